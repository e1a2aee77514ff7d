"""The bars of a trace: tasks, transfers, gradient traffic, ops of the first microbatch and of the update; tracks."""

from collections.abc import Iterable, Iterator, Sequence

from autopar.program.records import Program
from autopar.simulate.fitting import Interval, Jobs
from autopar.simulate.layout import Resource
from autopar.simulate.pipeline import Run, Transfer
from autopar.simulate.stages import Part, StageLayout
from autopar.simulate.timeline import Event, Row

_SPAN_ROW = {Resource.COMPUTE: Row.COMPUTE, Resource.TO_HOST: Row.TO_HOST, Resource.FROM_HOST: Row.FROM_HOST}
_GRADIENT_ROW = {Resource.INTRA: Row.GRADIENTS_INTRA, Resource.INTER: Row.GRADIENTS_INTER}


def part_events(group: int, parts: Iterable[Part], start: float, first: int) -> Iterator[Event]:
    """Yield a bar per segment of a task that starts at `start`, and one per op and collective within.

    `first` is the position in the chain of the first block of the stage.
    """
    for part in parts:
        begin, block, phase = start + part.offset, first + part.index, str(part.phase)
        if part.layout.seconds:
            name = f"{phase} of block {block}"
            yield Event(group, Row.COMPUTE, name, begin, part.layout.seconds, 1, block, phase)
        for span in part.layout.spans:
            row = _SPAN_ROW.get(span.resource, Row.COLLECTIVES)
            depth = 2 if row is Row.COMPUTE else 0
            yield Event(group, row, span.name, begin + span.offset, span.seconds, depth, block, phase)


def task_events(
    group: int, chunks: Sequence[StageLayout], runs: Iterable[Run], firsts: Sequence[int]
) -> Iterator[Event]:
    """Yield a bar per task, and what happens within for the first microbatch; the others are alike.

    `firsts` are the positions in the chain of the first blocks of the stages of the group.
    """
    for run in runs:
        yield Event(group, Row.COMPUTE, str(run.task), run.start, run.end - run.start)
        if run.task.microbatch == 0:
            parts = chunks[run.task.chunk].passes[run.task.kind].parts
            yield from part_events(group, parts, run.start, firsts[run.task.chunk])


def gradient_events(group: int, jobs: Jobs, times: Sequence[Interval]) -> Iterator[Event]:
    """Yield a bar per reduction, from its first to its last moment on the link."""
    for job, (start, end) in zip(jobs, times, strict=True):
        yield Event(group, _GRADIENT_ROW[job.resource], job.name, start, end - start)


def transfer_event(transfer: Transfer, groups: Sequence[int], chunks: Sequence[Sequence[int]]) -> Event:
    """Return the bar of a transfer, which belongs to the devices that send.

    Args:
        transfer: The transfer.
        groups: The device group of every stage.
        chunks: The stages of every group.
    """
    row = Row.SEND_NEXT if transfer.receiver > transfer.sender else Row.SEND_PREVIOUS
    group = groups[transfer.sender]
    target = groups[transfer.receiver]
    taken = transfer.task._replace(chunk=chunks[target].index(transfer.receiver))
    seconds = transfer.end - transfer.start
    return Event(group, row, str(transfer.task), transfer.start, seconds, receiver=(target, str(taken)))


def track_names(parts: Sequence[tuple[Program, Sequence[tuple[int, int]]]]) -> tuple[str, ...]:
    """Return what the tracks of a timeline are: stages with their devices and blocks, or device groups.

    Args:
        parts: The program with the devices of each stage; one per share where rows have different shares.
    """
    if len(parts) == 1:
        return tuple(_names(*parts[0]))
    return tuple(
        f"{name}, {program.num_microbatches} microbatches"
        for program, devices in parts
        for name in _names(program, devices)
    )


def _names(program: Program, devices: Sequence[tuple[int, int]]) -> list[str]:
    starts = [0]
    for stage in program.stages:
        starts.append(starts[-1] + len(stage.blocks))
    names = []
    for number, held in enumerate(program.chunks):
        first, last = devices[held[0]]
        blocks = ", ".join(_span(starts[stage], starts[stage + 1]) for stage in held)
        own = f"stage {number}" if program.num_chunks == 1 else _group(number, held)
        names.append(f"{own}: GPU {_span(first, last)}, block {blocks}")
    return names


def _group(number: int, held: Sequence[int]) -> str:
    return f"device group {number} (stages {', '.join(map(str, held))})"


def _span(start: int, stop: int) -> str:
    """Return a half-open range for reading.

    >>> _span(0, 8), _span(3, 4), _span(2, 2)
    ('0-7', '3', 'none')
    """
    if stop == start:
        return "none"
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"
