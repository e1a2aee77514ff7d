"""Encoders: what makes a sequence of tokens or of an image, a stack of blocks, and what is made of their result.

What the parts are, an `EncoderConfig` says. Dims: B batch, S sequence, d model width, V vocabulary, H heads.
"""

from typing import TYPE_CHECKING, assert_never

import numpy as np
from numpy.typing import NDArray

from autopar.models import layers
from autopar.models.decoder import transformer_block
from autopar.models.decoder_config import TRANSPOSED
from autopar.models.encoder_config import (
    AttentionPool,
    EncoderConfig,
    FlatPatches,
    MaskedLanguageHead,
    OneToken,
    Patches,
    Tokens,
    WholeSequence,
)
from autopar.models.experts import mlp
from autopar.models.rotary import Grid
from autopar.models.writer import Writer

if TYPE_CHECKING:
    import onnx


def build(name: str, config: EncoderConfig) -> "onnx.ModelProto":
    """Return the graph of an encoder.

    Its input is `input_ids` int64 [batch, seq] or `pixel_values` float32 [batch, channels, height, width]; its output
    is `logits` [batch, seq, vocab] or what the head says.
    """
    w = Writer(name, config)
    match config.embedding:
        case Tokens() as part:
            ids = w.g.input("input_ids", ("batch", config.seq), "int64")
            x = embed_tokens(w, ids, part, "embed")
        case Patches() as part:
            pixels = w.g.input("pixel_values", ("batch", part.channels, *part.image))
            x = embed_patches(w, pixels, part, "embed")
        case FlatPatches():
            raise AssertionError("towers of flat patches are part of decoders of images and text")
    for index, block in enumerate(config.blocks):
        x = transformer_block(w, x, f"layers.{index}", config.names.layer.format(index), block)
    return w.g.model(write_head(w, x, config))


def embed_tokens(w: Writer, ids: str, part: Tokens, name: str) -> str:
    """Return tokens as a sequence [B, S, d], placed and, where the model does it, normalised.

    Args:
        w: Where to write.
        ids: Tokens [B, S].
        part: The embedding.
        name: Prefix of all ops.
    """
    g, hidden = w.g, w.config.hidden
    tokens, positions, segments, norm = part.names
    x = g.op("Gather", g.parameter(f"{tokens}.weight", (part.vocab, hidden)), ids, name=f"{name}.tokens", axis=0)
    if part.segments:
        segment = g.parameter(f"{segments}.weight", (part.segments, hidden))
        first = g.op("Gather", segment, g.constant(0), name=f"{name}.segment", axis=0)
        x = g.op("Add", x, first, name=f"{name}.segmented")
    table = g.parameter(f"{positions}.weight", (part.positions, hidden))
    x = g.op("Add", x, positions_of(w, table, part.positions, part.first_position, name), name=f"{name}.placed")
    return w.norm(x, f"{name}.norm", norm) if norm else x


def positions_of(w: Writer, table: str, rows: int, first: int, name: str) -> str:
    """Return the rows [S, d] of a table of learned positions, from `first` on."""
    if first == 0 and w.config.seq == rows:
        return table
    g = w.g
    ends = (g.constant((end,)) for end in (first, first + w.config.seq))
    return g.op("Slice", table, *ends, g.constant((0,)), name=f"{name}.positions")


def embed_patches(w: Writer, pixels: str, part: Patches, name: str) -> str:
    """Return the patches of images as a sequence [B, S, d], placed and, where the model does it, normalised.

    Args:
        w: Where to write.
        pixels: Images [B, channels, height, width].
        part: The embedding.
        name: Prefix of all ops.
    """
    g, hidden, count = w.g, w.config.hidden, part.grid[0] * part.grid[1]
    fan = part.channels * part.patch[0] * part.patch[1]
    shape = (hidden, part.channels, *part.patch)
    held = (hidden, fan) if part.flat_kernel else shape
    kernel = g.parameter(f"{part.projection}.weight", held, f"normal {fan**-0.5:.6g}")
    if part.flat_kernel:
        kernel = g.op("Reshape", kernel, g.constant(shape), name=f"{name}.kernel")
    shift = (g.parameter(f"{part.projection}.bias", (hidden,), "constant 0"),) if part.bias else ()
    x = g.op("Conv", pixels, kernel, *shift, name=f"{name}.patches", kernel_shape=part.patch, strides=part.patch)
    x = g.op("Reshape", x, g.constant((0, hidden, count)), name=f"{name}.flat")
    x = g.op("Transpose", x, name=f"{name}.rows", perm=(0, 2, 1))
    if part.class_token:
        token = g.parameter(part.class_token, part.class_shape)
        token = g.op("Expand", token, g.batch_shape(pixels, 3), name=f"{name}.class")
        x = g.op("Concat", *((x, token) if part.class_last else (token, x)), name=f"{name}.tokens", axis=1)
    placed = (part.seq, hidden) if part.positions_rank == 2 else (1, part.seq, hidden)
    x = g.op("Add", x, g.parameter(part.positions, placed), name=f"{name}.placed")
    return w.norm(x, f"{name}.norm", part.norm) if part.norm else x


