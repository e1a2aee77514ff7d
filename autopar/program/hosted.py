"""What of the state of a block lies in host memory: how it comes and goes, its bytes, and the update on the host."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from autopar.program.block import LoweredKind
from autopar.program.offload import MASTER, hosted_operand
from autopar.program.records import (
    OPTIMIZER_STATE,
    STATE_COPIES,
    Category,
    Collective,
    Compute,
    Fetch,
    Offload,
    Operand,
    Part,
    Segment,
    SegmentPhase,
    Slice,
    Store,
    reads,
)
from autopar.recompute import STATE_KINDS, Hosted


def shared_parameters(lowered: Collection[LoweredKind]) -> frozenset[str]:
    """Return the parameters that several blocks read: they stay on the device."""
    return frozenset(name for block in lowered for name in block.borrowed)


def state_copies(block: LoweredKind, what: Hosted, shared: Collection[str]) -> list[Segment]:
    """Return the segments that bring what of a block's state lies in host memory, and take it back.

    Sums that are reduced once per step stay on the device, and so do parameters that other blocks read, too.

    Args:
        block: The block.
        what: What lies in host memory.
        shared: As of `shared_parameters`.
    """
    return [*(own for own in block.segments if own.phase in _STATE), *streams(block, what, shared)]


_STATE = (SegmentPhase.STATE_FETCH, SegmentPhase.STATE_OFFLOAD)


def streams(block: LoweredKind, what: Hosted, shared: Collection[str]) -> list[Segment]:
    """Return those of `state_copies` that bring and take more than the optimizer's state."""
    kind, table = STATE_KINDS[what], {segment.phase: segment for segment in block.segments}
    passes, found = [table[phase] for phase in _PASSES if phase in table], list[Segment]()
    if kind.sums:
        sums = dict.fromkeys(block.sums.keys() - _moved(table.get(SegmentPhase.REDUCE)), 0.0)
        found += _persistent_copies(passes, sums, SegmentPhase.SUM_FETCH)
    if kind.parameters:
        stored = {name: size for name, size in block.stored.items() if name not in shared}
        found += _persistent_copies(passes, stored, SegmentPhase.PARAMETER_FETCH)
    return found


_PASSES = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.WEIGHT)


def _tensors(segment: Segment | None) -> dict[str, str]:
    """Return the persistent tensors that a segment reads, by the name of the value."""
    if segment is None:
        return {}
    parts = {part.value: part.tensor for part in segment.parts}
    return {operand.value: parts[operand.value] for operand in segment.external if operand.value in parts}


def _moved(segment: Segment | None) -> set[str]:
    """Return the persistent tensors that the instructions of a segment read."""
    tensors = _tensors(segment)
    instructions = () if segment is None else segment.instructions
    return {
        tensors[operand.value]
        for instruction in instructions
        for operand in reads(instruction)
        if operand.value in tensors
    }


def _persistent_copies(passes: Sequence[Segment], sizes: Mapping[str, float], fetch: SegmentPhase) -> list[Segment]:
    """Return the segments that bring persistent tensors that passes read, and take them back; none without any.

    Args:
        passes: Segments of a block.
        sizes: Bytes of the tensors by name; those of the value itself if they are 0.
        fetch: The phase that brings them.
    """
    read: dict[str, Operand] = {}
    for segment in passes:
        tensors = _tensors(segment)
        read |= {tensors[own.value]: own for own in segment.external if tensors.get(own.value, "") in sizes}
    if not read:
        return []
    moved = {tensor: sizes[tensor] or operand.bytes for tensor, operand in read.items()}
    there = tuple(Part(hosted_operand(operand).value, tensor) for tensor, operand in read.items())
    here = tuple(Part(operand.value, tensor) for tensor, operand in read.items())
    kind = passes[0].kind
    return [
        Segment(
            kind,
            fetch,
            inputs=(),
            external=tuple(hosted_operand(operand) for operand in read.values()),
            instructions=tuple(Fetch(hosted_operand(own), own, moved[tensor]) for tensor, own in read.items()),
            stores=tuple(Store(operand, tensor) for tensor, operand in read.items()),
            parts=(*there, *here),
        ),
        Segment(
            kind,
            STATE_COPIES[fetch],
            inputs=(),
            external=tuple(read.values()),
            instructions=tuple(Offload(own, hosted_operand(own), moved[tensor]) for tensor, own in read.items()),
            parts=here,
        ),
    ]


def hosted_bytes(block: LoweredKind, what: Hosted, shared: Collection[str]) -> dict[Category, float]:
    """Return what of the persistent bytes of a block lies in host memory; arguments as of `state_copies`."""
    found = {part: block.resident[part] for part in OPTIMIZER_STATE if part in block.resident}
    copied = {segment.phase: _tensors(segment).values() for segment in state_copies(block, what, shared)}
    for name in copied.get(SegmentPhase.SUM_OFFLOAD, ()):
        size = block.owned.get(block.sums[name], {}).get(Category.GRADIENTS, 0.0)
        found[Category.GRADIENTS] = found.get(Category.GRADIENTS, 0.0) + size
    for name in copied.get(SegmentPhase.PARAMETER_OFFLOAD, ()):
        found[Category.PARAMETERS] = found.get(Category.PARAMETERS, 0.0) + block.stored[name]
    return found


def streamed_bytes(block: LoweredKind, what: Hosted, shared: Collection[str]) -> float:
    """Return the bytes on a device while a pass runs of what otherwise lies in host memory; as `state_copies`."""
    return fetched_bytes(streams(block, what, shared))


def fetched_bytes(segments: Iterable[Segment]) -> float:
    """Return the bytes that segments bring from host memory."""
    return fsum(copy.bytes for segment in segments for copy in segment.instructions if isinstance(copy, Fetch))


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """The update of a block on its host, in bytes per device.

    Attributes:
        traffic: What the processors of the host read and write.
        out: What goes to the host: gradients whose sums are on the device, new parameters that devices have gathered.
        back: What comes back: new parameters, if they lie on the device or are gathered there.
    """

    traffic: float
    out: float
    back: float


def host_update(update: Segment, copies: Mapping[SegmentPhase, Segment]) -> HostUpdate:
    """Return what an update on the host reads, writes and sends.

    Args:
        update: The update.
        copies: What brings state of its block from host memory, by phase.
    """
    sums, parameters, moments = (
        set(_tensors(copies.get(phase)).values())
        for phase in (SegmentPhase.SUM_OFFLOAD, SegmentPhase.PARAMETER_OFFLOAD, SegmentPhase.STATE_OFFLOAD)
    )
    tensors, moved = _tensors(update), {}
    traffic = out = back = 0.0
    for instruction in update.instructions:
        if isinstance(instruction, Compute):
            operands = [own for own in (*instruction.inputs, *instruction.outputs) if own is not None]
            traffic += fsum(operand.bytes for operand in operands)
            for operand in (own for own in instruction.inputs if own is not None):
                tensor = tensors.get(operand.value, "")
                is_state = tensor in sums or tensor in moments or operand.value.endswith(MASTER)
                out += 0.0 if is_state else operand.bytes
        elif isinstance(instruction, Collective | Slice):
            moved[instruction.result.value] = instruction.operand
    for store in update.stores:
        if store.target in moments:
            continue
        value, is_moved = store.value, False
        while value.value in moved:
            value, is_moved = moved[value.value], True
        is_there = store.target in parameters
        back += value.bytes if is_moved or not is_there else 0.0
        out += store.value.bytes if is_moved and is_there else 0.0
    return HostUpdate(traffic, out, back)
