"""Which of plans that are equally fast, as far as predictions can tell, is the usual and simple one."""

from collections.abc import Sequence
from math import prod

from autopar.describe.axis_roles import AxisRole, roles_of_axes
from autopar.folding.fold import Folded
from autopar.plan import Plan
from autopar.recompute import Recompute

NEAR = 0.005
"""Share of a step by which plans differ at most that count as equally fast, by hand: the plan predicted best is within
3 % of the best one measured in 86 % of the groups of docs/benchmarks/validation_2026-11-28.md, and where two plans
differ by less than this, no part of the step does by more (`autopar.report.parts`)."""

_SCHEDULES = {"forward-only": 0, "1f1b": 0, "gpipe": 1, "interleaved": 1}
"""What schedules count; those that split the backward, which few frameworks have, count 2."""
_ZERO = (0, 0, 1, 2)
"""What levels of ZeRO count: plain data parallelism and the distributed optimizer are what frameworks have by default;
from level 2 on gradients are reduced for every microbatch, at level 3 parameters are gathered in every pass."""


def complexity(plan: Plan, folded: Folded) -> int:
    """Return how many things of a plan have to be set up beyond data parallelism with the distributed optimizer.

    Args:
        plan: The plan.
        folded: The graph of one of its microbatches.
    """
    alone = [plan.of_variant(number) if plan.variants else plan for number in range(len(plan.all_variants))]
    own = [_axes(roles_of_axes(each.mesh, each.blocks, folded)) for each in alone]
    groups = len({stage.devices for stage in plan.stages})
    kept = {flavour for stage in plan.stages for flavour in stage.flavours}
    total = max(own) + 2 * len(plan.variants)
    if groups > 1:
        total += 1 + _SCHEDULES.get(plan.schedule, 2) + ("numbered" in plan.job.cluster)
    total += (kept != {Recompute.NONE}) + (len(kept) > 2)
    return total + any(stage.offload for stage in plan.stages)


def _axes(roles: Sequence[AxisRole]) -> int:
    """Return what the axes of a mesh count: roles but data parallelism, levels of ZeRO, and what has no usual name."""
    used = [found for found in roles if found.axis.size > 1]
    names = {found.role for found in used} - {"dp"}
    zeros = {found.zero for found in used if found.role in ("dp", "cp", "spatial")} or {0}
    partial = any(found.role == "tp" and found.in_part for found in used)
    idle = prod(found.axis.size for found in used if found.role == "idle")
    return len(names) + _ZERO[max(zeros)] + (len(zeros) > 1) + partial + (idle > 1)
