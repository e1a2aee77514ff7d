"""The default solver, exact: presolve, elimination or dual ascent, Lagrangian prices for limits, branch and bound last.

1. Presolve: arc consistency, parallel edges (`model.graphical_model.prepare`), contraction of functionally determined
   nodes (`reductions.contraction.contract`).
2. Without limits: nodes of degree <= 2 are eliminated, the core too if its tables stay small. Else dual ascent usually
   closes the gap (`bounds.dual_ascent`); if not, the field on the labels that survive reduced-cost fixing is eliminated
   or solved as a linear program. If the choice is within the limits, it is optimal.
3. With limits: Lagrangian prices by cutting planes, each oracle call being step 2; for fields too wide to eliminate,
   the local polytope with limits and cover cuts. Minimisers are repaired into incumbents.
4. Labels and pairs that cannot be part of a choice below a ceiling are fixed by min-marginals at the best prices, and
   the rest is branched on; the ceiling rises from just above the bound to the incumbent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE, Problem
from autopar.solvers.backends import highs, lazy_rows
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.bounds.dual_ascent import AscentResult, ascend, ascend_flat
from autopar.solvers.bounds.local_polytope import linear_program, scale_of
from autopar.solvers.bounds.memory_prices import maximise_lagrangian_dual
from autopar.solvers.local_search.coordinate_descent import greedy
from autopar.solvers.local_search.repair import State, descend, repair
from autopar.solvers.model.csr import FlatField
from autopar.solvers.model.graphical_model import Field, Floats, Prepared, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.model.problem_family import ProblemFamily, family_of
from autopar.solvers.reductions.components import fix_unconstrained, solve_components
from autopar.solvers.reductions.contraction import Contraction, contract
from autopar.solvers.reductions.dominance import undominated
from autopar.solvers.reductions.elimination import (
    MAX_ENTRIES,
    MAX_WORK,
    Marginals,
    ReducedField,
    drop_weak_tables,
    eliminate,
    eliminate_all,
    elimination_order,
)

FIRST_STEP = 1e-4
"""First ceiling above the bound, relative; each further step is `STEP_GROWTH` times as long."""
STEP_GROWTH = 3.0
STEPS = 8
"""Ceilings tried before branching without one."""
LEAST_DROPPED = 0.1
"""Share of the labels that must be fixed for another dual ascent on the remaining ones."""
PRICE_FACTORS = (1.0, 1.02, 1.1, 1.5, 3.0)
"""Factors on the relaxation's prices at which minimisers are sought until one is within the limits."""


@dataclass(frozen=True, slots=True, eq=False)
class PricedBound:
    """Reduced costs and bound at the best dual prices.

    Attributes:
        marginals: Rise of the bound per label and pair.
        bound: Lower bound on the optimum under the limits.
    """

    marginals: Marginals
    bound: float


class Auto(Solver):
    """Exact solver; see the top of the module."""

    counts_work: ClassVar[bool] = True

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        if (family := family_of(problem)) is not None:
            _run_family_member(problem, family, budget)
            return
        prepared = prepare(problem)
        contraction = None if prepared is None else contract(prepared.field, Memory.of(problem, prepared.labels))
        if prepared is None or contraction is None:
            budget.raise_bound(math.inf)
            return
        exact(prepared, contraction, budget)


def exact(prepared: Prepared, contraction: Contraction, budget: Budget) -> None:
    """Raise the bound and offer choices until the budget is spent or the optimum is proven."""
    _Search(prepared, contraction, budget).run()


def _run_family_member(problem: Problem, family: ProblemFamily, budget: Budget) -> None:
    """Solve a member of a problem family (without limits), reusing the family's analysis."""
    if not family.is_permitted:
        budget.raise_bound(math.inf)
        return
    core = family.core(problem)
    budget.raise_bound(core.flat.lowest_cost(), EXACT)

    def offer(labels: Sequence[int], bound: float) -> None:
        budget.raise_bound(bound, EXACT)
        budget.offer(family.strategies(core, labels))

    found = _Minimiser(budget).minimise_flat(core.flat, family.order(core), budget.upper, offer)
    if found is not None:
        offer(*found)


