"""Choice of the executor of a search: this process, processes of this machine, or a Ray cluster.

`Engine` is what a caller asks for; `Engine.open_executor` starts it.
"""

from dataclasses import dataclass

from autopar.engines import EngineRequest
from autopar.machine import usable_cores
from autopar.search.context import SearchContext
from autopar.search.ordered_execution import LAG
from autopar.search.task_executor import Executor, InProcessExecutor

MOST_WORKERS = LAG + 1
"""Processes that can be busy at a time: see `ordered_execution.horizon`."""


@dataclass(frozen=True, slots=True)
class Engine(EngineRequest):
    """Executor that a caller asks for. The answer of a search does not depend on it; see `EngineRequest`."""

    @property
    def is_here(self) -> bool:
        """Whether this process executes the tasks."""
        return self.name == "local" and self.workers in (None, 1)

    @property
    def processes(self) -> int:
        """Worker processes on this machine; 0 if this process, or another machine, executes the tasks."""
        return 0 if self.is_here or self.name == "ray" else self.workers or 1

    def start_workers(self) -> None:
        """Start the server of worker processes early, so that it imports this package while the job is prepared."""
        if self.name == "local" and not self.is_here:
            from autopar.search.process_executor import open_server

            open_server()

    def open_executor(self, search: SearchContext) -> Executor:
        """Start the executor of a search."""
        if self.is_here:
            return InProcessExecutor(search)
        if self.name == "ray":
            from autopar.search.ray_executor import RayExecutor

            return RayExecutor(search, self.workers, self.address)
        from autopar.search.process_executor import ProcessExecutor

        return ProcessExecutor(search, self.workers or 1)


def usual_workers() -> int:
    """Return the default number of processes: one per core, at most `MOST_WORKERS`."""
    return min(MOST_WORKERS, usable_cores())


HERE = Engine()
"""The engine that executes tasks in this process."""
