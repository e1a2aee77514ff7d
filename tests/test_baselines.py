"""The baselines: honest, exhaustive where they say so, and the same every time."""

import math
import time
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest

from autopar.api import plan_task
from autopar.bench.baselines import BASELINES, by_degrees
from autopar.bench.baselines.annealing import annealing
from autopar.bench.baselines.beam import beam, greedy
from autopar.bench.baselines.degree_space import DECISIONS, DegreeSpace, chunk_counts, whole
from autopar.bench.baselines.grid import grid
from autopar.bench.baselines.mcts import mcts
from autopar.bench.baselines.megatron import megatron
from autopar.bench.baselines.race import Race
from autopar.bench.compare import baselines_of
from autopar.degrees import Degrees
from autopar.errors import JobError
from autopar.formulate.building import build_tables
from autopar.formulate.tables import Tables
from autopar.progress import never, silent
from autopar.request import JobRequest
from autopar.tactics.terms import passes_terms
from autopar.task import Effort, Task, prepare
from tests import formulations
from tests.shares import one_in, some

DIMS = {"num_layers": 4, "hidden": 64, "heads": 4, "seq": 32, "vocab": 256}


@cache
def _task(name: str = "gpt2", gpus: int = 4, limit: float | None = None, batch: int = 8) -> Task:
    dims = DIMS | ({"kv_heads": 2, "ffn": 128, "experts": 4} if name == "mixtral-8x7b" else {})
    return prepare(
        JobRequest(f"zoo:{name}", gpus=gpus, cluster="a100", global_batch=batch, dims=dims, memory_limit=limit)
    )


def _race(task: Task) -> Race:
    return Race(task, "test", math.inf, silent, never)


@pytest.mark.parametrize("name", some(BASELINES, lambda name: name in ("grid", "megatron")))
def test_every_baseline_ends_in_a_verified_plan(name: str) -> None:
    """Its figures are the simulator's, its history only gets better, and twice the same is found."""
    task = _task("gpt2", 2)

    first, second = (BASELINES[name].find(task, Effort(top_k=2), name, silent, never) for _ in range(2))

    assert first.method == name
    assert first.best is not None
    assert first.termination == "exhausted"
    assert first.plans == second.plans
    assert [moment.objective for moment in first.history] == [moment.objective for moment in second.history]
    assert sorted((m.objective for m in first.history), reverse=True) == [m.objective for m in first.history]
    assert first.best.peak_bytes <= task.job.memory_limit


def test_no_plain_data_parallelism_is_faster_than_the_plan_found() -> None:
    """All devices on one axis, the gradient of the tied embedding reduced once: what grid search wins with."""
    task = prepare(JobRequest("zoo:gpt2", gpus=4, cluster="a100", global_batch=32, dims=formulations.DIMS["gpt2"]))
    race = _race(task)

    plan = plan_task(task, Effort(top_k=3))

    assert plan.simulated is not None
    for zero in range(4):
        degrees = Degrees(dp=4, zero=zero, microbatch=8, global_batch=32)
        found = race.predictor.predict(
            degrees, race.estimator(4).cluster, task.costs.stack, policy=task.costs.policy,
            memory_limit=task.job.memory_limit,
        )  # fmt: skip
        assert found.plan.simulated is not None
        # plans that are equal by the formula to a ten-thousandth are not told apart by it
        assert plan.simulated.step_seconds <= found.plan.simulated.step_seconds * (1 + 1e-4)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_that_is_stopped_says_so(name: str) -> None:
    """Whatever it has by then is its result."""
    result = BASELINES[name].find(_task(), Effort(), name, silent, lambda: True)

    assert result.termination == "interrupted"


@pytest.mark.parametrize(("name", "gpus"), [("gpt2", 4), ("mixtral-8x7b", 4), ("gpt2", 1)])
def test_the_space_holds_every_way_to_state_a_plan(name: str, gpus: int) -> None:
    """No path ends before a plan, no plan comes twice, and all degrees occur that divide."""
    space = _race(_task(name, gpus)).space

    plans = [space.degrees(leaf) for leaf in space.leaves()]

    assert len(set(plans)) == len(plans)
    assert {plan.gpus for plan in plans} == {gpus}
    degrees = {1, 2, 4} if gpus == 4 else {1}
    assert {plan.tp for plan in plans} == {plan.pp for plan in plans} == {plan.cp for plan in plans} == degrees
    assert {plan.ep for plan in plans} == (degrees if name == "mixtral-8x7b" else {1})
    assert {plan.zero for plan in plans} == ({0, 1, 2, 3} if gpus > 1 else {0})
    if gpus > 1:
        assert {plan.schedule for plan in plans} == {"1f1b", "zb-h1", "zb-h2", "zb-v"}


