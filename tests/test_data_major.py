"""Meshes of three axes with a data-parallel major axis: their list, the restriction of the axis, and the bound."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autopar.api import plan_task
from autopar.configuration import Configuration, configurations, describe
from autopar.formulate.constraints import Constraints
from autopar.formulate.data_major import is_data_major
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.manual_recipes import batch_dims
from autopar.formulate.op_strategies import all_placements
from autopar.formulate.step_time import Split, step_time
from autopar.formulate.tables import Decision, Tables
from autopar.ir.graph import Phase
from autopar.recompute import Recompute
from autopar.request import JobRequest
from autopar.search.branch_and_bound import search as run_search
from autopar.search.context import SearchContext
from autopar.search.node_solver import NodeSolver, open_node
from autopar.search.settings import DEFAULT_SETTINGS
from autopar.sharding import Mesh
from autopar.task import Effort, Task, prepare
from tests.executions import Execution, model_graph, model_rules, random_plan
from tests.formulations import COSTS, optimum, random_choice, rules, splits, workload

MESH = Mesh.of(dp=2, outer=2, inner=2)
CLOSE = 3e-6
"""Relative: placement problems are proven optimal to 1e-6 each."""


def _found(name: str, mesh: Mesh, samples: int, mode: str = "train") -> Tables:
    """Return the tables of a tiny model."""
    own = workload(name, mode)
    tables = Constraints(batch=own.batch_dims_of).tables(own.folded(samples), rules(name, mode), mesh, COSTS)
    assert tables is not None
    return tables


def _space(gpus: int, batch: int = 64) -> list[Configuration]:
    return configurations(
        gpus=gpus, devices_per_node=8, num_blocks=4, global_batch=batch, batch_of_model=None, mode="train"
    )


@pytest.mark.parametrize("gpus", [1, 4, 8, 64, 96, 1024])
def test_listed_meshes_of_three_axes(gpus: int) -> None:
    """Three axes from 8 devices on: inner within a node, both minor axes within four, dp divides the samples."""
    space = [each for each in _space(gpus) if len(each.mesh.axes) > 2]

    assert bool(space) == (gpus >= 8)
    for each in space:
        dp, outer, inner = each.mesh.shape
        assert is_data_major(each.mesh)
        assert min(dp, outer, inner) > 1
        assert each.mesh.size * each.num_stages == gpus
        assert inner <= 8
        assert outer * inner <= 32
        assert (64 // each.num_microbatches) % dp == 0


def test_a_batch_that_the_axis_does_not_divide_is_not_listed() -> None:
    assert not any(is_data_major(each.mesh) for each in _space(8, batch=27))
    assert {each.num_microbatches for each in _space(8, batch=54) if is_data_major(each.mesh)} == {1, 3, 9, 27}


def test_the_declared_space_names_them() -> None:
    words = "; ".join(describe(_space(16)))

    assert "three axes whose major one is data parallel 2×2×2, 2×2×4, 2×4×2, 4×2×2;" in words
    assert "three axes" not in "; ".join(describe(_space(4)))


def test_the_declared_space_says_which_devices_it_is_of() -> None:
    """Where there are nodes to tell apart, and more of them than the free axes may span."""
    one, two, eight = ("; ".join(describe(_space(gpus), num_nodes=nodes)) for gpus, nodes in ((8, 1), (16, 2), (64, 8)))

    assert "pipeline stages 1, 2, 4, cut at any block" in one
    assert "pipeline stages 1, 2, 4 of consecutive devices, cut at any block" in two
    assert "on the other two, which span 4 nodes at most" in eight
    assert "nodes at most" not in one + two


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_the_major_axis_is_data_parallel(name: str) -> None:
    """The major axis splits every value of a pass with a batch dim; parameters, gradient sums and updates are free."""
    found = _found(name, MESH, 8)
    dims = workload(name).batch_dims(8)
    shapes = {value: info.shape for value, info in found.folded.graph.values.items()}
    split = 0
    for node in found.nodes:
        if node.decision is Decision.PARAMETER:
            assert node.value is not None
            shape = node.value.shape
            assert set(node.outputs(0)) == set(all_placements(shape, (1,) * len(shape), MESH, partial=False))
        elif node.decision is Decision.OP and node.options is not None:
            op = found.folded.kinds[node.kind].ops[node.position]
            names, numbers = (*op.inputs, *op.outputs), (*node.options.inputs, *node.options.outputs)
            if op.phase is Phase.UPDATE:
                continue
            digits = {
                v: set(n // (len(shapes[v]) + 2) ** 2)
                for v, n in zip(names, numbers, strict=True)
                if n is not None and v in dims
            }
            assert all(own <= {2 + dims[v]} or own == {0} for v, own in digits.items()), op.name
            split += any(own == {2 + dims[v]} for v, own in digits.items())
    assert split > len(found.nodes) / 4


def test_the_minor_axes_are_free() -> None:
    """An op of the passes has as many strategies as on the two minor axes with its share of the samples."""
    three, two = _found("llama3-8b", MESH, 8), _found("llama3-8b", Mesh.of(outer=2, inner=2), 4)
    matrices = 0
    for node, own in zip(three.nodes, two.nodes, strict=True):
        assert node.name == own.name
        op = None if node.options is None else three.folded.kinds[node.kind].ops[node.position]
        if op is not None and op.kind == "MatMul" and op.phase is Phase.FORWARD:
            matrices += 1
            assert node.count == own.count
            np.testing.assert_allclose(sorted(node.seconds), sorted(own.seconds))
    assert matrices


@pytest.mark.parametrize("name", ["mlp-xs", "llama3-8b", "mixtral-8x7b"])
def test_random_plans_train_like_the_model(name: str, cache_dir: Path) -> None:
    """Lowered, verified, executed: loss, gradients and updates are those of the unpartitioned model."""
    execution = Execution.of(name, 4, 2)
    dims = batch_dims(model_graph(name, 4).values, model_graph(name, 8).values)
    constraints = Constraints(batch=lambda folded: dims)
    configuration = Configuration(1, MESH, 2, "1f1b")
    for seed in range(2):
        plan = random_plan(
            execution.folded, model_rules(name, cache_dir), configuration, 4, seed, constraints=constraints
        )
        assert [axis.size for axis in plan.mesh] == [2, 2, 2]
        execution.check(plan)


@cache
def _task() -> Task:
    return prepare(JobRequest("zoo:mlp-xs", gpus=8, global_batch=8, dims={"num_layers": 2, "hidden": 16}))


def _limited(tasks: int) -> SearchContext:
    """Return the inputs of a search that does so many tasks on meshes with an outer data-parallel axis."""
    settings = replace(DEFAULT_SETTINGS, outer_tasks=tasks, outer_share=0.0, outer_factor=1.0)
    return replace(_task().context(Effort(top_k=1)), settings=settings)


@pytest.mark.parametrize("pieces", [0, 1, 1000])
def test_the_bound_covers_meshes_with_an_outer_data_parallel_axis(pieces: int) -> None:
    """It is below every plan found by solving each configuration alone, and below random choices under every split.

    That holds for any number of tasks on these meshes.
    """
    task, search = _task(), _limited(pieces)
    outcome = run_search(task.space, search)
    three = [each for each in task.space if is_data_major(each.mesh)]
    rng = np.random.default_rng(0)
    best, tried = np.inf, 0
    for configuration in three:
        node = open_node(search, (configuration,), np.inf)
        assert node is not None
        node.solve(node.relax(np.inf), np.inf)
        assert node.best is not None
        best = min(best, node.best.objective)
        tried += _tried(node, configuration, outcome.bound, rng)

    assert tried > 10
    assert outcome.bound <= best * (1 + CLOSE)
    assert outcome.closed_bound >= outcome.bound
    assert outcome.solved + outcome.pruned == len(task.space) - len(outcome.closed)
    if pieces == 1000:
        assert outcome.closed == ()
        assert outcome.candidates[0].objective <= best * (1 + CLOSE)
    elif not pieces:
        floors = {search.least((each,)): each for each in three}
        assert outcome.closed_bound >= min(floors)
        assert set() < set(outcome.closed) <= {each for floor, each in floors.items() if floor < outcome.best}
        assert not any(is_data_major(candidate.configuration.mesh) for candidate in outcome.candidates)


def test_more_tasks_on_meshes_with_an_outer_data_parallel_axis_prove_no_less() -> None:
    bounds = [run_search(_task().space, _limited(tasks)).bound for tasks in (0, 1, 1000)]

    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1]


@pytest.mark.parametrize("tasks", [0, 1000])
def test_the_report_says_what_is_left_of_them(tasks: int) -> None:
    report = plan_task(_task(), Effort(top_k=1, settings=_limited(tasks).settings)).search

    assert report is not None
    left = [line for line in report.space if line.startswith("not searched to the end: ") and "three axes" in line]
    assert bool(left) == (tasks == 0)
    assert any("meshes of three axes whose major one is data parallel 2×2×2;" in line for line in report.space)
    assert report.configurations == len(_task().space)
    assert report.bound <= report.objective


def _tried(node: NodeSolver, configuration: Configuration, bound: float, rng: np.random.Generator) -> int:
    """Return how many plans were held against a bound."""
    tables, pipeline = node.tables, node.pipeline
    floor = node.state.search.roofline.seconds(configuration, node.state.search.global_batch)
    instance = problem(tables, weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True))
    choice = optimum(instance)[1]
    tried = 0
    for _ in range(4):
        for ranges in splits(len(tables.folded.chain), pipeline.num_stages):
            split = Split.uniform(ranges, (Recompute.NONE,) * len(ranges))
            totals = tables.block_seconds(choice)
            seconds = step_time(totals, tables.folded.chain, pipeline, split, hop=0.0).seconds
            assert max(bound, floor) <= seconds * (1 + CLOSE)
            tried += 1
        choice = random_choice(instance, rng, near=choice)
    return tried
