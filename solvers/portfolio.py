"""Anytime solver for problems of any size: exact where that closes the gap, else a dual bound and local search.

1. Presolve: arc consistency, merged parallel edges, contraction of functionally determined nodes.
2. Small problems: after a quick search for an incumbent, the exact method of `auto` gets half of the time.
3. The Lagrangian dual (`bounds.lagrangian_dual`) raises the bound; its decoded choices are repaired and polished
   (`local_search.polish`), in a second thread if there is one.
4. Reduced-cost fixing: labels that provably cost more than the incumbent go; if a medium-sized problem remains, the
   exact method gets half of the remaining time.
5. Large-neighbourhood search (`local_search.improve`) until the time is up; until the dual has converged, one thread
   spends half its time on it and polishes its decoded choices.
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
from autopar.solvers.bounds.lagrangian_dual import PEAKS, WINDOW, LagrangianDual, peaks
from autopar.solvers.local_search.coordinate_descent import least_use
from autopar.solvers.local_search.improve import DualInformation, Improver
from autopar.solvers.local_search.parallel_search import improve_together
from autopar.solvers.local_search.polish import FIRST_ROUND, Polisher
from autopar.solvers.model.csr import FlatField, FlatMemory
from autopar.solvers.model.graphical_model import Ints, Prepared, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.components import fix_unconstrained, solve_components
from autopar.solvers.reductions.contraction import Contraction, contract
from autopar.solvers.reductions.dominance import undominated

SMALL = 150_000
"""Table entries up to which the exact method is tried first; without limits four times as many."""
MEDIUM = 700_000
"""Table entries up to which the exact method is tried after reduced-cost fixing."""
SHORT = 20.0
"""Seconds below which the choice of least use is offered first, so that some incumbent exists in the end."""
FIRST_SEARCH_SHARE = 0.2
"""Share of the remaining time spent on search before the exact method on a medium-sized problem."""
DUAL_SHARE = 0.25
"""Share of the time for the dual."""
EXACT_SHARE = 0.5
"""Share of the remaining time for the exact method."""
QUICK_SECONDS, QUICK_SHARE = 0.5, 0.02
"""Time for an incumbent before the exact method: seconds, and share of the remaining time, whichever is less."""
OFFER_SECONDS = 1.0
"""Seconds between two choices the search offers: pricing a choice of the whole problem exactly is slow."""
SETTLING_ROUNDS = 10
"""Sweeps after a price change before a choice is decoded."""
POLISH_SHARE = 0.3
"""Share of a thread's time for polishing beside other work."""
POLISH_ROUNDS = 50
"""Rounds of the dual between two polished choices, if rounds are counted."""
FIRST_RISE, LAST_RISE, RISE_GROWTH = 1e-4, 1e6, 1.2
"""Price increase of a broken limit, relative to the bound: the first, the last, and the growth factor."""