@pytest.mark.parametrize(("name", "gpus", "batch"), [("gpt2", 4, 12), ("gpt2", 64, 96), ("mixtral-8x7b", 4, 30)])
def test_the_space_holds_every_number_of_microbatches_of_the_planner(name: str, gpus: int, batch: int) -> None:
    """All of them over all plans, and at each data-parallel degree all that leave it whole samples."""
    task = _task(name, gpus, batch=batch)
    space = _race(task).space
    planner = {configuration.num_microbatches for configuration in task.space}
    found: dict[int, set[int]] = {}

    for leaf in space.leaves(length=DECISIONS.index("microbatch") + 1):
        dp = space.data(leaf)
        found.setdefault(dp, set()).add(batch // (dp * whole(leaf, "microbatch")))

    assert set().union(*found.values()) == planner
    assert found == {dp: {count for count in planner if batch % (dp * count) == 0} for dp in found}


def test_decisions_that_lead_nowhere_are_no_options() -> None:
    """Every beginning of a plan can be completed."""
    space = _race(_task("gpt2", 4)).space

    for leaf in islice(space.leaves(), 0, None, 97):
        for length in range(len(DECISIONS)):
            assert space.options({name: leaf[name] for name in DECISIONS[:length]})
    assert chunk_counts(1) == []


@pytest.mark.parametrize("limit", [pytest.param(None, marks=pytest.mark.slow), 3.0e6])
def test_the_grid_leaves_out_nothing_that_could_win(limit: float | None) -> None:
    """Its best plan is the best of all plans, each priced; with little memory, too."""
    task = _task("gpt2", 2, limit)
    quick, whole = _race(task), _race(task)

    grid(quick)
    for leaf in whole.space.leaves():
        whole.price(whole.space.degrees(leaf))

    assert quick.best == whole.best < math.inf
    assert len(quick.prices) + quick.skipped == len(whole.prices)
    assert len(quick.prices) < len(whole.prices)


@pytest.mark.parametrize("name", one_in(2, ["gpt2", "mixtral-8x7b"]))
def test_floors_are_below_every_plan(name: str) -> None:
    """In seconds, and in bytes with full recompute and without."""
    race = _race(_task(name))

    for leaf in islice(race.space.leaves(), 0, None, 61):
        plan = race.space.degrees(leaf)
        estimator = race.estimator(plan.gpus)
        found = estimator.estimate([plan])
        assert race.floor(plan) <= found.step_seconds[0] * (1 + 1e-9), plan
        assert estimator.floor_bytes(plan) <= found.peak_bytes[0], plan


def test_megatron_follows_its_rules() -> None:
    """A sixth of GPT-3 and of the memory: a node of tensor parallelism, then pipelines; ZeRO-1; interleaved."""
    race = _race(
        prepare(JobRequest("zoo:gpt3-175b", gpus=256, cluster="a100", dims={"num_layers": 16}, memory_limit=14e9))
    )

    megatron(race)

    best = race.finalists()[0]
    assert (best.tp, best.zero, best.sequence_parallel, best.cp) == (8, 1, True, 1)
    assert best.pp > 1
    assert best.interleave > 1


def test_what_tactics_cannot_place_is_counted() -> None:
    """Four heads are not dealt out to eight context-parallel devices, and such plans do not end the search."""
    race = _race(_task())

    price = race.price(Degrees(cp=64, global_batch=8))

    assert not price.fits
    assert race.refused == 1


def test_time_is_over_for_a_race() -> None:
    race = Race(_task(), "test", time.monotonic() - 1, silent, never)

    grid(race)

    assert race.stopped == "time limit"
    assert not race.prices


@pytest.mark.parametrize("method", [grid, greedy, beam, annealing, mcts, megatron])
def test_a_method_is_stopped_between_two_prices(method: Callable[[Race], None]) -> None:
    """A price may take seconds."""
    race = Race(_task(), "test", math.inf, silent, lambda: len(race.prices) >= 3)

    method(race)

    assert len(race.prices) == 3


def test_a_price_does_not_ask_all_ops_what_they_pass_on() -> None:
    """It would for each product that is tried, and each parameter: what ops add there cannot be terms."""
    race = _race(_task("mixtral-8x7b"))

    with patch("autopar.tactics.propagate.passes_terms", wraps=passes_terms) as asked:
        price = race.price(Degrees(dp=2, tp=2, zero=2, global_batch=8))

    assert math.isfinite(price.seconds)
    assert not asked.called


def test_grid_search_lists_plans_as_it_asks_for_them() -> None:
    """Where there are half a million the time limit would be over."""
    with patch.object(DegreeSpace, "degrees", autospec=True, side_effect=DegreeSpace.degrees) as listed:
        race = Race(_task(), "test", math.inf, silent, lambda: listed.called)

        grid(race)

    assert 0 < listed.call_count < sum(1 for _ in race.space.leaves()) / 2


def test_the_simulator_keeps_to_the_time_limit() -> None:
    """Once a plan fits: a method that takes all the time there is has one all the same."""

    def late(race: Race) -> None:
        for leaf in islice(race.space.leaves(), 6):
            race.price(race.space.degrees(leaf))

    in_time, too_late = (
        by_degrees(late, _task(), Effort(top_k=3, time_limit=limit), "late", silent, never) for limit in (None, 1e-3)
    )

    assert (len(in_time.plans), in_time.termination) == (3, "exhausted")
    assert (len(too_late.plans), too_late.termination) == (1, "time limit")


def test_alpa_is_stopped_between_two_axes() -> None:
    """Tables of a large model take seconds for each."""
    late: list[bool] = []

    def build(*own: Any) -> Tables:
        late.append(decided.called)
        return build_tables(*own)

    with (
        patch("autopar.bench.baselines.alpa._Axes.decide") as decided,
        patch("autopar.bench.baselines.alpa.build_tables", build),
    ):
        result = BASELINES["alpa"].find(_task(), Effort(), "alpa", silent, lambda: bool(decided.called))

    assert result.termination == "interrupted"
    assert late
    assert not any(late)


def test_names_of_baselines_are_checked() -> None:
    assert baselines_of(("beam", "all")) == ("beam", *(name for name in BASELINES if name != "beam"))
    with pytest.raises(JobError, match="no baseline 'gird'"):
        baselines_of(("gird",))


def test_grid_search_passes_over_what_cannot_be_placed() -> None:
    """Three devices divide neither sequences of 32 nor 4 heads: what is left is found all the same."""
    task = prepare(JobRequest("zoo:gpt2", gpus=3, cluster="a100", global_batch=3, dims=DIMS | {"num_layers": 2}))
    race = _race(task)

    grid(race)

    assert race.skipped
    assert race.best < math.inf
