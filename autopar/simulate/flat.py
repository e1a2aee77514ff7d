"""Every device apart: the check on the hierarchical simulator, which takes one device for all of its stage.

Each device has a clock of its own, its own links, and a speed. Devices of a group on a mesh axis meet for each
collective: it starts when the last of them is there. A device sends to its counterpart in the next stage over its own
link, in the order in which it has something to send. Gradient traffic is fitted into the gaps on the links of each
device, and a bucket is ready, and over, for all devices of its group at once.

Clocks are arrays over devices, so that the effort grows with stages, microbatches and collectives, and slowly with
devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost import Overlap
from autopar.program.records import Program, StageProgram
from autopar.program.verify import verify_program
from autopar.schedule import SCHEDULES, Pass, topological_order
from autopar.sharding import Axis
from autopar.simulate.engine import maker_of, stages_in_time, traffic_of
from autopar.simulate.fitting import Interval, Job, Line
from autopar.simulate.gradients import StageTraffic
from autopar.simulate.hops import hops
from autopar.simulate.layout import Costs, Resource
from autopar.simulate.shares import RowsPart, rows_of
from autopar.simulate.simulation import EVEN, Stragglers
from autopar.simulate.stages import StageLayout, TaskLayout

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Devices:
    """A step of every device; all arrays are (devices,) seconds.

    Attributes:
        step_seconds: From the first forward to the end of the last update of any device, and what is fixed per step.
        compute: Kernels of forward, backward and update.
        ends: When the device has updated its parameters.
    """

    step_seconds: float
    compute: FloatArray
    ends: FloatArray

    @property
    def idle(self) -> FloatArray:
        """Seconds of the step in which no kernel runs."""
        return self.step_seconds - self.compute


class _Clocks:
    """When each device is free, and what it has computed."""

    def __init__(self, factors: FloatArray) -> None:
        self.factors = factors
        self.now = np.zeros(len(factors))
        self.compute = np.zeros(len(factors))

    def run(self, stage: StageProgram, task: TaskLayout, stretch: float, extra: float) -> None:
        """Let the devices of a stage run a task, `stretch` times as long and `extra` seconds longer."""
        first, last = stage.devices
        now, factors = self.now[first:last], stretch * self.factors[first:last]
        for part in task.parts:
            done = 0.0
            for stop in part.layout.stops:
                now += factors * (stop.at - done)
                self.meet(stage, stop.axis)
                now += factors * stop.seconds
                done = stop.at
            paused = sum(stop.seconds for stop in part.layout.stops)
            now += factors * (part.layout.seconds - done - paused)
            self.compute[first:last] += part.layout.compute_seconds
        now += factors * extra

    def meet(self, stage: StageProgram, axis: Axis) -> None:
        """Let the devices of every group of an axis wait for each other."""
        first, last = stage.devices
        self.now[first:last] = _latest(self.now[first:last], stage, axis)


def _latest(times: FloatArray, stage: StageProgram, axis: Axis) -> FloatArray:
    """Return the latest time in the group of each device of a stage."""
    sizes = [each.size for each in stage.mesh.axes]
    index = [each.name for each in stage.mesh.axes].index(axis.name)
    grid = times.reshape(sizes)
    return np.broadcast_to(grid.max(axis=index, keepdims=True), sizes).reshape(-1)


def simulate_flat(
    program: Program, costs: Costs, *, bucket: float | None = None, stragglers: Stragglers = EVEN
) -> Devices:
    """Return one step of a program on every device; arguments and errors as of `simulate`."""
    verify_program(program)
    whole = RowsPart(program, costs, tuple(stage.devices for stage in program.stages))
    parts = [_Part(part, bucket, stragglers) for part in (rows_of(program, costs) if program.shares else [whole])]
    ends: list[FloatArray] = [part.clocks.now for part in parts]
    share = Overlap.of(costs.stack).share
    for number, stage in enumerate(program.stages[: program.num_groups]):
        groups = [part.group(number) for part in parts]
        reduced = _reduced(groups, parts[0].maker, share, [part.sends for part in parts], stage, bool(program.shares))
        for part, group, over in zip(parts, groups, reduced, strict=True):
            part.update(group, over)
    step = max(float((now - part.begin).max()) for now, part in zip(ends, parts, strict=True))
    compute, over = np.zeros(program.num_devices), np.zeros(program.num_devices)
    for part in parts:
        for stage, devices in zip(part.program.stages, part.devices, strict=True):
            compute[slice(*devices)] = part.clocks.compute[slice(*stage.devices)]
            over[slice(*devices)] = part.clocks.now[slice(*stage.devices)]
    return Devices(step + costs.stack["step_seconds"], compute, over)


class _Part:
    """The rows of a share, or all rows of a program, whose passes have run.

    Args:
        part: Their program.
        bucket: As of `simulate`.
        stragglers: As of `simulate`.

    Attributes:
        program: Their program.
        devices: As of `RowsPart`.
        maker: The pass that makes gradients.
        clocks: Of the devices as their program numbers them.
        begin: When the step of each begins.
        sends: Their transfers.
    """

    def __init__(self, part: RowsPart, bucket: float | None, stragglers: Stragglers) -> None:
        self.program = program = part.program
        costs = part.costs
        self.devices = part.devices
        self._stages = stages = stages_in_time(program, costs, bucket)
        stack = costs.stack
        self.maker = maker = maker_of(program)
        self._traffic = traffic = traffic_of(stages, program, costs, bucket)
        count = max(stage.devices[1] for stage in program.stages)
        factors, drawn = np.ones(count), stragglers.factors(max(last for _, last in part.devices))
        for stage, devices in zip(program.stages, part.devices, strict=True):
            factors[slice(*stage.devices)] = drawn[slice(*devices)]
        self.clocks = clocks = _Clocks(factors)
        turns = 1 + (stack["interleave_overhead"] if program.num_chunks > 1 else 0.0)
        self.sends = sends = _Sends(program, costs, count)
        orders, placed = program.orders(), program.groups
        final = max(task.microbatch for order in orders for task in order)
        self._tasks = tasks = [list[tuple[int, Pass, FloatArray, FloatArray]]() for _ in orders]
        for index, task in topological_order(orders, placed):
            stage, (first, last) = program.stages[index], program.stages[index].devices
            arrived = sends.received.pop((index, task.kind, task.microbatch), None)
            if arrived is not None:
                np.maximum(clocks.now[first:last], arrived, out=clocks.now[first:last])
            start = clocks.now[first:last].copy()
            makes = task.kind is maker
            clocks.run(stage, stages[index].passes[task.kind], turns, traffic[index].longer if makes else 0.0)
            if makes and task.microbatch == final:
                clocks.now[first:last] += traffic[index].longest
            tasks[placed[index]].append((task.chunk, task.kind, start, clocks.now[first:last].copy()))
            if task.kind is not Pass.WEIGHT:
                sends.send(index, task.kind, task.microbatch, clocks.now)
        self.begin = np.zeros(count)

    def group(self, number: int) -> "_Group":
        """Return a group of devices, its tasks timed."""
        chunks = self.program.chunks[number]
        return _Group(
            [self.program.stages[stage] for stage in chunks],
            [self._stages[stage] for stage in chunks],
            [self._traffic[stage] for stage in chunks],
            self._tasks[number],
        )

    def update(self, group: "_Group", reduced: FloatArray | None) -> None:
        """Let a group of devices update, once its gradients are reduced."""
        first, last = group.stages[0].devices
        if SCHEDULES[self.program.schedule].steps_overlap:
            self.begin[first:last] = group.tasks[0][2].min()
        if reduced is not None:
            np.maximum(self.clocks.now[first:last], reduced, out=self.clocks.now[first:last])
        for layout, stage in zip(group.layouts, group.stages, strict=True):
            self.clocks.run(stage, layout.update, 1.0, 0.0)


class _Sends:
    """Transfers between stages, device by device.

    Attributes:
        received: When the input of a task is there, by receiving stage, pass and microbatch: (devices of the stage,).
        passing: Per device and link the intervals in which it sends or receives.
    """

    def __init__(self, program: Program, costs: Costs, num_devices: int) -> None:
        self.received: dict[tuple[int, Pass, int], FloatArray] = {}
        self.passing: dict[tuple[int, Resource], list[Interval]] = {}
        self._program = program
        self._free: dict[tuple[int, int], FloatArray] = {}
        self._hops = hops(program, costs)

    def send(self, index: int, kind: Pass, microbatch: int, now: FloatArray) -> None:
        """Send what a stage has made of a microbatch to its neighbour."""
        forward = kind is Pass.FORWARD
        receiver = index + 1 if forward else index - 1
        stages, placed = self._program.stages, self._program.groups
        if not 0 <= receiver < len(stages):
            return
        target, source = stages[receiver], stages[index]
        if placed[receiver] == placed[index]:
            self.received[receiver, kind, microbatch] = now[source.devices[0] : source.devices[1]].copy()
            return
        hop = self._hops[min(index, receiver)]
        way = hop.forward if forward else hop.backward
        key = (placed[index], placed[receiver])
        free = self._free.setdefault(key, np.zeros(len(now)))
        starts = np.maximum(now[way.senders], free[way.senders])
        ends = starts + way.each
        np.maximum.at(free, way.senders, ends)
        arrived = np.zeros(target.num_devices)
        np.maximum.at(arrived, way.receivers - target.devices[0], ends)
        self.received[receiver, kind, microbatch] = arrived
        for sender, getter, tier, start, end in zip(
            way.senders.tolist(),
            way.receivers.tolist(),
            way.tiers.tolist(),
            starts.tolist(),
            ends.tolist(),
            strict=True,
        ):
            for device in (sender, getter):
                link = Resource.INTER if tier else Resource.INTRA
                self.passing.setdefault((device, link), []).append((start, end))


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A group of devices once its tasks are timed: the stages it runs, their layouts and traffic, and its tasks.

    Each task is its chunk, its pass, and when it starts and ends on each device.
    """

    stages: Sequence[StageProgram]
    layouts: Sequence[StageLayout]
    traffic: Sequence[StageTraffic]
    tasks: Sequence[tuple[int, Pass, FloatArray, FloatArray]]


