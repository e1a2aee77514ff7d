"""The parts of a simulated step, and why one plan is slower than another."""

from collections.abc import Iterable

from autopar.plan import Plan, Simulated
from autopar.report.text import format_change
from autopar.units import format_bytes, format_seconds

_WORTH_NAMING = 0.005
"""Share of the step below which a difference is not listed."""


def time_parts(simulated: Simulated) -> list[tuple[str, float]]:
    """Return the parts of a step of the busiest stage in seconds."""
    if simulated.parts:
        return list(simulated.parts)
    return [  # of a plan written before parts were
        ("compute", simulated.compute_seconds),
        ("exposed communication", simulated.exposed_seconds),
        ("gradient reduction", simulated.gradient_seconds),
        ("bubble", simulated.bubble_seconds),
    ]


AT_PEAK = "model FLOPs at peak"
BELOW_PEAK = "kernels below peak"


def from_peak(simulated: Simulated) -> list[tuple[str, float]]:
    """Return the parts of a step in seconds, compute split at the peak of the devices (`split_at_peak`)."""
    return split_at_peak(time_parts(simulated), simulated.mfu * simulated.step_seconds)


def split_at_peak(parts: Iterable[tuple[str, float]], ideal: float) -> list[tuple[str, float]]:
    """Return the parts of a step in seconds, compute split at the peak of the devices.

    The model's FLOPs, spread evenly over all devices, would take the MFU's share of the step at the peak of the data
    sheet. What kernels take beyond that is their efficiency, and kernels that are bound by memory.

    Args:
        parts: The parts of the step.
        ideal: Seconds of the model's FLOPs at the peak.
    """
    found: list[tuple[str, float]] = []
    for name, seconds in parts:
        if name == "compute" and 0 < ideal <= seconds:
            found += [(AT_PEAK, ideal), (BELOW_PEAK, seconds - ideal)]
        else:
            found.append((name, seconds))
    return found


def why_lost(plan: Plan, other: Plan) -> str:
    """Return what a runner-up is, by how much it is slower, and in which parts of the step."""
    if plan.simulated is None or other.simulated is None:
        return f"{other.summary}: {format_change(other.objective, plan.objective)} by the planner's formula"
    best, worse = plan.simulated, other.simulated
    step, named = best.step_seconds, changed_parts(best, worse)
    peak, best_peak = (max((stage.peak for stage in simulated.stages), default=0.0) for simulated in (worse, best))
    text = f"{other.summary}: {format_seconds(worse.step_seconds)} ({format_change(worse.step_seconds, step)})"
    text += f"; {', '.join(named)}" if named else "; no part differs by more than 0.5 % of the step"
    text += f"; peak {format_bytes(peak)} ({format_change(peak, best_peak)})"
    if worse.step_seconds < step:
        return f"{text}; faster by less than the model's error, and less simple"
    if other.objective < plan.objective:
        text += "; better by the planner's formula, worse when simulated"
    return text


def changed_parts(best: Simulated, other: Simulated) -> list[str]:
    """Return the parts of the step in which another one differs, what it takes longer for first."""
    mine, its = dict(time_parts(best)), dict(time_parts(other))
    differences = sorted(
        ((its.get(name, 0.0) - mine.get(name, 0.0), name) for name in dict.fromkeys((*mine, *its))), reverse=True
    )
    return [
        f"{name} {'+' if change > 0 else '-'}{format_seconds(abs(change))}"
        for change, name in differences
        if abs(change) > _WORTH_NAMING * best.step_seconds
    ]
