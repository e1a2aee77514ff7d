"""Hugging Face configurations that are built without PyTorch, held to transformers."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import huggingface, models
from autopar.cli import main
from autopar.errors import ModelError
from autopar.execute import run_graph
from autopar.models.architectures import READERS, missing_sizes
from autopar.models.decoder_config import (
    TRANSPOSED,
    Attention,
    Block,
    DecoderConfig,
    Experts,
    LatentAttention,
    Scan,
    SelectiveScan,
    StateSpace,
)
from autopar.models.decoder_settings import packed, predicting
from autopar.models.diffusion_reader import DIFFUSION
from autopar.models.dual_encoder_reader import DUAL_ENCODERS
from autopar.models.encoder_decoder_reader import ENCODER_DECODERS
from autopar.models.encoder_reader import ENCODERS
from autopar.models.image_text_reader import IMAGE_TEXT
from autopar.onnx import load
from autopar.training import training_step
from autopar.workload import open_workload
from tests.gradients import as_float64, feeds_of, gradients
from tests.parity import Pairs, check_pairs

Array = NDArray[Any]

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="needs torch and transformers",
)
SEQ, VOCAB, LAYERS = 12, 48, 2
_TINY = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 32,
}  # fmt: skip
_MOE = {**_TINY, "num_key_value_heads": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT = {
    **_TINY, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "q_lora_rank": 20, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
_SCAN = {key: value for key, value in _TINY.items() if key not in ("num_attention_heads", "intermediate_size")}
_NEMOTRON_H = {
    **_TINY, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 6, "chunk_size": 4, "mlp_hidden_act": "relu2", "num_experts_per_tok": 2,
}  # fmt: skip
_NEMOTRON_H.pop("num_hidden_layers")
_FALCON = {**_TINY, "hidden_size": 32, "ffn_hidden_size": 40}
TINY: dict[str, dict[str, Any]] = {
    "llama": {**_TINY, "num_key_value_heads": 2},
    "llama, biases, tied": {**_TINY, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama, scaled rotary": {**_TINY, "num_key_value_heads": 2, "rope_parameters": _LLAMA3},
    "llama, linear rotary": {
        **_TINY, "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    },
    "llama, yarn": {**_TINY, "rope_parameters": _YARN},
    "mistral": {**_TINY, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2": {**_TINY, "num_key_value_heads": 2},
    "qwen3": {**_TINY, "num_key_value_heads": 2, "head_dim": 16},
    "phi3": {**_TINY, "num_key_value_heads": 2},
    "phi3, long": {**_TINY, "rope_parameters": _LONG, "original_max_position_embeddings": 32},
    "olmo2": {**_TINY, "num_key_value_heads": 2},
    "nemotron": {**_TINY, "head_dim": 16, "num_key_value_heads": 2},
    "granite": {
        **_TINY, "num_key_value_heads": 2, "embedding_multiplier": 3.0, "logits_scaling": 5.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.25,
    },
    "starcoder2": {**_TINY, "num_key_value_heads": 2, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "mixtral": {**_TINY, "num_key_value_heads": 2, "num_local_experts": 4},
    "olmoe": {**_TINY, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_MOE, "num_experts": 6, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**_MOE, "num_experts": 6, "norm_topk_prob": True, "head_dim": 16},
    "qwen3_moe, some dense": {**_MOE, "num_experts": 6, "mlp_only_layers": [0]},
    "glm4_moe": {**_MOE, "n_routed_experts": 6, "use_qk_norm": True, "head_dim": 16, "routed_scaling_factor": 1.5},
    "deepseek_v2": {**_LATENT, "n_routed_experts": 6, "topk_method": "greedy", "routed_scaling_factor": 2.0},
    "deepseek_v2, groups": {
        **_LATENT, "n_routed_experts": 8, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "q_lora_rank": None,
    },
    "deepseek_v3": {**_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "deepseek_v3, scaled rotary": {
        **_LATENT, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "rope_interleave": False,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "gpt_oss": {**_MOE, "num_local_experts": 6, "sliding_window": 5, "swiglu_limit": 0.7, "head_dim": 16},
    "llama4_text": {
        **_MOE, "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16,
        "intermediate_size_mlp": 36, "attention_chunk_size": 5, "floor_scale": 4, "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1, 1],
    },
    "gemma": {**_TINY, "num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {
        **_TINY, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9,
    },
    "gemma3_text": {
        **_TINY, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "mistral, window": {**_TINY, "num_key_value_heads": 2, "sliding_window": 5},
    "mamba2": {**_SCAN, "num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 4},
    "mamba2, one group, biases": {
        **_SCAN, "num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 1, "use_bias": True, "chunk_size": 16,
        "time_step_limit": [0.3, 0.9], "tie_word_embeddings": True,
    },
    "nemotron_h": {
        **_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    },
    "nemotron_h, experts": {
        **_NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention"], "n_routed_experts": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 28, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.5,
    },
    "bamba": {
        **_TINY, "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 6,
        "mamba_n_groups": 2, "mamba_chunk_size": 4,
    },
    "mamba": {**_SCAN, "state_size": 6},
    "mamba, biases": {
        **_SCAN, "state_size": 6, "expand": 3, "time_step_rank": 5, "use_bias": True, "use_conv_bias": False,
        "tie_word_embeddings": False,
    },
    "falcon_mamba": {**_SCAN, "state_size": 6, "intermediate_size": 48, "tie_word_embeddings": False},
    "jamba": {
        **_TINY, "num_hidden_layers": 4, "num_key_value_heads": 2, "attn_layer_period": 4, "attn_layer_offset": 2,
        "num_experts": 4, "mamba_d_state": 6,
    },
    "jamba, dense, biases": {
        **_TINY, "num_key_value_heads": 2, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 0,
        "mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_proj_bias": True, "mamba_conv_bias": False,
    },
    "qwen3_next": {
        **_MOE, "num_experts": 6, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_value_head_dim": 6,
        "linear_key_head_dim": 4, "shared_expert_intermediate_size": 20, "norm_topk_prob": True,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4},
    "bloom, more heads than a power of 2": {"vocab_size": VOCAB, "hidden_size": 36, "n_layer": LAYERS, "n_head": 6},
    "mpt": {
        "vocab_size": VOCAB, "d_model": 36, "n_layers": LAYERS, "n_heads": 6, "max_seq_len": 64,
        "attn_config": {"softmax_scale": 0.2},
    },
    "gpt_neox": _TINY,
    "gpt_neox, one after the other": {**_TINY, "use_parallel_residual": False},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": SEQ},
    "gpt2, short": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 2 * SEQ},
    "opt": {**_TINY, "ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.0},
    "falcon": _FALCON,
    "falcon, grouped": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon, heads": {**_FALCON, "multi_query": False, "parallel_attn": False},
}  # fmt: skip
"""Small configurations, `model_type` first."""


def config_of(name: str) -> dict[str, Any]:
    """Return a small configuration."""
    return {"model_type": name.split(",")[0], **TINY[name]}


def part_of_weight(weight: Array, name: str, config: DecoderConfig) -> Array:
    """Return the rows of a fused weight [..., out, in] that a weight of ours stands for, `name` ending in its part."""
    part, block = name.rpartition(".")[2], block_of(name, config)
    attention, mlp = block.attention, block.mlp
    if isinstance(attention, Scan) and any(of in name for of in ("in_proj", "x_proj", "conv1d")):
        return part_of_scan(weight, name, attention)
    if isinstance(mlp, Experts) and mlp.interleaved:
        return weight[..., ["gate", "up"].index(part) :: 2]
    if isinstance(mlp, Experts) and not mlp.transposed and weight.ndim == 3:
        return np.split(weight, 2, axis=-1)[part == "up"]
    if part in ("gate", "up") and ("mlp" in name or "feed_forward" in name):
        return np.split(weight, 2, axis=weight.ndim - 2)[part == "up"]
    if isinstance(attention, LatentAttention):
        return part_of_latent(weight, part, attention)
    assert isinstance(attention, Attention)
    heads, kv_heads, size = attention.heads, attention.kv_heads, attention.size
    if attention.gated:
        return weight.reshape(heads, 2, size, -1)[:, ["q", "gate"].index(part)].reshape(heads * size, -1)
    index = "qkv".index(part)
    match attention.fused:
        case "blocks":
            ends = np.cumsum([heads * size, kv_heads * size, kv_heads * size])
            return np.split(weight, ends[:-1])[index]
        case "heads":
            rows = weight.reshape(heads, 3, size, *weight.shape[1:])[:, index]
        case "groups":
            grouped = weight.reshape(kv_heads, heads // kv_heads + 2, size, *weight.shape[1:])
            rows = grouped[:, :-2] if part == "q" else grouped[:, index - 3]
    return rows.reshape(-1, *weight.shape[1:])


def block_of(name: str, config: DecoderConfig) -> Block:
    """Return the block that a weight belongs to."""
    number = re.search(r"\.(\d+)\.", name)
    assert number, f"{name} is a weight of a block"
    return config.blocks[int(number.group(1))]


def part_of_scan(weight: Array, name: str, mixer: Scan) -> Array:
    """Return the rows of the projections or of the convolution of a scan that a weight of ours stands for."""
    part, rows = name.rpartition(".")[2], weight
    if isinstance(mixer, StateSpace):
        inner, shared = mixer.heads * mixer.size, mixer.groups * mixer.state
        sizes = {"gate": inner, "x": inner, "b": shared, "c": shared, "step": mixer.heads}
        if "conv1d" in name:
            sizes = {key: sizes[key] for key in "xbc"}
    elif isinstance(mixer, SelectiveScan):
        sizes = {"x": mixer.channels, "gate": mixer.channels}
        if "x_proj" in name:
            sizes = {"latent": mixer.rank, "b": mixer.state, "c": mixer.state}
    else:
        members = mixer.heads // mixer.key_heads
        sizes = {"q": mixer.key_size, "k": mixer.key_size, "v": members * mixer.size, "gate": members * mixer.size}
        if "in_proj_ba" in name:
            sizes = {"beta": members, "step": members}
        if "conv1d" in name:
            sizes = {key: mixer.key_heads * sizes[key] for key in "qkv"}
        else:  # key head by key head
            rows = np.moveaxis(weight.reshape(mixer.key_heads, -1, *weight.shape[1:]), 1, 0)
    first = sum(list(sizes.values())[: list(sizes).index(part)])
    found = rows[first : first + sizes[part]]
    if rows is weight:
        return found
    return np.moveaxis(found, 0, 1).reshape(-1, *weight.shape[1:])


def part_of_latent(weight: Array, part: str, attention: LatentAttention) -> Array:
    """Return the rows of a matrix of latent attention that a weight of ours stands for."""
    turned = attention.rope.size
    if part == "latent" or (part == "rope" and weight.shape[0] == attention.latent_rank + turned):
        return np.split(weight, [attention.latent_rank])[part == "rope"]
    first = attention.plain
    of_heads = weight.reshape(attention.heads, -1, *weight.shape[1:])
    rows = of_heads[:, :first] if part in ("plain", "k") else of_heads[:, first:]
    return rows.reshape(-1, *weight.shape[1:])


def weight_of(tensors: dict[str, Array], name: str, config: DecoderConfig) -> Array:
    """Return what a weight of ours is in the tensors of a checkpoint, or of its gradients."""
    own = name.removesuffix(TRANSPOSED)
    if own in tensors:
        weight = tensors[own]
    else:  # gpt2 keeps its matrices [in, out], so that parts are columns
        whole = tensors[own.rpartition(".")[0]]
        attention = config.blocks[0].attention
        turned = isinstance(attention, Attention) and not attention.transposed and whole.ndim == 2
        weight = part_of_weight(whole.T if turned else whole, own, config)
        weight = weight.T if turned else weight
    return np.swapaxes(weight, -1, -2) if name.endswith(TRANSPOSED) else weight


def against_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """Return logits, and gradients by parameter, of a tiny model: ours and those of transformers, in float64.

    What transformers computes in float32 whatever the weights are (norms, scans) is computed in float64, too.
    """
    import torch
    import transformers

    config = config_of(name)
    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(**config)
    known._attn_implementation, known._experts_implementation = "eager", "eager"
    module = transformers.AutoModelForCausalLM.from_config(known, attn_implementation="eager").double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    native = models.read_architecture(config, SEQ)
    assert isinstance(native, DecoderConfig)
    model = models.build_config("decoder", native)
    assert models.num_parameters(model) == module.num_parameters()
    tables = {key: value.astype(np.float64) for key, value in models.initial_values(model).items()}

    step = training_step(as_float64(load(model, batch=2)), loss="cross-entropy", optimizer="sgd")
    weights = {key: tensor.detach().numpy() for key, tensor in module.state_dict().items()}
    trained = [value.name for value in step.parameters]
    given = {**tables, **{key: weight_of(weights, key, native) for key in trained}}
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ))
    labels = np.random.default_rng(1).integers(0, VOCAB, (2, SEQ))
    feeds = feeds_of(step, {**given, "input_ids": tokens, "labels": labels})
    found = gradients(step, feeds)
    logits = run_graph(as_float64(load(model, batch=2)), {**given, "input_ids": tokens})["logits"]

    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    expected = module(input_ids=torch.tensor(tokens)).logits
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), torch.tensor(labels.ravel())).backward()
    theirs = {key: value.grad.numpy() for key, value in module.named_parameters() if value.grad is not None}
    assert set(found) == set(trained)
    pairs = {key: (found[key], weight_of(theirs, key, native)) for key in trained}
    return (logits, expected.detach().numpy()), pairs


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_models_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal parameters; with equal weights, equal logits and gradients."""
    check_pairs(*against_transformers(name, monkeypatch))


