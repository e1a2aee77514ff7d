"""Fused projections of unequal parts are taken apart when a model is imported."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import autopar
from autopar.degrees import Degrees
from autopar.execute import run_graph
from autopar.ir.graph import SEPARATED
from autopar.onnx import load
from autopar.plan import Plan

BATCH, SEQ, WIDTH = 2, 3, 4

SPLIT = """
    m = MatMul (x, w)
    s = Add (b, m)
    q, k, v = Split <axis = -1> (s, sizes)
"""
SLICES = """
    s = MatMul (x, w)
    v = Slice (s, five, eight, axis)
    q = Slice (s, zero, five, axis)
    k = Identity (v)
"""
GROUPS = """
    m = MatMul (x, w)
    s = Add (m, b)
    g = Reshape (s, groups)
    q, k, v = Split <axis = 3> (g, members)
"""
FORMS = {
    "split": (SPLIT, (5, 2, 1), 8),
    "slices of one dim": (SLICES, (5, 3), 8),
    "groups of heads": (GROUPS, (8, 4, 4), 16),
}
"""Each with the widths of the parts and of the whole."""


def _model(body: str, width: int, results: str = "float[B,S,A] q, float[B,S,C] k, float[B,S,D] v") -> onnx.ModelProto:
    """Return a model from x [B, S, 4] by a fused projection to q, k and v."""
    model = parser.parse_model(f"""
    <ir_version: 10, opset_import: ["": 23]>
    fused (float[B,{SEQ},{WIDTH}] x) => ({results})
    <int64[3] sizes = {{5, 2, 1}}, int64[1] zero = {{0}}, int64[1] five = {{5}}, int64[1] eight = {{8}},
     int64[1] axis = {{2}}, int64[5] groups = {{0, 0, 2, 4, -1}}, int64[3] members = {{2, 1, 1}}>
    {{{body}}}
    """)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (WIDTH, width)), ("b", (width,))):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


def _columns(form: str, part: int) -> NDArray[np.int64]:
    """Return the columns of the whole that a part is made of."""
    _, sizes, width = FORMS[form]
    if form != "groups of heads":
        start = sum(sizes[:part])
        return np.arange(start, start + sizes[part])
    rows = np.arange(width).reshape(2, 4, 2)[:, ((0, 1), (2,), (3,))[part]]
    return np.asarray(rows.reshape(-1))


@pytest.mark.parametrize("form", FORMS)
def test_parts_are_products_of_their_own(form: str) -> None:
    """Parts have parameters of their own, whose columns are those of the whole; results are the same numbers."""
    body, sizes, width = FORMS[form]
    model = _model(body, width)
    whole = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    x = np.random.default_rng(1).normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)

    graph = load(model, batch=BATCH)

    assert [value.shape for value in graph.parameters if value.name.startswith("w")] == [(WIDTH, n) for n in sizes]
    assert not {op.kind for op in graph.ops} & {"Split", "Slice"}
    parts = json.loads(graph.metadata[SEPARATED])
    feeds = {name: whole[of][..., _columns(form, int(name.split(".")[1]))] for name, of in parts.items()}
    found = run_graph(graph, feeds | {"x": x})
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    for name, array in zip(graph.outputs, expected, strict=True):
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


HALVES = """
    halves = Constant <value_ints = [4, 4]> ()
    s = MatMul (x, w)
    q, k = Split <axis = -1> (s, halves)
    v = Identity (k)
"""
READ_TWICE = """
    s = MatMul (x, w)
    q, k, v1 = Split <axis = -1> (s, sizes)
    again = MatMul (x, w)
    last = Constant <value_ints = [2]> ()
    total = ReduceSum (again, last)
    v = Add (v1, total)
