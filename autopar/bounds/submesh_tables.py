"""The two free axes of a mesh whose major one is data parallel, on their own: what passes take on all three at least.

On dp × outer × inner the major axis splits the batch of every op and value of a pass that has one and can be split so
(`data_major.py`). A device then works on one dp-th of the samples, with whatever placements on outer × inner: an op has
the same local shapes, and a value that stays split over dp travels over the same links in the same bytes. So with

    T(dp, o, i; s)      the least seconds of a pass of s samples on dp × outer × inner
    T(o, i; s / dp)     those of the terms below, of s / dp samples on outer × inner

the first is at least the second, for every dp: one small problem serves many meshes and pipelines. The terms are

- the seconds of ops that split the batch over dp whenever they can; sums of gradients, which dp may split too, and ops
  that have to stay whole are left out;
- changes of placement of values with a batch between such ops. Others, parameters above all, are left out: their way
  may be shorter with shards over dp.

A value is back in shards of its batch after each of its ways, but may leave them meanwhile. What its placements on the
other axes are then they can be on outer × inner, with as many bytes or fewer, as long as s / dp samples can be split
over both axes. If they cannot, ways are priced as if they could.
"""

from dataclasses import replace
from math import gcd

import numpy as np

from autopar.folding.graph_facts import element_bytes
from autopar.formulate.data_major import DataMajor
from autopar.formulate.tables import Decision, Edge, FloatArray, IntArray, Node, Slot, Tables
from autopar.ir.graph import Phase
from autopar.sharding import Mesh

_WAYS = frozenset({Slot.FORWARD_WAIT, Slot.FORWARD_GATHER, Slot.BACKWARD_WAIT, Slot.BACKWARD_GATHER})
"""Changes of placement in passes."""


def minor_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh of the two free axes of one whose major axis is data parallel.

    >>> str(minor_mesh(Mesh.of(dp=4, outer=2, inner=8)))
    'outer=2×inner=8'
    """
    _, *free = mesh.axes
    return Mesh(tuple(free))


def passes_alone(tables: Tables, data: DataMajor) -> Tables:
    """Return what is left of the tables of two axes that holds for three, for passes without recompute.

    Args:
        tables: Decisions and prices on outer × inner, unrestricted.
        data: What a data-parallel axis does with the graph of the tables.
    """
    split = [_is_split(tables, node, data) for node in tables.nodes]
    nodes = tuple(
        node if kept else replace(node, seconds=np.zeros(node.count))
        for node, kept in zip(tables.nodes, split, strict=True)
    )
    ways = (edge for edge in tables.edges if edge.slot in _WAYS and split[edge.first] and split[edge.second])
    edges = tuple(
        replace(edge, table=_as_if_split(tables, edge, data)) for edge in ways if _has_batch(tables, edge.value, data)
    )
    return replace(tables, nodes=nodes, edges=edges, again_nodes=(), again_edges=())


def _has_batch(tables: Tables, value: str, data: DataMajor) -> bool:
    """Whether a value has a batch that any number of devices that divides it may split."""
    dim = data.facts.batch.get(value)
    return dim is not None and tables.meaning.chunks(value)[dim] == 1


def _is_split(tables: Tables, node: Node, data: DataMajor) -> bool:
    """Whether what a node decides about is split along the batch by the data-parallel axis, and not otherwise."""
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
    # An op that devices run in place of another one on their shard may take longer without the shard.
    return bool(splitting) and all(strategy.local is None for strategy in splitting)


def _as_if_split(tables: Tables, edge: Edge, data: DataMajor) -> FloatArray:
    """Return the prices of an edge as if the batch of its value could be split over all devices."""
    shape = tables.folded.graph.values[edge.value].shape
    dim = data.facts.batch[edge.value]
    parts = tables.mesh.size // gcd(shape[dim], tables.mesh.size)
    if parts == 1:
        return edge.table
    _, wire = element_bytes(tables.folded, tables.costs.policy)
    finer = (*shape[:dim], shape[dim] * parts, *shape[dim + 1 :])  # of as many bytes
    ways = tables.resharder.of(finer, wire[edge.value] / parts, tables.meaning.chunks(edge.value))
    prices = ways.between(*placements(tables, edge))
    return np.where(np.isfinite(edge.table), prices, edge.table)


def placements(tables: Tables, edge: Edge) -> tuple[IntArray, IntArray]:
    """Return the placement numbers between which an edge of a pass prices the ways, of both of its nodes."""
    first, second = tables.nodes[edge.first], tables.nodes[edge.second]
    if second.options is None:
        target = second.outputs(0)
    else:
        read = second.options.inputs[edge.consumer]
        assert read is not None, "free values have no edges"
        target = read
    if first.options is None:
        return first.outputs(0), target
    outputs = tables.folded.kinds[first.kind].ops[first.position].outputs
    if second.decision is not Decision.BOUNDARY:
        return first.outputs(outputs.index(edge.value)), target
    boundary = next(own for own in tables.boundaries if own.node == edge.second)
    made = next(own for own in boundary.producers if (own.kind, own.position) == (first.kind, first.position))
    return first.outputs(made.slot), target
