"""The laws of programs. `verify_program` refuses what would compute nonsense, deadlock or be costed wrongly."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import assert_never

from autopar.cost.collectives import Collective as CollectiveKind
from autopar.errors import ProgramError
from autopar.program.records import (
    Collective,
    Compute,
    Exchange,
    Instruction,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    Slice,
    StageProgram,
    defines,
    reads,
)
from autopar.program.text import format_instruction
from autopar.schedule import SCHEDULES, Pass, Task, follow
from autopar.sharding import Shard, format_placements

_ONCE = (SegmentPhase.REDUCE, SegmentPhase.UPDATE)
_CONTEXT = 2  # instructions printed before and after the one at fault


def verify_program(program: Program) -> None:
    """Check that a program keeps the laws.

    - The schedule is known, has backwards if the program trains, and gets every microbatch through the stages: none
      waits for what another one only does later. Stages tile the devices, or take turns on them if the schedule
      interleaves; every block has a forward.
    - In a segment every value is defined once and before it is read; a backward may also read what its forward saves.
    - Collectives and slices run over an axis of their stage and change shapes as their placements say.
    - Neighbouring blocks agree on the values that cross, in number, shape, size and placement.
    - Reductions and updates follow a backward; reductions only communicate; only gradient traffic overlaps.

    Raises:
        ProgramError: If it does not; the message prints the surrounding instructions.
    """
    _verify_frame(program)
    table = program.table()
    if len(table) < len(program.segments):
        raise ProgramError(f"{len(program.segments)} segments for {len(table)} pairs of kind and phase")
    for segment in program.segments:
        if segment.phase in _ONCE and (segment.kind, SegmentPhase.BACKWARD) not in table:
            raise ProgramError(f"{_title(segment)} follows a backward, but kind {segment.kind} has none")
        forward = table.get((segment.kind, SegmentPhase.FORWARD))
        saved = forward.saved if forward is not None and segment.phase is SegmentPhase.BACKWARD else ()
        _verify_segment(segment, saved)
    for stage in program.stages:
        _verify_axes(stage, program)
    _verify_chain(program)
    if not program.trains:
        for segment in program.segments:
            if segment.saved:
                raise ProgramError(f"{_title(segment)} saves values but the program has no backward")


def _title(segment: Segment) -> str:
    return f"segment {segment.kind} {segment.phase}"


def _verify_frame(program: Program) -> None:
    schedule = SCHEDULES.get(program.schedule)
    if schedule is None:
        raise ProgramError(f"there is no schedule {program.schedule!r}", hint=f"known are {', '.join(SCHEDULES)}")
    if schedule.trains != program.trains:
        having = "has" if program.trains else "has no"
        raise ProgramError(f"the program {having} backward segments, which schedule {program.schedule!r} does not fit")
    if program.num_microbatches < 1:
        raise ProgramError(f"{program.num_microbatches} microbatches", hint="at least 1")
    if not program.stages:
        raise ProgramError("the program has no stages")
    forwards = {segment.kind for segment in program.segments if segment.phase is SegmentPhase.FORWARD}
    device, groups = 0, program.num_groups
    for index, stage in enumerate(program.stages):
        where = f"stage {index}"
        if stage.index != index:
            raise ProgramError(f"{where} has index {stage.index}")
        if index >= groups:
            if stage.devices != program.stages[index - groups].devices:
                raise ProgramError(f"{where} has devices {stage.devices}, those of stage {index - groups} take turns")
        elif stage.devices[0] != device or stage.num_devices < 1:
            raise ProgramError(f"{where} has devices {stage.devices}, the previous one ends at {device}")
        if stage.mesh.size != stage.num_devices:
            raise ProgramError(f"{where} has {stage.num_devices} devices and mesh {stage.mesh} of {stage.mesh.size}")
        if not stage.blocks:
            raise ProgramError(f"{where} has no blocks")
        missing = sorted(set(stage.blocks) - forwards)
        if missing:
            raise ProgramError(f"{where} has blocks of kind {missing[0]}, which has no forward segment")
        categories = [resident.category for resident in stage.resident]
        if len(set(categories)) < len(categories):
            raise ProgramError(f"{where} lists a category of resident memory twice: {', '.join(categories)}")
        device = stage.devices[1]
    if len(program.stages) % groups:
        raise ProgramError(f"{len(program.stages)} stages cannot take turns on {groups} groups of devices")
    if groups < len(program.stages) and not schedule.interleaves:
        raise ProgramError(
            f"schedule {program.schedule!r} runs one stage per group of devices, not {program.num_chunks}",
            hint="schedule 'interleaved' runs several",
        )
    if schedule.interleaves and program.num_microbatches % groups:
        raise ProgramError(
            f"{program.num_microbatches} microbatches are no whole number of rounds through {groups} groups of devices",
            hint=f"schedule {program.schedule!r} needs a multiple of {groups}",
        )
    _verify_order(program.schedule, groups, program.num_microbatches, program.num_chunks)


@lru_cache(maxsize=256)  # programs are many, schedules of one size few
def _verify_order(name: str, num_groups: int, num_microbatches: int, num_chunks: int) -> None:
    """Check that no group of devices waits for what another one only does later, and that nothing is left out."""
    schedule = SCHEDULES[name]
    orders = [schedule.order(group, num_groups, num_microbatches, num_chunks) for group in range(num_groups)]
    passes = list(Pass) if schedule.trains else [Pass.FORWARD]
    wanted = {Task(*task) for task in product(passes, range(num_microbatches), range(num_chunks))}
    for group, order in enumerate(orders):
        if len(order) != len(wanted) or set(order) != wanted:
            missing = ", ".join(sorted(map(str, wanted.difference(order)))[:3])
            raise ProgramError(
                f"schedule {name!r} does not run every task once; group {group} lacks {missing or 'none'}"
            )
    follow(orders)


def _at(segment: Segment, index: int, problem: str) -> ProgramError:
    """Return an error that shows the instruction at fault among its neighbours."""
    first = max(0, index - _CONTEXT)
    lines = [
        f"  {'>' if i == index else ' '} {format_instruction(segment.instructions[i])}"
        for i in range(first, min(len(segment.instructions), index + _CONTEXT + 1))
    ]
    return ProgramError("\n".join([f"{_title(segment)}, instruction {index}: {problem}", *lines]))


def _verify_segment(segment: Segment, saved: Sequence[Operand]) -> None:
    known = {operand.value: operand for operand in saved}
    for operand in (*segment.inputs, *segment.external):
        if known.setdefault(operand.value, operand) != operand:
            raise ProgramError(f"{_title(segment)}: {operand} is not what was saved: {known[operand.value]}")
    given = set(known)
    for index, instruction in enumerate(segment.instructions):
        for operand in reads(instruction):
            if operand.value not in known:
                raise _at(segment, index, f"{operand.value!r} is read before it is defined")
            if known[operand.value] != operand:
                raise _at(segment, index, f"reads {operand}, defined was {known[operand.value]}")
        for operand in defines(instruction):
            if operand.value in known:
                raise _at(segment, index, f"{operand.value!r} is defined twice")
            known[operand.value] = operand
        _verify_instruction(segment, index, instruction)
    own = {operand.value for operand in segment.inputs} | (known.keys() - given)
    for what, operands in (("saved", segment.saved), ("output", segment.outputs), ("export", segment.exports)):
        for operand in operands:
            if operand.value not in own or known[operand.value] != operand:
                raise ProgramError(f"{_title(segment)}: {what} {operand} is no input and not defined there")
    for store in segment.stores:
        if known.get(store.value.value) != store.value or store.value.value in given:
            raise ProgramError(f"{_title(segment)}: {store.value.value!r} is stored but not defined there")
    for part in segment.parts:
        if part.value not in known:
            raise ProgramError(f"{_title(segment)}: {part.value!r} is a part of {part.tensor!r} but not there")
    if segment.phase in _ONCE and (segment.inputs or segment.outputs):
        raise ProgramError(f"{_title(segment)} runs once per step and cannot exchange values with its neighbours")
    if segment.phase is not SegmentPhase.FORWARD and segment.saved:
        raise ProgramError(f"{_title(segment)} saves values; only a forward can")


def _verify_instruction(segment: Segment, index: int, instruction: Instruction) -> None:
    match instruction:
        case Compute(op=op):
            if segment.phase is SegmentPhase.REDUCE:
                raise _at(segment, index, "reductions only communicate")
            if len(op.inputs) != len(instruction.inputs) or len(op.outputs) != len(instruction.outputs):
                raise _at(segment, index, f"op {op.name!r} has {len(op.inputs)} inputs and {len(op.outputs)} outputs")
        case Collective():
            _verify_collective(segment, index, instruction)
        case Slice(axis=axis, target=target, operand=operand, result=result):
            if operand.shape != _scaled(result.shape, target.dim, axis.size):
                raise _at(segment, index, f"a slice of {operand.shape} on dim {target.dim} is not {result.shape}")
        case Exchange(dim=dim, before=before, after=after, operand=operand, result=result):
            if result.shape != _grown(operand.shape, dim, before + after):
                raise _at(
                    segment, index, f"{operand.shape} with {before}+{after} rows on dim {dim} is not {result.shape}"
                )
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


def _verify_collective(segment: Segment, index: int, collective: Collective) -> None:
    before, after, size = collective.operand.shape, collective.result.shape, collective.axis.size
    if collective.overlaps and segment.phase not in (SegmentPhase.BACKWARD, SegmentPhase.REDUCE):
        raise _at(segment, index, "only gradient traffic overlaps, in backward and reduce segments")
    # both sides with the dims that the placements split put together again are one and the same shape
    whole: list[tuple[int, ...] | None] = []
    for shape, placement in ((before, collective.source), (after, collective.target)):
        whole.append(_scaled(shape, placement.dim, size) if isinstance(placement, Shard) else shape)
    if None in whole or whole[0] != whole[1]:
        raise _at(segment, index, f"{collective.kind} over {size} devices does not turn {before} into {after}")
    if collective.bytes < 0:
        raise _at(segment, index, f"{collective.bytes} bytes")
    assert collective.kind in CollectiveKind, f"{collective.kind} is no collective"


def _verify_axes(stage: StageProgram, program: Program) -> None:
    kinds = set(stage.blocks)
    for segment in program.segments:
        if segment.kind in kinds:
            for index, instruction in enumerate(segment.instructions):
                if not isinstance(instruction, Compute) and instruction.axis not in stage.mesh.axes:
                    raise _at(segment, index, f"axis {instruction.axis} is none of stage {stage.index}, {stage.mesh}")


def _verify_chain(program: Program) -> None:
    table = program.table()
    chain = list(program.blocks())
    empty: tuple[Operand, ...] = ()

    def values(kind: int, phase: SegmentPhase, incoming: bool) -> tuple[Operand, ...]:
        segment = table.get((kind, phase))
        return empty if segment is None else segment.inputs if incoming else segment.outputs

    for phase, first in ((SegmentPhase.FORWARD, chain[0]), (SegmentPhase.BACKWARD, chain[-1])):
        if values(first[1], phase, incoming=True):
            raise ProgramError(f"segment {first[1]} {phase} has inputs but no block comes before it in this phase")
    if values(chain[0][1], SegmentPhase.BACKWARD, incoming=False):
        raise ProgramError(f"segment {chain[0][1]} backward has outputs but no block comes after it in this phase")
    for index, ((stage, kind), (next_stage, next_kind)) in enumerate(pairwise(chain)):
        for phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
            sender, receiver = (kind, next_kind) if phase is SegmentPhase.FORWARD else (next_kind, kind)
            sent, received = values(sender, phase, incoming=False), values(receiver, phase, incoming=True)
            same_mesh = stage.mesh.shape == next_stage.mesh.shape
            agree = len(sent) == len(received)
            if agree and same_mesh:
                pairs = zip(sent, received, strict=True)
                agree = all(replace(sent_one, value=got.value) == got for sent_one, got in pairs)
            if not agree:
                raise ProgramError(
                    f"blocks {index} (kind {kind}) and {index + 1} (kind {next_kind}) disagree in {phase}: "
                    f"{_describe(sent)} is sent, {_describe(received)} expected"
                )


def _describe(operands: Sequence[Operand]) -> str:
    texts = (f"{item.value} {item.shape} {format_placements(item.placements)}".rstrip() for item in operands)
    return ", ".join(texts) or "nothing"
