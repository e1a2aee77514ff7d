"""Alternatives to a plan: solved again with one decision pinned, so that what is said of them can be checked."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.alternatives import TensorView, Weighing, view_tensor, weigh
from autopar.alternatives.decisions import LIKEST, decisions, likest, pinned_to
from autopar.alternatives.job_of_plan import task_of
from autopar.api import plan_task
from autopar.cli import main
from autopar.configuration import Configuration
from autopar.degrees import Degrees
from autopar.errors import PlanError
from autopar.least_memory_plan import thriftiest
from autopar.pins import Choices, Pins, broken
from autopar.plan import Plan
from autopar.report.alternatives import format_tensor, format_weighing
from autopar.sizing.planning import find_plan
from autopar.task import Effort, Task, pinned
from tests.sizes import short_task

LONG = 600.0
"""Seconds; searches of these models end by themselves long before."""


@cache
def _plan(memory: float | None = None) -> Plan:
    return plan_task(_task(memory), Effort(top_k=1))


@cache
def _task(memory: float | None = None) -> Task:
    return short_task("mlp-xs", 4, memory)


@cache
def _weighing() -> Weighing:
    return weigh(_plan(), time_limit=LONG)


@pytest.mark.slow
def test_every_alternative_is_the_best_plan_that_has_the_value() -> None:
    """It keeps to the pin when looked at, and solving with the pin gives the same step time."""
    plan, task = _plan(), task_of(_plan())
    folded = task.workload.folded(plan.microbatch)
    found = {(own.decision, own.value): own for own in _weighing().alternatives}

    compared = 0
    for decision in decisions(plan, folded, task.space):
        for value in decision.others:
            alternative = found[decision.name, value.text]
            if decision.name not in ("pp", "dp", "microbatches", "recompute") or alternative.simulated is None:
                continue
            other = find_plan(pinned(task, Pins(value.pin)), Effort(top_k=1)).plan
            assert other is not None
            assert other.simulated is not None
            assert other.summary == alternative.plan
            assert alternative.simulated.step_seconds == pytest.approx(other.simulated.step_seconds)
            assert not broken(other, Pins(value.pin), task.workload.folded(other.microbatch))
            compared += 1
    assert compared >= 4


def test_no_alternative_beats_a_plan_proven_optimal() -> None:
    """By the formula: a pin only makes the space smaller, but for offload, which only a pin opens where plans fit."""
    plan, weighing = _plan(), _weighing()

    assert plan.search is not None
    assert weighing.again is None
    for own in weighing.alternatives:
        assert own.outcome in ("plan", "not possible", "does not fit")
        opened = "offload" in (own.decision, own.value)
        if own.complete and own.simulated is not None and not opened:
            assert own.bound >= plan.search.bound * (1 - 1e-3)  # a bound is raised no further than it has to be


def test_the_likest_configurations_are_the_plan_s_own_first() -> None:
    """Then those with one thing changed by a factor of two; nothing is left out that is nearer than what is in."""
    plan, space = _plan(), _task().space
    groups = len({stage.devices for stage in plan.stages})
    own = Configuration(groups, plan.device_mesh, plan.num_microbatches, plan.schedule, len(plan.stages) // groups)
    assert own in space

    found = likest(plan, space)

    assert found[0] == own
    assert len(found) == LIKEST < len(space)
    twice = [each for each in found if each.mesh == own.mesh and each.num_stages == own.num_stages]
    assert {each.num_microbatches / own.num_microbatches for each in twice} >= {1.0, 2.0}


def test_alternatives_are_no_worse_than_what_is_most_like_the_plan() -> None:
    """Whichever of the two ways it was found."""
    plan, task = _plan(), _task()
    (decision, *_) = (own for own in decisions(plan, task.workload.folded(plan.microbatch), task.space) if own.others)
    value = decision.others[0]
    own = pinned(task, pinned_to(task.pins, value))
    alike = find_plan(replace(own, space=likest(plan, own.space)), Effort(top_k=1)).plan
    assert alike is not None
    assert alike.simulated is not None

    found = {(each.decision, each.value): each for each in _weighing().alternatives}[decision.name, value.text]

    assert found.simulated is not None
    assert found.simulated.step_seconds <= alike.simulated.step_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_what_is_missing_is_said_where_nothing_fits() -> None:
    """Under a limit at which the job just fits, not every other value does."""
    tight = 1.02 * thriftiest(task_of(_plan())).bytes

    weighing = weigh(_plan(tight), time_limit=LONG)

    failed = [own for own in weighing.alternatives if own.outcome == "does not fit"]
    assert failed
    assert all("too much" in own.why and "stage" in own.why for own in failed)
    assert "does not fit: stage" in format_weighing(weighing).replace("\n ", "")


def test_a_pin_of_the_job_gives_way_to_the_value_and_the_others_stay() -> None:
    pins = Pins(Choices(stages=(2,), microbatches=(4,)), Choices(zero=(3,)))
    task = pinned(_task(), pins)
    plan = plan_task(task, Effort(top_k=1))
    (decision, *_) = decisions(plan, task.workload.folded(plan.microbatch), _task().space)

    assert (decision.name, decision.value) == ("pp", "2")
    assert pinned_to(pins, decision.others[0]) == Pins(Choices(stages=(1,), microbatches=(4,)), Choices(zero=(3,)))


def test_no_time_leaves_everything_to_be_looked_at_and_says_so() -> None:
    weighing = weigh(_plan(), time_limit=1e-3)

    assert {own.outcome for own in weighing.alternatives} == {"not looked at"}
    assert weighing.stopped == "time limit"
    assert max(map(len, format_weighing(weighing).splitlines())) <= 80
    assert "not looked at" in format_weighing(weighing)


def test_interrupted_it_keeps_what_it_has() -> None:
    """The second question whether to stop, after the limit, is answered yes."""
    told: list[str] = []

    weighing = weigh(
        _plan(),
        time_limit=LONG,
        progress=lambda step: told.append(step.detail),
        should_stop=lambda: len([own for own in told if own.startswith("pp")]) > 0,
    )

    assert weighing.stopped == "interrupted"
    assert weighing.limit.more.outcome == "plan"
    assert "not looked at" in {own.outcome for own in weighing.alternatives}


def test_plan_without_simulation_is_refused() -> None:
    with pytest.raises(PlanError, match="no simulated step"):
        weigh(replace(_plan(), simulated=None))


def test_plan_of_another_model_is_refused() -> None:
    plan = _plan()

    with pytest.raises(PlanError, match="not the model the plan was made for"):
        weigh(replace(plan, model=replace(plan.model, sha256="0" * 64)))


def test_command_prints_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of the text fit 80 columns; the JSON holds the same alternatives, and so does the page."""
    asked: list[float] = []

    def answered(plan: Plan, *, time_limit: float, **_: Any) -> Weighing:
        asked.append(time_limit)
        return _weighing()

    monkeypatch.setattr("autopar.alternatives.weigh", answered)
    _plan().save(tmp_path / "plan.json")
    command = ["explain", str(tmp_path / "plan.json"), "--alternatives", "--no-cache", "--time-limit", "60"]

    assert main(command) == 0
    text = capsys.readouterr().out
    assert main([*command, "--json", "-o", str(tmp_path / "out")]) == 0
    data = json.loads(capsys.readouterr().out)

    assert asked == [60.0, 60.0]
    assert "What limits it" in text
    assert max(map(len, text.splitlines())) <= 80
    assert (tmp_path / "out" / "alternatives.txt").read_text() == text
    assert json.loads((tmp_path / "out" / "alternatives.json").read_text()) == data
    assert "Alternatives</h2>" in (tmp_path / "out" / "report.html").read_text()
    assert [name for name, _ in data["decisions"]][:3] == ["pp", "dp", "tp"]
    assert len(data["alternatives"]) == len(_weighing().alternatives)


