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
from autopar.bench.baselines.megatron import megatron
from autopar.bench.baselines.race import Race
from autopar.bench.usual import (
    LEAST_SECONDS,
    MOST_SECONDS,
    Sweep,
    UsualRace,
    grid_seconds,
    usual_practice,
    usual_preview,
)
from autopar.degrees import Degrees
from autopar.frameworks.restriction import runner
from autopar.page.compare import compared
from autopar.plan import PhaseTime, Plan, Rival
from autopar.practice import Practice, beside
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
RULED = replace(FOUND, method="Megatron's rules", step_seconds=15.0, tried=7, plans=7)
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

    found = usual_practice(_task(), _plan(), seconds=math.inf).grid

    assert (found.stopped, found.tried, found.plans) == ("", len(prices), len(prices))
    costs = _task().costs
    best = [
        race.predictor.predict(degrees, costs.cluster, costs.stack, policy=costs.policy)
        for degrees in race.finalists()[:VERIFY]
    ]
    assert found.step_seconds == min(own.timeline.step_seconds for own in best)
    assert found.summary in {own.plan.summary for own in best}


def test_the_rules_are_those_of_the_baseline() -> None:
    """As many plans, the best of which is simulated; whatever both have priced is priced once."""
    race = Race(_task(), "megatron", math.inf, silent, never)
    megatron(race)

    found = usual_practice(_task(), _plan(), seconds=math.inf).rules

    assert found is not None
    best = [plan for degrees in race.finalists()[:VERIFY] if (plan := race.simulate(degrees)) is not None]
    assert (found.stopped, found.tried) == ("", len(race.prices))
    assert found.step_seconds == min(map(step_seconds, best))


def test_a_faster_plan_of_grid_search_is_adopted() -> None:
    """It is the answer, with what the search has proven; the plan of the search is the first of the others.

    The search is told of plans with as many microbatches as can be only, which are far from the best ones.
    """
    task = prepare(JobRequest("zoo:gpt2", gpus=2, global_batch=4, dims=DIMS["gpt2"]))
    few = [own for own in task.space if (own.num_stages, own.num_microbatches) == (1, 4)]
    poor = plan_task(replace(task, space=few, unequal=None), Effort(top_k=2))

    plan = beside(poor, usual_practice(task, poor, seconds=math.inf), task)

    assert plan.rival is not None
    assert plan.rival.step_seconds is not None
    assert step_seconds(plan) <= plan.rival.step_seconds < step_seconds(poor)
    assert plan.alternatives[0] == poor.without_alternatives()
    search, before = plan.search, poor.search
    assert search is not None
    assert before is not None
    assert search.objective == plan.objective == search.history[-1].objective
    assert search.bound == min(before.bound, plan.objective)
    assert search.termination == "optimal"
    slower = f"{100 * (step_seconds(poor) / step_seconds(plan) - 1):.1f} % slower"
    answer = " ".join(format_answer(plan).split())
    assert f"grid search this plan is its best, of {plan.rival.tried} configurations tried; the best plan of" in answer
    assert f"the search is {slower}" in answer
    assert f"the search is {slower}" in " ".join(text for _, text in verdict(plan))
    assert {each.kind for each in compared(plan)} == {"this plan", "runner-up", "grid search", "Megatron's rules"}
    assert Plan.from_json(plan.to_json()) == plan
    assert "tensor_model_parallel" in plan.export("megatron").text.replace("-", "_")


def test_an_adopted_plan_is_kept(tmp_path: Path) -> None:
    """Asked again, it is the answer at once."""
    request: dict[str, Any] = {**REQUEST, "cache_dir": tmp_path, "time_limit": 60.0}
    poor = autopar.solve("zoo:mlp-xs", **request)
    assert poor.simulated is not None
    best = replace(poor, summary="dp=2", simulated=replace(poor.simulated, step_seconds=0.5 * step_seconds(poor)))
    practice = Practice(replace(FOUND, summary="dp=2", step_seconds=step_seconds(best)), None, best)

    plans = [
        autopar.solve("zoo:mlp-xs", rival=rival, **request)
        for rival in (lambda *_: practice, lambda _, plan: Practice(plan.rival))
    ]

    assert plans[0].summary == plans[1].summary == "dp=2"
    assert plans[1].search is not None
    assert plans[1].search.cached


def test_a_plan_that_is_as_fast_is_not_adopted() -> None:
    """Nor is one that is slower: what was found beside it is told."""
    plan = _plan()

    found = beside(plan, Practice(FOUND, RULED, plan), _task())

    assert found == replace(plan, rival=FOUND, by_rules=RULED)


