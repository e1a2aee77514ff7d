"""Ops that know their position: on devices that hold some rows of a table, or of an image that windows slide over."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.discover import Rule, Strategy, discover
from autopar.execute import Executor
from autopar.formulate.op_strategies import options
from autopar.ir.functions import DOMAIN, OPSET, function_proto
from autopar.ir.rings import RINGS
from autopar.sharding import Mesh, Partial, Shard
from tests.single_ops import (
    Array,
    Input,
    check_strategy,
    draw_all,
    fits_axis,
    floats,
    indices,
    ints,
    single_op,
)

EXECUTOR = Executor()
SHARDS = (2, 3, 4)


def rule_of(kind: str, inputs: Sequence[Input], **attrs: Any) -> Rule:
    """Return the rule of an op."""
    graph, op = single_op(kind, inputs, **attrs)
    return discover(graph).of(op)


def hold(kind: str, inputs: Sequence[Input], strategies: Sequence[Strategy], **attrs: Any) -> int:
    """Assert that strategies hold on these inputs on axes of 2, 3 and 4; return how many trials that were."""
    graph, op = single_op(kind, inputs, **attrs)
    data = draw_all(inputs, seed=7)
    outputs = EXECUTOR.run(op, data, graph.opset)
    fitting = [(s, n) for s in strategies for n in SHARDS if fits_axis(op, s, data, outputs, n)]
    for strategy, size in fitting:
        check_strategy(op, strategy, data, graph.opset, size)
    return len(fitting)


# --- Local kinds: what a device runs that holds some rows of a table --------------------------------------------------

T, D, M = 12, 5, 7
"""Rows of the table, their length, indices."""
PARTS: list[tuple[str, int, Sequence[Input], dict[str, Any]]] = [
    ("Gather", 0, [floats(T, D), indices(T, M)], {}),
    ("Gather", 0, [floats(T, D), indices(T)], {}),  # a scalar index
    ("Gather", 1, [floats(3, T, D), indices(T, 2, M)], {"axis": 1}),
    ("Gather", 1, [floats(3, T), indices(T, 2, M)], {"axis": -1}),
    ("GatherElements", 0, [floats(T, D), indices(T, M, D)], {}),
    ("GatherElements", 1, [floats(D, T), indices(T, D, 2 * T)], {"axis": -1}),
    ("GatherND", 0, [floats(T, T, D), indices(T, M, 2)], {}),
    ("GatherND", 0, [floats(T), indices(T, M, 1)], {}),
    ("GatherND", 1, [floats(3, T, D), indices(T, 3, M, 1)], {"batch_dims": 1}),
    ("ScatterElements", 0, [floats(T, D), indices(T, M, D), floats(M, D)], {}),
    ("ScatterElements", 1, [floats(D, T), indices(T, D, 3), floats(D, 3)], {"axis": -1, "reduction": "add"}),
    ("ScatterElements", 1, [floats(D, T), indices(T, D, M), floats(D, M)], {"axis": 1, "reduction": "mul"}),
    ("ScatterElements", 1, [floats(D, T), indices(T, D, M), floats(D, M)], {"axis": 1, "reduction": "max"}),
    ("ScatterND", 0, [floats(T, D), indices(T, M, 1), floats(M, D)], {}),
    ("ScatterND", 0, [floats(T, T), indices(T, M, 2), floats(M)], {"reduction": "add"}),
    ("ScatterND", 0, [floats(T, D), indices(T, 2, M, 1), floats(2, M, D)], {"reduction": "min"}),
]
every_part = pytest.mark.parametrize(
    ("kind", "dim", "inputs", "attrs"), PARTS, ids=[f"{p[0]}-{i}" for i, p in enumerate(PARTS)]
)


def whole_and_parts(
    kind: str, dim: int, inputs: Sequence[Input], attrs: dict[str, Any], size: int
) -> tuple[Array, list[tuple[list[Array | None], dict[str, Any]]]]:
    """Return what an op gives on a table, and inputs and attributes of the local kind on each block of its rows."""
    data = draw_all(inputs, seed=size)
    table, picked = data[0], data[1]
    assert table is not None
    assert picked is not None
    from_end = np.random.default_rng(size).random(picked.shape) < 0.4
    data[1] = np.asarray(np.where(from_end, picked - T, picked))  # counted from the end, as ONNX allows
    whole = EXECUTOR.run_kind(kind, tuple(attrs.items()), data, 1, OPSET)[0]
    blocks = np.split(table, size, axis=dim)
    starts = [np.array(rank * T // size, np.int64) for rank in range(size)]
    return whole, [
        ([block, *data[1:], start], attrs | {"size": T}) for block, start in zip(blocks, starts, strict=True)
    ]


@every_part
@pytest.mark.parametrize("size", SHARDS)
def test_blocks_of_a_table_make_the_whole(
    kind: str, dim: int, inputs: Sequence[Input], attrs: dict[str, Any], size: int
) -> None:
    """What is gathered adds up and what is scattered lies side by side, also for indices that count from the end."""
    whole, parts = whole_and_parts(kind, dim, inputs, attrs, size)

    results = [
        EXECUTOR.run_kind(f"{DOMAIN}::{kind}Part", tuple(given.items()), local, 1, OPSET)[0] for local, given in parts
    ]

    together = np.sum(results, axis=0) if kind.startswith("Gather") else np.concatenate(results, axis=dim)
    np.testing.assert_array_equal(together, whole)


@every_part
def test_onnxruntime_runs_local_kinds_as_we_do(
    kind: str, dim: int, inputs: Sequence[Input], attrs: dict[str, Any]
) -> None:
    """The bodies are ONNX: another runtime computes the same from them."""
    _, parts = whole_and_parts(kind, dim, inputs, attrs, 3)

    compare_runtimes(f"{DOMAIN}::{kind}Part", *parts[1])


def compare_runtimes(kind: str, inputs: Sequence[Array | None], attrs: dict[str, Any]) -> None:
    """Assert that ONNX Runtime makes of a function what our executor makes of it, in float32."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="the oracle of this test")
    from onnx import helper

    arrays = [x.astype(np.float32) if x.dtype == np.float64 else x for x in inputs if x is not None]
    feeds = {f"x{i}": array for i, array in enumerate(arrays)}
    function = function_proto(kind)
    node = helper.make_node(function.name, list(feeds), list(function.output), domain=DOMAIN, **attrs)
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in feeds.items()}
    graph = helper.make_graph(
        [node],
        "part",
        [helper.make_tensor_value_info(name, types[name], list(x.shape)) for name, x in feeds.items()],
        [helper.make_tensor_value_info(name, types["x0"], None) for name in function.output],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)

    results = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)

    expected = EXECUTOR.run_kind(kind, tuple(attrs.items()), arrays, len(results), OPSET)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)  # float32 sums in another order


