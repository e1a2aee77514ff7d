"""The clock and its keeper: the solver's processes are cut off when the time is over, whatever they are doing.

A solver may sit in a library that looks at no clock and no flag, so it is not asked to stop, and what it has found is
not fetched at the end: every choice and bound comes over a pipe the moment it is found, and the process is killed.
Several processes solve the problem with different seeds, and each is told what the others have found.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autopar import iopddl
from autopar.engines import EngineRequest
from autopar.errors import SolverError
from autopar.problem import OPTIMALITY_TOLERANCE, Choice, Solution, Termination, relative_gap
from autopar.selection.crew import Crew, LocalCrew
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
"""Seconds kept for printing a choice and for the end of all processes; one of gigabytes takes a while to die."""
_RAY_LAST_WORDS = 3.0
"""Seconds kept in addition for the end of a Ray cluster."""
_EARLY = 0.35
"""Seconds by which a solver that looks at the clock has to be done earlier than it is cut off."""
_LAST_SHARE, _EARLY_SHARE = 0.25, 0.1
"""Of a short limit, at most these parts are kept for either: ending takes longer on a machine that has other work."""
_TICK = 0.05
"""Seconds between two looks at whether somebody wants an end."""
_SEEDS = 1_000_003
"""Difference between the seeds of two processes; threads of one use consecutive seeds."""

Report = Callable[[Known, Choice | None], None]
"""Called with what is known, and with the choice if it is a new one."""


def select(
    path: str | Path,
    *,
    time_limit: float,
    solver: str = "portfolio",
    threads: int | None = None,
    seed: int = 0,
    began: float | None = None,
    reductions: bool = False,
    report: Report | None = None,
    should_stop: Callable[[], bool] | None = None,
    engine: EngineRequest | None = None,
) -> Selection:
    """Return the best choice for the problem in a file that a solver finds in the time given, and what it proves.

    Args:
        path: An IOPDDL file, `.json` or `.json.gz`.
        time_limit: Seconds of wall time; this returns before they are over, reading and cutting off included.
        solver: Name of the solver.
        threads: Threads of each process; by default two in a single process, one in each of several.
        seed: Of what it draws at random.
        began: When the time began, on the monotonic clock; now by default.
        reductions: Whether to record what presolve removes (which takes some of the time).
        report: Called with everything that gets better, as it does.
        should_stop: Polled all the time; once it is true, the best so far is returned.
        engine: Number of processes that solve the problem together, and where; one here by default.

    Raises:
        ProblemError: If the file is not a problem.
        SolverError: If there is no such solver, it refuses the problem, or all its processes die before one has found
            anything.
        WorkerError: If a Ray cluster is of no use.
    """
    began = time.monotonic() if began is None else began
    engine = EngineRequest() if engine is None else engine
    on_ray = engine.name == "ray"
    last = min(_LAST_WORDS + _RAY_LAST_WORDS * on_ray, _LAST_SHARE * time_limit)
    cut = began + time_limit - last
    end = cut - min(_EARLY, _EARLY_SHARE * time_limit)

    def requests(size: int) -> list[Request]:
        each = threads or (2 if size == 1 else 1)
        return [
            Request(str(path), solver, end, each, seed + _SEEDS * number, reductions and number == 0, number)
            for number in range(size)
        ]

    crew = _hired(requests, engine, path)
    size = crew.size
    listener = _Listener(began, report, size)
    interrupted = False
    try:
        while time.monotonic() < cut and not listener.complete:
            if should_stop is not None and should_stop():
                interrupted = True
                break
            for number, message in crew.receive(max(0.0, min(_TICK, cut - time.monotonic()))):
                if message is None:
                    listener.bury(number, crew.death(number))
                    continue
                news = listener.take(message, number)
                for other in range(size if news is not None else 0):
                    if other != number and news is not None:
                        crew.tell(other, news)
    finally:
        peak_bytes = crew.end()
    failure = next(iter(listener.failures), "")
    if failure and listener.choice is None and len(listener.failures) == size:
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
        size,
    )


def _hired(requests: Callable[[int], list[Request]], engine: EngineRequest, path: str | Path) -> Crew:
    """Start the processes; `requests` returns what a number of them are asked."""
    if engine.name == "ray":
        from autopar.selection.ray_crew import RayCrew

        return RayCrew(requests, engine.workers, iopddl.read(path), engine.address)
    return LocalCrew(requests(engine.workers or 1))


class _Listener:
    """Keeps the best of what the solver's processes say.

    Args:
        began: When the time began, on the monotonic clock.
        report: Called with everything that gets better.
        size: Number of processes.

    Attributes:
        loaded: Size of the problem.
        choice: Best choice so far.
        history: What was known when.
        steps: What presolve removed.
        conflict: Why nothing fits.
        failures: How processes died that had not returned, in words.
    """

    def __init__(self, began: float, report: Report | None, size: int = 1) -> None:
        self._began = began
        self._report = report
        self._cost, self._bound = math.inf, -math.inf
        self._left = set(range(size))
        self.failures: list[str] = []
        self.loaded = Loaded("", 0, 0)
        self.choice: Choice | None = None
        self.history: list[Known] = []
        self.steps: tuple[Step, ...] = ()
        self.conflict: Conflict | None = None

    @property
    def complete(self) -> bool:
        """Whether there is nothing more to come: all is known, or all processes have returned or died."""
        if self._is_infeasible:
            return self.conflict is not None or not self._left
        return not self._left or (
            self.choice is not None and relative_gap(self._cost, min(self._bound, self._cost)) <= OPTIMALITY_TOLERANCE
        )

    @property
    def _is_infeasible(self) -> bool:
        return self.choice is None and self._bound == math.inf

    def bury(self, worker: int, death: str) -> None:
        """Take note that a process has ended; one that had returned has not died."""
        if worker in self._left:
            self._left.remove(worker)
            self.failures.append(death)

    def take(self, message: Message, worker: int = 0) -> Better | None:
        """Take note of a message; return what the other processes should know.

        Raises:
            AutoparError: If it says that the request cannot be done.
        """
        match message:
            case Loaded():
                self.loaded = message
            case Reductions(steps):
                self.steps = steps
            case Better():
                return self._improve(message)
            case Done(solution):
                if solution.termination is not Termination.INFEASIBLE:  # else its explanation is still to come
                    self._left.discard(worker)
                return self._improve(Better(time.monotonic(), solution.choice, solution.cost, solution.bound))
            case Explained(conflict):
                self.conflict = conflict
            case Refused(error):
                raise error
        return None

    def _improve(self, message: Better) -> Better | None:
        """Take what is better; parts of a solver may know less than the whole, and so may other processes."""
        choice = message.choice if message.cost < self._cost else None
        if choice is None and message.bound <= self._bound:
            return None
        if choice is not None:
            self.choice, self._cost = choice, message.cost
        self._bound = max(self._bound, message.bound)
        assert self.choice is None or self._bound < math.inf, "a problem with a choice is not infeasible"
        known = Known(message.time - self._began, self._cost, min(self._bound, self._cost))
        self.history.append(known)
        if self._report is not None:
            self._report(known, choice)
        return Better(message.time, choice, self._cost, self._bound)

    def solution(self, interrupted: bool) -> Solution:
        """Return the best choice and bound of all processes, and what they imply."""
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