@needs_transformers
@pytest.mark.slow
def test_further_tokens_are_predicted_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two modules, of equations 21 to 23 of DeepSeek-V3's report, around blocks of transformers, which has none.

    In float64: equal logits, and equal gradients of every weight, those that the modules share with the decoder too.
    """
    import torch
    from torch import nn
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    depth, config = 2, config_of("deepseek_v3")
    known = deepseek.DeepseekV3Config(**{key: value for key, value in config.items() if key != "model_type"})
    known._attn_implementation, known._experts_implementation = "eager", "eager"

    class Module(deepseek.DeepseekV3DecoderLayer):  # type: ignore[misc]
        """One module, called as in the released checkpoint."""

        def __init__(self, index: int) -> None:
            super().__init__(known, index)
            self.enorm, self.hnorm = (deepseek.DeepseekV3RMSNorm(32, known.rms_norm_eps) for _ in range(2))
            self.eh_proj = nn.Linear(64, 32, bias=False)
            self.shared_head = nn.ModuleDict({"norm": deepseek.DeepseekV3RMSNorm(32, known.rms_norm_eps)})

    module = deepseek.DeepseekV3ForCausalLM(known)
    further = [Module(LAYERS + number) for number in range(depth)]
    module.model.layers.extend(further)
    module = module.double().eval()
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    native = models.read_architecture(config, SEQ)
    assert isinstance(native, DecoderConfig)
    native = predicting(native, depth)
    model = models.build_config("decoder", native)
    assert models.num_parameters(model) == sum(parameter.numel() for parameter in module.parameters())
    weights = {key: tensor.detach().numpy() for key, tensor in module.state_dict().items()}
    whole = replace(native, blocks=native.blocks + (native.blocks[-1],) * depth)  # modules are blocks by their names
    step = training_step(as_float64(load(model, batch=2)), loss="cross-entropy", optimizer="sgd")
    trained = [value.name for value in step.parameters]
    tables = {key: value.astype(np.float64) for key, value in models.initial_values(model).items()}
    given = {**tables, **{key: weight_of(weights, key, whole) for key in trained}}
    stream = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ + depth + 1))
    shifted = [stream[:, first : first + SEQ] for first in range(depth + 2)]
    inputs = {"input_ids": shifted[0], "input_ids_1": shifted[1], "input_ids_2": shifted[2]}
    labels = np.stack(shifted[1:], axis=1)

    found = gradients(step, feeds_of(step, {**given, **inputs, "labels": labels}))
    logits = run_graph(as_float64(load(model, batch=2)), {**given, **inputs})["logits"]

    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    module.model.config.num_hidden_layers = LAYERS
    tokens = [torch.tensor(part) for part in shifted]
    x = module.model(input_ids=tokens[0]).last_hidden_state
    hidden = torch.full((SEQ, SEQ), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    turned = module.model.rotary_emb(x, torch.arange(SEQ)[None])
    outputs = [module.lm_head(x)]
    for number, own in enumerate(further, 1):
        embedded = module.model.embed_tokens(tokens[number])
        joined = own.eh_proj(torch.cat([own.enorm(embedded), own.hnorm(x)], dim=-1))
        x = own.shared_head["norm"](own(joined, attention_mask=hidden, position_embeddings=turned))
        outputs.append(module.lm_head(x))
    expected = torch.stack(outputs, dim=1)
    torch.nn.functional.cross_entropy(expected.flatten(0, 2), torch.tensor(labels.ravel())).backward()
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-6, atol=1e-6)
    theirs = {key: value.grad.numpy() for key, value in module.named_parameters() if value.grad is not None}
    assert set(found) == set(trained)
    for key in trained:
        np.testing.assert_allclose(found[key], weight_of(theirs, key, whole), rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(
    ("name", "published", "table"),
    [
        ("deepseek-v3", 684_489_845_504 - 59 * 256, 129280 * 7168),
        pytest.param("glm-4.5", 358_337_791_296 - 90 * 160, 151552 * 5120, marks=pytest.mark.slow),
    ],
)
def test_modules_of_multi_token_prediction_have_the_published_parameters(name: str, published: int, table: int) -> None:
    """Checkpoints hold embedding and head twice, and biases of the choice of experts, which are not trained."""
    model = models.build(name, mtp=1)

    assert models.num_parameters(model) + 2 * table == published
    assert model.graph.name == name


def test_documents_cannot_be_packed_where_scores_fall_with_distance() -> None:
    """Slopes know one document per sequence."""
    native = models.read_architecture(config_of("bloom"), SEQ)
    assert isinstance(native, DecoderConfig)

    with pytest.raises(ModelError, match="2 documents per sequence are not known to attention whose scores fall"):
        packed(native, 2)


def test_only_whole_blocks_predict_further_tokens() -> None:
    """A block that is a scan alone is no module."""
    native = models.read_architecture(config_of("mamba2"), SEQ)
    assert isinstance(native, DecoderConfig)

    assert predicting(native, 0) == native
    with pytest.raises(ModelError, match="which of them predicts further tokens is not known"):
        predicting(native, 1)


def grok_against_reference() -> Pairs:
    """Return results, and gradients by parameter, ours and those of a block, embedding and head of PyTorch.

    They are written down from `model.py` of xai-org/grok-1: transformers has none.
    """
    import torch

    config = {
        **_TINY, "model_type": "grok-1", "num_key_value_heads": 2, "num_experts": 4, "num_hidden_layers": 1,
        "attn_output_multiplier": 0.3, "max_attn_value": 0.7, "embedding_multiplier_scale": 3.0,
        "output_multiplier_scale": 0.5,
    }  # fmt: skip
    native = models.read_architecture(config, SEQ)
    assert isinstance(native, DecoderConfig)
    model = models.build_config("decoder", native)
    rng = np.random.default_rng(0)
    step = training_step(as_float64(load(model, batch=2)), loss="cross-entropy", optimizer="sgd")
    own = {value.name: rng.normal(0, 0.3, value.shape) for value in step.parameters}
    tables = {key: value.astype(np.float64) for key, value in models.initial_values(model).items()}
    tokens, labels = (rng.integers(0, VOCAB, (2, SEQ)) for _ in range(2))

    feeds = feeds_of(step, {**tables, **own, "input_ids": tokens, "labels": labels})
    found = gradients(step, feeds)
    logits = run_graph(as_float64(load(model, batch=2)), {**tables, **own, "input_ids": tokens})["logits"]

    given = {key: torch.tensor(value, requires_grad=True) for key, value in own.items()}
    of = {key.removeprefix("model.layers.0."): value for key, value in given.items()}

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * of[f"{name}.weight"]

    def heads(x: Any, name: str) -> Any:
        return (x @ of[f"attn.{name}_proj.weight.T"]).unflatten(-1, (-1, 8)).transpose(1, 2)

    def turned(x: Any) -> Any:
        cos, sin = (torch.tensor(tables[f"rope.{part}"]).repeat(1, 1, 2) for part in ("cos", "sin"))
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], dim=-1) * sin

    x = given["model.embed_tokens.weight"][torch.tensor(tokens)] * 3.0
    normed = norm(x, "pre_attn_norm")
    q, k, v = turned(heads(normed, "q")), turned(heads(normed, "k")), heads(normed, "v")
    scores = 0.3 * q @ k.repeat_interleave(2, 1).transpose(2, 3)
    scores = 0.7 * torch.tanh(scores / 0.7) + torch.full((SEQ, SEQ), float("-inf"), dtype=torch.float64).triu(1)
    y = (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2) @ of["attn.o_proj.weight.T"]
    x = x + norm(y, "post_attn_norm")
    normed = norm(x, "pre_moe_norm")
    weight, expert = (normed @ of["moe_block.gate.weight.T"]).softmax(-1).topk(2)
    gate, up, down = (of[f"moe_block.experts.{part}.T"] for part in ("gate_up.gate", "gate_up.up", "linear_1"))
    inner = torch.nn.functional.gelu(normed @ gate[:, None], approximate="tanh") * (normed @ up[:, None])
    made = (inner @ down[:, None]).permute(1, 2, 0, 3)  # every expert on every token
    chosen = made.gather(2, expert[..., None].expand(-1, -1, -1, 32))
    x = x + norm((weight[..., None] * chosen).sum(2), "post_moe_norm")
    last = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * given["model.norm.weight"]
    expected = 0.5 * last @ given["model.embed_tokens.weight"].T
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), torch.tensor(labels.ravel())).backward()
    assert set(found) == set(given)
    pairs = {}
    for key, value in given.items():
        assert value.grad is not None
        pairs[key] = found[key], value.grad.numpy()
    return (logits, expected.detach().numpy()), pairs


@needs_transformers
@pytest.mark.slow
def test_grok_is_the_released_one() -> None:
    """With equal weights, equal results and gradients."""
    check_pairs(*grok_against_reference())


def test_every_family_has_a_small_configuration() -> None:
    """So that none is left out above."""
    decoders = set(READERS) - {*ENCODERS, *ENCODER_DECODERS, *DUAL_ENCODERS, *IMAGE_TEXT, *DIFFUSION}
    assert {name.split(",")[0] for name in TINY} == decoders - {"kimi_k2", "grok-1"}  # DeepSeek-V3's; tested alone
    assert READERS["kimi_k2"] is READERS["deepseek_v3"]


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B": (
        8_030_261_248,
        {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
    ),
    "meta-llama/Llama-3.1-405B": (
        405_853_388_800,
        {
            "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
            "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
        },
    ),
    "mistralai/Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
        },
    ),
    "Qwen/Qwen2.5-7B": (
        7_615_616_512,
        {
            "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "sliding_window": 131072,
            "use_sliding_window": False,
        },
    ),
    "Qwen/Qwen3-32B": (
        32_762_123_264,
        {
            "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        },
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        3_821_079_552,
        {
            "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 2047,
        },
    ),
    "tiiuae/falcon-7b": (
        6_921_720_704,
        {
            "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
            "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "vocab_size": 65024,
        },
    ),
    "EleutherAI/gpt-neox-20b": (
        20_554_567_680,
        {
            "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
            "num_attention_heads": 64, "rotary_pct": 0.25, "rotary_emb_base": 10000, "vocab_size": 50432,
        },
    ),
    "bigcode/starcoder2-15b": (
        15_957_889_024,
        {
            "model_type": "starcoder2", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 40,
            "num_attention_heads": 48, "num_key_value_heads": 4, "vocab_size": 49152, "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
    ),
    "bigscience/bloom": (
        176_247_271_424,
        {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880},
    ),
    "mosaicml/mpt-7b": (
        6_649_286_656,
        {
            "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4,
            "max_seq_len": 2048, "vocab_size": 50432, "no_bias": True, "logit_scale": None,
            "attn_config": {
                "alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention", "clip_qkv": None,
                "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
            },
        },
    ),
    "openai-community/gpt2": (124_439_808, {"model_type": "gpt2"}),
    "facebook/opt-6.7b": (
        6_658_473_984,
        {
            "model_type": "opt", "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32,
            "num_attention_heads": 32, "word_embed_proj_dim": 4096,
        },
    ),
    "google/gemma-7b": (
        8_537_680_896,
        {
            "model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_size": 3072,
            "intermediate_size": 24576, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 16,
            "vocab_size": 256000,
        },
    ),
    "ibm-granite/granite-3.0-8b-instruct": (
        8_170_848_256,
        {
            "model_type": "granite", "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
            "hidden_size": 4096, "intermediate_size": 12800, "logits_scaling": 16.0, "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22,
            "tie_word_embeddings": True, "vocab_size": 49155,
        },
    ),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": (
        140_630_071_296,
        {
            "model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48,
            "num_experts_per_tok": 2, "num_hidden_layers": 56, "num_key_value_heads": 8, "num_local_experts": 8,
            "vocab_size": 32768,
        },
    ),
    "allenai/OLMo-2-0325-32B": (
        32_234_279_936,
        {
            "model_type": "olmo2", "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "vocab_size": 100352,
        },
    ),
    "allenai/OLMoE-1B-7B-0924": (
        6_919_161_856,
        {
            "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
            "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "vocab_size": 50304,
        },
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        {
            "model_type": "qwen2_moe", "hidden_size": 2048, "moe_intermediate_size": 1408, "num_attention_heads": 16,
            "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632, "vocab_size": 151936,
        },
    ),
}  # fmt: skip
"""Parameters of published checkpoints, a tied embedding counted once, and the sizes in their configurations."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_have_the_published_parameters(name: str) -> None:
    """Without PyTorch."""
    count, config = PUBLISHED[name]

    native = models.read_architecture(config, 1024)

    assert isinstance(native, DecoderConfig)
    assert models.num_parameters(models.build_config("decoder", native)) == count


