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
    stages = stages_in_time(program, costs, bucket)
    schedule, stack = SCHEDULES[program.schedule], costs.stack
    maker, traffic = maker_of(program), traffic_of(stages, program, costs, bucket)
    clocks = _Clocks(stragglers.factors(program.num_devices))
    turns = 1 + (stack["interleave_overhead"] if program.num_chunks > 1 else 0.0)
    sends = _Sends(program, costs)
    orders, placed = program.orders(), program.groups
    final = max(task.microbatch for order in orders for task in order)
    tasks: list[list[tuple[int, Pass, FloatArray, FloatArray]]] = [[] for _ in orders]
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
    begin = np.zeros(program.num_devices)
    for number, chunks in enumerate(program.chunks):
        first, last = program.stages[chunks[0]].devices
        if schedule.steps_overlap:
            begin[first:last] = tasks[number][0][2].min()
        group = _Group(
            [program.stages[stage] for stage in chunks],
            [stages[stage] for stage in chunks],
            [traffic[stage] for stage in chunks],
            tasks[number],
        )
        over = _reduced(group, maker, Overlap.of(stack).share, sends)
        if over is not None:
            np.maximum(clocks.now[first:last], over, out=clocks.now[first:last])
        for layout, stage in zip(group.layouts, group.stages, strict=True):
            clocks.run(stage, layout.update, 1.0, 0.0)
    step = float((clocks.now - begin).max()) + stack["step_seconds"]
    return Devices(step, clocks.compute, clocks.now)


class _Sends:
    """Transfers between stages, device by device.

    Attributes:
        received: When the input of a task is there, by receiving stage, pass and microbatch: (devices of the stage,).
        passing: Per device and link the intervals in which it sends or receives.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
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


def _reduced(group: _Group, maker: Pass, share: float, sends: _Sends) -> FloatArray | None:
    """Return when the gradient traffic of each device of a group is over; None if there is none."""
    jobs = _jobs(group, maker, share)
    if not jobs:
        return None
    stage = group.stages[0]
    since = min(float(ready.min()) for _, ready in jobs)
    lines = [_lines(group, device - stage.devices[0], device, sends, since) for device in range(*stage.devices)]
    done: list[FloatArray] = []
    for job, ready in jobs:
        start = np.maximum(ready, done[job.after]) if job.after >= 0 else ready
        if job.axis is not None:
            start = _latest(start, stage, job.axis)
        ends = np.array(
            [each[job.resource].fit(time, job.seconds)[1] for each, time in zip(lines, start.tolist(), strict=True)]
        )
        if job.axis is not None:
            ends = _latest(ends, stage, job.axis)
            for each, end in zip(lines, ends.tolist(), strict=True):
                each[job.resource].free = end
        done.append(ends)
    return np.asarray(np.max(done, axis=0))


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
