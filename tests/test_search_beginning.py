"""What a search begins with: what seems to have room for everything, then what is set up by hand."""

from dataclasses import replace

import pytest

from autopar.api import plan_task
from autopar.configuration import Configuration, configurations, first_tries, fitting_try
from autopar.request import JobRequest
from autopar.search.branch_and_bound import search as run_search
from autopar.search.task_executor import InProcessExecutor
from autopar.search.tasks import SearchTask, TaskKind
from autopar.sharding import Mesh
from autopar.task import Effort, Task, prepare


class _Noting(InProcessExecutor):
    """Records the tasks that it starts."""

    begun: list[SearchTask]

    def start(self, number: int, search_task: SearchTask, end: float) -> None:
        self.begun.append(search_task)
        super().start(number, search_task, end)


def _noting() -> type[_Noting]:
    """Return an executor class that has recorded no task yet."""
    return type("Noting", (_Noting,), {"begun": []})


def _small() -> Task:
    return prepare(JobRequest("zoo:mlp-xs", gpus=2, global_batch=16, dims={"num_layers": 2, "hidden": 16})).on_device


def test_all_that_has_room_is_tried_with_few_stages_and_few_microbatches() -> None:
    space = configurations(
        gpus=64, devices_per_node=8, num_blocks=32, global_batch=256, batch_of_model=None, mode="train"
    )

    def samples(configuration: Configuration) -> int:
        return 256 // configuration.num_microbatches

    most = fitting_try(space, 256, lambda configuration: True)
    some = fitting_try(space, 256, lambda configuration: samples(configuration) <= 64)
    piped = fitting_try(space, 256, lambda own: samples(own) <= 64 and own.num_stages > 1)
    few = fitting_try(space, 256, lambda configuration: samples(configuration) < configuration.mesh.size)

    assert most is not None
    assert some is not None
    assert piped is not None
    assert (most.num_stages, most.mesh.shape, most.num_microbatches) == (1, (8, 8), 1)
    assert (some.num_stages, some.mesh.shape, some.num_microbatches) == (1, (8, 8), 4)
    assert (piped.num_stages, piped.mesh.shape, piped.num_microbatches) == (2, (4, 8), 4)
    assert few is None, "a sample for each device at least"
    assert fitting_try([], 256, lambda configuration: True) is None


@pytest.mark.parametrize("name", ["bert-base", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_what_seems_roomy_is_about_what_a_plan_takes(name: str) -> None:
    """Of all blocks, alike or not; what is there beside while one runs is much in convolutional nets."""
    task = replace(prepare(JobRequest(f"zoo:{name}", gpus=8, global_batch=64)), unequal=None)
    mesh, search = Mesh.of(outer=2, inner=4), task.context(Effort(top_k=1))
    task.space[:] = [own for own in task.space if own.mesh == mesh and own.num_microbatches == 1]
    plan = plan_task(task, Effort(top_k=1))
    assert plan.simulated is not None
    assert "no recompute" in plan.summary
    peak = max(stage.peak for stage in plan.simulated.stages)

    def seems_to_fit(limit: float) -> bool:
        return replace(search, memory_limit=limit).memory_bounds.seems_to_fit(task.space[0])

    assert seems_to_fit(peak)
    assert not seems_to_fit(0.2 * peak)


def test_a_plan_with_room_for_everything_is_enough_to_begin_with() -> None:
    """Without one, all that is set up by hand is tried."""
    task, executor = _small(), _noting()
    search = task.context(Effort(top_k=1))

    assert run_search(task.space, search, executor).candidates
    fitting = fitting_try(task.space, search.global_batch, search.memory_bounds.seems_to_fit)
    assert executor.begun[0].family[0] == fitting
    assert sum(search_task.needs_plan for search_task in executor.begun if search_task.kind is TaskKind.BOUND) == 1

    alone = [own for own in task.space if search.global_batch < own.num_microbatches * own.mesh.size]
    executor = _noting()
    assert run_search(alone, search, executor).candidates
    tries = first_tries([own for own in alone if own.schedule == "1f1b"], search.global_batch, search.least_bytes)
    assert [search_task.family[0] for search_task in executor.begun[: len(tries)]] == tries
