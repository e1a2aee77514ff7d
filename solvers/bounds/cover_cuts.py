"""Cover inequalities of the memory rows: knapsack rows whose variables form one-label-per-node groups.

At a time with limit L, let m_n be the least use of node n. Nodes C with a threshold h_n each are a cover if

    sum over n in C of (h_n - m_n)  >  L - sum over all n of m_n

so not all nodes of C can use their thresholds or more, whatever the other nodes take:

    sum over n in C of sum over labels s with use[n, s] >= h_n of x[n, s]  <=  |C| - 1

Labels of further nodes whose use above their node's least is at least the largest in C are added to the left-hand side
(extended cover, Balas 1975; covers as cuts of 0-1 programs: Crowder, Johnson, Padberg 1983; with one-label groups:
Wolsey 1990). The cuts tighten the LP relaxation: its fractional solutions often violate a cover but not the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.problem import LIMIT_TOLERANCE
from autopar.solvers.model.graphical_model import Floats, Ints
from autopar.solvers.model.memory_rows import Memory

LEAST_VIOLATION = 0.01
"""Least violation of a cover that is worth a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """An inequality  sum of values * x[columns] <= most  that every choice within the limits satisfies.

    Attributes:
        columns: Labels, as columns of the linear program.
        values: Coefficient of each label.
        most: Right-hand side.
    """

    columns: NDArray[np.int32]
    values: Floats
    most: float


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRow:
    """The limit of one segment over groups of labels, of which each node takes one.

    Attributes:
        columns: Labels of nodes whose use differs between labels, as columns of the linear program.
        owner: Node of each label, numbered from 0 in this row, ascending.
        above: Use of each label above the least of its node.
        room: Limit less the least uses of all nodes, with the tolerance of a feasible choice.
    """

    columns: Ints
    owner: Ints
    above: Floats
    room: float

    @classmethod
    def of(cls, memory: Memory, offsets: Ints, t: int) -> "GroupedRow | None":
        """Return the limit of segment `t`; None if no use differs, or the least uses break it.

        Args:
            memory: The limits.
            offsets: First column of each node.
            t: Segment.
        """
        uses: dict[int, Floats] = {}
        for u in np.flatnonzero((memory.first <= t) & (t < memory.last)).tolist():
            node = int(memory.nodes[u])
            uses[node] = uses[node] + memory.amounts[u] if node in uses else memory.amounts[u]
        nodes = [node for node, use in uses.items() if use.max() > use.min()]
        room = float(memory.limits[t]) - sum(float(use.min()) for use in uses.values())
        room += LIMIT_TOLERANCE * float(memory.scales[t])
        if not nodes or room < 0:
            return None  # cuts do not report an infeasible segment
        return cls(
            np.concatenate([offsets[n] + np.arange(len(uses[n])) for n in nodes]),
            np.repeat(np.arange(len(nodes)), [len(uses[n]) for n in nodes]),
            np.concatenate([uses[n] - uses[n].min() for n in nodes]),
            room,
        )


def covers(memory: Memory, offsets: Ints, times: Sequence[int], solution: Floats) -> list[Cut]:
    """Return covers violated by a solution of the relaxation, at most one per segment.

    Args:
        memory: The limits.
        offsets: First column of each node.
        times: Segments to separate.
        solution: Value per column.
    """
    rows = (GroupedRow.of(memory, offsets, t) for t in times)
    found = (None if row is None else _cover(row, solution) for row in rows)
    return [cover for cover in found if cover is not None]


def _cover(row: GroupedRow, solution: Floats) -> Cut | None:
    """Separate one segment greedily: items by 1 - x per unit of use, then drop those the cover does not need."""
    columns, owner, above, room = row.columns, row.owner, row.above, row.room
    num_nodes = int(owner[-1]) + 1
    order = np.lexsort((-above, owner))
    taken = np.empty(len(columns))  # per label, the solution's sum over labels of its node with at least its use
    running = np.cumsum(solution[columns[order]])
    before = np.concatenate([[0.0], running])[np.searchsorted(owner[order], np.arange(num_nodes))]
    taken[order] = running - before[owner[order]]
    doubt = np.maximum(1.0 - taken, 0.0)
    useful = np.flatnonzero((above > 0) & (doubt < 1.0))
    inside: dict[int, int] = {}
    total = 0.0
    for item in useful[np.argsort(doubt[useful] / above[useful], kind="stable")].tolist():
        node = int(owner[item])
        if node not in inside:
            inside[node] = item
            total += float(above[item])
            if total > room:
                break
    if total <= room:
        return None
    for node, item in sorted(inside.items(), key=lambda entry: -doubt[entry[1]]):
        if total - above[item] > room:  # the rest is a cover without it
            total -= float(above[item])
            del inside[node]
    thresholds = np.full(num_nodes, max(float(above[item]) for item in inside.values()))
    for node, item in inside.items():
        thresholds[node] = above[item]
    counted = above >= thresholds[owner]
    if float(solution[columns[counted]].sum()) < len(inside) - 1 + LEAST_VIOLATION:
        return None
    return Cut(columns[counted].astype(np.int32), np.ones(int(counted.sum())), float(len(inside) - 1))
