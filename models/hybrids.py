"""Configurations of decoders with scans: Mamba 2, Nemotron-H, Bamba and Qwen3-Next (`architectures`)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isnan

from autopar.errors import ModelError
from autopar.models.config_fields import Fields, UnknownError, activation
from autopar.models.decoder_config import (
    Attention,
    Block,
    DecoderConfig,
    DeltaRule,
    Experts,
    Mlp,
    Names,
    Norm,
    StateSpace,
    uniform,
)
from autopar.models.llama_reader import LLAMA, llama
from autopar.models.mamba_reader import mixers
from autopar.models.mixtures import QWEN_SHARED, qwen_moe, sigmoid_experts


def _mamba2(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=4096), fields.size("num_heads", default=128)
    size = fields.size("head_dim", default=64)
    _check_width(fields.size("expand", default=2) * hidden, heads, size)
    least, most = _step_limits(fields, "time_step_limit")
    mixer = StateSpace(
        heads, size, fields.size("n_groups", default=8), fields.size("state_size", default=128),
        fields.size("conv_kernel", default=4), kernel_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False), activation=activation(fields, "hidden_act", default="silu"),
        least_step=least, most_step=most,
    )  # fmt: skip
    return uniform(
        fields.size("num_hidden_layers", default=64), mixer, None, hidden=hidden, seq=seq,
        vocab=fields.size("vocab_size", default=32768),
        norm=Norm("rms", fields.number("layer_norm_epsilon", default=1e-5)), arrangement="pre",
        names=mixers("backbone"), tied=fields.flag("tie_word_embeddings", False),
    )  # fmt: skip


def _check_width(width: int, heads: int, size: int) -> None:
    """Check that the heads of a scan have the channels between its projections.

    Raises:
        ModelError: If they have others.
    """
    if heads * size != width:
        raise ModelError(
            f"{heads} heads of {size} channels are not the {width} channels of the scan",
            hint="heads times their size have to be hidden_size times expand",
        )


def _step_limits(fields: Fields, name: str) -> tuple[float, float]:
    """Return the least and the largest step of a scan, 0 for any; infinity may be as transformers writes it.

    Raises:
        ModelError: If they are no two numbers in order.
    """
    value = fields.get(name, default=[0.0, float("inf")])
    infinite = {"__float__": "Infinity"}
    limits = (
        [float("inf") if limit == infinite else limit for limit in value] if isinstance(value, list | tuple) else []
    )
    numbers = [float(limit) for limit in limits if isinstance(limit, int | float) and not isnan(limit)]
    if len(limits) != 2 or len(numbers) != 2 or not numbers[0] <= numbers[1]:
        raise ModelError(
            f"{name} of the configuration is {value!r}, not the least and the largest step of a scan",
            hint="download the config.json of the model again, or correct it",
        )
    return numbers[0], 0.0 if numbers[1] == float("inf") else numbers[1]


_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Kinds of blocks by their letter in `hybrid_override_pattern`."""
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def _block_kinds(fields: Fields) -> list[str]:
    """Return the kinds of a Nemotron-H's blocks.

    Raises:
        UnknownError: If one is unknown.
        ModelError: If neither a list nor a pattern states them.
    """
    kinds = fields.get("layers_block_type", "layer_types")
    pattern = fields.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [_KINDS.get(letter, letter) for letter in pattern]
    if not isinstance(kinds, list) or not kinds:
        raise ModelError(
            "layers_block_type of the configuration is no list of kinds of blocks",
            hint="state layers_block_type, or hybrid_override_pattern",
        )
    kinds = [_OLD_KINDS.get(kind, kind) for kind in kinds]
    strange = [kind for kind in kinds if kind not in _KINDS.values()]
    if strange:
        raise UnknownError(f"layers_block_type with {strange[0]!r}")
    return kinds  # num_hidden_layers counts for nothing beside them, as in transformers


def _nemotron_h(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=4096), fields.size("num_attention_heads", default=32)
    if fields.flag("attention_bias", False):
        raise UnknownError("attention_bias=True")  # transformers has none in this family
    for name in ("partial_rotary_factor", "qk_layernorm"):
        fields.get(name)  # attention has neither positions nor norms
    attention = Attention(
        heads, fields.size("num_key_value_heads", default=8), fields.size("head_dim", "attention_head_dim", default=128)
    )
    mixer = StateSpace(
        fields.size("mamba_num_heads", default=128), fields.size("mamba_head_dim", default=64),
        fields.size("n_groups", "mamba_n_groups", default=8), fields.size("ssm_state_size", default=128),
        fields.size("conv_kernel", "mamba_d_conv", default=4),
        kernel_bias=fields.flag("use_conv_bias", True), bias=fields.flag("use_bias", False),
        activation=activation(fields, "mamba_hidden_act", default="silu"),
        least_step=fields.number("time_step_min", "mamba_dt_min", default=0.001),
    )  # fmt: skip
    act = activation(fields, "mlp_hidden_act", default="relu2")
    bias = fields.flag("mlp_bias", False)
    mlp = Mlp(fields.size("intermediate_size", default=21504), act, gated=False, bias=bias)
    kinds = _block_kinds(fields)
    blocks = {
        "linear_attention": Block(mixer, None),
        "full_attention": Block(attention, None),
        "mlp": Block(None, mlp),
        "moe": Block(None, _nemotron_experts(fields)) if "moe" in kinds else None,
    }
    return DecoderConfig(
        tuple(block for kind in kinds if (block := blocks[kind]) is not None), hidden=hidden, seq=seq,
        vocab=fields.size("vocab_size", default=131072),
        norm=Norm("rms", fields.number("layer_norm_epsilon", "norm_eps", default=1e-5)), arrangement="pre",
        names=mixers("model"), tied=fields.flag("tie_word_embeddings", False),
    )  # fmt: skip


