"""Control flow of known course becomes plain ops that compute the same numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.ir.graph import Graph, Role
from autopar.onnx import control_flow, load

onnxruntime = pytest.importorskip("onnxruntime", reason="onnx.reference joins the rows of a Loop instead of stacking")

Array = NDArray[Any]

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
LOOPS = {
    "carried, with its own weight": (
        """m (float[2,3] x) => (float[2,3] y, float[4,2,3] rows) <int64 trips = {4}, bool yes = {1}> {
            y, rows = Loop (trips, yes, x) <body =
                b (int64 i, bool go, float[2,3] h) => (bool on, float[2,3] z, float[2,3] r) 
                        <float[3,3] w = {1,2,3,4,5,6,7,8,9}> {
                    on = Identity (go)  c = Constant <value = float[3] {1,2,3}> ()
                    f = Cast <to = 1> (i)  s = Add (h, f)  m = MatMul (s, w)  t = Tanh (m)  z = Add (t, c)
                    r = Neg (z) }> }""",
        ["w"],
    ),
    "ended by its condition": (
        """m (float[2,3] x) => (float[2,3] y) <bool yes = {1}, int64 two = {2}> {
            y = Loop ("", yes, x) <body = b (int64 i, bool go, float[2,3] h) => (bool on, float[2,3] z) {
                    on = Less (i, two)  z = Add (h, h) }> }""",
        [],
    ),
    "never run": (
        """m (float[2,3] x) => (float[2,3] y) <int64 trips = {0}> {
            y0 = Loop (trips, "", x) <body = b (int64 i, bool go, float[2,3] h) => (bool on, float[2,3] z) {
                    on = Identity (go)  z = Add (h, h) }>
            y = Neg (y0) }""",
        [],
    ),
    "with a branch inside": (
        """m (float[2,3] x) => (float[2,3] y) <int64 trips = {3}, int64 one = {1}> {
            y = Loop (trips, "", x) <body = b (int64 i, bool go, float[2,3] h) => (bool on, float[2,3] z) {
                    on = Identity (go)  first = Equal (i, one)  d = Add (h, h)
                    z = If (first) <then_branch = t () => (float[2,3] a) { a = Mul (d, h) },
                                    else_branch = e () => (float[2,3] a) { b = Neg (h)  a = Add (b, d) }> }> }""",
        [],
    ),
    "scan along dim 1, one output backwards": (
        """m (float[2,4,3] x, float[2,3] s) => (float[2,3] y, float[2,3,4] rows) {
            y, rows = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [2],
                            scan_output_directions = [1],
                body = b (float[2,3] h, float[2,3] xt) => (float[2,3] z, float[2,3] r) {
                    a = Mul (h, xt)  z = Add (a, xt)  r = Tanh (z) }> (s, x) }""",
        [],
    ),
    "scan backwards over one row": (
        """m (float[1,2,3] x, float[2,3] s) => (float[2,3] y) {
            y = Scan <num_scan_inputs = 1, scan_input_directions = [1],
                body = b (float[2,3] h, float[2,3] xt) => (float[2,3] z) { z = Add (h, xt) }> (s, x) }""",
        [],
    ),
}  # fmt: skip


def _model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def _computed(graph: Graph, feeds: Mapping[str, Array], weights: Mapping[str, Array]) -> list[Array]:
    found = run_graph(graph, {**feeds, **{state.input: weights[state.input] for state in graph.states}})
    return [found[name] for name in graph.outputs]


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_unrolled(name: str) -> None:
    """The numbers are those of the loop; weights of the body stay one weight."""
    text, trained = LOOPS[name]
    model = _model(text)
    rng = np.random.default_rng(0)
    feeds = {
        item.name: rng.normal(size=[dim.dim_value for dim in item.type.tensor_type.shape.dim]).astype(np.float32)
        for item in model.graph.input
    }
    bodies = [attribute.g for node in model.graph.node for attribute in node.attribute if attribute.HasField("g")]
    weights = {tensor.name: numpy_helper.to_array(tensor) for body in bodies for tensor in body.initializer}

    graph = load(model)

    assert [state.input for state in graph.states if state.role is Role.PARAMETER] == trained
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for found, expected in zip(_computed(graph, feeds, weights), session.run(None, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)  # float32 sums of a few terms


def test_branches_may_use_the_same_names() -> None:
    """Names of a branch are its own: two branches taken one after the other do not mix them up."""
    text = """m (float[2] x) => (float[2] y) <bool yes = {1}> {
        a = If (yes) <then_branch = t () => (float[2] r) { t = Neg (x) r = Exp (t) },
                      else_branch = e () => (float[2] r) { r = Abs (x) }>
        y = If (yes) <then_branch = t () => (float[2] r) { t = Abs (a) r = Sqrt (t) },
                      else_branch = e () => (float[2] r) { r = Abs (x) }> }"""
    x = np.array([0.5, -2.0], np.float32)

    (y,) = _computed(load(_model(text)), {"x": x}, {})

    np.testing.assert_allclose(y, np.sqrt(np.exp(-x)), rtol=1e-6)


BODY = "b (int64 i, bool go, float[2] h) => (bool on, float[2] z) { on = Identity (go) z = Add (h, h) }"
REFUSED = {
    "condition of an input": (
        'm (float[2] x, int64 rate) => (float[2] y) <int64 k = {16000}> { c = Equal (rate, k) y = If (c) <'
        "then_branch = t () => (float[2] r) { r = Neg (x) }, else_branch = e () => (float[2] q) { q = Abs (x) }> }",
        r"node 'y' \(If\) has a condition that depends on the value of input 'rate'(.|\n)*"
        r"initializer.append\(onnx.numpy_helper.from_array\(np.full\(\(\), ..., np.int64\), 'rate'\)\)",
    ),
    "trip count of data": (
        "m (float[99] x, float[2] s) => (float[2] y) { a = ReduceSum (x) n = Cast <to = 7> (a) "
        f'y = Loop (n, "", s) <body = {BODY}> }}',
        "its trip count 'n' is computed from 'x'",
    ),
    "too many trips": (
        f'm (float[2] x) => (float[2] y) <int64 n = {{60000}}> {{ y = Loop (n, "", x) <body = {BODY}> }}',
        "runs its body of 2 nodes 60,000 times; loops are unrolled to at most 100,000 nodes",
    ),
    "no end": (
        f'm (float[2] x) => (float[2] y) {{ y = Loop ("", "", x) <body = {BODY}> }}',
        "neither a trip count nor a condition",
    ),
    "no rows": (
        'm (float[2] x) => (float[0,2] y) <int64 n = {0}> { y = Loop (n, "") <body = '
        "b (int64 i, bool go) => (bool on, float[2] z) { on = Identity (go) z = Add (x, x) }> }",
        "runs no iteration",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_control_flow_of_unknown_course_gets_one_error(name: str) -> None:
    """It names the node and what its course depends on."""
    text, message = REFUSED[name]

    with pytest.raises(ModelError, match=message):
        load(_model(text))


def test_endless_loops_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that stays true runs into the limit of nodes."""
    monkeypatch.setattr(control_flow, "MAX_NODES", 50)
    text = f'm (float[2] x) => (float[2] y) <bool yes = {{1}}> {{ y = Loop ("", yes, x) <body = {BODY}> }}'

    with pytest.raises(ModelError, match="does not end within the 50 nodes"):
        load(_model(text))
