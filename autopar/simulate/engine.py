"""The simulator: a program and a cost model in, a timeline out.

    segments ─ layout ─▶ stages ─ pipeline ─▶ runs ─ gradients ─▶ start of the update ─▶ timeline
                                              runs ─ memory ────────────────────────────▶

Equal blocks are laid out once, and one device stands for all devices of its stage, so the effort depends on the number
of distinct blocks and on stages x microbatches, not on depth or on the number of devices. Stages that are interleaved
on the same devices (a group) are timed together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import fsum, inf

import numpy as np

from autopar.cluster import Cluster
from autopar.cost import CostModel, Overlap
from autopar.cost.nearest import step_error
from autopar.program.hosted import host_update
from autopar.program.records import Program, Segment, SegmentPhase, StageProgram
from autopar.program.verify import verify_program
from autopar.schedule import SCHEDULES, Pass
from autopar.schedule.timing import tasks_of
from autopar.simulate.blocks import BlockMemories
from autopar.simulate.events import gradient_events, part_events, task_events, track_names, transfer_event
from autopar.simulate.fitting import fit_in
from autopar.simulate.gradients import (
    Boundary,
    StageTraffic,
    gradient_jobs,
    stage_traffic,
    transfers_by_group,
    urgent_intervals,
)
from autopar.simulate.hops import hops
from autopar.simulate.layout import Costs, Layout, Resource, lay_out, lay_out_host_update
from autopar.simulate.measured_share import measured_share
from autopar.simulate.memory import StageMoments, fullest_host, stage_moments
from autopar.simulate.path import PathStep, Track, critical_path
from autopar.simulate.pipeline import PASSES, Runs, run_pipeline
from autopar.simulate.simulation import EVEN, Simulation, Stragglers
from autopar.simulate.stages import Layouts, StageLayout, lay_out_stage
from autopar.simulate.step_arrays import step_arrays
from autopar.simulate.timeline import StageTimeline, Timeline


def _boundaries(program: Program, costs: Costs) -> list[Boundary]:
    """Return what lies between each stage and the next."""
    return [
        Boundary(
            hop.forward.seconds,
            hop.backward.seconds,
            Resource.INTER if Resource.INTER in (hop.forward.resource, hop.backward.resource) else Resource.INTRA,
        )
        for hop in hops(program, costs)
    ]


def scheduled(program: Program, costs: Costs) -> Costs:
    """Return the costs of a program under its schedule."""
    return costs.overlapped() if SCHEDULES[program.schedule].hides_dispatch else costs


def stages_in_time(program: Program, costs: Costs, bucket: float | None) -> list[StageLayout]:
    """Return the stages in time; equal stages on equal devices are one and the same object.

    Segments are laid out once for all stages that work on equal devices.
    """
    costs = scheduled(program, costs)
    segments: dict[int, list[Segment]] = {}
    for segment in program.segments:
        segments.setdefault(segment.kind, []).append(segment)
    layouts: dict[Cluster, dict[tuple[int, SegmentPhase], Layout]] = {}
    laid_out: dict[Cluster, set[int]] = {}
    known: dict[object, StageLayout] = {}
    stages = []
    for stage in program.stages:
        view = costs.on(range(*stage.devices))
        here = layouts.setdefault(view.cluster, {})
        for kind in set(stage.blocks) - laid_out.setdefault(view.cluster, set()):
            laid_out[view.cluster].add(kind)
            here |= {(kind, segment.phase): lay_out(segment, view, bucket) for segment in segments.get(kind, ())}
        key = (view.cluster, stage.blocks, stage.recompute, stage.hosted_blocks, stage.hosted_copies, stage.what)
        if key not in known:
            known[key] = lay_out_stage(stage, here, view, _on_host(stage, segments, here, view))
        stages.append(known[key])
    return stages


def _on_host(
    stage: StageProgram, segments: Mapping[int, Sequence[Segment]], layouts: Layouts, costs: Costs
) -> dict[int, Layout]:
    """Return the updates that the host of a stage runs, by kind of block."""
    if not stage.hosted or not stage.state_kind.updates_there:
        return {}
    found = {}
    for kind in {kind for kind, away in zip(stage.blocks, stage.hosted_blocks, strict=True) if away}:
        own = {segment.phase: segment for segment in segments.get(kind, ())}
        if SegmentPhase.UPDATE in own:
            update = host_update(own[SegmentPhase.UPDATE], own)
            found[kind] = lay_out_host_update(layouts[kind, SegmentPhase.UPDATE], update, costs)
    return found


def maker_of(program: Program) -> Pass:
    """Return the pass that makes gradients."""
    return Pass.WEIGHT if SCHEDULES[program.schedule].splits else Pass.BACKWARD


def traffic_of(
    stages: Sequence[StageLayout], program: Program, costs: Costs, bucket: float | None
) -> list[StageTraffic]:
    """Return the gradient traffic of every stage."""
    maker, costs = maker_of(program), scheduled(program, costs)
    known: dict[object, StageTraffic] = {}
    found = []
    for layout, stage in zip(stages, program.stages, strict=True):
        key = (id(layout), stage.buckets)
        if key not in known:
            known[key] = stage_traffic(layout, maker, costs.on(range(*stage.devices)), bucket, stage.buckets)
        found.append(known[key])
    return found


MOST_MOMENTS = 60_000
"""Moments of memory over time, by block, up to which a trace has them; more are told by task, for the page's sake."""
_ROUNDING = 1e-12
"""Share of a step below which a sum of its parts is nothing but rounding."""


