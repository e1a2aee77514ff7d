"""Hugging Face configurations as configurations of our builders: a table of families, one reader each.

A `config.json` is a table of numbers. A reader takes the fields its family has and turns them into a `DecoderConfig`.
What a configuration says beyond that must not change the model: every field of `NEUTRAL` that nobody has read has to
have a value there, or the model is one that the family's builder does not know (`Unbuilt`). Nothing is dropped
silently.

Defaults are those of the configuration classes of transformers 5.24, which apply where a file leaves a field out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from autopar.errors import ModelError
from autopar.models.decoder import Activation, Attention, DecoderConfig, Mlp, Names, Norm
from autopar.models.rotary import Rope, longrope_amplitude, yarn_amplitude

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "head_dim": (None,),
    "is_encoder_decoder": (False,),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (False,),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "partial_rotary_factor": (None, 1, 1.0),
    "qk_layernorm": (False, None),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "scale_attn_by_inverse_layer_idx": (False,),
    "use_bidirectional_attention": (False, None),
    "use_qk_norm": (False, None),
}
"""Fields that change a model, and the values at which they do not."""


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """A model that no builder of ours makes, though PyTorch may export it.

    Attributes:
        reason: What the builder of its family does not know, as the end of a sentence.
    """

    reason: str


@dataclass(slots=True)
class Fields:
    """The fields of a configuration, read by name; it remembers which have been read.

    Attributes:
        values: The configuration.
        taken: Names that were read.
    """

    values: Mapping[str, Any]
    taken: set[str] = field(default_factory=set)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of some fields that is there and not null."""
        self.taken.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive whole number.

        Raises:
            ModelError: If it is missing and has no default, or is none.
        """
        value = self.get(*names, default=default)
        if value is None:
            raise self._wrong(names[0], "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(names[0], f"is {value!r}, not a whole number above 0")
        return value

    def number(self, *names: str, default: float) -> float:
        """Return a positive number.

        Raises:
            ModelError: If it is none.
        """
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or not isfinite(value):
            raise self._wrong(names[0], f"is {value!r}, not a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            ModelError: If it is neither.
        """
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self._wrong(name, f"is {value!r}, neither true nor false")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a nested table; empty if there is none.

        Raises:
            ModelError: If it is something else.
        """
        value = self.get(name, default={})
        if not isinstance(value, dict):
            raise self._wrong(name, f"is {value!r}, not a table")
        return value

    def unread(self) -> str:
        """Return the first field nobody has read whose value changes the model, with its value; "" if there is none."""
        for name, values in NEUTRAL.items():
            if name not in self.taken and name in self.values:
                value = self.values[name]
                if not any(value == neutral and type(value) is type(neutral) for neutral in values):
                    return f"{name}={value!r}"
        return ""

    def _wrong(self, name: str, what: str) -> ModelError:
        return ModelError(
            f"{name} of the configuration {what}", hint="download the config.json of the model again, or correct it"
        )


class _UnknownError(Exception):
    """A value that the family's builder does not know; caught where the family is read."""


_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "relu2": "relu-squared",
}


def _activation(fields: Fields, *names: str, default: str) -> Activation:
    value = fields.get(*names, default=default)
    if value not in _ACTIVATIONS:
        raise _UnknownError(f"{names[0]}={value!r}")
    return _ACTIVATIONS[value]


