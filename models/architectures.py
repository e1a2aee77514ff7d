"""Hugging Face configurations as configurations of our builders: a table of families, one reader each.

A `config.json` is a table of numbers. A reader takes the fields its family has and turns them into a `DecoderConfig` or
another record of `BUILDERS`, whose builder writes the graph.
What a configuration says beyond that must not change the model: every field of `NEUTRAL` that nobody has read has to
have a value there, or the model is one that the family's builder does not know (`Unbuilt`). Nothing is dropped
silently.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.models import decoder, dit, dual_encoder, encoder, encoder_decoder, flux, image_text, sd3, wan
from autopar.models.alibi_reader import ALIBI
from autopar.models.config_fields import Fields, Unbuilt, UnknownError, activation, head_size, rope, windows
from autopar.models.decoder_config import Attention, DecoderConfig, Mlp, Names, Norm, uniform
from autopar.models.diffusion_reader import DIFFUSION
from autopar.models.dit import DitConfig
from autopar.models.dual_encoder import DualEncoderConfig
from autopar.models.dual_encoder_reader import DUAL_ENCODERS
from autopar.models.encoder_config import EncoderConfig
from autopar.models.encoder_decoder_config import EncoderDecoderConfig
from autopar.models.encoder_decoder_reader import ENCODER_DECODERS
from autopar.models.encoder_reader import ENCODERS
from autopar.models.flux import FluxConfig
from autopar.models.gemma_reader import GEMMAS
from autopar.models.hybrids import HYBRIDS
from autopar.models.image_text_config import ImageTextConfig
from autopar.models.image_text_reader import IMAGE_TEXT
from autopar.models.llama_reader import LLAMA, llama, qwen_window, with_windows
from autopar.models.mamba_reader import MAMBAS
from autopar.models.mixtures import MIXTURES
from autopar.models.sd3 import Sd3Config
from autopar.models.wan import WanConfig

if TYPE_CHECKING:
    import onnx

Architecture = (
    DecoderConfig
    | EncoderConfig
    | EncoderDecoderConfig
    | DualEncoderConfig
    | ImageTextConfig
    | DitConfig
    | FluxConfig
    | Sd3Config
    | WanConfig
)
"""What a reader makes of a configuration."""


def _llama(fields: Fields, seq: int) -> DecoderConfig:
    return llama(fields, seq, mlp_bias=True)


def _mistral(fields: Fields, seq: int) -> DecoderConfig:
    return llama(fields, seq, kv_heads=8, qkv_bias=False, window=lambda index: True)


def _qwen2(fields: Fields, seq: int) -> DecoderConfig:
    return llama(fields, seq, qkv_bias=True, window=qwen_window(fields))


def _qwen3(fields: Fields, seq: int) -> DecoderConfig:
    return llama(fields, seq, qk_norm="head", window=qwen_window(fields))


def _olmo2(fields: Fields, seq: int) -> DecoderConfig:
    names = Names(
        LLAMA.embed, LLAMA.layer, "post_attention_layernorm", "post_feedforward_layernorm", LLAMA.qkv, LLAMA.out,
        LLAMA.mlp, LLAMA.final_norm,
    )  # fmt: skip
    return llama(fields, seq, epsilon=1e-5, qk_norm="width", arrangement="post", names=names)


def _phi3(fields: Fields, seq: int) -> DecoderConfig:
    names = Names(
        LLAMA.embed, LLAMA.layer, LLAMA.attention_norm, LLAMA.mlp_norm, ("self_attn.qkv_proj",), LLAMA.out,
        ("mlp.gate_up_proj", "mlp.down_proj"), LLAMA.final_norm,
    )  # fmt: skip
    return llama(fields, seq, epsilon=1e-5, qkv_bias=False, fused="blocks", window=lambda index: True, names=names)


def _granite(fields: Fields, seq: int) -> DecoderConfig:
    return llama(
        fields, seq, mlp_bias=True,
        scale=fields.number("attention_multiplier", default=1.0),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logits_scale=1.0 / fields.number("logits_scaling", default=1.0),
    )  # fmt: skip


def _nemotron(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=6144), fields.size("num_attention_heads", default=48)
    head, bias = head_size(fields, hidden, heads), fields.flag("attention_bias", False)
    names = Names(
        LLAMA.embed, LLAMA.layer, LLAMA.attention_norm, LLAMA.mlp_norm, LLAMA.qkv, LLAMA.out,
        ("mlp.up_proj", "mlp.down_proj"), LLAMA.final_norm,
    )  # fmt: skip
    return uniform(
        num_layers=fields.size("num_hidden_layers", default=32),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=256000),
        attention=Attention(
            heads, fields.size("num_key_value_heads", default=heads), head, qkv_bias=bias, out_bias=bias,
            rope=rope(fields, head, seq, share=0.5),
        ),
        mlp=Mlp(
            fields.size("intermediate_size", default=24576), activation(fields, "hidden_act", default="relu2"),
            gated=False, bias=fields.flag("mlp_bias", False),
        ),
        norm=Norm("layer", fields.number("norm_eps", default=1e-5), from_zero=True),
        arrangement="pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", False),
    )  # fmt: skip


def _starcoder2(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=3072), fields.size("num_attention_heads", default=24)
    head, bias = head_size(fields, hidden, heads), fields.flag("use_bias", True)
    names = Names(
        LLAMA.embed, LLAMA.layer, LLAMA.attention_norm, LLAMA.mlp_norm, LLAMA.qkv, LLAMA.out,
        ("mlp.c_fc", "mlp.c_proj"), LLAMA.final_norm,
    )  # fmt: skip
    config = uniform(
        num_layers=fields.size("num_hidden_layers", default=30),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=49152),
        attention=Attention(
            heads, fields.size("num_key_value_heads", default=2), head, qkv_bias=bias, out_bias=bias,
            rope=rope(fields, head, seq),
        ),
        mlp=Mlp(
            fields.size("intermediate_size", default=12288),
            activation(fields, "hidden_act", default="gelu_pytorch_tanh"), gated=False, bias=bias,
        ),
        norm=Norm("layer", fields.number("norm_epsilon", default=1e-5)),
        arrangement="pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip
    return with_windows(config, windows(fields, config.num_layers, lambda index: True))


def _gpt_neox(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=6144), fields.size("num_attention_heads", default=64)
    head, bias = head_size(fields, hidden, heads), fields.flag("attention_bias", True)
    names = Names(
        "gpt_neox.embed_in", "gpt_neox.layers.{}", "input_layernorm", "post_attention_layernorm",
        ("attention.query_key_value",), "attention.dense", ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "gpt_neox.final_layer_norm",
    )  # fmt: skip
    return uniform(
        num_layers=fields.size("num_hidden_layers", default=44),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=50432),
        attention=Attention(
            heads, heads, head, fused="heads", qkv_bias=bias, out_bias=bias,
            rope=rope(fields, head, seq, share=0.25),
        ),
        mlp=Mlp(
            fields.size("intermediate_size", default=24576), activation(fields, "hidden_act", default="gelu"),
            gated=False, bias=True,
        ),
        norm=Norm("layer", fields.number("layer_norm_eps", default=1e-5)),
        arrangement="parallel" if fields.flag("use_parallel_residual", True) else "pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", False),
    )  # fmt: skip


def _gpt2(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("n_embd", default=768), fields.size("n_head", default=12)
    if not fields.flag("scale_attn_weights", True):
        raise UnknownError("scale_attn_weights=False")
    names = Names(
        "transformer.wte", "transformer.h.{}", "ln_1", "ln_2", ("attn.c_attn",), "attn.c_proj",
        ("mlp.c_fc", "mlp.c_proj"), "transformer.ln_f", positions="transformer.wpe",
    )  # fmt: skip
    return uniform(
        num_layers=fields.size("n_layer", default=12),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=50257),
        attention=Attention(
            heads, heads, head_size(fields, hidden, heads), fused="blocks", qkv_bias=True, out_bias=True,
            transposed=False,
        ),
        mlp=Mlp(
            fields.size("n_inner", default=4 * hidden),
            activation(fields, "activation_function", default="gelu_new"), gated=False, bias=True, transposed=False,
        ),
        norm=Norm("layer", fields.number("layer_norm_epsilon", default=1e-5)),
        arrangement="pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", True),
        positions=fields.size("n_positions", default=1024),
    )  # fmt: skip


def _opt(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=768), fields.size("num_attention_heads", default=12)
    bias = fields.flag("enable_bias", True)
    for name, usual in (
        ("do_layer_norm_before", True), ("_remove_final_layer_norm", False), ("layer_norm_elementwise_affine", True)
    ):  # fmt: skip
        if fields.flag(name, usual) != usual:
            raise UnknownError(f"{name}={not usual}")
    if fields.size("word_embed_proj_dim", default=hidden) != hidden:
        raise UnknownError("word_embed_proj_dim unlike hidden_size")
    names = Names(
        "model.decoder.embed_tokens", "model.decoder.layers.{}", "self_attn_layer_norm", "final_layer_norm",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj", ("fc1", "fc2"),
        "model.decoder.final_layer_norm", positions="model.decoder.embed_positions",
    )  # fmt: skip
    return uniform(
        num_layers=fields.size("num_hidden_layers", default=12),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=50272),
        attention=Attention(heads, heads, head_size(fields, hidden, heads), qkv_bias=bias, out_bias=bias),
        mlp=Mlp(
            fields.size("ffn_dim", default=3072), activation(fields, "activation_function", default="relu"),
            gated=False, bias=bias,
        ),
        norm=Norm("layer", 1e-5),
        arrangement="pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", True),
        positions=fields.size("max_position_embeddings", default=2048) + _OPT_OFFSET,
        first_position=_OPT_OFFSET,
    )  # fmt: skip


_OPT_OFFSET = 2
"""Rows of OPT's table of positions before that of the first token."""


