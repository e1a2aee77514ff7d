"""Shares of rows: a row runs its microbatches without the others, and all of them sum gradients at the end."""

from autopar.errors import ProgramError
from autopar.folding.fold import Folded
from autopar.program.records import Collective, Compute, Exchange, Program, Segment, SegmentPhase
from autopar.program.text import format_instruction
from autopar.program.verify.fault import title
from autopar.schedule import SCHEDULES
from autopar.sharding import Axis, Replicate
from autopar.shares import faults, num_rows

_ONCE = (SegmentPhase.REDUCE, SegmentPhase.UPDATE, SegmentPhase.STATE_FETCH, SegmentPhase.STATE_OFFLOAD)
_HINT = "rows with different shares meet once per step: data parallelism with ZeRO-1 at most on the major axis"


def verify_shares(program: Program, folded: Folded | None) -> None:
    """Check that rows with different shares can run apart.

    Raises:
        ProgramError: If the shares do not fit the meshes, rows talk to each other inside a pass, or a pass leaves
            something that is no sum over rows.
    """
    if not program.shares:
        return
    fault = next(faults(program.shares, program.num_microbatches), None)
    if fault is not None:
        raise ProgramError(fault)
    if not program.trains:
        raise ProgramError("rows have different shares, and nothing is trained", hint="shares are of a training step")
    rows = num_rows(program.shares)
    for stage in program.stages:
        if stage.mesh.axes[0].size != rows:
            raise ProgramError(f"shares are of {rows} rows, the major axis of stage {stage.index} is {stage.mesh}")
    schedule, groups = SCHEDULES[program.schedule], program.num_groups
    for share in program.shares:
        problem, hint = schedule.problem(groups, share.num_microbatches, program.num_chunks)
        if problem:
            raise ProgramError(f"schedule {program.schedule!r} {problem}", hint=hint)
    majors = {stage.mesh.axes[0] for stage in program.stages}
    outputs = set() if folded is None else set(folded.graph.outputs)
    for segment in program.segments:
        if segment.phase not in _ONCE:
            _verify_pass(segment, majors, outputs)
    for crossing in program.crossings:
        sender, receiver = program.stages[crossing.sender], program.stages[crossing.receiver]
        for piece in crossing.pieces if crossing.phase is not SegmentPhase.UPDATE else ():
            rows_apart = (
                (piece.sender - sender.devices[0]) * rows // sender.num_devices,
                (piece.receiver - receiver.devices[0]) * rows // receiver.num_devices,
            )
            if len(set(rows_apart)) > 1:
                raise ProgramError(
                    f"{crossing.tensor!r} goes from row {rows_apart[0]} to row {rows_apart[1]} in a pass", hint=_HINT
                )


def _verify_pass(segment: Segment, majors: set[Axis], outputs: set[str]) -> None:
    """Check that rows are apart in a segment of a pass."""
    for instruction in segment.instructions:
        meets = isinstance(instruction, Collective | Exchange) and instruction.axis in majors
        if meets or (isinstance(instruction, Compute) and instruction.ring in majors):
            raise ProgramError(
                f"{title(segment)}: rows meet inside a pass, in\n  {format_instruction(instruction)}", hint=_HINT
            )
    for store in segment.stores:
        if not store.value.placements or isinstance(store.value.placements[0], Replicate):
            raise ProgramError(
                f"{title(segment)}: {store.target!r} is stored as if all rows had run the pass", hint=_HINT
            )
    parts = {part.value: part.tensor for part in segment.parts}
    for operand in segment.exports:
        if parts.get(operand.value) in outputs and isinstance(operand.placements[0], Replicate):
            raise ProgramError(
                f"{title(segment)}: output {operand.value!r} leaves as if all rows had run the pass", hint=_HINT
            )
