"""Resizing: the folded graph of one microbatch size, derived from that of another.

Shapes depend on the number of samples, structure hardly ever does. So the whole model is imported, differentiated and
folded for one size; for another size only an *excerpt* (`layer_excerpt`) is built and compared with the excerpt of the
known size. If the two differ in numbers alone (dim sizes, contents of constants, attributes), and equal numbers stay
equal, the whole graphs differ in these numbers alone, too: every op of the whole graph has a *twin* in the excerpt, an
op of the same kind of block at the same position.

Otherwise resizing returns None, and the whole model has to be built for that size.
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
"""Kind of block, and position of an op in it."""


@dataclass(frozen=True, slots=True, eq=False)
class SizedExcerpt:
    """An excerpt at one microbatch size: its forward graph with blocks, and its training step."""

    forward: Graph
    step: Graph


def place_blocks(graph: Graph, forward: Graph, kept: Sequence[int]) -> Graph | None:
    """Return an imported excerpt with op order and blocks of the whole graph; None if its ops differ.

    Args:
        graph: The excerpt as imported.
        forward: The whole forward graph with blocks.
        kept: The blocks in the excerpt.
    """
    number = {block: index for index, block in enumerate(kept)}
    own = {op.name: op for op in graph.ops}
    places = [(op.name, number[op.block]) for op in forward.ops if op.block in number]
    if len(places) != len(own) or any(name not in own for name, _ in places):
        return None
    return replace(graph, ops=tuple(replace(own[name], block=block) for name, block in places))


class Resizer:
    """Derives folded graphs of other microbatch sizes from a known one.

    Args:
        cut: The whole forward graph with its blocks.
        folded: The folded training step of the whole graph.
        kept: The blocks in excerpts.
        sample: The excerpt at the known size.
    """

    def __init__(self, cut: Cut, folded: Folded, kept: Sequence[int], sample: SizedExcerpt) -> None:
        self._cut, self._folded, self._sample = cut, folded, sample
        block_of = {folded.chain[block]: index for index, block in enumerate(kept)}
        self._blocks = tuple(block_of[kind.id] for kind in folded.kinds)
        self._twins = _constant_twins(folded, self._ops(sample.step))
        self._lines = tuple(
            _indexed(folded.by_value[name] for name in line.crossing if name in folded.by_value) for line in cut.lines
        )
        made = (next(filter(None, op.outputs)) for op in cut.lines[-1].core)
        self._core = _indexed(folded.by_value[name] for name in made if name in folded.by_value)

    @classmethod
    def of(cls, cut: Cut, folded: Folded, kept: Sequence[int], sample: SizedExcerpt) -> "Resizer | None":
        """Return the resizer of a folded graph; None if the excerpt does not represent all of it."""
        if {folded.chain[block] for block in kept} != set(range(len(folded.kinds))):
            return None
        number = {folded.chain[block]: index for index, block in enumerate(kept)}
        blocks = instance_ops(sample.step)
        forms = ((kind.ops, blocks[number[kind.id]]) for kind in folded.kinds)
        if any(_structure(folded.graph, ops) != _structure(sample.step, twins) for ops, twins in forms):
            return None  # a block sums up a gradient of every layer, for instance
        found = cls(cut, folded, kept, sample)
        sizes = (len(line.crossing) for line in cut.lines)
        if any(len(index) != size for (_, index), size in zip(found._lines, sizes, strict=True)):
            return None  # some crossing values have no producer in the step
        if len(found._core[1]) != len(cut.lines[-1].core):
            return None
        return found

    def at(self, other: SizedExcerpt) -> Folded | None:
        """Return the folded graph at the excerpt's size; None if the excerpts differ in more than numbers."""
        known = self._sample
        if not (
            _same_structure(known.forward, other.forward)
            and _same_structure(known.step, other.step)
            and self._has_same_cut(other)
        ):
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
        """Return, per kind, the twins of its ops in an excerpt."""
        blocks = instance_ops(step)
        return [blocks[index] for index in self._blocks]

    def _has_same_cut(self, other: SizedExcerpt) -> bool:
        """Return whether the whole forward graph would be cut into the same blocks at the other size."""
        ops, step = self._ops(other.step), other.step
        nbytes = []
        for distinct, index in self._lines:
            sizes = [num_bytes(step.values[ops[made.kind][made.position].outputs[made.slot]]) for made in distinct]
            nbytes.append(np.array(sizes, np.int64)[index])
        distinct, index = self._core
        work = np.array([work_of(ops[made.kind][made.position], step) for made in distinct], np.float64)[index]
        return self._cut.holds(nbytes, work)

    def _constants(self, other: Graph) -> Constants | None:
        """Return the constants of the whole graph; None if one constant has twins with different contents."""
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
        """Return the attributes that differ from those of the known size, by kind and position."""
        return {
            (kind.id, position): twin.attrs
            for kind, twins in zip(self._folded.kinds, ops, strict=True)
            for position, (op, twin) in enumerate(zip(kind.ops, twins, strict=True))
            if op.attrs != twin.attrs
        }


