"""The best plans side by side: by the planner's formula and simulated, and why the two disagree on their order."""

import math
from collections.abc import Sequence
from itertools import combinations

from autopar.plan import Plan, Simulated
from autopar.report.text import format_change, format_items, format_table, heading
from autopar.units import format_bytes, format_seconds


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
        ahead = slower.simulated.step_seconds / faster.simulated.step_seconds - 1
        behind = 1 - slower.objective / faster.objective
        text = f"plan {second} is {100 * behind:.1f} % faster than plan {first} by the formula, "
        text += f"{100 * ahead:.1f} % slower simulated"
        why = _largest(faster.simulated, slower.simulated)
        found.append(f"{text}: {why}" if why else text)
    return found


def _largest(faster: Simulated, slower: Simulated) -> str:
    """Return the part of the step on which formula and simulator differ most between two plans."""
    known = {part.name: part for part in faster.against}
    shifts = [
        ((part.simulated - part.formula) - (known[part.name].simulated - known[part.name].formula), part)
        for part in slower.against
        if part.name in known
    ]
    if not shifts:
        return ""
    _, part = max(shifts, key=lambda shift: shift[0])
    own = known[part.name]
    return (
        f"{part.name} {format_seconds(part.simulated)} instead of {format_seconds(part.formula)}, "
        f"of the other {format_seconds(own.simulated)} instead of {format_seconds(own.formula)}"
    )


def _complete(plan: Plan) -> list[str]:
    """Return up to which step time nothing is missing from the list."""
    search = plan.search
    if search is None or not search.complete:
        return []
    last = max(candidate.objective for candidate in (plan, *plan.alternatives))
    if search.complete >= last or math.isinf(search.complete):
        return ["no plan that differs from these in more than details is faster by the formula than the last of them"]
    return [
        f"a plan that differs from these in more than details may exist from {format_seconds(search.complete)} "
        "by the formula on"
    ]


def _seconds(plan: Plan) -> float:
    return plan.objective if plan.simulated is None else plan.simulated.step_seconds
