"""The law on random small models: random plans on random meshes train like the unpartitioned model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import currently_in_test_context, event, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.configuration import Configuration
from autopar.discover import discover
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Role
from autopar.ir.text import format_graph, parse_graph
from autopar.sharding import Mesh
from autopar.training import STEP, training_step
from tests.executions import Execution, random_plan
from tests.random_graphs import VOCABULARY, Model, models

Array = NDArray[Any]

MESHES = (Mesh.of(inner=2), Mesh.of(inner=4), Mesh.of(outer=2, inner=2), Mesh.of(outer=2, inner=3))
MORE_MESHES = (Mesh.of(inner=3), Mesh.of(inner=8), Mesh.of(outer=4, inner=2), Mesh.of(a=2, b=2, c=2))
STEPS = 3


def data_of(graph: Graph, classes: int, count: int) -> list[dict[str, Array]]:
    """Return random data for each microbatch."""
    rng = np.random.default_rng(count)
    microbatches = []
    for _ in range(count):
        data: dict[str, Array] = {}
        for name in graph.inputs:
            value = graph.values[name]
            high = VOCABULARY if name == "tokens" else classes
            data[name] = rng.normal(size=value.shape) if value.is_float else rng.integers(0, high, value.shape)
        if STEP in graph.inputs:
            data[STEP] = np.asarray(1.0, graph.values[STEP].dtype)
        microbatches.append(data)
    return microbatches


def states_of(graph: Graph, given_states: Mapping[str, Array]) -> dict[str, Array]:
    """Return parameters as given, empty gradient buffers, and moments above 0."""
    rng = np.random.default_rng(0)
    states = {}
    for state in graph.states:
        shape = graph.values[state.input].shape
        match state.role:
            case Role.GRADIENT:
                states[state.input] = np.zeros(shape)
            case Role.MOMENT:
                states[state.input] = rng.uniform(0.1, 1.0, shape)
            case _:
                states[state.input] = given_states[state.input]
    return states


def check_random_plan(
    model: Model, mesh: Mesh, num_stages: int, num_microbatches: int, schedule: str, seed: int, cache_dir: Path
) -> float:
    """Assert the law for a random plan of a model and return the largest deviation."""
    graph = training_step(find_blocks(model.graph), loss=model.loss)
    rules = discover(graph, cache_dir=cache_dir)
    execution = Execution.of_graph(
        graph, data_of(graph, model.classes, num_microbatches), states_of(graph, model.states), steps=STEPS
    )
    stages = min(num_stages, execution.folded.num_blocks)
    configuration = Configuration(stages, mesh, num_microbatches, schedule)
    samples = graph.values[graph.inputs[0]].shape[0]
    plan = random_plan(execution.folded, rules, configuration, samples, seed)
    if currently_in_test_context():
        note(format_graph(find_blocks(model.graph)))
        note(f"{configuration}, seed {seed}")
        event(f"{stages} stages")
    return execution.check(plan)


PLANS: Mapping[str, st.SearchStrategy[Any]] = {
    "model": models(),
    "mesh": st.sampled_from(MESHES),
    "num_stages": st.integers(1, 3),
    "num_microbatches": st.integers(1, 3),
    "schedule": st.sampled_from(["1f1b", "gpipe"]),
    "seed": st.integers(0, 2**16),
}


@settings(max_examples=6)
@given(drawn=st.fixed_dictionaries(PLANS))
def test_random_plans_of_random_models_train_like_the_model(drawn: dict[str, Any], cache_dir: Path) -> None:
    """Loss, gradients and updated states after three steps."""
    check_random_plan(cache_dir=cache_dir, **drawn)


ADDED = """graph added opset=24
input %x: float64[8,12]
state %w0: float64[12,6] parameter
state %w1: float64[8,6] parameter
state %w2: float64[8,6] parameter
state %w3: float64[8,6] parameter
%a: float64[8,6] = MatMul(%x, %w0) as a
%b: float64[8,6] = Sub(%w1, %a) as b
%c: float64[8,6] = Sub(%w2, %b) as c
%d: float64[8,6] = Sub(%w3, %c) as d
output %d
"""
"""Parameters of the shape of activations: the gradient of both is one value, which passes between blocks."""


@pytest.mark.parametrize("seed", range(2))
def test_gradients_that_pass_between_blocks_may_be_those_of_parameters(seed: int, cache_dir: Path) -> None:
    """What a block sends and what the next one expects have equal bytes, too."""
    graph = parse_graph(ADDED)
    states = {value.name: np.random.default_rng(1).normal(size=value.shape) for value in graph.parameters}

    check_random_plan(Model(graph, states, "mse", 1), MESHES[0], 2, 2, "1f1b", seed, cache_dir)


@pytest.mark.slow
@settings(max_examples=500)
@given(drawn=st.fixed_dictionaries({**PLANS, "mesh": st.sampled_from((*MESHES, *MORE_MESHES))}))
def test_many_random_plans_of_random_models_train_like_the_model(drawn: dict[str, Any], cache_dir: Path) -> None:
    """As above, on larger meshes too."""
    check_random_plan(cache_dir=cache_dir, **drawn)
