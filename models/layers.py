"""Pieces that several families share.

Dims: B batch, S sequence, H heads, D head size, d model width. Nothing depends on B: reshapes copy it (a 0 in the
target shape). Projections are separate `MatMul`s, so that each can be sharded by its own output dim (heads, hidden
units).
"""

from autopar.errors import ModelError
from autopar.models.builder import Builder


def head_size(hidden: int, heads: int) -> int:
    """Return the width of one head.

    Raises:
        ModelError: If the heads do not divide the width.
    """
    if heads < 1 or hidden % heads:
        raise ModelError(
            f"hidden size {hidden} is not divisible by {heads} heads",
            hint=f"give hidden={max(1, hidden // max(1, heads)) * max(1, heads)} or other heads",
        )
    return hidden // heads


def linear(g: Builder, x: str, name: str, num_in: int, num_out: int, *, bias: bool = True) -> str:
    """Return `x @ weight [num_in, num_out] + bias`."""
    weight = g.parameter(f"{name}.weight", (num_in, num_out), f"normal {num_in**-0.5:.6g}")
    if not bias:
        return g.op("MatMul", x, weight, name=name)
    product = g.op("MatMul", x, weight, name=f"{name}.matmul")
    return g.op("Add", product, g.parameter(f"{name}.bias", (num_out,), "constant 0"), name=name)


def layer_norm(g: Builder, x: str, name: str, hidden: int, *, epsilon: float = 1e-5, bias: bool = True) -> str:
    """Return `x` normalised over its last dim, scaled and, with bias, shifted."""
    scale = g.parameter(f"{name}.weight", (hidden,), "constant 1")
    if not bias:
        return g.op("LayerNormalization", x, scale, name=name, axis=-1, epsilon=epsilon)
    shift = g.parameter(f"{name}.bias", (hidden,), "constant 0")
    return g.op("LayerNormalization", x, scale, shift, name=name, axis=-1, epsilon=epsilon)


def rms_norm(g: Builder, x: str, name: str, hidden: int, *, epsilon: float = 1e-5) -> str:
    """Return `x` divided by its root mean square over the last dim, and scaled."""
    scale = g.parameter(f"{name}.weight", (hidden,), "constant 1")
    return g.op("RMSNormalization", x, scale, name=name, axis=-1, epsilon=epsilon)


def split_heads(g: Builder, x_BSd: str, name: str, seq: int, heads: int, size: int) -> str:
    """Return `x` as [B, H, S, D]."""
    x_BSHD = g.op("Reshape", x_BSd, g.constant((0, seq, heads, size)), name=f"{name}.split")
    return g.op("Transpose", x_BSHD, name=f"{name}.heads", perm=(0, 2, 1, 3))


def merge_heads(g: Builder, x_BHSD: str, name: str, seq: int, width: int) -> str:
    """Return `x` as [B, S, width], width being heads times head size."""
    x_BSHD = g.op("Transpose", x_BHSD, name=f"{name}.unheads", perm=(0, 2, 1, 3))
    return g.op("Reshape", x_BSHD, g.constant((0, seq, width)), name=f"{name}.merge")


def self_attention(
    g: Builder, x_BSd: str, name: str, *, seq: int, hidden: int, heads: int, causal: bool, bias: bool = True
) -> str:
    """Return multi-head self-attention of `x`, all projections with bias or none."""
    size = head_size(hidden, heads)
    q, k, v = (
        split_heads(
            g, linear(g, x_BSd, f"{name}.{part}", hidden, hidden, bias=bias), f"{name}.{part}", seq, heads, size
        )
        for part in ("q", "k", "v")
    )
    y_BHSD = g.op("Attention", q, k, v, name=f"{name}.core", is_causal=int(causal))
    merged = merge_heads(g, y_BHSD, f"{name}.core", seq, hidden)
    return linear(g, merged, f"{name}.out", hidden, hidden, bias=bias)


def mlp(g: Builder, x: str, name: str, hidden: int, ffn: int, *, approximate: str, bias: bool = True) -> str:
    """Return `down(gelu(up(x)))`, both projections with bias or none.

    Args:
        g: The graph.
        x: Input [..., hidden].
        name: Prefix of all names.
        hidden: Width outside.
        ffn: Width inside.
        approximate: Form of the GELU: "none" (error function) or "tanh".
        bias: Whether the projections have one.
    """
    up = linear(g, x, f"{name}.up", hidden, ffn, bias=bias)
    active = g.op("Gelu", up, name=f"{name}.gelu", approximate=approximate)
    return linear(g, active, f"{name}.down", ffn, hidden, bias=bias)


def tied_head(g: Builder, x_BSd: str, embedding_Vd: str, name: str) -> str:
    """Return the product of `x` with the transposed token embedding: [B, S, V]."""
    return g.op("MatMul", x_BSd, g.op("Transpose", embedding_Vd, name=f"{name}.weight", perm=(1, 0)), name=name)
