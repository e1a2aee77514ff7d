"""How many GPUs a goal takes; every claim is recomputed."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import main
from autopar.cluster import load_cluster
from autopar.errors import InfeasibleError, InterruptedSearchError, JobError
from autopar.pins import pins_from
from autopar.progress import never, silent
from autopar.report.sizing import format_sizing
from autopar.request import JobRequest
from autopar.sizing.explain import counts
from autopar.sizing.goals import Goal, Per
from autopar.sizing.gpus import Finder, find_gpus
from autopar.task import Effort, prepare, resized
from tests.sizes import GPT, LONG, MLP, SHORT, fits, short_task

PATIENT: dict[str, Any] = {"time_limit": 3600.0}
"""No answer of a test depends on how busy the machine is."""


def test_the_fewest_gpus_are_the_fewest() -> None:
    """By solving every smaller number; what is called proven is below its bounds."""
    limit = 4.0e3

    found = find_gpus("zoo:mlp-xs", memory_limit=limit, max_gpus=4, **MLP, **PATIENT)

    assert found.gpus is not None
    assert found.plan is not None
    assert found.plan.job.gpus == found.gpus
    base = prepare(JobRequest("zoo:mlp-xs", gpus=1, memory_limit=limit, **MLP))
    for number in counts(base, 1, found.gpus - 1):
        assert not fits(resized(base, gpus=number))
    by_number = {own.gpus: own for own in found.looked}
    assert set(by_number) >= set(counts(base, 1, found.gpus))
    assert by_number[found.gpus].outcome == "meets"
    assert all(by_number[number].why for number in counts(base, 1, found.gpus - 1))
    assert found.proven == all(by_number[number].proven for number in counts(base, 1, found.gpus - 1))


def test_a_target_time_takes_the_fewest_gpus_that_meet_it() -> None:
    """By simulation; numbers below it are excluded by a bound or were too slow."""
    times = {gpus: _simulated("mlp-xs", gpus) for gpus in (1, 2, 4)}
    target = 1.001 * min(times.values())

    found = find_gpus("zoo:mlp-xs", target_seconds=target, max_gpus=4, **MLP, **PATIENT)

    assert found.plan is not None
    assert found.plan.simulated is not None
    assert found.plan.simulated.step_seconds <= target
    assert found.gpus is not None
    assert all(seconds > target for gpus, seconds in times.items() if gpus < found.gpus)


@cache
def _simulated(name: str, gpus: int) -> float:
    plan = autopar.solve(f"zoo:{name}", gpus=gpus, top_k=1, **MLP)
    assert plan.simulated is not None
    return plan.simulated.step_seconds


def test_a_budget_takes_the_fastest_plan_within_it() -> None:
    """Prices recomputed: GPUs x seconds x price of an hour; the answer is within the budget, faster ones are not."""
    price = 3600.0  # a GPU second costs 1
    costs = {gpus: gpus * _simulated("mlp-xs", gpus) for gpus in (1, 2, 4)}
    budget = 1.01 * costs[1]

    found = find_gpus("zoo:mlp-xs", budget=budget, gpu_hour_price=price, max_gpus=4, **MLP, **PATIENT)

    assert found.gpus is not None
    answer = next(own for own in found.looked if own.gpus == found.gpus)
    assert answer.step_seconds is not None
    assert answer.cost is not None
    assert answer.cost == pytest.approx(found.gpus * answer.step_seconds)
    assert answer.cost <= budget
    for own in found.looked:
        if own.step_seconds is not None and own.step_seconds < answer.step_seconds:
            assert own.cost is not None
            assert own.cost > budget
    assert "per step" in format_sizing(found)


@pytest.mark.parametrize(
    ("per", "steps", "times"), [("step", None, 1.0), ("million", None, 1e6 / (16 * 6)), ("run", 50, 50.0)]
)
def test_a_budget_is_for_what_it_says(per: str, steps: int | None, times: float) -> None:
    """The batch is 16 samples of 6 tokens; a GPU second costs 1."""
    goal = Goal(budget=1e9, per=Per(per), steps=steps, gpu_hour_price=3600.0)

    assert goal.price(4, 0.5, 16 * 6) == pytest.approx(4 * 0.5 * times)


def test_tokens_are_what_a_budget_per_million_counts() -> None:
    """Of a model that reads tokens; the price is the cluster's where none is given."""
    machine = replace(load_cluster("h100"), gpu_hour_price=3600.0)

    found = find_gpus("zoo:gpt2", budget=1e9, per="million", cluster=machine, max_gpus=1, **GPT, **PATIENT)

    (answer,) = (own for own in found.looked if own.gpus == found.gpus)
    assert answer.step_seconds is not None
    assert found.tokens == 16 * 6
    assert answer.cost == pytest.approx(answer.gpus * answer.step_seconds * 1e6 / (16 * 6))


def test_goals_nobody_meets_are_answered_with_the_nearest() -> None:
    target = 0.99 * min(_simulated("mlp-xs", gpus) for gpus in (1, 2))
    with pytest.raises(InfeasibleError, match=r"no number of GPUs up to 2 has a step of at most .* takes") as caught:
        find_gpus("zoo:mlp-xs", target_seconds=target, max_gpus=2, **MLP, **PATIENT)
    assert caught.value.hint.startswith("--max-gpus 4, or raise --target-time to at least ")
    with pytest.raises(InfeasibleError, match="no number of GPUs up to 2 has a plan that fits"):
        find_gpus("zoo:mlp-xs", memory_limit=1000.0, max_gpus=2, **MLP, **PATIENT)


