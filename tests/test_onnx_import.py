"""Import of ONNX models: the same numbers, static shapes, clear errors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from autopar import models
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.ir.graph import Graph, Role
from autopar.onnx import load

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

Array = NDArray[Any]


def _model(
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int | str | None] = (2, 6),
    weights: Mapping[str, Array] | None = None,
    opset: int = 18,
    **extra: Any,
) -> onnx.ModelProto:
    """Return a model from `x` to `y`."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **extra)


def _kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.ops]


def _check_numbers(model: onnx.ModelProto, graph: Graph) -> None:
    """Assert that the graph computes what the reference evaluator makes of the model, on data drawn here."""
    rng = np.random.default_rng(0)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    feeds: dict[str, Array] = {}
    for name in graph.inputs:
        value = graph.values[name]
        is_index = "int" in value.dtype
        feeds[name] = rng.integers(0, 8, value.shape) if is_index else rng.normal(size=value.shape).astype(value.dtype)
    expected = ReferenceEvaluator(model).run(None, feeds)

    found = run_graph(graph, feeds | {state.input: weights[state.input] for state in graph.states})

    for name, array in zip(graph.outputs, expected, strict=True):
        assert found[name].shape == graph.values[name].shape
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6)  # float32 sums of a few terms


W = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)

OLD_FORMS: dict[str, tuple[int, list[onnx.NodeProto], Mapping[str, Array]]] = {
    "Unsqueeze": (9, [helper.make_node("Unsqueeze", ["x"], ["y"], axes=[0])], {}),
    "Squeeze": (
        9,
        [helper.make_node("Unsqueeze", ["x"], ["a"], axes=[1]), helper.make_node("Squeeze", ["a"], ["y"], axes=[1])],
        {},
    ),
    "ReduceSum": (11, [helper.make_node("ReduceSum", ["x"], ["y"], axes=[1], keepdims=0)], {}),
    "ReduceMean": (13, [helper.make_node("ReduceMean", ["x"], ["y"], axes=[0])], {}),
    "ReduceMax": (13, [helper.make_node("ReduceMax", ["x"], ["y"])], {}),
    "Split": (11, [helper.make_node("Split", ["x"], ["y", "z"], axis=1, split=[2, 4])], {}),
    "Split even": (13, [helper.make_node("Split", ["x"], ["y", "z"], axis=1)], {}),
    "Slice": (9, [helper.make_node("Slice", ["x"], ["y"], starts=[0, 1], ends=[2, 5])], {}),
    "TopK": (9, [helper.make_node("TopK", ["x"], ["y", "i"], k=3)], {}),
    "Clip": (9, [helper.make_node("Clip", ["x"], ["y"], min=-0.5, max=0.5)], {}),
    "Pad": (9, [helper.make_node("Pad", ["x"], ["y"], pads=[0, 1, 0, 2], value=3.0)], {}),
    "Softmax": (11, [helper.make_node("Softmax", ["x"], ["y"])], {}),
    "Dropout": (9, [helper.make_node("Dropout", ["x"], ["y"], ratio=0.3)], {}),
    "Upsample": (
        9,
        [
            helper.make_node("Unsqueeze", ["x"], ["a"], axes=[0, 1]),
            helper.make_node("Upsample", ["a", "s"], ["y"], mode="nearest"),
        ],
        {"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "Gemm": (9, [helper.make_node("Gemm", ["x", "w", "b"], ["y"])], {"w": W, "b": W[0]}),
}


@pytest.mark.parametrize("name", OLD_FORMS)
def test_old_forms_of_ops_are_brought_to_one_opset(name: str) -> None:
    """A model of any opset becomes a graph of opset 24 that computes the same."""
    opset, nodes, weights = OLD_FORMS[name]
    model = _model(nodes, weights=weights, opset=opset)

    graph = load(model)

    assert graph.opset == 24
    _check_numbers(model, graph)


def test_old_softmax_normalises_all_trailing_dims() -> None:
    """Before opset 13, axis 0 meant the whole tensor (onnx's reference follows the new meaning, hence by hand)."""
    graph = load(_model([helper.make_node("Softmax", ["x"], ["y"], axis=0)], opset=11))

    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    found = run_graph(graph, {"x": x})["y"]
    np.testing.assert_allclose(found, np.exp(x) / np.exp(x).sum(), rtol=1e-6)


K = np.linspace(-1, 1, 18, dtype=np.float32).reshape(1, 1, 3, 6)[..., :4]
OPEN: dict[str, tuple[onnx.NodeProto, dict[str, Any]]] = {
    # 7 rows at stride 2 make 4 windows of 3, which need 2 rows of padding; 6 columns at stride 1 need 3 for 4 taps
    "Conv": (
        helper.make_node("Conv", ["x", "k"], ["y"], auto_pad="SAME_UPPER", strides=[2, 1]),
        {"kernel_shape": (3, 4), "pads": (1, 1, 1, 2), "strides": (2, 1)},
    ),
    "Conv, more padding before": (
        helper.make_node("Conv", ["x", "k"], ["y"], auto_pad="SAME_LOWER"),
        {"kernel_shape": (3, 4), "pads": (1, 2, 1, 1)},
    ),
    "MaxPool": (
        helper.make_node("MaxPool", ["x"], ["y"], auto_pad="VALID", kernel_shape=[2, 2]),
        {"kernel_shape": (2, 2), "pads": (0, 0, 0, 0)},
    ),
    "AveragePool": (
        helper.make_node("AveragePool", ["x"], ["y"], auto_pad="SAME_UPPER", kernel_shape=[2, 2]),
        {"kernel_shape": (2, 2), "pads": (0, 0, 1, 1)},
    ),
    "ConvTranspose": (
        helper.make_node("ConvTranspose", ["x", "k"], ["y"], strides=[2, 2]),
        {"kernel_shape": (3, 4), "strides": (2, 2)},
    ),
    "Resize": (helper.make_node("Resize", ["x", "", "s"], ["y"], mode="nearest"), {"mode": "nearest"}),
}


@pytest.mark.parametrize("name", OPEN)
def test_windows_and_sizes_are_written_down(name: str) -> None:
    """Padding, kernels and sizes that ONNX lets an op leave open are numbers of the graph; it computes the same."""
    node, attrs = OPEN[name]
    weights = {"k": K, "s": np.array([1, 1, 2, 3], np.float32)}
    used = {key: array for key, array in weights.items() if key in node.input}
    model = _model([node], shape=(1, 1, 7, 6), weights=used)

    graph = load(model)

    assert dict(graph.ops[0].attrs) == attrs
    assert [array.tolist() for array in graph.constants.values()] == ([[1, 1, 14, 18]] if name == "Resize" else [])
    _check_numbers(model, graph)


LIKE_FIRST = {
    "GroupNormalization": helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2),
    "MeanVarianceNormalization": helper.make_node("MeanVarianceNormalization", ["x"], ["y"]),
}


@pytest.mark.parametrize("name", LIKE_FIRST)
def test_ops_without_shape_inference_have_the_shape_of_their_input(name: str) -> None:
    """The schemas of `onnx` do not say what shape these have."""
    node = LIKE_FIRST[name]
    weights = {key: array for key, array in (("s", W[:, 0]), ("b", W[:, 1])) if key in node.input}
    model = _model([node], shape=(2, 6, 3, 4), weights=weights, opset=21)

    _check_numbers(model, load(model))


def test_shape_arithmetic_is_folded() -> None:
    """Reading, slicing and joining shapes leaves one `Reshape` with a constant target."""
    model = _model(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "zero"], ["rows"]),
            helper.make_node("Unsqueeze", ["rows", "axis"], ["rows1"]),
            helper.make_node("Concat", ["rows1", "rest"], ["target"], axis=0),
            helper.make_node("Reshape", ["x", "target"], ["y"]),
        ],
        weights={
            "zero": np.array(0, np.int64),
            "axis": np.array([0], np.int64),
            "rest": np.array([3, -1], np.int64),
        },
    )

    graph = load(model)

    assert _kinds(graph) == ["Reshape"]
    assert {name: array.tolist() for name, array in graph.constants.items()} == {"target": [2, 3, -1]}
    assert graph.values["y"].shape == (2, 3, 2)


