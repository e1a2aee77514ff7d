"""What a block of the most frequent kind holds, whatever its placements: values and their bytes.

What it leaves behind in its forward are the items of `Tables.bytes` that are kept per microbatch in flight, before any
table is written. What a split backward puts off until the weight pass is there besides, whatever runs again.
"""

from dataclasses import dataclass
from functools import lru_cache

from autopar.cost import Collective, CostModel, is_view
from autopar.folding.block_interface import hand_overs
from autopar.folding.fold import BlockKind, Folded, boundary_groups
from autopar.folding.graph_facts import element_bytes, global_shapes
from autopar.folding.selective_recompute import selective_ops
from autopar.folding.weight_gradients import weight_pass_ops
from autopar.formulate.tables import Memory
from autopar.ir.graph import Phase, Role


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


@lru_cache(maxsize=65536)
def most_shards(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """Return into how many shards a tensor can be cut by axes of a mesh, each of which cuts one dim or none.

    >>> most_shards((6, 4), (3, 4)), most_shards((6, 5), (3, 4))
    (12, 3)
    """
    if not axes:
        return 1
    most = most_shards(shape, axes[1:])
    for dim, length in enumerate(shape):
        if length % axes[0] == 0:
            rest = (*shape[:dim], length // axes[0], *shape[dim + 1 :])
            most = max(most, axes[0] * most_shards(rest, axes[1:]))
    return most


def main_kind(folded: Folded) -> BlockKind:
    """Return the most frequent kind of blocks, the first of several."""
    return max(folded.kinds, key=lambda kind: kind.count)


@lru_cache(maxsize=64)  # meshes are many, graphs few
def kept(folded: Folded, costs: CostModel) -> tuple[Kept, ...]:
    """Return what a block of the most frequent kind keeps for its backward."""
    return kept_by(folded, costs, main_kind(folded).id)


def kept_by(folded: Folded, costs: CostModel, kind_id: int) -> tuple[Kept, ...]:
    """Return what a block of a kind keeps for its backward."""
    kind, graph = folded.kinds[kind_id], folded.graph
    if not any(op.phase is Phase.BACKWARD for op in kind.ops):
        return ()
    resident, _ = element_bytes(folded, costs.policy)
    again = selective_ops(folded, costs)[kind.id]
    written = {state.output for state in graph.states}
    found = []
    for position, op in enumerate(kind.ops):
        memory = Memory.DROPPED if position in again else Memory.SAVED
        behind = float(costs.kept_bytes(op, *global_shapes(graph, op), resident)[0])
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


@dataclass(frozen=True, slots=True)
class Memories:
    """Values of one memory: one, and views of it.

    Attributes:
        shapes: Their shapes.
        bytes: Their bytes, on all devices together if each holds a shard.
    """

    shapes: frozenset[tuple[int, ...]]
    bytes: float

    def least(self, mesh: tuple[int, ...]) -> float:
        """Return the least bytes that a device of a mesh of this shape holds of it."""
        return self.bytes / max(most_shards(shape, mesh) for shape in self.shapes)


@lru_cache(maxsize=64)
def put_off(folded: Folded, costs: CostModel) -> tuple[Memories, ...]:
    """Return what a block of the most frequent kind keeps from its backward to its weight pass, nearly all of it.

    Values of the forward that another block makes are left out: several blocks may keep them together.
    """
    kind, graph = main_kind(folded), folded.graph
    late = weight_pass_ops(folded, kind)
    makers = {name: op for op in kind.ops for name in op.outputs if name}
    written = {state.output for state in graph.states}
    here = {name for name, op in makers.items() if op.phase is not Phase.UPDATE and op.name not in late}
    here = (here - written) | set(hand_overs(folded)[kind.id].backward_in)

    def memory(name: str) -> str:
        op = makers.get(name)
        while op is not None and op.inputs and op.inputs[0] and is_view(op, len(graph.values[op.inputs[0]].shape)):
            name = op.inputs[0]
            op = makers.get(name)
        return name

    read: dict[str, set[str]] = {}
    for op in kind.ops:
        for name in op.inputs if op.name in late else ():
            if name and memory(name) in here:
                read.setdefault(memory(name), set()).update((name, memory(name)))
    resident, wire = element_bytes(folded, costs.policy)
    return tuple(
        Memories(
            frozenset(graph.values[name].shape for name in names),
            min(graph.values[name].size * min(resident[name], wire[name]) for name in names),
        )
        for names in read.values()
    )


@lru_cache(maxsize=64)
def received(folded: Folded, costs: CostModel, kind: int) -> tuple[tuple[Memories, ...], tuple[Memories, ...]]:
    """Return what a block of a kind receives from the one before it, and from the next one."""
    resident, wire = element_bytes(folded, costs.policy)
    own, values = hand_overs(folded)[kind], folded.graph.values
    arriving, returning = (
        tuple(
            Memories(frozenset({values[name].shape}), values[name].size * min(resident[name], wire[name]))
            for name in names
        )
        for names in (own.forward_in, own.backward_in)
    )
    return arriving, returning


@dataclass(frozen=True, slots=True)
class Sent:
    """A parameter or a sum of gradients of a block of the most frequent kind, and its way where it lies in shards.

    Attributes:
        memories: What is held through the step.
        wire: Bytes as it travels, of the whole tensor.
        collective: What brings the whole to where it is used, or makes shards of what is made there.
        times: How often, for every microbatch.
    """

    memories: Memories
    wire: float
    collective: Collective
    times: int


@lru_cache(maxsize=64)
def sent(folded: Folded, costs: CostModel) -> tuple[Sent, ...]:
    """Return what travels in every microbatch if a data-parallel axis shards it: each pass reads parameters whole."""
    kind, graph = main_kind(folded), folded.graph
    made = {name for op in kind.ops for name in op.outputs}
    sums = {state.output for state in graph.states if state.role is Role.GRADIENT}
    resident, wire = element_bytes(folded, costs.policy)
    readers: dict[str, set[Phase]] = {}
    for op in kind.ops:
        if op.phase is not Phase.UPDATE and sums.isdisjoint(op.outputs):
            for name in op.inputs:
                readers.setdefault(name, set()).add(Phase.BACKWARD if op.phase is Phase.BACKWARD else Phase.FORWARD)
    found = []
    for state in graph.states:
        if state.output not in made or state.role not in (Role.PARAMETER, Role.GRADIENT):
            continue
        is_parameter = state.role is Role.PARAMETER
        name = state.input if is_parameter else state.output
        value = graph.values[name]
        found.append(
            Sent(
                Memories(frozenset({value.shape}), value.size * resident[name]),
                value.size * wire[name],
                Collective.ALL_GATHER if is_parameter else Collective.REDUCE_SCATTER,
                len(readers.get(name, ())) if is_parameter else 1,
            )
        )
    return tuple(found)


@lru_cache(maxsize=64)
def states(folded: Folded, costs: CostModel, *, offload: bool) -> tuple[Memories, ...]:
    """Return what a block of the most frequent kind holds through the step: parameters, sums of gradients, moments.

    If the optimizer is offloaded, its moments are left out.
    """
    kind, graph = main_kind(folded), folded.graph
    made = {name for op in kind.ops for name in op.outputs}
    resident, _ = element_bytes(folded, costs.policy)
    found = []
    for state in graph.states:
        if state.output in made and not (offload and state.role is Role.MOMENT):
            name = state.input if state.role is Role.PARAMETER else state.output
            if state.role in (Role.PARAMETER, Role.GRADIENT, Role.MOMENT):
                value = graph.values[name]
                found.append(Memories(frozenset({value.shape}), value.size * resident[name]))
    return tuple(found)
