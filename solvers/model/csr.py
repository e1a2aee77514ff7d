"""A field and its memory rows in compressed sparse row (CSR) arrays, the form compiled kernels work on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled
from autopar.solvers.model.graphical_model import Field, Floats, Ints
from autopar.solvers.model.memory_rows import Memory


@dataclass(frozen=True, slots=True, eq=False)
class FlatField:
    """A field in arrays: every node has labels, every edge joins a smaller node to a larger one.

    Bounds and local search require finite costs (`Field.softened`).

    Attributes:
        offsets: Where each node's labels begin, shape (num_nodes + 1,).
        unary: Cost of each label.
        edges: Nodes of each edge, shape (num_edges, 2), sorted.
        entries: `tables` and `turned`, concatenated.
        tables: Entries of all distinct tables, each row-major with the labels of the smaller node first.
        turned: Entries of all distinct tables, each transposed.
        at: Where each edge's table begins in `tables` and in `turned`.
        first_at: Where each edge's message to its smaller node begins.
        second_at: Where each edge's message to its larger node begins.
        later: Edges of each node to larger nodes, concatenated by node.
        later_at: Where each node's edges in `later` begin, shape (num_nodes + 1,).
        earlier: Edges of each node to smaller nodes, concatenated by node.
        earlier_at: Where each node's edges in `earlier` begin, shape (num_nodes + 1,).
        constant: Cost independent of the choice.
    """

    offsets: Ints
    unary: Floats
    edges: Ints
    entries: Floats
    tables: Floats
    turned: Floats
    at: Ints
    first_at: Ints
    second_at: Ints
    later: Ints
    later_at: Ints
    earlier: Ints
    earlier_at: Ints
    constant: float

    @classmethod
    def of(cls, field: Field) -> "FlatField":
        """Return `field` in arrays."""
        sizes = np.array([len(u) for u in field.unary], np.int64)
        offsets = _starts(sizes)
        pairs = sorted(field.tables)
        edges = np.array(pairs, np.int64).reshape(-1, 2)
        known: dict[int, int] = {}
        distinct: list[Floats] = []
        position = 0
        at = np.zeros(len(pairs), np.int64)
        for e, pair in enumerate(pairs):
            table = field.tables[pair]
            if id(table) not in known:
                known[id(table)] = position
                distinct.append(table)
                position += table.size
            at[e] = known[id(table)]
        entries = np.concatenate([np.zeros(0), *(t.ravel() for t in distinct), *(t.T.ravel() for t in distinct)])
        return cls._laid_out(
            offsets, np.concatenate([np.zeros(0), *field.unary]), edges, entries, position, at, field.constant
        )

    @classmethod
    def of_tables(cls, sizes: Ints, unary: Floats, edges: Ints, tables: Floats, constant: float) -> "FlatField":
        """Return the arrays of a field with one table per edge, edges sorted.

        Args:
            sizes: Number of labels of each node.
            unary: Cost of each label.
            edges: Nodes of each edge.
            tables: Table entries in the order of the edges, the labels of the smaller node first.
            constant: Cost independent of the choice.
        """
        rows, columns = sizes[edges[:, 0]], sizes[edges[:, 1]]
        at = _starts(rows * columns)
        entries = np.concatenate([tables, _turned(tables, at, rows, columns)])
        return cls._laid_out(_starts(sizes), unary, edges, entries, len(tables), at[:-1], constant)

    @classmethod
    def _laid_out(
        cls, offsets: Ints, unary: Floats, edges: Ints, entries: Floats, position: int, at: Ints, constant: float
    ) -> "FlatField":
        """Return the arrays with their index; `position` is where transposed tables begin in `entries`."""
        sizes, count = np.diff(offsets), len(offsets) - 1
        return cls(
            offsets,
            unary,
            edges,
            entries,
            entries[:position],
            entries[position:],
            at,
            _starts(sizes[edges[:, 0]]),
            _starts(sizes[edges[:, 1]]),
            np.argsort(edges[:, 0], kind="stable"),
            _starts(np.bincount(edges[:, 0], minlength=count)),
            np.argsort(edges[:, 1], kind="stable"),
            _starts(np.bincount(edges[:, 1], minlength=count)),
            constant,
        )

    @property
    def field(self) -> Field:
        """The field as dictionaries of tables."""
        sizes = np.diff(self.offsets)
        shapes = sizes[self.edges].tolist()
        tables = {
            (first, second): self.tables[start : start + rows * columns].reshape(rows, columns)
            for (first, second), start, (rows, columns) in zip(
                self.edges.tolist(), self.at.tolist(), shapes, strict=True
            )
        }
        unary = [self.unary[first:last] for first, last in pairwise(self.offsets.tolist())]
        return Field(unary, tables, constant=self.constant)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.offsets) - 1

    def lowest_cost(self) -> float:
        """Return the sum of all minima, a lower bound (`Field.lowest_cost`); every edge must have its own table."""
        least = self.constant
        for costs, starts in ((self.unary, self.offsets[:-1]), (self.tables, self.at)):
            least += float(np.minimum.reduceat(costs, starts).sum()) if len(starts) else 0.0
        return least

    def cost(self, labels: Ints) -> float:
        """Return the cost of one label per node."""
        first, second = self.edges[:, 0], self.edges[:, 1]
        width = np.diff(self.offsets)[second]
        pairs = self.tables[self.at + labels[first] * width + labels[second]]
        return self.constant + float(self.unary[self.offsets[:-1] + labels].sum()) + float(pairs.sum())


@dataclass(frozen=True, slots=True, eq=False)
class FlatMemory:
    """Memory rows in arrays; usages are sorted by node.

    Attributes:
        limits: Limit of each segment.
        scales: Unit in which the excess of each segment is measured.
        node_at: Where the usages of each node begin, shape (num_nodes + 1,).
        first: First segment of each usage.
        last: Segment after the last one of each usage.
        amount_at: Where the amounts of each usage begin, shape (num_usages + 1,).
        amounts: Use of each label of each usage.
        label_of: Label of each amount, numbered over all nodes.
        usage_of: Usage of each amount.
    """

    limits: Floats
    scales: Floats
    node_at: Ints
    first: Ints
    last: Ints
    amount_at: Ints
    amounts: Floats
    label_of: Ints
    usage_of: Ints

    @classmethod
    def of(cls, memory: Memory, offsets: Ints) -> "FlatMemory":
        """Return `memory` in arrays; `offsets` holds where each node's labels begin."""
        order = np.argsort(memory.nodes, kind="stable")
        nodes = memory.nodes[order]
        sizes = np.diff(offsets)[nodes]
        amount_at = _starts(sizes)
        usage_of = np.repeat(np.arange(len(nodes)), sizes)
        within = np.arange(int(amount_at[-1])) - amount_at[usage_of]
        return cls(
            memory.limits,
            memory.scales,
            _starts(np.bincount(nodes, minlength=len(offsets) - 1)),
            memory.first[order],
            memory.last[order],
            amount_at,
            np.concatenate([np.zeros(0), *(memory.amounts[u] for u in order.tolist())]),
            offsets[nodes][usage_of] + within,
            usage_of,
        )

    def priced(self, prices: Floats, num_labels: int) -> Floats:
        """Return the cost of each label's use at `prices` per segment."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        each = (total[self.last] - total[self.first])[self.usage_of]
        return np.bincount(self.label_of, each * self.amounts, minlength=num_labels).astype(np.float64, copy=False)

    def profile(self, weights: Floats) -> Floats:
        """Return the use in each segment of a fractional choice, given the weight of each label."""
        used = np.bincount(self.usage_of, weights[self.label_of] * self.amounts, minlength=len(self.first))
        count = len(self.limits) + 1
        change = np.bincount(self.first, used, minlength=count) - np.bincount(self.last, used, minlength=count)
        return np.cumsum(change)[:-1]


def indicator(offsets: Ints, labels: Sequence[int] | NDArray[np.int64]) -> Floats:
    """Return the 0/1 vector of a choice: 1 for the chosen label of each node."""
    result = np.zeros(int(offsets[-1]))
    result[offsets[:-1] + np.asarray(labels, np.int64)] = 1.0
    return result


def _starts(sizes: Ints) -> Ints:
    """Return where consecutive runs of `sizes` begin, and the end of the last run."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


@compiled
def _turned(tables: Floats, at: Ints, rows: Ints, columns: Ints) -> Floats:
    """Return concatenated tables, each transposed."""
    result = np.empty(len(tables))
    for edge in range(len(rows)):
        for x in range(rows[edge]):
            for y in range(columns[edge]):
                result[at[edge] + y * rows[edge] + x] = tables[at[edge] + x * columns[edge] + y]
    return result