def test_ops_that_do_nothing_are_dropped() -> None:
    """Identity, dropout, casts to the same type, reshapes to the same shape; the output keeps its name."""
    model = _model(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"]),
            helper.make_node("Identity", ["a"], ["b"]),
            helper.make_node("Cast", ["b"], ["c"], to=TensorProto.FLOAT),
            helper.make_node("Reshape", ["c", "t"], ["d"]),
            helper.make_node("Transpose", ["d"], ["e"], perm=[0, 1]),
            helper.make_node("Dropout", ["e"], ["f", "mask"]),
            helper.make_node("Concat", ["f"], ["y"], axis=0),
            helper.make_node("Relu", ["y"], ["unused"]),
        ],
        weights={"w": W, "t": np.array([2, 4], np.int64)},
    )

    graph = load(model)

    assert _kinds(graph) == ["MatMul"]
    assert graph.outputs == ("y",)
    _check_numbers(model, graph)


def test_the_nan_guard_of_attention_is_dropped() -> None:
    """`Where(IsNaN(softmax), 0, softmax)` is what PyTorch writes around every softmax."""
    model = _model(
        [
            helper.make_node("Softmax", ["x"], ["p"]),
            helper.make_node("IsNaN", ["p"], ["bad"]),
            helper.make_node("Where", ["bad", "zero", "p"], ["y"]),
        ],
        weights={"zero": np.zeros((), np.float32)},
    )

    assert _kinds(load(model)) == ["Softmax"]


