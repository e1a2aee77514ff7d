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


def _grid_sample(t: Tape, op: Op, grads: Grads) -> Grads:
    """Of the image: each result, shared among the pixels it was read from. Of the grid: the slope of the image there.

    Coordinates are turned into places in units of pixels first, inside the image where the padding says so.
    """
    (x, grid), dy = op.inputs, grad_of(grads)
    sizes, mode = t.shape(x)[2:], op.attr("mode", "linear")
    if mode not in ("linear", "nearest"):
        raise unsupported(op, f"its mode is {mode!r}")
    if len(sizes) not in _SAMPLED:
        raise unsupported(op, f"it samples {len(sizes)} spatial dims")
    places, slope = _places(t, op, sizes)
    if mode == "nearest":
        places = t.map("Round", places)
    suffix, rows = _SAMPLED[len(sizes)], [t.row_numbers(size) for size in sizes]
    dx = dgrid = None
    if t.needs(op, 0):
        dx = t.emit(f"autopar::GridSample{suffix}Grad", [places, *rows, dy], t.shape(x), t.dtype(x))
    if t.needs(op, 1) and mode == "linear":
        kind = f"autopar::GridSample{suffix}PlacesGrad"
        dgrid = t.map("Mul", t.emit(kind, [places, x, *rows, dy], t.shape(grid), t.dtype(grid)), slope)
    return dx, dgrid


_SAMPLED = {2: "", 3: "3D"}
"""What gradients of grid sampling are called by the number of spatial dims."""


def _places(t: Tape, op: Op, sizes: tuple[int, ...]) -> tuple[str, str]:
    """Return the places that a grid samples, in pixels from the first, and how fast they move with its coordinates.

    Coordinates run from -1 to 1, over the centres of the outermost pixels or over their edges.
    """
    grid, dtype = op.inputs[1], t.dtype(op.inputs[1])
    tops = np.array(sizes[::-1], np.float64) - 1  # coordinates are those of columns first
    aligned, padding = bool(int_attr(op, "align_corners", 0)), op.attr("padding_mode", "zeros")
    scales = tops / 2 if aligned else (tops + 1) / 2
    slope = t.numbers(scales, dtype)
    places = t.map("Add", t.map("Mul", grid, slope), t.numbers(tops / 2, dtype))
    if padding == "reflection":
        low = np.zeros_like(tops) if aligned else np.full_like(tops, -0.5)
        span = np.maximum(tops - 2 * low, 1.0)
        beyond = t.map("Sub", places, t.numbers(low, dtype))
        turn = t.map("Mod", t.map("Abs", beyond), t.numbers(2 * span, dtype), fmod=1)
        back = t.map("Sub", t.numbers(span, dtype), turn)
        slope = t.map("Mul", slope, t.map("Mul", t.map("Sign", beyond), t.map("Sign", back)))
        places = t.map("Sub", t.numbers(span + low, dtype), t.map("Abs", back))
    if padding != "zeros":
        first, last = t.numbers(np.zeros_like(tops), dtype), t.numbers(tops, dtype)
        inside = t.map("Min", t.map("Max", places, first), last)
        same = t.emit("Equal", [inside, places], t.shape(grid), "bool")
        slope = t.map("Mul", slope, t.emit("CastLike", [same, grid], t.shape(grid), dtype))
        places = inside
    return places, slope


IMAGES: Mapping[str, Rule] = {
    "DepthToSpace": _depth_to_space,
    "GridSample": _grid_sample,
    "Resize": _resize,
    "SpaceToDepth": _space_to_depth,
}
