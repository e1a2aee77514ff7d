"""Every gradient rule against central differences in float64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.errors import UnsupportedOpError
from autopar.execute import Executor
from autopar.ir.functions import FUNCTIONS, function_proto
from autopar.ir.graph import Attr, Graph, Op, Role, State, Value
from autopar.ir.verify import verify
from autopar.training import VJPS, training_step
from tests.gradients import check_gradient, feeds_of

Array = NDArray[Any]
OPSET = 24
EXECUTOR = Executor()


@dataclass(frozen=True)
class Case:
    """One op: float arrays named in `trained` are parameters, all other data are constants."""

    kind: str
    inputs: Sequence[Array | None]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    num_outputs: int = 1
    trained: tuple[int, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{'-' if self.note else ''}{self.note}"


def _random(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> Array:
    return np.random.default_rng((seed, *shape)).uniform(low, high, shape)


def _ints(*numbers: int) -> Array:
    return np.asarray(numbers, np.int64)


def _int(number: int) -> Array:
    return np.asarray(number, np.int64)


def forward_graph(case: Case) -> Graph:
    """Return the op as a model in float64; several outputs are reduced to one by a weighted sum of sums."""
    names = ["" if array is None else f"x{index}" for index, array in enumerate(case.inputs)]
    outputs = tuple(f"y{index}" for index in range(case.num_outputs))
    op = Op("op", case.kind, tuple(names), outputs, tuple(sorted(case.attrs.items())))
    results = EXECUTOR.run(op, case.inputs, OPSET)
    values = {n: Value(n, a.shape, str(a.dtype)) for n, a in zip(names, case.inputs, strict=True) if a is not None}
    values |= {n: Value(n, a.shape, str(a.dtype)) for n, a in zip(op.outputs, results, strict=True)}
    trained = case.trained or tuple(
        index for index, array in enumerate(case.inputs) if array is not None and array.dtype == np.float64
    )
    parameters = [names[index] for index in trained]
    constants = {n: a for n, a in zip(names, case.inputs, strict=True) if n and n not in parameters and a is not None}
    ops = [op]
    floats = [name for name in op.outputs if values[name].is_float]
    output = floats[0]
    if len(floats) > 1:
        values["flat"] = Value("flat", (1,), "int64")
        constants["flat"] = _ints(-1)
        rows = [f"{name}.row" for name in floats]
        for name, row in zip(floats, rows, strict=True):
            ops.append(Op(row, "Reshape", (name, "flat"), (row,)))
            values[row] = Value(row, (values[name].size,), "float64")
        output = "all"
        ops.append(Op("all", "Concat", tuple(rows), ("all",), (("axis", 0),)))
        values["all"] = Value("all", (sum(values[name].size for name in floats),), "float64")
    states = tuple(State(name, name, Role.PARAMETER, name) for name in parameters)
    return Graph("case", OPSET, values, (), states, constants, tuple(ops), (output,))


def _positive(*shape: int) -> Array:
    return _random(*shape, low=0.5, high=2.0)


def state_space(heads: int, groups: int) -> list[Array]:
    """Return the inputs of a scan over 5 tokens: x, dt, a_log, b, c, d, dt_bias."""
    shared = _random(2, 5, groups, 3, seed=1), _random(2, 5, groups, 3, seed=2)
    x, dt, per_head = _random(2, 5, heads, 2), _random(2, 5, heads), [_random(heads, seed=seed) for seed in range(3)]
    return [x, dt, per_head[0], *shared, *per_head[1:]]


def selective() -> list[Array]:
    """Return the inputs of a selective scan of 4 channels over 5 tokens: x, dt, a_log, b, c, d, dt_bias."""
    shared = _random(2, 5, 3, seed=1), _random(2, 5, 3, seed=2)
    return [_random(2, 5, 4), _random(2, 5, 4, seed=3), _random(4, 3), *shared, _random(4), _random(4, seed=1)]


def gated_delta(heads: int, groups: int) -> list[Array]:
    """Return the inputs of a gated delta rule over 5 tokens: q, k, v, a, b, a_log, dt_bias."""
    q, k, v = _random(2, 5, groups, 3), _random(2, 5, groups, 3, seed=1), _random(2, 5, heads, 2)
    return [q, k, v, *(_random(2, 5, heads, seed=seed) for seed in (2, 3)), _random(heads), _random(heads, seed=1)]


A, B, V = _random(3, 4), _random(3, 4, seed=1), _random(4, seed=2)
X = _random(2, 3, 4)
IMAGE = _random(2, 4, 7, 6)
GRID = _random(2, 3, 5, 2, low=-1.6, high=1.6)
"""Places inside an image and beyond its edges."""
Q, K, W = _random(2, 4, 5, 6), _random(2, 2, 5, 6, seed=1), _random(2, 2, 5, 3, seed=2)
FLAT_Q, FLAT_K = _random(2, 5, 24), _random(2, 5, 12, seed=1)
NBITS = {"bits": 4, "block_size": 4}
BYTES = np.random.default_rng(0).integers(0, 256, (3, 2, 2)).astype(np.uint8)
PICKS = np.asarray([[2, 0, 1, 3], [1, 3, 2, 0]])
EXPERT = np.asarray([[[0, 3], [1, 0], [4, 2], [3, 1]], [[2, 4], [0, 1], [2, 3], [4, 0]]])
ROWS = _random(5, 2, 4, 3)
PLACES = np.asarray([[[2, 3], [0, 1]], [[1, 0], [1, 0]]])
TRANSPOSED = {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}
V6 = _random(6, low=0.5)
REPEATED = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
WINDOW: Mapping[str, Attr] = {"kernel_shape": (3, 2), "strides": (2, 2), "pads": (1, 0, 1, 1)}
COS, SIN = np.cos(_random(2, 5, 3)), np.sin(_random(2, 5, 3))

CASES = [
    Case("Abs", [A]),
    Case("Acos", [A / 3]),
    Case("Acosh", [1.0 + _positive(3, 4)]),
    Case("Asin", [A / 3]),
    Case("Asinh", [A]),
    Case("Atan", [A]),
    Case("Atanh", [A / 3]),
    Case("Celu", [A], {"alpha": 0.7}),
    Case("Cosh", [A]),
    Case("Elu", [A], {"alpha": 1.3}),
    Case("HardSigmoid", [2 * A], note="default"),
    Case("HardSigmoid", [2 * A], {"alpha": 0.4, "beta": 0.3}, note="attributes"),
    Case("HardSwish", [3 * A]),
    Case("Mish", [A]),
    Case("PRelu", [X, _random(3, 1, low=0.1)], note="channels"),
    Case("PRelu", [X, _random(1)], trained=(1,), note="slope-only"),
    Case("Selu", [A]),
    Case("Sinh", [A]),
    Case("Softsign", [A]),
    Case("Tan", [A / 2]),
    Case("ThresholdedRelu", [A], {"alpha": 0.4}),
    Case("ReduceL1", [X, _ints(1)], {"keepdims": 0}),
    Case("ReduceL2", [X, _ints(-1, 0)]),
    Case("ReduceL2", [X], {"keepdims": 0}, note="all"),
    Case("ReduceLogSum", [_positive(2, 3, 4), _ints(1)], {"keepdims": 0}),
    Case("ReduceLogSumExp", [X, _ints(2)], {"keepdims": 0}),
    Case("ReduceSumSquare", [X, _ints(1)]),
    Case("ReduceProd", [X, _ints(1)], {"keepdims": 0}),
    Case("ReduceProd", [np.where(np.eye(3, 4) > 0, 0.0, A), _ints(1)], note="one-zero-each"),
    Case("ReduceProd", [np.where(A > 0, 0.0, A), _ints(0)], note="zeros"),
    Case("LpNormalization", [X], note="default"),
    Case("LpNormalization", [X], {"axis": 1, "p": 1}, note="order-1"),
    Case("GlobalMaxPool", [IMAGE]),
    Case("autopar::MatMulNBits", [_random(2, 8), BYTES, _random(3, 2)], NBITS, trained=(0,)),
    Case("autopar::MatMulNBitsPacked", [_random(2, 8), BYTES, _random(3, 2), BYTES[:, 0, :1]], NBITS, trained=(0,)),
    Case("autopar::MatMulNBitsShifted", [_random(2, 8), BYTES, _random(3, 2), _random(3, 2)], NBITS, trained=(0,)),
    Case("autopar::ExpertRows", [_random(3, 2, 4, 3)], {}),
    Case("autopar::ExpertDispatch", [_random(2, 4, 3), EXPERT, _ints(0, 1, 2, 3, 4)], {"fill": 0.4}),
    Case("autopar::ExpertSum", [ROWS, EXPERT, _ints(0, 1, 2, 3, 4)], {"fill": 0.4}),
    Case("autopar::ExpertCombine", [ROWS, _random(2, 4, 2), EXPERT, _ints(0, 1, 2, 3, 4)], {"fill": 0.4}),
    Case("autopar::GroupedMatMul", [ROWS, _random(5, 3, 2)], {"fill": 0.4}),
    Case("LSTM", [_random(4, 2, 3), _random(1, 20, 3), _random(1, 20, 5), _random(1, 40)], {"hidden_size": 5}, 3),
    Case(
        "LSTM",
        [
            _random(4, 2, 3),
            _random(2, 20, 3),
            _random(2, 20, 5),
            None,
            None,
            _random(2, 2, 5),
            _random(2, 2, 5, seed=1),
        ],
        {"hidden_size": 5, "direction": "bidirectional"},
        3,
        note="both-ways-states",
    ),
    Case("LSTM", [_random(4, 2, 3), _random(1, 8, 3), _random(1, 8, 2)], {"hidden_size": 2}, 1, note="output-only"),
    Case(
        "GRU",
        [_random(4, 2, 3), _random(1, 15, 3), _random(1, 15, 5), _random(1, 30), None, _random(1, 2, 5)],
        {"hidden_size": 5, "linear_before_reset": 1},
        2,
        note="reset-after",
    ),
    Case("GRU", [_random(4, 2, 3), _random(1, 15, 3), _random(1, 15, 5), _random(1, 30)], {"hidden_size": 5}, 2),
    Case(
        "RNN",
        [_random(4, 2, 3), _random(1, 5, 3), _random(1, 5, 5), _random(1, 10)],
        {"hidden_size": 5, "direction": "reverse"},
        2,
        note="backwards",
    ),
    Case(
        "LSTM",
        [_random(2, 4, 3), _random(1, 8, 3), _random(1, 8, 2)],
        {"hidden_size": 2, "layout": 1},
        3,
        note="batch-first",
    ),
    Case("DepthToSpace", [_random(2, 8, 3, 2)], {"blocksize": 2}),
    *(
        Case(
            "GridSample",
            [IMAGE, GRID],
            {"mode": "linear", "padding_mode": padding, "align_corners": aligned},
            note=f"{padding}-{aligned}",
        )
        for padding in ("zeros", "border", "reflection")
        for aligned in (0, 1)
    ),
    Case("GridSample", [IMAGE, GRID], {"mode": "nearest"}, trained=(0,), note="nearest"),
    Case("GridSample", [IMAGE, GRID], {"mode": "nearest", "padding_mode": "border"}, trained=(0,), note="border"),
    Case("GridSample", [_random(1, 2, 3, 4, 3), _random(1, 2, 3, 2, 3, low=-1.2, high=1.2)], note="3d"),
    Case("DepthToSpace", [_random(2, 8, 3, 2)], {"blocksize": 2, "mode": "CRD"}, note="CRD"),
    Case("SpaceToDepth", [_random(2, 3, 4, 6)], {"blocksize": 2}),
    Case("ScatterElements", [A, PICKS, B[:2]], {"axis": 1}),
    Case("ScatterElements", [A, np.asarray([[0, 0], [3, 1]]), B[:2, :2]], {"axis": 1, "reduction": "add"}, note="add"),
    Case("ScatterElements", [A, PICKS, B[:2]], {"axis": 1, "reduction": "max"}, note="max"),
    Case("ScatterElements", [A, PICKS, B[:2]], {"axis": -1, "reduction": "min"}, note="min"),
    Case("ScatterND", [X, np.asarray([[1, 2], [0, 1]]), B[:2]]),
    Case("ScatterND", [X, np.asarray([[1], [1]]), _random(2, 3, 4)], {"reduction": "add"}, note="add"),
    Case("ScatterND", [X, np.asarray([[1, 2], [0, 1]]), B[:2]], {"reduction": "max"}, note="max"),
    Case("DFT", [_random(2, 6, 1), None, _int(-2)], {"onesided": 1}, note="real"),
    Case("DFT", [_random(2, 5, 2), None, _int(1)], note="complex"),
    Case("DFT", [_random(2, 5, 2), None, _int(1)], {"inverse": 1}, note="inverse"),
    Case("Resize", [IMAGE, None, None, _ints(2, 4, 14, 12)], {"mode": "linear"}, note="linear"),
    Case("Resize", [IMAGE, None, np.asarray([1.5, 0.7], np.float32)], {"mode": "linear", "axes": (2, 3)}, note="axes"),
    Case("Resize", [IMAGE, None, None, _ints(2, 4, 5, 9)], {"mode": "cubic"}, note="cubic"),
    Case("Resize", [IMAGE, None, None, _ints(2, 4, 4, 9)], {"mode": "nearest"}, note="nearest"),
    Case(
        "Resize",
        [IMAGE, None, None, _ints(2, 4, 10, 9)],
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        note="corners",
    ),
    Case("ConvTranspose", [IMAGE, _random(4, 3, 3, 2), _random(3)]),
    Case(
        "ConvTranspose",
        [IMAGE, _random(4, 2, 3, 3)],
        {"group": 2, "strides": (2, 3), "pads": (1, 0, 2, 1), "output_padding": (1, 2)},
        note="groups",
    ),
    Case("ConvTranspose", [IMAGE, _random(4, 1, 2, 2)], {"dilations": (2, 2)}, note="dilated"),
    Case("ConvTranspose", [IMAGE, _random(4, 2, 3, 3)], {"strides": (2, 2), "auto_pad": "SAME_UPPER"}, note="same"),
    Case("ConvTranspose", [IMAGE, _random(4, 2, 3, 3)], {"strides": (2, 2), "output_shape": (14, 12)}, note="shape"),
    Case("ConvTranspose", [_random(2, 3, 5), _random(3, 4, 3)], {"strides": (2,)}, note="1d"),
    Case("MaxPool", [_random(1, 2, 5, 6, 5)], {"kernel_shape": (2, 3, 2), "strides": (2, 1, 2)}, note="3d"),
    Case("MaxPool", [_random(1, 2, 4, 4, 4)], {"kernel_shape": (2, 2, 2), "pads": (1,) * 6}, note="3d-pads"),
    Case("AveragePool", [_random(1, 2, 5, 6, 5)], {"kernel_shape": (2, 3, 2), "strides": (2, 1, 2)}, note="3d"),
    Case("AveragePool", [_random(1, 2, 4, 4, 4)], {"kernel_shape": (2, 2, 2), "pads": (1,) * 6}, note="3d-pads"),
    Case("GatherElements", [A, np.asarray([[0, 0], [3, 1]])], {"axis": 1}, note="part"),
    Case("GatherND", [_random(2, 3, 4, 2), np.asarray([[0, 1, 2], [1, 0, 3], [1, 0, 3]])], note="three-coordinates"),
    Case(
        "GatherND",
        [_random(2, 2, 3, 2, 2), np.asarray([[[0, 1, 1], [1, 2, 0]], [[1, -1, -2], [0, 0, 0]]])],
        {"batch_dims": 1},
        note="three-in-batches",
    ),
    Case("GatherND", [X, np.asarray([[[-1], [0]], [[1], [-2]]])], {"batch_dims": 1}, note="from-the-end"),
    Case("Einsum", [_random(3, 3), _random(3)], {"equation": "aa,a->a"}, note="diagonal"),
    Case("Add", [X, V], note="broadcast"),
    Case("Add", [_random(1, 3, 1), _random(2, 1, 4)], note="both-broadcast"),
    Case("Cast", [A], {"to": 11}),
    Case("CastLike", [A, B], trained=(0,)),
    Case("Clip", [A, np.asarray(-1.0), np.asarray(0.5)], trained=(0,)),
    Case("Cos", [A]),
    Case("Div", [A, _positive(4)]),
    Case("Dropout", [A, np.asarray(0.5)], trained=(0,)),
    Case("Erf", [A]),
    Case("Exp", [A]),
    Case("Gelu", [A], note="erf"),
    Case("Gelu", [A], {"approximate": "tanh"}, note="tanh"),
    Case("Identity", [A]),
    Case("LeakyRelu", [A], {"alpha": 0.2}),
    Case("Log", [_positive(3, 4)]),
    Case("Max", [A, B]),
    Case("Max", [A], note="single"),
    Case("Mean", [A, B, V]),
    Case("Min", [A, V]),
    Case("Mul", [X, _random(3, 1)]),
    Case("Mul", [X, V], trained=(1,), note="one-side"),
    Case("Neg", [A]),
    Case("Pow", [_positive(3, 4), np.asarray(2.0)], trained=(0,), note="square"),
    Case("Pow", [_positive(3, 4), np.asarray(-0.5)], trained=(0,), note="number"),
    Case("Pow", [_positive(3, 4), V], note="tensor"),
    Case("Pow", [A, _int(3)], note="integer"),
    Case("Reciprocal", [_positive(3, 4)]),
    Case("Relu", [A]),
    Case("Sigmoid", [A]),
    Case("Sin", [A]),
    Case("Softplus", [A]),
    Case("Sqrt", [_positive(3, 4)]),
    Case("Sub", [V, A]),
    Case("Sum", [A, V, B]),
    Case("Swish", [A], note="default"),
    Case("Swish", [A], {"alpha": 1.7}, note="alpha"),
    Case("Tanh", [A]),
    Case("Where", [A > 0, B, V]),
    Case("Concat", [A, _random(3, 2)], {"axis": 1}),
    Case("CumSum", [A, _int(1)], {"exclusive": 1}),
    Case("CumSum", [A, _int(0)], {"reverse": 1}, note="reverse"),
    Case("Expand", [_random(3, 1), _ints(2, 3, 4)]),
    Case("Flatten", [X], {"axis": 2}),
    Case("Gather", [A, np.asarray([[2, 0], [1, 2]])], note="rows"),
    Case("Gather", [X, _int(-1)], {"axis": 1}, note="one-from-the-end"),
    Case("Gather", [X, _ints(3, 0, 3)], {"axis": -1}, note="columns"),
    Case("GatherElements", [A, np.asarray([[0, 0], [3, 1], [2, 2]])], {"axis": 1}),
    Case("GatherND", [X, np.asarray([[[2], [0]], [[1], [1]]])], {"batch_dims": 1}),
    Case("GatherND", [X, np.asarray([[0, 2], [1, 1], [0, 2]])], note="two-coordinates"),
    Case("GatherND", [_random(2, 3, 4, 2), PLACES], {"batch_dims": 1}, note="moe"),
    Case("Pad", [A, _ints(0, 1, 2, 1)]),
    Case("Pad", [A, _ints(1, 2), None, _ints(1)], note="axes"),
    Case("ReduceMax", [X, _ints(-1)]),
    Case("ReduceMin", [X, _ints(0, 1)], {"keepdims": 0}),
    Case("ReduceMean", [X, _ints(1)], {"keepdims": 0}),
    Case("ReduceMean", [X], note="all"),
    Case("ReduceSum", [X, _ints(-1, 0)], {"keepdims": 0}),
    Case("ReduceSum", [X, _ints()], {"noop_with_empty_axes": 1}, note="none"),
    Case("Reshape", [X, _ints(0, -1)]),
    Case("Reshape", [_random(6, 4), _ints(2, 3, 4)], note="split"),
    Case("Slice", [X, _ints(1, 0), _ints(3, -1), _ints(1, 2)]),
    Case("Slice", [X, _ints(-1), _ints(-100), _ints(2), _ints(-2)], note="backwards"),
    Case("Split", [A, _ints(1, 3)], {"axis": 1}, num_outputs=2),
    Case("Squeeze", [_random(3, 1, 4, 1), _ints(-1, 1)]),
    Case("Squeeze", [_random(3, 1, 4)], note="all"),
    Case("Tile", [A, _ints(2, 3)]),
    Case("TopK", [A, _ints(2)], num_outputs=2),
    Case("Transpose", [X], {"perm": (2, 0, 1)}),
    Case("Transpose", [X], note="reversed"),
    Case("Trilu", [A], {"upper": 0}),
    Case("Unsqueeze", [A, _ints(0, -1)]),
    Case("MatMul", [X, _random(4, 5)], note="weight"),
    Case("MatMul", [_random(2, 3, 4), _random(2, 4, 5)], note="batched"),
    Case("MatMul", [_random(2, 1, 3, 4), _random(3, 4, 2)], note="broadcast"),
    Case("MatMul", [_random(4), _random(2, 4, 3)], note="vector-matrix"),
    Case("MatMul", [_random(2, 3, 4), _random(4)], note="matrix-vector"),
    Case("MatMul", [_random(4), _random(4, seed=1)], note="vectors"),
    Case("Gemm", [_random(3, 4), _random(4, 5), _random(5)]),
    Case("Gemm", [_random(4, 3), _random(5, 4), _random(3, 1)], TRANSPOSED, note="all"),
    Case("Einsum", [X, _random(4, 5)], {"equation": "bsd,df->bsf"}),
    Case("Einsum", [X, _random(3, 4)], {"equation": "bsd, se -> be"}, note="summed-alone"),
    Case("Einsum", [X, _random(4, 5)], {"equation": "...d,df->...f"}, note="ellipsis"),
    Case("Einsum", [A, _random(4, 5), _random(5)], {"equation": "ab,bc,c"}, note="implicit"),
    Case("Attention", [Q, K, W], {"is_causal": 1}, note="causal-grouped"),
    Case("Attention", [Q, K, W], {"scale": 0.3}, note="scale"),
    Case("Attention", [Q, K, W, _random(5, 5)], trained=(0, 1, 2), note="mask"),
    Case("Attention", [Q, K, W, _random(2, 1, 5, 5) > -1.5], {"is_causal": 1}, note="bool-mask"),
    Case("Attention", [FLAT_Q, FLAT_K, FLAT_K], {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1}, note="flat"),
    Case("Attention", [Q, K, W], {"is_causal": 1, "softcap": 1.5}, note="softcap"),
    Case("autopar::CausalAttention", [Q, K, W], {"scale": 0.3}, note="all-keys"),
    Case("autopar::CausalAttention", [Q, K, W], {"scale": 0.3, "window": 2}, note="window"),
    Case("autopar::CausalAttention", [Q, K, W], {"scale": 0.3, "chunk": 3}, note="chunk"),
    Case("autopar::CausalAttention", [Q, K, W], {"scale": 0.3, "window": 3, "softcap": 1.5}, note="softcap"),
    Case("autopar::CausalAttention", [Q[:, :, 3:], K, W], {"scale": 0.3, "window": 3}, note="last-queries"),
    Case("autopar::SinkAttention", [Q, K, W, _random(4)], {"scale": 0.3}, note="all-keys"),
    Case("autopar::SinkAttention", [Q, K, W, _random(4)], {"scale": 0.3, "window": 2}, note="window"),
    Case("autopar::StateSpaceScan", state_space(heads=4, groups=2), note="groups"),
    Case("autopar::StateSpaceScan", state_space(heads=3, groups=1), {"least": 0.5, "most": 1.5}, note="one-group"),
    Case("autopar::SelectiveScan", selective()),
    Case("autopar::GatedDeltaRule", gated_delta(heads=4, groups=2), {"scale": 0.6}, note="groups"),
    Case("autopar::GatedDeltaRule", gated_delta(heads=2, groups=2), {"scale": 0.6}, note="heads"),
    Case("autopar::RelativeAttention", [Q, K, W, _random(4, 5)], {"scale": 0.3}, note="all-keys"),
    Case("autopar::RelativeAttention", [Q, K, W, _random(4, 5)], {"scale": 0.3, "is_causal": 1}, note="causal"),
    Case("RotaryEmbedding", [Q, COS, SIN], trained=(0,)),
    Case("RotaryEmbedding", [Q, COS, SIN], {"interleaved": 1}, trained=(0,), note="interleaved"),
    Case(
        "RotaryEmbedding",
        [FLAT_Q, _random(9, 2), _random(9, 2, seed=1), np.arange(10).reshape(2, 5) % 9],
        {"num_heads": 4, "rotary_embedding_dim": 4},
        trained=(0,),
        note="positions",
    ),
    Case("LayerNormalization", [X, V, _random(4, seed=3)]),
    Case("LayerNormalization", [X, _random(3, 4, seed=4)], {"axis": 1, "epsilon": 0.1}, note="no-bias"),
    Case("LayerNormalization", [X, _random(1), _random(3, 1, seed=3)], {"axis": 1}, note="few-scales"),
    Case("RMSNormalization", [X, V]),
    Case("RMSNormalization", [X, _random(1)], note="one-scale"),
    Case("RMSNormalization", [X, np.ones(1)], trained=(0,), note="no-scale"),
    Case("Softmax", [X]),
    Case("Softmax", [X], {"axis": 1}, note="axis"),
    Case("LogSoftmax", [X]),
    Case("BatchNormalization", [IMAGE, _random(4), _random(4, seed=1), _random(4), _positive(4)], trained=(0, 1, 2)),
    Case("BatchNormalization", [A, V, V, V, _positive(4)], trained=(0, 1, 2), note="rows"),
    Case("GroupNormalization", [IMAGE, _random(4), _random(4, seed=1)], {"num_groups": 2, "epsilon": 0.01}),
    Case("GroupNormalization", [_random(2, 6, 5), V6, V6], {"num_groups": 3}, note="rows"),
    Case("InstanceNormalization", [IMAGE, _random(4), _random(4, seed=1)], {"epsilon": 0.01}),
    Case("Resize", [IMAGE, None, np.asarray([1, 1, 2, 3], np.float32)], REPEATED),
    Case("Resize", [_random(2, 3, 4), None, None, _ints(2, 3, 8)], note="sizes"),
    Case("LRN", [IMAGE], {"size": 3, "alpha": 0.5, "beta": 0.6, "bias": 1.5}),
    Case("LRN", [IMAGE], {"size": 4, "alpha": 0.5}, note="even"),
    Case("Conv", [IMAGE, _random(6, 4, 3, 2), _random(6)]),
    Case("Conv", [IMAGE, _random(6, 2, 3, 3)], {"group": 2, "strides": (2, 3), "pads": (1, 0, 2, 1)}, note="groups"),
    Case("Conv", [IMAGE, _random(4, 1, 2, 2)], {"group": 4, "dilations": (2, 2)}, note="depthwise"),
    Case("Conv", [IMAGE, _random(3, 4, 3, 2)], {"auto_pad": "SAME_LOWER", "strides": (2, 2)}, note="same"),
    Case("Conv", [IMAGE, _random(3, 4, 3, 2)], {"auto_pad": "VALID", "strides": (2, 2)}, note="valid"),
    Case("Conv", [_random(2, 3, 8), _random(4, 3, 3)], {"strides": (2,), "pads": (1, 1)}, note="1d"),
    Case("Conv", [_random(1, 2, 4, 3, 4), _random(2, 2, 2, 2, 2)], note="3d"),
    Case("MaxPool", [IMAGE], WINDOW),
    Case("MaxPool", [IMAGE], {"kernel_shape": (2, 2), "strides": (2, 2), "ceil_mode": 1}, note="ceil"),
    Case("MaxPool", [IMAGE], {"kernel_shape": (2, 3), "dilations": (2, 1)}, note="dilated"),
    Case("MaxPool", [_random(2, 3, 8)], {"kernel_shape": (3,)}, note="1d"),
    Case("AveragePool", [IMAGE], WINDOW),
    Case("AveragePool", [IMAGE], {**WINDOW, "count_include_pad": 1}, note="pad"),
    Case("AveragePool", [IMAGE], {"kernel_shape": (2, 4), "strides": (2, 3), "ceil_mode": 1}, note="ceil"),
    Case("AveragePool", [_random(2, 3, 8)], {"kernel_shape": (3,), "strides": (2,)}, note="1d"),
    Case("GlobalAveragePool", [IMAGE]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_central_differences(case: Case) -> None:
    """For L = mean((y - target)^2): (L(x + h d) - L(x - h d)) / 2h = <dL/dx, d> up to h^2."""
    graph = forward_graph(case)

    step = training_step(graph, loss="mse", optimizer="sgd")

    verify(step)
    given = {f"x{index}": array for index, array in enumerate(case.inputs) if array is not None}
    check_gradient(step, feeds_of(step, given))


def test_every_rule_has_a_case() -> None:
    """A rule that is not in the table above is not tested."""
    tested = {case.kind for case in CASES}

    assert set(VJPS) == (tested - {"BatchNormalization"}) | {"autopar::BatchNorm"}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_function_is_named_by_its_kind(kind: str) -> None:
    """The body parses, and its name and domain are those of the kind."""
    proto = function_proto(kind)

    assert f"{proto.domain}::{proto.name}" == kind
    assert set(proto.attribute).issubset(
        {a.ref_attr_name for node in proto.node for a in node.attribute if a.ref_attr_name}
    )


@pytest.mark.parametrize(
    "case",
    [
        Case("Det", [_random(2, 2)]),
        Case("GridSample", [IMAGE, GRID], {"mode": "cubic"}),
        Case("GRU", [_random(4, 2, 3), _random(1, 15, 3), _random(1, 15, 5)], {"hidden_size": 5, "clip": 1.0}),
        Case("ScatterND", [X, np.asarray([[1]]), X[:1]], {"reduction": "mul"}),
        Case("Pad", [A, _ints(0, 1, 0, 0)], {"mode": "edge"}),
        Case("Attention", [Q, K, W], {"softcap": 5.0}),
    ],
    ids=str,
)
def test_unsupported_op_is_named(case: Case) -> None:
    """An op that has no gradient is an error that names it and its kind, never a silent zero."""
    graph = forward_graph(case)

    with pytest.raises(UnsupportedOpError, match=rf"no gradient for op 'op' \({case.kind}\)"):
        training_step(graph, loss="mse")


def test_missing_gradients_are_listed_together() -> None:
    """One error names every kind of op that has no gradient and why, not the first one met."""
    steps: list[tuple[str, str, dict[str, Attr]]] = [
        ("a", "Det", {}),
        ("b", "Mod", {"fmod": 1}),
        ("c", "Pad", {"mode": "edge"}),
        ("d", "Mod", {"fmod": 1}),
    ]
    shapes = {"x": (3, 2, 2), "a": (3,), "b": (3,), "c": (5,), "d": (5,)}
    values = {name: Value(name, shape, "float64") for name, shape in shapes.items()}
    values |= {"two": Value("two", (), "float64"), "pads": Value("pads", (2,), "int64")}
    ops = []
    for before, (name, kind, attrs) in zip(["x", "a", "b", "c"], steps, strict=True):
        inputs = (before, *{"Mod": ("two",), "Pad": ("pads",)}.get(kind, ()))
        ops.append(Op(name, kind, inputs, (name,), tuple(sorted(attrs.items()))))
    constants = {"two": np.asarray(2.0), "pads": _ints(1, 1)}
    graph = Graph("case", OPSET, values, (), (State("x", "x", Role.PARAMETER, "x"),), constants, tuple(ops), ("d",))

    with pytest.raises(UnsupportedOpError) as error:
        training_step(graph, loss="mse")

    assert str(error.value).splitlines()[:-1] == [
        "no gradient for 4 ops:",
        "  Det: its kind has no rule (op 'a')",
        "  Mod: its kind has no rule (op 'b' and 1 more)",
        "  Pad: its mode is edge (op 'c')",
    ]


@pytest.mark.parametrize("kind", ["TopK", "Split"])
def test_outputs_that_nobody_reads_need_no_name(kind: str) -> None:
    """A gradient that needs one names it; the indices of a sort are the usual case."""
    given = _ints(4) if kind == "TopK" else _ints(3, 1)
    graph = forward_graph(Case(kind, [A, given], {"axis": 1}, num_outputs=2))
    op = replace(graph.ops[0], outputs=("y0", ""))
    graph = replace(graph, ops=(op,), values={n: v for n, v in graph.values.items() if n != "y1"}, outputs=("y0",))

    step = training_step(graph, loss="mse", optimizer="sgd")

    verify(step)
    assert all(all(item.inputs) for item in step.ops)
    check_gradient(step, feeds_of(step, {"x0": A}))
