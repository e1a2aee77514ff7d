"""Scans of domain `autopar` against their recurrences, in PyTorch and ONNX Runtime."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.execute import Executor
from autopar.ir.graph import Attr
from tests.test_discover_windows import compare_runtimes

Array = NDArray[Any]
EXECUTOR = Executor()
OPSET = 24
B, S, H, P, N = 2, 7, 4, 3, 5
"""Samples, tokens, heads (or channels of a scan without heads), channels of a head, size of the state."""


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def state_space(groups: int) -> list[Array]:
    """Return x, dt, a_log, b, c, d and dt_bias."""
    shared = draw(B, S, groups, N, seed=2), draw(B, S, groups, N, seed=3)
    return [draw(B, S, H, P), draw(B, S, H), draw(H, seed=1), *shared, draw(H, seed=4), draw(H, seed=5)]


def gated_delta(groups: int) -> list[Array]:
    """Return q, k, v, a, b, a_log and dt_bias."""
    q, k, v = draw(B, S, groups, N), draw(B, S, groups, N, seed=1), draw(B, S, H, P)
    return [q, k, v, draw(B, S, H), draw(B, S, H, seed=1), draw(H), draw(H, seed=1)]


def selective(groups: int) -> list[Array]:
    """Return x, dt, a_log, b, c, d and dt_bias; all channels are one group."""
    assert groups == 1
    shared = draw(B, S, N, seed=2), draw(B, S, N, seed=3)
    return [draw(B, S, H), draw(B, S, H, seed=1), draw(H, N), *shared, draw(H, seed=4), draw(H, seed=5)]


def scan_selective(x: Any, dt: Any, a_log: Any, b: Any, c: Any, d: Any, dt_bias: Any) -> Any:
    """Return the outputs token by token (Gu and Dao 2023, equation 2a and 2b, discretised as in section 3.6)."""
    import torch

    step, a = torch.nn.functional.softplus(dt + dt_bias), -torch.exp(a_log)
    state = x.new_zeros(x.shape[0], *a_log.shape)
    outputs = []
    for t in range(x.shape[1]):
        written = torch.einsum("bc,bn->bcn", step[:, t] * x[:, t], b[:, t])
        state = torch.exp(step[:, t, :, None] * a) * state + written
        outputs.append(torch.einsum("bcn,bn->bc", state, c[:, t]) + d * x[:, t])
    return torch.stack(outputs, 1)


def scan_state_space(x: Any, dt: Any, a_log: Any, b: Any, c: Any, d: Any, dt_bias: Any) -> Any:
    """Return the outputs token by token (Dao and Gu 2024, equation 1, with the steps of Mamba)."""
    import torch

    b, c = (item.repeat_interleave(x.shape[2] // b.shape[2], 2) for item in (b, c))
    dt, a = torch.nn.functional.softplus(dt + dt_bias).clamp(0.5, 1.5), -torch.exp(a_log)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        added = torch.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], b[:, t])
        state = torch.exp(dt[:, t] * a)[..., None, None] * state + added
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + d[:, None] * x[:, t])
    return torch.stack(outputs, 1)


def scan_gated_delta(q: Any, k: Any, v: Any, a: Any, b: Any, a_log: Any, dt_bias: Any) -> Any:
    """Return the outputs token by token (Yang et al. 2024, Gated Delta Networks, equation 10)."""
    import torch

    q, k = (item / torch.sqrt((item * item).sum(-1, keepdim=True) + 1e-6) for item in (q, k))
    q, k = (item.repeat_interleave(v.shape[2] // item.shape[2], 2) for item in (q, k))
    g, beta = -torch.exp(a_log) * torch.nn.functional.softplus(a + dt_bias), torch.sigmoid(b)
    state = v.new_zeros(v.shape[0], v.shape[2], v.shape[3], k.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        erased = torch.eye(k.shape[3], dtype=k.dtype) - beta[:, t, :, None, None] * torch.einsum(
            "bhk,bhl->bhkl", k[:, t], k[:, t]
        )
        added = beta[:, t, :, None, None] * torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        state = torch.exp(g[:, t])[..., None, None] * state @ erased + added
        outputs.append(0.25 * torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


CASES: Mapping[str, tuple[str, Callable[[int], list[Array]], Callable[..., Any], dict[str, Attr]]] = {
    "state space": ("autopar::StateSpaceScan", state_space, scan_state_space, {"least": 0.5, "most": 1.5}),
    "gated delta rule": ("autopar::GatedDeltaRule", gated_delta, scan_gated_delta, {"scale": 0.25}),
    "selective": ("autopar::SelectiveScan", selective, scan_selective, {}),
}
GROUPS: Mapping[str, tuple[int, ...]] = {"state space": (1, 2, 4), "gated delta rule": (1, 2, 4), "selective": (1,)}
"""Numbers of groups of heads that share two of the inputs."""


def middle(name: str) -> int:
    """Return a number of groups that is neither one nor that of the heads, where there is one."""
    return GROUPS[name][len(GROUPS[name]) // 2]


def run(kind: str, attrs: Mapping[str, Attr], inputs: Sequence[Array], num_outputs: int = 1) -> tuple[Array, ...]:
    return EXECUTOR.run_kind(kind, tuple(attrs.items()), inputs, num_outputs, OPSET)


@pytest.mark.parametrize(("name", "groups"), [(name, count) for name, counts in GROUPS.items() for count in counts])
def test_result_and_gradients_are_those_of_the_recurrence(name: str, groups: int) -> None:
    """In float64, for heads that share keys (or B and C) in groups, all of them or none."""
    torch = pytest.importorskip("torch", reason="the oracle of this test")
    kind, make, scan, attrs = CASES[name]
    inputs = make(groups)
    tensors = [torch.from_numpy(array).requires_grad_() for array in inputs]
    expected = scan(*tensors)
    dy = draw(*expected.shape, seed=9)
    expected.backward(torch.from_numpy(dy))

    (y,) = run(kind, attrs, inputs)
    gradients = run(f"{kind}Grad", attrs, [*inputs, dy], len(inputs))

    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=0, atol=1e-12)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_token_depends_on_none_behind_it(name: str) -> None:
    """The first outputs of a sequence are those of its beginning."""
    kind, make, _, attrs = CASES[name]
    inputs = make(middle(name))

    (whole,) = run(kind, attrs, inputs)
    (beginning,) = run(kind, attrs, [array[:, :4] if array.shape[:2] == (B, S) else array for array in inputs])

    np.testing.assert_allclose(whole[:, :4], beginning, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_bodies_run_in_onnx_runtime(name: str) -> None:
    """They are plain ONNX."""
    kind, make, _, attrs = CASES[name]
    inputs = make(middle(name))
    (y,) = run(kind, attrs, inputs)

    compare_runtimes(kind, inputs, dict(attrs))
    compare_runtimes(f"{kind}Grad", [*inputs, draw(*y.shape)], dict(attrs))
