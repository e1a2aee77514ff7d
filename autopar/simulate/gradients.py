"""When gradient traffic runs: beside compute, in the gaps the rest of the traffic leaves on the link.

Compute never waits for it, only the optimizer does. So the pipeline is timed first, and this traffic is fitted in
afterwards: per link first in, first out, interrupted whenever a collective that compute waits for, or a transfer
between stages, has the link.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.program.records import SegmentPhase
from autopar.schedule import Pass
from autopar.simulate.layout import Layout, Resource
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
    """

    resource: Resource
    name: str
    ready: float
    seconds: float
    after: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Between a stage and the next: seconds of a transfer there (activations) and back (gradients), and its link."""

    forward_seconds: float
    backward_seconds: float
    resource: Resource


def gradient_jobs(chunks: Sequence[StageLayout], runs: Sequence[Run]) -> list[Job]:
    """Return the gradient traffic of a group of devices in order of issue: of each backward, then of the step.

    Where the backward is split, the weight passes make the gradients.
    """
    splits = any(run.task.kind is Pass.WEIGHT for run in runs)
    kind, phase = (Pass.WEIGHT, SegmentPhase.WEIGHT) if splits else (Pass.BACKWARD, SegmentPhase.BACKWARD)
    backwards = [run for run in runs if run.task.kind is kind]
    final = {run.task.chunk: run for run in backwards}
    quiet = [not any(part.layout.traffic for part in layout.passes[kind].parts) for layout in chunks]
    jobs: list[Job] = []

    def issue(start: float, what: Layout) -> None:
        base = len(jobs)
        for traffic in what.traffic:
            after = base + traffic.after if traffic.after >= 0 else -1
            jobs.append(Job(traffic.resource, traffic.name, start + traffic.ready, traffic.seconds, after))

    for run in backwards:
        layout, is_final = chunks[run.task.chunk], run is final[run.task.chunk]
        if quiet[run.task.chunk] and not is_final:
            continue
        for part in layout.passes[kind].parts:
            issue(run.start + part.offset, part.layout)
            if is_final and part.phase is phase and part.index in layout.reduce:
                issue(run.start + part.offset + part.layout.seconds, layout.reduce[part.index])
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
        (chunk, kind): [
            (span.resource, part.offset + span.offset, part.offset + span.offset + span.seconds)
            for part in task.parts
            for span in part.layout.spans
            if span.resource is not Resource.COMPUTE
        ]
        for chunk, layout in enumerate(chunks)
        for kind, task in layout.passes.items()
    }
    for run in runs:
        if run.end > since:
            for resource, start, end in blocking[run.task.chunk, run.task.kind]:
                busy[resource].append((run.start + start, run.start + end))
    return busy


def fit_in(jobs: Sequence[Job], busy: Mapping[Resource, Iterable[Interval]]) -> list[Interval]:
    """Return when each job runs, from its first to its last moment on the link.

    Args:
        jobs: In the order in which they are issued.
        busy: When each link has something more urgent to do; intervals may overlap.

    >>> fit_in([Job(Resource.INTRA, "a", 1.0, 2.0, -1)], {Resource.INTRA: [(0.0, 1.5), (2.0, 3.0)]})
    [(1.5, 4.5)]
    """
    intervals = {resource: sorted(parts) for resource, parts in busy.items()}
    position = dict.fromkeys(Resource, 0)
    free = dict.fromkeys(Resource, 0.0)
    done: list[Interval] = []
    for job in jobs:
        urgent = intervals.get(job.resource, [])
        i = position[job.resource]
        now = max(job.ready, free[job.resource], done[job.after][1] if job.after >= 0 else 0.0)
        begin, left = None, job.seconds
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
        position[job.resource] = i
        free[job.resource] = now
        done.append((begin, now))
    return done
