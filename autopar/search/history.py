"""Incumbent and bound of a search over wall time: the anytime curve."""

import math
import time
from dataclasses import replace

from autopar.plan import HistoryPoint


class History:
    """Records every improvement of incumbent or bound, from the first plan on.

    Args:
        before: Seconds between the request and the start of the search.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._start = time.monotonic() - before
        self._points: list[HistoryPoint] = []

    def record(self, objective: float, bound: float) -> None:
        """Record objective and bound in seconds if one of them improves."""
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
        """The points: seconds ascend, objectives never rise, bounds never fall."""
        if not self._points:
            return ()
        # A bound above the incumbent proves it optimal: the bound is then the incumbent's own step time.
        least = self._points[-1].objective
        return tuple(replace(point, bound=min(point.bound, least)) for point in self._points)
