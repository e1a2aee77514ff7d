"""Baselines leave devices free where links between nodes are slow, and only there."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from autopar.api import plan_task
from autopar.bench.baselines import BASELINES, by_degrees
from autopar.bench.baselines.annealing import annealing
from autopar.bench.baselines.beam import beam, greedy
from autopar.bench.baselines.degree_space import DECISIONS
from autopar.bench.baselines.grid import grid
from autopar.bench.baselines.mcts import mcts
from autopar.bench.baselines.megatron import megatron
from autopar.bench.baselines.race import Race
from autopar.bench.usual import Sweep, UsualRace, usual_practice
from autopar.cluster import Cluster, NodeGroup, load_cluster
from autopar.cost import default_limit
from autopar.progress import never, silent
from autopar.request import JobRequest
from autopar.task import Effort, Task, prepare
from autopar.verdict import step_seconds

METHODS: tuple[Callable[[Race], None], ...] = (grid, greedy, beam, annealing, mcts, megatron)


def _nodes(bandwidth: float) -> Cluster:
    """Nodes of two devices that reach each other at so many bytes/s."""
    preset = load_cluster("h100")
    link = replace(preset.inter, tier="Ethernet", bandwidth=bandwidth, tunings=(), nics=None)
    return replace(preset, name=f"pairs at {bandwidth:g}", devices_per_node=2, inter=link, host=None)


@cache
def _task(bandwidth: float, batch: int = 64) -> Task:
    """Gradients of 134 MB take more than a second over 100 MB/s; products of 8,192 samples 2.3 ms on one device."""
    dims = {"num_layers": 2, "hidden": 4096}
    return prepare(JobRequest("zoo:mlp-xs", gpus=4, cluster=_nodes(bandwidth), global_batch=batch, dims=dims))


def _race(bandwidth: float, batch: int = 64) -> Race:
    return Race(_task(bandwidth, batch), "test", math.inf, silent, never)


def test_the_first_decision_is_the_number_of_devices() -> None:
    """All 4, or the 2 of one node; every beginning of a plan can be completed."""
    space = _race(1e8).space

    plans = [space.degrees(leaf) for leaf in space.leaves()]

    assert DECISIONS[0] == "gpus"
    assert space.options({}) == space.gpu_counts == (4, 2)
    assert {plan.gpus for plan in plans} == {4, 2}
    assert len(set(plans)) == len(plans)


@pytest.mark.parametrize("method", METHODS)
def test_slow_links_leave_devices_free(method: Callable[[Race], None]) -> None:
    """The best plan is on one node, and its line says how many devices are free."""
    found = by_degrees(method, _task(1e8), Effort(top_k=1), "test", silent, never)

    assert found.best is not None
    assert found.best.summary.endswith("; 2 of 4 GPUs are left free")


@pytest.mark.parametrize("name", ["recipes", "alpa"])
def test_placements_by_search_leave_devices_free(name: str) -> None:
    """So do methods that place ops in the configurations of the planner."""
    found = BASELINES[name].find(_task(1e8), Effort(top_k=1), name, silent, never)

    assert found.best is not None
    assert len(found.plans) == 1
    assert found.best.summary.endswith("; 2 of 4 GPUs are left free")


def test_the_faster_kind_of_nodes_is_priced() -> None:
    """Of two kinds of two devices each, plans on two devices are priced on the faster ones, which come last."""
    fast = _nodes(1e8)
    peaks = tuple((numbers, peak / 2) for numbers, peak in fast.device.peaks)
    slow = replace(fast, name="slow", device=replace(fast.device, name="slow", peaks=peaks))
    mixed = Cluster.mixed("both", (NodeGroup(1, slow), NodeGroup(1, fast)), fast.inter)
    dims = {"num_layers": 2, "hidden": 4096}
    task = prepare(JobRequest("zoo:mlp-xs", gpus=4, cluster=mixed, global_batch=64, dims=dims))

    race = Race(task, "test", math.inf, silent, never)

    assert race.space.gpu_counts == (4, 2)
    assert race.estimator(2).cluster == fast
    assert race.limit(2) == default_limit(fast)


@pytest.mark.parametrize("method", [grid, greedy, megatron])
def test_fast_links_leave_no_device_free(method: Callable[[Race], None]) -> None:
    """No plan on fewer devices is priced: its bound is above the best plan on all, or no heuristic tries it."""
    race = _race(1e12, 8192)

    method(race)

    assert math.isfinite(race.best)
    assert {plan.gpus for plan in race.prices} == {4}


def test_the_grid_beside_a_plan_leaves_devices_free() -> None:
    """The plan is on 2 of 4 GPUs; so is the best by degrees, and the grid says that it looked there."""
    task = _task(1e8)
    plan = plan_task(task, Effort(top_k=1))

    found = usual_practice(task, plan, seconds=math.inf).grid

    assert plan.job.gpus == 2
    assert found.step_seconds is not None
    assert found.step_seconds >= step_seconds(plan) * (1 - 1e-9)
    assert found.summary.endswith("; 2 of 4 GPUs are left free")
    assert found.space.endswith(", on 2 GPUs, too")


@pytest.mark.parametrize(("share", "counts"), [(1.01, (4, 2)), (0.99, (4,))])
def test_a_sweep_leaves_out_devices_on_which_no_plan_is_as_fast(share: float, counts: tuple[int, ...]) -> None:
    """As the plan it stands beside, a little slower or faster than the bound for 2 devices."""
    race = UsualRace(_task(1e12), "grid", math.inf, silent, lambda: True)
    sweep = Sweep({}, share * race.least(2))

    sweep(race)

    assert sweep.counts == counts
    assert sweep.total == sum(1 for gpus in counts for _ in race.space.leaves({"gpus": gpus}))


def test_a_method_without_a_plan_ends() -> None:
    """3 rows are not dealt out to 4 or 2 devices, nor does the chain of one block have stages."""
    task = prepare(
        JobRequest("zoo:mlp-xs", gpus=4, cluster=_nodes(1e8), global_batch=3, dims={"num_layers": 1, "hidden": 15})
    )

    results = [BASELINES[name].find(task, Effort(), name, silent, never) for name in ("annealing", "mcts", "grid")]

    assert [result.termination for result in results] == ["infeasible"] * 3
