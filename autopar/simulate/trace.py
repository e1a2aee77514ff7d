"""A timeline as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.

Format: "Trace Event Format" of the Chromium project. A process is a stage, a thread is a row of it; times are in
microseconds.
"""

from pathlib import Path
from typing import Any

import msgspec

from autopar.plan import write_atomically
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


def write_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace as JSON, atomically.

    Raises:
        PlanError: If the file cannot be written.
    """
    write_atomically(Path(path), msgspec.json.encode(chrome_trace(timeline)))
