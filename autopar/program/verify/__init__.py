"""The laws of programs. `verify_program` refuses what would compute nonsense, deadlock or be costed wrongly."""

from collections.abc import Callable

from autopar.discover import Rules
from autopar.errors import ProgramError
from autopar.folding.fold import Folded
from autopar.program.buckets import fault as bucket_fault
from autopar.program.records import Program, Segment, SegmentPhase, Table, saved_for
from autopar.program.verify.crossings import verify_crossings
from autopar.program.verify.fault import title
from autopar.program.verify.frame import verify_frame
from autopar.program.verify.graph import verify_graph
from autopar.program.verify.offload import verify_copies, verify_hosted
from autopar.program.verify.persistent import verify_persistent
from autopar.program.verify.placements import verify_placements
from autopar.program.verify.segments import verify_again, verify_axes, verify_segment
from autopar.program.verify.shares import verify_shares
from autopar.schedule import SCHEDULES

__all__ = ["verify_program"]

_ONCE = (SegmentPhase.REDUCE, SegmentPhase.UPDATE)


def verify_program(
    program: Program,
    folded: Folded | None = None,
    rules: Rules | None = None,
    doubt: Callable[[str], None] | None = None,
) -> None:
    """Check that a program keeps the laws.

    - The schedule is known, has backwards if the program trains, and gets every microbatch through the stages: none
      waits for what another one only does later. Stages tile the devices, or take turns on them as the schedule
      says; every block has a forward.
    - In a segment every value is defined once and before it is read; a backward may also read what its forward saves,
      a weight segment what either of them saves.
    - What runs again before a backward is part of the forward; with what is kept for it nothing is missing.
    - What goes to host memory is fetched before it is read: what a block saves, and with a graph the optimizer's state.
    - Collectives, slices and exchanges run over an axis of their stage, start from the placement their operand has, and
      change shapes and placements as they say.
    - Neighbouring blocks agree on the values that cross, in number, shape, size and placement.
    - Persistent tensors are read as they are stored, and not stored as terms, but for sums of gradients.
    - Buckets hold all gradients of their collective and axis, in order.
    - Rows with different shares of the microbatches meet only in reductions and updates.
    - Reductions and updates follow a backward; reductions only communicate; only gradient traffic overlaps.
    - With a graph: the program computes it. Every op runs once on the values it names, blocks hand on what the next
      one takes it for, every state gets its new content, every result leaves.
    - With rules: every op runs by one of its strategies on every mesh axis, numbers in it divided accordingly.

    Args:
        program: What to check.
        folded: The graph it was lowered from; None to look at the program by itself.
        rules: The rules of that graph's ops; None to believe whatever is claimed of ops.
        doubt: Told, in a sentence, of an op that runs by no strategy of its rule; None to raise an error.

    Raises:
        ProgramError: If it does not; the message prints the surrounding instructions.
    """
    assert rules is None or folded is not None, "rules belong to a graph"
    verify_frame(program)
    table = program.table()
    if len(table) < len(program.segments):
        raise ProgramError(f"{len(program.segments)} segments for {len(table)} pairs of kind and phase")
    meshes = {kind: dict.fromkeys(stage.mesh for stage in program.stages if kind in stage.blocks) for kind, _ in table}
    for segment in program.segments:
        if segment.phase in _ONCE and (segment.kind, SegmentPhase.BACKWARD) not in table:
            raise ProgramError(f"{title(segment)} follows a backward, but kind {segment.kind} has none")
        _verify_parts(segment, table)
        saved = saved_for(segment.kind, segment.phase, table)
        verify_segment(segment, saved)
        verify_copies(segment, table)
        for mesh in meshes[segment.kind]:
            verify_axes(segment, mesh)
            verify_placements(segment, saved, mesh)
    verify_crossings(program)
    _verify_buckets(program, table)
    verify_persistent(program)
    verify_shares(program, folded)
    if not program.trains:
        for segment in program.segments:
            if segment.saved:
                raise ProgramError(f"{title(segment)} saves values but the program has no backward")
    if folded is not None:
        verify_graph(program, folded, rules, doubt)
        verify_hosted(program, folded)


def _verify_buckets(program: Program, table: Table) -> None:
    """Check that buckets hold gradients that are there, all of them, in order."""
    for stage in program.stages:
        if wrong := bucket_fault(stage, table, splits=SCHEDULES[program.schedule].splits):
            raise ProgramError(f"buckets of stage {stage.index}: {wrong}")


def _verify_parts(segment: Segment, table: Table) -> None:
    """Check that the parts of a backward are there: what runs again before it, and the weights put off."""
    forward = table.get((segment.kind, SegmentPhase.FORWARD))
    backward, weight = (segment.kind, SegmentPhase.BACKWARD), (segment.kind, SegmentPhase.WEIGHT)
    if segment.phase is SegmentPhase.AGAIN:
        if forward is None or backward not in table:
            raise ProgramError(f"{title(segment)} stands between a forward and a backward, which are not there")
        verify_again(segment, forward)
    if segment.phase is SegmentPhase.WEIGHT and backward not in table:
        raise ProgramError(f"{title(segment)} follows a backward, but kind {segment.kind} has none")
    if segment.phase is SegmentPhase.BACKWARD and segment.saved and weight not in table:
        raise ProgramError(f"{title(segment)} saves values, but there is no weight segment to read them")
