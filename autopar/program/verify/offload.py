"""What goes to host memory comes back: copies are in pairs, and with what stays on the device nothing is missing."""

from autopar.errors import ProgramError
from autopar.folding.fold import Folded
from autopar.ir.graph import Role
from autopar.program.records import (
    HOST_PHASES,
    STATE_COPIES,
    Category,
    Fetch,
    Offload,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    StageProgram,
    Table,
    in_host_memory,
    reads,
)
from autopar.program.verify.fault import fault, title

_PARTNER = {
    SegmentPhase.OFFLOAD: SegmentPhase.FETCH,
    SegmentPhase.FETCH: SegmentPhase.OFFLOAD,
    **STATE_COPIES,
    **{back: there for there, back in STATE_COPIES.items()},
}
_USERS = {
    SegmentPhase.OFFLOAD: SegmentPhase.BACKWARD,
    SegmentPhase.FETCH: SegmentPhase.BACKWARD,
    **dict.fromkeys((phase for pair in STATE_COPIES.items() for phase in pair), SegmentPhase.UPDATE),
}
"""Segments without which nothing is copied."""


def verify_copies(segment: Segment, table: Table) -> None:
    """Check a segment of a host phase against its partner and against the segment whose values it copies.

    Raises:
        ProgramError: If it copies the wrong way, or what goes to host memory does not come back.
    """
    kind, phase = segment.kind, segment.phase
    if phase not in HOST_PHASES:
        return
    way = Offload if phase in (SegmentPhase.OFFLOAD, *STATE_COPIES.values()) else Fetch
    for index, instruction in enumerate(segment.instructions):
        if not isinstance(instruction, way):
            raise fault(segment, index, f"a segment {phase} only copies, one way")
    if segment.inputs or segment.outputs or segment.exports:
        raise ProgramError(f"{title(segment)} exchanges values with its neighbours: it only copies to or from its host")
    known = {part.value for part in segment.parts}
    crossing = (*segment.external, *(store.value for store in segment.stores))
    nameless = [operand.value for operand in crossing if operand.value not in known]
    if nameless:
        raise ProgramError(f"{title(segment)}: {nameless[0]!r} is copied and no part of any tensor")
    partner = table.get((kind, _PARTNER[phase]))
    if partner is None:
        raise ProgramError(f"{title(segment)} has no segment {_PARTNER[phase]} beside it")
    if (kind, _USERS[phase]) not in table:
        raise ProgramError(f"{title(segment)} copies for a segment {_USERS[phase]}, which is not there")
    if phase is SegmentPhase.OFFLOAD:
        _verify_saved(segment, partner, table[kind, SegmentPhase.FORWARD])
    elif phase in STATE_COPIES:
        if tuple(store.value for store in segment.stores) != _fetched(segment):
            raise ProgramError(f"{title(segment)} does not store all that it fetches: nothing would find it")
    elif phase in STATE_COPIES.values() and _fetched(partner) != tuple(
        operand for copy in segment.instructions for operand in reads(copy)
    ):
        raise ProgramError(f"{title(segment)} takes back other values than {title(partner)} fetches")


def _verify_saved(offload: Segment, fetch: Segment, forward: Segment) -> None:
    there = {operand.value: operand for operand in (*offload.saved, *_fetched(fetch))}
    for operand in offload.saved:
        if operand not in forward.saved:
            raise ProgramError(f"{title(offload)} keeps {operand}, which its forward does not save")
    for operand in forward.saved:
        if there.get(operand.value) != operand:
            raise ProgramError(f"{title(fetch)} does not bring back {operand}, and it was not kept on the device")
    for instruction in fetch.instructions:
        if isinstance(instruction, Fetch) and instruction.operand not in in_host_memory(offload):
            raise ProgramError(f"{title(fetch)} fetches {instruction.operand}, which was not taken to host memory")


def _fetched(segment: Segment) -> tuple[Operand, ...]:
    return tuple(instruction.result for instruction in segment.instructions if isinstance(instruction, Fetch))


def verify_hosted(program: Program, folded: Folded) -> None:
    """Check that stages whose optimizer state lies in host memory fetch it for every update that reads it.

    Raises:
        ProgramError: If a stage does not.
    """
    moments = {state.input for state in folded.graph.states if state.role is Role.MOMENT}
    table = program.table()
    for stage in program.stages:
        if not all(stage.hosted_blocks):
            _verify_resident(stage, table, moments)
        own = stage.state_kind
        allowed = {Category.OPTIMIZER: True, Category.GRADIENTS: own.sums, Category.PARAMETERS: own.parameters}
        if not all(allowed.get(part.category, False) for part in stage.hosted):
            raise ProgramError(f"stage {stage.index} keeps more in host memory than its {stage.what}")
        if all(stage.hosted_blocks) and any(part.category is Category.OPTIMIZER for part in stage.resident):
            raise ProgramError(f"stage {stage.index} keeps the optimizer's state in host memory and on the device")
        for kind in dict.fromkeys(kind for kind, away in zip(stage.blocks, stage.hosted_blocks, strict=True) if away):
            update, fetch = (table.get((kind, phase)) for phase in (SegmentPhase.UPDATE, SegmentPhase.STATE_FETCH))
            if update is None:
                continue
            tensors = {part.value: part.tensor for part in update.parts}
            found = set() if fetch is None else set(_fetched(fetch))
            for operand in update.external:
                if tensors.get(operand.value) in moments and operand not in found:
                    raise ProgramError(
                        f"stage {stage.index}: {title(update)} reads {operand.value!r}, which is in host memory and "
                        "not fetched"
                    )


def _verify_resident(stage: StageProgram, table: Table, moments: set[str]) -> None:
    """Check that a stage holds the optimizer's state that it does not offload on its devices."""
    here = dict.fromkeys(kind for kind, away in zip(stage.blocks, stage.hosted_blocks, strict=True) if not away)
    updates = (table.get((kind, SegmentPhase.UPDATE)) for kind in here)
    has_state = any(part.tensor in moments for update in updates if update is not None for part in update.parts)
    if has_state and all(part.category is not Category.OPTIMIZER for part in stage.resident):
        raise ProgramError(f"stage {stage.index} holds the state of its optimizer neither on devices nor on hosts")
