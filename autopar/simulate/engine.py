"""The simulator: a program and a cost model in, a timeline out.

    segments ─ layout ─▶ stages ─ pipeline ─▶ runs ─ gradients ─▶ start of the update ─▶ timeline
                                              runs ─ memory ────────────────────────────▶

Equal blocks are laid out once, and one device stands for all devices of its stage, so the effort depends on the number
of distinct blocks and on stages x microbatches, not on depth or on the number of devices. Stages that are interleaved
on the same devices (a group) are timed together.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from autopar.simulate.fitting import FloatArray, Jobs, fit_in
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
from autopar.simulate.pipeline import PASSES, Runs, Transfer, Transfers, run_pipeline
from autopar.simulate.shares import RowsPart, aligned, fit_jointly, rows_of
from autopar.simulate.simulation import EVEN, Simulation, Stragglers
from autopar.simulate.stages import Layouts, StageLayout, lay_out_stage
from autopar.simulate.step_arrays import step_arrays
from autopar.simulate.timeline import Event, MemorySample, StageTimeline, Timeline


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
    over = float(runs.end[-1])
    gradients = sim.reduced[group] - over
    waits = min(gradients, max(0.0, sim.others[0] - over))  # for rows that have not run their last backward
    return StageTimeline(
        index=moments.chunks[0].index,
        compute_seconds=compute,
        collective_seconds=collective,
        wait_seconds=wait,
        bubble_seconds=bubble + waits + (sim.longest - (sim.ends[group] - sim.begins[group])),
        gradient_seconds=gradients - waits,
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


@dataclass(frozen=True, slots=True)
class _Passes:
    """The passes of a step in time, before its gradients have travelled; by group of devices as in `Simulation`."""

    groups: Sequence[Sequence[StageLayout]]
    boundaries: Sequence[Boundary]
    runs: Sequence[Runs]
    transfers: Transfers
    jobs: Sequence[Jobs]
    busy: Sequence[Mapping[Resource, FloatArray]]
    slower: Sequence[float]
    common: Sequence[int]
    """Jobs of the last backward of each group, the last ones it has."""


def run_step(
    program: Program,
    costs: Costs,
    *,
    bucket: float | None = None,
    stragglers: Stragglers = EVEN,
    stages: Sequence[StageLayout] | None = None,
    traffic: Sequence[StageTraffic] | None = None,
) -> Simulation:
    """Return one step of a lawful program, all of whose rows have equal shares, in time.

    Args:
        program: As of `simulate`.
        costs: As of `simulate`.
        bucket: As of `simulate`.
        stragglers: As of `simulate`.
        stages: The stages in time if they are known.
        traffic: The gradient traffic of every stage in place of its own.
    """
    assert not program.shares, "each share is simulated apart"
    slower = [stragglers.slowest(program.stages[chunks[0]].devices) for chunks in program.chunks]
    passes = _run_passes(program, costs, bucket, slower, stages, traffic)
    times = [fit_in(queue, busy) for queue, busy in zip(passes.jobs, passes.busy, strict=True)]
    return _finished(program, costs, passes, times)


def _run_passes(
    program: Program,
    costs: Costs,
    bucket: float | None,
    slower: Sequence[float],
    stages: Sequence[StageLayout] | None = None,
    traffic: Sequence[StageTraffic] | None = None,
) -> _Passes:
    """Return the passes of a step in time; arguments as of `run_step`."""
    if stages is None:
        stages = stages_in_time(program, costs, bucket)
    placed, stack = program.groups, costs.stack
    groups = [[stages[stage] for stage in chunks] for chunks in program.chunks]
    boundaries = _boundaries(program, costs)
    maker = maker_of(program)
    if traffic is None:
        traffic = traffic_of(stages, program, costs, bucket)
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
    busy = [
        urgent_intervals(chunks, done, passed, float(queue.ready[0])) if len(queue) else {}
        for queue, chunks, done, passed in zip(jobs, groups, runs, passing, strict=True)
    ]
    counts = [int((done.kind == PASSES.index(maker)).sum()) for done in runs]
    common = [
        len(queue) - (count - 1) * len(traffic[chunks[0]].every)
        for queue, count, chunks in zip(jobs, counts, program.chunks, strict=True)
    ]
    return _Passes(groups, boundaries, runs, transfers, jobs, busy, slower, common)


def _finished(
    program: Program,
    costs: Costs,
    passes: _Passes,
    times: Sequence[FloatArray],
) -> Simulation:
    """Return a step whose gradients travel at the given times."""
    runs = passes.runs
    reduced = [float(spans[:, 1].max(initial=done.end[-1])) for done, spans in zip(runs, times, strict=True)]
    ends = [
        start + factor * _update_seconds(chunks)
        for start, factor, chunks in zip(reduced, passes.slower, passes.groups, strict=True)
    ]
    # Where steps overlap, a group's step starts with its first task, and all of them repeat at one and the same pace.
    overlap = SCHEDULES[program.schedule].steps_overlap
    begins = [float(done.start[0]) if overlap else 0.0 for done in runs]
    return Simulation(
        passes.groups,
        passes.boundaries,
        runs,
        passes.transfers,
        passes.jobs,
        times,
        reduced,
        passes.slower,
        begins,
        ends,
        costs.stack["step_seconds"],
    )


def run_shares(
    program: Program, costs: Costs, *, bucket: float | None = None, stragglers: Stragglers = EVEN
) -> list[tuple[RowsPart, Simulation]]:
    """Return one step of a lawful program in time, part by part where rows have different shares.

    Gradients that all rows sum travel when the last part is ready for them.
    """
    if not program.shares:
        whole = RowsPart(program, costs, tuple(stage.devices for stage in program.stages))
        return [(whole, run_step(program, costs, bucket=bucket, stragglers=stragglers))]
    parts = rows_of(program, costs)
    passes = [
        _run_passes(part.program, part.costs, bucket, [stragglers.slowest(devices) for devices in part.devices])
        for part in parts
    ]
    times: list[list[FloatArray]] = [[] for _ in parts]
    jobs: list[list[Jobs]] = [[] for _ in parts]
    for group, stage in enumerate(program.stages):
        common, major = passes[0].common[group], stage.mesh.axes[0].name
        together = aligned([own.jobs[group] for own in passes], common, major)
        fitted = fit_jointly(together, [own.busy[group] for own in passes], common, major)
        for number, spans in enumerate(fitted):
            times[number].append(spans)
            jobs[number].append(together[number])
    sims = [
        _finished(part.program, part.costs, replace(own, jobs=queues), spans)
        for part, own, queues, spans in zip(parts, passes, jobs, times, strict=True)
    ]
    last = max(float(done.end[-1]) for sim in sims for done in sim.runs)
    others = last, max(sim.longest for sim in sims)
    return [(part, replace(sim, others=others)) for part, sim in zip(parts, sims, strict=True)]


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
    parts = run_shares(program, costs, bucket=bucket, stragglers=stragglers)
    memories = BlockMemories(program.table(), program.trains)
    tasks = program.num_microbatches * len(Pass) * sum(len(stage.blocks) for stage in program.stages)
    by_block = trace and tasks <= MOST_MOMENTS
    moments = [_moments(part, sim, memories, by_block=by_block) for part, sim in parts]
    timelines = tuple(
        replace(_account(sim, group, own), index=number * program.num_groups + own.chunks[0].index)
        for number, ((_, sim), each) in enumerate(zip(parts, moments, strict=True))
        for group, own in enumerate(each)
    )
    step = max(sim.step for _, sim in parts)
    error = step_error(costs.stack, costs.cluster)
    held = [[stage.host_bytes for stage in timelines[place:]] for place in range(0, len(timelines), program.num_groups)]
    hosts = [
        fullest_host(part.program, part.costs.cluster, own[: program.num_groups])
        for (part, _), own in zip(parts, held, strict=True)
    ]
    host = max((own for own in hosts if own is not None), key=lambda own: own.bytes / own.usable, default=None)
    measured = None
    if isinstance(costs, CostModel) and costs.prices is not None:
        measured = measured_share(program, costs)
    if not trace:
        return Timeline(
            step,
            timelines,
            error,
            host=host,
            measured=measured,
            stages_per_group=program.num_chunks,
            num_shares=len(parts),
        )
    events: list[Event] = []
    samples: list[MemorySample] = []
    for number, ((part, sim), each) in enumerate(zip(parts, moments, strict=True)):
        first = number * program.num_groups
        events.extend(_at(event, first) for event in _events(part.program, sim))
        samples.extend(
            replace(sample, stage=first + sample.stage)
            for stage, chunks in zip(each, sim.groups, strict=True)
            for sample in stage.samples(chunks)
        )
    sims = [sim for _, sim in parts]
    return Timeline(
        step,
        timelines,
        error,
        tuple(events),
        tuple(samples),
        _path([(part.program, sim) for part, sim in parts]),
        step_arrays(program, sims, samples),
        host,
        track_names([(part.program, part.devices) for part, _ in parts]),
        measured,
        program.num_chunks,
        len(parts),
    )


def _moments(part: RowsPart, sim: Simulation, memories: BlockMemories, *, by_block: bool) -> list[StageMoments]:
    """Return the fullest moments of every group of devices."""
    program = part.program
    return [
        stage_moments(
            [program.stages[stage] for stage in chunks],
            program,
            memories,
            done,
            update_start,
            part.costs.stack.gradients,
            by_block=by_block,
        )
        for chunks, done, update_start in zip(program.chunks, sim.runs, sim.reduced, strict=True)
    ]


def _events(program: Program, sim: Simulation) -> Iterator[Event]:
    """Yield the bars of the trace of a simulated step."""
    placed, held = program.groups, program.chunks
    firsts = [0, *accumulate(len(stage.blocks) for stage in program.stages)]
    yield from (transfer_event(transfer, placed, held) for transfer in sim.transfers)
    for i, chunks in enumerate(sim.groups):
        begins = [firsts[stage] for stage in held[i]]
        yield from task_events(i, chunks, sim.runs[i], begins)
        yield from gradient_events(i, sim.jobs[i], sim.times[i].tolist())
        start = sim.reduced[i]
        for layout, first in zip(chunks, begins, strict=True):
            yield from part_events(i, layout.update.parts, start, first)
            start += layout.update.seconds


def _at(event: Event, first: int) -> Event:
    """Return a bar of a part of the program whose first record is number `first` of the timeline."""
    if not first:
        return event
    receiver = None if event.receiver is None else (first + event.receiver[0], event.receiver[1])
    return replace(event, stage=first + event.stage, receiver=receiver)


def _path(parts: Sequence[tuple[Program, Simulation]]) -> tuple[PathStep, ...]:
    """Return the critical path of a simulated step."""
    tracks, transfers = [], list[Transfer]()
    for number, (program, sim) in enumerate(parts):
        base = number * len(program.stages)
        transfers += [own._replace(sender=base + own.sender, receiver=base + own.receiver) for own in sim.transfers]
        for group, chunks in enumerate(sim.groups):
            stages = [program.stages[stage] for stage in program.chunks[group]]
            tracks.append(
                Track(
                    stages=tuple(base + stage.index for stage in stages),
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
    return critical_path(tracks, transfers, parts[0][1].fixed)
