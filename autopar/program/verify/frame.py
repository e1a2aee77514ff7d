"""Schedule, stages and devices of a program; and that nobody waits forever."""

from functools import lru_cache

import numpy as np

from autopar.errors import ProgramError
from autopar.limits import MAX_DEVICES, MAX_MICROBATCHES
from autopar.program.records import Program, SegmentPhase
from autopar.schedule import SCHEDULES, Pass, Schedule, Task
from autopar.schedule.timing import listed_tasks, tasks_of
from autopar.sharding import Mesh


def verify_frame(program: Program) -> None:
    """Check schedule, stages and devices.

    Raises:
        ProgramError: If they do not fit each other.
    """
    schedule = SCHEDULES.get(program.schedule)
    if schedule is None:
        raise ProgramError(f"there is no schedule {program.schedule!r}", hint=f"known are {', '.join(SCHEDULES)}")
    splits = any(segment.phase is SegmentPhase.WEIGHT for segment in program.segments)
    if splits and not schedule.splits:
        raise ProgramError(f"the program has weight segments, which schedule {program.schedule!r} does not run")
    if schedule.trains != program.trains:
        having = "has" if program.trains else "has no"
        raise ProgramError(f"the program {having} backward segments, which schedule {program.schedule!r} does not fit")
    if not 1 <= program.num_microbatches <= MAX_MICROBATCHES:
        raise ProgramError(f"{program.num_microbatches} microbatches", hint=f"from 1 to {MAX_MICROBATCHES}")
    if not program.stages:
        raise ProgramError("the program has no stages")
    forwards = {segment.kind for segment in program.segments if segment.phase is SegmentPhase.FORWARD}
    device, groups = 0, program.num_groups
    for index, stage in enumerate(program.stages):
        where = f"stage {index}"
        if stage.index != index:
            raise ProgramError(f"{where} has index {stage.index}")
        if index >= groups:
            turn = schedule.group(index, groups)
            if stage.devices != program.stages[turn].devices:
                raise ProgramError(f"{where} has devices {stage.devices}, those of stage {turn} take turns")
            if (stage.variant, stage.mesh) != (program.stages[turn].variant, program.stages[turn].mesh):
                raise ProgramError(f"{where} has the devices of stage {turn} and another mesh or other placements")
        elif stage.devices[0] != device or stage.num_devices < 1:
            raise ProgramError(f"{where} has devices {stage.devices}, the previous one ends at {device}")
        if stage.devices[1] > MAX_DEVICES:
            raise ProgramError(f"{where} has devices {stage.devices}", hint=f"there are at most {MAX_DEVICES}")
        sizes = {axis.name: axis.size for axis in stage.mesh.axes}
        if stage.mesh != Mesh.of(**sizes):
            raise ProgramError(
                f"{where} has mesh {stage.mesh}, whose strides are not those of a grid, or two axes of one name",
                hint=f"the strides are {', '.join(f'{axis.name}: {axis.stride}' for axis in Mesh.of(**sizes).axes)}",
            )
        if stage.mesh.size != stage.num_devices:
            raise ProgramError(f"{where} has {stage.num_devices} devices and mesh {stage.mesh} of {stage.mesh.size}")
        if not stage.blocks:
            raise ProgramError(f"{where} has no blocks")
        if len(stage.recompute) != len(stage.blocks):
            raise ProgramError(
                f"{where} says what {len(stage.recompute)} blocks keep, and has {len(stage.blocks)}",
            )
        missing = sorted(set(stage.blocks) - forwards)
        if missing:
            raise ProgramError(f"{where} has blocks of kind {missing[0]}, which has no forward segment")
        categories = [resident.category for resident in stage.resident]
        if len(set(categories)) < len(categories):
            raise ProgramError(f"{where} lists a category of resident memory twice: {', '.join(categories)}")
        device = stage.devices[1]
    homes: dict[int, int] = {}
    for stage in program.stages:
        for kind in stage.blocks:
            if homes.setdefault(kind, stage.variant) != stage.variant:
                raise ProgramError(f"stage {stage.index} has blocks of kind {kind}, which another variant has, too")
    if len(program.stages) % groups:
        raise ProgramError(f"{len(program.stages)} stages cannot take turns on {groups} groups of devices")
    problem, hint = schedule.problem(groups, program.num_microbatches, program.num_chunks)
    if problem:
        raise ProgramError(f"schedule {program.schedule!r} {problem}", hint=hint)
    _verify_order(program.schedule, schedule, groups, program.num_microbatches, program.num_chunks)


@lru_cache(maxsize=256)  # programs are many, schedules of one size few
def _verify_order(name: str, schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> None:
    """Check that no group of devices waits for what another one only does later, and that nothing is left out."""
    listed, begins = listed_tasks(schedule, num_groups, num_microbatches, num_chunks)
    once = np.zeros((num_chunks, len(Pass), num_microbatches), dtype=np.int64)
    once[:, [tuple(Pass).index(kind) for kind in schedule.passes]] = 1
    for group, (chunk, kind, microbatch) in enumerate(np.split(listed, begins[1:-1], axis=1)):
        cells = np.ravel_multi_index((chunk, kind, microbatch), once.shape)
        found = np.bincount(cells, minlength=once.size).reshape(once.shape)
        if (found != once).any():
            lacking = np.argwhere(found < once).tolist()
            missing = sorted(str(Task(tuple(Pass)[number], batch, own)) for own, number, batch in lacking)
            raise ProgramError(
                f"schedule {name!r} does not run every task once; "
                f"group {group} lacks {', '.join(missing[:3]) or 'none'}"
            )
    tasks_of(schedule, num_groups, num_microbatches, num_chunks)
