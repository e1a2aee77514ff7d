"""Core problems and the labels that no limit permits, each against brute force on small problems."""

import math
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings

from autopar.problem import Problem, Usage
from autopar.solvers.base import Budget
from autopar.solvers.bounds.lagrangian_dual import DualInformation, LagrangianDual
from autopar.solvers.exact.core_problem import Core, CoreProver
from autopar.solvers.model.csr import FlatField, FlatMemory
from autopar.solvers.model.graphical_model import prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.contraction import Contraction, contract
from autopar.solvers.reductions.resource_fixing import drop_oversized, fitting_labels
from tests.checks import choices
from tests.strategies import problems


def reduced(problem: Problem) -> Contraction:
    """Return the contracted problem; draws without a permitted choice are discarded."""
    prepared = prepare(problem)
    contraction = None if prepared is None else contract(prepared.field, Memory.of(problem, prepared.labels))
    if contraction is None or contraction.memory.is_infeasible():
        reject()
    return contraction


def cheapest(problem: Problem) -> float:
    """Return the optimum; infinity if nothing fits."""
    return min((problem.cost(c) for c in choices(problem) if problem.fits(c)), default=math.inf)


def prover_of(problem: Problem, budget: Budget, rounds: int) -> tuple[CoreProver, DualInformation]:
    """Return the prover of a problem and the guide after some rounds of the dual."""
    prepared = prepare(problem)
    assert prepared is not None
    contraction = reduced(problem)
    flat = FlatField.of(contraction.field.softened())
    dual = LagrangianDual(flat, FlatMemory.of(contraction.memory, flat.offsets))
    for _ in range(rounds):
        dual.run_round()
    prover = CoreProver(
        contraction.field,
        contraction.memory,
        flat,
        budget,
        lambda labels: budget.offer(prepared.strategies(contraction.invert(labels))),
    )
    return prover, dual.information()


@given(problem=problems())
@settings(max_examples=25)
def test_growing_cores_prove_the_optimum(problem: Problem) -> None:
    """Every bound on the way is below the optimum, and with an optimal incumbent the last one meets it."""
    best = cheapest(problem)
    assume(best < math.inf)
    start = next(c for c in choices(problem) if problem.fits(c) and problem.cost(c) == best)
    bounds = [-math.inf]
    budget = Budget(
        problem, math.inf, start, math.inf, 1e-6, None, watch=lambda _choice, _cost, bound: bounds.append(bound)
    )
    prover, guide = prover_of(problem, budget, 80)

    for _ in range(20):
        core = None if budget.targets_met() else prover.core(guide, 1e9)
        if core is None:
            break
        assert prover.solve(core)

    assert max(bounds) <= best + 1e-6 * abs(best)
    assert budget.targets_met()


def test_the_core_follows_the_seconds() -> None:
    """Two labels of equal cost in each of ten nodes, the others dear: a short time is enough for the cheap ones only.

    Once they are known to be optimal below their room, nothing larger is asked for than the gap.
    """
    table = np.array([[0, 1, 50, 60], [1, 0, 50, 60], [50, 50, 70, 80], [60, 60, 80, 90]])
    problem = Problem.build([[0, 0, 40, 45]] * 10, [(i, i + 1, table) for i in range(9)])
    budget = Budget(problem, math.inf, [2] * 10, math.inf, 0.0, None)
    prover, guide = prover_of(problem, budget, 40)

    short, long = (prover.core(guide, seconds) for seconds in (1e-2, math.inf))

    assert short is not None
    assert long is not None
    assert short.entries < long.entries
    assert short.ceiling < long.ceiling <= budget.cost
    assert prover.core(guide, 1e-9) is None


def test_cores_that_were_given_up_get_longer_once_the_search_stagnates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each core is given up after 4 seconds: the largest again, with 12, 12 seconds after the last better incumbent."""
    clock = 0.0

    def give_up(_prover: CoreProver, _core: Core, _budget: Budget) -> bool:
        nonlocal clock
        clock += 4.0
        return True

    monkeypatch.setattr(time, "monotonic", lambda: clock)
    problem = Problem.build([[0, 40]] * 10, [(i, i + 1, np.array([[0, 1], [1, 0]])) for i in range(9)])
    budget = Budget(problem, math.inf, [1] * 10, math.inf, 0.0, None)
    prover, guide = prover_of(problem, budget, 40)
    monkeypatch.setattr(CoreProver, "_minimise", give_up)

    tried: list[tuple[float, int, float]] = []
    while (core := prover.core(guide, 1e3)) is not None and len(tried) < 10:
        tried.append((clock, core.entries, core.most_seconds))
        assert not prover.solve(core)
    clock = 12.0
    again = prover.core(guide, 1e3)

    assert [entries for _, entries, _ in tried] == sorted({entries for _, entries, _ in tried}, reverse=True)
    assert clock - tried[-1][0] > 4.0, "the search had time left when no core was"
    assert again is not None
    assert again.entries == tried[0][1]
    assert tried[0][2] < 4.0
    assert again.most_seconds == 12.0


@given(problem=problems(limited=True))
@settings(max_examples=40)
def test_labels_of_feasible_choices_fit(problem: Problem) -> None:
    """No feasible choice loses a label, and a problem of one node loses all labels that break a limit."""
    contraction = reduced(problem)
    memory, sizes = contraction.memory, [len(u) for u in contraction.field.unary]
    feasible = [
        c
        for c in product(*map(range, sizes))
        if contraction.field.cost(c) < math.inf and (memory.profile(c) <= memory.limits).all()
    ]

    kept = fitting_labels(memory, sizes)
    fewer = drop_oversized(contraction)

    assert all(label in own for c in feasible for label, own in zip(c, kept, strict=True))
    assert fewer is not None or not feasible
    if len(sizes) == 1:
        assert len(kept[0]) <= len(
            {c[0] for c in product(range(sizes[0])) if (memory.profile(c) <= memory.limits).all()}
        )


def test_what_does_not_fit_beside_the_least_of_the_others_goes() -> None:
    """9 of 10 are free for node 0 beside the least 1 of node 1; node 1 has 8 beside the least 2 of node 0."""
    usages = [Usage(0, 0, 2, np.array([2, 9, 10])), Usage(1, 1, 3, np.array([1, 8, 9]))]
    problem = Problem.build([[0, 0, 0]] * 2, usages=usages, limit=10)

    kept = fitting_labels(reduced(problem).memory, [3, 3])

    assert [own.tolist() for own in kept] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("limit", [2, 3])
def test_use_of_a_node_is_counted_whole(limit: int) -> None:
    """Two usages of one node overlap: what one label saves in one it needs in the other."""
    usages = [Usage(0, 0, 4, np.array([1, 2])), Usage(0, 2, 6, np.array([1, 1])), Usage(1, 0, 6, np.array([0, 1]))]
    problem = Problem.build([[0, 0]] * 2, usages=usages, limit=limit)

    kept = fitting_labels(Memory.of(problem, [np.arange(2)] * 2), [2, 2])

    assert [own.tolist() for own in kept] == ([[0], [0]] if limit == 2 else [[0, 1], [0, 1]])
