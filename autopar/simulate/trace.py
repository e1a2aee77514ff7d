"""A timeline as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.

Format: "Trace Event Format" of the Chromium project. A process is a stage, or a device group that has several; a thread
is a row of it; an arrow leads from a transfer to the task that takes it. Times are in microseconds.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar.simulate.kineto import Recording, Work
from autopar.simulate.timeline import Event, Row, Timeline
from autopar.writing import write_atomically

_THREADS = {row: index for index, row in enumerate(Row)}
_LAYER = re.compile(r"\b\w+\.\d+\.")
"""What the name of an op of a repeated block begins with, "layers.6."; it names the representative, not the block."""
_VERSION = re.compile(r"\|\S*")
"""What is behind the name of a tensor that was moved: its placement and phase."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the events of a timeline that was simulated with `trace=True`, ready for JSON.

    Events that take no time are left out, and so are threads without events.
    """
    bars = [event for event in timeline.events if event.seconds > 0]
    rows = {(event.stage, event.row) for event in bars}
    events: list[dict[str, Any]] = []
    for stage in timeline.stages:
        own = {"name": timeline.tracks[stage.index] if timeline.tracks else f"stage {stage.index}"}
        events.append({"ph": "M", "name": "process_name", "pid": stage.index, "args": own})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": stage.index, "args": {"sort_index": stage.index}}
        )
        for row, thread in _THREADS.items():
            if (stage.index, row) in rows:
                place = {"pid": stage.index, "tid": thread}
                events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": row.value}})
                events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}})
    events.extend(map(_bar, bars))
    events.extend(_arrows(bars))
    events.extend(
        {
            "ph": "C",
            "name": "memory",
            "pid": sample.stage,
            "ts": _microseconds(sample.start),
            "args": {"bytes": sample.bytes},
        }
        for sample in timeline.samples
    )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def chrome_trace_of_both(timeline: Timeline, measured: Sequence[tuple[int, Recording]]) -> dict[str, Any]:
    """Return the events of a timeline and of what ranks did, ready for JSON.

    Every rank is a process after the stages, with a row per kind of work. Steps begin together.

    Args:
        timeline: Simulated with `trace=True`.
        measured: Pairs of a stage and what a rank of it did.
    """
    trace = chrome_trace(timeline)
    events = trace["traceEvents"]
    for event in events:
        if event["name"] == "process_name":
            event["args"] = {"name": f"simulated {event['args']['name']}"}
    first = 1 + max(stage.index for stage in timeline.stages)
    for process, (stage, recording) in enumerate(measured, first):
        rank = "a rank" if recording.rank is None else f"rank {recording.rank}"
        name = f"measured {rank} of stage {stage}"
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        for thread, work in enumerate(Work):
            args = {"name": work.value}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": args})
        threads = {work: thread for thread, work in enumerate(Work)}
        events.extend(
            {
                "ph": "X",
                "name": bar.name,
                "cat": bar.work.value,
                "pid": process,
                "tid": threads[bar.work],
                "ts": _microseconds(bar.start),
                "dur": _microseconds(bar.seconds),
            }
            for bar in recording.bars
        )
    return trace


def write_trace_of_both(timeline: Timeline, measured: Sequence[tuple[int, Recording]], path: str | Path) -> None:
    """Write the trace of `chrome_trace_of_both` as JSON, atomically.

    Raises:
        PlanError: If the file cannot be written.
    """
    write_atomically(Path(path), msgspec.json.encode(chrome_trace_of_both(timeline, measured)))


def write_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace as JSON, atomically.

    Raises:
        PlanError: If the file cannot be written.
    """
    write_atomically(Path(path), msgspec.json.encode(chrome_trace(timeline)))


def _bar(event: Event) -> dict[str, Any]:
    label = _label(event)
    bar = {
        "ph": "X",
        "name": label,
        "cat": event.row.value,
        "pid": event.stage,
        "tid": _THREADS[event.row],
        "ts": _microseconds(event.start),
        "dur": _microseconds(event.seconds),
    }
    return bar if label == event.name else {**bar, "args": {"op": event.name}}


def _label(event: Event) -> str:
    """Return what a bar is called: an op or a collective of a block with the block and its phase.

    >>> _label(Event(0, Row.COMPUTE, "layers.6.attn.q.matmul", 0.0, 1.0, 2, 3, "forward"))
    'block 3 attn.q.matmul forward'
    >>> _label(Event(0, Row.COLLECTIVES, "all_gather[tp] layers.6.attn_norm|S(1)R|forward", 0.0, 1.0, 0, 3, "forward"))
    'block 3 all_gather[tp] attn_norm forward'
    """
    if event.block is None or event.depth == 1:
        return event.name
    name = _VERSION.sub("", _LAYER.sub("", event.name, count=1))
    return f"block {event.block} {name} {event.phase}"


def _arrows(bars: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Yield start and end of an arrow from each transfer to the task that takes it."""
    tasks = {(event.stage, event.name): event for event in bars if event.row is Row.COMPUTE and event.depth == 0}
    sent = [(event, tasks[event.receiver]) for event in bars if event.receiver in tasks and event.receiver is not None]
    for number, (transfer, task) in enumerate(sent):
        arrow = {"name": "send", "cat": "transfer", "id": number}
        yield {"ph": "s", **arrow, "pid": transfer.stage, "tid": _THREADS[transfer.row],
               "ts": _microseconds(transfer.start)}  # fmt: skip
        yield {"ph": "f", "bp": "e", **arrow, "pid": task.stage, "tid": _THREADS[task.row],
               "ts": _microseconds(task.start)}  # fmt: skip


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
