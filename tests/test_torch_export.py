"""PyTorch modules and Hugging Face configurations as models."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar import huggingface, torch_export
from autopar.cli import main
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.folding.expert_parameters import experts_of
from autopar.folding.fold import fold
from autopar.huggingface import check_dense
from autopar.ir.blocks import block_kinds, find_blocks
from autopar.ir.graph import Graph
from autopar.onnx import load
from autopar.training import training_step
from autopar.workload import open_workload

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="needs torch and transformers",
)
LAYERS, SEQ, VOCAB = 3, 16, 96
DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": SEQ, "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": SEQ}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **DECODER, "num_key_value_heads": 2},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **DECODER, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], **GPT2, "bos_token_id": 0, "eos_token_id": 0},
    "helium": {"architectures": ["HeliumForCausalLM"], **DECODER, "num_key_value_heads": 2, "head_dim": 8},
    "bert": {"architectures": ["BertForMaskedLM"], **DECODER},
    "vit": {"architectures": ["ViTForImageClassification"], **DECODER, "image_size": 32, "patch_size": 8},
}  # fmt: skip


def written(name: str, folder: Path) -> Path:
    """Write a configuration and return its folder."""
    (folder / "config.json").write_text(json.dumps({"model_type": name, **CONFIGS[name]}))
    return folder


def test_without_torch_there_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says what to install."""
    for module in (torch_export, huggingface):
        monkeypatch.setattr(module, "find_spec", lambda name: None)

    with pytest.raises(ModelError, match=r"autopar\[torch\]"):
        open_workload(f"hf:{written('helium', tmp_path)}")
    with pytest.raises(ModelError, match="needs torch, onnxscript"):
        autopar.from_torch(None, (), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is no JSON"), ("[]", "no model_type"), ('{"hidden_size": 4}', "no model_type")],
)
def test_a_wrong_configuration_gets_one_error(content: str | None, message: str, tmp_path: Path) -> None:
    """Before anything is imported."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    with pytest.raises(ModelError, match=message):
        open_workload(f"hf:{tmp_path}")


def test_only_the_sequence_can_be_set(tmp_path: Path) -> None:
    """Everything else stands in the configuration."""
    with pytest.raises(ModelError, match="heads=8 cannot be set"):
        open_workload(f"hf:{written('llama', tmp_path)}", dims={"heads": 8})


@pytest.mark.parametrize(
    ("stated", "experts", "model"),
    [
        ({"num_local_experts": 4, "num_experts_per_tok": 2}, 4, "zoo:mixtral-8x7b"),
        ({"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 48}, 128, "zoo:mixtral-8x7b"),
        ({"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}, 64, "zoo:deepseek-moe-16b"),
        ({"text_config": {**DECODER, "num_experts": 16}}, 16, "zoo:mixtral-8x7b"),
    ],
)
def test_mixtures_of_experts_are_refused(stated: dict[str, Any], experts: int, model: str, tmp_path: Path) -> None:
    """Before anything is exported, with the nearest model of the zoo."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sparse", **DECODER, **stated}))

    with pytest.raises(ModelError, match=f"sparse is a mixture of {experts} experts") as raised:
        open_workload(f"hf:{tmp_path}")

    assert f"{model} --set num_layers=3 --set hidden=32" in raised.value.hint
    assert f"--set experts={experts} --set seq=16" in raised.value.hint


def test_a_configuration_with_one_expert_is_dense() -> None:
    check_dense({"model_type": "dense", **DECODER, "num_experts": 1}, SEQ)


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_become_models(name: str, tmp_path: Path) -> None:
    """With the parameters that transformers counts, equal layers, and another batch than the exported one."""
    import transformers

    graph = find_blocks(open_workload(f"hf:{written(name, tmp_path)}", cache_dir=tmp_path).forward(4))

    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = getattr(transformers, CONFIGS[name]["architectures"][0])(config)
    assert graph.num_parameters == model.num_parameters()
    kinds = block_kinds(graph)
    assert [kinds.count(kind) for kind in dict.fromkeys(kinds)].count(LAYERS) == 1
    assert sum(op.kind == "Attention" for op in graph.ops) == LAYERS
    assert graph.values[graph.outputs[0]].shape[0] == 4


