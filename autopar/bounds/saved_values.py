"""Bytes that a block of the most frequent kind holds under any placements: saved, deferred, received, resident.

Look here for the constants of the memory bounds, computed from the graph before any table of placements exists. Saved
values are the items of `Tables.bytes` kept per microbatch in flight. A split backward retains further values until its
weight pass, whatever is recomputed.
"""

from dataclasses import dataclass
from functools import lru_cache

from autopar.cost import Collective, CostModel, is_view
from autopar.folding.block_interface import hand_overs
from autopar.folding.fold import BlockKind, Folded, boundary_groups
from autopar.folding.graph_facts import dealt_lengths, element_bytes, global_shapes
from autopar.folding.selective_recompute import selective_ops
from autopar.folding.weight_gradients import weight_pass_ops
from autopar.formulate.tables import Memory
from autopar.ir.graph import Phase, Role, Value


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value that a block keeps between forward and backward.

    Attributes:
        memory: Why it is kept, which decides under which recompute flavours it is.
        shape: Its shape; None if a kernel keeps it and it is no value of the graph.
        bytes: Bytes of the whole tensor.
    """

    memory: Memory
    shape: tuple[int, ...] | None
    bytes: float


@lru_cache(maxsize=65536)
def most_shards(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """Upper bound on the number of shards: every mesh axis cuts one dim of the tensor or none.

    >>> most_shards((6, 4), (3, 4)), most_shards((6, 5), (3, 4)), most_shards((0, 5), (3, 4))
    (12, 3, 12)
    """
    if not axes:
        return 1
    most = most_shards(shape, axes[1:])
    for dim, length in enumerate(shape):
        if length % axes[0] == 0:
            rest = (*shape[:dim], length // axes[0], *shape[dim + 1 :])
            most = max(most, axes[0] * most_shards(rest, axes[1:]))
    return most


def freed(shape: tuple[int, ...], folded: Folded) -> tuple[int, ...]:
    """Return a shape with 0, which every axis divides, for a dim that may be dealt out in uneven blocks."""
    dealt = dealt_lengths(folded)
    return tuple(0 if length in dealt else length for length in shape)


def main_kind(folded: Folded) -> BlockKind:
    """Return the most frequent kind of blocks, the first one if several are."""
    return max(folded.kinds, key=lambda kind: kind.count)


@lru_cache(maxsize=64)  # there are many meshes and few graphs
def saved_by_main(folded: Folded, costs: CostModel) -> tuple[SavedValue, ...]:
    """Return what a block of the most frequent kind keeps for its backward."""
    return saved_by(folded, costs, main_kind(folded).id)


def saved_by(folded: Folded, costs: CostModel, kind_id: int) -> tuple[SavedValue, ...]:
    """Return what a block of a kind keeps for its backward."""
    kind, graph = folded.kinds[kind_id], folded.graph
    if not any(op.phase is Phase.BACKWARD for op in kind.ops):
        return ()
    resident, _ = element_bytes(folded, costs.policy)
    recomputed = selective_ops(folded, costs)[kind.id]
    written = {state.output for state in graph.states}
    entries = []
    for position, op in enumerate(kind.ops):
        memory = Memory.DROPPED if position in recomputed else Memory.SAVED
        kernel_bytes = float(costs.kept_bytes(op, *global_shapes(graph, op), resident)[0])
        if kernel_bytes:
            entries.append(SavedValue(memory, None, kernel_bytes))
        for name, saved in zip(op.outputs, kind.saved[position], strict=True):
            if name and saved and name not in written:
                value = graph.values[name]
                entries.append(SavedValue(memory, freed(value.shape, folded), value.size * resident[name]))
    for producers, arrivals in boundary_groups(folded):
        first_producer = producers[0]
        value = graph.values[
            folded.kinds[first_producer.kind].ops[first_producer.position].outputs[first_producer.slot]
        ]
        for number, arrival in arrivals:
            if number == kind.id and arrival.saved:
                are_saved = (
                    folded.kinds[producer.kind].saved[producer.position][producer.slot]
                    for producer, _ in arrival.producers
                )
                memory = Memory.HANDED if all(are_saved) else Memory.ARRIVED
                entries.append(SavedValue(memory, freed(value.shape, folded), value.size * resident[value.name]))
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class Storage:
    """A tensor in memory together with its views.

    Attributes:
        shapes: Shapes of the tensor and its views, as of `freed`.
        bytes: Bytes of the whole tensor.
    """

    shapes: frozenset[tuple[int, ...]]
    bytes: float

    def least(self, mesh: tuple[int, ...]) -> float:
        """Least bytes on a device of a mesh of this shape."""
        return self.bytes / max(most_shards(shape, mesh) for shape in self.shapes)


@lru_cache(maxsize=64)
def deferred_values(folded: Folded, costs: CostModel) -> tuple[Storage, ...]:
    """Return values that a block of the most frequent kind retains from its backward until its weight pass.

    A lower bound: forward values produced by another block are left out, for several blocks may share them.
    """
    kind, graph = main_kind(folded), folded.graph
    weight_ops = weight_pass_ops(folded, kind)
    makers = {name: op for op in kind.ops for name in op.outputs if name}
    written = {state.output for state in graph.states}
    kept_names = {name for name, op in makers.items() if op.phase is not Phase.UPDATE and op.name not in weight_ops}
    kept_names = (kept_names - written) | set(hand_overs(folded)[kind.id].backward_in)

    def storage_name(name: str) -> str:
        op = makers.get(name)
        while op is not None and op.inputs and op.inputs[0] and is_view(op, len(graph.values[op.inputs[0]].shape)):
            name = op.inputs[0]
            op = makers.get(name)
        return name

    views_of: dict[str, set[str]] = {}
    for op in kind.ops:
        for name in op.inputs if op.name in weight_ops else ():
            if name and storage_name(name) in kept_names:
                views_of.setdefault(storage_name(name), set()).update((name, storage_name(name)))
    resident, wire = element_bytes(folded, costs.policy)
    return tuple(
        Storage(
            frozenset(freed(graph.values[name].shape, folded) for name in names),
            min(graph.values[name].size * min(resident[name], wire[name]) for name in names),
        )
        for names in views_of.values()
    )


@lru_cache(maxsize=64)
def received_values(folded: Folded, costs: CostModel, kind: int) -> tuple[tuple[Storage, ...], tuple[Storage, ...]]:
    """Return what a block of a kind receives from the previous block, and from the next one."""
    resident, wire = element_bytes(folded, costs.policy)
    interface, values = hand_overs(folded)[kind], folded.graph.values
    arriving, returning = (
        tuple(
            Storage(frozenset({freed(values[name].shape, folded)}), values[name].size * min(resident[name], wire[name]))
            for name in names
        )
        for names in (interface.forward_in, interface.backward_in)
    )
    return arriving, returning


@dataclass(frozen=True, slots=True)
class ShardedState:
    """A parameter or gradient sum of a block of the most frequent kind, and its collective if it is sharded.

    Attributes:
        storage: What is resident through the step.
        wire: Bytes of the whole tensor as communicated.
        collective: All-gather of parameters before use, or reduce-scatter of gradients.
        per_microbatch: Number of collectives per microbatch.
    """

    storage: Storage
    wire: float
    collective: Collective
    per_microbatch: int


@lru_cache(maxsize=64)
def sharded_states(folded: Folded, costs: CostModel) -> tuple[ShardedState, ...]:
    """Return what is communicated in every microbatch if a data-parallel axis shards it.

    Every pass reads whole parameters, frozen ones too.
    """
    kind, graph = main_kind(folded), folded.graph
    outputs = {name for op in kind.ops for name in op.outputs}
    gradient_sums = {state.output for state in graph.states if state.role is Role.GRADIENT}
    resident, wire = element_bytes(folded, costs.policy)
    readers: dict[str, set[Phase]] = {}
    for op in kind.ops:
        if op.phase is not Phase.UPDATE and gradient_sums.isdisjoint(op.outputs):
            for name in op.inputs:
                readers.setdefault(name, set()).add(Phase.BACKWARD if op.phase is Phase.BACKWARD else Phase.FORWARD)
    entries = []
    sharded = [(value, True) for value in _unwritten_parameters(folded, kind)]
    for state in graph.states:
        if state.output in outputs and state.role in (Role.PARAMETER, Role.GRADIENT):
            is_parameter = state.role is Role.PARAMETER
            sharded.append((graph.values[state.input if is_parameter else state.output], is_parameter))
    for value, is_parameter in sharded:
        entries.append(
            ShardedState(
                Storage(frozenset({freed(value.shape, folded)}), value.size * resident[value.name]),
                value.size * wire[value.name],
                Collective.ALL_GATHER if is_parameter else Collective.REDUCE_SCATTER,
                len(readers.get(value.name, ())) if is_parameter else 1,
            )
        )
    return tuple(entries)


def _unwritten_parameters(folded: Folded, kind: BlockKind) -> list[Value]:
    """Return the parameters no update writes of which every block of a kind has its own, in the representative."""
    written = {state.input for state in folded.graph.states if state.output != state.input}
    own = (item for item in folded.parameters if item.producer.kind == kind.id and item.count >= kind.count)
    return [item.value for item in own if item.value.name not in written]


@lru_cache(maxsize=64)
def resident_states(folded: Folded, costs: CostModel, *, offload: bool) -> tuple[Storage, ...]:
    """Return parameters, gradient sums and moments of a block of the most frequent kind.

    With `offload` the moments are left out. Of the parameters that no update writes (frozen ones, and all of them in
    inference) those count that every block of the kind has of its own.
    """
    kind, graph = main_kind(folded), folded.graph
    outputs = {name for op in kind.ops for name in op.outputs}
    resident, _ = element_bytes(folded, costs.policy)
    entries = [
        Storage(frozenset({freed(value.shape, folded)}), value.size * resident[value.name])
        for value in _unwritten_parameters(folded, kind)
    ]
    for state in graph.states:
        if state.output in outputs and not (offload and state.role is Role.MOMENT):
            name = state.input if state.role is Role.PARAMETER else state.output
            if state.role in (Role.PARAMETER, Role.GRADIENT, Role.MOMENT):
                value = graph.values[name]
                entries.append(Storage(frozenset({freed(value.shape, folded)}), value.size * resident[name]))
    return tuple(entries)
