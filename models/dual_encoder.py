"""Dual encoders: a tower of images and one of texts, whose results are compared with each other (CLIP, SigLIP).

Dims: B batch, S sequence, d width of a tower, E width that is compared.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors import ModelError
from autopar.models.decoder import transformer_block
from autopar.models.encoder import embed_patches, embed_tokens, write_head
from autopar.models.encoder_config import EncoderConfig, MaskedLanguageHead, OneToken, Patches, Tokens, WholeSequence
from autopar.models.writer import Writer

if TYPE_CHECKING:
    import onnx

LOGITS = "logits_per_text"
"""Name of the output."""


@dataclass(frozen=True, slots=True)
class DualEncoderConfig:
    """A tower of images and one of texts (Radford et al. 2021, CLIP; Zhai et al. 2023, SigLIP).

    Attributes:
        vision: The tower of images, whose head makes one vector per image.
        text: The tower of texts, whose head makes one vector per text, of the last token: texts are taken to end with
            their end token or, of SigLIP, to be filled up.
        scale: Shape of the logarithm of the factor of the logits, which is trained.
        shift: Shape of what is added to the logits, which is trained; None where nothing is.
    """

    vision: EncoderConfig
    text: EncoderConfig
    scale: tuple[int, ...]
    shift: tuple[int, ...] | None

    def __post_init__(self) -> None:
        widths = [_width(tower) for tower in (self.vision, self.text)]
        if widths[0] != widths[1]:
            raise ModelError(
                f"images become vectors of {widths[0]} elements and texts of {widths[1]}, which cannot be compared",
                hint="correct projection_size of text_config, or hidden_size of vision_config",
            )

    @property
    def num_layers(self) -> int:
        """Blocks of both towers."""
        return self.vision.num_layers + self.text.num_layers

    @property
    def sample_size(self) -> int:
        """Tokens per text."""
        return self.text.seq


def _width(tower: EncoderConfig) -> int:
    """Return the elements of the vector that a tower makes."""
    assert not isinstance(tower.head, MaskedLanguageHead | WholeSequence), "the head of a tower makes one vector"
    return (tower.head.width if isinstance(tower.head, OneToken) else 0) or tower.hidden


def build(name: str, config: DualEncoderConfig) -> "onnx.ModelProto":
    """Return the graph of a dual encoder.

    Its inputs are `pixel_values` float32 [batch, channels, height, width] and `input_ids` int64 [batch, seq]; its
    output is `logits_per_text` [batch, batch]: row i compares text i with every image.
    """
    w = Writer(name, config.vision)
    g, images, texts = w.g, config.vision, config.text
    assert isinstance(images.embedding, Patches), "a tower of images embeds patches"
    assert isinstance(texts.embedding, Tokens), "a tower of texts embeds tokens"
    pixels = g.input("pixel_values", ("batch", images.embedding.channels, *images.embedding.image))
    x = embed_patches(w, pixels, images.embedding, "vision.embed")
    image = _vector(w, x, images, "vision")
    w = Writer(g, texts)
    ids = g.input("input_ids", ("batch", texts.seq), "int64")
    text = _vector(w, embed_tokens(w, ids, texts.embedding, "text.embed"), texts, "text")

    columns = g.op("Transpose", image, name="images.columns", perm=(1, 0))
    cosines = g.op("MatMul", text, columns, name="cosines")
    factor = g.op("Exp", g.parameter("logit_scale", config.scale, "constant 2.6592"), name="logits.factor")
    if config.shift is None:
        g.op("Mul", cosines, factor, name=LOGITS)
    else:
        scaled = g.op("Mul", cosines, factor, name="logits.scaled")
        g.op("Add", scaled, g.parameter("logit_bias", config.shift, "constant -10"), name=LOGITS)
    return g.model({LOGITS: ("batch", "batch")})


def _vector(w: Writer, x_BSd: str, config: EncoderConfig, name: str) -> str:
    """Return what blocks and head make of a sequence, of length 1: [B, E].

    A vector by its length is the vector by its root mean square, divided by the root of its elements.
    """
    for index, block in enumerate(config.blocks):
        x_BSd = transformer_block(w, x_BSd, f"{name}.layers.{index}", config.names.layer.format(index), block)
    (output,) = write_head(w, x_BSd, config, f"{name}.")
    unit = w.g.scales((_width(config) ** -0.5,))
    return w.g.op("RMSNormalization", output, unit, name=f"{name}.unit", axis=-1, epsilon=0.0)
