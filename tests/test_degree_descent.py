"""Plans by degrees that a search for a framework begins with, held against the space that it searches."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from autopar import api, degree_descent
from autopar.configuration import families
from autopar.degree_descent import DegreeDescent
from autopar.frameworks import restriction
from autopar.pins import Pins, pins_from
from autopar.request import JobRequest
from autopar.search.outcome import Outcome
from autopar.search.tasks import SearchTask, TaskKind
from autopar.search.workbench import Workbench
from autopar.seeding import descends
from autopar.sharding import Mesh
from autopar.task import Effort, Task, pinned, prepare
from autopar.task_search import search_plans

MODEL, GPUS = "zoo:qwen3-30b-a3b", 4


def test_plans_by_degrees_are_in_the_space_of_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound on the node of a plan by degrees is above its estimate: experts, batch and matrices lie as it says.

    Four layers of a mixture of 128 experts on 4 H100, all layers without recompute. Backwards of experts that were
    split by sample took 1.6 times as long as by degrees.
    """
    pins = restriction.kept_to("megatron", Pins(), model=MODEL, gpus=GPUS, cluster="h100")
    kind = restriction.kinds_of_recompute("megatron", pins)[0]
    request = JobRequest(
        MODEL, gpus=GPUS, cluster="h100", global_batch=8, dims={"num_layers": 4, "seq": 512}, pins=kind
    )
    task = pinned(prepare(request), kind)
    descent = DegreeDescent(task, restriction.runner("megatron", MODEL), ["none"])

    monkeypatch.setattr(degree_descent, "PATIENCE", 0)
    descent.run(math.inf)

    found = descent.best("none")
    bench = Workbench(replace(task.context(Effort()), memory_limit=math.inf), portable=False)
    nodes = families(task.space)
    split = [own for own in found if own.degrees.ep > 1]
    assert len(split) >= 2
    for own in split[:3]:
        family = next(node for node in nodes if own.configuration in node)
        bound = bench.execute(SearchTask(TaskKind.BOUND, family, 0.0, math.inf), math.inf).bound
        assert bound <= own.seconds * (1 + 1e-6), own


@pytest.mark.parametrize(
    ("mesh", "roles"),
    [
        (Mesh.of(dp=2, ep=4, tp=8), {(8, 8, 1, 4)}),
        (Mesh.of(inner=4), {(4, 1, 1, 1), (4, 1, 1, 2), (4, 1, 1, 4), (1, 1, 4, 1), (1, 4, 1, 1)}),
        (Mesh.of(outer=2, inner=4), {(2, 1, 4, 1), (2, 1, 4, 8), (2, 4, 1, 1), (2, 4, 1, 2), (1, 4, 2, 1)}),
        (Mesh.of(dp=2, outer=2, inner=4), {(2, 4, 2, 1), (2, 4, 2, 4)}),
    ],
)
def test_axes_without_names_are_read_from_the_outermost(mesh: Mesh, roles: set[tuple[int, ...]]) -> None:
    """As data, context and tensor parallelism; experts are over a part of the data-parallel devices."""
    assert set(degree_descent.roles_of(mesh, has_experts=True)) == roles


def test_a_search_under_a_limit_does_not_end_below_plans_by_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is the plan by degrees where that is faster, with the bound of the search and its plan behind it."""
    task = prepare(JobRequest("zoo:gpt2", gpus=4, cluster="h100", global_batch=8, dims={"num_layers": 2, "seq": 128}))
    slow = pinned(task, pins_from({"stages": 4}))
    monkeypatch.setattr(api, "search_plans", partial(_searched, slow))

    plan = api.plan_task(task, Effort(time_limit=60.0, top_k=2))

    assert plan.search is not None
    assert plan.simulated is not None
    assert "descent over degrees" in plan.simulated.remarks[0].text
    assert plan.alternatives[0].simulated is not None
    assert plan.simulated.step_seconds < plan.alternatives[0].simulated.step_seconds
    assert plan.search.bound <= plan.objective
    assert not descends(slow, Effort(time_limit=60.0))
    assert not descends(task, Effort())


def _searched(slow: Task, _: Task, effort: Effort, **rest: Any) -> Outcome:
    """Search what pins leave in place of all."""
    return search_plans(slow, effort, **rest)
