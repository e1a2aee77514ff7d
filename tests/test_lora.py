"""Low-rank adapters: which products get them, what they compute, what is trained, and how they are written down."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar import models
from autopar.api import solve
from autopar.cli import main
from autopar.cluster import load_cluster
from autopar.configuration import Configuration
from autopar.cost import MIXED
from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.errors import JobError
from autopar.execute import run_graph
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Role
from autopar.ir.verify import verify
from autopar.models.builder import Builder
from autopar.onnx import load
from autopar.plan import Plan
from autopar.prediction import Predictor
from autopar.sharding import Mesh
from autopar.training import ADAPTER_CONFIG, Lora, add_adapters, read_lora, training_step
from autopar.training.lora import adapter_names
from autopar.workload import open_plan, open_workload
from tests.executions import EXECUTOR, TINY, Execution, model_feeds, random_plan, solved_plan
from tests.gradients import as_float64

SPACE = (
    Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b"),
    Configuration(2, Mesh.of(inner=4), 1, "gpipe"),
    Configuration(3, Mesh.of(inner=2), 4, "zb-h1"),
)


def trained(graph: Graph) -> list[str]:
    """Return the parameters that are not frozen."""
    frozen = json.loads(graph.metadata["frozen"])
    return [value.name for value in graph.parameters if value.name not in frozen]


def lora_step(samples: int, lora: Lora, name: str = "llama3-8b", **dims: Any) -> Graph:
    """Return the training step of a tiny model with adapters, in float64."""
    forward = as_float64(load(models.build(name, **{**TINY[name], **dims}), batch=samples))
    return training_step(find_blocks(add_adapters(forward, lora)))


@pytest.mark.parametrize(
    ("lora", "count"),
    [
        (Lora(16, targets=("q", "v")), 8_388_608),  # 32 layers of 2 x 16 x (4096 + 4096); printed by peft
        (Lora(16), 39_976_960),  # all-linear, printed by peft
        (Lora(8, targets=("attention",)), 8_388_608),
        (Lora(16, targets=("mlp",)), 32 * 3 * 16 * (4096 + 11008)),
    ],
    ids=str,
)
def test_the_trained_parameters_of_llama2_7b(lora: Lora, count: int) -> None:
    """Those peft trains; the model itself is frozen, its norms, embedding and head too."""
    graph = add_adapters(load(models.build("llama2-7b"), batch=1), lora)

    verify(graph)
    assert graph.num_trained == count
    assert graph.num_parameters == 6_738_415_616 + count
    assert {name.split(".")[-2] for name in trained(graph)} == {"lora_A", "lora_B"}


def test_gradients_are_those_of_the_formula() -> None:
    """Y = x W + s x A B and a mean: dA = s x^T dy B^T, dB = s (x A)^T dy, with s = alpha / rank."""
    g = Builder("linear")
    g.op("MatMul", g.input("x", ("batch", 6)), g.parameter("w", (6, 4)), name="y")
    graph = as_float64(load(g.model({"y": ("batch", 4)}), batch=3))
    rng = np.random.default_rng(0)
    x, w, a, b = (rng.normal(size=shape) for shape in ((3, 6), (6, 4), (6, 2), (2, 4)))
    step = training_step(add_adapters(graph, Lora(2, 6.0)), loss="mean", optimizer="sgd")
    zeros = {state.input: np.zeros(step.values[state.input].shape) for state in step.states}

    found = run_graph(step, {**zeros, "x": x, "w": w, "w.lora_A": a, "w.lora_B": b}, EXECUTOR)

    dy = np.full((3, 4), 1 / 12)
    loss = (x @ w + 3 * x @ a @ b).mean()
    assert found[step.outputs[0]] == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(found["w.lora_A.grad.sum"], 3 * x.T @ (dy @ b.T), rtol=1e-12)
    np.testing.assert_allclose(found["w.lora_B.grad.sum"], 3 * (x @ a).T @ dy, rtol=1e-12)
    assert "w.grad.sum" not in found


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama3-8b", Lora(4, targets=("q", "v"))),
        ("gpt2", Lora(2, 4.0)),
        ("mixtral-8x7b", Lora(4)),
    ],
)
def test_partitioned_adapters_train_like_the_model(name: str, lora: Lora, cache_dir: Path) -> None:
    """Random plans, and the best of a cluster on which splitting pays."""
    rules = discover(lora_step(10, lora, name), cache_dir=cache_dir)

    for seed, configuration in enumerate(SPACE):
        graph = lora_step(4, lora, name)
        execution = Execution.of_graph(graph, *model_feeds(name, graph, configuration.num_microbatches))
        execution.check(random_plan(execution.folded, rules, configuration, 4, seed))
        if not seed:
            execution.check(solved_plan(execution.folded, rules, configuration, 4))


@pytest.mark.parametrize("dp", [1, 8])
def test_a_base_of_4_bits_takes_as_long(dp: int) -> None:
    """Products are split as those of 16 bits are; less of them is read."""
    dims = {"num_layers": 4}
    whole, packed = (
        Predictor(open_workload("zoo:llama2-7b", lora=f"rank=16{base}", dims=dims)).predict(
            Degrees(dp=dp, microbatch=1, global_batch=dp), load_cluster("h100")
        )
        for base in ("", ",base=nf4")
    )

    assert packed.timeline.step_seconds == pytest.approx(whole.timeline.step_seconds, rel=0.02)
    assert packed.timeline.peak_bytes < whole.timeline.peak_bytes - 1.4 * 4 * 202e6  # elements of a layer


def test_a_base_of_4_bits_takes_half_a_byte_and_a_scale_per_64() -> None:
    """0.5625 bytes of every element of a matrix in a layer; the head and the embedding keep 2."""
    graph = training_step(find_blocks(add_adapters(load(models.build("llama2-7b"), batch=1), Lora(16, base="nf4"))))

    sizes = MIXED.graph_element_bytes(graph)

    held = sum(sizes[value.name] * value.size for value in graph.parameters if "lora" not in value.name)
    layers = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    others = 6_738_415_616 - layers
    assert held == 0.5625 * layers + 2 * others
    assert graph.num_parameters == 6_738_415_616 + 39_976_960
    assert {state.owner for state in graph.states if state.role in (Role.GRADIENT, Role.MOMENT)} == set(trained(graph))


def test_parts_of_a_fused_matrix_share_their_half() -> None:
    """One A for queries, keys and values that a checkpoint fuses, and a B for each, as peft has it in one."""
    g = Builder("fused")
    x = g.input("x", ("batch", 6))
    parts = [g.op("MatMul", x, g.parameter(f"h.0.c_attn.weight.{part}.T", (6, 6)), name=part) for part in "qkv"]
    g.op("Sum", *parts, name="y")

    graph = add_adapters(load(g.model({"y": ("batch", 6)}), batch=3), Lora(2, targets=("c_attn",)))

    verify(graph)
    assert trained(graph) == [
        "h.0.c_attn.lora_A.weight.T",
        *(f"h.0.c_attn.lora_B.weight.{part}.T" for part in "qkv"),
    ]
    assert graph.num_trained == 2 * (6 + 18)


def test_products_of_one_value_share_their_half_if_told_so() -> None:
    """As on the fused matrices of Megatron-LM: one A for queries, keys and values, another one for what follows."""
    forward = load(models.build("llama3-8b", **TINY["llama3-8b"]), batch=2)

    graph = add_adapters(forward, Lora(2, targets=("attention",), shared=True))

    verify(graph)
    first = [name for name in trained(graph) if name.startswith("layers.0.")]
    assert sum("lora_A" in name for name in first) == 2
    assert sum("lora_B" in name for name in first) == 4


def test_matrices_per_expert_get_an_adapter_each() -> None:
    """A and B have the experts in front."""
    forward = load(models.build("mixtral-8x7b", **TINY["mixtral-8x7b"]), batch=2)
    up = next(value for value in forward.parameters if len(value.shape) == 3)

    graph = add_adapters(forward, Lora(2, targets=(up.name.removesuffix(".weight"),)))

    verify(graph)
    experts, rows, columns = up.shape
    a, b = adapter_names(up.name)
    assert [graph.values[name].shape for name in (a, b)] == [(experts, rows, 2), (experts, 2, columns)]


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("rank=16,targets=q:v", Lora(16, targets=("q", "v"))),
        ("alpha=32, targets=attention", Lora(8, 32.0, ("attention",))),
        ("rank=4,rslora=true,base=nf4", Lora(4, 8.0, ("all",), True, "nf4")),
        ("rank=4,shared=true", Lora(4, shared=True)),
    ],
)
def test_adapters_read_as_they_are_written(text: str, lora: Lora) -> None:
    """Rank 8, alpha 8 and all products of layers unless stated; a plan holds them as text."""
    assert read_lora(text) == lora
    assert read_lora(str(lora)) == lora
    assert read_lora(lora) is lora


def test_there_need_be_none() -> None:
    assert [read_lora(given) for given in (None, "", "none")] == [None, None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=0", "rank 0"),
        ("rank=2.5", "not whole"),
        ("rank=x", "no number"),
        ("rank=8,rank=9", "twice"),
        ("r=8", "'r=8' says nothing"),
        ("rank=8,alpha=-1", "alpha -1"),
        ("base=int3", "'int3'"),
        ("targets=q::v", "without targets"),
        ("nowhere.json", "cannot be read"),
        ("rslora=maybe", "rslora"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        read_lora(text)


def test_an_unknown_target_lists_those_there_are() -> None:
    graph = load(models.build("llama3-8b", **TINY["llama3-8b"]), batch=2)

    with pytest.raises(JobError, match=r"(?s)'q_proj'.*attention, mlp, all, q, k, v, out, gate, up, down, logits"):
        add_adapters(graph, Lora(targets=("q_proj",)))


PEFT: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "meta-llama/Llama-2-7b-hf",
    "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["v_proj", "q_proj"], "bias": "none",
    "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "modules_to_save": None,
    "layers_to_transform": None, "rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "use_rslora": False,
}  # fmt: skip
"""What peft writes."""


def test_a_configuration_of_peft_is_read(tmp_path: Path) -> None:
    """The file, or the folder with one."""
    file = tmp_path / ADAPTER_CONFIG
    file.write_text(json.dumps(PEFT))

    assert read_lora(file) == read_lora(tmp_path) == Lora(16, 32.0, ("q_proj", "v_proj"))
    file.write_text(json.dumps({**PEFT, "target_modules": "all-linear", "use_rslora": True}))
    assert read_lora(file) == Lora(16, 32.0, ("all",), True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "all"}, "bias='all'"),
        ({"layers_to_transform": [1]}, "layers_to_transform"),
        ({"some_new_field": 3}, "some_new_field=3"),
        ({"peft_type": "IA3"}, "no LoRA configuration"),
        ({"target_modules": 3}, "target_modules is 3, no list of names and no regular expression"),
        ({"target_modules": ""}, "target_modules is '', no list of names and no regular expression"),
        ({"target_modules": "(q_proj"}, r"LoRA pattern '\(q_proj' is no regular expression: missing \)"),
        ({"target_modules": "q{99999999999}"}, "is no regular expression: the repetition number is too large"),
        ({"r": "16"}, "r is '16'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_a_field_of_peft_that_changes_the_model_is_not_dropped(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({**PEFT, **change}))

    with pytest.raises(JobError, match=message):
        read_lora(tmp_path)


@pytest.mark.parametrize(
    "pattern", [r".*\.(q|v)", r"layers\.[01]\..*\.(up|down)", "layers\\.0\\.attn\\.o.{1,2}, q", ".*, pattern=q"]
)
def test_a_regular_expression_is_written_as_it_was_read(pattern: str, tmp_path: Path) -> None:
    """Commas, colons and equals signs included: a plan keeps adapters as text."""
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({**PEFT, "target_modules": pattern}))

    lora = read_lora(tmp_path)

    assert lora == Lora(16, 32.0, pattern=pattern)
    assert read_lora(str(lora)) == lora
    assert read_lora(f"pattern={pattern}") == Lora(pattern=pattern)


def test_a_regular_expression_matches_whole_names_of_modules() -> None:
    """As peft's does: of layer 0 alone, and no module of which it matches a part."""
    graph = load(models.build("llama3-8b", **TINY["llama3-8b"]), batch=2)

    some = trained(add_adapters(graph, Lora(pattern=r"layers\.0\..*\.(q|up)")))

    found = {name.rpartition(".lora_")[0] for name in some}
    assert found == {"layers.0.attn.q", "layers.0.mlp.up"}
    with pytest.raises(JobError, match=r"(?s)'layers' matches the whole name of no module.*layers\.0\.attn"):
        add_adapters(graph, Lora(pattern="layers"))