def test_local_functions_are_inlined() -> None:
    function = helper.make_function(
        "mine", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    model = _model([helper.make_node("Double", ["x"], ["y"], domain="mine")], functions=[function])
    model.opset_import.append(helper.make_opsetid("mine", 1))

    graph = load(model)

    assert _kinds(graph) == ["Add"]
    assert [function.name for function in model.functions] == ["Double"]


def test_the_branch_of_a_known_condition_is_inlined() -> None:
    def branch(kind: str) -> onnx.GraphProto:
        out = f"{kind}_out"
        return helper.make_graph(
            [helper.make_node(kind, ["x"], [out])], kind, [], [helper.make_empty_tensor_value_info(out)]
        )

    model = _model(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch("Relu"), else_branch=branch("Tanh"))],
        weights={"c": np.array(False)},
    )

    assert _kinds(load(model)) == ["Tanh"]


def test_roles_of_initializers() -> None:
    """Float tensors are trained; statistics, listed names and large integers are buffers; the small rest is known."""
    model = _model(
        [
            helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "var"], ["n"]),
            helper.make_node("Mul", ["n", "table"], ["m"]),
            helper.make_node("Mul", ["m", "half"], ["h"]),
            helper.make_node("Gather", ["h", "big"], ["g"]),
            helper.make_node("Gather", ["g", "small"], ["y"]),
        ],
        weights={
            **{name: np.ones(6, np.float32) for name in ("scale", "shift", "mean", "var", "table")},
            "half": np.array([0.5], np.float32),
            "big": np.zeros(5000, np.int64),
            "small": np.zeros(3, np.int64),
        },
    )
    helper.set_model_props(model, {"autopar.buffers": "table"})

    graph = load(model)

    roles = {state.input: state.role for state in graph.states}
    assert roles == {
        "scale": Role.PARAMETER, "shift": Role.PARAMETER, "mean": Role.BUFFER, "var": Role.BUFFER,
        "table": Role.BUFFER, "big": Role.BUFFER,
    }  # fmt: skip
    assert set(graph.constants) == {"half", "small"}


def test_metadata_says_where_the_graph_is_from() -> None:
    model = _model([helper.make_node("Relu", ["x"], ["y"])], shape=("n", 6), producer_name="me", producer_version="1")

    metadata = load(model, dims={"n": 4}).metadata

    assert metadata["producer"] == "me 1"
    assert len(metadata["sha256"]) == 64
    assert json.loads(metadata["dims"]) == {"n": 4}
    assert (metadata["batch"], json.loads(metadata["batch_inputs"])) == ("4", ["x"])


@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda path: path.stem)
def test_shipped_networks_have_weights_and_static_shapes(path: Path) -> None:
    """The nine networks inside the onnx package: fills are their weights, the batch can be changed."""
    graph = load(path)
    double = load(path, batch=2)

    assert len(graph.inputs) == 1
    assert graph.num_parameters == double.num_parameters
    assert {"ConstantOfShape", "Dropout"}.isdisjoint(_kinds(graph))
    assert [double.values[name].shape[0] for name in double.outputs] == [2] * len(graph.outputs)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    # Published counts: torchvision's models, AlexNet with Caffe's groups.
    [("bvlc_alexnet", 60_965_224), ("resnet50", 25_557_032), ("vgg19", 143_667_240), ("squeezenet", 1_235_496)],
)
def test_shipped_networks_have_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    assert load(LIGHT / f"light_{name}.onnx").num_parameters == num_parameters


