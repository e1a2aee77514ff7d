"""Loops over experts in ONNX files: raised to ops for experts where they are exactly that, and named where not."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import autopar
from autopar.degrees import Degrees
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.ir.graph import BRANCHES
from autopar.onnx import load

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 6, 4, 5, 3, 2
NUMBERS = {
    "zero": [0], "one": [1], "two": [2], "k": [TOP_K], "last": [-1], "range": list(range(EXPERTS)), "rows": [-1, WIDTH],
}  # fmt: skip
OPS = ("Sigmoid", "Tanh", "Relu")
"""What experts that are not alike run."""


def _node(kind: str, inputs: str, outputs: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), outputs.split(), outputs.split()[0], **attrs)


def _expert(number: int, x: str, activation: str) -> Iterator[onnx.NodeProto]:
    """Yield an expert on rows: a product with a bias, an activation times the product, a product."""
    own = f"e{number}"
    yield _node("Gemm", f"{x} experts.{number}.up experts.{number}.bias", f"{own}.up", transB=1)
    yield _node(activation, f"{own}.up", f"{own}.act")
    yield _node("Mul", f"{own}.act {own}.up", f"{own}.inner")
    yield _node("MatMul", f"{own}.inner experts.{number}.down", f"{own}.y")


def _rows(number: int, form: str, before: str, activation: str) -> Iterator[onnx.NodeProto]:
    """Yield an expert that runs on the rows of its tokens, as transformers' loops were exported."""
    own = f"e{number}"
    if form == "index_add":
        yield _node("Gather", f"by_expert number.{number}", f"{own}.mask", axis=0)
    else:
        yield _node("Equal", f"chosen number.{number}", f"{own}.mask")
    yield _node("NonZero", f"{own}.mask", f"{own}.nz")
    yield _node("Transpose", f"{own}.nz", f"{own}.places", perm=(1, 0))
    first, second = ("k", "t") if form == "index_add" else ("t", "k")
    for which, start, end in ((first, "zero", "one"), (second, "one", "two")):
        yield _node("Slice", f"{own}.places {start} {end} one", f"{own}.{which}1")
        yield _node("Squeeze", f"{own}.{which}1 one", f"{own}.{which}0")
        yield _node("Unsqueeze", f"{own}.{which}0 last", f"{own}.{which}")
    yield _node("GatherND", f"x {own}.t", f"{own}.x")
    yield from _expert(number, f"{own}.x", activation)
    yield _node("Concat", f"{own}.t {own}.k", f"{own}.both", axis=-1)
    yield _node("Unsqueeze", "weight last", f"{own}.weights")
    yield _node("GatherND", f"{own}.weights {own}.both", f"{own}.w")
    yield _node("Mul", f"{own}.y {own}.w", f"{own}.term")
    if form == "index_add":
        yield _node("ScatterND", f"{before} {own}.t {own}.term", f"sum.{number}", reduction="add")
        return
    yield _node("GatherND", f"{before} {own}.t", f"{own}.before")
    yield _node("Add", f"{own}.before {own}.term", f"{own}.after")
    yield _node("ScatterND", f"{before} {own}.t {own}.after", f"sum.{number}")


def _all(number: int, form: str, before: str, activation: str) -> Iterator[onnx.NodeProto]:
    """Yield an expert that runs on all tokens."""
    own = f"e{number}"
    yield from _expert(number, "x", activation)
    if form == "mask":
        yield _node("Equal", f"chosen number.{number}", f"{own}.is")
        yield _node("Cast", f"{own}.is", f"{own}.mask", to=TensorProto.FLOAT)
        yield _node("Mul", f"{own}.mask weight", f"{own}.masked")
        yield _node("ReduceSum", f"{own}.masked last", f"{own}.w", keepdims=1)
    else:
        yield _node("Gather", f"by_token number.{number}", f"{own}.w0", axis=1)
        yield _node("Unsqueeze", f"{own}.w0 one", f"{own}.w")
    yield _node("Mul", f"{own}.y {own}.w", f"{own}.term")
    yield _node("Add", f"{before} {own}.term", f"sum.{number}")


