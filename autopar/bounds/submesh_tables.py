"""Tables of the two free axes of a `dp × outer × inner` mesh, restricted to terms that are valid for every dp.

```text
P(dp × outer × inner, s) >= P'(outer × inner, s / dp)          every dp
```

Look here for why the submesh bound is valid. The data-parallel major axis splits the batch of every op and value that
has one and can be split (`data_major.py`). A device then has s / dp samples, with any placements on outer × inner: ops
have the same local shapes, and values that stay split over dp move over the same links in the same bytes. P' contains:

- seconds of ops that split the batch over dp whenever they can. Gradient sums, which dp may split too, and ops that
  have to stay whole are left out;
- reshards of values with a batch between such ops. Other reshards, of parameters above all, are left out: they may
  move fewer bytes if dp shards them.

A value may leave the shards of its batch during a reshard, and returns to them. Its placements on the free axes
meanwhile exist on outer × inner, with as many bytes or fewer, if s / dp is divisible by both axes. If not, reshards are
priced as if it were. Where collectives run in chunks beside products (`hides_tp` of a stack), reshards are left out: a
cheapest way of as many seconds may hide more of them.
"""

from dataclasses import replace
from math import gcd

import numpy as np

from autopar.folding.graph_facts import element_bytes, row_routings
from autopar.formulate.data_major import DataMajor
from autopar.formulate.tables import Decision, Edge, FloatArray, IntArray, Node, Slot, Tables
from autopar.ir.graph import Phase
from autopar.sharding import Mesh

_RESHARD_SLOTS = frozenset({Slot.FORWARD_WAIT, Slot.FORWARD_GATHER, Slot.BACKWARD_WAIT, Slot.BACKWARD_GATHER})
"""Slots of reshards in passes."""


def inner_mesh(mesh: Mesh) -> Mesh:
    """Return the free axes of a mesh with a data-parallel major axis.

    >>> str(inner_mesh(Mesh.of(dp=4, outer=2, inner=8)))
    'outer=2×inner=8'
    """
    _, *free = mesh.axes
    return Mesh(tuple(free))


def tables_of_passes(tables: Tables, data: DataMajor) -> Tables:
    """Restrict tables of the free axes to the terms of passes, without recompute, that are valid for every dp.

    Args:
        tables: Decisions and prices on outer × inner, unrestricted.
        data: What a data-parallel axis does with the graph of the tables.
    """
    splits_batch = [_splits_batch(tables, node, data) for node in tables.nodes]
    nodes = tuple(
        node if is_kept else replace(node, seconds=np.zeros(node.count))
        for node, is_kept in zip(tables.nodes, splits_batch, strict=True)
    )
    reshards = (
        edge
        for edge in tables.edges
        if edge.slot in _RESHARD_SLOTS
        and not tables.costs.stack.hides_tp
        and splits_batch[edge.first]
        and splits_batch[edge.second]
    )
    edges = tuple(
        replace(edge, table=_prices_as_if_divisible(tables, edge, data))
        for edge in reshards
        if _has_batch(tables, edge.value, data)
    )
    return replace(tables, nodes=nodes, edges=edges, again_nodes=(), again_edges=())


def _has_batch(tables: Tables, value: str, data: DataMajor) -> bool:
    """Whether a value has a batch dim that any number of devices dividing it may split."""
    dim = data.facts.batch.get(value)
    return dim is not None and tables.meaning.chunks(value)[dim] == 1


def _splits_batch(tables: Tables, node: Node, data: DataMajor) -> bool:
    """Whether a data-parallel axis splits the batch of a node, and nothing else of it."""
    if node.options is None:
        return node.value is not None and _has_batch(tables, node.value.name, data)
    op = tables.folded.kinds[node.kind].ops[node.position]
    names = [name for name in (*op.inputs, *op.outputs) if name and name not in tables.folded.free]
    if op.phase is Phase.UPDATE or not data.facts.gradients.isdisjoint(op.outputs):
        return False
    if any(name in data.facts.batch and not _has_batch(tables, name, data) for name in names):
        return False
    strategies = tables.meaning.strategies(op)
    splitting = [strategies[index] for index in np.flatnonzero(data.splitting(node.kind, op, strategies))]
    # A local kind that replaces an op on shards may take longer without the shard.
    return bool(splitting) and all(strategy.local is None for strategy in splitting)


def _prices_as_if_divisible(tables: Tables, edge: Edge, data: DataMajor) -> FloatArray:
    """Prices of an edge as if the batch of its value were divisible by all devices."""
    shape = tables.folded.graph.values[edge.value].shape
    dim = data.facts.batch[edge.value]
    factor = tables.mesh.size // gcd(shape[dim], tables.mesh.size)
    if factor == 1:
        return edge.table
    _, wire = element_bytes(tables.folded, tables.costs.policy)
    refined = (*shape[:dim], shape[dim] * factor, *shape[dim + 1 :])  # with equal bytes in total
    routing = row_routings(tables.folded).get(edge.value)
    reshards = tables.resharder.of(refined, wire[edge.value] / factor, tables.meaning.chunks(edge.value), routing)
    prices = reshards.between(*placements(tables, edge))
    return np.where(np.isfinite(edge.table), prices, edge.table)


def placements(tables: Tables, edge: Edge) -> tuple[IntArray, IntArray]:
    """Placement numbers of an edge at its producer and at its reader, by strategy."""
    first, second = tables.nodes[edge.first], tables.nodes[edge.second]
    if second.options is None:
        target = second.outputs(0)
    else:
        read_at = second.options.inputs[edge.consumer]
        assert read_at is not None, "free values have no edges"
        target = read_at
    if first.options is None:
        return first.outputs(0), target
    outputs = tables.folded.kinds[first.kind].ops[first.position].outputs
    if second.decision is not Decision.BOUNDARY:
        return first.outputs(outputs.index(edge.value)), target
    boundary = next(candidate for candidate in tables.boundaries if candidate.node == edge.second)
    producer = next(
        candidate
        for candidate in boundary.producers
        if (candidate.kind, candidate.position) == (first.kind, first.position)
    )
    return first.outputs(producer.slot), target