def test_beside_a_search_for_a_framework_only_what_it_runs_is_swept() -> None:
    """FSDP2 has neither tensor parallelism nor pipelines, selective recompute or ZeRO 1; Megatron-LM has them all."""
    task = prepare(JobRequest("zoo:gpt2", gpus=2, global_batch=4, dims=DIMS["gpt2"]))
    swept = {}
    for framework in ("fsdp", "megatron"):
        race = UsualRace(replace(task, runs=runner(framework, "zoo:gpt2")), "grid", math.inf, silent, never)
        Sweep({"tp": 1, "pp": 1, "interleave": 1, "microbatch": 1})(race)
        swept[framework] = set(race.prices)
        rules = race.beside("megatron", math.inf)
        megatron(rules)
        assert all(rules.is_allowed(plan) for plan, price in rules.prices.items() if price.fits)

    assert {(plan.tp, plan.pp, plan.zero, plan.recompute) for plan in swept["fsdp"]} == {
        (1, 1, 3, "none"), (1, 1, 3, "full")
    }  # fmt: skip
    assert any(plan.tp == 2 for plan in swept["megatron"])
    assert any(plan.pp == 2 for plan in swept["megatron"])
    assert all(plan.zero in (0, 1) for plan in swept["megatron"] if plan.pp > 1)


def test_heads_that_a_framework_does_not_copy_bound_tensor_parallelism() -> None:
    """Llama 3 8B has 8 key-value heads."""
    wide = Degrees(tp=16, sequence_parallel=True, global_batch=8)

    assert runner("megatron", "zoo:llama3-8b")(wide)
    assert not runner("torchtitan", "zoo:llama3-8b")(wide)
    assert runner("torchtitan", "zoo:llama3-8b")(replace(wide, tp=8, dp=2, zero=3))
    assert not runner("torchtitan", "zoo:llama3-8b")(replace(wide, tp=8, dp=2, zero=1))


def test_a_search_for_a_framework_asks_for_usual_practice() -> None:
    """Pins of the framework are no reason not to; the user's are."""
    asked: list[Task] = []

    def rival(task: Task, plan: Plan) -> Practice:
        asked.append(task)
        return Practice(FOUND, RULED, None)

    for pins in (None, {"stages": 1}):
        plan = autopar.solve(
            "zoo:gpt2", gpus=2, global_batch=4, dims=DIMS["gpt2"], framework="fsdp", rival=rival, pins=pins,
            time_limit=20, cache_dir=None,
        )  # fmt: skip
        assert plan.rival == (FOUND if pins is None else None)

    assert [task.runs is None for task in asked] == [False]


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
    practice = usual_practice(_task(), _plan(), should_stop=lambda: True)

    found = practice.grid
    assert (found.stopped, found.tried, found.step_seconds) == ("interrupted", 0, None)
    assert (practice.rules, practice.best) == (None, None)


def test_a_grid_without_time_has_tried_the_nearest_plan() -> None:
    found = usual_practice(_task(), _plan(), seconds=1e-9)

    assert (found.grid.stopped, found.grid.tried) == ("time limit", 1)
    assert found.grid.step_seconds is not None


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


def test_the_answer_says_what_rules_lead_to() -> None:
    """By how much a plan is slower, and from three times on how many times."""
    plan = two_stage_plan()

    texts = [
        format_answer(replace(plan, rival=FOUND, by_rules=rules))
        for rules in (RULED, replace(RULED, step_seconds=1.1, summary=plan.summary), NONE_TRIED)
    ]

    assert "Megatron     its documented rules lead to dp=8 × pp=1: 15 times as slow\n" in texts[0]
    assert "Megatron     its documented rules lead to the same plan\n" in texts[1]
    cut = format_answer(replace(plan, by_rules=replace(RULED, stopped="time limit")))
    assert "15 times as slow (of 7" in " ".join(cut.split())
    assert "Megatron" not in texts[2].partition("Next")[0].partition("grid search")[2]


def test_what_it_found_is_kept_with_the_plan(tmp_path: Path) -> None:
    """A second question for the same job has its answer, and pins are not held against plans without them."""
    asked: list[Rival | None] = []

    def rival(_: Task, plan: Plan) -> Practice:
        asked.append(plan.rival)
        return Practice(FOUND, RULED)

    plans = [autopar.solve("zoo:mlp-xs", cache_dir=tmp_path, rival=rival, **REQUEST) for _ in range(2)]
    pins = autopar.Pins(autopar.Choices(stages=(1,)))
    pinned = autopar.solve("zoo:mlp-xs", cache_dir=tmp_path, rival=rival, pins=pins, **REQUEST)

    assert [(plan.rival, plan.by_rules) for plan in plans] == [(FOUND, RULED)] * 2
    assert asked == [None, FOUND]
    assert pinned.rival is None