@pytest.mark.parametrize("options", [["--tactics", "--pins"], ["--json"], ["-o", "out"]])
def test_options_that_exclude_each_other_are_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _plan().save(tmp_path / "plan.json")

    assert main(["explain", str(tmp_path / "plan.json"), *options]) == 2
    assert "error: " in capsys.readouterr().err


# One tensor.


@cache
def _sharded() -> Plan:
    """A plan with collectives on its parameters: ZeRO 3 on one stage."""
    return plan_task(pinned(_task(), Pins(Choices(stages=(1,), dp=(4,), zero=(3,)))), Effort(top_k=1))


def _weight(plan: Plan) -> str:
    return next(state.value for block in plan.blocks for state in block.states if "S" in state.placement)


@cache
def _view() -> TensorView:
    return view_tensor(_sharded(), _weight(_sharded()), time_limit=LONG)


def test_tensor_is_shown_where_it_is_stored_read_and_gathered() -> None:
    """A parameter that is stored split is gathered for each use, and its bytes there are those of the whole."""
    view = _view()

    assert any(text.startswith("S") for text in view.placements)
    forward = [use for use in view.uses if use.phase == "forward"]
    assert forward
    assert all(use.role == "read" and set(use.placements) == {"R"} and use.shape == view.shape for use in forward)
    gathers = [move for move in view.moves if move.kind == "all_gather"]
    assert gathers
    assert all(move.seconds > 0 and move.times > 0 and move.bytes > 0 for move in gathers)


