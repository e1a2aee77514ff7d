"""Dual encoders: plans of logits that compare every text with every image of a microbatch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar import models
from autopar.configuration import Configuration
from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph
from autopar.onnx import load
from autopar.sharding import Mesh
from autopar.training import training_step
from tests.executions import Execution, random_feeds, random_plan
from tests.gradients import as_float64
from tests.test_architectures_encoders import config_of

SAMPLES, TOKENS = 4, 6


def step_of(model: Any, samples: int) -> Graph:
    """Return the training step of a microbatch."""
    return training_step(as_float64(find_blocks(load(model, batch=samples))))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_plans_train_like_the_model(name: str, stages: int, cache_dir: Path) -> None:
    """Texts and images split over devices, and in stages."""
    native = models.read_architecture({**config_of(name), "projection_dim": 20}, TOKENS)
    assert not isinstance(native, models.Unbuilt)
    model = models.build_architecture(name, native)
    step = step_of(model, SAMPLES)
    start = {key: value.astype(np.float64) for key, value in models.initial_values(model).items()}
    execution = Execution.of_graph(step, *random_feeds(step, 2, start))
    rules = discover(step_of(model, 10), cache_dir=cache_dir)

    for seed in range(2):
        configuration = Configuration(stages, Mesh.of(outer=2, inner=2), 2, "1f1b")
        execution.check(random_plan(execution.folded, rules, configuration, SAMPLES, seed))


def test_both_towers_are_planned(tmp_path: Path, cache_dir: Path) -> None:
    """By degrees, from the configuration; tensor parallelism halves the matrices of both towers."""
    config = {
        **config_of("siglip"),
        "text_config": {**config_of("siglip")["text_config"], "max_position_embeddings": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    peaks = [
        autopar.predict(
            f"hf:{tmp_path}", Degrees(dp=2, tp=tp, microbatch=2, global_batch=8), stack="ideal", cache_dir=cache_dir
        ).plan
        for tp in (1, 2)
    ]

    whole, half = (plan.simulated.stages[0].breakdown for plan in peaks if plan.simulated is not None)
    assert 0.5 <= half["parameters"] / whole["parameters"] < 0.6
