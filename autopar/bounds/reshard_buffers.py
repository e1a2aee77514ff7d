"""Bytes that a change of placement takes while a block runs: parameters gathered for it, gradients on their way.

They belong to pairs of decisions, so that the placement problem, whose memory is of single decisions, does not see
them; a price on memory can be put on pairs as well as on single ones (`master_problem.py`). What is counted is never
more than what the simulator counts (`autopar.simulate.memory`): what an op reads through a copy that it shares is left
out.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autopar.cost.reshard import bucketed
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
    """Bytes per device of one instance: (S of the edge's first node, S of its second) amounts."""

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
    """Return the buffers of a graph; those that are always empty are left out."""
    resident, wire = element_bytes(tables.folded, tables.costs.policy)
    found = []
    known: dict[tuple[int, BufferUse, float, float], FloatArray] = {}  # equal prices are of equal ways
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
        source, target = _ends(tables, edge)
        value, name = tables.folded.graph.values[edge.value], edge.value
        key = (id(edge.table), use, resident[name], wire[name])
        if key not in known:
            reducing = use is BufferUse.REDUCING
            resharder = bucketed(tables.mesh, tables.costs) if reducing else tables.resharder
            ways = resharder.of(value.shape, wire[name], tables.meaning.chunks(name))
            ends, handed = ways.ways(source, target)
            if reducing:
                known[key] = handed * min(1.0, resident[name] / wire[name])
            else:
                size = local_sizes(value.shape, target, tables.mesh) * min(resident[name], wire[name])
                known[key] = np.where(ends, size, 0)
        amounts = known[key]
        if amounts.any():
            found.append(Buffer(index, edge.kind, use, amounts))
    return tuple(found)


def _ends(tables: Tables, edge: Edge) -> tuple[IntArray, IntArray]:
    """Return the placement numbers at which a value is made, and at which it is read, by strategy."""
    first, second = tables.nodes[edge.first], tables.nodes[edge.second]
    slot = 0
    if first.decision is Decision.OP:
        slot = tables.folded.kinds[first.kind].ops[first.position].outputs.index(edge.value)
    assert second.options is not None, "an op reads it"
    target = second.options.inputs[edge.consumer]
    assert target is not None, "a price is for an input that is there"
    return first.outputs(slot), target
