"""Tables as arrays: what is looked up and added up many times for one mesh, laid out once.

Sums are taken in the order of nodes and edges, so that they are what adding up one after the other gives.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.problem import Kinship

if TYPE_CHECKING:  # they are laid out by this
    from autopar.formulate.tables import Slot, Tables

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class FlatTables:
    """The prices of tables in arrays, which are never written to.

    Args:
        tables: The decisions.
        num_slots: Number of slots.
        again: By slot of a forward, what it is where it runs again.
        outside: By slot of a collective, where the part of it is told that leaves nodes.

    Attributes:
        node_kinds: Per node the kind of block it is paid in.
        node_slots: Per node the slot.
        node_shares: Per node how often per instance.
        label_at: Where the strategies of each node begin among all, (nodes + 1,).
        label_seconds: Seconds of all strategies of all nodes, one node after another.
        edge_kinds: As of nodes.
        edge_slots: As of nodes.
        edge_shares: As of nodes.
        ends: First and second node of each edge, then of each pair of nodes with forbidden strategies.
        tables: The distinct tables of edges and of those pairs.
        table_of: Per edge and such pair the number of its table.
        again_nodes: Nodes that are paid again under selective recompute.
        again_node_slots: Where.
        again_edges: The same of edges.
        again_edge_slots: Where.
        outside: Edges that say what of their seconds leaves nodes, as long as they are paid at all.
        outside_slots: Where each of those says so.
        outside_tables: The distinct tables of that.
        outside_of: Per such edge the number of its table among them.
        again_outside: Those of them that are paid again under selective recompute, by their place among them.
        names: Per node a name for reports.
        item_nodes: Nodes of the items of `Tables.bytes`.
        item_labels: Per strategy of each item, one item after another, its place among all strategies.
        item_amounts: The bytes.
        item_at: Where items begin in those, (items + 1,).
        kinships: Of placement problems of these tables, by the nodes that pay for something in pairs besides.
        nbytes: Bytes of memory of the prices of pairs, here and in the tables.
    """

    def __init__(
        self, tables: "Tables", num_slots: int, again: Mapping["Slot", "Slot"], outside: Mapping["Slot", "Slot"]
    ) -> None:
        nodes, edges = tables.nodes, tables.edges
        self.kinships: dict[tuple[tuple[int, int], ...], Kinship] = {}
        self.node_kinds = _ints(node.kind for node in nodes)
        self.node_slots = _ints(node.slot for node in nodes)
        self.node_shares = np.array([node.share for node in nodes])
        self.label_at = _starts([node.count for node in nodes])
        self.label_seconds = np.concatenate([np.zeros(0), *(node.seconds for node in nodes)])
        self.names = tuple(f"{node.decision.name.lower()}:{node.kind}:{node.name}" for node in nodes)
        self.edge_kinds = _ints(edge.kind for edge in edges)
        self.edge_slots = _ints(edge.slot for edge in edges)
        self.edge_shares = np.array([edge.share for edge in edges])
        pairs = [(edge.first, edge.second, edge.table) for edge in edges]
        pairs += [(pair.first, pair.second, pair.seconds) for pair in tables.forbidden]
        self.ends = np.array([pair[:2] for pair in pairs], np.int64).reshape(-1, 2)
        self.ends.flags.writeable = False
        self.tables, self.table_of = _distinct([table for _, _, table in pairs])
        self.again_nodes = _ints(tables.again_nodes)
        self.again_edges = _ints(tables.again_edges)
        self.outside = _ints(
            number
            for number, edge in enumerate(edges)
            if edge.outside is not None and edge.slot in outside and edge.share
        )
        self.outside_slots = _ints(outside[edges[number].slot] for number in self.outside.tolist())
        told: dict[tuple[int, int, int], FloatArray] = {}
        each = []
        for number in self.outside.tolist():
            own = edges[number].outside
            assert own is not None, "those were chosen"
            key = id(own.seconds), id(own.source), id(own.target)
            each.append(told[key] if key in told else told.setdefault(key, own.table))
        self.outside_tables, self.outside_of = _distinct(each)
        items = tables.bytes
        self.item_nodes = _ints(item.node for item in items)
        self.item_at = _starts([len(item.amounts) for item in items])
        self.item_labels = np.concatenate(
            [np.zeros(0, np.int64), *(self.label_at[item.node] + np.arange(len(item.amounts)) for item in items)]
        )
        self.item_amounts = np.concatenate([np.zeros(0), *(item.amounts for item in items)])
        self._shape = len(tables.folded.kinds), num_slots
        self._widths = np.array([table.shape[1] for table in self.tables], np.int64)
        self._entries, self._entry_at = _laid_out(self.tables)
        self._outside_entries, self._outside_at = _laid_out(self.outside_tables)
        apart = {id(edge.outside.seconds): edge.outside.seconds for edge in edges if edge.outside is not None}
        arrays = *self.tables, *self.outside_tables, *apart.values(), self._entries, self._outside_entries
        self.nbytes = sum(array.nbytes for array in arrays)
        paid = np.flatnonzero(self.edge_shares)
        self.again_node_slots = _ints(again[nodes[number].slot] for number in tables.again_nodes)
        self.again_edge_slots = _ints(again[edges[number].slot] for number in tables.again_edges)
        place = {number: index for index, number in enumerate(self.outside.tolist())}
        repeated = [number for number in self.again_edges.tolist() if number in place]
        self._paid = paid
        self.again_outside = _ints(place[number] for number in repeated)
        self._cells = np.concatenate([
            self._cell(self.node_kinds, self.node_slots),
            self._cell(self.edge_kinds[paid], self.edge_slots[paid]),
            self._cell(self.edge_kinds[self.outside], self.outside_slots),
            self._cell(self.node_kinds[self.again_nodes], self.again_node_slots),
            self._cell(self.edge_kinds[self.again_edges], self.again_edge_slots),
            self._cell(self.edge_kinds[repeated], _ints(outside[again[edges[number].slot]] for number in repeated)),
        ])  # fmt: skip

    def _cell(self, kinds: IntArray, slots: IntArray) -> IntArray:
        """Return the places of kinds and slots in an array of both."""
        return kinds * self._shape[1] + slots

    def kind_totals(self, choice: Sequence[int]) -> FloatArray:
        """Return the summed prices of one instance by kind and slot; see `Tables.kind_totals`."""
        chosen = np.asarray(choice, np.int64)
        nodes = self.node_shares * self.label_seconds[self.label_at[:-1] + chosen]
        count = len(self.edge_kinds)
        of, ends = self.table_of[:count], self.ends[:count]
        within = chosen[ends[:, 0]] * self._widths[of] + chosen[ends[:, 1]]
        with np.errstate(invalid="ignore"):  # what is never paid may be forbidden
            edges = self.edge_shares * self._entries[self._entry_at[of] + within]
        told = self._outside_entries[self._outside_at[self.outside_of] + within[self.outside]]
        outside = self.edge_shares[self.outside] * told
        again = nodes[self.again_nodes], edges[self.again_edges], outside[self.again_outside]
        parts = nodes, edges[self._paid], outside, *again
        totals = np.bincount(self._cells, np.concatenate(parts), minlength=self._shape[0] * self._shape[1])
        return totals.reshape(self._shape).astype(np.float64, copy=False)

    def held(self, choice: Sequence[int]) -> FloatArray:
        """Return the bytes of every item of `Tables.bytes`, (items,)."""
        amounts: FloatArray = self.item_amounts[self.item_at[:-1] + np.asarray(choice, np.int64)[self.item_nodes]]
        return amounts


def _ints(numbers: Iterable[int]) -> IntArray:
    return np.array(list(numbers), np.int64)


def _starts(sizes: Sequence[int]) -> IntArray:
    """Return where consecutive runs of `sizes` begin, and where the last one ends."""
    return np.cumsum([0, *sizes], dtype=np.int64)


def _frozen(array: FloatArray) -> FloatArray:
    """Return an array that nobody writes to any more, so that problems share it; itself if it is no view."""
    if not array.flags.owndata:
        array = np.array(array)
    array.flags.writeable = False
    return array


def _distinct(tables: Sequence[FloatArray]) -> tuple[tuple[FloatArray, ...], IntArray]:
    """Return the tables of different content, and the number of each."""
    found: list[FloatArray] = []
    by_content: dict[tuple[tuple[int, ...], bytes], int] = {}
    by_id: dict[int, int] = {}
    for table in tables:
        if id(table) not in by_id:
            array = np.ascontiguousarray(table, np.float64)
            key = array.shape, hashlib.blake2b(array.data, digest_size=16).digest()
            by_id[id(table)] = by_content.setdefault(key, len(found))
            if by_content[key] == len(found):
                found.append(_frozen(array))
    return tuple(found), _ints(by_id[id(table)] for table in tables)


def _laid_out(tables: Sequence[FloatArray]) -> tuple[FloatArray, IntArray]:
    """Return the entries of tables one after another, and where each begins."""
    return np.concatenate([np.zeros(0), *(table.ravel() for table in tables)]), _starts([t.size for t in tables])
