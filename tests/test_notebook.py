"""What an interactive user sees and gets of a plan."""

import importlib.util
import sys
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

import autopar
from autopar import display
from autopar.errors import PlanError
from autopar.progress import Progress
from autopar.report import format_explain
from tests.plans import two_stage_plan, two_variant_plan


class _Cells(HTMLParser):
    """Collects the text of table cells, and what is open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "br":
            self.open.append(tag)
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] in (["th"], ["td"]):
            self.cells[-1] += data


def test_a_notebook_shows_the_verdict() -> None:
    plan = replace(two_stage_plan(), summary="dp=2 <b> & tp=2")

    found = _Cells(plan._repr_html_())

    assert not found.open
    assert found.cells[:2] == ["plan", "dp=2 <b> & tp=2"]
    assert "step time" in found.cells


def test_an_explanation_is_shown_as_it_is() -> None:
    plan = two_stage_plan()

    assert repr(plan.explain()) == format_explain(plan)
    assert "h.0.up" in plan.explain(ops=True)


def test_tables_have_a_row_per_stage_tensor_and_plan() -> None:
    pytest.importorskip("pandas", reason="Plan.to_dataframe needs pandas")
    plan = two_stage_plan()

    stages, tensors, plans = (plan.to_dataframe(what) for what in ("stages", "tensors", "plans"))

    assert stages["devices"].tolist() == [4, 4]
    assert stages["peak"].tolist() == [39e9, 33.5e9]
    assert stages["activations"].tolist() == [20e9, 10e9]
    assert tensors.set_index("tensor").loc["h.0.up.weight", ["dp", "tp"]].tolist() == ["R", "S(1)"]
    assert plans["step_seconds"].tolist() == [1.0, 1.05]


def test_tensors_of_stages_with_their_own_placements_have_a_row_each() -> None:
    """One for each stage, or stages, that place them alike."""
    pytest.importorskip("pandas", reason="Plan.to_dataframe needs pandas")

    tensors = two_variant_plan().to_dataframe("tensors")

    found = tensors[tensors["tensor"] == "h.0.up.weight"].set_index("on")
    assert found["tp"].to_dict() == {"stage 0": "S(1)", "stage 1": "S(0)"}
    assert found["dp"].isna().to_dict() == {"stage 0": False, "stage 1": True}


def test_a_table_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="no table 'layers'"):
        two_stage_plan().to_dataframe("layers")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(PlanError, match="need pandas"):
        two_stage_plan().to_dataframe()


def test_a_solved_plan_has_a_timeline_and_files() -> None:
    plan = autopar.solve("zoo:mlp-xs", gpus=2, global_batch=8, dims={"num_layers": 2, "hidden": 64})

    timeline = plan.timeline()

    if importlib.util.find_spec("pandas") is not None:
        ops, collectives, bars = (plan.to_dataframe(what) for what in ("ops", "collectives", "timeline"))
        assert set(ops["phase"]) >= {"forward", "backward", "update"}
        assert len(ops) + len(collectives) < len(bars)
        assert (bars["start"] + bars["seconds"]).max() <= timeline.step_seconds * (1 + 1e-9)
    assert plan.simulated is not None
    assert timeline.step_seconds == pytest.approx(plan.simulated.step_seconds)
    assert timeline.events
    assert "PartitionSpec" in plan.export("jax").text


def test_progress_in_a_notebook_goes_to_its_display(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))

    with display.show_progress() as progress:
        progress(Progress("solve", 1, 2, 0.02, 0.019))

    shown = capsys.readouterr()
    assert shown.err == ""