def test_targets_and_a_pattern_are_one_too_many() -> None:
    with pytest.raises(JobError, match="both targets and a pattern"):
        read_lora("rank=4,targets=q,pattern=.*v")
    with pytest.raises(JobError, match="empty pattern"):
        read_lora("rank=4,pattern=")


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def test_adapters_beside_a_hugging_face_model_are_trained(tmp_path: Path) -> None:
    """Unless others are asked for, or none."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(PEFT))
    source = f"hf:{tmp_path}"

    found = [open_workload(source, lora=given).lora for given in (None, "none", "rank=2")]

    assert found == [Lora(16, 32.0, ("q_proj", "v_proj")), None, Lora(2)]
    graph = open_workload(source).graph(2)
    assert {state.owner.split(".")[4] for state in graph.states if state.role is Role.GRADIENT} == {"q_proj", "v_proj"}


def test_a_solved_plan_says_what_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the plan, the report and what is opened again."""
    dims = ["--set", "num_layers=4", "--set", "hidden=64", "--set", "ffn=96", "--set", "heads=4", "--set", "kv_heads=4"]
    dims += ["--set", "vocab=128", "--set", "seq=16"]

    main(
        ["solve", "zoo:llama2-7b", "--gpus", "2", "--global-batch", "8", *dims, "--lora", "rank=4,targets=q:v", "-o",
         str(tmp_path), "--no-cache", "--workers", "1"],
    )  # fmt: skip

    plan = Plan.from_json((tmp_path / "plan.json").read_bytes())
    assert plan.job.lora == "rank=4,alpha=8,targets=q:v"
    assert plan.model.trained == 4 * 2 * 4 * (64 + 64)
    assert open_plan(plan).lora == Lora(4, targets=("q", "v"))
    said = " ".join(capsys.readouterr().out.split())
    assert "4.1 k trained" in said
    assert "LoRA rank=4,alpha=8,targets=q:v" in said


@pytest.mark.slow
def test_a_70b_model_with_adapters_fits_8_gpus() -> None:
    """Its 138 GB are shared; the optimizer holds 12 bytes of the adapters and nothing of the base."""
    plan = solve("zoo:llama2-70b", gpus=8, global_batch=64, lora="rank=16,targets=attention", time_limit=120, top_k=1)

    assert plan.simulated is not None
    held = [dict(stage.breakdown) for stage in plan.simulated.stages]
    assert max(parts["parameters"] for parts in held) > 138e9 / 8
    assert sum(parts["optimizer"] for parts in held) / len(held) < 12 * plan.model.trained
