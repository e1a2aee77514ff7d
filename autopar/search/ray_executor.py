"""Executor with Ray actors as workers, on this machine or on a cluster.

Ray restarts an actor that died, on another node if need be, and executes its task again; the packed state of a cell is
sent with every task. Every node needs this package in the same version, which is checked first: otherwise tasks would
fail one by one.
"""

import pickle
import socket
import sys
import time
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autopar.collector import uncollected
from autopar.errors import WorkerError
from autopar.search.context import SearchContext
from autopar.search.executor import MAX_DEATHS, Assignment, WorkerPool
from autopar.search.tasks import Finding, SearchTask
from autopar.search.workbench import Workbench

CONNECT_SECONDS = 5.0
"""Longest time until a cluster accepts a connection."""

ANSWER_SECONDS = 60.0
"""Longest time until a node answers which version it has."""

FREE_SECONDS = 10.0
"""Longest time to wait for free CPUs: those of a search that has just ended are released a moment later."""

POLL_SECONDS = 0.2
"""Time between two questions for free CPUs."""


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
            _connect(size, address)
        try:
            size = _num_workers(size)
            _check_nodes()
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
        state = self._states.get(assignment.task.cell)
        self._running[self.actors[worker].execute.remote(assignment.task, assignment.left, state)] = worker


def _check_listening(address: str | None) -> None:
    """Check that a server listens at an address HOST:PORT; Ray itself would try for minutes.

    Raises:
        OSError: If no server listens.
    """
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


def _num_workers(size: int | None) -> int:
    """Return the number of actors: the requested one, or one per free CPU.

    Raises:
        WorkerError: If fewer CPUs are free.
    """
    num_cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
    if size is not None and size > num_cpus:
        raise WorkerError(f"{size} workers on a cluster of {num_cpus} CPUs", hint=f"--workers {num_cpus}")
    end = time.monotonic() + FREE_SECONDS
    while (free := int(ray.available_resources().get("CPU", 0))) < (size or num_cpus) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    if free < (size or 1):
        raise WorkerError(
            f"{free} of the {num_cpus} CPUs of the Ray cluster are free, of {size or 1} that workers need",
            hint=f"--workers {free}" if free else "wait for what runs there, or leave --engine ray out",
        )
    return size or free


def _check_nodes() -> None:
    """Check that every node has this package, in the version of this process.

    Raises:
        WorkerError: If a node has another version or none, or does not answer.
    """
    here = version("autopar")
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    asked = []
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append(ray.remote(num_cpus=0, scheduling_strategy=where)(version).remote("autopar"))
    for node, answer in zip(nodes, asked, strict=True):
        name = node["NodeManagerAddress"]
        try:
            there = ray.get(answer, timeout=ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise WorkerError(f"node {name} of the Ray cluster does not answer", hint="see its logs") from None
        except (PackageNotFoundError, ray.exceptions.RayError) as error:
            is_absent = isinstance(error, PackageNotFoundError)
            raise WorkerError(
                f"node {name} of the Ray cluster {'has no autopar' if is_absent else f'cannot run anything: {error}'}",
                hint=f"install autopar {here} on every node, for the Python that runs Ray there",
            ) from None
        if there != here:
            raise WorkerError(
                f"node {name} of the Ray cluster has autopar {there}, here it is {here}",
                hint="install the same version on every node",
            )


def _connect(size: int | None, address: str | None) -> None:
    """Connect to a cluster, or start one on this machine.

    Raises:
        WorkerError: If neither is possible.
    """
    try:
        _check_listening(address)
        if address is None:  # ignores RAY_ADDRESS, which "auto" follows
            ray.init("local", num_cpus=size, include_dashboard=False, log_to_driver=False, logging_level="error")
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # `ray.init` raises bare exceptions, for example if a node is slow to start
        raise WorkerError(
            f"no Ray cluster at {address!r}: {error}" if address else f"Ray cannot be started: {error}",
            hint="start one with `ray start --head`, or leave --ray-address out",
        ) from error
