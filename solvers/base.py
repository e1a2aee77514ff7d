"""The solver interface: `Solver`, and the `Budget` (time, work, targets, incumbent, lower bound) one solve runs under.

A new solver subclasses `Solver` and implements `run`; termination status and solution follow from its budget.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
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


class Solver(ABC):
    """Finds a choice for a problem and proves a lower bound on the optimum."""

    counts_work: ClassVar[bool] = False
    """Whether the solver counts its work, so that a work limit stops it."""

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

        Raises:
            SolverError: If the solver cannot take this problem at all.
        """
        budget = Budget(problem, time_limit, start, cutoff, gap, should_stop, threads, seed, watch, work)
        self.run(problem, budget)
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


class Budget:
    """Time, work, interruption and targets of one solve, with its incumbent and its lower bound.

    The budget prices every offered choice by `Problem.cost` and tests it by `Problem.fits`, so no cost or feasibility
    claim of a third-party solver is trusted.

    Attributes:
        start: The caller's warm start, feasible or not.
        choice: The incumbent.
        cost: Cost of the incumbent.
        bound: Best proven lower bound.
        gap: Relative difference of cost and bound at which to stop.
        interrupted: Whether `should_stop` has returned true.
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
        self.interrupted = False
        self.choice: Choice | None = None
        self.cost: float = math.inf
        self.bound: float = -math.inf
        if start is not None:
            self.offer(start)

    @property
    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def upper(self) -> float:
        """Cost from which on choices are of no interest: the incumbent's or the cutoff."""
        return min(self.cost, self._cutoff)

    def limited_to(self, seconds: float) -> "Budget":
        """Return a copy of this budget that ends after `seconds`, or with this budget if that is sooner."""
        result = copy(self)
        result._end = min(self._end, time.monotonic() + seconds)
        return result

    def for_subproblem(self, problem: Problem, share: float, start: Sequence[int] | None, watch: Watch) -> "Budget":
        """Return the budget of a subproblem: `share` of the time and work left, stopped together with this budget."""
        work = Work(share * self.work.left, self.work)
        limit = share * self.remaining
        return Budget(problem, limit, start, math.inf, self.gap, self.stopped, self.threads, self.seed, watch, work)

    def adopt(self, part: "Budget") -> None:
        """Copy the incumbent and bound of `part`, a copy of this budget, if they are better."""
        if part.cost < self.cost:
            self.choice, self.cost = part.choice, part.cost
        self.bound = max(self.bound, part.bound)
        self.interrupted = self.interrupted or part.interrupted

    def spent(self) -> bool:
        """Return whether to stop now: out of time or work, interrupted, or targets met."""
        return self.stopped() or self.remaining == 0.0 or self.work.left == 0.0 or self.targets_met()

    def stopped(self) -> bool:
        """Return whether the caller asked for an interruption."""
        if self._should_stop is not None and self._should_stop():
            self.interrupted = True
        return self.interrupted

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
        if cost < self.cost:
            self.choice, self.cost = candidate, cost
            self._notify()
        return True

    def raise_bound(self, bound: float, error: float = OPTIMALITY_TOLERANCE) -> None:
        """Raise the lower bound to `bound`, true up to the relative `error`; for whole costs it is rounded up."""
        if self._problem.is_whole and math.isfinite(bound):
            bound = math.ceil(bound - max(1e-3, error * abs(bound)))
        if bound > self.bound:
            self.bound = bound
            self._notify()

    def _notify(self) -> None:
        if self._watch is not None:
            self._watch(self.choice, self.cost, min(self.bound, self.cost))

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
