"""Configurations of decoders whose scores fall with the distance of keys: BLOOM and MPT (Press et al. 2022, ALiBi)."""

from collections.abc import Callable, Mapping
from math import ceil, log2

from autopar.models.config_fields import Fields, UnknownError, activation, head_size
from autopar.models.decoder_config import Attention, DecoderConfig, Mlp, Names, Norm, uniform


def _bloom(fields: Fields, seq: int) -> DecoderConfig:
    hidden = fields.size("n_embed", "hidden_size", default=64)
    heads = fields.size("n_head", "num_attention_heads", default=8)
    names = Names(
        "transformer.word_embeddings", "transformer.h.{}", "input_layernorm", "post_attention_layernorm",
        ("self_attention.query_key_value",), "self_attention.dense", ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "transformer.ln_f", embed_norm="transformer.word_embeddings_layernorm",
    )  # fmt: skip
    return uniform(
        fields.size("n_layer", "num_hidden_layers", default=2),
        Attention(
            heads, heads, head_size(fields, hidden, heads), fused="heads", qkv_bias=True, out_bias=True,
            slopes=bloom_slopes(heads),
        ),
        Mlp(4 * hidden, "gelu-tanh", gated=False, bias=True),
        hidden=hidden, seq=seq, vocab=fields.size("vocab_size", default=250880),
        norm=Norm("layer", fields.number("layer_norm_epsilon", default=1e-5)), arrangement="pre", names=names,
        tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _mpt(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("d_model", default=2048), fields.size("n_heads", default=16)
    of_attention = Fields(fields.table("attn_config"))
    for part, name, known in (
        (of_attention, "attn_type", "multihead_attention"), (of_attention, "clip_qkv", None),
        (of_attention, "qk_ln", False), (of_attention, "alibi", True), (of_attention, "prefix_lm", False),
        (of_attention, "attn_uses_sequence_id", False), (fields, "no_bias", True), (fields, "logit_scale", None),
    ):  # fmt: skip
        if part.get(name, default=known) != known:
            raise UnknownError(f"{name}={part.get(name)!r}")
    scale = of_attention.get("softmax_scale")
    names = Names(
        "transformer.wte", "transformer.blocks.{}", "norm_1", "norm_2", ("attn.Wqkv",), "attn.out_proj",
        ("ffn.up_proj", "ffn.down_proj"), "transformer.norm_f",
    )  # fmt: skip
    most = of_attention.number("alibi_bias_max", default=8.0)
    return uniform(
        fields.size("n_layers", default=24),
        Attention(
            heads, heads, head_size(fields, hidden, heads), fused="blocks", slopes=mpt_slopes(heads, most),
            scale=None if scale is None else of_attention.number("softmax_scale", default=1.0),
        ),
        Mlp(
            fields.size("expansion_ratio", default=4) * hidden, activation(fields, "activation", default="gelu"),
            gated=False,
        ),
        hidden=hidden, seq=seq, vocab=fields.size("vocab_size", default=50368),
        norm=Norm("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=False), arrangement="pre",
        names=names, tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head: those of the largest power of 2 below, then every other one of the next power.

    Source: Press et al. 2022, section 3, and their code.

    >>> bloom_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    more = [2.0 ** (-4.0 * (2 * index + 1) / power) for index in range(heads - power)]
    return (*first, *more)


def mpt_slopes(heads: int, most: float) -> tuple[float, ...]:
    """Return the slope of each head: those of the next power of 2, every other one first if there are more than heads.

    Args:
        heads: Heads.
        most: Logarithm to base 2 of the inverse of the least slope.

    >>> mpt_slopes(3, 8.0)
    (0.0625, 0.00390625, 0.25)
    """
    power = 1 << ceil(log2(heads))
    slopes = [2.0 ** (-most * (index + 1) / power) for index in range(power)]
    return tuple(slopes if power == heads else [*slopes[1::2], *slopes[::2]][:heads])


ALIBI: Mapping[str, Callable[[Fields, int], DecoderConfig]] = {"bloom": _bloom, "mpt": _mpt}
"""Reader of each `model_type`."""
