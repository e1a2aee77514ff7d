"""Measured traces beside simulated timelines."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autopar.cli.commands import app
from autopar.errors import DataError
from autopar.report.against import format_comparison
from autopar.sharding import Mesh
from autopar.simulate import Timeline, simulate
from autopar.simulate.comparison import IDLE, Place, compare, stage_of
from autopar.simulate.kineto import read_trace
from autopar.simulate.trace import chrome_trace_of_both
from tests.kineto_traces import kineto
from tests.programs import ExactCosts, equal_stages, two_block_step

SIZES = {"dp": 2, "tp": 4}


@pytest.fixture
def timeline() -> Timeline:
    """Two microbatches of two blocks on one stage, with collectives over both axes."""
    return simulate(two_block_step(Mesh.of(**SIZES)), ExactCosts(), trace=True)


def write(tree: Any, path: Path) -> Path:
    """Write a trace, packed if its name says so, and return its path."""
    text = json.dumps(tree).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_a_trace_of_what_was_simulated_has_the_seconds_of_every_term(timeline: Timeline, tmp_path: Path) -> None:
    """By hand: 2 x (2 + 3) forward, 2 x (4 + 3) backward, 2 update; 2 x (1 + 1) over tp, 2 + 5 and 1 over dp."""
    recording = read_trace(write(kineto(timeline, 0, SIZES), tmp_path / "trace.json"))

    found = compare(timeline, 0, SIZES, recording)

    by_hand = {
        "forward kernels": 10, "backward kernels": 14, "optimizer kernels": 2, "all_reduce over 4": 4,
        "all_reduce over 2": 7, "all_gather over 2": 1,
    }  # fmt: skip
    assert {row.name: row.simulated for row in found.rows if row.name != IDLE} == by_hand
    for row in found.rows:
        assert row.measured == pytest.approx(row.simulated)
    assert found.off == ()
    assert found.measured_seconds == pytest.approx(found.simulated_seconds)


@pytest.mark.parametrize(
    ("term", "named"),
    [
        ("forward", "forward kernels"), ("backward", "backward kernels"), ("optimizer", "optimizer kernels"),
        ("tp", "all_reduce over 4"),
    ],
)  # fmt: skip
def test_a_term_that_takes_longer_is_named(timeline: Timeline, tmp_path: Path, term: str, named: str) -> None:
    """Of a step in which one term takes half as long again, that term and no other one is off."""
    trace = kineto(timeline, 0, SIZES, factors={term: 1.5}, steps=3)

    found = compare(timeline, 0, SIZES, read_trace(write(trace, tmp_path / "trace.json.gz")))

    assert found.steps == 3
    assert [row.name for row in found.off if row.name != IDLE] == [named]
    assert found.off[0].measured == pytest.approx(1.5 * found.off[0].simulated)
    assert f"{named} (-33.3 %)" in format_comparison(found).replace("\n           ", " ")


def test_collectives_of_gradients_are_aligned_one_by_one(tmp_path: Path) -> None:
    """Each beside the measured one in its place; one that the trace lacks stands alone, and the others still meet."""
    timeline = simulate(two_block_step(Mesh.of(**SIZES)), ExactCosts(), trace=True, bucket=0.0)
    trace = kineto(timeline, 0, SIZES)
    again = compare(timeline, 0, SIZES, read_trace(write(trace, tmp_path / "trace.json")))
    reduces = [event for event in trace["traceEvents"] if event.get("args", {}).get("Group size") == SIZES["dp"]]
    trace["traceEvents"].remove(next(event for event in reduces if event["dur"] == pytest.approx(2e6)))

    found = compare(timeline, 0, SIZES, read_trace(write(trace, tmp_path / "less.json")))

    assert [row.simulated[1] for row in again.events if row.simulated is not None] == [
        6,
        2,
    ]  # the first waits for tp once
    assert all(row.measured == pytest.approx(row.simulated) for row in again.events)
    alone, met = found.events[1], found.events[0]
    assert (alone.measured, alone.apart) == (None, 2)
    assert met.measured == pytest.approx(met.simulated)
    assert "of 2 collectives of gradients whose ends are furthest apart" in format_comparison(found)


def test_collectives_meet_by_kind_where_group_sizes_are_unknown(timeline: Timeline, tmp_path: Path) -> None:
    """Older traces do not say how large the group of a collective is."""
    trace = kineto(timeline, 0, SIZES, group_sizes=False)

    found = compare(timeline, 0, SIZES, read_trace(write(trace, tmp_path / "trace.json")))

    terms = {row.name: row.measured for row in found.rows}
    assert terms["all_reduce"] == pytest.approx(11)
    assert terms["all_gather"] == pytest.approx(1)
    assert found.off == ()


def test_sends_between_stages_are_a_term(tmp_path: Path) -> None:
    """The first of two stages sends three microbatches, half a second each; twice as long in the trace."""
    timeline = simulate(equal_stages(2, 3, "1f1b"), ExactCosts(latency=0.5), trace=True)
    trace = kineto(timeline, 0, {}, factors={"send": 2.0})

    found = compare(timeline, 0, {}, read_trace(write(trace, tmp_path / "trace.json")))

    sends = next(row for row in found.rows if row.name == "sends between stages")
    assert sends.simulated == pytest.approx(1.5)
    assert sends.measured == pytest.approx(3.0)
    assert sends.is_off


def test_a_rank_belongs_to_the_stage_that_has_its_devices(timeline: Timeline, tmp_path: Path) -> None:
    """By the rank that the trace names; without one only if there is no choice."""
    places = [Place((0, 2), {}), Place((2, 4), {})]
    named = read_trace(write(kineto(timeline, 0, SIZES, rank=3), tmp_path / "named.json"))
    unnamed = read_trace(write(kineto(timeline, 0, SIZES, rank=None), tmp_path / "unnamed.json"))

    assert stage_of(named, places, "x") == 1
    assert stage_of(unnamed, places[:1], "x") == 0
    with pytest.raises(DataError, match="does not say of which rank"):
        stage_of(unnamed, places, "x")
    with pytest.raises(DataError, match="ranks 0 to 1"):
        stage_of(named, places[:1], "x")


def test_both_steps_are_in_one_trace(timeline: Timeline, tmp_path: Path) -> None:
    """Stages keep their processes; the rank has one after them, with its kernels from the start of the step on."""
    recording = read_trace(write(kineto(timeline, 0, SIZES), tmp_path / "trace.json"))

    events = chrome_trace_of_both(timeline, [(0, recording)])["traceEvents"]

    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[0].startswith("simulated stage 0")
    assert names[1] == "measured rank 0 of stage 0"
    assert len(names) == 2
    measured = [event for event in events if event["pid"] == 1 and event["ph"] == "X"]
    assert len(measured) == len(recording.bars)
    assert sum(event["dur"] for event in measured) == pytest.approx(38e6)


KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0, "dur": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is no trace"),
        (b"no json", "it is no trace"),
        (b"[1, 2", "it is no trace"),
        (b"{}", "no list of traceEvents"),
        (b'"text"', "no list of traceEvents"),
        (b'{"traceEvents": {}}', "no list of traceEvents"),
        (b'{"traceEvents": [1, null, {"ph": "X"}]}', "no start and length"),
        (json.dumps([KERNEL | {"ts": "now"}]).encode(), "no start and length"),
        (json.dumps([KERNEL | {"dur": -1}]).encode(), "no start and length"),
        (json.dumps([KERNEL | {"cat": "cpu_op"}]).encode(), "no kernels of a GPU"),
        (gzip.compress(json.dumps([KERNEL]).encode(), mtime=0)[:-9], "cut off or damaged"),
        (b"\x1f\x8bnothing", "cut off or damaged"),
    ],
)
def test_a_broken_trace_is_one_clear_error(tmp_path: Path, content: bytes, said: str) -> None:
    """Whatever is wrong, the message names the file and says what, and the hint what to give."""
    path = tmp_path / "trace.json"
    path.write_bytes(content)

    with pytest.raises(DataError) as error:
        read_trace(path)

    assert "trace.json" in str(error.value)
    assert said in str(error.value)
    assert "torch.profiler" in error.value.hint


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_trace(tmp_path / "nothing.json")


def test_a_bare_list_of_kernels_is_one_step(tmp_path: Path) -> None:
    """Chrome's other form, without steps, launches and ranks: everything is forward."""
    trace = [KERNEL, KERNEL | {"ts": 3, "name": "multi_tensor_apply_kernel"}, KERNEL | {"ts": 6, "args": {"x": 1}}]

    found = read_trace(write(trace, tmp_path / "trace.json"))

    assert (found.rank, found.steps) == (None, 1)
    assert found.seconds == pytest.approx(7e-6)
    assert [bar.work.value for bar in found.bars] == ["forward kernels", "optimizer kernels", "forward kernels"]