def _idle(runs: Runs, begin: float) -> tuple[float, float]:
    """Return the seconds a stage waits for values on their way, and for its neighbours."""
    gaps = np.maximum(0.0, runs.start - np.concatenate([[begin], runs.end[:-1]]))
    waits = np.minimum(gaps, runs.start - runs.sent)
    return fsum(waits.tolist()), fsum((gaps - waits).tolist())


def _account(sim: Simulation, group: int, moments: StageMoments) -> StageTimeline:
    """Return where the step of a group of devices goes."""
    chunks, runs = sim.groups[group], sim.runs[group]
    counts = [dict(zip(PASSES, row, strict=True)) for row in runs.counts(len(chunks)).tolist()]
    tasks = [(own[kind], layout.passes[kind]) for own, layout in zip(counts, chunks, strict=True) for kind in PASSES]
    compute = fsum(count * task.compute_seconds for count, task in tasks)
    collective = fsum(count * task.collective_seconds for count, task in tasks)
    copies = fsum(count * task.copy_seconds for count, task in tasks)
    waited = fsum(layout.update.copy_seconds for layout in chunks)
    by_axis: defaultdict[str, float] = defaultdict(float)
    for count, task in tasks:
        for axis, seconds in task.axis_seconds.items():
            by_axis[axis] += count * seconds
    update = _update_seconds(chunks)
    computing = fsum(layout.update.compute_seconds for layout in chunks)
    wait, bubble = _idle(runs, sim.begins[group])
    late = fsum((runs.end - runs.start).tolist()) - compute - collective - copies
    late += (sim.slower[group] - 1) * update + sim.fixed
    late = late if late > _ROUNDING * sim.step else 0.0
    return StageTimeline(
        index=moments.chunks[0].index,
        compute_seconds=compute,
        collective_seconds=collective,
        wait_seconds=wait,
        bubble_seconds=bubble + (sim.longest - (sim.ends[group] - sim.begins[group])),
        gradient_seconds=sim.reduced[group] - float(runs.end[-1]),
        update_seconds=computing,
        gather_seconds=fsum(layout.update.collective_seconds for layout in chunks),
        delay_seconds=late,
        overlapped_seconds=fsum(sim.jobs[group].seconds.tolist()),
        link_seconds=fsum(count * task.link_seconds for count, task in tasks),
        memory=moments.peak(),
        copy_seconds=copies + waited,
        host_link_seconds=fsum(count * task.host_link_seconds for count, task in tasks)
        + fsum(layout.update.host_link_seconds for layout in chunks),
        host_bytes=moments.host_bytes,
        again_seconds=fsum(
            own[Pass.BACKWARD] * chunk.passes[Pass.BACKWARD].again_seconds
            for own, chunk in zip(counts, chunks, strict=True)
        ),
        axis_seconds=tuple(sorted(by_axis.items())),
    )


def _update_seconds(chunks: Sequence[StageLayout]) -> float:
    """Return how long the optimizer takes for all stages of a group of devices, one after the other."""
    return fsum(layout.update.seconds for layout in chunks)


def run_step(
    program: Program,
    costs: Costs,
    *,
    bucket: float | None = None,
    stragglers: Stragglers = EVEN,
    stages: Sequence[StageLayout] | None = None,
    traffic: Sequence[StageTraffic] | None = None,
) -> Simulation:
    """Return one step of a lawful program in time.

    Args:
        program: As of `simulate`.
        costs: As of `simulate`.
        bucket: As of `simulate`.
        stragglers: As of `simulate`.
        stages: The stages in time if they are known.
        traffic: The gradient traffic of every stage in place of its own.
    """
    if stages is None:
        stages = stages_in_time(program, costs, bucket)
    placed, stack = program.groups, costs.stack
    groups = [[stages[stage] for stage in chunks] for chunks in program.chunks]
    boundaries = _boundaries(program, costs)
    maker = maker_of(program)
    if traffic is None:
        traffic = traffic_of(stages, program, costs, bucket)
    slower = [stragglers.slowest(program.stages[chunks[0]].devices) for chunks in program.chunks]
    turns = 1 + (stack["interleave_overhead"] if program.num_chunks > 1 else 0.0)
    factors = [slower[group] * turns for group in placed]
    runs, transfers = run_pipeline(
        tasks_of(SCHEDULES[program.schedule], program.num_groups, program.num_microbatches, program.num_chunks),
        placed,
        [
            {
                kind: factor * (task.seconds + (beside.longer if kind is maker else 0.0))
                for kind, task in stage.passes.items()
            }
            for stage, beside, factor in zip(stages, traffic, factors, strict=True)
        ],
        [boundary.forward_seconds for boundary in boundaries],
        [boundary.backward_seconds for boundary in boundaries],
        [beside.longest for beside in traffic],
    )
    share = Overlap.of(stack).share
    jobs = [
        gradient_jobs(done, maker, [traffic[stage] for stage in chunks], share)
        for done, chunks in zip(runs, program.chunks, strict=True)
    ]
    since = min((float(queue.ready[0]) for queue in jobs if len(queue)), default=inf)
    passing = transfers_by_group(transfers, boundaries, placed, since)
    times = [
        fit_in(queue, urgent_intervals(chunks, done, passed, float(queue.ready[0])) if len(queue) else {})
        for queue, chunks, done, passed in zip(jobs, groups, runs, passing, strict=True)
    ]
    reduced = [float(spans[:, 1].max(initial=done.end[-1])) for done, spans in zip(runs, times, strict=True)]
    ends = [
        start + factor * _update_seconds(chunks) for start, factor, chunks in zip(reduced, slower, groups, strict=True)
    ]
    # Where steps overlap, a group's step starts with its first task, and all of them repeat at one and the same pace.
    overlap = SCHEDULES[program.schedule].steps_overlap
    begins = [float(done.start[0]) if overlap else 0.0 for done in runs]
    fixed = stack["step_seconds"]
    return Simulation(groups, boundaries, runs, transfers, jobs, times, reduced, slower, begins, ends, fixed)


