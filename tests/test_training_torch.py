"""Gradients and updates of tiny models against PyTorch autograd: a second opinion, where PyTorch is installed."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from autopar import models
from autopar.execute import run_graph
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Op, Role
from autopar.onnx import load
from autopar.training import training_step
from tests.gradients import EXECUTOR, as_float64, gradients
from tests.test_training_step import TINY, tiny_feeds

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install autopar[torch]")
functional = pytest.importorskip("torch.nn.functional", reason="part of PyTorch")

pytestmark = pytest.mark.slow

Tensor = Any
Numbers = tuple[int, ...]


def _rotate(op: Op, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last dim of x [B, H, S, E]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def _attention(op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, is_causal=bool(op.attr("is_causal", 0)), enable_gqa=q.shape[1] != k.shape[1]
    )


def _layer_norm(op: Op, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, scale.shape, scale, bias, op.attr("epsilon"))


def _gather(op: Op, x: Tensor, indices: Tensor) -> Tensor:
    axis = op.attr("axis", 0)
    assert isinstance(axis, int)
    taken = x.index_select(axis, indices.reshape(-1))
    return taken.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _gather_nd(op: Op, x: Tensor, indices: Tensor) -> Tensor:
    return torch.stack([x[(batch, *indices[batch].unbind(-1))] for batch in range(len(x))])


def _pairs(op: Op, name: str) -> Numbers:
    value = op.attr(name, (0, 0, 0, 0))
    assert isinstance(value, tuple)
    return tuple(int(number) for number in value[:2])


def _conv(op: Op, x: Tensor, w: Tensor, b: Tensor = None) -> Tensor:
    return functional.conv2d(x, w, b, stride=_pairs(op, "strides") or 1, padding=_pairs(op, "pads"))


TORCH: Mapping[str, Callable[..., Tensor]] = {
    "Add": lambda op, a, b: a + b,
    "Attention": _attention,
    "BatchNormalization": lambda op, x, scale, bias, mean, var: functional.batch_norm(
        x, None, None, scale, bias, training=True, eps=op.attr("epsilon")
    ),
    "Concat": lambda op, *parts: torch.cat(parts, op.attr("axis")),
    "Conv": _conv,
    "Expand": lambda op, x, shape: x.broadcast_to(torch.broadcast_shapes(x.shape, tuple(shape.tolist()))),
    "Flatten": lambda op, x: x.flatten(1),
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Gelu": lambda op, x: functional.gelu(x, approximate=op.attr("approximate", "none")),
    "GlobalAveragePool": lambda op, x: x.mean((2, 3), keepdim=True),
    "GroupNormalization": lambda op, x, scale, bias: functional.group_norm(
        x, op.attr("num_groups"), scale, bias, op.attr("epsilon")
    ),
    "LayerNormalization": _layer_norm,
    "MatMul": lambda op, a, b: a @ b,
    "MaxPool": lambda op, x: functional.max_pool2d(
        x, _pairs(op, "kernel_shape"), _pairs(op, "strides"), _pairs(op, "pads")
    ),
    "Mul": lambda op, a, b: a * b,
    "RMSNormalization": lambda op, x, scale: functional.rms_norm(x, scale.shape, scale, op.attr("epsilon")),
    "ReduceSum": lambda op, x, axes: x.sum(tuple(axes.tolist()), keepdim=bool(op.attr("keepdims", 1))),
    "Relu": lambda op, x: functional.relu(x),
    "Reshape": lambda op, x, shape: x.reshape(
        [x.shape[dim] if size == 0 else size for dim, size in enumerate(shape.tolist())]
    ),
    "Resize": lambda op, x, roi, scales, sizes: functional.interpolate(x, size=tuple(sizes.tolist()[2:])),
    "RotaryEmbedding": _rotate,
    "Squeeze": lambda op, x, axes: x.squeeze(tuple(axes.tolist())),
    "Softmax": lambda op, x: x.softmax(op.attr("axis", -1)),
    "Swish": lambda op, x: functional.silu(x),
    "TopK": lambda op, x, k: x.topk(int(k), op.attr("axis", -1)),
    "Transpose": lambda op, x: x.permute(op.attr("perm")),
    "Unsqueeze": lambda op, x, axes: (
        x[tuple(None if dim in axes.tolist() else slice(None) for dim in range(x.ndim + len(axes.reshape(-1))))]
        if axes.min() >= 0
        else x.unsqueeze(int(axes))
    ),
}
"""The ops of the zoo in PyTorch's own words."""


def run_in_torch(graph: Graph, values: dict[str, Tensor]) -> Tensor:
    """Return the output of a model; ops without trained inputs are run by the reference."""
    values |= {name: torch.from_numpy(np.array(array)) for name, array in graph.constants.items()}
    for op in graph.ops:
        inputs = [values[name] if name else None for name in op.inputs]
        if any(x is not None and x.requires_grad for x in inputs):
            results = TORCH[op.kind](op, *inputs)
            results = results if isinstance(results, tuple) else (results,)
        else:
            arrays = EXECUTOR.run(op, [None if x is None else x.numpy() for x in inputs], graph.opset)
            results = tuple(torch.from_numpy(np.array(array)) for array in arrays)
        values |= dict(zip(op.outputs, results, strict=False))
    return values[graph.outputs[0]]


@pytest.mark.parametrize("name", TINY)
def test_step_equals_pytorch(name: str) -> None:
    """Loss, every gradient and every parameter after one update of Adam, in float64."""
    model = as_float64(find_blocks(load(models.build(name, **TINY[name]), batch=4)))
    step = training_step(model)
    feeds = tiny_feeds(name, step)
    feeds |= {state.input: np.zeros_like(feeds[state.input]) for state in step.states if state.role is Role.GRADIENT}
    data = {key: torch.from_numpy(np.array(array)) for key, array in feeds.items()}
    trained = [value.name for value in model.parameters]
    weights = {key: data[key].requires_grad_() for key in trained}

    logits = run_in_torch(model, dict(data))
    if "targets" in data:
        loss = functional.mse_loss(logits, data["targets"])
    else:
        loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), data["labels"].reshape(-1))
    loss.backward()
    expected = {key: weight.grad.numpy().copy() for key, weight in weights.items()}
    torch.optim.Adam(weights.values(), lr=1e-3).step()
    got = gradients(step, feeds)
    values = run_graph(step, feeds, EXECUTOR)

    assert float(values["loss"]) == pytest.approx(float(loss.detach()), rel=1e-9)
    for key in trained:
        # Elements that cancel are held to the size of the others; epsilon is a float32 in ONNX and none in PyTorch.
        small = 1e-10 + 2e-8 * np.abs(expected[key]).max()
        np.testing.assert_allclose(got[key], expected[key], rtol=1e-7, atol=small, err_msg=key)
        # Adam divides by the size of the gradient: of one that is 0 in theory, rounding would show.
        moved = np.abs(expected[key]) > 1e-7
        np.testing.assert_allclose(
            values[f"{key}.new"][moved], weights[key].detach().numpy()[moved], rtol=1e-6, atol=1e-8, err_msg=key
        )
