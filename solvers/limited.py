"""Work and time limits of one placement problem (`solve_limited`).

The limit is counted work, so that a solve is cut off at the same point on every machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.problem import OPTIMALITY_TOLERANCE, Problem, Solution
from autopar.solvers import Solver
from autopar.solvers.base import Work

PLACEMENT_WORK = 8e9
"""Work limit of one placement problem, in units of about a nanosecond; most problems take a hundredth of it.

Unlike a time limit, it cuts the same problems off at the same point on every machine, however busy it is."""

PLACEMENT_SECONDS = 8.0
"""Time limit of one placement problem, in seconds, for solvers that do not count their work."""


@dataclass(frozen=True, slots=True)
class Limited:
    """Solution of a placement problem under limits.

    Attributes:
        solution: The solution.
        cut: Whether a limit ended the solve.
        work: Units of work used.
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
    """Solve a placement problem within `most` units of work and before `end` on the monotonic clock."""
    work, began = Work(min(PLACEMENT_WORK, most)), time.monotonic()
    left = end - began
    clock = max(0.1, left if solver.counts_work else min(PLACEMENT_SECONDS, left))
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
