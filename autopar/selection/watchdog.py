"""The clock and its keeper: the solver's process is cut off when the time is over, whatever it is doing.

The solver may sit in a library that looks at no clock and no flag, so it is not asked to stop, and what it has found is
not fetched at the end: every choice and bound comes over a pipe the moment it is found, and the process is killed.
It is started from nothing, because a caller with threads cannot be forked, and gets the number of threads by its
environment, where all libraries look for it.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import SolverError
from autopar.problem import OPTIMALITY_TOLERANCE, Choice, Solution, Termination, relative_gap
from autopar.selection.records import (
    Better,
    Done,
    Explained,
    Known,
    Loaded,
    Message,
    Reductions,
    Refused,
    Request,
    Selection,
)

if TYPE_CHECKING:
    from autopar.solvers.bounds.infeasibility_proof import Conflict
    from autopar.solvers.reductions.presolve import Step

_LAST_WORDS = 0.8
"""Seconds kept for printing a choice and for the end of both processes; one of gigabytes takes a while to die."""
_EARLY = 0.35
"""Seconds by which a solver that looks at the clock has to be done earlier than it is cut off."""
_LAST_SHARE, _EARLY_SHARE = 0.25, 0.1
"""Of a short limit, at most these parts are kept for either: ending takes longer on a machine that has other work."""
_PATIENCE = 0.1
"""Seconds a process that has closed its pipe may take to end."""
_TICK = 0.05
"""Seconds between two looks at whether somebody wants an end."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

Report = Callable[[Known, Choice | None], None]
"""Called with what is known, and with the choice if it is a new one."""


def select(
    path: str | Path,
    *,
    time_limit: float,
    solver: str = "portfolio",
    threads: int = 2,
    seed: int = 0,
    began: float | None = None,
    reductions: bool = False,
    report: Report | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Selection:
    """Return the best choice for the problem in a file that a solver finds in the time given, and what it proves.

    Args:
        path: An IOPDDL file, `.json` or `.json.gz`.
        time_limit: Seconds of wall time; this returns before they are over, reading and cutting off included.
        solver: Name of the solver.
        threads: Threads it may use.
        seed: Of what it draws at random.
        began: When the time began, on the monotonic clock; now by default.
        reductions: Whether to record what presolve removes (which takes some of the time).
        report: Called with everything that gets better, as it does.
        should_stop: Polled all the time; once it is true, the best so far is returned.

    Raises:
        ProblemError: If the file is not a problem.
        SolverError: If there is no such solver, it refuses the problem, or its process dies before it has found
            anything.
    """
    began = time.monotonic() if began is None else began
    cut = began + time_limit - min(_LAST_WORDS, _LAST_SHARE * time_limit)
    request = Request(str(path), solver, cut - min(_EARLY, _EARLY_SHARE * time_limit), threads, seed, reductions)
    listener = _Listener(began, report)
    process, connection = _start(threads)
    interrupted = ended = False
    try:
        connection.send(request)
        while time.monotonic() < cut and not listener.complete:
            if should_stop is not None and should_stop():
                interrupted = True
                break
            if wait([connection], max(0.0, min(_TICK, cut - time.monotonic()))):
                listener.take(connection.recv())
    except (EOFError, OSError):
        ended = True
    finally:
        connection.close()
        peak_bytes = _end(process, _PATIENCE if ended else 0.0)
    failure = _death(process.returncode) if ended and not listener.finished else ""
    if failure and listener.choice is None:
        raise SolverError(f"solver {solver!r} {failure}", hint="see the lines above, or use another --solver")
    loaded = listener.loaded
    return Selection(
        loaded.name,
        loaded.num_nodes,
        loaded.num_edges,
        solver,
        time_limit,
        listener.solution(interrupted),
        time.monotonic() - began,
        peak_bytes,
        tuple(listener.history),
        listener.steps,
        listener.conflict,
        failure,
    )


class _Listener:
    """Keeps the best of what the solver's process says.

    Attributes:
        loaded: Size of the problem.
        choice: Best choice so far.
        history: What was known when.
        steps: What presolve removed.
        conflict: Why nothing fits.
        finished: Whether the solver returned.
    """

    def __init__(self, began: float, report: Report | None) -> None:
        self._began = began
        self._report = report
        self._cost, self._bound = math.inf, -math.inf
        self._solution: Solution | None = None
        self.loaded = Loaded("", 0, 0)
        self.choice: Choice | None = None
        self.history: list[Known] = []
        self.steps: tuple[Step, ...] = ()
        self.conflict: Conflict | None = None

    @property
    def finished(self) -> bool:
        """Whether the solver returned."""
        return self._solution is not None

    @property
    def complete(self) -> bool:
        """Whether there is nothing more to come."""
        infeasible = self._solution is not None and self._solution.termination is Termination.INFEASIBLE
        return self.finished and (self.conflict is not None or not infeasible)

    def take(self, message: Message) -> None:
        """Take note of a message.

        Raises:
            AutoparError: If it says that the request cannot be done.
        """
        match message:
            case Loaded():
                self.loaded = message
            case Reductions(steps):
                self.steps = steps
            case Better():
                self._improve(message)
            case Done(solution):
                self._solution = solution
                self.choice = solution.choice
            case Explained(conflict):
                self.conflict = conflict
            case Refused(error):
                raise error

    def _improve(self, message: Better) -> None:
        """Take what is better; parts of a solver may know less than the whole."""
        choice = message.choice if message.cost < self._cost else None
        if choice is None and message.bound <= self._bound:
            return
        if choice is not None:
            self.choice, self._cost = choice, message.cost
        self._bound = max(self._bound, message.bound)
        known = Known(message.time - self._began, self._cost, min(self._bound, self._cost))
        self.history.append(known)
        if self._report is not None:
            self._report(known, choice)

    def solution(self, interrupted: bool) -> Solution:
        """Return what the solver returned, or what it had when it was cut off."""
        if self._solution is not None:
            return self._solution
        cost, bound = self._cost, min(self._bound, self._cost)
        if self.choice is None and bound == math.inf:
            termination = Termination.INFEASIBLE
        elif self.choice is not None and relative_gap(cost, bound) <= OPTIMALITY_TOLERANCE:
            termination = Termination.OPTIMAL
        elif interrupted:
            termination = Termination.INTERRUPTED
        else:
            termination = Termination.UNKNOWN if self.choice is None else Termination.FEASIBLE
        return Solution(termination, self.choice, cost, bound)


def _start(threads: int) -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start the solver's process.

    Its standard output goes nowhere: libraries that print must not come between a choice and its reader.
    """
    ours, theirs = Pipe()
    path = [str(folder) for folder in sys.path]
    code = f"import sys; sys.path[:] = {path!r}; from autopar.selection.worker import serve; serve({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        env=os.environ | dict.fromkeys(_THREADS, str(threads)),
        start_new_session=True,  # Ctrl-C is for us alone
    )
    theirs.close()
    return process, ours


def _end(process: "subprocess.Popen[bytes]", patience: float) -> float:
    """End a process that has not ended by itself after some seconds, and return its peak memory in bytes."""
    end = time.monotonic() + patience
    number, status, usage = os.wait4(process.pid, os.WNOHANG)
    while not number and time.monotonic() < end:
        time.sleep(0.005)
        number, status, usage = os.wait4(process.pid, os.WNOHANG)
    if not number:
        os.kill(process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return 1024.0 * usage.ru_maxrss


def _death(code: int) -> str:
    """Return in words how a process died."""
    if code >= 0:
        return f"ended without an answer, with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
