"""Folding: a graph described by its distinct blocks (*kinds*), their counts, and the values that pass between them.

Op j of one instance corresponds to op j of every other instance of its kind, so one strategy per (kind, position)
decides for the whole model. That all instances of a kind share one strategy is part of the declared space. Tofu (Wang,
Huang, Li 2019) coalesces repeated operators likewise.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum

from autopar.ir.blocks import block_kinds
from autopar.ir.caches import caches_of
from autopar.ir.graph import ITEM_BYTES, Graph, Op, Phase, Role, Value

VIEW_KINDS = frozenset({"Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten", "autopar::ExpertRows"})
"""Ops whose output shares the memory of their first input."""


class Source(IntEnum):
    """What defines a value of the folded graph: an op, or the state before the step."""

    OP = 0
    STATE = 1


@dataclass(frozen=True, slots=True)
class Producer:
    """Origin of a value.

    Output `slot` of op `position` of a kind, or the parameter first used as input `slot` of that op.
    """

    source: Source
    kind: int
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Consumer:
    """Use of a value: input `slot` of op `position` of a kind."""

    kind: int
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Use:
    """A producer-consumer pair with its `count` in the unfolded graph; `crossing` if it joins different blocks."""

    producer: Producer
    consumer: Consumer
    count: int
    crossing: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kind: its value in the representative, and the number of model parameters it represents."""

    producer: Producer
    value: Value
    count: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A value that reaches a kind from another block.

    Attributes:
        value: Its name in the representative.
        uses: Its uses in the block.
        saved: Whether it is a forward value that the block's backward needs.
        producers: Its producers in the unfolded graph, with counts; several if the first instance differs from the
            others.
    """

    value: str
    uses: tuple[Consumer, ...]
    saved: bool
    producers: tuple[tuple[Producer, int], ...]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A distinct block.

    Attributes:
        id: Its number.
        representative: The instance whose names are used.
        instances: All its instances in the chain.
        ops: Ops of the representative in program order.
        saved: Per op and output: whether the backward pass of the block needs the value (or a view of it).
        arrivals: Values from other blocks, in order of first use.
        last_use: Per op and output: position after the last op of the instance that reads the value or a view of it;
            the end of the phase if another block reads it; the op's own position plus one if it is never read.
    """

    id: int
    representative: int
    instances: tuple[int, ...]
    ops: tuple[Op, ...]
    saved: tuple[tuple[bool, ...], ...]
    arrivals: tuple["Arrival", ...]
    last_use: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Number of instances."""
        return len(self.instances)


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """A graph by its distinct blocks.

    Attributes:
        graph: The unfolded graph.
        chain: Kind of every block instance, in order.
        kinds: The distinct blocks.
        parameters: Distinct parameters.
        uses: Distinct producer-consumer pairs.
        free: Values available everywhere at no cost: data inputs, constants, buffers.
        buffer_bytes: Bytes of the buffers, which every device holds.
        by_value: Producer of every value that has one.
        producers: Op that defines each value.
        readers: Ops that read each value, in program order, each once.
        origin: The folded graph of another microbatch size this one was resized from; None if there is none.
        batch_dims: Batch dim of representatives' activations where it is not dim 0, as in time-major models.
        microbatches: Microbatches of a step, whose caches are all in memory (`ir.caches`).
    """

    graph: Graph
    chain: tuple[int, ...]
    kinds: tuple[BlockKind, ...]
    parameters: tuple[Parameter, ...]
    uses: tuple[Use, ...]
    free: frozenset[str]
    buffer_bytes: float
    by_value: Mapping[str, Producer]
    producers: Mapping[str, Op]
    readers: Mapping[str, Sequence[Op]]
    origin: "Folded | None" = None
    batch_dims: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 1

    @property
    def pattern(self) -> "Folded":
        """The graph that defines names, dtypes and structure; facts that depend only on these are cached for it."""
        return self if self.origin is None else self.origin

    def caches_of(self, op: Op) -> Iterator[tuple[int, str]]:
        """Yield the inputs of an op that are caches, by slot."""
        inputs = self.graph.inputs
        yield from ((slot, name) for slot, name in caches_of(op) if name in inputs)

    @property
    def num_blocks(self) -> int:
        """Length of the chain of blocks."""
        return len(self.chain)

    def representative_names(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each op with the name of the corresponding op of its kind's representative."""
        position = [0] * self.num_blocks
        for op in self.graph.ops:
            yield op.name, self.kinds[self.chain[op.block]].ops[position[op.block]].name
            position[op.block] += 1


