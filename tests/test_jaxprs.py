"""JAX functions as models: what the importer makes of their equations, and that it computes what JAX computes."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar import jaxprs
from autopar.configuration import Configuration
from autopar.discover import discover
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.ir.blocks import block_kinds, find_blocks
from autopar.ir.graph import Graph, Role
from autopar.jaxprs.equations import Equation, Value, constant
from autopar.jaxprs.positions import Causal, Content, Full, content
from autopar.onnx import load
from autopar.sharding import Mesh
from autopar.training import training_step
from tests.executions import Execution, random_feeds, random_plan
from tests.gradients import as_float64

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or importlib.util.find_spec("flax") is None, reason="needs jax and flax"
)
LAYERS, SEQ, VOCAB = 2, 16, 48
NORMS = {"llama": "RMSNormalization"}
MODELS = ("gpt", "moe", "scanned", "llama", "linen", "nnx")


def test_without_jax_there_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says what to install."""
    monkeypatch.setattr(jaxprs, "find_spec", lambda name: None)

    with pytest.raises(ModelError, match="needs jax, jaxlib") as raised:
        autopar.from_jax(lambda p, x: x, {}, (), tmp_path / "model.onnx")

    assert raised.value.hint == 'pip install "autopar[jax]"'


class Equations:
    """Equations on squares of 4 x 4, and what their results hold."""

    def __init__(self) -> None:
        self.made: dict[Value, Equation] = {}

    def do(self, kind: str, *inputs: Value, shape: tuple[int, ...] = (4, 4), dtype: str = "int32", **how: Any) -> Value:
        """Add an equation and return its result."""
        output = Value(shape, dtype)
        self.made[output] = Equation(kind, inputs, (output,), how)
        return output

    def iota(self, dim: int) -> Value:
        """Return positions along a dim."""
        return self.do("iota", dimension=dim)

    def holds(self, value: Value) -> Content | None:
        """Return what a value holds."""
        return content(value, self.made)


@pytest.mark.parametrize(
    ("kind", "flip", "ahead", "expected"),
    [
        ("ge", False, 0, Causal(0, 1)),
        ("le", True, 0, Causal(0, 1)),
        ("gt", False, 1, Causal(0, 1)),
        ("lt", True, 1, Causal(0, 1)),
        ("ge", True, 0, Causal(1, 0)),
        ("gt", False, 0, None),
        ("ge", False, 1, None),
        ("eq", False, 0, None),
    ],
)
def test_comparisons_of_positions_are_causal_where_a_query_sees_itself(
    kind: str, flip: bool, ahead: int, expected: Content | None
) -> None:
    """`i >= j` and its spellings; `i > j`, which hides a query from itself, and `i + 1 >= j` are other masks."""
    e = Equations()
    query, key = e.do("add", e.iota(0), constant(ahead)), e.iota(1)

    mask = e.do(kind, *((key, query) if flip else (query, key)), dtype="bool")

    assert e.holds(mask) == expected


def test_masks_are_followed_through_the_ways_they_are_written() -> None:
    """`jnp.tril` of ones; Flax's mask of floats with a dim of heads; a transpose, which turns the mask round."""
    e = Equations()
    seen = e.do("ge", e.iota(0), e.iota(1), dtype="bool")
    zeros, ones = (e.do("broadcast_in_dim", constant(n), broadcast_dimensions=()) for n in (0, 1))
    lower = e.do("select_n", seen, zeros, ones)
    upper = e.do("select_n", seen, ones, zeros)
    float_mask = e.do("convert_element_type", seen, dtype="float32")
    headed = e.do("broadcast_in_dim", float_mask, shape=(2, 1, 4, 4), broadcast_dimensions=(0 + 2, 1 + 2))
    visible = e.do("ne", headed, constant(0.0), shape=(2, 1, 4, 4), dtype="bool")

    assert e.holds(lower) == e.holds(e.do("and", seen, lower)) == Causal(0, 1)
    assert e.holds(upper) is None
    assert e.holds(visible) == Causal(2, 3)
    assert e.holds(e.do("transpose", seen, permutation=(1, 0))) == Causal(1, 0)
    assert e.holds(e.do("and", seen, ones)) == Causal(0, 1)
    assert e.holds(e.do("and", seen, e.do("ge", e.iota(1), e.iota(0)))) is None


