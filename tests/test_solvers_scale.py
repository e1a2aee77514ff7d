"""The scalable parts of the portfolio, each against brute force on small problems."""

import math
from collections.abc import Callable
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from autopar.problem import Problem, Termination, Usage
from autopar.solvers import portfolio
from autopar.solvers.base import Budget
from autopar.solvers.bounds.lagrangian_dual import DualInformation, LagrangianDual, peaks
from autopar.solvers.bounds.messages import Messages
from autopar.solvers.exact.core_problem import Core, CoreProver
from autopar.solvers.local_search.improve import Improver
from autopar.solvers.local_search.neighbourhood import solve, subproblem_of
from autopar.solvers.local_search.parallel_search import improve_together
from autopar.solvers.local_search.polish import Polisher
from autopar.solvers.local_search.tree_descent import VISITS, TreeDescent
from autopar.solvers.model.csr import FlatField, FlatMemory, indicator
from autopar.solvers.model.graphical_model import Field, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.portfolio import Portfolio
from autopar.solvers.reductions.contraction import Contraction, contract
from tests.checks import check_solution, choices, close
from tests.instances import k_tree
from tests.strategies import problems

DUST = 1e-9
"""Tolerated relative difference of sums of few equal numbers in different orders."""


def labellings(field: Field) -> list[tuple[int, ...]]:
    """Return every choice of a field."""
    return list(product(*(range(len(u)) for u in field.unary)))


def reduced(problem: Problem) -> Contraction:
    """Return the contracted problem; draws without a permitted choice are discarded."""
    prepared = prepare(problem)
    if prepared is None:
        reject()
    contraction = contract(prepared.field, Memory.of(problem, prepared.labels))
    if contraction is None:
        reject()
    return contraction


def fitting(contraction: Contraction) -> dict[tuple[int, ...], float]:
    """Return the feasible choices with their costs."""
    memory = contraction.memory
    found = {c: contraction.field.cost(c) for c in labellings(contraction.field)}
    return {c: cost for c, cost in found.items() if cost < math.inf and (memory.profile(c) <= memory.limits).all()}


def room(*costs: float) -> float:
    """Return the rounding error of sums of this size."""
    return DUST * max((abs(c) for c in costs if math.isfinite(c)), default=0.0)


@given(problem=problems(limited=False), data=st.data())
@settings(max_examples=100)
def test_any_messages_give_a_lower_bound(problem: Problem, data: st.DataObject) -> None:
    """Any messages give a lower bound; sweeps never lower it, and on a tree it becomes the optimum."""
    contraction = reduced(problem)
    flat = FlatField.of(contraction.field.softened())
    messages = Messages.zero(flat)
    seed = data.draw(st.integers(0, 2**32 - 1))
    scale = data.draw(st.sampled_from([0.0, 1.0, 1e6]))
    random = np.random.default_rng(seed)
    messages.to_first[:] = scale * random.normal(size=len(messages.to_first))
    messages.to_second[:] = scale * random.normal(size=len(messages.to_second))
    best = min(contraction.field.cost(c) for c in labellings(contraction.field))

    bounds = [messages.bound(flat, flat.unary)]
    for _ in range(30):
        swept = messages.sweep(flat, flat.unary)
        bounds.append(messages.bound(flat, flat.unary))

    assert all(b <= best for b in bounds)
    largest = max(float(np.abs(a).max(initial=0.0)) for a in (flat.tables, flat.unary))
    slack = DUST * (abs(best) + scale + largest)
    assert abs(swept - bounds[-1]) <= slack
    assert all(b >= a - slack for a, b in pairwise(bounds[1:]))
    if len(contraction.field.tables) <= 1:
        assert bounds[-1] >= best - slack


@given(problem=problems(limited=True))
@settings(max_examples=100)
def test_the_dual_and_its_reduced_costs_bound_feasible_choices(problem: Problem) -> None:
    """The bound holds at any prices, and a choice costs at least the bound plus each label's reduced cost."""
    contraction = reduced(problem)
    flat = FlatField.of(contraction.field.softened())
    dual = LagrangianDual(flat, FlatMemory.of(contraction.memory, flat.offsets))
    costs = fitting(contraction)
    best = min(costs.values(), default=math.inf)

    for _ in range(200):
        dual.run_round()
        assert dual.bound <= best
    guide = dual.information()
    bound, reduced_costs = guide.bound, guide.reduced_costs

    slack = 1e-9 * (float(np.abs(flat.unary).max()) + float(np.abs(flat.tables).max(initial=0.0)) + abs(bound))
    for choice, cost in costs.items():
        assert (bound + reduced_costs[flat.offsets[:-1] + np.array(choice)] <= cost + slack).all()