def _nemotron_experts(fields: Fields) -> Experts:
    """Return experts without gates, chosen as DeepSeek-V3 chooses.

    Raises:
        UnknownError: If they work on a latent vector, or have biases.
    """
    for name in ("moe_latent_size", "mlp_bias"):
        if fields.get(name):
            raise UnknownError(f"{name}={fields.get(name)!r} with experts")
    experts = sigmoid_experts(
        fields, count=8, width=7688, scale=1.0, groups=1, chosen=1, act="mlp_hidden_act", nonlinearity="relu2", top_k=2
    )
    return replace(
        experts, gated=False, shared=fields.size("moe_shared_expert_intermediate_size", default=7688),
        names=("mixer.gate", "mixer.experts.up_proj", "mixer.experts.down_proj", "mixer.shared_experts", ""),
    )  # fmt: skip


def _bamba(fields: Fields, seq: int) -> DecoderConfig:
    names = Names(
        LLAMA.embed, LLAMA.layer, LLAMA.attention_norm, "pre_ff_layernorm", LLAMA.qkv, LLAMA.out,
        ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"), "model.final_layernorm",
        scan="mamba",
    )  # fmt: skip
    chosen = fields.get("attn_layer_indices", default=[])
    if not isinstance(chosen, list):
        raise ModelError(
            f"attn_layer_indices of the configuration is {chosen!r}, not a list of layers",
            hint="correct the config.json",
        )
    config = llama(fields, seq, kv_heads=8, epsilon=1e-5, rotated=0.5, width=14336, names=names, mlp_bias=True)
    heads, width = fields.size("mamba_n_heads", default=128), fields.size("mamba_expand", default=2) * config.hidden
    stated = fields.get("mamba_d_head", default="auto")
    size = width // heads if stated == "auto" else fields.size("mamba_d_head")
    _check_width(width, heads, size)
    least, most = _step_limits(fields, "time_step_limit")
    mixer = StateSpace(
        heads, size, fields.size("mamba_n_groups", default=1), fields.size("mamba_d_state", default=256),
        fields.size("mamba_d_conv", default=4), kernel_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias", False), activation=activation(fields, "hidden_act", default="silu"),
        least_step=least, most_step=most,
    )  # fmt: skip
    blocks = (block if index in chosen else Block(mixer, block.mlp) for index, block in enumerate(config.blocks))
    return replace(config, blocks=tuple(blocks))


def _qwen3_next(fields: Fields, seq: int) -> DecoderConfig:
    kinds, every = fields.get("layer_types"), fields.size("full_attention_interval", default=4)
    fields.values = {name: value for name, value in fields.values.items() if name != "layer_types"}
    fields.presume(
        {
            "hidden_size": 2048, "num_attention_heads": 16, "head_dim": 256, "num_hidden_layers": 48,
            "vocab_size": 151936, "norm_topk_prob": True,
        }
    )  # fmt: skip
    config = llama(fields, seq, kv_heads=2, qk_norm="head", from_zero=True, gated=True, rotated=0.25, width=5632)
    if kinds is None:
        kinds = [_INTERVAL[(index + 1) % every == 0] for index in range(config.num_layers)]
    if not isinstance(kinds, list) or len(kinds) < config.num_layers:
        raise ModelError(
            f"layer_types of the configuration is {kinds!r}, not a list of {config.num_layers} kinds",
            hint="correct the config.json",
        )
    strange = [kind for kind in kinds if kind not in _INTERVAL]
    if strange:
        raise UnknownError(f"layer_types with {strange[0]!r}")
    scan = DeltaRule(
        fields.size("linear_num_value_heads", default=32), fields.size("linear_value_head_dim", default=128),
        fields.size("linear_num_key_heads", default=16), fields.size("linear_key_head_dim", default=128),
        fields.size("linear_conv_kernel_dim", default=4), activation(fields, "hidden_act", default="silu"),
    )  # fmt: skip
    shared = fields.size("shared_expert_intermediate_size", default=512)
    config = qwen_moe(
        config, fields, count=512, top_k=10, width=512, shared=shared, shared_gate=True, names=QWEN_SHARED
    )
    blocks = (
        Block(scan, block.mlp) if kind == "linear_attention" else block
        for block, kind in zip(config.blocks, kinds, strict=False)
    )
    return replace(config, blocks=tuple(blocks), names=replace(config.names, scan="linear_attn"))


_INTERVAL = ("linear_attention", "full_attention")

HYBRIDS: Mapping[str, Callable[[Fields, int], DecoderConfig]] = {
    "bamba": _bamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
}
"""Reader of each `model_type`."""
