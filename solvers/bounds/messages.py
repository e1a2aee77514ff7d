"""Lower bounds by message passing: sequential reweighted messages (SRMP, Kolmogorov 2015; TRW-S on pairwise fields).

    bound(m) = sum_i min_s (unary_i[s] + sum_e m_ei[s])  +  sum_e min_{s, u} (table_e[s, u] - m_ea[s] - m_eb[u])

A message m_ei moves cost from the table of edge e to its node i, a reparametrisation that keeps every choice's cost, so
bound(m) is a lower bound for all m. A forward and a backward pass in node order never lower it (Kolmogorov 2006; tree
reweighting: Wainwright, Jaakkola, Willsky 2005). Fixed points are not always optima of the local polytope's dual.
"""

import math
from dataclasses import dataclass

import numpy as np

from autopar.compiled import compiled
from autopar.solvers.model.csr import FlatField
from autopar.solvers.model.graphical_model import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Messages of all edges; `sweep` changes them in place.

    Attributes:
        to_first: Message to the smaller node, per edge and label.
        to_second: Message to the larger node, per edge and label.
        reduced_costs: Per label, its reparametrised cost above the node's minimum at the last visit: a lower bound on
            the rise of the optimum if the label is taken.
        labels: A choice decoded sequentially: per node the cheapest label given those of its predecessors.
    """

    to_first: Floats
    to_second: Floats
    reduced_costs: Floats
    labels: Ints

    @classmethod
    def zero(cls, flat: FlatField) -> "Messages":
        """Return messages that are all 0."""
        return cls(
            np.zeros(int(flat.first_at[-1])),
            np.zeros(int(flat.second_at[-1])),
            np.zeros(len(flat.unary)),
            np.zeros(flat.num_nodes, np.int64),
        )

    def copy(self) -> "Messages":
        """Return an independent copy."""
        return Messages(self.to_first.copy(), self.to_second.copy(), self.reduced_costs.copy(), self.labels.copy())

    def sweep(self, flat: FlatField, unary: Floats, times: int = 1, reserved: Ints | None = None) -> float:
        """Pass forwards and backwards; return the lower bound, up to rounding.

        Args:
            flat: The field.
            unary: Costs of labels, in place of the field's.
            times: Number of forward and backward passes.
            reserved: Per node, shares of its cost that stay at the node instead of moving to an edge; 0 by default.
        """
        if reserved is None:
            reserved = np.zeros(flat.num_nodes, np.int64)
        width = int(np.diff(flat.offsets).max(initial=1))
        moved, decided = np.zeros(width), np.zeros(width)
        offsets, edges = flat.offsets, flat.edges
        first, second, to_first, to_second = flat.first_at, flat.second_at, self.to_first, self.to_second
        later, later_at, earlier, earlier_at = flat.later, flat.later_at, flat.earlier, flat.earlier_at
        reduced_costs, labels, bound = self.reduced_costs, self.labels, 0.0
        # fmt: off
        for _ in range(times):
            _pass(offsets, unary, edges, flat.tables, flat.at, to_first, to_second, first, second,
                  earlier, earlier_at, later, later_at, reserved, reduced_costs, labels, moved, decided, False)
            bound = _pass(offsets, unary, edges, flat.turned, flat.at, to_second, to_first, second, first,
                          later, later_at, earlier, earlier_at, reserved, reduced_costs, labels, moved, decided, True)
        # fmt: on
        return float(bound) + flat.constant

    def bound(self, flat: FlatField, unary: Floats) -> float:
        """Return the bound at the present messages, less its rounding error.

        Relaxes: the agreement of edges on the labels of a node (dual of the local polytope). Valid when: always, for
        any messages. Costs: one pass over the tables. Source: Werner 2007, Kolmogorov 2015.
        """
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
    reserved: Ints,
    reduced_costs: Floats,
    labels: Ints,
    total: Floats,
    given: Floats,
    backwards: bool,
) -> float:
    """Visit all nodes in order; `into` holds the messages in the direction of the pass, `out` those against it.

    `tables` has the labels of the preceding node as rows.
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
            reduced_costs[begin + x] = total[x] - least
        num_ahead = ahead_at[i + 1] - ahead_at[i]
        chains = max(1, num_ahead, behind_at[i + 1] - behind_at[i]) + reserved[i]
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
    """Return the minimum of each node and table after reparametrisation, and the magnitude summed in each."""
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
