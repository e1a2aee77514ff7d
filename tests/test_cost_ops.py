"""Costs of ops: FLOPs and bytes worked out by hand, the roofline, dtype policies and resident memory."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost import FP32, MIXED, CostModel, DtypePolicy, op_bytes, op_flops
from autopar.cost.arrays import IntArray
from autopar.errors import ClusterError
from autopar.ir.graph import Attr, Graph, Op, Role, State, Value

A100 = CostModel(load_cluster("a100"))


def make_op(kind: str, num_inputs: int, num_outputs: int = 1, **attrs: Attr) -> Op:
    inputs = tuple(f"x{index}" for index in range(num_inputs))
    outputs = tuple(f"y{index}" for index in range(num_outputs))
    return Op("op", kind, inputs, outputs, tuple(sorted(attrs.items())))


def shapes(*rows: tuple[int, ...] | None) -> list[IntArray | None]:
    return [None if row is None else np.array([row], np.int64) for row in rows]


def two_bytes(op: Op) -> dict[str, float]:
    return dict.fromkeys((*op.inputs, *op.outputs), 2.0)


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "flops"),
    [
        # 2 x (5 x 8 x 6 results) x 4 terms
        (make_op("MatMul", 2), [(5, 8, 4), (4, 6)], [(5, 8, 6)], 1920),
        (make_op("MatMul", 2), [(4,), (4, 6)], [(6,)], 48),
        (make_op("Gemm", 3), [(8, 4), (4, 6), (6,)], [(8, 6)], 384),
        (make_op("Gemm", 2, transA=1), [(4, 8), (4, 6)], [(8, 6)], 384),
        (make_op("Gemm", 2, transB=1), [(8, 4), (6, 4)], [(8, 6)], 384),
        # scores of 2 batches, 3 heads, 5 x 7 positions, 4 channels
        (make_op("Einsum", 2, equation="bhqd,bhkd->bhqk"), [(2, 3, 5, 4), (2, 3, 7, 4)], [(2, 3, 5, 7)], 1680),
        (make_op("Einsum", 2, equation="...ij,...jk"), [(9, 2, 3), (9, 3, 5)], [(9, 2, 5)], 540),
        (make_op("Einsum", 2, equation="...ij,jk->...ik"), [(9, 2, 3), (3, 5)], [(9, 2, 5)], 540),
        (make_op("Einsum", 2, equation="ij,jk"), [(2, 3), (3, 5)], [(2, 5)], 60),
        (make_op("Einsum", 1, equation="ij->ji"), [(2, 3)], [(3, 2)], 0),
        # (2 x 3) (3 x 4) then (2 x 4) (4 x 5): 2 (24 + 40)
        (make_op("Einsum", 3, equation="ij,jk,kl->il"), [(2, 3), (3, 4), (4, 5)], [(2, 5)], 128),
        # 16 channels x 8 x 8 results of 4 images, 3 x 3 x 3 weights each
        (make_op("Conv", 2), [(4, 3, 10, 10), (16, 3, 3, 3)], [(4, 16, 8, 8)], 221184),
        # depthwise: every channel has its own 3 x 3 weights
        (make_op("Conv", 2, group=16), [(4, 16, 10, 10), (16, 1, 3, 3)], [(4, 16, 8, 8)], 73728),
        (make_op("ConvTranspose", 2), [(4, 16, 8, 8), (16, 3, 3, 3)], [(4, 3, 10, 10)], 221184),
        # 2 products x 2 x (2 batches x 3 heads x 8 queries x 4 channels) x 8 keys
        (make_op("Attention", 3), [(2, 3, 8, 4)] * 3, [(2, 3, 8, 4)], 6144),
        (make_op("Attention", 3, is_causal=1), [(2, 3, 8, 4)] * 3, [(2, 3, 8, 4)], 3072),
        # grouped queries as (batch, length, heads x channels): 4 query heads on 1 key head
        (make_op("Attention", 3), [(2, 8, 16), (2, 8, 4), (2, 8, 4)], [(2, 8, 16)], 8192),
        # one query after 7 cached keys sees all 8
        (
            make_op("Attention", 6),
            [(1, 1, 1, 4), (1, 1, 1, 4), (1, 1, 1, 4), None, (1, 1, 7, 4), (1, 1, 7, 4)],
            [(1, 1, 1, 4)],
            128,
        ),
        # the gradient recomputes the scores: 5 products instead of 2
        (make_op("autopar::AttentionGrad", 4, 3), [(2, 3, 8, 4)] * 4, [(2, 3, 8, 4)] * 3, 15360),
        (
            make_op("autopar::MaskedAttentionGrad", 5, 3),
            [(2, 3, 8, 4), (2, 3, 8, 4), (2, 3, 8, 4), (8, 8), (2, 3, 8, 4)],
            [(2, 3, 8, 4)] * 3,
            15360,
        ),
        (make_op("autopar::ConvWeightGrad", 2), [(4, 3, 10, 10), (4, 16, 8, 8)], [(16, 3, 3, 3)], 221184),
        (make_op("Relu", 1), [(100, 100)], [(100, 100)], 0),
    ],
)
def test_flops_are_those_worked_out_by_hand(
    op: Op, inputs: list[tuple[int, ...] | None], outputs: list[tuple[int, ...]], flops: float
) -> None:
    assert op_flops(op, shapes(*inputs), shapes(*outputs)).tolist() == [flops]


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "nbytes"),
    [
        (make_op("MatMul", 2), [(8, 4), (4, 6)], [(8, 6)], 2 * (32 + 24 + 48)),
        (make_op("Add", 2), [(8, 4), (4,)], [(8, 4)], 2 * (32 + 4 + 32)),
        (make_op("Clip", 3), [(8, 4), None, None], [(8, 4)], 2 * (32 + 32)),
        (make_op("autopar::GeluGrad", 2), [(8, 4), (8, 4)], [(8, 4)], 2 * 96),
        # the gradient of an embedding writes the whole table
        (make_op("autopar::GatherGrad", 3), [(3,), (50_000,), (3, 4)], [(50_000, 4)], 2 * (3 + 50_000 + 12 + 200_000)),
        # an embedding of 3 rows reads 3 rows and 3 indices, not the table of 50,000
        (make_op("Gather", 2), [(50_000, 4), (3,)], [(3, 4)], 2 * (12 + 3 + 12)),
        (make_op("Slice", 3), [(50_000, 4), (1,), (1,)], [(3, 4)], 2 * (12 + 2 + 12)),
        # heads and positions change places, rows of channels stay together: kernels follow strides
        (make_op("Transpose", 1, perm=(0, 2, 1, 3)), [(2, 3, 4, 5)], [(2, 4, 3, 5)], 0),
        (make_op("Transpose", 1, perm=(0, 3, 1, 2)), [(2, 3, 4, 5)], [(2, 5, 3, 4)], 2 * 240),
        # logits copied to float32, shifted, exponentiated, summed: 16 bytes each, labels and classes in the shade of it
        (
            make_op("autopar::CrossEntropyStats", 4, 2),
            [(2, 3, 50), (2, 3, 1), (2, 3), (50,)],
            [(2, 3, 1), (2, 3, 1)],
            16 * 300,
        ),
        (make_op("Transpose", 1, perm=(0, 1, 3, 2)), [(2, 3, 4, 5)], [(2, 3, 5, 4)], 0),
        (make_op("Transpose", 1), [(4, 5)], [(5, 4)], 0),
        (make_op("Transpose", 1), [(3, 4, 5)], [(5, 4, 3)], 2 * 120),
        (make_op("Reshape", 2), [(8, 4), (1,)], [(32,)], 0),
    ],
)
def test_bytes_are_those_worked_out_by_hand(
    op: Op, inputs: list[tuple[int, ...] | None], outputs: list[tuple[int, ...]], nbytes: float
) -> None:
    assert op_bytes(op, shapes(*inputs), shapes(*outputs), two_bytes(op)).tolist() == [nbytes]


def test_a_large_product_takes_its_waves_of_tiles() -> None:
    """4096 x 4096 results are 1024 tiles of 128 x 128, 9.48 on each of 108 SMs: 0.565 x 9.48 + 0.435 x 10 waves.

    A wave is 108 tiles of 2 x 128 x 128 x (4096 + 80) FLOPs at 312 TFLOP/s x 0.763. Memory takes 101 MB at 1.63 TB/s.
    """
    product = make_op("MatMul", 2)
    square = shapes((4096, 4096), (4096, 4096))

    seconds = A100.op_seconds(product, square, square[:1], two_bytes(product))

    waves = 0.565 * 1024 / 108 + 0.435 * 10
    compute = waves * 108 * 2 * 128**2 * (4096 + 80) / (312e12 * 0.763)
    memory = 3 * 2 * 4096**2 / (2.039e12 * 0.8)
    assert seconds == pytest.approx(4.2e-6 + (compute**4 + memory**4) ** 0.25)


def test_few_tiles_with_long_sums_are_split() -> None:
    """128 x 128 results of 65,536 terms: four tiles of 64 x 64, each in four parts, keep 16 SMs busy for one wave."""
    product = make_op("MatMul", 2)
    long = shapes((128, 65536), (65536, 128))

    seconds = A100.op_seconds(product, long, shapes((128, 128)), two_bytes(product))

    compute = 108 * 2 * 64**2 * (65536 / 4 + 80) / (312e12 * 0.763 * 0.77)
    adding = 3e-6 + 0.16 * 4 * 2 * 4 * 128**2 / (2.039e12 * 0.8)
    memory = 2 * (2 * 128 * 65536 + 128**2) / (2.039e12 * 0.8)
    assert seconds == pytest.approx(4.2e-6 + ((compute + adding) ** 4 + memory**4) ** 0.25)


def test_a_device_of_unknown_tiles_computes_at_its_efficiency() -> None:
    cost = CostModel(replace(A100.cluster, device=replace(A100.cluster.device, num_sms=0)))
    product = make_op("MatMul", 2)
    odd = shapes((1000, 3000), (3000, 1000))

    seconds = cost.op_seconds(product, odd, shapes((1000, 1000)), two_bytes(product))

    compute, memory = 6e9 / (312e12 * 0.763), 2 * 7e6 / (2.039e12 * 0.8)
    assert seconds == pytest.approx(4.2e-6 + (compute**4 + memory**4) ** 0.25)


def test_kernels_bound_by_memory_reach_what_their_class_reaches() -> None:
    """An addition reaches 1.1 of what products get from the memory, an activation 0.62, a norm 0.7."""
    block = shapes((4096, 4096))
    nbytes, bandwidth = 2 * 2 * 4096**2, 2.039e12 * 0.8

    for kind, share in (("Neg", 1.1), ("Gelu", 0.62), ("RMSNormalization", 0.7)):
        op = make_op(kind, 1)
        seconds = A100.op_seconds(op, block, block, two_bytes(op))
        assert seconds == pytest.approx(0.3 * 4.2e-6 + nbytes / (bandwidth * share))


def test_all_strategies_are_priced_at_once_and_each_as_if_alone() -> None:
    op = make_op("MatMul", 2)
    rows = [((2**i, 512), (512, 2**j), (2**i, 2**j)) for i in range(4, 12) for j in range(4, 12)]
    a, b, y = (np.array([row[k] for row in rows], np.int64) for k in range(3))

    together = A100.op_seconds(op, [a, b], [y], two_bytes(op))
    alone = [A100.op_seconds(op, shapes(p, q), shapes(r), two_bytes(op))[0] for p, q, r in rows]

    np.testing.assert_array_equal(together, alone)


def test_views_launch_nothing_and_everything_else_takes_at_least_a_launch() -> None:
    view, copy = make_op("Reshape", 2), make_op("Relu", 1)

    assert A100.op_seconds(view, shapes((8, 4), (1,)), shapes((32,)), two_bytes(view)).tolist() == [0.0]
    assert A100.op_seconds(copy, shapes((1,)), shapes((1,)), two_bytes(copy))[0] > 0.3 * 4.2e-6


def test_faster_hardware_is_never_slower() -> None:
    """Twice the peak, or twice the memory bandwidth, lowers or keeps the seconds of every op."""
    device = A100.cluster.device
    faster = [
        replace(device, peaks=(("half", 624e12),)),
        replace(device, memory_bandwidth=2 * device.memory_bandwidth),
    ]
    op = make_op("MatMul", 2)

    for size in (64, 512, 4096):
        square = shapes((size, size), (size, size))
        before = A100.op_seconds(op, square, square[:1], two_bytes(op))
        for better in faster:
            cost = CostModel(replace(A100.cluster, device=better))
            assert cost.op_seconds(op, square, square[:1], two_bytes(op)) <= before


def test_a_policy_the_device_cannot_compute_in_is_refused() -> None:
    with pytest.raises(ClusterError, match="no peak for 'tf32'"):
        CostModel(load_cluster("v100"), replace(FP32, numbers="tf32"))


def trained(dtype: str = "float32", moments: tuple[str, ...] = ("m", "v")) -> Graph:
    """Return a step that trains one parameter of 10 x 6, with a buffer of 5 and int64 tokens."""
    names = ("w", "w.grad", *(f"w.{moment}" for moment in moments))
    values = [Value(name, (10, 6), dtype) for name in (*names, *(f"{name}'" for name in names))]
    values += [Value("table", (5,), dtype), Value("tokens", (7,), "int64"), Value("h", (7, 6), dtype)]
    roles = (Role.PARAMETER, Role.GRADIENT, *(Role.MOMENT for _ in moments))
    states = [State(name, f"{name}'", role, "w") for name, role in zip(names, roles, strict=True)]
    states.append(State("table", "table", Role.BUFFER, "table"))
    return Graph("step", 24, {value.name: value for value in values}, ("tokens",), tuple(states), {}, (), ())


@pytest.mark.parametrize(
    ("policy", "moments", "per_parameter"),
    [(MIXED, ("m", "v"), 18), (FP32, ("m", "v"), 16), (MIXED, ("m",), 14), (MIXED, (), 10), (FP32, (), 8)],
)
def test_training_holds_the_published_bytes_per_parameter(
    policy: DtypePolicy, moments: tuple[str, ...], per_parameter: float
) -> None:
    """Megatron-LM's README: 18 bytes with Adam in mixed precision; all in float32 it is 4 each of four things."""
    graph = trained(moments=moments)

    sizes = policy.graph_element_bytes(graph)

    assert sum(sizes[state.input] for state in graph.states if state.owner == "w") == per_parameter


def test_element_bytes_follow_role_and_policy_not_the_dtype_of_the_graph() -> None:
    for dtype in ("float32", "float64"):
        sizes = MIXED.graph_element_bytes(trained(dtype))
        assert [sizes[name] for name in ("w", "w'", "w.grad", "w.m", "h", "table")] == [2, 2, 4, 6, 2, 2]


def test_integers_and_booleans_keep_their_size() -> None:
    for policy in (MIXED, FP32):
        assert policy.element_bytes(Value("tokens", (7,), "int64")) == 8
        assert policy.element_bytes(Value("mask", (7,), "bool")) == 1


def test_gradients_travel_as_wide_as_the_policy_says() -> None:
    narrow = replace(MIXED, gradient_wire=2.0)

    assert MIXED.graph_wire_bytes(trained())["w.grad'"] == 4
    assert narrow.graph_wire_bytes(trained())["w.grad'"] == 2
    assert narrow.graph_element_bytes(trained())["w.grad'"] == 4