@dataclass(frozen=True, slots=True)
class Portfolio(Solver):
    """Anytime solver: a choice and a bound at every size.

    Attributes:
        max_rounds: Most rounds of the dual, though never fewer than give a first bound.
        max_parts: Most subproblems of the search, per thread. With both limits, one thread and no time limit, equal
            seeds give equal results.
    """

    max_rounds: int | None = None
    max_parts: int | None = None

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`.

        `should_stop` may be called from several threads, `watch` only from the caller's. The search draws from `seed`.
        """
        prepared = prepare(problem)
        contraction = None if prepared is None else contract(prepared.field, Memory.of(problem, prepared.labels))
        if prepared is None or contraction is None or contraction.memory.is_infeasible():
            budget.raise_bound(math.inf)
            return
        _PortfolioRun(self, prepared, contraction, budget).run()


class _PortfolioRun:
    """One run of `Portfolio` on one problem."""

    def __init__(
        self,
        options: Portfolio,
        prepared: Prepared,
        contraction: Contraction,
        budget: Budget,
    ) -> None:
        self._options = options
        self._prepared = prepared
        self._contraction = contraction
        self._budget = budget

    def run(self) -> None:
        """Raise the bound and offer choices until the budget is spent or the optimum is proven."""
        small = _entries(self._contraction) <= SMALL * (1 if self._contraction.memory.num_rows else 4)
        if small:
            if self._contraction.memory.num_rows and self._options.max_rounds is None:
                self._find_quick_incumbent(self._contraction)
            if not self._budget.spent():
                self._run_exact(self._contraction)
        if self._budget.spent():
            return
        if not small and self._budget.remaining < SHORT:
            self._offer(self._contraction, np.array(least_use(self._contraction.field, self._contraction.memory)))
        contraction, parts = fix_unconstrained(
            self._contraction.restrict(undominated(self._contraction.field, self._contraction.memory))
        )
        if parts > 1 and solve_components(self._prepared, contraction, self._budget, self._options.run):
            return
        flat = FlatField.of(contraction.field.softened())
        dual = LagrangianDual(flat, FlatMemory.of(contraction.memory, flat.offsets))
        polisher = Polisher(flat, dual.memory, self._budget.seed)
        self._raise_dual_bound(contraction, dual, polisher, DUAL_SHARE * self._budget.remaining)
        if math.isinf(self._budget.cost) and not self._budget.spent():
            self._repair_by_prices(contraction, dual, polisher)
        best = self._incumbent_labels(contraction)
        if best is None and polisher.labels is not None and self._offer(contraction, polisher.labels):
            best = polisher.labels
        guide = DualInformation(*dual.reduced_costs(), dual.best_prices)
        if not small and not self._budget.spent():
            unending = math.isinf(self._budget.remaining) and self._options.max_parts is None
            if best is not None and not unending and _entries(contraction) <= MEDIUM:
                best = self._improve(contraction, dual, polisher, guide, best, FIRST_SEARCH_SHARE)
            thinned = self._fix_by_reduced_costs(contraction, guide, dual)
            if thinned is not None and (unending or _entries(thinned) <= MEDIUM):
                self._run_exact(thinned)
                known = self._incumbent_labels(contraction)
                best = best if known is None else known
        if best is not None and not self._budget.spent():
            self._improve(contraction, dual, polisher, guide, best)

    def _find_quick_incumbent(self, contraction: Contraction) -> None:
        """Search briefly for an incumbent: the exact method may find none for long, and prunes by its cost."""
        flat = FlatField.of(contraction.field.softened())
        dual = LagrangianDual(flat, FlatMemory.of(contraction.memory, flat.offsets))
        seconds = min(QUICK_SECONDS, QUICK_SHARE * self._budget.remaining)
        self._raise_dual_bound(contraction, dual, Polisher(flat, dual.memory, self._budget.seed), seconds)

    def _run_exact(self, contraction: Contraction) -> None:
        part = self._budget.limited_to(EXACT_SHARE * self._budget.remaining)
        exact(self._prepared, contraction, part)
        self._budget.adopt(part)

    def _fix_by_reduced_costs(
        self, contraction: Contraction, guide: DualInformation, dual: LagrangianDual
    ) -> Contraction | None:
        """Fix labels by reduced costs: drop those that cost more than the incumbent; None if some node has none left.

        A lower bound on the restricted problem is valid up to the incumbent's cost, and no higher bound is needed.
        """
        cost = self._budget.cost
        if math.isinf(cost):
            return contraction
        slack = 1e-9 * abs(cost) + 1e-12 * float(np.abs(dual.flat.tables).max(initial=0.0))
        permitted = guide.bound + guide.reduced_costs <= cost + slack
        offsets = dual.flat.offsets.tolist()
        kept = [np.flatnonzero(permitted[first:last]) for first, last in pairwise(offsets)]
        if any(len(k) == 0 for k in kept):
            self._budget.raise_bound(cost, 0.0)
            return None
        return contraction.restrict(kept)

    def _raise_dual_bound(
        self, contraction: Contraction, dual: LagrangianDual, polisher: Polisher, seconds: float
    ) -> None:
        """Raise the dual bound and polish decoded choices, in a second thread or alternately in one."""
        budget = self._budget.limited_to(seconds)
        highest = contraction.field.highest_cost()
        highest += 1e-9 * abs(highest)  # upper bound on the cost of permitted choices
        self._offer_initial(contraction, polisher)
        beside = self._budget.threads > 1 and self._options.max_rounds is None
        rounds, began = 0, time.monotonic()
        offered, last = polisher.cost, began
        with ThreadPoolExecutor(1) as pool:
            over = Event()
            future = (
                pool.submit(polisher.polish_iterates, dual, lambda: over.is_set() or budget.spent()) if beside else None
            )
            try:
                if not beside:
                    polisher.polish_least_use(budget.spent)
                while rounds < WINDOW or not (dual.finished or budget.spent() or rounds == self._options.max_rounds):
                    dual.run_round()
                    rounds += 1
                    if not beside and self._polish_due(rounds, polisher.seconds, time.monotonic() - began):
                        polisher.polish(dual.labels.copy(), dual.prices, budget.spent)
                    found = polisher.labels
                    if (
                        found is not None
                        and polisher.cost < offered
                        and (math.isinf(offered) or time.monotonic() - last >= OFFER_SECONDS)
                    ):
                        offered, last = polisher.cost, time.monotonic()
                        self._offer(contraction, found)
                    if dual.bound > self._budget.bound:
                        self._budget.raise_bound(math.inf if dual.bound > highest else dual.bound, 0.0)
                        budget.adopt(self._budget)
            finally:
                over.set()
            if future is not None:
                future.result()
        if polisher.labels is not None:
            self._offer(contraction, polisher.labels)

    def _polish_due(self, rounds: int, polished: float, elapsed: float) -> bool:
        """Return whether to polish now: by rounds if they are limited, else by time."""
        if self._options.max_rounds is not None:
            return rounds % POLISH_ROUNDS == 1
        return rounds >= FIRST_ROUND and polished <= POLISH_SHARE * elapsed

    def _offer_initial(self, contraction: Contraction, polisher: Polisher) -> None:
        """Offer a first choice: the incumbent, and the labels of least use if they are within the limits."""
        known = self._incumbent_labels(contraction)
        for labels in (known, polisher.least_use_labels()):
            if labels is not None and polisher.offer(labels):
                self._offer(contraction, labels)

    def _incumbent_labels(self, contraction: Contraction) -> Ints | None:
        """Return the incumbent in labels of `contraction`; None if there is none or a label was dropped."""
        if self._budget.choice is None or (before := self._prepared.choice(self._budget.choice)) is None:
            return None
        labels = contraction.choice(before)
        return None if labels is None else np.array(labels, np.int64)

    def _repair_by_prices(self, contraction: Contraction, dual: LagrangianDual, polisher: Polisher) -> None:
        """Raise the prices of broken limits and polish the decoded choice, until one is within the limits."""
        prices = dual.best_prices.copy()
        size = max(abs(dual.bound - dual.flat.constant), 1e-300)
        rise = FIRST_RISE * size
        while not self._budget.spent() and rise <= LAST_RISE * size:
            labels = dual.decode_at(prices, SETTLING_ROUNDS)
            polisher.polish(labels, prices, self._budget.spent)
            if polisher.labels is not None and self._offer(contraction, polisher.labels):
                return
            for t in peaks(dual.excess(labels), PEAKS).tolist():
                prices[t] += rise / dual.memory.scales[t]
            rise *= RISE_GROWTH

    def _improve(
        self,
        contraction: Contraction,
        dual: LagrangianDual,
        polisher: Polisher,
        guide: DualInformation,
        best: Ints,
        share: float = 1.0,
    ) -> Ints:
        """Run the neighbourhood search for a share of the remaining time; return the best choice."""
        budget = self._budget.limited_to(share * self._budget.remaining) if share < 1 else self._budget
        flat, memory = dual.flat, dual.memory
        improvers = [
            Improver(contraction.field, flat, memory, best, guide, self._budget.seed + k, dual)
            for k in range(max(1, self._budget.threads))
        ]
        offered, last = improvers[0].cost, time.monotonic()
        reported = last

        def report(labels: Ints, cost: float) -> None:
            nonlocal offered, last, reported
            if cost < offered and time.monotonic() - last >= OFFER_SECONDS:
                self._offer(contraction, labels)
                offered, last = cost, time.monotonic()
            if not dual.finished and self._options.max_rounds is None:
                self._continue_dual(dual, time.monotonic() - reported)
                if dual.finished:
                    better = DualInformation(*dual.reduced_costs(), dual.best_prices)
                    for improver in improvers:
                        improver.guide = better
                if polisher.seconds <= POLISH_SHARE * (time.monotonic() - began):
                    polisher.offer(labels)
                    polisher.polish(dual.labels.copy(), dual.prices, budget.spent)
                    if polisher.labels is not None and polisher.cost < cost:
                        improvers[0].adopt(polisher.labels)
            reported = time.monotonic()

        began, polisher.seconds = time.monotonic(), 0.0
        labels, cost = improve_together(improvers, budget, self._options.max_parts, report)
        if cost < offered:
            self._offer(contraction, labels)
        return labels

    def _continue_dual(self, dual: LagrangianDual, seconds: float) -> None:
        """Continue the dual for `seconds`, and record its bound."""
        budget = self._budget.limited_to(seconds)
        while not dual.finished and not budget.spent():
            dual.run_round()
        if dual.bound > self._budget.bound:
            self._budget.raise_bound(dual.bound, 0.0)

    def _offer(self, contraction: Contraction, labels: Ints) -> bool:
        return self._budget.offer(self._prepared.strategies(contraction.invert(labels.tolist())))


def _entries(contraction: Contraction) -> int:
    """Return the number of entries of all tables."""
    return sum(table.size for table in contraction.field.tables.values())
