"""All reductions in turn, their record, and the split into components, against brute force."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from autopar.problem import FORBIDDEN, Limit, Problem, Termination, Usage
from autopar.solvers import Solver, auto, portfolio
from autopar.solvers.auto import Auto
from autopar.solvers.model.graphical_model import Field, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.portfolio import Portfolio
from autopar.solvers.reductions import components
from autopar.solvers.reductions.components import Component, fix_unconstrained, split
from autopar.solvers.reductions.contraction import contract
from autopar.solvers.reductions.presolve import ProblemSize, presolve
from tests.checks import check_solution, choices, close
from tests.instances import knapsack
from tests.strategies import problems, tied_problems


def best_of(part: Component) -> tuple[int, ...] | None:
    """Return the best labels of a component under its limits; None if it is infeasible."""
    room = part.memory.limits + 1e-9 * part.memory.scales
    labels = product(*(range(max(1, len(u))) for u in part.field.unary))
    fitting = [c for c in labels if (part.memory.profile(c) <= room).all() and part.field.cost(c) < math.inf]
    return min(fitting, key=part.field.cost, default=None)


@given(problem=problems(max_nodes=5))
@settings(max_examples=150)
def test_optima_of_the_presolved_components_form_an_optimum(problem: Problem) -> None:
    """Best choices of the components map to a best choice; if one component is infeasible, so is the problem."""
    best = min((problem.cost(c) for c in choices(problem) if problem.fits(c)), default=math.inf)

    _, left = presolve(problem)

    found = [best_of(part) for part in left.parts.parts] if left is not None else [None]
    if best == math.inf:
        assert None in found
        return
    assert left is not None
    choice = left.invert([labels for labels in found if labels is not None])
    assert problem.fits(choice)
    assert close(problem, problem.cost(choice), best)


@given(first=problems(max_nodes=3), second=problems(max_nodes=3))
@settings(max_examples=60)
def test_components_are_disjoint_and_their_optima_add_up(first: Problem, second: Problem) -> None:
    """No table and no usage joins two components, and every remaining node is in one component."""
    rng = np.random.default_rng(first.num_nodes)
    sizes = [2] * (first.num_nodes + second.num_nodes)
    field = Field([rng.integers(0, 9, size).astype(float) for size in sizes])
    for shift, problem in ((0, first), (first.num_nodes, second)):
        for a, b in problem.edge_nodes.tolist():
            field.add(a + shift, b + shift, rng.integers(0, 9, (2, 2)).astype(float))
    usages = [Usage(n, t, t + 2, rng.integers(0, 9, 2)) for n, t in enumerate(rng.integers(0, 12, len(sizes)))]
    flat = Problem.build([[0, 0] for _ in sizes], usages=usages, limit=12)
    memory = Memory.of(flat, [np.arange(2) for _ in sizes]).restrict([np.arange(2) for _ in sizes])
    whole = best_of(Component(np.arange(len(sizes)), field, memory))

    parts = split(field, memory)

    found = [best_of(part) for part in parts.parts]
    assert sorted(n for part in parts.parts for n in part.nodes.tolist()) == list(range(len(sizes)))
    if whole is None:
        assert None in found
    else:
        labels = parts.invert([each for each in found if each is not None])
        assert field.cost(labels) == pytest.approx(field.cost(whole))
        assert (memory.profile(labels) <= memory.limits).all()


def test_a_limit_that_two_nodes_share_joins_them() -> None:
    """Nodes 0 and 1 use at time 0, nodes 2 and 3 at time 5, of a limit that two dear strategies break; 4 is alone."""
    usages = [Usage(node, 5 * (node // 2), 5 * (node // 2) + 1, np.array([0, 3])) for node in range(4)]
    problem = Problem.build([[1.0, 0.0]] * 5, usages=usages, limit=5)
    memory = Memory.of(problem, [np.arange(2)] * 5)

    parts = split(Field([np.array([1.0, 0.0])] * 5), memory)

    assert [part.nodes.tolist() for part in parts.parts] == [[0, 1], [2, 3], [4]]
    assert [part.memory.times.tolist() for part in parts.parts] == [[0], [5], []]


def test_a_usage_over_two_times_joins_the_users_of_both() -> None:
    """Node 0 uses at times 0 to 9, nodes 1 and 2 at its ends: all three form one component."""
    spans = [(0, 10), (0, 1), (9, 10)]
    usages = [Usage(node, start, end, np.array([0, 3])) for node, (start, end) in enumerate(spans)]
    problem = Problem.build([[1.0, 0.0]] * 3, usages=usages, limit=5)

    parts = split(Field([np.array([1.0, 0.0])] * 3), Memory.of(problem, [np.arange(2)] * 3))

    assert [part.nodes.tolist() for part in parts.parts] == [[0, 1, 2]]
    assert parts.parts[0].memory.times.tolist() == [0, 9]


@given(problem=problems(limited=True) | tied_problems())
@settings(max_examples=100)
def test_dropped_rows_are_implied(problem: Problem) -> None:
    """For every choice, all limits hold if those of the remaining rows do."""
    memory = Memory.of(problem, [np.arange(size) for size in problem.num_strategies])

    fewer = memory.without_implied_rows()

    assert set(fewer.times.tolist()) <= set(memory.times.tolist())
    for choice in choices(problem):
        assert (fewer.profile(choice) <= fewer.limits).all() == (memory.profile(choice) <= memory.limits).all()


def test_a_row_is_implied_by_a_neighbour_that_uses_more() -> None:
    """Worked out by hand: one node uses (4, 6), (5, 6), (3, 3) and (6, 1) of the limit at times 0, 1, 2 and 3.

    Time 1 implies time 0, and time 2. Time 3 stays: only there strategy 0 is too much.
    """
    use = [(4, 6), (5, 6), (3, 3), (6, 1)]
    usages = [Usage(0, t, t + 1, np.array(amounts)) for t, amounts in enumerate(use)]
    usages += [Usage(1, t, t + 1, np.array([0, 9])) for t in range(4)]
    problem = Problem.build([[0, 0], [0, 0]], usages=usages, limit=5)
    memory = Memory.of(problem, [np.arange(2)] * 2)
    assert memory.times.tolist() == [0, 1, 2, 3]

    assert memory.without_implied_rows().times.tolist() == [1, 3]


def test_every_reduction_is_recorded() -> None:
    """Worked out by hand.

    Four nodes of 3, 2, 2 and 2 strategies. The two edges of nodes 0 and 1 become one table. Strategy 2 of node 0 is
    forbidden. Only time 0 can break the limit. Node 1 follows node 0. Strategy 1 of node 3 is dearer than 0 and uses
    nothing less. Nodes 0 and 2 use what is limited, so both stay: two labels each, joined by the limit.
    """
    tie = np.array([[0, FORBIDDEN], [FORBIDDEN, 0], [0, 0]])
    edges = [(0, 1, tie), (0, 1, np.array([[1, 2], [3, 4], [5, 6]])), (1, 2, np.array([[0, 5], [5, 0]]))]
    usages = [Usage(node, 0, 2, np.array(use)) for node, use in ((0, [4, 0, 0]), (2, [0, 4]))]
    problem = Problem.build(
        [[0, 1, FORBIDDEN], [0, 0], [1, 0], [0, 9]],
        edges,
        usages=[*usages, Usage(3, 3, 4, np.array([1, 1]))],
        limit=[Limit(7, 0, 5)],
    )

    steps, left = presolve(problem)

    assert [(step.name, step.after) for step in steps] == [
        ("parallel edges", ProblemSize(4, 9, 2, 2)),
        ("forbidden strategies", ProblemSize(4, 8, 2, 2)),
        ("times that cannot bind", ProblemSize(4, 8, 2, 1)),
        ("followers", ProblemSize(3, 6, 1, 1)),
        ("strategies that no limit permits", ProblemSize(3, 6, 1, 1)),
        ("dominated strategies", ProblemSize(2, 4, 1, 1)),
        ("parts no limit binds", ProblemSize(2, 4, 1, 1)),
        ("degree at most 2", ProblemSize(2, 4, 1, 1)),
        ("largest of 1 components", ProblemSize(2, 4, 1, 1)),
    ]
    assert steps[0].before == ProblemSize(4, 9, 3, 2)
    assert all(first.after == second.before for first, second in pairwise(steps))
    assert left is not None


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=30)
def test_presolve_detects_infeasibility(problem: Problem, data: st.DataObject) -> None:
    """With a limit below every choice's peak some reduction proves infeasibility."""
    peak = min(problem.peak_usage(c) for c in choices(problem))
    last = max((u.end for u in problem.usages), default=0)
    limit = peak - data.draw(st.integers(1, 9))
    problem = Problem.build(
        problem.node_costs,
        [(a, b, problem.edge_tables[i]) for (a, b), i in zip(problem.edge_nodes, problem.edge_table_ids, strict=True)],
        usages=problem.usages,
        limit=[Limit(limit, 0, last + 1)],
    )

    _, left = presolve(problem)

    assert left is None or any(best_of(part) is None for part in left.parts.parts)


