"""Ops and gradients fused for one objective: the simulated step.

Kernels are found first, for they decide when gradients are there, and gradients are cut for them. What comes of it is
held against fused ops alone, cut gradients alone and neither: the fastest stands, the simplest if two are as fast.
"""

from dataclasses import dataclass, replace

from autopar.cost import CostModel
from autopar.folding.fold import Folded
from autopar.fusion.buckets import LEAST_GAIN, Bucketing, cut_gradients
from autopar.fusion.ops import USUAL, OpFusion, OpSearch, fuse_ops
from autopar.fusion_plan import FusionPlan
from autopar.plan import Plan
from autopar.program.buckets import with_buckets
from autopar.program.lower import lower
from autopar.program.records import Program


@dataclass(frozen=True, slots=True)
class Joint:
    """What fusing ops and gradients brings a plan; seconds of a step.

    Attributes:
        fusion: The fusion that stands; None if none saves enough.
        program: The program with it.
        neither: The step without any.
        ops_only: With fused ops and the uniform rule of buckets.
        buckets_only: With cut gradients and the kernels of the stack.
        both: With both.
        ops: The kernels that were found.
        buckets: The cuts that were found beside the kernels of the stack.
        prices: What priced the kernels, in words.
    """

    fusion: FusionPlan | None
    program: Program
    neither: float
    ops_only: float
    buckets_only: float
    both: float
    ops: OpFusion
    buckets: Bucketing
    prices: str

    @property
    def step_seconds(self) -> float:
        """The step with the fusion that stands."""
        return min(self.neither, self.ops_only, self.buckets_only, self.both)


def fuse_jointly(plan: Plan, program: Program, folded: Folded, costs: CostModel, search: OpSearch = USUAL) -> Joint:
    """Return the fusion of ops and gradients of a plan.

    Args:
        plan: The plan; what it says of fusion is not looked at.
        program: Its lawful program without fusion.
        folded: The graph of one of its microbatches.
        costs: What it costs.
        search: How hard to look for kernels.
    """
    ops = fuse_ops(program, costs, len(folded.kinds), search)
    fused = lower(replace(plan, fusion=FusionPlan((), ops.groups)), folded, costs) if ops.groups else program
    plain, cut = cut_gradients(program, costs), cut_gradients(fused, costs)
    neither, ops_only = plain.uniform.step_seconds, cut.uniform.step_seconds
    buckets_only, both = plain.found.step_seconds, cut.found.step_seconds
    ways = [
        (ops_only, replace(FusionPlan(), groups=ops.groups)),
        (buckets_only, FusionPlan.of_cuts(plain.cuts)),
        (both, replace(FusionPlan.of_cuts(cut.cuts), groups=ops.groups)),
    ]
    prices = _prices(costs)
    step, fusion = min(ways, key=lambda way: way[0])
    if step > (1 - LEAST_GAIN) * neither:
        return Joint(None, program, neither, ops_only, buckets_only, both, ops, plain, prices)
    chosen = with_buckets(fused if fusion.groups else program, fusion)
    return Joint(fusion, chosen, neither, ops_only, buckets_only, both, ops, plain, prices)


def _prices(costs: CostModel) -> str:
    """Return what priced kernels, in words."""
    if costs.kernels is None:
        return "by the formula: bytes and launches"
    if costs.learned is None:
        trained = costs.kernels.provenance.machine
        return f"by the formula: learned costs are of {trained} in float32, not of {costs.cluster.device.name}"
    return costs.learned.told()
