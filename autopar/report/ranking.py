"""The best plans side by side: by the planner's formula and simulated, and why the two disagree on their order."""

from collections.abc import Sequence
from itertools import combinations

from autopar.plan import PartTimes, Plan, Simulated
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.report.text import format_change, format_items, format_table, heading
from autopar.units import format_bytes, format_seconds

_WORTH_NAMING = 0.25
"""Of the largest shift between formula and simulator: what a part has to make up to be named beside it."""


def ranking(plan: Plan) -> list[str]:
    """Return the table of a plan and its alternatives, and what there is to say about their order."""
    ranked = (plan, *plan.alternatives)
    best = _seconds(plan)
    rows = []
    for number, candidate in enumerate(ranked, start=1):
        seconds = _seconds(candidate)
        slower = "-" if number == 1 else format_change(seconds, best)
        peak = max((stage.peak for stage in candidate.simulated.stages), default=0.0) if candidate.simulated else 0.0
        formula = format_change(candidate.objective, seconds) if candidate.simulated else "-"
        rows.append((str(number), format_seconds(seconds), slower, formula, format_bytes(peak), candidate.summary))
    lines = [
        *heading(f"Best {len(ranked)} plans"),
        *format_table(("#", "step", "against", "formula", "peak", "plan"), rows),
    ]
    remarks = [*_complete(plan), *reorderings(ranked)]
    return [*lines, "", *format_items(remarks)] if remarks else lines


def reorderings(ranked: Sequence[Plan]) -> list[str]:
    """Return a sentence for each pair of plans that the simulator puts in another order than the formula."""
    found = []
    for (first, faster), (second, slower) in combinations(enumerate(ranked, start=1), 2):
        if faster.objective <= slower.objective or faster.simulated is None or slower.simulated is None:
            continue
        if slower.simulated.step_seconds < faster.simulated.step_seconds:  # the first plan is simpler, not faster
            continue
        ahead = slower.simulated.step_seconds / faster.simulated.step_seconds - 1
        behind = 1 - slower.objective / faster.objective
        text = f"plan {second} is {100 * behind:.1f} % faster than plan {first} by the formula, "
        text += f"{100 * ahead:.1f} % slower simulated"
        why = _largest(faster.simulated, slower.simulated)
        found.append(f"{text}: {why}" if why else text)
    return found


def _largest(faster: Simulated, slower: Simulated) -> str:
    """Return the parts of the step on which formula and simulator differ most between two plans."""
    known = {part.name: part for part in faster.against}
    shifts = [
        ((part.simulated - part.formula) - (known[part.name].simulated - known[part.name].formula), part)
        for part in slower.against
        if part.name in known
    ]
    shifts.sort(key=lambda shift: -shift[0])
    told = [part for shift, part in shifts if shift > 0 and shift >= _WORTH_NAMING * shifts[0][0]]
    return "; ".join(_both(part, known[part.name]) for part in told)


def _both(part: PartTimes, other: PartTimes) -> str:
    return (
        f"{part.name} {format_seconds(part.simulated)} instead of {format_seconds(part.formula)}, "
        f"of the other {format_seconds(other.simulated)} instead of {format_seconds(other.formula)}"
    )


def _complete(plan: Plan) -> list[str]:
    """Return up to which step time nothing is missing from the list."""
    search = plan.search
    if search is None or not search.complete:
        return []
    last = max(candidate.objective for candidate in (plan, *plan.alternatives))
    if search.complete >= last * (1 - OPTIMALITY_TOLERANCE):
        return ["no substantially different plan is faster by the formula than the last of these"]
    return [f"no substantially different plan can be faster than {format_seconds(search.complete)} by the formula"]


def _seconds(plan: Plan) -> float:
    return plan.objective if plan.simulated is None else plan.simulated.step_seconds
