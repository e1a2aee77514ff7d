"""Chrome traces."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from autopar.errors import PlanError
from autopar.program.records import Program
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh
from autopar.simulate import Row, chrome_trace, simulate, write_chrome_trace
from tests.programs import ExactCosts, equal_stages, programs, two_block_step


def test_file_holds_bars_rows_and_memory(tmp_path: Path) -> None:
    """Microseconds; a process per stage and a thread per row, both named; a counter of bytes."""
    timeline = simulate(equal_stages(2, 2, "1f1b"), ExactCosts(latency=0.5), trace=True)

    write_chrome_trace(timeline, tmp_path / "trace.json")

    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    assert {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "stage 1: GPU 1, block 1"}} in events
    assert {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "compute"}} in events
    assert {"ph": "C", "name": "memory", "pid": 0, "ts": 0.0, "args": {"bytes": 11.0}} in events
    bar = {"ph": "X", "name": "F0", "cat": "compute", "pid": 1, "tid": 0, "ts": 1.5e6, "dur": 1e6}
    assert bar in events
    send = {"ph": "X", "name": "F0", "cat": "send to next stage", "pid": 0, "tid": 4, "ts": 1e6, "dur": 0.5e6}
    assert send in events


def test_without_trace_nothing_is_recorded() -> None:
    timeline = simulate(two_block_step(Mesh.of(dp=2, tp=2)), ExactCosts())

    assert (timeline.events, timeline.samples) == ((), ())


@given(program=programs())
def test_recording_changes_no_number(program: Program) -> None:
    costs = ExactCosts(latency=1.0)

    assert simulate(program, costs, trace=True).stages == simulate(program, costs).stages


DUST = 1e-9
"""Seconds by which sums of the same few numbers may differ when added in another order."""


@given(program=programs())
def test_bars_of_a_row_never_overlap_partly(program: Program) -> None:
    """Viewers stack the bars of a thread: of any two, one encloses the other or they are apart, all in the step.

    Where steps overlap, that of a stage begins with its first task.
    """
    timeline = simulate(program, ExactCosts(latency=1.0), trace=True)

    for stage in timeline.stages:
        tasks = [event.start for event in timeline.events if (event.stage, event.row) == (stage.index, Row.COMPUTE)]
        begin = min(tasks) if SCHEDULES[program.schedule].steps_overlap else 0.0
        for row in Row:
            bars = [
                (event.start, event.start + event.seconds)
                for event in timeline.events
                if (event.stage, event.row) == (stage.index, row) and event.seconds
            ]
            open_until: list[float] = []
            for start, end in sorted(bars, key=lambda bar: (bar[0], -bar[1])):
                while open_until and open_until[-1] <= start + DUST:
                    open_until.pop()
                assert not open_until or end <= open_until[-1] + DUST
                open_until.append(end)
                assert begin - DUST <= start <= end <= begin + timeline.step_seconds + DUST


def test_tasks_of_a_stage_follow_each_other() -> None:
    timeline = simulate(equal_stages(3, 5, "1f1b"), ExactCosts(), trace=True)

    for stage in range(3):
        tasks = [e for e in timeline.events if (e.stage, e.row) == (stage, Row.COMPUTE) and e.name[1:].isdigit()]
        assert len(tasks) == 10
        assert all(before.start + before.seconds <= after.start for before, after in pairwise(tasks))


def test_unwritable_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timeline = simulate(equal_stages(1, 1, "forward-only"), ExactCosts(), trace=True)

    with pytest.raises(PlanError, match="cannot write"):
        write_chrome_trace(timeline, tmp_path / "file" / "trace.json")


def test_trace_has_every_event_that_takes_time() -> None:
    timeline = simulate(two_block_step(Mesh.of(dp=2, tp=2)), ExactCosts(), trace=True)

    bars = [event for event in chrome_trace(timeline)["traceEvents"] if event["ph"] == "X"]

    assert len(bars) == sum(event.seconds > 0 for event in timeline.events) > 0


@given(program=programs())
def test_tracks_are_named_and_none_is_empty(program: Program) -> None:
    timeline = simulate(program, ExactCosts(latency=1.0), trace=True)

    events = chrome_trace(timeline)["traceEvents"]

    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(set(processes)) == len(timeline.stages)


def _slices(events: list[dict[str, Any]], arrow: dict[str, Any]) -> list[str]:
    """Return the bars of the thread of one end of an arrow that are open at its time."""
    place = (arrow["pid"], arrow["tid"])
    return [
        event["name"]
        for event in events
        if event["ph"] == "X" and (event["pid"], event["tid"]) == place
        and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]
    ]  # fmt: skip


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_arrows_lead_from_sends_to_the_tasks_that_take_them(schedule: str, chunks: int) -> None:
    """Forwards to the forward of that microbatch, backwards likewise, each after the transfer is over."""
    program = equal_stages(4, 4, schedule, num_chunks=chunks)
    timeline = simulate(program, ExactCosts(latency=0.5), trace=True)

    events = chrome_trace(timeline)["traceEvents"]

    starts, ends = ({event["id"]: event for event in events if event["ph"] == kind} for kind in "sf")
    sends = [event for event in timeline.events if event.receiver is not None and event.seconds > 0]
    assert set(starts) == set(ends)
    assert len(starts) == len(sends) > 0
    for number, start in starts.items():
        (sent,) = _slices(events, start)
        task = _slices(events, ends[number])[0]
        assert sent.split(".")[0] == task.split(".")[0]
        assert start["ts"] < ends[number]["ts"]
        assert start["pid"] != ends[number]["pid"]


def test_blocks_are_numbered_along_the_chain() -> None:
    """Two stages of three blocks: those of the second are 3 to 5."""
    program = equal_stages(2, 2, "1f1b", blocks_per_stage=3)
    timeline = simulate(program, ExactCosts(), trace=True)

    assert timeline.tracks[1].endswith("block 3-5")
    assert {event.block for event in timeline.events if event.stage == 1 and event.block is not None} == {3, 4, 5}
