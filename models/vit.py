"""Vision Transformer (Dosovitskiy et al. 2021) with a class token and a linear head on 1000 classes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors import ModelError
from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx

_EPSILON = 1e-6  # google-research/vision_transformer (flax LayerNorm)


@dataclass(frozen=True, slots=True)
class VitConfig:
    """Hyperparameters of a Vision Transformer.

    Attributes:
        num_layers: Encoder blocks.
        hidden: Model width.
        heads: Attention heads.
        patch: Pixels of a patch's side.
        image_size: Pixels of an image's side.
        classes: Classes of the head.
    """

    num_layers: int
    hidden: int
    heads: int
    patch: int
    image_size: int = 224
    classes: int = 1000

    def __post_init__(self) -> None:
        layers.head_size(self.hidden, self.heads)
        if self.patch < 1 or self.image_size % self.patch:
            raise ModelError(
                f"an image of {self.image_size} pixels cannot be cut into patches of {self.patch}",
                hint=f"give image_size={max(1, self.patch) * 14}",
            )

    @property
    def sample_size(self) -> int:
        """Pixels of an image's side."""
        return self.image_size


def build(name: str, config: VitConfig) -> "onnx.ModelProto":
    """Return the graph from `images` float32 [batch, 3, image_size, image_size] to `logits` [batch, classes]."""
    g = Builder(name)
    hidden, patch = config.hidden, config.patch
    num_patches = (config.image_size // patch) ** 2
    seq = num_patches + 1
    images = g.input("images", ("batch", 3, config.image_size, config.image_size))
    kernel = g.parameter("embed.patches.weight", (hidden, 3, patch, patch), f"normal {(3 * patch**2) ** -0.5:.6g}")
    shift = g.parameter("embed.patches.bias", (hidden,), "constant 0")
    x = g.op("Conv", images, kernel, shift, name="embed.patches", kernel_shape=(patch, patch), strides=(patch, patch))
    x = g.op("Reshape", x, g.constant((0, hidden, num_patches)), name="embed.flat")
    x = g.op("Transpose", x, name="embed.rows", perm=(0, 2, 1))
    token = g.parameter("embed.class.weight", (1, 1, hidden))
    token = g.op("Expand", token, g.batch_shape(images, 3), name="embed.class")
    x = g.op("Concat", token, x, name="embed.tokens", axis=1)
    x = g.op("Add", x, g.parameter("embed.positions.weight", (1, seq, hidden)), name="embed")
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        normed = layers.layer_norm(g, x, f"{layer}.attn_norm", hidden, epsilon=_EPSILON)
        attended = layers.self_attention(
            g, normed, f"{layer}.attn", seq=seq, hidden=hidden, heads=config.heads, causal=False
        )
        x = g.op("Add", x, attended, name=f"{layer}.attn_residual")
        normed = layers.layer_norm(g, x, f"{layer}.mlp_norm", hidden, epsilon=_EPSILON)
        fed = layers.mlp(g, normed, f"{layer}.mlp", hidden, 4 * hidden, approximate="none")
        x = g.op("Add", x, fed, name=f"{layer}.mlp_residual")
    x = layers.layer_norm(g, x, "final_norm", hidden, epsilon=_EPSILON)
    layers.linear(g, g.op("Gather", x, g.constant(0), name="pooled", axis=1), "logits", hidden, config.classes)
    return g.model({"logits": ("batch", config.classes)})


# Sizes: Table 1; batch 4096: Table 3; counts: torchvision's vit_b_16, vit_l_16, vit_h_14 at 224 pixels.
_SOURCE = "Dosovitskiy et al. 2021, Tables 1 and 3; torchvision"

SPECS = (
    ModelSpec("vit-b16", "vit", 86_567_656, 4096, "image", _SOURCE, VitConfig(12, 768, 12, 16)),
    ModelSpec("vit-l16", "vit", 304_326_632, 4096, "image", _SOURCE, VitConfig(24, 1024, 16, 16)),
    ModelSpec("vit-h14", "vit", 632_045_800, 4096, "image", _SOURCE, VitConfig(32, 1280, 16, 14)),
)
"""All Vision Transformers."""
