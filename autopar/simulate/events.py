"""The bars of a trace: tasks, transfers, gradient traffic, and each op of the first microbatch and of the update."""

from collections.abc import Iterable, Iterator, Sequence

from autopar.simulate.fitting import Interval, Jobs
from autopar.simulate.layout import Resource
from autopar.simulate.pipeline import Run, Transfer
from autopar.simulate.stages import Part, StageLayout
from autopar.simulate.timeline import Event, Row

_SPAN_ROW = {Resource.COMPUTE: Row.COMPUTE, Resource.TO_HOST: Row.TO_HOST, Resource.FROM_HOST: Row.FROM_HOST}
_GRADIENT_ROW = {Resource.INTRA: Row.GRADIENTS_INTRA, Resource.INTER: Row.GRADIENTS_INTER}


def part_events(group: int, parts: Iterable[Part], start: float) -> Iterator[Event]:
    """Yield a bar per segment of a task that starts at `start`, and one per op and collective within."""
    for part in parts:
        begin = start + part.offset
        if part.layout.seconds:
            yield Event(group, Row.COMPUTE, f"{part.phase} of block {part.index}", begin, part.layout.seconds, 1)
        for span in part.layout.spans:
            row = _SPAN_ROW.get(span.resource, Row.COLLECTIVES)
            yield Event(group, row, span.name, begin + span.offset, span.seconds, 2 if row is Row.COMPUTE else 0)


def task_events(group: int, chunks: Sequence[StageLayout], runs: Iterable[Run]) -> Iterator[Event]:
    """Yield a bar per task, and what happens within for the first microbatch; the others are alike."""
    for run in runs:
        yield Event(group, Row.COMPUTE, str(run.task), run.start, run.end - run.start)
        if run.task.microbatch == 0:
            yield from part_events(group, chunks[run.task.chunk].passes[run.task.kind].parts, run.start)


def gradient_events(group: int, jobs: Jobs, times: Sequence[Interval]) -> Iterator[Event]:
    """Yield a bar per reduction, from its first to its last moment on the link."""
    for job, (start, end) in zip(jobs, times, strict=True):
        yield Event(group, _GRADIENT_ROW[job.resource], job.name, start, end - start)


def transfer_event(transfer: Transfer, groups: Sequence[int]) -> Event:
    """Return the bar of a transfer, which belongs to the devices that send."""
    row = Row.SEND_NEXT if transfer.receiver > transfer.sender else Row.SEND_PREVIOUS
    group = groups[transfer.sender]
    return Event(group, row, str(transfer.task), transfer.start, transfer.end - transfer.start)
