"""Encoder-decoders: an encoder of tokens or of sound, and a decoder whose blocks attend to what the encoder makes.

What the parts are, an `EncoderDecoderConfig` says. Dims: B batch, S sequence, d model width, V vocabulary, H heads.
"""

from typing import TYPE_CHECKING

from autopar.models import layers
from autopar.models.attention import Memory, grouped_attention
from autopar.models.decoder_config import Attention, Block, Mlp
from autopar.models.encoder_decoder_config import Audio, Cross, EncoderDecoderConfig, Side
from autopar.models.experts import mlp
from autopar.models.writer import Writer

if TYPE_CHECKING:
    import onnx


def build(name: str, config: EncoderDecoderConfig) -> "onnx.ModelProto":
    """Return the graph of an encoder-decoder.

    Its inputs are `input_ids` int64 [batch, seq] or `input_features` float32 [batch, channels, frames], and
    `decoder_input_ids` int64 [batch, seq]; its output is `logits` [batch, seq, vocab].
    """
    encoder, decoder = config.encoder, config.decoder
    w = Writer(name, encoder)
    g, table = w.g, (config.vocab, decoder.hidden)
    if config.audio is None:
        tokens = g.input("input_ids", ("batch", encoder.seq), "int64")
        embedding = g.parameter(f"{decoder.names.embed}.weight", table)
        x = g.op("Gather", embedding, tokens, name="encoder.embed", axis=0)
    else:
        embedding = ""
        x = _frames(w, config.audio)
    x = _stack(w, x, "encoder", encoder)
    memory = Memory(w.norm(x, "encoder.final_norm", encoder.names.final_norm), encoder.seq)

    w = Writer(g, decoder)
    tokens = g.input("decoder_input_ids", ("batch", decoder.seq), "int64")
    embedding = embedding or g.parameter(f"{decoder.names.embed}.weight", table)
    x = g.op("Gather", embedding, tokens, name="decoder.embed", axis=0)
    x = _stack(w, x, "decoder", decoder, config.cross, memory)
    x = w.scaled(w.norm(x, "decoder.final_norm", decoder.names.final_norm), config.logits_scale)
    if config.tied:
        layers.tied_head(g, x, embedding, "logits")
    else:
        w.linear(x, "logits", decoder.names.head, decoder.hidden, config.vocab)
    return g.model({"logits": ("batch", decoder.seq, config.vocab)})


def _frames(w: Writer, part: Audio) -> str:
    """Return frames of sound as a sequence [B, S, d]."""
    g, hidden = w.g, w.config.hidden
    x = g.input("input_features", ("batch", part.channels, 2 * w.config.seq))
    for number, (name, channels) in enumerate(zip(part.convolutions, (part.channels, hidden), strict=True), 1):
        kernel = g.parameter(f"{name}.weight", (hidden, channels, 3), f"normal {(3 * channels) ** -0.5:.6g}")
        bias = g.parameter(f"{name}.bias", (hidden,), "constant 0")
        op = f"encoder.conv{number}"
        x = g.op("Conv", x, kernel, bias, name=op, kernel_shape=(3,), strides=(number,), pads=(1, 1))
        x = w.activated(x, op, "gelu")
    return g.op("Transpose", x, name="encoder.frames", perm=(0, 2, 1))


def _stack(
    w: Writer, x_BSd: str, name: str, side: Side, cross: Cross | None = None, memory: Memory | None = None
) -> str:
    """Return what positions and blocks make of a sequence."""
    g = w.g
    if side.positions:
        shape, of = (side.positions, side.hidden), f"{side.names.positions}.weight"
        table = g.parameter(of, shape) if side.positions_are_trained else g.buffer(of, shape, "sinusoids 10000")
        if side.seq < side.positions:
            ends = g.constant((0,)), g.constant((side.seq,)), g.constant((0,))
            table = g.op("Slice", table, *ends, name=f"{name}.positions")
        x_BSd = g.op("Add", x_BSd, table, name=f"{name}.embed.placed")
    bias = _distance_bias(w, name, side)
    for index, block in enumerate(side.blocks):
        layer, weights = f"{name}.layers.{index}", side.names.layer.format(index)
        x_BSd = _attended(w, x_BSd, f"{layer}.attn", weights, block, side, bias)
        if cross is not None:
            normed = w.norm(x_BSd, f"{layer}.cross_norm", f"{weights}.{cross.names.attention_norm}")
            y = grouped_attention(w, normed, f"{layer}.cross", weights, cross.attention, cross.names, memory=memory)
            x_BSd = g.op("Add", x_BSd, y, name=f"{layer}.cross_residual")
        assert isinstance(block.mlp, Mlp), "encoder-decoders have no experts"
        normed = w.norm(x_BSd, f"{layer}.mlp_norm", f"{weights}.{side.names.mlp_norm}")
        y = mlp(w, normed, f"{layer}.mlp", weights, block.mlp, side.names.mlp)
        x_BSd = g.op("Add", x_BSd, y, name=f"{layer}.mlp_residual")
    return x_BSd


def _attended(w: Writer, x_BSd: str, name: str, weights: str, block: Block, side: Side, bias: str) -> str:
    assert isinstance(block.attention, Attention), "encoder-decoders have no latent attention"
    normed = w.norm(x_BSd, f"{name}_norm", f"{weights}.{side.names.attention_norm}")
    y = grouped_attention(w, normed, name, weights, block.attention, side.names, distance_bias=bias)
    return w.g.op("Add", x_BSd, y, name=f"{name}_residual")


def _distance_bias(w: Writer, name: str, side: Side) -> str:
    """Return the biases by distance [H, R] of the scores of a stack's self-attention; "" without."""
    part = side.relative
    if part is None:
        return ""
    attention = side.blocks[0].attention
    assert isinstance(attention, Attention), "encoder-decoders have no latent attention"
    g = w.g
    table = g.parameter(f"{part.table}.weight", (part.buckets, attention.heads))
    rows = g.op("Gather", table, g.constant(part.bucket_of_distance()), name=f"{name}.distances", axis=0)
    return g.op("Transpose", rows, name=f"{name}.distance_bias", perm=(1, 0))
