"""Bytes that a change of placement takes while a block runs: parameters gathered for it, gradients on their way.

They belong to pairs of decisions, so that the placement problem, whose memory is of single decisions, does not see
them; a price on memory can be put on pairs as well as on single ones (`hull.py`). What is counted is never more than
what the simulator counts (`autopar.simulate.memory`): only ways that are gathers or reductions all along.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autopar.formulate.memory import FloatArray
from autopar.formulate.options import local_sizes
from autopar.formulate.tables import Decision, Edge, IntArray, Slot, Tables, element_bytes


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
    resident, wire = element_bytes(tables.folded.graph, tables.costs.policy)
    found = []
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
        size = min(resident[edge.value], wire[edge.value])
        amounts = size * _elements(tables, edge.value, source, target, reduces=use is BufferUse.REDUCING)
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


def _elements(tables: Tables, value: str, source: IntArray, target: IntArray, *, reduces: bool) -> FloatArray:
    """Return the elements that a gather makes, or that a reduction is handed; 0 for ways that are something else."""
    shape = tables.folded.graph.values[value].shape
    before, after = np.meshgrid(source, target, indexing="ij")
    made = np.broadcast_to(local_sizes(shape, target, tables.mesh), before.shape).astype(np.float64)
    pure, moves = np.ones(before.shape, dtype=bool), np.zeros(before.shape, dtype=bool)
    handed = np.ones(before.shape)
    for axis in reversed(tables.mesh.axes):
        before, old = np.divmod(before, len(shape) + 2)
        after, new = np.divmod(after, len(shape) + 2)
        here = (old == 1) & (new != 1) if reduces else (old >= 2) & (new == 0)
        pure &= here | (old == new)
        moves |= here
        if reduces:
            handed = np.where(here & (new >= 2), handed * axis.size, handed)
    return np.where(pure & moves, made * handed, 0.0)
