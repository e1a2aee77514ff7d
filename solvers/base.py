"""What every solver is, and the budget it works under."""

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
    """Work that is counted, so that what a limit cuts is the same on a slow machine as on a fast one.

    A unit takes about a nanosecond: a number that is added up, a nonzero that a step of a linear program looks at.

    Args:
        limit: Units at most; infinity for any number.
        whole: What this is a part of: units are counted there as well.
    """

    def __init__(self, limit: float = math.inf, whole: "Work | None" = None) -> None:
        self._limit, self._whole = limit, whole
        self.done = 0.0
        """Units so far."""

    @property
    def left(self) -> float:
        """Units left, at least 0."""
        own = max(0.0, self._limit - self.done)
        return own if self._whole is None else min(own, self._whole.left)

    def spend(self, units: float) -> None:
        """Count units."""
        self.done += units
        if self._whole is not None:
            self._whole.spend(units)


Watch = Callable[[Choice | None, float, float], None]
"""(best choice, its cost, proven lower bound), None and infinity before the first choice."""


class Solver(ABC):
    """Finds a choice for a problem and proves what it can."""

    counts: ClassVar[bool] = False
    """Whether it counts its work, so that a limit of work ends it."""

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
            start: A choice to begin from; ignored if it is forbidden or does not fit.
            cutoff: Stop as soon as the bound proves that no choice costs less than this.
            gap: Stop as soon as cost and bound agree to this, relative to the cost. A solution is called optimal only
                if they agree to `OPTIMALITY_TOLERANCE`, whatever `gap` is.
            should_stop: Polled between steps; the solver returns what it has once this is true.
            threads: Threads it may use; most solvers use one.
            seed: Of whatever is drawn at random.
            watch: Called with what is known whenever a better choice or a higher bound is.
            work: What it does is counted here, and it ends when nothing is left, if it `counts`.

        Raises:
            SolverError: If the solver cannot take this problem at all.
        """
        budget = Budget(problem, time_limit, start, cutoff, gap, should_stop, threads, seed, watch, work)
        self.run(problem, budget)
        return budget.solution()

    @abstractmethod
    def run(self, problem: Problem, budget: "Budget") -> None:
        """Offer choices to the budget and raise its bound until it is spent, or nothing more can be done.

        This is all a solver has to write: what it found and proved, and why it stopped, follow from the budget.

        Args:
            problem: What to solve.
            budget: Holds the arguments of `solve`.

        Raises:
            SolverError: If the solver cannot take this problem at all.
        """


class Budget:
    """Time, interruption and the targets of one call, and the best choice and bound so far.

    A choice is taken only if the problem itself finds it permitted and fitting, so nothing a third-party code reports
    is trusted.

    Attributes:
        start: The choice the caller gave to begin from, fitting or not.
        choice: Best choice so far.
        cost: Its cost.
        bound: Best proven lower bound so far.
        gap: Cost and bound that agree to this, relative to the cost, are enough.
        interrupted: Whether `should_stop` has said so.
        threads: Threads that may be used.
        seed: Of whatever is drawn at random.
        work: Counts what is done.
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
        """Cost that is of no interest any more: the incumbent's or the cutoff."""
        return min(self.cost, self._cutoff)

    def part(self, seconds: float) -> "Budget":
        """Return a budget that begins where this one is and ends after `seconds`, or with this one."""
        result = copy(self)
        result._end = min(self._end, time.monotonic() + seconds)
        return result

    def apart(self, problem: Problem, share: float, start: Sequence[int] | None, watch: Watch) -> "Budget":
        """Return a budget for another problem, of a share of what is left, that ends when the caller wants an end."""
        work = Work(share * self.work.left, self.work)
        limit = share * self.remaining
        return Budget(problem, limit, start, math.inf, self.gap, self.stopped, self.threads, self.seed, watch, work)

    def adopt(self, part: "Budget") -> None:
        """Take what was found under a part of this budget."""
        if part.cost < self.cost:
            self.choice, self.cost = part.choice, part.cost
        self.bound = max(self.bound, part.bound)
        self.interrupted = self.interrupted or part.interrupted

    def spent(self) -> bool:
        """Return whether to stop now: out of time or work, interrupted, or done."""
        return self.stopped() or self.remaining == 0.0 or self.work.left == 0.0 or self.done()

    def stopped(self) -> bool:
        """Return whether the caller wants an end."""
        if self._should_stop is not None and self._should_stop():
            self.interrupted = True
        return self.interrupted

    def done(self) -> bool:
        """Return whether cost and bound meet the caller's targets."""
        return self.bound >= self._cutoff or (
            self.choice is not None and relative_gap(self.cost, self.bound) <= self.gap
        )

    def offer(self, choice: Sequence[int]) -> bool:
        """Take `choice` if it is the cheapest so far; return whether it is permitted and fits."""
        candidate = tuple(map(int, choice))
        cost = self._problem.cost(candidate)
        if cost == math.inf or not self._problem.fits(candidate):
            return False
        if cost < self.cost:
            self.choice, self.cost = candidate, cost
            self._tell()
        return True

    def raise_bound(self, bound: float, error: float = OPTIMALITY_TOLERANCE) -> None:
        """Take a lower bound that is true to the relative `error`, rounded up to a cost there can be."""
        if self._problem.is_whole and math.isfinite(bound):
            bound = math.ceil(bound - max(1e-3, error * abs(bound)))
        if bound > self.bound:
            self.bound = bound
            self._tell()

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch(self.choice, self.cost, min(self.bound, self.cost))

    def solution(self) -> Solution:
        """Return what was found, with the termination that follows from it."""
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
