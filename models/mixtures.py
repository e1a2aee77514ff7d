"""Hugging Face configurations of mixtures of experts, one reader per family (`architectures`)."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.errors import ModelError
from autopar.limits import MAX_LAYERS
from autopar.models.config_fields import Fields, UnknownError, activation, layer_kinds, rope
from autopar.models.decoder_config import (
    Attention,
    Block,
    DecoderConfig,
    Experts,
    LatentAttention,
    Mlp,
    Names,
    Norm,
    uniform,
)
from autopar.models.llama_reader import LLAMA, llama
from autopar.models.rotary import yarn_amplitude

QWEN_SHARED = (
    "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.shared_expert", "mlp.shared_expert_gate"
)  # fmt: skip


def _with_experts(config: DecoderConfig, experts: Experts, dense: frozenset[int] = frozenset()) -> DecoderConfig:
    """Return a decoder with experts in place of the MLPs, but for those of some blocks."""
    blocks = (block if index in dense else Block(block.attention, experts) for index, block in enumerate(config.blocks))
    return replace(config, blocks=tuple(blocks))


def _mixtral(fields: Fields, seq: int) -> DecoderConfig:
    config = llama(
        fields, seq, kv_heads=8, epsilon=1e-5, qkv_bias=False, window=lambda index: True, width=14336, theta=1e6
    )
    experts = Experts(
        fields.size("num_local_experts", "num_experts", default=8), fields.size("num_experts_per_tok", default=2),
        fields.size("intermediate_size", default=14336), activation(fields, "hidden_act", default="silu"),
    )  # fmt: skip
    return _with_experts(config, experts)


def _olmoe(fields: Fields, seq: int) -> DecoderConfig:
    config = llama(fields, seq, epsilon=1e-5, qk_norm="width", width=2048)
    experts = Experts(
        fields.size("num_experts", "num_local_experts", default=64), fields.size("num_experts_per_tok", default=8),
        fields.size("intermediate_size", default=2048), activation(fields, "hidden_act", default="silu"),
        normalized=fields.flag("norm_topk_prob", False),
    )  # fmt: skip
    return _with_experts(config, experts)


def _dense_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Return the blocks of a Qwen mixture that have an MLP: those named, and those between every so many."""
    step, named = fields.size("decoder_sparse_step", default=1), fields.get("mlp_only_layers", default=[])
    if not isinstance(named, list):
        raise ModelError(
            f"mlp_only_layers of the configuration is {named!r}, not a list of layers", hint="correct the config.json"
        )
    return frozenset(index for index in range(num_layers) if index in named or (index + 1) % step)


def qwen_moe(config: DecoderConfig, fields: Fields, **parts: object) -> DecoderConfig:
    """Return a dense Qwen with experts; `parts` are fields of `Experts` that differ between its generations."""
    experts = Experts(
        fields.size("num_experts", "num_local_experts", default=parts.pop("count")),  # type: ignore[arg-type]
        fields.size("num_experts_per_tok", default=parts.pop("top_k")),  # type: ignore[arg-type]
        fields.size("moe_intermediate_size", default=parts.pop("width")),  # type: ignore[arg-type]
        activation(fields, "hidden_act", default="silu"),
        normalized=fields.flag("norm_topk_prob", False),
        **parts,  # type: ignore[arg-type]
    )
    return _with_experts(config, experts, _dense_layers(fields, config.num_layers))


def _qwen2_moe(fields: Fields, seq: int) -> DecoderConfig:
    used, last = fields.flag("use_sliding_window", False), fields.get("max_window_layers", default=28)
    config = llama(
        fields, seq, qkv_bias=fields.flag("qkv_bias", True), width=5632,
        window=lambda index: used and index % 2 == 0 and index < last,
    )  # fmt: skip
    shared = fields.size("shared_expert_intermediate_size", default=5632)
    return qwen_moe(config, fields, count=60, top_k=4, width=1408, shared=shared, shared_gate=True, names=QWEN_SHARED)


def _qwen3_moe(fields: Fields, seq: int) -> DecoderConfig:
    if fields.flag("use_sliding_window", False):
        raise UnknownError("use_sliding_window=True")
    config = llama(fields, seq, kv_heads=4, qk_norm="head", width=6144)
    return qwen_moe(config, fields, count=128, top_k=8, width=768)


