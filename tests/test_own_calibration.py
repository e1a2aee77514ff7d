"""Calibration on one's own: step times in a CSV, and profiles as clusters and stacks."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autopar.cli.entry import main
from autopar.cluster import Cluster, load_cluster
from autopar.cost import IDEAL, CostModel, Stack, load_policy, load_stack
from autopar.cost.collectives import Collective
from autopar.cost.pricing import formula_seconds
from autopar.degrees import Degrees
from autopar.errors import DataError
from autopar.events import (
    Database,
    Machine,
    Measurement,
    OpEvent,
    OverlapEvent,
    Profile,
    TransferEvent,
    event_id,
    save_database,
)
from autopar.prediction import open_setting
from autopar.profile.suite import suite
from autopar.sharding import Axis
from autopar.validation.own_machine import fit_machine
from autopar.validation.own_steps import calibrate_steps, read_steps

MACHINE = Machine("a core", "gloo", 1, 2, (), 16e9)
TRUE = load_cluster("docs/benchmarks/cpu2.yaml")
DIMS = {"num_layers": 2, "hidden": 64}
SETS = [part for name, size in DIMS.items() for part in ("--set", f"{name}={size}")]
KNOWN = IDEAL.with_scalars(step_seconds=0.02)
PLANS = (
    "dp=1 microbatch=4 global_batch=8", "dp=2 microbatch=2 global_batch=8", "tp=2 microbatch=8 global_batch=8",
    "pp=2 microbatch=4 global_batch=16 schedule=gpipe",
)  # fmt: skip


def _predicted(stack: Stack, cache_dir: Path) -> list[tuple[Degrees, float]]:
    from autopar.profile.plans import parse_degrees

    setting = open_setting("zoo:mlp-xs", cluster=TRUE, stack=stack, dims=DIMS, precision="fp32", cache_dir=cache_dir)
    found = [parse_degrees(text) for text in PLANS]
    return [(degrees, setting.predict(degrees).timeline.step_seconds) for degrees in found]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a CSV of steps that a known stack makes."""
    folder = tmp_path_factory.mktemp("steps")
    columns = ("dp", "tp", "pp", "zero", "microbatch", "global_batch", "recompute", "schedule")
    lines = [",".join([*columns, "seconds"])]
    for degrees, seconds in _predicted(KNOWN, folder):
        lines.append(",".join([*(str(getattr(degrees, name)) for name in columns), repr(seconds)]))
    path = folder / "mine.csv"
    path.write_text("\n".join(lines))
    return path


def test_steps_give_back_the_stack_that_made_them(steps: Path) -> None:
    """On any cluster file and any model, under a free name."""
    start = replace(IDEAL, name="whatever")

    found = calibrate_steps(
        [steps], "zoo:mlp-xs", start, TRUE, dims=DIMS, precision="fp32", scalars=("step_seconds",),
        cache_dir=steps.parent,
    )  # fmt: skip

    fit = found.stack.fit
    assert found.stack.name == "whatever"
    assert found.stack["step_seconds"] == pytest.approx(0.02, rel=0.02)
    assert found.before.mean > 0.1
    assert found.fitted.mean < 0.02
    assert fit is not None
    assert fit.rows == len(PLANS)
    assert fit.data[0].source == "mine.csv"
    assert {own.name: (own.low, own.high) for own in fit.valid}["n_gpus"] == (1, 2)


