"""Whole training steps: gradients of models, losses, optimizers, accumulation, blocks."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import models
from autopar.errors import JobError, ModelError, UnsupportedOpError
from autopar.execute import run_graph
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Op, Phase, Role, State, Value
from autopar.ir.verify import verify
from autopar.models.builder import Builder
from autopar.onnx import load
from autopar.training import LOSS_SCALE, STEP, training_step
from tests.gradients import EXECUTOR, as_float64, check_gradient, feeds_of, gradients

Array = NDArray[Any]

TINY: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"num_layers": 2, "hidden": 8, "heads": 2, "seq": 5, "vocab": 11},
    "llama3-8b": {"num_layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 12, "seq": 5, "vocab": 11},
    "bert-base": {"num_layers": 1, "hidden": 8, "heads": 2, "seq": 5, "vocab": 11},
    "mixtral-8x7b": {
        "num_layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 6, "seq": 6, "vocab": 11, "experts": 4,
    },
    "vit-b16": {"num_layers": 1, "hidden": 8, "heads": 2, "patch": 2, "image_size": 4, "classes": 5},
    "resnet50": {"blocks": (2, 1), "channels": 4, "image_size": 16, "classes": 5},
    "mlp-xs": {"num_layers": 3, "hidden": 6},
    "deepseek-moe-16b": {
        "num_layers": 3, "hidden": 16, "heads": 4, "kv_heads": 4, "dense_ffn": 40, "ffn": 8, "seq": 4, "vocab": 24,
        "experts": 8, "top_k": 2,
    },
    "unet-sd1": {
        "channels": 8, "factors": (1, 2), "blocks": 1, "heads": 2, "context": 6, "tokens": 3, "image_size": 4,
        "groups": 4,
    },
}  # fmt: skip


def tiny_step(name: str, *, batch: int = 4) -> Graph:
    """Return the step of a tiny model of the zoo, in float64."""
    graph = as_float64(find_blocks(load(models.build(name, **TINY[name]), batch=batch)))
    return training_step(graph)


def tiny_feeds(name: str, step: Graph) -> dict[str, Array]:
    """Return data for a tiny model: its own start values in float64, shaken so that no bias is zero."""
    rng = np.random.default_rng(1)
    start = models.initial_values(models.build(name, **TINY[name]))
    trained = {state.input for state in step.states if state.role is Role.PARAMETER}
    given: dict[str, Array] = {
        key: array.astype(np.float64) + (rng.normal(0, 0.1, array.shape) if key in trained else 0)
        for key, array in start.items()
    }
    for key in step.inputs:
        value = step.values[key]
        if not value.is_float:
            given[key] = rng.integers(0, 5, value.shape)
    return feeds_of(step, given)


@pytest.mark.parametrize("name", TINY)
def test_gradient_of_a_model_equals_central_differences(name: str) -> None:
    """Along a random direction of all parameters at once; every parameter is trained."""
    step = tiny_step(name, batch=2)

    verify(step)
    assert {state.owner for state in step.states if state.role is Role.GRADIENT} == {
        value.name for value in step.parameters
    }
    check_gradient(step, tiny_feeds(name, step), together=True)


@pytest.mark.parametrize("name", TINY)
def test_step_runs_in_float32(name: str) -> None:
    """All values have the shapes and dtypes the step says, and gradients are those of float64 up to its precision."""
    exact = tiny_step(name)
    feeds = tiny_feeds(name, exact)
    step = training_step(find_blocks(load(models.build(name, **TINY[name]), batch=4)))
    rounded = {key: x.astype(np.float32) if x.dtype == np.float64 else x for key, x in feeds.items()}

    got, expected = gradients(step, rounded), gradients(exact, feeds)

    for key, gradient in expected.items():
        # 1e-6 per op on numbers near 1, through some tens of ops.
        np.testing.assert_allclose(got[key], gradient, rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", TINY)
def test_step_follows_the_conventions(name: str) -> None:
    """A backward op has the block of its origin; gradient sums, updates and moments are named after their parameter."""
    step = tiny_step(name)

    blocks = {op.name: op.block for op in step.ops}
    producers = step.producers()
    for op in step.ops:
        if op.phase is Phase.BACKWARD and op.origin in blocks:
            assert op.block == blocks[op.origin]
    for parameter in (value.name for value in step.parameters):
        update, total = producers[f"{parameter}.new"], producers[f"{parameter}.grad.sum"]
        assert (update.kind, update.phase, update.origin) == ("autopar::Adam", Phase.UPDATE, parameter)
        assert update.inputs == (
            parameter, f"{parameter}.m", f"{parameter}.v", f"{parameter}.grad.sum", STEP,
        )  # fmt: skip
        assert update.outputs == (f"{parameter}.new", f"{parameter}.m.new", f"{parameter}.v.new")
        assert (total.kind, total.phase, total.origin) == ("Add", Phase.BACKWARD, parameter)
        assert total.inputs[0] == f"{parameter}.grad"
        assert update.block == total.block
        roles = {state.role: state for state in step.states if state.owner == parameter}
        assert roles[Role.GRADIENT] == State(f"{parameter}.grad", f"{parameter}.grad.sum", Role.GRADIENT, parameter)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "bert-base", "mixtral-8x7b"])
def test_equal_blocks_have_equal_backward_and_update_ops(name: str) -> None:
    """Position by position: kind, attributes and shapes of what is read and written."""
    step = training_step(find_blocks(load(models.build(name, **{**TINY[name], "num_layers": 4}), batch=2)))

    forms: dict[tuple[Phase, int], list[object]] = defaultdict(list)
    for op in step.ops:
        shapes = [tuple(step.values[n].shape if n else None for n in names) for names in (op.inputs, op.outputs)]
        forms[op.phase, op.block].append((op.kind, op.attrs, shapes))
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
        assert forms[phase, 1] == forms[phase, 2] == forms[phase, 3] == forms[phase, 4] != []


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_microbatches_add_up_to_the_batch(name: str) -> None:
    """Two microbatches of 2, each with half the loss scale, leave the gradient sums of one batch of 4."""
    whole, half = tiny_step(name, batch=4), tiny_step(name, batch=2)
    feeds = tiny_feeds(name, whole)
    feeds |= {state.input: np.zeros_like(feeds[state.input]) for state in whole.states if state.role is Role.GRADIENT}
    scale = half.metadata[LOSS_SCALE]

    expected = run_graph(whole, feeds, EXECUTOR)
    buffers = {state.input: feeds[state.input] for state in half.states}
    loss = 0.0
    for rows in (slice(0, 2), slice(2, 4)):
        data = {key: feeds[key][rows] if key != STEP else feeds[key] for key in half.inputs}
        values = run_graph(
            half, {**buffers, **data, scale: np.asarray(half.constants[scale], np.float64) / 2}, EXECUTOR
        )
        buffers |= {state.input: values[state.output] for state in half.states if state.role is Role.GRADIENT}
        loss += float(values["loss"])

    assert loss == pytest.approx(float(expected["loss"]), rel=1e-12)
    for state in whole.states:
        if state.role is Role.GRADIENT:
            np.testing.assert_allclose(buffers[state.input], expected[state.output], rtol=1e-9, atol=1e-12)


def _linear(*, uses: int = 1, blocks: tuple[int, int] = (-1, -1)) -> Graph:
    """Return y = relu(x w) w ... with one weight used `uses` times."""
    shape = (3, 4)
    values = {"x": Value("x", shape, "float64"), "w": Value("w", (4, 4), "float64")}
    ops = []
    last = "x"
    for index in range(uses):
        name = f"y{index}"
        ops.append(Op(name, "MatMul", (last, "w"), (name,), block=blocks[min(index, 1)]))
        values[name] = Value(name, shape, "float64")
        last = name
    return Graph("linear", 24, values, ("x",), (State("w", "w", Role.PARAMETER, "w"),), {}, tuple(ops), (last,))


def test_cross_entropy_is_the_mean_over_all_elements() -> None:
    """The loss is mean(log(sum(exp(y))) - y[label]) and dy = (softmax(y) - onehot) / n."""
    step = training_step(_linear())
    labels = np.asarray([0, 3, 1])
    feeds = feeds_of(step, {"labels": labels})

    values = run_graph(step, feeds, EXECUTOR)

    y = feeds["x"] @ feeds["w"]
    probability = np.exp(y) / np.exp(y).sum(-1, keepdims=True)
    assert step.values["labels"] == Value("labels", (3,), "int64")
    assert step.outputs == ("loss",)
    np.testing.assert_allclose(values["loss"], -np.log(probability[np.arange(3), labels]).mean(), rtol=1e-12)
    expected = feeds["x"].T @ (probability - np.eye(4)[labels]) / 3
    np.testing.assert_allclose(values["w.grad.sum"], feeds["w.grad"] + expected, rtol=1e-12, atol=1e-14)


def test_mean_loss_is_the_mean() -> None:
    """The loss is mean(x w), so dw = sum over rows of x / (number of outputs)."""
    step = training_step(_linear(), loss="mean")
    feeds = feeds_of(step, {})

    got = gradients(step, feeds)

    np.testing.assert_allclose(got["w"], np.tile(feeds["x"].sum(0)[:, None] / 12, (1, 4)), rtol=1e-12)


def test_softmax_at_the_end_is_taken_back() -> None:
    """The logits of a model that ends in a Softmax are what enters it; the Softmax is dropped, like all unused ops."""
    graph = _linear()
    softmax = Op("p", "Softmax", ("y0",), ("p",), (("axis", -1),))
    ended = replace(
        graph, values={**graph.values, "p": Value("p", (3, 4), "float64")}, ops=(*graph.ops, softmax), outputs=("p",)
    )

    step = training_step(ended)

    assert [op.kind for op in step.ops] == [op.kind for op in training_step(graph).ops]


def test_shared_weight_gets_the_sum_in_the_block_of_its_first_user() -> None:
    """Y = x w w w with the uses in blocks 0, 1, 1: what block 1 gives is added there, the rest in block 0."""
    step = training_step(_linear(uses=3, blocks=(0, 1)), loss="mean")

    sums = [(op.name, op.block) for op in step.ops if op.kind == "Add"]
    assert sums == [("y1.sum.0", 1), ("y0.sum.0", 0), ("w.grad.sum", 0)]
    assert step.producers()["w.new"].block == 0
    check_gradient(step, feeds_of(step, {}))


def test_skip_connection_is_added_in_the_block_that_made_the_value() -> None:
    """Y = x w is used in blocks 1 and 2: their gradients meet in block 0."""
    graph = _linear(blocks=(0, 0))
    values = {**graph.values, **{name: Value(name, (3, 4), "float64") for name in ("a", "b", "c")}}
    ops = (
        *graph.ops,
        Op("a", "Tanh", ("y0",), ("a",), block=1),
        Op("b", "Exp", ("y0",), ("b",), block=2),
        Op("c", "Mul", ("a", "b"), ("c",), block=2),
    )

    step = training_step(replace(graph, values=values, ops=ops, outputs=("c",)), loss="mse")

    assert [(op.origin, op.block) for op in step.ops if op.kind == "Add"] == [("y0", 0), ("w", 0)]
    check_gradient(step, feeds_of(step, {}))


def test_unused_parameter_stays_as_it_is() -> None:
    """It gets no gradient, no moments and no update."""
    graph = _linear()
    unused = State("u", "u", Role.PARAMETER, "u")
    step = training_step(
        replace(graph, values={**graph.values, "u": Value("u", (2,), "float64")}, states=(*graph.states, unused))
    )

    verify(step)
    assert unused in step.states
    assert [state.input for state in step.states] == ["w", "u", "w.grad", "w.m", "w.v"]


def test_adam_equals_its_formula() -> None:
    """Three updates follow Kingma & Ba's algorithm 1; hyperparameters are float32 attributes."""
    step = training_step(_linear(), optimizer="adam")
    feeds = feeds_of(step, {"labels": np.asarray([1, 0, 2])})
    rate, beta1, beta2, epsilon = (float(np.float32(number)) for number in (1e-3, 0.9, 0.999, 1e-8))
    p, m, v = feeds["w"], feeds["w.m"], feeds["w.v"]

    for count in (1, 2, 3):
        feeds[STEP] = np.asarray(count, np.float32)
        values = run_graph(step, feeds, EXECUTOR)
        g = values["w.grad.sum"]
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        p = p - rate * (m / (1 - beta1**count)) / (np.sqrt(v / (1 - beta2**count)) + epsilon)
        for state, expected in zip(("w", "w.m", "w.v"), (p, m, v), strict=True):
            np.testing.assert_allclose(values[f"{state}.new"], expected, rtol=1e-10)
            feeds[state] = values[f"{state}.new"]


