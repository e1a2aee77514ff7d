"""What the search says of a job holds for every plan by degrees, and its laws hold from one job to the next."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.api import plan_task
from autopar.configuration import describe
from autopar.plan import SearchReport
from autopar.sizing.fewer import least_seconds
from autopar.task import Effort, resized
from autopar.task_search import search_plans
from tests.enumeration import (
    CLOSE,
    FEWER,
    NUM_JOBS,
    Comparison,
    Enumeration,
    SmallJob,
    every_degree,
    left_out,
    slow_nodes,
)
from tests.enumeration import small_job as drawn
from tests.executions import TINY

QUICK = (3, 8, 12, 26)
"""Jobs of the ordinary suite: those that take the fewest seconds."""

GPT = {**TINY["gpt2"], "num_layers": 2}
MLP = {"num_layers": 4, "hidden": 16}


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=() if number in QUICK else pytest.mark.slow) for number in range(NUM_JOBS)]
)
def test_no_plan_by_degrees_contradicts_the_search(number: int, cache_dir: Path) -> None:
    """None is below the bound, by formula or simulated, none is faster than the plan by more than the gap."""
    found = Comparison.of(drawn(number), cache_dir)

    assert not found.violations, f"{found.job}: {found.plan.summary}"


SPACES: dict[str, tuple[SmallJob, set[str]]] = {
    "nodes of one device": (SmallJob(0, "gpt2", GPT, 4, slow_nodes(1, 1e8, 1e8), "train", 4, 2.0), set()),
    "few microbatches": (SmallJob(0, "mlp-xs", MLP, 4, slow_nodes(4, 1e8, 1e8), "train", 2, 2.0), set()),
    "groups that share": (SmallJob(0, "gpt2", GPT, 8, slow_nodes(2, 1e8, 1e7), "train", 4, 2.0), set()),
    "experts": (
        SmallJob(0, "mixtral-8x7b", TINY["mixtral-8x7b"], 8, slow_nodes(8, 1e8, 1e8), "infer", 4, 2.0),
        {"mesh of three axes without data parallelism"},
    ),
    "fewer stages per group than blocks": (
        SmallJob(0, "mlp-xs", {**MLP, "num_layers": 6}, 2, slow_nodes(2, 1e8, 1e8), "train", 4, 2.0),
        {"interleaved of 2 stages per group"},
    ),
}
"""Jobs, and what their spaces leave out of the plans by degrees on all devices."""


@pytest.mark.parametrize("name", SPACES)
def test_the_space_lists_every_plan_by_degrees_but_what_it_says(name: str, cache_dir: Path) -> None:
    """Meshes and stages per group are listed one by one; of what else is left out the space has a line."""
    job, expected = SPACES[name]
    task = job.prepare(cache_dir)

    found = {left_out(task, degrees) for degrees in every_degree(task)} - {"", FEWER}

    assert found == expected
    if "mesh of three axes without data parallelism" in found:
        assert "meshes of three axes whose major one is not data parallel" in "; ".join(describe(task.space))


def test_a_plan_below_the_bound_is_a_violation(cache_dir: Path) -> None:
    """The comparison finds a bound that is too high."""
    job = SmallJob(0, "mlp-xs", {"num_layers": 2, "hidden": 16}, 2, slow_nodes(1, 1e6, 1e6), "infer", 4, 0.0)
    found = Comparison.of(job, cache_dir)
    assert not found.violations

    assert found.plan.search is not None
    best = found.best
    assert best is not None
    wrong = replace(found.plan.search, bound=best.simulated * 1.1, objective=best.simulated * 1.1)
    told = replace(found, plan=replace(found.plan, search=wrong, objective=wrong.objective)).violations

    assert any("below the bound" in text for text in told)


LAWS = {
    "mlp-xs": SmallJob(0, "mlp-xs", MLP, 2, slow_nodes(2, 3e7, 3e7), "train", 4, 2.0),
    "gpt2": SmallJob(0, "gpt2", GPT, 2, slow_nodes(1, 3e7, 3e7), "infer", 4, 2.0),
}


def _solved(job: SmallJob, folder: Path, limit: float | None = None) -> SearchReport:
    plan = plan_task(job.prepare(folder, limit), Effort(top_k=1))
    assert plan.search is not None, "it was searched"
    return plan.search


@pytest.mark.parametrize("model", LAWS)
def test_more_memory_is_never_worse(model: str, cache_dir: Path) -> None:
    """Neither is the best plan slower nor the bound above what fits in less."""
    job = LAWS[model]
    enumeration = Enumeration.of(job, cache_dir)
    least = min(plan.peak_bytes for plan in enumeration.plans)
    limits = (least, (least + enumeration.plans[0].peak_bytes) / 2, None)

    found = [_solved(job, cache_dir, limit) for limit in limits]

    for less, more in pairwise(found):
        assert more.least <= less.least * (1 + CLOSE)
        assert more.bound <= less.least * (1 + CLOSE)


@pytest.mark.parametrize("model", LAWS)
def test_a_faster_link_is_never_worse(model: str, cache_dir: Path) -> None:
    """The same of links of three and ten times the bandwidth."""
    job = LAWS[model]
    node = job.cluster.devices_per_node
    jobs = [replace(job, cluster=slow_nodes(node, rate, rate)) for rate in (1e7, 3e7, 1e8)]

    found = [_solved(own, cache_dir) for own in jobs]

    for slower, faster in pairwise(found):
        assert faster.least <= slower.least * (1 + CLOSE)
        assert faster.bound <= slower.least * (1 + CLOSE)


def test_a_search_on_fewer_devices_does_not_weaken_the_bound(cache_dir: Path) -> None:
    """Half of the devices count with what their search proves, not with the floor below which none is looked for."""
    job = drawn(3)
    limit = Enumeration.of(job, cache_dir).limit
    task = job.prepare(cache_dir, limit)
    proven = search_plans(task, Effort()).bound

    report = _solved(job, cache_dir, limit)

    assert report.space[-1].startswith("plans on fewer GPUs; on 2 GPUs")
    assert least_seconds(resized(task, gpus=2)) < proven
    assert report.bound == proven
