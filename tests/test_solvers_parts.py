"""The exact reductions of the solvers, each against brute force."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.problem import FORBIDDEN, Problem
from autopar.solvers import auto
from autopar.solvers.backends import highs
from autopar.solvers.base import Budget
from autopar.solvers.bounds.local_polytope import linear_program, scale_of
from autopar.solvers.model.graphical_model import Field, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.contraction import contract
from autopar.solvers.reductions.dominance import undominated
from autopar.solvers.reductions.elimination import drop_weak_tables, eliminate, eliminate_all, elimination_order
from tests.checks import check_exact, choices
from tests.strategies import problems, tied_problems

DUST = 1e-9
"""Tolerated relative difference of sums of few equal numbers in different orders."""


def budget(problem: Problem) -> Budget:
    """Return a budget without limits."""
    return Budget(problem, math.inf, None, math.inf, 0.0, None)


def labellings(field: Field) -> list[tuple[int, ...]]:
    """Return every choice of a field; removed nodes have label 0."""
    return list(product(*(range(max(1, len(u))) for u in field.unary)))


def same(a: float, b: float) -> bool:
    """Return whether two sums are equal but for rounding."""
    return a == b or abs(a - b) <= DUST * max(abs(a), abs(b))


@given(problem=problems())
@settings(max_examples=60)
def test_preparation_keeps_the_optimum_and_all_costs(problem: Problem) -> None:
    """The field of a problem costs what the problem costs, and lacks only choices that are forbidden."""
    prepared = prepare(problem)
    best = min(problem.cost(c) for c in choices(problem))

    if prepared is None:
        assert best == math.inf
        return
    assert same(min(prepared.field.cost(c) for c in labellings(prepared.field)), best)
    for labels in labellings(prepared.field):
        assert same(prepared.field.cost(labels), problem.cost(prepared.strategies(labels)))


@given(problem=tied_problems())
@settings(max_examples=150)
def test_contraction_keeps_exactly_the_permitted_choices(problem: Problem) -> None:
    """Every choice of the contracted field is a choice of the problem with equal cost and use, and none is missing.

    Labels are removed only if no permitted choice has them.
    """
    prepared = prepare(problem)
    permitted = {c: problem.cost(c) for c in choices(problem) if problem.cost(c) < math.inf}
    contraction = None if prepared is None else contract(prepared.field, Memory.of(problem, prepared.labels))

    if prepared is None or contraction is None:
        assert not permitted
        return
    found = {}
    for labels in labellings(contraction.field):
        cost = contraction.field.cost(labels)
        if cost < math.inf:
            choice = prepared.strategies(contraction.invert(labels))
            found[choice] = cost
            fits = bool((contraction.memory.profile(labels) <= contraction.memory.limits).all())
            assert fits == problem.fits(choice)
    assert found == permitted


def test_a_cycle_of_functional_constraints_contracts_to_one_node() -> None:
    """Three nodes in a ring, and one that follows the ring, contract to one node without a table."""
    ring = [(0, 1, [[1, FORBIDDEN], [FORBIDDEN, 2]]), (1, 2, [[FORBIDDEN, 3], [4, FORBIDDEN]])]
    problem = Problem.build(
        [[0, 0], [0, 0], [0, 0], [5, 6, 7]],
        [*ring, (2, 0, [[FORBIDDEN, 5], [6, FORBIDDEN]]), (2, 3, [[0, *[FORBIDDEN] * 2], [*[FORBIDDEN] * 2, 0]])],
    )
    prepared = prepare(problem)
    assert prepared is not None

    contraction = contract(prepared.field, Memory.unlimited())

    assert contraction is not None
    assert [len(u) for u in contraction.field.unary] == [2]
    assert not contraction.field.tables
    assert prepared.strategies(contraction.invert([0])) == (0, 0, 1, 2)
    assert contraction.field.cost([0]) == problem.cost((0, 0, 1, 2)) == 1 + 3 + 6 + 7


@given(problem=problems())
@settings(max_examples=60)
def test_elimination_inverts_to_an_optimum(problem: Problem) -> None:
    """The reduced field has the original optimum, and its best choice maps back to an optimal choice."""
    prepared = prepare(problem)
    assume(prepared is not None)
    assert prepared is not None
    reduced = eliminate(prepared.field)

    left = min(labellings(reduced.field), key=reduced.field.cost)

    best = min(problem.cost(c) for c in choices(problem))
    assert same(reduced.field.cost(left), best)
    assert same(problem.cost(prepared.strategies(reduced.invert(left))), best)


@given(problem=problems(max_nodes=5))
@settings(max_examples=60)
def test_min_marginals_are_exact(problem: Problem) -> None:
    """A label's min-marginal is the least cost of a choice with it, minus the optimum; likewise of a pair."""
    prepared = prepare(problem)
    assume(prepared is not None)
    assert prepared is not None
    field = prepared.field
    order = elimination_order(field, 10**6, 10**7)
    assert order is not None
    eliminated = eliminate_all(field, order, budget(problem))
    assert eliminated is not None

    marginals = eliminated.marginals()

    costs = {labels: field.cost(labels) for labels in labellings(field)}
    best = min(costs.values())
    assert same(eliminated.optimum, best)
    assert same(costs[tuple(eliminated.choice())], best)
    size = max(1e-300, *(abs(c) for c in costs.values() if math.isfinite(c)))
    for node, rises in enumerate(marginals.nodes):
        for label, rise in enumerate(rises.tolist()):
            least = min(c for labels, c in costs.items() if labels[node] == label)
            assert rise == least - best or abs(rise - (least - best)) <= DUST * size
    for (a, b), table in marginals.pairs.items():
        for (s, t), rise in np.ndenumerate(table):
            least = min(c for labels, c in costs.items() if labels[a] == s and labels[b] == t)
            assert rise == least - best or abs(rise - (least - best)) <= DUST * size


