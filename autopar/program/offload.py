"""What goes to host memory and comes back: what a block saves, and the state of the optimizer."""

from collections.abc import Collection

from autopar.cost import is_view
from autopar.program.records import Compute, Fetch, Offload, Operand, Part, Segment, SegmentPhase, Store, defines

MASTER = "|master"
"""Ends the name of the optimizer's own copy of a parameter."""
_HOST = "|host"
"""Ends the name of a value in host memory."""


def offload_saved(forward: Segment) -> tuple[Segment, Segment] | None:
    """Return the segments that take what a block saves to its host, and back; None if it saves nothing it could.

    Values that arrive go, too: they are as large as what a block keeps under full recompute. On the device stay those
    that the block only passes on, which the next block may need there, those that blocks further away read, and
    parameters.

    Args:
        forward: The forward of the block.
    """
    memory = _memory(forward)
    arrived = {operand.value for operand in forward.inputs}
    handed = {memory.get(operand.value, operand.value) for operand in forward.outputs}
    stay = {operand.value for operand in forward.external} | (arrived & handed)
    stay |= {memory.get(operand.value, operand.value) for operand in forward.exports}
    leaving = [operand for operand in forward.saved if memory.get(operand.value, operand.value) not in stay]
    if not leaving:
        return None
    kept = tuple(operand for operand in forward.saved if operand not in leaving)
    sizes = _sizes(forward, leaving, memory)
    return (
        Segment(
            forward.kind,
            SegmentPhase.OFFLOAD,
            inputs=(),
            external=(),
            instructions=tuple(Offload(operand, hosted_operand(operand), sizes[operand.value]) for operand in leaving),
            saved=kept,
        ),
        Segment(
            forward.kind,
            SegmentPhase.FETCH,
            inputs=(),
            external=(),
            instructions=tuple(Fetch(hosted_operand(operand), operand, sizes[operand.value]) for operand in leaving),
        ),
    )


def _memory(forward: Segment) -> dict[str, str]:
    """Return whose memory each view has."""
    found: dict[str, str] = {}
    for instruction in forward.instructions:
        if isinstance(instruction, Compute) and instruction.inputs and instruction.inputs[0] is not None:
            first = instruction.inputs[0]
            if is_view(instruction.op, len(first.shape)):
                found |= dict.fromkeys(
                    (operand.value for operand in defines(instruction)), found.get(first.value, first.value)
                )
    return found


def _sizes(forward: Segment, leaving: list[Operand], memory: dict[str, str]) -> dict[str, float]:
    """Return the bytes that go over the link with each value."""
    sizes: dict[str, float] = {}
    first: dict[str, str] = {}
    for operand in leaving:
        owner = memory.get(operand.value, operand.value)
        sizes[operand.value] = 0.0 if owner in first else operand.bytes
        first.setdefault(owner, operand.value)
    for instruction in forward.instructions:
        if isinstance(instruction, Compute) and instruction.kept:
            made = (first.get(memory.get(operand.value, operand.value)) for operand in defines(instruction))
            carrier = next((name for name in made if name is not None), leaving[0].value)
            sizes[carrier] += instruction.kept
    return sizes


def offload_state(update: Segment, moments: Collection[str]) -> tuple[Segment, Segment] | None:
    """Return the segments that take the optimizer's state of a block to the device, and back; None if it has none.

    Args:
        update: The update of the block.
        moments: Names of the tensors that are moments, as they enter a step.
    """
    parts = {part.value: part.tensor for part in update.parts}
    state = [operand for operand in update.external if parts.get(operand.value) in moments]
    if not state:
        return None
    there = tuple(Part(hosted_operand(operand).value, parts[operand.value]) for operand in state)
    here = tuple(Part(operand.value, parts[operand.value]) for operand in state)
    return (
        Segment(
            update.kind,
            SegmentPhase.STATE_FETCH,
            inputs=(),
            external=tuple(hosted_operand(operand) for operand in state),
            instructions=tuple(Fetch(hosted_operand(operand), operand, operand.bytes) for operand in state),
            stores=tuple(Store(operand, parts[operand.value]) for operand in state),
            parts=(*there, *here),
        ),
        Segment(
            update.kind,
            SegmentPhase.STATE_OFFLOAD,
            inputs=(),
            external=tuple(state),
            instructions=tuple(Offload(operand, hosted_operand(operand), operand.bytes) for operand in state),
            parts=here,
        ),
    )


def hosted_operand(operand: Operand) -> Operand:
    """Return the value in host memory."""
    return Operand(f"{operand.value}{_HOST}", operand.shape, operand.bytes, operand.placements)