LLAMA = {"model_type": "llama", **_TINY}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "unheard-of"}, "model_type='unheard-of'; known are"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type='spiral'"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"model_type": "deepseek_v2", "topk_method": "best"}, "topk_method='best'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"model_type": "mpt", "attn_config": {"clip_qkv": 6}}, "clip_qkv=6"),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "post_layernorm=True"),
        ({"model_type": "mamba", "rms_norm": False}, "rms_norm=False"),
        ({"model_type": "jamba", "num_key_value_heads": 2, "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "jamba", "mlp_bias": True}, "mlp_bias=True"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention=True"),
    ],
)
def test_what_a_builder_does_not_know_is_said(change: dict[str, Any], reason: str) -> None:
    """Nothing that changes the model is dropped silently."""
    native = models.read_architecture({**LLAMA, **change}, SEQ)

    assert isinstance(native, models.Unbuilt)
    assert reason in native.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size of the configuration is 'wide'"),
        ({"num_hidden_layers": -2}, "num_hidden_layers of the configuration is -2"),
        ({"num_attention_heads": 5}, "hidden_size 32 of the configuration is not divisible by its 5 heads"),
        ({"num_key_value_heads": 3}, "4 query heads are not divisible by 3"),
        ({"head_dim": 7}, "7 of the 7 elements of a head cannot be rotated in pairs"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps of the configuration is nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings of the configuration is 'no'"),
        ({"rope_scaling": 3}, "rope_scaling of the configuration is 3, not a table"),
        (
            {"model_type": "jamba", "num_key_value_heads": 2, "attn_layer_offset": 8},
            "attn_layer_offset of the configuration is 8, not a layer of",
        ),
        (
            {"model_type": "jamba", "num_key_value_heads": 2, "expert_layer_offset": "1"},
            "expert_layer_offset of the configuration is '1', not a",
        ),
        ({"model_type": "mamba", "time_step_rank": 0}, "time_step_rank of the configuration is 0"),
        ({"model_type": "gpt2", "n_positions": 8}, "learned positions for 8 tokens, fewer than the 12"),
    ],
)
def test_an_impossible_configuration_gets_one_error(change: dict[str, Any], message: str) -> None:
    """It names the field."""
    with pytest.raises(ModelError, match=re.escape(message)):
        models.read_architecture({**LLAMA, **change}, SEQ)


