"""Training steps of exported modules against PyTorch's autograd and optimizers: slow, and with extra `torch` only."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.configuration import Configuration
from autopar.discover import discover
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Role
from autopar.onnx import load
from autopar.sharding import Mesh
from autopar.training import STEP, training_step
from tests.executions import Execution, random_plan
from tests.export_transformers import BATCH, SEQ, build
from tests.gradients import as_float64

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install autopar[torch]")
nn = pytest.importorskip("torch.nn", reason="part of PyTorch")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

Array = NDArray[Any]
STEPS = 3
TOLERANCE = 1e-6
"""Relative to the largest element of a tensor: a file keeps scales and epsilons in float32."""


class Bottleneck(nn.Module):  # type: ignore[misc, name-defined]
    """A block of a ResNet: three convolutions with batch norms, and a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Any) -> Any:
        """Return the block's output for x [B, C, H, W]."""
        return torch.relu(self.body(x) + self.shortcut(x))


def _resnet() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Bottleneck(8, 4, 1), Bottleneck(16, 4, 1), Bottleneck(16, 8, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).eval()  # fmt: skip


def _tokens() -> Any:
    """Return tokens but 0, which BERT takes for padding: autograd skips its row, of which a file says nothing."""
    return torch.from_numpy(np.random.default_rng(0).integers(1, 96, (BATCH, SEQ)))


def _images() -> Any:
    return torch.from_numpy(np.random.default_rng(0).normal(size=(4, 3, 32, 32))).float()


MODULES: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    **{name: (partial(build, name), _tokens) for name in ("gpt2", "llama", "bert")},
    "resnet": (_resnet, _images),
}
"""Each module with its input."""


def _stay_in_float64(patch: pytest.MonkeyPatch) -> None:
    """Turn what modules do in float32 whatever they are fed (norms, angles) into float64."""
    convert = torch.Tensor.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        return convert(self, *args, **kwargs)

    patch.setattr(torch.Tensor, "to", to)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)


def _export(module: Any, name: str, data: Any, folder: Path) -> Graph:
    """Return a module as we read it from its file, in float64, with parameters under the module's names."""
    from onnxscript import optimizer

    program = torch.onnx.export(module, (data,), dynamo=True, opset_version=20, verbose=False, optimize=False)
    if name == "gpt2":  # its projections are split into a sequence, which folding turns into a Split
        optimizer.optimize(program.model, input_size_limit=64, output_size_limit=64)
    path = folder / f"{name}.onnx"
    program.save(str(path), external_data=False)
    return as_float64(find_blocks(load(path)))


def _labels(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(1).integers(0, 10, shape)


def _train(module: Any, data: Any, optimizer: Any) -> Iterator[tuple[float, dict[str, Array], dict[str, Array]]]:
    """Yield loss, gradients and new parameters of each step."""
    named = dict(module.named_parameters(remove_duplicate=False))
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = module(data)
        logits = getattr(result, "logits", result)
        labels = torch.from_numpy(_labels(tuple(logits.shape[:-1])))
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        loss.backward()
        grads = {name: parameter.grad.numpy().copy() for name, parameter in named.items()}
        optimizer.step()
        yield float(loss.detach()), grads, {name: p.detach().numpy().copy() for name, p in named.items()}


def _step(graph: Graph, decay: float) -> Graph:
    """Return the training step with this weight decay."""
    step = training_step(graph, loss="cross-entropy")

    def decayed(attrs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        return tuple((key, decay if key == "weight_decay" else value) for key, value in attrs)

    return replace(step, ops=tuple(replace(op, attrs=decayed(op.attrs)) for op in step.ops))


def _close(found: Array, wanted: Array, what: str, where: Array | None = None) -> None:
    """Compare up to the tolerance, only `where` if given."""
    chosen = np.ones(wanted.shape, bool) if where is None else where
    scale = float(np.max(np.abs(wanted), initial=0.0))
    np.testing.assert_allclose(found[chosen], wanted[chosen], rtol=0, atol=TOLERANCE * scale + 1e-12, err_msg=what)


@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["adam", "adamw"])
@pytest.mark.parametrize("name", MODULES)
def test_steps_of_exported_modules_equal_pytorch(
    name: str, decay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of every parameter in each of three steps, and the parameters after it; so does a plan."""
    make, make_data = MODULES[name]
    module, data = make(), make_data()
    graph = _step(_export(module, name, data, tmp_path), decay)
    _stay_in_float64(monkeypatch)
    module = module.double()
    data = data.double() if data.is_floating_point() else data
    module.train(name == "resnet")  # batch norms use the statistics of the batch; there is no dropout in it
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers())
    states: dict[str, Array] = {}
    for state in graph.states:
        value = graph.values[state.input]
        if state.role in (Role.GRADIENT, Role.MOMENT):
            states[state.input] = np.zeros(value.shape)
        else:
            states[state.input] = (parameters | buffers)[state.input].detach().numpy().copy()
    feeds = {
        graph.inputs[0]: data.numpy(),
        "labels": _labels(graph.values["labels"].shape),
        STEP: np.asarray(1.0, np.float32),
    }
    execution = Execution.of_graph(graph, [feeds], states, steps=STEPS)
    owners = {state.owner for state in graph.states if state.role is Role.GRADIENT}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=decay)

    for found, (loss, gradients, after) in zip(execution.expected, _train(module, data, optimizer), strict=True):
        assert float(found.outputs[0]["loss"]) == pytest.approx(loss, rel=TOLERANCE)
        for key in owners:
            _close(found.gradients[key], gradients[key], f"gradient of {key}")
            # Adam divides by the size of the gradient: of one that is 0 in theory, rounding would show.
            moved = np.abs(gradients[key]) > 1e-6 * np.abs(gradients[key]).max()
            _close(found.states[key], after[key], key, moved)
    assert owners == {name for name in parameters if name in graph.values}
    plan = random_plan(
        execution.folded, discover(graph), Configuration(2, Mesh.of(outer=2, inner=2), 1, "1f1b"), len(data), 0
    )
    # Moments above 0, so that what is 0 in theory does not show in the plan either.
    moments = {state.input for state in graph.states if state.role is Role.MOMENT}
    shaken = {key: np.full(array.shape, 0.1) if key in moments else array for key, array in states.items()}
    Execution.of_graph(graph, [feeds], shaken, steps=STEPS).check(plan)
