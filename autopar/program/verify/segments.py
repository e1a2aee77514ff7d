"""One segment by itself: every value is defined once and before it is read, and instructions fit their shapes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from autopar.cost.collectives import Collective as CollectiveKind
from autopar.errors import ProgramError
from autopar.program.records import (
    HOST_PHASES,
    Collective,
    Compute,
    Exchange,
    Fetch,
    Instruction,
    Offload,
    Operand,
    Segment,
    SegmentPhase,
    Slice,
    defines,
    forward_values,
    reads,
)
from autopar.program.verify.fault import fault, title
from autopar.sharding import Mesh, Shard

_ONCE = (SegmentPhase.REDUCE, SegmentPhase.UPDATE)
_SAVING = (SegmentPhase.FORWARD, SegmentPhase.AGAIN, SegmentPhase.BACKWARD, SegmentPhase.OFFLOAD)
_OVERLAPPING = (SegmentPhase.BACKWARD, SegmentPhase.WEIGHT, SegmentPhase.REDUCE)


def verify_segment(segment: Segment, saved: Sequence[Operand]) -> None:
    """Check that values are defined once and before they are read, and that instructions fit their shapes.

    Args:
        segment: What runs.
        saved: What earlier segments of the block have saved for it.

    Raises:
        ProgramError: If not; the message prints the surrounding instructions.
    """
    known = {operand.value: operand for operand in saved}
    for operand in (*segment.inputs, *segment.external):
        if known.setdefault(operand.value, operand) != operand:
            raise ProgramError(f"{title(segment)}: {operand} is not what was saved: {known[operand.value]}")
    given = set(known)
    for index, instruction in enumerate(segment.instructions):
        for operand in reads(instruction):
            if operand.value not in known:
                raise fault(segment, index, f"{operand.value!r} is read before it is defined")
            if known[operand.value] != operand:
                raise fault(segment, index, f"reads {operand}, defined was {known[operand.value]}")
        for operand in defines(instruction):
            if operand.value in known:
                raise fault(segment, index, f"{operand.value!r} is defined twice")
            known[operand.value] = operand
        _verify_instruction(segment, index, instruction)
    own = {operand.value for operand in segment.inputs} | (known.keys() - given)
    keeps = segment.saved if segment.phase is SegmentPhase.FORWARD else ()
    for what, operands in (("saved", keeps), ("output", segment.outputs), ("export", segment.exports)):
        for operand in operands:
            if operand.value not in own or known[operand.value] != operand:
                raise ProgramError(f"{title(segment)}: {what} {operand} is no input and not defined there")
    for store in segment.stores:
        if known.get(store.value.value) != store.value or store.value.value in given:
            raise ProgramError(f"{title(segment)}: {store.value.value!r} is stored but not defined there")
    if len({part.value for part in segment.parts}) < len(segment.parts):
        raise ProgramError(f"{title(segment)}: a value is a part of two tensors")
    for part in segment.parts:
        if part.value not in known:
            raise ProgramError(f"{title(segment)}: {part.value!r} is a part of {part.tensor!r} but not there")
    if segment.phase in _ONCE and (segment.inputs or segment.outputs):
        raise ProgramError(f"{title(segment)} runs once per step and cannot exchange values with its neighbours")
    if segment.phase is SegmentPhase.WEIGHT and (segment.inputs or segment.outputs or segment.exports):
        raise ProgramError(f"{title(segment)} makes gradients of parameters: no other block waits for them")
    if segment.phase not in _SAVING and segment.saved:
        raise ProgramError(f"{title(segment)} saves values; only a forward or a backward can")


def verify_again(again: Segment, forward: Segment) -> None:
    """Check that what runs again is part of a forward, and that with what is kept nothing is missing.

    Raises:
        ProgramError: If not.
    """
    if again.inputs or again.outputs or again.stores or again.exports:
        raise ProgramError(f"{title(again)} exchanges values with others: its forward has done so")
    rest = iter(forward.instructions)
    for index, instruction in enumerate(again.instructions):
        if instruction not in rest:  # takes from `rest` what comes before it, so that the order is the same
            raise fault(again, index, "the forward does not run this, or not in this order")
    values = {operand.value: operand for operand in forward_values(forward)}
    for operand in again.saved:
        if values.get(operand.value) != operand:
            raise ProgramError(f"{title(again)} keeps {operand}, which its forward does not make")
    there = {operand.value for operand in again.saved}
    there.update(operand.value for instruction in again.instructions for operand in defines(instruction))
    for operand in forward.saved:
        if operand.value not in there:
            raise ProgramError(f"{title(again)} neither keeps nor makes {operand}, which the backward reads")
    if not (set(again.external) <= set(forward.external) and set(again.parts) <= set(forward.parts)):
        raise ProgramError(f"{title(again)} reads other tensors than its forward")


def _verify_instruction(segment: Segment, index: int, instruction: Instruction) -> None:
    match instruction:
        case Compute(op=op):
            if segment.phase is SegmentPhase.REDUCE:
                raise fault(segment, index, "reductions only communicate")
            if len(op.inputs) != len(instruction.inputs) or len(op.outputs) != len(instruction.outputs):
                raise fault(segment, index, f"op {op.name!r} has {len(op.inputs)} inputs and {len(op.outputs)} outputs")
        case Collective():
            _verify_collective(segment, index, instruction)
        case Slice(axis=axis, target=target, operand=operand, result=result):
            if operand.shape != _joined(result.shape, target, axis.size):
                raise fault(segment, index, f"a slice of {operand.shape} on dim {target.dim} is not {result.shape}")
        case Exchange(dim=dim, before=before, after=after, operand=operand, result=result):
            if result.shape != _grown(operand.shape, dim, before + after):
                raise fault(
                    segment, index, f"{operand.shape} with {before}+{after} rows on dim {dim} is not {result.shape}"
                )
        case Offload(operand=operand, result=result) | Fetch(operand=operand, result=result):
            if segment.phase not in HOST_PHASES:
                raise fault(segment, index, f"a segment {segment.phase} does not copy to or from host memory")
            if replace(operand, value=result.value) != result or instruction.bytes < 0:
                raise fault(segment, index, f"{result} is no copy of {operand}")
        case _:
            assert_never(instruction)


def _scaled(shape: tuple[int, ...], dim: int, factor: int) -> tuple[int, ...] | None:
    """Return the shape with one dim multiplied; None if there is no such dim."""
    if not 0 <= dim < len(shape):
        return None
    return (*shape[:dim], shape[dim] * factor, *shape[dim + 1 :])


def _grown(shape: tuple[int, ...], dim: int, rows: int) -> tuple[int, ...] | None:
    """Return the shape with one dim longer; None if there is no such dim."""
    if not 0 <= dim < len(shape):
        return None
    return (*shape[:dim], shape[dim] + rows, *shape[dim + 1 :])


def _joined(shape: tuple[int, ...], placement: Shard, size: int) -> tuple[int, ...] | None:
    """Return the shape that blocks of `size` devices make; None without such a dim, or if a block is no padded one."""
    joined = _scaled(shape, placement.dim, size)
    if joined is None or not placement.whole:
        return joined
    if shape[placement.dim] != placement.block(size):
        return None
    return (*shape[: placement.dim], placement.whole, *shape[placement.dim + 1 :])


def _verify_collective(segment: Segment, index: int, collective: Collective) -> None:
    before, after, size = collective.operand.shape, collective.result.shape, collective.axis.size
    if collective.overlaps and segment.phase not in _OVERLAPPING:
        raise fault(segment, index, "only gradient traffic overlaps, in backward, weight and reduce segments")
    # both sides with the dims that the placements split put together again are one and the same shape
    whole: list[tuple[int, ...] | None] = []
    for shape, placement in ((before, collective.source), (after, collective.target)):
        whole.append(_joined(shape, placement, size) if isinstance(placement, Shard) else shape)
    if None in whole or whole[0] != whole[1]:
        raise fault(segment, index, f"{collective.kind} over {size} devices does not turn {before} into {after}")
    if collective.bytes < 0:
        raise fault(segment, index, f"{collective.bytes} bytes")
    assert collective.kind in CollectiveKind, f"{collective.kind} is no collective"


def verify_axes(segment: Segment, mesh: Mesh) -> None:
    """Check that devices talk over axes of their mesh only.

    Raises:
        ProgramError: If not.
    """
    for index, instruction in enumerate(segment.instructions):
        if not isinstance(instruction, Compute | Offload | Fetch) and instruction.axis not in mesh.axes:
            raise fault(segment, index, f"axis {instruction.axis} is none of mesh {mesh}")
