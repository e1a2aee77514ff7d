"""Lower bounds by message passing: sequential reweighted messages (Kolmogorov 2015; TRW-S on pairs).

Each edge moves cost from its table to its two nodes. Whatever is moved, the sum of the least costs of all nodes and of
all tables is a lower bound; one pass forwards and one backwards, in order of the nodes, move it so that the bound
never falls. What a label costs more than the least at its node, when the pass is there, is a lower bound on what the
optimum rises by if the label is taken.
"""

import math
from dataclasses import dataclass

import numpy as np

from autopar.compiled import compiled
from autopar.solvers.model.csr import Flat
from autopar.solvers.model.graphical_model import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """What has been moved from the tables to the nodes; `sweep` changes it in place.

    Attributes:
        to_first: Per edge and label of its smaller node.
        to_second: Per edge and label of its larger node.
        rises: Per label, what it costs above the least of its node when the last sweep was there.
        labels: Per node, a label: the cheapest given the labels of the nodes before it.
    """

    to_first: Floats
    to_second: Floats
    rises: Floats
    labels: Ints

    @classmethod
    def none(cls, flat: Flat) -> "Messages":
        """Return messages that move nothing."""
        return cls(
            np.zeros(int(flat.first_at[-1])),
            np.zeros(int(flat.second_at[-1])),
            np.zeros(len(flat.unary)),
            np.zeros(flat.num_nodes, np.int64),
        )

    def copy(self) -> "Messages":
        """Return messages that can be changed without changing these."""
        return Messages(self.to_first.copy(), self.to_second.copy(), self.rises.copy(), self.labels.copy())

    def sweep(self, flat: Flat, unary: Floats, times: int = 1) -> float:
        """Pass forwards and backwards; return the bound, true but for rounding.

        Args:
            flat: The field.
            unary: Costs of labels, in place of the field's.
            times: How often.
        """
        width = int(np.diff(flat.offsets).max(initial=1))
        moved, decided = np.zeros(width), np.zeros(width)
        offsets, edges = flat.offsets, flat.edges
        first, second, to_first, to_second = flat.first_at, flat.second_at, self.to_first, self.to_second
        later, later_at, earlier, earlier_at = flat.later, flat.later_at, flat.earlier, flat.earlier_at
        rises, labels, bound = self.rises, self.labels, 0.0
        # fmt: off
        for _ in range(times):
            _pass(offsets, unary, edges, flat.tables, flat.at, to_first, to_second, first, second,
                  earlier, earlier_at, later, later_at, rises, labels, moved, decided, False)
            bound = _pass(offsets, unary, edges, flat.turned, flat.at, to_second, to_first, second, first,
                          later, later_at, earlier, earlier_at, rises, labels, moved, decided, True)
        # fmt: on
        return float(bound) + flat.constant

    def bound(self, flat: Flat, unary: Floats) -> float:
        """Return a lower bound that holds in spite of rounding, whatever has been moved."""
        terms, sizes = _terms(
            flat.offsets,
            unary,
            flat.edges,
            flat.tables,
            flat.at,
            self.to_first,
            self.to_second,
            flat.first_at,
            flat.second_at,
        )
        # The error of a sum is below half a unit in the last place of each partial sum; `sizes` adds those up.
        return math.fsum([flat.constant, *terms.tolist()]) - 2.0**-52 * float(sizes.sum())


@compiled
def _pass(
    offsets: Ints,
    unary: Floats,
    edges: Ints,
    tables: Floats,
    at: Ints,
    out: Floats,
    into: Floats,
    out_at: Ints,
    into_at: Ints,
    behind: Ints,
    behind_at: Ints,
    ahead: Ints,
    ahead_at: Ints,
    rises: Floats,
    labels: Ints,
    total: Floats,
    given: Floats,
    backwards: bool,
) -> float:
    """Visit all nodes in order; `into` are the messages in the direction of the pass, `out` those against it.

    `tables` has the labels of the node behind first.
    """
    bound = 0.0
    count = len(offsets) - 1
    side = 1 if backwards else 0
    for step in range(count):
        i = count - 1 - step if backwards else step
        begin = offsets[i]
        size = offsets[i + 1] - begin
        for x in range(size):
            total[x] = unary[begin + x]
        for k in range(ahead_at[i], ahead_at[i + 1]):
            m = out_at[ahead[k]]
            for x in range(size):
                total[x] += out[m + x]
        for x in range(size):
            given[x] = total[x]
        for k in range(behind_at[i], behind_at[i + 1]):
            e = behind[k]
            j = edges[e, side]
            m = into_at[e]
            row = at[e]
            source = out_at[e]
            for x in range(size):
                into[m + x] = np.inf
            for y in range(offsets[j + 1] - offsets[j]):
                moved = out[source + y]
                for x in range(size):
                    into[m + x] = min(into[m + x], tables[row + x] - moved)
                row += size
            row = at[e] + labels[j] * size
            for x in range(size):
                total[x] += into[m + x]
                given[x] += tables[row + x]
        least = total[0]
        best = 0
        for x in range(size):
            least = min(least, total[x])
            if given[x] < given[best]:
                best = x
        labels[i] = best
        for x in range(size):
            rises[begin + x] = total[x] - least
        num_ahead = ahead_at[i + 1] - ahead_at[i]
        chains = max(1, num_ahead, behind_at[i + 1] - behind_at[i])
        for k in range(ahead_at[i], ahead_at[i + 1]):
            m = out_at[ahead[k]]
            for x in range(size):
                out[m + x] -= total[x] / chains
        bound += least * (1.0 - num_ahead / chains)
    return bound


@compiled
def _terms(
    offsets: Ints,
    unary: Floats,
    edges: Ints,
    tables: Floats,
    at: Ints,
    to_first: Floats,
    to_second: Floats,
    first_at: Ints,
    second_at: Ints,
) -> tuple[Floats, Floats]:
    """Return the least cost of each node and table after the messages, and the size of the numbers summed in each."""
    count = len(offsets) - 1
    terms = np.zeros(count + len(edges))
    sizes = np.zeros(count + len(edges))
    costs = unary.copy()
    size = np.abs(unary)
    for e in range(len(edges)):
        a, b = edges[e]
        rows, columns = offsets[a + 1] - offsets[a], offsets[b + 1] - offsets[b]
        least = np.inf
        largest = 0.0
        for x in range(rows):
            moved = to_first[first_at[e] + x]
            costs[offsets[a] + x] += moved
            size[offsets[a] + x] += abs(costs[offsets[a] + x]) + abs(moved)
            largest = max(largest, abs(moved))
            for y in range(columns):
                entry = tables[at[e] + x * columns + y]
                least = min(least, entry - moved - to_second[second_at[e] + y])
        for y in range(columns):
            moved = to_second[second_at[e] + y]
            costs[offsets[b] + y] += moved
            size[offsets[b] + y] += abs(costs[offsets[b] + y]) + abs(moved)
            largest = max(largest, abs(moved))
        terms[count + e] = least
        sizes[count + e] = 4.0 * largest + 2.0 * abs(least)
    for i in range(count):
        least = costs[offsets[i]]
        largest = 0.0
        for x in range(offsets[i], offsets[i + 1]):
            least = min(least, costs[x])
            largest = max(largest, size[x])
        terms[i] = least
        sizes[i] = largest
    return terms, sizes