def test_sgd_equals_its_formula() -> None:
    """It is m' = 0.9 m + g and p' = p - 0.01 m'."""
    step = training_step(_linear(), optimizer="sgd")
    feeds = feeds_of(step, {"labels": np.asarray([1, 0, 2])}) | {"w.m": np.ones((4, 4))}

    values = run_graph(step, feeds, EXECUTOR)

    momentum = float(np.float32(0.9)) + values["w.grad.sum"]
    np.testing.assert_allclose(values["w.m.new"], momentum, rtol=1e-12)
    np.testing.assert_allclose(values["w.new"], feeds["w"] - float(np.float32(1e-2)) * momentum, rtol=1e-12)
    assert [state.input for state in step.states] == ["w", "w.grad", "w.m"]


def test_optimizing_lowers_the_loss() -> None:
    """Thirty steps of Adam on one batch of a tiny GPT, with the gradient buffers emptied in between."""
    step = tiny_step("gpt2", batch=2)
    feeds = tiny_feeds("gpt2", step)
    empty = {state.input: np.zeros_like(feeds[state.input]) for state in step.states if state.role is Role.GRADIENT}
    losses = []
    for count in range(1, 31):
        values = run_graph(step, {**feeds, **empty, STEP: np.asarray(count, np.float32)}, EXECUTOR)
        feeds |= {state.input: values[state.output] for state in step.states}
        losses.append(float(values["loss"]))

    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(
    ("kind", "sharded", "reduce"),
    [
        ("autopar::CrossEntropyStats", (0, 3), "sum"),
        ("autopar::CrossEntropyGrad", (0, 4), "concat"),
        ("autopar::GatherGrad", (1,), "concat"),
    ],
)
def test_kernels_can_be_split_over_the_vocabulary(kind: str, sharded: tuple[int, ...], reduce: str) -> None:
    """With the row numbers split like the rows, terms add up or parts join to the whole result."""
    rng = np.random.default_rng(0)
    logits, labels, classes = rng.normal(size=(3, 6)), np.asarray([5, 0, 2]), np.arange(6)
    row_max = logits.max(-1, keepdims=True)
    total = np.exp(logits - row_max).sum(-1, keepdims=True)
    inputs: list[Array] = {
        "autopar::CrossEntropyStats": [logits, row_max, labels, classes],
        "autopar::CrossEntropyGrad": [logits, row_max, total, labels, classes, np.asarray(0.5)],
        "autopar::GatherGrad": [labels, classes, rng.normal(size=(3, 4))],
    }[kind]
    attrs = (("axis", 0),) if kind == "autopar::GatherGrad" else ()
    outputs = ("sum_exp", "picked") if reduce == "sum" else ("grad",)
    op = Op("op", kind, tuple(map(str, range(len(inputs)))), outputs, attrs)

    whole = EXECUTOR.run(op, inputs, 24)
    parts = []
    for half in (0, 1):
        local = [np.split(x, 2, axis=x.ndim - 1)[half] if i in sharded else x for i, x in enumerate(inputs)]
        parts.append(EXECUTOR.run(op, local, 24))

    for index, expected in enumerate(whole):
        first, second = parts[0][index], parts[1][index]
        joined = np.concatenate([first, second], axis=-1 if kind.endswith("EntropyGrad") else 0)
        np.testing.assert_allclose(first + second if reduce == "sum" else joined, expected, rtol=1e-12)


