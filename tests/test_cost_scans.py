"""Scans as the kernels of their authors: what is computed, moved and kept, by hand; depthwise convolutions."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost import CostModel, op_bytes, op_flops
from autopar.ir.graph import Op

COSTS = CostModel(load_cluster("h100"))
B, S, H, G, P, N = 2, 1024, 8, 2, 64, 128
"""Samples, tokens, heads, groups, channels of a head, size of a state."""
NAMES = {
    "StateSpaceScan": ("x", "dt", "a_log", "b", "c", "d", "dt_bias"),
    "SelectiveScan": ("x", "dt", "a_log", "b", "c", "d", "dt_bias"),
    "GatedDeltaRule": ("q", "k", "v", "a", "b", "a_log", "dt_bias"),
}
Shapes = list[np.ndarray]


def op_of(kind: str) -> Op:
    """Return a scan or its gradient."""
    names = NAMES[kind.removesuffix("Grad")]
    if kind.endswith("Grad"):
        return Op(kind, f"autopar::{kind}", (*names, "dy"), tuple(f"d{name}" for name in names))
    return Op(kind, f"autopar::{kind}", names, ("y",))


def shapes_of(kind: str, tokens: int = S, heads: int = H, groups: int = G) -> tuple[Shapes, Shapes]:
    """Return the shapes of the inputs and outputs; keys are as long as states of the state-space scan.

    A selective scan has as many channels as all heads together, and one group.
    """
    data: tuple[int, ...] = (B, tokens, heads, P)
    per_token, shared = (B, tokens, heads), (B, tokens, groups, N)
    if kind.startswith("Selective"):
        channels = heads * P
        data = B, tokens, channels
        inputs: list[tuple[int, ...]] = [data, data, (channels, N), *[(B, tokens, N)] * 2, (channels,), (channels,)]
    elif kind.startswith("State"):
        inputs = [data, per_token, (heads,), shared, shared, (heads,), (heads,)]
    else:
        inputs = [shared, shared, data, per_token, per_token, (heads,), (heads,)]
    arrays = [np.array([shape], np.int64) for shape in inputs]
    y = np.array([data], np.int64)
    return ([*arrays, y], arrays) if kind.endswith("Grad") else (arrays, [y])


def elements(op: Op, size: float = 2.0) -> Mapping[str, float]:
    return dict.fromkeys((*op.inputs, *op.outputs), size)


def flops(kind: str, **sizes: int) -> float:
    return float(op_flops(op_of(kind), *shapes_of(kind, **sizes))[0])


def test_products_of_a_state_space_scan_are_those_of_chunks_of_256_tokens() -> None:
    """Per token 2 G (128 N) for C B^T, and per head 2 (128 P) in its chunk and 2 N P for each of two ways of states."""
    per_token = 2 * G * 128 * N + H * (2 * 128 * P + 2 * 2 * N * P)

    assert flops("StateSpaceScan") == B * S * per_token
    # C B^T and states again; then two of each of the four products
    again = 2 * G * 128 * N + H * 2 * N * P
    assert flops("StateSpaceScanGrad") == B * S * (2 * per_token + again)


@pytest.mark.parametrize(
    ("kind", "state", "per_number"),
    [
        ("StateSpaceScan", (B, H, P, N), 5),
        ("SelectiveScan", (B, H * P, N), 9),
        ("GatedDeltaRule", (B, H, N, P), 7),
    ],
)
def test_a_step_of_decoding_reads_and_writes_states_once(kind: str, state: tuple[int, ...], per_number: int) -> None:
    """Besides what one token of a sample reads and writes; arithmetic goes over the numbers of the states."""
    whole = op_of(kind)
    op = replace(whole, kind=f"autopar::Cached{kind}", inputs=("state", *whole.inputs))
    inputs, outputs = shapes_of(kind, tokens=1)
    inputs = [np.array([state], np.int64), *inputs]

    moved = op_bytes(op, inputs, outputs, elements(op))[0]

    numbers = np.prod(state)
    assert op_flops(op, inputs, outputs)[0] == per_number * numbers
    assert moved == 2 * (2 * numbers + sum(np.prod(shape) for shape in (*inputs[1:], *outputs)))


def test_products_of_a_delta_rule_are_those_of_chunks_of_64_tokens() -> None:
    """Per token and head 2 (64 x 2 N) of keys, 2 (64^2 / 3), 2 x 64 (N + 2 P), and 2 N P for each of three products."""
    per_token = 2 * 64 * 2 * N + 2 * 64 * 64 / 3 + 2 * 64 * (N + 2 * P) + 3 * 2 * N * P

    assert flops("GatedDeltaRule") == pytest.approx(B * S * H * per_token)
    # 10 products of a chunk with keys, 5 with values, 8 with states, 2 of triangular matrices
    backward = 2 * 64 * (10 * N + 5 * P) + 8 * 2 * N * P + 2 * 2 * 64 * 64
    assert flops("GatedDeltaRuleGrad") == pytest.approx(B * S * H * backward)


@pytest.mark.parametrize("kind", [f"{kind}{phase}" for kind in NAMES for phase in ("", "Grad")])
def test_work_grows_with_the_tokens_and_is_divided_by_the_heads(kind: str) -> None:
    """Not with the square of the tokens; half the heads, and groups, have half the work and half the bytes of data.

    But for the states' B and C, which channels of a selective scan all read.
    """
    assert flops(kind, tokens=2 * S) == pytest.approx(2 * flops(kind))
    assert flops(kind, heads=H // 2, groups=G // 2) == pytest.approx(flops(kind) / 2)
    op = op_of(kind)
    whole, half = (
        op_bytes(op, *shapes_of(kind, heads=H // part, groups=G // part), elements(op))[0] for part in (1, 2)
    )
    shared = 2 * 2 * B * S * N * (2 if kind.endswith("Grad") else 1) * kind.startswith("Selective")
    assert half == pytest.approx((whole + shared) / 2)


def test_a_selective_scan_takes_vector_units_longer_than_its_bytes_take() -> None:
    """9 FLOPs per number of state and token, in the time of 16 multiply-adds at 67 TFLOP/s; its gradient thrice."""
    op, (inputs, outputs) = op_of("SelectiveScan"), shapes_of("SelectiveScan")
    numbers, device = B * S * H * P * N, COSTS.cluster.device
    moved = op_bytes(op, inputs, outputs, elements(op))[0]

    seconds = COSTS.op_seconds(op, inputs, outputs, elements(op))[0]

    assert flops("SelectiveScan") == 9 * numbers
    assert flops("SelectiveScanGrad") == 18 * numbers
    computed = 2 * 16 * numbers / 67e12
    read = moved / (device.memory_bandwidth * device.bandwidth_efficiency)
    assert seconds == pytest.approx(device.launch + (computed**4 + read**4) ** 0.25)
    assert moved == 2 * (3 * B * S * H * P + 2 * B * S * N + H * P * N + 2 * H * P)
    assert COSTS.least_compute_seconds(op, inputs, outputs) == pytest.approx(computed)
    gradient = op_of("SelectiveScanGrad")
    assert COSTS.least_compute_seconds(gradient, *shapes_of("SelectiveScanGrad")) == pytest.approx(3 * computed)


def test_a_device_without_a_peak_of_vector_units_has_an_eighth_of_its_matrix_units() -> None:
    """A cluster file may state peaks of half precision alone."""
    op, (inputs, outputs) = op_of("SelectiveScan"), shapes_of("SelectiveScan")
    device = replace(COSTS.cluster.device, peaks=(("half", 8 * 67e12),), efficiencies=())

    seconds = replace(COSTS, cluster=replace(COSTS.cluster, device=device)).least_compute_seconds(op, inputs, outputs)

    assert seconds == pytest.approx(COSTS.least_compute_seconds(op, inputs, outputs))


def test_a_sequence_shorter_than_a_chunk_is_one_chunk() -> None:
    """16 tokens: 2 G (8 N) for C B^T and 2 (8 P) per head."""
    assert flops("StateSpaceScan", tokens=16) == B * 16 * (2 * G * 8 * N + H * (2 * 8 * P + 2 * 2 * N * P))


def test_kernels_of_a_scan_hand_states_to_each_other() -> None:
    """States: 4 chunks, 12 bytes a number; C B^T: half of 256 x 256 numbers, 8 bytes each, written and read."""
    op, (inputs, outputs) = op_of("StateSpaceScan"), shapes_of("StateSpaceScan")
    operands = 2 * (2 * B * S * H * P + B * S * H + 3 * H + 2 * B * S * G * N)

    moved = op_bytes(op, inputs, outputs, elements(op))[0]

    assert moved == operands + 12 * (B * 4 * H * N * P) + 8 * (B * 4 * G * 256 * 128)


def test_a_delta_rule_keeps_64_numbers_per_token_and_head() -> None:
    """The inverses of its triangular matrices; a state-space scan keeps nothing but its operands.

    A selective scan keeps two float32 per number of state and 2048 tokens.
    """
    for kind, kept in (
        ("GatedDeltaRule", 2 * B * S * H * 64), ("GatedDeltaRuleGrad", 0), ("StateSpaceScan", 0),
        ("SelectiveScan", 8 * B * H * P * N), ("SelectiveScanGrad", 0),
    ):  # fmt: skip
        op = op_of(kind)
        assert COSTS.kept_bytes(op, *shapes_of(kind), elements(op)) == [kept]


def test_a_scan_starts_several_kernels() -> None:
    """Each takes its launch, however little there is to do."""
    op, (inputs, outputs) = op_of("StateSpaceScan"), shapes_of("StateSpaceScan", tokens=2, heads=1, groups=1)

    assert COSTS.op_kernels(op, 4) == 5
    assert COSTS.launch_seconds(op) == 5 * COSTS.cluster.device.launch
    assert COSTS.op_seconds(op, inputs, outputs, elements(op))[0] >= COSTS.launch_seconds(op)


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose", "autopar::ConvWeightGrad"])
def test_a_depthwise_convolution_takes_the_time_of_its_bytes(kind: str) -> None:
    """4 taps over 4096 tokens of 10240 channels: 168 MB of 2-byte numbers, far above what 8 FLOPs a number take."""
    data, weight = np.array([(1, 10240, 4096)], np.int64), np.array([(10240, 1, 4)], np.int64)
    inputs, outputs = ([data, data], [weight]) if kind.endswith("Grad") else ([data, weight], [data])
    op = Op("conv", kind, ("x", "w"), ("y",), (("group", 10240),))
    device = COSTS.cluster.device

    seconds = float(COSTS.op_seconds(op, inputs, outputs, elements(op))[0])

    assert op_flops(op, inputs, outputs) == [2 * 4 * 4096 * 10240]
    moved = 2 * (2 * 4096 * 10240 + 4 * 10240)
    bandwidth = device.memory_bandwidth * device.bandwidth_efficiency
    assert seconds == pytest.approx(device.launch + moved / bandwidth)
    assert COSTS.least_compute_seconds(op, inputs, outputs) == [0]