def test_command_writes_a_stack_that_predicts(steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What calibration writes is what prediction takes."""
    cluster, stack = "docs/benchmarks/cpu2.yaml", tmp_path / "mine.yaml"
    model = ["zoo:mlp-xs", *SETS, "--cluster", cluster, "--precision", "fp32"]
    (degrees, seconds), *_ = _predicted(KNOWN, steps.parent)
    written = ["-o", str(stack), "--scalars", "step_seconds"]

    code = main(["calibrate", str(steps), "--model", *model, "--stack", "ideal", "--name", "free name", *written])
    capsys.readouterr()
    plan = ["--microbatch", "4", "--global-batch", str(degrees.global_batch), "--json"]
    predicted = main(["predict", *model, "--stack", str(stack), *plan])

    assert (code, predicted) == (0, 0)
    assert load_stack(stack).name == "free name"
    found = json.loads(capsys.readouterr().out)["simulated"]
    assert found["step_seconds"] == pytest.approx(seconds, rel=0.1)
    assert found["error"] is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp,time\n1,2", "unknown column 'time'"),
        ("dp,tp\n1,2", "no column 'seconds' or 'log'"),
        ("dp,seconds\n", "no rows"),
        ("dp,seconds\n1,fast", "line 2: seconds is 'fast'"),
        ("dp,seconds\n1,1.0\n1,-1", "line 3: seconds is '-1'"),
        ("dp,seconds\ntwo,1.0", "line 2: .*dp is 'two'"),
        ("dp,seconds\n1", "line 2: it has not as many cells"),
        ("dp,seconds,set\n1,1.0,seq", "line 2: set is 'seq'"),
    ],
)
def test_wrong_steps_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """With file, line and what is wrong."""
    path = tmp_path / "steps.csv"
    path.write_text(text)

    with pytest.raises(DataError, match=message) as caught:
        read_steps(path)

    assert caught.value.hint


def test_plans_that_do_not_fit_the_model_name_their_line(tmp_path: Path, cache_dir: Path) -> None:
    """There are not as many blocks as stages."""
    path = tmp_path / "steps.csv"
    path.write_text("pp,microbatch,global_batch,seconds\n1,1,50,0.1\n50,1,50,0.1\n")

    with pytest.raises(DataError, match=r"steps.csv, line 3: "):
        calibrate_steps([path], "zoo:mlp-xs", IDEAL, TRUE, dims=DIMS, precision="fp32", cache_dir=cache_dir)


@cache
def _profile(true: Cluster, exposed: float = 0.6) -> Profile:
    """Return the suite as a cluster would take it, with a known share of communication that is not hidden."""
    costs = CostModel(true, load_policy("fp32"), Stack("cpu", "unfused", "none"))
    seconds = {}
    events = [task.event for task in suite(2, 2, "fp32")]
    for event in events:
        match event:
            case OpEvent():
                seconds[event_id(event)] = formula_seconds(event, costs)
            case TransferEvent(members=1):
                continue
            case TransferEvent(operation="send", bytes=nbytes):
                seconds[event_id(event)] = costs.send_seconds(nbytes, 0)
            case TransferEvent(operation=operation, bytes=nbytes):
                seconds[event_id(event)] = costs.collective_seconds(Collective(operation), nbytes, Axis("x", 2, 1))
            case OverlapEvent(parts=parts):
                seconds[event_id(event)] = {"compute": 1.0, "transfer": 0.5, "both": 1.0 + exposed * 0.5}[parts]
    measured = {
        name: Measurement(MACHINE.id, 2, own, own, own, 10, 3, "2026-01-01") for name, own in seconds.items() if own > 0
    }
    database = Database().with_events(events, "fp32").with_measurements(MACHINE, measured)
    return Profile("suite", database, database.digest)


def test_a_profile_gives_back_the_machine_that_made_it() -> None:
    """Peak, memory bandwidth, latency and bandwidth of links, and what overlaps."""
    found = fit_machine(_profile(TRUE), "found")

    device, link = found.cluster.device, found.cluster.intra
    assert device.peak("single") == pytest.approx(TRUE.device.peak("single"), rel=0.05)
    assert device.memory_bandwidth == pytest.approx(TRUE.device.memory_bandwidth, rel=0.05)
    assert found.ops.mean < 0.05
    assert found.transfers is not None
    assert found.transfers.mean < 0.01
    assert link.tuning("all_reduce", 2).latency == pytest.approx(TRUE.intra.latency, rel=0.02)
    assert link.tuning("send", 2).bandwidth == pytest.approx(TRUE.intra.bandwidth, rel=0.02)
    assert found.stack["exposed_share"] == pytest.approx(0.6, abs=0.01)
    assert found.stack.fit is not None
    assert "profile suite" in found.stack.fit.data[0].source


def test_a_known_cluster_keeps_what_a_profile_cannot_see() -> None:
    """Memory, devices of a node, price."""
    base = replace(TRUE, gpu_hour_price=0.1)

    found = fit_machine(_profile(TRUE), "found", base=base)

    assert found.cluster.device.memory == base.device.memory
    assert found.cluster.gpu_hour_price == 0.1
    assert found.cluster.device.name == base.device.name


def test_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cluster and a stack that `predict` takes at once."""
    save_database(_profile(TRUE).database, tmp_path)
    cluster, stack = tmp_path / "mine.yaml", tmp_path / "mine-stack.yaml"
    written = ["-o", str(stack), "--cluster-output", str(cluster)]
    plan = ["--dp", "2", "--microbatch", "1", "--global-batch", "2", "--precision", "fp32"]

    codes = [main(["calibrate", "--profile", str(tmp_path), "--name", "mine", *written])]
    text = capsys.readouterr().out
    codes.append(main(["predict", "zoo:mlp-xs", *SETS, "--cluster", str(cluster), "--stack", str(stack), *plan]))

    assert codes == [0, 0]
    assert "cluster mine, stack mine" in text
    assert "exposed_share" in text
    assert load_cluster(cluster).device.name == "a core"


def test_a_profile_without_products_is_no_machine() -> None:
    """The hint names the suite."""
    database = Database().with_events([TransferEvent("send", 1.0, 2, 2)], "fp32")

    with pytest.raises(DataError, match="has no measured event") as caught:
        fit_machine(Profile("empty", database, "0"), "found")

    assert "--suite" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate"], "give DATA_DIR, STEPS.csv, a log or --profile DIR"),
        (["calibrate", "STEPS", "--cluster-output", "c.yaml", "--model", "zoo:mlp-xs"], "--profile alone"),
        (["calibrate", "STEPS", "--stack", "ideal"], "line 2: it names no model"),
        (["calibrate", "STEPS", "--model", "zoo:mlp-xs", "--scalars", "luck"], "there is no scalar 'luck'"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(
    arguments: list[str], message: str, steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With one clear error and exit code 2."""
    monkeypatch.chdir(tmp_path)

    code = main([str(steps) if argument == "STEPS" else argument for argument in arguments])

    assert code == 2
    assert message in capsys.readouterr().err
