"""Everything together, for problems of any size: exact where that closes, else a bound from the dual and a search.

1. Forbidden strategies go, parallel edges merge, nodes that follow others are folded into them.
2. Small problems: after a quick look for a choice the exact method of `auto` gets half of the time.
3. Messages and prices (`relaxation`) give a bound, and choices, which are made to fit and made cheap while the bound
   rises (`polish`); a second thread does that if there is one.
4. Labels that provably cost more than the best choice go; if no more than a middling problem is left, the exact
   method gets half of the time that is left.
5. Search until the time is up (`improve`), in the way that gains most; while the dual is not finished, one thread gives
   it half its time, and polishes what it chooses.
"""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from threading import Event

import numpy as np

from autopar.problem import Problem
from autopar.solvers.auto import exact
from autopar.solvers.base import Budget, Solver
from autopar.solvers.bounds.lagrangian_dual import PEAKS, WINDOW, Relaxation, peaks
from autopar.solvers.local_search.coordinate_descent import frugal
from autopar.solvers.local_search.improve import Guide, Improver
from autopar.solvers.local_search.parallel_search import improve_together
from autopar.solvers.local_search.polish import FIRST_ROUND, Polisher
from autopar.solvers.model.csr import Flat, FlatMemory
from autopar.solvers.model.graphical_model import Ints, Prepared, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.components import settle, solve_apart
from autopar.solvers.reductions.contraction import Merged, merge
from autopar.solvers.reductions.dominance import undominated

SMALL = 150_000
"""Entries of all tables up to which the exact method is tried first; without limits four times as many."""
MIDDLING = 700_000
"""Entries of all tables up to which it is tried once labels have gone."""
SHORT = 20.0
"""Seconds below which the choice of least use is offered before anything else, lest there be none in the end."""
FIRST_SEARCH_SHARE = 0.2
"""Part of the time that is left for the search before that."""
DUAL_SHARE = 0.25
"""Part of the time that the dual may take."""
EXACT_SHARE = 0.5
"""Part of the time that is left that the exact method may take."""
GLANCE_SECONDS, GLANCE_SHARE = 0.5, 0.02
"""What looking for a choice may take before the exact method, and the part of the time that it may."""
OFFER_SECONDS = 1.0
"""How often the search hands over what it has found: pricing a choice of the whole problem exactly takes a while."""
SETTLING_ROUNDS = 10
"""Sweeps after a change of prices before a choice is looked at."""
LOOK_SHARE = 0.3
"""Part of a thread's time that polishing may take beside other work."""
LOOK_ROUNDS = 50
"""Rounds of the dual between two choices that are polished, where rounds are counted."""
FIRST_RISE, LAST_RISE, RISE_GROWTH = 1e-4, 1e6, 1.2
"""What is added to the price of a broken limit, in parts of the bound: at first, at last, and its growth."""


