"""Bytes of reshards while a block runs: gathered parameters, and gradients on their way to a reduction.

Look here for memory that belongs to pairs of decisions. Placement problems have memory of single decisions only; the
master problem (`master_problem.py`) prices these pairs as edge costs. Amounts are at most those of the simulator
(`autopar.simulate.memory`): inputs read through a shared copy are left out.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autopar.cost.reshard import bucketed
from autopar.folding.gather_units import NO_UNIT, gather_units
from autopar.folding.graph_facts import element_bytes
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.op_strategies import local_sizes
from autopar.formulate.tables import Decision, Edge, IntArray, Slot, Tables


class BufferUse(StrEnum):
    """What a buffer is for: parameters gathered for a pass, or gradients handed to their reduction."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCING = "reducing"


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Bytes per device of the buffer of one instance of a kind.

    Attributes:
        edge: Number of the edge whose decisions it depends on.
        kind: Kind of block.
        use: What it is for.
        amounts: (strategies of the edge's first node, strategies of its second node) bytes.
    """

    edge: int
    kind: int
    use: BufferUse
    amounts: FloatArray


_USES = {
    Slot.FORWARD_GATHER: BufferUse.FORWARD,
    Slot.BACKWARD_GATHER: BufferUse.BACKWARD,
    Slot.GRADIENT: BufferUse.REDUCING,
}


def buffers(tables: Tables) -> tuple[Buffer, ...]:
    """Return the nonempty buffers of a graph."""
    resident, wire = element_bytes(tables.folded, tables.costs.policy)
    found = []
    units = gather_units(tables.folded, tables.costs, tables.mesh.shape)
    amounts_of: dict[tuple[int, BufferUse, float, float], FloatArray] = {}  # edges with one table have equal reshards
    for index, edge in enumerate(tables.edges):
        use = _USES.get(edge.slot)
        first, second = tables.nodes[edge.first], tables.nodes[edge.second]
        if use is None or second.decision is not Decision.OP:
            continue
        if use is BufferUse.REDUCING:
            if first.decision is not Decision.OP:
                continue
        elif first.decision is not Decision.PARAMETER:
            continue
        source, target = _endpoints(tables, edge)
        value, name = tables.folded.graph.values[edge.value], edge.value
        key = (id(edge.table), use, resident[name], wire[name])
        if key not in amounts_of:
            reducing = use is BufferUse.REDUCING
            resharder = bucketed(tables.mesh, tables.costs, tables.resharder.dealt) if reducing else tables.resharder
            part = NO_UNIT
            if not reducing:
                part = units[edge.kind, use is BufferUse.BACKWARD].get(name, NO_UNIT)
            reshards = resharder.of(value.shape, wire[name], tables.meaning.chunks(name), share=part.share)
            is_gathered, handed_bytes = reshards.ways(source, target)
            if reducing:
                amounts_of[key] = handed_bytes * min(1.0, resident[name] / wire[name])
            else:
                size = local_sizes(value.shape, target, tables.mesh) * min(resident[name], wire[name])
                amounts_of[key] = np.where(is_gathered, size, 0)
        amounts = amounts_of[key]
        if amounts.any():
            found.append(Buffer(index, edge.kind, use, amounts))
    return tuple(found)


def _endpoints(tables: Tables, edge: Edge) -> tuple[IntArray, IntArray]:
    """Placement numbers where the value of an edge is produced, and where it is read, by strategy."""
    first, second = tables.nodes[edge.first], tables.nodes[edge.second]
    slot = 0
    if first.decision is Decision.OP:
        slot = tables.folded.kinds[first.kind].ops[first.position].outputs.index(edge.value)
    assert second.options is not None, "the reader is an op"
    target = second.options.inputs[edge.consumer]
    assert target is not None, "edges are for inputs that exist"
    return first.outputs(slot), target
