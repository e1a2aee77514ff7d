"""Flat arrays of the tables of one mesh, for lookups and sums that are repeated many times.

`FlatTables` sums in the order of nodes and edges, so that results are bitwise equal to sequential sums.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.problem import Kinship

if TYPE_CHECKING:  # `tables` imports this module
    from autopar.formulate.tables import Slot, Tables

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class FlatTables:
    """Costs and bytes of tables as read-only arrays; *labels* are the strategies of all nodes, numbered consecutively.

    Args:
        tables: The decisions.
        num_slots: Number of slots.
        again: Slot of the repetition under selective recompute, by slot of the forward.
        outside: Slot of the seconds between nodes, by slot of the collective.

    Attributes:
        node_kinds: (nodes,) kind of the block that pays.
        node_slots: (nodes,) slot.
        node_shares: (nodes,) times per instance.
        label_at: (nodes + 1,) first label of each node.
        label_seconds: (labels,) seconds.
        edge_kinds: (edges,) kind of the block that pays.
        edge_slots: (edges,) slot.
        edge_shares: (edges,) times per instance.
        ends: (pairs, 2) first and second node of each edge, then of each forbidden pair of nodes.
        tables: The distinct tables of these pairs.
        table_of: (pairs,) index into `tables`.
        again_nodes: Nodes that selective recompute repeats.
        again_node_slots: Slot of the repetition of each.
        again_edges: Edges that selective recompute repeats.
        again_edge_slots: Slot of the repetition of each.
        outside: Edges with known seconds between nodes and a share above zero.
        outside_slots: Slot of the seconds between nodes of each.
        outside_tables: The distinct tables of seconds between nodes.
        outside_of: Index into `outside_tables` of each edge in `outside`.
        again_outside: Indices into `outside` of the edges that selective recompute repeats.
        names: Name of each node for reports.
        item_nodes: (items,) node of each item of `Tables.bytes`.
        item_labels: Label of each strategy of each item, item after item.
        item_amounts: Bytes of each strategy of each item, in the order of `item_labels`.
        item_at: (items + 1,) first entry of each item in `item_labels`.
        kinships: Structure shared by placement problems of these tables, by the nodes of their additional pairs.
        nbytes: Bytes of memory of pairwise costs, here and in the tables.
    """

    def __init__(
        self, tables: "Tables", num_slots: int, again: Mapping["Slot", "Slot"], outside: Mapping["Slot", "Slot"]
    ) -> None:
        nodes, edges = tables.nodes, tables.edges
        self.kinships: dict[tuple[tuple[int, int], ...], Kinship] = {}
        self.node_kinds = _ints(node.kind for node in nodes)
        self.node_slots = _ints(node.slot for node in nodes)
        self.node_shares = np.array([node.share for node in nodes])
        self.label_at = _offsets([node.count for node in nodes])
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
        found_tables: dict[tuple[int, int, int], FloatArray] = {}
        each = []
        for number in self.outside.tolist():
            own = edges[number].outside
            assert own is not None, "`outside` must list edges with seconds between nodes"
            key = id(own.seconds), id(own.source), id(own.target)
            each.append(found_tables[key] if key in found_tables else found_tables.setdefault(key, own.table))
        self.outside_tables, self.outside_of = _distinct(each)
        items = tables.bytes
        self.item_nodes = _ints(item.node for item in items)
        self.item_at = _offsets([len(item.amounts) for item in items])
        self.item_labels = np.concatenate(
            [np.zeros(0, np.int64), *(self.label_at[item.node] + np.arange(len(item.amounts)) for item in items)]
        )
        self.item_amounts = np.concatenate([np.zeros(0), *(item.amounts for item in items)])
        self._shape = len(tables.folded.kinds), num_slots
        self._widths = np.array([table.shape[1] for table in self.tables], np.int64)
        self._entries, self._entry_at = _concatenated(self.tables)
        self._outside_entries, self._outside_at = _concatenated(self.outside_tables)
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
            self._cells_of(self.node_kinds, self.node_slots),
            self._cells_of(self.edge_kinds[paid], self.edge_slots[paid]),
            self._cells_of(self.edge_kinds[self.outside], self.outside_slots),
            self._cells_of(self.node_kinds[self.again_nodes], self.again_node_slots),
            self._cells_of(self.edge_kinds[self.again_edges], self.again_edge_slots),
            self._cells_of(self.edge_kinds[repeated], _ints(outside[again[edges[number].slot]] for number in repeated)),
        ])  # fmt: skip

    def _cells_of(self, kinds: IntArray, slots: IntArray) -> IntArray:
        """Return the flat indices of (kind, slot) cells."""
        return kinds * self._shape[1] + slots

    def kind_totals(self, choice: Sequence[int]) -> FloatArray:
        """Return the summed costs of one instance, (kinds, slots); see `Tables.kind_totals`."""
        chosen = np.asarray(choice, np.int64)
        nodes = self.node_shares * self.label_seconds[self.label_at[:-1] + chosen]
        count = len(self.edge_kinds)
        of, ends = self.table_of[:count], self.ends[:count]
        within = chosen[ends[:, 0]] * self._widths[of] + chosen[ends[:, 1]]
        with np.errstate(invalid="ignore"):  # an edge of share zero may be infinite
            edges = self.edge_shares * self._entries[self._entry_at[of] + within]
        found_tables = self._outside_entries[self._outside_at[self.outside_of] + within[self.outside]]
        outside = self.edge_shares[self.outside] * found_tables
        again = nodes[self.again_nodes], edges[self.again_edges], outside[self.again_outside]
        parts = nodes, edges[self._paid], outside, *again
        totals = np.bincount(self._cells, np.concatenate(parts), minlength=self._shape[0] * self._shape[1])
        return totals.reshape(self._shape).astype(np.float64, copy=False)

    def held(self, choice: Sequence[int]) -> FloatArray:
        """Return the (items,) bytes of every item of `Tables.bytes`."""
        amounts: FloatArray = self.item_amounts[self.item_at[:-1] + np.asarray(choice, np.int64)[self.item_nodes]]
        return amounts


def _ints(numbers: Iterable[int]) -> IntArray:
    return np.array(list(numbers), np.int64)


def _offsets(sizes: Sequence[int]) -> IntArray:
    """Return the offsets of consecutive runs of the given sizes, with the total at the end."""
    return np.cumsum([0, *sizes], dtype=np.int64)


def _read_only(array: FloatArray) -> FloatArray:
    """Return a read-only array for sharing between problems: the array itself if it owns its data, else a copy."""
    if not array.flags.owndata:
        array = np.array(array)
    array.flags.writeable = False
    return array


def _distinct(tables: Sequence[FloatArray]) -> tuple[tuple[FloatArray, ...], IntArray]:
    """Return the tables with distinct contents, and the index of each table among them."""
    found: list[FloatArray] = []
    by_content: dict[tuple[tuple[int, ...], bytes], int] = {}
    by_id: dict[int, int] = {}
    for table in tables:
        if id(table) not in by_id:
            array = np.ascontiguousarray(table, np.float64)
            key = array.shape, hashlib.blake2b(array.data, digest_size=16).digest()
            by_id[id(table)] = by_content.setdefault(key, len(found))
            if by_content[key] == len(found):
                found.append(_read_only(array))
    return tuple(found), _ints(by_id[id(table)] for table in tables)


def _concatenated(tables: Sequence[FloatArray]) -> tuple[FloatArray, IntArray]:
    """Return the concatenated entries of tables, and the offset of each table."""
    return np.concatenate([np.zeros(0), *(table.ravel() for table in tables)]), _offsets([t.size for t in tables])
