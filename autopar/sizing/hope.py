"""Whether a search that finds nothing has any hope: asked once, after some seconds without a plan."""

import math
import time

from autopar.progress import Progress, ProgressCallback, StopCallback
from autopar.search.outcome import Outcome
from autopar.search.pieces import Finding
from autopar.sizing.thrift import Thrifty, thriftiest
from autopar.task import Task

PATIENCE = 4.0
"""Seconds without a plan after which the thriftiest one is looked for."""

ASKED_SECONDS = 10.0
"""Longest time that may take."""


SURE = 1.1
"""Where not all configurations were looked at, the thriftiest plan found has to be this much too large."""


class Hope:
    """Watches a search; it is told of progress and asked whether to stop.

    Attributes:
        lost: Whether the thriftiest plan is too large, so that the search was stopped.
    """

    def __init__(self, task: Task, progress: ProgressCallback, should_stop: StopCallback) -> None:
        self.lost = False
        self._task, self._progress, self._should_stop = task, progress, should_stop
        self._began = time.monotonic()
        self._best = math.inf
        self._found: Thrifty | None = None

    def progress(self, progress: Progress) -> None:
        """Note whether there is a plan."""
        self._best = min(self._best, progress.incumbent)
        self._progress(progress)

    def should_stop(self) -> bool:
        """Whether the caller wants to stop, or there is no hope."""
        if self._should_stop():
            return True
        waited = time.monotonic() - self._began
        if self._found is None and self._best == math.inf and waited > PATIENCE:
            limit = self._task.job.memory_limit
            self._found = thriftiest(self._task, enough=limit, end=time.monotonic() + ASKED_SECONDS)
            self.lost = self._found.bytes > limit * (1.0 if self._found.complete else SURE)
        return self.lost

    def rescue(self, outcome: Outcome, *, late: bool = False, end: float = math.inf) -> None:
        """Add the thriftiest plan to an outcome without any, if it fits: looking for time may miss what just fits.

        Args:
            outcome: Of a search.
            late: Whether to do so even if the search was stopped.
            end: When to stop looking, on the monotonic clock.
        """
        if self.lost:
            outcome.stopped = ""
        if outcome.candidates or (outcome.stopped and not late):
            return
        limit = self._task.job.memory_limit
        found = self._found or thriftiest(self._task, enough=limit, end=end)
        if found.candidate is not None and found.bytes <= limit:
            outcome.take(Finding(found.candidate.objective, found.candidate, 0), 1)