def test_split_batch_has_the_statistics_of_the_whole() -> None:
    """The sums of BatchNormStats over halves of a batch add up to those over the batch."""
    x = np.random.default_rng(0).normal(size=(4, 3, 2, 2))
    op = Op("op", "autopar::BatchNormStats", ("x",), ("total", "total_square"))

    whole = EXECUTOR.run(op, [x], 24)
    halves = [EXECUTOR.run(op, [part], 24) for part in np.split(x, 2)]

    np.testing.assert_allclose(whole[0], x.sum(axis=(0, 2, 3)), rtol=1e-12)
    for index in (0, 1):
        np.testing.assert_allclose(halves[0][index] + halves[1][index], whole[index], rtol=1e-12)


def _light_models() -> list[Path]:
    import onnx

    return sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))


@pytest.mark.parametrize("path", _light_models(), ids=lambda path: path.stem)
def test_networks_shipped_with_onnx_become_steps(path: Path) -> None:
    """Every parameter of the nine networks is trained; at the end stand logits, not probabilities."""
    graph = load(path, batch=2)

    step = training_step(graph)

    verify(step)
    assert {f"{value.name}.grad" for value in graph.parameters} <= set(step.values)
    assert "Softmax" not in {op.kind for op in step.ops}


def test_step_of_a_large_model_has_its_parameters() -> None:
    """GPT-3 175B has 2501 forward ops, and its step about 8900."""
    graph = find_blocks(load(models.build("gpt3-175b"), batch=1))

    step = training_step(graph)

    assert step.num_parameters == graph.num_parameters


