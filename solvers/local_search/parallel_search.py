"""Several searches at once, in threads: each goes on from the best mixture of its own choice and the best of all."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

from autopar.solvers.base import Budget
from autopar.solvers.local_search.improve import Improver
from autopar.solvers.model.graphical_model import Ints


def improve_together(
    improvers: Sequence[Improver], budget: Budget, max_parts: int | None, report: Callable[[Ints, float], None]
) -> tuple[Ints, float]:
    """Return the best choice of all once the budget is spent, or each has solved `max_parts` parts, and its cost.

    The linear-programming code and the compiled code run beside each other, the rest takes turns.

    Args:
        improvers: One per thread; the first one works in this thread.
        budget: When to stop.
        max_parts: Parts per improver at most. With such a limit the sizes of parts do not depend on time.
        report: Called in this thread with the best choice after each of its parts.
    """
    team = _Team(improvers[0], budget, max_parts)
    with ThreadPoolExecutor(max(1, len(improvers) - 1)) as pool:
        try:
            futures = [pool.submit(team.work, improver, lambda _labels, _cost: None) for improver in improvers[1:]]
            team.work(improvers[0], report)
        finally:
            team.over.set()
        for future in futures:
            future.result()
    return team.labels, team.cost


class _Team:
    """The best choice of all.

    Attributes:
        labels: The choice.
        cost: Its cost.
        over: Set once all are to stop.
    """

    def __init__(self, first: Improver, budget: Budget, max_parts: int | None) -> None:
        self.labels = first.labels
        self.cost = first.cost
        self.over = Event()
        self._lock = Lock()
        self._budget = budget
        self._max_parts = max_parts

    def work(self, improver: Improver, report: Callable[[Ints, float], None]) -> None:
        """Solve part after part."""
        part = self._part if self._max_parts is None else lambda _seconds: self._part(math.inf)
        while not self.over.is_set() and not self._budget.spent() and improver.parts != self._max_parts:
            improver.step(part)
            with self._lock:
                if improver.cost < self.cost:
                    self.labels, self.cost = improver.labels, improver.cost
                labels, cost = self.labels, self.cost
            if cost < improver.cost:
                improver.join(labels, part)
            report(labels, cost)

    def _part(self, seconds: float) -> Budget:
        return self._budget.part(seconds)
