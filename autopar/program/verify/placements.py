"""How values lie on the mesh: each says so, and nothing but collectives, slices and exchanges changes it.

A dim that several axes split is split by the major one first, so it can be split or joined on an axis only while no
later axis splits it. Programs that are only timed say nothing of placements, and are not asked.
"""

from collections.abc import Sequence
from itertools import chain
from typing import TypeGuard

from autopar.errors import ProgramError
from autopar.ir.rings import RINGS
from autopar.program.records import (
    Collective,
    Compute,
    Exchange,
    Fetch,
    Instruction,
    Offload,
    Operand,
    Segment,
    Slice,
    Start,
    defines,
)
from autopar.program.verify.fault import fault, title
from autopar.sharding import Axis, Mesh, Placement, Replicate, Shard, format_placements

_FILLS = ("zero", "lowest")


def verify_placements(segment: Segment, saved: Sequence[Operand], mesh: Mesh) -> None:
    """Check that the placements of a segment fit the mesh, the shapes and each other.

    Args:
        segment: What runs.
        saved: What earlier segments of the block have saved for it.
        mesh: Where it runs.

    Raises:
        ProgramError: If they do not.
    """
    given = (*saved, *segment.inputs, *segment.external)
    made = chain.from_iterable(map(defines, segment.instructions))
    if not any(operand.placements for operand in chain(given, made)):
        return
    for operand in given:
        problem = _operand_problem(operand, mesh)
        if problem:
            raise ProgramError(f"{title(segment)}: {problem}")
    for index, instruction in enumerate(segment.instructions):
        problems = (_operand_problem(operand, mesh) for operand in defines(instruction))
        problem = next(filter(None, problems), "") or _instruction_problem(instruction, mesh)
        if problem:
            raise fault(segment, index, problem)


def _operand_problem(operand: Operand, mesh: Mesh) -> str:
    """Return what is wrong with the placements of a value, "" if nothing."""
    where = f"{operand.value!r} is {format_placements(operand.placements) or 'nowhere'}"
    if len(operand.placements) != len(mesh.axes):
        return f"{where} on mesh {mesh}"
    chunks: dict[int, int] = {}
    for placement in operand.placements:
        if isinstance(placement, Shard):
            if not 0 <= placement.dim < len(operand.shape):
                return f"{where}, but has {len(operand.shape)} dims"
            if chunks.setdefault(placement.dim, placement.chunks) != placement.chunks:
                return f"{where}: the axes that split dim {placement.dim} cut it into different numbers of chunks"
            if operand.shape[placement.dim] % placement.chunks:
                return f"{where}, but {operand.shape[placement.dim]} rows are no {placement.chunks} chunks"
    return ""


def _instruction_problem(instruction: Instruction, mesh: Mesh) -> str:
    """Return what is wrong with the placements of an instruction, "" if nothing."""
    match instruction:
        case Collective(axis=axis, source=source, target=target, operand=operand, result=result):
            return _move_problem(mesh, axis, source, target, operand, result)
        case Slice(axis=axis, target=target, operand=operand, result=result):
            return _move_problem(mesh, axis, Replicate(), target, operand, result)
        case Exchange():
            return _exchange_problem(instruction, mesh)
        case Compute(op=op, start=Start() as start, inputs=inputs):
            if op.kind in RINGS and len(start.axes) != 1:
                return f"op {op.name!r} runs in a ring over {len(start.axes)} axes: a ring is one axis"
            return _start_problem(start, inputs, mesh)
        case Compute(op=op) if op.kind in RINGS:
            return f"op {op.name!r} runs in a ring and does not say over which axis"
        case Compute() | Offload() | Fetch():  # copies change nothing: `verify_segment` holds both sides together
            return ""


def _move_problem(
    mesh: Mesh, axis: Axis, source: Placement, target: Placement, operand: Operand, result: Operand
) -> str:
    position = mesh.axes.index(axis)
    before, after = operand.placements, result.placements
    if before[position] != source:
        return f"{operand.value!r} is {before[position]} on axis {axis.name!r}, not {source}"
    expected = (*before[:position], target, *before[position + 1 :])
    if after != expected:
        return f"{result.value!r} is {format_placements(after)}, not {format_placements(expected)}"
    later = {placement.dim for placement in before[position + 1 :] if isinstance(placement, Shard)}
    for placement in (source, target):
        if isinstance(placement, Shard) and placement.dim in later:
            return f"dim {placement.dim} is split over an axis after {axis.name!r}, which has to be joined first"
    return ""


def _exchange_problem(exchange: Exchange, mesh: Mesh) -> str:
    operand, dim, axis = exchange.operand, exchange.dim, exchange.axis
    splitting = [
        other for other, placement in zip(mesh.axes, operand.placements, strict=True) if _splits(placement, dim)
    ]
    if splitting != [axis] or operand.placements[mesh.axes.index(axis)] != Shard(dim):
        placements = format_placements(operand.placements)
        return f"{operand.value!r} is {placements}: rows are exchanged if axis {axis.name!r} splits dim {dim}, alone"
    if exchange.result.placements != operand.placements:
        return f"{exchange.result.value!r} does not lie as {operand.value!r} does"
    if min(exchange.before, exchange.after) < 0 or exchange.before + exchange.after == 0:
        return f"{exchange.before} rows of the previous and {exchange.after} of the next device are exchanged"
    if max(exchange.before, exchange.after) > operand.shape[dim]:
        return f"the neighbours have no more than {operand.shape[dim]} rows each"
    if exchange.fill not in _FILLS:
        return f"the ends are filled with {exchange.fill!r}, not with one of {', '.join(_FILLS)}"
    return ""


def _start_problem(start: Start, inputs: Sequence[Operand | None], mesh: Mesh) -> str:
    names = ", ".join(repr(axis.name) for axis in start.axes)
    positions = [mesh.axes.index(axis) for axis in start.axes if axis in mesh.axes]
    if len(positions) < len(start.axes) or positions != sorted(set(positions)) or not positions:
        return f"the op is told where its block starts on axes {names or 'of none'}, not in the order of mesh {mesh}"
    for operand in filter(None, inputs):
        split = {operand.placements[position] for position in positions}
        wanted = [dim for dim, rows in enumerate(operand.shape) if rows == start.rows]
        if any(all(_splits(each, dim) and each.chunks == 1 for each in split) for dim in wanted):
            return ""
    return f"the op is told where its block starts, but no input has {start.rows} rows of a dim split over {names}"


def _splits(placement: Placement, dim: int) -> TypeGuard[Shard]:
    return isinstance(placement, Shard) and placement.dim == dim
