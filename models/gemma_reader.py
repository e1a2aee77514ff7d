"""Configurations of Gemma (Gemma Team 2024 and 2025): wide heads, a tied embedding, norms whose scale counts from 1."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.models.config_fields import Fields, UnknownError, rope
from autopar.models.decoder_config import Attention, DecoderConfig, Names
from autopar.models.llama_reader import LLAMA, llama

_NAMES = Names(
    LLAMA.embed, LLAMA.layer, LLAMA.attention_norm, "pre_feedforward_layernorm", LLAMA.qkv, LLAMA.out, LLAMA.mlp,
    LLAMA.final_norm,
)  # fmt: skip


def _gemma(fields: Fields, seq: int, sizes: Mapping[str, int], **parts: Any) -> DecoderConfig:
    """Return what all generations have in common.

    Args:
        fields: The configuration.
        seq: Tokens per sequence.
        sizes: Defaults of fields.
        **parts: As of `llama`.
    """
    fields.presume(sizes)
    hidden = fields.size("hidden_size")
    return llama(
        fields, seq, tied=True, from_zero=True, embedding_scale=hidden**0.5, nonlinearity="gelu_pytorch_tanh",
        activations=("hidden_activation", "hidden_act"), **parts,
    )  # fmt: skip


def _gemma1(fields: Fields, seq: int) -> DecoderConfig:
    sizes = {
        "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000,
    }  # fmt: skip
    if fields.get("hidden_act") == "gelu" and fields.get("hidden_activation") is None:
        fields.values = {**fields.values, "hidden_act": "gelu_pytorch_tanh"}  # as the released files mean it
    return _gemma(fields, seq, sizes)


_SIZES = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
"""Defaults of the second and the third generation."""


def _cap(fields: Fields, name: str, default: float) -> float:
    """Return a soft cap; null is none."""
    if name in fields.values and fields.get(name) is None:
        return 0.0
    return fields.number(name, default=default) if fields.get(name, default=default) else 0.0


def _gemma2(fields: Fields, seq: int) -> DecoderConfig:
    caps = _cap(fields, "attn_logit_softcapping", 50.0), _cap(fields, "final_logit_softcapping", 30.0)
    return _gemma(
        fields, seq, {**_SIZES, "vocab_size": 256000}, arrangement="both", names=_NAMES, softcap=caps[0],
        logits_cap=caps[1], scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        window=lambda index: index % 2 == 0,
    )  # fmt: skip


def _gemma3(fields: Fields, seq: int) -> DecoderConfig:
    caps = _cap(fields, "attn_logit_softcapping", 0.0), _cap(fields, "final_logit_softcapping", 0.0)
    if caps[0]:
        raise UnknownError(f"attn_logit_softcapping={caps[0]!r}")  # transformers does not apply it
    every = fields.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    tables = fields.table("rope_parameters")
    local, whole = (dict(Fields(tables).table(kind)) for kind in ("sliding_attention", "full_attention"))
    whole = {**fields.table("rope_scaling"), **whole}
    whole.setdefault("rope_theta", fields.number("rope_theta", default=1e6))
    local.setdefault("rope_theta", fields.number("rope_local_base_freq", default=1e4))
    without = {
        name: value
        for name, value in fields.values.items()
        if name not in ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
    }
    fields.values = {**without, "rope_parameters": whole}
    config = _gemma(
        fields, seq, {**_SIZES, "vocab_size": 262208}, arrangement="both", names=_NAMES, logits_cap=caps[1],
        qk_norm="head", scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        window=lambda index: bool((index + 1) % every),
    )  # fmt: skip
    turned = rope(Fields({**without, "rope_parameters": local}), fields.size("head_dim"), seq)
    blocks = []
    for block in config.blocks:
        assert isinstance(block.attention, Attention), "Gemma has grouped attention"
        near = replace(block.attention, rope=turned) if block.attention.window else block.attention
        blocks.append(replace(block, attention=near))
    return replace(config, blocks=tuple(blocks))


GEMMAS: Mapping[str, Callable[[Fields, int], DecoderConfig]] = {
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
"""Reader of each `model_type`."""