class ResizedValues(Mapping[str, Value]):
    """The values of a graph at another microbatch size, resized lazily.

    Args:
        known: The values at the known size.
        by_value: Producer of each value.
        ops: Per kind, the twins of its ops.
        twins: Twin of each constant.
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
        """Return whether there is a value of that name."""
        return name in self._known

    def _resized(self, value: Value) -> Value:
        made = self._by_value.get(value.name)
        if made is None:
            twin = self._twins.get(value.name, value.name)  # data keep their names; states no op makes keep their shape
        else:
            op = self._ops[made.kind][made.position]
            twin = (op.outputs if made.source is Source.OP else op.inputs)[made.slot]
        shape = self._values[twin].shape if twin in self._values else value.shape
        return value if shape == value.shape else replace(value, shape=shape)


def _indexed(made: Iterable[Producer]) -> tuple[tuple[Producer, ...], NDArray[np.int64]]:
    """Return the distinct producers, and the index of each given producer among them."""
    number: dict[Producer, int] = {}
    index = [number.setdefault(own, len(number)) for own in made]
    return tuple(number), np.array(index, np.int64)


def _constant_twins(folded: Folded, ops: Sequence[Sequence[Op]]) -> dict[str, tuple[str, ...]]:
    """Return, per constant of the whole graph, the excerpt's constants read by ops at equal places."""
    constants, found = folded.graph.constants, dict[str, dict[str, None]]()
    position = [0] * folded.num_blocks
    for op in folded.graph.ops:
        twin = ops[folded.chain[op.block]][position[op.block]]
        position[op.block] += 1
        for name, own in zip(op.inputs, twin.inputs, strict=True):
            if name in constants:
                found.setdefault(name, {})[own] = None
    return {name: tuple(twins) for name, twins in found.items()}


def _same_structure(one: Graph, other: Graph) -> bool:
    """Return whether two graphs differ in numbers only, and equal numbers of one are equal in the other."""
    if len(one.ops) != len(other.ops) or one.states != other.states:
        return False
    if (one.inputs, one.outputs, [*one.constants]) != (other.inputs, other.outputs, [*other.constants]):
        return False
    if one.metadata.keys() != other.metadata.keys() or one.values.keys() != other.values.keys():
        return False
    if any(_fields(op) != _fields(twin) for op, twin in zip(one.ops, other.ops, strict=True)):
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


def _fields(op: Op) -> Hashable:
    """Return all fields of an op but its attributes."""
    return op.name, op.kind, op.inputs, op.outputs, op.phase, op.block, op.origin, op.linear


def _one_to_one(pairs: Iterable[tuple[Hashable, Hashable]]) -> bool:
    """Return whether the pairs form a bijection."""
    distinct = set(pairs)
    return len(distinct) == len({one for one, _ in distinct}) == len({other for _, other in distinct})


def _structure(graph: Graph, ops: Sequence[Op]) -> list[Hashable]:
    """Return the ops of a block in canonical form, without names: kinds, attributes, operands and result types."""
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
        lines.append((op.kind, op.attrs, op.phase, inputs, outputs, op.linear))
    return lines


def _with_attrs(folded: Folded, attrs: Mapping[_Place, Attrs]) -> Folded:
    """Return a folded graph with the attributes of ops at some places replaced."""
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
