"""A timeline as bars, and memory over time: what the two charts with a time axis show."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from autopar.page.records import Bars, Gantt, MemoryCurve
from autopar.schedule import Pass
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
}
"""Kinds of bars of the rows of the trace; a row that is not here is a kind of its own."""
_FEW_STAGES = 8  # up to which rows other than that of tasks are high enough to be looked at without zooming
_GAP = 0.12  # share of a stage's height between it and the next


class _Bar(NamedTuple):
    kind: str
    row: str
    stage: int
    start: float
    seconds: float
    name: str


def gantt(timeline: Timeline, groups: Sequence[int]) -> Gantt:
    """Return the bars of a timeline that was simulated with `trace=True`, its critical path included.

    Args:
        timeline: The timeline.
        groups: The group of devices of every stage; stages that share their devices have one record in the timeline.
    """
    found = [*_events(timeline.events), *_updates(timeline.events), *_path(timeline, groups)]
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
        stages=tuple(str(stage.index) for stage in timeline.stages),
        rows=rows,
        bars=tuple(_bars(kind, found, numbers, names) for kind in kinds),
        names=tuple(names),
    )


def memory_curves(timeline: Timeline) -> tuple[MemoryCurve, ...]:
    """Return memory over time of every stage of a timeline that was simulated with `trace=True`."""
    curves = []
    for index, samples in groupby(sorted(timeline.samples, key=lambda s: (s.stage, s.start)), lambda s: s.stage):
        points = [(sample.start, sample.bytes) for sample in samples]
        end = max(timeline.step_seconds, points[-1][0])  # where steps overlap, that of a stage begins later
        start, size = np.array([*points, (end, points[-1][1])]).T
        curves.append(MemoryCurve(str(index), start, size))
    return tuple(curves)


def row_edges(gantt: Gantt) -> tuple[list[float], list[float]]:
    """Return top and bottom of each row of a stage that is 1 high; the first row, of the tasks, is the highest."""
    others = len(gantt.rows) - 1
    weights = [6 if len(gantt.stages) <= _FEW_STAGES else max(1, 3 * others), *[1] * others]
    ends = [(1 - _GAP) * end / sum(weights) for end in accumulate(weights)]
    return [0.0, *ends[:-1]], ends


def _bars(kind: str, found: Sequence[_Bar], rows: dict[str, int], names: dict[str, int]) -> Bars:
    mine = sorted(
        (bar.stage, rows[bar.row], bar.start, bar.seconds, names[bar.name]) for bar in found if bar.kind == kind
    )
    stage, row, start, seconds, name = zip(*mine, strict=True)
    return Bars(
        kind,
        np.array(stage, np.uint16),
        np.array(row, np.uint8),
        np.array(start, np.float64),
        np.array(seconds, np.float32),
        np.array(name, np.uint32),
    )


def _events(events: Iterable[Event]) -> Iterator[_Bar]:
    for event in events:
        if event.row is not Row.COMPUTE:
            kind, row = _KINDS.get(event.row, str(event.row)), str(event.row)
        elif event.depth == 0:
            kind, row = _PASSES[event.name[0]], _TASKS
        elif event.depth == 1:
            kind, row = _phase(event), _BLOCKS
        else:
            kind, row = _OPS, _OPS
        yield _Bar(kind, row, event.stage, event.start, event.seconds, event.name)


def _phase(event: Event) -> str:
    """Return the kind of the bar of a block; what runs again is a forward."""
    phase = event.name.split(" of block ")[0]
    return {"again": "forward", "weight": "weight gradients"}.get(phase, phase)


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
    for (stage, what), pieces in groupby(timeline.path, key=lambda piece: (groups[piece.stage], piece.what)):
        run = list(pieces)
        start, end = run[0].start, run[-1].end
        yield _Bar(_PATH, _PATH, stage, start, end - start, what)
