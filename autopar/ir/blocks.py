"""Blocks: the forward graph as a chain of pieces, most of them equal.

A block is what pipeline stages are made of, and what later passes look at once per *kind* instead of once per layer.
Repeated regions (the layers of a transformer, the bottlenecks of a ResNet) are found by structure; the rest is cut
where few values are alive.
"""

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.errors import GraphError
from autopar.ir.canonical_order import Ordered, canonical_order
from autopar.ir.graph import ITEM_BYTES, Graph, Op, Phase, Role, State, Value
from autopar.ir.repeats import MAX_OUTPUTS, NO_SOURCE, Region, cut_positions, find_regions
from autopar.ir.repeats import Sequence as OpSequence

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MAX_PIECES = 64  # a piece that is not repeated has at least this fraction of the model's work


class _Numbers:
    """Gives equal things equal numbers."""

    def __init__(self) -> None:
        self._of: dict[Hashable, int] = {}

    def __call__(self, key: Hashable) -> int:
        return self._of.setdefault(key, len(self._of))


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Core ops in one order, and what repeats in it.

    Attributes:
        core: The ops.
        crossing: Names of the values that other ops read, in the order of the sequence.
        sequence: The ops as arrays.
        regions: What repeats.
    """

    core: tuple[Op, ...]
    crossing: tuple[str, ...]
    sequence: OpSequence
    regions: tuple[Region, ...]

    @property
    def covered(self) -> int:
        """Ops in layers."""
        return sum(region.size for region in self.regions)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How a forward graph is cut into blocks.

    Attributes:
        graph: The graph with ops in canonical order and `op.block` set.
        lines: The orders that were looked at, the one that was taken last.
        starts: Position of each block's first op.
    """

    graph: Graph
    lines: tuple[Line, ...]
    starts: tuple[int, ...]

    def holds(self, nbytes: Sequence[Ints], work: Floats) -> bool:
        """Whether a graph that differs in the sizes of dims only, types being equal where they are, is cut alike.

        Args:
            nbytes: By line, the bytes of its crossing values.
            work: What `work_of` says of the core ops of the last line.
        """
        sequences = [replace(line.sequence, value_bytes=own) for line, own in zip(self.lines, nbytes, strict=True)]
        alike = all(
            tuple(find_regions(sequence)) == line.regions for line, sequence in zip(self.lines, sequences, strict=True)
        )
        return alike and tuple(_starts(work, sequences[-1], self.lines[-1].regions)) == self.starts


def find_blocks(graph: Graph) -> Graph:
    """Return the graph with ops in canonical order and `op.block` set.

    Blocks are numbered along the chain. Equal layers become one block each; the ops before, between and after them
    become blocks of their own. Ops without a trained tensor upstream (masks, tables of angles) belong to block 0, but
    those of constants that one block alone reads (numbers of experts) to that block; loss ops to the last block.

    Raises:
        GraphError: If the graph has backward or update ops: blocks are found before a training step is built.
    """
    return cut(graph).graph


def cut(graph: Graph) -> Cut:
    """Find blocks as `find_blocks` does, and tell how."""
    if any(op.phase in (Phase.BACKWARD, Phase.UPDATE) for op in graph.ops):
        raise GraphError("blocks of a training step cannot be found", hint="find blocks of the forward graph first")
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    ordered = canonical_order(graph, forward)
    line = _line(graph, ordered)
    lines = [line]
    # Values that all layers read are computed within the first one, which is therefore not equal to the others: move
    # them up. The layers of an encoder repeat only then, and may have values of their own to move.
    moved: list[str] = []
    while (shared := _shared(ordered, line.regions)) != moved:
        moved, again = shared, canonical_order(graph, forward, shared)
        lines.append(_line(graph, again))
        if lines[-1].covered <= line.covered:
            break
        ordered, line = again, lines[-1]
    lines.sort(key=lambda other: other is line)
    work = np.array([work_of(op, graph) for op in line.core], np.float64)
    starts = _starts(work, line.sequence, line.regions)
    blocks = np.searchsorted(starts, np.arange(len(line.core)), side="right") - 1
    core = [replace(op, block=int(block)) for op, block in zip(line.core, blocks, strict=True)]
    early = [replace(op, block=block) for op, block in _early_blocks(graph, ordered.early, core)]
    ops = sorted((*early, *core), key=lambda op: op.block)
    last = ops[-1].block if ops else 0
    ops += [replace(op, block=last) for op in graph.ops if op.phase is Phase.LOSS]
    found = replace(graph, ops=tuple(ops), values=_in_order(graph, ops))
    return Cut(found, tuple(lines), tuple(starts))