def test_unknown_requests_are_refused() -> None:
    """The hint lists what there is."""
    with pytest.raises(JobError, match=r"(?s)no loss 'hinge'.*auto, cross-entropy, chunked-cross-entropy, mse, mean"):
        training_step(_linear(), loss="hinge")
    with pytest.raises(
        JobError, match=r"(?s)no optimizer 'shampoo'.*adam, adamw, adamw-8bit, sgd, lion, muon, adafactor"
    ):
        training_step(_linear(), optimizer="shampoo")


def test_models_that_cannot_be_trained_are_refused() -> None:
    """A step is no model; an output must depend on a parameter; labels must be free."""
    graph = _linear()
    with pytest.raises(JobError, match="training step already"):
        training_step(training_step(graph))
    with pytest.raises(JobError, match="does not depend on any trained parameter"):
        training_step(replace(graph, states=(State("w", "w", Role.BUFFER, "w"),)))
    with pytest.raises(JobError, match="rename 'labels'"):
        training_step(
            replace(graph, values={**graph.values, "labels": Value("labels", (1,), "int64")}, inputs=("x", "labels"))
        )
    with pytest.raises(ModelError, match=r"rename 'w\.grad'"):
        training_step(
            replace(graph, values={**graph.values, "w.grad": Value("w.grad", (1,), "int64")}, inputs=("x", "w.grad"))
        )
    with pytest.raises(JobError, match="no output of 'linear' can be trained"):
        training_step(replace(graph, values={**graph.values, "y0": Value("y0", (3, 4), "int64")}))


