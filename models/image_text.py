"""Decoders of images and text: the patches of one image per sequence come first, then the text.

Frameworks put the patches where the text has placeholders; which places these are changes no size and no cost. Dims:
B batch, S sequence, d model width.
"""

from typing import TYPE_CHECKING

from autopar.models.decoder import transformer_block, write_decoder
from autopar.models.encoder import embed_patches
from autopar.models.encoder_config import Patches
from autopar.models.image_text_config import ImageTextConfig
from autopar.models.writer import Writer

if TYPE_CHECKING:
    import onnx


def build(name: str, config: ImageTextConfig) -> "onnx.ModelProto":
    """Return the graph of a decoder of images and text.

    Its inputs are `pixel_values` float32 [batch, channels, height, width] and `input_ids` int64 [batch, text]; its
    output is `logits` [batch, patches + text, vocab].
    """
    tower, decoder = config.tower, config.decoder
    w = Writer(name, tower)
    g = w.g
    assert isinstance(tower.embedding, Patches), "a vision tower embeds patches"
    pixels = g.input("pixel_values", ("batch", tower.embedding.channels, *tower.embedding.image))
    x = embed_patches(w, pixels, tower.embedding, "vision.embed")
    for index, block in enumerate(tower.blocks):
        x = transformer_block(w, x, f"vision.layers.{index}", tower.names.layer.format(index), block)
    first, last, axis = g.constant((1,)), g.constant((tower.seq,)), g.constant((1,))
    x = g.op("Slice", x, first, last, axis, name="vision.patches")
    part = config.projector
    x = w.linear(x, "projector.in", part.names[0], tower.hidden, decoder.hidden, bias=part.bias)
    x = w.activated(x, "projector", part.activation)
    x = w.linear(x, "projector.out", part.names[1], decoder.hidden, decoder.hidden, bias=part.bias)

    tokens = g.input("input_ids", ("batch", config.text), "int64")
    return write_decoder(Writer(g, decoder), tokens, decoder, before=x)
