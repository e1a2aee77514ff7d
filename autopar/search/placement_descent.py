"""Local search over placements: one decision of the incumbent is changed, and its neighbours are optimised again.

Column generation finds choices at the corners of the convex hull. A plan between them, which shards some parameters of
a layer and not the others, is optimal at no prices. Each decision is changed to each of its other strategies in turn,
its neighbours are optimised at the dual prices, and the result is timed by the formula, unless its price, which is a
lower bound on that time, is no improvement.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import numpy as np

from autopar.formulate.block_memory import FloatArray
from autopar.formulate.tables import Decision, Tables
from autopar.problem import Choice, Problem
from autopar.search.settings import NodeSettings

BETTER = 1e-9
"""Relative improvement below which a difference is rounding."""


class Neighbourhood:
    """Neighbours of a choice, at the prices of a placement problem.

    Args:
        tables: Placement decisions.
        instance: The placement problem.
        settings: Constants of the search.
    """

    def __init__(self, tables: Tables, instance: Problem, settings: NodeSettings) -> None:
        self._settings = settings
        self._nodes = tables.nodes
        self._instance, self._costs = instance, instance.node_costs
        self._priced: tuple[Choice, float] = (), math.inf
        self._around: list[list[tuple[int, FloatArray, float]]] = [[] for _ in tables.nodes]
        ends = zip(instance.edge_nodes.tolist(), instance.edge_table_ids.tolist(), instance.edge_weights, strict=True)
        for (first, second), table, weight in ends:
            prices = np.asarray(instance.edge_tables[table], dtype=np.float64)
            self._around[first].append((second, prices, float(weight)))
            self._around[second].append((first, prices.T, float(weight)))

    @property
    def order(self) -> list[int]:
        """The decisions, those about parameters first."""
        return sorted(range(len(self._nodes)), key=lambda index: self._nodes[index].decision is not Decision.PARAMETER)

    def changed(self, choice: Choice, index: int, limit: float) -> Iterator[Choice | None]:
        """Yield the neighbours with another strategy of one decision; None for those whose price reaches a limit."""
        for strategy in range(self._nodes[index].count):
            if strategy != choice[index]:
                found, touched = self._moved(choice, index, strategy)
                yield found if found is not None and self._cost(choice, found, touched) < limit else None

    def _cost(self, choice: Choice, other: Choice, touched: Sequence[int]) -> float:
        """Return the price of `other`, which differs from `choice` in touched decisions; that of `choice` is cached."""
        if self._priced[0] is not choice:
            self._priced = choice, self._instance.cost(choice)
        total = self._priced[1]
        if math.isinf(total):
            return self._instance.cost(other)
        changed = {node for node in touched if choice[node] != other[node]}
        for node in changed:
            total += float(self._costs[node][other[node]] - self._costs[node][choice[node]])
            for end, table, weight in self._around[node]:
                if weight and (end not in changed or end > node):  # an edge between two changed decisions counts once
                    before, after = table[choice[node], choice[end]], table[other[node], other[end]]
                    total += weight * float(after - before)
        return total

    def _moved(self, choice: Choice, index: int, strategy: int) -> tuple[Choice | None, Sequence[int]]:
        """Return a choice with another strategy and optimised neighbours, None if impossible, and these decisions."""
        new = list(choice)
        new[index] = strategy
        near = [other for other, *_ in self._around[index]]
        far = [other for node in near for other, *_ in self._around[node]]
        follow = [node for node in dict.fromkeys([*near, *far]) if node != index]
        for _ in range(self._settings.descent_rounds):
            for node in follow:
                new[node] = int(self._prices(new, node).argmin())
        touched = (index, *follow)
        possible = all(np.isfinite(self._prices(new, node)[new[node]]) for node in touched)
        return tuple(new) if possible else None, touched

    def _prices(self, choice: Sequence[int], node: int) -> FloatArray:
        """Return the price of each strategy of a node, given the strategies of the other nodes."""
        found = np.array(self._costs[node], dtype=np.float64)
        for other, table, weight in self._around[node]:
            if weight:
                found += weight * table[:, choice[other]]
            else:
                found[~np.isfinite(table[:, choice[other]])] = np.inf
        return found


def descend(
    start: Choice,
    near: Neighbourhood,
    constant: float,
    seconds: Callable[[Choice], float],
    should_stop: Callable[[], bool],
    settings: NodeSettings,
) -> Iterator[Choice]:
    """Yield better and better choices, until no neighbour of the last one is better or a limit of changes is reached.

    Args:
        start: First choice.
        near: Neighbours, at prices that are lower bounds on `seconds`.
        constant: Constant of these prices, in seconds.
        seconds: Returns the step time of a choice.
        should_stop: Whether to stop.
        settings: Constants of the search.
    """
    choice, best, unchanged, left = start, seconds(start), 0, settings.descent_changes
    before = best
    for index in cycle(near.order):
        for other in near.changed(choice, index, best * (1 - BETTER) - constant):
            left -= 1
            if not left or should_stop():
                return
            if left % settings.descent_share == 0:
                if best > before * (1 - settings.descent_worth):
                    return
                before = best
            found = math.inf if other is None else seconds(other)
            if other is not None and found < best * (1 - BETTER):
                choice, best, unchanged = other, found, 0
                yield choice
                break
        unchanged += 1
        if unchanged > len(start):
            return