@given(excess=st.lists(st.integers(-2, 3), max_size=12), count=st.integers(1, 4))
def test_peaks_are_the_highest_of_each_run(excess: list[int], count: int) -> None:
    """Each run of broken segments gives its first highest one, by descending excess."""
    array = np.array(excess, np.float64)
    runs: list[list[int]] = []
    for t, value in enumerate(excess):
        if value > 0:
            runs.append([*runs.pop(), t]) if runs and runs[-1][-1] == t - 1 else runs.append([t])
    tops = sorted((max(run, key=lambda t: (excess[t], -t)) for run in runs), key=lambda t: (-excess[t], t))

    assert peaks(array, count).tolist() == tops[:count]


def _flat(contraction: Contraction) -> tuple[FlatField, FlatMemory]:
    flat = FlatField.of(contraction.field.softened())
    return flat, FlatMemory.of(contraction.memory, flat.offsets)


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=100)
def test_arrays_have_the_costs_and_uses_of_the_field(problem: Problem, data: st.DataObject) -> None:
    """The arrays of a field and its limits agree with the objects they were made from."""
    contraction = reduced(problem)
    flat, memory = _flat(contraction)
    choice = data.draw(st.sampled_from(labellings(contraction.field)))
    prices = np.array(
        data.draw(
            st.lists(st.integers(0, 5), min_size=contraction.memory.num_rows, max_size=contraction.memory.num_rows)
        ),
        float,
    )

    cost, use = contraction.field.cost(choice), contraction.memory.profile(choice)

    if cost < math.inf:
        assert abs(flat.cost(np.array(choice)) - cost) <= room(cost, float(np.abs(flat.tables).max(initial=1.0)))
    assert np.allclose(memory.profile(indicator(flat.offsets, choice)), use)
    expected = contraction.memory.prices(prices, [len(u) for u in contraction.field.unary])
    assert np.allclose(memory.priced(prices, len(flat.unary)), np.concatenate(expected))


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=100)
def test_a_subproblem_has_the_costs_and_limits_of_the_whole(problem: Problem, data: st.DataObject) -> None:
    """A change of free nodes has equal cost and feasibility in subproblem and whole; the best one is found."""
    contraction = reduced(problem)
    costs = fitting(contraction)
    assume(len(costs) > 0)
    flat, memory = _flat(contraction)
    present = np.array(data.draw(st.sampled_from(sorted(costs))), np.int64)
    count = len(contraction.field.unary)
    nodes = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True)), np.int64)
    kept = []
    for n in nodes.tolist():
        others = data.draw(st.sets(st.integers(0, len(contraction.field.unary[n]) - 1)))
        kept.append(np.array(sorted(others | {int(present[n])}), np.int64))
    profile = memory.profile(indicator(flat.offsets, present))

    subproblem = subproblem_of(contraction.field, memory, present, profile, nodes, kept)

    before = contraction.field.cost(present.tolist()) - subproblem.field.cost(subproblem.present)
    best = math.inf
    for choice in labellings(subproblem.field):
        whole = present.copy()
        whole[nodes] = subproblem.labels(choice)
        cost = contraction.field.cost(whole.tolist())
        found = before + subproblem.field.cost(choice)
        assert found == cost or abs(found - cost) <= room(found, cost)
        fits = bool((subproblem.memory.profile(choice) <= subproblem.memory.limits + 1e-9).all())
        assert fits == bool((contraction.memory.profile(whole.tolist()) <= contraction.memory.limits + 1e-9).all())
        best = min(best, found) if fits else best
    solved = solve(subproblem, Budget(problem, math.inf, None, math.inf, 0.0, None))
    if solved is not None:
        whole = present.copy()
        whole[nodes] = solved
        assert contraction.field.cost(whole.tolist()) <= best + 1e-5 * abs(best)
    priced = solve(subproblem, Budget(problem, math.inf, None, math.inf, 0.0, None), np.ones(len(memory.limits)))
    if priced is not None:
        whole = present.copy()
        whole[nodes] = priced
        assert tuple(whole.tolist()) in costs
        assert costs[tuple(whole.tolist())] <= costs[tuple(present.tolist())] + room(
            best, costs[tuple(present.tolist())]
        )


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=60)
def test_the_incumbent_stays_feasible_and_never_gets_worse(problem: Problem, data: st.DataObject) -> None:
    """Every step keeps a feasible choice, and after many steps a problem that fits one subproblem is solved."""
    contraction = reduced(problem)
    costs = fitting(contraction)
    assume(len(costs) > 0 and any(len(u) > 1 for u in contraction.field.unary))
    flat, memory = _flat(contraction)
    present = np.array(data.draw(st.sampled_from(sorted(costs))), np.int64)
    everything = DualInformation(-1e9, np.zeros(len(flat.unary)), np.ones(contraction.memory.num_rows))
    dual = LagrangianDual(flat, memory)
    improver = Improver(contraction.field, flat, memory, present, everything, 0, dual)
    whole = Budget(problem, math.inf, None, math.inf, 0.0, None)

    for _ in range(12):
        before = improver.cost
        improver.step(whole.limited_to)
        assert improver.cost <= before
        assert tuple(improver.labels.tolist()) in costs
        assert improver.cost == pytest.approx(contraction.field.cost(improver.labels.tolist()), rel=DUST, abs=DUST)