def test_unsupported_op_off_the_gradient_path_is_no_error() -> None:
    """Data that is not trained may pass through any op; trained values may not."""
    graph = _linear()
    hidden = {**graph.values, "h": Value("h", (3, 4), "float64")}
    before = Op("h", "Hardmax", ("x",), ("h",))

    data_path = replace(graph, values=hidden, ops=(before, replace(graph.ops[0], inputs=("h", "w"))))
    trained_path = replace(graph, values=hidden, ops=(*graph.ops, replace(before, inputs=("y0",))), outputs=("h",))

    verify(training_step(data_path))
    with pytest.raises(UnsupportedOpError, match=r"op 'h' \(Hardmax\)"):
        training_step(trained_path)


def test_frozen_parameters_get_no_gradient() -> None:
    """Nor optimizer state; the gradient passes through them to the trained ones before."""
    graph = load(models.build("gpt2", **TINY["gpt2"]), batch=2)
    names = [value.name for value in graph.parameters]
    frozen = names[1::2]

    step = training_step(replace(graph, metadata={**graph.metadata, "frozen": json.dumps(frozen)}))

    verify(step)
    owners = {role: [state.owner for state in step.states if state.role is role] for role in Role}
    assert owners[Role.PARAMETER] == names
    assert owners[Role.GRADIENT] == names[::2]
    assert sorted(set(owners[Role.MOMENT])) == sorted(names[::2])


def test_a_model_that_is_frozen_throughout_cannot_be_trained() -> None:
    """The error says why."""
    graph = load(models.build("gpt2", **TINY["gpt2"]), batch=2)
    names = [value.name for value in graph.parameters]

    with pytest.raises(JobError, match=rf"any trained parameter; {len(names)} are frozen \(requires_grad=False\)"):
        training_step(replace(graph, metadata={"frozen": json.dumps(names)}))


def test_labels_are_batched_like_the_inputs_of_the_model() -> None:
    """The import notes which inputs have the batch in dim 0; the labels join them, the number of the step does not."""
    step = training_step(load(models.build("gpt2", **TINY["gpt2"]), batch=2))

    assert step.inputs == ("input_ids", "labels", STEP)
    assert json.loads(step.metadata["batch_inputs"]) == ["input_ids", "labels"]


def gathered_experts(tokens: int) -> Graph:
    """Return a mixture of 4 experts as PyTorch's exporter writes it: each token gets a copy of its expert."""
    g = Builder("sparse")
    x_Td = g.input("x", ("batch", 8))
    logits_TE = g.op("MatMul", x_Td, g.parameter("router", (8, 4)), name="logits")
    _, chosen_T1 = g.ops("TopK", logits_TE, g.constant((1,)), names=("best", "chosen"), axis=-1)
    weights_Tdd = g.op("GatherND", g.parameter("experts", (4, 8, 8)), chosen_T1, name="copies")
    rows_T1d = g.op("Unsqueeze", x_Td, g.constant((1,)), name="rows")
    y_T1d = g.op("MatMul", rows_T1d, weights_Tdd, name="made")
    g.op("Squeeze", y_T1d, g.constant((1,)), name="y")
    return load(g.model({"y": ("batch", 8)}), batch=tokens)


def test_copies_of_experts_are_refused() -> None:
    """More of them than there are experts: nothing trains so."""
    with pytest.raises(ModelError, match=r"'copies' \(GatherND\) copies \(16, 8, 8\) of the weights 'experts'"):
        training_step(find_blocks(gathered_experts(16)))


def test_a_few_gathered_matrices_are_no_mixture_of_experts() -> None:
    assert training_step(find_blocks(gathered_experts(4))).states
