"""Dual ascent on fields too wide to eliminate."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar import solvers
from autopar.problem import Problem
from autopar.solvers import auto
from autopar.solvers.backends import lazy_rows
from autopar.solvers.base import Budget
from autopar.solvers.bounds import dual_ascent
from autopar.solvers.bounds.dual_ascent import AscentResult
from autopar.solvers.bounds.lagrangian_dual import WINDOW
from autopar.solvers.model.graphical_model import prepare
from tests.checks import check_exact, check_solution
from tests.strategies import problems

DUST = 1e-9


def _budget(problem: Problem) -> Budget:
    return Budget(problem, math.inf, None, math.inf, 1e-6, None)


@given(problem=problems(limited=False), rounds=st.sampled_from([WINDOW, dual_ascent.ROUNDS]))
@settings(max_examples=60)
def test_kept_labels_contain_an_optimum(problem: Problem, rounds: int) -> None:
    """The bound is below the optimum; a closed ascent has an optimum, an open one keeps the labels of an optimum."""
    prepared = prepare(problem)
    assume(prepared is not None)
    assert prepared is not None
    field = prepared.field
    labels = [range(len(u)) for u in field.unary]
    every = [tuple(choice) for choice in np.ndindex(*map(len, labels))]
    best = min(field.cost(choice) for choice in every)
    assume(math.isfinite(best))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dual_ascent, "ROUNDS", rounds)
        found = dual_ascent.ascend(field, _budget(problem))

    room = DUST * max(1.0, abs(best))
    assert found.bound <= best + room
    kept = [choice for choice in every if all(s in own for s, own in zip(choice, found.kept, strict=True))]
    assert min(field.cost(choice) for choice in kept) <= best + room
    if found.closed:
        assert field.cost(found.labels) <= best + 1e-6 * max(1.0, abs(best))


def test_auto_is_exact_where_dual_ascent_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """After few sweeps the linear program finds the optimum among the kept labels."""
    monkeypatch.setattr(auto, "MAX_ENTRIES", 4)
    monkeypatch.setattr(dual_ascent, "ROUNDS", WINDOW)

    @settings(max_examples=60)
    @given(problem=problems())
    def law(problem: Problem) -> None:
        check_exact(problem, "auto")

    law()


@pytest.mark.parametrize("seed", range(5))
def test_the_ascent_result_is_kept_if_the_linear_program_is_interrupted(seed: int) -> None:
    """Six nodes, all neighbours: the solution has a choice and a bound no lower than the ascent's."""
    rng = np.random.default_rng(seed)
    edges = [(one, other, rng.random((3, 3))) for one, other in combinations(range(6), 2)]
    problem = Problem.build(list(rng.random((6, 3))), edges)
    told: list[float] = []

    def open_still(*arguments: Any) -> AscentResult:
        found = dual_ascent.ascend(*arguments)
        told.append(found.bound)
        return replace(found, closed=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "MAX_ENTRIES", 4)
        patch.setattr(auto, "ascend", open_still)
        patch.setattr(lazy_rows, "minimise", lambda *_, **__: None)

        solution = solvers.load("auto").solve(problem)

    check_solution(problem, solution)
    assert told
    assert solution.choice is not None
    assert solution.bound >= told[0] - DUST * abs(told[0])


def test_a_sufficient_bound_ends_the_ascent() -> None:
    """On a ring of ten nodes with frustrated edges the ascent stops at a bound above the cutoff."""
    rng = np.random.default_rng(3)
    size, nodes = 4, 10
    edges = [(a, b, rng.integers(1, 50, (size, size)).astype(float)) for a in range(nodes) for b in range(a + 1, nodes)]
    problem = Problem.build([np.zeros(size)] * nodes, edges)
    prepared = prepare(problem)
    assert prepared is not None

    found = dual_ascent.ascend(prepared.field, _budget(problem), 45.0)

    assert found.closed
    assert found.bound >= 45.0
