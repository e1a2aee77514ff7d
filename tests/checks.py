"""What a valid answer is, for the tests of all solvers."""

import math
from collections.abc import Sequence
from itertools import product

from autopar import solvers
from autopar.problem import OPTIMALITY_TOLERANCE, Problem, Solution, Termination, check


def check_solution(problem: Problem, solution: Solution) -> None:
    """Assert that everything a solution claims can be recomputed."""
    check(problem, solution)
    assert solution.bound <= solution.cost
    if solution.termination is Termination.OPTIMAL:
        assert solution.gap <= OPTIMALITY_TOLERANCE


def close(problem: Problem, cost: float, other: float) -> bool:
    """Return whether two costs are equal as far as an optimality proof can tell them apart."""
    return cost == other or abs(cost - other) <= 2 * OPTIMALITY_TOLERANCE * max(abs(cost), abs(other))


def choices(problem: Problem) -> Sequence[tuple[int, ...]]:
    """Return every choice, in order; only for small problems."""
    return list(product(*(range(size) for size in problem.num_strategies)))


def check_exact(problem: Problem, solver: str) -> None:
    """Assert that a solver finds the optimum of a small problem, or that there is none, and proves it."""
    best = min((problem.cost(c) for c in choices(problem) if problem.fits(c)), default=math.inf)

    solution = solvers.load(solver).solve(problem)

    check_solution(problem, solution)
    assert solution.termination is (Termination.INFEASIBLE if best == math.inf else Termination.OPTIMAL)
    assert close(problem, solution.cost, best)
