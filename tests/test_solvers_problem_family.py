"""Problems that differ in costs only are solved as exactly as each of them alone."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.formulate.manual_recipes import restrict
from autopar.problem import Kinship, Limit, Problem, Recipe, Termination, Usage, check
from autopar.solvers.auto import Auto
from autopar.solvers.bounds.dual_ascent import ascend_flat
from autopar.solvers.exact.brute_force import BruteForce
from autopar.solvers.model import problem_family
from autopar.solvers.model.problem_family import ProblemFamily, family_of
from autopar.solvers.reductions.elimination import MAX_ENTRIES, MAX_WORK, elimination_order

TIED, SUMS, FREE = "tied", "sums", "free"
"""Type of an edge: functional, separable, or general."""


@st.composite
def families(draw: st.DrawFn) -> list[Problem]:
    """Return problems with common nodes, edges and forbidden pairs."""
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    pairs = [(a, b) for a in range(len(sizes)) for b in range(len(sizes)) if a != b]
    ends = draw(st.lists(st.sampled_from(pairs), max_size=12)) if pairs else []
    kinds = [draw(st.sampled_from((TIED, SUMS, FREE, FREE))) for _ in ends]
    share = draw(st.sampled_from((0.0, 0.1, 0.4)))
    closed = []
    for (a, b), kind in zip(ends, kinds, strict=True):
        if kind == TIED:
            partner = random.integers(sizes[b], size=sizes[a])
            closed.append(np.arange(sizes[b])[None, :] != partner[:, None])
        else:
            closed.append(random.random((sizes[a], sizes[b])) < (share if kind == FREE else 0.0))
    kinship, found = Kinship(), []
    for _ in range(draw(st.integers(1, 3))):
        edges = []
        for (a, b), kind, own in zip(ends, kinds, closed, strict=True):
            table = random.integers(-3, 6, (sizes[a], sizes[b])).astype(float)
            if kind == SUMS:
                table = table[:, :1] + table[:1]
            edges.append((a, b, np.where(own, np.inf, table), float(random.integers(0, 3))))
        costs = [random.integers(-3, 6, size).astype(float) for size in sizes]
        found.append(replace(Problem.build(costs, edges), kinship=kinship))
    return found


@given(families())
@settings(max_examples=150, deadline=None)
def test_members_have_the_optimum_of_the_problem_alone(members: list[Problem]) -> None:
    for problem in members:
        found = Auto().solve(problem)
        expected = BruteForce().solve(replace(problem, kinship=None))
        check(problem, found)
        assert found.termination is expected.termination
        assert found.cost == pytest.approx(expected.cost)
        assert found.bound == pytest.approx(expected.bound)


@given(families())
@settings(max_examples=60, deadline=None)
def test_a_wide_core_is_solved_exactly(members: list[Problem]) -> None:
    """If the core is not eliminated, dual ascent and search solve it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem_family, "MAX_ENTRIES", 0)
        for problem in members:
            found = Auto().solve(problem)
            expected = BruteForce().solve(replace(problem, kinship=None))
            check(problem, found)
            assert found.cost == pytest.approx(expected.cost)
            assert found.bound == pytest.approx(expected.bound)


def test_a_core_too_slow_to_eliminate_has_no_order() -> None:
    """Five nodes with fourteen labels, all neighbours: tables are small enough, but the work is too much."""
    random = np.random.default_rng(0)
    nodes = range(5)
    edges = [(one, two, random.random((14, 14)), 1.0) for one in nodes for two in nodes if one < two]
    problem = replace(Problem.build([random.random(14) for _ in nodes], edges), kinship=Kinship())
    family = family_of(problem)
    assert family is not None
    core = family.core(problem)

    assert elimination_order(core.flat.field, MAX_ENTRIES, MAX_WORK) is not None
    assert family.order(core) is None
    found, expected = Auto().solve(problem), Auto().solve(replace(problem, kinship=None))
    assert found.cost == pytest.approx(expected.cost)
    assert found.bound == pytest.approx(expected.bound)


