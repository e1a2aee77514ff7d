"""The solver interface: `Solver`, and the `Budget` (time, work, targets, incumbent, lower bound) one solve runs under.

A new solver subclasses `Solver` and implements `run`; termination status and solution follow from its budget.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from threading import Lock, get_ident
from typing import ClassVar

from autopar.problem import OPTIMALITY_TOLERANCE, Choice, Problem, Solution, Termination, relative_gap

EXACT = 1e-12
"""Relative error of a bound that is a plain sum in float64."""


class Work:
    """Counter of deterministic work, so that a work limit stops a solve at the same point on every machine.

    A unit takes about a nanosecond: one table entry added up, one nonzero visited by a simplex step.

    Args:
        limit: Units allowed; infinity for no limit.
        parent: Counter that these units are also charged to.
    """

    def __init__(self, limit: float = math.inf, parent: "Work | None" = None) -> None:
        self._limit, self._parent = limit, parent
        self.done = 0.0
        """Units counted so far."""

    @property
    def left(self) -> float:
        """Units left, at least 0, here and in the parent."""
        own = max(0.0, self._limit - self.done)
        return own if self._parent is None else min(own, self._parent.left)

    def spend(self, units: float) -> None:
        """Count units."""
        self.done += units
        if self._parent is not None:
            self._parent.spend(units)


Watch = Callable[[Choice | None, float, float], None]
"""(incumbent, its cost, proven lower bound); the incumbent is None and its cost infinity before the first."""

Outside = Callable[[], tuple[Choice | None, float] | None]
"""Returns the newest (choice, lower bound) that another solver found for this problem; None if there is nothing new."""


class Solver(ABC):
    """Finds a choice for a problem and proves a lower bound on the optimum."""

    counts_work: ClassVar[bool] = False
    """Whether the solver counts its work, so that a work limit stops it."""

    def companion(self, number: int) -> "Solver":
        """Return the solver of process `number` of several that solve one problem and share what they find.

        Number 0 is this solver; the others have other seeds, and may leave out what one of them is enough for.
        """
        return self

    def solve(
        self,
        problem: Problem,
        *,
        time_limit: float = math.inf,
        start: Sequence[int] | None = None,
        cutoff: float = math.inf,
        gap: float = OPTIMALITY_TOLERANCE,
        should_stop: Callable[[], bool] | None = None,
        threads: int = 1,
        seed: int = 0,
        watch: Watch | None = None,
        work: Work | None = None,
        outside: Outside | None = None,
    ) -> Solution:
        """Return the best choice found and the best bound proven.

        Args:
            problem: What to solve.
            time_limit: Seconds of wall time; met to within one step of the method.
            start: Warm start; ignored if it is forbidden or breaks a limit.
            cutoff: Stop once the lower bound proves that no choice costs less than this.
            gap: Stop once cost and bound agree to this, relative to the cost. A solution is called optimal only
                if they agree to `OPTIMALITY_TOLERANCE`, whatever `gap` is.
            should_stop: Polled between steps; the solver returns its incumbent and bound once this is true.
            threads: Threads the solver may use; most solvers use one.
            seed: Seed of every random draw.
            watch: Called after each new incumbent and each rise of the lower bound.
            work: Counter of the solver's work; a solver with `counts_work` stops when none is left.
            outside: Polled between steps for what other solvers of the problem have found. Choices are priced and
                tested like the solver's own; a bound is taken as it is.

        Raises:
            SolverError: If the solver cannot take this problem at all.
        """
        budget = Budget(problem, time_limit, start, cutoff, gap, should_stop, threads, seed, watch, work, outside)
        self.run(problem, budget)
        budget.report()
        return budget.solution()

    @abstractmethod
    def run(self, problem: Problem, budget: "Budget") -> None:
        """Offer choices to the budget and raise its bound until the budget is spent or the method has finished.

        Termination status, cost and bound of the `Solution` follow from the budget.

        Args:
            problem: What to solve.
            budget: Holds the arguments of `solve`.

        Raises:
            SolverError: If the solver cannot take this problem at all.
        """


class _Record:
    """Incumbent and lower bound of one solve, shared by the copies of its budget in all threads."""

    __slots__ = ("bound", "choice", "cost", "improved", "interrupted", "lock", "owner", "unreported")

    def __init__(self) -> None:
        self.choice: Choice | None = None
        self.cost: float = math.inf
        self.improved = time.monotonic()
        self.bound: float = -math.inf
        self.interrupted = False
        self.lock = Lock()
        self.owner = get_ident()
        self.unreported = False


class Budget:
    """Time, work, interruption and targets of one solve, with its incumbent and its lower bound.

    The budget prices every offered choice by `Problem.cost` and tests it by `Problem.fits`, so no cost or feasibility
    claim of a third-party solver is trusted. Threads may share it: each offers choices and raises the bound, and the
    caller's thread calls `watch`.

    Attributes:
        start: The caller's warm start, feasible or not.
        gap: Relative difference of cost and bound at which to stop.
        threads: Threads that may be used.
        seed: Seed of every random draw.
        work: Counter of the work done.
    """

    def __init__(
        self,
        problem: Problem,
        time_limit: float,
        start: Sequence[int] | None,
        cutoff: float,
        gap: float,
        should_stop: Callable[[], bool] | None,
        threads: int = 1,
        seed: int = 0,
        watch: Watch | None = None,
        work: Work | None = None,
        outside: Outside | None = None,
    ) -> None:
        self._problem = problem
        self._end = time.monotonic() + time_limit
        self._cutoff = cutoff
        self.gap = gap
        self._should_stop = should_stop
        self._watch = watch
        self.start = start
        self.threads = threads
        self.seed = seed
        self.work = Work() if work is None else work
        self._outside = outside
        self._also_stop: Callable[[], bool] | None = None
        self._record = _Record()
        if start is not None:
            self.offer(start)

    @property
    def choice(self) -> Choice | None:
        """The incumbent."""
        return self._record.choice

    @property
    def cost(self) -> float:
        """Cost of the incumbent; infinity before the first."""
        return self._record.cost

    @property
    def bound(self) -> float:
        """Best proven lower bound."""
        return self._record.bound

    @property
    def interrupted(self) -> bool:
        """Whether `should_stop` has returned true."""
        return self._record.interrupted

    @property
    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def stagnated(self) -> float:
        """Seconds since the last incumbent, or since the begin of the solve before the first."""
        return time.monotonic() - self._record.improved

    @property
    def upper(self) -> float:
        """Cost from which on choices are of no interest: the incumbent's or the cutoff."""
        return min(self.cost, self._cutoff)

    def limited_to(self, seconds: float) -> "Budget":
        """Return a budget of the same solve that ends after `seconds`, or with this budget if that is sooner."""
        result = copy(self)
        result._end = min(self._end, time.monotonic() + seconds)
        return result

    def stopped_by(self, should_stop: Callable[[], bool]) -> "Budget":
        """Return a budget of the same solve that also stops once `should_stop` is true."""
        result = copy(self)
        result._also_stop = should_stop
        return result

    def for_subproblem(self, problem: Problem, share: float, start: Sequence[int] | None, watch: Watch) -> "Budget":
        """Return the budget of a subproblem: `share` of the time and work left, stopped together with this budget."""
        work = Work(share * self.work.left, self.work)
        limit = share * self.remaining
        return Budget(problem, limit, start, math.inf, self.gap, self.stopped, self.threads, self.seed, watch, work)

    def spent(self) -> bool:
        """Return whether to stop now: out of time or work, interrupted, or targets met."""
        self.report()
        return self.stopped() or self.remaining == 0.0 or self.work.left == 0.0 or self.targets_met()

    def stopped(self) -> bool:
        """Return whether the caller asked for an interruption, or this part of the solve has to stop."""
        if self._should_stop is not None and self._should_stop():
            self._record.interrupted = True
        return self._record.interrupted or (self._also_stop is not None and self._also_stop())

    def targets_met(self) -> bool:
        """Return whether cost and bound meet the cutoff or the gap."""
        return self.bound >= self._cutoff or (
            self.choice is not None and relative_gap(self.cost, self.bound) <= self.gap
        )

    def offer(self, choice: Sequence[int]) -> bool:
        """Make `choice` the incumbent if it is cheaper; return whether it is permitted and within the limits."""
        candidate = tuple(map(int, choice))
        cost = self._problem.cost(candidate)
        if cost == math.inf or not self._problem.fits(candidate):
            return False
        record = self._record
        with record.lock:
            if cost >= record.cost:
                return True
            record.choice, record.cost, record.improved = candidate, cost, time.monotonic()
        self._notify()
        return True

    def raise_bound(self, bound: float, error: float = OPTIMALITY_TOLERANCE) -> None:
        """Raise the lower bound to `bound`, true up to the relative `error`; for whole costs it is rounded up."""
        if self._problem.is_whole and math.isfinite(bound):
            bound = math.ceil(bound - max(1e-3, error * abs(bound)))
        record = self._record
        with record.lock:
            if bound <= record.bound:
                return
            record.bound = bound
        self._notify()

    def report(self) -> None:
        """In the caller's thread: take what other solvers found, and tell `watch` what other threads found."""
        record = self._record
        if get_ident() != record.owner:
            return
        if self._outside is not None and (found := self._outside()) is not None:
            choice, bound = found
            if choice is not None:
                self.offer(choice)
            with record.lock:
                record.bound = max(record.bound, bound)
        if record.unreported:
            self._notify()

    def _notify(self) -> None:
        record = self._record
        if self._watch is None:
            return
        if get_ident() != record.owner:
            record.unreported = True
            return
        record.unreported = False
        with record.lock:
            known = (record.choice, record.cost, min(record.bound, record.cost))
        self._watch(*known)

    def solution(self) -> Solution:
        """Return the incumbent and bound with the termination status they imply."""
        bound = min(self.bound, self.cost)
        if self.choice is None:
            if bound == math.inf:
                termination = Termination.INFEASIBLE
            elif bound >= self._cutoff:
                termination = Termination.CUTOFF
            else:
                termination = Termination.INTERRUPTED if self.interrupted else Termination.UNKNOWN
        elif relative_gap(self.cost, bound) <= OPTIMALITY_TOLERANCE:
            termination = Termination.OPTIMAL
        elif bound >= self._cutoff:
            termination = Termination.CUTOFF
        else:
            termination = Termination.INTERRUPTED if self.interrupted else Termination.FEASIBLE
        return Solution(termination, self.choice, self.cost, bound)
