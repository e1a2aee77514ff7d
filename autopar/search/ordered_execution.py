"""Deterministic parallel execution: several tasks at a time, with an answer that does not depend on their number.

A task depends on the incumbent when it is prepared. So that the speed of workers has no influence, task i is prepared
from the findings of exactly the tasks before its horizon h(i) < i, and findings are recorded in order:

    h(i) = max(0, i - min(LAG, lead + floor(i / 4)))

With lead 0, where each task may make the others needless, the first tasks see all findings before them; with lead 1
they miss one, and with lead `LAG`, where nearly all tasks are executed anyway, they miss `LAG`. At most `LAG` + 1 tasks
are executed at a time.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from autopar.search.task_executor import Executor
from autopar.search.tasks import Finding, SearchTask

LAG = 7
"""Tasks that are executed at a time, less one."""

POLL_SECONDS = 0.1
"""Longest time between two calls of the stop callback."""

GRACE_SECONDS = 2.0
"""Time that workers have to end their tasks when the search is stopped."""


def horizon(index: int, lead: int) -> int:
    """Return how many findings are recorded before a task is prepared.

    Args:
        index: Number of the task.
        lead: Tasks before it that the first tasks do not wait for.

    >>> [horizon(index, lead=0) for index in (0, 1, 3, 4, 8, 40)]
    [0, 1, 3, 3, 6, 33]
    >>> [horizon(index, lead=1) for index in (0, 1, 3, 4, 8, 40)]
    [0, 0, 2, 2, 5, 33]
    """
    return max(0, index - min(LAG, lead + index // 4))


class TaskSeries(ABC):
    """A sequence of tasks, each prepared from the findings before its horizon.

    Attributes:
        lead: Tasks before it that the first tasks do not wait for; 0 where each may make the others needless.
    """

    lead = 1

    @abstractmethod
    def is_over(self, index: int) -> bool:
        """Whether this task and all later ones are needless, given the findings so far."""

    @abstractmethod
    def next_task(self, index: int) -> SearchTask | None:
        """Prepare a task; None if it is needless, given the findings so far."""

    @abstractmethod
    def record_finding(self, index: int, finding: Finding | None) -> None:
        """Record the finding of a task, None if it was needless; in order, but for the last tasks when stopped."""


def run_series(
    executor: Executor,
    series: TaskSeries,
    count: int,
    end: Callable[[], float],
    must_stop: Callable[[], bool],
    on_finding: Callable[[Finding], None],
) -> None:
    """Execute a series of tasks.

    Args:
        executor: Executes the tasks.
        series: The tasks.
        count: Number of tasks at most.
        end: Returns when a task that is started now should end, on the monotonic clock.
        must_stop: Whether to stop now.
        on_finding: Called with each finding as soon as a worker returns it.

    Raises:
        WorkerError: If workers keep dying at a task.
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
        if found[number] is not None:  # a needless task has no finding that could be recorded out of order
            series.record_finding(number, found[number])
