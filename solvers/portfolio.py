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
from autopar.solvers.base import Budget, Solver, Watch
from autopar.solvers.dominance import undominated
from autopar.solvers.field import Ints, Prepared, prepare
from autopar.solvers.flat import Flat, FlatMemory
from autopar.solvers.improve import Guide, Improver
from autopar.solvers.memory import Memory
from autopar.solvers.merge import Merged, merge
from autopar.solvers.relaxation import PEAKS, Relaxation, peaks
from autopar.solvers.team import improve_together

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


@dataclass(frozen=True, slots=True)
class Portfolio(Solver):
    """Anytime: a choice and a bound at every size.

    Attributes:
        max_rounds: Rounds of the dual at most.
        max_parts: Parts of the search at most, per thread. With both limits, one thread and no limit of time, equal
            seeds give equal results.
    """

    max_rounds: int | None = None
    max_parts: int | None = None

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
    ) -> Solution:
        """See `Solver.solve`.

        `should_stop` may be called from several threads, `watch` is called from the caller's only. The search draws
        from `seed`.
        """
        budget = Budget(problem, time_limit, start, cutoff, gap, should_stop)
        prepared = prepare(problem)
        merged = None if prepared is None else merge(prepared.field, Memory.of(problem, prepared.labels))
        if prepared is None or merged is None or merged.memory.hopeless():
            budget.raise_bound(math.inf)
            return budget.solution()
        _Run(self, prepared, merged, budget, threads, seed, watch).run()
        return budget.solution()


class _Run:
    """One run on one problem."""

    def __init__(
        self,
        options: Portfolio,
        prepared: Prepared,
        merged: Merged,
        budget: Budget,
        threads: int,
        seed: int,
        watch: Watch | None,
    ) -> None:
        self._options = options
        self._threads = threads
        self._seed = seed
        self._watch = watch
        self._prepared = prepared
        self._merged = merged
        self._budget = budget
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
        if best is not None and not self._budget.spent():
            self._improve(merged, relaxation, best)

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

    def _improve(self, merged: Merged, relaxation: Relaxation, best: Ints) -> None:
        """Search until the time is up."""
        guide = Guide(*relaxation.rises())
        flat, memory = relaxation.flat, relaxation.memory
        improvers = [
            Improver(merged.field, flat, memory, best, guide, self._seed + k) for k in range(max(1, self._threads))
        ]
        offered, last = improvers[0].cost, time.monotonic()

        def report(labels: Ints, cost: float) -> None:
            nonlocal offered, last
            if cost < offered and time.monotonic() - last >= OFFER_SECONDS:
                self._offer(merged, labels)
                offered, last = cost, time.monotonic()

        labels, cost = improve_together(improvers, self._budget, self._options.max_parts, report)
        if cost < offered:
            self._offer(merged, labels)

    def _offer(self, merged: Merged, labels: Ints) -> bool:
        fits = self._budget.offer(self._prepared.strategies(merged.invert(labels.tolist())))
        self._tell()
        return fits

    def _tell(self) -> None:
        now = (self._budget.cost, min(self._budget.bound, self._budget.cost))
        if self._watch is not None and now != self._told:
            self._watch(self._budget.choice, *now)
        self._told = now
