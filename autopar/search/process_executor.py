"""A crew of processes on this machine.

They are forked from a server that has imported this package once, not from the caller, which may have threads. Each
gets the search (model, rules, costs) when it starts and discovers nothing again.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from types import ModuleType
from typing import TYPE_CHECKING

from autopar.collector import uncollected
from autopar.machine import follow_parent
from autopar.search.context import SearchContext
from autopar.search.executor import Assignment, WorkerPool
from autopar.search.tasks import Finding, SearchTask
from autopar.search.workbench import Workbench

if TYPE_CHECKING:
    from ctypes import c_byte


_IMPORTED = ["autopar.search.branch_and_bound", "autopar.solvers.auto", "autopar.workload", "autopar.task"]
"""What the server imports before the first worker starts."""

_CALLER_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that the caller decides about. A terminal, `timeout` and batch systems send them to every process of a group,
and workers that ended then would take along what they have found."""

_workbench: Workbench | None = None
"""In a worker: where it works."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A pool of one process, so that one that dies takes nobody along, and what it does and is to do then."""

    pool: ProcessPoolExecutor
    pid: int
    futures: deque[Future[Finding]] = field(default_factory=deque)


class ProcessExecutor(WorkerPool):
    """Processes of this machine.

    Args:
        search: What is searched.
        size: Number of processes.
    """

    ahead = 2

    def __init__(self, search: SearchContext, size: int) -> None:
        super().__init__(size)
        open_server()
        self._context = multiprocessing.get_context("forkserver")
        self._stop = self._context.RawValue("b", 0)
        with uncollected():
            self._search = pickle.dumps(search.portable())
        starting = [self._start_worker() for _ in range(size)]
        self._workers = [_Worker(pool, ready.result()) for pool, ready in starting]

    @property
    def pids(self) -> tuple[int, ...]:
        """Numbers of the processes."""
        return tuple(worker.pid for worker in self._workers)

    def wait(self, seconds: float) -> list[tuple[int, Finding]]:
        """See `Executor.wait`."""
        futures = {worker.futures[0]: number for number, worker in enumerate(self._workers) if worker.futures}
        found = []
        for future in wait(futures, seconds, FIRST_COMPLETED).done:
            number = futures[future]
            self._workers[number].futures.popleft()
            try:
                finding = future.result()
            except BrokenProcessPool as error:
                self._workers[number].pool.shutdown()
                pool, ready = self._start_worker()
                self._workers[number] = _Worker(pool, ready.result())
                self._reassign(number, str(error))
                continue
            found.append(self._record_finding(number, finding))
        return found

    def stop(self) -> None:
        """See `Executor.stop`."""
        self._stop.value = 1

    def close(self) -> None:
        """See `Executor.close`."""
        for worker in self._workers:
            if worker.futures:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.pool.shutdown(cancel_futures=True)

    def _send(self, worker: int, assignment: Assignment, state: bytes | None) -> None:
        known = self._workers[worker]
        try:
            known.futures.append(known.pool.submit(_execute, assignment.task, assignment.end, state))
        except BrokenProcessPool as error:  # it died while it had nothing to do
            known.futures.append(Future())
            known.futures[-1].set_exception(error)

    def _start_worker(self) -> "tuple[ProcessPoolExecutor, Future[int]]":
        """Return a new worker, and its process number once it is ready."""
        pool = ProcessPoolExecutor(1, self._context, _prepare_worker, (self._search, self._stop))
        with _detached():
            return pool, pool.submit(os.getpid)


def open_server() -> None:
    """Start the server that workers are forked from, unless it runs; it imports what they need meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)
    with _detached():
        forkserver.ensure_running()


@contextmanager
def _detached() -> Iterator[None]:
    """Keep new processes from importing the caller's script, and from signals that the caller decides about.

    They need nothing of the script, and it may not expect to be imported. Processes that are still starting get these
    signals too.
    """
    main = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CALLER_SIGNALS)  # inherited
    resource_tracker.ensure_running()  # which any of them starts; afterwards SIGINT and SIGTERM are let through here
    signal.pthread_sigmask(signal.SIG_BLOCK, _CALLER_SIGNALS)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker(search: bytes, stop: "c_byte") -> None:
    """Prepare a worker."""
    global _workbench
    for number in _CALLER_SIGNALS:  # also between two pieces
        signal.signal(number, signal.SIG_IGN)
    follow_parent()
    _workbench = Workbench.unpacked(search, lambda: bool(stop.value))


def _execute(task: SearchTask, end: float, state: bytes | None) -> Finding:
    """Do a piece, in a worker; processes of a machine have one monotonic clock."""
    assert _workbench is not None, "a worker is prepared before its first piece"
    return _workbench.execute(task, end - time.monotonic(), state)