def _model(form: str, *, alike: bool = True) -> onnx.ModelProto:
    """Return a layer of experts on x [T, d], with a loop of a form."""
    nodes = [
        _node("MatMul", "x router", "logits"),
        _node("Softmax", "logits", "p"),
        _node("TopK", "p k", "weight chosen"),
        _node("Unsqueeze", "chosen last", "spread"),
        _node("Equal", "spread range", "is_chosen"),
        _node("Cast", "is_chosen", "one_hot", to=TensorProto.INT64),
        _node("Transpose", "one_hot", "by_expert", perm=(2, 1, 0)),
        _node("Cast", "is_chosen", "one_hot_float", to=TensorProto.FLOAT),
        _node("Unsqueeze", "weight last", "weight_1"),
        _node("Mul", "one_hot_float weight_1", "spread_weights"),
        _node("ReduceSum", "spread_weights one", "by_token", keepdims=0),
        _node("Mul", "x nothing", "zeros") if form == "onto a value" else _node("Identity", "none", "zeros"),
    ]
    before = "zeros"
    for number in range(EXPERTS):
        write = _rows if form in ("index_add", "put back") else _all
        nodes += write(number, form, before, OPS[0 if alike else number])
        before = f"sum.{number}"
    rng = np.random.default_rng(0)
    weights = {"router": rng.normal(size=(WIDTH, EXPERTS))}
    for number in range(EXPERTS):
        weights[f"experts.{number}.up"] = rng.normal(size=(INNER, WIDTH))
        weights[f"experts.{number}.bias"] = rng.normal(size=INNER)
        weights[f"experts.{number}.down"] = rng.normal(size=(INNER, WIDTH))
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    tensors += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in NUMBERS.items()]
    tensors += [numpy_helper.from_array(np.array(n, np.int64), f"number.{n}") for n in range(EXPERTS)]
    tensors += [
        numpy_helper.from_array(np.zeros((TOKENS, WIDTH), np.float32), "none"),
        numpy_helper.from_array(np.array(0.5, np.float32), "nothing"),
    ]
    graph = helper.make_graph(
        nodes,
        "loop",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (TOKENS, WIDTH))],
        [helper.make_tensor_value_info(before, TensorProto.FLOAT, (TOKENS, WIDTH))],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def _stacked(model: onnx.ModelProto) -> dict[str, NDArray[np.float32]]:
    """Return the weights of the experts as the raised graph has them."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {"router": weights["router"]}
    for which, end in (("up", ".T"), ("down", ""), ("bias", "")):
        each = np.stack([weights[f"experts.{number}.{which}"] for number in range(EXPERTS)])
        each = np.swapaxes(each, 1, 2) if end else each
        found[f"experts.{which}{end}"] = each[:, None, None] if which == "bias" else each
    return found


@pytest.mark.parametrize("form", ["index_add", "put back", "mask", "one-hot", "onto a value"])
def test_a_loop_over_experts_becomes_grouped_products(form: str) -> None:
    """Tokens may be any number; results are the same numbers, of experts that are alike but for their parameters."""
    model = _model(form)
    x = np.random.default_rng(1).normal(size=(TOKENS, WIDTH)).astype(np.float32)

    graph = load(model)

    kinds = [op.kind.removeprefix("autopar::") for op in graph.ops if op.kind.startswith("autopar::")]
    assert kinds == ["ExpertDispatch", "GroupedMatMul", "GroupedMatMul", "ExpertCombine"]
    assert {op.attr("fill") for op in graph.ops if op.kind == "autopar::GroupedMatMul"} == {np.float32(TOP_K / EXPERTS)}
    assert BRANCHES not in graph.metadata
    weights = _stacked(model)
    assert {value.name for value in graph.parameters} == set(weights)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    found = run_graph(graph, weights | {"x": x})[graph.outputs[0]]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    load(model, batch=2 * TOKENS)


@pytest.mark.parametrize("form", ["index_add", "put back"])
def test_rows_of_experts_that_differ_are_named(form: str) -> None:
    """How many rows there are depends on data; the error says whose they are and why the loop is not raised."""
    with pytest.raises(ModelError, match=r"experts as separate branches: node 'e0.nz' .* run .*Relu and Sigmoid"):
        load(_model(form, alike=False))


def test_experts_that_differ_stay_branches() -> None:
    """Each on all tokens, as the file says; its numbers are kept, and that it does so."""
    model = _model("mask", alike=False)

    graph = load(model)

    assert graph.metadata[BRANCHES] == str(EXPERTS)
    assert sum(op.kind == "MatMul" for op in graph.ops) == 1 + EXPERTS


def test_branches_are_remarked_on(tmp_path: Path, cache_dir: Path) -> None:
    """A prediction of such a model says how its experts are priced."""
    path = tmp_path / "branches.onnx"
    onnx.save(_model("mask", alike=False), path)

    found = autopar.predict(
        str(path), Degrees(microbatch=TOKENS, global_batch=TOKENS), mode="infer", stack="ideal", cache_dir=cache_dir
    )

    assert found.plan.simulated is not None
    texts = [remark.text for remark in found.plan.simulated.remarks if remark.kind == "experts"]
    assert [text.partition(":")[0] for text in texts] == ["experts as separate branches"]
