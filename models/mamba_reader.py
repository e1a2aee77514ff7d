"""Configurations of decoders with Mamba's selective scans: Mamba, Falcon Mamba and Jamba (`architectures`)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from autopar.errors import ModelError
from autopar.models.config_fields import Fields, UnknownError, activation
from autopar.models.decoder_config import (
    Attention,
    Block,
    DecoderConfig,
    Experts,
    Names,
    Norm,
    SelectiveScan,
    uniform,
)
from autopar.models.llama_reader import LLAMA, llama

_CHANNELS_PER_RANK = 16
"""Elements of the model width per element of the vector that steps are made of, where `auto` is stated."""


def mixers(model: str) -> Names:
    """Return the names of a model whose blocks are a norm and something called `mixer`."""
    return Names(
        f"{model}.embeddings", f"{model}.layers.{{}}", "norm", "norm",
        ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), "mixer.o_proj", ("mixer.up_proj", "mixer.down_proj"),
        f"{model}.norm_f",
    )  # fmt: skip


def _rank(fields: Fields, name: str, hidden: int) -> int:
    """Return the elements of the vector that the steps of all channels are made of."""
    if fields.get(name, default="auto") == "auto":
        return -(-hidden // _CHANNELS_PER_RANK)
    return fields.size(name)


def _mamba(fields: Fields, seq: int, norm: Literal["", "unit"] = "") -> DecoderConfig:
    if not fields.flag("rms_norm", True):
        raise UnknownError("rms_norm=False")
    hidden = fields.size("hidden_size", "d_model", default=768)
    scan = SelectiveScan(
        fields.size("intermediate_size", "d_inner", default=fields.size("expand", default=2) * hidden),
        fields.size("state_size", default=16), _rank(fields, "time_step_rank", hidden),
        fields.size("conv_kernel", default=4), kernel_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False), activation=activation(fields, "hidden_act", default="silu"),
        norm=norm, norm_epsilon=fields.number("mixer_rms_eps", default=1e-6),
    )  # fmt: skip
    return uniform(
        fields.size("num_hidden_layers", "n_layer", default=32), scan, None, hidden=hidden, seq=seq,
        vocab=fields.size("vocab_size", default=50280),
        norm=Norm("rms", fields.number("layer_norm_epsilon", default=1e-5)), arrangement="pre",
        names=mixers("backbone"), tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _falcon_mamba(fields: Fields, seq: int) -> DecoderConfig:
    return _mamba(fields, seq, "unit")


def _every(fields: Fields, kind: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return which blocks are of a kind: one in each period of blocks.

    Args:
        fields: The configuration.
        kind: Beginning of the names of the fields that state the period and the first such block.
        period: Default of the period.
        offset: Default of the number of the first such block.

    Raises:
        ModelError: If there is no such block in a period.
    """
    count, name = fields.size(f"{kind}_layer_period", default=period), f"{kind}_layer_offset"
    first = fields.get(name, default=offset)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first < count:
        raise ModelError(
            f"{name} of the configuration is {first!r}, not a layer of a period of {count}",
            hint=f"{name} is from 0 to {count - 1}",
        )
    return lambda index: index % count == first


def _jamba(fields: Fields, seq: int) -> DecoderConfig:
    fields.presume({"vocab_size": 65536})
    names = Names(
        LLAMA.embed, LLAMA.layer, LLAMA.attention_norm, "pre_ff_layernorm", LLAMA.qkv, LLAMA.out,
        ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"), "model.final_layernorm",
        scan="mamba",
    )  # fmt: skip
    if fields.flag("mlp_bias", False):
        raise UnknownError("mlp_bias=True")
    config = llama(fields, seq, kv_heads=8, width=14336, names=names, qkv_bias=False, window=None)
    hidden = config.hidden
    scan = SelectiveScan(
        fields.size("mamba_expand", default=2) * hidden, fields.size("mamba_d_state", default=16),
        _rank(fields, "mamba_dt_rank", hidden), fields.size("mamba_d_conv", default=4),
        kernel_bias=fields.flag("mamba_conv_bias", True), bias=fields.flag("mamba_proj_bias", False),
        activation=activation(fields, "hidden_act", default="silu"), norm="scaled", norm_epsilon=config.norm.epsilon,
    )  # fmt: skip
    attends, chooses = _every(fields, "attn", 8, 4), _every(fields, "expert", 2, 1)
    count, chosen = (
        fields.size("num_experts", "num_local_experts", default=16), fields.size("num_experts_per_tok", default=2)
    )  # fmt: skip
    experts = None if count == 1 else Experts(
        count, chosen,
        fields.size("intermediate_size", default=14336), activation(fields, "hidden_act", default="silu"),
        normalized=False,
        names=("feed_forward.router", "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", "", ""),
    )  # fmt: skip
    blocks = []
    for index, block in enumerate(config.blocks):
        assert isinstance(block.attention, Attention), "Jamba has grouped attention"
        attention = replace(block.attention, rope=None) if attends(index) else scan
        blocks.append(Block(attention, experts if chooses(index) and experts else block.mlp))
    return replace(config, blocks=tuple(blocks))


MAMBAS: Mapping[str, Callable[[Fields, int], DecoderConfig]] = {
    "falcon_mamba": _falcon_mamba,
    "jamba": _jamba,
    "mamba": _mamba,
}
"""Reader of each `model_type`."""
