"""Strategies that are never dearer, whatever the neighbours take, and never use more.

Label s can stand in for label t if it uses no more and

    c[s] - c[t] + sum over neighbours n of max over labels u of n (d_n[s, u] - d_n[t, u])  <=  0

A maximum is at least the mean, so only pairs whose means satisfy this have to be looked at, which are few.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.solvers.compiled import compiled
from autopar.solvers.field import Field, Floats, Ints
from autopar.solvers.flat import Flat, FlatMemory
from autopar.solvers.memory import Memory

Flags = NDArray[np.bool_]

SLACK = 1e-9
"""Relative rounding of means: what is that close is looked at."""


def undominated(field: Field, memory: Memory) -> list[Ints]:
    """Return per node the labels to keep; at least one optimal choice under the limits consists of kept labels.

    A node's labels are judged against all labels of its neighbours that are still kept, so one pass in order of nodes
    is sound.
    """
    flat = Flat.of(field)
    uses = FlatMemory.of(memory, flat.offsets)
    # fmt: off
    kept = _undominated(flat.offsets, flat.unary, flat.edges, flat.tables, flat.turned, flat.at,
                        flat.later, flat.later_at, flat.earlier, flat.earlier_at,
                        uses.node_at, uses.amount_at, uses.amounts)
    # fmt: on
    return [np.flatnonzero(kept[first:last]) for first, last in pairwise(flat.offsets.tolist())]


@compiled
def _undominated(
    offsets: Ints,
    unary: Floats,
    edges: Ints,
    tables: Floats,
    turned: Floats,
    at: Ints,
    later: Ints,
    later_at: Ints,
    earlier: Ints,
    earlier_at: Ints,
    node_at: Ints,
    amount_at: Ints,
    amounts: Floats,
) -> Flags:
    """Return which labels stay."""
    count = len(offsets) - 1
    kept = np.ones(offsets[count], np.bool_)
    for i in range(count):
        begin = offsets[i]
        size = offsets[i + 1] - begin
        if size < 2:
            continue
        means = unary[begin : begin + size].copy()  # of a label's cost; not finite once something is forbidden with it
        magnitude = _largest(means)
        for k in range(later_at[i], later_at[i + 1]):
            magnitude += _add_means(
                means, tables, at[later[k]], kept[offsets[edges[later[k], 1]] : offsets[edges[later[k], 1] + 1]]
            )
        for k in range(earlier_at[i], earlier_at[i + 1]):
            magnitude += _add_means(
                means, turned, at[earlier[k]], kept[offsets[edges[earlier[k], 0]] : offsets[edges[earlier[k], 0] + 1]]
            )
        beats = np.zeros((size, size), np.bool_)  # [t, s]: s can stand in for t
        for t in range(size):
            for s in range(size):
                if s == t or means[s] - means[t] > SLACK * magnitude:
                    continue
                frugal = True
                for u in range(node_at[i], node_at[i + 1]):
                    frugal = frugal and amounts[amount_at[u] + s] <= amounts[amount_at[u] + t]
                if not frugal:
                    continue
                dearer = unary[begin + s] - unary[begin + t]
                for k in range(later_at[i], later_at[i + 1]):
                    other = edges[later[k], 1]
                    dearer += _most_dearer(tables, at[later[k]], s, t, kept[offsets[other] : offsets[other + 1]])
                for k in range(earlier_at[i], earlier_at[i + 1]):
                    other = edges[earlier[k], 0]
                    dearer += _most_dearer(turned, at[earlier[k]], s, t, kept[offsets[other] : offsets[other + 1]])
                beats[t, s] = dearer <= 0
        for t in range(size):
            for s in range(size):
                if beats[t, s] and kept[begin + s]:
                    kept[begin + t] = False
                    break
    return kept


@compiled
def _largest(numbers: Floats) -> float:
    """Return the largest finite absolute value."""
    result = 0.0
    for number in numbers:
        if np.isfinite(number):
            result = max(result, abs(number))
    return result


@compiled
def _add_means(means: Floats, tables: Floats, at: int, columns: Flags) -> float:
    """Add to each label the mean of its row over the kept columns; return how large the numbers were."""
    added = np.zeros(len(means))
    number = max(1, columns.sum())
    for s in range(len(means)):
        row = at + s * len(columns)
        for u in range(len(columns)):
            if columns[u]:
                added[s] += tables[row + u] / number
    means += added
    return _largest(added)


@compiled
def _most_dearer(tables: Floats, at: int, s: int, t: int, columns: Flags) -> float:
    """Return by how much row s of a table is dearer than row t at most, over the kept columns.

    What is forbidden with t does not count; what is forbidden with s alone counts infinitely.
    """
    result = -np.inf
    first, second = at + s * len(columns), at + t * len(columns)
    for u in range(len(columns)):
        if columns[u] and tables[second + u] < np.inf:
            result = max(result, tables[first + u] - tables[second + u])
    return result