V, S, B = 24, 12, 8
LOCAL: list[tuple[str, Sequence[Input], dict[str, Any], set[str]]] = [
    ("Gather", [floats(V, D), indices(V, B, S)], {}, {"S(0),R -> P as autopar::GatherPart from #0 dim 0"}),
    (
        "Gather",  # the last position, counted from the end, of a sequence in shards
        [floats(B, S, D), np.array(-1)],
        {"axis": 1},
        {"S(1),R -> P as autopar::GatherPart from #0 dim 1"},
    ),
    (
        "GatherElements",
        [floats(B, V), indices(V, B, S)],
        {"axis": 1},
        {"S(1),R -> P as autopar::GatherElementsPart from #0 dim 1"},
    ),
    (
        "GatherND",
        [floats(B, S, D), indices(S, B, 4, 1)],
        {"batch_dims": 1},
        {"S(1),R -> P as autopar::GatherNDPart from #0 dim 1"},
    ),
    (
        "ScatterElements",
        [floats(B, V), indices(V, B, 4), floats(B, 4)],
        {"axis": 1},
        {"S(1),R,R -> S(1) as autopar::ScatterElementsPart from #0 dim 1"},
    ),
    (
        "ScatterND",
        [floats(V, D), indices(V, 5, 1), floats(5, D)],
        {"reduction": "add"},
        {"S(0),R,R -> S(0) as autopar::ScatterNDPart from #0 dim 0"},
    ),
    (
        "Trilu",
        [floats(3, S, V)],
        {},
        {
            "S(1) -> S(1) as autopar::TriluRowsPart from #0 dim 1",
            "S(2) -> S(2) as autopar::TriluColumnsPart from #0 dim 2",
        },
    ),
    (
        "Trilu",
        [floats(S, V), np.array(-2)],
        {"upper": 0},
        {
            "S(0),R -> S(0) as autopar::ShiftedTriluRowsPart from #0 dim 0",
            "S(1),R -> S(1) as autopar::ShiftedTriluColumnsPart from #0 dim 1",
        },
    ),
    ("Gather", [ints(3, 1, 2, 5), np.array(1)], {}, set()),  # a shape: nobody shards it
    ("CumSum", [floats(S, D), np.array(0)], {}, set()),
]


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "expected"), LOCAL, ids=[f"{c[0]}-{i}" for i, c in enumerate(LOCAL)]
)
def test_dims_that_need_the_position_are_found_with_a_local_kind(
    kind: str, inputs: Sequence[Input], attrs: dict[str, Any], expected: set[str]
) -> None:
    """A table of rows can be sharded along them; found by execution, and right on other sizes."""
    strategies = [s for s in rule_of(kind, inputs, **attrs).strategies if s.local is not None]

    assert {str(strategy) for strategy in strategies} == expected
    assert hold(kind, inputs, strategies, **attrs) >= 2 * len(expected)