def simulate(
    program: Program,
    costs: Costs,
    *,
    trace: bool = False,
    bucket: float | None = None,
    stragglers: Stragglers = EVEN,
    verified: bool = False,
) -> Timeline:
    """Return one step of a program in time.

    Args:
        program: The lowered plan.
        costs: Seconds of its ops, collectives and transfers.
        trace: Whether to record the bars of a trace and memory over time.
        bucket: Bytes of gradients that travel together, 0 if every gradient travels alone; None for the buckets of the
            plan, else 25 MB, or 2 MB per device of a group where that is more.
        stragglers: How much slower than the others devices are.
        verified: Whether the program is known to keep the laws of programs, so that they need not be checked again.

    Raises:
        ProgramError: If the program breaks a law of programs.
    """
    if not verified:
        verify_program(program)
    sim = run_step(program, costs, bucket=bucket, stragglers=stragglers)
    memories = BlockMemories(program.table(), program.trains)
    tasks = program.num_microbatches * len(Pass) * sum(len(stage.blocks) for stage in program.stages)
    moments = [
        stage_moments(
            [program.stages[stage] for stage in chunks],
            program,
            memories,
            done,
            update_start,
            costs.stack.gradients,
            by_block=trace and tasks <= MOST_MOMENTS,
        )
        for chunks, done, update_start in zip(program.chunks, sim.runs, sim.reduced, strict=True)
    ]
    timelines = tuple(_account(sim, group, moments[group]) for group in range(program.num_groups))
    error = step_error(costs.stack, costs.cluster)
    host = fullest_host(program, costs.cluster, [stage.host_bytes for stage in timelines])
    measured = None
    if isinstance(costs, CostModel) and costs.prices is not None:
        measured = measured_share(program, costs)
    if not trace:
        return Timeline(sim.step, timelines, error, host=host, measured=measured, stages_per_group=program.num_chunks)
    placed, held = program.groups, program.chunks
    firsts = [0, *accumulate(len(stage.blocks) for stage in program.stages)]
    events = [transfer_event(transfer, placed, held) for transfer in sim.transfers]
    for i, chunks in enumerate(sim.groups):
        begins = [firsts[stage] for stage in held[i]]
        events.extend(task_events(i, chunks, sim.runs[i], begins))
        events.extend(gradient_events(i, sim.jobs[i], sim.times[i].tolist()))
        start = sim.reduced[i]
        for layout, first in zip(chunks, begins, strict=True):
            events.extend(part_events(i, layout.update.parts, start, first))
            start += layout.update.seconds
    samples = tuple(
        sample for stage, chunks in zip(moments, sim.groups, strict=True) for sample in stage.samples(chunks)
    )
    arrays = step_arrays(program, sim, samples)
    path, tracks = _path(program, sim), track_names(program)
    return Timeline(
        sim.step, timelines, error, tuple(events), samples, path, arrays, host, tracks, measured, program.num_chunks
    )


def _path(program: Program, sim: Simulation) -> tuple[PathStep, ...]:
    """Return the critical path of a simulated step."""
    tracks = []
    for group, chunks in enumerate(sim.groups):
        stages = [program.stages[stage] for stage in program.chunks[group]]
        tracks.append(
            Track(
                stages=tuple(stage.index for stage in stages),
                blocks=tuple(stage.blocks for stage in stages),
                runs=sim.runs[group],
                passes=[chunks[run.task.chunk].passes[run.task.kind] for run in sim.runs[group]],
                jobs=sim.jobs[group],
                times=sim.times[group].tolist(),
                reduced=sim.reduced[group],
                update=[chunk.update for chunk in chunks],
                end=sim.ends[group],
            )
        )
    return critical_path(tracks, sim.transfers, sim.fixed)