def test_indices_of_positions_are_not_negative() -> None:
    """So that nothing is wrapped round; a position less 1 may be."""
    e = Equations()

    assert e.holds(e.do("lt", e.iota(0), constant(0), dtype="bool")) == Full(0)
    assert e.holds(e.do("lt", e.do("sub", e.iota(0), constant(1)), constant(0), dtype="bool")) is None


def built(name: str, dtype: str = "float32") -> tuple[Any, dict[str, Any], Any, Any]:
    """Return a function, its parameters by the importer's names, the tree of them, and the model."""
    import jax
    import jax.numpy as jnp

    from tests.jax_models import MODELS

    function, tree = MODELS[name]()
    tree = jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)
    model = jaxprs.to_onnx(function, tree, (jax.ShapeDtypeStruct((2, SEQ), jnp.int32),))
    named = zip(jaxprs._values(tree, jax, []), jax.tree.leaves(tree), strict=True)
    return function, {value.name: np.asarray(leaf) for value, leaf in named}, tree, model


def given(graph: Graph, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the states of a graph: a parameter, or a layer of one that is stacked."""
    found = {}
    for state in graph.states:
        whole, _, layer = state.input.rpartition(".")
        found[state.input] = arrays[state.input] if state.input in arrays else arrays[whole][int(layer)]
    return found


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_jax_computes(name: str, dtype: str) -> None:
    """With another batch than the traced one; every layer has one attention, its norms are one op each."""
    import jax

    with jax.enable_x64(dtype == "float64"):
        function, arrays, tree, model = built(name, dtype)
        graph = load(model, batch=3)
        tokens = np.random.default_rng(0).integers(0, VOCAB, (3, SEQ)).astype(np.int32)

        found = run_graph(graph, {graph.inputs[0]: tokens, **given(graph, arrays)})[graph.outputs[0]]

        expected = np.asarray(function(tree, tokens))
    tolerance = 1e-5 if dtype == "float32" else 1e-6  # normalisations of ONNX compute in float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    assert graph.num_parameters == sum(array.size for array in arrays.values() if array.dtype.kind == "f")
    kinds = Counter(op.kind for op in graph.ops)
    norms = kinds["LayerNormalization"] + kinds["RMSNormalization"]
    assert (kinds["Attention"], norms) == (LAYERS, 2 * LAYERS + 1)
    assert all(op.attr("is_causal") == 1 for op in graph.ops if op.kind == "Attention")
    assert kinds["Gelu"] + kinds["Swish"] == LAYERS
    assert kinds["Softmax"] == (LAYERS if name == "moe" else 0)
    counted = Counter(block_kinds(find_blocks(graph)))
    assert LAYERS in counted.values()


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "moe", "linen"])
def test_partitioned_models_train_like_the_whole_one(name: str, cache_dir: Path) -> None:
    """Data and tensor parallelism and a pipeline, at random placements; training needs a gradient for every op."""
    forward = find_blocks(as_float64(load(built(name)[3], batch=4)))
    graph = training_step(forward)
    rules = discover(graph, cache_dir=cache_dir)
    for seed, configuration in enumerate(
        (Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b"), Configuration(2, Mesh.of(inner=2), 2, "1f1b"))
    ):
        execution = Execution.of_graph(graph, *random_feeds(graph, configuration.num_microbatches, {}))
        execution.check(random_plan(execution.folded, rules, configuration, 4, seed))


@needs_jax
@pytest.mark.slow
def test_models_of_any_size_are_planned(tmp_path: Path) -> None:
    """29 G parameters as shapes alone; layers that are scanned over become blocks."""
    import jax
    import jax.numpy as jnp

    from tests.jax_models import scanned, stacked

    shapes = jax.eval_shape(lambda: stacked(24, 12288, 2048))
    tokens = jax.ShapeDtypeStruct((2, 2048), jnp.int32)

    path = autopar.from_jax(scanned, shapes, {"tokens": tokens}, tmp_path / "model.onnx")

    graph = load(path, batch=4)
    assert graph.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(shapes)) > 28e9
    assert graph.inputs == ("tokens",)
    assert path.stat().st_size < 1_000_000


@needs_jax
@pytest.mark.slow
def test_models_are_solved(tmp_path: Path, cache_dir: Path) -> None:
    """From the file to a simulated plan whose stages hold all blocks."""
    import jax
    import jax.numpy as jnp

    from tests.jax_models import decoder, parameters

    shapes = jax.eval_shape(parameters)
    path = autopar.from_jax(decoder, shapes, (jax.ShapeDtypeStruct((2, SEQ), jnp.int32),), tmp_path / "model.onnx")

    plan = autopar.solve(path, gpus=4, global_batch=8, time_limit=120, cache_dir=cache_dir)

    assert plan.simulated is not None
    assert 0 < plan.simulated.step_seconds < 1


@needs_jax
@pytest.mark.slow
def test_attention_is_found_in_other_forms() -> None:
    """Keys shared by all heads, no mask, a mask of data; another mask over shared keys stays as it is."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, SEQ, heads, 8)).astype("float32") for heads in (4, 1, 1))
    seen = np.tril(np.ones((SEQ, SEQ), bool)) & (rng.random((2, 1, 1, SEQ)) < 0.7) | np.eye(SEQ, dtype=bool)

    def shared_keys(p: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(p["q"], k, v)

    def masked(p: Any, k: Any, seen: Any) -> Any:
        keys = jnp.broadcast_to(k, p["q"].shape)
        return jax.nn.dot_product_attention(p["q"], keys, keys, mask=seen)

    def strict(p: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bshd,btxd->bhst", p["q"], k) * 0.5
        mask = jnp.arange(SEQ)[:, None] > jnp.arange(SEQ)
        return jnp.einsum("bhst,btxd->bshd", jax.nn.softmax(jnp.where(mask, scores, -1e9), -1), v)

    for function, data, attentions in ((shared_keys, (k, v), 1), (masked, (k, seen), 1), (strict, (k, v), 0)):
        graph = load(jaxprs.to_onnx(function, {"q": q}, data))

        found = run_graph(graph, {**dict(zip(graph.inputs, data, strict=True)), "q": q})[graph.outputs[0]]

        np.testing.assert_allclose(found, function({"q": q}, *data), rtol=1e-4, atol=1e-5)
        assert sum(op.kind == "Attention" for op in graph.ops) == attentions, function
        assert not any(op.attr("is_causal", 0) for op in graph.ops), function


@needs_jax
@pytest.mark.slow
def test_primitives_compute_what_jax_computes() -> None:
    """Each of those that the models above do not have."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    x = rng.uniform(0.5, 2, (2, 6, 4)).astype("float32")
    image = rng.standard_normal((2, 8, 8, 3)).astype("float32")
    kernel = rng.standard_normal((3, 3, 3, 5)).astype("float32")

    def conv(w: Any, x: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=numbers)

    def elementwise(w: Any, x: Any) -> Any:
        y = jnp.log1p(x) + jnp.expm1(-x) + jnp.exp2(x) + jnp.sign(x - 1) * jnp.floor(x) + x**3 + x**-1 + x**0.3
        y = y + jnp.minimum(x, 1) * jnp.clip(x, 0.7, 1.5) - jnp.sin(x) * jnp.cos(w) + jnp.abs(-x) + (x % 0.3)
        y = y + jax.scipy.special.erf(x) + jax.nn.relu(x - 1) + jax.nn.softplus(x) + jnp.sqrt(x)
        return jnp.where((x > 1) & ~(x > 1.5) | (x == w), y, w)

    def structure(w: Any, x: Any) -> Any:
        y = jnp.roll(x, 1, -1)
        y = jnp.pad(y, ((0, 0), (1, 0), (0, 2)))[:, 1:, :4] + jnp.cumsum(x, 1) + x.max(1, keepdims=True)
        order = jnp.argmax(x, -1)
        y = y + jnp.take_along_axis(x, order[..., None], -1) + w[order][..., None] + x.min(-1, keepdims=True)
        return y.reshape(-1, 8).reshape(2, 6, 4) * x.prod(-1, keepdims=True) + jax.lax.dynamic_slice(w, (1,), (4,))

    def loops(w: Any, x: Any) -> Any:
        def step(carry: Any, row: Any) -> tuple[Any, Any]:
            return carry * 0.5 + row, carry.sum(-1)

        last, sums = jax.lax.scan(step, jnp.zeros((2, 4)), jnp.swapaxes(x, 0, 1), reverse=True)
        return jax.lax.fori_loop(0, 3, lambda index, y: y * w + index, last) + sums.T[:, :4]

    w = rng.uniform(0.5, 2, (4,)).astype("float32")
    for function, weight, data in ((conv, kernel, image), (elementwise, w, x), (structure, w, x), (loops, w, x)):
        graph = load(jaxprs.to_onnx(function, weight, (data,)))
        (parameter,) = (state.input for state in graph.states)

        found = run_graph(graph, {graph.inputs[0]: data, parameter: weight})[graph.outputs[0]]

        np.testing.assert_allclose(found, function(weight, data), rtol=2e-4, atol=2e-5, err_msg=function.__name__)


@needs_jax
@pytest.mark.slow
def test_what_is_not_trained_is_said(tmp_path: Path) -> None:
    """Frozen parameters by name; integers, statistics and what a function closes over are buffers."""
    import jax.numpy as jnp

    table = jnp.ones((128, 64))

    def function(p: Any, x: Any) -> Any:
        y = (x - p["batch_stats"]["mean"]) @ p["params"]["base"] + (x @ p["params"]["a"]) @ p["params"]["b"]
        return y + table[p["params"]["rows"]][:, :8].sum(0)

    params = {"base": jnp.ones((8, 8)), "a": jnp.ones((8, 2)), "b": jnp.ones((2, 8)), "rows": jnp.arange(3)}
    tree = {"params": params, "batch_stats": {"mean": jnp.ones(8)}}
    path = autopar.from_jax(function, tree, (jnp.ones((2, 8)),), tmp_path / "m.onnx", frozen=lambda n: "base" in n)

    graph = load(path)
    roles = {state.input: state.role for state in graph.states}
    assert json.loads(graph.metadata["frozen"]) == ["params.base"]
    assert {name for name, role in roles.items() if role is Role.PARAMETER} == {
        f"params.{n}" for n in ("base", "a", "b")
    }
    assert {name for name, role in roles.items() if role is Role.BUFFER} == {
        "closure",
        "batch_stats.mean",
        "params.rows",
    }


@needs_jax
@pytest.mark.slow
def test_what_has_no_static_form_gets_one_error() -> None:
    """Control flow on data, dropout, other gathers, a model without parameters, a function that does not fit."""
    import jax
    import jax.numpy as jnp

    x, tree = jnp.ones((2, 4)), {"w": jnp.ones(4)}
    cases = [
        (
            lambda p, x: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y + p["w"], x),
            tree,
            "while.*depends on data",
        ),
        (lambda p, x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: x * p["w"]), tree, "cond.*depends on data"),
        (lambda p, x: x * p["w"] * jax.random.uniform(jax.random.key(0), (4,)), tree, "random numbers"),
        (lambda p, x: jnp.linalg.svd(x * p["w"])[0], tree, "'svd' has no ONNX form"),
        (
            lambda p, x: jax.lax.ragged_dot(x, p["w"][None, :, None], jnp.array([2])),
            tree,
            "ragged_dot.* multiplies groups of rows whose sizes depend on data",
        ),
        (lambda p, x: jax.lax.dynamic_slice(x * p["w"], (0, x.astype(int)[0, 0]), (2, 2)), tree, "where data say"),
        (lambda p, x: x, {}, "no parameters to train"),
        (lambda p, x: x @ p["w"] @ p["w"], tree, "cannot trace lambda"),
        (lambda p, x: x if x.sum() > 0 else -x, tree, "cannot trace lambda"),
    ]
    for function, parameters, message in cases:
        with pytest.raises(ModelError, match=message):
            jaxprs.to_onnx(function, parameters, (x,))


@needs_jax
@pytest.mark.slow
def test_what_is_planned_otherwise_is_said(tmp_path: Path) -> None:
    """A gradient that the function stops, and a batch that it computes with."""
    import jax
    import jax.numpy as jnp

    tree = {"w": jnp.ones((2, 2))}
    with pytest.warns(UserWarning, match="stop_gradient is not planned"):
        jaxprs.to_onnx(lambda p, x: jax.lax.stop_gradient(x @ p["w"]) * x, tree, (jnp.ones((3, 2)),))
    with pytest.warns(UserWarning, match="is planned with microbatches of 2, the number of samples it was traced"):
        autopar.from_jax(
            lambda p, x: x + p["w"].sum(1, keepdims=True), tree, (jnp.ones((2, 8)),), tmp_path / "model.onnx"
        )
