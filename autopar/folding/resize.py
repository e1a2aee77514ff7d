"""The folded graph of one microbatch size, made of that of another.

Shapes follow the number of samples, structure hardly ever does. So the whole model is imported, differentiated and
folded for one size. For another one only an *excerpt* is, in which stretches of equal layers are short, and compared
with the same excerpt at the known size. If the two differ in numbers alone (sizes of dims, contents of constants,
attributes), and if whatever is equal at one size is equal at the other, then the whole graphs differ in these numbers
alone, too: every op of the one has its *twin* in the excerpt, an op of the same kind of block at the same position.

Else there is no answer, and the whole model has to be built for that size as well.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.folding.fold import BlockKind, Folded, Producer, Source
from autopar.ir.blocks import Cut, content, instance_ops, num_bytes, work_of
from autopar.ir.graph import Attr, Graph, Op, Value

Constants = Mapping[str, NDArray[np.generic]]
Attrs = tuple[tuple[str, Attr], ...]
_Place = tuple[int, int]
"""Kind of block and position of an op in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An excerpt at one microbatch size: its forward graph with blocks, and what is made of it."""

    forward: Graph
    step: Graph


def place_blocks(graph: Graph, forward: Graph, kept: Sequence[int]) -> Graph | None:
    """Return an imported excerpt in the order and with the blocks of the whole; None if it has other ops.

    Args:
        graph: The excerpt as imported.
        forward: The whole forward graph with blocks.
        kept: The blocks that the excerpt has.
    """
    number = {block: index for index, block in enumerate(kept)}
    own = {op.name: op for op in graph.ops}
    places = [(op.name, number[op.block]) for op in forward.ops if op.block in number]
    if len(places) != len(own) or any(name not in own for name, _ in places):
        return None
    return replace(graph, ops=tuple(replace(own[name], block=block) for name, block in places))


class Resizing:
    """Makes the folded graphs of other microbatch sizes.

    Args:
        cut: The whole forward graph with its blocks.
        folded: What was made of it, folded.
        kept: The blocks that excerpts have.
        sample: The excerpt at the same size.
    """

    def __init__(self, cut: Cut, folded: Folded, kept: Sequence[int], sample: Sample) -> None:
        self._cut, self._folded, self._sample = cut, folded, sample
        block_of = {folded.chain[block]: index for index, block in enumerate(kept)}
        self._blocks = tuple(block_of[kind.id] for kind in folded.kinds)
        self._twins = _constant_twins(folded, self._ops(sample.step))
        self._lines = tuple(
            _numbered(folded.by_value[name] for name in line.crossing if name in folded.by_value) for line in cut.lines
        )
        made = (next(filter(None, op.outputs)) for op in cut.lines[-1].core)
        self._core = _numbered(folded.by_value[name] for name in made if name in folded.by_value)

    @classmethod
    def of(cls, cut: Cut, folded: Folded, kept: Sequence[int], sample: Sample) -> "Resizing | None":
        """Return what makes other sizes of a folded graph; None if the excerpt does not stand for all of it."""
        if {folded.chain[block] for block in kept} != set(range(len(folded.kinds))):
            return None
        found = cls(cut, folded, kept, sample)
        sizes = (len(line.crossing) for line in cut.lines)
        if any(len(index) != size for (_, index), size in zip(found._lines, sizes, strict=True)):
            return None  # ops that the step has no use for
        if len(found._core[1]) != len(cut.lines[-1].core):
            return None
        forms = zip(folded.kinds, found._ops(sample.step), strict=True)
        if any(_form(folded.graph, kind.ops) != _form(sample.step, ops) for kind, ops in forms):
            return None
        return found

    def at(self, other: Sample) -> Folded | None:
        """Return the folded graph of the size of an excerpt; None if it differs in more than numbers."""
        known = self._sample
        if not (_alike(known.forward, other.forward) and _alike(known.step, other.step) and self._is_cut_alike(other)):
            return None
        constants = self._constants(other.step)
        if constants is None:
            return None
        folded, graph, ops = self._folded, self._folded.graph, self._ops(other.step)
        by_name = {name: twins[0] for name, twins in self._twins.items()}
        values = ResizedValues(graph.values, folded.by_value, ops, by_name, other.step.values)
        told = {key: text for key, text in other.step.metadata.items() if known.step.metadata[key] != text}
        graph = replace(graph, values=values, constants=constants, metadata={**graph.metadata, **told})
        parameters = tuple(replace(own, value=values[own.value.name]) for own in folded.parameters)
        found = replace(folded, graph=graph, parameters=parameters, origin=folded)
        return _with_attrs(found, self._attrs(ops))

    def _ops(self, step: Graph) -> list[list[Op]]:
        """Return the twins of the ops of every kind in an excerpt."""
        blocks = instance_ops(step)
        return [blocks[index] for index in self._blocks]

    def _is_cut_alike(self, other: Sample) -> bool:
        """Whether the whole forward graph would be cut into the same blocks."""
        ops, step = self._ops(other.step), other.step
        nbytes = []
        for distinct, index in self._lines:
            sizes = [num_bytes(step.values[ops[made.kind][made.position].outputs[made.slot]]) for made in distinct]
            nbytes.append(np.array(sizes, np.int64)[index])
        distinct, index = self._core
        work = np.array([work_of(ops[made.kind][made.position], step) for made in distinct], np.float64)[index]
        return self._cut.holds(nbytes, work)

    def _constants(self, other: Graph) -> Constants | None:
        """Return the constants of the whole graph; None if one constant would have to be two."""
        before, whole = self._sample.step.constants, self._folded.graph.constants
        changed = {name for name, array in other.constants.items() if content(array) != content(before[name])}
        if not changed:
            return whole
        found = dict(whole)
        for name, twins in self._twins.items():
            if changed.isdisjoint(twins):
                continue
            if len({content(other.constants[twin]) for twin in twins}) > 1:
                return None
            found[name] = other.constants[twins[0]]
        return found

    def _attrs(self, ops: Sequence[Sequence[Op]]) -> dict[_Place, Attrs]:
        """Return the attributes that differ from those of the known size, by the place of the op."""
        return {
            (kind.id, position): twin.attrs
            for kind, twins in zip(self._folded.kinds, ops, strict=True)
            for position, (op, twin) in enumerate(zip(kind.ops, twins, strict=True))
            if op.attrs != twin.attrs
        }


class ResizedValues(Mapping[str, Value]):
    """The values of a graph at another microbatch size, each found when it is asked for.

    Args:
        known: The values at the known size.
        by_value: Where each comes from.
        ops: The twins of the ops of every kind.
        twins: By constant, its twin.
        values: The values of the excerpt at the other size.
    """

    def __init__(
        self,
        known: Mapping[str, Value],
        by_value: Mapping[str, Producer],
        ops: Sequence[Sequence[Op]],
        twins: Mapping[str, str],
        values: Mapping[str, Value],
    ) -> None:
        self._known, self._by_value, self._ops, self._twins, self._values = known, by_value, ops, twins, values
        self._found: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        """Return a value by name."""
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._resized(self._known[name])
        return found

    def __iter__(self) -> Iterator[str]:
        """Return the names, in order of definition."""
        return iter(self._known)

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._known)

    def __contains__(self, name: object) -> bool:
        """Whether there is a value of that name."""
        return name in self._known

    def _resized(self, value: Value) -> Value:
        made = self._by_value.get(value.name)
        if made is None:
            twin = self._twins.get(value.name, value.name)  # data has the same names; states that no op makes stay
        else:
            op = self._ops[made.kind][made.position]
            twin = (op.outputs if made.source is Source.OP else op.inputs)[made.slot]
        shape = self._values[twin].shape if twin in self._values else value.shape
        return value if shape == value.shape else replace(value, shape=shape)


def _numbered(made: Iterable[Producer]) -> tuple[tuple[Producer, ...], NDArray[np.int64]]:
    """Return the distinct ones, and the number of each."""
    number: dict[Producer, int] = {}
    index = [number.setdefault(own, len(number)) for own in made]
    return tuple(number), np.array(index, np.int64)


def _constant_twins(folded: Folded, ops: Sequence[Sequence[Op]]) -> dict[str, tuple[str, ...]]:
    """Return by constant of a whole graph those of the excerpt that ops at the same places read."""
    constants, found = folded.graph.constants, dict[str, dict[str, None]]()
    position = [0] * folded.num_blocks
    for op in folded.graph.ops:
        twin = ops[folded.chain[op.block]][position[op.block]]
        position[op.block] += 1
        for name, own in zip(op.inputs, twin.inputs, strict=True):
            if name in constants:
                found.setdefault(name, {})[own] = None
    return {name: tuple(twins) for name, twins in found.items()}


def _alike(one: Graph, other: Graph) -> bool:
    """Whether two graphs differ in numbers only, equal things being equal in both."""
    if len(one.ops) != len(other.ops) or one.states != other.states:
        return False
    if (one.inputs, one.outputs, [*one.constants]) != (other.inputs, other.outputs, [*other.constants]):
        return False
    if one.metadata.keys() != other.metadata.keys() or one.values.keys() != other.values.keys():
        return False
    if any(_named(op) != _named(twin) for op, twin in zip(one.ops, other.ops, strict=True)):
        return False
    pairs = [(value, other.values[name]) for name, value in one.values.items()]
    if any(value.dtype != twin.dtype or len(value.shape) != len(twin.shape) for value, twin in pairs):
        return False
    if any(one.values[state.input] != other.values[state.input] for state in one.states):
        return False
    return (
        _one_to_one(((value.shape, value.dtype), (twin.shape, twin.dtype)) for value, twin in pairs)
        and _one_to_one((content(array), content(other.constants[name])) for name, array in one.constants.items())
        and _one_to_one(
            ((op.kind, op.attrs), (twin.kind, twin.attrs)) for op, twin in zip(one.ops, other.ops, strict=True)
        )
    )


def _named(op: Op) -> Hashable:
    """Return all of an op but its attributes."""
    return op.name, op.kind, op.inputs, op.outputs, op.phase, op.block, op.origin


def _one_to_one(pairs: Iterable[tuple[Hashable, Hashable]]) -> bool:
    """Whether what is equal on one side is equal on the other."""
    distinct = set(pairs)
    return len(distinct) == len({one for one, _ in distinct}) == len({other for _, other in distinct})


def _form(graph: Graph, ops: Sequence[Op]) -> list[Hashable]:
    """Return the ops of a block without names: what they are, and how they read of each other."""
    roles = {state.input: str(state.role) for state in graph.states}
    inside: dict[str, Hashable] = {}
    outside: dict[str, int] = {}

    def operand(name: str) -> Hashable:
        if not name or name in inside:
            return inside.get(name)
        value = graph.values[name]
        known = content(graph.constants[name]) if name in graph.constants else None
        return outside.setdefault(name, len(outside)), value.shape, value.dtype, roles.get(name), known

    lines: list[Hashable] = []
    for position, op in enumerate(ops):
        inputs = tuple([operand(name) for name in op.inputs])
        results = [graph.values[name] if name else None for name in op.outputs]
        outputs = tuple([value and (value.shape, value.dtype) for value in results])
        inside.update({name: (position, slot) for slot, name in enumerate(op.outputs) if name})
        lines.append((op.kind, op.attrs, op.phase, inputs, outputs))
    return lines


def _with_attrs(folded: Folded, attrs: Mapping[_Place, Attrs]) -> Folded:
    """Return a folded graph with other attributes of the ops at some places."""
    if not attrs:
        return folded
    position = [0] * folded.num_blocks
    ops: list[Op] = []
    for op in folded.graph.ops:
        own = attrs.get((folded.chain[op.block], position[op.block]))
        position[op.block] += 1
        ops.append(op if own is None else replace(op, attrs=own))
    graph = replace(folded.graph, ops=tuple(ops))
    kinds = tuple(_kind_with(kind, attrs) for kind in folded.kinds)
    return replace(folded, graph=graph, kinds=kinds, producers=graph.producers(), readers=graph.consumers())


def _kind_with(kind: BlockKind, attrs: Mapping[_Place, Attrs]) -> BlockKind:
    places = ((op, attrs.get((kind.id, position))) for position, op in enumerate(kind.ops))
    return replace(kind, ops=tuple(op if own is None else replace(op, attrs=own) for op, own in places))
