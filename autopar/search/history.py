"""What a search knew when: its best plan and its bound over wall time."""

import math
import time
from dataclasses import replace

from autopar.plan import HistoryPoint


class History:
    """Takes down what gets better, from the first plan on.

    Args:
        before: Seconds that had passed when the search began.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._start = time.monotonic() - before
        self._points: list[HistoryPoint] = []

    def record(self, objective: float, bound: float) -> None:
        """Take down the best objective and the bound if one of them is better than before; seconds."""
        if not math.isfinite(objective):
            return
        if self._points:
            last = self._points[-1]
            objective, bound = min(objective, last.objective), max(bound, last.bound)
            if (objective, bound) == (last.objective, last.bound):
                return
        self._points.append(HistoryPoint(time.monotonic() - self._start, objective, bound))

    @property
    def points(self) -> tuple[HistoryPoint, ...]:
        """What was taken down; seconds ascend, objectives never rise, bounds never fall."""
        if not self._points:
            return ()
        # Where the bound is above the best plan, nothing else is better: then the plan's own time is the bound.
        least = self._points[-1].objective
        return tuple(replace(point, bound=min(point.bound, least)) for point in self._points)
