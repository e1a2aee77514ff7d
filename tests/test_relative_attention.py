"""`autopar::RelativeAttention` against PyTorch, and how it may be sharded."""

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.cost.attention import attention_work
from autopar.discover import discover
from autopar.execute import Executor
from autopar.ir.graph import Attr, Op
from tests.single_ops import floats, single_op
from tests.test_discover_windows import compare_runtimes

EXECUTOR = Executor()
B, H, G, S, D, F, REACH = 2, 4, 2, 9, 6, 3, 4
"""Batch, query heads, key heads, tokens, channels of queries and keys, and of values, and the farthest distance."""


def draw(*shape: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


INPUTS = [draw(B, H, S, D), draw(B, G, S, D, seed=1), draw(B, G, S, F, seed=2), draw(H, 2 * REACH + 1)]


@pytest.mark.parametrize("is_causal", [0, 1])
def test_result_and_gradients_equal_those_of_pytorch(is_causal: int) -> None:
    """In float64, with biases looked up pair by pair."""
    torch = pytest.importorskip("torch", reason="the oracle of this test")
    dy = draw(B, H, S, F, seed=3)
    q, k, v, b = tensors = [torch.from_numpy(array).requires_grad_() for array in INPUTS]
    distance = torch.arange(S)[None, :] - torch.arange(S)[:, None]
    scores = 0.25 * q @ k.repeat_interleave(H // G, 1).transpose(-1, -2) + b[:, distance.clip(-REACH, REACH) + REACH]
    if is_causal:
        scores = scores.masked_fill(distance > 0, float("-inf"))
    expected = torch.softmax(scores, -1) @ v.repeat_interleave(H // G, 1)
    expected.backward(torch.from_numpy(dy))
    attrs: tuple[tuple[str, Attr], ...] = (("is_causal", is_causal), ("scale", 0.25))

    (y,) = EXECUTOR.run_kind("autopar::RelativeAttention", attrs, INPUTS, 1, 24)
    gradients = EXECUTOR.run_kind("autopar::RelativeAttentionGrad", attrs, [*INPUTS, dy], 4, 24)

    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=0, atol=1e-12)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=0, atol=1e-12)


def test_onnxruntime_runs_the_bodies_as_we_do() -> None:
    attrs = {"scale": 0.25, "is_causal": 1}

    compare_runtimes("autopar::RelativeAttention", INPUTS, attrs)
    compare_runtimes("autopar::RelativeAttentionGrad", [*INPUTS, draw(B, H, S, F, seed=3)], attrs)


def test_it_has_the_work_of_plain_attention() -> None:
    """2 products of 2 B H S S (D + F) FLOPs in the forward pass, 2.5 times as many in the gradient, half if causal."""
    q, k, v, b, dy = (np.array([shape]) for shape in ((B, H, S, D), (B, H, S, D), (B, H, S, F), (H, 9), (B, H, S, F)))
    op = Op("f", "autopar::RelativeAttention", ("q", "k", "v", "b"), ("y",), (("scale", 1.0),))
    grad = Op("g", "autopar::RelativeAttentionGrad", (*op.inputs, "dy"), ("dq",), (("is_causal", 1), ("scale", 1.0)))
    whole = 2 * B * H * S * S * (D + F)

    assert attention_work(op, [q, k, v, b], [dy]).flops[0] == whole
    assert attention_work(grad, [q, k, v, b, dy], [q]).flops[0] == 2.5 * whole / 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("RelativeAttention", {"S(0),S(0),S(0),R -> S(0)", "S(1),S(1),S(1),S(0) -> S(1)", "R,R,S(3),R -> S(3)"}),
        (
            "RelativeAttentionGrad",
            {"S(0),S(0),S(0),R,S(0) -> S(0),S(0),S(0),P", "S(1),S(1),S(1),S(0),S(1) -> S(1),S(1),S(1),S(0)"},
        ),
    ],
)
def test_samples_and_heads_are_sharded_but_no_positions(kind: str, expected: set[str]) -> None:
    """The gradient of the biases is a sum over samples."""
    inputs = [floats(6, 12, 24, 16), floats(6, 12, 24, 16), floats(6, 12, 24, 16), floats(12, 17)]
    inputs += [floats(6, 12, 24, 16)] if kind.endswith("Grad") else []
    graph, op = single_op(f"autopar::{kind}", inputs, 4 if kind.endswith("Grad") else 1, scale=0.3, is_causal=1)

    found = {str(strategy) for strategy in discover(graph).of(op).strategies}

    assert expected <= found
    assert not any("S(2)" in strategy for strategy in found)
