"""A timeline as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.

Format: "Trace Event Format" of the Chromium project. A process is a stage, a thread is a row of it; times are in
microseconds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar.plan import write_atomically
from autopar.simulate.kineto import Recording, Work
from autopar.simulate.timeline import Row, Timeline

_THREADS = {row: index for index, row in enumerate(Row)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the events of a timeline that was simulated with `trace=True`, ready for JSON."""
    events: list[dict[str, Any]] = []
    for stage in timeline.stages:
        events.append({"ph": "M", "name": "process_name", "pid": stage.index, "args": {"name": f"stage {stage.index}"}})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": stage.index, "args": {"sort_index": stage.index}}
        )
        for row, thread in _THREADS.items():
            place = {"pid": stage.index, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": row.value}})
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}})
    events.extend(
        {
            "ph": "X",
            "name": event.name,
            "cat": event.row.value,
            "pid": event.stage,
            "tid": _THREADS[event.row],
            "ts": _microseconds(event.start),
            "dur": _microseconds(event.seconds),
        }
        for event in timeline.events
    )
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