class _Minimiser:
    """Minimises fields without limits, by elimination, dual ascent or a linear program."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def minimise(
        self,
        field: Field,
        *,
        accept_rounded: bool = False,
        sufficient: float = math.inf,
        on_interim: Callable[[list[int], float], None] | None = None,
    ) -> tuple[list[int], float] | None:
        """Return a minimiser of a field and a lower bound on its minimum; None if the budget ran out.

        Args:
            field: The field.
            accept_rounded: Whether a rounded fractional solution is enough; it may be forbidden.
            sufficient: Bound from which on any choice is enough.
            on_interim: Called with a choice and a bound before a slow step, if the field is wide.
        """
        reduced = eliminate(field)
        order = elimination_order(reduced.field, MAX_ENTRIES, MAX_WORK)
        if order is not None:
            found = self._by_elimination(reduced.field, order)
        else:
            ascent = ascend(reduced.field, self._budget, sufficient)
            if on_interim is not None and not ascent.closed:
                on_interim(reduced.invert(ascent.labels), ascent.bound)
            found = self._finish(reduced.field, ascent, accept_rounded=accept_rounded)
        return None if found is None else (reduced.invert(found[0]), found[1])

    def minimise_flat(
        self,
        flat: FlatField,
        order: Sequence[int] | None,
        sufficient: float,
        on_interim: Callable[[list[int], float], None],
    ) -> tuple[list[int], float] | None:
        """Minimise a field in arrays whose nodes have more than two neighbours each; see `minimise`.

        Args:
            flat: The field.
            order: Elimination order of its nodes; None if tables get too large.
            sufficient: As in `minimise`.
            on_interim: As in `minimise`.
        """
        if order is not None:
            return self._by_elimination(flat.field, order)
        ascent = ascend_flat(flat, self._budget, sufficient)
        if ascent.closed:
            return ascent.labels, ascent.bound
        on_interim(ascent.labels, ascent.bound)
        return self._finish(flat.field, ascent, accept_rounded=False)

    def _finish(self, field: Field, ascent: AscentResult, *, accept_rounded: bool) -> tuple[list[int], float] | None:
        """Minimise a field after its dual ascent: on the labels that survived it, if it left a gap."""
        if ascent.closed:
            return ascent.labels, ascent.bound
        if self._budget.spent():
            return None
        part = field.restrict(ascent.kept)
        if not part.propagate():
            self._budget.raise_bound(math.inf)
            return None
        alive = [np.flatnonzero(np.isfinite(u)) for u in part.unary]
        part = part.restrict(alive)
        if sum(map(len, alive)) <= (1 - LEAST_DROPPED) * sum(map(len, field.unary)):
            found = self.minimise(part, accept_rounded=accept_rounded)
        else:
            found = self._by_linear_program(part, accept_rounded=accept_rounded)
        if found is None:
            return None
        kept = [own[left] for own, left in zip(ascent.kept, alive, strict=True)]
        labels = [int(own[label]) if len(own) else 0 for own, label in zip(kept, found[0], strict=True)]
        return labels, max(found[1], ascent.bound)

    def _by_elimination(self, field: Field, order: Sequence[int]) -> tuple[list[int], float] | None:
        """Minimise a field by eliminating all nodes."""
        eliminated = eliminate_all(field, order, self._budget)
        return None if eliminated is None else (eliminated.choice(), eliminated.optimum)

    def _by_linear_program(self, field: Field, *, accept_rounded: bool) -> tuple[list[int], float] | None:
        """Minimise a field by elimination if it has become narrow enough, else by a linear program."""
        reduced = eliminate(field)
        core = reduced.field
        order = elimination_order(core, MAX_ENTRIES, MAX_WORK)
        if order is not None:
            found = self._by_elimination(core, order)
            return None if found is None else (reduced.invert(found[0]), found[1])
        if accept_rounded:
            program = linear_program(core, scale_of(core))
            outcome = highs.run(program, False, self._budget)
            if outcome.solution is None:
                return None
            return reduced.invert(program.labels(outcome.solution)[0]), outcome.bound
        bounds = [-math.inf]
        unlimited = Memory.unlimited()
        labels = lazy_rows.minimise(core, unlimited, self._budget, highs.run, lambda _: True, report=bounds.append)
        if labels is None:
            return None
        return reduced.invert(labels), max(bounds)


class _Search:
    """One run of `Auto` on one problem."""

    def __init__(self, prepared: Prepared, contraction: Contraction, budget: Budget) -> None:
        self._prepared = prepared
        self._contraction = contraction
        self._field = contraction.field
        self._memory = contraction.memory
        self._budget = budget
        self._minimiser = _Minimiser(budget)
        self._violated_times: set[int] = set()

    def run(self) -> None:
        """Raise the bound and offer choices until the budget is spent or the optimum is proven."""
        if self._memory.is_infeasible():
            self._budget.raise_bound(math.inf)
            return
        self._budget.raise_bound(self._field.lowest_cost(), EXACT)
        relaxed = self._minimiser.minimise(self._field, sufficient=self._budget.upper, on_interim=self._record_interim)
        if relaxed is None:
            return
        labels, bound = relaxed
        self._budget.raise_bound(bound, EXACT)
        if self._offer(labels) or self._budget.spent():
            return
        self._contraction, parts = fix_unconstrained(self._contraction.restrict(undominated(self._field, self._memory)))
        self._field, self._memory = self._contraction.field, self._contraction.memory
        if parts > 1 and solve_components(self._prepared, self._contraction, self._budget, Auto().run):
            return
        reduced = eliminate(self._field, keep=self._memory.resource_users())
        if elimination_order(reduced.field, MAX_ENTRIES, MAX_WORK) is not None:
            known = self._maximise_dual(reduced.field)
        else:
            known = self._solve_relaxation(reduced.field)
        if not self._budget.spent():
            self._branch(reduced, known)

    def _offer(self, labels: Sequence[int]) -> bool:
        return self._budget.offer(self._prepared.strategies(self._contraction.invert(labels)))

    def _record_interim(self, labels: list[int], bound: float) -> None:
        """Record the bound and repaired choices before a slow linear program."""
        self._budget.raise_bound(bound, EXACT)
        for start in (labels, greedy(self._field.softened())):
            self._improve(start)

    def _improve(self, labels: Sequence[int]) -> None:
        """Offer the choice that repair and descent reach from `labels`."""
        state = State(self._field, self._memory, labels)
        if repair(state, self._budget):
            descend(state, self._budget)
            self._offer(state.labels)

    def _maximise_dual(self, field: Field) -> PricedBound | None:
        """Maximise the Lagrangian dual by cutting planes; return the min-marginals of `field` at the best prices."""

        def oracle(prices: Floats) -> tuple[list[int], float, float] | None:
            answer = self._minimiser.minimise(self._priced(prices))
            if answer is None:
                return None
            found, total = answer
            return found, total - float(prices @ self._memory.profile(found)), total

        best = maximise_lagrangian_dual(oracle, self._memory, self._budget, self._field.highest_cost(), self._improve)
        self._violated_times |= set(self._memory.times[best.prices > 0].tolist())
        order = elimination_order(field, MAX_ENTRIES, MAX_WORK)
        assert order is not None, "the caller has checked that the field can be eliminated"
        priced = field.copy()
        costs = self._memory.prices(best.prices, [len(u) for u in self._field.unary])
        priced.unary = [u + c if len(u) else u for u, c in zip(field.unary, costs, strict=True)]
        eliminated = eliminate_all(priced, order, self._budget)
        return None if eliminated is None else PricedBound(eliminated.marginals(), best.bound)

    def _solve_relaxation(self, field: Field) -> PricedBound | None:
        """Solve the LP relaxation with limits and covers, for wide fields; return the min-marginals at its prices."""
        relaxed = lazy_rows.relaxation(field, self._memory, self._budget, highs.run, self._violated_times)
        program, outcome, duals = relaxed.plain, relaxed.outcome, relaxed.plain_outcome.duals
        if outcome.duals is None or duals is None or self._budget.spent():
            return None
        prices = np.zeros(self._memory.num_rows)
        prices[list(program.limits)] = program.prices(duals) / self._memory.scales[list(program.limits)]
        for factor in PRICE_FACTORS:
            answer = self._minimiser.minimise(self._priced(factor * prices), accept_rounded=True)
            if answer is None:
                return None
            self._improve(answer[0])
            if self._offer(answer[0]):
                break
        thinned, order = drop_weak_tables(
            relaxed.program.reduced_cost_field(outcome.duals), MAX_ENTRIES // 4, MAX_WORK // 4
        )
        eliminated = eliminate_all(thinned, order, self._budget)
        return None if eliminated is None else PricedBound(eliminated.marginals(), outcome.bound)

    def _priced(self, prices: Floats) -> Field:
        field = self._field.copy()
        sizes = [len(u) for u in field.unary]
        field.unary = [u + p for u, p in zip(field.unary, self._memory.prices(prices, sizes), strict=True)]
        return field

    def _branch(self, reduced: ReducedField, known: PricedBound | None) -> None:
        """Branch below rising ceilings (destructive lower bounds, Klein and Scholl 1999) until a choice is found.

        A low ceiling leaves few labels to branch on, and an empty search raises the bound to the ceiling.
        """
        step = 0.0
        for _ in range(STEPS if known is not None else 0):
            if self._budget.spent():
                return
            bound, upper = self._budget.bound, self._budget.upper
            step = max(
                STEP_GROWTH * step,
                FIRST_STEP * abs(bound),
                FIRST_STEP * upper if bound == 0.0 and upper < math.inf else 0.0,
            )
            if bound + step >= upper:
                break
            self._branch_below(reduced, bound + step, known)
        if not self._budget.spent():
            self._branch_below(reduced, self._budget.upper, known)

    def _branch_below(self, reduced: ReducedField, ceiling: float, known: PricedBound | None) -> None:
        """Find the best choice that costs less than `ceiling`, or raise the bound to it."""
        field = reduced.field
        if known is not None and math.isfinite(ceiling):
            room = ceiling - known.bound + OPTIMALITY_TOLERANCE * abs(known.bound)
            field = known.marginals.forbid_above(field, room)
        if not field.propagate():
            self._budget.raise_bound(ceiling, EXACT)
            return
        alive = [np.flatnonzero(np.isfinite(u)) for u in field.unary]
        field = field.restrict(alive)
        memory = self._memory.restrict([part if len(part) else np.arange(1) for part in alive])
        if memory.is_infeasible():
            self._budget.raise_bound(ceiling, EXACT)
            return
        better = undominated(field, memory)
        alive = [part[kept] for part, kept in zip(alive, better, strict=True)]
        field, memory = (
            field.restrict(better),
            memory.restrict([kept if len(kept) else np.arange(1) for kept in better]),
        )
        rest = eliminate(field, keep=memory.resource_users())

        def offer(core: list[int]) -> bool:
            labels = [int(kept[s]) if len(kept) else 0 for kept, s in zip(alive, rest.invert(core), strict=True)]
            return self._offer(reduced.invert(labels))

        # Dropped labels cost at least the ceiling, so a bound on the restricted field is valid up to the ceiling.
        lazy_rows.minimise(
            rest.field,
            memory,
            self._budget,
            partial(highs.run, ceiling=ceiling),
            offer,
            report=lambda bound: self._budget.raise_bound(min(bound, ceiling)),
            violated_times=self._violated_times,
            cover_rounds=lazy_rows.COVER_ROUNDS,
        )