def _glm4_moe(fields: Fields, seq: int) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    norm = "head" if fields.flag("use_qk_norm", False) else ""
    config = llama(
        fields, seq, kv_heads=8, epsilon=1e-5, qkv_bias=bias, qk_norm=norm, rotated=0.5, width=10944,
    )  # fmt: skip
    experts = sigmoid_experts(fields, count=128, width=1408, scale=1.0, groups=1, chosen=1)
    return _with_experts(config, experts, frozenset(range(_dense_first(fields, 1))))


def _dense_first(fields: Fields, default: int) -> int:
    """Return the number of blocks before the first with experts."""
    value = fields.get("first_k_dense_replace", default=default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(
            f"first_k_dense_replace of the configuration is {value!r}, not a number of layers",
            hint="correct the config.json",
        )
    return min(value, MAX_LAYERS)


def sigmoid_experts(
    fields: Fields,
    *,
    count: int,
    width: int,
    scale: float,
    groups: int,
    chosen: int,
    top_k: int = 8,
    act: str = "hidden_act",
    nonlinearity: str = "silu",
) -> Experts:
    """Return experts that are chosen by corrected sigmoid scores within the best groups (DeepSeek-V3, section 2.1.2).

    Arguments are defaults of the fields; `act` is the one that states the nonlinearity.
    """
    for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.get(name, default=known) != known:
            raise UnknownError(f"{name}={fields.get(name)!r}")
    if fields.get("moe_layer_freq", default=1) != 1:
        raise UnknownError(f"moe_layer_freq={fields.get('moe_layer_freq')!r}")
    inside = fields.size("moe_intermediate_size", default=width)
    return Experts(
        fields.size("n_routed_experts", "num_local_experts", default=count),
        fields.size("num_experts_per_tok", default=top_k), inside, activation(fields, act, default=nonlinearity),
        scores="sigmoid", normalized=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", default=scale), correction=True,
        groups=fields.size("n_group", default=groups), chosen_groups=fields.size("topk_group", default=chosen),
        group_by="two", shared=_shared(fields, 1) * inside,
    )  # fmt: skip


def _shared(fields: Fields, default: int) -> int:
    """Return the number of experts that every token uses; null and 0 are none."""
    if "n_shared_experts" in fields.values and not fields.get("n_shared_experts"):
        return 0
    return fields.size("n_shared_experts", default=default)


def _deepseek(
    fields: Fields, seq: int, experts: Experts, *, sizes: tuple[int, int, int, int], dense: int, interleaved: bool
) -> DecoderConfig:
    """Return a decoder with latent attention.

    Args:
        fields: The configuration.
        seq: Tokens per sequence.
        experts: Experts of all blocks but the first `dense`.
        sizes: Defaults of the width, the width of an MLP, the blocks and the heads.
        dense: Default of the number of blocks with an MLP.
        interleaved: Whether neighbours are rotated as pairs.
    """
    hidden, inner, num_layers, num_heads = sizes
    heads = fields.size("num_attention_heads", default=num_heads)
    if fields.size("num_key_value_heads", default=heads) != heads:
        raise UnknownError("num_key_value_heads unlike num_attention_heads, of latent attention")
    fields.get("head_dim")
    plain, turned = fields.size("qk_nope_head_dim", default=128), fields.size("qk_rope_head_dim", default=64)
    direct = "q_lora_rank" in fields.values and fields.get("q_lora_rank") is None
    scaling = {**fields.table("rope_scaling"), **fields.table("rope_parameters")}
    amplitude = 1.0
    if scaling.get("type", scaling.get("rope_type", "default")) != "default" and scaling.get("mscale_all_dim"):
        part = Fields(scaling)
        amplitude = yarn_amplitude(part.number("factor", default=1.0), part.number("mscale_all_dim", default=1.0))
    attention = LatentAttention(
        heads, 0 if direct else fields.size("q_lora_rank", default=1536), fields.size("kv_lora_rank", default=512),
        plain, rope(fields, turned, seq), fields.size("v_head_dim", default=128),
        scale=amplitude**2 * (plain + turned) ** -0.5, bias=fields.flag("attention_bias", False),
        interleaved=interleaved,
    )  # fmt: skip
    mlp = Mlp(
        fields.size("intermediate_size", default=inner), activation(fields, "hidden_act", default="silu"),
        bias=fields.flag("mlp_bias", False),
    )  # fmt: skip
    config = uniform(
        fields.size("num_hidden_layers", default=num_layers), attention, mlp,
        hidden=fields.size("hidden_size", default=hidden), seq=seq, vocab=fields.size("vocab_size", default=102400),
        norm=Norm("rms", fields.number("rms_norm_eps", default=1e-6)), arrangement="pre", names=LLAMA,
        tied=fields.flag("tie_word_embeddings", False),
    )  # fmt: skip
    return _with_experts(config, experts, frozenset(range(_dense_first(fields, dense))))


def _deepseek_v2(fields: Fields, seq: int) -> DecoderConfig:
    method = fields.get("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnknownError(f"topk_method={method!r}")
    if fields.get("scoring_func", default="softmax") != "softmax" or fields.flag("norm_topk_prob", False):
        raise UnknownError("norm_topk_prob or scoring_func unlike DeepSeek-V2's")
    limited = method == "group_limited_greedy"
    width = fields.size("moe_intermediate_size", default=1407)
    groups, chosen = fields.size("n_group", default=1), fields.size("topk_group", default=1)
    experts = Experts(
        fields.size("n_routed_experts", default=64), fields.size("num_experts_per_tok", default=6), width,
        activation(fields, "hidden_act", default="silu"), normalized=False,
        scale=fields.number("routed_scaling_factor", default=1.0), groups=groups if limited else 1,
        chosen_groups=chosen if limited else 1, shared=_shared(fields, 2) * width,
    )  # fmt: skip
    return _deepseek(fields, seq, experts, sizes=(4096, 11008, 32, 32), dense=0, interleaved=True)


def _deepseek_v3(fields: Fields, seq: int) -> DecoderConfig:
    experts = sigmoid_experts(fields, count=256, width=2048, scale=2.5, groups=8, chosen=4)
    interleaved = fields.flag("rope_interleave", True)
    return _deepseek(fields, seq, experts, sizes=(7168, 18432, 61, 128), dense=3, interleaved=interleaved)


def _gpt_oss(fields: Fields, seq: int) -> DecoderConfig:
    if fields.number("swiglu_alpha", default=1.702) != 1.702:
        raise UnknownError(f"swiglu_alpha={fields.get('swiglu_alpha')!r}")
    fields.presume(
        {
            "sliding_window": 128, "head_dim": 64, "num_attention_heads": 64, "hidden_size": 2880,
            "attention_bias": True,
        }
    )  # fmt: skip
    if not fields.table("rope_parameters"):
        fields.presume({"rope_scaling": _GPT_OSS_ROPE})
    config = llama(
        fields, seq, kv_heads=8, epsilon=1e-5, width=2880, theta=150000.0, window=lambda index: index % 2 == 0,
        sinks=True,
    )  # fmt: skip
    experts = Experts(
        fields.size("num_local_experts", "num_experts", default=128), fields.size("num_experts_per_tok", default=4),
        fields.size("intermediate_size", default=2880), activation(fields, "hidden_act", default="silu"),
        scores="chosen", bias=True, limit=fields.number("swiglu_limit", default=7.0),
        transposed=False, interleaved=True,
        names=("mlp.router", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "", ""),
    )  # fmt: skip
    return _with_experts(config, experts)


def _llama4(fields: Fields, seq: int) -> DecoderConfig:
    fields.presume(
        {
            "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 48, "head_dim": 128,
            "vocab_size": 202048, "intermediate_size_mlp": 16384,
        }
    )  # fmt: skip
    config = llama(fields, seq, kv_heads=8, epsilon=1e-5, theta=500000.0, width=8192, names=_LLAMA4, window=None)
    count = config.num_layers
    interval, every = (fields.size(name, default=size) for name, size in (
        ("no_rope_layer_interval", 4), ("interleave_moe_layer_step", 1)
    ))  # fmt: skip
    turned = fields.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(count)]
    mixed = fields.get("moe_layers", default=list(range(every - 1, count, every)))
    for name, stated in (("no_rope_layers", turned), ("moe_layers", mixed)):
        if not isinstance(stated, list) or (name == "no_rope_layers" and len(stated) < count):
            raise ModelError(f"{name} of the configuration is {stated!r}, not a list of layers", hint="correct it")
    chunked = "attention_chunk_size" not in fields.values or fields.get("attention_chunk_size") is not None
    chunk = fields.size("attention_chunk_size", default=8192) if chunked else 0
    kinds = layer_kinds(
        fields, count, lambda index: "chunked_attention" if turned[index] and chunk else "full_attention"
    )
    if "sliding_attention" in kinds:
        raise UnknownError("layer_types with 'sliding_attention'")
    tempered = fields.flag("attn_temperature_tuning", True)
    growth = fields.number("floor_scale", default=8192.0), fields.number("attn_scale", default=0.1)
    normed = fields.flag("use_qk_norm", True)
    if fields.size("num_experts_per_tok", default=1) != 1:
        raise UnknownError(f"num_experts_per_tok={fields.get('num_experts_per_tok')}")
    width = fields.size("intermediate_size", default=8192)
    nonlinearity = activation(fields, "hidden_act", default="silu")
    experts = Experts(
        fields.size("num_local_experts", "num_experts", default=16), 1, width, nonlinearity, scores="sigmoid",
        normalized=False, shared=width, transposed=False, scaled_input=True,
        names=(
            "feed_forward.router", "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj",
            "feed_forward.shared_expert", "",
        ),
    )  # fmt: skip
    dense = Mlp(fields.size("intermediate_size_mlp", default=16384), nonlinearity)
    blocks = []
    for index, block in enumerate(config.blocks):
        assert isinstance(block.attention, Attention), "Llama 4 has grouped attention"
        attention = replace(
            block.attention, chunk=chunk if kinds[index] == "chunked_attention" else 0, interleaved=True,
            rope=block.attention.rope if turned[index] else None, qk_norm="unit" if normed and turned[index] else "",
            temperature=growth if tempered and not turned[index] and seq >= growth[0] else None,
        )  # fmt: skip
        blocks.append(Block(attention, experts if index in mixed else dense))
    return replace(config, blocks=tuple(blocks))


def _grok(fields: Fields, seq: int) -> DecoderConfig:
    fields.presume(
        {
            "vocab_size": 131072, "hidden_size": 6144, "intermediate_size": 32768, "num_hidden_layers": 64,
            "num_attention_heads": 48, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    hidden = fields.size("hidden_size")
    config = llama(
        fields, seq, kv_heads=8, epsilon=1e-5, nonlinearity="gelu_pytorch_tanh", arrangement="both", names=_GROK,
        scale=fields.number("attn_output_multiplier", default=128**-0.5),
        softcap=fields.number("max_attn_value", default=30.0),
        embedding_scale=fields.number("embedding_multiplier_scale", default=hidden**0.5),
        logits_scale=fields.number("output_multiplier_scale", default=3**-0.5),
    )  # fmt: skip
    experts = Experts(
        fields.size("num_experts", default=8), fields.size("num_experts_per_tok", default=2),
        fields.size("intermediate_size"), "gelu-tanh", normalized=False,
        names=("moe_block.gate", "moe_block.experts.gate_up", "moe_block.experts.linear_1", "", ""),
    )  # fmt: skip
    return _with_experts(config, experts)


_GROK = Names(
    LLAMA.embed, LLAMA.layer, "pre_attn_norm", "pre_moe_norm", ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.o_proj", LLAMA.mlp, LLAMA.final_norm, post_norms=("post_attn_norm", "post_moe_norm"),
)  # fmt: skip
"""Names of Grok-1's PyTorch port (hpcai-tech/grok-1), where experts are matrices of their own."""
_LLAMA4 = Names(
    LLAMA.embed, LLAMA.layer, LLAMA.attention_norm, LLAMA.mlp_norm, LLAMA.qkv, LLAMA.out,
    ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"), LLAMA.final_norm,
)  # fmt: skip
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

MIXTURES: Mapping[str, Callable[[Fields, int], DecoderConfig]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "kimi_k2": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "grok-1": _grok,
    "llama4_text": _llama4,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
"""Reader of each `model_type`."""
