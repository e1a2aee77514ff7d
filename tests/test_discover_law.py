"""The law of discovery on fresh shapes: what is found on proxies holds on sizes and data drawn anew."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from autopar.discover import discover
from tests.single_ops import Input, check_rule, draw_all, flags, floats, indices, ints, positive, single_op


@dataclass(frozen=True)
class Sizes:
    """Batch, sequence, heads, head size, vocabulary, channels; all different."""

    b: int
    s: int
    h: int
    k: int
    v: int
    c: int

    @property
    def d(self) -> int:
        """Hidden size."""
        return self.h * self.k


Case = tuple[str, Sequence[Input], int, dict[str, Any]]
POOL = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)}
KERNEL = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}

CASES: list[Callable[[Sizes], Case]] = [
    lambda z: ("Tanh", [floats(z.b, z.s)], 1, {}),
    lambda z: ("Exp", [floats(z.b, z.s)], 1, {}),
    lambda z: ("Abs", [floats(z.b, z.s)], 1, {}),
    lambda z: ("Erf", [floats(z.b, z.s)], 1, {}),
    lambda z: ("Clip", [floats(z.b, z.s), np.array(-0.5), np.array(20.0)], 1, {}),
    lambda z: ("LeakyRelu", [floats(z.b, z.s)], 1, {"alpha": 0.1}),
    lambda z: ("PRelu", [floats(z.b, z.c, z.s), floats(z.c, 1)], 1, {}),
    lambda z: ("Sub", [floats(z.b, z.s, z.d), floats(z.b, z.s, 1)], 1, {}),
    lambda z: ("Div", [floats(z.b, z.s), positive(z.s)], 1, {}),
    lambda z: ("Max", [floats(z.b, z.s), floats(z.s)], 1, {}),
    lambda z: ("Min", [floats(z.b, 1), floats(1, z.s)], 1, {}),
    lambda z: ("Mean", [floats(z.b, z.s)] * 3, 1, {}),
    lambda z: ("Greater", [floats(z.b, z.s), floats(z.b, 1)], 1, {}),
    lambda z: ("Equal", [indices(4, z.b, z.s), indices(4, z.s)], 1, {}),
    lambda z: ("And", [flags(z.b, z.s), flags(z.s)], 1, {}),
    lambda z: ("Where", [flags(z.b, z.s), floats(z.b, z.s), floats(z.s)], 1, {}),
    lambda z: ("MatMul", [floats(z.s, z.d), floats(z.d, z.v)], 1, {}),
    lambda z: ("MatMul", [floats(z.b, z.h, z.s, z.k), floats(z.h, z.k, z.v)], 1, {}),
    lambda z: ("Gemm", [floats(z.d, z.s), floats(z.v, z.d), floats(z.v)], 1, {"transA": 1, "transB": 1}),
    lambda z: ("Einsum", [floats(z.b, z.s, z.h, z.k), floats(z.h, z.k, z.v)], 1, {"equation": "bshk,hkd->bsd"}),
    lambda z: ("Conv", [floats(z.b, z.c, 4, 6), floats(2 * z.k, z.c, 3, 3), floats(2 * z.k)], 1, KERNEL),
    lambda z: ("Conv", [floats(z.b, 4 * z.c, 4, 6), floats(4 * z.k, z.c, 3, 3)], 1, {**KERNEL, "group": 4}),
    lambda z: ("Conv", [floats(z.b, z.c, 4, 6), floats(z.c, 1, 3, 3)], 1, {**KERNEL, "group": z.c}),
    lambda z: ("ConvTranspose", [floats(z.b, z.c, 4, 6), floats(z.c, z.v, 2, 2)], 1, {"strides": (2, 2)}),
    lambda z: ("MaxPool", [floats(z.b, z.c, 4, 6)], 1, POOL),
    lambda z: ("AveragePool", [floats(z.b, z.c, 4, 6)], 1, POOL),
    lambda z: ("GlobalAveragePool", [floats(z.b, z.c, 4, 6)], 1, {}),
    lambda z: ("Softmax", [floats(z.b, z.h, z.s)], 1, {"axis": 1}),
    lambda z: ("LogSoftmax", [floats(z.b, z.s, z.v)], 1, {}),
    lambda z: ("LayerNormalization", [floats(z.b, z.s, z.d), floats(z.d), floats(z.d)], 1, {}),
    lambda z: ("GroupNormalization", [floats(z.b, 4 * z.c, 6, 6), *[floats(4 * z.c)] * 2], 1, {"num_groups": 4}),
    lambda z: ("InstanceNormalization", [floats(z.b, z.c, 6, 6), floats(z.c), floats(z.c)], 1, {}),
    lambda z: ("ReduceMean", [floats(z.b, z.s, z.d), ints(0, 2)], 1, {"keepdims": 0}),
    lambda z: ("ReduceLogSumExp", [floats(z.b, z.s, z.d), ints(1)], 1, {}),
    lambda z: ("ReduceProd", [floats(z.b, z.s), ints(0)], 1, {}),
    lambda z: ("ReduceL2", [floats(z.b, z.s, z.d), ints(2)], 1, {}),
    lambda z: ("ArgMin", [floats(z.b, z.s, z.d)], 1, {"axis": 1}),
    lambda z: ("CumSum", [floats(z.b, z.s), np.array(0)], 1, {"reverse": 1}),
    lambda z: ("Attention", [floats(z.b, z.h, z.s, z.k), *[floats(z.b, z.h, z.v, z.k)] * 2], 1, {}),
    lambda z: (
        "Attention",
        [floats(z.b, z.s, z.d), floats(z.b, z.s, z.d), floats(z.b, z.s, z.d)],
        1,
        {"q_num_heads": z.h, "kv_num_heads": z.h, "is_causal": 1},
    ),
    lambda z: (
        "autopar::CausalAttention",
        [floats(z.b, 2 * z.h, z.s, z.k), *[floats(z.b, z.h, z.s, z.k)] * 2],
        1,
        {"scale": 0.3, "window": 3},
    ),
    lambda z: (
        "autopar::CausalAttentionGrad",
        [floats(z.b, z.h, z.s, z.k)] * 4,
        3,
        {"scale": 0.3, "chunk": z.s // 2},
    ),
    lambda z: (
        "autopar::SinkAttentionGrad",
        [*[floats(z.b, z.h, z.s, z.k)] * 3, floats(z.h), floats(z.b, z.h, z.s, z.k)],
        4,
        {"scale": 0.3, "window": 4, "softcap": 2.0},
    ),
    lambda z: (
        "autopar::StateSpaceScanGrad",
        [
            floats(z.b, z.s, 2 * z.h, z.k),
            floats(z.b, z.s, 2 * z.h),
            floats(2 * z.h),
            *[floats(z.b, z.s, z.h, z.c)] * 2,
            *[floats(2 * z.h)] * 2,
            floats(z.b, z.s, 2 * z.h, z.k),
        ],
        7,
        {"least": 0.1},
    ),
    lambda z: (
        "autopar::SelectiveScanGrad",
        [
            *[floats(z.b, z.s, z.d)] * 2,
            floats(z.d, z.k),
            *[floats(z.b, z.s, z.k)] * 2,
            *[floats(z.d)] * 2,
            floats(z.b, z.s, z.d),
        ],
        7,
        {},
    ),
    lambda z: (
        "autopar::GatedDeltaRuleGrad",
        [
            *[floats(z.b, z.s, z.h, z.k)] * 2,
            floats(z.b, z.s, 2 * z.h, z.v),
            *[floats(z.b, z.s, 2 * z.h)] * 2,
            *[floats(2 * z.h)] * 2,
            floats(z.b, z.s, 2 * z.h, z.v),
        ],
        7,
        {"scale": 0.25},
    ),
    lambda z: (
        "autopar::RelativeAttentionGrad",
        [*[floats(z.b, z.h, z.s, z.k)] * 3, floats(z.h, 7), floats(z.b, z.h, z.s, z.k)],
        4,
        {"scale": 0.3, "is_causal": 1},
    ),
    lambda z: ("Transpose", [floats(z.b, z.s, z.h, z.k)], 1, {"perm": (2, 0, 3, 1)}),
    lambda z: ("Reshape", [floats(z.b, z.s, z.d), ints(z.b, z.s, z.h, z.k)], 1, {}),
    lambda z: ("Reshape", [floats(z.b, z.s, 3 * z.d), ints(z.b, z.s, 3, z.h, z.k)], 1, {}),
    lambda z: ("Reshape", [floats(z.b, z.s, z.h, z.k), ints(z.b * z.s, z.d)], 1, {}),
    lambda z: ("Reshape", [floats(z.b * z.s, z.d), ints(z.b, z.s, -1)], 1, {}),
    lambda z: ("Expand", [floats(z.b, 1, z.k), ints(z.b, z.h, z.k)], 1, {}),
    lambda z: ("Tile", [floats(z.b, z.k), ints(2, 3)], 1, {}),
    lambda z: ("Slice", [floats(z.b, 4 * z.k), ints(z.k), ints(3 * z.k), ints(1)], 1, {}),
    lambda z: ("Slice", [floats(z.b, z.s), ints(0), ints(2**31), ints(1), ints(2)], 1, {}),
    lambda z: ("Pad", [floats(z.b, z.k), ints(0, 2 * z.k, 0, z.k)], 1, {}),
    lambda z: ("Split", [floats(z.b, z.s, 3 * z.d)], 3, {"axis": 2}),
    lambda z: ("Split", [floats(z.b, 6 * z.k), ints(4 * z.k, z.k, z.k)], 3, {"axis": 1}),
    lambda z: ("Concat", [floats(z.b, 2 * z.k), floats(z.b, z.k)], 1, {"axis": 1}),
    lambda z: ("Concat", [floats(z.b, z.k), floats(z.b, z.v)], 1, {"axis": 1}),
    lambda z: ("DepthToSpace", [floats(z.b, 4 * z.c, 4, 6)], 1, {"blocksize": 2}),
    lambda z: ("Gather", [floats(z.b, z.v, z.k), indices(z.v, z.s)], 1, {"axis": 1}),
    lambda z: ("GatherElements", [floats(z.b, z.v), indices(z.v, z.b, z.k)], 1, {"axis": 1}),
    lambda z: (
        "ScatterElements",
        [floats(z.b, z.v), indices(z.v, z.b, 4), floats(z.b, 4)],
        1,
        {"axis": 1, "reduction": "max"},
    ),
    lambda z: ("ScatterND", [floats(z.v, z.k), indices(z.v, z.s, 1), floats(z.s, z.k)], 1, {"reduction": "add"}),
    lambda z: ("TopK", [floats(z.b, z.v), ints(3)], 2, {}),
    lambda z: ("OneHot", [indices(z.v, z.b, z.s), np.array(z.v), floats(2)], 1, {}),
    lambda z: ("Trilu", [floats(z.b, z.s, z.v)], 1, {}),
    lambda z: (
        "SoftmaxCrossEntropyLoss",
        [floats(z.s, z.v), indices(z.v, z.s)],
        1,
        {"reduction": "sum", "ignore_index": 1},
    ),
    lambda z: ("autopar::GatherGrad", [indices(z.v, z.b, z.s), np.arange(z.v), floats(z.b, z.s, z.k)], 1, {"axis": 0}),
]


def draw_sizes(rng: np.random.Generator) -> Sizes:
    """Return sizes of which some divide by 2, some by 3, some by 4, and most by none of them all."""
    drawn = rng.permutation([6, 8, 9, 10, 12, 14, 15, 16, 18, 20])[:6]
    return Sizes(*(int(size) for size in drawn))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: CASES[index](Sizes(4, 6, 8, 9, 10, 12))[0])
def test_strategies_hold_on_fresh_shapes_and_data(index: int) -> None:
    """Sharded op == whole op on axes of 2, 3 and 4, in chunks and uneven blocks too where the strategy says so."""
    sizes = draw_sizes(np.random.default_rng(index))
    kind, inputs, num_outputs, attrs = CASES[index](sizes)
    graph, op = single_op(kind, inputs, num_outputs, **attrs)

    rule = discover(graph).of(op)

    assert len(rule.strategies) > 1
    for size in (2, 3, 4):
        check_rule(graph, op, rule, draw_all(inputs, seed=size), size)
