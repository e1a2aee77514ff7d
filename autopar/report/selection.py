"""What a run on a problem file found, as text and as JSON."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.problem import Termination, relative_gap
from autopar.report.text import format_table
from autopar.selection import Known, Selection
from autopar.units import format_bytes

if TYPE_CHECKING:
    from autopar.solvers.reductions.presolve import ProblemSize, Step

STEPS_HEADER = ("presolve", "nodes", "strategies", "edges", "times", "seconds")


def format_figures(cost: float, bound: float) -> str:
    """Return cost, bound and gap, exactly; "-" for what is not there.

    >>> format_figures(445, 415), format_figures(math.inf, 415)
    ('cost 445, bound 415, gap 6.7416 %', 'cost -, bound 415, gap -')
    """
    gap = f"{100 * relative_gap(cost, bound):.4f} %" if math.isfinite(cost) and math.isfinite(bound) else "-"
    return f"cost {_number(cost)}, bound {_number(bound)}, gap {gap}"


def format_known(known: Known) -> str:
    """Return what was known at some moment, for a line of progress.

    >>> format_known(Known(1.25, 445, 415))
    '     1.2 s  cost 445, bound 415, gap 6.7416 %'
    """
    return f"{known.seconds:8.1f} s  {format_figures(known.cost, known.bound)}"


def format_status(selection: Selection) -> str:
    """Return the line before the choice: cost, bound, gap, why it stopped, and what it took."""
    solution = selection.solution
    return (
        f"{format_figures(solution.cost, solution.bound)}, {solution.termination}, "
        f"{selection.seconds:.1f} s of {selection.time_limit:g} s, {format_bytes(selection.peak_bytes)}"
    )


def format_choice(choice: Sequence[int]) -> str:
    """Return a choice as the contest wants it.

    >>> format_choice((0, 2, 1))
    '[0, 2, 1]'
    """
    return f"[{', '.join(map(str, choice))}]"


def format_steps(steps: "Sequence[Step]", width: int = 80) -> str:
    """Return the table of what each reduction left; "" without any."""
    return "\n".join(format_table(STEPS_HEADER, step_rows(steps), width)) + "\n" if steps else ""


def step_rows(steps: "Sequence[Step]") -> list[tuple[str, ...]]:
    """Return the rows of the table of reductions, the sizes of the problem itself first."""
    first = [("(the file)", *_size(steps[0].before), "")] if steps else []
    return [*first, *((step.name, *_size(step.after), f"{step.seconds:.2f}") for step in steps)]


def selection_to_dict(selection: Selection) -> dict[str, Any]:
    """Return a selection in values JSON knows: null for what is infinite."""
    solution, conflict = selection.solution, selection.conflict
    return {
        "problem": selection.name,
        "nodes": selection.num_nodes,
        "edges": selection.num_edges,
        "solver": selection.solver,
        "time_limit": selection.time_limit,
        "seconds": selection.seconds,
        "peak_bytes": selection.peak_bytes,
        "termination": str(solution.termination),
        "cost": _finite(solution.cost),
        "bound": _finite(solution.bound),
        "gap": _finite(solution.gap),
        "choice": solution.choice,
        "conflict": None if conflict is None else {"sentence": conflict.sentence(), **_fields(conflict)},
        "presolve": [
            {"step": step.name, "before": _fields(step.before), "after": _fields(step.after), "seconds": step.seconds}
            for step in selection.steps
        ],
        "history": [
            {"seconds": known.seconds, "cost": _finite(known.cost), "bound": _finite(known.bound)}
            for known in selection.history
        ],
        "failure": selection.failure,
        "workers": selection.workers,
    }


def describe_nothing(selection: Selection) -> tuple[str, str]:
    """Return why there is no choice, and what to do."""
    if selection.solution.termination is not Termination.INFEASIBLE:
        why = "interrupted" if selection.solution.termination is Termination.INTERRUPTED else "the time was over"
        return f"{why} before the first choice; whether there is one is not known", "allow more seconds"
    if selection.conflict is None:
        return "no choice fits, which is proven; the time was not enough to say which nodes", "allow more seconds"
    hint = "raise usage_limit" if selection.conflict.times else "permit some of what is forbidden there"
    return f"no choice fits: {selection.conflict.sentence()}", hint


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _size(size: "ProblemSize") -> tuple[str, ...]:
    return tuple(f"{number:,}" for number in (size.nodes, size.labels, size.pairs, size.rows))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _number(number: float) -> str:
    return str(number) if math.isfinite(number) else "-"
