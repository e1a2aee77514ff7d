"""How much one placement problem may take: a limit of work, so that it is cut at the same point on every machine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.problem import OPTIMALITY_TOLERANCE, Problem, Solution
from autopar.solvers import Solver
from autopar.solvers.base import Work

PLACEMENT_WORK = 8e9
"""Units of work one placement problem may take, about a nanosecond each; most take a hundredth of it.

A limit of work, unlike one of time, cuts the same problems at the same point on every machine, however busy it is."""

PLACEMENT_SECONDS = 8.0
"""The same for solvers that do not count their work."""


@dataclass(frozen=True, slots=True)
class Limited:
    """What came of a placement problem.

    Attributes:
        solution: The solution.
        cut: Whether a limit cut it.
        work: Units of work it took.
    """

    solution: Solution
    cut: bool
    work: float


def solve_limited(
    solver: Solver,
    instance: Problem,
    end: float,
    *,
    start: Sequence[int] | None = None,
    cutoff: float = float("inf"),
    gap: float = OPTIMALITY_TOLERANCE,
    should_stop: Callable[[], bool] | None = None,
    seed: int = 0,
    most: float = PLACEMENT_WORK,
) -> Limited:
    """Solve a placement problem within the limits: `most` units of work, and until `end` on the monotonic clock."""
    work, began = Work(min(PLACEMENT_WORK, most)), time.monotonic()
    left = end - began
    clock = max(0.1, left if solver.counts else min(PLACEMENT_SECONDS, left))
    solution = solver.solve(
        instance,
        time_limit=clock,
        start=start,
        cutoff=cutoff,
        gap=gap,
        should_stop=should_stop,
        seed=seed,
        work=work,
    )
    return Limited(solution, work.left == 0.0 or time.monotonic() - began >= clock, work.done)
