"""Beam search (Lowerre 1976): partial choices, ranked by cost so far plus a lower bound on the rest, node by node."""

import math

import numpy as np

from autopar.problem import Problem
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.model.graphical_model import Field, Floats, prepare
from autopar.solvers.model.memory_rows import Memory


class Beam(Solver):
    """Heuristic: keeps the best partial choices per node; its bound is the sum of all minima.

    Attributes:
        width: Partial choices kept after each node.
    """

    def __init__(self, width: int = 64) -> None:
        self.width = width

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        prepared = prepare(problem)
        memory = Memory.of(problem, prepared.labels) if prepared is not None else None
        if prepared is None or memory is None or memory.is_infeasible():
            budget.raise_bound(math.inf)
            return
        budget.raise_bound(prepared.field.lowest_cost(), EXACT)
        for labels in self._search(prepared.field, memory, budget):
            budget.offer(prepared.strategies(labels.tolist()))

    def _search(self, field: Field, memory: Memory, budget: Budget) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Return complete choices, best first, shape (kept, num_nodes); none if every partial choice was infeasible."""
        num_nodes = len(field.unary)
        uses = _dense_uses(field, memory)
        spare = memory.limits - sum((use.min(axis=0) for use in uses), np.zeros(memory.num_rows))
        choices = np.zeros((1, num_nodes), np.int64)  # K partial choices kept, N nodes
        costs = np.zeros(1)  # cost so far, plus the minima of tables to later nodes
        spares = spare[None, :]  # K x T: room under the limits if all later nodes take their least use
        for node in range(num_nodes):
            if budget.spent():
                return choices[:0]
            size = len(field.unary[node])
            total = costs[:, None] + field.unary[node][None, :]
            for other in field.adjacent[node]:
                table = field.table(node, other)
                if other < node:  # the table's minimum was counted when the other node was placed
                    total = total + (table - table.min(axis=0)[None, :]).T[choices[:, other]]
                else:
                    total = total + table.min(axis=1)[None, :]
            left = spares[:, None, :] - (uses[node] - uses[node].min(axis=0))[None, :, :]
            total = np.where((left >= -1e-9 * memory.scales).all(axis=2), total, np.inf)
            flat = total.ravel()
            kept = np.argsort(flat, kind="stable")[: self.width]
            kept = kept[np.isfinite(flat[kept])]
            parents, labels = kept // size, kept % size
            choices = choices[parents]
            choices[:, node] = labels
            costs, spares = flat[kept], left[parents, labels]
        return choices


def _dense_uses(field: Field, memory: Memory) -> list[Floats]:
    """Return the use of each label in each segment, per node, shape (labels, num_rows)."""
    uses = [np.zeros((len(u), memory.num_rows)) for u in field.unary]
    for n, first, last, amounts in zip(
        memory.nodes.tolist(), memory.first.tolist(), memory.last.tolist(), memory.amounts, strict=True
    ):
        uses[n][:, first:last] += amounts[:, None]
    return uses
