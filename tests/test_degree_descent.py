"""Plans by degrees that a search for a framework begins with, held against the space that it searches."""

import math
from dataclasses import replace

import pytest

from autopar import degree_descent
from autopar.configuration import families
from autopar.degree_descent import DegreeDescent
from autopar.frameworks import restriction
from autopar.pins import Pins
from autopar.request import JobRequest
from autopar.search.tasks import SearchTask, TaskKind
from autopar.search.workbench import Workbench
from autopar.task import Effort, pinned, prepare

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
