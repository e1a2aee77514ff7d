"""DiT (Peebles and Xie 2023): blocks of patches of an image, modulated by the step of the noise and a class.

Weights are called as in diffusers. Dims: B batch, N patches, d model width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.models import diffusion, layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx

_MLP_EPSILON = 1e-5
"""Of the norm before the MLP, as in diffusers."""


@dataclass(frozen=True, slots=True)
class DitConfig(diffusion.Patched):
    """Hyperparameters of a DiT with patches of 2 x 2 latent pixels.

    Attributes:
        num_layers: Blocks.
        hidden: Model width.
        heads: Attention heads.
        image_size: Pixels of the latent image's side.
        latent: Channels of the latent image.
        outputs: Channels that come out: noise, and variances where the model learns them.
        classes: Classes; one more stands for none.
        steps: Steps of the noise.
        shared: Whether all blocks embed step and class by the same weights, as published; in diffusers each has its
            own.
    """

    num_layers: int = 28
    hidden: int = 1152
    heads: int = 16
    image_size: int = 32
    latent: int = 4
    outputs: int = 8
    classes: int = 1000
    steps: int = 1000
    shared: bool = True

    def __post_init__(self) -> None:
        layers.head_size(self.hidden, self.heads)
        self.check_patches()
        diffusion.check_places(self.hidden)


def build(name: str, config: DitConfig) -> "onnx.ModelProto":
    """Return the graph of a denoiser.

    Inputs are the noisy latent `images` float32 [batch, latent, image_size, image_size], the `step` of the noise int64
    [batch] and the `label` int64 [batch] of the class; the output is `noise` [batch, outputs, image_size, image_size].
    """
    g = Builder(name)
    hidden, size, side = config.hidden, config.image_size, config.side
    images = g.input("images", ("batch", config.latent, size, size))
    step, label = (g.input(which, ("batch",), "int64") for which in ("step", "label"))
    waves = diffusion.waves(g, step, config.steps, spread=True)

    def moment(index: int) -> str:
        """Return activated features of step and class for a block."""
        of, own = f"transformer_blocks.{index}.norm1.emb", f"moment.{index}"
        features = diffusion.features(g, waves, f"{own}.step", f"{of}.timestep_embedder", hidden)
        table = g.parameter(f"{of}.class_embedder.embedding_table.weight", (config.classes + 1, hidden))
        known = g.op("Gather", table, label, name=f"{own}.class", axis=0)
        return diffusion.silu(g, g.op("Add", features, known, name=own), f"{own}.swish")

    def changes(active: str, name: str, weight: str, count: int) -> list[str]:
        """Return shifts, scales and gates [B, 1, d]."""
        parts = (
            diffusion.linear(g, active, f"{name}.{number}", weight, hidden, hidden, part=f".{number}")
            for number in range(count)
        )
        return [diffusion.column(g, part, f"{part}.column") for part in parts]

    x = diffusion.patches(g, images, "pos_embed", config.latent, side, hidden)
    x = diffusion.placed(g, x, side, hidden)
    first = active = moment(0)
    for index in range(config.num_layers):
        name, weights = f"layers.{index}", f"transformer_blocks.{index}"
        active = active if config.shared or not index else moment(index)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = changes(
            active, f"{name}.mod", f"{weights}.norm1.linear", 6
        )
        normed = diffusion.modulated(g, x, f"{name}.attn_in", hidden, shift, scale)
        q, k, v = (
            layers.split_heads(
                g, diffusion.linear(g, normed, f"{name}.attn.{which}", f"{weights}.attn1.to_{which}", hidden, hidden),
                f"{name}.attn.{which}", config.patches, config.heads, hidden // config.heads,
            )
            for which in "qkv"
        )  # fmt: skip
        y = diffusion.attend(g, q, k, v, f"{name}.attn.core", config.patches, hidden)
        y = diffusion.linear(g, y, f"{name}.attn.out", f"{weights}.attn1.to_out.0", hidden, hidden)
        x = diffusion.gated(g, x, f"{name}.attn_residual", y, gate)
        normed = diffusion.modulated(g, x, f"{name}.mlp_in", hidden, shift_mlp, scale_mlp, epsilon=_MLP_EPSILON)
        y = diffusion.feed_forward(g, normed, f"{name}.mlp", f"{weights}.ff", hidden, 4 * hidden)
        x = diffusion.gated(g, x, f"{name}.mlp_residual", y, gate_mlp)
    shift, scale = changes(first, "head.mod", "proj_out_1", 2)
    x = diffusion.modulated(g, x, "head.in", hidden, shift, scale)
    diffusion.unpatched(g, x, "proj_out_2", config.outputs, side, hidden, "noise")
    return g.model({"noise": ("batch", config.outputs, size, size)})


# Peebles and Xie 2023, Table 1 and section 5: 256 images per step, of 256 pixels, 32 latent ones. Counts are without
# the fixed table of places.
SPECS = (
    ModelSpec("dit-xl-2", "dit", 674_834_720, 256, "image", "Peebles and Xie 2023; facebookresearch/DiT", DitConfig()),
    ModelSpec(
        "dit-l-2", "dit", 457_840_672, 256, "image", "Peebles and Xie 2023; facebookresearch/DiT",
        DitConfig(num_layers=24, hidden=1024),
    ),
)  # fmt: skip
"""All DiT models."""