def _falcon(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=4544), fields.size("num_attention_heads", default=71)
    head, bias = head_size(fields, hidden, heads), fields.flag("bias", False)
    grouped, parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    kv_heads = fields.size("num_kv_heads", default=heads)
    if not grouped:
        kv_heads = 1 if fields.flag("multi_query", True) else heads
    norms = fields.size("num_ln_in_parallel_attn", default=2 if grouped else 1)
    two = parallel and norms == 2 and grouped
    names = Names(
        "transformer.word_embeddings", "transformer.h.{}", "ln_attn" if two else "input_layernorm",
        "ln_mlp" if two else "post_attention_layernorm", ("self_attention.query_key_value",), "self_attention.dense",
        ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), "transformer.ln_f",
    )  # fmt: skip
    if grouped and not parallel:
        raise UnknownError("new_decoder_architecture without parallel_attn")
    return uniform(
        num_layers=fields.size("num_hidden_layers", default=32),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=65024),
        attention=Attention(
            heads, kv_heads, head, fused="groups" if grouped else "heads" if kv_heads == heads else "blocks",
            qkv_bias=bias, out_bias=bias, rope=rope(fields, head, seq),
        ),
        mlp=Mlp(
            fields.size("ffn_hidden_size", default=4 * hidden), activation(fields, "activation", default="gelu"),
            gated=False, bias=bias,
        ),
        norm=Norm("layer", fields.number("layer_norm_epsilon", default=1e-5)),
        arrangement="parallel" if two else "parallel-shared" if parallel else "pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _with_decoders(read: Callable[..., ImageTextConfig]) -> Callable[[Fields, int], ImageTextConfig]:
    """Return the reader of a model of images and text, which reads its decoder by the table of readers itself."""
    return lambda fields, seq: read(fields, seq, read_architecture)


