"""The default: exact reductions first, a linear program only for what they leave, limits by prices, branching last.

1. Forbidden strategies go, parallel edges merge (`field.prepare`).
2. Without limits: nodes of degree <= 2 are eliminated; the core is eliminated as well if its tables stay small, else it is a linear program.
   If the choice fits, it is optimal.
3. Limits: their prices are raised by cutting planes, each step being step 2 with priced use added to the costs; choices on the way are
   repaired and descended into incumbents.
4. Labels and pairs that provably cannot lead below the incumbent go (min-marginals at the best prices), and what is left is branched on.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE, Problem, Solution
from autopar.solvers import highs, lazy
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.eliminate import Marginals, eliminate, eliminate_all, order_of
from autopar.solvers.field import Field, Floats, Prepared, prepare
from autopar.solvers.local import State, descend, repair
from autopar.solvers.memory import Memory
from autopar.solvers.prices import Priced, price_limits

MAX_ENTRIES = 2_000_000
"""Largest table of an exact elimination (16 MB)."""
MAX_WORK = 40_000_000
"""Entries of all tables of an exact elimination, times how often each is added up; about half a second."""


FIRST_STEP = 1e-4
"""How far above the bound, relative, a choice is looked for first."""


class Auto(Solver):
    """Exact; the method is described at the top of the module."""

    def solve(
        self,
        problem: Problem,
        *,
        time_limit: float = math.inf,
        start: Sequence[int] | None = None,
        cutoff: float = math.inf,
        gap: float = OPTIMALITY_TOLERANCE,
        should_stop: Callable[[], bool] | None = None,
    ) -> Solution:
        """See `Solver.solve`."""
        budget = Budget(problem, time_limit, start, cutoff, gap, should_stop)
        prepared = prepare(problem)
        if prepared is None:
            budget.raise_bound(math.inf)
            return budget.solution()
        _Search(problem, prepared, budget).run()
        return budget.solution()


class _Search:
    """One run on one problem."""

    def __init__(self, problem: Problem, prepared: Prepared, budget: Budget) -> None:
        self._field = prepared.field
        self._prepared = prepared
        self._budget = budget
        self._memory = Memory.of(problem, prepared.labels)
        self._best = Priced(np.zeros(self._memory.num_rows), -math.inf)
        self._step = 0.0

    def run(self) -> None:
        """Raise the bound and offer choices until the budget is done."""
        if self._memory.hopeless():
            self._budget.raise_bound(math.inf)
            return
        relaxed = self._minimise(self._field)
        if relaxed is None:
            self._settle()
            return
        labels, bound = relaxed
        self._budget.raise_bound(bound, EXACT)
        if self._offer(labels) or self._budget.spent():
            return
        self._price(labels, bound)
        if not self._budget.spent():
            self._branch()

    def _offer(self, labels: Sequence[int]) -> bool:
        return self._budget.offer(self._prepared.strategies(labels))

    def _settle(self) -> None:
        """Find any choice with the little that is left of the budget."""
        self._improve([int(u.argmin()) for u in self._field.unary])

    def _improve(self, labels: Sequence[int]) -> None:
        state = State(self._field, self._memory, labels)
        if repair(state, self._budget):
            descend(state, self._budget)
            self._offer(state.labels)

    def _minimise(self, field: Field) -> tuple[list[int], float] | None:
        """Return a minimiser of `field` without limits and a lower bound on its minimum; None if the budget ran out first."""
        reduced = eliminate(field)
        core = reduced.field
        order = order_of(core, MAX_ENTRIES, MAX_WORK)
        if order is not None:
            eliminated = eliminate_all(core, order, self._budget)
            if eliminated is None:
                return None
            return reduced.invert(eliminated.choice()), eliminated.optimum
        bounds = [-math.inf]
        unlimited = Memory.unlimited()
        labels = lazy.minimise(core, unlimited, self._budget, highs.run, lambda _: True, report=bounds.append)
        if labels is None:
            return None
        return reduced.invert(labels), max(bounds)

    def _price(self, labels: Sequence[int], bound: float) -> None:
        """Raise the bound by prices of the limits, and collect incumbents."""
        sizes = [len(u) for u in self._field.unary]
        first: list[tuple[list[int], float] | None] = [(list(labels), bound)]

        def oracle(prices: Floats) -> tuple[list[int], float, float] | None:
            answer = first.pop() if first else self._minimise(self._priced(prices, sizes))
            if answer is None:
                return None
            found, total = answer
            return found, total - float(prices @ self._memory.profile(found)), total

        visited: set[tuple[int, ...]] = set()

        def visit(found: list[int], prices: Floats) -> None:
            if tuple(found) not in visited:
                visited.add(tuple(found))
                self._improve(found)

        self._best = price_limits(oracle, self._memory, self._budget, self._field.highest_cost(), visit)

    def _priced(self, prices: Floats, sizes: Sequence[int]) -> Field:
        field = self._field.copy()
        field.unary = [u + p for u, p in zip(field.unary, self._memory.prices(prices, sizes), strict=True)]
        return field

    def _branch(self) -> None:
        """Look for a choice just above the bound, then a little further up, until there is one or the incumbent is reached.

        Below a low ceiling little is left to branch on, and finding nothing there raises the bound to the ceiling.
        """
        marginals = self._marginals()
        while not self._budget.spent():
            bound, upper = self._budget.bound, self._budget.upper
            ceiling = upper
            if marginals is not None:
                step = max(FIRST_STEP * abs(bound), self._step)
                self._step = 4 * step
                ceiling = upper if bound + 2 * step >= upper else bound + step
            self._branch_below(ceiling, marginals)
            if marginals is None or ceiling == upper:
                return

    def _branch_below(self, ceiling: float, marginals: Marginals | None) -> None:
        """Find the best choice that costs less than `ceiling`, or raise the bound to it."""
        field, memory = self._field, self._memory
        if marginals is not None and math.isfinite(ceiling):
            field = marginals.below(field, ceiling - self._best.bound + OPTIMALITY_TOLERANCE * abs(self._best.bound))
        if not field.propagate():
            self._budget.raise_bound(ceiling)
            return
        alive = tuple(np.flatnonzero(np.isfinite(u)) for u in field.unary)
        memory = memory.restrict(alive)
        if memory.hopeless():
            self._budget.raise_bound(ceiling)
            return
        reduced = eliminate(field.restrict(alive), keep=memory.users())

        def offer(core_labels: list[int]) -> bool:
            labels = reduced.invert(core_labels)
            return self._offer([int(kept[label]) for kept, label in zip(alive, labels, strict=True)])

        # What was dropped costs at least the ceiling, so a bound of what is left holds up to there.
        lazy.minimise(
            reduced.field,
            memory,
            self._budget,
            highs.run,
            offer,
            report=lambda bound: self._budget.raise_bound(min(bound, ceiling)),
        )

    def _marginals(self) -> Marginals | None:
        """Return the min-marginals at the best prices; None if elimination would take too much or the budget ran out."""
        order = order_of(self._field, MAX_ENTRIES, MAX_WORK)
        if order is None:
            return None
        priced = self._priced(self._best.prices, [len(u) for u in self._field.unary])
        eliminated = eliminate_all(priced, order, self._budget)
        return None if eliminated is None else eliminated.marginals()