@given(problem=problems(), data=st.data())
@settings(max_examples=60)
def test_contraction_maps_choices_both_ways(problem: Problem, data: st.DataObject) -> None:
    """A choice of the roots is recovered from the choice of all nodes it maps to."""
    contraction = reduced(problem)
    choice = list(data.draw(st.sampled_from(labellings(contraction.field))))

    assert contraction.choice(contraction.invert(choice)) == choice


@pytest.mark.parametrize("threads", [1, 2])
def test_parallel_search_returns_its_best_choice(threads: int) -> None:
    """Two nodes that may not use more than 10 together: 1 + 9 costs 0, the start 5 + 5 costs 2."""
    uses = [Usage(node, 0, 1, np.array([5, 1, 9])) for node in (0, 1)]
    problem = Problem.build([[1, 9, 0], [1, 0, 9]], usages=uses, limit=10)
    contraction = reduced(problem)
    flat, memory = _flat(contraction)
    guide = DualInformation(-10.0, np.zeros(len(flat.unary)), np.zeros(1))
    start = np.array([0, 0])
    team = [Improver(contraction.field, flat, memory, start, guide, seed) for seed in range(threads)]
    seen: list[float] = []

    labels, cost = improve_together(
        team, Budget(problem, math.inf, None, math.inf, 0.0, None), 30, lambda _labels, cost: seen.append(cost)
    )

    assert (labels.tolist(), cost) == ([2, 1], 0.0)
    assert len(seen) == 30
    assert seen == sorted(seen, reverse=True)


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=60)
def test_recombination_is_optimal_over_both_choices(problem: Problem, data: st.DataObject) -> None:
    """The result is feasible and costs no more than any combination of the two choices' labels."""
    contraction = reduced(problem)
    costs = fitting(contraction)
    assume(len(costs) > 0)
    flat, memory = _flat(contraction)
    mine, other = (data.draw(st.sampled_from(sorted(costs))) for _ in range(2))
    guide = DualInformation(-1e9, np.zeros(len(flat.unary)), np.ones(contraction.memory.num_rows))
    improver = Improver(contraction.field, flat, memory, np.array(mine), guide, seed=0)

    improver.recombine(np.array(other), Budget(problem, math.inf, None, math.inf, 0.0, None).limited_to)

    mixtures = [cost for c, cost in costs.items() if all(x in pair for x, *pair in zip(c, mine, other, strict=True))]
    result = tuple(improver.labels.tolist())
    assert costs[result] == pytest.approx(improver.cost, rel=DUST, abs=DUST)
    assert costs[result] <= costs[other] + room(costs[other])
    assert improver.cost <= min(mixtures) + 1e-5 * abs(min(mixtures))


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=100)
def test_tree_descent_lowers_the_cost_within_the_limits(problem: Problem, data: st.DataObject) -> None:
    """For any seeds; broken limits are broken no further, and a kick returns its true gain."""
    contraction = reduced(problem)
    flat, memory = _flat(contraction)
    start = np.array(data.draw(st.sampled_from(labellings(contraction.field))))
    before = contraction.memory.profile(start.tolist())
    trees = TreeDescent(flat, memory)
    seeds = np.array(data.draw(st.lists(st.integers(0, flat.num_nodes - 1), min_size=1, max_size=6)))
    forced = np.array([data.draw(st.integers(0, int(np.diff(flat.offsets)[n]) - 1)) for n in seeds.tolist()])
    opened = np.full(flat.num_nodes, VISITS)
    most = data.draw(st.integers(1, 4))
    labels = start.copy()

    gains = trees.descend(flat.unary, labels, opened, seeds, most, 1)
    descended = labels.copy()
    gained = trees.kick(flat.unary, labels, seeds, forced, most, 2)

    slack = room(*flat.tables, *flat.unary, flat.constant)
    assert (gains > 0) == bool((descended != start).any())
    assert flat.cost(descended) <= flat.cost(start) + slack
    assert abs(flat.cost(descended) - gained - flat.cost(labels)) <= slack
    for changed in (descended, labels):
        after = contraction.memory.profile(changed.tolist())
        assert (after <= np.maximum(contraction.memory.limits, before) + 1e-9 * contraction.memory.scales).all()