"""
OVERLAP = SLICES.replace("zero, five", "zero, eight")


@pytest.mark.parametrize("body", [HALVES, READ_TWICE, OVERLAP], ids=["equal parts", "read twice", "overlap"])
def test_what_is_no_projection_into_parts_is_left(body: str) -> None:
    """Equal parts are sharded alike in one matrix, and what reads it twice needs it whole."""
    graph = load(_model(body, 8), batch=BATCH)

    assert [value.name for value in graph.parameters if value.name.startswith("w")] == ["w"]
    assert SEPARATED not in graph.metadata


def _attention(path: Path, heads: int, key_heads: int) -> Path:
    """Write two layers of attention with one matrix for queries, keys and values, as PyTorch exports them."""
    size, seq = 8, 16
    width, fused = heads * size, (heads + 2 * key_heads) * size
    nodes, weights = [], []
    for layer in range(2):
        x, own = ("x" if not layer else f"y{layer - 1}"), f"l{layer}"
        shapes = {"qkv": (width, fused), "out": (width, width)}
        weights += [
            helper.make_tensor_value_info(f"{own}.{name}.weight", TensorProto.FLOAT, shape)
            for name, shape in shapes.items()
        ]
        nodes += [
            helper.make_node("MatMul", [x, f"{own}.qkv.weight"], [f"{own}.fused"]),
            helper.make_node("Split", [f"{own}.fused", "sizes"], [f"{own}.{w}" for w in "qkv"], axis=-1),
            *(helper.make_node("Reshape", [f"{own}.{w}", f"heads.{w}"], [f"{own}.{w}4"]) for w in "qkv"),
            *(
                helper.make_node("Transpose", [f"{own}.{w}4"], [f"{own}.{w}h"], perm=(0, 2, 1, 3))
                for w in "qkv"
            ),
            helper.make_node(
                "Attention", [f"{own}.{w}h" for w in "qkv"], [f"{own}.a"], f"{own}.core",
                is_causal=1, softcap=0.0, qk_matmul_output_mode=0,
            ),
            helper.make_node("Transpose", [f"{own}.a"], [f"{own}.t"], perm=(0, 2, 1, 3)),
            helper.make_node("Reshape", [f"{own}.t", "flat"], [f"{own}.r"]),
            helper.make_node("MatMul", [f"{own}.r", f"{own}.out.weight"], [f"{own}.o"]),
            helper.make_node("Add", [x, f"{own}.o"], [f"y{layer}"]),
        ]  # fmt: skip
    sizes = {
        "sizes": [heads * size, key_heads * size, key_heads * size],
        "heads.q": [0, 0, heads, size], "heads.k": [0, 0, key_heads, size], "heads.v": [0, 0, key_heads, size],
        "flat": [0, 0, width],
    }  # fmt: skip
    data = helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", seq, width))
    result = helper.make_tensor_value_info("y1", TensorProto.FLOAT, ("batch", seq, width))
    tensors = [numpy_helper.from_array(np.array(numbers, np.int64), name) for name, numbers in sizes.items()]
    for value in weights:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        tensors.append(numpy_helper.from_array(np.zeros(shape, np.float32), value.name))
    graph = helper.make_graph(nodes, "attention", [data], [result], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), path)
    return path


def test_above_the_number_of_key_heads_a_fused_matrix_is_copied_in_part(tmp_path: Path, cache_dir: Path) -> None:
    """4 devices, 8 query heads, 2 key heads of 8: of a layer, 64 x 16 for keys and 64 x 16 for values are whole.

    The other 2 x 64 x 64 elements are divided by 4.
    """
    path = _attention(tmp_path / "fused.onnx", heads=8, key_heads=2)

    found = autopar.predict(
        str(path), Degrees(tp=4, microbatch=2, global_batch=2), cluster="a100", stack="ideal", cache_dir=cache_dir
    )

    assert _parameter_bytes(found.plan) == 2 * 2 * (2 * 64 * 64 / 4 + 2 * 64 * 16)


def _parameter_bytes(plan: Plan) -> float:
    assert plan.simulated is not None
    (stage,) = plan.simulated.stages
    return stage.breakdown["parameters"]
