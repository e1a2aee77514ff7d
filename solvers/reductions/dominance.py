"""Dominated labels: strategies that another strategy of the node can replace at no cost, whatever the neighbours take.

Label s dominates label t (dead-end elimination, Desmet et al. 1992, Goldstein 1994) if it never uses more memory and

    c[s] - c[t] + sum over neighbours n of max over labels u of n (d_n[s, u] - d_n[t, u])  <=  0

A maximum is at least the mean, so only pairs (s, t) whose means satisfy the inequality are tested, and a test stops as
soon as the maxima so far plus the means of the remaining neighbours are above 0.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled
from autopar.solvers.model.csr import FlatField, FlatMemory
from autopar.solvers.model.graphical_model import Field, Floats, Ints, labels_of
from autopar.solvers.model.memory_rows import Memory

Flags = NDArray[np.bool_]

SLACK = 1e-9
"""Relative rounding error of means: pairs this close to the threshold are tested."""


def undominated(field: Field, memory: Memory) -> list[Ints]:
    """Return the labels to keep per node; some optimal choice under the limits consists of kept labels.

    Each node is compared against the labels of its neighbours that are still kept, so one pass over the nodes is sound.
    """
    flat = FlatField.of(field)
    return labels_of(undominated_flags(flat, FlatMemory.of(memory, flat.offsets)), flat.offsets)


def undominated_flags(flat: FlatField, uses: FlatMemory) -> Flags:
    """Return, for a field in arrays, whether each label is kept; see `undominated`."""
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
    """Return which labels are kept."""
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
        # One row per label: its costs with each kept label of the neighbours, one neighbour after another.
        costs, starts, rest = np.empty((size, width)), np.zeros(number + 1, np.int64), np.zeros((number + 1, size))
        means = unary[begin : begin + size].copy()  # mean cost of each label; not finite if it forbids something
        magnitude = _largest(means)
        place = 0
        for k in range(later_at[i], later_at[i + 1]):
            _gather_costs(costs, starts, place, tables, at[later[k]], kept, offsets, edges[later[k], 1])
            place += 1
        for k in range(earlier_at[i], earlier_at[i + 1]):
            _gather_costs(costs, starts, place, turned, at[earlier[k]], kept, offsets, edges[earlier[k], 0])
            place += 1
        for place in range(number):
            magnitude += _write_means(rest[place], costs, starts[place], starts[place + 1])
            for s in range(size):
                means[s] += rest[place, s]
        for place in range(number - 1, -1, -1):
            for s in range(size):
                rest[place, s] += rest[place + 1, s]  # suffix sums of the means over the neighbours
        slack = SLACK * magnitude
        beats = np.zeros((size, size), np.bool_)  # [t, s]: s dominates t
        for t in range(size):
            for s in range(size):
                if s == t or means[s] - means[t] > slack:
                    continue
                frugal = True
                for u in range(node_at[i], node_at[i + 1]):
                    frugal = frugal and amounts[amount_at[u] + s] <= amounts[amount_at[u] + t]
                if frugal:
                    dearer = unary[begin + s] - unary[begin + t]
                    beats[t, s] = _dominates(costs, starts, rest, s, t, dearer, slack)
        for t in range(size):
            for s in range(size):
                if beats[t, s] and kept[begin + s]:
                    kept[begin + t] = False
                    break
    return kept


@compiled
def _gather_costs(
    costs: Floats, starts: Ints, place: int, tables: Floats, at: int, kept: Flags, offsets: Ints, other: int
) -> None:
    """Write the costs of all labels with the kept labels of a neighbour, and where the next neighbour begins."""
    columns = offsets[other + 1] - offsets[other]
    end = starts[place]
    for u in range(columns):
        if kept[offsets[other] + u]:
            for s in range(costs.shape[0]):
                costs[s, end] = tables[at + s * columns + u]
            end += 1
    starts[place + 1] = end


@compiled
def _dominates(costs: Floats, starts: Ints, rest: Floats, s: int, t: int, dearer: float, slack: float) -> bool:
    """Return whether label s dominates label t, given the difference of their unary costs.

    Combinations forbidden with t are ignored; one forbidden with s only makes the difference infinite.
    """
    for place in range(len(starts) - 1):
        most = -np.inf
        for u in range(starts[place], starts[place + 1]):
            difference = costs[s, u] - costs[t, u]  # NaN or -infinity where t is forbidden
            if difference > most:
                most = difference
        dearer += most
        more = rest[place + 1, s] - rest[place + 1, t]  # NaN or infinite if t forbids something
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
    """Write the mean of each row between two columns; return the largest magnitude."""
    number = max(1, last - first)
    for s in range(len(means)):
        total = 0.0
        for u in range(first, last):
            total += costs[s, u]
        means[s] = total / number
    return _largest(means)