@dataclass(frozen=True, slots=True)
class Portfolio(Solver):
    """Anytime: a choice and a bound at every size.

    Attributes:
        max_rounds: Rounds of the dual at most, but no fewer than give a first bound.
        max_parts: Parts of the search at most, per thread. With both limits, one thread and no limit of time, equal
            seeds give equal results.
    """

    max_rounds: int | None = None
    max_parts: int | None = None

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`.

        `should_stop` may be called from several threads, `watch` is called from the caller's only. The search draws
        from `seed`.
        """
        prepared = prepare(problem)
        merged = None if prepared is None else merge(prepared.field, Memory.of(problem, prepared.labels))
        if prepared is None or merged is None or merged.memory.hopeless():
            budget.raise_bound(math.inf)
            return
        _Run(self, prepared, merged, budget).run()


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

    def run(self) -> None:
        """Raise the bound and offer choices until the budget is done."""
        small = _entries(self._merged) <= SMALL * (1 if self._merged.memory.num_rows else 4)
        if small:
            if self._merged.memory.num_rows and self._options.max_rounds is None:
                self._glance(self._merged)
            if not self._budget.spent():
                self._exact(self._merged)
        if self._budget.spent():
            return
        if not small and self._budget.remaining < SHORT:
            self._offer(self._merged, np.array(frugal(self._merged.field, self._merged.memory)))
        merged, parts = settle(self._merged.restrict(undominated(self._merged.field, self._merged.memory)))
        if parts > 1 and solve_apart(self._prepared, merged, self._budget, self._options.run):
            return
        flat = Flat.of(merged.field.softened())
        relaxation = Relaxation(flat, FlatMemory.of(merged.memory, flat.offsets))
        polisher = Polisher(flat, relaxation.memory, self._budget.seed)
        self._bound(merged, relaxation, polisher, DUAL_SHARE * self._budget.remaining)
        if math.isinf(self._budget.cost) and not self._budget.spent():
            self._fit(merged, relaxation, polisher)
        best = self._known(merged)
        if best is None and polisher.labels is not None and self._offer(merged, polisher.labels):
            best = polisher.labels
        guide = Guide(*relaxation.rises(), relaxation.best_prices)
        if not small and not self._budget.spent():
            unending = math.isinf(self._budget.remaining) and self._options.max_parts is None
            if best is not None and not unending and _entries(merged) <= MIDDLING:
                best = self._improve(merged, relaxation, polisher, guide, best, FIRST_SEARCH_SHARE)
            thinned = self._below(merged, guide, relaxation)
            if thinned is not None and (unending or _entries(thinned) <= MIDDLING):
                self._exact(thinned)
                known = self._known(merged)
                best = best if known is None else known
        if best is not None and not self._budget.spent():
            self._improve(merged, relaxation, polisher, guide, best)

    def _glance(self, merged: Merged) -> None:
        """Look for a choice quickly: the exact method may have none for long, and leaves out more if one is known."""
        flat = Flat.of(merged.field.softened())
        relaxation = Relaxation(flat, FlatMemory.of(merged.memory, flat.offsets))
        seconds = min(GLANCE_SECONDS, GLANCE_SHARE * self._budget.remaining)
        self._bound(merged, relaxation, Polisher(flat, relaxation.memory, self._budget.seed), seconds)

    def _exact(self, merged: Merged) -> None:
        part = self._budget.part(EXACT_SHARE * self._budget.remaining)
        exact(self._prepared, merged, part)
        self._budget.adopt(part)

    def _below(self, merged: Merged, guide: Guide, relaxation: Relaxation) -> Merged | None:
        """Return `merged` without labels that cost more than the best choice; None if some node has none left.

        A bound on what is left is one on the whole up to the best choice's cost, and beyond that it does not matter.
        """
        cost = self._budget.cost
        if math.isinf(cost):
            return merged
        slack = 1e-9 * abs(cost) + 1e-12 * float(np.abs(relaxation.flat.tables).max(initial=0.0))
        permitted = guide.bound + guide.rises <= cost + slack
        offsets = relaxation.flat.offsets.tolist()
        kept = [np.flatnonzero(permitted[first:last]) for first, last in pairwise(offsets)]
        if any(len(k) == 0 for k in kept):
            self._budget.raise_bound(cost, 0.0)
            return None
        return merged.restrict(kept)

    def _bound(self, merged: Merged, relaxation: Relaxation, polisher: Polisher, seconds: float) -> None:
        """Raise the dual bound, and polish what it chooses on the way: beside it, or in turns with one thread."""
        budget = self._budget.part(seconds)
        highest = merged.field.highest_cost()
        highest += 1e-9 * abs(highest)  # no permitted choice costs more
        self._begin(merged, polisher)
        beside = self._budget.threads > 1 and self._options.max_rounds is None
        rounds, began = 0, time.monotonic()
        offered, last = polisher.cost, began
        with ThreadPoolExecutor(1) as pool:
            over = Event()
            future = (
                pool.submit(polisher.follow, relaxation, lambda: over.is_set() or budget.spent()) if beside else None
            )
            try:
                if not beside:
                    polisher.start(budget.spent)
                while rounds < WINDOW or not (
                    relaxation.finished or budget.spent() or rounds == self._options.max_rounds
                ):
                    relaxation.round()
                    rounds += 1
                    if not beside and self._due(rounds, polisher.seconds, time.monotonic() - began):
                        polisher.look(relaxation.labels.copy(), relaxation.prices, budget.spent)
                    found = polisher.labels
                    if (
                        found is not None
                        and polisher.cost < offered
                        and (math.isinf(offered) or time.monotonic() - last >= OFFER_SECONDS)
                    ):
                        offered, last = polisher.cost, time.monotonic()
                        self._offer(merged, found)
                    if relaxation.bound > self._budget.bound:
                        self._budget.raise_bound(math.inf if relaxation.bound > highest else relaxation.bound, 0.0)
                        budget.adopt(self._budget)
            finally:
                over.set()
            if future is not None:
                future.result()
        if polisher.labels is not None:
            self._offer(merged, polisher.labels)

    def _due(self, rounds: int, polished: float, elapsed: float) -> bool:
        """Return whether it is the turn of polishing: by rounds if those are limited, else by time."""
        if self._options.max_rounds is not None:
            return rounds % LOOK_ROUNDS == 1
        return rounds >= FIRST_ROUND and polished <= LOOK_SHARE * elapsed

    def _begin(self, merged: Merged, polisher: Polisher) -> None:
        """Offer a choice at once, where the labels that use least fit together, or one is known."""
        known = self._known(merged)
        for labels in (known, polisher.thrifty()):
            if labels is not None and polisher.offer(labels):
                self._offer(merged, labels)

    def _known(self, merged: Merged) -> Ints | None:
        """Return the budget's choice in labels of `merged`, None if it has none there."""
        if self._budget.choice is None or (before := self._prepared.choice(self._budget.choice)) is None:
            return None
        labels = merged.choice(before)
        return None if labels is None else np.array(labels, np.int64)

    def _fit(self, merged: Merged, relaxation: Relaxation, polisher: Polisher) -> None:
        """Make broken limits dearer, and polish what is chosen then, until a choice fits."""
        prices = relaxation.best_prices.copy()
        size = max(abs(relaxation.bound - relaxation.flat.constant), 1e-300)
        rise = FIRST_RISE * size
        while not self._budget.spent() and rise <= LAST_RISE * size:
            labels = relaxation.settle(prices, SETTLING_ROUNDS)
            polisher.look(labels, prices, self._budget.spent)
            if polisher.labels is not None and self._offer(merged, polisher.labels):
                return
            for t in peaks(relaxation.excess(labels), PEAKS).tolist():
                prices[t] += rise / relaxation.memory.scales[t]
            rise *= RISE_GROWTH

    def _improve(
        self, merged: Merged, relaxation: Relaxation, polisher: Polisher, guide: Guide, best: Ints, share: float = 1.0
    ) -> Ints:
        """Search for a share of the time that is left, and return the best choice."""
        budget = self._budget.part(share * self._budget.remaining) if share < 1 else self._budget
        flat, memory = relaxation.flat, relaxation.memory
        improvers = [
            Improver(merged.field, flat, memory, best, guide, self._budget.seed + k, relaxation)
            for k in range(max(1, self._budget.threads))
        ]
        offered, last = improvers[0].cost, time.monotonic()
        reported = last

        def report(labels: Ints, cost: float) -> None:
            nonlocal offered, last, reported
            if cost < offered and time.monotonic() - last >= OFFER_SECONDS:
                self._offer(merged, labels)
                offered, last = cost, time.monotonic()
            if not relaxation.finished and self._options.max_rounds is None:
                self._go_on(relaxation, time.monotonic() - reported)
                if relaxation.finished:
                    better = Guide(*relaxation.rises(), relaxation.best_prices)
                    for improver in improvers:
                        improver.guide = better
                if polisher.seconds <= LOOK_SHARE * (time.monotonic() - began):
                    polisher.offer(labels)
                    polisher.look(relaxation.labels.copy(), relaxation.prices, budget.spent)
                    if polisher.labels is not None and polisher.cost < cost:
                        improvers[0].adopt(polisher.labels)
            reported = time.monotonic()

        began, polisher.seconds = time.monotonic(), 0.0
        labels, cost = improve_together(improvers, budget, self._options.max_parts, report)
        if cost < offered:
            self._offer(merged, labels)
        return labels

    def _go_on(self, relaxation: Relaxation, seconds: float) -> None:
        """Raise the dual bound for some seconds more."""
        budget = self._budget.part(seconds)
        while not relaxation.finished and not budget.spent():
            relaxation.round()
        if relaxation.bound > self._budget.bound:
            self._budget.raise_bound(relaxation.bound, 0.0)

    def _offer(self, merged: Merged, labels: Ints) -> bool:
        return self._budget.offer(self._prepared.strategies(merged.invert(labels.tolist())))


def _entries(merged: Merged) -> int:
    """Return the entries of all tables."""
    return sum(table.size for table in merged.field.tables.values())
