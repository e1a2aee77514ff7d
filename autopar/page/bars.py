"""A timeline as bars, and memory over time: what the two charts with a time axis show."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from autopar.page.palette import MEANINGS
from autopar.page.records import Bars, Gantt, Lanes, MemoryCurve
from autopar.program.records import SegmentPhase
from autopar.schedule import Pass, chunks_of
from autopar.simulate import Event, Row, Timeline

_TASKS, _BLOCKS, _OPS, _PATH = "tasks", "blocks", "ops", "critical path"
_PASSES = {
    Pass.FORWARD.value: "forward",
    Pass.BACKWARD.value: "backward",
    Pass.WEIGHT.value: "weight gradients",
}
_KINDS = {
    Row.COLLECTIVES: "collectives",
    Row.GRADIENTS_INTRA: "gradients",
    Row.GRADIENTS_INTER: "gradients",
    Row.SEND_NEXT: "sends",
    Row.SEND_PREVIOUS: "sends",
    Row.TO_HOST: "host copies",
    Row.FROM_HOST: "host copies",
}
"""Kinds of bars of the rows of the trace; a row that is not here is a kind of its own."""
_COLLECTIVE = re.compile(r"\w+\[([^\]]+)\]")
"""Start of the name of a collective, with its mesh axis."""
_PHASES = {
    SegmentPhase.FORWARD: "forward",
    SegmentPhase.AGAIN: "forward",
    SegmentPhase.BACKWARD: "backward",
    SegmentPhase.WEIGHT: "weight gradients",
    SegmentPhase.UPDATE: "update",
}
"""Kinds of bars of blocks; the other phases that have one move something to host memory or back."""
_SEEN = 0.1  # share of the limit below which memory is a line at the bottom of a chart that shows the limit
_FEW_LANES = 8  # up to which rows other than that of tasks are high enough to be looked at without zooming
_GAP = 0.12  # share of a lane's height between it and the next


class _Bar(NamedTuple):
    kind: str
    row: str
    lane: int
    start: float
    seconds: float
    name: str


def gantt(timeline: Timeline, groups: Sequence[int], roles: Sequence[Mapping[str, str]] = ()) -> Gantt:
    """Return the bars of a timeline that was simulated with `trace=True`, its critical path included.

    Args:
        timeline: The timeline.
        groups: The device group of every stage; stages that share their devices have one record in the timeline.
        roles: What each mesh axis does, by stage; collectives over an axis with a role are a kind of their own.
    """
    found = [*_events(timeline.events, roles), *_updates(timeline.events), *_path(timeline, groups)]
    found = [bar for bar in found if bar.seconds > 0]
    order = (_TASKS, _BLOCKS, _OPS, *Row, _PATH)
    used = {bar.row for bar in found}
    rows = tuple(row for row in map(str, order) if row in used)
    kinds = dict.fromkeys(bar.kind for bar in sorted(found, key=lambda bar: rows.index(bar.row)))
    names = {name: index for index, name in enumerate(dict.fromkeys(bar.name for bar in found))}
    numbers = {row: index for index, row in enumerate(rows)}
    end = max((bar.start + bar.seconds for bar in found), default=timeline.step_seconds)
    return Gantt(
        seconds=max(end, timeline.step_seconds),
        lanes=lanes_of(groups, are_shares=timeline.unit == "share"),
        rows=rows,
        bars=tuple(_bars(kind, found, numbers, names) for kind in kinds),
        names=tuple(names),
    )


def lanes_of(groups: Sequence[int], *, are_shares: bool = False) -> Lanes:
    """Return the lanes of a timeline, given the device group of every stage; `are_shares` as of `Lanes`."""
    return Lanes(chunks_of(groups), are_shares)


def memory_curves(timeline: Timeline, lanes: Lanes) -> tuple[MemoryCurve, ...]:
    """Return memory over time of every lane of a timeline that was simulated with `trace=True`."""
    curves = []
    for index, samples in groupby(sorted(timeline.samples, key=lambda s: (s.stage, s.start)), lambda s: s.stage):
        points = [(sample.start, sample.bytes) for sample in samples]
        end = max(timeline.step_seconds, points[-1][0])  # where steps overlap, that of a stage begins later
        start, size = np.array([*points, (end, points[-1][1])]).T
        curves.append(MemoryCurve(lanes.titles[index], start, size))
    return tuple(curves)


def memory_top(curves: Sequence[MemoryCurve], limit: float) -> float:
    """Return where the axis of memory ends: above the limit, unless next to it nothing else could be seen."""
    highest = max(float(curve.bytes.max()) for curve in curves)
    return 1.08 * max(highest, limit) if highest > _SEEN * limit else 1.5 * highest


def row_edges(gantt: Gantt) -> tuple[list[float], list[float]]:
    """Return top and bottom of each row of a lane that is 1 high; the first row, of the tasks, is the highest."""
    others = len(gantt.rows) - 1
    weights = [6 if len(gantt.lanes) <= _FEW_LANES else max(1, 3 * others), *[1] * others]
    ends = [(1 - _GAP) * end / sum(weights) for end in accumulate(weights)]
    return [0.0, *ends[:-1]], ends


def _bars(kind: str, found: Sequence[_Bar], rows: dict[str, int], names: dict[str, int]) -> Bars:
    mine = sorted(
        (bar.lane, rows[bar.row], bar.start, bar.seconds, names[bar.name]) for bar in found if bar.kind == kind
    )
    lane, row, start, seconds, name = zip(*mine, strict=True)
    return Bars(
        kind,
        np.array(lane, np.uint16),
        np.array(row, np.uint8),
        np.array(start, np.float64),
        np.array(seconds, np.float32),
        np.array(name, np.uint32),
    )


def _events(events: Iterable[Event], roles: Sequence[Mapping[str, str]]) -> Iterator[_Bar]:
    for event in events:
        if event.row is Row.COLLECTIVES:
            kind, row = _communication(event, roles), str(event.row)
        elif event.row is not Row.COMPUTE:
            kind, row = _KINDS.get(event.row, str(event.row)), str(event.row)
        elif event.depth == 0:
            kind, row = _PASSES[event.name[0]], _TASKS
        elif event.depth == 1:
            kind, row = _phase(event), _BLOCKS
        else:
            kind, row = _OPS, _OPS
        yield _Bar(kind, row, event.stage, event.start, event.seconds, event.name)


def _communication(event: Event, roles: Sequence[Mapping[str, str]]) -> str:
    """Return the kind of the bar of a collective: what the axis it runs over does."""
    axis = _COLLECTIVE.match(event.name)
    role = roles[event.stage].get(axis[1], "") if axis and roles else ""
    kind = f"{role} communication"
    return kind if kind in MEANINGS else _KINDS[Row.COLLECTIVES]


def _phase(event: Event) -> str:
    """Return the kind of the bar of a block, whose name begins with its phase."""
    return _PHASES.get(SegmentPhase(event.name.split(" of block ")[0]), "host copies")


def _updates(events: Iterable[Event]) -> Iterator[_Bar]:
    """Yield a bar for the update of each stage, which the trace has only block by block."""
    spans: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.row is Row.COMPUTE and event.depth == 1 and event.name.startswith("update"):
            start, end = spans.get(event.stage, (event.start, event.start))
            spans[event.stage] = (min(start, event.start), max(end, event.start + event.seconds))
    for stage, (start, end) in spans.items():
        yield _Bar("update", _TASKS, stage, start, end - start, "update")


def _path(timeline: Timeline, groups: Sequence[int]) -> Iterator[_Bar]:
    """Yield the critical path, what follows each other on a stage and is of one sort put together."""
    for (lane, what), pieces in groupby(timeline.path, key=lambda piece: (groups[piece.stage], piece.what)):
        run = list(pieces)
        start, end = run[0].start, run[-1].end
        yield _Bar(_PATH, _PATH, lane, start, end - start, what)
