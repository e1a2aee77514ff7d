"""Where the pieces of a search are done: here, in processes of this machine, or on a Ray cluster."""

from dataclasses import dataclass
from importlib.util import find_spec

from autopar.errors import JobError, WorkerError
from autopar.machine import usable_cores
from autopar.search.context import SearchContext
from autopar.search.executor import Executor, InProcessExecutor
from autopar.search.ordered_execution import LAG

ENGINES = ("local", "ray")

MOST_WORKERS = LAG + 1
"""Processes that have something to do at a time."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Who does the work of a search; the answer is the same whoever does.

    Attributes:
        name: "local" or "ray".
        workers: Number of processes; None for this one alone, or with Ray for as many as the cluster has CPUs.
        address: With Ray, the address of a running cluster, "auto" for the one this machine belongs to; None starts one
            on this machine.

    Raises:
        JobError: If there is no such engine, no worker, or an address without Ray.
        WorkerError: If Ray is not installed.
    """

    name: str = "local"
    workers: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise JobError(f"no engine {self.name!r}", hint=f"use {' or '.join(ENGINES)}")
        if self.workers is not None and self.workers < 1:
            raise JobError(f"{self.workers} workers", hint="--workers takes a whole number from 1 on")
        if self.address is not None and self.name != "ray":
            raise JobError(f"a Ray address {self.address!r} for engine {self.name}", hint="add --engine ray")
        if self.name == "ray" and find_spec("ray") is None:
            raise WorkerError("Ray is not installed", hint="pip install 'autopar[ray]', or use --workers N")

    @property
    def is_here(self) -> bool:
        """Whether this process does the work."""
        return self.name == "local" and self.workers in (None, 1)

    def get_ready(self) -> None:
        """Begin to prepare for workers, while it is not yet known what they will search."""
        if self.name == "local" and not self.is_here:
            from autopar.search.process_executor import open_server

            open_server()

    def open_executor(self, search: SearchContext) -> Executor:
        """Return the workers of a search."""
        if self.is_here:
            return InProcessExecutor(search)
        if self.name == "ray":
            from autopar.search.ray_executor import RayExecutor

            return RayExecutor(search, self.workers, self.address)
        from autopar.search.process_executor import ProcessExecutor

        return ProcessExecutor(search, self.workers or 1)


def usual_workers() -> int:
    """Return how many processes search where nobody says: one per core, but no more than have something to do."""
    return min(MOST_WORKERS, usable_cores())


HERE = Engine()
"""This process."""
