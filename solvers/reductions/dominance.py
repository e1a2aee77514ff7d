"""Strategies that are never dearer, whatever the neighbours take, and never use more.

Label s can stand in for label t if it uses no more and

    c[s] - c[t] + sum over neighbours n of max over labels u of n (d_n[s, u] - d_n[t, u])  <=  0

A maximum is at least the mean, so only pairs whose means satisfy this have to be looked at, which are few, and of those
no more neighbours than it takes until the maxima so far and the means of the rest are above 0.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled
from autopar.solvers.model.csr import Flat, FlatMemory
from autopar.solvers.model.graphical_model import Field, Floats, Ints, labels_of
from autopar.solvers.model.memory_rows import Memory

Flags = NDArray[np.bool_]

SLACK = 1e-9
"""Relative rounding of means: what is that close is looked at."""


def undominated(field: Field, memory: Memory) -> list[Ints]:
    """Return per node the labels to keep; at least one optimal choice under the limits consists of kept labels.

    A node's labels are judged against all labels of its neighbours that are still kept, so one pass in order of nodes
    is sound.
    """
    flat = Flat.of(field)
    return labels_of(undominated_of(flat, FlatMemory.of(memory, flat.offsets)), flat.offsets)


def undominated_of(flat: Flat, uses: FlatMemory) -> Flags:
    """Return the same of a field in arrays: of every label, whether to keep it."""
    # fmt: off
    kept = _undominated(flat.offsets, flat.unary, flat.edges, flat.tables, flat.turned, flat.at,
                        flat.later, flat.later_at, flat.earlier, flat.earlier_at,
                        uses.node_at, uses.amount_at, uses.amounts)
    # fmt: on
    return np.asarray(kept)


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
        number = later_at[i + 1] - later_at[i] + earlier_at[i + 1] - earlier_at[i]
        width = 0
        for k in range(later_at[i], later_at[i + 1]):
            width += offsets[edges[later[k], 1] + 1] - offsets[edges[later[k], 1]]
        for k in range(earlier_at[i], earlier_at[i + 1]):
            width += offsets[edges[earlier[k], 0] + 1] - offsets[edges[earlier[k], 0]]
        # One row per label: what it costs with each label that is left of one neighbour after another.
        costs, starts, rest = np.empty((size, width)), np.zeros(number + 1, np.int64), np.zeros((number + 1, size))
        means = unary[begin : begin + size].copy()  # of a label's cost; not finite once something is forbidden with it
        magnitude = _largest(means)
        place = 0
        for k in range(later_at[i], later_at[i + 1]):
            _line_up(costs, starts, place, tables, at[later[k]], kept, offsets, edges[later[k], 1])
            place += 1
        for k in range(earlier_at[i], earlier_at[i + 1]):
            _line_up(costs, starts, place, turned, at[earlier[k]], kept, offsets, edges[earlier[k], 0])
            place += 1
        for place in range(number):
            magnitude += _write_means(rest[place], costs, starts[place], starts[place + 1])
            for s in range(size):
                means[s] += rest[place, s]
        for place in range(number - 1, -1, -1):
            for s in range(size):
                rest[place, s] += rest[place + 1, s]  # what this neighbour and those after it cost
        slack = SLACK * magnitude
        beats = np.zeros((size, size), np.bool_)  # [t, s]: s can stand in for t
        for t in range(size):
            for s in range(size):
                if s == t or means[s] - means[t] > slack:
                    continue
                frugal = True
                for u in range(node_at[i], node_at[i + 1]):
                    frugal = frugal and amounts[amount_at[u] + s] <= amounts[amount_at[u] + t]
                if frugal:
                    dearer = unary[begin + s] - unary[begin + t]
                    beats[t, s] = _stands_in(costs, starts, rest, s, t, dearer, slack)
        for t in range(size):
            for s in range(size):
                if beats[t, s] and kept[begin + s]:
                    kept[begin + t] = False
                    break
    return kept


@compiled
def _line_up(
    costs: Floats, starts: Ints, place: int, tables: Floats, at: int, kept: Flags, offsets: Ints, other: int
) -> None:
    """Write what labels cost with those that are left of a neighbour, and where the next one begins."""
    columns = offsets[other + 1] - offsets[other]
    end = starts[place]
    for u in range(columns):
        if kept[offsets[other] + u]:
            for s in range(costs.shape[0]):
                costs[s, end] = tables[at + s * columns + u]
            end += 1
    starts[place + 1] = end


@compiled
def _stands_in(costs: Floats, starts: Ints, rest: Floats, s: int, t: int, dearer: float, slack: float) -> bool:
    """Whether label s is never dearer than label t, given by how much it is itself.

    What is forbidden with t does not count; what is forbidden with s alone counts infinitely.
    """
    for place in range(len(starts) - 1):
        most = -np.inf
        for u in range(starts[place], starts[place + 1]):
            difference = costs[s, u] - costs[t, u]  # no number or -infinity where t is forbidden
            if difference > most:
                most = difference
        dearer += most
        more = rest[place + 1, s] - rest[place + 1, t]  # no number, or infinite, if something is forbidden with t
        if dearer + more > slack:
            return False
    return dearer <= 0


@compiled
def _largest(numbers: Floats) -> float:
    """Return the largest finite absolute value."""
    result = 0.0
    for number in numbers:
        if np.isfinite(number):
            result = max(result, abs(number))
    return result


@compiled
def _write_means(means: Floats, costs: Floats, first: int, last: int) -> float:
    """Write for each label the mean of its row between two columns, and return how large the numbers are."""
    number = max(1, last - first)
    for s in range(len(means)):
        total = 0.0
        for u in range(first, last):
            total += costs[s, u]
        means[s] = total / number
    return _largest(means)
