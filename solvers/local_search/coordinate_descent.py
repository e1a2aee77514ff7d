"""Coordinate descent: repair what does not fit, then give one node after another its best strategy."""

import math
from collections.abc import Sequence

import numpy as np

from autopar.problem import Problem
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.local_search.repair import State, descend, repair
from autopar.solvers.model.graphical_model import Field, prepare
from autopar.solvers.model.memory_rows import Memory


class CoordinateDescent(Solver):
    """A heuristic; its bound is the sum of all least costs."""

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        search(problem, budget)


def search(problem: Problem, budget: Budget, *, allowed: Sequence[Sequence[int]] | None = None) -> None:
    """Offer what descent reaches from the caller's start, from a greedy choice and from the choice that uses least.

    Args:
        problem: What to solve.
        budget: Takes the choices, and the bound unless strategies were excluded.
        allowed: Per node the strategies to consider; all by default.
    """
    prepared = prepare(problem, allowed)
    memory = Memory.of(problem, prepared.labels) if prepared is not None else None
    if prepared is None or memory is None or memory.hopeless():
        if allowed is None:
            budget.raise_bound(math.inf)
        return
    if allowed is None:
        budget.raise_bound(prepared.field.lowest_cost(), EXACT)
    soft = prepared.field.softened()
    starts = [greedy(soft), frugal(soft, memory)]
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
    """Return a choice made node by node: the cheapest label given those before, the others at their least."""
    labels = [0] * len(field.unary)
    for node, costs in enumerate(field.unary):
        total = costs
        for other in field.adjacent[node]:
            table = field.table(node, other)
            total = total + (table[:, labels[other]] if other < node else table.min(axis=1))
        labels[node] = int(total.argmin()) if len(costs) else 0
    return labels


def frugal(field: Field, memory: Memory) -> list[int]:
    """Return the choice of least use, each node's summed over its segments."""
    use = memory.prices(np.ones(memory.num_rows), [len(u) for u in field.unary])
    return [int(np.lexsort((u, amounts))[0]) if len(u) else 0 for u, amounts in zip(field.unary, use, strict=True)]
