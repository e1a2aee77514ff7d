"""The simulator: a program and a cost model in, a timeline out.

    segments ─ layout ─▶ seconds per task ─ pipeline ─▶ runs of every stage ─ gradients ─▶ start of the update ─▶ end

Equal blocks are laid out once, and one device stands for all devices of its stage, so the effort depends on the number
of distinct blocks and on stages x microbatches, not on depth or on the number of devices.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum, inf

from autopar.program.records import Program, Segment, SegmentPhase, StageProgram
from autopar.program.verify import verify_program
from autopar.schedule import SCHEDULES, Pass
from autopar.simulate.gradients import Interval, Job, fit_in
from autopar.simulate.layout import Costs, Layout, Resource, lay_out
from autopar.simulate.memory import TaskMemory, breakdown, memory_over_time, stage_memory
from autopar.simulate.pipeline import Run, Transfer, run_pipeline
from autopar.simulate.timeline import Event, MemoryPeak, MemorySample, Row, StageTimeline, Timeline

Layouts = Mapping[tuple[int, SegmentPhase], Layout]

_PHASE = {Pass.FORWARD: SegmentPhase.FORWARD, Pass.BACKWARD: SegmentPhase.BACKWARD}
_GRADIENT_ROW = {Resource.INTRA: Row.GRADIENTS_INTRA, Resource.INTER: Row.GRADIENTS_INTER}


@dataclass(frozen=True, slots=True)
class Part:
    """A segment within a task: block `index` of the stage runs `layout` from `offset` seconds after the start on."""

    offset: float
    index: int
    phase: SegmentPhase
    layout: Layout


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The tasks of one stage and its update in time.

    Attributes:
        passes: Segments of a forward and of a backward, end to end.
        reduce: Reductions of each block by its index; blocks without any are left out.
        update: Segments of the update, end to end.
    """

    passes: Mapping[Pass, tuple[Part, ...]]
    reduce: Mapping[int, Layout]
    update: tuple[Part, ...]


def _end_to_end(parts: Iterable[tuple[int, SegmentPhase, Layout | None]]) -> tuple[Part, ...]:
    placed = []
    offset = 0.0
    for index, phase, layout in parts:
        if layout is not None:
            placed.append(Part(offset, index, phase, layout))
            offset += layout.seconds
    return tuple(placed)


def _seconds(parts: Sequence[Part]) -> float:
    return parts[-1].offset + parts[-1].layout.seconds if parts else 0.0


def _compute(parts: Sequence[Part]) -> float:
    return fsum(part.layout.compute_seconds for part in parts)


def _stage_layout(stage: StageProgram, layouts: Layouts) -> StageLayout:
    chain = list(enumerate(stage.blocks))

    def backward() -> Iterator[tuple[int, SegmentPhase, Layout | None]]:
        for index, kind in reversed(chain):
            if stage.recompute:
                yield index, SegmentPhase.FORWARD, layouts.get((kind, SegmentPhase.FORWARD))
            yield index, SegmentPhase.BACKWARD, layouts.get((kind, SegmentPhase.BACKWARD))

    def once(phase: SegmentPhase) -> Iterator[tuple[int, SegmentPhase, Layout | None]]:
        return ((index, phase, layouts.get((kind, phase))) for index, kind in chain)

    return StageLayout(
        passes={Pass.FORWARD: _end_to_end(once(SegmentPhase.FORWARD)), Pass.BACKWARD: _end_to_end(backward())},
        reduce={index: layout for index, _, layout in once(SegmentPhase.REDUCE) if layout is not None},
        update=_end_to_end(once(SegmentPhase.UPDATE)),
    )


