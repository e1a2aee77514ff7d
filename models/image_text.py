"""Decoders of images and text: the patches of one image per sequence come first, then the text.

Frameworks put the patches where the text has placeholders; which places these are changes no size and no cost. Dims:
B batch, S sequence, T text, N tokens of an image, d model width.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

import numpy as np

from autopar.models.decoder import transformer_block, write_decoder
from autopar.models.encoder import embed_flat_patches, embed_patches, window_order
from autopar.models.encoder_config import FlatPatches, Patches
from autopar.models.image_text_config import ImageTextConfig, Merger, PixelShuffle, Pooled, Projector
from autopar.models.writer import Writer

if TYPE_CHECKING:
    import onnx


def build(name: str, config: ImageTextConfig) -> "onnx.ModelProto":
    """Return the graph of a decoder of images and text.

    Its inputs are `pixel_values` float32 [batch, channels, height, width], or [batch, patches, pixels] where a tower
    takes rows, and `input_ids` int64 [batch, text]; its output is `logits` [batch, image + text, vocab].
    """
    tower, decoder = config.tower, config.decoder
    w = Writer(name, tower)
    g = w.g
    match tower.embedding:
        case Patches() as part:
            pixels = g.input("pixel_values", ("batch", part.channels, *part.image))
            x = embed_patches(w, pixels, part, "vision.embed")
        case FlatPatches() as part:
            pixels = g.input("pixel_values", ("batch", part.seq, part.pixels))
            x = embed_flat_patches(w, pixels, part, "vision.embed")
        case _:
            raise AssertionError("a vision tower embeds patches")
    ropes = [block.rope for block in tower.blocks if block.rope is not None]
    if ropes:
        w.declare_tables(pixels, ropes, "vision.")
    added: list[str] = []
    of_layer = {tap.layer: (number, tap.merger) for number, tap in enumerate(config.taps)}
    for index, block in enumerate(tower.blocks):
        x = transformer_block(w, x, f"vision.layers.{index}", tower.names.layer.format(index), block)
        if index in of_layer:
            number, merger = of_layer[index]
            added.append(_merged(w, x, f"vision.taps.{number}", merger, config))
    if config.norm:
        x = w.norm(x, "vision.final_norm", config.norm)
    if isinstance(tower.embedding, Patches) and tower.embedding.class_token:
        first = 0 if tower.embedding.class_last else 1
        ends = g.constant((first,)), g.constant((first + tower.seq - 1,)), g.constant((1,))
        x = g.op("Slice", x, *ends, name="vision.patches")
    tokens = g.input("input_ids", ("batch", config.text), "int64")
    image = _projected(w, x, config)
    if isinstance(tower.embedding, FlatPatches) and tower.embedding.window:
        squares = window_order(tower.embedding)[:: tower.embedding.block**2] // tower.embedding.block**2
        image = g.op("Gather", image, g.constant(tuple(np.argsort(squares).tolist())), name="vision.unwindowed", axis=1)
    return write_decoder(Writer(g, decoder), tokens, decoder, before=image, added=added, num_before=config.patches)


def _projected(w: Writer, x_BSd: str, config: ImageTextConfig) -> str:
    """Return the result of the tower as tokens of the decoder."""
    tower, hidden, name = config.tower, config.decoder.hidden, "projector"
    match config.projector:
        case Projector() as part:
            x = w.linear(x_BSd, f"{name}.in", part.names[0], tower.hidden, hidden, bias=part.bias)
            x = w.activated(x, name, part.activation)
            return w.linear(x, f"{name}.out", part.names[1], hidden, hidden, bias=part.bias)
        case Pooled() as part:
            return _pooled(w, x_BSd, name, part, config)
        case Merger() as part:
            return _merged(w, x_BSd, name, part, config)
        case PixelShuffle() as part:
            x = w.linear(_joined(w, x_BSd, name, part, config), f"{name}.in", part.names[0], *_sizes(part, config))
            x = w.linear(w.activated(x, name, "gelu"), f"{name}.inner", part.names[1], part.inner, part.output)
            x = w.activated(x, f"{name}.inner", "gelu")
            return w.linear(x, f"{name}.out", part.names[2], part.output, hidden)
        case _:
            assert_never(config.projector)


def _sizes(part: PixelShuffle, config: ImageTextConfig) -> tuple[int, int]:
    """Return what the first projection behind a shuffle takes and makes."""
    return part.side**2 * config.tower.hidden, part.inner


def _joined(w: Writer, x_BSd: str, name: str, part: PixelShuffle, config: ImageTextConfig) -> str:
    """Return the patches of each square as one row [B, N, side side d]; squares and patches go row by row."""
    g, side, (rows, columns), hidden = w.g, part.side, config.grid, config.tower.hidden
    shape = (0, rows // side, side, columns // side, side, hidden)
    x = g.op("Reshape", x_BSd, g.constant(shape), name=f"{name}.squares")
    x = g.op("Transpose", x, name=f"{name}.square_major", perm=(0, 1, 3, 2, 4, 5))
    return g.op("Reshape", x, g.constant((0, config.patches, side**2 * hidden)), name=f"{name}.rows")


def _pooled(w: Writer, x_BSd: str, name: str, part: Pooled, config: ImageTextConfig) -> str:
    g, side, (rows, columns), hidden = w.g, part.side, config.grid, config.tower.hidden
    shape = (0, rows // side, side, columns // side, side, hidden)
    x = g.op("Reshape", x_BSd, g.constant(shape), name=f"{name}.squares")
    x = g.op("ReduceMean", x, g.constant((2, 4)), name=f"{name}.means", keepdims=0)
    x = g.op("Reshape", x, g.constant((0, config.patches, hidden)), name=f"{name}.pooled")
    of_norm = Writer(g, replace(config.tower, norm=part.norm))
    x = of_norm.norm(x, f"{name}.norm", part.norm_name)
    matrix = g.parameter(part.projection, (hidden, config.decoder.hidden), f"normal {hidden**-0.5:.6g}")
    return g.op("MatMul", x, matrix, name=f"{name}.out")


def _merged(w: Writer, x_BSd: str, name: str, part: Merger, config: ImageTextConfig) -> str:
    g, width, row = w.g, config.tower.hidden, part.side**2 * config.tower.hidden
    x = x_BSd if part.norm_behind else w.norm(x_BSd, f"{name}.norm", part.norm, width)
    x = g.op("Reshape", x, g.constant((0, config.patches, row)), name=f"{name}.rows")
    x = w.norm(x, f"{name}.norm", part.norm, row) if part.norm_behind else x
    x = w.activated(w.linear(x, f"{name}.in", part.names[0], row, row, bias=True), name, "gelu")
    return w.linear(x, f"{name}.out", part.names[1], row, config.decoder.hidden, bias=True)