def test_a_network_of_opset_9_computes_the_same() -> None:
    """SqueezeNet in ONNX Runtime at opset 9, and as our graph of opset 24, with weights drawn here.

    As shipped, all its weights are equal, and so all its results.
    """
    onnxruntime = pytest.importorskip("onnxruntime", reason="the oracle of this test")
    model = onnx.load(LIGHT / "light_squeezenet.onnx")
    graph = load(model)
    rng = np.random.default_rng(0)
    weights = {value.name: rng.normal(0, 0.1, value.shape).astype(np.float32) for value in graph.parameters}
    data = {"data_0": rng.normal(size=(1, 3, 224, 224)).astype(np.float32)}

    found = run_graph(graph, data | weights)

    nodes = [node for node in model.graph.node if node.op_type != "ConstantOfShape"]
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    inputs = [item for item in model.graph.input if item.name in weights or item.name in data]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, data)
    assert np.ptp(expected[0]) > 1e-4
    np.testing.assert_allclose(found[graph.outputs[0]], expected[0], rtol=1e-4)


def test_zoo_models_compute_the_same() -> None:
    """A small LLaMA through the reference evaluator and through our graph."""
    model = models.build("llama3-8b", num_layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, seq=8, vocab=16)
    graph = load(model, batch=2)
    weights: dict[str, Array] = dict(models.initial_values(model))
    feeds: dict[str, Array] = {
        name: np.random.default_rng(0).integers(0, 16, graph.values[name].shape) for name in graph.inputs
    }
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))

    found = run_graph(graph, feeds | {state.input: weights[state.input] for state in graph.states})

    expected = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(found["logits"], expected[0], rtol=1e-5, atol=1e-6)


def test_a_fixed_batch_is_replaced() -> None:
    """Batch 2 is in two target shapes and in a mask of equal rows; batch 5 takes its place."""
    mask = np.tile(np.array([[[0.0, -1.0, 0.0]]], np.float32), (2, 1, 1))
    nodes = [
        helper.make_node("Reshape", ["x", "split"], ["a"]),
        helper.make_node("Add", ["a", "mask"], ["b"]),
        helper.make_node("Reshape", ["b", "rows"], ["c"]),
        helper.make_node("MatMul", ["c", "w"], ["y"]),
    ]
    weights: dict[str, Array] = {
        "mask": mask,
        "w": W[:3],
        "split": np.array([2, 2, 3], np.int64),
        "rows": np.array([4, 3], np.int64),
    }
    model = _model(nodes, weights=weights)
    helper.set_model_props(model, {"autopar.buffers": "mask"})

    graph = load(model, batch=5)

    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    found = run_graph(graph, {"x": x, "w": W[:3], "mask": mask[:1]})
    np.testing.assert_allclose(found["y"], (x.reshape(5, 2, 3) + mask[:1]).reshape(10, 3) @ W[:3], rtol=1e-6)


def test_a_batch_that_cannot_be_replaced_is_named() -> None:
    """A mask whose rows differ fits the two samples it was exported for, and no others."""
    mask = np.arange(12, dtype=np.float32).reshape(2, 6)
    model = _model([helper.make_node("Add", ["x", "mask"], ["y"], name="n1")], weights={"mask": mask})

    with pytest.raises(ModelError) as error:
        load(model, batch=5)

    assert "exported for a batch of 2 and cannot take 5: node 'n1' (Add) does not fit" in str(error.value)


def test_unbound_dims_are_named() -> None:
    """All of them, and what to type."""
    model = _model([helper.make_node("Relu", ["x"], ["y"])], shape=("batch", None, "seq"))

    with pytest.raises(ModelError) as error:
        load(model)

    assert str(error.value) == (
        "dims 'batch', 'x.1', 'seq' of the model's inputs have no size\n"
        "  hint: --set batch=... --set x.1=... --set seq=..."
    )
    assert load(model, dims={"x.1": 3, "seq": 4}, batch=2).values["y"].shape == (2, 3, 4)


