"""One model on several clusters and numbers of GPUs: every cell is a plan of its own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import main
from autopar.cluster import format_cluster, load_cluster
from autopar.cost import Collective
from autopar.errors import ClusterError, JobError
from autopar.events import Database, Machine, Measurement, TransferEvent, event_id, save_database
from autopar.plan import Plan
from autopar.report.summary import verdict
from autopar.report.whatif import format_whatif
from tests.formulations import DIMS

MLP: dict[str, Any] = {"global_batch": 8, "dims": DIMS["mlp-xs"]}
SET = [word for name, size in DIMS["mlp-xs"].items() for word in ("--set", f"{name}={size}")]


def test_cells_are_the_plans_of_solve_and_prices_follow() -> None:
    """The step of each, and GPUs x hours x price over millions of samples."""
    found = autopar.whatif("zoo:mlp-xs", gpus=[2, 4], clusters=["a100", "h100"], gpu_hour_price={"a100": 1.5}, **MLP)

    assert [(cell.cluster, cell.gpus) for cell in found.cells] == [("a100", 2), ("a100", 4), ("h100", 2), ("h100", 4)]
    for cell in found.cells:
        plan = autopar.solve("zoo:mlp-xs", gpus=cell.gpus, cluster=cell.cluster, top_k=1, **MLP)
        assert plan.simulated is not None
        assert cell.step_seconds == pytest.approx(plan.simulated.step_seconds)
        assert cell.items_per_second == pytest.approx(8 / plan.simulated.step_seconds)
        price = cell.gpus * plan.simulated.step_seconds / 3600 * 1.5 / 8e-6
        assert cell.price_per_million == (pytest.approx(price) if cell.cluster == "a100" else None)


def test_prices_are_those_of_the_clusters_unless_given(tmp_path: Path) -> None:
    """And the report of a plan on such a cluster has the same one."""
    file = tmp_path / "ours.yaml"
    file.write_text(format_cluster(replace(load_cluster("h100"), name="ours", gpu_hour_price=2.5)))

    own = autopar.whatif("zoo:mlp-xs", gpus=[2], clusters=[str(file)], **MLP).cells[0]
    given = autopar.whatif("zoo:mlp-xs", gpus=[2], clusters=[str(file)], gpu_hour_price=5.0, **MLP).cells[0]

    assert own.step_seconds is not None
    assert own.price_per_million is not None
    assert own.price_per_million == pytest.approx(2 * own.step_seconds / 3600 * 2.5 / 8e-6)
    assert given.price_per_million == pytest.approx(2 * own.price_per_million)
    assert own.plan is not None
    assert f"{own.price_per_million:.4g} per million samples, 5 an hour" in dict(verdict(own.plan))["price"]


def test_cells_without_a_plan_say_why() -> None:
    """Too little memory, GPUs that fill no nodes, and the rest of the table stands."""
    found = autopar.whatif("zoo:mlp-xs", gpus=[2, 12], memory_limit=2e3, **MLP)
    text = format_whatif(found)

    assert [cell.outcome for cell in found.cells] == ["does not fit", "not possible"]
    assert "too much" in found.cells[0].why
    assert "do not fill nodes" in found.cells[1].why
    assert "2 × h100: does not fit" in text


def test_cells_are_planned_with_measured_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Collectives that take 10 ms whatever their size: `--profile` plans around them as `solve` does."""
    here = Machine("here", "gloo", 1, 2, (), 8e9)
    events = [TransferEvent(kind, nbytes, 2, 2) for kind in Collective for nbytes in (1e2, 1e8)]
    measured = {event_id(own): Measurement(here.id, 2, 1e-2, 1e-2, 1e-2, 10, 3, "2026-01-01") for own in events}
    database = Database().with_events(events, "mixed").with_measurements(here, measured)
    save_database(database, tmp_path)

    code = main(["whatif", "zoo:mlp-xs", *SET, "--gpus", "2", "--global-batch", "8", "--cluster", "a100", "--no-cache",
                 "--profile", str(tmp_path), "--json"])  # fmt: skip

    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert code == 0
    ours = autopar.solve("zoo:mlp-xs", gpus=2, cluster="a100", top_k=1, profile=tmp_path, **MLP)
    assert ours.simulated is not None
    assert cell["step_seconds"] == pytest.approx(ours.simulated.step_seconds)
    assert cell["plan"] == ours.summary
    assert cell["step_seconds"] < 1e-2
    plain = autopar.solve("zoo:mlp-xs", gpus=2, cluster="a100", top_k=1, **MLP)
    assert plain.summary != ours.summary


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"gpus": [12]}, JobError, "do not fill nodes"),
        ({"gpus": []}, JobError, "no number of GPUs"),
        ({"gpus": [2], "clusters": ["h1000"]}, ClusterError, "h1000"),
        ({"gpus": [2], "gpu_hour_price": {"a100": 1.0}}, JobError, "not asked for"),
        ({"gpus": [2], "gpu_hour_price": -1.0}, JobError, "a price of -1"),
    ],
)
def test_wrong_requests_are_refused(request_: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        autopar.whatif("zoo:mlp-xs", **request_, **MLP)


def test_interrupted_it_keeps_what_it_has() -> None:
    told: list[str] = []

    found = autopar.whatif(
        "zoo:mlp-xs",
        gpus=[2, 4, 8],
        progress=lambda step: told.append(step.detail),
        should_stop=lambda: len(told) > 1,
        **MLP,
    )

    assert found.stopped
    assert found.cells[0].outcome == "plan"
    assert found.cells[2].outcome == "not looked at"


def test_command_writes_table_plans_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plans can be read again, and the JSON has the figures of the table."""
    folder = tmp_path / "out"
    command = ["whatif", "zoo:mlp-xs", *SET, "--gpus", "2,4", "--cluster", "a100", "--global-batch", "8"]

    code = main([*command, "--gpu-hour-price", "a100=2", "--no-cache", "-o", str(folder)])

    text = capsys.readouterr().out
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert (folder / "whatif.txt").read_text() == text
    assert (folder / "scaling.svg").exists()
    assert "What if</h2>" in (folder / "report.html").read_text()
    cells = json.loads((folder / "whatif.json").read_text())["cells"]
    for gpus, cell in zip((2, 4), cells, strict=True):
        plan = Plan.load(folder / f"a100-{gpus}.json")
        assert plan.simulated is not None
        assert cell["step_seconds"] == pytest.approx(plan.simulated.step_seconds)
        assert cell["plan"] == plan.summary


@pytest.mark.parametrize("options", [["--gpus", "2,x"], ["--gpus", "0"], ["--gpus", "2", "--gpu-hour-price", "h100=0"]])
def test_malformed_numbers_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", "zoo:mlp-xs", *options]) == 2
    assert "error: " in capsys.readouterr().err


def test_cells_leave_gpus_free_as_solve_does(tmp_path: Path) -> None:
    """Where gradients of 134 MB take more than a second between nodes, one node of two is faster than two."""
    preset = load_cluster("h100")
    link = replace(preset.inter, tier="Ethernet", bandwidth=1e8, tunings=(), nics=None)
    file = tmp_path / "slow.yaml"
    file.write_text(format_cluster(replace(preset, name="slow", devices_per_node=2, inter=link, host=None)))

    dims = {"num_layers": 2, "hidden": 4096}
    cell = autopar.whatif("zoo:mlp-xs", gpus=[4], clusters=[str(file)], global_batch=64, dims=dims).cells[0]

    assert cell.plan is not None
    assert (cell.gpus, cell.plan.job.gpus) == (4, 2)
    assert any(remark.startswith("2 of 4 GPUs are left free") for remark in cell.to_mapping()["remarks"])
