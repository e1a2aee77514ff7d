"""Parallel neighbourhood search in threads, which recombine their own choice with the best choice of all."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

from autopar.solvers.base import Budget
from autopar.solvers.local_search.improve import Improver
from autopar.solvers.model.graphical_model import Ints

PAUSE_SECONDS = 0.02
"""Seconds between two looks whether a pause is over."""


def improve_together(
    improvers: Sequence[Improver],
    budget: Budget,
    max_parts: int | None,
    report: Callable[[Ints, float], None],
    pause: Callable[[], bool] = lambda: False,
) -> tuple[Ints, float]:
    """Run the searches until the budget is spent or each has solved `max_parts` subproblems; return the best choice.

    The linear-programming and compiled code run concurrently; the Python parts share the interpreter lock.

    Args:
        improvers: One per thread; the first runs in the calling thread.
        budget: When to stop.
        max_parts: Most subproblems per search. With such a limit the sizes of subproblems do not depend on time.
        report: Called in the calling thread with the best choice and its cost after each of its subproblems.
        pause: Polled by the second thread, which waits between subproblems while it is true.

    Returns:
        The best choice and its cost.
    """
    team = _SharedIncumbent(improvers[0], budget, max_parts)
    with ThreadPoolExecutor(max(1, len(improvers) - 1)) as pool:
        try:
            futures = [
                pool.submit(team.work, improver, lambda _labels, _cost: None, pause if number == 0 else lambda: False)
                for number, improver in enumerate(improvers[1:])
            ]
            team.work(improvers[0], report, lambda: False)
        finally:
            team.over.set()
        for future in futures:
            future.result()
    return team.labels, team.cost


class _SharedIncumbent:
    """The best choice of all threads.

    Attributes:
        labels: The choice.
        cost: Its cost.
        over: Set to stop all threads.
    """

    def __init__(self, first: Improver, budget: Budget, max_parts: int | None) -> None:
        self.labels = first.labels
        self.cost = first.cost
        self.over = Event()
        self._lock = Lock()
        self._budget = budget
        self._max_parts = max_parts

    def work(self, improver: Improver, report: Callable[[Ints, float], None], pause: Callable[[], bool]) -> None:
        """Solve subproblems with one search until the budget is spent, recombining after each."""
        part = self._limited_budget if self._max_parts is None else lambda _seconds: self._limited_budget(math.inf)
        while not self.over.is_set() and not self._budget.spent() and improver.parts != self._max_parts:
            if pause():
                time.sleep(PAUSE_SECONDS)
                continue
            improver.step(part)
            with self._lock:
                if improver.cost < self.cost:
                    self.labels, self.cost = improver.labels, improver.cost
                labels, cost = self.labels, self.cost
            if cost < improver.cost:
                improver.recombine(labels, part)
            report(labels, cost)

    def _limited_budget(self, seconds: float) -> Budget:
        return self._budget.limited_to(seconds)
