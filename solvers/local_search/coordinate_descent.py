"""Coordinate descent: repair a choice until it is within the limits, then give each node in turn its best label."""

import math
from collections.abc import Sequence

import numpy as np

from autopar.problem import Problem
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.local_search.repair import State, descend, repair
from autopar.solvers.model.graphical_model import Field, prepare
from autopar.solvers.model.memory_rows import Memory


class CoordinateDescent(Solver):
    """Heuristic: descent from greedy starts (iterated conditional modes, Besag 1986); bound: the sum of minima."""

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        search(problem, budget)


def search(problem: Problem, budget: Budget, *, allowed: Sequence[Sequence[int]] | None = None) -> None:
    """Offer the local optima reached from the warm start, a greedy choice and the choice of least use.

    Args:
        problem: The problem.
        budget: Receives the choices, and the bound unless strategies were excluded.
        allowed: Strategies to consider per node; all by default.
    """
    prepared = prepare(problem, allowed)
    memory = Memory.of(problem, prepared.labels) if prepared is not None else None
    if prepared is None or memory is None or memory.is_infeasible():
        if allowed is None:
            budget.raise_bound(math.inf)
        return
    if allowed is None:
        budget.raise_bound(prepared.field.lowest_cost(), EXACT)
    soft = prepared.field.softened()
    starts = [greedy(soft), least_use(soft, memory)]
    if budget.start is not None and (labels := prepared.choice(budget.start)) is not None:
        starts.insert(0, labels)
    for labels in starts:
        if budget.spent():
            return
        state = State(soft, memory, labels)
        if repair(state, budget):
            descend(state, budget)
            budget.offer(prepared.strategies(state.labels))


def greedy(field: Field) -> list[int]:
    """Return a greedy choice: per node the cheapest label given earlier nodes, later nodes at their minimum."""
    labels = [0] * len(field.unary)
    for node, costs in enumerate(field.unary):
        total = costs
        for other in field.adjacent[node]:
            table = field.table(node, other)
            total = total + (table[:, labels[other]] if other < node else table.min(axis=1))
        labels[node] = int(total.argmin()) if len(costs) else 0
    return labels


def least_use(field: Field, memory: Memory) -> list[int]:
    """Return the choice of least use, summed over each node's segments; cost breaks ties."""
    use = memory.prices(np.ones(memory.num_rows), [len(u) for u in field.unary])
    return [int(np.lexsort((u, amounts))[0]) if len(u) else 0 for u, amounts in zip(field.unary, use, strict=True)]