def embed_flat_patches(w: Writer, pixels: str, part: FlatPatches, name: str) -> str:
    """Return rows of pixels [B, S, P] as a sequence [B, S, d], placed where the model has a table of positions.

    Patches go window by window where the model has windows.

    Args:
        w: Where to write.
        pixels: The rows.
        part: The embedding.
        name: Prefix of all ops.
    """
    g, hidden = w.g, w.config.hidden
    x = w.linear(pixels, f"{name}.patches", part.projection, part.pixels, hidden, bias=part.bias)
    if part.window:
        places = g.constant(tuple(window_order(part).tolist()))
        x = g.op("Gather", x, places, name=f"{name}.windows", axis=1)
    if not part.positions:
        return x
    assert not part.window, "positions of windows are rotary"
    rows, columns = Grid(*part.grid, (), part.block).coordinates_of().T
    order = tuple((rows * part.grid[1] + columns).tolist())
    table = g.parameter(f"{part.positions}.weight", (part.seq, hidden))
    return g.op(
        "Add", x, g.op("Gather", table, g.constant(order), name=f"{name}.places", axis=0), name=f"{name}.placed"
    )


def window_order(part: FlatPatches) -> NDArray[np.int64]:
    """Return the places of patches without windows in the order that they have in windows: (patches,)."""
    columns = part.grid[1]
    plain, windowed = (
        Grid(*part.grid, (), part.block, window=window).coordinates_of() @ np.array([columns, 1])
        for window in (0, part.window)
    )
    place = np.argsort(plain)
    found: NDArray[np.int64] = place[windowed]
    return found


def write_head(w: Writer, x_BSd: str, config: EncoderConfig, prefix: str = "") -> dict[str, tuple[int | str, ...]]:
    """Write the head and return the shapes of the model's outputs.

    Args:
        w: Where to write.
        x_BSd: Result of the last block.
        config: The encoder.
        prefix: What names of ops begin with.
    """
    hidden, seq, part = config.hidden, config.seq, config.head
    match part:
        case MaskedLanguageHead():
            assert isinstance(config.embedding, Tokens), "a language model embeds tokens"
            vocab = config.embedding.vocab
            _masked_language_head(w, x_BSd, part, f"{config.embedding.names[0]}.weight", vocab)
            return {"logits": ("batch", seq, vocab)}
        case OneToken():
            # Elements are normalised by themselves: the others' norms are left out.
            place = w.g.constant(seq - 1 if part.is_last else 0)
            one = w.g.op("Gather", x_BSd, place, name=f"{prefix}pooled.{'last' if part.is_last else 'first'}", axis=1)
            if not part.projection:
                w.norm(one, part.output, part.norm)
                return {part.output: ("batch", hidden)}
            pooled = w.norm(one, f"{prefix}pooled", part.norm)
            w.linear(pooled, part.output, part.projection, hidden, part.width, bias=part.bias)
            return {part.output: ("batch", part.width)}
        case AttentionPool():
            _attention_pool(w, x_BSd, part)
            return {part.output: ("batch", hidden)}
        case WholeSequence():
            w.norm(x_BSd, part.output, part.norm)
            return {part.output: ("batch", seq, hidden)}
        case _:
            assert_never(part)


def _masked_language_head(w: Writer, x_BSd: str, part: MaskedLanguageHead, embedding_Vd: str, vocab: int) -> None:
    g, hidden = w.g, w.config.hidden
    dense, norm, bias = part.names
    x = w.activated(w.linear(x_BSd, "head.dense", dense, hidden, hidden, bias=True), "head", part.activation)
    product = layers.tied_head(g, w.norm(x, "head.norm", norm), embedding_Vd, "head.decoder")
    g.op("Add", product, g.parameter(bias, (vocab,), "constant 0"), name="logits")


def _attention_pool(w: Writer, x_BSd: str, part: AttentionPool) -> None:
    g, hidden, at = w.g, w.config.hidden, f"{part.prefix}.attention"
    size = hidden // part.heads

    def projected(value: str, which: str, length: int) -> str:
        weight = g.parameter(f"{at}.in_proj_weight.{which}{TRANSPOSED}", (hidden, hidden), f"normal {hidden**-0.5:.6g}")
        bias = g.parameter(f"{at}.in_proj_bias.{which}", (hidden,), "constant 0")
        flat = g.op("Add", g.op("MatMul", value, weight, name=f"pool.{which}.matmul"), bias, name=f"pool.{which}")
        return layers.split_heads(g, flat, f"pool.{which}", length, part.heads, size)

    x_BSd = w.norm(x_BSd, "final_norm", part.norm)
    query = g.parameter(f"{part.prefix}.probe", (1, 1, hidden))
    query_B1d = g.op("Expand", query, g.batch_shape(x_BSd, 3), name="pool.query")
    q, k, v = projected(query_B1d, "q", 1), *(projected(x_BSd, which, w.config.seq) for which in "kv")
    y_BH1D = g.op("Attention", q, k, v, name="pool.core", is_causal=0)
    merged = layers.merge_heads(g, y_BH1D, "pool.core", 1, hidden)
    y = w.linear(merged, "pool.out", f"{at}.out_proj", hidden, hidden, bias=True)
    normed = w.norm(y, "pool.norm", f"{part.prefix}.layernorm")
    fed = mlp(w, normed, "pool.mlp", part.prefix, part.mlp, ("mlp.fc1", "mlp.fc2"))
    g.op("Gather", g.op("Add", y, fed, name="pool.sum"), g.constant(0), name=part.output, axis=1)
