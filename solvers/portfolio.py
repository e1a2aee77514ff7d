"""Everything together, for problems of any size: exact where that closes, else a bound from the dual and a search.

1. Forbidden strategies go, parallel edges merge, nodes that follow others are folded into them.
2. Small problems: the exact method of `auto` gets half of the time.
3. Messages and prices (`relaxation`) give a bound, and choices: those that fit on the way, or that fit once the limits
   are made dearer.
4. Labels that provably cost more than the best choice go; if little is left, the exact method gets another chance.
5. Large-neighbourhood search until the time is up.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE, Problem, Solution
from autopar.solvers.auto import exact
from autopar.solvers.base import Budget, Solver
from autopar.solvers.dominance import undominated
from autopar.solvers.field import Ints, Prepared, prepare
from autopar.solvers.flat import Flat, FlatMemory
from autopar.solvers.improve import Guide, Improver
from autopar.solvers.memory import Memory
from autopar.solvers.merge import Merged, merge
from autopar.solvers.relaxation import PEAKS, Relaxation, peaks

SMALL = 150_000
"""Entries of all tables up to which the exact method is tried first; without limits four times as many."""
DUAL_SHARE = 0.25
"""Part of the time that the dual may take."""
EXACT_SHARE = 0.5
"""Part of the time that is left that the exact method may take."""
OFFER_SECONDS = 1.0
"""How often the search hands over what it has found: pricing a choice of the whole problem exactly takes a while."""
SETTLING_ROUNDS = 10
"""Sweeps after a change of prices before a choice is looked at."""

Progress = Callable[[float, float, float], None]
"""(seconds since the start, cost of the best choice, bound), called when either has improved."""


@dataclass(frozen=True, slots=True)
class Portfolio(Solver):
    """Anytime: a choice and a bound at every size.

    Attributes:
        seed: Of the search; equal seeds and work limits give equal results.
        max_rounds: Rounds of the dual at most.
        max_parts: Parts of the search at most.
        progress: Told of every improvement.
    """

    seed: int = 0
    max_rounds: int | None = None
    max_parts: int | None = None
    progress: Progress | None = None

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
        merged = None if prepared is None else merge(prepared.field, Memory.of(problem, prepared.labels))
        if prepared is None or merged is None or merged.memory.hopeless():
            budget.raise_bound(math.inf)
            return budget.solution()
        _Run(self, prepared, merged, budget).run()
        return budget.solution()


class _Run:
    """One run on one problem."""

    def __init__(
        self,
        options: Portfolio,
        prepared: Prepared,
        merged: Merged,
        budget: Budget,
    ) -> None:
        self._options = options
        self._prepared = prepared
        self._merged = merged
        self._budget = budget
        self._begin = time.monotonic()
        self._told = (math.inf, -math.inf)

    def run(self) -> None:
        """Raise the bound and offer choices until the budget is done."""
        if self._size(self._merged) <= SMALL * (1 if self._merged.memory.num_rows else 4):
            self._exact(self._merged)
        if self._budget.spent():
            return
        merged = self._merged.restrict(undominated(self._merged.field, self._merged.memory))
        flat = Flat.of(merged.field.softened())
        relaxation = Relaxation(flat, FlatMemory.of(merged.memory, flat.offsets))
        best = self._bound(merged, relaxation)
        if self._budget.spent():
            return
        if best is None:
            best = self._fit(merged, relaxation)
        bound, rises = relaxation.rises()
        guide = Guide(bound, rises)
        if best is not None and not self._budget.spent():
            self._improve(Improver(merged.field, flat, relaxation.memory, best, guide, self._options.seed), merged)

    def _size(self, merged: Merged) -> int:
        return sum(table.size for table in merged.field.tables.values())

    def _exact(self, merged: Merged) -> None:
        part = self._budget.part(EXACT_SHARE * self._budget.remaining)
        exact(self._prepared, merged, part)
        self._budget.adopt(part)
        self._tell()

    def _bound(self, merged: Merged, relaxation: Relaxation) -> Ints | None:
        """Raise the dual bound; return the cheapest choice that fits on the way."""
        budget = self._budget.part(DUAL_SHARE * self._budget.remaining)
        best, cost = self._known(merged), math.inf
        if best is not None:
            cost = relaxation.flat.cost(best)
        rounds = 0
        while not relaxation.finished and not budget.spent() and rounds != self._options.max_rounds:
            excess = relaxation.round()
            rounds += 1
            if excess.max(initial=0.0) <= 0 and (found := relaxation.flat.cost(relaxation.labels)) < cost:
                best, cost = relaxation.labels.copy(), found
            if relaxation.bound > self._budget.bound:
                self._budget.raise_bound(relaxation.bound, 0.0)
                budget.adopt(self._budget)
        if best is not None:
            self._offer(merged, best)
        self._tell()
        return best

    def _known(self, merged: Merged) -> Ints | None:
        """Return the budget's choice in labels of `merged`, None if it has none there."""
        if self._budget.choice is None or (before := self._prepared.choice(self._budget.choice)) is None:
            return None
        labels = merged.choice(before)
        return None if labels is None else np.array(labels, np.int64)

    def _fit(self, merged: Merged, relaxation: Relaxation) -> Ints | None:
        """Make broken limits dearer until a choice fits."""
        prices = relaxation.best_prices.copy()
        base = 1e-4 * max(abs(relaxation.bound - relaxation.flat.constant), 1e-300)
        while not self._budget.spent():
            labels = relaxation.settle(prices, SETTLING_ROUNDS)
            excess = relaxation.excess(labels)
            if excess.max(initial=0.0) <= 0:
                if self._offer(merged, labels):
                    return labels
                return None
            if base > 1e6 * abs(relaxation.bound):
                return None
            for t in peaks(excess, PEAKS).tolist():
                prices[t] += base / relaxation.memory.scales[t]
            base *= 1.2
        return None

    def _improve(self, improver: Improver, merged: Merged) -> None:
        offered, last = improver.cost, time.monotonic()
        while not self._budget.spent() and improver.parts != self._options.max_parts:
            improver.step(self._budget.part)
            if improver.cost < offered and time.monotonic() - last >= OFFER_SECONDS:
                offered, last = improver.cost, time.monotonic()
                self._offer(merged, improver.labels)
        if improver.cost < offered:
            self._offer(merged, improver.labels)

    def _offer(self, merged: Merged, labels: Ints) -> bool:
        fits = self._budget.offer(self._prepared.strategies(merged.invert(labels.tolist())))
        self._tell()
        return fits

    def _tell(self) -> None:
        now = (self._budget.cost, self._budget.bound)
        if self._options.progress is not None and now != self._told:
            self._options.progress(time.monotonic() - self._begin, *now)
        self._told = now
