"""Anytime solver for problems of any size: exact where that closes the gap, else a dual bound and local search.

1. Presolve: arc consistency, merged parallel edges, contraction of functionally determined nodes.
2. Problems that elimination solves, and problems without limits: after a quick search for an incumbent, the exact
   method of `auto` gets half of the time, if it is predicted to need less.
3. The Lagrangian dual (`bounds.lagrangian_dual`) raises the bound; its decoded choices are repaired and polished
   (`local_search.polish`).
4. Core problems (`exact.core_problem`): the labels whose reduced cost is small are solved exactly, more of them each
   time, as long as the seconds predicted from their number are there.
5. Large-neighbourhood search (`local_search.improve`) until the time is up; until the dual has converged, one thread
   spends half its time on it and polishes its decoded choices.

With two threads, 4 runs beside 3 and 5, and takes reduced costs and incumbents from them as they improve. While it has
nothing to do, the thread polishes or searches.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Event

import numpy as np

from autopar.problem import Problem
from autopar.solvers.auto import exact
from autopar.solvers.base import Budget, Solver
from autopar.solvers.bounds.dual_ascent import ROUNDS
from autopar.solvers.bounds.lagrangian_dual import PEAKS, WINDOW, DualInformation, LagrangianDual, peaks
from autopar.solvers.exact.core_problem import CoreProver
from autopar.solvers.local_search.coordinate_descent import least_use
from autopar.solvers.local_search.improve import Improver
from autopar.solvers.local_search.parallel_search import improve_together
from autopar.solvers.local_search.polish import FIRST_ROUND, Polisher
from autopar.solvers.model.csr import FlatField, FlatMemory
from autopar.solvers.model.graphical_model import Ints, Prepared, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.components import fix_unconstrained, solve_components
from autopar.solvers.reductions.contraction import Contraction, contract
from autopar.solvers.reductions.dominance import undominated
from autopar.solvers.reductions.elimination import MAX_ENTRIES, MAX_WORK, eliminate, elimination_order
from autopar.solvers.reductions.resource_fixing import drop_oversized

SHORT = 20.0
"""Seconds below which the choice of least use is offered first, so that some incumbent exists in the end."""
ELIMINATIONS = 200
"""Seconds of the exact method on a problem that elimination solves, as a factor on those of planning its elimination:
about 60 eliminations for the prices of the limits, each a few times slower than its plan."""
SWEEP_SECONDS = 5e-9
"""Seconds of a sweep of the messages per table entry, both ways; measured on an AMD EPYC core."""
ASCENT_SHARE = 0.05
"""Share of the time that the dual ascent of a problem without limits may be predicted to take, to be tried first."""
FIRST_SEARCH_SHARE = 0.2
"""Share of the remaining time spent on search before large core problems, with one thread."""
DUAL_SHARE = 0.25
"""Share of the time for the dual."""
EXACT_SHARE = 0.5
"""Share of the remaining time for the exact method, and for core problems with one thread."""
FIRST_CORE_SHARE = 0.15
"""Share of the remaining time for core problems before the first search, with one thread."""
BESIDE_SHARE = 0.8
"""Share of the remaining time for a core problem with a thread of its own."""
CORE_SECONDS = 10.0
"""Predicted seconds up to which a core problem is solved if subproblems are counted instead of seconds."""
GUIDE_SECONDS = 2.0
"""Seconds between two publications of the reduced costs while the gap hardly falls."""
GUIDE_GAP = 0.8
"""Factor by which the gap must fall for reduced costs to be published at once."""
IDLE_SECONDS = 0.05
"""Seconds between two looks of the proving thread for new reduced costs or a better incumbent."""
RETRY_SECONDS = 1.0
"""Seconds after which it looks for a core problem even if there are none."""
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
        proves: Whether exact methods are tried.
    """

    max_rounds: int | None = None
    max_parts: int | None = None
    proves: bool = True

    def companion(self, number: int) -> Solver:
        """Return the portfolio, which searches without exact methods in all processes but the first."""
        return self if number == 0 else replace(self, proves=False)

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


