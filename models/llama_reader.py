"""LLaMA's configuration, and what families that differ from it in a few things have in common with it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.models.config_fields import Fields, activation, head_size, rope, windows
from autopar.models.decoder_config import Attention, DecoderConfig, Mlp, Names, Norm, uniform

LLAMA = Names(
    embed="model.embed_tokens",
    layer="model.layers.{}",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    final_norm="model.norm",
)


def llama(
    fields: Fields,
    seq: int,
    *,
    kv_heads: int | None = None,
    epsilon: float = 1e-6,
    qkv_bias: bool | None = None,
    window: Callable[[int], bool] | None = lambda index: False,
    width: int = 11008,
    rotated: float = 1.0,
    theta: float = 1e4,
    mlp_bias: bool = False,
    **parts: Any,
) -> DecoderConfig:
    """Read LLaMA, and families that differ from it in what `parts` says of attention, norm, MLP and arrangement.

    Args:
        fields: The configuration.
        seq: Tokens per sequence.
        kv_heads: Default of `num_key_value_heads`; None for as many as query heads.
        epsilon: Default of the norm's epsilon.
        qkv_bias: Whether queries, keys and values have a bias and the output has none; None for `attention_bias`,
            which speaks of all four.
        window: Whether a block has a sliding window, where one is stated, by default; None if the caller reads what
            blocks attend to.
        width: Default of `intermediate_size`.
        rotated: Rotated part of a head unless the configuration says another.
        theta: Base of the rotary frequencies unless the configuration says another.
        mlp_bias: Whether the family has the field `mlp_bias`.
        **parts: Fields of `Attention` (`qk_norm`, `fused`, `scale`, `softcap`, `sinks`, `gated`), `from_zero` of
            `Norm`, fields of `DecoderConfig`, names of fields that state the nonlinearity (`activations`) and their
            default (`nonlinearity`).
    """
    hidden, heads = fields.size("hidden_size", default=4096), fields.size("num_attention_heads", default=32)
    head = head_size(fields, hidden, heads)
    bias = fields.flag("attention_bias", False) if qkv_bias is None else qkv_bias
    of_attention = {
        name: parts.pop(name) for name in ("qk_norm", "fused", "scale", "softcap", "sinks", "gated") if name in parts
    }
    names = parts.pop("names", LLAMA)
    config = uniform(
        num_layers=fields.size("num_hidden_layers", default=32),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=32000),
        attention=Attention(
            heads, fields.size("num_key_value_heads", default=kv_heads or heads), head,
            qkv_bias=bias, out_bias=bias and qkv_bias is None, rope=rope(fields, head, seq, share=rotated, theta=theta),
            **of_attention,
        ),
        mlp=Mlp(
            fields.size("intermediate_size", default=width),
            activation(fields, *parts.pop("activations", ("hidden_act",)), default=parts.pop("nonlinearity", "silu")),
            bias=mlp_bias and fields.flag("mlp_bias", False),
            fused=len(names.mlp) == 2,
        ),
        norm=Norm("rms", fields.number("rms_norm_eps", default=epsilon), from_zero=parts.pop("from_zero", False)),
        arrangement=parts.pop("arrangement", "pre"),
        names=names,
        tied=fields.flag("tie_word_embeddings", parts.pop("tied", False)),
        **parts,
    )  # fmt: skip
    return config if window is None else with_windows(config, windows(fields, config.num_layers, window))


def with_windows(config: DecoderConfig, sizes: Sequence[int]) -> DecoderConfig:
    """Return a decoder whose blocks have sliding windows of the given sizes; 0 for none."""
    blocks = []
    for block, size in zip(config.blocks, sizes, strict=True):
        assert isinstance(block.attention, Attention), "latent attention has no window"
        blocks.append(replace(block, attention=replace(block.attention, window=size)))
    return replace(config, blocks=tuple(blocks))


def qwen_window(fields: Fields) -> Callable[[int], bool]:
    """Return which blocks of a Qwen have the sliding window: those from `max_window_layers` on, where it is used."""
    used, first = fields.flag("use_sliding_window", False), fields.get("max_window_layers", default=28)
    return lambda index: used and index >= first