def _reduced(
    groups: Sequence[_Group],
    maker: Pass,
    share: float,
    sends: Sequence[_Sends],
    stage: StageProgram,
    apart: bool,
) -> list[FloatArray | None]:
    """Return, by share of rows, when the gradient traffic of each device of a group is over; None if there is none.

    Args:
        groups: The group, by share of rows.
        maker: The pass that makes gradients.
        share: What of reductions overlaps nothing.
        sends: Transfers, by share of rows.
        stage: A stage of the group with all its rows.
        apart: Whether rows have different shares.
    """
    queues = [_jobs(group, maker, share) for group in groups]
    if not queues[0]:
        return [None] * len(groups)
    lines = []
    for group, queue, own in zip(groups, queues, sends, strict=True):
        first = group.stages[0].devices[0]
        since = min(float(ready.min()) for _, ready in queue)
        lines.append([_lines(group, device - first, device, own, since) for device in range(*group.stages[0].devices)])
    done: list[list[FloatArray]] = [[] for _ in groups]
    # What rows do apart comes first: traffic of all backwards but the last one.
    common = min(map(len, queues)) if not apart else _common(groups, queues, maker)
    for group, queue, links, over in zip(groups, queues, lines, done, strict=True):
        for job, ready in queue[: len(queue) - common]:
            over.append(_fit([group.stages[0]], [job], [_after(ready, over, job)], [links], None)[0])
    for place in range(common, 0, -1):
        jobs = [queue[len(queue) - place] for queue in queues]
        readies = [_after(ready, over, job) for (job, ready), over in zip(jobs, done, strict=True)]
        meets = stage if apart and jobs[0][0].axis in (None, stage.mesh.axes[0]) else None
        stages = [group.stages[0] for group in groups]
        for over, end in zip(done, _fit(stages, [job for job, _ in jobs], readies, lines, meets), strict=True):
            over.append(end)
    return [np.asarray(np.max(over, axis=0)) for over in done]


