"""Stable Diffusion 3 and 3.5 (Esser et al. 2024): blocks of two streams, text and image, with fixed places of patches.

Dims: B batch, T text, N patches, d model width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors import ModelError
from autopar.models import diffusion, layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec
from autopar.models.streams import Stream, Streams

if TYPE_CHECKING:
    import onnx

_STEPS = 1000
"""Steps of the noise."""


@dataclass(frozen=True, slots=True)
class Sd3Config(diffusion.Patched):
    """Hyperparameters of a Stable Diffusion 3.

    Attributes:
        num_layers: Blocks.
        hidden: Model width.
        heads: Attention heads.
        dual: First blocks in which the image also attends to itself.
        qk_norm: Whether queries and keys are normalised.
        latent: Channels of the latent image.
        image_size: Pixels of the latent image's side.
        base_size: Pixels of the side of the latent image that places are counted in.
        places: Places of patches along a side that there are; an image has those in the middle.
        tokens: Tokens of the text.
        context: Width of the embedded text.
        pooled: Width of the embedding of the whole text.
    """

    num_layers: int
    hidden: int
    heads: int
    dual: int = 0
    qk_norm: bool = False
    latent: int = 16
    image_size: int = 128
    base_size: int = 128
    places: int = 192
    tokens: int = 333
    context: int = 4096
    pooled: int = 2048

    def __post_init__(self) -> None:
        layers.head_size(self.hidden, self.heads)
        self.check_patches()
        diffusion.check_places(self.hidden)
        if self.side > self.places:
            raise ModelError(
                f"an image of {self.side} patches a side has more than the model's {self.places} places",
                hint=f"give image_size={2 * self.places}, or less",
            )
        if self.dual > self.num_layers:
            raise ModelError(
                f"{self.dual} of {self.num_layers} blocks cannot attend twice", hint=f"give dual={self.num_layers}"
            )


def build(name: str, config: Sd3Config) -> "onnx.ModelProto":
    """Return the graph of a denoiser.

    Inputs are the noisy latent `images` float32 [batch, latent, image_size, image_size], the `step` of the noise int64
    [batch], the `text` float32 [batch, tokens, context] and its `pooled` embedding [batch, pooled]; the output is the
    flow, shaped like the images.
    """
    g = Builder(name)
    hidden, size, side = config.hidden, config.image_size, config.side
    images = g.input("images", ("batch", config.latent, size, size))
    step = g.input("step", ("batch",), "int64")
    text = g.input("text", ("batch", config.tokens, config.context))
    pooled = g.input("pooled", ("batch", config.pooled))
    of = "time_text_embed"
    moment = diffusion.step_features(g, step, _STEPS, f"{of}.timestep_embedder", hidden)
    features = diffusion.two_layers(g, pooled, "pooled.features", f"{of}.text_embedder", config.pooled, hidden)
    moment = diffusion.silu(g, g.op("Add", moment, features, name="moment"), "moment.swish")
    spacing = config.base_size / 2 / config.places
    x = diffusion.patches(g, images, "pos_embed", config.latent, side, hidden)
    x = diffusion.placed(g, x, side, hidden, first=(config.places - side) // 2 * spacing, spacing=spacing)
    y = diffusion.linear(g, text, "embed.text", "context_embedder", config.context, hidden)
    lengths: dict[Stream, int] = {"text": config.tokens, "image": config.patches}
    streams = Streams(g, hidden, config.heads, lengths, moment, normed=config.qk_norm)
    for index in range(config.num_layers):
        y, x = streams.block(y, x, index, last=index == config.num_layers - 1, dual=index < config.dual)
    scale, shift = streams.modulation("head.mod", "norm_out.linear", 2)
    x = diffusion.modulated(g, x, "head.in", hidden, shift, scale)
    diffusion.unpatched(g, x, "proj_out", config.latent, side, hidden, "flow")
    return g.model({"flow": ("batch", config.latent, size, size)})


# Sizes and counts are those of the released checkpoints, the fixed table of places left out; training batches: Esser et
# al. 2024, section 5.3. An image of 1024 pixels has 128 latent ones; text is 77 tokens of CLIP and 256 of T5.
SPECS = (
    ModelSpec(
        "sd3-medium", "sd3", 2_028_328_000, 4096, "image",
        "stabilityai/stable-diffusion-3-medium, transformer", Sd3Config(24, 1536, 24),
    ),
    ModelSpec(
        "sd3.5-medium", "sd3", 2_243_171_520, 4096, "image",
        "stabilityai/stable-diffusion-3.5-medium, transformer",
        Sd3Config(24, 1536, 24, dual=13, qk_norm=True, places=384),
    ),
    ModelSpec(
        "sd3.5-large", "sd3", 8_056_627_520, 4096, "image",
        "stabilityai/stable-diffusion-3.5-large, transformer", Sd3Config(38, 2432, 38, qk_norm=True),
    ),
)  # fmt: skip
"""All Stable Diffusion 3 models."""