def test_a_configuration_opens_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a `config.json` is a model wherever one is accepted."""
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    graph = open_workload(f"hf:{tmp_path}", dims={"seq": SEQ}).forward(4)

    assert graph.values[graph.outputs[0]].shape == (4, SEQ, VOCAB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, r"type llama does not state hidden_size \(by default 4096\)"),
        (
            {"model_type": "gpt2"},
            r"type gpt2 does not state n_embd \(by default 768\), n_layer \(by default 12\), n_head \(by default 12\)$",
        ),
        ({"model_type": "unheard-of"}, "no builder for model_type='unheard-of'; known are .*qwen3_moe.*needs torch"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "no builder for rope_type='spiral'; exporting it needs torch"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of the configuration, of type 'linear', has no fac"),
        ({"attention_bias": "yes"}, "attention_bias of the configuration is 'yes', neither true nor false"),
        (
            {"model_type": "phi3", "attention_bias": True},
            "no builder for attention_bias=True; exporting it needs torch",
        ),
        ({"layer_types": ["full_attention", "rwkv"]}, "no builder for layer_types with 'rwkv'; exporting it needs"),
        (
            {"model_type": "gpt_neox", "layer_types": ["full_attention", "sliding_attention"]},
            r"no builder for layer_types=\['full_attention', 'sliding_attention'\]; exporting it needs torch",
        ),
        (
            {"model_type": "jamba", "layers_block_type": ["mamba", "rwkv"], "num_key_value_heads": 2},
            r"no builder for layers_block_type=\['mamba', 'rwkv'\]; exporting it needs torch",
        ),
        (
            {"model_type": "mistral", "num_key_value_heads": 2, "mlp_bias": True},
            "no builder for mlp_bias=True; exporting",
        ),
        (
            {"model_type": "nemotron_h", "num_key_value_heads": 2, "hybrid_override_pattern": "MX"},
            "no builder for layers_block_type with 'X'",
        ),
    ],
)
def test_a_wrong_file_gets_one_error(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the field or its value; without PyTorch also what could export the model."""
    monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))

    with pytest.raises(ModelError) as error:
        huggingface.build(tmp_path, {"seq": SEQ})

    assert re.search(message, error.value.args[0])
    assert error.value.hint