def _common(groups: Sequence[_Group], queues: Sequence[Sequence[object]], maker: Pass) -> int:
    """Return how many jobs are of the last backward."""
    count = sum(task[1] is maker for task in groups[0].tasks)
    return len(queues[0]) - (count - 1) * len(groups[0].traffic[0].every)


def _after(ready: FloatArray, done: Sequence[FloatArray], job: Job) -> FloatArray:
    """Return when a job may start, after the one whose result it needs."""
    return np.maximum(ready, done[job.after]) if job.after >= 0 else ready


def _fit(
    stages: Sequence[StageProgram],
    jobs: Sequence[Job],
    readies: Sequence[FloatArray],
    lines: Sequence[Sequence[dict[Resource, Line]]],
    whole: StageProgram | None,
) -> list[FloatArray]:
    """Return when a job is over on each device, by share of rows; if `whole` is the stage, its rows meet for it."""
    seconds, axis = [job.seconds for job in jobs], jobs[0].axis
    starts = list(readies)
    if whole is not None:
        seconds = [max(seconds)] * len(jobs)
        starts = _together(starts, whole)
    elif axis is not None:
        starts = [_latest(start, stage, axis) for start, stage in zip(starts, stages, strict=True)]
    ends = [
        np.array([each[job.resource].fit(time, own)[1] for each, time in zip(links, start.tolist(), strict=True)])
        for job, own, links, start in zip(jobs, seconds, lines, starts, strict=True)
    ]
    if whole is not None:
        ends = _together(ends, whole)
    elif axis is not None:
        ends = [_latest(end, stage, axis) for end, stage in zip(ends, stages, strict=True)]
    if axis is not None or whole is not None:
        for job, links, end in zip(jobs, lines, ends, strict=True):
            for each, time in zip(links, end.tolist(), strict=True):
                each[job.resource].free = time
    return ends


