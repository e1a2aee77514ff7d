"""Cutting planes from the limits: covers of knapsack rows whose nodes take one label each.

At a time with limit L, let m_n be the least that node n uses. Nodes C with a threshold h_n each are a cover if

    sum over n in C of (h_n - m_n)  >  L - sum over all n of m_n

Then not all of them can use their thresholds or more, whatever the others take:

    sum over n in C of sum over labels s with use[n, s] >= h_n of x[n, s]  <=  |C| - 1

Labels of further nodes that use as much above their node's least as any of C does may be counted as well (extended
cover, Balas 1975). A fractional solution of the relaxation often breaks such a row without breaking the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.problem import LIMIT_TOLERANCE
from autopar.solvers.model.graphical_model import Floats, Ints
from autopar.solvers.model.memory_rows import Memory

LEAST_VIOLATION = 0.01
"""By how much a cover must be broken to be worth a row."""


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """At most `most` of some labels can be taken together.

    Attributes:
        columns: The labels, as columns of the linear program.
        most: How many of them.
    """

    columns: NDArray[np.int32]
    most: int


def covers(memory: Memory, offsets: Ints, times: Sequence[int], solution: Floats) -> list[Cover]:
    """Return covers that a solution of the relaxation breaks, at most one for each time.

    Args:
        memory: The limits.
        offsets: Per node its first column.
        times: Segments to look at.
        solution: Value per column.
    """
    found = (_cover(memory, offsets, t, solution) for t in times)
    return [cover for cover in found if cover is not None]


def _cover(memory: Memory, offsets: Ints, t: int, solution: Floats) -> Cover | None:
    """Return a broken cover of one time, looked for greedily: the least doubt per unit of use first."""
    uses: dict[int, Floats] = {}
    for u in np.flatnonzero((memory.first <= t) & (t < memory.last)).tolist():
        node = int(memory.nodes[u])
        uses[node] = uses[node] + memory.amounts[u] if node in uses else memory.amounts[u]
    nodes = [node for node, use in uses.items() if use.max() > use.min()]
    if not nodes:
        return None
    columns = np.concatenate([offsets[n] + np.arange(len(uses[n])) for n in nodes])
    owner = np.repeat(np.arange(len(nodes)), [len(uses[n]) for n in nodes])
    above = np.concatenate([uses[n] - uses[n].min() for n in nodes])  # use above the node's least
    room = float(memory.limits[t]) - sum(float(use.min()) for use in uses.values())
    room += LIMIT_TOLERANCE * float(memory.scales[t])  # what counts as fitting
    if room < 0:
        return None  # nothing fits at all, which is not for a cover to say
    order = np.lexsort((-above, owner))
    taken = np.empty(len(columns))  # what the solution takes of labels that use as much or more
    running = np.cumsum(solution[columns[order]])
    before = np.concatenate([[0.0], running])[np.searchsorted(owner[order], np.arange(len(nodes)))]
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
        if total - above[item] > room:  # not needed
            total -= float(above[item])
            del inside[node]
    thresholds = np.full(len(nodes), max(float(above[item]) for item in inside.values()))
    for node, item in inside.items():
        thresholds[node] = above[item]
    counted = above >= thresholds[owner]
    if float(solution[columns[counted]].sum()) < len(inside) - 1 + LEAST_VIOLATION:
        return None
    return Cover(columns[counted].astype(np.int32), len(inside) - 1)
