"""The order of pieces: several at a time, and the same answer however many that are.

A piece depends on the best plans known when it is prepared. So that these do not depend on who was how fast, piece i is
prepared from what came of the pieces before the horizon h(i) < i, no more and no less, and findings are taken in order:

    h(i) = max(0, i - min(LAG, lead + floor(i / 4)))

The first pieces see all before them where each may make the others needless (lead 0), and else miss one (lead 1), or
`LAG` where nearly all have to be done whatever comes of them; later ones miss the last `LAG` at most. Up to `LAG` + 1
can be done at a time.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from autopar.search.executor import Executor
from autopar.search.tasks import Finding, SearchTask

LAG = 7
"""Pieces that are done at a time, less one, by as many workers or more."""

POLL_SECONDS = 0.1
"""Longest time between two looks at whether to stop."""

GRACE_SECONDS = 2.0
"""What workers have for ending what they do when the search is stopped."""


def horizon(index: int, lead: int) -> int:
    """Return how many pieces have to be done before a piece is prepared.

    Args:
        index: Number of the piece.
        lead: How many before it the first ones need not wait for.

    >>> [horizon(index, lead=0) for index in (0, 1, 3, 4, 8, 40)]
    [0, 1, 3, 3, 6, 33]
    >>> [horizon(index, lead=1) for index in (0, 1, 3, 4, 8, 40)]
    [0, 0, 2, 2, 5, 33]
    """
    return max(0, index - min(LAG, lead + index // 4))


class TaskSeries(ABC):
    """Pieces in order.

    Attributes:
        lead: How many before it the first ones need not wait for: none where each may make others needless.
    """

    lead = 1

    @abstractmethod
    def is_over(self, index: int) -> bool:
        """Whether what is known makes this piece and all after it needless."""

    @abstractmethod
    def next_task(self, index: int) -> SearchTask | None:
        """Return a piece; None if what is known makes it needless."""

    @abstractmethod
    def record_finding(self, index: int, finding: Finding | None) -> None:
        """Take what came of a piece, None if it was needless; in order, but for the last ones if stopped."""


def run_series(
    executor: Executor,
    series: TaskSeries,
    count: int,
    end: Callable[[], float],
    must_stop: Callable[[], bool],
    on_finding: Callable[[Finding], None],
) -> None:
    """Have a series of pieces done.

    Args:
        executor: By whom.
        series: The pieces.
        count: How many there are.
        end: Returns when a piece that is started now should be done, on the monotonic clock.
        must_stop: Whether to stop now, with what there is.
        on_finding: Told of findings as soon as they are there.

    Raises:
        WorkerError: If workers keep dying of a piece.
    """
    ready: deque[tuple[int, SearchTask]] = deque()
    found: dict[int, Finding | None] = {}
    prepared = taken = 0
    while True:
        while prepared < count and horizon(prepared, series.lead) <= taken:
            if series.is_over(prepared):
                count = prepared
                break
            task = series.next_task(prepared)
            if task is None:
                found[prepared] = None
            else:
                ready.append((prepared, task))
            prepared += 1
        if taken in found:
            series.record_finding(taken, found.pop(taken))
            taken += 1
            continue
        if taken == count:
            return
        if must_stop():
            break
        while ready and executor.is_free:
            number, task = entry = next((each for each in ready if executor.is_preferred(each[1])), ready[0])
            ready.remove(entry)
            executor.start(number, task, end())
        for number, finding in executor.wait(POLL_SECONDS):
            on_finding(finding)
            found[number] = finding
    running = prepared - taken - len(ready) - len(found)
    executor.stop()
    limit = time.monotonic() + GRACE_SECONDS
    while running > 0 and (left := limit - time.monotonic()) > 0:
        for number, finding in executor.wait(left):
            on_finding(finding)
            found[number] = finding
            running -= 1
    for number in sorted(found):
        if found[number] is not None:  # what was needless was not looked at, so that it is told as such
            series.record_finding(number, found[number])
