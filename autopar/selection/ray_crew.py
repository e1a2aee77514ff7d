"""Workers on a Ray cluster: actors that each keep a solver's process on their node and pass its messages on."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import ray

from autopar import ray_cluster
from autopar.errors import WorkerError
from autopar.selection.crew import PATIENCE, Crew, WorkerProcess, describe_death
from autopar.selection.records import Better, Message, Request

START_SECONDS = 60.0
"""Longest time until an actor has started."""
POLL_SECONDS = 0.2
"""Longest time an actor waits for messages before it answers without any."""
END_SECONDS = 1.0
"""Longest time an actor may take to end its process before it is killed itself."""


class RayRelay:
    """An actor: keeps a solver's process on its node. Other threads receive what others found, and the end."""

    def __init__(self, content: bytes, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / name
        self._path.write_bytes(content)
        self._worker: WorkerProcess | None = None

    def start(self, request: Request, seconds: float) -> None:
        """Start the process, which has to be done in `seconds`: clocks of other machines are different ones."""
        self._worker = WorkerProcess(replace(request, path=str(self._path), end=time.monotonic() + seconds))

    def receive(self) -> list[Message | int]:
        """Return messages, at once or none after a moment; the exit code last once the process has ended."""
        worker = self._worker
        assert worker is not None, "it was started before"
        found: list[Message | int] = []
        try:
            seconds = POLL_SECONDS
            while wait([worker.connection], seconds):
                found.append(worker.connection.recv())
                seconds = 0.0
        except (EOFError, OSError):
            worker.end(PATIENCE)
            found.append(worker.returncode or 0)
        return found

    def tell(self, finding: Better) -> None:
        """Tell the process what another one found."""
        if self._worker is not None and self._worker.returncode is None:
            self._worker.tell(finding)

    def end(self) -> float:
        """End the process and return its peak memory in bytes."""
        if self._worker is None:
            return 0.0
        self._worker.end()
        return self._worker.peak_bytes


class RayCrew(Crew):
    """Workers on a Ray cluster.

    Args:
        requests: Returns the requests of a number of workers.
        size: Number of workers; None for one per free CPU.
        content: The problem file; nodes of a cluster need not have it.
        address: Address of a running cluster; None starts one on this machine.

    Raises:
        WorkerError: If the cluster cannot be reached, has too few CPUs, or a node lacks this package.
    """

    def __init__(
        self, requests: Callable[[int], Sequence[Request]], size: int | None, content: bytes, address: str | None
    ) -> None:
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            ray_cluster.connect(size, address)
        try:
            self.size = ray_cluster.num_workers(size)
            ray_cluster.check_nodes()
            asked = requests(self.size)
            held = ray.put(content)
            actor = ray.remote(num_cpus=1, max_concurrency=3)(RayRelay)
            self._actors: list[Any] = [actor.remote(held, Path(request.path).name) for request in asked]
            starts = [
                each.start.remote(request, request.end - time.monotonic())
                for each, request in zip(self._actors, asked, strict=True)
            ]
            ray.get(starts, timeout=START_SECONDS)
        except (WorkerError, ray.exceptions.RayError) as error:
            self._leave()
            if isinstance(error, WorkerError):
                raise
            raise WorkerError(f"no worker starts on the Ray cluster: {error}", hint="see the logs of Ray") from error
        self._waiting: dict[Any, int] = {each.receive.remote(): n for n, each in enumerate(self._actors)}
        self._deaths: dict[int, str] = {}

    def receive(self, seconds: float) -> list[tuple[int, Message | None]]:
        """See `Crew.receive`."""
        done, _ = ray.wait(list(self._waiting), timeout=seconds) if self._waiting else ([], [])
        found: list[tuple[int, Message | None]] = []
        for reference in done:
            number = self._waiting.pop(reference)
            try:
                messages = ray.get(reference)
            except ray.exceptions.RayError:
                messages = []
                self._deaths[number] = "was ended with its Ray actor"
            for message in messages:
                if isinstance(message, int):
                    self._deaths[number] = describe_death(message)
                elif isinstance(message, Better):
                    found.append((number, replace(message, time=time.monotonic())))
                else:
                    found.append((number, message))
            if number in self._deaths:
                found.append((number, None))
            else:
                self._waiting[self._actors[number].receive.remote()] = number
        return found

    def tell(self, worker: int, finding: Better) -> None:
        """See `Crew.tell`."""
        if worker not in self._deaths:
            self._actors[worker].tell.remote(finding)

    def end(self) -> float:
        """See `Crew.end`."""
        ends = [actor.end.remote() for actor in self._actors]
        done, _ = ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
        peak = 0.0
        for reference in done:
            try:
                peak += ray.get(reference)
            except ray.exceptions.RayError:
                continue  # its actor has died, and its process with it
        for actor in self._actors:
            ray.kill(actor)
        self._leave()
        return peak

    def death(self, worker: int) -> str:
        """See `Crew.death`."""
        return self._deaths[worker]

    def _leave(self) -> None:
        if self._owns_cluster:
            ray.shutdown()
