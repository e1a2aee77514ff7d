"""When gradient traffic runs: beside compute, in the gaps the rest of the traffic leaves on the link.

Gradients travel in buckets: those of one collective and one axis wait for each other until they are large enough, or
until the backward is over; or a plan says where they are cut. Compute never waits for them, only the optimizer does. So
the pipeline is timed first, and
this traffic is fitted in afterwards: per link first in, first out, interrupted whenever a collective that compute waits
for, or a transfer between stages, has the link.

What does not overlap whatever the room (`exposed_share` of a stack) is paid where the formula of
`autopar.formulate.step_time` pays it: of traffic per microbatch in the backward, of reductions after the last one. Both
slow the backward beside which they run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np
from numpy.typing import NDArray

from autopar.cost import Overlap
from autopar.fusion_plan import STEP, BucketCuts
from autopar.program.bucket_order import BucketQueue
from autopar.program.records import SegmentPhase
from autopar.schedule import Pass
from autopar.simulate.fitting import FloatArray, IntArray, Job, Jobs
from autopar.simulate.layout import NETWORK, Costs, Layout, Resource, Traffic
from autopar.simulate.pipeline import PASSES, Runs, Transfers
from autopar.simulate.stages import StageLayout


@dataclass(frozen=True, slots=True)
class Boundary:
    """Between a stage and the next: seconds of a transfer there (activations) and back (gradients), and its link."""

    forward_seconds: float
    backward_seconds: float
    resource: Resource


@dataclass(frozen=True, slots=True)
class Issued:
    """A gradient of the last backward of a stage.

    Attributes:
        traffic: Its collective.
        ready: When it may run if nothing else has the link; from the start of the backward on.
        needed: Number of the gradient that it is made from; -1 if there is none.
        key: What it has in common with those it may share a bucket with, as of `BucketCuts.key`.
        job: The job of its bucket among those of the last backward.
    """

    traffic: Traffic
    ready: float
    needed: int
    key: tuple[str, str, str, int]
    job: int


class _Buckets:
    """Gradients of one backward on their way into jobs; times count from its start.

    A bucket of a plan is issued with its last gradient, and no sooner than those that made what it reduces further.

    Args:
        costs: What a bucket takes.
        limit: Bytes from which on a bucket is full, as of `full_bucket`.
        cuts: Where gradients are cut into buckets; those not named follow the limit.
    """

    def __init__(self, costs: Costs, limit: float | None, cuts: Iterable[BucketCuts] = ()) -> None:
        self.jobs: list[Job] = []
        self._costs = costs
        self._queue = BucketQueue(limit, cuts)
        self._gradients: list[tuple[Traffic, float, int]] = []  # what, ready, number of the one it needs
        self._job: list[int] = []  # job of every gradient; -1 until its bucket is issued

    def issue(self, start: float, what: Layout, once: bool) -> None:
        """Add the traffic of a segment that starts at `start`; `once` if it is the reduction of a step."""
        base = len(self._gradients)
        for traffic in what.traffic:
            after = base + traffic.after if traffic.after >= 0 else -1
            self._gradients.append((traffic, start + traffic.ready, after))
            self._job.append(-1)
            added = self._queue.add(traffic.collective, traffic.axis, traffic.nbytes, once=once, after=after)
            for numbers in added:
                self._put(numbers)

    def flush(self) -> Jobs:
        """Close all buckets and return the jobs."""
        for numbers in self._queue.flush():
            self._put(numbers)
        return Jobs.of(self.jobs)

    def issued(self) -> tuple[Issued, ...]:
        """Return the gradients in order, once all buckets are closed."""
        return tuple(
            Issued(traffic, ready, needed, self._queue.key(number), job)
            for number, ((traffic, ready, needed), job) in enumerate(zip(self._gradients, self._job, strict=True))
        )

    def _put(self, numbers: Sequence[int]) -> None:
        """Add the job of a bucket."""
        key, members = self._queue.key(numbers[0]), [self._gradients[number] for number in numbers]
        traffic = members[0][0]
        seconds, name = traffic.seconds, traffic.name
        if len(members) > 1:
            total = fsum(own.nbytes for own, *_ in members)
            seconds = float(self._costs.collective_seconds(traffic.collective, total, traffic.axis))
            name = f"{traffic.collective}[{traffic.axis.name}] of {len(members)} gradients"
        after = max((self._job[needed] for *_, needed in members if needed >= 0), default=-1)
        for number in numbers:
            self._job[number] = len(self.jobs)
        ready = max(ready for _, ready, _ in members)
        self.jobs.append(Job(traffic.resource, name, ready, seconds, after, key[2] == STEP, traffic.axis, key))


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """The gradient traffic of the backwards of a stage; times count from the start of a backward.

    Attributes:
        every: Of any backward but the last one.
        last: Of the last backward, with the reductions of the step.
        issued: The gradients of the last backward in order.
        longer: By how much the traffic makes any backward longer, in seconds.
        longest: By how much it makes the last one longer, besides.
    """

    every: Jobs
    last: Jobs
    issued: tuple[Issued, ...]
    longer: float
    longest: float


_PHASE = {Pass.BACKWARD: SegmentPhase.BACKWARD, Pass.WEIGHT: SegmentPhase.WEIGHT}


def stage_traffic(
    layout: StageLayout, maker: Pass, costs: Costs, bucket: float | None, cuts: Sequence[BucketCuts] = ()
) -> StageTraffic:
    """Return the gradient traffic of a stage.

    Args:
        layout: What the stage does.
        maker: The pass that makes the gradients: the backward, or what a split leaves of it for later.
        costs: What a bucket takes.
        bucket: Bytes from which on a bucket is full, as of `full_bucket`.
        cuts: Buckets of the plan; a `bucket` that is stated overrides them.
    """
    own = cuts if bucket is None else ()
    every, last = _Buckets(costs, bucket, own), _Buckets(costs, bucket, own)
    for part in layout.passes[maker].parts:
        every.issue(part.offset, part.layout, once=False)
        last.issue(part.offset, part.layout, once=False)
        if part.phase is _PHASE[maker] and part.index in layout.reduce:
            last.issue(part.offset + part.layout.seconds, layout.reduce[part.index], once=True)
    jobs = every.flush(), last.flush()
    overlap = Overlap.of(costs.stack)
    gradient = fsum(jobs[0].seconds.tolist())
    passes = fsum(task.seconds for task in layout.passes.values())
    longer = overlap.share * gradient
    longer += (overlap.slowdown - 1) * min(passes, (1 - overlap.share) * gradient)
    return StageTraffic(
        *jobs, last.issued(), longer, (overlap.slowdown - 1) * _hidden(layout, maker, jobs[1], 1 - overlap.share)
    )


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


def gradient_jobs(runs: Runs, maker: Pass, traffic: Sequence[StageTraffic], share: float) -> Jobs:
    """Return the gradient traffic of a group of devices in order of issue: of each backward, then of the step.

    Args:
        runs: The tasks of the group.
        maker: As of `stage_traffic`.
        traffic: The traffic of each of its stages.
        share: What of the reductions overlaps nothing and runs when all backwards are over.
    """
    makers, is_last = making(runs, maker)
    parts = [part for each in traffic for part in (each.every, each.last)]
    jobs = Jobs.joined(parts, runs.start[makers], 2 * runs.chunk[makers] + is_last)
    if not share or not len(jobs):
        return jobs
    seconds = np.where(jobs.each(lambda job: job.once), (1 - share) * jobs.seconds, jobs.seconds)
    rest = []
    for resource in NETWORK:
        left = fsum(job.seconds for each in traffic for job in each.last if job.once and job.resource is resource)
        if left:
            over = float(runs.end[makers[-1]])
            rest.append(Job(resource, "what overlaps nothing", over, share * left, -1, True))
    return Jobs.joined([replace(jobs, seconds=seconds), Jobs.of(rest)], np.zeros(2), np.arange(2))


def making(runs: Runs, maker: Pass) -> tuple[IntArray, NDArray[np.bool_]]:
    """Return the numbers of the tasks of a group that make gradients, and which of them are the last ones of a stage.

    Args:
        runs: The tasks of the group.
        maker: As of `stage_traffic`.
    """
    makers = np.flatnonzero(runs.kind == PASSES.index(maker))
    chunks = runs.chunk[makers]
    is_last = np.zeros(len(makers), dtype=np.bool_)
    final = np.zeros(chunks.max(initial=0) + 1, dtype=np.int64)
    final[chunks] = np.arange(len(makers))  # of equal indices the last one counts
    is_last[final[np.unique(chunks)]] = True
    return makers, is_last


Busy = Mapping[Resource, FloatArray]
"""When each link is taken: starts and ends, (intervals, 2)."""


def transfers_by_group(
    transfers: Transfers, boundaries: Sequence[Boundary], groups: Sequence[int], since: float
) -> list[Busy]:
    """Return, per group of devices, when its links carry transfers to or from another group, from `since` on."""
    late = np.flatnonzero(transfers.end > since)
    sender, receiver = transfers.sender[late], transfers.receiver[late]
    spans = np.stack([transfers.start[late], transfers.end[late]], axis=1)
    on = np.array([NETWORK.index(boundary.resource) for boundary in boundaries], dtype=np.int64)
    link, placed = on[np.minimum(sender, receiver)], np.asarray(groups)
    ends = [placed[sender], placed[receiver]]
    return [
        {
            resource: np.concatenate([spans[(end == group) & (link == number)] for end in ends])
            for number, resource in enumerate(NETWORK)
        }
        for group in range(max(groups) + 1)
    ]


def urgent_intervals(chunks: Sequence[StageLayout], runs: Runs, passing: Busy, since: float) -> Busy:
    """Return when each link of a group of devices is taken by what is waited for, from `since` on, (intervals, 2)."""
    busy: dict[Resource, list[FloatArray]] = {link: [passing.get(link, np.zeros((0, 2)))] for link in NETWORK}
    is_late = runs.end > since
    for chunk, layout in enumerate(chunks):
        for number, kind in enumerate(PASSES):
            taken = list(layout.passes[kind].on_links())
            if not taken:
                continue
            starts = runs.start[is_late & (runs.chunk == chunk) & (runs.kind == number)]
            for link in NETWORK:
                own = np.array([(start, end) for resource, start, end in taken if resource is link]).reshape(-1, 2)
                busy[link].append((starts[:, None, None] + own).reshape(-1, 2))
    return {link: np.concatenate(parts) for link, parts in busy.items()}