def _early_blocks(graph: Graph, early: Sequence[Op], core: Sequence[Op]) -> Iterator[tuple[Op, int]]:
    """Yield ops without a trained tensor upstream, and their block."""
    readers: dict[str, set[int]] = {}
    for op in (*(replace(op, block=0) for op in early), *core):
        for name in op.inputs:
            readers.setdefault(name, set()).add(op.block)
    for op in early:
        blocks = {block for name in op.outputs for block in readers.get(name, ())}
        is_of_constants = all(name in graph.constants for name in op.inputs if name)
        yield op, blocks.pop() if is_of_constants and len(blocks) == 1 else 0


def _line(graph: Graph, ordered: Ordered) -> Line:
    crossing, sequence = _sequence(graph, ordered)
    return Line(ordered.core, crossing, sequence, tuple(find_regions(sequence)))


def _in_order(graph: Graph, ops: Sequence[Op]) -> dict[str, Value]:
    """Return the values in order of definition."""
    names = [*graph.inputs, *(state.input for state in graph.states), *graph.constants]
    names += [name for op in ops for name in op.outputs if name]
    return {name: graph.values[name] for name in dict.fromkeys((*names, *graph.values))}


def _sequence(graph: Graph, ordered: Ordered) -> tuple[tuple[str, ...], OpSequence]:
    """Return the names of the values that core ops read of each other, and the ops as arrays."""
    number = _Numbers()
    type_of = {name: number((value.shape, value.dtype)) for name, value in graph.values.items()}
    content_of = {name: number(content(graph.constants[name])) for name in graph.constants}
    role_of = {state.input: state.role for state in graph.states}
    defined: dict[str, int] = {}
    outside = _Numbers()
    used: dict[str, int] = {}
    last_use: dict[str, int] = {}
    tokens: list[int] = []
    trained: list[bool] = []
    first_slot = [0]
    sources: list[int] = []
    for position, op in enumerate(ordered.core):
        slots: list[Hashable] = []
        is_trained = False
        for slot, name in enumerate(op.inputs):
            if not name:
                slots.append("absent")
            elif name in content_of:
                slots.append(("constant", content_of[name]))
            elif role_of.get(name) is Role.PARAMETER:
                slots.append(("parameter", type_of[name]))
                sources.append(used.get(name, NO_SOURCE))
                used[name] = position * MAX_OUTPUTS + slot
                is_trained = True
            else:
                slots.append((role_of.get(name, "value"), type_of[name]))
                sources.append(defined.get(name, -1 - outside(name)))
                if name in defined:
                    last_use[name] = position
        for slot, name in enumerate(op.outputs):
            if name:
                defined[name] = position * MAX_OUTPUTS + slot
        results = tuple(type_of[name] if name else -1 for name in op.outputs)
        tokens.append(number((op.kind, op.attrs, tuple(slots), results)))
        trained.append(is_trained)
        first_slot.append(len(sources))
    return tuple(last_use), OpSequence(
        token=np.array(tokens, np.int64),
        first_slot=np.array(first_slot, np.int64),
        source=np.array(sources, np.int64),
        trained=np.array(trained, bool),
        value_position=np.array([defined[name] // MAX_OUTPUTS for name in last_use], np.int64),
        value_last=np.array(list(last_use.values()), np.int64),
        value_bytes=np.array([num_bytes(graph.values[name]) for name in last_use], np.int64),
    )


def num_bytes(value: Value) -> int:
    """Return the bytes of a value, by which blocks are cut."""
    return value.size * ITEM_BYTES.get(value.dtype, 1)


def content(array: NDArray[np.generic]) -> Hashable:
    """Return something that is equal for constants of equal content."""
    data = array.tobytes()
    return str(array.dtype), array.shape, data if len(data) <= 64 else hashlib.sha256(data).digest()


def _shared(ordered: Ordered, regions: Sequence[Region]) -> list[str]:
    """Return values defined before a region that all its instances (the first aside) read.

    They are in the order of the regions, those of one region from the deepest on: what an encoder makes comes before
    small tables of the decoder, which would else be there while the encoder runs.
    """
    instance_of = {
        position: (index, (position - region.start) // region.period)
        for index, region in enumerate(regions)
        for position in range(region.start, region.stop)
    }
    position_of = {name: position for position, op in enumerate(ordered.core) for name in op.outputs if name}
    readers: dict[tuple[int, str], set[int]] = {}
    for position, (index, instance) in instance_of.items():
        for name in ordered.core[position].inputs:
            if position_of.get(name, regions[index].start) < regions[index].start:
                readers.setdefault((index, name), set()).add(instance)
    depth: dict[str, int] = {}
    for op in ordered.core:
        below = max((depth.get(name, 0) for name in op.inputs), default=0)
        depth.update(dict.fromkeys(op.outputs, below + 1))
    found = sorted(readers.items(), key=lambda item: (item[0][0], -depth[item[0][1]], position_of[item[0][1]]))
    return list(
        dict.fromkeys(
            name
            for (index, name), instances in found
            if len(instances | {0}) == regions[index].count and len(instances) > 1
        )
    )


def _starts(work: Floats, sequence: OpSequence, regions: Sequence[Region]) -> list[int]:
    """Return the position of each block's first op, given the work of each."""
    least = float(work.sum()) / _MAX_PIECES
    starts: list[int] = []
    low = 0
    for region in (*regions, Region(sequence.size, 0, 0)):
        if low < region.start:
            starts += _pieces(sequence, work, least, low, region.start)
        starts += region.starts
        low = region.stop
    return starts


def _pieces(sequence: OpSequence, work: Floats, least: float, low: int, high: int) -> list[int]:
    """Cut an unrepeated stretch into pieces with a trained tensor and `least` work each, and return where they start.

    Among the positions between two pieces that have enough, the one with the fewest bytes alive is cut.
    """
    cuts = [low, *cut_positions(sequence, low, high), high]
    alive = sequence.crossing(sequence.value_bytes, np.ones_like(sequence.value_bytes, bool))

    def enough(start: int, stop: int) -> bool:
        return bool(sequence.trained[start:stop].any()) and float(work[start:stop].sum()) >= least

    starts = [low]
    full = 0  # index of the cut at which the last piece has enough; 0 while it has not
    for index in range(1, len(cuts)):
        if not full:
            full = index if enough(starts[-1], cuts[index]) else 0
        elif enough(cuts[full], cuts[index]):
            behind = [cut for cut in cuts[full:index] if sequence.trained[cut : cuts[index]].any()]
            starts.append(min(behind, key=lambda cut: (alive[cut], -cut)))
            full = index if enough(starts[-1], cuts[index]) else 0
    if len(starts) > 1 and not full:
        starts.pop()
    return starts


def work_of(op: Op, graph: Graph) -> float:
    """Return a rough number of multiplications: enough to tell large pieces from small ones."""
    size = float(sum(graph.values[name].size for name in op.outputs if name))
    if op.kind in ("MatMul", "Gemm") and graph.values[op.inputs[0]].shape:
        shape = graph.values[op.inputs[0]].shape
        return size * shape[0 if op.attr("transA") else -1]
    if op.kind == "Conv":
        return size * prod(graph.values[op.inputs[1]].shape[1:])
    return size


def instance_ops(graph: Graph) -> list[list[Op]]:
    """Return the ops of each block in program order, all phases together.

    Raises:
        GraphError: If blocks were not found yet.
    """
    blocks: list[list[Op]] = [[] for _ in range(graph.num_blocks)]
    for op in graph.ops:
        if op.block < 0:
            raise GraphError(f"op {op.name!r} belongs to no block", hint="call find_blocks first")
        blocks[op.block].append(op)
    return blocks


def block_kinds(graph: Graph) -> tuple[int, ...]:
    """Return the kind of each block, numbered in order of first occurrence.

    Blocks are of one kind if their ops are equal position by position, in all phases: kind, attributes, types, and
    inputs that come from corresponding ops. What comes from other blocks counts by type and order only, trained
    tensors by shape, constants by content.

    Raises:
        GraphError: If blocks were not found yet.
    """
    facts = _Facts.of(graph)
    number = _Numbers()
    return tuple(number(_signature(ops, facts)) for ops in instance_ops(graph))


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the signature of a block needs to know about values.

    Attributes:
        sort: Per value, what it is: input, constant with its content, a role, or the type of an activation.
        owner: Parameter that a state belongs to, by state input and output.
        first_block: Block that uses a state first, buffers aside: a shared tensor makes its first user differ from
            the others.
        leaving: State that leaves the step as this value.
        results: Outputs of the graph.
    """

    sort: dict[str, Hashable] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=dict)
    first_block: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, State] = field(default_factory=dict)
    results: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: Graph) -> "_Facts":
        facts = cls(results=frozenset(graph.outputs))
        for name, value in graph.values.items():
            facts.sort[name] = ("activation", value.shape, value.dtype)
        for name in graph.inputs:
            facts.sort[name] = ("input", graph.values[name].shape, graph.values[name].dtype)
        for state in graph.states:
            facts.sort[state.input] = (
                str(state.role),
                graph.values[state.input].shape,
                graph.values[state.input].dtype,
            )
            facts.owner[state.input] = state.owner
            if state.output != state.input:
                facts.leaving[state.output] = state
        for name in graph.constants:
            facts.sort[name] = ("constant", content(graph.constants[name]))
        roles = {state.input: state.role for state in graph.states}
        for op in graph.ops:
            for name in op.inputs:
                if name in facts.owner and roles[name] is not Role.BUFFER:
                    facts.first_block.setdefault(name, op.block)
        return facts


def _signature(ops: Sequence[Op], facts: _Facts) -> Hashable:
    """Return a description of a block that is equal for isomorphic blocks."""
    inside: dict[str, tuple[int, int]] = {}
    outside: dict[str, int] = {}
    position_of: dict[str, int] = {}

    def describe(name: str) -> Hashable:
        if not name:
            return None
        if name in inside:
            return inside[name]
        ordinal = outside.setdefault(name, len(outside))
        if name not in facts.owner:
            return ordinal, facts.sort[name]
        owns = facts.first_block.get(name) == ops[0].block
        return ordinal, facts.sort[name], owns, outside.get(facts.owner[name], -1)

    lines: list[Hashable] = []
    for position, op in enumerate(ops):
        operands = tuple([describe(name) for name in op.inputs])
        results: list[Hashable] = []
        for slot, name in enumerate(op.outputs):
            if not name:
                results.append(None)
                continue
            inside[name] = (position, slot)
            state = facts.leaving.get(name)
            leaves = None if state is None else (str(state.role), outside.get(state.input, -1))
            results.append((facts.sort[name], leaves, name in facts.results))
        origin = position_of.get(op.origin, outside.get(op.origin, -1) if op.origin in facts.owner else -2)
        lines.append((op.kind, op.attrs, op.phase, operands, tuple(results), origin, op.linear))
        position_of[op.name] = position
    return tuple(lines)
