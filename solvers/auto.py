"""The default: exact reductions first, a linear program only for what they leave, limits by prices, branching last.

1. Forbidden strategies go, parallel edges merge (`autopar.solvers.model.graphical_model.prepare`), nodes that follow
others are folded into them (`merge`).
2. Without limits: nodes of degree <= 2 are eliminated; the core is eliminated as well if its tables stay small. Else
messages and trees mostly close the gap (`closing`); what they leave is eliminated or a linear program.
   If the choice fits, it is optimal.
3. Limits: their prices are raised by cutting planes, each step being step 2 with priced use added to the costs; choices
on the way are
   repaired and descended into incumbents.
4. Labels and pairs that provably cannot lead below the incumbent go (min-marginals at the best prices), and what is
left is branched on.
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
from autopar.solvers.bounds.dual_ascent import Closing, close_in, close_in_flat
from autopar.solvers.bounds.local_polytope import linear_program, scale_of
from autopar.solvers.bounds.memory_prices import price_limits
from autopar.solvers.local_search.coordinate_descent import greedy
from autopar.solvers.local_search.repair import State, descend, repair
from autopar.solvers.model.csr import Flat
from autopar.solvers.model.graphical_model import Field, Floats, Prepared, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.model.problem_family import Frame, frame_of
from autopar.solvers.reductions.components import settle, solve_apart
from autopar.solvers.reductions.contraction import Merged, merge
from autopar.solvers.reductions.dominance import undominated
from autopar.solvers.reductions.elimination import (
    MAX_ENTRIES,
    MAX_WORK,
    Marginals,
    Reduced,
    eliminate,
    eliminate_all,
    order_of,
    thin,
)

FIRST_STEP = 1e-4
"""How far above the bound, relative, a choice is looked for first; each further step is `STEP_GROWTH` times as long."""
STEP_GROWTH = 3.0
STEPS = 8
"""Steps before a choice is looked for anywhere."""
LEAST_DROPPED = 0.1
"""Share of the labels that have to go before messages are sent again among those that are left."""
DEARER = (1.0, 1.02, 1.1, 1.5, 3.0)
"""Factors on the prices of the relaxation at which choices are sought until one fits."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What the limits' prices prove.

    Attributes:
        marginals: By how much labels and pairs raise the bound.
        bound: A lower bound on the optimum under the limits.
    """

    marginals: Marginals
    bound: float


class Auto(Solver):
    """Exact; the method is described at the top of the module."""

    counts: ClassVar[bool] = True

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        if (frame := frame_of(problem)) is not None:
            _run_akin(problem, frame, budget)
            return
        prepared = prepare(problem)
        merged = None if prepared is None else merge(prepared.field, Memory.of(problem, prepared.labels))
        if prepared is None or merged is None:
            budget.raise_bound(math.inf)
            return
        exact(prepared, merged, budget)


def exact(prepared: Prepared, merged: Merged, budget: Budget) -> None:
    """Raise the bound and offer choices until the budget is done."""
    _Search(prepared, merged, budget).run()


def _run_akin(problem: Problem, frame: Frame, budget: Budget) -> None:
    """As `Auto.run` on a problem without limits that is one of many."""
    if not frame.is_permitted:
        budget.raise_bound(math.inf)
        return
    core = frame.core(problem)
    budget.raise_bound(core.flat.lowest_cost(), EXACT)

    def offer(labels: Sequence[int], bound: float) -> None:
        budget.raise_bound(bound, EXACT)
        budget.offer(frame.strategies(core, labels))

    found = _Minimiser(budget).of_flat(core.flat, frame.order(core), budget.upper, offer)
    if found is not None:
        offer(*found)


class _Minimiser:
    """Minimises fields without limits."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def of(
        self,
        field: Field,
        *,
        rounded: bool = False,
        enough: float = math.inf,
        tell: Callable[[list[int], float], None] | None = None,
    ) -> tuple[list[int], float] | None:
        """Return a minimiser of a field and a bound on its minimum; None if the budget ran out.

        Args:
            field: The field.
            rounded: Whether the choice may be a fractional one rounded, and forbidden.
            enough: A bound from which on the choice may be any.
            tell: If the field is wide, it is given a choice and a bound before what takes long.
        """
        reduced = eliminate(field)
        order = order_of(reduced.field, MAX_ENTRIES, MAX_WORK)
        if order is not None:
            found = self._by_elimination(reduced.field, order)
        else:
            closing = close_in(reduced.field, self._budget, enough)
            if tell is not None and not closing.closed:
                tell(reduced.invert(closing.labels), closing.bound)
            found = self._finished(reduced.field, closing, rounded=rounded)
        return None if found is None else (reduced.invert(found[0]), found[1])

    def of_flat(
        self, flat: Flat, order: Sequence[int] | None, enough: float, tell: Callable[[list[int], float], None]
    ) -> tuple[list[int], float] | None:
        """As `of`, of a field in arrays whose nodes have more than two neighbours each.

        Args:
            flat: The field.
            order: An order to eliminate its nodes in; None if tables get too large.
            enough: As of `of`.
            tell: The same.
        """
        if order is not None:
            return self._by_elimination(flat.field, order)
        closing = close_in_flat(flat, self._budget, enough)
        if closing.closed:
            return closing.labels, closing.bound
        tell(closing.labels, closing.bound)
        return self._finished(flat.field, closing, rounded=False)

    def _finished(self, field: Field, closing: Closing, *, rounded: bool) -> tuple[list[int], float] | None:
        """As `of`, given what messages and trees have found."""
        if closing.closed:
            return closing.labels, closing.bound
        if self._budget.spent():
            return None
        part = field.restrict(closing.kept)
        if not part.propagate():
            self._budget.raise_bound(math.inf)
            return None
        alive = [np.flatnonzero(np.isfinite(u)) for u in part.unary]
        part = part.restrict(alive)
        if sum(map(len, alive)) <= (1 - LEAST_DROPPED) * sum(map(len, field.unary)):
            found = self.of(part, rounded=rounded)
        else:
            found = self._by_program(part, rounded=rounded)
        if found is None:
            return None
        kept = [own[left] for own, left in zip(closing.kept, alive, strict=True)]
        labels = [int(own[label]) if len(own) else 0 for own, label in zip(kept, found[0], strict=True)]
        return labels, max(found[1], closing.bound)

    def _by_elimination(self, field: Field, order: Sequence[int]) -> tuple[list[int], float] | None:
        """As `of`, by elimination of all nodes."""
        eliminated = eliminate_all(field, order, self._budget)
        return None if eliminated is None else (eliminated.choice(), eliminated.optimum)

    def _by_program(self, field: Field, *, rounded: bool) -> tuple[list[int], float] | None:
        """As `of`, by elimination if that has become possible, else by a linear program."""
        reduced = eliminate(field)
        core = reduced.field
        order = order_of(core, MAX_ENTRIES, MAX_WORK)
        if order is not None:
            found = self._by_elimination(core, order)
            return None if found is None else (reduced.invert(found[0]), found[1])
        if rounded:
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
    """One run on one problem."""

    def __init__(self, prepared: Prepared, merged: Merged, budget: Budget) -> None:
        self._prepared = prepared
        self._merged = merged
        self._field = merged.field
        self._memory = merged.memory
        self._budget = budget
        self._minimiser = _Minimiser(budget)
        self._broken: set[int] = set()

    def run(self) -> None:
        """Raise the bound and offer choices until the budget is done."""
        if self._memory.hopeless():
            self._budget.raise_bound(math.inf)
            return
        self._budget.raise_bound(self._field.lowest_cost(), EXACT)
        relaxed = self._minimiser.of(self._field, enough=self._budget.upper, tell=self._open)
        if relaxed is None:
            return
        labels, bound = relaxed
        self._budget.raise_bound(bound, EXACT)
        if self._offer(labels) or self._budget.spent():
            return
        self._merged, parts = settle(self._merged.restrict(undominated(self._field, self._memory)))
        self._field, self._memory = self._merged.field, self._merged.memory
        if parts > 1 and solve_apart(self._prepared, self._merged, self._budget, Auto().run):
            return
        reduced = eliminate(self._field, keep=self._memory.users())
        if order_of(reduced.field, MAX_ENTRIES, MAX_WORK) is not None:
            known = self._price(reduced.field)
        else:
            known = self._relax(reduced.field)
        if not self._budget.spent():
            self._branch(reduced, known)

    def _offer(self, labels: Sequence[int]) -> bool:
        return self._budget.offer(self._prepared.strategies(self._merged.invert(labels)))

    def _open(self, labels: list[int], bound: float) -> None:
        """Take down what is known before the linear program, which may take all that is left of the budget."""
        self._budget.raise_bound(bound, EXACT)
        for start in (labels, greedy(self._field.softened())):
            self._improve(start)

    def _improve(self, labels: Sequence[int]) -> None:
        """Offer what repair and descent reach from `labels`."""
        state = State(self._field, self._memory, labels)
        if repair(state, self._budget):
            descend(state, self._budget)
            self._offer(state.labels)

    def _price(self, field: Field) -> Known | None:
        """Price the limits, and return by how much labels of `field` raise the bound at the best prices."""

        def oracle(prices: Floats) -> tuple[list[int], float, float] | None:
            answer = self._minimiser.of(self._priced(prices))
            if answer is None:
                return None
            found, total = answer
            return found, total - float(prices @ self._memory.profile(found)), total

        best = price_limits(oracle, self._memory, self._budget, self._field.highest_cost(), self._improve)
        self._broken |= set(self._memory.times[best.prices > 0].tolist())
        order = order_of(field, MAX_ENTRIES, MAX_WORK)
        assert order is not None, "the caller has seen that the field can be eliminated"
        priced = field.copy()
        costs = self._memory.prices(best.prices, [len(u) for u in self._field.unary])
        priced.unary = [u + c if len(u) else u for u, c in zip(field.unary, costs, strict=True)]
        eliminated = eliminate_all(priced, order, self._budget)
        return None if eliminated is None else Known(eliminated.marginals(), best.bound)

    def _relax(self, field: Field) -> Known | None:
        """As `_price`, by the linear program with limits: for fields too wide to eliminate."""
        relaxed = lazy_rows.relaxation(field, self._memory, self._budget, highs.run, self._broken)
        program, outcome, duals = relaxed.plain, relaxed.outcome, relaxed.plain_outcome.duals
        if outcome.duals is None or duals is None or self._budget.spent():
            return None
        prices = np.zeros(self._memory.num_rows)
        prices[list(program.limits)] = program.prices(duals) / self._memory.scales[list(program.limits)]
        for factor in DEARER:
            answer = self._minimiser.of(self._priced(factor * prices), rounded=True)
            if answer is None:
                return None
            self._improve(answer[0])
            if self._offer(answer[0]):
                break
        thinned, order = thin(relaxed.program.residual(outcome.duals), MAX_ENTRIES // 4, MAX_WORK // 4)
        eliminated = eliminate_all(thinned, order, self._budget)
        return None if eliminated is None else Known(eliminated.marginals(), outcome.bound)

    def _priced(self, prices: Floats) -> Field:
        field = self._field.copy()
        sizes = [len(u) for u in field.unary]
        field.unary = [u + p for u, p in zip(field.unary, self._memory.prices(prices, sizes), strict=True)]
        return field

    def _branch(self, reduced: Reduced, known: Known | None) -> None:
        """Look for a choice just above the bound, then further up, until there is one or the incumbent is reached.

        Below a low ceiling little is left to branch on, and finding nothing there raises the bound to the ceiling.
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

    def _branch_below(self, reduced: Reduced, ceiling: float, known: Known | None) -> None:
        """Find the best choice that costs less than `ceiling`, or raise the bound to it."""
        field = reduced.field
        if known is not None and math.isfinite(ceiling):
            room = ceiling - known.bound + OPTIMALITY_TOLERANCE * abs(known.bound)
            field = known.marginals.below(field, room)
        if not field.propagate():
            self._budget.raise_bound(ceiling, EXACT)
            return
        alive = [np.flatnonzero(np.isfinite(u)) for u in field.unary]
        field = field.restrict(alive)
        memory = self._memory.restrict([part if len(part) else np.arange(1) for part in alive])
        if memory.hopeless():
            self._budget.raise_bound(ceiling, EXACT)
            return
        better = undominated(field, memory)
        alive = [part[kept] for part, kept in zip(alive, better, strict=True)]
        field, memory = (
            field.restrict(better),
            memory.restrict([kept if len(kept) else np.arange(1) for kept in better]),
        )
        rest = eliminate(field, keep=memory.users())

        def offer(core: list[int]) -> bool:
            labels = [int(kept[s]) if len(kept) else 0 for kept, s in zip(alive, rest.invert(core), strict=True)]
            return self._offer(reduced.invert(labels))

        # What was dropped costs at least the ceiling, so a bound of what is left holds up to there.
        lazy_rows.minimise(
            rest.field,
            memory,
            self._budget,
            partial(highs.run, ceiling=ceiling),
            offer,
            report=lambda bound: self._budget.raise_bound(min(bound, ceiling)),
            broken_before=self._broken,
            cover_rounds=lazy_rows.COVER_ROUNDS,
        )
