"""The rules of single ops, worked out by hand, and the law that every strategy keeps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autopar.discover import discover, format_rule
from tests.single_ops import (
    Input,
    check_strategy,
    draw_all,
    fits_axis,
    flags,
    floats,
    indices,
    ints,
    positive,
    single_op,
)

B, S, D, H, K, V, C = 8, 16, 96, 12, 8, 40, 16
"""Batch, sequence, hidden (H * K), heads, head size, vocabulary, channels."""
SCALAR = np.array(2.0)

Case = tuple[str, Sequence[Input], int, dict[str, Any], str]

ELEMENTWISE: list[Case] = [
    ("Relu", [floats(B, S, D)], 1, {}, "[a,b,c]->[a,b,c]"),
    ("Sqrt", [positive(B, S)], 1, {}, "[a,b]->[a,b]"),
    ("Log", [positive(B, S)], 1, {}, "[a,b]->[a,b]"),
    ("Neg", [floats(B, S)], 1, {}, "[a,b]->[a,b]; P->P"),
    ("Cast", [floats(B, S)], 1, {"to": 11}, "[a,b]->[a,b]; P->P"),
    ("Add", [floats(B, S, D), floats(D)], 1, {}, "[a,b,c],[c]->[a,b,c]; P,P->P"),
    ("Add", [floats(B, S), floats(B, S)], 1, {}, "[a,b],[a,b]->[a,b]; P,P->P"),
    ("Mul", [floats(B, S), floats()], 1, {}, "[a,b],[]->[a,b]; P,R->P; R,P->P"),
    ("Mul", [floats(B, S), floats(B, 1)], 1, {}, "[a,b],[a,.]->[a,b]; P,R->P; R,P->P"),
    ("Pow", [floats(B, S), SCALAR], 1, {}, "[a,b],[]->[a,b]"),
    (
        "Where",
        [flags(B, 1, S), floats(B, H, S), np.array(0.0)],
        1,
        {},
        "[b,.,c],[b,a,c],[]->[b,a,c]; R,P,R->P",
    ),
    ("Sum", [floats(B, S)] * 4, 1, {}, "[a,b],[a,b],[a,b],[a,b]->[a,b]; P,P,P,P->P"),
]

PRODUCTS: list[Case] = [
    # The contraction c is the dim MetaDist loses in low precision; batch dims of the left operand stay.
    ("MatMul", [floats(B, S, D), floats(D, V)], 1, {}, "[b,c,d],[d,a]->[b,c,a]; d: sum; P,R->P; R,P->P"),
    (
        "MatMul",
        [floats(B, H, S, K), floats(B, H, K, S)],
        1,
        {},
        "[b,c,d,e],[b,c,e,a]->[b,c,d,a]; e: sum; P,R->P; R,P->P",
    ),
    # The bias is added once: with the contraction sharded it has to be a partial sum itself.
    (
        "Gemm",
        [floats(S, D), floats(D, V), floats(V)],
        1,
        {},
        "[b,c],[c,a],[a]->[b,a]; c: sum, #2 partial; P,R,P->P; R,P,P->P",
    ),
    (
        "Einsum",  # the gradient of a weight: batch and sequence are contracted
        [floats(B, S, D), floats(B, S, V)],
        1,
        {"equation": "bsd,bsv->dv"},
        "[b,c,d],[b,c,a]->[d,a]; b: sum; c: sum; P,R->P; R,P->P",
    ),
    (
        "Conv",
        [floats(4, C, 8, 8), floats(2 * C, C, 3, 3), floats(2 * C)],
        1,
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)},
        "[b,c,.,.],[a,c,.,.],[a]->[b,a,.,.]; c: sum, #2 partial; P,R,P->P; R,P,P->P",
    ),
    (
        "Conv",  # a depthwise convolution: the channels go with the groups
        [floats(4, C, 8, 8), floats(C, 1, 3, 3)],
        1,
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "group": C},
        "[a,b,.,.],[b,.,.,.]->[a,b,.,.]; b: scales group[0]; P,R->P; R,P->P",
    ),
    (
        "MaxPool",
        [floats(4, C, 8, 8)],
        1,
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)},
        "[a,b,.,.]->[a,b,.,.]",
    ),
    ("GlobalAveragePool", [floats(4, C, 7, 7)], 1, {}, "[a,b,c,d]->[a,b,.,.]; c: mean; d: mean; P->P"),
]

NORMS: list[Case] = [
    ("Softmax", [floats(B, S, D)], 1, {"axis": -1}, "[a,b,.]->[a,b,.]"),
    (
        "LayerNormalization",
        [floats(B, S, D), floats(D), floats(D)],
        1,
        {"axis": -1},
        "[a,b,.],[.],[.]->[a,b,.]; R,P,P->P",
    ),
    ("RMSNormalization", [floats(B, S, D), floats(D)], 1, {"axis": -1}, "[a,b,.],[.]->[a,b,.]; R,P->P"),
    (
        "BatchNormalization",  # inference: the statistics are inputs
        [floats(4, C, 8, 8), floats(C), floats(C), floats(C), positive(C)],
        1,
        {},
        "[a,b,c,d],[b],[b],[b],[b]->[a,b,c,d]; R,P,P,R,R->P",
    ),
    ("ReduceSum", [floats(B, S, D), ints(0, 1)], 1, {"keepdims": 0}, "[a,b,c],_->[c]; a: sum; b: sum; P,R->P"),
    ("ReduceMean", [floats(B, S, D), ints(-1)], 1, {}, "[a,b,c],_->[a,b,.]; c: mean; P,R->P"),
    ("ReduceMax", [floats(B, S, D), ints(-1)], 1, {}, "[a,b,c],_->[a,b,.]; c: max"),
    ("ReduceMin", [floats(B, S, D), ints(-1)], 1, {}, "[a,b,c],_->[a,b,.]; c: min"),
    ("ArgMax", [floats(B, S, D)], 1, {"axis": 2, "keepdims": 0}, "[a,b,.]->[a,b]"),
    ("CumSum", [floats(B, S, D), np.array(1)], 1, {}, "[a,.,b],_->[a,.,b]; P,R->P"),
    ("Trilu", [floats(B, S, S)], 1, {}, "[a,.,.]->[a,.,.]; P->P"),
]

ATTENTION: list[Case] = [
    # Query rows of causal attention know their position: no sharding of the sequence. The values' head size is free.
    (
        "Attention",
        [floats(B, H, S, K)] * 3,
        1,
        {"is_causal": 1},
        "[b,c,.,.],[b,c,.,.],[b,c,.,a]->[b,c,.,a]; R,R,P->P",
    ),
    (
        "Attention",
        [floats(B, H, S, K)] * 3,
        1,
        {},
        "[b,c,d,.],[b,c,.,.],[b,c,.,a]->[b,c,d,a]; R,R,P->P",
    ),
    (
        "Attention",  # grouped queries: 4 query heads to each key head
        [floats(2, 16, S, K), floats(2, 4, S, K), floats(2, 4, S, K)],
        1,
        {"is_causal": 1},
        "[b,c,.,.],[b,c,.,.],[b,c,.,a]->[b,c,.,a]; R,R,P->P",
    ),
    (
        "Attention",  # the mask is sharded with the queries
        [floats(B, H, S, K)] * 3 + [floats(B, 1, S, S)],
        1,
        {},
        "[b,c,d,.],[b,c,.,.],[b,c,.,a],[b,.,d,.]->[b,c,d,a]; R,R,P,R->P",
    ),
    (
        "RotaryEmbedding",
        [floats(B, H, S, K), floats(B, S, K // 2), floats(B, S, K // 2)],
        1,
        {},
        "[a,b,c,.],[a,c,.],[a,c,.]->[a,b,c,.]; P,R,R->P; R,P,P->P",
    ),
]

SHAPES: list[Case] = [
    ("Transpose", [floats(B, S, H, K)], 1, {"perm": (0, 2, 1, 3)}, "[a,b,c,d]->[a,c,b,d]; P->P"),
    # Splitting the hidden dim: its shards are shards of the heads, and the target shape has to shrink.
    (
        "Reshape",
        [floats(B, S, D), ints(B, S, H, K)],
        1,
        {},
        "[a,b,c],_->[a,b,c,.]; a: scales #1[0]; b: scales #1[1]; c: scales #1[2]; P,R->P",
    ),
    ("Reshape", [floats(B, S, H, K), ints(0, 0, -1)], 1, {}, "[a,b,c,.],_->[a,b,c]; P,R->P"),
    ("Reshape", [floats(B, S, D), ints(-1, D)], 1, {}, "[a,.,b],_->[a,b]; b: scales #1[1]; P,R->P"),
    ("Flatten", [floats(B, C, 3, 3)], 1, {"axis": 1}, "[a,b,.,.]->[a,b]; P->P"),
    ("Unsqueeze", [floats(B, S, D), ints(2)], 1, {}, "[a,b,c],_->[a,b,.,c]; P,R->P"),
    ("Squeeze", [floats(B, 1, D), ints(1)], 1, {}, "[a,.,b],_->[a,b]; P,R->P"),
    (
        "Expand",  # the dims made from the shape alone (b, d) can be made in shards
        [floats(B, 1, S, 1), ints(B, H, S, V)],
        1,
        {},
        "[c,.,d,.],_->[c,a,d,b]; a: scales #1[1]; b: scales #1[3]; c: scales #1[0]; d: scales #1[2]; P,R->P",
    ),
    (
        "Slice",
        [floats(B, S, D), ints(0), ints(S // 2), ints(1)],
        1,
        {},
        "[a,.,b],_,_,_->[a,.,b]; P,R,R,R->P",
    ),
    # Each device has its share of both parts, side by side: the result is sharded block-cyclic.
    ("Concat", [floats(B, S, D)] * 2, 1, {"axis": 2}, "[a,b,c],[a,b,c]->[a,b,c]; P,P->P"),
    # A contiguous shard of a fused projection is not a shard of each of its parts.
    ("Split", [floats(B, S, 3 * D), ints(D, D, D)], 3, {"axis": 2}, "[a,b,.],_->[a,b,.],[a,b,.],[a,b,.]; P,R->P,P,P"),
    (
        "Split",
        [floats(B, S, 6 * K), ints(4 * K, K, K)],
        3,
        {"axis": 2},
        "[a,b,.],_->[a,b,.],[a,b,.],[a,b,.]; P,R->P,P,P",
    ),
    ("Shape", [floats(B, S)], 1, {}, "[.,.]->[.]; P->R"),
]

INDEXING: list[Case] = [
    ("Gather", [floats(V, D), indices(V, B, S)], 1, {}, "[.,c],[a,b]->[a,b,c]; P,R->P"),
    ("Gather", [floats(B, S, D), np.array(3)], 1, {"axis": 1}, "[a,.,b],_->[a,b]; P,R->P"),
    ("GatherND", [floats(B, S, D), indices(S, B, 5, 1)], 1, {"batch_dims": 1}, "[b,.,c],[b,a,.]->[b,a,c]; P,R->P"),
    ("GatherElements", [floats(B, S), indices(S, B, 4)], 1, {"axis": 1}, "[b,.],[b,a]->[b,a]; P,R->P"),
    (
        "ScatterElements",
        [floats(B, S), indices(S, B, 4), floats(B, 4)],
        1,
        {"axis": 1, "reduction": "add"},
        "[b,.],[b,a],[b,a]->[b,.]; a: sum, #0 partial; P,R,P->P",
    ),
    ("TopK", [floats(B, S, V), ints(2)], 2, {"axis": -1}, "[a,b,.],_->[a,b,.],[a,b,.]"),
    (
        "OneHot",
        [indices(V, B, S), np.array(V), floats(2)],
        1,
        {"axis": -1},
        "[a,b],_,[.]->[a,b,.]; R,R,P->P",
    ),
]

FUNCTIONS: list[Case] = [
    # The rows of the table come in as their numbers, so the vocabulary (b) can be sharded.
    (
        "autopar::GatherGrad",
        [indices(V, B, S), np.arange(V), floats(B, S, D)],
        1,
        {"axis": 0},
        "[c,d],[b],[c,d,a]->[b,a]; c: sum; d: sum; R,R,P->P",
    ),
    (
        "autopar::LayerNormalizationGrad",
        [floats(B, S, D), floats(D), floats(B, S, D)],
        3,
        {"axis": 2, "epsilon": 1e-5},
        "[a,b,.],[.],[a,b,.]->[a,b,.],[.],[.]; a: sum; b: sum; R,P,R->P,R,R; R,R,P->P,P,P",
    ),
    (
        "autopar::CrossEntropyStats",
        [floats(B, S, V), floats(B, S, 1), indices(V, B, S), np.arange(V)],
        2,
        {},
        "[a,b,c],[a,b,.],[a,b],[c]->[a,b,.],[a,b,.]; c: sum",
    ),
    (
        "autopar::BatchNormStats",
        [floats(4, C, 8, 8)],
        2,
        {},
        "[a,b,c,d]->[b],[b]; a: sum; c: sum; d: sum",
    ),
    (
        "autopar::Adam",  # not linear in anything, not even in a gradient that is still partial
        [floats(D, V), floats(D, V), positive(D, V), floats(D, V), positive()],
        3,
        {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1},
        "[a,b],[a,b],[a,b],[a,b],[]->[a,b],[a,b],[a,b]",
    ),
    (
        "SoftmaxCrossEntropyLoss",
        [floats(B * S, V), indices(V, B * S)],
        1,
        {"reduction": "mean"},
        "[a,.],[a]->[]; a: mean",
    ),
]

CASES = [*ELEMENTWISE, *PRODUCTS, *NORMS, *ATTENTION, *SHAPES, *INDEXING, *FUNCTIONS]
every_case = pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])


@every_case
def test_rule_is_the_one_worked_out_by_hand(case: Case) -> None:
    """All strategies of the op, and no other, are found by execution alone."""
    kind, inputs, num_outputs, attrs, expected = case
    graph, op = single_op(kind, inputs, num_outputs, **attrs)

    rule = discover(graph).of(op)

    assert format_rule(rule) == expected


@every_case
def test_devices_that_follow_a_strategy_compute_what_one_device_computes(case: Case) -> None:
    """Sharded op == whole op on the real shapes, which are not those of the discovery, on axes of 2 and 4."""
    kind, inputs, num_outputs, attrs, _ = case
    graph, op = single_op(kind, inputs, num_outputs, **attrs)
    rule = discover(graph).of(op)

    for size in (2, 4):
        data = draw_all(inputs, seed=size)
        outputs = draw_outputs(graph)
        for strategy in rule.strategies:
            if fits_axis(strategy, data, outputs, size):
                check_strategy(op, strategy, data, graph.opset, size)


def draw_outputs(graph: Any) -> list[Any]:
    return [np.empty(graph.values[name].shape) for name in graph.outputs]
