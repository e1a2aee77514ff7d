"""Fused groups: the ops of one kernel with shapes, as kernels are timed and their seconds predicted.

A group names no values of its graph, so that equal groups of different models are equal, and are priced once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost.fusion import Kernel, Work
from autopar.ir.graph import ITEM_BYTES

Shape = tuple[int, ...]
Attr = int | float | str | tuple[int | float | str, ...]
"""What an attribute of an op of a group may be, as files have it."""


@dataclass(frozen=True, slots=True)
class GroupTensor:
    """A value as an op reads or makes it, or a group reads it from memory.

    Attributes:
        shape: Its shape.
        dtype: Its element type.
        data: Its elements if they are known, as axes are.
    """

    shape: Shape
    dtype: str
    data: tuple[int | float, ...] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the tensor; 0 if it is known, for it is a part of the kernel."""
        return 0 if self.data is not None else prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Read:
    """What an op reads.

    Attributes:
        value: Number of the value: inputs of the group first, then outputs of its ops in order; -1 for an absent one.
        shape: The shape in which the op reads it, which a view may have changed.
    """

    value: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Made:
    """What an op makes: shape, element type, and whether it is written to memory."""

    shape: Shape
    dtype: str
    written: bool

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class GroupOp:
    """An op of a group."""

    kind: str
    attrs: tuple[tuple[str, Attr], ...]
    reads: tuple[Read, ...]
    made: tuple[Made, ...]

    @property
    def elements(self) -> int:
        """Elements of the largest tensor that the op reads or makes."""
        return max(*(prod(own.shape) for own in self.reads), *(prod(own.shape) for own in self.made), 1)


@dataclass(frozen=True, slots=True)
class FusedGroup:
    """The ops of one kernel.

    Attributes:
        inputs: What it reads from memory.
        ops: Its ops in order.
    """

    inputs: tuple[GroupTensor, ...]
    ops: tuple[GroupOp, ...]

    @property
    def structure(self) -> tuple[object, ...]:
        """What groups that differ in sizes only have in common: kinds, who reads what, ranks, what is written."""
        return tuple(
            (
                op.kind,
                tuple((read.value, len(read.shape)) for read in op.reads),
                tuple((made.written, len(made.shape)) for made in op.made),
            )
            for op in self.ops
        )

    @property
    def read_bytes(self) -> int:
        """Bytes that enter the kernel."""
        return sum(own.bytes for own in self.inputs)

    @property
    def written_bytes(self) -> int:
        """Bytes that leave the kernel."""
        return sum(made.bytes for op in self.ops for made in op.made if made.written)

    @property
    def elements(self) -> int:
        """Elements of the largest tensor in it."""
        return max(op.elements for op in self.ops)


def group_of(
    kernel: Kernel,
    work: Work,
    typed: Mapping[str, GroupTensor],
    outside: Sequence[str] | frozenset[str] = (),
) -> FusedGroup | None:
    """Return the fused group of a kernel; None if it has no ops in a phase, or reads what it makes later.

    Args:
        kernel: The kernel.
        work: The ops of the phase it belongs to.
        typed: Values by name, views included.
        outside: Values that must be written whoever reads them.
    """
    members = {work.numbers[name] for name in kernel.ops if name in work.numbers}
    again = {work.numbers[name] for name in kernel.again if name in work.numbers} - members
    if not members:
        return None
    chosen = [work.kernels[number] for number in sorted(members | again)]
    makers = {name for op in chosen for name in op.outputs if name}
    inputs: dict[str, GroupTensor] = {}
    for op in chosen:
        for name in op.inputs:
            source = work.source(name)
            if name and source not in makers and source not in inputs:
                inputs[source] = typed[source]
    numbers = {name: number for number, name in enumerate(inputs)}
    ops = []
    for op in chosen:
        reads = []
        for name in op.inputs:
            if not name:
                reads.append(Read(-1, ()))
                continue
            if work.source(name) not in numbers:
                return None
            reads.append(Read(numbers[work.source(name)], typed[name].shape))
        made = []
        for name in op.outputs:
            if not name:
                continue
            numbers[name] = len(numbers)
            readers = work.readers.get(name, ())
            is_repeated = work.numbers[op.name] in again
            written = not is_repeated and (name in outside or not readers or not members.issuperset(readers))
            made.append(Made(typed[name].shape, typed[name].dtype, written))
        ops.append(GroupOp(op.kind, op.attrs, tuple(reads), tuple(made)))
    return FusedGroup(tuple(inputs.values()), tuple(ops))