def _crosses_nodes(sender: StageProgram, receiver: StageProgram, per_node: int) -> bool:
    """Whether any device has its counterpart in the neighbouring stage on another node."""
    count = max(sender.num_devices, receiver.num_devices)
    return any(
        (sender.devices[0] + i * sender.num_devices // count) // per_node
        != (receiver.devices[0] + i * receiver.num_devices // count) // per_node
        for i in range(count)
    )


@dataclass(frozen=True, slots=True)
class _Boundary:
    """Between stage i and stage i + 1: seconds of a transfer each way, and the link it takes."""

    forward: float
    backward: float
    resource: Resource


def _boundaries(program: Program, costs: Costs) -> list[_Boundary]:
    table = program.table()

    def seconds(segment: Segment | None, crosses: bool) -> float:
        return float(
            costs.send_seconds(fsum(operand.bytes for operand in segment.outputs) if segment else 0.0, crosses)
        )

    boundaries = []
    for sender, receiver in pairwise(program.stages):
        crosses = _crosses_nodes(sender, receiver, costs.cluster.devices_per_node)
        forward = seconds(table[sender.blocks[-1], SegmentPhase.FORWARD], crosses)
        backward = seconds(table.get((receiver.blocks[0], SegmentPhase.BACKWARD)), crosses)
        boundaries.append(_Boundary(forward, backward, Resource.INTER if crosses else Resource.INTRA))
    return boundaries


def _gradient_jobs(layout: StageLayout, runs: Sequence[Run]) -> list[Job]:
    """Return the gradient traffic of a stage in order of issue: of each backward, then of the step."""
    parts = layout.passes[Pass.BACKWARD]
    last = max((i for i, run in enumerate(runs) if run.task.kind is Pass.BACKWARD), default=-1)
    jobs: list[Job] = []

    def issue(start: float, what: Layout) -> None:
        base = len(jobs)
        for traffic in what.traffic:
            after = base + traffic.after if traffic.after >= 0 else -1
            jobs.append(Job(traffic.resource, traffic.name, start + traffic.ready, traffic.seconds, after))

    quiet = not any(part.layout.traffic for part in parts)
    for i, run in enumerate(runs):
        if run.task.kind is not Pass.BACKWARD or (quiet and i != last):
            continue
        for part in parts:
            issue(run.start + part.offset, part.layout)
            if i == last and part.phase is SegmentPhase.BACKWARD and part.index in layout.reduce:
                issue(run.start + part.offset + part.layout.seconds, layout.reduce[part.index])
    return jobs


def _transfers_by_stage(
    transfers: Iterable[Transfer], boundaries: Sequence[_Boundary], since: float
) -> list[list[tuple[Resource, Interval]]]:
    """Return, per stage, when which of its links carries a transfer to or from a neighbour, from `since` on."""
    passing: list[list[tuple[Resource, Interval]]] = [[] for _ in range(len(boundaries) + 1)]
    for transfer in transfers:
        if transfer.end > since:
            link = boundaries[min(transfer.sender, transfer.receiver)].resource
            for stage in (transfer.sender, transfer.receiver):
                passing[stage].append((link, (transfer.start, transfer.end)))
    return passing


def _urgent(
    layout: StageLayout, runs: Sequence[Run], transfers: Iterable[tuple[Resource, Interval]], since: float
) -> dict[Resource, list[Interval]]:
    """Return when each link of a stage is taken by what is waited for, from `since` on."""
    busy: dict[Resource, list[Interval]] = {Resource.INTRA: [], Resource.INTER: []}
    for resource, interval in transfers:
        if interval[1] > since:
            busy[resource].append(interval)
    blocking = {
        kind: [
            (span.resource, part.offset + span.offset, part.offset + span.offset + span.seconds)
            for part in parts
            for span in part.layout.spans
            if span.resource is not Resource.COMPUTE
        ]
        for kind, parts in layout.passes.items()
    }
    for run in runs:
        if run.end > since:
            for resource, start, end in blocking[run.task.kind]:
                busy[resource].append((run.start + start, run.start + end))
    return busy


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


@dataclass(frozen=True, slots=True)
class _Memory:
    """Fullest moment of each task of a stage, by the start of the task."""

    stage: StageProgram
    starts: Sequence[float]
    moments: Sequence[TaskMemory]

    @property
    def resident(self) -> float:
        return fsum(part.bytes for part in self.stage.resident)

    def peak(self) -> MemoryPeak:
        """Return the fullest moment, the first of several."""
        sizes = [moment.activations + moment.transient for moment in self.moments]
        highest = sizes.index(max(sizes))
        moment = self.moments[highest]
        during = "update" if moment.task is None else str(moment.task)
        return MemoryPeak(self.resident + sizes[highest], self.starts[highest], during, breakdown(self.stage, moment))

    def samples(self) -> Iterator[MemorySample]:
        resident = self.resident
        for start, moment in zip(self.starts, self.moments, strict=True):
            yield MemorySample(self.stage.index, start, resident + moment.activations + moment.transient)


def _memory(stage: StageProgram, program: Program, runs: Sequence[Run], update_start: float) -> _Memory:
    moments = list(
        memory_over_time(
            stage_memory(stage, program.table(), program.trains), [run.task for run in runs], program.trains
        )
    )
    starts = [run.start for run in runs]
    return _Memory(stage, [*starts, update_start] if program.trains else starts, moments)


def _task_events(stage: int, layout: StageLayout, runs: Sequence[Run]) -> Iterator[Event]:
    """Yield a bar per task, and for the first microbatch also its blocks, their ops and collectives."""
    for run in runs:
        yield Event(stage, Row.COMPUTE, str(run.task), run.start, run.end - run.start)
        if run.task.microbatch == 0:
            yield from _part_events(stage, layout.passes[run.task.kind], run.start)


def _part_events(stage: int, parts: Iterable[Part], start: float) -> Iterator[Event]:
    for part in parts:
        yield Event(stage, Row.COMPUTE, f"{part.phase} of block {part.index}", start + part.offset, part.layout.seconds)
        for span in part.layout.spans:
            row = Row.COMPUTE if span.resource is Resource.COMPUTE else Row.COLLECTIVES
            yield Event(stage, row, span.name, start + part.offset + span.offset, span.seconds)


def _send_event(transfer: Transfer) -> Event:
    row = Row.SEND_NEXT if transfer.receiver > transfer.sender else Row.SEND_PREVIOUS
    return Event(transfer.sender, row, str(transfer.task), transfer.start, transfer.end - transfer.start)


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
    stages = [_stage_layout(stage, layouts) for stage in program.stages]
    schedule = SCHEDULES[program.schedule]
    num_stages = len(stages)
    boundaries = _boundaries(program, costs)
    runs, transfers = run_pipeline(
        [schedule.order(i, num_stages, program.num_microbatches) for i in range(num_stages)],
        [{kind: _seconds(parts) for kind, parts in stage.passes.items()} for stage in stages],
        [boundary.forward for boundary in boundaries],
        [boundary.backward for boundary in boundaries],
    )
    jobs = [_gradient_jobs(layout, done) for layout, done in zip(stages, runs, strict=True)]
    passing = _transfers_by_stage(
        transfers, boundaries, since=min((queue[0].ready for queue in jobs if queue), default=inf)
    )

    events = [_send_event(transfer) for transfer in transfers] if trace else []
    samples: list[MemorySample] = []
    reduced: list[float] = []
    for stage, layout, done, queue in zip(program.stages, stages, runs, jobs, strict=True):
        urgent = _urgent(layout, done, passing[stage.index], queue[0].ready) if queue else {}
        times = fit_in(queue, urgent)
        reduced.append(max([done[-1].end, *(end for _, end in times)]))
        if trace:
            events.extend(_task_events(stage.index, layout, done))
            events.extend(_part_events(stage.index, layout.update, reduced[-1]))
            events.extend(
                Event(stage.index, _GRADIENT_ROW[job.resource], job.name, start, end - start)
                for job, (start, end) in zip(queue, times, strict=True)
            )
    ends = [start + _seconds(layout.update) for start, layout in zip(reduced, stages, strict=True)]
    step = max(ends)

    timelines = []
    for i, (stage, layout, done) in enumerate(zip(program.stages, stages, runs, strict=True)):
        counts = {kind: sum(run.task.kind is kind for run in done) for kind in Pass}
        total = fsum(counts[kind] * _seconds(parts) for kind, parts in layout.passes.items())
        compute = fsum(counts[kind] * _compute(parts) for kind, parts in layout.passes.items())
        wait, bubble = _idle(done)
        update = _compute(layout.update)
        memory = _memory(stage, program, done, reduced[i])
        if trace:
            samples.extend(memory.samples())
        timelines.append(
            StageTimeline(
                index=stage.index,
                compute_seconds=compute,
                collective_seconds=total - compute,
                wait_seconds=wait,
                bubble_seconds=bubble + step - ends[i],
                gradient_seconds=reduced[i] - done[-1].end,
                update_seconds=update,
                gather_seconds=_seconds(layout.update) - update,
                overlapped_seconds=fsum(job.seconds for job in jobs[i]),
                memory=memory.peak(),
            )
        )
    return Timeline(step, tuple(timelines), tuple(events), tuple(samples))
