"""Gradients of attention and rotary positions."""

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, float_attr, grad_of, int_attr
from autopar.training.tape import Tape, unsupported


def _attention(t: Tape, op: Op, grads: Grads) -> Grads:
    """Recompute the scores from q, k, v, as flash attention does: nothing of size S x S is kept from the forward pass.

    3-D operands [B, S, H * E] are brought to [B, H, S, E] first.
    """
    if any(op.inputs[4:]) or any(op.outputs[1:]):
        raise unsupported(op, "it has a key-value cache, padding lengths or more than one output")
    if max(int_attr(op, "left_window_size", -1), int_attr(op, "right_window_size", -1)) >= 0:
        raise unsupported(op, "it has a sliding window")
    masked, softcap = any(op.inputs[3:4]), float_attr(op, "softcap", 0.0)
    is_causal = int_attr(op, "is_causal", 0)
    if softcap and (masked or not is_causal or t.shape(op.inputs[0])[-2] != t.shape(op.inputs[1])[-2]):
        raise unsupported(op, "it has a soft cap and is no causal attention of a sequence to itself")
    if t.needs(op, 3):
        raise unsupported(op, "its mask is trained")
    dy = grad_of(grads)
    q, k, v = op.inputs[:3]
    operands = {"q": q, "k": k, "v": v, "dy": dy}
    flat = len(t.shape(q)) == 3
    if flat:
        heads = {"q": int_attr(op, "q_num_heads", 0), "k": int_attr(op, "kv_num_heads", 0)}
        heads |= {"v": heads["k"], "dy": heads["q"]}
        operands = {part: _to_heads(t, name, heads[part]) for part, name in operands.items()}
    scale = op.attr("scale")
    if scale is None:
        scale = t.shape(operands["q"])[-1] ** -0.5
    shapes = [t.shape(operands[part]) for part in "qkv"]
    kind, mask, attrs = "autopar::AttentionGrad", list[str](), {"is_causal": is_causal, "scale": scale}
    if masked:
        kind, mask = "autopar::MaskedAttentionGrad", [_additive(t, op.inputs[3], t.dtype(q))]
    elif softcap:
        kind, attrs = "autopar::CausalAttentionGrad", {"scale": scale, "softcap": softcap}
    inputs = [*(operands[part] for part in "qkv"), *mask, operands["dy"]]
    results: Sequence[str] = t.emit_all(kind, inputs, shapes, t.dtype(q), **attrs)
    if flat:
        results = [_from_heads(t, name) for name in results]
    return results


def _to_heads(t: Tape, x: str, heads: int) -> str:
    batch, length, width = t.shape(x)
    return t.transpose(t.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _from_heads(t: Tape, x: str) -> str:
    batch, heads, length, size = t.shape(x)
    return t.reshape(t.transpose(x, (0, 2, 1, 3)), (batch, length, heads * size))


def _additive(t: Tape, mask: str, dtype: str) -> str:
    """Return a mask as numbers to add to the scores."""
    if t.dtype(mask) != "bool":
        return mask
    zero, hidden = t.scalar(0.0, dtype), t.scalar(float("-inf"), dtype)
    return t.emit("Where", [mask, zero, hidden], t.shape(mask), dtype)


def _own_attention(t: Tape, op: Op, grads: Grads) -> Grads:
    """Recompute the scores as `_attention` does; inputs are q, k, v, and a parameter of some kinds."""
    shapes = [t.shape(name) for name in op.inputs]
    inputs = [*op.inputs, grad_of(grads)]
    return t.emit_all(f"{op.kind}Grad", inputs, shapes, t.dtype(op.inputs[0]), **dict(op.attrs))


def _rotary(t: Tape, op: Op, grads: Grads) -> Grads:
    """Turn the gradient back by the same angles."""
    if t.needs(op, 1) or t.needs(op, 2):
        raise unsupported(op, "its angles are trained")
    dy = grad_of(grads)
    attrs = {name: int_attr(op, name, 0) for name in ("interleaved", "num_heads", "rotary_embedding_dim")}
    dx = t.emit("autopar::RotaryEmbeddingGrad", [dy, *op.inputs[1:]], t.shape(dy), t.dtype(dy), **attrs)
    return (dx,)


ATTENTION: Mapping[str, Rule] = {
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    "autopar::CausalAttention": _own_attention,
    "autopar::RelativeAttention": _own_attention,
    "autopar::SinkAttention": _own_attention,
}
