"""When gradient traffic runs: beside compute, in the gaps the rest of the traffic leaves on the link.

Gradients travel in buckets: those of one collective and one axis wait for each other until they are large enough, or
until the backward is over. Compute never waits for them, only the optimizer does. So the pipeline is timed first, and
this traffic is fitted in afterwards: per link first in, first out, interrupted whenever a collective that compute waits
for, or a transfer between stages, has the link.

What does not overlap whatever the room (`exposed_share` of a stack) is paid where the formula of
`autopar.formulate.step` pays it: of traffic per microbatch in the backward, of reductions after the last one. Both slow
the backward beside which they run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from autopar.cost import Overlap
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.program.records import SegmentPhase
from autopar.schedule import Pass
from autopar.sharding import Axis
from autopar.simulate.layout import Costs, Layout, Resource, Traffic
from autopar.simulate.pipeline import Run, Transfer
from autopar.simulate.stages import StageLayout

Interval = tuple[float, float]
"""Start and end in seconds."""


@dataclass(frozen=True, slots=True)
class Job:
    """A collective to fit in.

    Attributes:
        resource: Its link.
        name: What to call it.
        ready: From when on it may run, in seconds.
        seconds: Time it needs on the link.
        after: Index of an earlier job that has to be done first; -1 if there is none.
        once: Whether it is a reduction of the step, not of one microbatch.
        axis: Over which devices; None if each is on its own.
    """

    resource: Resource
    name: str
    ready: float
    seconds: float
    after: int
    once: bool = False
    axis: Axis | None = None


@dataclass(frozen=True, slots=True)
class Boundary:
    """Between a stage and the next: seconds of a transfer there (activations) and back (gradients), and its link."""

    forward_seconds: float
    backward_seconds: float
    resource: Resource


_Key = tuple[CollectiveKind, Axis, bool, int]
"""What gradients of one bucket have in common.

