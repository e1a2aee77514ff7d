"""The processes that solve one problem: started from nothing, listened to, told what others found, and killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait

from autopar.selection.records import Better, Message, Request

PATIENCE = 0.1
"""Seconds a process that has closed its pipe may take to end."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class Crew(ABC):
    """Numbered workers, each of which solves the problem in a process of its own.

    Attributes:
        size: Number of workers.
    """

    size: int

    @abstractmethod
    def receive(self, seconds: float) -> list[tuple[int, Message | None]]:
        """Return messages with the numbers of their workers, at once or none after `seconds`; None for a worker's end.

        An end comes once.
        """

    @abstractmethod
    def tell(self, worker: int, finding: Better) -> None:
        """Tell a worker what another one found; returns at once."""

    @abstractmethod
    def end(self) -> float:
        """End all workers and return the sum of their peak memory in bytes."""

    @abstractmethod
    def death(self, worker: int) -> str:
        """Return in words how a worker died that has ended."""


class WorkerProcess:
    """A process of this machine that serves one request.

    It is started from nothing, because a caller with threads cannot be forked, and gets the number of threads by its
    environment, where all libraries look for it. Its standard output goes nowhere: libraries that print must not come
    between a choice and its reader.

    Attributes:
        connection: Its messages.
        returncode: Exit code; None while it runs.
        peak_bytes: Peak memory once it has ended.
    """

    def __init__(self, request: Request) -> None:
        self.connection, theirs = Pipe()
        self.peak_bytes = 0.0
        path = [str(folder) for folder in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; from autopar.selection.worker import serve; serve({theirs.fileno()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=os.environ | dict.fromkeys(_THREADS, str(request.threads)),
            start_new_session=True,  # Ctrl-C is for us alone
        )
        theirs.close()
        self._teller: _Teller | None = None
        self.connection.send(request)

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.returncode

    def tell(self, finding: Better) -> None:
        """Send what another worker found, in a thread: a process that never looks up must not hold us up."""
        if self._teller is None:
            self._teller = _Teller(self.connection)
        self._teller.tell(finding)

    def end(self, patience: float = 0.0) -> None:
        """End the process if it has not ended by itself after some seconds, and record its peak memory."""
        if self._process.returncode is not None:
            return
        end = time.monotonic() + patience
        number, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        while not number and time.monotonic() < end:
            time.sleep(0.005)
            number, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if not number:
            os.kill(self._process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.peak_bytes = 1024.0 * usage.ru_maxrss
        if self._teller is not None:
            self._teller.end()
        self.connection.close()


class LocalCrew(Crew):
    """Processes of this machine."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.size = len(requests)
        self._workers = [WorkerProcess(request) for request in requests]

    def receive(self, seconds: float) -> list[tuple[int, Message | None]]:
        """See `Crew.receive`."""
        running = {own.connection: number for number, own in enumerate(self._workers) if own.returncode is None}
        found: list[tuple[int, Message | None]] = []
        for connection in wait(list(running), seconds):
            number = running[connection]  # type: ignore[index]
            try:
                found.append((number, self._workers[number].connection.recv()))
            except (EOFError, OSError):
                self._workers[number].end(PATIENCE)
                found.append((number, None))
        return found

    def tell(self, worker: int, finding: Better) -> None:
        """See `Crew.tell`."""
        if self._workers[worker].returncode is None:
            self._workers[worker].tell(finding)

    def end(self) -> float:
        """See `Crew.end`."""
        for worker in self._workers:
            worker.end()
        return sum(worker.peak_bytes for worker in self._workers)

    def death(self, worker: int) -> str:
        """See `Crew.death`."""
        return describe_death(self._workers[worker].returncode or 0)


class _Teller:
    """Sends the newest finding to a process, in a thread that may wait for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._newest: Better | None = None
        self._changed = threading.Condition()
        self._over = False
        threading.Thread(target=self._run, daemon=True).start()

    def tell(self, finding: Better) -> None:
        """Send a finding soon, unless there is a newer one by then."""
        with self._changed:
            self._newest = finding
            self._changed.notify()

    def end(self) -> None:
        """End the thread."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._newest is None and not self._over:
                    self._changed.wait()
                finding, self._newest = self._newest, None
                if self._over or finding is None:
                    return
            try:
                self._connection.send(finding)
            except OSError:  # the process has ended
                return


def describe_death(code: int) -> str:
    """Return in words how a process died.

    >>> describe_death(1), describe_death(-11)
    ('ended without an answer, with exit code 1', 'was ended by SIGSEGV')
    """
    if code >= 0:
        return f"ended without an answer, with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
