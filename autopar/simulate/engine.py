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

from autopar.cluster import Cluster
from autopar.program.records import Program, Segment, SegmentPhase, StageProgram
from autopar.program.verify import verify_program
from autopar.simulate.events import gradient_events, part_events, task_events, transfer_event
from autopar.simulate.gradients import Boundary, fit_in, gradient_jobs, transfers_by_group, urgent_intervals
from autopar.simulate.layout import Costs, Resource, lay_out
from autopar.simulate.memory import StageMoments, stage_moments
from autopar.simulate.pipeline import Run, run_pipeline
from autopar.simulate.stages import Layouts, StageLayout, lay_out_stage
from autopar.simulate.timeline import StageTimeline, Timeline


def _tier(sender: StageProgram, receiver: StageProgram, cluster: Cluster) -> int:
    """Return the widest tier on which any device meets its counterpart in the neighbouring stage."""
    count = max(sender.num_devices, receiver.num_devices)
    pairs = (
        (
            sender.devices[0] + i * sender.num_devices // count,
            receiver.devices[0] + i * receiver.num_devices // count,
        )
        for i in range(count)
    )
    return max(cluster.tier(first, second) for first, second in pairs)


def _boundaries(program: Program, costs: Costs) -> list[Boundary]:
    """Return what lies between each stage and the next."""
    table = program.table()

    def seconds(segment: Segment | None, tier: int, view: Costs) -> float:
        size = fsum(operand.bytes for operand in segment.outputs) if segment else 0.0
        return float(view.send_seconds(size, tier))

    boundaries = []
    for sender, receiver in pairwise(program.stages):
        tier = _tier(sender, receiver, costs.cluster)
        ends = (*sender.devices, *receiver.devices)
        view = costs.on(range(min(ends), max(ends)))
        forward = seconds(table[sender.blocks[-1], SegmentPhase.FORWARD], tier, view)
        backward = seconds(table.get((receiver.blocks[0], SegmentPhase.BACKWARD)), tier, view)
        boundaries.append(Boundary(forward, backward, Resource.INTER if tier else Resource.INTRA))
    return boundaries


def _stages(program: Program, costs: Costs) -> list[StageLayout]:
    """Return the stages in time; segments are laid out once for all stages that work on equal devices."""
    layouts: dict[Cluster, Layouts] = {}
    stages = []
    for stage in program.stages:
        view = costs.on(range(*stage.devices))
        if view.cluster not in layouts:
            layouts[view.cluster] = {
                (segment.kind, segment.phase): lay_out(segment, view) for segment in program.segments
            }
        stages.append(lay_out_stage(stage, layouts[view.cluster]))
    return stages


def _idle(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the seconds a stage waits for values on their way, and for its neighbours."""
    wait = bubble = clock = 0.0
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
    step: float,
    moments: StageMoments,
) -> StageTimeline:
    """Return where the step of a group of devices goes; its reductions end at `reduced`, all groups at `step`."""
    counts = Counter((run.task.chunk, run.task.kind) for run in runs)
    tasks = [(counts[i, kind], task) for i, layout in enumerate(chunks) for kind, task in layout.passes.items()]
    total = fsum(count * task.seconds for count, task in tasks)
    compute = fsum(count * task.compute_seconds for count, task in tasks)
    update = _update_seconds(chunks)
    computing = fsum(layout.update.compute_seconds for layout in chunks)
    wait, bubble = _idle(runs)
    return StageTimeline(
        index=moments.chunks[0].index,
        compute_seconds=compute,
        collective_seconds=total - compute,
        wait_seconds=wait,
        bubble_seconds=bubble + step - (reduced + update),
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
    stages = _stages(program, costs)
    num_groups = program.num_groups
    groups = [stages[group::num_groups] for group in range(num_groups)]
    boundaries = _boundaries(program, costs)
    runs, transfers = run_pipeline(
        program.orders(),
        [{kind: task.seconds for kind, task in stage.passes.items()} for stage in stages],
        [boundary.forward_seconds for boundary in boundaries],
        [boundary.backward_seconds for boundary in boundaries],
    )

    jobs = [gradient_jobs(chunks, done) for chunks, done in zip(groups, runs, strict=True)]
    since = min((queue[0].ready for queue in jobs if queue), default=inf)
    passing = transfers_by_group(transfers, boundaries, num_groups, since)
    times = [
        fit_in(queue, urgent_intervals(chunks, done, passed, queue[0].ready)) if queue else []
        for queue, chunks, done, passed in zip(jobs, groups, runs, passing, strict=True)
    ]
    reduced = [max([done[-1].end, *(end for _, end in spans)]) for done, spans in zip(runs, times, strict=True)]
    step = max(start + _update_seconds(chunks) for start, chunks in zip(reduced, groups, strict=True))

    moments = [
        stage_moments(program.stages[group::num_groups], program, done, update_start)
        for group, (done, update_start) in enumerate(zip(runs, reduced, strict=True))
    ]
    timelines = tuple(
        _account(groups[i], runs[i], reduced[i], fsum(job.seconds for job in jobs[i]), step, moments[i])
        for i in range(num_groups)
    )
    if not trace:
        return Timeline(step, timelines)
    events = [transfer_event(transfer, num_groups) for transfer in transfers]
    for i, chunks in enumerate(groups):
        events.extend(task_events(i, chunks, runs[i]))
        events.extend(gradient_events(i, jobs[i], times[i]))
        start = reduced[i]
        for layout in chunks:
            events.extend(part_events(i, layout.update.parts, start))
            start += layout.update.seconds
    samples = tuple(sample for stage in moments for sample in stage.samples())
    return Timeline(step, timelines, tuple(events), samples)
