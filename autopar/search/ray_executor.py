"""Executor with Ray actors as workers, on this machine or on a cluster.

Ray restarts an actor that died, on another node if need be, and executes its task again; the packed state of a cell is
sent with every task.
"""

import pickle
import sys
from contextlib import redirect_stdout
from typing import Any

import ray

from autopar import ray_cluster
from autopar.collector import uncollected
from autopar.errors import WorkerError
from autopar.search.context import SearchContext
from autopar.search.task_executor import MAX_DEATHS, Assignment, WorkerPool
from autopar.search.tasks import Finding, SearchTask
from autopar.search.workbench import Workbench


class RayWorker:
    """A worker: an actor whose second thread receives `stop`."""

    def __init__(self, search: bytes) -> None:
        self._is_stopped = False
        self._workbench = Workbench.unpacked(search, lambda: self._is_stopped)

    def execute(self, task: SearchTask, seconds: float, state: bytes | None) -> Finding:
        """Execute a task."""
        return self._workbench.execute(task, seconds, state)

    def stop(self) -> None:
        """End the current task early."""
        self._is_stopped = True


class RayExecutor(WorkerPool):
    """Executes tasks in Ray actors.

    Args:
        search: Inputs of the search.
        size: Number of actors; None for one per free CPU.
        address: Address of a running cluster; None starts a cluster of `size` CPUs on this machine.

    Raises:
        WorkerError: If the cluster cannot be reached, has too few CPUs, or a node lacks this package.
    """

    def __init__(self, search: SearchContext, size: int | None, address: str | None) -> None:
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            ray_cluster.connect(size, address)
        try:
            size = ray_cluster.num_workers(size)
            ray_cluster.check_nodes()
        except WorkerError:
            self._leave()
            raise
        super().__init__(size)
        # Ray reports retries on standard output, which is reserved for the results of the search.
        self._quiet = redirect_stdout(sys.stderr)
        self._quiet.__enter__()
        with uncollected():
            packed = pickle.dumps(search.portable())
        self._search = ray.put(packed)  # kept: a restarted actor reads it
        actor = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=MAX_DEATHS - 1, max_concurrency=2)(RayWorker)
        self.actors: list[Any] = [actor.remote(self._search) for _ in range(size)]
        self._running: dict[Any, int] = {}

    def wait(self, seconds: float) -> list[tuple[int, Finding]]:
        """See `Executor.wait`."""
        if not self._running:
            return []
        done, _ = ray.wait(list(self._running), timeout=seconds)
        found = []
        for reference in done:
            worker = self._running.pop(reference)
            try:
                finding = ray.get(reference)
            except ray.exceptions.RayActorError as error:
                where = self._assignments[worker][0].task.family[0]
                raise WorkerError(
                    f"{MAX_DEATHS} processes of the search ended before their time at {where}: {error}",
                    hint="see the logs of the Ray cluster, or use fewer --workers",
                ) from error
            found.append(self._record_finding(worker, finding))
        return found

    def stop(self) -> None:
        """See `Executor.stop`."""
        for actor in self.actors:
            actor.stop.remote()

    def close(self) -> None:
        """See `Executor.close`."""
        for actor in self.actors:
            ray.kill(actor)
        self._quiet.__exit__(None, None, None)
        self._leave()

    def _leave(self) -> None:
        if self._owns_cluster:
            ray.shutdown()

    def _send(self, worker: int, assignment: Assignment, state: bytes | None) -> None:
        # A restarted actor has no state of the cell, so that the state is always sent.
        state = self._states.get(assignment.task.solver_key)
        self._running[self.actors[worker].execute.remote(assignment.task, assignment.left, state)] = worker
