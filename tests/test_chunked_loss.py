"""Cross-entropies that never hold all logits: the numbers of the plain loss, less memory, any placement."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autopar.configuration import Configuration
from autopar.cost import IDEAL
from autopar.cost.traffic import HEAD_GRAD
from autopar.degrees import Degrees
from autopar.discover import Rules, discover
from autopar.errors import JobError
from autopar.ir.graph import Graph
from autopar.prediction import predict
from autopar.sharding import Mesh
from autopar.training import training_step
from autopar.training.chunked_loss import CHUNKED
from tests.executions import COSTS, TINY, Execution, model_feeds, model_graph, random_plan

SAMPLES = 4
MODELS = ("llama3-8b", "gpt2")  # a head of its own, and one that is tied to the embedding


def _step(model: str, samples: int, loss: str = CHUNKED) -> Graph:
    return training_step(model_graph(model, samples, train=False), loss=loss)


@cache
def _rules(model: str, cache_dir: Path) -> Rules:
    return discover(_step(model, 10), cache_dir=cache_dir)


@cache
def _execution(model: str) -> Execution:
    graph = _step(model, SAMPLES)
    return Execution.of_graph(graph, *model_feeds(model, graph, 2), steps=2)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_in_chunks_is_the_step_of_the_plain_loss(model: str) -> None:
    """Loss, gradients and states; there are no logits."""
    plain = _step(model, SAMPLES, "cross-entropy")
    expected = Execution.of_graph(plain, *model_feeds(model, plain, 2), steps=1).expected[0]

    found = _execution(model).expected[0]

    np.testing.assert_allclose([own["loss"] for own in found.outputs], [own["loss"] for own in expected.outputs])
    for name, array in expected.states.items():
        np.testing.assert_allclose(found.states[name], array, rtol=1e-9, atol=1e-12, err_msg=name)
    assert "logits" in plain.values
    assert "logits" not in _step(model, SAMPLES).values


@pytest.mark.parametrize(
    ("model", "seed"),
    [("llama3-8b", 0), *(pytest.param(m, s, marks=pytest.mark.slow) for m in MODELS for s in (1, 2))],
)
def test_partitioned_heads_compute_what_the_model_does(model: str, seed: int, cache_dir: Path) -> None:
    """Tokens, classes and width are split at random over two axes, with recompute."""
    execution = _execution(model)
    configuration = Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b")

    plan = random_plan(execution.folded, _rules(model, cache_dir), configuration, SAMPLES, seed)

    execution.check(plan)


def test_heads_can_share_tokens_or_classes(cache_dir: Path) -> None:
    """As in a vocabulary-parallel loss: sums of exponentials are added up, the largest logits compared."""
    step = _step("llama3-8b", 10)
    rules = _rules("llama3-8b", cache_dir)
    (stats,) = (op for op in step.ops if op.kind == "autopar::HeadStats")

    splits = {tuple(str(own) for own in strategy.inputs[:2]) for strategy in rules.of(stats).strategies}

    assert {("S(0)", "R"), ("S(1)", "R"), ("R", "S(1)")} <= splits


def test_the_gradient_holds_a_chunk_of_logits() -> None:
    step = _step("llama3-8b", SAMPLES)
    (grad,) = (op for op in step.ops if op.kind == HEAD_GRAD)
    inputs, outputs = ([np.array([step.values[name].shape]) for name in names] for names in (grad.inputs, grad.outputs))

    held = replace(COSTS, stack=IDEAL).kept_bytes(grad, inputs, outputs, dict.fromkeys(step.values, 2.0))

    assert held.tolist() == [SAMPLES * TINY["llama3-8b"]["seq"] * TINY["llama3-8b"]["hidden"] * 4.0]


def test_a_head_with_a_bias_is_refused() -> None:
    with pytest.raises(JobError, match="made by Add, not by a product"):
        _step("bert-base", SAMPLES)


def test_predictions_need_no_memory_for_logits(cache_dir: Path) -> None:
    """32,768 words and 64 tokens of width 32: of 4 MB of logits, which their gradient overwrites, a chunk is left."""
    dims = {"num_layers": 1, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "seq": 64, "vocab": 32_768}

    plain, chunked = (
        predict("zoo:llama3-8b", Degrees(global_batch=1), dims=dims, loss=loss, stack="ideal", cache_dir=cache_dir)
        for loss in ("auto", CHUNKED)
    )

    logits, chunk = 64 * 32_768 * 2.0, 64 * 32 * 4.0
    freed = plain.timeline.peak_bytes - chunked.timeline.peak_bytes
    assert freed == pytest.approx(logits - chunk, rel=0.01)
