"""The law for stages with meshes and placements of their own: they train like the unpartitioned model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import currently_in_test_context, event, given, note, settings
from hypothesis import strategies as st

from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.ir.blocks import find_blocks
from autopar.ir.text import format_graph
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh, Partial
from autopar.training import training_step
from tests.executions import TINY, Execution, model_rules
from tests.random_graphs import Model, models
from tests.shares import some
from tests.test_law_graphs import STEPS, data_of, states_of
from tests.test_prediction import plan_of
from tests.variants import plan_of_variants, random_plan_of_variants, random_variants, staged

SEVERAL = {
    "unequal": (Mesh.of(a=2), Mesh.of(a=4), Mesh.of(a=2)),
    "two axes and one": (Mesh.of(a=2, b=2), Mesh.of(a=2)),
    "equal sizes of another shape": (Mesh.of(a=4), Mesh.of(a=2, b=2)),
    "equal meshes with other placements": (Mesh.of(a=2), Mesh.of(a=2), Mesh.of(a=2)),
    "equal meshes whose axes have other names": (Mesh.of(a=2), Mesh.of(b=2), Mesh.of(c=2)),
    "one device and many": (Mesh.of(a=1), Mesh.of(a=2, b=2), Mesh.of(a=2)),
}
"""Meshes of the groups of devices of a pipeline."""
ORDERS = ("1f1b", "gpipe", "zb-h1", "zb-h2")
MESHES = (Mesh.of(a=1), Mesh.of(a=2), Mesh.of(a=3), Mesh.of(a=4), Mesh.of(a=2, b=2), Mesh.of(a=2, b=3))


@pytest.mark.parametrize("name", some(TINY, lambda name: name not in ("resnet50", "unet-sd1", "vit-b16", "bert-base")))
def test_random_variants_train_like_the_model(name: str, cache_dir: Path) -> None:
    """Loss, gradients and updated states, for random placements of everything on stages of every kind of mesh."""
    rules = model_rules(name, cache_dir)
    execution = Execution.of(name, 4, 2)

    for seed, meshes in enumerate(SEVERAL.values()):
        schedule = ORDERS[seed % len(ORDERS)]
        execution.check(random_plan_of_variants(execution.folded, rules, meshes, schedule, 2, 4, seed))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe-v"])
def test_groups_of_devices_take_turns_with_a_variant_each(schedule: str, cache_dir: Path) -> None:
    """Two stages on 2 devices, two on 4: a block of the second group follows one of the first, and the other way."""
    execution = Execution.of("gpt2", 4, 2)
    meshes = (Mesh.of(a=2), Mesh.of(a=2, b=2))

    for seed in range(3):
        plan = random_plan_of_variants(
            execution.folded, model_rules("gpt2", cache_dir), meshes, schedule, 2, 4, 20 + seed
        )
        execution.check(plan)


def test_variants_infer_like_the_model(cache_dir: Path) -> None:
    execution = Execution.of("llama3-8b", 4, 2, train=False)
    rules = model_rules("llama3-8b", cache_dir, train=False)

    for seed, meshes in enumerate(SEVERAL.values()):
        execution.check(random_plan_of_variants(execution.folded, rules, meshes, "forward-only", 2, 4, seed))


def test_stages_of_one_variant_may_lie_around_those_of_another(cache_dir: Path) -> None:
    """Stages 0 and 2 are placed alike, stage 1 otherwise; what is far passes it by. Tied weights are at both ends."""
    execution = Execution.of("gpt2", 4, 3, steps=2)
    variants = random_variants(execution.folded, model_rules("gpt2", cache_dir), (Mesh.of(a=4), Mesh.of(a=2)), 5)

    for seed in range(3):
        execution.check(plan_of_variants(variants, (0, 1, 0), "1f1b", 3, 4, seed))


def test_some_stages_may_offload(cache_dir: Path) -> None:
    """Activations of the first stage, the optimizer of the second; they have the same kind of layer on other meshes."""
    execution = Execution.of("mlp-xs", 4, 3)
    meshes = (Mesh.of(a=2), Mesh.of(a=2, b=2))
    plan = random_plan_of_variants(execution.folded, model_rules("mlp-xs", cache_dir), meshes, "1f1b", 3, 4, 8)
    first, second = plan.stages

    execution.check(replace(plan, stages=(replace(first, recompute="offload"), replace(second, offload="optimizer"))))


BATCH = 8
BY_DEGREES = {
    "terms become fewer": (
        Degrees(dp=2, tp=2, microbatch=2, global_batch=BATCH),
        Degrees(tp=2, microbatch=4, global_batch=BATCH),
        Degrees(dp=4, global_batch=BATCH),
    ),
    "terms become more": (
        Degrees(dp=4, zero=1, global_batch=BATCH),
        Degrees(tp=4, microbatch=4, global_batch=BATCH),
        Degrees(dp=2, microbatch=2, global_batch=BATCH),
    ),
    "parameters in shards": (
        Degrees(dp=4, zero=3, global_batch=BATCH),
        Degrees(tp=2, microbatch=4, sequence_parallel=True, global_batch=BATCH),
    ),
}


@pytest.mark.parametrize("name", BY_DEGREES)
def test_ways_to_split_stages_can_be_mixed(name: str, cache_dir: Path) -> None:
    """Data, tensor and sequence parallelism and ZeRO. The gradient of tied weights goes to their owner as terms."""
    found = [plan_of("gpt2", degrees, cache_dir) for degrees in BY_DEGREES[name]]
    execution, plans = found[0][0], [plan for _, plan in found]

    plan = staged(plans, "1f1b", [1] * (len(plans) - 1))

    terms = [
        crossing
        for crossing in execution.program(plan).crossings
        if any(isinstance(placement, Partial) for placement in crossing.source.placements)
    ]
    assert bool(terms) == (plan.variants[-1].mesh[0].name == "dp")
    execution.check(plan)


def check_random_variants(
    model: Model, meshes: tuple[Mesh, ...], num_microbatches: int, schedule: str, seed: int, cache_dir: Path
) -> float:
    """Assert the law for a random plan with variants of a model, and return the largest deviation."""
    graph = training_step(find_blocks(model.graph), loss=model.loss)
    rules = discover(graph, cache_dir=cache_dir)
    execution = Execution.of_graph(
        graph, data_of(graph, model.classes, num_microbatches), states_of(graph, model.states), steps=STEPS
    )
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    meshes = meshes[: execution.folded.num_blocks // chunks]
    samples = graph.values[graph.inputs[0]].shape[0]
    if not meshes or SCHEDULES[schedule].problem(len(meshes), num_microbatches, chunks)[0]:
        return 0.0
    plan = random_plan_of_variants(execution.folded, rules, meshes, schedule, num_microbatches, samples, seed)
    if currently_in_test_context():
        note(format_graph(find_blocks(model.graph)))
        note(f"{meshes}, {schedule}, seed {seed}")
        event(f"{len(meshes)} stages")
    return execution.check(plan)


PLANS: dict[str, st.SearchStrategy[Any]] = {
    "model": models(),
    "meshes": st.lists(st.sampled_from(MESHES), min_size=2, max_size=3).map(tuple),
    "num_microbatches": st.integers(1, 3),
    "schedule": st.sampled_from([*ORDERS, "interleaved", "zb-v"]),
    "seed": st.integers(0, 2**16),
}


@settings(max_examples=6)
@given(drawn=st.fixed_dictionaries(PLANS))
def test_random_variants_of_random_models_train_like_the_model(drawn: dict[str, Any], cache_dir: Path) -> None:
    """Loss, gradients and updated states after three steps."""
    check_random_variants(cache_dir=cache_dir, **drawn)


@pytest.mark.slow
@settings(max_examples=300)
@given(drawn=st.fixed_dictionaries(PLANS))
def test_many_random_variants_of_random_models_train_like_the_model(drawn: dict[str, Any], cache_dir: Path) -> None:
    """As above."""
    check_random_variants(cache_dir=cache_dir, **drawn)
