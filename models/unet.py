"""U-Nets of diffusion models with attention to a text (Rombach et al. 2022, Stable Diffusion).

Down: at each level residual blocks, from the second on each followed by a transformer over pixels, then a convolution
of stride 2; the last level has no attention. Up: the same backwards, with one residual block more per level, each of
which also reads what the way down left at its resolution, so that every block has values of its own shape and hardly
two blocks are equal. The step of the noise enters every residual block, the text every transformer.

Dims: B batch, C channels, H and W pixels of the latent image, S = H W, T tokens of the text.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors import ModelError
from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnx

_GROUPS = 32
"""Groups of a normalisation (Wu and He 2018), as in all published models."""
_NOISE_STEPS = 1000


@dataclass(frozen=True, slots=True)
class UnetConfig:
    """Hyperparameters of a U-Net.

    Attributes:
        channels: Channels of the first level.
        factors: Channels of each level as multiples of that.
        blocks: Residual blocks per level on the way down; one more on the way up.
        heads: Heads of attention.
        context: Width of the text's features.
        tokens: Tokens of the text.
        image_size: Pixels of the latent image's side.
        latent: Channels of the latent image.
        groups: Groups of a normalisation.
    """

    channels: int
    factors: tuple[int, ...]
    blocks: int
    heads: int
    context: int
    tokens: int = 77
    image_size: int = 64
    latent: int = 4
    groups: int = _GROUPS

    def __post_init__(self) -> None:
        if self.channels % (2 * self.groups) and self.channels % self.groups:
            raise ModelError(
                f"{self.channels} channels cannot be normalised in {self.groups} groups",
                hint=f"give channels={-(-self.channels // self.groups) * self.groups}",
            )
        halvings = 2 ** (len(self.factors) - 1)
        if self.image_size % halvings:
            raise ModelError(
                f"{self.image_size} pixels cannot be halved {len(self.factors) - 1} times",
                hint=f"give image_size={-(-self.image_size // halvings) * halvings}",
            )

    @property
    def num_layers(self) -> int:
        """Residual blocks."""
        return len(self.factors) * (2 * self.blocks + 1) + 2

    @property
    def sample_size(self) -> int:
        """Pixels of the latent image's side."""
        return self.image_size


def _conv(g: Builder, x: str, name: str, num_in: int, num_out: int, kernel: int, stride: int = 1) -> str:
    weight = g.parameter(
        f"{name}.weight", (num_out, num_in, kernel, kernel), f"normal {(num_in * kernel**2) ** -0.5:.6g}"
    )
    pad, bias = kernel // 2, g.parameter(f"{name}.bias", (num_out,), "constant 0")
    return g.op(
        "Conv", x, weight, bias, name=name, kernel_shape=(kernel, kernel), strides=(stride, stride), pads=(pad,) * 4
    )


def _group_norm(g: Builder, x: str, name: str, channels: int, groups: int, epsilon: float = 1e-5) -> str:
    scale = g.parameter(f"{name}.weight", (channels,), "constant 1")
    shift = g.parameter(f"{name}.bias", (channels,), "constant 0")
    return g.op("GroupNormalization", x, scale, shift, name=name, num_groups=groups, epsilon=epsilon)


class _Net:
    """Writes the blocks of one network."""

    def __init__(self, g: Builder, config: UnetConfig, moment: str, text: str) -> None:
        self.g, self.config, self.moment, self.text = g, config, moment, text

    def residual(self, x_BCHW: str, name: str, num_in: int, num_out: int) -> str:
        """Return two convolutions with the step of the noise between them, added to the input."""
        g, config = self.g, self.config
        y = g.op("Swish", _group_norm(g, x_BCHW, f"{name}.norm1", num_in, config.groups), name=f"{name}.swish1")
        y = _conv(g, y, f"{name}.conv1", num_in, num_out, 3)
        shift_BC = layers.linear(g, self.moment, f"{name}.moment", 4 * config.channels, num_out)
        shift_BC11 = g.op("Unsqueeze", shift_BC, g.constant((2, 3)), name=f"{name}.moment.pixels")
        y = g.op("Add", y, shift_BC11, name=f"{name}.shifted")
        y = g.op("Swish", _group_norm(g, y, f"{name}.norm2", num_out, config.groups), name=f"{name}.swish2")
        y = _conv(g, y, f"{name}.conv2", num_out, num_out, 3)
        if num_in != num_out:
            x_BCHW = _conv(g, x_BCHW, f"{name}.skip", num_in, num_out, 1)
        return g.op("Add", x_BCHW, y, name=name)

    def transformer(self, x_BCHW: str, name: str, channels: int, size: int) -> str:
        """Return attention of the pixels to each other and to the text, and a gated MLP, added to the input."""
        g, config, seq = self.g, self.config, size * size
        normed = _group_norm(g, x_BCHW, f"{name}.norm", channels, config.groups, 1e-6)
        y_BCHW = _conv(g, normed, f"{name}.in", channels, channels, 1)
        y_BCS = g.op("Reshape", y_BCHW, g.constant((0, channels, seq)), name=f"{name}.flat")
        y_BSC = g.op("Transpose", y_BCS, name=f"{name}.rows", perm=(0, 2, 1))
        for part, source, length, width in (
            ("self", None, seq, channels),
            ("text", self.text, config.tokens, config.context),
        ):
            normed = layers.layer_norm(g, y_BSC, f"{name}.{part}_norm", channels)
            attended = self._attention(normed, source or normed, f"{name}.{part}", channels, seq, length, width)
            y_BSC = g.op("Add", y_BSC, attended, name=f"{name}.{part}_residual")
        normed = layers.layer_norm(g, y_BSC, f"{name}.mlp_norm", channels)
        up = layers.linear(g, normed, f"{name}.mlp.up", channels, 4 * channels)
        gate = g.op(
            "Gelu", layers.linear(g, normed, f"{name}.mlp.gate", channels, 4 * channels), name=f"{name}.mlp.gelu"
        )
        fed = layers.linear(
            g, g.op("Mul", up, gate, name=f"{name}.mlp.gated"), f"{name}.mlp.down", 4 * channels, channels
        )
        y_BSC = g.op("Add", y_BSC, fed, name=f"{name}.mlp_residual")
        y_BCS = g.op("Transpose", y_BSC, name=f"{name}.columns", perm=(0, 2, 1))
        y_BCHW = g.op("Reshape", y_BCS, g.constant((0, channels, size, size)), name=f"{name}.image")
        return g.op("Add", x_BCHW, _conv(g, y_BCHW, f"{name}.out", channels, channels, 1), name=name)

    def _attention(self, x_BSC: str, source: str, name: str, channels: int, seq: int, length: int, width: int) -> str:
        """Return attention of `x` to `source`; only the last projection has a bias."""
        g, heads = self.g, self.config.heads
        size = layers.head_size(channels, heads)
        q = layers.split_heads(
            g, layers.linear(g, x_BSC, f"{name}.q", channels, channels, bias=False), f"{name}.q", seq, heads, size
        )
        k, v = (
            layers.split_heads(
                g, layers.linear(g, source, f"{name}.{part}", width, channels, bias=False), f"{name}.{part}", length,
                heads, size,
            )
            for part in ("k", "v")
        )  # fmt: skip
        core = layers.merge_heads(g, g.op("Attention", q, k, v, name=f"{name}.core"), f"{name}.core", seq, channels)
        return layers.linear(g, core, f"{name}.out", channels, channels)