@dataclass(frozen=True, slots=True)
class _Place:
    """An op of a kind, shared by all instances: its inputs as uses and as parameters, its outputs as producers."""

    inputs: tuple[Consumer, ...]
    states: tuple[Producer, ...]
    outputs: tuple[Producer, ...]


def _places(kind: int, ops: Sequence[Op]) -> list[_Place]:
    """Return the op descriptions of a kind, given the ops of one instance."""
    return [
        _Place(
            tuple(Consumer(kind, position, slot) for slot in range(len(op.inputs))),
            tuple(Producer(Source.STATE, kind, position, slot) for slot in range(len(op.inputs))),
            tuple(Producer(Source.OP, kind, position, slot) for slot in range(len(op.outputs))),
        )
        for position, op in enumerate(ops)
    ]


@dataclass(slots=True)
class _UseCount:
    """A producer-consumer pair with its count so far."""

    producer: Producer
    consumer: Consumer
    count: int = 0
    crossing: bool = False


def fold(graph: Graph) -> Folded:
    """Fold a graph in which blocks have been found.

    Free values (data, constants, buffers) have no producer and hence no uses: data loaders can deliver any shard, and
    buffers are replicated.
    """
    chain = tuple(block_kinds(graph))
    members: list[list[Op]] = [[] for _ in chain]
    for op in graph.ops:
        members[op.block].append(op)
    instances: dict[int, list[int]] = {}
    for index, kind in enumerate(chain):
        instances.setdefault(kind, []).append(index)
    # The middle instance is the most typical: its neighbours are usually instances of its own kind.
    representatives = {kind: blocks[len(blocks) // 2] for kind, blocks in instances.items()}

    trained = {state.input: state.owner for state in graph.states if state.role is not Role.BUFFER}
    parameter_names = {state.input for state in graph.states if state.role is Role.PARAMETER}
    produced: dict[str, tuple[int, Producer]] = {}
    owners: dict[Producer, tuple[str, int]] = {}
    places = [_places(kind, members[block]) for kind, block in sorted(representatives.items())]
    for block, ops in enumerate(members):
        kind = chain[block]
        for op, place in zip(ops, places[kind], strict=True):
            for name, producer in zip(op.inputs, place.states, strict=True):
                if name in parameter_names and name not in produced and op.phase is not Phase.UPDATE:
                    produced[name] = (block, producer)
                    first, count = owners.get(producer, (name, 0))
                    owners[producer] = (name if block == representatives[kind] else first, count + 1)
            for name, producer in zip(op.outputs, place.outputs, strict=True):
                if name:
                    produced[name] = (block, producer)
    met: dict[tuple[int, int], _UseCount] = {}  # keyed by the ids of producer and consumer, which `places` keeps alive
    for block, ops in enumerate(members):
        for op, place in zip(ops, places[chain[block]], strict=True):
            for name, consumer in zip(op.inputs, place.inputs, strict=True):
                if name not in produced:
                    continue
                if op.phase is Phase.UPDATE and name in trained:
                    continue  # the optimizer's own state is placed where the update runs
                home, producer = produced[name]
                pair = met.get((id(producer), id(consumer)))
                if pair is None:
                    pair = met[id(producer), id(consumer)] = _UseCount(producer, consumer)
                pair.count += 1
                pair.crossing = pair.crossing or home != block
    uses = {(pair.producer, pair.consumer): (pair.count, pair.crossing) for pair in met.values()}

    sizes = {state.input: graph.values[state.input] for state in graph.states if state.role is Role.BUFFER}
    kinds = []
    consumers = graph.consumers()
    activations = {name for op in graph.ops if _phase_group(op) == 0 for name in op.outputs}
    for kind in sorted(instances):
        block = representatives[kind]
        ops = members[block]
        saved, last_use = _lifetimes(ops, block, consumers)
        arrivals = _arrivals(kind, ops, block, produced, uses, activations)
        kinds.append(BlockKind(kind, block, tuple(instances[kind]), tuple(ops), saved, arrivals, last_use))
    return Folded(
        graph=graph,
        chain=chain,
        kinds=tuple(kinds),
        parameters=tuple(Parameter(producer, graph.values[name], count) for producer, (name, count) in owners.items()),
        uses=tuple(
            Use(producer, consumer, count, crossing) for (producer, consumer), (count, crossing) in uses.items()
        ),
        free=frozenset(graph.inputs) | frozenset(graph.constants) | frozenset(sizes),
        buffer_bytes=float(sum(_buffer_bytes(value) for value in sizes.values())),
        by_value={name: producer for name, (_, producer) in produced.items()},
        producers=graph.producers(),
        readers=consumers,
    )


def _buffer_bytes(value: Value) -> int:
    """Return the bytes of a buffer; floats are kept in half precision."""
    return value.size * (2 if value.is_float else ITEM_BYTES[value.dtype])


def _lifetimes(
    ops: list[Op], block: int, consumers: Mapping[str, list[Op]]
) -> tuple[tuple[tuple[bool, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return `saved` and `last_use` of a representative instance."""
    position = {op.name: index for index, op in enumerate(ops)}
    phase_end = {
        phase: max((i + 1 for i, op in enumerate(ops) if _phase_group(op) == phase), default=0) for phase in range(3)
    }
    saved: list[tuple[bool, ...]] = []
    last_use: list[tuple[int, ...]] = []
    for index, op in enumerate(ops):
        is_saved, ends = [], []
        for name in op.outputs:
            readers = _readers(name, consumers)
            needed = _phase_group(op) == 0 and any(
                _phase_group(reader) == 1 for reader in readers if reader.block == block
            )
            outside = [reader for reader in readers if reader.block != block]
            end = max((position[r.name] + 1 for r in readers if r.block == block), default=index + 1)
            if outside:
                end = max(end, phase_end[_phase_group(op)])
            view = op.kind in VIEW_KINDS
            is_saved.append(needed and not view)
            ends.append(index if view else end)
        saved.append(tuple(is_saved))
        last_use.append(tuple(ends))
    return tuple(saved), tuple(last_use)


def _arrivals(
    kind: int,
    ops: list[Op],
    block: int,
    produced: Mapping[str, tuple[int, Producer]],
    uses: Mapping[tuple[Producer, Consumer], tuple[int, bool]],
    activations: Set[str],
) -> tuple[Arrival, ...]:
    """Return the values a representative takes from other blocks; parameters are resident where used, so not listed."""
    incoming: dict[str, list[Consumer]] = {}
    for position, op in enumerate(ops):
        for slot, name in enumerate(op.inputs):
            if name in produced and produced[name][0] != block and produced[name][1].source is Source.OP:
                incoming.setdefault(name, []).append(Consumer(kind, position, slot))
    by_consumer: dict[Consumer, list[tuple[Producer, int]]] = {}
    for (producer, consumer), (count, _) in uses.items():
        if consumer.kind == kind and producer.source is Source.OP:
            by_consumer.setdefault(consumer, []).append((producer, count))
    arrivals = []
    for name, places in incoming.items():
        groups = [_phase_group(ops[place.position]) for place in places]
        saved = name in activations and 1 in groups
        arrivals.append(Arrival(name, tuple(places), saved, tuple(by_consumer[places[0]])))
    return tuple(arrivals)


def _phase_group(op: Op) -> int:
    """Return 0 for forward and loss, 1 for backward, 2 for update."""
    if op.phase in (Phase.FORWARD, Phase.LOSS):
        return 0
    return 1 if op.phase is Phase.BACKWARD else 2


def _readers(name: str, consumers: Mapping[str, list[Op]]) -> list[Op]:
    """Return the ops that read a value or a view of it."""
    readers: list[Op] = []
    pending = [name]
    while pending:
        for reader in consumers.get(pending.pop(), ()):
            readers.append(reader)
            if reader.kind in VIEW_KINDS:
                pending.extend(output for output in reader.outputs if output)
    return readers


def boundary_groups(folded: Folded) -> list[tuple[list[Producer], list[tuple[int, Arrival]]]]:
    """Return the classes of values that must share a placement: producers that meet in one arrival, transitively."""
    group_of: dict[Producer, int] = {}
    groups: list[tuple[list[Producer], list[tuple[int, Arrival]]]] = []
    for kind in folded.kinds:
        for arrival in kind.arrivals:
            found = sorted({group_of[producer] for producer, _ in arrival.producers if producer in group_of})
            if found:
                target = found[0]
                for other in found[1:]:
                    producers, arrivals = groups[other]
                    groups[target][0].extend(producers)
                    groups[target][1].extend(arrivals)
                    for producer in producers:
                        group_of[producer] = target
                    groups[other] = ([], [])
            else:
                target = len(groups)
                groups.append(([], []))
            for producer, _ in arrival.producers:
                if producer not in group_of:
                    group_of[producer] = target
                    groups[target][0].append(producer)
            groups[target][1].append((kind.id, arrival))
    return [group for group in groups if group[0]]
