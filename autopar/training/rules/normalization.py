"""Gradients of softmax and of normalisations.

Batch normalisation is trained with the statistics of the batch: `autopar.training.batch_norm` has replaced it by
`autopar::BatchNorm`.
"""

from collections.abc import Mapping

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, axis_attr, float_attr, grad_of, int_attr
from autopar.training.tape import Shape, Tape, unsupported


def _softmax(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map(f"autopar::{op.kind}Grad", op.outputs[0], grad_of(grads), axis=axis_attr(t, op, -1)),)


def _layer_norm(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, (x, scale) = grads[0], op.inputs[:2]
    if dy is None or any(grads[1:]):
        raise unsupported(op, "a gradient flows through the statistics it returns")
    axis = _norm_axis(t, op)
    norm_shape = t.shape(x)[axis:]
    dx, dscale, dbias = t.emit_all(
        "autopar::LayerNormalizationGrad",
        [x, _spread(t, scale, norm_shape), dy],
        [t.shape(x), norm_shape, norm_shape],
        t.dtype(x),
        axis=axis,
        epsilon=float_attr(op, "epsilon", 1e-5),
    )
    bias_shape = t.shape(op.inputs[2]) if t.needs(op, 2) else norm_shape
    return dx, t.reduce_to(dscale, t.shape(scale)), t.reduce_to(dbias, bias_shape)


def _rms_norm(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, (x, scale) = grad_of(grads), op.inputs
    axis = _norm_axis(t, op)
    norm_shape = t.shape(x)[axis:]
    dx, dscale = t.emit_all(
        "autopar::RMSNormalizationGrad",
        [x, _spread(t, scale, norm_shape), dy],
        [t.shape(x), norm_shape],
        t.dtype(x),
        axis=axis,
        epsilon=float_attr(op, "epsilon", 1e-5),
    )
    return dx, t.reduce_to(dscale, t.shape(scale)) if t.needs(op, 1) else None


def _group_norm(t: Tape, op: Op, grads: Grads) -> Grads:
    """Of GroupNormalization, and of InstanceNormalization, which has a group per channel."""
    dy, (x, scale) = grad_of(grads), op.inputs[:2]
    channels = t.shape(x)[1]
    if t.shape(scale) != (channels,):
        raise unsupported(op, f"{t.values[scale]} has not one number for each of {channels} channels")
    return t.emit_all(
        "autopar::GroupNormalizationGrad",
        [x, scale, dy],
        [t.shape(x), (channels,), (channels,)],
        t.dtype(x),
        epsilon=float_attr(op, "epsilon", 1e-5),
        num_groups=int_attr(op, "num_groups", channels),
    )


def _norm_axis(t: Tape, op: Op) -> int:
    """Return the first normalised dim of an op whose scale (and bias) has the normalised dims, or 1 in their place."""
    axis = axis_attr(t, op, -1)
    normed = t.shape(op.inputs[0])[axis:]
    for name in filter(None, op.inputs[1:]):
        shape = t.shape(name)
        fits = (size in (1, full) for size, full in zip(shape[::-1], normed[::-1], strict=False))
        if len(shape) > len(normed) or not all(fits):
            raise unsupported(op, f"{t.values[name]} has not the shape {list(normed)} of the normalised dims")
    return axis


def _spread(t: Tape, scale: str, shape: Shape) -> str:
    """Return a scale with all normalised dims."""
    own = t.shape(scale)
    return scale if own == shape else t.expand(t.reshape(scale, (1,) * (len(shape) - len(own)) + own), shape)


def _batch_norm(t: Tape, op: Op, grads: Grads) -> Grads:
    """Return the gradients including what flows through the statistics.

    The two means over the batch are sums (which are dbias and dscale) times a constant, so that shards of a batch can
    be added.
    """
    dy, (x, scale, bias, mean, mean_square) = grad_of(grads), op.inputs
    epsilon = float_attr(op, "epsilon", 1e-5)
    dtype, shape = t.dtype(x), t.shape(x)
    count = t.values[x].size // shape[1]
    if int_attr(op, "per_device", 0):
        return _batch_norm_per_device(t, op, dy, epsilon)
    dscale, dbias = t.emit_all(
        "autopar::BatchNormGradStats",
        [x, mean, mean_square, dy],
        [t.shape(scale), t.shape(bias)],
        dtype,
        epsilon=epsilon,
    )
    dx = None
    if t.needs(op, 0):
        means = [t.times(value, 1.0 / count) for value in (dscale, dbias)]
        inputs = [x, scale, mean, mean_square, *means, dy]
        dx = t.emit("autopar::BatchNormGrad", inputs, shape, dtype, epsilon=epsilon)
    return dx, dscale, dbias


def _batch_norm_per_device(t: Tape, op: Op, dy: str, epsilon: float) -> Grads:
    """Return the gradients where each device takes its own terms of the means over the batch for the whole ones."""
    x, scale, bias, mean, mean_square = op.inputs
    dscale, dbias, *means = t.emit_all(
        "autopar::BatchNormGradMeans",
        [x, mean, mean_square, dy],
        [t.shape(scale), t.shape(bias), t.shape(mean), t.shape(mean_square)],
        t.dtype(x),
        epsilon=epsilon,
        per_device=1,
    )
    dx = None
    if t.needs(op, 0):
        inputs = [x, scale, mean, mean_square, *means, dy]
        dx = t.emit("autopar::BatchNormGrad", inputs, t.shape(x), t.dtype(x), epsilon=epsilon, per_device=1)
    return dx, dscale, dbias


def _lrn(t: Tape, op: Op, grads: Grads) -> Grads:
    dx = t.map(
        "autopar::LRNGrad",
        op.inputs[0],
        grad_of(grads),
        size=int_attr(op, "size", 1),
        alpha=float_attr(op, "alpha", 1e-4),
        beta=float_attr(op, "beta", 0.75),
        bias=float_attr(op, "bias", 1.0),
    )
    return (dx,)


NORMALIZATION: Mapping[str, Rule] = {
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _group_norm,
    "LRN": _lrn,
    "LayerNormalization": _layer_norm,
    "LogSoftmax": _softmax,
    "RMSNormalization": _rms_norm,
    "Softmax": _softmax,
    "autopar::BatchNorm": _batch_norm,
}
