"""Every solver goes through the same laws."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from autopar import solvers
from autopar.errors import SolverError
from autopar.problem import Limit, Problem, Recipe, Termination, Usage
from tests.checks import check_solution, choices, close
from tests.instances import training_step
from tests.strategies import problems

EXACT = (
    "auto",
    "portfolio",
    "highs",
    "ortools-highs",
    "ortools-scip",
    "ortools-cbc",
    "pulp-cbc",
    "cp-sat",
    "brute-force",
)
EXAMPLES = {
    "auto": 300,
    "highs": 60,
    "pulp-cbc": 8,
    "ortools-scip": 30,
    "ortools-highs": 30,
    "ortools-cbc": 30,
    "cp-sat": 15,
}


@pytest.mark.parametrize("name", solvers.names())
def test_claims_hold_up(name: str) -> None:
    """Whatever a solver claims can be recomputed, nobody beats the optimum, and exact solvers reach it."""

    @settings(max_examples=EXAMPLES.get(name, 60))
    @given(problem=problems())
    def law(problem: Problem) -> None:
        best = min((problem.cost(c) for c in choices(problem) if problem.fits(c)), default=math.inf)

        solution = solvers.load(name).solve(problem)

        check_solution(problem, solution)
        assert solution.cost >= best
        assert solution.bound <= best or close(problem, solution.bound, best)
        if name in EXACT:
            expected = Termination.INFEASIBLE if best == math.inf else Termination.OPTIMAL
            assert solution.termination is expected
            assert close(problem, solution.cost, best)

    law()


@given(problem=problems(limited=True))
@settings(max_examples=100)
def test_more_memory_is_never_worse(problem: Problem) -> None:
    """Raising every limit never raises the optimum."""
    wider = replace(problem, limits=tuple(Limit(x.amount + 3, x.start, x.end) for x in problem.limits))

    tight, loose = (solvers.load("auto").solve(p).cost for p in (problem, wider))

    assert loose <= tight or close(problem, loose, tight)


@pytest.mark.parametrize("tightness", [0.1, 0.05, 0.02])
def test_auto_equals_the_plain_program_on_a_training_step(tightness: float) -> None:
    """Reductions, prices and pruning lose nothing: the unreduced program has the same optimum under the limit."""
    problem = training_step(3, mesh=(8,), tightness=tightness)

    reduced, plain = (solvers.load(name).solve(problem) for name in ("auto", "highs"))

    check_solution(problem, reduced)
    assert reduced.termination is plain.termination is Termination.OPTIMAL
    assert close(problem, reduced.cost, plain.cost)


def test_auto_solves_a_wide_mesh_by_elimination_alone() -> None:
    """241 nodes of 9 to 16 strategies, where no limit binds."""
    problem = training_step(16)

    solution = solvers.load("auto").solve(problem)

    assert solution.termination is Termination.OPTIMAL
    assert solution.bound == solution.cost


@pytest.mark.parametrize("name", [n for n in solvers.names() if n != "brute-force"])
def test_a_spent_limit_is_not_called_optimal(name: str) -> None:
    """With no time at all a solver claims no more than its bound allows."""
    problem = training_step(4, tightness=0.05)

    solution = solvers.load(name).solve(problem, time_limit=0.0)

    check_solution(problem, solution)
    assert solution.termination in (Termination.UNKNOWN, Termination.FEASIBLE)


@pytest.mark.parametrize("name", solvers.names())
def test_an_interrupted_solver_keeps_the_choice_it_was_given(name: str) -> None:
    """`should_stop` ends the search; the start is the answer unless the step under way found a better one."""
    problem = Problem.build([[1, 2], [3, 0]], [(0, 1, [[0, 9], [9, 0]])])

    solution = solvers.load(name).solve(problem, start=(0, 0), should_stop=lambda: True)

    check_solution(problem, solution)
    assert solution.cost <= 4
    assert solution.termination is (Termination.INTERRUPTED if solution.cost == 4 else Termination.OPTIMAL)


@pytest.mark.parametrize("name", solvers.names())
def test_a_watcher_is_told_whatever_the_solver_returns(name: str) -> None:
    """Choices get cheaper, bounds higher, and the last word is the solution."""

    @settings(max_examples=8)
    @given(problem=problems())
    def law(problem: Problem) -> None:
        told: list[tuple[tuple[int, ...] | None, float, float]] = [(None, math.inf, -math.inf)]

        solution = solvers.load(name).solve(problem, watch=lambda *known: told.append(known))

        assert told[-1] == (solution.choice, solution.cost, solution.bound)
        for (_, cost, bound), (choice, new_cost, new_bound) in pairwise(told):
            assert new_cost <= cost
            assert new_bound >= min(bound, new_cost)
            assert choice is None or problem.cost(choice) == new_cost

    law()


def test_a_start_that_does_not_fit_is_ignored() -> None:
    """The start breaks the limit, so it cannot be the answer."""
    problem = Problem.build([[0, 5]], usages=[Usage(0, 0, 1, np.array([9, 1]))], limit=5)

    solution = solvers.load("auto").solve(problem, start=(0,))

    assert solution.choice == (1,)


def test_cutoff_stops_once_the_bound_has_reached_it() -> None:
    """The optimum without limit is 2, so no choice costs less than 1.5: a limit need not be considered."""
    problem = Problem.build([[1, 3], [1, 3]], usages=[Usage(0, 0, 1, np.array([9, 1]))], limit=5)

    solution = solvers.load("auto").solve(problem, cutoff=1.5)

    check_solution(problem, solution)
    assert solution.termination is Termination.CUTOFF
    assert solution.bound >= 1.5


def test_no_limit_segment_with_use_makes_a_negative_limit_fit() -> None:
    """Nothing fits a negative limit, not even nothing."""
    problem = Problem.build([[1, 2]], limit=-1.0)

    assert {solvers.load(n).solve(problem).termination for n in EXACT} == {Termination.INFEASIBLE}


def test_grid_takes_the_cheapest_recipe() -> None:
    """Recipe costs by hand: "left" 1 + 3 = 4, "right" 2 + 0 = 2; the mixed choices cost 9 more."""
    problem = Problem.build([[1, 2], [3, 0]], [(0, 1, [[0, 9], [9, 0]])])
    recipes = (Recipe("left", ((0,), (0,))), Recipe("right", ((1,), (1,))))

    both, left = (solvers.load("grid").solve(replace(problem, recipes=r)) for r in (recipes, recipes[:1]))

    assert (both.choice, both.cost) == ((1, 1), 2)
    assert (left.choice, left.cost) == ((0, 0), 4)


def test_brute_force_refuses_what_it_cannot_finish() -> None:
    problem = Problem.build([[0] * 10] * 7)

    with pytest.raises(SolverError, match=r"brute force on 1e\+07 choices"):
        solvers.load("brute-force").solve(problem)


def test_an_unknown_solver_is_named_with_its_neighbours() -> None:
    with pytest.raises(SolverError, match=r"no solver 'hihgs'[\s\S]*use .*highs"):
        solvers.load("hihgs")


def test_every_solver_is_available_where_the_dependencies_are_installed() -> None:
    assert solvers.available() == solvers.names()