def _run(graph: Graph, module: Any, data: np.ndarray[Any, Any]) -> Any:
    """Return the output of a graph with the weights of a module."""
    weights = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    given: dict[str, Any] = {graph.inputs[0]: data}
    for state in graph.states:
        name = state.input.removesuffix(torch_export.TRANSPOSED)
        given[state.input] = np.swapaxes(weights[name], -1, -2) if name != state.input else weights[name]
    return run_graph(graph, given)[graph.outputs[0]]


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["helium"])
def test_exported_models_compute_the_same(name: str, tmp_path: Path) -> None:
    """With the module's weights under the names that the file gives them: attention, rotations, grouped heads."""
    import torch
    import transformers

    graph = open_workload(f"hf:{written(name, tmp_path)}", cache_dir=tmp_path).forward(2)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    module = getattr(transformers, CONFIGS[name]["architectures"][0])(config).eval()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ))

    found = _run(graph, module, tokens)

    with torch.no_grad():
        expected = module(input_ids=torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


EXPERTS: dict[str, dict[str, Any]] = {
    "granitemoe": {**DECODER, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {**DECODER, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
}
"""Mixtures of experts that no builder of ours makes."""


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_exported_experts_run_as_grouped_products(name: str, tmp_path: Path) -> None:
    """As transformers' loop over experts, of other numbers of samples too; trained, and dealt out as experts."""
    import torch
    import transformers

    config = {**EXPERTS[name], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, **config}))
    known = transformers.AutoConfig.for_model(name, **config)
    known._experts_implementation = "eager"
    module = transformers.AutoModelForCausalLM.from_config(known).eval()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, SEQ))

    graph = open_workload(f"hf:{tmp_path}", cache_dir=tmp_path).forward(3)

    kinds = [op.kind for op in graph.ops if op.kind.startswith("autopar::")]
    assert Counter(kinds) == {
        "autopar::ExpertDispatch": LAYERS, "autopar::GroupedMatMul": 2 * LAYERS, "autopar::ExpertCombine": LAYERS
    }  # fmt: skip
    assert {op.attr("fill") for op in graph.ops if op.kind == "autopar::GroupedMatMul"} == {0.5}
    with torch.no_grad():
        expected = module(input_ids=torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(_run(graph, module, tokens), expected, rtol=1e-3, atol=1e-5)
    assert graph.num_parameters == module.num_parameters()
    step = training_step(find_blocks(graph))
    assert {owner.split(".")[4] for owner in experts_of(fold(step))} == {"experts"}
    assert len(experts_of(fold(step))) == 2 * LAYERS
    assert "autopar" not in transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS


@needs_torch
@pytest.mark.slow
def test_experts_of_a_module_are_exported_and_left_as_they_are(tmp_path: Path) -> None:
    """Biases, and gates that gpt-oss clips, are the module's own."""
    import torch
    import transformers

    known = transformers.AutoConfig.for_model(
        "gpt_oss", **DECODER, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2
    )
    known._experts_implementation = "eager"
    experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssMLP(known).eval()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    data = np.random.default_rng(0).normal(size=(3, SEQ, 32)).astype(np.float32)

    graph = load(autopar.from_torch(experts, (torch.zeros(2, SEQ, 32),), tmp_path / "model.onnx"), batch=3)

    assert [op.kind for op in graph.ops if op.kind.startswith("autopar::")] == [
        "autopar::ExpertDispatch", "autopar::GroupedMatMul", "autopar::GroupedMatMul", "autopar::ExpertCombine"
    ]  # fmt: skip
    assert known._experts_implementation == "eager"
    with torch.no_grad():
        expected = experts(torch.tensor(data))[0].numpy()
    np.testing.assert_allclose(_run(graph, experts, data), expected, rtol=1e-3, atol=1e-5)


@needs_torch
@pytest.mark.slow
def test_modules_become_models(tmp_path: Path) -> None:
    """On the meta device, too large for any memory; the module is left as it was, and the file is small."""
    import torch

    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(1 << 20, 1 << 20), torch.nn.ReLU(), torch.nn.Linear(1 << 20, 8))

    path = autopar.from_torch(module, (torch.zeros(2, 1 << 20),), tmp_path / "model.onnx")

    graph = load(path, batch=8)
    assert graph.num_parameters == sum(parameter.numel() for parameter in module.parameters())
    assert path.stat().st_size < 10_000
    assert all(parameter.is_meta for parameter in module.parameters())


