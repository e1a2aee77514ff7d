"""The critical path: the chain of tasks, transfers and traffic that a step consists of, none of which could be later.

It is followed back from the end of the step: to what the last update waited for, then from each task to the one before
it on the same devices or to the transfer it waited for, whichever ended when it started.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopar.simulate.fitting import Interval, Jobs
from autopar.simulate.pipeline import Runs, Transfer
from autopar.simulate.stages import TaskLayout


@dataclass(frozen=True, slots=True)
class PathStep:
    """A piece of the critical path: a stage does `what` in `block` from `start` to `end`.

    Attributes:
        stage: Whose devices.
        what: "forward", "backward", "update", "reduce", "send" or "fixed".
        block: Kind of the block; -1 for what belongs to no block.
        kind: "compute", "collective", "delay", "copy" (to or from host memory) or "traffic".
        start: Seconds.
        end: Seconds.
    """

    stage: int
    what: str
    block: int
    kind: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Track:
    """What the path needs to know of a group of devices.

    Attributes:
        stages: Its stages.
        blocks: Kinds of the blocks of each stage.
        runs: Its tasks in order.
        passes: The layout of each of them.
        jobs: Its gradient traffic in order of issue.
        times: When that runs.
        reduced: When its reductions are over.
        update: Its update.
        end: When that is over.
    """

    stages: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    runs: Runs
    passes: Sequence[TaskLayout]
    jobs: Jobs
    times: Sequence[Interval]
    reduced: float
    update: Sequence[TaskLayout]
    end: float


def critical_path(tracks: Sequence[Track], transfers: Iterable[Transfer], fixed: float) -> tuple[PathStep, ...]:
    """Return the critical path of a step, in order of time, with the `fixed` seconds of every step at its end.

    Its pieces follow each other from the first task of any group. They add up to the step, but for schedules whose
    steps overlap: there the step begins later, with the first task of its own group.
    """
    group = max(range(len(tracks)), key=lambda index: tracks[index].end)
    track = tracks[group]
    pieces = [PathStep(track.stages[0], "fixed", -1, "delay", track.end, track.end + fixed)]
    clock = track.end
    planned = sum(layout.seconds for layout in track.update)
    slower = (track.end - track.reduced) / planned if planned else 1.0
    for layout, stage, kinds in reversed(list(zip(track.update, track.stages, track.blocks, strict=True))):
        begin = clock - slower * layout.seconds
        pieces.extend(_pieces(layout, stage, kinds, begin, clock))
        clock = begin
    clock = _reduction(track, pieces)
    if clock > track.runs[-1].end:  # rows with another share of the batch were later
        group = max(range(len(tracks)), key=lambda index: tracks[index].runs[-1].end)
        track = tracks[group]
    number = max((i for i, run in enumerate(track.runs) if run.start < clock), default=0)
    arrivals = {(transfer.receiver, transfer.task.kind, transfer.task.microbatch): transfer for transfer in transfers}
    place = {
        (other.stages[run.task.chunk], run.task.kind, run.task.microbatch): (index, i)
        for index, other in enumerate(tracks)
        for i, run in enumerate(other.runs)
    }
    while True:
        track = tracks[group]
        run = track.runs[number]
        stage = track.stages[run.task.chunk]
        pieces.extend(_pieces(track.passes[number], stage, track.blocks[run.task.chunk], run.start, clock))
        clock = run.start
        if clock <= 0.0:
            break
        if number and track.runs[number - 1].end >= clock:
            number -= 1
            continue
        transfer = arrivals.get((stage, run.task.kind, run.task.microbatch))
        assert transfer is not None, f"nothing explains why {run.task} of stage {stage} starts at {clock}"
        group, number = place[transfer.sender, run.task.kind, run.task.microbatch]
        finished = tracks[group].runs[number].end
        pieces.append(PathStep(transfer.sender, "send", -1, "traffic", finished, clock))
        clock = finished
    return tuple(reversed([piece for piece in pieces if piece.end > piece.start]))


def _reduction(track: Track, pieces: list[PathStep]) -> float:
    """Add the gradient traffic that the update waits for, and return when the first of it was ready."""
    end = track.reduced
    if end <= track.runs[-1].end:
        return track.runs[-1].end
    number = max(range(len(track.times)), key=lambda index: track.times[index][1])
    while True:
        job, (begin, _) = track.jobs[number], track.times[number]
        pieces.append(PathStep(track.stages[0], "reduce", -1, "traffic", begin, end))
        if begin <= job.ready:
            return begin
        before = [
            i
            for i in range(number)
            if track.times[i][1] >= begin and (track.jobs[i].resource is job.resource or i == job.after)
        ]
        if not before:  # the link had something more urgent to do
            pieces.append(PathStep(track.stages[0], "reduce", -1, "traffic", job.ready, begin))
            return job.ready
        number, end = before[-1], begin


def _pieces(layout: TaskLayout, stage: int, kinds: Sequence[int], start: float, until: float) -> Iterator[PathStep]:
    """Yield what a task that starts at `start` does up to `until`, last first; more time than it plans is delay."""
    clock = start
    found: list[PathStep] = []
    for part in layout.parts:
        for kind, seconds in (
            ("compute", part.layout.compute_seconds),
            ("collective", part.layout.collective_seconds),
            ("delay", part.layout.host_seconds),
            ("copy", part.layout.copy_seconds),
        ):
            stop = min(until, clock + seconds)
            found.append(PathStep(stage, str(part.phase), kinds[part.index], kind, clock, stop))
            clock = stop
    if found:
        found.append(PathStep(stage, found[-1].what, -1, "delay", clock, until))
    yield from reversed(found)
