"""The parts of a step by cause; communication over a mesh axis is named by the axis's role."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from autopar.describe.axis_roles import AxisRole, roles_of_axes
from autopar.folding.fold import Folded
from autopar.plan import Plan
from autopar.simulate import StageTimeline, Timeline

DATA_PARALLEL = "dp communication"
"""Exposed gathers of parameters, gradient reductions not hidden by the backward, gathers after the update."""
COMPUTE = "compute"
IMBALANCE = "imbalance"
"""What the busiest stage computes beyond the mean of all stages, for which the others wait."""
_EQUAL = 1e-9  # relative; stages that compute the same do so up to rounding


def step_parts(plan: Plan, timeline: Timeline, folded: Folded) -> tuple[tuple[str, float], ...]:
    """Return the parts of the step of the busiest stage in seconds; they add up to the step.

    Args:
        plan: The plan.
        timeline: Its simulation.
        folded: The folded graph of one of its microbatches.
    """
    return busiest_parts(timeline, roles_by_stage(plan, folded))


def busiest_parts(timeline: Timeline, roles: Sequence[Mapping[str, str]]) -> tuple[tuple[str, float], ...]:
    """Return the parts of the step of the busiest stage in seconds, what it computes beyond the mean of all apart.

    Args:
        timeline: The simulated step.
        roles: Role of each mesh axis, by stage.
    """
    busiest = timeline.busiest
    mean = fmean(stage.compute_seconds - stage.again_seconds for stage in timeline.stages)
    found: list[tuple[str, float]] = []
    for name, seconds in stage_parts(busiest, roles[busiest.index]):
        if name == COMPUTE and seconds > (1 + _EQUAL) * mean:
            found += [(COMPUTE, mean), (IMBALANCE, seconds - mean)]
        else:
            found.append((name, seconds))
    return tuple(found)


def roles_by_stage(plan: Plan, folded: Folded) -> tuple[dict[str, str], ...]:
    """Return the role of each mesh axis, stage by stage, given the folded graph of one of the plan's microbatches.

    Stages come once for every share of rows.

    A data-parallel axis that divides experts counts as "ep": exposed communication over it carries tokens to and from
    experts.
    """
    plans = {number: plan.of_variant(number) if plan.variants else plan for number in range(len(plan.all_variants))}
    roles = {
        number: {role.axis.name: _communication_role(role) for role in roles_of_axes(each.mesh, each.blocks, folded)}
        for number, each in plans.items()
    }
    return tuple(roles[stage.variant] for stage in plan.stages) * max(1, len(plan.shares))


def _communication_role(role: AxisRole) -> str:
    return "ep" if role.experts and role.role == "dp" else role.role


def stage_parts(stage: StageTimeline, roles: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
    """Return the parts of the step of a stage in seconds; they add up to the step.

    Args:
        stage: Its simulation.
        roles: Role of each mesh axis of the stage.
    """
    waited: defaultdict[str, float] = defaultdict(float)
    for axis, seconds in stage.axis_seconds:
        role = roles.get(axis, "idle")
        waited[f"{'other' if role == 'idle' else role} communication"] += seconds
    waited[DATA_PARALLEL] += stage.gradient_seconds + stage.gather_seconds
    parts = (
        (COMPUTE, stage.compute_seconds - stage.again_seconds),
        ("recompute", stage.again_seconds),
        *sorted(waited.items(), key=lambda part: -part[1]),
        ("pp communication", stage.wait_seconds),
        ("host memory", stage.copy_seconds),
        ("bubble", stage.bubble_seconds),
        ("optimizer", stage.update_seconds),
        ("launches, overlap", stage.delay_seconds),
    )
    return tuple((name, seconds) for name, seconds in parts if seconds > 0)