def _together(times: Sequence[FloatArray], stage: StageProgram) -> list[FloatArray]:
    """Return the latest time of each device among those of all rows, by share of rows."""
    latest = _latest(np.concatenate(times), stage, stage.mesh.axes[0])
    return np.split(latest, np.cumsum([len(own) for own in times])[:-1])


def _jobs(group: _Group, maker: Pass, share: float) -> list[tuple[Job, FloatArray]]:
    """Return the gradient traffic of a group in order, with when each device is ready for it."""
    makers = [task for task in group.tasks if task[1] is maker]
    final = {task[0]: index for index, task in enumerate(makers)}
    jobs: list[tuple[Job, FloatArray]] = []
    for index, (chunk, _, start, _) in enumerate(makers):
        base, found = len(jobs), group.traffic[chunk]
        for job in found.last if final[chunk] == index else found.every:
            after = base + job.after if job.after >= 0 else -1
            seconds = (1 - share) * job.seconds if job.once else job.seconds
            jobs.append((replace(job, after=after, seconds=seconds), start + job.ready))
    for resource in (Resource.INTRA, Resource.INTER):
        once = [job for each in group.traffic for job in each.last if job.once and job.resource is resource]
        if share and once:
            seconds = share * sum(job.seconds for job in once)
            jobs.append((Job(resource, "what overlaps nothing", 0.0, seconds, -1, True), makers[-1][3]))
    return jobs


def _lines(group: _Group, index: int, device: int, sends: _Sends, since: float) -> dict[Resource, Line]:
    """Return the links of a device, `index` of its stage, with what has them before gradients from `since` on."""
    urgent: dict[Resource, list[Interval]] = {resource: [] for resource in Resource}
    for resource in (Resource.INTRA, Resource.INTER):
        urgent[resource] += [span for span in sends.passing.get((device, resource), []) if span[1] > since]
    blocking = [{kind: list(task.on_links()) for kind, task in layout.passes.items()} for layout in group.layouts]
    for chunk, kind, starts, ends in group.tasks:
        if ends[index] > since:
            begin = float(starts[index])
            for resource, start, end in blocking[chunk][kind]:
                urgent[resource].append((begin + start, begin + end))
    return {resource: Line(np.array(spans).reshape(-1, 2)) for resource, spans in urgent.items()}