def _ports(**shapes: Sequence[int | str | None]) -> onnx.ModelProto:
    """Return a model that passes inputs of these shapes on."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_empty_tensor_value_info(f"{name}.y") for name in shapes]
    nodes = [helper.make_node("Relu", [name], [f"{name}.y"]) for name in shapes]
    return helper.make_model(
        helper.make_graph(nodes, "ports", inputs, outputs), opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    )


PORTS: dict[str, tuple[dict[str, list[int | str | None]], dict[str, int], dict[str, tuple[int, ...]]]] = {
    "time-major": ({"x": [16, "batch", 24], "h": [1, "batch", 8]}, {}, {"x": (16, 5, 24), "h": (1, 5, 8)}),
    "time-major, dynamic time": ({"x": ["T", "N", 24]}, {"T": 7}, {"x": (7, 5, 24)}),
    "not all inputs": ({"x": ["batch", 3], "table": [4, 3]}, {}, {"x": (5, 3), "table": (4, 3)}),
    "a graph and its edges": (
        {"x": ["nodes", 8], "edges": [2, "num_edges"]},
        {"num_edges": 9},
        {"x": (5, 8), "edges": (2, 9)},
    ),
    "an expression": (
        {"x": ["batch", "kv"], "past": ["batch", "4096-kv"], "all": ["batch", "2*(kv + 1)"]},
        {"kv": 96},
        {"x": (5, 96), "past": (5, 4000), "all": (5, 194)},
    ),
    "a name with a sign": ({"x": ["batch", "max-len"]}, {"max-len": 6}, {"x": (5, 6)}),
    "anonymous": ({"x": ["?", "?", "?"]}, {"x.1": 3, "x.2": 4}, {"x": (5, 3, 4)}),
}  # fmt: skip


@pytest.mark.parametrize("name", PORTS)
def test_dims_are_bound_by_their_names(name: str) -> None:
    """The batch is the dim that is named so, wherever it is; expressions follow; anonymous dims have names."""
    shapes, dims, expected = PORTS[name]

    graph = load(_ports(**shapes), dims=dims, batch=5)

    assert {item: graph.values[item].shape for item in graph.inputs} == expected
    assert graph.metadata["batch"] == "5"
    axes = json.loads(graph.metadata.get("batch_axes", "{}"))
    assert set(axes.values()) == ({1} if name.startswith("time-major") else set())


def test_a_model_of_one_sequence_has_no_batch() -> None:
    """A dim named as time is no batch: such a model works on one sample, and more are refused."""
    model = _ports(x=["sequence_length", 8], h=[1, 8])

    graph = load(model, dims={"sequence_length": 12})

    assert [graph.values[name].shape for name in graph.inputs] == [(12, 8), (1, 8)]
    assert "batch" not in graph.metadata
    with pytest.raises(ModelError, match="works on one sample at a time, not 4"):
        load(model, dims={"sequence_length": 12}, batch=4)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"kv": 96, "4096-kv": 4001}, "dim '4096-kv' is set to 4001, but it is 4000 with kv=96"),
        ({"kv": 5000}, "dim '4096-kv' is -904 with kv=5000"),
        ({}, "dims 'kv' of the model's inputs have no size"),
    ],
)
def test_dims_that_contradict_each_other_are_refused(dims: dict[str, int], message: str) -> None:
    """A dim that is an expression of others has one size."""
    model = _ports(x=["batch", "kv"], past=["batch", "4096-kv"])

    with pytest.raises(ModelError, match=message):
        load(model, dims=dims, batch=2)


def test_a_batch_that_is_merged_with_time_is_found_again() -> None:
    """6 x batch rows become 6 and the batch again, with other ops between."""
    weight = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    model = _model(
        [
            helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
            helper.make_node("Reshape", ["t", "rows"], ["r"]),
            helper.make_node("MatMul", ["r", "w"], ["m"]),
            helper.make_node("Tanh", ["m"], ["h"]),
            helper.make_node("Reshape", ["h", "split"], ["s"]),
            helper.make_node("Transpose", ["s"], ["back"], perm=[1, 0, 2]),
            helper.make_node("Add", ["x", "back"], ["y"]),
        ],
        (2, 6, 4),
        {"w": weight, "rows": np.array([12, 4]), "split": np.array([6, 2, 4])},
    )
    x = np.random.default_rng(0).normal(size=(5, 6, 4)).astype(np.float32)

    found = run_graph(load(model, batch=5), {"x": x, "w": weight})["y"]

    np.testing.assert_allclose(found, x + np.tanh(x @ weight), rtol=1e-5, atol=1e-6)  # float32 sums of 4 terms


BAD_MODELS: dict[str, tuple[onnx.ModelProto, str]] = {
    "unknown domain": (
        _model([helper.make_node("Fused", ["x", "x"], ["y"], name="n7", domain="com.other")]),
        "node 'n7' (com.other::Fused) is of the unknown domain 'com.other'",
    ),
    "layout of one CPU": (
        _model([helper.make_node("Conv", ["x", "x"], ["y"], name="n7", domain="com.microsoft.nchwc")]),
        "node 'n7' (com.microsoft.nchwc::Conv) has images laid out for one CPU by ONNX Runtime",
    ),
    "unknown op of ONNX Runtime": (
        _model([helper.make_node("DynamicQuantizeLSTM", ["x", "x"], ["y"], name="n7", domain="com.microsoft")]),
        "node 'n7' (com.microsoft::DynamicQuantizeLSTM) is an op of ONNX Runtime that standard ops cannot replace",
    ),
    "unknown op": (_model([helper.make_node("Rellu", ["x"], ["y"])]), "node 'y' (Rellu) is unknown at opset 18"),
    "loop": (
        _model([helper.make_node("Loop", ["", "x"], ["y"], name="n3", body=onnx.GraphProto())]),
        "node 'n3' (Loop) carries 0 values, but its body has 0 inputs and 0 outputs",
    ),
    "undefined value": (_model([helper.make_node("Relu", ["z"], ["y"])]), "reads 'z', which nothing before it defines"),
    "undefined output": (_model([helper.make_node("Relu", ["x"], ["z"])]), "output 'y' is not defined by any node"),
    "shapes that do not fit": (
        _model([helper.make_node("MatMul", ["x", "x"], ["y"])]),
        "node 'y' (MatMul) does not fit its inputs float32[2, 6], float32[2, 6]",
    ),
    "shape that depends on data": (
        _model([helper.make_node("NonZero", ["x"], ["y"], name="nz")]),
        "the shape of 'y', result of node 'nz' (NonZero), depends on data",
    ),
    "sequence": (_model([helper.make_node("SequenceConstruct", ["x"], ["y"])]), "is a sequence, not a tensor"),
    "no nodes": (_model([]), "has no nodes"),
    "complex numbers": (
        _model([helper.make_node("Relu", ["x"], ["y"])], weights={"c": np.ones(2, np.complex64)}),
        "initializer 'c' has element type COMPLEX64",
    ),
    "negative dim": (_model([helper.make_node("Relu", ["x"], ["y"])], shape=("n", 6)), "have no size"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_are_named(name: str) -> None:
    """One clear error that names the node."""
    model, message = BAD_MODELS[name]

    with pytest.raises(ModelError) as error:
        load(model)

    assert message in str(error.value)


def test_bad_dims_are_named() -> None:
    model = _model([helper.make_node("Relu", ["x"], ["y"])], shape=("n", 6))

    with pytest.raises(ModelError, match="no dim 'm': its dynamic dims are n"):
        load(model, dims={"m": 2})
    with pytest.raises(ModelError, match="dim 'n' is set to 0"):
        load(model, dims={"n": 0})


def test_a_newer_opset_than_onnx_knows_is_named() -> None:
    newest = onnx.defs.onnx_opset_version()
    model = _model([helper.make_node("Relu", ["x"], ["y"])])
    model.opset_import[0].version = newest + 1

    with pytest.raises(ModelError, match=f"has opset {newest + 1}"):
        load(model)


def test_bad_files_are_named(tmp_path: Path) -> None:
    """Missing, a folder, empty, something else, truncated: each error says which."""
    data = (LIGHT / "light_squeezenet.onnx").read_bytes()
    for name, content in {"empty": b"", "text": b"hello", "zip": b"PK\x03\x04", "cut": data[: len(data) // 2]}.items():
        (tmp_path / name).write_bytes(content)
    expected = {
        "missing": "does not exist", "": "is a directory", "empty": "is empty", "text": "is not an ONNX model",
        "zip": "is a zip archive", "cut": "truncated or damaged",
    }  # fmt: skip

    for name, message in expected.items():
        with pytest.raises(ModelError, match=message):
            load(tmp_path / name)


def test_external_data_may_be_absent(tmp_path: Path) -> None:
    """A model saved by the zoo refers to a data file that is not there."""
    path = tmp_path / "gpt2.onnx"
    models.save(models.build("gpt2"), path)

    graph = load(path, batch=1)

    assert graph.num_parameters == 124_439_808
