"""Pieces of diffusion transformers (Peebles and Xie 2023): features of the step of the noise, modulated norms.

Dims: B batch, S sequence, d model width, H heads, D head size. Weights are called as in diffusers; `.T` and parts of
fused matrices as in `decoder_config`.
"""

from collections.abc import Sequence

import numpy as np

from autopar.errors import ModelError
from autopar.models import layers
from autopar.models.builder import Builder
from autopar.models.decoder_config import TRANSPOSED
from autopar.models.rotary import Grid, Rope
from autopar.models.values import grid_text

_WAVES = 256
"""Sines and cosines of the step of the noise."""
_EPSILON = 1e-6
"""Of all norms."""
_THETA = 1e4
"""Base of the rotary frequencies."""


def linear(g: Builder, x: str, name: str, weight: str, num_in: int, num_out: int, *, part: str = "") -> str:
    """Return `x @ weight [num_in, num_out] + bias`; `part` of the weight the checkpoint has under that name."""
    matrix = g.parameter(f"{weight}.weight{part}{TRANSPOSED}", (num_in, num_out), f"normal {num_in**-0.5:.6g}")
    product = g.op("MatMul", x, matrix, name=f"{name}.matmul")
    return g.op("Add", product, g.parameter(f"{weight}.bias{part}", (num_out,), "constant 0"), name=name)


def two_layers(g: Builder, x: str, name: str, weight: str, num_in: int, num_out: int, *, gelu: bool = False) -> str:
    """Return an MLP of two projections, `linear_1` and `linear_2`, with a SiLU or a GELU between them."""
    x = linear(g, x, f"{name}.up", f"{weight}.linear_1", num_in, num_out)
    x = g.op("Gelu", x, name=f"{name}.gelu", approximate="tanh") if gelu else silu(g, x, f"{name}.swish")
    return linear(g, x, f"{name}.down", f"{weight}.linear_2", num_out, num_out)


def silu(g: Builder, x: str, name: str) -> str:
    """Return `x sigmoid(x)`."""
    return g.op("Swish", x, name=name)


def feed_forward(g: Builder, x: str, name: str, weight: str, hidden: int, inner: int) -> str:
    """Return the MLP of a block, a GELU between two projections."""
    x = linear(g, x, f"{name}.up", f"{weight}.net.0.proj", hidden, inner)
    x = g.op("Gelu", x, name=f"{name}.gelu", approximate="tanh")
    return linear(g, x, f"{name}.down", f"{weight}.net.2", inner, hidden)


def waves(g: Builder, step_B: str, rows: int, *, spread: bool = False) -> str:
    """Return cosines and sines of whole numbers [B, 256], by rows of a table.

    Args:
        g: The graph.
        step_B: The numbers, int64.
        rows: How many there may be.
        spread: Whether frequencies reach down to 1 / 10000 itself, so that steps between them are a little larger.
    """
    count, found = _WAVES // 2, []
    frequencies = _THETA ** (-np.arange(count) / (count - 1))
    kind, text = ("angles", f"1.0:{','.join(map(repr, frequencies.tolist()))}") if spread else ("rope", f"{_THETA:g}")
    for part in ("cos", "sin"):
        table = g.buffer(f"{step_B}.{part}.table", (1, rows, count), f"{kind}-{part} {text}")
        wave = g.op("Gather", table, step_B, name=f"{step_B}.{part}", axis=1)
        found.append(g.op("Squeeze", wave, g.constant((0,)), name=f"{step_B}.{part}.row"))
    return g.op("Concat", *found, name=f"{step_B}.waves", axis=1)


def step_features(g: Builder, step_B: str, rows: int, weight: str, hidden: int) -> str:
    """Return features of whole numbers [B, d]: their waves through an MLP."""
    return features(g, waves(g, step_B, rows), f"{step_B}.features", weight, hidden)


def features(g: Builder, waves_BW: str, name: str, weight: str, hidden: int) -> str:
    """Return what an MLP makes of waves, [B, d]."""
    return two_layers(g, waves_BW, name, weight, _WAVES, hidden)


class Patched:
    """What configurations of denoisers share whose latent image is a square of patches of 2 x 2 pixels."""

    __slots__ = ()
    image_size: int
    """Pixels of the latent image's side."""

    @property
    def side(self) -> int:
        """Patches of the image's side."""
        return self.image_size // 2

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return self.side**2

    @property
    def sample_size(self) -> int:
        """Pixels of the latent image's side."""
        return self.image_size

    def check_patches(self) -> None:
        """Check that the image divides into patches.

        Raises:
            ModelError: If it does not.
        """
        if self.image_size % 2:
            raise ModelError(
                f"{self.image_size} latent pixels do not divide into patches of 2", hint="give an even image_size"
            )


def check_places(hidden: int) -> None:
    """Check that a width divides into sines and cosines of two places.

    Raises:
        ModelError: If it does not.
    """
    if hidden % 4:
        raise ModelError(
            f"places of patches have no sines and cosines in a width of {hidden}", hint="give a multiple of 4"
        )


