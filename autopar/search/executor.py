"""Who does the pieces of a search: this process, or others.

A crew is handed as many pieces at a time as it has workers, or twice as many, and hands back what came of them in any
order. A worker that dies is replaced, and what it was doing is done again.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from typing import Self

from autopar.errors import WorkerError
from autopar.search.context import SearchContext
from autopar.search.tasks import Cell, Finding, SearchTask
from autopar.search.workbench import Workbench

MAX_DEATHS = 3
"""Of workers at the same piece; a fourth would fare no better."""


class Executor(ABC):
    """Workers of a search, let go when the context ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def is_free(self) -> bool:
        """Whether a worker can take a piece."""

    @property
    def peak_bytes(self) -> float:
        """What workers had of memory at most, each by itself, as far as they have told, besides this process."""
        return 0.0

    def is_preferred(self, task: SearchTask) -> bool:
        """Whether a piece should rather be done now than one that suits another worker."""
        return True

    @abstractmethod
    def start(self, number: int, task: SearchTask, end: float) -> None:
        """Have a worker that can take one do a piece.

        Args:
            number: Of the piece.
            task: What is to be done.
            end: When it should be done, on the monotonic clock.
        """

    @abstractmethod
    def wait(self, seconds: float) -> list[tuple[int, Finding]]:
        """Return what has come of pieces, by their numbers, as soon as there is something, else after `seconds`.

        Raises:
            WorkerError: If workers keep dying of a piece.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ask the workers to end what they do with what they have."""

    @abstractmethod
    def close(self) -> None:
        """Let the workers go, whatever they do."""


class InProcessExecutor(Executor):
    """This process; a piece is done when it is started."""

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
        """See `Executor.stop`: what is done has seen the same signal."""

    def close(self) -> None:
        """See `Executor.close`."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """A piece being done.

    Attributes:
        number: Of the piece.
        task: The task.
        end: When it should be done, on the monotonic clock.
        deaths: Of workers so far, at this piece.
    """

    number: int
    task: SearchTask
    end: float
    deaths: int = 0

    @property
    def left(self) -> float:
        """Seconds left."""
        return math.inf if math.isinf(self.end) else self.end - time.monotonic()


class WorkerPool(Executor):
    """Workers that are numbered, each in a process of its own; who worked on a configuration goes on, if it is free.

    What was done on a configuration is kept here, so that any worker can go on.

    Attributes:
        ahead: Pieces that a worker may have at a time, which it does in this order: with a second one it goes on while
            nobody looks at what it has found, or prepares the next one.
    """

    ahead = 1

    def __init__(self, size: int) -> None:
        self._assignments: dict[int, deque[Assignment]] = {worker: deque() for worker in range(size)}
        self._owners: dict[Cell, int] = {}
        self._states: dict[Cell, bytes] = {}
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
        """See `Executor.is_preferred`: who worked on its configuration has it at hand."""
        owner = self._owners.get(task.cell)
        return owner is None or len(self._assignments[owner]) == self._fewest_tasks

    def start(self, number: int, task: SearchTask, end: float) -> None:
        """See `Executor.start`."""
        owner, fewest = self._owners.get(task.cell), self._fewest_tasks
        free = [worker for worker, assignments in self._assignments.items() if len(assignments) == fewest]
        self._assign(owner if owner is not None and owner in free else free[0], Assignment(number, task, end))

    @property
    def _fewest_tasks(self) -> int:
        """How many pieces the workers have that have fewest."""
        return min(map(len, self._assignments.values()))

    def _assign(self, worker: int, assignment: Assignment) -> None:
        self._assignments[worker].append(assignment)
        cell = assignment.task.cell
        is_known = self._owners.get(cell) == worker
        self._owners[cell] = worker
        self._send(worker, assignment, None if is_known else self._states.get(cell))

    def _record_finding(self, worker: int, finding: Finding) -> tuple[int, Finding]:
        """Take what a worker has found of the first of its pieces."""
        assignment = self._assignments[worker].popleft()
        self._peaks[worker] = max(self._peaks.get(worker, 0.0), finding.peak_bytes)
        if finding.is_final:
            self._states.pop(assignment.task.cell, None)
        elif finding.state is not None:
            self._states[assignment.task.cell] = finding.state
        return assignment.number, finding

    def _reassign(self, worker: int, why: str) -> None:
        """Have the successor of a worker do what it was doing, and what it was to do then.

        Raises:
            WorkerError: If it is not the first that died of it.
        """
        assignment, *others = self._assignments[worker]
        if assignment.deaths + 1 >= MAX_DEATHS:
            raise WorkerError(
                f"{MAX_DEATHS} processes of the search ended before their time at {assignment.task.family[0]}: {why}",
                hint="there may be too little memory for so many: use fewer --workers",
            )
        self._owners = {known: owner for known, owner in self._owners.items() if owner != worker}
        self._assignments[worker].clear()
        for each in (replace(assignment, deaths=assignment.deaths + 1), *others):
            self._assign(worker, each)

    @abstractmethod
    def _send(self, worker: int, assignment: Assignment, state: bytes | None) -> None:
        """Have a worker do an order; `state` is what others did on the configuration before."""