Collective, axis, whether it is the reduction of a step, and how many collectives their gradients have behind them, so
that no two buckets can wait for each other.
"""


class _Buckets:
    """Gradients of one backward on their way into jobs; times count from its start."""

    def __init__(self, costs: Costs, limit: float) -> None:
        self.jobs: list[Job] = []
        self._costs, self._limit = costs, limit
        self._open: dict[_Key, list[int]] = {}  # numbers of the gradients of a bucket
        self._full: dict[_Key, float] = {}  # its bytes
        self._gradients: list[tuple[Traffic, float, int, _Key]] = []  # what, ready, number of the one it needs, bucket
        self._job: list[int] = []  # job of every gradient; -1 while its bucket is open

    def issue(self, start: float, what: Layout, once: bool) -> None:
        """Add the traffic of a segment that starts at `start`; `once` if it is the reduction of a step."""
        base = len(self._gradients)
        for traffic in what.traffic:
            after = base + traffic.after if traffic.after >= 0 else -1
            hops = self._gradients[after][3][3] + 1 if after >= 0 else 0
            key = (traffic.collective, traffic.axis, once, hops)
            bucket = self._open.setdefault(key, [])
            bucket.append(len(self._gradients))
            self._gradients.append((traffic, start + traffic.ready, after, key))
            self._job.append(-1)
            full = self._full[key] = self._full.get(key, 0.0) + traffic.nbytes
            if full >= self._limit:
                self._close(key)

    def flush(self) -> tuple[Job, ...]:
        """Close all buckets and return the jobs."""
        for key in list(self._open):
            if key in self._open:  # closing one closes those it needs
                self._close(key)
        return tuple(self.jobs)

    def _close(self, key: _Key) -> None:
        collective, axis, once, _ = key
        numbers, total = self._open.pop(key), self._full.pop(key)
        members = [self._gradients[number] for number in numbers]
        for _, _, needed, _ in members:
            if needed >= 0 and self._job[needed] < 0:
                self._close(self._gradients[needed][3])
        traffic = members[0][0]
        seconds, name = traffic.seconds, traffic.name
        if len(members) > 1:
            seconds = float(self._costs.collective_seconds(collective, total, axis))
            name = f"{collective}[{axis.name}] of {len(members)} gradients"
        after = max((self._job[needed] for _, _, needed, _ in members if needed >= 0), default=-1)
        for number in numbers:
            self._job[number] = len(self.jobs)
        self.jobs.append(
            Job(traffic.resource, name, max(ready for _, ready, *_ in members), seconds, after, once, axis)
        )


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """The gradient traffic of the backwards of a stage; times count from the start of a backward.

    Attributes:
        every: Of any backward but the last one.
        last: Of the last backward, with the reductions of the step.
        longer: By how much the traffic makes any backward longer, in seconds.
        longest: By how much it makes the last one longer, besides.
    """

    every: tuple[Job, ...]
    last: tuple[Job, ...]
    longer: float
    longest: float


_PHASE = {Pass.BACKWARD: SegmentPhase.BACKWARD, Pass.WEIGHT: SegmentPhase.WEIGHT}


def stage_traffic(layout: StageLayout, maker: Pass, costs: Costs, bucket: float) -> StageTraffic:
    """Return the gradient traffic of a stage.

    Args:
        layout: What the stage does.
        maker: The pass that makes the gradients: the backward, or what a split leaves of it for later.
        costs: What a bucket takes.
        bucket: Bytes from which on a bucket is full; 0 to let every gradient travel alone.
    """
    every, last = _Buckets(costs, bucket), _Buckets(costs, bucket)
    for part in layout.passes[maker].parts:
        every.issue(part.offset, part.layout, once=False)
        last.issue(part.offset, part.layout, once=False)
        if part.phase is _PHASE[maker] and part.index in layout.reduce:
            last.issue(part.offset + part.layout.seconds, layout.reduce[part.index], once=True)
    jobs = every.flush(), last.flush()
    overlap = Overlap.of(costs.stack)
    gradient = fsum(job.seconds for job in jobs[0])
    passes = fsum(task.seconds for task in layout.passes.values())
    longer = overlap.share * gradient
    longer += (overlap.slowdown - 1) * min(passes, (1 - overlap.share) * gradient)
    return StageTraffic(*jobs, longer, (overlap.slowdown - 1) * _hidden(layout, maker, jobs[1], 1 - overlap.share))


def _hidden(layout: StageLayout, maker: Pass, jobs: Iterable[Job], share: float) -> float:
    """Return the seconds of reductions, `share` of which can overlap, that the last backward has room for."""
    total = fsum(job.seconds for job in jobs if job.once)
    alone = {index: fsum(each.seconds for each in found.traffic) for index, found in layout.reduce.items()}
    scale = share * total / fsum(alone.values()) if total else 0.0  # what buckets make of it
    spent = reduced = late = 0.0
    for part in reversed(layout.passes[maker].parts):  # the first block's backward is the last to end
        if part.phase is _PHASE[maker]:
            reduced += scale * alone.get(part.index, 0.0)
            late = max(late, reduced - spent)
        spent += part.layout.seconds
    return reduced - late


def gradient_jobs(runs: Sequence[Run], maker: Pass, traffic: Sequence[StageTraffic], share: float) -> list[Job]:
    """Return the gradient traffic of a group of devices in order of issue: of each backward, then of the step.

    Args:
        runs: The tasks of the group.
        maker: As of `stage_traffic`.
        traffic: The traffic of each of its stages.
        share: What of the reductions overlaps nothing and runs when all backwards are over.
    """
    backwards = [run for run in runs if run.task.kind is maker]
    final = {run.task.chunk: run for run in backwards}
    jobs: list[Job] = []
    for run in backwards:
        found = traffic[run.task.chunk]
        base = len(jobs)
        for job in found.last if run is final[run.task.chunk] else found.every:
            after = base + job.after if job.after >= 0 else -1
            seconds = (1 - share) * job.seconds if job.once else job.seconds
            jobs.append(Job(job.resource, job.name, run.start + job.ready, seconds, after, job.once, job.axis))
    if share and backwards:
        for resource in (Resource.INTRA, Resource.INTER):
            left = fsum(job.seconds for each in traffic for job in each.last if job.once and job.resource is resource)
            if left:
                jobs.append(Job(resource, "what overlaps nothing", backwards[-1].end, share * left, -1, True))
    return jobs


def transfers_by_group(
    transfers: Iterable[Transfer], boundaries: Sequence[Boundary], groups: Sequence[int], since: float
) -> list[list[tuple[Resource, Interval]]]:
    """Return, per group of devices, when which of its links carries a transfer to or from another, from `since` on."""
    passing: list[list[tuple[Resource, Interval]]] = [[] for _ in set(groups)]
    for transfer in transfers:
        if transfer.end > since:
            link = boundaries[min(transfer.sender, transfer.receiver)].resource
            for stage in (transfer.sender, transfer.receiver):
                passing[groups[stage]].append((link, (transfer.start, transfer.end)))
    return passing


def urgent_intervals(
    chunks: Sequence[StageLayout], runs: Iterable[Run], passing: Iterable[tuple[Resource, Interval]], since: float
) -> dict[Resource, list[Interval]]:
    """Return when each link of a group of devices is taken by what is waited for, from `since` on."""
    busy: dict[Resource, list[Interval]] = {Resource.INTRA: [], Resource.INTER: []}
    for resource, interval in passing:
        busy[resource].append(interval)
    blocking = {
        (chunk, kind): list(task.on_links())
        for chunk, layout in enumerate(chunks)
        for kind, task in layout.passes.items()
    }
    for run in runs:
        if run.end > since:
            for resource, start, end in blocking[run.task.chunk, run.task.kind]:
                busy[resource].append((run.start + start, run.start + end))
    return busy


class Line:
    """A link on which jobs follow each other, whenever nothing more urgent has it.

    Args:
        urgent: When something more urgent has it; intervals may overlap.
    """

    def __init__(self, urgent: Iterable[Interval]) -> None:
        self.free = 0.0
        self._urgent = sorted(urgent)
        self._next = 0

    def fit(self, ready: float, seconds: float) -> Interval:
        """Return when a job of `seconds` runs that may start at `ready`, from its first to its last moment."""
        urgent, i = self._urgent, self._next
        now = max(ready, self.free)
        begin, left = None, seconds
        while True:
            # everything urgent that has started by now comes first
            while i < len(urgent) and urgent[i][0] <= now:
                now = max(now, urgent[i][1])
                i += 1
            begin = now if begin is None else begin
            gap = urgent[i][0] - now if i < len(urgent) else left
            if left <= gap:
                now += left
                break
            left -= gap
            now = urgent[i][0]
        self._next, self.free = i, now
        return begin, now


def fit_in(jobs: Sequence[Job], busy: Mapping[Resource, Iterable[Interval]]) -> list[Interval]:
    """Return when each job runs, from its first to its last moment on the link.

    Args:
        jobs: In the order in which they are issued.
        busy: When each link has something more urgent to do; intervals may overlap.

    >>> fit_in([Job(Resource.INTRA, "a", 1.0, 2.0, -1)], {Resource.INTRA: [(0.0, 1.5), (2.0, 3.0)]})
    [(1.5, 4.5)]
    """
    lines = {resource: Line(busy.get(resource, ())) for resource in Resource}
    done: list[Interval] = []
    for job in jobs:
        ready = max(job.ready, done[job.after][1]) if job.after >= 0 else job.ready
        done.append(lines[job.resource].fit(ready, job.seconds))
    return done