def cut(g: Builder, images: str, channels: int, side: int) -> str:
    """Return the patches of 2 x 2 pixels of images as rows of their pixels [B, N, 4 channels]."""
    x = g.op("Reshape", images, g.constant((0, channels, side, 2, side, 2)), name="patches.cut")
    x = g.op("Transpose", x, name="patches.rows", perm=(0, 2, 4, 1, 3, 5))
    return g.op("Reshape", x, g.constant((0, side**2, 4 * channels)), name="patches")


def patches(g: Builder, images: str, weight: str, channels: int, side: int, hidden: int) -> str:
    """Return the embedded patches of 2 x 2 pixels of images [B, N, d]."""
    return linear(g, cut(g, images, channels, side), "embed.image", f"{weight}.proj", 4 * channels, hidden)


def placed(g: Builder, x: str, side: int, hidden: int, *, first: float = 0.0, spacing: float = 1.0) -> str:
    """Return patches [B, N, d] plus sines and cosines of their columns and rows.

    Args:
        g: The graph.
        x: The patches, row by row.
        side: Patches of a side.
        hidden: Model width.
        first: Column and row of the first patch.
        spacing: Distance of neighbours.
    """
    table = g.buffer("places", (1, side**2, hidden), f"places {first!r}:{spacing!r}:{side}")
    return g.op("Add", x, table, name="embed.placed")


def unpatched(g: Builder, x: str, weight: str, channels: int, side: int, hidden: int, output: str) -> None:
    """Write the images [B, channels, 2 side, 2 side] that patches become by a projection."""
    x = linear(g, x, "head", weight, hidden, 4 * channels)
    x = g.op("Reshape", x, g.constant((0, side, side, 2, 2, channels)), name="head.cut")
    x = g.op("Transpose", x, name="head.rows", perm=(0, 5, 1, 3, 2, 4))
    g.op("Reshape", x, g.constant((0, channels, 2 * side, 2 * side)), name=output)


def column(g: Builder, x_Bd: str, name: str) -> str:
    """Return `x` as [B, 1, d], for all elements of a sequence."""
    return g.op("Unsqueeze", x_Bd, g.constant((1,)), name=name)


def modulated(
    g: Builder, x: str, name: str, hidden: int, shift_B1d: str, scale_B1d: str, *, epsilon: float = _EPSILON
) -> str:
    """Return a layer norm of `x` without weights, times `1 + scale`, plus `shift`."""
    normed = g.op("LayerNormalization", x, ones(g, hidden), name=f"{name}.norm", axis=-1, epsilon=epsilon)
    factor = g.op("Add", scale_B1d, g.scales((1.0,)), name=f"{name}.factor")
    return g.op("Add", g.op("Mul", normed, factor, name=f"{name}.scaled"), shift_B1d, name=name)


def ones(g: Builder, width: int) -> str:
    """Return the scale of a norm without weights; declared once."""
    return g.shared_buffer(f"ones.{width}", (width,), "constant 1")


def layer_norm(g: Builder, x: str, name: str, weight: str, hidden: int) -> str:
    """Return a layer norm with weights."""
    scale = g.parameter(f"{weight}.weight", (hidden,), "constant 1")
    shift = g.parameter(f"{weight}.bias", (hidden,), "constant 0")
    return g.op("LayerNormalization", x, scale, shift, name=name, axis=-1, epsilon=_EPSILON)


def rms_norm(g: Builder, x: str, name: str, weight: str, width: int) -> str:
    """Return `x` divided by its root mean square over the last dim, and scaled."""
    scale = g.parameter(f"{weight}.weight", (width,), "constant 1")
    return g.op("RMSNormalization", x, scale, name=name, axis=-1, epsilon=_EPSILON)


def gated(g: Builder, x: str, name: str, term: str, gate_B1d: str) -> str:
    """Return `x + gate * term`."""
    return g.op("Add", x, g.op("Mul", term, gate_B1d, name=f"{name}.gated"), name=name)


def rotary_tables(g: Builder, seq: int, grid: Grid, sizes: Sequence[int]) -> tuple[str, str]:
    """Return cosines and sines [1, S, D / 2] of places by frame, row and column.

    Args:
        g: The graph.
        seq: Length of the sequence.
        grid: The places.
        sizes: Dims that turn by frame, by row and by column, each with frequencies of its own.
    """
    frequencies = np.concatenate([Rope(_THETA, size).frequencies() for size in sizes])
    text = f"1.0:{','.join(map(repr, frequencies.tolist()))}:{grid_text(grid)}"
    shape = (1, seq, len(frequencies))
    cos, sin = (g.buffer(f"rope.{part}", shape, f"angles-{part} {text}") for part in ("cos", "sin"))
    return cos, sin


def rotated(g: Builder, x_BHSD: str, name: str, tables: tuple[str, str], batch: str) -> str:
    """Return heads turned by their places, neighbours as pairs; tables are broadcast to the batch."""
    cos, sin = (
        g.op("Expand", table, batch, name=f"{name}.{part}") for part, table in zip(("cos", "sin"), tables, strict=True)
    )
    return g.op("RotaryEmbedding", x_BHSD, cos, sin, name=f"{name}.rotated", interleaved=1)


def attend(g: Builder, q: str, k: str, v: str, name: str, seq: int, hidden: int) -> str:
    """Return what all queries make of all keys and values, heads merged [B, S, d]."""
    return layers.merge_heads(g, g.op("Attention", q, k, v, name=name, is_causal=0), name, seq, hidden)