@given(problem=problems(limited=False), data=st.data())
@settings(max_examples=100)
def test_a_tree_takes_its_optimal_labels(problem: Problem, data: st.DataObject) -> None:
    """Two nodes are a tree, and so is one node with fixed neighbours: no single change lowers the cost."""
    contraction = reduced(problem)
    flat, memory = _flat(contraction)
    labels = np.array(data.draw(st.sampled_from(labellings(contraction.field))))
    polisher = Polisher(flat, memory, seed=0)

    polisher.polish(labels, np.zeros(0), lambda: False)

    assert polisher.labels is not None
    slack = room(*flat.tables, *flat.unary, flat.constant)
    for node, unary in enumerate(contraction.field.unary):
        for label in range(len(unary)):
            other = polisher.labels.copy()
            other[node] = label
            assert flat.cost(other) >= polisher.cost - slack
    if flat.num_nodes <= 2:
        assert polisher.cost <= min(flat.cost(np.array(c)) for c in labellings(contraction.field)) + slack


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=100)
def test_polishing_keeps_only_feasible_improvements(problem: Problem, data: st.DataObject) -> None:
    """From any start; it finds a feasible choice if the least use of every node fits or only one node uses memory."""
    contraction = reduced(problem)
    flat, memory = _flat(contraction)
    polisher = Polisher(flat, memory, seed=0)
    fits = {
        c for c in labellings(contraction.field) if (contraction.memory.profile(c) <= contraction.memory.limits).all()
    }
    starts = data.draw(st.lists(st.sampled_from(labellings(contraction.field)), min_size=1, max_size=3))

    costs = []
    polisher.offer(polisher.least_use_labels())
    for start in starts:
        polisher.polish(np.array(start), np.zeros(contraction.memory.num_rows), lambda: False)
        costs.append(polisher.cost)

    assert costs == sorted(costs, reverse=True)
    assert polisher.labels is None or tuple(polisher.labels.tolist()) in fits
    lonely = len(set(contraction.memory.nodes.tolist())) == len(contraction.memory.nodes) == 1
    lowest, _ = contraction.memory.extremes()
    single = len(contraction.memory.nodes) == len(set(contraction.memory.nodes.tolist()))
    if fits and (lonely or (single and (lowest <= contraction.memory.limits).all())):
        assert polisher.labels is not None


def test_repair_takes_the_least_cost_per_use_saved() -> None:
    """15 of 12 are used. Node 0 saves 4 for 8, node 1 saves 3 for 3, node 2 saves 2 for 1: node 1 is enough."""
    uses = [Usage(node, 0, 1, np.array(use)) for node, use in enumerate(([5, 1], [5, 2], [5, 3]))]
    problem = Problem.build([[0, 8], [0, 3], [0, 1]], usages=uses, limit=12)
    contraction = reduced(problem)
    polisher = Polisher(*_flat(contraction), seed=0)

    polisher.polish(np.zeros(3, np.int64), np.zeros(1), lambda: False)

    assert polisher.labels is not None
    assert (polisher.labels.tolist(), polisher.cost) == ([0, 1, 0], 3.0)