@needs_torch
@pytest.mark.slow
def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    """`requires_grad=False`, as LoRA has it, is kept, also for weights that the export transposes."""
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    module[0].requires_grad_(False)

    graph = load(autopar.from_torch(module, (torch.zeros(2, 3, 8),), tmp_path / "model.onnx"), batch=4)

    assert json.loads(graph.metadata["frozen"]) == ["0.weight.T", "0.bias"]
    assert graph.num_parameters == 8 * 8 + 8 + 8 * 4 + 4


@needs_torch
@pytest.mark.slow
def test_the_traced_batch_is_not_baked_in(tmp_path: Path) -> None:
    """The encoder turns (batch, time) round and merges and splits them: all shapes hold the samples."""
    import torch

    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    data = np.random.default_rng(0).normal(size=(5, 6, 16)).astype(np.float32)

    path = autopar.from_torch(encoder, (torch.zeros(2, 6, 16),), tmp_path / "model.onnx")

    assert open_workload(path).fixed_batch is None
    with torch.no_grad():
        expected = encoder(torch.tensor(data)).numpy()
    np.testing.assert_allclose(_run(load(path, batch=5), encoder, data), expected, rtol=1e-3, atol=1e-5)


@needs_torch
@pytest.mark.slow
def test_a_batch_that_is_baked_in_is_said(tmp_path: Path) -> None:
    """A module that computes with the number of samples works on that number only."""
    import torch

    class Mixes(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.mix(x.T).T

    with pytest.warns(
        UserWarning, match="Mixes is planned with microbatches of 2, the number of samples it was traced"
    ):
        autopar.from_torch(Mixes(), (torch.zeros(2, 8),), tmp_path / "model.onnx")


@needs_torch
@pytest.mark.slow
def test_the_short_cut_through_the_exporter_changes_nothing() -> None:
    """Two halves become one split, with the rule tried on slices only as with the rule tried everywhere."""
    import onnx
    import onnx_ir
    from onnxscript import optimizer

    text = """<ir_version: 10, opset_import: ["": 20]> halves (float[2, 8] x) => (float[2, 4] y)
    <int64[1] a = {0}, int64[1] b = {4}, int64[1] c = {8}, int64[1] d = {1}>
    { s = Relu(x) r = Slice(s, b, c, d) l = Slice(s, a, b, d) m = Sigmoid(r) y = Mul(l, m) }"""
    quick, slow = (onnx_ir.from_proto(onnx.parser.parse_model(text)) for _ in range(2))

    with torch_export._splits_tried_on_slices():
        optimizer.optimize_ir(quick)
    optimizer.optimize_ir(slow)

    assert [node.op_type for node in quick.graph] == ["Relu", "Split", "Sigmoid", "Mul"]
    assert onnx_ir.to_proto(quick) == onnx_ir.to_proto(slow)


@needs_torch
@pytest.mark.slow
def test_what_cannot_be_traced_gets_one_error(tmp_path: Path) -> None:
    """Control flow that depends on data."""
    import torch

    class Branch(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(ModelError, match="cannot export Branch"):
        autopar.from_torch(Branch(), (torch.zeros(2, 2),), tmp_path / "model.onnx")


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "helium"])
def test_a_configuration_is_planned_and_exported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`hf:` wherever a model is accepted; of a model that PyTorch exports, the second command finds the cached file."""
    source = f"hf:{written(name, tmp_path)}"
    cache = ["--cache-dir", str(tmp_path / "cache")]

    command = ["predict", source, "--dp", "2", "--global-batch", "4", "--set", "seq=8", "-o", str(tmp_path / "out")]
    assert main([*command, *cache]) == 0
    made = [file.stat().st_mtime_ns for file in tmp_path.glob("cache/huggingface/*")]
    for target in ("megatron", "pytorch"):
        assert main(["export", str(tmp_path / "out" / "plan.json"), "--to", target, *cache]) == 0
    assert [file.stat().st_mtime_ns for file in tmp_path.glob("cache/huggingface/*")] == made
    assert len(made) == (name == "helium")

    text = capsys.readouterr().out
    assert "--num-layers 3" in text
    assert "--seq-length 8" in text
    assert "'model.layers.0.self_attn.q_proj.weight': ((32, 32), (None,))" in text


@needs_torch
@pytest.mark.slow
def test_a_damaged_model_of_the_cache_is_made_again(tmp_path: Path) -> None:
    """And a cache that cannot be written to costs no more than the export next time."""
    source = written("helium", tmp_path)
    path = huggingface.build(source, {"seq": 8}, tmp_path / "cache")
    assert isinstance(path, Path)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    (tmp_path / "file").write_text("no folder")

    again = huggingface.build(source, {"seq": 8}, tmp_path / "cache")
    kept = huggingface.build(source, {"seq": 8}, tmp_path / "file")

    assert again == path
    assert path.read_bytes() == data
    assert not isinstance(kept, Path)


@needs_torch
@pytest.mark.slow
def test_the_same_model_is_the_same_file(tmp_path: Path) -> None:
    """An export is reproducible, so that a plan still fits its model when the cache was emptied, or without one."""
    first, second = (tmp_path / "1", tmp_path / "2")
    source = written("helium", tmp_path)

    files = [huggingface.build(source, {}, folder) for folder in (first, second)]
    kept = huggingface.build(source, {})

    assert isinstance(files[0], Path)
    assert isinstance(files[1], Path)
    assert not isinstance(kept, Path)
    assert files[0].read_bytes() == files[1].read_bytes() == kept.SerializeToString(deterministic=True)


def test_the_sequence_is_as_long_as_the_model_takes() -> None:
    """Up to 4096 tokens, unless it is set."""
    assert huggingface.default_seq({"model_type": "llama", "max_position_embeddings": 131072}) == 4096
    assert huggingface.default_seq({"model_type": "gpt2", "n_positions": 1024}) == 1024
    assert huggingface.default_seq({"model_type": "roberta", "max_position_embeddings": 514}) == 512


@pytest.mark.parametrize(
    "fields",
    [
        {"n_positions": [16]},
        {"n_positions": "many"},
        {"max_seq_len": True},
        {"text_config": {"max_position_embeddings": -4}},
    ],
)
def test_a_longest_sequence_that_is_no_number_is_named(fields: dict[str, Any]) -> None:
    """Found by the fuzzer: other sizes may be lists, this one not."""
    with pytest.raises(ModelError, match=r"(n_positions|max_seq_len|max_position_embeddings) of the configuration is "):
        huggingface.default_seq({"model_type": "gpt2", **fields})


@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("form", ["index_add", "put back", "all tokens"])
def test_loops_over_experts_are_exported_as_grouped_products(form: str, tmp_path: Path) -> None:
    """As mixtures are written by hand: rows picked out and added, or put back, or each expert on all tokens."""
    import torch
    from torch import nn

    class Expert(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((8, 12), (8, 12), (12, 8)))

        def forward(self, x: Any) -> Any:
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    class Loop(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(Expert() for _ in range(4))

        def forward(self, x_BSd: Any) -> Any:
            x = x_BSd.view(-1, 8)
            weight, chosen = torch.topk(self.router(x).softmax(-1), 2)
            weight, y = weight / weight.sum(-1, keepdim=True), torch.zeros_like(x)
            mask = nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
            for number, expert in enumerate(self.experts):
                if form == "index_add":
                    choice, token = torch.where(mask[number])
                    y.index_add_(0, token, expert(x[None, token].reshape(-1, 8)) * weight[token, choice, None])
                elif form == "put back":
                    token, choice = torch.where(chosen == number)
                    y[token] += weight[token, choice, None] * expert(x[token])
                else:
                    y = y + expert(x) * ((chosen == number) * weight).sum(-1, keepdim=True)
            return y.view(x_BSd.shape)

    module = Loop().double()
    data = np.random.default_rng(0).normal(size=(3, SEQ, 8))

    graph = load(autopar.from_torch(Loop(), (torch.zeros(2, SEQ, 8),), tmp_path / "model.onnx"), batch=3)

    assert Counter(op.kind for op in graph.ops if op.kind.startswith("autopar::")) == {
        "autopar::ExpertDispatch": 1, "autopar::GroupedMatMul": 3, "autopar::ExpertCombine": 1
    }  # fmt: skip
    weights = {name: array.detach().numpy() for name, array in module.state_dict().items()}
    feeds = {}
    for value in graph.parameters:
        name = value.name.removesuffix(".T")
        if name in weights:
            feeds[value.name] = weights[name].T if name != value.name else weights[name]
        else:
            which = name.removeprefix("experts.")
            feeds[value.name] = np.stack([weights[f"experts.{number}.{which}"].T for number in range(4)])
    found = run_graph(graph, feeds | {graph.inputs[0]: data})[graph.outputs[0]]
    np.testing.assert_allclose(found, module(torch.tensor(data)).detach().numpy(), rtol=1e-6, atol=1e-9)