@given(problem=problems(limited=True))
@settings(max_examples=60)
def test_removing_dominated_strategies_keeps_an_optimum(problem: Problem) -> None:
    """At least one optimum under the limits consists of kept labels."""
    prepared = prepare(problem)
    assume(prepared is not None)
    assert prepared is not None

    kept = undominated(prepared.field, Memory.of(problem, prepared.labels))

    remaining = product(*(s[k].tolist() for s, k in zip(prepared.labels, kept, strict=True)))
    best, of_kept = (
        min((problem.cost(c) for c in some if problem.fits(c)), default=math.inf)
        for some in (choices(problem), remaining)
    )
    assert same(of_kept, best)


@given(problem=problems(limited=True))
@settings(max_examples=60)
def test_memory_rows_are_the_limits(problem: Problem) -> None:
    """Memory rows are broken exactly by infeasible choices, before and after labels are dropped."""
    labels = tuple(np.arange(size) for size in problem.num_strategies)
    memory = Memory.of(problem, labels)
    halves = [np.arange((size + 1) // 2) for size in problem.num_strategies]
    smaller = memory.restrict(halves)

    for choice in choices(problem):
        assert bool((memory.profile(choice) <= memory.limits).all()) == problem.fits(choice)
        if all(s < len(half) for s, half in zip(choice, halves, strict=True)):
            assert bool((smaller.profile(choice) <= smaller.limits).all()) == problem.fits(choice)


@given(problem=problems(limited=False))
@settings(max_examples=40)
def test_reduced_costs_bound_every_choice(problem: Problem) -> None:
    """No choice costs less than the dual bound plus its reduced cost, with or without the weak tables."""
    prepared = prepare(problem)
    assume(prepared is not None)
    assert prepared is not None
    field = prepared.field
    program = linear_program(field, scale_of(field))
    outcome = highs.run(program, False, budget(problem))
    assert outcome.duals is not None

    residual = program.reduced_cost_field(outcome.duals)

    thinned, _ = drop_weak_tables(residual, 8, 100)
    for labels in labellings(field):
        cost = field.cost(labels)
        room = DUST * max(abs(cost), abs(outcome.bound)) if math.isfinite(cost) else 0.0
        assert outcome.bound + residual.cost(labels) <= cost + room
        assert thinned.cost(labels) <= residual.cost(labels)


def test_auto_is_exact_where_elimination_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables limited to four entries the linear program replaces elimination."""
    monkeypatch.setattr(auto, "MAX_ENTRIES", 4)

    @settings(max_examples=150)
    @given(problem=problems())
    def law(problem: Problem) -> None:
        check_exact(problem, "auto")

    law()


@given(problem=problems(), factor=st.sampled_from([1, 7, 10**6, 10**12 + 1]))
@settings(max_examples=40)
def test_scaling_the_linear_program_rounds_nothing(problem: Problem, factor: int) -> None:
    """Integer costs are recovered exactly, and the largest scaled spread is 500 to 1000."""
    prepared = prepare(problem)
    assume(prepared is not None and problem.is_whole)
    assert prepared is not None
    field = prepared.field
    field.unary = [u * factor for u in field.unary]
    field.tables = {pair: table * factor for pair, table in field.tables.items()}

    scale = scale_of(field)

    costs = [*field.unary, *(table.ravel() for table in field.tables.values())]
    finite = [c[np.isfinite(c)] for c in costs]
    spread = max((float(c.max() - c.min()) for c in finite if len(c)), default=0.0)
    assert all(np.array_equal(c / scale * scale, c) for c in finite)
    assert spread == 0 or 500 < spread / scale <= 1000