def test_the_dual_converges_beside_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time of its own the dual reaches the bound of an uninterrupted run, to a thousandth."""
    monkeypatch.setattr(portfolio, "_is_narrow", lambda _contraction, _seconds: False)
    monkeypatch.setattr(portfolio, "DUAL_SHARE", 0.0)
    monkeypatch.setattr(CoreProver, "core", lambda _self, _guide, _seconds: None)
    problem = k_tree(300, width=2, tightness=0.3)
    contraction = reduced(problem)
    dual = LagrangianDual(*_flat(contraction))
    while not dual.finished:
        dual.run_round()
    bounds = [-math.inf]

    solution = Portfolio().solve(
        problem,
        time_limit=120.0,  # a loaded machine compiles for long before the dual gets its turn
        threads=2,
        watch=lambda _choice, _cost, bound: bounds.append(bound),
        should_stop=lambda: bounds[-1] >= 0.999 * dual.bound,
    )

    check_solution(problem, solution)
    assert solution.bound >= 0.999 * dual.bound


def test_the_proof_goes_on_after_a_core_that_was_given_up() -> None:
    """Another core is asked for at once, though neither dual nor incumbent has changed."""
    core = Core(DualInformation(1.0, np.zeros(2), np.zeros(0)), 2.0, (), 0, 0.0, 1.0)
    budget = Budget(Problem.build([[1, 2]]), 5.0, None, math.inf, 0.0, None)
    tried: list[Core] = []

    def give_up(core: Core, _should_stop: Callable[[], bool]) -> bool:
        tried.append(core)
        if len(tried) == 2:
            proof.end()
        return False

    prover: Any = SimpleNamespace(core=lambda _guide, _seconds: core, solve=give_up)
    proof = portfolio._Proof(prover, budget)
    proof.publish(core.guide)
    proof.run()

    assert len(tried) == 2


def test_an_incumbent_precedes_the_exact_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick search on a small problem finds a choice well below the cost of the least-use choice."""
    known: list[float] = []
    monkeypatch.setattr(portfolio, "exact", lambda _prepared, _contraction, part: known.append(part.cost))
    monkeypatch.setattr(portfolio, "QUICK_SHARE", 1.0)
    monkeypatch.setattr(portfolio, "QUICK_SECONDS", 3.0)
    problem = k_tree(300, width=2, tightness=0.3)
    least = problem.cost([int(u.amounts.argmin()) for u in problem.usages])

    solution = Portfolio().solve(problem, time_limit=60.0, should_stop=lambda: bool(known))

    check_solution(problem, solution)
    assert known[0] < 0.9 * least


@pytest.mark.parametrize("fixing", [False, True])
def test_the_portfolio_is_exact_without_a_time_limit(monkeypatch: pytest.MonkeyPatch, fixing: bool) -> None:
    """By core problems, or by the exact method on the labels left by reduced-cost fixing."""
    monkeypatch.setattr(portfolio, "_is_narrow", lambda _contraction, _seconds: False)
    if fixing:
        monkeypatch.setattr(CoreProver, "core", lambda _self, _guide, _seconds: None)

    @settings(max_examples=80)
    @given(problem=problems())
    def law(problem: Problem) -> None:
        best = min((problem.cost(c) for c in choices(problem) if problem.fits(c)), default=math.inf)

        solution = Portfolio(max_rounds=80).solve(problem)

        check_solution(problem, solution)
        assert solution.termination is (Termination.INFEASIBLE if best == math.inf else Termination.OPTIMAL)
        assert close(problem, solution.cost, best)

    law()


def test_the_portfolio_without_its_exact_part_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are below the optimum, choices are feasible, and equal seeds give equal results."""
    monkeypatch.setattr(portfolio, "_is_narrow", lambda _contraction, _seconds: False)

    @settings(max_examples=80)
    @given(problem=problems())
    def law(problem: Problem) -> None:
        best = min((problem.cost(c) for c in choices(problem) if problem.fits(c)), default=math.inf)

        first, again = (Portfolio(max_rounds=120, max_parts=5).solve(problem, seed=3) for _ in range(2))

        check_solution(problem, first)
        assert first == again
        assert first.cost >= best
        assert first.bound <= best
        if best < math.inf:
            assert first.termination is not Termination.INFEASIBLE

    law()
