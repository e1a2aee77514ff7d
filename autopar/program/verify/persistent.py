"""What outlives a segment: persistent tensors lie between steps as they were stored, and nothing is stored as terms.

A gradient sum is the exception: its terms are added up microbatch by microbatch, and reduced once. The optimizer may
also read a parameter as it writes it before it is put together for the other phases: that is the optimizer's own copy.
"""

from collections.abc import Mapping

from autopar.errors import ProgramError
from autopar.program.records import (
    Compute,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    defines,
    reads,
)
from autopar.program.verify.fault import title
from autopar.sharding import Partial, Placements, format_placements

_ORDER = list(SegmentPhase)


def verify_persistent(program: Program) -> None:
    """Check that what segments read of other segments is there, and lies as they read it.

    Programs that are only timed do not say which tensors their values are, and are not asked.

    Raises:
        ProgramError: If it is not.
    """
    if not any(segment.parts for segment in program.segments):
        return
    variants = {kind: stage.variant for stage in program.stages for kind in stage.blocks}
    stored: dict[tuple[int, str], tuple[Segment, Operand]] = {}
    own: dict[int, dict[str, tuple[SegmentPhase, Operand]]] = {}
    for segment in program.segments:
        parts = {part.value for part in segment.parts}
        for store in segment.stores:
            _verify_terms(segment, store.value)
            if store.value.value not in parts:
                own.setdefault(segment.kind, {})[store.target] = (segment.phase, store.value)
                continue
            key = (variants.get(segment.kind, 0), store.target)
            other, known = stored.setdefault(key, (segment, store.value))
            if other is segment and known is not store.value:
                raise ProgramError(f"{title(segment)} stores {store.target!r} twice")
            if (known.placements, known.shape) != (store.value.placements, store.value.shape):
                raise ProgramError(
                    f"{title(segment)} stores {store.target!r} as {_form(store.value)}, "
                    f"{title(other)} stores it as {_form(known)}"
                )
    for segment in program.segments:
        tensors = {part.value: part.tensor for part in segment.parts}
        written = _written(segment)
        for operand in (*segment.inputs, *segment.outputs, *segment.exports):
            if operand.value not in tensors:
                raise ProgramError(f"{title(segment)}: {operand.value!r} crosses its edge and is no part of any tensor")
        for operand in segment.external:
            tensor = tensors.get(operand.value)
            key = (variants.get(segment.kind, 0), tensor or "")
            if tensor is None:
                phase, held = own.get(segment.kind, {}).get(operand.value, (segment.phase, None))
                if held is None or _ORDER.index(phase) >= _ORDER.index(segment.phase):
                    raise ProgramError(f"{title(segment)} reads {operand.value!r}, which no earlier segment has stored")
                if held != operand:
                    raise ProgramError(f"{title(segment)} reads {operand}, stored was {held}")
            elif key in stored:
                writer, content = stored[key]
                forms = {content.placements, *written.get(tensor, ())}
                if operand.placements not in forms:
                    raise ProgramError(
                        f"{title(segment)} reads {tensor!r} as {_form(operand)}, {title(writer)} stores it as "
                        f"{_form(content)}"
                    )


def _form(operand: Operand) -> str:
    return f"{list(operand.shape)} {format_placements(operand.placements)}".rstrip()


def _verify_terms(segment: Segment, operand: Operand) -> None:
    placements = format_placements(operand.placements)
    partial = any(isinstance(placement, Partial) for placement in operand.placements)
    if partial and segment.phase in (SegmentPhase.FORWARD, SegmentPhase.UPDATE):
        raise ProgramError(f"{title(segment)} stores {operand.value!r} as terms, {placements}")


def _written(segment: Segment) -> Mapping[str, list[Placements]]:
    """Return how the optimizer writes the tensors that its segment stores, before they are put together."""
    if segment.phase is not SegmentPhase.UPDATE:
        return {}
    sources = {
        made.value: read
        for instruction in segment.instructions
        if not isinstance(instruction, Compute)
        for made, read in zip(defines(instruction), reads(instruction), strict=True)
    }
    found: dict[str, list[Placements]] = {}
    for store in segment.stores:
        operand = store.value
        while operand.value in sources:
            operand = sources[operand.value]
        found.setdefault(store.target, []).append(operand.placements)
    return found
