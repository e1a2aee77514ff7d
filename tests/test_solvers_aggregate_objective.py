"""Minimum of a convex function of sums over one choice, against brute force."""

import itertools
import math

import numpy as np
import pytest

from autopar.problem import Problem
from autopar.solvers.backends.highs import HighsSolver
from autopar.solvers.base import Budget, Work
from autopar.solvers.exact.aggregate_objective import AggregateObjective, Term, minimise
from autopar.solvers.model.graphical_model import Floats
from autopar.solvers.reductions.reduced_cost_fixing import Survivors, survivors_below, union_of

NUM_CRITERIA = 3
TOLERANCE = 1e-6


def _budget(problem: Problem, work: float = math.inf) -> Budget:
    return Budget(problem, math.inf, None, math.inf, 0.0, None, work=Work(work))


def _terms(rng: np.random.Generator, sizes: list[int]) -> tuple[Term, ...]:
    """Return values of every node and of a ring of pairs, one with forbidden pairs, one with reversed nodes."""
    terms = [Term((node,), int(rng.integers(NUM_CRITERIA)), rng.random(size)) for node, size in enumerate(sizes)]
    for node in range(len(sizes)):
        other = (node + 1) % len(sizes)
        values = rng.random((sizes[node], sizes[other])) * (rng.random((sizes[node], sizes[other])) < 0.6)
        if node == 1:
            values[rng.random(values.shape) < 0.4] = np.inf
        terms.append(Term((node, other), int(rng.integers(NUM_CRITERIA)), values))
    return tuple(terms)


def _criteria(terms: tuple[Term, ...], choice: tuple[int, ...]) -> Floats:
    found = np.zeros(NUM_CRITERIA)
    for term in terms:
        found[term.criterion] += term.values[tuple(choice[node] for node in term.nodes)]
    return found


def _composite(rng: np.random.Generator, sizes: list[int], modes: int, parts: int) -> AggregateObjective:
    """Return 2 y0 + y1, y0 >= each of three sums, y1 >= a fourth minus y0; one criterion is equal in all modes."""
    weights = rng.random((4, modes, NUM_CRITERIA)) * 3
    weights[:, :, 0] = weights[:, :1, 0]
    lhs = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    return AggregateObjective(np.array([2.0, 1.0]), lhs, rng.random((4, modes)), weights, _terms(rng, sizes), parts)


def _value(composite: AggregateObjective, choice: tuple[int, ...]) -> float:
    """Return the least value of a choice over all shares of modes."""
    found = _criteria(composite.terms, choice)
    modes, best = composite.least.shape[1], math.inf
    if not np.isfinite(found).all():
        return best
    for counts in itertools.product(range(composite.parts + 1), repeat=modes):
        if sum(counts) == composite.parts:
            shares = np.array(counts) / composite.parts
            rows = composite.least @ shares + np.einsum("f,rfk,k->r", shares, composite.weights, found)
            first = max(rows[:3])
            best = min(best, 2 * first + max(0.0, rows[3] - first))
    return best


def _priced(composite: AggregateObjective, sizes: list[int], mode: int, prices: Floats) -> tuple[Problem, float]:
    """Return the problem of a mode at given row prices, and its constant part."""
    weight = prices @ composite.weights[:, mode]
    nodes = [np.zeros(size) for size in sizes]
    edges: list[tuple[int, int, Floats, float]] = []
    for term in composite.terms:
        if len(term.nodes) == 1:
            nodes[term.nodes[0]] += weight[term.criterion] * term.values
        else:
            first, second = term.nodes
            edges.append((first, second, term.values, float(weight[term.criterion])))
    return Problem.build(nodes, edges), float(prices @ composite.least[:, mode])


PRICES = np.array([0.3, 0.4, 0.3, 0.9])
"""Row prices, no larger than the costs of y, so that the priced problems are lower bounds."""


@pytest.mark.parametrize(("modes", "parts"), [(1, 1), (2, 1), (3, 4)])
@pytest.mark.parametrize("seed", range(6))
def test_the_minimum_is_that_of_brute_force(seed: int, modes: int, parts: int) -> None:
    """With the value of any choice as ceiling, the best choice survives, and branch and bound finds its value."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(2, 4, size=5)]
    composite = _composite(rng, sizes, modes, parts)
    values = {choice: _value(composite, choice) for choice in itertools.product(*map(range, sizes))}
    possible = sorted(value for value in values.values() if value < math.inf)
    assert len(possible) > 10
    for ceiling in (possible[0] * 1.001, possible[len(possible) // 10], possible[-1]):
        problems = [_priced(composite, sizes, mode, PRICES) for mode in range(modes)]
        left = union_of([survivors_below(problem, ceiling - rest, _budget(problem)) for problem, rest in problems])
        assert left is not None

        for choice, value in values.items():
            inside = all(own[label] for own, label in zip(left.labels, choice, strict=True))
            inside &= all(mask[choice[a], choice[b]] for (a, b), mask in left.pairs.items())
            assert inside or value > ceiling
        found = minimise(composite, left, ceiling * 1.01, _budget(problems[0][0]))
        assert found.choice is not None
        assert found.bound == pytest.approx(possible[0], rel=TOLERANCE)
        assert values[found.choice] == pytest.approx(possible[0], rel=TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_survives_below_the_minimum(seed: int) -> None:
    """Below the minimum the bound is infinite, or no label survives."""
    rng = np.random.default_rng(seed)
    sizes = [3] * 4
    composite = _composite(rng, sizes, 1, 1)
    least = min(_value(composite, choice) for choice in itertools.product(*map(range, sizes)))
    problem, rest = _priced(composite, sizes, 0, PRICES)

    left = survivors_below(problem, 0.99 * least - rest, _budget(problem))

    assert left is None or minimise(composite, left, 0.99 * least, _budget(problem)).bound >= 0.99 * least
    lowest = HighsSolver().solve(problem).bound
    assert survivors_below(problem, lowest - 1e-3, _budget(problem)) is None


def test_a_work_limit_keeps_the_bound_valid() -> None:
    """With a nearly spent budget more labels survive and the bound is lower; the best choice is never lost."""
    rng = np.random.default_rng(7)
    sizes = [3] * 6
    composite = _composite(rng, sizes, 2, 3)
    values = {choice: _value(composite, choice) for choice in itertools.product(*map(range, sizes))}
    least = min(values.values())
    everything = Survivors(tuple(np.ones(size, np.bool_) for size in sizes), {})

    for work in (1.0, 1e6, 1e8, math.inf):
        problem, _ = _priced(composite, sizes, 0, PRICES)
        forbidden = {term.nodes: np.isfinite(term.values) for term in composite.terms if len(term.nodes) == 2}
        pairs = {tuple(sorted(at)): mask if at[0] < at[1] else mask.T for at, mask in forbidden.items()}
        left = Survivors(everything.labels, {(at[0], at[1]): mask for at, mask in pairs.items()})
        found = minimise(composite, left, 2 * least, _budget(problem, work))

        assert found.bound <= least * (1 + TOLERANCE)
        assert found.choice is None or values[found.choice] >= least * (1 - TOLERANCE)
        if work == math.inf:
            assert found.bound == pytest.approx(least, rel=TOLERANCE)
