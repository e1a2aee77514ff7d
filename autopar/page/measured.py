"""A measured step beside the simulated one: what the page shows of a trace of PyTorch's profiler."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from autopar.page.records import Gantt, Measured, StepBar
from autopar.program.records import Program
from autopar.simulate import Timeline
from autopar.simulate.comparison import Place, compare, stage_of
from autopar.simulate.kineto import Bar, Recording, Work
from autopar.simulate.timeline import Row

SIMULATED, MEASURED = "simulated", "measured"
ROWS = ("compute", "collectives", "sends", "host copies")
"""Rows of either step, from top to bottom."""
_ROW_OF: Mapping[str, str] = {
    "tasks": "compute",
    Row.COLLECTIVES: "collectives",
    Row.GRADIENTS_INTRA: "collectives",
    Row.GRADIENTS_INTER: "collectives",
    Row.SEND_NEXT: "sends",
    Row.SEND_PREVIOUS: "sends",
    Row.TO_HOST: "host copies",
    Row.FROM_HOST: "host copies",
}
_KIND_OF: Mapping[Work, tuple[str, str]] = {
    Work.FORWARD: ("compute", "forward"),
    Work.BACKWARD: ("compute", "backward"),
    Work.OPTIMIZER: ("compute", "update"),
    Work.COLLECTIVE: ("collectives", "collectives"),
    Work.SEND: ("sends", "sends"),
    Work.TO_HOST: ("host copies", "host copies"),
    Work.FROM_HOST: ("host copies", "host copies"),
}
_CLOSE = 5e-4  # of the longer step: kernels of one kind that are so near each other are one bar


def measured_step(program: Program, timeline: Timeline, gantt: Gantt, recording: Recording, shown: str) -> Measured:
    """Return what a rank did in its first recorded step beside what was simulated of its devices.

    Args:
        program: The plan lowered.
        timeline: Its step, simulated with `trace=True`.
        gantt: The same as bars.
        recording: What the rank did.
        shown: The trace as errors name it.

    Raises:
        DataError: If the rank is on none of the devices, or nothing says which rank it is.
    """
    places = []
    for held in program.chunks:
        stage = program.stages[held[0]]
        places.append(Place(stage.devices, {axis.name: axis.size for axis in stage.mesh.axes}))
    lane = stage_of(recording, places, shown)
    found = compare(timeline, timeline.stages[lane].index, places[lane].sizes, recording)
    step = recording.seconds / recording.steps
    bars = [*_simulated(gantt, lane), *_merged(recording.bars, step, _CLOSE * max(step, timeline.step_seconds))]
    return Measured(found, gantt.lanes.titles[lane], tuple(bars))


def _simulated(gantt: Gantt, lane: int) -> Iterator[StepBar]:
    for bars in gantt.bars:
        for own, row, start, seconds, name in zip(
            bars.lane, bars.row, bars.start, bars.seconds, bars.name, strict=True
        ):
            where = _ROW_OF.get(gantt.rows[row])
            if own == lane and where is not None:
                yield StepBar(SIMULATED, where, bars.kind, float(start), float(seconds), gantt.names[name])


def _merged(bars: Iterable[Bar], step: float, close: float) -> Iterator[StepBar]:
    """Yield the bars of the first recorded step, those that follow each other closely put together."""
    first = [bar for bar in bars if bar.start < step]
    for (row, kind), own in groupby(sorted(first, key=_order), key=lambda bar: _KIND_OF[bar.work]):
        run: list[Bar] = []
        for bar in own:
            if run and bar.start - _end(run) > close:
                yield _bar(row, kind, run)
                run = []
            run.append(bar)
        yield _bar(row, kind, run)


def _order(bar: Bar) -> tuple[tuple[str, str], float]:
    return _KIND_OF[bar.work], bar.start


def _end(run: Sequence[Bar]) -> float:
    return max(bar.start + bar.seconds for bar in run)


def _bar(row: str, kind: str, run: Sequence[Bar]) -> StepBar:
    name = run[0].name if len(run) == 1 else f"{len(run)} kernels"
    return StepBar(MEASURED, row, kind, run[0].start, _end(run) - run[0].start, name)