H, K = 4, 6
QUERIES: list[tuple[str, Sequence[Input], dict[str, Any], str]] = [
    (
        "Attention",
        [floats(B, H, S, K)] * 3,
        {"is_causal": 1},
        "S(2),R,R -> S(2) as autopar::AttentionPart from #0 dim 2",
    ),
    (
        "Attention",  # grouped queries, more keys than queries
        [floats(B, H, S, K), floats(B, 2, V, K), floats(B, 2, V, K)],
        {"is_causal": 1, "scale": 0.3, "softcap": 2.0},
        "S(2),R,R -> S(2) as autopar::ScaledAttentionPart from #0 dim 2",
    ),
    (
        "autopar::AttentionGrad",
        [floats(B, H, S, K), floats(B, 2, S, K), floats(B, 2, S, K), floats(B, H, S, K)],
        {"is_causal": 1, "scale": 0.3},
        "S(2),R,R,S(2) -> S(2),P,P as autopar::AttentionGradPart from #0 dim 2",
    ),
    (
        "autopar::CausalAttention",
        [floats(B, H, S, K)] * 3,
        {"scale": 0.3, "window": 5},
        "S(2),R,R -> S(2) as autopar::CausalAttentionPart from #0 dim 2",
    ),
    (
        "autopar::CausalAttention",  # grouped queries, more keys than queries
        [floats(B, H, S, K), floats(B, 2, V, K), floats(B, 2, V, K)],
        {"scale": 0.3, "chunk": 8, "softcap": 2.0},
        "S(2),R,R -> S(2) as autopar::CausalAttentionPart from #0 dim 2",
    ),
    (
        "autopar::SinkAttention",
        [*[floats(B, H, S, K)] * 3, floats(H)],
        {"scale": 0.3, "window": 5},
        "S(2),R,R,R -> S(2) as autopar::SinkAttentionPart from #0 dim 2",
    ),
    (
        "autopar::CausalAttentionGrad",
        [floats(B, H, S, K), floats(B, 2, S, K), floats(B, 2, S, K), floats(B, H, S, K)],
        {"scale": 0.3, "chunk": 4},  # blocks on 3 devices are chunks
        "S(2),R,R,S(2) -> S(2),P,P as autopar::CausalAttentionGradPart from #0 dim 2",
    ),
    (
        "autopar::SinkAttentionGrad",
        [floats(B, H, S, K), floats(B, 2, S, K), floats(B, 2, S, K), floats(H), floats(B, H, S, K)],
        {"scale": 0.3, "window": 5, "softcap": 2.0},
        "S(2),R,R,R,S(2) -> S(2),P,P,P as autopar::SinkAttentionGradPart from #0 dim 2",
    ),
]


