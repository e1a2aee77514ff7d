"""Events timed by real processes over gloo. Slow: they import torch."""

import json
from pathlib import Path

import pytest

from autopar.cli.entry import main
from autopar.configuration import Configuration
from autopar.events import (
    Database,
    Event,
    LaunchEvent,
    OverlapEvent,
    TransferEvent,
    event_id,
    load_database,
    save_database,
)
from autopar.profile.extract import Extraction
from autopar.profile.measure import profile_events
from autopar.profile.plans import extract_plan
from autopar.profile.suite import suite
from autopar.profile.timed_tasks import Task
from autopar.progress import Progress
from autopar.ranks.launch import run_plan
from autopar.ranks.records import RunRequest
from autopar.ranks.run_table import format_run
from autopar.sharding import Mesh
from tests.executions import TINY
from tests.rank_runs import tiny_plan

pytest.importorskip("torch", reason="processes talk over PyTorch: pip install autopar[run]")
pytestmark = pytest.mark.slow

SIZES = [part for name, size in TINY["gpt2"].items() for part in ("--set", f"{name}={size}")]


def _tasks() -> list[Task]:
    """Return one task of every kind that two ranks can time, and one for four."""
    ops = [task for task in suite(2, 2, "fp32") if task.work is not None][:2]
    transfers = [TransferEvent(name, 4096.0, 2, 2) for name in ("all_reduce", "all_gather", "reduce_scatter")]
    others = [TransferEvent("all_to_all", 4096.0, 2, 2, True), TransferEvent("send", 4096.0, 2, 2)]
    copies = [TransferEvent("offload", 4096.0, 1, 1), TransferEvent("fetch", 4096.0, 1, 1)]
    overlap = [OverlapEvent(32, 2, "all_reduce", 4096.0, 2, parts) for parts in ("both", "compute", "transfer")]
    too_large = TransferEvent("all_reduce", 4096.0, 4, 4)
    events: tuple[Event, ...] = (*transfers, *others, *copies, *overlap, too_large)
    return [*ops, *(Task(event) for event in events)]


def test_two_ranks_time_all_kinds_of_events_once(tmp_path: Path) -> None:
    """What is known is not timed again; groups of more devices than there are stay unknown."""
    tasks, told = _tasks(), list[Progress]()

    first = profile_events(tasks, tmp_path, ranks=2, seconds=0.01)
    second = profile_events(tasks, tmp_path, ranks=2, seconds=0.01, progress=told.append)

    assert first == second == load_database(tmp_path)
    assert not told
    measured = {name for name, entry in first.events.items() if entry.measured}
    assert measured == {task.id for task in tasks[:-1]} | {event_id(LaunchEvent())}
    for name in measured:
        (one,) = first.events[name].measured
        assert 0 < one.low <= one.seconds <= one.high
        assert (one.busy, one.warmup) == (2, 3)
        assert one.repeats >= 7


def test_what_a_runtime_does_not_take_is_told(tmp_path: Path) -> None:
    """One op of a job that ONNX Runtime cannot compile is no reason to lose the others."""
    good, bad = [task for task in suite(1, 1, "fp32") if task.work is not None][:2]
    assert bad.work is not None
    broken = Task(bad.event, type(bad.work)(b"no model", bad.work.inputs, bad.work.outputs))

    found = profile_events([good, broken], tmp_path, ranks=1, seconds=0.01)

    assert found.events[good.id].measured
    assert "cannot compile" in found.events[broken.id].problem


def test_runs_that_are_only_timed_compare_nothing(tmp_path: Path, cache_dir: Path) -> None:
    """Pinned ranks, a prediction made of measured events, and tenths of the steps."""
    plan = tiny_plan("gpt2", Configuration(1, Mesh.of(inner=2), 2, "1f1b"), cache_dir, recipe="data", seed=5)
    plan.save(tmp_path / "plan.json")
    found = Extraction()
    extract_plan(tmp_path / "plan.json", found, cache_dir=cache_dir)
    database = Database().with_events([task.event for task in found.tasks.values()], "fp32")
    save_database(database, tmp_path)

    report = run_plan(
        RunRequest(str(tmp_path / "plan.json"), 2, steps=4, pin=True, compare=False, profile=str(tmp_path), model=None)
    )

    assert report.compared == ()
    assert report.passed
    assert 0 < report.low_seconds <= report.measured_seconds * 1.001
    assert report.low_seconds <= report.high_seconds
    assert report.measured_share == 0.0
    assert "verdict" not in format_run(report)


def test_command_profiles_merges_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a model to a prediction all of which is measured."""
    model = ["zoo:gpt2", *SIZES, "--cluster", "docs/benchmarks/cpu2.yaml", "--stack", "ideal"]
    where = ["--ranks", "2", "--seconds", "0.01", "--json"]
    plan = ["--dp", "2", "--microbatch", "1", "--global-batch", "4", "--precision", "fp32", "--json"]
    folders = [str(tmp_path / name) for name in ("a", "b", "both")]

    codes = [main(["profile", *model, "--degrees", "dp=2", "--global-batch", "4", *where, "-o", folders[0]])]
    codes.append(main(["profile", *model, "--degrees", "tp=2", "--global-batch", "4", *where, "-o", folders[1]]))
    codes.append(main(["profile", "merge", *folders[:2], "-o", folders[2]]))
    capsys.readouterr()
    codes.append(main(["predict", *model, *plan, "--profile", folders[2]]))

    assert codes == [0, 0, 0, 0]
    told = json.loads(capsys.readouterr().out)
    (remark,) = [one for one in told["simulated"]["remarks"] if one["kind"] == "profile"]
    assert remark["text"].startswith(("100 %", "99 %"))
    assert "profile both" in remark["text"]
    merged, first = load_database(folders[2]), load_database(folders[0])
    assert merged.num_measured > first.num_measured
