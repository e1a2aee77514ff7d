"""Wan 2.1 (Wan Team 2025, section 4.2): a diffusion transformer of videos that attends to the text in every block.

A sequence is the patches of 2 x 2 latent pixels of every latent frame, frame by frame and row by row.

Dims: B batch, S sequence, T text, d model width.
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


@dataclass(frozen=True, slots=True)
class WanConfig:
    """Hyperparameters of a Wan.

    Attributes:
        num_layers: Blocks.
        hidden: Model width.
        heads: Attention heads.
        ffn: Width of the MLP.
        latent: Channels of the latent video.
        frames: Latent frames; one for the first frame of the video, and one for every four of the others.
        height: Pixels of a latent frame from top to bottom.
        width: Pixels of a latent frame from left to right.
        tokens: Tokens of the text.
        context: Width of the embedded text.
    """

    num_layers: int
    hidden: int
    heads: int
    ffn: int
    latent: int = 16
    frames: int = 21
    height: int = 60
    width: int = 104
    tokens: int = 512
    context: int = 4096

    def __post_init__(self) -> None:
        size = layers.head_size(self.hidden, self.heads)
        if size % 2 or size < 6:
            raise ModelError(
                f"frames, rows and columns cannot turn a head of {size} elements", hint="an even number from 6 on"
            )
        if self.height % 2 or self.width % 2:
            raise ModelError(
                f"{self.height} x {self.width} latent pixels do not divide into patches of 2 x 2",
                hint="give an even height and width",
            )

    @property
    def axes(self) -> tuple[int, int, int]:
        """Elements of a head that turn by frame, row and column."""
        size = self.hidden // self.heads
        side = 2 * (size // 6)
        return size - 2 * side, side, side

    @property
    def seq(self) -> int:
        """Patches of a video."""
        return self.frames * (self.height // 2) * (self.width // 2)

    @property
    def sample_size(self) -> int:
        """Pixels of a latent frame from left to right."""
        return self.width


class _Net:
    """What all blocks share.

    Args:
        g: The graph.
        config: The model.
        text: The embedded text [B, T, d].
        changes: What the step of the noise changes in every block: three of attention and three of the MLP [B, 1, d].
        data: What the batch is read from.
    """

    def __init__(self, g: Builder, config: WanConfig, text: str, changes: list[str], data: str) -> None:
        self.g, self.config, self.text, self.changes = g, config, text, changes
        coordinates = tuple(axis for axis, size in enumerate(config.axes) for _ in range(size // 2))
        grid = Grid(config.height // 2, config.width // 2, coordinates, frames=config.frames)
        self.tables = diffusion.rotary_tables(g, config.seq, grid, config.axes)
        self.batch = g.batch_shape(data, 3)

    def attention(self, x: str, name: str, weights: str, *, cross: bool) -> str:
        """Return attention to the video itself, or to the text."""
        g, config = self.g, self.config
        hidden, heads = config.hidden, config.heads
        found = []
        for which in "qkv":
            to_text = cross and which != "q"
            source, seq = (self.text, config.tokens) if to_text else (x, config.seq)
            flat = diffusion.linear(g, source, f"{name}.{which}", f"{weights}.to_{which}", hidden, hidden)
            if which != "v":
                flat = diffusion.rms_norm(g, flat, f"{name}.{which}_norm", f"{weights}.norm_{which}", hidden)
            value = layers.split_heads(g, flat, f"{name}.{which}", seq, heads, hidden // heads)
            if which != "v" and not cross:
                value = diffusion.rotated(g, value, f"{name}.{which}", self.tables, self.batch)
            found.append(value)
        q, k, v = found
        merged = diffusion.attend(g, q, k, v, f"{name}.core", config.seq, hidden)
        return diffusion.linear(g, merged, f"{name}.out", f"{weights}.to_out.0", hidden, hidden)

    def block(self, x: str, index: int) -> str:
        """Return what a block makes of a video."""
        g, name, weights, hidden = self.g, f"layers.{index}", f"blocks.{index}", self.config.hidden
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = added_to_table(
            g, f"{weights}.scale_shift_table", self.changes, name, hidden
        )
        normed = diffusion.modulated(g, x, f"{name}.attn_in", hidden, shift, scale)
        y = self.attention(normed, f"{name}.attn", f"{weights}.attn1", cross=False)
        x = diffusion.gated(g, x, f"{name}.attn_residual", y, gate)
        normed = diffusion.layer_norm(g, x, f"{name}.cross_norm", f"{weights}.norm2", hidden)
        y = self.attention(normed, f"{name}.cross", f"{weights}.attn2", cross=True)
        x = g.op("Add", x, y, name=f"{name}.cross_residual")
        normed = diffusion.modulated(g, x, f"{name}.mlp_in", hidden, shift_mlp, scale_mlp)
        y = diffusion.feed_forward(g, normed, f"{name}.mlp", f"{weights}.ffn", hidden, self.config.ffn)
        return diffusion.gated(g, x, f"{name}.mlp_residual", y, gate_mlp)


def added_to_table(g: Builder, table: str, changes: list[str], name: str, hidden: int) -> list[str]:
    """Return rows of a table [1, rows, d] of the checkpoint, a weight each here, plus what the step changes."""
    return [
        g.op("Add", g.parameter(f"{table}.{number}", (1, 1, hidden)), change, name=f"{name}.mod.{number}")
        for number, change in enumerate(changes)
    ]


def build(name: str, config: WanConfig) -> "onnx.ModelProto":
    """Return the graph of a denoiser.

    Inputs are the noisy latent `video` float32 [batch, latent, frames, height, width], the `step` of the noise int64
    [batch] and the `text` float32 [batch, tokens, context]; the output is the flow, shaped like the video.
    """
    g = Builder(name)
    hidden, latent = config.hidden, config.latent
    rows, columns, channels = config.height // 2, config.width // 2, 4 * config.latent
    video = g.input("video", ("batch", latent, config.frames, config.height, config.width))
    step = g.input("step", ("batch",), "int64")
    text = g.input("text", ("batch", config.tokens, config.context))
    of = "condition_embedder"
    moment = diffusion.step_features(g, step, _STEPS, f"{of}.time_embedder", hidden)
    active = diffusion.silu(g, moment, "moment.swish")
    changes = [
        diffusion.column(
            g,
            diffusion.linear(g, active, f"moment.{number}", f"{of}.time_proj", hidden, hidden, part=f".{number}"),
            f"moment.{number}.column",
        )
        for number in range(6)
    ]
    text = diffusion.two_layers(g, text, "embed.text", f"{of}.text_embedder", config.context, hidden, gelu=True)
    net = _Net(g, config, text, changes, video)
    cut = (0, latent, config.frames, rows, 2, columns, 2)
    x = g.op("Reshape", video, g.constant(cut), name="patches.cut")
    x = g.op("Transpose", x, name="patches.rows", perm=(0, 2, 3, 5, 1, 4, 6))
    x = g.op("Reshape", x, g.constant((0, config.seq, channels)), name="patches")
    x = diffusion.linear(g, x, "embed.video", "patch_embedding", channels, hidden)
    for index in range(config.num_layers):
        x = net.block(x, index)
    last = [diffusion.column(g, moment, f"head.moment.{number}") for number in range(2)]
    shift, scale = added_to_table(g, "scale_shift_table", last, "head", hidden)
    x = diffusion.modulated(g, x, "head.in", hidden, shift, scale)
    x = diffusion.linear(g, x, "head", "proj_out", hidden, channels)
    x = g.op("Reshape", x, g.constant((0, config.frames, rows, columns, 2, 2, latent)), name="head.cut")
    x = g.op("Transpose", x, name="head.rows", perm=(0, 6, 1, 2, 4, 3, 5))
    shape = (latent, config.frames, config.height, config.width)
    g.op("Reshape", x, g.constant((0, *shape)), name="flow")
    return g.model({"flow": ("batch", *shape)})


# Sizes and counts are those of the released checkpoints; the training batch was not published. A video of 81 frames of
# 832 x 480 pixels has 21 latent frames of 104 x 60.
SPECS = (
    ModelSpec(
        "wan-1.3b", "wan", 1_418_996_800, 512, "image", "Wan-AI/Wan2.1-T2V-1.3B, transformer",
        WanConfig(num_layers=30, hidden=1536, heads=12, ffn=8960),
    ),
    ModelSpec(
        "wan-14b", "wan", 14_288_491_584, 512, "image", "Wan-AI/Wan2.1-T2V-14B, transformer",
        WanConfig(num_layers=40, hidden=5120, heads=40, ffn=13824),
    ),
)  # fmt: skip
"""All Wan models."""
