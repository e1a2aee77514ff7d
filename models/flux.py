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

if TYPE_CHECKING:
    import onnx

_STEPS = 1000
"""Steps of the noise."""
_GUIDANCES = 1 << 14
"""Guidances that are told apart: thousandths up to 16."""


@dataclass(frozen=True, slots=True)
class FluxConfig:
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
        if self.image_size % 2:
            raise ModelError(
                f"{self.image_size} latent pixels do not divide into patches of 2", hint="give an even image_size"
            )

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // 2) ** 2

    @property
    def sample_size(self) -> int:
        """Pixels of the latent image's side."""
        return self.image_size


class _Net:
    """What all blocks share.

    Args:
        g: The graph.
        config: The model.
        moment_Bd: Activated features of step, guidance and text.
        data: What the batch is read from.
    """

    def __init__(self, g: Builder, config: FluxConfig, moment_Bd: str, data: str) -> None:
        self.g, self.config, self.moment = g, config, moment_Bd
        self.seq = config.tokens + config.patches
        side = config.image_size // 2
        coordinates = tuple(axis for axis, size in enumerate(config.axes) for _ in range(size // 2))
        grid = Grid(side, side, coordinates, skipped=config.tokens)
        self.tables = diffusion.rotary_tables(g, self.seq, grid, config.axes)
        self.batch = g.batch_shape(data, 3)

    def modulation(self, name: str, weight: str, count: int) -> list[str]:
        """Return shifts, scales and gates [B, 1, d] of a block or of the head."""
        hidden, found = self.config.hidden, []
        for number in range(count):
            part = diffusion.linear(self.g, self.moment, f"{name}.{number}", weight, hidden, hidden, part=f".{number}")
            found.append(diffusion.column(self.g, part, f"{name}.{number}.column"))
        return found

    def heads(self, x: str, name: str, weights: str, names: tuple[str, ...], seq: int) -> list[str]:
        """Return queries, keys and values; `names` are those of projections, then of the norms of queries and keys."""
        g, hidden, count = self.g, self.config.hidden, self.config.heads
        found = []
        for which, projection in zip("qkv", names[:3], strict=True):
            flat = diffusion.linear(g, x, f"{name}.{which}", f"{weights}.{projection}", hidden, hidden)
            found.append(layers.split_heads(g, flat, f"{name}.{which}", seq, count, hidden // count))
        for index, norm in enumerate(names[3:]):
            found[index] = diffusion.rms_norm(
                g, found[index], f"{name}.{'qk'[index]}_norm", f"{weights}.{norm}", hidden // count
            )
        return found

    def attended(self, q: str, k: str, v: str, name: str) -> str:
        """Return joint attention [B, S, d]."""
        q, k = (
            diffusion.rotated(self.g, value, f"{name}.{which}", self.tables, self.batch)
            for which, value in (("q", q), ("k", k))
        )
        return diffusion.attend(self.g, q, k, v, f"{name}.core", self.seq, self.config.hidden)

    def double(self, text: str, image: str, index: int) -> tuple[str, str]:
        """Return both streams behind a block of two."""
        g, config, name, weights = self.g, self.config, f"layers.{index}", f"transformer_blocks.{index}"
        hidden = config.hidden
        lengths = {"text": config.tokens, "image": config.patches}
        streams = {"text": text, "image": image}
        changes = {
            "text": self.modulation(f"{name}.text.mod", f"{weights}.norm1_context.linear", 6),
            "image": self.modulation(f"{name}.image.mod", f"{weights}.norm1.linear", 6),
        }
        parts = []
        for stream, names in (("text", _TEXT), ("image", _IMAGE)):
            shift, scale = changes[stream][:2]
            own = f"{name}.{stream}"
            normed = diffusion.modulated(g, streams[stream], f"{own}.attn_in", hidden, shift, scale)
            parts.append(self.heads(normed, f"{own}.attn", f"{weights}.attn", names, lengths[stream]))
        q, k, v = (
            g.op("Concat", *pair, name=f"{name}.attn.{which}.joined", axis=2)
            for which, pair in zip("qkv", zip(*parts, strict=True), strict=True)
        )
        y = self.attended(q, k, v, f"{name}.attn")
        first, axis = 0, g.constant((1,))
        for stream, out, fed in (("text", "to_add_out", "ff_context"), ("image", "to_out.0", "ff")):
            own, last = f"{name}.{stream}", first + lengths[stream]
            mine = g.op("Slice", y, g.constant((first,)), g.constant((last,)), axis, name=f"{own}.attn.part")
            first = last
            _, _, gate, shift, scale, gate_mlp = changes[stream]
            mine = diffusion.linear(g, mine, f"{own}.attn.out", f"{weights}.attn.{out}", hidden, hidden)
            x = diffusion.gated(g, streams[stream], f"{own}.attn_residual", mine, gate)
            normed = diffusion.modulated(g, x, f"{own}.mlp_in", hidden, shift, scale)
            y_mlp = diffusion.feed_forward(g, normed, f"{own}.mlp", f"{weights}.{fed}", hidden, 4 * hidden)
            streams[stream] = diffusion.gated(g, x, f"{own}.mlp_residual", y_mlp, gate_mlp)
        return streams["text"], streams["image"]

    def single(self, x: str, index: int) -> str:
        """Return the joined stream behind a block of one."""
        g, name, weights = self.g, f"single.{index}", f"single_transformer_blocks.{index}"
        hidden = self.config.hidden
        shift, scale, gate = self.modulation(f"{name}.mod", f"{weights}.norm.linear", 3)
        normed = diffusion.modulated(g, x, f"{name}.in", hidden, shift, scale)
        q, k, v = self.heads(normed, f"{name}.attn", f"{weights}.attn", _IMAGE, self.seq)
        y = self.attended(q, k, v, f"{name}.attn")
        inner = diffusion.linear(g, normed, f"{name}.mlp.up", f"{weights}.proj_mlp", hidden, 4 * hidden)
        inner = g.op("Gelu", inner, name=f"{name}.mlp.gelu", approximate="tanh")
        of_attention = g.parameter(f"{weights}.proj_out.weight.attn.T", (hidden, hidden), "normal 0.01")
        y = g.op("MatMul", y, of_attention, name=f"{name}.attn.out")
        fed = diffusion.linear(g, inner, f"{name}.mlp.out", f"{weights}.proj_out", 4 * hidden, hidden, part=".mlp")
        y = g.op("Add", y, fed, name=f"{name}.out")
        return diffusion.gated(g, x, f"{name}.residual", y, gate)


_IMAGE = ("to_q", "to_k", "to_v", "norm_q", "norm_k")
_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k")


def build(name: str, config: FluxConfig) -> "onnx.ModelProto":
    """Return the graph of a denoiser.

    Inputs are the noisy latent `images` float32 [batch, latent, image_size, image_size], the `step` of the noise int64
    [batch], `guidance` int64 [batch] in thousandths where the model takes it, the `text` float32 [batch, tokens,
    context] and its `pooled` embedding [batch, pooled]; the output is the flow, shaped like the images.
    """
    g = Builder(name)
    hidden, size, side = config.hidden, config.image_size, config.image_size // 2
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
    x = g.op("Reshape", images, g.constant((0, config.latent, side, 2, side, 2)), name="patches.cut")
    x = g.op("Transpose", x, name="patches.rows", perm=(0, 2, 4, 1, 3, 5))
    x = g.op("Reshape", x, g.constant((0, config.patches, channels)), name="patches")
    x = diffusion.linear(g, x, "embed.image", "x_embedder", channels, hidden)
    y = diffusion.linear(g, text, "embed.text", "context_embedder", config.context, hidden)
    for index in range(config.num_layers):
        y, x = net.double(y, x, index)
    joined = g.op("Concat", y, x, name="single.joined", axis=1)
    for index in range(config.single_layers):
        joined = net.single(joined, index)
    ends = g.constant((config.tokens,)), g.constant((net.seq,)), g.constant((1,))
    x = g.op("Slice", joined, *ends, name="image")
    scale, shift = net.modulation("head.mod", "norm_out.linear", 2)
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
