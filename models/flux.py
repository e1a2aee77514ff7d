"""FLUX.1 (Black Forest Labs 2024): blocks with streams of text and image that attend together, then blocks of one.

The two-stream blocks are those of Stable Diffusion 3 (Esser et al. 2024, section 4), the others run attention and MLP
side by side (Dehghani et al. 2023). A sequence is the text and then the patches of 2 x 2 latent pixels, row by row.

Dims: B batch, S sequence, T text, N patches, d model width.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors import ModelError
from autopar.models import diffusion, layers
from autopar.models.builder import Builder
from autopar.models.rotary import Grid
from autopar.models.spec import ModelSpec
from autopar.models.streams import IMAGE, Stream, Streams

if TYPE_CHECKING:
    import onnx

_STEPS = 1000
"""Steps of the noise."""
_GUIDANCES = 1 << 14
"""Guidances that are told apart: thousandths up to 16."""


@dataclass(frozen=True, slots=True)
class FluxConfig(diffusion.Patched):
    """Hyperparameters of a FLUX.

    Attributes:
        num_layers: Blocks of two streams.
        single_layers: Blocks of one stream.
        hidden: Model width.
        heads: Attention heads.
        axes: Elements of a head that turn by frame, row and column.
        latent: Channels of the latent image.
        image_size: Pixels of the latent image's side.
        tokens: Tokens of the text.
        context: Width of the embedded text.
        pooled: Width of the embedding of the whole text.
        guidance: Whether the strength of guidance is an input.
    """

    num_layers: int = 19
    single_layers: int = 38
    hidden: int = 3072
    heads: int = 24
    axes: tuple[int, int, int] = (16, 56, 56)
    latent: int = 16
    image_size: int = 128
    tokens: int = 512
    context: int = 4096
    pooled: int = 768
    guidance: bool = True

    def __post_init__(self) -> None:
        size = layers.head_size(self.hidden, self.heads)
        if len(self.axes) != 3 or sum(self.axes) != size or any(part % 2 for part in self.axes):
            raise ModelError(
                f"axes {self.axes} do not make a head of {size} elements",
                hint="frame, row and column turn an even number of elements each, all of a head together",
            )
        self.check_patches()


class _Net:
    """What all blocks share.

    Args:
        g: The graph.
        config: The model.
        moment_Bd: Activated features of step, guidance and text.
        data: What the batch is read from.
    """

    def __init__(self, g: Builder, config: FluxConfig, moment_Bd: str, data: str) -> None:
        self.g, self.config = g, config
        self.seq = config.tokens + config.patches
        side = config.side
        coordinates = tuple(axis for axis, size in enumerate(config.axes) for _ in range(size // 2))
        grid = Grid(side, side, coordinates, skipped=config.tokens)
        tables, batch = diffusion.rotary_tables(g, self.seq, grid, config.axes), g.batch_shape(data, 3)

        def turned(q: str, k: str, name: str) -> tuple[str, str]:
            return (
                diffusion.rotated(g, q, f"{name}.q", tables, batch),
                diffusion.rotated(g, k, f"{name}.k", tables, batch),
            )

        lengths: dict[Stream, int] = {"text": config.tokens, "image": config.patches}
        self.streams = Streams(g, config.hidden, config.heads, lengths, moment_Bd, normed=True, turned=turned)

    def single(self, x: str, index: int) -> str:
        """Return the joined stream behind a block of one."""
        g, name, weights = self.g, f"single.{index}", f"single_transformer_blocks.{index}"
        hidden = self.config.hidden
        shift, scale, gate = self.streams.modulation(f"{name}.mod", f"{weights}.norm.linear", 3)
        normed = diffusion.modulated(g, x, f"{name}.in", hidden, shift, scale)
        q, k, v = self.streams.heads(normed, f"{name}.attn", f"{weights}.attn", IMAGE, self.seq)
        y = self.streams.attended(q, k, v, f"{name}.attn")
        inner = diffusion.linear(g, normed, f"{name}.mlp.up", f"{weights}.proj_mlp", hidden, 4 * hidden)
        inner = g.op("Gelu", inner, name=f"{name}.mlp.gelu", approximate="tanh")
        of_attention = g.parameter(f"{weights}.proj_out.weight.attn.T", (hidden, hidden), "normal 0.01")
        y = g.op("MatMul", y, of_attention, name=f"{name}.attn.out")
        fed = diffusion.linear(g, inner, f"{name}.mlp.out", f"{weights}.proj_out", 4 * hidden, hidden, part=".mlp")
        y = g.op("Add", y, fed, name=f"{name}.out")
        return diffusion.gated(g, x, f"{name}.residual", y, gate)


def build(name: str, config: FluxConfig) -> "onnx.ModelProto":
    """Return the graph of a denoiser.

    Inputs are the noisy latent `images` float32 [batch, latent, image_size, image_size], the `step` of the noise int64
    [batch], `guidance` int64 [batch] in thousandths where the model takes it, the `text` float32 [batch, tokens,
    context] and its `pooled` embedding [batch, pooled]; the output is the flow, shaped like the images.
    """
    g = Builder(name)
    hidden, size, side = config.hidden, config.image_size, config.side
    channels = 4 * config.latent
    images = g.input("images", ("batch", config.latent, size, size))
    step = g.input("step", ("batch",), "int64")
    of = "time_text_embed"
    moment = diffusion.step_features(g, step, _STEPS, f"{of}.timestep_embedder", hidden)
    if config.guidance:
        guidance = g.input("guidance", ("batch",), "int64")
        features = diffusion.step_features(g, guidance, _GUIDANCES, f"{of}.guidance_embedder", hidden)
        moment = g.op("Add", moment, features, name="moment.guided")
    text = g.input("text", ("batch", config.tokens, config.context))
    pooled = g.input("pooled", ("batch", config.pooled))
    features = diffusion.two_layers(g, pooled, "pooled.features", f"{of}.text_embedder", config.pooled, hidden)
    moment = diffusion.silu(g, g.op("Add", moment, features, name="moment"), "moment.swish")
    net = _Net(g, config, moment, images)
    x = diffusion.linear(
        g, diffusion.cut(g, images, config.latent, side), "embed.image", "x_embedder", channels, hidden
    )
    y = diffusion.linear(g, text, "embed.text", "context_embedder", config.context, hidden)
    for index in range(config.num_layers):
        y, x = net.streams.block(y, x, index)
    joined = g.op("Concat", y, x, name="single.joined", axis=1)
    for index in range(config.single_layers):
        joined = net.single(joined, index)
    ends = g.constant((config.tokens,)), g.constant((net.seq,)), g.constant((1,))
    x = g.op("Slice", joined, *ends, name="image")
    scale, shift = net.streams.modulation("head.mod", "norm_out.linear", 2)
    x = diffusion.modulated(g, x, "head.in", hidden, shift, scale)
    x = diffusion.linear(g, x, "head", "proj_out", hidden, channels)
    x = g.op("Reshape", x, g.constant((0, side, side, config.latent, 2, 2)), name="head.cut")
    x = g.op("Transpose", x, name="head.rows", perm=(0, 3, 1, 4, 2, 5))
    g.op("Reshape", x, g.constant((0, config.latent, size, size)), name="flow")
    return g.model({"flow": ("batch", config.latent, size, size)})


# Sizes and count are those of the released checkpoint, which takes the guidance; the training batch was not published.
# An image of 1024 pixels has 128 latent ones.
SPECS = (
    ModelSpec(
        "flux-12b", "flux", 11_901_408_320, 1024, "image", "black-forest-labs/FLUX.1-dev, transformer", FluxConfig()
    ),
)
"""All FLUX models."""
