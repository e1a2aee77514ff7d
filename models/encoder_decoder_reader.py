"""Configurations of encoder-decoders: T5 (Raffel et al. 2020) and Whisper (Radford et al. 2022)."""

from collections.abc import Callable, Mapping

from autopar.errors import ModelError
from autopar.models.config_fields import Fields, UnknownError, activation
from autopar.models.decoder_config import Attention, Block, Mlp, Names, Norm
from autopar.models.encoder_decoder_config import Audio, Cross, EncoderDecoderConfig, RelativePositions, Side
from autopar.models.encoder_reader import built_as


def _t5(fields: Fields, seq: int) -> EncoderDecoderConfig:
    """Read T5, and T5 1.1 with gated MLPs and a head of its own.

    transformers 5 ties the head of T5 1.1, too, and tells it from T5 by `tie_word_embeddings`; its checkpoints and its
    authors have a head of its own.
    """
    built_as(fields, "T5ForConditionalGeneration")
    if not fields.flag("is_encoder_decoder", True):
        raise UnknownError("is_encoder_decoder=False")
    hidden, heads = fields.size("d_model", default=512), fields.size("num_heads", default=8)
    size, width = fields.size("d_kv", default=64), fields.size("d_ff", default=2048)
    kind = str(fields.get("feed_forward_proj", default="relu"))
    gated = kind.startswith("gated-")
    inner = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    mlp = Mlp(width, activation(Fields({"feed_forward_proj": inner}), "feed_forward_proj", default="relu"), gated=gated)
    count = fields.size("num_layers", default=6)
    norm = Norm("rms", fields.number("layer_norm_epsilon", default=1e-6))
    buckets = fields.size("relative_attention_num_buckets", default=32)
    reach = fields.size("relative_attention_max_distance", default=128)
    tied = fields.flag("tie_word_embeddings", True)

    def projections(layer: int, name: str) -> tuple[str, ...]:
        return tuple(f"layer.{layer}.{name}.{part}" for part in "qkvo")

    def side(which: str, layers: int, feed: int) -> Side:
        *qkv, out = projections(0, "SelfAttention")
        of_mlp = [f"layer.{feed}.DenseReluDense.{part}" for part in (("wi_0", "wi_1", "wo") if gated else ("wi", "wo"))]
        names = Names(
            "shared", f"{which}.block.{{}}", "layer.0.layer_norm", f"layer.{feed}.layer_norm", tuple(qkv), out,
            tuple(of_mlp), f"{which}.final_layer_norm",
        )  # fmt: skip
        attention = Attention(heads, heads, size, scale=1.0, causal=which == "decoder")
        table = f"{which}.block.0.layer.0.SelfAttention.relative_attention_bias"
        relative = RelativePositions(table, buckets, reach, both_ways=which == "encoder")
        return Side((Block(attention, mlp),) * layers, hidden, seq, norm, names, relative)

    *qkv, out = projections(1, "EncDecAttention")
    return EncoderDecoderConfig(
        side("encoder", count, 1),
        side("decoder", fields.size("num_decoder_layers", default=count), 2),
        Cross(
            Attention(heads, heads, size, scale=1.0, causal=False),
            Names("", "", "layer.1.layer_norm", "", tuple(qkv), out, (), ""),
        ),
        fields.size("vocab_size", default=32128),
        tied=tied,
        logits_scale=hidden**-0.5 if tied else 1.0,
    )


def _whisper(fields: Fields, seq: int) -> EncoderDecoderConfig:
    built_as(fields, "WhisperForConditionalGeneration")
    for name, usual in (("is_encoder_decoder", True), ("tie_word_embeddings", True), ("scale_embedding", False)):
        if fields.flag(name, usual) != usual:
            raise UnknownError(f"{name}={not usual}")
    hidden = fields.size("d_model", default=384)
    nonlinearity = activation(fields, "activation_function", default="gelu")
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def attention(heads: int, *, causal: bool) -> Attention:
        if hidden % heads:
            raise ModelError(
                f"d_model {hidden} of the configuration is not divisible by its {heads} heads",
                hint="correct encoder_attention_heads and decoder_attention_heads",
            )
        size = hidden // heads
        return Attention(heads, heads, size, qkv_bias=True, key_bias=False, out_bias=True, causal=causal)

    def side(which: str, length: int, positions: int, *, trained: bool) -> Side:
        heads = fields.size(f"{which}_attention_heads", default=6)
        mlp = Mlp(fields.size(f"{which}_ffn_dim", default=1536), nonlinearity, gated=False, bias=True)
        names = Names(
            "model.decoder.embed_tokens", f"model.{which}.layers.{{}}", "self_attn_layer_norm", "final_layer_norm",
            qkv, "self_attn.out_proj", ("fc1", "fc2"), f"model.{which}.layer_norm",
            positions=f"model.{which}.embed_positions",
        )  # fmt: skip
        block = Block(attention(heads, causal=which == "decoder"), mlp)
        return Side(
            (block,) * fields.size(f"{which}_layers", default=4), hidden, length, Norm("layer", 1e-5), names,
            positions=positions, positions_are_trained=trained,
        )  # fmt: skip

    frames = fields.size("max_source_positions", default=1500)
    return EncoderDecoderConfig(
        side("encoder", frames, frames, trained=False),
        side("decoder", seq, fields.size("max_target_positions", default=448), trained=True),
        Cross(
            attention(fields.size("decoder_attention_heads", default=6), causal=False),
            Names(
                "", "", "encoder_attn_layer_norm", "", tuple(name.replace("self", "encoder") for name in qkv),
                "encoder_attn.out_proj", (), "",
            ),
        ),
        fields.size("vocab_size", default=51865),
        audio=Audio(fields.size("num_mel_bins", default=80), ("model.encoder.conv1", "model.encoder.conv2")),
    )  # fmt: skip


ENCODER_DECODERS: Mapping[str, Callable[[Fields, int], EncoderDecoderConfig]] = {"t5": _t5, "whisper": _whisper}
"""Reader of each `model_type`."""