def strung(problems: Sequence[Problem]) -> Problem:
    """Return the disjoint union of problems, their times one after another."""
    nodes, times = 0, 0
    costs: list[Any] = []
    edges: list[tuple[int, int, Any, float]] = []
    usages: list[Usage] = []
    limits: list[Limit] = []
    for problem in problems:
        barred = FORBIDDEN if problem.is_whole else math.inf
        costs += [np.where(c >= barred, math.inf, c) for c in problem.node_costs]
        tables = [np.where(t >= barred, math.inf, t) for t in problem.edge_tables]
        weights = problem.edge_weights.tolist()
        ends = problem.edge_nodes + nodes
        edges += [(a, b, tables[i], w) for (a, b), i, w in zip(ends, problem.edge_table_ids, weights, strict=True)]
        usages += [replace(u, node=u.node + nodes, start=u.start + times, end=u.end + times) for u in problem.usages]
        limits += [replace(x, start=x.start + times, end=x.end + times) for x in problem.limits]
        nodes += problem.num_nodes
        times += 100
    return Problem.build(costs, edges, usages=usages, limit=limits)


@pytest.mark.parametrize(
    ("solver", "proves"), [(Auto(), True), (Portfolio(max_rounds=60, max_parts=3), False)], ids=["auto", "portfolio"]
)
def test_components_are_solved_separately(solver: Solver, proves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any grouping of components, choice and bound are those of the components together."""
    monkeypatch.setattr(components, "LEAST_LABELS", 1)
    monkeypatch.setattr(portfolio, "_is_narrow", lambda _contraction, _seconds: False)
    split_up: list[bool] = []

    def counted(*arguments: Any) -> bool:
        split_up.append(components.solve_components(*arguments))
        return split_up[-1]

    for module in (auto, portfolio):
        monkeypatch.setattr(module, "solve_components", counted)

    @settings(max_examples=60)
    @given(parts=st.lists(problems(max_nodes=4, limited=True), min_size=2, max_size=3))
    @example(parts=[knapsack(), knapsack()])
    def law(parts: list[Problem]) -> None:
        whole = strung(parts)
        best = sum(min((p.cost(c) for c in choices(p) if p.fits(c)), default=math.inf) for p in parts)

        solution = solver.solve(whole)

        check_solution(whole, solution)
        assert solution.bound <= best or close(whole, solution.bound, best)
        assert solution.cost >= best or close(whole, solution.cost, best)
        if proves:
            assert solution.termination is (Termination.INFEASIBLE if best == math.inf else Termination.OPTIMAL)

    law()
    assert any(split_up)


@given(problem=problems() | tied_problems())
@settings(max_examples=150)
def test_fixing_unconstrained_components_keeps_an_optimum(problem: Problem) -> None:
    """The remaining field has the original optimum, and its choices map back at equal cost."""
    prepared = prepare(problem)
    contraction = None if prepared is None else contract(prepared.field, Memory.of(problem, prepared.labels))
    assume(contraction is not None)
    assert prepared is not None
    assert contraction is not None
    best = min((problem.cost(c) for c in choices(problem) if problem.fits(c)), default=math.inf)

    settled, parts = fix_unconstrained(
        contraction.restrict([np.arange(len(unary)) for unary in contraction.field.unary])
    )

    found = best_of(Component(np.arange(len(settled.field.unary)), settled.field, settled.memory))
    assert parts <= len(settled.field.unary)
    assert len(settled.field.unary) + len(settled.decided - contraction.decided) >= len(contraction.field.unary)
    if best == math.inf:
        assert found is None
        return
    assert found is not None
    choice = prepared.strategies(settled.invert(found))
    assert problem.fits(choice)
    assert close(problem, problem.cost(choice), best)
    labels = prepared.choice(choice)
    assert labels is not None
    again = settled.choice(labels)
    assert again is not None
    assert settled.invert(again) == labels
