"""What a block of the most frequent kind leaves behind in its forward, whatever its placements: values and their bytes.

These are the items of `Tables.bytes` that are kept per microbatch in flight, before any table is written.
"""

from dataclasses import dataclass
from functools import lru_cache

from autopar.cost import CostModel
from autopar.formulate.facts import element_bytes
from autopar.formulate.fold import BlockKind, Folded, boundary_groups
from autopar.formulate.options import whole_shapes
from autopar.formulate.selective import selective_ops
from autopar.formulate.tables import Memory
from autopar.ir.graph import Phase


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that is kept.

    Attributes:
        memory: What it is kept for, and so with which flavours of recompute.
        shape: Its shape; None if it is no value of the graph, but kept by a kernel.
        bytes: Its bytes, on all devices together if each holds a shard.
    """

    memory: Memory
    shape: tuple[int, ...] | None
    bytes: float


def main_kind(folded: Folded) -> BlockKind:
    """Return the most frequent kind of blocks, the first of several."""
    return max(folded.kinds, key=lambda kind: kind.count)


@lru_cache(maxsize=64)  # meshes are many, graphs few
def kept(folded: Folded, costs: CostModel) -> tuple[Kept, ...]:
    """Return what a block of the most frequent kind keeps for its backward."""
    kind, graph = main_kind(folded), folded.graph
    if not any(op.phase is Phase.BACKWARD for op in kind.ops):
        return ()
    resident, _ = element_bytes(folded, costs.policy)
    again = selective_ops(folded, costs)[kind.id]
    written = {state.output for state in graph.states}
    found = []
    for position, op in enumerate(kind.ops):
        memory = Memory.DROPPED if position in again else Memory.SAVED
        behind = float(costs.kept_bytes(op, *whole_shapes(graph, op), resident)[0])
        if behind:
            found.append(Kept(memory, None, behind))
        for name, saved in zip(op.outputs, kind.saved[position], strict=True):
            if name and saved and name not in written:
                value = graph.values[name]
                found.append(Kept(memory, value.shape, value.size * resident[name]))
    for producers, arrivals in boundary_groups(folded):
        made = producers[0]
        value = graph.values[folded.kinds[made.kind].ops[made.position].outputs[made.slot]]
        for number, arrival in arrivals:
            if number == kind.id and arrival.saved:
                theirs = (folded.kinds[own.kind].saved[own.position][own.slot] for own, _ in arrival.producers)
                memory = Memory.HANDED if all(theirs) else Memory.ARRIVED
                found.append(Kept(memory, value.shape, value.size * resident[value.name]))
    return tuple(found)
