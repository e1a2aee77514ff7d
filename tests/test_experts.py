"""Experts without dropped tokens: what they compute, and that they cost what the chosen rows cost."""

from math import prod

import numpy as np
import pytest

from autopar import models
from autopar.cli import main
from autopar.cluster import PRESETS
from autopar.cost import CostModel
from autopar.cost.flops import op_flops
from autopar.cost.policy import MIXED
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.ir.fills import fill_of, fills
from autopar.ir.graph import Graph, Phase
from autopar.onnx import load
from autopar.training import training_step
from tests.gradients import as_float64

SEQ, EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 8, 2, 16, 12
SIZES = {
    "num_layers": 1, "hidden": HIDDEN, "heads": 4, "kv_heads": 2, "head": 4, "seq": SEQ, "vocab": 24,
    "experts": EXPERTS, "top_k": TOP_K, "expert_ffn": WIDTH,
}  # fmt: skip


def tiny() -> Graph:
    return load(models.build("qwen3-30b-a3b", **SIZES), batch=2)


def test_a_token_gets_what_its_experts_make_of_it() -> None:
    """Expert by expert and token by token."""
    graph = as_float64(tiny())
    weights = {name: array.astype(np.float64) for name, array in models.initial_values(
        models.build("qwen3-30b-a3b", **SIZES)
    ).items()}  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, 24, (2, SEQ))
    found = run_graph(graph, {**weights, "input_ids": tokens})

    x, mixture = found["layers.0.mlp_norm"], "model.layers.0.mlp"
    logits = x @ weights[f"{mixture}.gate.weight.T"]
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = np.zeros_like(x)
    for place in np.ndindex(2, SEQ):
        chosen = np.argsort(-scores[place])[:TOP_K]
        for expert in chosen:
            gate = x[place] @ weights[f"{mixture}.experts.gate_up_proj.gate.T"][expert]
            up = x[place] @ weights[f"{mixture}.experts.gate_up_proj.up.T"][expert]
            made = (gate / (1 + np.exp(-gate)) * up) @ weights[f"{mixture}.experts.down_proj.T"][expert]
            expected[place] += scores[place][expert] / scores[place][chosen].sum() * made
    np.testing.assert_allclose(found["layers.0.moe"], expected, rtol=1e-10, atol=1e-12)


def test_only_chosen_rows_are_multiplied() -> None:
    """Two products up and one down for each choice of a token; twice that for the gradients."""
    step = training_step(tiny())
    for phase, passes in ((Phase.FORWARD, 1), (Phase.BACKWARD, 2)):
        flops = sum(
            float(op_flops(
                op, [np.array([step.values[name].shape]) for name in op.inputs],
                [np.array([step.values[name].shape]) for name in op.outputs],
            )[0])
            for op in step.ops if op.phase is phase and "GroupedMatMul" in op.kind
        )  # fmt: skip
        assert flops == pytest.approx(passes * 2 * 3 * 2 * SEQ * TOP_K * HIDDEN * WIDTH)


def test_rows_take_the_bytes_of_chosen_ones_from_dispatch_to_combine() -> None:
    """Forward and backward; what the rest of the model holds takes all of its own."""
    step = training_step(tiny())
    rows = {name for name, value in step.values.items() if value.shape[:3] == (EXPERTS, 2, SEQ)}
    sizes = MIXED.graph_element_bytes(step)

    assert fills(step.ops, step.values) == dict.fromkeys(rows, TOP_K / EXPERTS)
    assert {sizes[name] for name in rows} == {2 * TOP_K / EXPERTS}
    assert {"layers.0.moe.dispatch", "layers.0.moe.swish", "layers.0.moe.down"} <= rows
    assert sizes["layers.0.moe"] == sizes["layers.0.mlp_residual"] == 2


def test_a_dispatch_moves_what_is_chosen() -> None:
    """It reads each token, and writes `top_k` of the rows."""
    graph = load(models.build("qwen3-30b-a3b", num_layers=1), batch=1)
    op = next(op for op in graph.ops if op.kind == "autopar::ExpertDispatch")
    read, made = ([np.array([graph.values[name].shape]) for name in names] for names in (op.inputs, op.outputs))
    costs = CostModel(PRESETS["h100"])
    seconds = float(costs.op_seconds(op, read, made, MIXED.graph_element_bytes(graph))[0])
    written = 8 * 2 * prod(graph.values[op.inputs[0]].shape)

    assert written / 3.35e12 < seconds < 3 * written / 3.35e12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fill": 1.5}, "fill=1.5, not a share"),
        ({"depth": 3}, "'depth' that its op does not have"),
    ],
)
def test_a_file_with_a_wrong_attribute_is_refused(change: dict[str, float], message: str) -> None:
    """In one sentence."""
    from onnx import helper

    model = models.build("qwen3-30b-a3b", **SIZES)
    node = next(node for node in model.graph.node if node.op_type == "ExpertDispatch")
    kept = [item for item in node.attribute if item.name not in change]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in change.items())])
    with pytest.raises(ModelError, match=message):
        load(model, batch=2)


def test_a_file_with_operands_that_do_not_fit_is_refused() -> None:
    """The matrices of experts are as many as there are rows of experts."""
    model = models.build("qwen3-30b-a3b", **SIZES)
    weight = next(item for item in model.graph.initializer if item.name.endswith("down_proj.T"))
    weight.dims[0] = 3
    with pytest.raises(ModelError, match="one matrix per expert"):
        load(model, batch=2)


def test_a_function_of_the_same_name_with_another_body_is_inlined() -> None:
    """What a file says of an op counts, not what it is called."""
    model = models.build("qwen3-30b-a3b", **SIZES)
    own = next(item for item in model.functions if item.name == "GroupedMatMul")
    next(node for node in own.node if node.op_type == "MatMul").name = "other"
    kinds = {op.kind for op in load(model, batch=2).ops}

    assert "autopar::GroupedMatMul" not in kinds
    assert "autopar::ExpertCombine" in kinds


def test_an_uneven_load_fills_more_rows() -> None:
    """Those of the fullest device, and never more than all."""
    for imbalance, fill in ((1.5, 1.5 * TOP_K / EXPERTS), (100.0, 1.0)):
        graph = load(models.build("qwen3-30b-a3b", **SIZES, expert_imbalance=imbalance), batch=2)
        found = [fill_of(op) for op in graph.ops if "Grouped" in op.kind]
        assert found == pytest.approx([fill] * 3)


@pytest.mark.parametrize("model", ["zoo:gpt2", "zoo:qwen3-8b"])
def test_a_model_without_experts_has_no_uneven_load(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no option without effect."""
    code = main(["predict", model, "--global-batch", "8", "--dp", "2", "--gpus", "2", "--expert-imbalance", "1.5"])

    assert code == 2
    assert "expert" in capsys.readouterr().err