PROGRAM = """\
program forward-only microbatches=2
stage 0 devices=0:2 mesh=(tp: 2/1) blocks=(0) recompute=none
  resident parameters: 48
segment 0 forward
  external x: [8, 6] R 192
  external w: [6, 2] S(1) 48
  h: [8, 2] S(1) 64 = MatMul(x, w) op=h phase=forward block=0
  y: [8, 4] R 128 = all_gather(h) axis=(tp: 2/1) S(1)->R bytes=128
  export y
  part x x
  part w w
  part y h
end
graph by_hand opset=24
input %x: float32[8,6]
state %w: float32[6,4] parameter
%h: float32[8,4] = MatMul(%x, %w) #0
output %h
"""


@pytest.mark.slow
def test_the_command_says_which_terms_are_off(tmp_path: Path) -> None:
    """`autopar simulate PROGRAM --against TRACE` prints both, and writes both into one trace."""
    (tmp_path / "program.txt").write_text(PROGRAM)
    write([KERNEL | {"dur": 1e6}], tmp_path / "measured.json")
    asked = [
        "simulate",
        str(tmp_path / "program.txt"),
        "--cluster",
        "v100",
        "--against",
        str(tmp_path / "measured.json"),
    ]

    shown = CliRunner().invoke(app, [*asked, "--trace-out", str(tmp_path / "both.json")])
    told = CliRunner().invoke(app, [*asked, "--rank", "1", "--json"])
    alone = CliRunner().invoke(app, ["simulate", str(tmp_path / "program.txt"), "--rank", "1"])

    assert shown.exit_code == 0, shown.output
    assert "forward kernels" in shown.output
    assert "all_gather" in shown.output
    assert len({event["pid"] for event in json.loads((tmp_path / "both.json").read_text())["traceEvents"]}) == 2
    assert json.loads(told.stdout)["against"][0]["rank"] == 1
    assert alone.exit_code == 2
