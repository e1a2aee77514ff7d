"""Where a step goes, in the field's words: what each mesh axis does names the communication over it."""

from collections import defaultdict

from autopar.formulate.fold import Folded
from autopar.plan import Plan
from autopar.search.roles import roles_of_axes
from autopar.simulate import Timeline

DATA_PARALLEL = "dp communication"
"""Gathers of parameters that compute waits for, gradients that the backward does not hide, gathers of the update."""


def step_parts(plan: Plan, timeline: Timeline, folded: Folded) -> tuple[tuple[str, float], ...]:
    """Return the parts of the step of the busiest stage in seconds; they add up to the step.

    Args:
        plan: The plan.
        timeline: Its simulation.
        folded: The graph of one of its microbatches.
    """
    busiest = timeline.busiest
    names = {role.axis.name: role.role for role in roles_of_axes(plan, folded)}
    waited: defaultdict[str, float] = defaultdict(float)
    for axis, seconds in busiest.axis_seconds:
        role = names.get(axis, axis)
        waited[f"{axis if role == 'idle' else role} communication"] += seconds
    waited[DATA_PARALLEL] += busiest.gradient_seconds + busiest.gather_seconds
    parts = (
        ("compute", busiest.compute_seconds - busiest.again_seconds),
        ("recompute", busiest.again_seconds),
        *sorted(waited.items(), key=lambda part: -part[1]),
        ("pp communication", busiest.wait_seconds),
        ("bubble", busiest.bubble_seconds),
        ("optimizer", busiest.update_seconds),
        ("launches, overlap", busiest.delay_seconds),
    )
    return tuple((name, seconds) for name, seconds in parts if seconds > 0)
