"""Ops that ONNX Runtime's optimizer writes become standard ops that compute what ONNX Runtime computes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from autopar.cost import op_flops
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.ir.graph import Role
from autopar.ir.verify import verify
from autopar.onnx import load
from autopar.training import training_step

onnxruntime = pytest.importorskip("onnxruntime", reason="it computes what is expected")

Array = NDArray[Any]
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """One op: data inputs and weights by name in the order of its inputs; "-" stands for an absent one."""

    kind: str
    inputs: Mapping[str, Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    num_outputs: int = 1
    domain: str = "com.microsoft"
    opset: int = 17
    read: tuple[int, ...] = (0,)
    note: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{'-' if self.note else ''}{self.note}"

    def model(self) -> onnx.ModelProto:
        """Return the op as a model; names that begin with a capital are data, the others weights."""
        names = ["" if array is None else name for name, array in self.inputs.items()]
        outputs = [f"y{index}" if index in self.read else "" for index in range(self.num_outputs)]
        data = {name: array for name, array in self.inputs.items() if array is not None and name[0].isupper()}
        weights = {name: array for name, array in self.inputs.items() if array is not None and name[0].islower()}
        graph = helper.make_graph(
            [helper.make_node(self.kind, names, outputs, name="op", domain=self.domain, **self.attrs)],
            "case",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in data.items()
            ],
            [helper.make_empty_tensor_value_info(name) for name in outputs if name],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

    @property
    def data(self) -> dict[str, Array]:
        """What is fed."""
        return {name: array for name, array in self.inputs.items() if array is not None and name[0].isupper()}


def _x(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def _packed(rows: int, groups: int, size: int) -> Array:
    return RNG.integers(0, 256, (rows, groups, size)).astype(np.uint8)


def _int32(*numbers: int) -> Array:
    return np.array(numbers, np.int32)


X, W3 = _x(2, 5, 16), _x(16, 48) / 4
Q, QUERIES, KEYS = _x(2, 5, 16), _x(2, 5, 32), _x(2, 5, 16)
COS, SIN = np.cos(_x(12, 2)), np.sin(_x(12, 2))
COS8, SIN8 = np.cos(_x(12, 8)), np.sin(_x(12, 8))
PAST = _x(1, 2, 3, 16)
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], np.int32)
HEADS = {"num_heads": 4}
GROUPED = {"num_heads": 4, "kv_num_heads": 2}
NORM = {"X": X, "skip": _x(2, 5, 16), "gamma": _x(16), "beta": _x(16), "bias": _x(16)}

CASES = [
    Case("Gelu", {"X": X}),
    Case("FastGelu", {"X": X, "bias": _x(16)}),
    Case("FastGelu", {"X": X}, note="alone"),
    Case("BiasGelu", {"X": X, "bias": _x(16)}),
    Case("QuickGelu", {"X": X}, {"alpha": 1.5}),
    Case("FusedMatMul", {"X": _x(2, 3, 4), "W": _x(2, 5, 3)}, {"transA": 1, "transB": 1, "alpha": 0.5}),
    Case(
        "FusedConv",
        {"X": _x(1, 2, 5, 5), "w": _x(3, 2, 3, 3), "b": _x(3)},
        {"activation": "Relu", "pads": [1, 1, 1, 1]},
    ),
    Case(
        "FusedConv",
        {"X": _x(1, 2, 5, 5), "w": _x(3, 2, 3, 3)},
        {"activation": "LeakyRelu", "activation_params": [0.2]},
        note="leaky",
    ),
    Case("FusedGemm", {"X": _x(3, 4), "w": _x(5, 4), "b": _x(5)}, {"transB": 1, "activation": "Relu"}),
    Case("SimplifiedLayerNormalization", {"X": X, "g": _x(16)}, {"axis": -1, "epsilon": 1e-6}, domain=""),
    Case("LayerNormalization", {"X": X, "g": _x(16), "b": _x(16)}, {"axis": -1}, domain="", opset=12),
    Case("SkipLayerNormalization", NORM, {"epsilon": 1e-5}, 4, read=(0, 3)),
    Case("SkipLayerNormalization", {**NORM, "beta": None, "bias": None}, note="bare"),
    Case(
        "SkipSimplifiedLayerNormalization",
        {"X": X, "skip": _x(2, 5, 16), "gamma": _x(16), "bias": _x(16)},
        {"epsilon": 1e-5},
        4,
        read=(0, 3),
    ),
    Case(
        "EmbedLayerNormalization",
        {
            "Ids": RNG.integers(0, 9, (2, 5)).astype(np.int32), "Segments": RNG.integers(0, 2, (2, 5)).astype(np.int32),
            "words": _x(9, 8), "places": _x(7, 8), "kinds": _x(2, 8), "g": _x(8), "b": _x(8), "Mask": MASK,
        },
        {"epsilon": 1e-5},
        2,
        read=(0, 1),
    ),
    Case("RotaryEmbedding", {"X": X, "P": np.arange(10).reshape(2, 5), "cos": COS, "sin": SIN}),
    Case("RotaryEmbedding", {"X": X, "P": np.array([3]), "cos": COS, "sin": SIN}, {"interleaved": 1}, note="offset"),
    Case("RotaryEmbedding", {"X": _x(2, 4, 5, 4), "P": np.array([0]), "cos": COS, "sin": SIN}, note="heads"),
    Case(
        "RotaryEmbedding",
        {"X": _x(2, 5, 32), "P": np.array([0]), "cos": COS, "sin": SIN},
        {"num_heads": 4, "rotary_embedding_dim": 4},
        note="part",
    ),
    Case("Attention", {"X": X, "w": W3, "b": _x(48)}, HEADS),
    Case("Attention", {"X": X, "w": W3, "b": _x(48), "Mask": MASK}, HEADS, note="mask"),
    Case("Attention", {"X": X, "w": W3, "b": _x(48), "Lengths": _int32(4, 3)}, HEADS, note="lengths"),
    Case("Attention", {"X": X, "w": W3, "b": _x(48)}, {**HEADS, "unidirectional": 1, "scale": 0.3}, note="causal"),
    Case(
        "Attention",
        {"X": X, "w": W3, "b": _x(48), "m": None, "Past": _x(2, 2, 4, 3, 4)},
        {**HEADS, "unidirectional": 1},
        2,
        read=(0, 1),
        note="past",
    ),
    Case("MultiHeadAttention", {"Q": Q, "K": _x(2, 7, 16), "V": _x(2, 7, 16), "b": _x(48)}, HEADS),
    Case(
        "MultiHeadAttention",
        {"Q": Q, "K": Q, "V": Q, "b": None, "Mask": MASK, "Bias": _x(1, 4, 5, 5)},
        {**HEADS, "scale": 0.2},
        note="mask-and-bias",
    ),
    Case("MultiHeadAttention", {"Q": Q, "K": _x(2, 4, 7, 4), "V": _x(2, 4, 7, 4)}, HEADS, note="keys-by-head"),
    Case(
        "MultiHeadAttention",
        {"Q": Q, "K": Q, "V": Q, "b": None, "m": None, "a": None, "PastK": _x(2, 4, 3, 4), "PastV": _x(2, 4, 3, 4)},
        {**HEADS, "unidirectional": 1},
        3,
        read=(0, 1, 2),
        note="past",
    ),
    Case(
        "GroupQueryAttention",
        {"Q": QUERIES, "K": KEYS, "V": KEYS, "pk": None, "pv": None, "L": _int32(4, 4), "T": np.array(5, np.int32)},
        GROUPED,
        3,
        read=(0, 1, 2),
    ),
    Case(
        "GroupQueryAttention",
        {
            "Q": _x(1, 5, 128), "k": None, "v": None, "PastK": PAST, "PastV": PAST, "L": _int32(7),
            "T": np.array(8, np.int32), "cos": COS8, "sin": SIN8,
        },
        {**GROUPED, "do_rotary": 1},
        3,
        read=(0, 1, 2),
        note="packed-rotary-past",
    ),
    Case(
        "GroupQueryAttention",
        {"Q": QUERIES, "K": KEYS, "V": KEYS, "pk": None, "pv": None, "L": _int32(4, 4), "T": np.array(5, np.int32)},
        {**GROUPED, "local_window_size": 2, "softcap": 3.0, "scale": 0.4},
        3,
        note="window",
    ),
    Case(
        "MatMulNBits",
        {"X": _x(2, 3, 64), "b": _packed(6, 2, 16), "s": _x(12)},
        {"K": 64, "N": 6, "bits": 4, "block_size": 32},
    ),
    Case(
        "MatMulNBits",
        {"X": _x(2, 48), "b": _packed(6, 3, 8), "s": _x(18), "z": RNG.integers(0, 256, 12).astype(np.uint8)},
        {"K": 48, "N": 6, "bits": 4, "block_size": 16},
        note="zero-points",
    ),
    Case(
        "MatMulNBits",
        {"X": _x(2, 40), "b": _packed(6, 3, 16), "s": _x(18), "z": None, "g": None, "c": _x(6)},
        {"K": 40, "N": 6, "bits": 8, "block_size": 16},
        note="8-bits-cut",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_onnx_runtime(case: Case) -> None:
    """On random inputs, in float32 sums of a few dozen terms."""
    model = case.model()
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, case.data)

    graph = load(model)

    verify(graph)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = run_graph(graph, case.data | {state.input: weights[state.input] for state in graph.states})
    for name, array in zip(graph.outputs, expected, strict=True):
        assert found[name].shape == array.shape
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("count", [2, 3])
def test_packed_heads_are_those_side_by_side(count: int) -> None:
    """Queries, keys and values of a head that lie together, a form that ONNX Runtime has on GPUs only."""
    packed = _x(2, 5, 4, count, 4)
    parts = [np.ascontiguousarray(packed[..., index, :]).reshape(2, 5, 16) for index in range(count)]
    q, k, v = parts if count == 3 else (Q, *parts)
    plain = Case("MultiHeadAttention", {"Q": q, "K": k, "V": v}, HEADS)
    given = Case("MultiHeadAttention", {"Q": packed} if count == 3 else {"Q": Q, "K": packed}, HEADS)

    found, expected = (run_graph(load(case.model()), case.data)["y0"] for case in (given, plain))

    np.testing.assert_array_equal(found, expected)


def test_packed_weights_are_counted_packed() -> None:
    """Two weights of 4 bits make a byte; they are parameters that are not trained, and the product is a product."""
    case = next(case for case in CASES if str(case) == "MatMulNBits")

    graph = load(case.model())

    (weight,) = [value for value in graph.parameters if value.name == "b"]
    assert (weight.size, weight.dtype) == (6 * 64 // 2, "uint8")
    assert '"b"' in graph.metadata["frozen"]
    (op,) = [op for op in graph.ops if op.kind == "autopar::MatMulNBits"]
    shapes = [np.array([graph.values[name].shape]) for name in (*op.inputs, *op.outputs)]
    assert op_flops(op, shapes[:-1], shapes[-1:]).tolist() == [2 * 2 * 3 * 64 * 6]


def test_what_comes_before_a_packed_weight_is_trained() -> None:
    """The gradient passes through the product, as it does when a LoRA is trained."""
    case = next(case for case in CASES if str(case) == "MatMulNBits-zero-points")
    model = case.model()
    model.graph.node.insert(0, helper.make_node("MatMul", ["X", "a"], ["h"]))
    model.graph.node[1].input[0] = "h"
    model.graph.initializer.append(numpy_helper.from_array(_x(48, 48), "a"))

    step = training_step(load(model), loss="mse")

    verify(step)
    assert [state.owner for state in step.states if state.role is Role.GRADIENT] == ["a"]
    assert step.num_parameters == 48 * 48 + 48 * 6


@pytest.mark.parametrize(
    ("name", "count"),
    [("MatMulNBits", 64 * 6), ("MatMulNBits-zero-points", 48 * 6), ("MatMulNBits-8-bits-cut", 40 * 6)],
)
def test_weights_of_a_few_bits_count_one_each(name: str, count: int) -> None:
    """Neither bytes nor scales, zero points or the rest of a block that is not full are parameters of the model."""
    case = next(case for case in CASES if str(case) == name)
    bias = 6 if "c" in case.inputs else 0

    graph = load(case.model())

    assert graph.num_parameters == count + bias
    assert json.loads(graph.metadata["packed"])["b"] == count


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("FusedMatMul", {"X": _x(2, 3, 4), "W": _x(2, 4, 3)}, {"transBatchA": 1}), "moves batch dims"),
        (Case("Attention", {"X": X, "w": W3, "b": _x(48)}, {**HEADS, "do_rotary": 1}), "rotates queries and keys"),
        (Case("SkipLayerNormalization", NORM, num_outputs=2, read=(0, 1)), r"output 1 \('y1'\) is read"),
        (Case("FusedConv", {"X": _x(1, 2, 5, 5), "w": _x(3, 2, 3, 3)}, {"activation": "Elu"}), "its activation is Elu"),
    ],
    ids=["batch-dims", "rotary", "output", "activation"],
)
def test_other_forms_get_one_error(case: Case, message: str) -> None:
    """It names the op and what has no counterpart."""
    with pytest.raises(ModelError, match=rf"node 'op' \(com.microsoft::{case.kind}\).*{message}"):
        load(case.model())
