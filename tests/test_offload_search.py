"""What goes to host memory as a choice of the search: opened in need or where it is pinned, priced, executed."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.api import plan_task
from autopar.bench.baselines import BASELINES
from autopar.bench.baselines.race import Race
from autopar.bench.records import Result
from autopar.cluster import PRESETS
from autopar.configuration import Configuration
from autopar.errors import InfeasibleError, PinError
from autopar.formulate.constraints import FREE, Constraints
from autopar.least_memory_plan import thriftiest
from autopar.pins import broken, pins_from
from autopar.pins.reading import pins_of
from autopar.plan import Plan
from autopar.progress import never, silent
from autopar.recompute import BY_SECONDS, RESERVE, Hosted, Recompute
from autopar.request import JobRequest
from autopar.search.branch_and_bound import search as run_search
from autopar.search.candidate import Candidate
from autopar.search.host_restaging import restaged
from autopar.search.node_solver import open_node
from autopar.sharding import Mesh
from autopar.simulate import simulate
from autopar.sizing.explain import Limits, explain_infeasible
from autopar.sizing.records import Infeasibility
from autopar.task import Effort, Task, pinned, prepare
from tests.executions import COSTS, Execution, found_candidates, model_rules, search_of, written
from tests.formulations import DIMS
from tests.sizes import short_task

ALL = RESERVE
SLOW = replace(PRESETS["h100"], host=replace(PRESETS["h100"].known_host(), to_host=1e8, to_device=1e8))
"""Devices whose host link is so slow that copies show in models as small as these."""


def _task(memory: float | None = None, gpus: int = 2, num_layers: int = 5, **pins: Any) -> Task:
    return prepare(
        JobRequest(
            "zoo:mlp-xs",
            gpus=gpus,
            cluster=SLOW,
            global_batch=8,
            dims=DIMS["mlp-xs"] | {"num_layers": num_layers},
            memory_limit=memory,
            pins=pins_from(pins) if pins else None,
        )
    )


def _short(memory: float | None = None, **pins: Any) -> Task:
    """A task whose whole space is soon searched, with little memory too."""
    return _task(memory, num_layers=2, **pins)


def _least(task: Task) -> tuple[float, float]:
    """Return the bytes of the thriftiest plans: on devices alone, and with host memory."""
    alone, opened = thriftiest(task), thriftiest(task.opened)
    assert opened.bytes < alone.bytes
    return alone.bytes, opened.bytes


def _hosted(plan: Plan) -> set[Hosted]:
    activations = any(Recompute.OFFLOAD in stage.flavours for stage in plan.stages)
    found = {stage.hosted_state for stage in plan.stages if stage.offload}
    return found | {Hosted.ACTIVATIONS} if activations else found


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("keeps", [{Recompute.OFFLOAD}, set(BY_SECONDS)], ids=["activations", "any"])
def test_what_the_search_chooses_computes_the_same(stages: int, keeps: set[Recompute], cache_dir: Path) -> None:
    """The law, for plans that do not fit on the device: it takes what the simulator says, and fits where it should."""
    execution, rules = Execution.of("gpt2", 4, 2), model_rules("gpt2", cache_dir)
    configuration = Configuration(stages, Mesh.of(inner=2), 2, "1f1b")
    own = Constraints(hosted=ALL, keeps=(frozenset(keeps),) * len(execution.folded.chain))
    limit, plan = 5e5, None
    while plan is None or not _hosted(plan):
        limit /= 1.2
        (candidate, *_) = found_candidates(execution.folded, rules, configuration, 4, limit, COSTS, own)
        plan = written(candidate, 8, True)

    execution.check(plan)
    timeline = simulate(execution.program(plan), COSTS)
    assert timeline.fits(limit)
    assert timeline.step_seconds == pytest.approx(candidate.objective, rel=0.02)


def test_host_memory_is_opened_in_need_only() -> None:
    """Just below what fits on devices alone a plan with host memory is found; else it is tried on placements only."""
    alone, opened = _least(_short())

    free, tight = (plan_task(_short(limit), Effort()) for limit in (1.01 * alone, 1.01 * opened))

    assert free.search is not None
    assert tight.search is not None
    assert not _hosted(free)
    assert any(
        line.startswith("CPU offload of activations and optimizer state was tried on the placements of the best plans")
        for line in free.search.space
    )
    assert _hosted(tight)
    assert any(
        line.startswith("CPU offload of activations and optimizer state was tried") for line in tight.search.space
    )
    assert tight.search.bound <= tight.objective


@pytest.mark.slow
def test_plans_that_recompute_are_tried_with_host_memory(cache_dir: Path) -> None:
    """Where the host is near the same placements recompute less, in less time; where it is far they stay."""
    execution, rules = Execution.of("gpt2", 4, 2), model_rules("gpt2", cache_dir)
    configuration, host = Configuration(1, Mesh.of(inner=2), 2, "1f1b"), COSTS.cluster.known_host()
    limit, candidates = 5e5, list[Candidate]()
    while not candidates or set(candidates[0].split.flavours) == {Recompute.NONE}:
        limit /= 1.1
        candidates = found_candidates(execution.folded, rules, configuration, 4, limit)

    def tried(speed: float) -> list[Candidate]:
        near = replace(COSTS.cluster, host=replace(host, to_host=speed, to_device=speed, latency=0.0))
        given = execution.folded, rules, configuration, 4, limit, replace(COSTS, cluster=near)
        return restaged(search_of(*given, Constraints(hosted=ALL)), candidates, math.inf)

    assert not tried(1e3)
    found = min(tried(1e15), key=lambda candidate: candidate.objective)
    assert found.objective < 0.99 * candidates[0].objective
    plan = written(found, 8, True)
    assert _hosted(plan)
    assert simulate(execution.program(plan), COSTS).fits(limit)
    execution.check(plan)


def test_no_plan_with_host_memory_is_faster_than_the_report_says() -> None:
    """What is said of the space that was not opened holds when it is."""
    alone, _ = _least(_short())
    task = _short(1.01 * alone)
    outcome = run_search(task.space, task.context(Effort()))
    opened = pinned(task, pins_from({"pin": {"offload": ["none", "activations", "optimizer"]}}))

    found = run_search(opened.space, opened.context(Effort()))

    assert found.bound <= found.best <= outcome.best * (1 + 1e-9)
    assert found.best >= min(task.context(Effort()).least((each,)) for each in task.space)


@pytest.mark.parametrize(
    ("pins", "hosted"),
    [
        ({"pin": {"offload": ["activations", "optimizer"]}}, {Hosted.ACTIVATIONS, Hosted.OPTIMIZER}),
        ({"pin": {"offload": "optimizer"}}, {Hosted.OPTIMIZER}),
        ({"pin": {"offload": "activations"}}, {Hosted.ACTIVATIONS}),
        ({"pin": {"recompute": "offload", "stages": 2}}, {Hosted.ACTIVATIONS}),
        ({"pin": {"offload": {"0-2": "optimizer", "3-4": "none"}, "stages": 2, "boundaries": 3}}, {Hosted.OPTIMIZER}),
        ({"pin": {"offload": "none"}}, set()),
        ({"forbid": {"offload": "activations"}}, set()),
    ],
    ids=["both", "optimizer", "activations", "by-recompute", "by-blocks", "none", "forbidden"],
)
def test_pinned_offload_is_kept_to(pins: dict[str, Any], hosted: set[Hosted]) -> None:
    """What is named is in host memory, everywhere, and nothing else."""
    task = _task(**pins)
    plan = plan_task(task, Effort())

    assert _hosted(plan) == hosted
    folded = task.workload.folded(plan.microbatch)
    assert broken(plan, task.pins, folded) == ()
    if hosted:
        assert broken(plan, pins_from({"forbid": {"offload": list(map(str, hosted))}}), folded)
        assert broken(plan, pins_from({"pin": {"offload": "none"}}), folded)
    else:
        assert broken(plan, pins_from({"pin": {"offload": "optimizer"}}), folded)
    own = pins_of(plan, folded, task.rules_of(folded), task.workload.batch_dims_of(folded))
    assert broken(plan, own, folded) == ()
    assert plan_task(pinned(task, own), Effort()).objective == pytest.approx(plan.objective, rel=1e-9)


@pytest.mark.parametrize(
    "pins",
    [
        {"pin": {"offload": "activations"}},
        {"pin": {"offload": "optimizer"}},
        {"forbid": {"recompute": ["none", "selective", "full"]}},
    ],
    ids=["activations", "optimizer", "by-recompute"],
)
def test_what_needs_host_memory_has_no_stages_with_meshes_of_their_own(pins: dict[str, Any]) -> None:
    """Those offload nothing: they are not searched, and nothing is left where only they are allowed."""
    free = short_task("mlp-xs", 4)
    task = pinned(free, pins_from(pins))
    assert free.unequal is not None
    assert task.unequal is None

    plan = plan_task(task, Effort(top_k=1))

    assert _hosted(plan)
    assert broken(plan, task.pins, task.workload.folded(plan.microbatch)) == ()
    with pytest.raises(PinError, match="stages with meshes of their own offload nothing"):
        pinned(free, pins_from({**pins, "pin": {**pins.get("pin", {}), "unequal": True}}))


def test_forbidding_host_memory_is_part_of_the_conflict() -> None:
    """Without the pin a plan fits, and how long it takes is said."""
    limit = 1.01 * _least(_short())[1]
    task = _short(limit, forbid={"offload": ["activations", "optimizer"]})
    outcome = run_search(task.space, task.context(Effort()))
    assert not outcome.candidates

    error = explain_infeasible(task, Effort(), outcome, most_gpus=2, limits=Limits(*[np.inf] * 5))

    assert isinstance(error, InfeasibleError)
    report = error.report
    assert isinstance(report, Infeasibility)
    assert "forbid offload: [activations, optimizer]" in report.conflict
    (way,) = (way for way in report.relaxations if "offload" in way.what)
    assert way.peak_bytes <= limit
    assert np.isfinite(way.step_seconds)


def test_a_cluster_without_hosts_offloads_nothing() -> None:
    task = prepare(
        JobRequest(
            "zoo:mlp-xs", gpus=2, cluster=replace(PRESETS["h100"], host=None), global_batch=8, dims=DIMS["mlp-xs"]
        )
    )
    assert not task.constraints.reserve

    with pytest.raises(PinError, match="optimizer cannot lie in host memory: the cluster does not say"):
        pinned(task, pins_from({"pin": {"offload": "optimizer"}}))


def test_constraints_are_closed_unless_opened() -> None:
    assert Recompute.OFFLOAD not in FREE.flavours()
    assert Constraints(reserve=ALL).opened.flavours() == BY_SECONDS
    assert Constraints(reserve=ALL).opened.hosts_optimizer


def test_grid_search_gets_what_the_space_has() -> None:
    """Offload where it is pinned, and where nothing fits without; else none of its plans has any."""
    effort = Effort(top_k=1)

    def offloads(task: Task) -> tuple[set[str], Result]:
        space = Race(task, "grid", 0.0, silent, never).space
        found = {str(value) for leaf in space.leaves() for name, value in leaf.items() if name == "offload"}
        return found, BASELINES["grid"].find(task, effort, "grid", silent, never)

    free, plain = offloads(_task())
    pinned_, _ = offloads(_task(pin={"offload": ["none", "optimizer"]}))
    assert free == {""}
    assert pinned_ == {"", "optimizer"}

    result, limit = plain, plain.plans[0].peak_bytes
    while "offloaded" not in result.plans[0].summary:
        limit /= 1.1
        _, result = offloads(_task(limit))
    assert result.plans[0].peak_bytes <= limit


def _tried(configuration: Configuration, room: float, limit: float) -> tuple[bool, Candidate | None]:
    """Return whether a configuration of four layers is looked at, and its best plan.

    Args:
        configuration: The configuration.
        room: Host memory of a device, in what the optimizer's state takes there at least.
        limit: Memory of a device for that, beside what may not lie in host memory.
    """
    search = _task(num_layers=4).opened.context(Effort())
    fixed = search.roofline.bytes(configuration, offload=True)
    state = search.roofline.bytes(configuration) - fixed
    search = replace(search, host_room=room * state, memory_limit=fixed + limit * state)
    node = open_node(search, (configuration,), math.inf)
    assert node is not None
    node.solve(node.relax(math.inf), math.inf)
    return search.may_fit(configuration), node.best


INTERLEAVED = Configuration(2, Mesh.of(inner=1), 8, "interleaved", 2)


def test_host_memory_that_does_not_hold_all_of_a_group_holds_that_of_some_stages() -> None:
    """Neither it nor the device has room for the optimizer's state of both stages that take turns on a device."""
    _, best = _tried(INTERLEAVED, 0.6, 1.2)

    assert best is not None
    for group in range(2):
        away = [own for stage in best.split.offload[group::2] for own in stage]
        assert 0 < sum(away) < len(away)


@pytest.mark.parametrize("configuration", [replace(INTERLEAVED, schedule="1f1b", num_chunks=1), INTERLEAVED])
def test_what_has_no_room_for_the_state_has_no_plan(configuration: Configuration) -> None:
    """Beside the host's memory and the parameters: what neither has room for has no plan."""
    found = {(room, limit): _tried(configuration, room, limit) for room in (0.5, 0.9, 1.1) for limit in (0.3, 0.7, 1.3)}

    assert {own for own, (may_fit, _) in found.items() if not may_fit} >= {(0.5, 0.3)}
    assert all(best is None for may_fit, best in found.values() if not may_fit)
    assert any(best is not None for _, best in found.values())
    assert found[0.9, 0.7][0]
    assert all(may_fit for (room, limit), (may_fit, _) in found.items() if room > 1)
