"""Buckets of a plan in the words of a framework: one size, or units of whole blocks, and what is lost by that."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.cost import CostModel
from autopar.folding.fold import Folded
from autopar.fusion import cut_gradients
from autopar.fusion.buckets import Bucketing, BucketTimer
from autopar.fusion.rules import DDP_FIRST, MIB, RULES, SizeRule, best_rule
from autopar.plan import Plan
from autopar.program.buckets import gradients
from autopar.program.lower import lower
from autopar.program.records import Program
from autopar.schedule import SCHEDULES
from autopar.task import job_costs
from autopar.units import format_seconds

NAMES = {
    "megatron": "Megatron-LM",
    "nemo": "NeMo",
    "deepspeed": "DeepSpeed",
    "ddp": "DistributedDataParallel",
    "fsdp": "DistributedDataParallel",
    "maxtext": "XLA",
    "jax": "XLA",
}
_RULES = {"nemo": "megatron", "fsdp": "ddp", "maxtext": "xla", "jax": "xla"}
"""Rules of frameworks that cut as another one does."""
_BESIDES = {
    "megatron": " (--ddp-num-buckets is a size, too: it divides the parameters of a stage, and excludes the other)",
    "jax": ", if it unrolls the layers: what a scan over them reduces is combined within a layer",
    "maxtext": ", with scan_layers: false: what a scan over layers reduces is combined within a layer",
}
"""What else a framework makes of a size."""
_THRESHOLDS = ("all_reduce", "reduce_scatter")
"""Collectives whose combination XLA has a threshold for."""


@dataclass(frozen=True, slots=True)
class OneSize:
    """The best buckets of one size for a plan.

    Attributes:
        nbytes: Bytes of a bucket.
        elements: Gradients, counted one by one, of a bucket.
        lost: What the plan's own cuts would bring beyond it, a sentence.
        collectives: Which collectives have buckets.
    """

    nbytes: float
    elements: int
    lost: str
    collectives: tuple[str, ...] = ()

    @property
    def xla_flags(self) -> str:
        """The environment variable with which XLA combines collectives up to this size."""
        known = [name for name in _THRESHOLDS if name in self.collectives]
        flags = (f"--xla_gpu_{name}_combine_threshold_bytes={round(self.nbytes)}" for name in known)
        return f"XLA_FLAGS={' '.join(flags)}"


def one_size(plan: Plan, folded: Folded, rule: str) -> OneSize | None:
    """Return the best buckets of one size, cut as a framework does; None if the plan follows the uniform rule.

    Args:
        plan: The plan.
        folded: The graph of one of its microbatches.
        rule: The framework, of `NAMES`.
    """
    if plan.fusion is None or not plan.fusion.buckets:
        return None
    costs = job_costs(plan.job)
    program = lower(plan, folded, costs)
    timer = BucketTimer(program, costs)
    restriction: SizeRule = RULES[_RULES.get(rule, rule)]
    best, timed = best_rule(timer, restriction)
    ours = timer.time(tuple(stage.buckets for stage in program.stages))
    own = sum(len(cuts.ends) for stage in program.stages for cuts in stage.buckets)
    elements = max(1, round(best.limit / costs.policy.gradient_wire))
    return OneSize(
        best.limit,
        elements,
        f"{own} buckets cut for this plan ({format_seconds(ours.step_seconds)} a step): {NAMES[rule]} cuts by one "
        f"size; the best of {best.limit / 1e6:.3g} MB takes {format_seconds(timed.step_seconds)}"
        f"{_BESIDES.get(rule, '')}",
        tuple(sorted({cuts.collective for stage in program.stages for cuts in stage.buckets})),
    )


def in_pytorch(plan: Plan, folded: Folded) -> list[str]:
    """Return how the buckets of a plan are stated in PyTorch: to DistributedDataParallel, or as units of FSDP2."""
    if plan.fusion is None or not plan.fusion.buckets:
        return []
    keys = {cuts.key for each in plan.fusion.buckets for cuts in each.cuts}
    if {key[:1] for key in keys} == {("all_reduce",)}:
        size = one_size(plan, folded, "ddp")
        assert size is not None, "there are buckets"
        lists = _caps(plan, folded)
        if len(lists) == 1:
            caps = ", ".join(f"{nbytes / MIB:.8g}" for nbytes in lists[0])
            return [
                f"buckets cut for this plan: DistributedDataParallel(module, bucket_cap_mb_list=[{caps}]), which "
                f"PyTorch 2.13 has; before it {size.lost}, bucket_cap_mb={size.nbytes / MIB:.4g}, with a first bucket "
                f"of {DDP_FIRST / MIB:g} MiB (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)"
            ]
        return [
            f"{size.lost}: DistributedDataParallel(module, bucket_cap_mb={size.nbytes / MIB:.4g}); the first bucket "
            f"has {DDP_FIRST / MIB:g} MiB (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES) before PyTorch 2.13"
        ]
    costs = job_costs(plan.job)
    program = lower(plan, folded, costs)
    return [_told(program, cut_gradients(program, costs, whole_blocks=True), costs)]


@dataclass(frozen=True, slots=True)
class Units:
    """Layers that FSDP2 gathers and reduces together.

    Attributes:
        counts: Layers of each unit, in the order of the forward.
        lost: What the plan's own cuts would bring beyond them, a sentence.
    """

    counts: tuple[int, ...]
    lost: str


def layer_units(plan: Plan, folded: Folded, layers: Sequence[int]) -> Units | None:
    """Return the best units of whole blocks for the gradients of a plan; None if it follows the uniform rule.

    Args:
        plan: The plan, of one stage.
        folded: The graph of one of its microbatches.
        layers: Blocks that are layers, in order.
    """
    if plan.fusion is None or not plan.fusion.buckets:
        return None
    costs = job_costs(plan.job)
    program = lower(plan, folded, costs)
    found = cut_gradients(program, costs, whole_blocks=True)
    (parts,) = _parts(program, found)
    counts = tuple(count for low, high in parts if (count := sum(low <= layer <= high for layer in layers)))
    return Units(counts, _told(program, found, costs))


def _told(program: Program, found: Bucketing, costs: CostModel) -> str:
    """Return what whole units come to beside the cuts of a plan."""
    own = BucketTimer(program, costs).time(tuple(stage.buckets for stage in program.stages))
    units = "; ".join(
        ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in stage)
        for stage in _parts(program, found)
        if stage
    )
    told = f"fully_shard on units of blocks {units}" if units else "fully_shard on every block"
    return (
        f"buckets cut for this plan ({format_seconds(own.step_seconds)} a step): FSDP2 reduces whole units; the "
        f"best are {told} ({format_seconds(found.found.step_seconds)})"
    )


def _caps(plan: Plan, folded: Folded) -> list[tuple[float, ...]]:
    """Return the bytes of the buckets of every stage, first ones first; stages with equal ones count once."""
    costs = job_costs(plan.job)
    program = lower(plan, folded, costs)
    timer = BucketTimer(program, costs)
    found: dict[tuple[float, ...], None] = {}
    for stage, traffic in zip(program.stages, timer.traffic(timer.uncut), strict=True):
        for cuts in stage.buckets:
            sizes = [own.traffic.nbytes for own in traffic.issued if own.key == cuts.key]
            found[tuple(sum(sizes[begin:end]) for begin, end in pairwise((0, *cuts.ends)))] = None
    return list(found)


def _parts(program: Program, found: Bucketing) -> list[list[tuple[int, int]]]:
    """Return the first and the last block of each unit, stage by stage, in the order in which the forward runs them."""
    table, splits = program.table(), SCHEDULES[program.schedule].splits
    told: list[list[tuple[int, int]]] = []
    first = 0
    for stage, cuts in zip(program.stages, found.cuts, strict=True):
        known = gradients(stage, table, splits=splits)
        told.append([])
        for own in cuts[:1]:
            blocks = [first + gradient.block for gradient in known[own.key]]
            parts = [(blocks[end - 1], blocks[begin]) for begin, end in pairwise((0, *own.ends))]
            told[-1] += reversed(parts)
        first += len(stage.blocks)
    return told