@needs_transformers
def test_a_failed_export_says_why_there_is_no_builder(tmp_path: Path) -> None:
    """The field, beside what transformers makes of it."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "rope_scaling": {"rope_type": "spiral"}}))

    with pytest.raises(ModelError, match=r"no builder for rope_type='spiral', and transformers .* cannot make a model"):
        huggingface.build(tmp_path, {"seq": SEQ})


def test_published_configurations_state_their_sizes() -> None:
    """Whatever else is left to defaults."""
    for name, (_, config) in PUBLISHED.items():
        if name != "openai-community/gpt2":
            assert set(missing_sizes(config, SEQ)) <= {"intermediate_size", "vocab_size"}, name


def test_the_graph_of_a_configuration_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the model that `hf:` opens, experts and all."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3_moe")))

    code = main(["model", "--from", str(tmp_path), "--set", f"seq={SEQ}", "-o", str(tmp_path / "model.onnx")])

    assert code == 0, capsys.readouterr().err
    written = open_workload(str(tmp_path / "model.onnx")).forward(4)
    opened = open_workload(f"hf:{tmp_path}", dims={"seq": SEQ}).forward(4)
    assert [op.kind for op in written.ops] == [op.kind for op in opened.ops]
    assert written.num_parameters == opened.num_parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "a token cannot choose 9 of 6 experts"),
        ({"num_experts": "many"}, "num_experts of the configuration is 'many'"),
        ({"mlp_only_layers": 3}, "mlp_only_layers of the configuration is 3, not a list"),
        ({"layer_types": ["full_attention"]}, "not a list of 2 kinds"),
        ({"vocab_size": 10**30}, "vocab_size of the configuration is 1000000000000000000000000000000, more than"),
        ({"head_dim": 10**9}, "elements of a head of 1000000000 are rotated"),
        ({"rms_norm_eps": 1e300}, "which a float32 does not hold"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}},
            "full_attention of the configuration",
        ),
        (
            {
                "model_type": "deepseek_v2",
                "topk_method": "group_limited_greedy",
                "n_group": [],
                "norm_topk_prob": False,
            },
            "n_group of the configuration is [],",
        ),
        (
            {"model_type": "deepseek_v3", "qk_rope_head_dim": 3, "num_key_value_heads": 4},
            "3 elements of a key cannot be rotated in pairs",
        ),
    ],
)
def test_an_impossible_mixture_gets_one_error(change: dict[str, Any], message: str) -> None:
    """It names the field."""
    with pytest.raises(ModelError, match=re.escape(message)):
        models.read_architecture({**config_of("qwen3_moe"), **change}, SEQ)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma2"])
def test_documents_of_a_sequence_do_not_see_each_other(name: str) -> None:
    """Packed into one sequence they give what each gives alone."""
    config = config_of(name)
    alone = models.read_architecture(config, SEQ // 2)
    whole = models.read_architecture(config, SEQ)
    assert isinstance(alone, DecoderConfig)
    assert isinstance(whole, DecoderConfig)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ))

    def logits(own: DecoderConfig, given: Array) -> Array:
        model = models.build_config("decoder", own)
        weights = {key: value.astype(np.float64) for key, value in models.initial_values(model).items()}
        found = run_graph(as_float64(load(model, batch=len(given))), {**weights, "input_ids": given})
        return found["logits"]

    one = logits(packed(whole, 2), tokens).reshape(4, SEQ // 2, VOCAB)
    each = logits(alone, tokens.reshape(4, SEQ // 2))

    np.testing.assert_allclose(one, each, rtol=1e-5, atol=1e-5)  # rotary tables are float32
    assert not np.allclose(logits(whole, tokens).reshape(each.shape), each)


def test_documents_cannot_be_packed_into_an_export(tmp_path: Path) -> None:
    """Its attention is fixed."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "unheard-of"}))
    with pytest.raises(ModelError, match="docs_per_sequence cannot be set on a model that PyTorch exports"):
        open_workload(f"hf:{tmp_path}", dims={"seq": SEQ, "docs_per_sequence": 2}).forward(4)
