"""An op as one device runs it.

A strategy may change more than shapes: it divides numbers (an entry of a Reshape's target shape, the groups of a
convolution), replaces numbers of attributes (the padding of a convolution whose blocks come with their halos), or runs
another op that is told where the device's block starts.
"""

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import PlanError
from autopar.ir.graph import Attr, Graph, Op
from autopar.plan import DividedNumber, HaloRows, OpPlacement, ReplacedNumber
from autopar.program.records import Exchange, Operand, Start
from autopar.sharding import Axis, Mesh

Constants = tuple[tuple[int, tuple[int, ...]], ...]
"""(Index, flat content) of the constant inputs of an op that have other content on a shard."""

_HINT = "it belongs to another model: solve again"


def local_op(graph: Graph, op: Op, placement: OpPlacement) -> tuple[Op, Constants]:
    """Return an op for one device, and its constant inputs that have other content there.

    Args:
        graph: Holds the op's constants.
        op: The op for global shapes.
        placement: What changes.

    Raises:
        PlanError: If something it speaks of is not there, or a number not divisible.
    """
    local, constants = _divide(graph, op, placement.divided)
    local = _replace(local, placement.replaced)
    told = placement.local
    if told is not None:
        shape = (
            graph.values[op.inputs[told.input]].shape if told.input < len(op.inputs) and op.inputs[told.input] else ()
        )
        if told.dim >= len(shape):
            raise _unknown_dim(op, told.input, told.dim)
        local = replace(local, kind=told.kind, attrs=(*local.attrs, ("size", shape[told.dim])))
    return local, constants


def block_start(op: Op, placement: OpPlacement, inputs: Sequence[Operand | None], mesh: Mesh) -> Start | None:
    """Return where the block of an input starts that a local kind is told about; None if the op is its own kind.

    Args:
        op: The op.
        placement: How it runs.
        inputs: Its inputs, without halos.
        mesh: The devices.

    Raises:
        PlanError: If there is no such input, dim or axis.
    """
    local = placement.local
    if local is None:
        return None
    operand = _operand(op, inputs, local.input, local.dim)
    return Start(tuple(_axis(op, name, mesh) for name in local.axes), operand.shape[local.dim])


def halo_exchange(op: Op, rows: HaloRows, inputs: Sequence[Operand | None], mesh: Mesh) -> Exchange:
    """Return the exchange that puts the rows of neighbours around a block of an input.

    Raises:
        PlanError: If there is no such input, dim or axis, or the blocks have fewer rows.
    """
    operand, axis = _operand(op, inputs, rows.input, rows.dim), _axis(op, rows.axis, mesh)
    held, extra = operand.shape[rows.dim], rows.before + rows.after
    if held < max(rows.before, rows.after):
        raise PlanError(
            f"op {op.name!r} needs {rows.before}+{rows.after} rows of its neighbours, which have {held}", hint=_HINT
        )
    shape = (*operand.shape[: rows.dim], held + extra, *operand.shape[rows.dim + 1 :])
    per_row = operand.bytes / held
    name = f"{operand.value}+{rows.before}+{rows.after}@{op.name}"
    result = Operand(name, shape, per_row * (held + extra), operand.placements)
    return Exchange(axis, rows.dim, rows.before, rows.after, rows.fill, operand, result, per_row * extra)


def _operand(op: Op, inputs: Sequence[Operand | None], index: int, dim: int) -> Operand:
    operand = inputs[index] if index < len(inputs) else None
    if operand is None or dim >= len(operand.shape):
        raise _unknown_dim(op, index, dim)
    return operand


def _unknown_dim(op: Op, index: int, dim: int) -> PlanError:
    return PlanError(f"the plan speaks of dim {dim} of input {index} of op {op.name!r}, which is not there", hint=_HINT)


def _axis(op: Op, name: str, mesh: Mesh) -> Axis:
    for axis in mesh.axes:
        if axis.name == name:
            return axis
    raise PlanError(f"op {op.name!r} speaks of axis {name!r}, which mesh {mesh} does not have", hint=_HINT)


def _replace(op: Op, replaced: Sequence[ReplacedNumber]) -> Op:
    """Return an op with other numbers in its attributes."""
    attrs: dict[str, Attr] = dict(op.attrs)
    for number in replaced:
        value = attrs.get(number.attr)
        entries = [entry for entry in (value if isinstance(value, tuple) else (value,)) if isinstance(entry, int)]
        if number.entry >= len(entries):
            raise PlanError(
                f"the plan replaces number {number.attr}[{number.entry}] of op {op.name!r}, which has {entries}",
                hint=_HINT,
            )
        entries[number.entry] = number.value
        attrs[number.attr] = tuple(entries) if isinstance(value, tuple) else entries[0]
    return replace(op, attrs=tuple(attrs.items())) if replaced else op


def _divide(graph: Graph, op: Op, divided: Sequence[DividedNumber]) -> tuple[Op, Constants]:
    """Return an op with numbers divided in its attributes, and the constant inputs in which some are.

    Raises:
        PlanError: If a number is not there or not divisible.
    """
    attrs: dict[str, Attr] = dict(op.attrs)
    constants: dict[int, list[int]] = {}
    for number in divided:
        if isinstance(number.source, int):
            name = op.inputs[number.source] if number.source < len(op.inputs) else ""
            held = graph.constants.get(name)
            content = [] if held is None else [int(entry) for entry in held.reshape(-1)]
            entries = constants.setdefault(number.source, content)
        else:
            value = attrs.get(number.source)
            entries = [entry for entry in (value if isinstance(value, tuple) else (value,)) if isinstance(entry, int)]
        if not 0 <= number.entry < len(entries) or number.divisor < 1 or entries[number.entry] % number.divisor:
            raise PlanError(
                f"the plan divides number {number.source}[{number.entry}] of op {op.name!r} by {number.divisor}, "
                f"which {entries} does not allow",
                hint=_HINT,
            )
        entries[number.entry] //= number.divisor
        if isinstance(number.source, str):
            attrs[number.source] = tuple(entries) if isinstance(attrs[number.source], tuple) else entries[0]
    local = replace(op, attrs=tuple(attrs.items())) if any(isinstance(n.source, str) for n in divided) else op
    return local, tuple((index, tuple(content)) for index, content in sorted(constants.items()))