@pytest.mark.parametrize(("goal", "unit"), [({"target_seconds": 1e-9}, "takes"), ({"budget": 1e-12}, "costs")])
def test_goals_that_no_number_meets_are_known(goal: dict[str, Any], unit: str) -> None:
    """What is named as the least is below what every number has, by its own floor, and asking for it is not refused."""
    price = 3600.0

    with pytest.raises(InfeasibleError, match=rf"no number of GPUs has .*: it {unit} .* or more") as caught:
        find_gpus("zoo:mlp-xs", max_gpus=4, gpu_hour_price=price, **goal, **MLP, **PATIENT)

    (_, raised) = caught.value.hint.split(" to at least ")
    assert float(raised) > next(iter(goal.values()))
    base = prepare(JobRequest("zoo:mlp-xs", gpus=1, **MLP))
    finder = Finder(base, Goal(), Effort(), 8, silent, never)
    # The floor of a pipeline with fewer microbatches than stages leaves out that its passes follow each other.
    for number in (1,) if unit == "takes" else (1, 2, 4, 8, 64):
        floor = finder._floor(resized(base, gpus=number)) * (1 if unit == "takes" else number)
        met: dict[str, Any] = dict.fromkeys(goal, floor)
        finder.goal = Goal(**met, gpu_hour_price=price)
        assert not finder._least()


def test_who_interrupts_is_not_told_that_nothing_does() -> None:
    """A number that was not looked at to the end may do."""
    with pytest.raises(InterruptedSearchError, match="interrupted before a number of GPUs had a plan that fits"):
        find_gpus("zoo:mlp-xs", memory_limit=4.0e3, max_gpus=4, should_stop=lambda: True, **MLP)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--dump-problem", "p.json"], "--dump-problem"),
        (["--grid", "5"], "--grid"),
        (["--workers", "2", "--ray-address", "auto", "--engine", "ray"], "--workers and --engine and --ray-address"),
        (["--grid", "0", "--engine", "local"], ""),
    ],
)
def test_options_of_one_search_are_refused_where_numbers_are_looked_for(
    options: list[str], refused: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any work, unless they say what holds in any case."""
    asked: list[str] = []

    def find(model: str, **_: object) -> None:
        asked.append(model)
        raise JobError("asked")

    monkeypatch.setattr("autopar.sizing.gpus.find_gpus", find)

    assert main(["solve", "zoo:mlp-xs", "--find-min-gpus", "--no-cache", *options]) == 2

    assert bool(asked) == (not refused)
    assert not refused or f"leave out {refused}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": 3.0}, "a budget without a price"),
        ({"budget": 3.0, "gpu_hour_price": 1.0, "target_seconds": 1.0}, "a target time and a budget at once"),
        ({"budget": 3.0, "gpu_hour_price": 1.0, "per": "run"}, "a run without its length"),
        ({"budget": 3.0, "gpu_hour_price": 1.0, "per": "day"}, "a budget per 'day'"),
        ({"target_seconds": -1.0}, "target seconds of -1"),
        ({"global_batch": None}, "the batch of this model depends on the number of GPUs"),
    ],
)
def test_goals_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    request = {**GPT, **wrong}
    model = "zoo:gpt2"
    if wrong.get("global_batch", 1) is None:
        model, request = str(_exported(tmp_path)), {}

    with pytest.raises(JobError) as caught:
        find_gpus(model, **request)

    assert message in caught.value.args[0]
    assert caught.value.hint


def _exported(folder: Path) -> Path:
    path = folder / "mlp.onnx"
    assert main(["model", "mlp-xs", "-o", str(path)]) == 0
    return path


def test_pins_hold_for_every_number() -> None:
    """Numbers whose space has nothing of what is pinned are listed with the reason."""
    found = find_gpus("zoo:mlp-xs", pins=pins_from({"pin": {"stages": 2, "tp": 2}}), max_gpus=4, **LONG, **PATIENT)

    assert found.gpus == 4
    assert found.plan is not None
    assert found.plan.job.pins == {"pin": {"stages": 2, "tp": 2}}
    assert {own.gpus: own.outcome for own in found.looked} == {1: "fails", 2: "fails", 3: "fails", 4: "meets"}
    assert all("pin " in own.why for own in found.looked if own.outcome == "fails")


def test_numbers_fill_nodes() -> None:
    task = short_task("mlp-xs", 1)

    assert counts(task, 1, 32) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32]
    assert counts(task, 5, 17) == [5, 6, 7, 8, 16]
    assert counts(task, 9, 15) == []


def test_the_command_asks_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["solve", "zoo:mlp-xs", "--global-batch", "8", "--max-gpus", "2", "--no-cache"]
    arguments += [word for name, size in SHORT["mlp-xs"].items() for word in ("--set", f"{name}={size}")]

    assert main([*arguments, "--find-min-gpus"]) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--target-time", "1000", "--gpu-hour-price", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert "answer  1 GPUs" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert (found["gpus"], found["proven"], found["plan"]["job"]["gpus"]) == (1, True, 1)
    assert found["looked"][0]["cost"] > 0
