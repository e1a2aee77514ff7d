"""Gradients of ops that rearrange or resize images (N batch, C channels, then spatial dims)."""

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.execute import Executor
from autopar.ir.functions import OPSET
from autopar.ir.graph import Attr, Op
from autopar.training.rules.base import Grads, Rule, grad_of, int_attr
from autopar.training.tape import Tape, unsupported


def _depth_to_space(t: Tape, op: Op, grads: Grads) -> Grads:
    """Undo the move of channels to pixels; SpaceToDepth does so for the order DCR, a transposition for CRD."""
    dy, size = grad_of(grads), int_attr(op, "blocksize", 1)
    shape = t.shape(op.inputs[0])
    if op.attr("mode", "DCR") == "DCR":
        return (t.emit("SpaceToDepth", [dy], shape, t.dtype(dy), blocksize=size),)
    batch, channels, height, width = shape
    parts = t.reshape(dy, (batch, channels // size**2, height, size, width, size))
    return (t.reshape(t.transpose(parts, (0, 1, 3, 5, 2, 4)), shape),)


def _space_to_depth(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    attrs: dict[str, Attr] = {"blocksize": int_attr(op, "blocksize", 1), "mode": "DCR"}
    return (t.emit("DepthToSpace", [dy], t.shape(op.inputs[0]), t.dtype(dy), **attrs),)


def _resize(t: Tape, op: Op, grads: Grads) -> Grads:
    """Of an image whose pixels are repeated: sums over the copies of a pixel. Else the transposed interpolation.

    Interpolation is linear and goes dim by dim, so each dim has a matrix (size after, size before).
    """
    x, dy = op.inputs[0], grad_of(grads)
    shape, larger = t.shape(x), t.shape(dy)
    factors = tuple(after // before for before, after in zip(shape, larger, strict=True))
    way = (op.attr("coordinate_transformation_mode", "half_pixel"), op.attr("nearest_mode", "round_prefer_floor"))
    repeats = op.attr("mode", "nearest") == "nearest" and way in _REPEATS
    whole = all(before * factor == after for before, factor, after in zip(shape, factors, larger, strict=True))
    if repeats and whole and factors[:2] == (1, 1) and len(shape) > len(("N", "C")):
        mean = t.emit("AveragePool", [dy], shape, t.dtype(x), kernel_shape=factors[2:], strides=factors[2:])
        return (t.times(mean, float(prod(factors))),)
    if op.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise unsupported(op, "it crops the image (tf_crop_and_resize)")
    for dim, (before, after) in enumerate(zip(shape, larger, strict=True)):
        matrix = _interpolation(t, op, dim)
        if before != after or not np.array_equal(matrix, np.eye(before)):
            labels = "abcdefghij"[: len(shape)]
            equation = f"{labels},{labels[dim]}z->{labels.replace(labels[dim], 'z')}"
            kept = (*t.shape(dy)[:dim], before, *t.shape(dy)[dim + 1 :])
            dy = t.emit("Einsum", [dy, t.numbers(matrix, t.dtype(x))], kept, t.dtype(x), equation=equation)
    return (dy,)


def _interpolation(t: Tape, op: Op, dim: int) -> NDArray[np.generic]:
    """Return the matrix (size after, size before) of a resize along one dim: its effect on each unit vector."""
    before, after = t.shape(op.inputs[0])[dim], t.shape(op.outputs[0])[dim]
    scales = t.known(op, 2)
    axes = op.attr("axes")
    at = axes.index(dim) if isinstance(axes, tuple) and dim in axes else dim
    known = scales is not None and scales.size and not (isinstance(axes, tuple) and dim not in axes)
    scale = float(scales[at]) if known and scales is not None else after / before
    attrs = tuple(item for item in op.attrs if item[0] not in ("axes", "keep_aspect_ratio_policy"))
    units = np.eye(before)[:, None, :]
    line: list[NDArray[np.generic] | None]
    if scales is not None and scales.size:
        line = [units, None, np.array([1.0, 1.0, scale], np.float32)]
    else:
        line = [units, None, None, np.array([before, 1, after], np.int64)]
    (rows,) = Executor().run_kind("Resize", attrs, line, 1, OPSET, op.name)
    return np.asarray(rows[:, 0, :].T)


_REPEATS = (("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil"))
"""Ways to find the nearest pixel that, for whole factors, take each as often as the others."""

IMAGES: Mapping[str, Rule] = {
    "DepthToSpace": _depth_to_space,
    "Resize": _resize,
    "SpaceToDepth": _space_to_depth,
}