def test_other_placements_are_solved_one_axis_at_a_time() -> None:
    """Each value once; for a tensor that is split, also what not splitting it costs."""
    view = _view()

    solved = [own for own in view.alternatives if own.simulated is not None]
    assert len({own.value for own in view.alternatives}) == len(view.alternatives)
    assert solved
    assert any("not split" in own.value for own in solved)
    assert "not split" in format_tensor(view)


def test_equal_tensors_and_ops_have_one_view() -> None:
    """An op stands for what it makes; a tensor of any of several equal blocks for that of their representative."""
    plan = _sharded()
    op = next(own for block in plan.blocks for own in block.ops if own.outputs[0])

    view = view_tensor(plan, op.op, time_limit=1e-3)

    assert view.asked == op.op
    assert any(use.role == "made" and use.op == op.op for use in view.uses)
    assert {own.outcome for own in view.alternatives} == {"not looked at"}


def test_a_tensor_is_called_as_it_was_asked_for() -> None:
    """Equal blocks are placed alike, and each tensor of them has its own name and its own ops."""
    degrees = Degrees(dp=2, zero=3, global_batch=4)
    dims = {"hidden": 32, "num_layers": 4, "heads": 4, "seq": 8, "vocab": 64}
    plan = autopar.predict("zoo:gpt2", degrees, dims=dims).plan
    views = [view_tensor(plan, f"layers.{layer}.attn.q.weight", time_limit=1e-3) for layer in range(4)]

    assert [view.tensor for view in views] == [f"layers.{layer}.attn.q.weight" for layer in range(4)]
    forward = [next(use.op for use in view.uses if use.phase == "forward") for view in views]
    assert len(set(forward)) == 4
    assert len({view.placements for view in views}) == 1
    assert "layers.0.attn.q.weight, one of 4 equal ones" in format_tensor(views[0])


def test_unknown_tensor_is_refused_with_the_nearest_name() -> None:
    name = _weight(_sharded())

    with pytest.raises(PlanError) as caught:
        view_tensor(_sharded(), name + "x")

    assert name in caught.value.hint


def test_command_prints_a_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text within 80 columns, and as JSON."""
    _sharded().save(tmp_path / "plan.json")
    name = _weight(_sharded())
    monkeypatch.setattr("autopar.alternatives.view_tensor", lambda plan, asked, **_: _view() if asked == name else None)
    command = ["explain", str(tmp_path / "plan.json"), "--op", name, "--no-cache"]

    assert main(command) == 0
    text = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)

    assert "Collectives on it" in text
    assert max(map(len, text.splitlines())) <= 80
    assert data["tensor"] == name
    assert [move["kind"] for move in data["moves"]] == [move.kind for move in _view().moves]