READERS: Mapping[str, Callable[[Fields, int], Architecture]] = {
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "starcoder2": _starcoder2,
    **ALIBI,
    **GEMMAS,
    **HYBRIDS,
    **MAMBAS,
    **MIXTURES,
    **DIFFUSION,
    **ENCODERS,
    **ENCODER_DECODERS,
    **DUAL_ENCODERS,
    **{kind: _with_decoders(read) for kind, read in IMAGE_TEXT.items()},
}
"""Reader of each `model_type`, or class of diffusers."""

BUILDERS: "Mapping[type, Callable[[str, Any], onnx.ModelProto]]" = {
    DecoderConfig: decoder.build,
    EncoderConfig: encoder.build,
    EncoderDecoderConfig: encoder_decoder.build,
    DualEncoderConfig: dual_encoder.build,
    ImageTextConfig: image_text.build,
    FluxConfig: flux.build,
    WanConfig: wan.build,
    DitConfig: dit.build,
    Sd3Config: sd3.build,
}
"""What writes the graph of each kind of record; it takes the name of the graph and the record."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")


def read_architecture(config: Mapping[str, Any], seq: int) -> Architecture | Unbuilt:
    """Return what to build for a Hugging Face configuration, or why none of our builders makes the model.

    Args:
        config: The content of a `config.json`.
        seq: Tokens per sequence.

    Raises:
        ModelError: If a field is missing or has an impossible value.
    """
    kind = config.get("model_type")
    reader = READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        return Unbuilt(f"model_type={kind!r}; known are {', '.join(READERS)}")
    fields = Fields(config)
    try:
        found = reader(fields, seq)
    except UnknownError as error:
        return Unbuilt(str(error))
    heads = config.get("architectures") or []
    if isinstance(found, DecoderConfig) and heads and not str(heads[0]).endswith(_CAUSAL):
        return Unbuilt(f"architectures={heads!r}; {kind} is built as a language model")
    unread = fields.unread()
    return Unbuilt(unread) if unread else found


SIZES = (
    "hidden_size", "n_embd", "n_embed", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "encoder_layers", "decoder_layers", "num_attention_heads", "n_head", "n_heads", "num_heads",
    "encoder_attention_heads", "decoder_attention_heads", "vocab_size", "intermediate_size", "d_ff", "ffn_dim",
)  # fmt: skip
"""Sizes that every published configuration states: without them it is not that of the model."""


def missing_sizes(config: Mapping[str, Any], seq: int) -> Mapping[str, int]:
    """Return the sizes of `SIZES` that a reader looks for and a configuration lacks, with the defaults that count.

    Nested tables are not looked at: transformers leaves out of them what is the default.

    Args:
        config: The content of a `config.json` of a known type.
        seq: Tokens per sequence.
    """
    fields = Fields(config)
    try:
        READERS[config["model_type"]](fields, seq)
    except UnknownError:
        return {}
    return {name: fields.presumed[name] for name in SIZES if name in fields.presumed}


def build_architecture(name: str, config: Architecture) -> "onnx.ModelProto":
    """Return the ONNX graph of what a reader made of a configuration.

    Args:
        name: Name of the graph.
        config: What to build.
    """
    return BUILDERS[type(config)](name, config)