def _rope(fields: Fields, head: int, seq: int, *, share: float = 1.0) -> Rope:
    """Return the rotary positions: `rope_parameters`, or `rope_theta` beside `rope_scaling` as files had it before.

    Args:
        fields: The configuration.
        head: Elements of a head.
        seq: Tokens per sequence, which choose between the factors of `longrope`.
        share: Rotated part of a head unless the configuration says another.
    """
    scaling = Fields({**fields.table("rope_scaling"), **fields.table("rope_parameters")})
    theta = scaling.number("rope_theta", default=fields.number("rope_theta", "rotary_emb_base", default=1e4))
    part = fields.number("partial_rotary_factor", "rotary_pct", default=share)
    size = int(head * scaling.number("partial_rotary_factor", default=part))
    kind = scaling.get("rope_type", "type", default="default")
    longest = fields.size("max_position_embeddings", default=seq)
    if kind == "default" or (kind == "dynamic" and seq <= longest):
        return Rope(theta, size)
    original = scaling.get("original_max_position_embeddings")
    original = fields.get("original_max_position_embeddings", default=longest) if original is None else original
    if isinstance(original, bool) or not isinstance(original, int) or original < 1:
        raise ModelError(
            f"original_max_position_embeddings of the configuration is {original!r}, not a whole number above 0",
            hint="download the config.json of the model again, or correct it",
        )
    match kind:
        case "linear":
            return Rope(theta, size, "linear", scaling.number("factor", default=1.0))
        case "llama3":
            low, high = scaling.number("low_freq_factor", default=1.0), scaling.number("high_freq_factor", default=4.0)
            return Rope(theta, size, "llama3", scaling.number("factor", default=8.0), original, low, high)
        case "yarn":
            factor = scaling.number("factor", default=longest / original)
            usual = yarn_amplitude(factor)
            if scaling.get("mscale") and scaling.get("mscale_all_dim"):
                parts = (scaling.number(name, default=1.0) for name in ("mscale", "mscale_all_dim"))
                above, below = (yarn_amplitude(factor, each) for each in parts)
                usual = above / below
            return Rope(
                theta, size, "yarn", factor, original,
                low=scaling.number("beta_slow", default=1.0), high=scaling.number("beta_fast", default=32.0),
                truncate=scaling.flag("truncate", True), amplitude=scaling.number("attention_factor", default=usual),
            )  # fmt: skip
        case "longrope":
            name = "long_factor" if seq > original else "short_factor"
            factors = scaling.get(name)
            if not isinstance(factors, list) or len(factors) != size // 2:
                raise ModelError(
                    f"{name} of rope_scaling has to be a list of {size // 2} numbers, one per pair of rotated elements",
                    hint="download the config.json of the model again, or correct it",
                )
            usual = longrope_amplitude(longest / original, original)
            amplitude = scaling.number("attention_factor", default=usual)
            return Rope(theta, size, "longrope", factors=tuple(map(float, factors)), amplitude=amplitude)
    raise _UnknownError(f"rope_type={kind!r}")


def _refuse_window(fields: Fields, seq: int, *, active: bool = True) -> None:
    """Refuse a sliding window that a sequence is longer than; a wider one hides nothing.

    Args:
        fields: The configuration.
        seq: Tokens per sequence.
        active: Whether layers have the window where `layer_types` does not say which do.
    """
    window, kinds = fields.get("sliding_window"), fields.get("layer_types", default=[])
    if not isinstance(kinds, list):
        raise ModelError(f"layer_types of the configuration is {kinds!r}, not a list", hint="correct the config.json")
    strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if strange:
        raise _UnknownError(f"layer_types with {strange[0]!r}")
    active = "sliding_attention" in kinds if kinds else active
    if active and isinstance(window, int) and window < seq:
        raise _UnknownError(f"sliding_window={window} below the {seq} tokens of a sequence (seq={window} has none)")


_LLAMA = Names(
    embed="model.embed_tokens",
    layer="model.layers.{}",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    final_norm="model.norm",
)


