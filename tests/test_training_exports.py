"""Gradients of exported PyTorch modules against autograd, for the ops that users meet beyond transformers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autopar import torch_export
from autopar.ir.blocks import find_blocks
from autopar.onnx import load
from autopar.training import training_step
from tests.gradients import as_float64, feeds_of, gradients

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install autopar[torch]")
pytest.importorskip("onnxscript", reason="PyTorch exports through it")

pytestmark = pytest.mark.slow

nn, functional = torch.nn, torch.nn.functional
Tensor = Any


class _Layer(nn.Module):  # type: ignore[misc,name-defined]
    """A linear layer (over the last dim), or another one, and what is done with its result."""

    def __init__(self, then: Callable[[Tensor], Tensor], layer: Any = None, width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(6, width) if layer is None else layer
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.layer(x))


def _routed(x: Tensor) -> Tensor:
    """Weights of the two best of six, put back in their places, as a router of experts does."""
    weights, places = torch.topk(torch.softmax(x, -1), 2)
    return torch.zeros_like(x).scatter(-1, places, weights)


def _activations(x: Tensor) -> Tensor:
    first = functional.hardswish(3 * x) + functional.hardsigmoid(x) + functional.elu(x, 0.7) + functional.selu(x)
    return first + functional.celu(x, 1.3) + functional.mish(x) + functional.softsign(x) + functional.gelu(x)


def _norms(x: Tensor) -> Tensor:
    flat = x.flatten(2)
    parts = [flat.norm(dim=-1), flat.norm(p=1, dim=-1), flat.prod(-1), flat.amax(-1), flat.amin(-1), flat.logsumexp(-1)]
    return torch.stack(parts, -1)


PICKS = torch.tensor([[[0, 2, 1, 1, 0, 2]]])
IMAGE, VOLUME, ROWS = (2, 3, 6, 6), (2, 2, 4, 4, 4), (2, 4, 6)
MODULES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "activations": (lambda: _Layer(_activations), ROWS),
    "PReLU": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.PReLU(4)), IMAGE),
    "LSTM": (lambda: _Layer(lambda out: out[0], nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)), ROWS),
    "GRU": (lambda: _Layer(lambda out: out[0], nn.GRU(6, 5, batch_first=True)), ROWS),
    "RNN": (lambda: _Layer(lambda out: out[0], nn.RNN(6, 5, batch_first=True)), ROWS),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1, dilation=2),
        IMAGE,
    ),
    "routing": (lambda: _Layer(_routed), ROWS),
    "sort and cumsum": (lambda: _Layer(lambda x: x.sort(-1).values.cumsum(-1)), ROWS),
    "scatter with maximum": (
        lambda: _Layer(lambda x: torch.zeros_like(x).scatter_reduce(1, PICKS.expand(2, 1, 6), x[:, :1], "amax")),
        ROWS,
    ),
    "index put": (lambda: _Layer(lambda x: torch.index_put(x * 0, (torch.tensor([1, 0]),), x * x)), ROWS),
    "einsum": (lambda: _Layer(lambda x: torch.einsum("bsd,btd->bst", x, x.tanh())), ROWS),
    "reductions": (lambda: _Layer(_norms), (2, 4, 3, 6)),
    "bilinear": (
        lambda: _Layer(lambda x: functional.interpolate(x, (9, 4), mode="bilinear"), nn.Conv2d(3, 4, 1)),
        IMAGE,
    ),
    "bicubic": (lambda: _Layer(lambda x: functional.interpolate(x, (9, 8), mode="bicubic"), nn.Conv2d(3, 4, 1)), IMAGE),
    "nearest": (lambda: _Layer(lambda x: functional.interpolate(x, (9, 8)), nn.Conv2d(3, 4, 1)), IMAGE),
    "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(3)), IMAGE),
    "instance norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "normalize": (lambda: _Layer(lambda x: functional.normalize(x, dim=-1)), ROWS),
    "largest of all": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(1)), IMAGE),
    "pooling in three dims": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 1), nn.MaxPool3d(2, 1, 1), nn.AvgPool3d(2, 2)),
        VOLUME,
    ),
    "spectrum": (lambda: _Layer(lambda x: torch.fft.rfft(x).abs()), ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_gradients_equal_autograd(name: str) -> None:
    """Of the mean squared error, in float64 on both sides."""
    torch.manual_seed(0)
    build, shape = MODULES[name]
    module = build()
    model = torch_export.to_onnx(module, (torch.randn(shape),))
    step = training_step(as_float64(find_blocks(load(model))), loss="mse")
    module = module.double()
    given = {
        name + end: parameter.detach().numpy().T if end else parameter.detach().numpy()
        for name, parameter in module.named_parameters()
        for end in (("", torch_export.TRANSPOSED) if parameter.ndim == 2 else ("",))
    }
    feeds = feeds_of(step, given)
    data = next(value for value in step.inputs if value not in ("targets", "optimizer.step"))

    got = gradients(step, feeds)

    functional.mse_loss(module(torch.from_numpy(feeds[data])), torch.from_numpy(feeds["targets"])).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert got, "nothing is trained"
    for key, array in got.items():
        weight = key.removesuffix(torch_export.TRANSPOSED)
        found = array.T if weight != key else array
        if weight in expected:
            np.testing.assert_allclose(found, expected[weight].numpy(), rtol=1e-5, atol=1e-7, err_msg=key)
