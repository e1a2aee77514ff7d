"""Batch normalisation with the statistics of each device, as frameworks have it by default, or of the whole batch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autopar import models
from autopar.cluster import load_cluster
from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.folding.fold import fold
from autopar.formulate.building import build_tables
from autopar.formulate.manual_recipes import batch_dims
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph
from autopar.onnx import load
from autopar.plan import Job, ModelInfo, Plan
from autopar.prediction import Predictor
from autopar.program.lower import lower
from autopar.program.records import Collective, Compute, Program, SegmentPhase
from autopar.program.verify import verify_program
from autopar.runtime import run_step
from autopar.sharding import Mesh, Shard
from autopar.tactics import DataParallel, Tactic
from autopar.tactics.draft import Draft
from autopar.training import training_step
from autopar.workload import open_workload
from tests.executions import COSTS, EXECUTOR, TINY, TOLERANCE, Array, check_close, model_feeds, run_unpartitioned
from tests.gradients import as_float64
from tests.single_ops import floats, positive, single_op

NAME = "resnet50"


@cache
def step(samples: int, *, synchronised: bool) -> Graph:
    """Return a training step of a tiny network with batch normalisation in float64."""
    graph = as_float64(find_blocks(load(models.build(NAME, **TINY[NAME]), batch=samples)))
    return training_step(graph, sync_batchnorm=synchronised)


def data_parallel(synchronised: bool, cache_dir: Path, *more: Tactic) -> tuple[Program, Graph]:
    """Return the program of 2 data-parallel devices on 2 microbatches of 4 samples, verified."""
    graph, large = (step(samples, synchronised=synchronised) for samples in (4, 8))
    folded = fold(graph)
    rules = discover(step(10, synchronised=synchronised), cache_dir=cache_dir)
    draft = Draft(
        folded, rules, Mesh.of(b=2), COSTS, model=ModelInfo(NAME, NAME, "", 1), job=Job("train", 2, 8, 75e9, {}),
        batch=batch_dims(graph.values, large.values), num_microbatches=2,
    )  # fmt: skip
    for tactic in (DataParallel("b"), *more):
        draft.apply(tactic)
    program = lower(draft.plan(), folded, COSTS)
    verify_program(program, folded)
    return program, graph


def test_own_statistics_compute_what_gradient_accumulation_does(cache_dir: Path) -> None:
    """2 devices on 2 microbatches of 4 samples: the step on one device with 4 microbatches of 2 samples."""
    program, graph = data_parallel(False, cache_dir)
    data, states = model_feeds(NAME, graph, 2)
    parts: list[Mapping[str, Array]] = [
        {name: np.split(x, 2)[half] if x.shape and x.shape[0] == 4 else x for name, x in each.items()}
        for each in data
        for half in (0, 1)
    ]

    found = run_step(program, fold(graph), data, states, EXECUTOR)

    expected = run_unpartitioned(step(2, synchronised=False), parts, states)
    check_close(found.gradients, expected.gradients, TOLERANCE)
    check_close(found.states, expected.states, TOLERANCE)
    for index, outputs in enumerate(found.outputs):
        (loss,) = outputs.values()
        (first,), (second,) = (expected.outputs[2 * index + half].values() for half in (0, 1))
        assert loss == pytest.approx(first + second, rel=1e-9)


def test_synchronised_statistics_compute_what_the_whole_batch_does(cache_dir: Path) -> None:
    program, graph = data_parallel(True, cache_dir)
    data, states = model_feeds(NAME, graph, 2)

    found = run_step(program, fold(graph), data, states, EXECUTOR)

    check_close(found.gradients, run_unpartitioned(graph, data, states).gradients, TOLERANCE)


def test_one_device_computes_the_same_either_way() -> None:
    """A mean of sums over a constant number is the mean."""
    own, whole = (step(4, synchronised=synchronised) for synchronised in (False, True))
    data, states = model_feeds(NAME, whole, 2)

    found = run_unpartitioned(own, data, states)

    check_close(found.gradients, run_unpartitioned(whole, data, states).gradients, TOLERANCE)


@pytest.mark.parametrize("synchronised", [False, True])
def test_collectives_of_statistics_are_those_of_synchronised_ones(synchronised: bool, cache_dir: Path) -> None:
    """Per normalisation 2 in the forward and 2 in the backward pass; none where each device has its own."""
    program, _ = data_parallel(synchronised, cache_dir)

    for segment in program.segments:
        if segment.phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD):
            kinds = [each.op.kind for each in segment.instructions if isinstance(each, Compute)]
            norms = sum(kind in ("autopar::BatchNorm", "autopar::BatchNormGrad") for kind in kinds)
            collectives = sum(isinstance(each, Collective) and not each.overlaps for each in segment.instructions)
            assert collectives == (2 * norms if synchronised else 0)


def test_an_op_takes_its_own_terms_of_means_where_it_shards_the_batch() -> None:
    """Only there, and only if it says that it does: channels and images are sharded as they are found to be."""
    inputs = [floats(4, 6, 8, 8), floats(6), floats(6), floats(6), positive(6)]
    graph, op = single_op("autopar::BatchNorm", inputs, 1, epsilon=1e-5, per_device=1)
    plain = single_op("autopar::BatchNorm", inputs, 1, epsilon=1e-5)

    found = {str(strategy) for strategy in discover(graph).of(op).strategies}
    others = {str(strategy) for strategy in discover(plain[0]).of(plain[1]).strategies}

    assert found - others == {"S(0),R,R,P(mean),P(mean) -> S(0)"}
    assert others - found == {"S(0),R,R,R,R -> S(0)"}


def test_the_planner_may_shard_the_batch_of_every_op_with_own_statistics(cache_dir: Path) -> None:
    """Each of these values has terms of one kind, a mean: no op is left without the batch."""
    graph = step(4, synchronised=False)
    rules = discover(step(10, synchronised=False), cache_dir=cache_dir)

    tables = build_tables(fold(graph), rules, Mesh.of(dp=2), COSTS)

    places = dict.fromkeys(("autopar::BatchNorm", "autopar::BatchNormGradMeans", "autopar::BatchNormGrad"), 0)
    for node in tables.nodes:
        if node.options is not None:
            op = tables.folded.kinds[node.kind].ops[node.position]
            if op.attr("per_device"):
                found = [node.options.by_axis(number)[0].inputs[0] for number in range(node.count)]
                assert Shard(0) in found, op.name
                places[op.kind] += 1
    assert all(places.values())


def test_a_job_says_how_a_batch_is_normalised(cache_dir: Path) -> None:
    """Plans of before do not say and were synchronised; so is everything that normalises no batch."""
    degrees, cluster = Degrees(dp=2, global_batch=8, microbatch=4), load_cluster("h100")
    plans: dict[tuple[str, bool], Plan] = {}
    for name, dims in (("resnet50", {"channels": 8, "image_size": 32}), ("mlp-xs", {"hidden": 16})):
        for synchronised in (False, True):
            workload = open_workload(f"zoo:{name}", dims=dims, sync_batchnorm=synchronised)
            plans[name, synchronised] = Predictor(workload, cache_dir).planned(degrees, cluster)

    own, synchronised_plan = plans["resnet50", False], plans["resnet50", True]
    assert [plan.job.sync_batchnorm for plan in plans.values()] == [False, True, True, True]
    assert own.job == replace(synchronised_plan.job, sync_batchnorm=False)
    assert Plan.from_json(own.to_json()).job == own.job
    data = json.loads(synchronised_plan.to_json())
    data["job"].pop("sync_batchnorm", None)
    assert Plan.from_json(json.dumps(data).encode()).job.sync_batchnorm
