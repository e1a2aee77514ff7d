"""Limits as knapsacks in the dual, against brute force on small problems."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from autopar.problem import Problem, Usage
from autopar.solvers.bounds.knapsack_dual import KnapsackDual
from autopar.solvers.bounds.lagrangian_dual import LagrangianDual
from autopar.solvers.bounds.messages import Messages
from autopar.solvers.model.csr import FlatField, FlatMemory
from autopar.solvers.model.graphical_model import prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.contraction import Contraction, contract
from tests.strategies import problems


def reduced(problem: Problem) -> Contraction:
    """Return the contracted problem; draws without a permitted choice are discarded."""
    prepared = prepare(problem)
    contraction = None if prepared is None else contract(prepared.field, Memory.of(problem, prepared.labels))
    if contraction is None or contraction.memory.is_infeasible():
        reject()
    return contraction


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=15)
def test_knapsacks_bound_feasible_choices_at_any_prices(problem: Problem, data: st.DataObject) -> None:
    """The bound starts at that of the prices, but for rounding, and holds with each label's reduced cost."""
    contraction = reduced(problem)
    flat = FlatField.of(contraction.field.softened())
    memory = FlatMemory.of(contraction.memory, flat.offsets)
    scale = data.draw(st.sampled_from([0.0, 1.0, 1e3]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    prices = scale * random.random(len(memory.limits)) / memory.scales
    messages = Messages.zero(flat)
    priced = messages.sweep(flat, flat.unary + memory.priced(prices, len(flat.unary)))
    priced -= float(prices @ memory.limits)

    dual = KnapsackDual(flat, memory, prices, messages)
    for _ in range(20):
        dual.run_round()
    bound, reduced_costs = dual.information()

    slack = 1e-9 * (float(np.abs(flat.unary).max()) + float(np.abs(flat.tables).max(initial=0.0)) + abs(bound))
    slack += 1e-8 * float(prices @ np.abs(memory.limits))
    assert bound >= priced - slack
    for choice in product(*map(range, np.diff(flat.offsets))):
        if (contraction.memory.profile(choice) <= contraction.memory.limits).all():
            cost = contraction.field.cost(choice)
            assert max(dual.bound, bound) <= cost + 1e-12 * abs(cost)
            assert (bound + reduced_costs[flat.offsets[:-1] + np.array(choice)] <= cost + slack).all()


def test_a_limit_is_not_filled_with_fractions() -> None:
    """Two nodes cost 10, or nothing with use 2, under a limit of 3: prices prove 5, the knapsack the optimum of 10."""
    usages = [Usage(node, 0, 1, np.array([0, 2])) for node in range(2)]
    problem = Problem.build([[10, 0]] * 2, usages=usages, limit=3)
    contraction = reduced(problem)
    flat = FlatField.of(contraction.field.softened())
    memory = FlatMemory.of(contraction.memory, flat.offsets)

    dual = KnapsackDual(flat, memory, np.array([5.0]), Messages.zero(flat))
    while not dual.finished:
        dual.run_round()

    assert dual.bound == pytest.approx(10.0, rel=1e-9)
    assert dual.bound <= 10.0


@pytest.mark.parametrize("free", [0, 1])
def test_the_dual_ends_with_knapsacks(free: int) -> None:
    """The Lagrangian dual passes its bound on the same two nodes, joined by an edge, once its prices have converged.

    Prices rise from 0 even if the bound without limits is 0.
    """
    usages = [Usage(node, 0, 1, np.array([0, 2])) for node in range(2)]
    problem = Problem.build([[10 + free, free]] * 2, [(0, 1, [[0, 1], [0, 0]])], usages=usages, limit=3)
    contraction = reduced(problem)
    flat = FlatField.of(contraction.field.softened())
    dual = LagrangianDual(flat, FlatMemory.of(contraction.memory, flat.offsets))

    while not dual.finished:
        dual.run_round()

    assert dual.bound == pytest.approx(10.0 + 2 * free, rel=1e-6)
    assert dual.information().bound == pytest.approx(10.0 + 2 * free, rel=1e-6)
    assert math.isfinite(float(dual.information().reduced_costs.max()))