KEY_HEADS: list[tuple[str, Sequence[Input], dict[str, Any], str]] = [
    (
        "Attention",
        [floats(B, 12, S, K), floats(B, 3, S, K), floats(B, 3, S, K)],
        {"is_causal": 1},
        "S(1),R,R -> S(1) as autopar::AttentionHeadsPart from #0 dim 1",
    ),
    (
        "Attention",
        [floats(B, 12, S, K), floats(B, 3, V, K), floats(B, 3, V, K), floats(B, 1, S, V)],
        {"scale": 0.3, "softcap": 2.0},
        "S(1),R,R,R -> S(1) as autopar::ScaledMaskedAttentionHeadsPart from #0 dim 1",
    ),
    (
        "autopar::AttentionGrad",
        [floats(B, 12, S, K), floats(B, 3, S, K), floats(B, 3, S, K), floats(B, 12, S, K)],
        {"is_causal": 1, "scale": 0.3},
        "S(1),R,R,S(1) -> S(1),P,P as autopar::AttentionGradHeadsPart from #0 dim 1",
    ),
    (
        "autopar::MaskedAttentionGrad",
        [
            *(floats(B, 12, S, K), floats(B, 3, S, K), floats(B, 3, S, K), floats(B, 1, S, S)),
            floats(B, 12, S, K),
        ],
        {"is_causal": 0, "scale": 0.3},
        "S(1),R,R,R,S(1) -> S(1),P,P as autopar::MaskedAttentionGradHeadsPart from #0 dim 1",
    ),
    (
        "autopar::CausalAttention",
        [floats(B, 12, S, K), floats(B, 3, S, K), floats(B, 3, S, K)],
        {"scale": 0.3, "window": 5},
        "S(1),R,R -> S(1) as autopar::CausalAttentionHeadsPart from #0 dim 1",
    ),
    (
        "autopar::CachedAttention",
        [floats(B, 12, 1, K), *[floats(B, 3, S, K)] * 2, *[floats(B, 3, 1, K)] * 2],
        {"scale": 0.3, "window": 5},
        "S(1),R,R,R,R -> S(1) as autopar::CachedAttentionHeadsPart from #0 dim 1",
    ),
    (
        "autopar::CausalAttentionGrad",
        [floats(B, 12, S, K), floats(B, 3, S, K), floats(B, 3, S, K), floats(B, 12, S, K)],
        {"scale": 0.3, "chunk": 4, "softcap": 2.0},
        "S(1),R,R,S(1) -> S(1),P,P as autopar::CausalAttentionGradHeadsPart from #0 dim 1",
    ),
    (
        "autopar::SinkAttention",
        [floats(B, 12, S, K), floats(B, 3, S, K), floats(B, 3, S, K), floats(12)],
        {"scale": 0.3, "window": 5},
        "S(1),R,R,R -> S(1) as autopar::SinkAttentionHeadsPart from #0 dim 1",
    ),
    (
        "autopar::SinkAttentionGrad",
        [floats(B, 12, S, K), floats(B, 3, S, K), floats(B, 3, S, K), floats(12), floats(B, 12, S, K)],
        {"scale": 0.3, "window": 5},
        "S(1),R,R,R,S(1) -> S(1),P,P,P as autopar::SinkAttentionGradHeadsPart from #0 dim 1",
    ),
]


