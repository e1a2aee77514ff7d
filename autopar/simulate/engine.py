"""The simulator: a program and a cost model in, a timeline out.

    segments ─ layout ─▶ stages ─ pipeline ─▶ runs ─ gradients ─▶ start of the update ─▶ timeline
                                              runs ─ memory ────────────────────────────▶

Equal blocks are laid out once, and one device stands for all devices of its stage, so the effort depends on the number
of distinct blocks and on stages x microbatches, not on depth or on the number of devices. Stages that are interleaved
on the same devices (a group) are timed together.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import fsum, inf

from autopar.program.records import Program, Segment, SegmentPhase, StageProgram
from autopar.program.verify import verify_program
from autopar.schedule import SCHEDULES
from autopar.simulate.blocks import BlockMemories
from autopar.simulate.events import gradient_events, part_events, task_events, transfer_event
from autopar.simulate.gradients import Boundary, fit_in, gradient_jobs, transfers_by_group, urgent_intervals
from autopar.simulate.layout import Costs, Resource, lay_out
from autopar.simulate.memory import StageMoments, stage_moments
from autopar.simulate.pipeline import Run, run_pipeline
from autopar.simulate.stages import StageLayout, lay_out_stage
from autopar.simulate.timeline import StageTimeline, Timeline


def _crosses_nodes(sender: StageProgram, receiver: StageProgram, per_node: int) -> bool:
    """Whether any device has its counterpart in the neighbouring stage on another node."""
    count = max(sender.num_devices, receiver.num_devices)
    return any(
        (sender.devices[0] + i * sender.num_devices // count) // per_node
        != (receiver.devices[0] + i * receiver.num_devices // count) // per_node
        for i in range(count)
    )


def _boundaries(program: Program, costs: Costs) -> list[Boundary]:
    """Return what lies between each stage and the next."""
    table = program.table()

    def seconds(segment: Segment | None, crosses: bool) -> float:
        size = fsum(operand.bytes for operand in segment.outputs) if segment else 0.0
        return float(costs.send_seconds(size, crosses))

    boundaries = []
    for sender, receiver in pairwise(program.stages):
        crosses = _crosses_nodes(sender, receiver, costs.cluster.devices_per_node)
        forward = seconds(table[sender.blocks[-1], SegmentPhase.FORWARD], crosses)
        backward = seconds(table.get((receiver.blocks[0], SegmentPhase.BACKWARD)), crosses)
        boundaries.append(Boundary(forward, backward, Resource.INTER if crosses else Resource.INTRA))
    return boundaries


def _idle(runs: Sequence[Run], begin: float) -> tuple[float, float]:
    """Return the seconds a stage waits for values on their way, and for its neighbours."""
    wait, bubble, clock = 0.0, 0.0, begin
    for run in runs:
        gap = run.start - clock
        if gap > 0:
            on_the_way = min(gap, run.start - run.sent)
            wait += on_the_way
            bubble += gap - on_the_way
        clock = run.end
    return wait, bubble


def _account(
    chunks: Sequence[StageLayout],
    runs: Sequence[Run],
    reduced: float,
    traffic: float,
    begin: float,
    end: float,
    moments: StageMoments,
) -> StageTimeline:
    """Return where the step of a group of devices goes, from `begin` to `end`; its reductions end at `reduced`."""
    counts = Counter((run.task.chunk, run.task.kind) for run in runs)
    tasks = [(counts[i, kind], task) for i, layout in enumerate(chunks) for kind, task in layout.passes.items()]
    total = fsum(count * task.seconds for count, task in tasks)
    compute = fsum(count * task.compute_seconds for count, task in tasks)
    update = _update_seconds(chunks)
    computing = fsum(layout.update.compute_seconds for layout in chunks)
    wait, bubble = _idle(runs, begin)
    return StageTimeline(
        index=moments.chunks[0].index,
        compute_seconds=compute,
        collective_seconds=total - compute,
        wait_seconds=wait,
        bubble_seconds=bubble + end - (reduced + update),
        gradient_seconds=reduced - runs[-1].end,
        update_seconds=computing,
        gather_seconds=update - computing,
        overlapped_seconds=traffic,
        memory=moments.peak(),
    )


def _update_seconds(chunks: Sequence[StageLayout]) -> float:
    """Return how long the optimizer takes for all stages of a group of devices, one after the other."""
    return fsum(layout.update.seconds for layout in chunks)


def simulate(program: Program, costs: Costs, *, trace: bool = False) -> Timeline:
    """Return one step of a program in time.

    Args:
        program: The lowered plan.
        costs: Seconds of its ops, collectives and transfers.
        trace: Whether to record the bars of a trace and memory over time.

    Raises:
        ProgramError: If the program breaks a law of programs.
    """
    verify_program(program)
    layouts = {(segment.kind, segment.phase): lay_out(segment, costs) for segment in program.segments}
    stages = [lay_out_stage(stage, layouts) for stage in program.stages]
    num_groups, placed = program.num_groups, program.groups
    groups = [[stages[stage] for stage in chunks] for chunks in program.chunks]
    boundaries = _boundaries(program, costs)
    runs, transfers = run_pipeline(
        program.orders(),
        placed,
        [{kind: task.seconds for kind, task in stage.passes.items()} for stage in stages],
        [boundary.forward_seconds for boundary in boundaries],
        [boundary.backward_seconds for boundary in boundaries],
    )

    jobs = [gradient_jobs(chunks, done) for chunks, done in zip(groups, runs, strict=True)]
    since = min((queue[0].ready for queue in jobs if queue), default=inf)
    passing = transfers_by_group(transfers, boundaries, placed, since)
    times = [
        fit_in(queue, urgent_intervals(chunks, done, passed, queue[0].ready)) if queue else []
        for queue, chunks, done, passed in zip(jobs, groups, runs, passing, strict=True)
    ]
    reduced = [max([done[-1].end, *(end for _, end in spans)]) for done, spans in zip(runs, times, strict=True)]
    # Where steps overlap, a group's step starts with its first task, and all of them repeat at one and the same pace.
    overlap = SCHEDULES[program.schedule].steps_overlap
    begins = [done[0].start if overlap else 0.0 for done in runs]
    step = max(
        end + _update_seconds(chunks) - begin for begin, end, chunks in zip(begins, reduced, groups, strict=True)
    )

    memories = BlockMemories(program.table(), program.trains)
    moments = [
        stage_moments([program.stages[stage] for stage in program.chunks[group]], program, memories, done, update_start)
        for group, (done, update_start) in enumerate(zip(runs, reduced, strict=True))
    ]
    timelines = tuple(
        _account(
            groups[i],
            runs[i],
            reduced[i],
            fsum(job.seconds for job in jobs[i]),
            begins[i],
            begins[i] + step,
            moments[i],
        )
        for i in range(num_groups)
    )
    if not trace:
        return Timeline(step, timelines)
    events = [transfer_event(transfer, placed) for transfer in transfers]
    for i, chunks in enumerate(groups):
        events.extend(task_events(i, chunks, runs[i]))
        events.extend(gradient_events(i, jobs[i], times[i]))
        start = reduced[i]
        for layout in chunks:
            events.extend(part_events(i, layout.update.parts, start))
            start += layout.update.seconds
    samples = tuple(sample for stage in moments for sample in stage.samples())
    return Timeline(step, timelines, tuple(events), samples)