def test_elimination_enlarges_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes with few labels between two with many: eliminating them makes a large table from small ones."""
    random = np.random.default_rng(0)
    costs = [random.random(size) for size in (12, 12, 2, 2, 2)]
    edges = [(end, node, random.random((12, 2)), 1.0) for node in (2, 3, 4) for end in (0, 1)]
    problem = replace(Problem.build(costs, edges), kinship=Kinship())
    expected, tried = Auto().solve(replace(problem, kinship=None)), []
    reduce = problem_family._reduce

    def counted(*args: Any) -> int:
        tried.append(int(reduce(*args)))
        return tried[-1]

    monkeypatch.setattr(problem_family, "MOST_NEW", 1)
    monkeypatch.setattr(problem_family, "_reduce", counted)
    found = Auto().solve(problem)
    assert tried[0] == -1
    assert tried[-1] == 5
    assert found.cost == pytest.approx(expected.cost)
    assert found.bound == pytest.approx(expected.bound)


@given(families())
@settings(max_examples=60, deadline=None)
def test_a_core_has_the_costs_of_its_problem(members: list[Problem]) -> None:
    """For any labels of the core, the remaining nodes get their best labels."""
    for problem in members:
        family = family_of(problem)
        assert family is not None
        if not family.is_permitted:
            continue
        core = family.core(problem)
        random = np.random.default_rng(0)
        sizes = np.diff(core.flat.offsets)
        for _ in range(3):
            labels = random.integers(sizes) if len(sizes) else np.zeros(0, np.int64)
            own, whole = core.flat.cost(labels), problem.cost(family.strategies(core, labels.tolist()))
            assert own == pytest.approx(whole)


def _ring(weight: float, kinship: Kinship | None, **more: Any) -> Problem:
    """Return four nodes in a ring with both diagonals: no node has at most two neighbours."""
    table = np.array([[0.0, 2.0, 5.0], [3.0, 0.0, 1.0], [1.0, 4.0, 0.0]])
    edges = [(a, b, table if (a + b) % 2 else table[::-1].copy(), weight) for a in range(4) for b in range(a + 1, 4)]
    built = Problem.build([np.array([0.0, 1.0, 2.0])] * 4, edges)
    return replace(built, kinship=kinship, **more)


def test_a_family_is_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kinship, made = Kinship(), []
    begin = ProblemFamily.__init__

    def counted(self: ProblemFamily, problem: Problem) -> None:
        made.append(problem)
        begin(self, problem)

    monkeypatch.setattr(ProblemFamily, "__init__", counted)
    costs = [Auto().solve(_ring(weight, kinship)).cost for weight in (1.0, 2.0, 3.0)]
    assert costs == [BruteForce().solve(_ring(weight, None)).cost for weight in (1.0, 2.0, 3.0)]
    assert len(made) == 1
    assert len({id(family_of(_ring(weight, kinship))) for weight in (1.0, 2.0)}) == 1


def test_only_float_problems_with_kinship_and_without_limits_have_a_family() -> None:
    assert family_of(_ring(1.0, None)) is None
    usages, limits = (Usage(0, 0, 1, np.ones(3)),), (Limit(2.0, 0, 1),)
    assert family_of(_ring(1.0, Kinship(), usages=usages, limits=limits)) is None
    whole = replace(Problem.build([[1, 2], [3, 4]], [(0, 1, [[1, 2], [3, 4]])]), kinship=Kinship())
    assert family_of(whole) is None


def test_a_restricted_problem_leaves_its_family() -> None:
    """The restriction forbids more than the family does."""
    problem = _ring(1.0, Kinship())
    Auto().solve(problem)
    narrowed = restrict(problem, Recipe("last", ((2,),) * 4))
    assert narrowed.kinship is None
    assert Auto().solve(narrowed).choice == (2, 2, 2, 2)


def test_forbidden_pairs_of_edges_without_weight_stay_forbidden() -> None:
    """The cheapest pair is forbidden by an edge of weight 0."""
    table = np.array([[np.inf, 0.0], [0.0, 0.0]])
    problem = replace(
        Problem.build([np.array([0.0, 3.0]), np.array([0.0, 1.0])], [(0, 1, table, 0.0)]), kinship=Kinship()
    )
    assert Auto().solve(problem).choice == (0, 1)


def test_a_family_without_a_permitted_choice_is_infeasible() -> None:
    table = np.full((2, 2), np.inf)
    problem = replace(Problem.build([np.zeros(2)] * 2, [(0, 1, table)]), kinship=Kinship())
    assert Auto().solve(problem).termination is Termination.INFEASIBLE


def test_the_ascent_stops_at_the_requested_gap() -> None:
    """The sweeps end at the requested gap, and the reported bound is valid."""
    problem = _ring(1.0, Kinship())
    best = BruteForce().solve(replace(problem, kinship=None)).cost
    loose = Auto().solve(problem, gap=0.5)
    assert loose.bound <= best * (1 + 1e-9)
    assert loose.cost >= best
    assert loose.cost - loose.bound <= 0.5 * abs(loose.cost) + 1e-9


def test_both_forms_of_a_field_have_equal_ascents() -> None:
    from autopar.solvers.base import Budget
    from autopar.solvers.bounds.dual_ascent import ascend

    problem = _ring(2.0, Kinship())
    family = family_of(problem)
    assert family is not None
    flat = family.core(problem).flat
    budget = Budget(problem, 10.0, None, np.inf, 1e-6, None)
    one, other = ascend(flat.field, budget), ascend_flat(flat, budget)
    assert one.closed == other.closed
    assert other.bound == pytest.approx(one.bound)
    assert flat.cost(np.array(other.labels)) == pytest.approx(flat.cost(np.array(one.labels)))


def test_a_long_chain_is_eliminated_in_time_that_grows_with_its_length() -> None:
    """The next node is taken from a heap: a scan of 30,000 nodes would take 5e8 steps."""
    random, count = np.random.default_rng(0), 30_000
    costs = [random.random(3) for _ in range(count)]
    edges = [(node, node + 1, random.random((3, 3)), 1.0) for node in range(count - 1)]
    problem = replace(Problem.build(costs, edges), kinship=Kinship())
    family = family_of(problem)
    assert family is not None
    began = time.process_time()

    core = family.core(problem)

    assert len(core.nodes) == 0
    assert time.process_time() - began < 5.0
