"""Executors of search tasks: this process, and the base of executors with workers in other processes.

An executor holds at most one or two tasks per worker and returns their findings in any order. A worker that dies is
replaced, and its tasks are executed again.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from typing import Self

from autopar.errors import WorkerError
from autopar.search.context import SearchContext
from autopar.search.tasks import Finding, SearchTask, SolverKey
from autopar.search.workbench import Workbench

MAX_DEATHS = 3
"""Workers that may die at one task before the search fails."""


class Executor(ABC):
    """Executes tasks; a context manager that closes its workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def is_free(self) -> bool:
        """Whether a worker can take another task."""

    @property
    def peak_bytes(self) -> float:
        """Sum of the peak memory of the workers, in bytes, as reported so far, without this process."""
        return 0.0

    def is_preferred(self, task: SearchTask) -> bool:
        """Whether the worker that has the state of a task is the next free one: such tasks are started first."""
        return True

    @abstractmethod
    def start(self, number: int, task: SearchTask, end: float) -> None:
        """Start a task on a free worker.

        Args:
            number: Number of the task.
            task: The task.
            end: When the task should end, on the monotonic clock.
        """

    @abstractmethod
    def wait(self, seconds: float) -> list[tuple[int, Finding]]:
        """Return findings with the numbers of their tasks: as soon as there is one, or none after `seconds`.

        Raises:
            WorkerError: If workers keep dying at a task.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ask the workers to end their tasks early, with the findings so far."""

    @abstractmethod
    def close(self) -> None:
        """End the workers and their tasks."""


class InProcessExecutor(Executor):
    """Executes each task in this process, at once when it is started."""

    def __init__(self, search: SearchContext) -> None:
        self._workbench = Workbench(search, portable=False)
        self._done: list[tuple[int, Finding]] = []

    @property
    def is_free(self) -> bool:
        """See `Executor.is_free`."""
        return not self._done

    def start(self, number: int, task: SearchTask, end: float) -> None:
        """See `Executor.start`."""
        self._done.append((number, self._workbench.execute(task, end - time.monotonic())))

    def wait(self, seconds: float) -> list[tuple[int, Finding]]:
        """See `Executor.wait`."""
        done, self._done = self._done, []
        return done

    def stop(self) -> None:
        """See `Executor.stop`: a task polls the stop callback of the search itself."""

    def close(self) -> None:
        """See `Executor.close`."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A task of a worker.

    Attributes:
        number: Number of the task.
        task: The task.
        end: When the task should end, on the monotonic clock.
        deaths: Workers that died at this task so far.
    """

    number: int
    task: SearchTask
    end: float
    deaths: int = 0

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return math.inf if math.isinf(self.end) else self.end - time.monotonic()


class WorkerPool(Executor):
    """Numbered workers, each in its own process. A task goes to the worker with the state of its cell, if that is free.

    The state of every cell is kept here as well, so that any worker can continue it.

    Args:
        size: Number of workers.

    Attributes:
        ahead: Tasks that a worker may hold, executed in order. A second task keeps the worker busy while the finding of
            the first one is recorded and the next task is prepared.
    """

    ahead = 1

    def __init__(self, size: int) -> None:
        self._assignments: dict[int, deque[Assignment]] = {worker: deque() for worker in range(size)}
        self._owners: dict[SolverKey, int] = {}
        self._states: dict[SolverKey, bytes] = {}
        self._peaks: dict[int, float] = {}

    @property
    def is_free(self) -> bool:
        """See `Executor.is_free`."""
        return self._fewest_tasks < self.ahead

    @property
    def peak_bytes(self) -> float:
        """See `Executor.peak_bytes`."""
        return sum(self._peaks.values())

    def is_preferred(self, task: SearchTask) -> bool:
        """See `Executor.is_preferred`."""
        owner = self._owners.get(task.solver_key)
        return owner is None or len(self._assignments[owner]) == self._fewest_tasks

    def start(self, number: int, task: SearchTask, end: float) -> None:
        """See `Executor.start`."""
        owner, fewest = self._owners.get(task.solver_key), self._fewest_tasks
        free = [worker for worker, assignments in self._assignments.items() if len(assignments) == fewest]
        self._assign(owner if owner is not None and owner in free else free[0], Assignment(number, task, end))

    @property
    def _fewest_tasks(self) -> int:
        """Tasks of the worker that holds the fewest."""
        return min(map(len, self._assignments.values()))

    def _assign(self, worker: int, assignment: Assignment) -> None:
        self._assignments[worker].append(assignment)
        key = assignment.task.solver_key
        is_known = self._owners.get(key) == worker
        self._owners[key] = worker
        self._send(worker, assignment, None if is_known else self._states.get(key))

    def _record_finding(self, worker: int, finding: Finding) -> tuple[int, Finding]:
        """Record the finding of a worker's first task, and return it with the number of the task."""
        assignment = self._assignments[worker].popleft()
        self._peaks[worker] = max(self._peaks.get(worker, 0.0), finding.peak_bytes)
        if finding.is_final:
            self._states.pop(assignment.task.solver_key, None)
        elif finding.state is not None:
            self._states[assignment.task.solver_key] = finding.state
        return assignment.number, finding

    def _reassign(self, worker: int, why: str) -> None:
        """Assign the tasks of a dead worker to its successor, in order.

        Raises:
            WorkerError: If `MAX_DEATHS` workers have died at its first task.
        """
        assignment, *others = self._assignments[worker]
        if assignment.deaths + 1 >= MAX_DEATHS:
            raise WorkerError(
                f"{MAX_DEATHS} processes of the search ended before their time at {assignment.task.family[0]}: {why}",
                hint="there may be too little memory for all workers: use fewer --workers",
            )
        self._owners = {known: owner for known, owner in self._owners.items() if owner != worker}
        self._assignments[worker].clear()
        for each in (replace(assignment, deaths=assignment.deaths + 1), *others):
            self._assign(worker, each)

    @abstractmethod
    def _send(self, worker: int, assignment: Assignment, state: bytes | None) -> None:
        """Send an assignment to a worker; `state` is the packed state of the cell if another worker has it."""
