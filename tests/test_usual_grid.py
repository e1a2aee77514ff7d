"""Grid search beside a plan: the part of the space it says, the best of it, and its place in the answer."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.api import plan_task
from autopar.bench.baselines.race import Race
from autopar.bench.usual import LEAST_SECONDS, MOST_SECONDS, Sweep, UsualRace, grid_seconds, usual_grid, usual_preview
from autopar.degrees import Degrees
from autopar.plan import PhaseTime, Plan, Rival
from autopar.progress import Progress, never, silent
from autopar.report.answer import format_answer
from autopar.report.summary import rival_words, verdict
from autopar.request import JobRequest
from autopar.task import Effort, Task, prepare
from autopar.verdict import VERIFY, step_seconds
from tests.formulations import DIMS
from tests.plans import two_stage_plan

REQUEST: dict[str, Any] = {"gpus": 2, "global_batch": 4, "dims": DIMS["mlp-xs"]}
FOUND = Rival("grid search", "1F1B", "dp=8 × pp=1", 1.1, 1e9, 20, 90, "", 2.0)
NONE_TRIED = replace(FOUND, summary="", step_seconds=None, peak_bytes=None, tried=0, stopped="time limit")


@cache
def _task() -> Task:
    return prepare(JobRequest("zoo:mlp-xs", **REQUEST))


@cache
def _plan() -> Plan:
    return plan_task(_task(), Effort(top_k=1))


def _usual(plan: Degrees, node: int) -> bool:
    """What the module says of the degrees it sweeps, told apart from how it does."""
    return (
        plan.schedule == "1f1b"
        and plan.cp == 1
        and plan.tp <= node
        and plan.zero in ((1, 3) if plan.dp > 1 else (0,))
        and plan.sequence_parallel == (plan.tp > 1)
    )


@pytest.mark.parametrize("gpus", [2, 16])
def test_the_space_is_the_usual_part_of_all_degrees(gpus: int) -> None:
    task = prepare(JobRequest("zoo:gpt2", gpus=gpus, global_batch=16, dims=DIMS["gpt2"]))
    whole, usual = (kind(task, "grid", math.inf, silent, never).space for kind in (Race, UsualRace))

    plans = [usual.degrees(leaf) for leaf in usual.leaves()]

    assert len(set(plans)) == len(plans)
    assert set(plans) == {
        plan for leaf in whole.leaves() if _usual(plan := whole.degrees(leaf), task.costs.cluster.devices_per_node)
    }


def test_a_sweep_that_ends_has_the_best_of_its_space() -> None:
    """As priced one by one, in another order: the fastest of its best few when simulated."""
    race = UsualRace(_task(), "grid", math.inf, silent, never)
    prices = [race.price(race.space.degrees(leaf)) for leaf in race.space.leaves()]

    found = usual_grid(_task(), _plan(), seconds=math.inf)

    assert (found.stopped, found.tried, found.plans) == ("", len(prices), len(prices))
    costs = _task().costs
    best = [
        race.predictor.predict(degrees, costs.cluster, costs.stack, policy=costs.policy)
        for degrees in race.finalists()[:VERIFY]
    ]
    assert found.step_seconds == min(own.timeline.step_seconds for own in best)
    assert found.summary in {own.plan.summary for own in best}


def test_nearest_plans_come_first() -> None:
    """By factors of two in what is told of the plan; a race that is stopped has priced no others."""
    sweep = Sweep({"tp": 2, "pp": 1, "interleave": 1, "microbatch": 1})
    race = UsualRace(_task(), "grid", math.inf, silent, _after(9))

    sweep(race)

    distances = [sweep.distance(plan) for plan in race.prices]
    left = {race.space.degrees(leaf) for leaf in race.space.leaves()} - set(race.prices)
    assert distances == sorted(distances)
    assert len(distances) == 9
    assert min(map(sweep.distance, left)) >= distances[-1]


def _after(count: int) -> Callable[[], bool]:
    """Return what says stop after being asked so many times."""
    asked = iter(range(count))
    return lambda: next(asked, None) is None


def test_a_grid_that_is_stopped_says_so() -> None:
    found = usual_grid(_task(), _plan(), should_stop=lambda: True)

    assert (found.stopped, found.tried, found.step_seconds) == ("interrupted", 0, None)


def test_plans_told_beforehand_are_usual_ones_that_fit() -> None:
    """The first splits the model least; each is faster than the one before, and none is slower than its estimate."""
    told = list[Progress]()

    usual_preview(_task(), told.append)

    seconds = [step.incumbent for step in told]
    assert seconds == sorted(set(seconds), reverse=True)
    assert all(step.phase == "usual" and step.done <= step.total for step in told)
    assert told[0].detail.startswith(f"dp={REQUEST['gpus']}")
    assert seconds[-1] < 2 * step_seconds(_plan())


def test_nothing_is_told_beforehand_once_it_is_stopped() -> None:
    told = list[Progress]()

    usual_preview(_task(), told.append, lambda: True)

    assert told == []


@pytest.mark.parametrize(("took", "wanted"), [(0.5, LEAST_SECONDS), (30.0, 3.0), (9000.0, MOST_SECONDS)])
def test_its_time_is_a_tenth_of_the_search(took: float, wanted: float) -> None:
    plan = two_stage_plan()
    assert plan.search is not None

    timed = replace(plan, search=replace(plan.search, phases=(PhaseTime("search", took, 0.0),)))

    assert grid_seconds(timed) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rival", "text"),
    [
        (FOUND, "dp=8 × pp=1: 1.1 s (+10.0 %); best of all 90 dp/tp/pp combinations (1F1B), tried in 2 s"),
        (
            replace(FOUND, stopped="time limit"),
            "dp=8 × pp=1: 1.1 s (+10.0 %); best of 20 of 90 dp/tp/pp combinations (1F1B), tried in 2 s",
        ),
        (
            replace(FOUND, summary="", step_seconds=None, peak_bytes=None),
            "no plan that fits among all 90 dp/tp/pp combinations (1F1B), tried in 2 s",
        ),
        (NONE_TRIED, "none of 90 dp/tp/pp combinations tried in 2 s"),
    ],
)
def test_how_it_was_obtained_is_told(rival: Rival, text: str) -> None:
    plan = replace(two_stage_plan(), rival=rival)

    assert rival_words(rival, plan) == text
    assert ("grid search", text) in verdict(plan)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("rival", "text"),
    [
        (NONE_TRIED, "no configuration tried in its share of the time"),
        (replace(NONE_TRIED, tried=3), "no plan that fits among 3 of 90 configurations"),
        (replace(NONE_TRIED, tried=90, stopped=""), "no plan that fits among 90 configurations"),
    ],
)
def test_the_answer_says_how_many_did_not_fit(rival: Rival, text: str) -> None:
    """A grid that had no time for any is not said to have found that none fits."""
    assert f"grid search  {text}" in format_answer(replace(two_stage_plan(), rival=rival))


def test_what_it_found_is_kept_with_the_plan(tmp_path: Path) -> None:
    """A second question for the same job has its answer, and pins are not held against plans without them."""
    asked: list[Rival | None] = []

    def rival(_: Task, plan: Plan) -> Rival:
        asked.append(plan.rival)
        return FOUND

    plans = [autopar.solve("zoo:mlp-xs", cache_dir=tmp_path, rival=rival, **REQUEST) for _ in range(2)]
    pins = autopar.Pins(autopar.Choices(stages=(1,)))
    pinned = autopar.solve("zoo:mlp-xs", cache_dir=tmp_path, rival=rival, pins=pins, **REQUEST)

    assert [plan.rival for plan in plans] == [FOUND, FOUND]
    assert asked == [None, FOUND]
    assert pinned.rival is None
