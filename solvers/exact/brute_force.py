"""Enumeration of all choices: the oracle the other solvers are tested against."""

import math

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SolverError
from autopar.problem import Problem
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.model.graphical_model import as_floats

MAX_CHOICES = 1_000_000
_CHUNK = 1 << 15


class BruteForce(Solver):
    """Exact, exponential in the number of nodes; refuses problems with more than `MAX_CHOICES` choices."""

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`.

        Raises:
            SolverError: If there are too many choices.
        """
        sizes = problem.num_strategies
        count = math.prod(sizes)
        if count > MAX_CHOICES:
            raise SolverError(f"brute force on {count:.3g} choices", hint="use --solver auto")
        for first in range(0, count, _CHUNK):
            if budget.spent():
                return
            numbers = np.arange(first, min(first + _CHUNK, count))
            choices = np.stack(np.unravel_index(numbers, sizes), axis=1) if sizes else np.zeros((1, 0), np.int64)
            costs = _costs(problem, choices)
            for index in np.argsort(costs, kind="stable").tolist():
                # Vectorised costs are rounded sums: a choice that may still win is priced again by the problem.
                if costs[index] == math.inf or costs[index] > budget.cost + 1e-9 * abs(budget.cost):
                    break
                budget.offer(choices[index].tolist())
        budget.raise_bound(budget.cost, EXACT)


def _costs(problem: Problem, choices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the cost of each row of `choices`, rounded."""
    total = np.zeros(len(choices))
    for node, costs in enumerate(problem.node_costs):
        total += as_floats(costs)[choices[:, node]]
    for (a, b), index, weight in zip(
        problem.edge_nodes.tolist(), problem.edge_table_ids.tolist(), problem.edge_weights.tolist(), strict=True
    ):
        terms = as_floats(problem.edge_tables[index])[choices[:, a], choices[:, b]]
        total += np.where(np.isinf(terms), np.inf, np.where(np.isinf(terms), 0.0, terms) * weight)
    return total
