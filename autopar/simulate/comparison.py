"""A measured step beside a simulated one: seconds of one device by term, and which terms are off."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from autopar.errors import DataError
from autopar.simulate.kineto import Recording, Work
from autopar.simulate.timeline import Event, Row, Timeline

OFF_BY = 0.1
"""Share of the larger of two figures from which on a term is off."""
MOST_ALIGNED = 1000
"""Collectives of a kind and group that are aligned one by one: aligning takes time with the square of them."""
OFF_STEP = 0.01
"""Share of the measured step that the difference has to be, too."""
_TASK = re.compile(r"([FBW])\d+(\.\d+)?")
_COLLECTIVE = re.compile(r"([a-z_]+)\[([^\]]+)\]")
_PASS = {"F": Work.FORWARD, "B": Work.BACKWARD, "W": Work.BACKWARD}
_WORK = {
    Row.SEND_NEXT: Work.SEND, Row.SEND_PREVIOUS: Work.SEND, Row.TO_HOST: Work.TO_HOST, Row.FROM_HOST: Work.FROM_HOST,
}  # fmt: skip
IDLE = "idle"
_RANK = "give --rank N, the rank that was profiled"


@dataclass(frozen=True, slots=True)
class TermRow:
    """One term of a step.

    Attributes:
        name: `forward kernels`, `all_reduce over 8`, `idle`, ...
        simulated: Seconds of one device in a step.
        measured: The same, measured.
        is_off: Whether they differ by much.
    """

    name: str
    simulated: float
    measured: float
    is_off: bool


@dataclass(frozen=True, slots=True)
class EventRow:
    """A collective of gradients in the simulated step and the one of the measured step that it is taken for.

    Attributes:
        name: As in the simulated timeline; the kind of a measured one that has no counterpart.
        simulated: Start and length in seconds, from the start of the step; None if only the measured step has it.
        measured: The same of the first measured step; None if only the simulated step has it.
    """

    name: str
    simulated: tuple[float, float] | None
    measured: tuple[float, float] | None

    @property
    def apart(self) -> float:
        """Seconds between both ends; the length of one that has no counterpart."""
        if self.simulated is None or self.measured is None:
            return (self.simulated or self.measured or (0.0, 0.0))[1]
        return abs(sum(self.simulated) - sum(self.measured))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A rank beside the stage it belongs to.

    Attributes:
        rank: The rank; None if nothing says which one.
        stage: Index of the stage in the timeline.
        simulated_seconds: Of the step.
        measured_seconds: Of a step, on the mean of those in the trace.
        steps: How many these are.
        rows: By term; those that differ most first.
        events: Collectives of gradients, one by one, in the order of the simulated step.
    """

    rank: int | None
    stage: int
    simulated_seconds: float
    measured_seconds: float
    steps: int
    rows: tuple[TermRow, ...]
    events: tuple[EventRow, ...] = ()

    @property
    def off(self) -> tuple[TermRow, ...]:
        """The terms that are off; those that differ most first."""
        return tuple(row for row in self.rows if row.is_off)


@dataclass(frozen=True, slots=True)
class Place:
    """Devices that a timeline has one stage for.

    Attributes:
        devices: Half-open range of device numbers.
        sizes: Devices of every mesh axis, by name.
    """

    devices: tuple[int, int]
    sizes: Mapping[str, int]


def stage_of(recording: Recording, places: Sequence[Place], shown: str) -> int:
    """Return the index of the place that a recorded rank belongs to; without a rank, of the only one.

    Raises:
        DataError: If the rank is on none of them, or nothing says which rank it is.
    """
    for index, place in enumerate(places):
        if recording.rank is not None and place.devices[0] <= recording.rank < place.devices[1]:
            return index
    if recording.rank is None:
        if len(places) == 1:
            return 0
        raise DataError(f"{shown} does not say of which rank it is, and there are {len(places)} stages", hint=_RANK)
    last = max(place.devices[1] for place in places) - 1
    raise DataError(f"{shown} is of rank {recording.rank}, and the plan has ranks 0 to {last}", hint=_RANK)


def compare(timeline: Timeline, stage: int, sizes: Mapping[str, int], recording: Recording) -> Comparison:
    """Lay a measured step beside a simulated one, term by term.

    Collectives meet by kind and size of the group, or by kind alone if the trace does not have the sizes. Those of
    gradients, which the simulated step has one by one, are also aligned with the measured ones: in order, with the
    least sum of differences between starts, in which a collective without a counterpart counts half a step.

    Args:
        timeline: Simulated with `trace=True`.
        stage: Index of the stage whose device was recorded.
        sizes: Devices of every mesh axis of the stage, by name.
        recording: What the device did.
    """
    told = all(bar.size for bar in recording.bars if bar.work is Work.COLLECTIVE)
    simulated = _simulated_terms([event for event in timeline.events if event.stage == stage], sizes, told)
    measured: defaultdict[str, float] = defaultdict(float)
    for bar in recording.bars:
        measured[_term(bar.work, bar.kind, bar.size if told else 0)] += bar.seconds / recording.steps
    step = recording.seconds / recording.steps
    simulated[IDLE] = timeline.step_seconds - _covered(_busy(timeline.events, stage))
    busy = _covered((bar.start, bar.start + bar.seconds) for bar in recording.bars)
    measured[IDLE] = (recording.seconds - busy) / recording.steps
    rows = [
        TermRow(name, simulated.get(name, 0.0), measured.get(name, 0.0), _is_off(simulated, measured, name, step))
        for name in {*simulated, *measured}
    ]
    rows.sort(key=lambda row: (-abs(row.measured - row.simulated), row.name))
    aligned = tuple(_aligned(timeline, stage, sizes, recording, told=told))
    return Comparison(recording.rank, stage, timeline.step_seconds, step, recording.steps, tuple(rows), aligned)


