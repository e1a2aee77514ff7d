"""When a search ends: time limit, overtime without a plan, and interruption."""

import math
import time

from autopar.search.context import SearchContext
from autopar.search.outcome import Outcome
from autopar.search.tasks import Finding


class Clock:
    """The time limit of a search.

    Args:
        search: Time limit, overtime and the caller's wish to stop.
        outcome: Told why the search stopped.
    """

    def __init__(self, search: SearchContext, outcome: Outcome) -> None:
        self._search, self._outcome = search, outcome
        self._late = min(search.settings.transfer_seconds, search.settings.transfer_share * search.time_limit)
        self._end = time.monotonic() + search.time_limit - self._late
        self._first = search.incumbent
        self._stopped = math.inf

    def end(self) -> float:
        """Return when a task that is started now should be done, on the monotonic clock."""
        return self._end

    def share_end(self, share: float) -> float:
        """Return when a share of the remaining time is over, on the monotonic clock."""
        now = time.monotonic()
        return now + share * max(0.0, self._end - now)

    def must_stop(self) -> bool:
        """Whether to stop; the reason is noted in the outcome. A limit waits for a first plan."""
        if self._search.should_stop():
            self._outcome.stopped = "interrupted"
        elif time.monotonic() > self._end + (
            self._search.settings.overtime_seconds if math.isinf(self._first) else 0.0
        ):
            self._outcome.stopped = "time limit"
        if self._outcome.stopped:
            self._stopped = min(self._stopped, time.monotonic())
        return bool(self._outcome.stopped)

    def is_late(self) -> bool:
        """Whether the time for raising bounds after the end of the search is over."""
        return self.must_stop() and time.monotonic() > self._stopped + self._late

    def record_finding(self, finding: Finding) -> None:
        """Note that there is a plan, as soon as a worker returns it."""
        if finding.best is not None:
            self._first = min(self._first, finding.best.objective)
            self._outcome.history.record(finding.best.objective, 0.0)