def num_outputs(kind: str) -> int:
    """Return the number of outputs of an attention or its gradient."""
    return len(function_proto(kind).output) if kind.startswith(DOMAIN) else 1


@pytest.mark.parametrize(("kind", "inputs", "attrs", "expected"), KEY_HEADS)
def test_query_heads_are_sharded_over_more_devices_than_there_are_key_heads(
    kind: str, inputs: Sequence[Input], attrs: dict[str, Any], expected: str
) -> None:
    """A device takes the key heads of its query heads; on 2 and 4 devices 3 key heads cannot be sharded."""
    graph, op = single_op(kind, inputs, num_outputs(kind), **attrs)

    strategies = [s for s in discover(graph).of(op).strategies if s.local is not None and s.local.fewer is not None]

    assert [str(strategy) for strategy in strategies] == [expected]
    for size in (2, 4, 6):
        check_strategy(op, strategies[0], draw_all(inputs, seed=size), graph.opset, size)


def test_key_heads_are_sharded_where_they_divide() -> None:
    """The kind that selects key heads is an option on 8 devices, of which 4 key heads are too few, and on no fewer."""
    inputs = [floats(B, 16, S, K), floats(B, 4, S, K), floats(B, 4, S, K)]
    graph, op = single_op("Attention", inputs, 1, is_causal=1)
    strategies = discover(graph).of(op).strategies

    for devices, expected in ((2, False), (4, False), (8, True)):
        found = options(graph, op, strategies, Mesh.of(tp=devices), frozenset())
        used = {strategies[index].local for index in found.local_kinds if index >= 0}
        assert any(local is not None and local.fewer is not None for local in used) == expected


@pytest.mark.parametrize("chunk", [4, 16, 32])
def test_chunks_of_attention_are_not_taken_for_shards(chunk: int) -> None:
    """Of 64 tokens 2 devices have whole chunks, 32 devices have not; only rings split keys and values."""
    graph, op = single_op("autopar::CausalAttention", [floats(B, H, 64, K)] * 3, 1, scale=0.3, chunk=chunk)

    strategies = [s for s in discover(graph).of(op).strategies if s.local is None or s.local.kind not in RINGS]

    assert len(strategies) > 4
    assert all(Shard(2) not in strategy.inputs[1:] for strategy in strategies)


@pytest.mark.parametrize(("kind", "inputs", "attrs", "expected"), QUERIES, ids=[case[0] for case in QUERIES])
def test_queries_of_causal_attention_are_sharded_with_their_position(
    kind: str, inputs: Sequence[Input], attrs: dict[str, Any], expected: str
) -> None:
    """Context parallelism: a device has some queries and all keys; its gradients of keys and values are terms."""
    graph, op = single_op(kind, inputs, num_outputs(kind), **attrs)

    strategies = [s for s in discover(graph).of(op).strategies if s.local is not None and s.local.fewer is None]
    strategies = [s for s in strategies if s.local is not None and s.local.kind not in RINGS]

    assert [str(strategy) for strategy in strategies] == [expected]
    for size in SHARDS:
        check_strategy(op, strategies[0], draw_all(inputs, seed=size), graph.opset, size)


def test_onnxruntime_runs_attention_of_some_queries_as_we_do() -> None:
    """The mask that says which keys are seen is one ONNX Runtime takes."""
    q, kv, start = floats(2, H, 3, K), floats(2, H, S, K), np.array(4, np.int64)

    compare_runtimes("autopar::AttentionPart", [*draw_all([q, kv, kv], 0), start], {"size": S, "is_causal": 1})
    compare_runtimes(
        "autopar::AttentionGradPart",
        [*draw_all([q, kv, kv, q], 0), start],
        {"size": S, "is_causal": 1, "scale": 0.3},
    )


