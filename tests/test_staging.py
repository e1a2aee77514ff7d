"""Staging problems: the dynamic program, HiGHS and CP-SAT against the enumeration of routes."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.staging.dynamic_program import solve
from autopar.solvers.staging.integer_program import solve_cp_sat, solve_highs, survivors
from autopar.staging import Leg, Staged, Staging
from tests.stagings import random_staging, routes

SOLVERS: dict[str, Callable[[Staging, float], Staged]] = {
    "dynamic program": solve,
    "highs": solve_highs,
    "cp-sat": solve_cp_sat,
}
ROUNDED = 1e-9
"""Relative rounding error of CP-SAT, which rounds seconds down."""


def _best(problem: Staging) -> float:
    return min((problem.value(route) for route in routes(problem)), default=math.inf)


@pytest.mark.parametrize("name", SOLVERS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**20))
@example(seed=2)
@example(seed=7)
@example(seed=828034)  # CP-SAT's presolve cuts the best route off
def test_no_route_is_better_than_the_one_found(name: str, seed: int) -> None:
    """The value is the minimum over all routes, and the bound is just below it."""
    problem = random_staging(seed)
    best = _best(problem)

    found = SOLVERS[name](problem, 2 * best if math.isfinite(best) else 1e3)

    assert found.seconds == (pytest.approx(best, rel=2 * OPTIMALITY_TOLERANCE) if math.isfinite(best) else math.inf)
    assert problem.value(found.route) == found.seconds
    assert found.bound <= best * (1 + ROUNDED)
    assert found.bound >= best * (1 - 1e-5)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_stopped_search_bounds_all_routes(rounds: int) -> None:
    """It returns the best route visited, and a lower bound on the others."""
    kept = bounded = 0
    for seed in range(60):
        problem, answers = random_staging(seed), [True] + [False] * rounds  # the last one first
        found = solve(problem, stops=answers.pop)
        if not answers:  # it was told to stop
            assert found.bound <= _best(problem) * (1 + ROUNDED)
            assert found.seconds == (problem.value(found.route) if found.route else math.inf)
            kept += bool(found.route)
            bounded += found.bound > 0
    assert (kept > 0) == (bounded > 0) == (rounds > 0)


def test_most_random_problems_have_routes() -> None:
    """Otherwise the test above would be vacuous."""
    found = [math.isfinite(_best(random_staging(seed))) for seed in range(30)]

    assert sum(found) > 15


@settings(max_examples=30)
@given(seed=st.integers(0, 2**20))
def test_a_cutoff_below_the_best_route_is_a_bound(seed: int) -> None:
    """No route is found, and the bound is the cutoff; infinity if there is no route at all."""
    problem = random_staging(seed)
    best = _best(problem)

    found = solve(problem, 0.99 * best if math.isfinite(best) else math.inf)

    assert not found.route
    assert found.bound == pytest.approx(0.99 * best) if math.isfinite(best) else found.bound == math.inf


@settings(max_examples=60)
@given(seed=st.integers(0, 2**20), room=st.floats(1.0, 1.5))
def test_stages_of_good_routes_survive(seed: int, room: float) -> None:
    """All stages of all routes within the value are listed, or one of each option."""
    problem = random_staging(seed)
    most = _best(problem) * room
    if not math.isfinite(most):
        return

    found = survivors(problem, most)

    good = [route for route in routes(problem) if problem.value(route) <= most]
    needed = {(len(route) - 1 - number, leg) for route in good for number, leg in enumerate(route)}
    assert needed <= set(found)
    assert len(set(found)) == len(found)
    one_each = survivors(problem, most, one_each=True)
    assert sorted(leg.option for _, leg in one_each) == sorted({leg.option for _, leg in found})
    assert set(one_each) <= set(found)


def test_a_problem_above_the_memory_limit_gets_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for pairs there is no bound, and every stage of a good route is still listed."""
    monkeypatch.setattr("autopar.solvers.staging.dynamic_program.MOST_BYTES", 0)
    monkeypatch.setattr("autopar.solvers.staging.integer_program.MOST_BYTES", 0)
    monkeypatch.setattr("autopar.solvers.staging.dynamic_program.ROOM", 1)
    monkeypatch.setattr("autopar.solvers.staging.integer_program.ROOM", 1)
    cut = 0
    for seed in range(60):
        problem = random_staging(seed)
        best = _best(problem)
        if not math.isfinite(best):
            continue
        found = solve(problem)
        assert found.bound <= best * (1 + ROUNDED)
        assert not found.route or problem.value(found.route) == found.seconds
        cut += found.bound == 0.0
        good = [route for route in routes(problem) if problem.value(route) <= 1.1 * best]
        needed = {(len(route) - 1 - number, leg) for route in good for number, leg in enumerate(route)}
        assert needed <= set(survivors(problem, 1.1 * best))
    assert cut


