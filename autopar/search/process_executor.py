"""Executor with worker processes on this machine.

Workers are forked from a server that has imported this package, not from the caller, which may have threads. Each gets
the search context (model, rules, costs) when it starts, so that nothing is discovered twice.
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
from ctypes import c_byte
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from types import ModuleType

from autopar.collector import uncollected
from autopar.machine import follow_parent
from autopar.search.context import SearchContext
from autopar.search.task_executor import Assignment, WorkerPool
from autopar.search.tasks import Finding, SearchTask
from autopar.search.workbench import Workbench

_IMPORTED = ["autopar.search.branch_and_bound", "autopar.solvers.auto", "autopar.workload", "autopar.task"]
"""Modules that the server imports before the first worker starts."""

CALLER_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that workers ignore and the caller handles. Terminals, `timeout` and batch systems send them to every process
of a group; a worker that ended then would lose its findings."""

_workbench: Workbench | None = None
"""The workbench of a worker process."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A pool of one process, so that its death breaks no other worker, and its tasks in order."""

    pool: ProcessPoolExecutor
    pid: int
    futures: deque[Future[Finding]] = field(default_factory=deque)


class ProcessExecutor(WorkerPool):
    """Executes tasks in processes of this machine.

    Args:
        search: Inputs of the search.
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
        """Process identifiers of the workers."""
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
        except BrokenProcessPool as error:  # the worker died while it was idle
            known.futures.append(Future())
            known.futures[-1].set_exception(error)

    def _start_worker(self) -> "tuple[ProcessPoolExecutor, Future[int]]":
        """Start a worker; return its pool, and a future of its process identifier."""
        pool = ProcessPoolExecutor(1, self._context, _prepare_worker, (self._search, self._stop))
        with detached():
            return pool, pool.submit(os.getpid)


def open_server() -> None:
    """Start the server that workers are forked from, unless it runs; it imports their modules meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)
    with detached():
        forkserver.ensure_running()


@contextmanager
def detached() -> Iterator[None]:
    """Keep new processes from importing the caller's script, and from signals that the caller handles.

    Workers need nothing of the script, which may have no guard against being imported. Signals would otherwise reach
    processes that are still starting.
    """
    main = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CALLER_SIGNALS)  # inherited by new processes
    resource_tracker.ensure_running()  # new processes would start it; its start unblocks SIGINT and SIGTERM here
    signal.pthread_sigmask(signal.SIG_BLOCK, CALLER_SIGNALS)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker(search: bytes, stop: c_byte) -> None:
    """Prepare a worker process."""
    global _workbench
    for number in CALLER_SIGNALS:  # also between two tasks
        signal.signal(number, signal.SIG_IGN)
    follow_parent()
    _workbench = Workbench.unpacked(search, lambda: bool(stop.value))


def _execute(task: SearchTask, end: float, state: bytes | None) -> Finding:
    """Execute a task in a worker; processes of a machine share the monotonic clock."""
    assert _workbench is not None, "a worker is prepared before its first task"
    return _workbench.execute(task, end - time.monotonic(), state)
