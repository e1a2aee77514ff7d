"""Pieces of diffusion transformers (Peebles and Xie 2023): features of the step of the noise, modulated norms.

Dims: B batch, S sequence, d model width, H heads, D head size. Weights are called as in diffusers; `.T` and parts of
fused matrices as in `decoder_config`.
"""

from collections.abc import Sequence

import numpy as np

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


def waves(g: Builder, step_B: str, rows: int) -> str:
    """Return cosines and sines of whole numbers [B, 256], by rows of a table.

    Args:
        g: The graph.
        step_B: The numbers, int64.
        rows: How many there may be.
    """
    found = []
    for part in ("cos", "sin"):
        table = g.buffer(f"{step_B}.{part}.table", (1, rows, _WAVES // 2), f"rope-{part} 10000")
        wave = g.op("Gather", table, step_B, name=f"{step_B}.{part}", axis=1)
        found.append(g.op("Squeeze", wave, g.constant((0,)), name=f"{step_B}.{part}.row"))
    return g.op("Concat", *found, name=f"{step_B}.waves", axis=1)


def step_features(g: Builder, step_B: str, rows: int, weight: str, hidden: int) -> str:
    """Return features of whole numbers [B, d]: their waves through an MLP."""
    return two_layers(g, waves(g, step_B, rows), f"{step_B}.features", weight, _WAVES, hidden)


def column(g: Builder, x_Bd: str, name: str) -> str:
    """Return `x` as [B, 1, d], for all elements of a sequence."""
    return g.op("Unsqueeze", x_Bd, g.constant((1,)), name=name)


def modulated(g: Builder, x: str, name: str, hidden: int, shift_B1d: str, scale_B1d: str) -> str:
    """Return a layer norm of `x` without weights, times `1 + scale`, plus `shift`."""
    normed = g.op("LayerNormalization", x, ones(g, hidden), name=f"{name}.norm", axis=-1, epsilon=_EPSILON)
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