class _Proof:
    """Solves core problems in a thread of its own, beside the dual and the search.

    Attributes:
        is_active: Whether it is solving one: the others then use one thread less.
    """

    def __init__(self, prover: CoreProver, budget: Budget) -> None:
        self.is_active = False
        self._prover = prover
        self._budget = budget
        self._guide: DualInformation | None = None
        self._over = Event()
        self._gap = math.inf
        self._published = -math.inf

    def publish_if_due(self, dual: LagrangianDual) -> None:
        """Take the reduced costs of the dual if the gap has fallen since, or some time has passed."""
        gap, now = self._budget.upper - dual.bound, time.monotonic()
        if dual.rounds < FIRST_ROUND:
            return
        if gap < GUIDE_GAP * self._gap or now - self._published >= GUIDE_SECONDS:
            self.publish(dual.information())
            self._gap, self._published = gap, time.monotonic()

    def publish(self, guide: DualInformation) -> None:
        """Take dual information, unless what is known proves more."""
        if self._guide is None or guide.bound >= self._guide.bound:
            self._guide = guide

    def run(self) -> None:
        """Solve core problems until the budget is spent or somebody ends this thread."""
        seen: tuple[DualInformation | None, float] | None = None
        looked = -math.inf
        while not (self._over.is_set() or self._budget.spent()):
            guide, cost = self._guide, self._budget.upper
            core = None
            if guide is not None and ((guide, cost) != seen or time.monotonic() - looked >= RETRY_SECONDS):
                core = self._prover.core(guide, BESIDE_SHARE * self._budget.remaining)
                looked = time.monotonic()
            if guide is None or core is None:
                seen = (guide, cost)
                self._over.wait(IDLE_SECONDS)
                continue
            room = core.ceiling - guide.bound

            def is_outdated(base: float = guide.bound, room: float = room) -> bool:
                """Whether the gap of today is a small part of the core's."""
                newest = self._guide
                known = base if newest is None else newest.bound
                return self._over.is_set() or self._budget.upper - known < room / 2

            self.is_active = True
            try:
                self._prover.solve(core, is_outdated)
            finally:
                self.is_active = False
            seen = None

    def end(self) -> None:
        """End the thread soon."""
        self._over.set()


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
        if self._budget.spent():
            return
        if self._budget.remaining < SHORT:
            self._offer(self._contraction, np.array(least_use(self._contraction.field, self._contraction.memory)))
        fitting = drop_oversized(self._contraction)
        if fitting is None:
            self._budget.raise_bound(math.inf)
            return
        contraction, parts = fix_unconstrained(fitting.restrict(undominated(fitting.field, fitting.memory)))
        if parts > 1 and solve_components(self._prepared, contraction, self._budget, self._options.run):
            return
        if self._options.proves and _is_narrow(contraction, EXACT_SHARE * self._budget.remaining):
            if contraction.memory.num_rows and self._options.max_rounds is None:
                self._find_quick_incumbent(contraction)
            if not self._budget.spent():
                self._run_exact(contraction)
            if self._budget.spent():
                return
        flat = FlatField.of(contraction.field.softened())
        dual = LagrangianDual(flat, FlatMemory.of(contraction.memory, flat.offsets))
        polisher = Polisher(flat, dual.memory, self._budget.seed)
        prover = CoreProver(
            contraction.field,
            contraction.memory,
            flat,
            self._budget,
            lambda labels: self._offer(contraction, np.array(labels)),
        )
        with self._beside(prover) as proof:
            self._solve(contraction, dual, polisher, prover, proof)

    @contextmanager
    def _beside(self, prover: CoreProver) -> Iterator[_Proof | None]:
        """Solve core problems in a second thread, if there may be one."""
        if self._budget.threads < 2 or self._options.max_rounds is not None or not self._options.proves:
            yield None
            return
        proof = _Proof(prover, self._budget)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(proof.run)
            try:
                yield proof
            finally:
                proof.end()
            future.result()

    def _solve(
        self,
        contraction: Contraction,
        dual: LagrangianDual,
        polisher: Polisher,
        prover: CoreProver,
        proof: _Proof | None,
    ) -> None:
        """Run the dual, the core problems and the search on the reduced problem."""
        self._raise_dual_bound(contraction, dual, polisher, DUAL_SHARE * self._budget.remaining, proof)
        if math.isinf(self._budget.cost) and not self._budget.spent():
            self._repair_by_prices(contraction, dual, polisher)
        best = self._incumbent_labels(contraction)
        if best is None and polisher.labels is not None and self._offer(contraction, polisher.labels):
            best = polisher.labels
        guide = dual.information()
        if proof is not None:
            proof.publish(guide)
        elif self._options.proves and not self._budget.spent():
            best = self._prove_and_improve(contraction, dual, polisher, guide, best, prover)
        if best is not None and not self._budget.spent():
            self._improve(contraction, dual, polisher, guide, best, proof)

    def _prove_and_improve(
        self,
        contraction: Contraction,
        dual: LagrangianDual,
        polisher: Polisher,
        guide: DualInformation,
        best: Ints | None,
        prover: CoreProver,
    ) -> Ints | None:
        """Solve core problems in the only thread: small ones, then a search, then larger ones; return the best choice.

        Without a time limit, and without a limit on subproblems, the proof goes on until it is complete.
        """
        unending = math.isinf(self._budget.remaining)
        if unending and self._options.max_parts is None:
            self._prove(prover, guide, math.inf)
            if not self._budget.spent() and (thinned := self._fix_by_reduced_costs(contraction, guide, dual)):
                self._run_exact(thinned)
        elif unending:
            self._prove(prover, guide, CORE_SECONDS)
        else:
            self._prove(prover, guide, FIRST_CORE_SHARE * self._budget.remaining)
            if best is not None and not self._budget.spent():
                best = self._improve(contraction, dual, polisher, guide, best, None, FIRST_SEARCH_SHARE)
            self._prove(prover, guide, EXACT_SHARE * self._budget.remaining)
        known = self._incumbent_labels(contraction)
        return best if known is None else known

    def _prove(self, prover: CoreProver, guide: DualInformation, seconds: float) -> None:
        """Solve core problems for some seconds, in this thread."""
        end = time.monotonic() + seconds
        while not self._budget.spent():
            left = end - time.monotonic() if math.isfinite(self._budget.remaining) else seconds
            core = prover.core(guide, left) if left > 0 else None
            if core is None:
                return
            prover.solve(core)

    def _find_quick_incumbent(self, contraction: Contraction) -> None:
        """Search briefly for an incumbent: the exact method may find none for long, and prunes by its cost."""
        flat = FlatField.of(contraction.field.softened())
        dual = LagrangianDual(flat, FlatMemory.of(contraction.memory, flat.offsets))
        seconds = min(QUICK_SECONDS, QUICK_SHARE * self._budget.remaining)
        self._raise_dual_bound(contraction, dual, Polisher(flat, dual.memory, self._budget.seed), seconds, None)

    def _run_exact(self, contraction: Contraction) -> None:
        exact(self._prepared, contraction, self._budget.limited_to(EXACT_SHARE * self._budget.remaining))

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
        self,
        contraction: Contraction,
        dual: LagrangianDual,
        polisher: Polisher,
        seconds: float,
        proof: _Proof | None,
    ) -> None:
        """Raise the dual bound and polish decoded choices, in a second thread or alternately in one.

        While `proof` needs the second thread, the polishing is done alternately.
        """
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
                pool.submit(
                    polisher.polish_iterates,
                    dual,
                    lambda: over.is_set() or budget.spent(),
                    lambda: self._is_crowded(proof),
                )
                if beside
                else None
            )
            try:
                if not beside:
                    polisher.polish_least_use(budget.spent)
                while rounds < WINDOW or not (dual.finished or budget.spent() or rounds == self._options.max_rounds):
                    dual.run_round()
                    rounds += 1
                    alone = not beside or self._is_crowded(proof)
                    if (
                        alone
                        and self._polish_due(rounds, polisher.seconds, time.monotonic() - began)
                        and polisher.turn.acquire(blocking=False)
                    ):
                        try:
                            polisher.polish(dual.labels.copy(), dual.prices, budget.spent)
                        finally:
                            polisher.turn.release()
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
                    if proof is not None:
                        proof.publish_if_due(dual)
            finally:
                over.set()
            if future is not None:
                future.result()
        if polisher.labels is not None:
            self._offer(contraction, polisher.labels)

    def _is_crowded(self, proof: _Proof | None) -> bool:
        """Return whether a core problem keeps one of two threads busy, so that only one is left for other work."""
        return proof is not None and proof.is_active and self._budget.threads < 3

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
        proof: _Proof | None,
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
        adopted = self._budget.choice

        def report(labels: Ints, cost: float) -> None:
            nonlocal offered, last, reported, adopted
            if cost < offered and time.monotonic() - last >= OFFER_SECONDS:
                self._offer(contraction, labels)
                offered, last = cost, time.monotonic()
            if not dual.finished and self._options.max_rounds is None:
                self._continue_dual(dual, time.monotonic() - reported)
                if proof is not None:
                    proof.publish_if_due(dual)
                if dual.finished:
                    better = dual.information()
                    for improver in improvers:
                        improver.guide = better
                    if proof is not None:
                        proof.publish(better)
                if polisher.seconds <= POLISH_SHARE * (time.monotonic() - began):
                    polisher.offer(labels)
                    polisher.polish(dual.labels.copy(), dual.prices, budget.spent)
                    if polisher.labels is not None and polisher.cost < cost:
                        improvers[0].adopt(polisher.labels)
            if self._budget.choice is not adopted:  # found by the proof or by another process
                adopted = self._budget.choice
                found = self._incumbent_labels(contraction)
                if found is not None and flat.cost(found) < improvers[0].cost:
                    improvers[0].recombine(found, budget.limited_to)
            reported = time.monotonic()

        began, polisher.seconds = time.monotonic(), 0.0
        labels, cost = improve_together(
            improvers, budget, self._options.max_parts, report, lambda: self._is_crowded(proof)
        )
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


def _is_narrow(contraction: Contraction, seconds: float) -> bool:
    """Return whether the exact method of `auto` is predicted to solve the problem within `seconds` by elimination.

    Without limits, it may also be a dual ascent that is predicted to be short.
    """
    entries = sum(table.size for table in contraction.field.tables.values())
    if not contraction.memory.num_rows and ROUNDS * SWEEP_SECONDS * entries <= ASCENT_SHARE * seconds:
        return True
    began = time.monotonic()
    core = eliminate(contraction.field, keep=contraction.memory.resource_users()).field
    order = elimination_order(core, MAX_ENTRIES, MAX_WORK)
    return order is not None and ELIMINATIONS * (time.monotonic() - began) <= seconds