@pytest.mark.parametrize(
    ("kind", "inputs", "rows", "attrs"),
    [
        ("GatherGrad", [indices(V, B, S), np.arange(V), floats(B, S, D)], 1, {"axis": 0}),
        ("GatherNDGrad", [indices(V, B, 4, 1), np.arange(V), floats(B, 4, D)], 1, {"batch_dims": 1}),
        ("GatherElementsGrad", [indices(V, B, S), np.arange(V), floats(B, S)], 1, {"axis": 1}),
        ("CrossEntropyStats", [floats(B, V), floats(B, 1), indices(V, B), np.arange(V)], 3, {}),
        ("CrossEntropyGrad", [floats(B, V), floats(B, 1), floats(B, 1), indices(V, B), np.arange(V), floats()], 4, {}),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_gradients_and_losses_are_sharded_over_the_vocabulary_by_its_row_numbers(
    kind: str, inputs: Sequence[Input], rows: int, attrs: dict[str, Any]
) -> None:
    """Our own kinds take the numbers of the rows as an input, so they need no local kind."""
    num_outputs = 2 if kind == "CrossEntropyStats" else 1
    graph, op = single_op(f"autopar::{kind}", inputs, num_outputs, **attrs)

    strategies = [s for s in discover(graph).of(op).strategies if s.inputs[rows] == Shard(0)]

    assert [s.local for s in strategies] == [None]
    assert all(isinstance(p, Partial if kind == "CrossEntropyStats" else Shard) for p in strategies[0].outputs)


def test_data_that_is_not_overwritten_counts() -> None:
    """An update of some rows is neither independent of the others nor linear in the updates alone."""
    rule = rule_of("ScatterND", [floats(V, D), indices(V, 5, 1), floats(5, D)])

    assert {str(s) for s in rule.strategies if Partial() in s.inputs} == {"P,R,P -> P"}


# --- Windows ----------------------------------------------------------------------------------------------------------

C = 4
X, W = floats(3, C, 24, 24), floats(6, C, 3, 3)


def halos(rule: Rule, dim: int) -> list[str]:
    """Return the strategies that shard a spatial dim and need a halo."""
    return [str(s) for s in rule.strategies if s.halos and s.halos[0].dim == dim]


def same(kernel: int, dims: int = 2, **attrs: Any) -> dict[str, Any]:
    """Return the attributes of a window with padding that keeps sizes."""
    return {"kernel_shape": (kernel,) * dims, "pads": (kernel // 2,) * (2 * dims)} | attrs


WINDOWS: list[tuple[str, Sequence[Input], dict[str, Any], str]] = [
    # before = padding, after = what the last window of a block reaches beyond it: span - stride - padding
    ("Conv", [X, W], same(3), "S(2),R -> S(2) with halo #0 dim 2 +1+1 with pads[0]=0, pads[2]=0"),
    ("Conv", [X, W], same(3, strides=(2, 2)), "S(2),R -> S(2) with halo #0 dim 2 +1+0 with pads[0]=0, pads[2]=0"),
    (
        "Conv",
        [X, W],
        same(3, dilations=(2, 2), pads=(2, 2, 2, 2)),
        "S(2),R -> S(2) with halo #0 dim 2 +2+2 with pads[0]=0, pads[2]=0",
    ),
    ("Conv", [X, W], same(3, pads=(0, 1, 2, 1)), "S(2),R -> S(2) with halo #0 dim 2 +0+2 with pads[2]=0"),
    (
        "Conv",
        [X, floats(6, C, 4, 4), floats(6)],
        {"kernel_shape": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1)},
        "S(2),R,R -> S(2) with halo #0 dim 2 +1+1 with pads[0]=0, pads[2]=0",
    ),
    (
        "Conv",
        [X, floats(C, 1, 7, 7)],
        same(7, group=C),
        "S(2),R -> S(2) with halo #0 dim 2 +3+3 with pads[0]=0, pads[2]=0",
    ),
    (
        "Conv",
        [floats(3, C, 24), floats(6, C, 5)],
        same(5, dims=1, strides=(2,)),
        "S(2),R -> S(2) with halo #0 dim 2 +2+1 with pads[0]=0, pads[1]=0",
    ),
    (
        "Conv",
        [floats(3, C, 12, 12, 12), floats(6, C, 3, 3, 3)],
        same(3, dims=3),
        "S(2),R -> S(2) with halo #0 dim 2 +1+1 with pads[0]=0, pads[3]=0",
    ),
    # each row of the result sums up what the windows put there: theirs, and those of the neighbours that reach it
    (
        "ConvTranspose",
        [X, floats(C, 6, 4, 4)],
        {"kernel_shape": (4, 4), "strides": (2, 2), "pads": (1, 1, 1, 1)},
        "S(2),R -> S(2) with halo #0 dim 2 +1+1 with pads[0]=3, pads[2]=3",
    ),
    (
        "ConvTranspose",
        [X, floats(C, 6, 3, 3)],
        same(3, strides=(2, 2), output_padding=(1, 1)),
        "S(2),R -> S(2) with halo #0 dim 2 +0+1 with pads[2]=3",
    ),
    ("MaxPool", [X], same(3), "S(2) -> S(2) with halo #0 dim 2 +1+1 lowest with pads[0]=0, pads[2]=0"),
    (
        "MaxPool",
        [X],
        {"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1},
        "S(2) -> S(2) with halo #0 dim 2 +0+1 lowest",
    ),
    (
        "AveragePool",
        [X],
        same(3, count_include_pad=1),
        "S(2) -> S(2) with halo #0 dim 2 +1+1 with pads[0]=0, pads[2]=0",
    ),
    ("LpPool", [X], same(3), "S(2) -> S(2) with halo #0 dim 2 +1+1 with pads[0]=0, pads[2]=0"),
    (
        "autopar::ConvWeightGrad",
        [X, floats(3, 6, 12, 12)],
        same(3, strides=(2, 2), dilations=(1, 1), group=1),
        "S(2),S(2) -> P with halo #0 dim 2 +1+0 with pads[0]=0, pads[2]=0",
    ),
    (
        "autopar::MaxPoolGrad",  # windows of the next device that overlap the block, and all that these windows see
        [X, floats(3, C, 12, 12)],
        same(3, strides=(2, 2), dilations=(1, 1), crop=(0, 0, 0, 0)),
        "S(2),S(2) -> S(2) with halo #0 dim 2 +1+2 lowest, #1 dim 2 +0+1 "
        "with pads[0]=0, pads[2]=0, crop[0]=1, crop[2]=2",
    ),
    (
        "autopar::AveragePoolGrad",
        [X, ints(24, 24)],
        same(3, strides=(1, 1), dilations=(1, 1), count_include_pad=1),
        "S(2),R -> S(2) scaling #1[0] with halo #0 dim 2 +1+1 with pads[0]=2, pads[2]=2",
    ),
]


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs", "expected"), WINDOWS, ids=[f"{case[0]}-{i}" for i, case in enumerate(WINDOWS)]
)
def test_windows_slide_over_shards_with_halos(
    kind: str, inputs: Sequence[Input], attrs: dict[str, Any], expected: str
) -> None:
    """One strategy per spatial dim, with the smallest halo; it holds on sizes and numbers of shards never tried."""
    rule = rule_of(kind, inputs, **attrs)
    strategies = [s for s in rule.strategies if s.halos]

    assert halos(rule, 2) == [expected]
    assert len(strategies) == len(attrs["kernel_shape"])
    assert hold(kind, inputs, strategies, **attrs) == 3 * len(strategies)


@pytest.mark.parametrize(
    ("kind", "inputs", "attrs"),
    [
        ("Conv", [X, W], {"kernel_shape": (3, 3)}),  # fewer windows than rows: blocks do not match
        ("Conv", [X, W], {"kernel_shape": (3, 3), "pads": (2, 2, 2, 2)}),
        ("AveragePool", [X], same(3)),  # the windows at the ends have another divisor
        ("AveragePool", [X], {"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1}),
        ("MaxPool", [X], {"kernel_shape": (2, 2), "strides": (2, 2)}),  # windows end where blocks end
        ("Conv", [X, floats(6, C, 1, 1)], {"kernel_shape": (1, 1)}),
        ("GlobalAveragePool", [X], {}),
    ],
)
def test_no_halo_is_offered_where_none_helps_or_none_is_needed(
    kind: str, inputs: Sequence[Input], attrs: dict[str, Any]
) -> None:
    """Rows that windows share with the wrong neighbours, divisors that know the ends, windows that share nothing."""
    assert halos(rule_of(kind, inputs, **attrs), 2) == []


@pytest.mark.parametrize("size", [32, 224])
def test_patches_are_sharded_like_their_image(size: int) -> None:
    """Windows as far apart as they are long need no halo, however long they are."""
    inputs = [floats(2, 3, size, size), floats(8, 3, 16, 16)]

    rule = rule_of("Conv", inputs, kernel_shape=(16, 16), strides=(16, 16))

    assert {"S(2),R -> S(2)", "S(3),R -> S(3)"} <= {str(s) for s in rule.strategies}


def test_long_windows_that_overlap_are_not_taken_for_short_ones() -> None:
    """The small op that stands for it may have a shorter window only if that overlaps its neighbours, too."""
    inputs = [floats(4, 3, 60), floats(8, 3, 16)]

    rule = rule_of("Conv", inputs, kernel_shape=(16,), strides=(8,), pads=(0, 0))

    assert not any(s.inputs[0] == Shard(2) for s in rule.strategies)


@st.composite
def sliding(draw: st.DrawFn) -> tuple[str, list[Input], dict[str, Any], tuple[int, int]]:
    """Draw an op that slides a window over one dim of `stride` times as many rows as there are windows.

    Returns kind, inputs, attributes and how many rows its halo has before and after.
    """
    kind = draw(st.sampled_from(["Conv", "MaxPool", "AveragePool", "ConvTranspose"]))
    kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    span = (kernel - 1) * dilation + 1
    rest = draw(st.integers(0, stride - 1))
    total = span - stride + rest
    assume(total >= 0)
    begin = draw(st.integers(0, total))
    end = total - begin
    assume(max(begin, end) < kernel)
    attrs: dict[str, Any] = {
        "kernel_shape": (kernel,),
        "strides": (stride,),
        "dilations": (dilation,),
        "pads": (begin, end),
    }
    rows, windows = floats(3, C, 12 * stride), floats(3, C, 12)
    match kind:
        case "Conv":
            return kind, [rows, floats(5, C, kernel)], attrs, (begin, max(0, span - stride - begin))
        case "ConvTranspose":
            inputs: list[Input] = [windows, floats(C, 5, kernel)]
            return (
                kind,
                inputs,
                attrs | {"output_padding": (rest,)},
                ((span - 1 - begin) // stride, -(-begin // stride)),
            )
        case "AveragePool":
            attrs["count_include_pad"] = 1
    return kind, [rows], attrs, (begin, max(0, span - stride - begin))


@settings(max_examples=40)
@given(case=sliding())
def test_every_window_that_moves_with_its_rows_can_be_sharded(
    case: tuple[str, list[Input], dict[str, Any], tuple[int, int]],
) -> None:
    """The strategy is there, its halo is the smallest possible, and all strategies are right on other sizes."""
    kind, inputs, attrs, halo = case

    strategies = [s for s in rule_of(kind, inputs, **attrs).strategies if s.inputs[0] == Shard(2)]

    assert [[(h.before, h.after) for h in s.halos] for s in strategies] == [[halo] if any(halo) else []]
    assert hold(kind, inputs, strategies, **attrs) == len(SHARDS)