def build(name: str, config: UnetConfig) -> "onnx.ModelProto":
    """Return the graph of a denoiser.

    Inputs are the noisy latent `images` float32 [batch, latent, image_size, image_size], the step of the noise `step`
    int64 [batch], and the `text` float32 [batch, tokens, context]; the output is the noise, shaped like the images.
    """
    g = Builder(name)
    size = config.image_size
    images = g.input("images", ("batch", config.latent, size, size))
    step = g.input("step", ("batch",), "int64")
    text = g.input("text", ("batch", config.tokens, config.context))
    net = _Net(g, config, _moment(g, step, config), text)
    widths = [config.channels * factor for factor in config.factors]
    width = config.channels
    x = _conv(g, images, "in", config.latent, width, 3)
    left = [(x, width)]
    for level, wanted in enumerate(widths):
        attends = level < len(widths) - 1
        for block in range(config.blocks):
            x = net.residual(x, f"down.{level}.{block}", width, wanted)
            width = wanted
            if attends:
                x = net.transformer(x, f"down.{level}.{block}.attn", width, size)
            left.append((x, width))
        if attends:
            x, size = _conv(g, x, f"down.{level}.halve", width, width, 3, stride=2), size // 2
            left.append((x, width))
    x = net.residual(x, "middle.0", width, width)
    x = net.transformer(x, "middle.attn", width, size)
    x = net.residual(x, "middle.1", width, width)
    for level in reversed(range(len(widths))):
        for block in range(config.blocks + 1):
            other, channels = left.pop()
            x = g.op("Concat", x, other, name=f"up.{level}.{block}.joined", axis=1)
            x = net.residual(x, f"up.{level}.{block}", width + channels, widths[level])
            width = widths[level]
            if level < len(widths) - 1:
                x = net.transformer(x, f"up.{level}.{block}.attn", width, size)
        if level:
            x, size = _doubled(g, x, f"up.{level}.double"), 2 * size
            x = _conv(g, x, f"up.{level}.conv", width, width, 3)
    x = g.op("Swish", _group_norm(g, x, "out_norm", width, config.groups), name="out_swish")
    _conv(g, x, "noise", width, config.latent, 3)
    return g.model({"noise": ("batch", config.latent, size, size)})


def _moment(g: Builder, step_B: str, config: UnetConfig) -> str:
    """Return the features of the step of the noise [B, 4 channels]: waves of it through an MLP, activated."""
    width = config.channels
    waves = []
    for part, init in (("cos", "rope-cos 10000"), ("sin", "rope-sin 10000")):
        table = g.buffer(f"step.{part}.table", (1, _NOISE_STEPS, width // 2), init)
        wave = g.op("Gather", table, step_B, name=f"step.{part}", axis=1)
        waves.append(g.op("Squeeze", wave, g.constant((0,)), name=f"step.{part}.row"))
    features = g.op("Concat", *waves, name="step.waves", axis=1)
    hidden = layers.linear(g, features, "step.up", width, 4 * width)
    features = layers.linear(g, g.op("Swish", hidden, name="step.swish"), "step.down", 4 * width, 4 * width)
    return g.op("Swish", features, name="step.active")


def _doubled(g: Builder, x: str, name: str) -> str:
    """Return the image at twice the size, each pixel four times."""
    return g.op(
        "Resize", x, "", g.scales((1.0, 1.0, 2.0, 2.0)), name=name, mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip


# Counts of the released checkpoints: 859,520,964 for both 1.x; 2,048 images a step (v1 model card). Heads of 1.x are
# eight of any size. The small one is of the size of Ho et al. 2020's for 256 pixels, at the batch they trained it with.
_SOURCE = "Rombach et al. 2022; CompVis/stable-diffusion-v1 configuration, checkpoint and model card"

SPECS = (
    ModelSpec(
        "unet-sd1", "unet", 859_520_964, 2048, "image", _SOURCE, UnetConfig(320, (1, 2, 4, 4), 2, 8, 768)
    ),
)  # fmt: skip
"""All U-Nets."""
