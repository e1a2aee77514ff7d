"""Searches once per kind of recompute: what they begin with, what they share, and what is proven of all."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar import api, recompute_apart
from autopar.errors import InfeasibleError
from autopar.frameworks import restriction
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.recompute_apart import plan_apart
from autopar.request import JobRequest
from autopar.search.outcome import Outcome
from autopar.seeding import NO_SEEDS, Seeds, seeds_of
from autopar.shortage import Shortage
from autopar.sizing.explain import Explainer, explain_parts
from autopar.sizing.fewer import least_seconds
from autopar.sizing.records import Infeasibility, Relaxation
from autopar.task import Effort, Task, pinned, prepare
from autopar.task_search import search_plans
from autopar.verdict import step_seconds
from tests.formulations import DIMS

ONE = Effort(top_k=1)


@pytest.fixture(scope="module")
def kinds() -> tuple[Pins, ...]:
    """The kinds of recompute of FSDP2: none and full."""
    pins = restriction.kept_to("fsdp", Pins(), model="zoo:gpt2", gpus=2, cluster="h100")
    return restriction.kinds_of_recompute("fsdp", pins)


@pytest.fixture(scope="module")
def task() -> Task:
    """GPT-2 on two devices for FSDP2."""
    pins = restriction.kept_to("fsdp", Pins(), model="zoo:gpt2", gpus=2, cluster="h100")
    task = prepare(JobRequest("zoo:gpt2", gpus=2, cluster="h100", global_batch=4, dims=DIMS["gpt2"], pins=pins))
    return replace(task, runs=restriction.runner("fsdp", "zoo:gpt2"))


@pytest.fixture(scope="module")
def seeds(task: Task) -> Seeds:
    """Its plans by degrees."""
    assert task.runs is not None
    return seeds_of(task, task.runs, ["none", "full"], ONE)


@pytest.fixture(scope="module")
def whole(task: Task, kinds: tuple[Pins, ...]) -> Plan:
    """Its plan, searched to the end."""
    return plan_apart(task, kinds, ONE)


Change = Callable[[Outcome], None]


def _changed(monkeypatch: pytest.MonkeyPatch, change: Change) -> list[dict[str, object]]:
    """Change what searches find, and return the list that their options will be in."""
    asked: list[dict[str, object]] = []

    def search(*args: object, **options: object) -> Outcome:
        asked.append(options)
        outcome = search_plans(*args, **options)  # type: ignore[arg-type]
        change(outcome)
        return outcome

    monkeypatch.setattr(recompute_apart, "search_plans", search)
    return asked


def test_a_bound_holds_for_kinds_that_were_not_searched(
    monkeypatch: pytest.MonkeyPatch, task: Task, kinds: tuple[Pins, ...], whole: Plan
) -> None:
    """Interrupted in the first of two kinds, only what holds for all plans is proven; the whole search proves more."""

    def interrupt(outcome: Outcome) -> None:
        outcome.stopped = "interrupted"

    _changed(monkeypatch, interrupt)
    cut = plan_apart(replace(task, runs=None), kinds, ONE)

    assert len(kinds) == 2
    assert whole.search is not None
    assert cut.search is not None
    assert cut.search.termination == "interrupted"
    assert cut.search.bound <= least_seconds(task) < whole.search.bound


def test_each_kind_looks_for_faster_plans_than_all_that_are_known(
    monkeypatch: pytest.MonkeyPatch, task: Task, kinds: tuple[Pins, ...], seeds: Seeds
) -> None:
    """The fastest plan by degrees is the incumbent of the first search, and its configuration where that begins."""
    asked = _changed(monkeypatch, lambda outcome: None)

    plan_apart(task, tuple(reversed(kinds)), ONE)

    assert seeds.seconds("none") < seeds.seconds("full")
    assert asked[0]["incumbent"] == seeds.objective
    assert asked[0]["starts"] == seeds.starts(["none"])
    assert asked[1]["starts"] == seeds.starts(["full"])
    incumbent = asked[1]["incumbent"]
    assert isinstance(incumbent, float)
    assert incumbent <= seeds.objective


def test_no_plan_is_slower_than_the_best_one_by_degrees(
    monkeypatch: pytest.MonkeyPatch, task: Task, kinds: tuple[Pins, ...], seeds: Seeds, whole: Plan
) -> None:
    """Searches that find nothing end with the plan by degrees; one that is searched to its end has none slower."""
    assert seeds.plan is not None
    assert step_seconds(whole) <= step_seconds(seeds.plan)
    for own in (own for _, each in seeds.found for own in each):
        assert own.configuration in task.space
        assert task.runs is not None
        assert task.runs(own.degrees)

    def lose(outcome: Outcome) -> None:
        outcome.candidates, outcome.stopped = [], "time limit"

    _changed(monkeypatch, lose)
    plan = plan_apart(task, kinds, ONE)

    assert step_seconds(plan) <= step_seconds(seeds.plan)
    assert plan.simulated is not None
    assert plan.simulated.remarks[0].text == "found by a descent over degrees; the search found none faster"
    assert plan.search is not None
    assert plan.search.termination == "time limit"
    assert plan.search.bound <= plan.search.objective


def test_searches_in_one_part_begin_with_plans_by_degrees(
    monkeypatch: pytest.MonkeyPatch, task: Task, seeds: Seeds
) -> None:
    """So do searches for frameworks whose layers may differ: without a faster plan the one by degrees is the answer."""

    def search(one: Task, effort: Effort, **options: object) -> Outcome:
        assert options["incumbent"] == seeds.objective
        return Outcome(seeds.objective, bound=0.9 * seeds.objective, stopped="time limit")

    monkeypatch.setattr(api, "search_plans", search)
    plan = api.plan_task(task, ONE)

    assert seeds.plan is not None
    assert step_seconds(plan) <= step_seconds(seeds.plan)
    assert plan.search is not None
    assert (plan.search.termination, plan.search.bound) == ("time limit", 0.9 * seeds.objective)


def test_a_limit_is_that_of_all_kinds(monkeypatch: pytest.MonkeyPatch, task: Task, kinds: tuple[Pins, ...]) -> None:
    """Kinds share a limit, and the last one alone has overtime for a first plan, less what was taken of it."""
    now = [0.0]
    monkeypatch.setattr("autopar.recompute_apart.time.monotonic", lambda: now[0])
    asked: list[tuple[float | None, float]] = []
    plans: list[Outcome] = []

    def search(one: Task, effort: Effort, **options: object) -> Outcome:
        asked.append((effort.time_limit, effort.settings.overtime_seconds))
        now[0] += 12.0
        return plans.pop() if plans else Outcome(stopped="time limit")

    monkeypatch.setattr(recompute_apart, "search_plans", search)
    monkeypatch.setattr(recompute_apart, "searching", lambda effort, task: effort)
    monkeypatch.setattr(recompute_apart, "_seeds", lambda *args: NO_SEEDS)
    with pytest.raises(Exception, match="no plan found until well after the time limit"):
        plan_apart(task, kinds, Effort(top_k=1, time_limit=10.0))

    assert asked == [(5.0, 0.0), (recompute_apart.LEAST_SECONDS, pytest.approx(28.0))]


def test_kinds_left_out_are_told(
    monkeypatch: pytest.MonkeyPatch, task: Task, kinds: tuple[Pins, ...], seeds: Seeds
) -> None:
    """A limit that is over after the first kind: the second one is named, and nothing is proven of it."""
    now = [0.0]
    monkeypatch.setattr("autopar.recompute_apart.time.monotonic", lambda: now[0])
    monkeypatch.setattr(recompute_apart, "_seeds", lambda *args: seeds)

    def search(one: Task, effort: Effort, **options: object) -> Outcome:
        now[0] += 12.0
        return Outcome(seeds.objective, bound=0.9 * seeds.objective, stopped="time limit")

    monkeypatch.setattr(recompute_apart, "search_plans", search)
    plan = plan_apart(task, kinds, Effort(top_k=1, time_limit=10.0))

    assert plan.search is not None
    assert "not searched for lack of time: full recompute" in plan.search.space
    assert plan.search.bound == min(least_seconds(task), 0.9 * seeds.objective)
    assert math.isfinite(plan.search.objective)


def test_ways_out_are_those_of_all_kinds(task: Task, kinds: tuple[Pins, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two kinds the one that needs less memory says what is missing, and each way out is the cheaper one of both."""
    outcomes = {name: (pinned(task, pins), Outcome(bound=math.inf)) for name, pins in zip("ab", kinds, strict=True)}
    made = {
        "a": _report("a", 9e9, (Relaxation("4 GPUs", "--gpus 4", "a", 1.0, 1.0, 4, True),)),
        "b": _report(
            "b",
            8e9,
            (
                Relaxation("4 GPUs", "--gpus 4", "b", 2.0, 1.0, 4, True),
                Relaxation("more", "--memory-limit 8", "b", 3.0, 1.0, 2, True),
            ),
        ),
    }
    told = iter(made.values())
    monkeypatch.setattr(Explainer, "explain", lambda self, outcome: next(told))

    error = explain_parts([*outcomes.values()], ONE)

    assert isinstance(error, InfeasibleError)
    report = error.report
    assert isinstance(report, Infeasibility)
    assert (report.shortage.bytes, report.shortage.floor) == (8e9, 4e9)
    assert [(way.option, way.plan) for way in report.relaxations] == [("--gpus 4", "a"), ("--memory-limit 8", "b")]


def _report(name: str, nbytes: float, ways: tuple[Relaxation, ...]) -> Infeasibility:
    """Return why nothing fits in a part of a space."""
    lacking = Shortage(name, 0, nbytes, 1e9, {}, (), 1.0, nbytes / 2)
    return Infeasibility(2, lacking, True, (), True, ways)