def _aligned(
    timeline: Timeline, stage: int, sizes: Mapping[str, int], recording: Recording, *, told: bool
) -> list[EventRow]:
    """Return the collectives of gradients of a stage beside those of the first measured step.

    Kinds and sizes of groups that passes have collectives of, too, are left out: a trace does not tell them apart.
    """
    gradients: defaultdict[tuple[str, int], list[Event]] = defaultdict(list)
    mixed = set()
    for event in timeline.events:
        match = _COLLECTIVE.match(event.name)
        if event.stage != stage or match is None:
            continue
        key = match[1], sizes.get(match[2], 0) if told else 0
        if event.row in (Row.GRADIENTS_INTRA, Row.GRADIENTS_INTER):
            gradients[key].append(event)
        elif event.row is Row.COLLECTIVES:
            mixed.add(key)
    length = recording.seconds / recording.steps
    rows = []
    for key, events in gradients.items():
        if key in mixed:
            continue
        bars = [
            bar
            for bar in recording.bars
            if bar.work is Work.COLLECTIVE and (bar.kind, bar.size if told else 0) == key and bar.start < length
        ]
        spans = sorted((event.start, event.seconds, event.name) for event in events)
        spans, bars = spans[:MOST_ALIGNED], bars[:MOST_ALIGNED]
        for first, second in _pairs([start for start, *_ in spans], [bar.start for bar in bars], 0.5 * length):
            rows.append(
                EventRow(
                    _term(Work.COLLECTIVE, *key) if first is None else spans[first][2],
                    None if first is None else spans[first][:2],
                    None if second is None else (bars[second].start, bars[second].seconds),
                )
            )
    rows.sort(key=lambda row: (row.simulated or row.measured or (0.0, 0.0))[0])
    return rows


def _pairs(first: Sequence[float], second: Sequence[float], alone: float) -> list[tuple[int | None, int | None]]:
    """Align two ascending sequences in order; one left alone costs `alone`, a pair what its members are apart.

    >>> _pairs([0.0, 1.0, 5.0], [1.1, 5.2], 2.0)
    [(0, None), (1, 0), (2, 1)]
    """
    rows, columns = len(first), len(second)
    cost = [[alone * (row + column) for column in range(columns + 1)] for row in range(rows + 1)]
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            cost[row][column] = min(
                cost[row - 1][column - 1] + abs(first[row - 1] - second[column - 1]),
                cost[row - 1][column] + alone,
                cost[row][column - 1] + alone,
            )
    found: list[tuple[int | None, int | None]] = []
    row, column = rows, columns
    while row or column:
        here = cost[row][column]
        if row and column and here == cost[row - 1][column - 1] + abs(first[row - 1] - second[column - 1]):
            row, column = row - 1, column - 1
            found.append((row, column))
        elif row and here == cost[row - 1][column] + alone:
            row -= 1
            found.append((row, None))
        else:
            column -= 1
            found.append((None, column))
    return found[::-1]


def _simulated_terms(events: Sequence[Event], sizes: Mapping[str, int], told: bool) -> dict[str, float]:
    """Return seconds by term; what happens inside passes was recorded of the first microbatch, and counts for all."""
    tasks = Counter(
        (match[1], match[2]) for event in events if event.row is Row.COMPUTE and not event.depth
        if (match := _TASK.fullmatch(event.name))
    )  # fmt: skip
    found: defaultdict[str, float] = defaultdict(float)
    work, times, until = Work.OPTIMIZER, 1, 0.0
    for event in events:
        if event.row is Row.COMPUTE and event.depth == 0:
            match = _TASK.fullmatch(event.name)
            assert match is not None, "bars of whole tasks are named as tasks are"
            work, times, until = _PASS[match[1]], tasks[match[1], match[2]], event.start + event.seconds
            continue
        inside = event.start < until
        if event.row is Row.COMPUTE:
            if event.depth == 2:
                found[_term(work if inside else Work.OPTIMIZER)] += event.seconds * (times if inside else 1)
        elif event.row in (Row.COLLECTIVES, Row.GRADIENTS_INTRA, Row.GRADIENTS_INTER):
            match = _COLLECTIVE.match(event.name)
            kind, size = (match[1], sizes.get(match[2], 0)) if match else (event.name, 0)
            is_once = event.row is not Row.COLLECTIVES or not inside
            found[_term(Work.COLLECTIVE, kind, size if told else 0)] += event.seconds * (1 if is_once else times)
        elif event.row in (Row.TO_HOST, Row.FROM_HOST):
            found[_term(_WORK[event.row])] += event.seconds * (times if inside else 1)
        else:
            found[_term(_WORK[event.row])] += event.seconds
    return found


def _term(work: Work, kind: str = "", size: int = 0) -> str:
    if work is not Work.COLLECTIVE:
        return work.value
    return f"{kind} over {size}" if size else kind


def _is_off(simulated: Mapping[str, float], measured: Mapping[str, float], name: str, step: float) -> bool:
    one, other = simulated.get(name, 0.0), measured.get(name, 0.0)
    return abs(one - other) > max(OFF_BY * max(one, other), OFF_STEP * step)


def _busy(events: Iterable[Event], stage: int) -> Iterable[tuple[float, float]]:
    for event in events:
        if event.stage == stage and (event.row is not Row.COMPUTE or event.depth == 0 or "update" in event.name):
            yield event.start, event.start + event.seconds


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that at least one span covers."""
    covered, reach = [], float("-inf")
    for start, end in sorted(spans):
        if end > reach:
            covered.append(end - max(start, reach))
            reach = end
    return fsum(covered)