def test_a_step_by_hand() -> None:
    """Two stages of 2 and 1 s, backwards 1 and 0.5 s, 0.1 s on and 0.2 s back, 3 microbatches, tails 0.5 and 4 s.

    The first stage ends at 2 + 1 + 0.3 + 2 * 2 + 0.5; the second 1 + 0.2 earlier without tails: 7.3 - 1.2 + 4, then 1 s
    fixed.
    """
    problem = Staging(
        at=np.array([[0, -1], [1, -1]]),
        sizes=np.array([1]),
        starts=np.ones((1, 2), dtype=bool),
        seconds=np.array([[[[np.inf], [1.0]]], [[[2.0], [np.inf]]]]),
        lead=np.array([[[[0.0], [0.5]]], [[[1.0], [0.0]]]]),
        slow=np.zeros((2, 1, 2, 1)),
        tails=np.array([[[[0.0], [4.0]]], [[[0.5], [0.0]]]]),
        ends=np.array([0]),
        classes=np.array([0, 0]),
        ahead=np.full((1, 1, 1, 2), 0.1),
        back=np.full((1, 1, 1, 2), 0.2),
        counts=frozenset({2}),
        follow=2.0,
        fixed=1.0,
    )

    found = solve(problem)

    assert found.route == (Leg(0, 1, 0, 0, 0), Leg(1, 2, 1, 0, 0))
    assert found.seconds == pytest.approx(7.3 - 1.2 + 4.0 + 1.0)


def test_the_capacity_of_frontiers_grows() -> None:
    """Five equal stages whose R and W trade off exceed the initial capacity."""
    rng = np.random.default_rng(0)
    at = np.array([[block, -1] for block in range(5)])
    seconds = rng.uniform(1.0, 2.0, (5, 1, 5, 6))
    problem = Staging(
        at=at,
        sizes=np.array([1]),
        starts=np.ones((1, 5), dtype=bool),
        seconds=seconds,
        lead=0.5 * seconds,
        slow=np.zeros_like(seconds),
        tails=8.0 * (2.0 - seconds),  # the faster, the later the end
        ends=np.array([0]),
        classes=np.zeros(5, dtype=np.int64),
        ahead=np.zeros((1, 1, 1, 5)),
        back=np.zeros((1, 1, 1, 5)),
        counts=frozenset({5}),
        follow=1.0,
    )

    assert solve(problem).seconds == pytest.approx(_best(problem), rel=2 * OPTIMALITY_TOLERANCE)


def test_invalid_routes_have_infinite_value() -> None:
    """Gaps, wrong order, too few stages, forbidden devices."""
    problem = next(problem for seed in range(100) if len(solve(problem := random_staging(seed)).route) > 1)
    best = solve(problem).route

    assert problem.value(best[:-1]) == math.inf
    assert problem.value(best[::-1]) == math.inf
    assert replace(problem, counts=frozenset()).value(best) == math.inf
    assert replace(problem, starts=np.zeros_like(problem.starts)).value(best) == math.inf