def _head_size(fields: Fields, hidden: int, heads: int) -> int:
    """Return `head_dim`, or the width by the heads.

    Raises:
        ModelError: If the heads do not divide the width and nothing says how large one is.
    """
    if fields.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"hidden_size {hidden} of the configuration is not divisible by its {heads} heads",
            hint="correct num_attention_heads, or say head_dim",
        )
    return fields.size("head_dim", default=hidden // heads)


def _llama(
    fields: Fields,
    seq: int,
    *,
    kv_heads: int | None = None,
    epsilon: float = 1e-6,
    qkv_bias: bool | None = None,
    window: bool = False,
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
        window: Whether the family has a sliding window by default.
        **parts: Fields of `Attention` (`qk_norm`, `fused`, `scale`), and of `DecoderConfig`.
    """
    hidden, heads = fields.size("hidden_size", default=4096), fields.size("num_attention_heads", default=32)
    head = _head_size(fields, hidden, heads)
    _refuse_window(fields, seq, active=window or fields.flag("use_sliding_window", False))
    bias = fields.flag("attention_bias", False) if qkv_bias is None else qkv_bias
    of_attention = {name: parts.pop(name) for name in ("qk_norm", "fused", "scale") if name in parts}
    names = parts.pop("names", _LLAMA)
    return DecoderConfig(
        num_layers=fields.size("num_hidden_layers", default=32),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=32000),
        attention=Attention(
            heads, fields.size("num_key_value_heads", default=kv_heads or heads), head,
            qkv_bias=bias, out_bias=bias and qkv_bias is None, rope=_rope(fields, head, seq), **of_attention,
        ),
        mlp=Mlp(
            fields.size("intermediate_size", default=11008),
            _activation(fields, "hidden_act", default="silu"),
            bias=fields.flag("mlp_bias", False),
            fused=len(names.mlp) == 2,
        ),
        norm=Norm("rms", fields.number("rms_norm_eps", default=epsilon)),
        arrangement=parts.pop("arrangement", "pre"),
        names=names,
        tied=fields.flag("tie_word_embeddings", parts.pop("tied", False)),
        **parts,
    )  # fmt: skip


def _mistral(fields: Fields, seq: int) -> DecoderConfig:
    return _llama(fields, seq, kv_heads=8, window=True)


def _qwen2(fields: Fields, seq: int) -> DecoderConfig:
    return _llama(fields, seq, qkv_bias=True)


def _qwen3(fields: Fields, seq: int) -> DecoderConfig:
    return _llama(fields, seq, qk_norm="head")


def _olmo2(fields: Fields, seq: int) -> DecoderConfig:
    names = Names(
        _LLAMA.embed, _LLAMA.layer, "post_attention_layernorm", "post_feedforward_layernorm", _LLAMA.qkv, _LLAMA.out,
        _LLAMA.mlp, _LLAMA.final_norm,
    )  # fmt: skip
    return _llama(fields, seq, epsilon=1e-5, qk_norm="width", arrangement="post", names=names)


def _phi3(fields: Fields, seq: int) -> DecoderConfig:
    names = Names(
        _LLAMA.embed, _LLAMA.layer, _LLAMA.attention_norm, _LLAMA.mlp_norm, ("self_attn.qkv_proj",), _LLAMA.out,
        ("mlp.gate_up_proj", "mlp.down_proj"), _LLAMA.final_norm,
    )  # fmt: skip
    return _llama(fields, seq, epsilon=1e-5, fused="blocks", window=True, names=names)


def _granite(fields: Fields, seq: int) -> DecoderConfig:
    return _llama(
        fields, seq,
        scale=fields.number("attention_multiplier", default=1.0),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logits_scale=1.0 / fields.number("logits_scaling", default=1.0),
    )  # fmt: skip


def _nemotron(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=6144), fields.size("num_attention_heads", default=48)
    head, bias = _head_size(fields, hidden, heads), fields.flag("attention_bias", False)
    names = Names(
        _LLAMA.embed, _LLAMA.layer, _LLAMA.attention_norm, _LLAMA.mlp_norm, _LLAMA.qkv, _LLAMA.out,
        ("mlp.up_proj", "mlp.down_proj"), _LLAMA.final_norm,
    )  # fmt: skip
    return DecoderConfig(
        num_layers=fields.size("num_hidden_layers", default=32),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=256000),
        attention=Attention(
            heads, fields.size("num_key_value_heads", default=heads), head, qkv_bias=bias, out_bias=bias,
            rope=_rope(fields, head, seq, share=0.5),
        ),
        mlp=Mlp(
            fields.size("intermediate_size", default=24576), _activation(fields, "hidden_act", default="relu2"),
            gated=False, bias=fields.flag("mlp_bias", False),
        ),
        norm=Norm("layer", fields.number("norm_eps", default=1e-5), from_zero=True),
        arrangement="pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", False),
    )  # fmt: skip


def _starcoder2(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=3072), fields.size("num_attention_heads", default=24)
    head, bias = _head_size(fields, hidden, heads), fields.flag("use_bias", True)
    _refuse_window(fields, seq)
    names = Names(
        _LLAMA.embed, _LLAMA.layer, _LLAMA.attention_norm, _LLAMA.mlp_norm, _LLAMA.qkv, _LLAMA.out,
        ("mlp.c_fc", "mlp.c_proj"), _LLAMA.final_norm,
    )  # fmt: skip
    return DecoderConfig(
        num_layers=fields.size("num_hidden_layers", default=30),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=49152),
        attention=Attention(
            heads, fields.size("num_key_value_heads", default=2), head, qkv_bias=bias, out_bias=bias,
            rope=_rope(fields, head, seq),
        ),
        mlp=Mlp(
            fields.size("intermediate_size", default=12288),
            _activation(fields, "hidden_act", default="gelu_pytorch_tanh"), gated=False, bias=bias,
        ),
        norm=Norm("layer", fields.number("norm_epsilon", default=1e-5)),
        arrangement="pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip


def _gpt_neox(fields: Fields, seq: int) -> DecoderConfig:
    hidden, heads = fields.size("hidden_size", default=6144), fields.size("num_attention_heads", default=64)
    head, bias = _head_size(fields, hidden, heads), fields.flag("attention_bias", True)
    names = Names(
        "gpt_neox.embed_in", "gpt_neox.layers.{}", "input_layernorm", "post_attention_layernorm",
        ("attention.query_key_value",), "attention.dense", ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        "gpt_neox.final_layer_norm",
    )  # fmt: skip
    return DecoderConfig(
        num_layers=fields.size("num_hidden_layers", default=44),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=50432),
        attention=Attention(
            heads, heads, head, fused="heads", qkv_bias=bias, out_bias=bias,
            rope=_rope(fields, head, seq, share=0.25),
        ),
        mlp=Mlp(
            fields.size("intermediate_size", default=24576), _activation(fields, "hidden_act", default="gelu"),
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
        raise _UnknownError("scale_attn_weights=False")
    names = Names(
        "transformer.wte", "transformer.h.{}", "ln_1", "ln_2", ("attn.c_attn",), "attn.c_proj",
        ("mlp.c_fc", "mlp.c_proj"), "transformer.ln_f", positions="transformer.wpe",
    )  # fmt: skip
    return DecoderConfig(
        num_layers=fields.size("n_layer", default=12),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=50257),
        attention=Attention(
            heads, heads, _head_size(fields, hidden, heads), fused="blocks", qkv_bias=True, out_bias=True,
            transposed=False,
        ),
        mlp=Mlp(
            fields.size("n_inner", default=4 * hidden),
            _activation(fields, "activation_function", default="gelu_new"), gated=False, bias=True, transposed=False,
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
            raise _UnknownError(f"{name}={not usual}")
    if fields.size("word_embed_proj_dim", default=hidden) != hidden:
        raise _UnknownError("word_embed_proj_dim unlike hidden_size")
    names = Names(
        "model.decoder.embed_tokens", "model.decoder.layers.{}", "self_attn_layer_norm", "final_layer_norm",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj", ("fc1", "fc2"),
        "model.decoder.final_layer_norm", positions="model.decoder.embed_positions",
    )  # fmt: skip
    return DecoderConfig(
        num_layers=fields.size("num_hidden_layers", default=12),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=50272),
        attention=Attention(heads, heads, _head_size(fields, hidden, heads), qkv_bias=bias, out_bias=bias),
        mlp=Mlp(
            fields.size("ffn_dim", default=3072), _activation(fields, "activation_function", default="relu"),
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
    head, bias = _head_size(fields, hidden, heads), fields.flag("bias", False)
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
        raise _UnknownError("new_decoder_architecture without parallel_attn")
    return DecoderConfig(
        num_layers=fields.size("num_hidden_layers", default=32),
        hidden=hidden,
        seq=seq,
        vocab=fields.size("vocab_size", default=65024),
        attention=Attention(
            heads, kv_heads, head, fused="groups" if grouped else "heads" if kv_heads == heads else "blocks",
            qkv_bias=bias, out_bias=bias, rope=_rope(fields, head, seq),
        ),
        mlp=Mlp(
            fields.size("ffn_hidden_size", default=4 * hidden), _activation(fields, "activation", default="gelu"),
            gated=False, bias=bias,
        ),
        norm=Norm("layer", fields.number("layer_norm_epsilon", default=1e-5)),
        arrangement="parallel" if two else "parallel-shared" if parallel else "pre",
        names=names,
        tied=fields.flag("tie_word_embeddings", True),
    )  # fmt: skip


READERS: Mapping[str, Callable[[Fields, int], DecoderConfig]] = {
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
}
"""Reader of each `model_type`."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")


def read_architecture(config: Mapping[str, Any], seq: int) -> DecoderConfig | Unbuilt:
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
    heads = config.get("architectures") or []
    if heads and not str(heads[0]).endswith(_CAUSAL):
        return Unbuilt(f"architectures={heads!r}; {kind} is built as a language model")
    fields = Fields(config)
    try:
        found = reader(fields, seq)
    except _UnknownError as error:
        return Unbuilt(str(error))
    unread = fields.unread()
    return Unbuilt(unread) if unread else found
