"""Processes that search for rules, as the caller sees them: tasks in, answers out, in the order they are ready.

Kernels run in processes of their own, because one that crashes or hangs must not end or hold up the caller's. The
caller's process is never forked (it may have threads and devices) and its main module never imported again (it may be
a script without a guard): a server is started from nothing and forks the workers (`server`). It is started with the
first task, so that a discovery that finds everything in the cache starts nothing, and kept for the next discovery.
"""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from heapq import heappop, heappush
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Self

from autopar.discover.guard import Death, Proxies, Searching, Shrinking, Task
from autopar.discover.rules import Rule
from autopar.discover.server import Isolation, Report
from autopar.errors import ExecutionError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_MAX_RESTARTS = 3
"""Servers a discovery may lose."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Proxies are too small to share a run among cores; and a process with one thread can be forked."""

Answer = Proxies | Rule | None


class Workers:
    """Processes that do tasks; a context manager.

    At its end the processes are kept for the next discovery, or killed if tasks are left.
    """

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._queue: list[tuple[int, int]] = []
        self._tasks: list[Task] = []
        self._running: set[int] = set()
        self._server: _Server | None = None
        self._restarts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is None:
            return
        if self._server.ready and not self._running:
            _idle.append(self._server)
        else:
            self._server.kill()

    def submit(self, task: Task) -> None:
        """Have a task done; the first one starts the server, which gets ready while the caller goes on."""
        self._tasks.append(task)
        self._enqueue(len(self._tasks) - 1)
        if self._server is None:
            self._server = _take(self._isolation)

    def answers(self) -> Iterator[tuple[Task, Answer, Report]]:
        """Iterate over tasks, answers and what happened, in the order in which they are ready.

        Tasks may be submitted meanwhile. An answer is None if too many workers died of the task.

        Raises:
            ExecutionError: If the server cannot be started.
            AutoparError: Whatever a task raises.
        """
        errors: dict[int, Exception] = {}
        while self._queue or self._running:
            if self._restarts > _MAX_RESTARTS:
                lost = Death(0, "lost its server")
                _, index = heappop(self._queue)
                yield self._tasks[index], None, Report(index, (lost,), stopped=True)
                continue
            report, answer = self._receive()
            if report is None:
                self._restart()
                continue
            self._running.remove(report.index)
            if isinstance(answer, Exception):
                errors[report.index] = answer
            else:
                yield self._tasks[report.index], answer, report
        if errors:
            raise errors[min(errors)]  # the same one, however many workers there are

    def _receive(self) -> tuple[Report | None, Answer | Exception]:
        """Return the next answer; no report if the server died."""
        assert self._server is not None, "started with the first task"
        connection = self._server.connection()
        try:
            while self._queue and len(self._running) < self._isolation.num_workers:
                _, index = heappop(self._queue)
                self._running.add(index)
                connection.send((index, self._tasks[index]))
            report: Report = connection.recv()
            answer: Answer | Exception = connection.recv()
        except (EOFError, OSError):
            return None, None
        return report, answer

    def _restart(self) -> None:
        """Have another server do what the last one did not."""
        assert self._server is not None, "it died just now"
        self._server.kill()
        self._server = _Server(self._isolation)
        self._restarts += 1
        for index in self._running:
            self._enqueue(index)
        self._running.clear()

    def _enqueue(self, index: int) -> None:
        """Put a task into the queue: those that lead to others first, then long searches, so that none is left over."""
        match self._tasks[index]:
            case Shrinking():
                rank = -sys.maxsize
            case Searching((even, _)):
                rank = -prod(1 + len(operand.shape) for operand in even.sketch.inputs if operand is not None)
        heappush(self._queue, (rank, index))


class _Server:
    """A process that forks workers and hands tasks to them.

    Attributes:
        isolation: How ops are run there.
        ready: Whether it has said so.
    """

    def __init__(self, isolation: Isolation) -> None:
        from multiprocessing.connection import Pipe

        self.isolation = isolation
        self._owner = os.getpid()
        self.ready = False
        self._connection, theirs = Pipe()
        path = [str(folder) for folder in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; from autopar.discover.server import serve; serve({theirs.fileno()})"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # Ctrl-C is for us; and a group of processes can be killed at once
            )
        except OSError as error:
            self._connection.close()
            raise _no_server(str(error)) from error
        finally:
            theirs.close()

    def connection(self) -> "Connection":
        """Return the connection to the server, once it is ready.

        Raises:
            ExecutionError: If it does not get ready.
        """
        if not self.ready:
            try:
                self._connection.send(self.isolation)
                self._connection.recv()
            except (EOFError, OSError) as error:
                raise _no_server(f"it exited with {self._process.wait()}") from error
            self.ready = True
        return self._connection

    @property
    def usable(self) -> bool:
        """Whether it is alive and ours; after a fork it is our parent's."""
        return self._owner == os.getpid() and self._process.poll() is None

    def kill(self) -> None:
        """End it and its workers at once."""
        self._connection.close()
        if self._process.returncode is None:  # not reaped: its number is still that of its group
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


_idle: list[_Server] = []
"""Servers between two discoveries: starting one takes as long as discovering the rules of a small model."""


def _take(isolation: Isolation) -> _Server:
    """Return an idle server for this isolation, or a new one; idle ones for others are ended."""
    while _idle:
        server = _idle.pop()
        if server.usable and server.isolation == isolation:
            return server
        if server.usable:
            server.kill()
    return _Server(isolation)


@atexit.register
def _kill_idle() -> None:
    """End what would otherwise notice by itself that this process is gone."""
    while _idle:
        server = _idle.pop()
        if server.usable:
            server.kill()


def _no_server(what: str) -> ExecutionError:
    return ExecutionError(
        f"ops cannot be run in a process of their own: {what}",
        hint=f"see whether {sys.executable!r} starts and can import autopar",
    )
