"""Numpy kernels for ops that `onnx.reference` runs too slowly to be run thousands of times, or not as specified.

Each follows the operator's text in the ONNX specification. Array dims: N batch, C channels, then spatial dims.
Arguments are those of the ONNX op; `None` stands for an absent input or attribute. All of them keep the dtype of their
first input.
"""

import math
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = Sequence[int]


def _padding(
    shape: Ints, kernel: Ints, strides: Ints, dilations: Ints, pads: Ints | None, auto_pad: str | None, ceil_mode: bool
) -> list[tuple[int, int, int]]:
    """Return (padding before, padding after, number of windows) per spatial dim.

    The padding after includes the rows that the last window of `ceil_mode` reaches beyond the declared padding.
    """
    result = []
    for axis, size in enumerate(shape):
        span = (kernel[axis] - 1) * dilations[axis] + 1
        stride = strides[axis]
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            count = -(-size // stride)
            total = max(0, (count - 1) * stride + span - size)
            before = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            after = total - before
        else:
            before, after = (pads[axis], pads[axis + len(shape)]) if pads and auto_pad != "VALID" else (0, 0)
            room = size + before + after - span
            count = (-(-room // stride) if ceil_mode else room // stride) + 1
            if ceil_mode and (count - 1) * stride >= size + before:  # it would start in the padding: ignored
                count -= 1
        if count < 1:
            raise ValueError(f"a window of {span} does not fit spatial dim {axis} of size {size}")
        result.append((before, max(after, (count - 1) * stride + span - size - before), count))
    return result


def _windows(
    x: Array, kernel: Ints, strides: Ints, dilations: Ints, padding: list[tuple[int, int, int]], fill: float
) -> Array:
    """Return the sliding windows of `x`: (N, C, *windows, *kernel), a view of the padded input."""
    padded = x
    if any(before or after for before, after, _ in padding):
        widths = [(0, 0), (0, 0)] + [(before, after) for before, after, _ in padding]
        padded = np.pad(x, widths, constant_values=fill)
    spans = tuple((size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True))
    views = sliding_window_view(padded, spans, axis=tuple(range(2, x.ndim)))
    steps = [slice(None), slice(None)]
    steps += [
        slice(0, (count - 1) * stride + 1, stride) for (_, _, count), stride in zip(padding, strides, strict=True)
    ]
    steps += [slice(None, None, dilation) for dilation in dilations]
    return views[tuple(steps)]


def _spatial_axes(x: Array) -> tuple[int, ...]:
    return tuple(range(x.ndim, 2 * x.ndim - 2))


def max_pool(
    x: Array,
    *,
    num_outputs: int,
    kernel_shape: Ints,
    auto_pad: str | None = None,
    ceil_mode: int | None = None,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    storage_order: int | None = None,
    strides: Ints | None = None,
) -> tuple[Array, ...]:
    """Return the maxima and, if two outputs are asked for, their flat indices in `x`."""
    rank = len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    padding = _padding(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    lowest = -np.inf if np.issubdtype(x.dtype, np.floating) else np.iinfo(x.dtype).min
    windows = _windows(x, kernel_shape, strides, dilations, padding, lowest)
    y = windows.max(axis=_spatial_axes(x))
    if num_outputs == 1:
        return (y,)
    flat = windows.reshape(*y.shape, prod(kernel_shape)).argmax(axis=-1)
    inside = np.unravel_index(flat, tuple(kernel_shape))
    spatial = x.shape[2:]
    weights = [prod(spatial[axis + 1 :]) if not storage_order else prod(spatial[:axis]) for axis in range(rank)]
    starts = np.ogrid[tuple(slice(0, size) for size in y.shape)]
    indices = (starts[0] * x.shape[1] + starts[1]) * prod(spatial)
    for axis in range(rank):
        position = starts[axis + 2] * strides[axis] - padding[axis][0] + inside[axis] * dilations[axis]
        indices = indices + position * weights[axis]
    return y, indices.astype(np.int64)


def global_max_pool(x: Array, *, num_outputs: int) -> tuple[Array, ...]:
    """Return the maxima over all spatial dims; `onnx.reference` takes every input for an image."""
    assert num_outputs == 1, "GlobalMaxPool has one output"
    return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


def average_pool(
    x: Array,
    *,
    num_outputs: int,
    kernel_shape: Ints,
    auto_pad: str | None = None,
    ceil_mode: int | None = None,
    count_include_pad: int | None = None,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> tuple[Array, ...]:
    """Return the means of the windows.

    With `count_include_pad` the divisor counts the declared padding, but never what `ceil_mode` adds beyond it.
    """
    assert num_outputs == 1, "AveragePool has one output"
    rank = len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    padding = _padding(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    total = _windows(x, kernel_shape, strides, dilations, padding, 0).sum(axis=_spatial_axes(x))
    ones: Array = np.ones((1, 1, *x.shape[2:]))
    counted = padding
    if count_include_pad:
        if auto_pad in (None, "NOTSET") and pads:
            declared = [(pads[axis], pads[axis + rank]) for axis in range(rank)]
        elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            declared = [(before, after) for before, after, _ in padding]
        else:
            declared = [(0, 0)] * rank
        ones = np.pad(ones, [(0, 0), (0, 0), *declared], constant_values=1)
        counted = [(b - db, max(0, a - da), n) for (b, a, n), (db, da) in zip(padding, declared, strict=True)]
    count = _windows(ones, kernel_shape, strides, dilations, counted, 0).sum(axis=_spatial_axes(x))
    return ((total / count).astype(x.dtype),)


def lp_pool(
    x: Array,
    *,
    num_outputs: int,
    kernel_shape: Ints,
    auto_pad: str | None = None,
    ceil_mode: int | None = None,
    dilations: Ints | None = None,
    p: float | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> tuple[Array, ...]:
    """Return the p-norms of the windows."""
    assert num_outputs == 1, "LpPool has one output"
    rank = len(kernel_shape)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    order = 2 if p is None else p
    padding = _padding(x.shape[2:], kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    powers = _windows(np.abs(x) ** order, kernel_shape, strides, dilations, padding, 0).sum(axis=_spatial_axes(x))
    return ((powers ** (1.0 / order)).astype(x.dtype),)


def conv(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    num_outputs: int,
    auto_pad: str | None = None,
    dilations: Ints | None = None,
    group: int | None = None,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> tuple[Array, ...]:
    """Return the convolution of `x` (N, C, ...) with `w` (M, C / group, *kernel) plus the bias `b` (M)."""
    assert num_outputs == 1, "Conv has one output"
    rank, groups = x.ndim - 2, group or 1
    kernel = w.shape[2:]
    if kernel_shape and tuple(kernel_shape) != kernel:
        raise ValueError(f"kernel_shape {tuple(kernel_shape)} differs from the kernel of W {w.shape}")
    if x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ValueError(f"{groups} groups do not fit X {x.shape} and W {w.shape}")
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    padding = _padding(x.shape[2:], kernel, strides, dilations, pads, auto_pad, ceil_mode=False)
    windows = _windows(x, kernel, strides, dilations, padding, 0)
    sizes = windows.shape[2 : 2 + rank]
    # One matrix product per group: (G, N * sizes, C / G * kernel) with (G, C / G * kernel, M / G).
    grouped = windows.reshape(x.shape[0], groups, w.shape[1], *windows.shape[2:])
    rows = np.moveaxis(grouped, (1, 2), (0, 2 + rank)).reshape(groups, -1, prod(w.shape[1:]))
    weights = w.reshape(groups, w.shape[0] // groups, -1)
    parts = rows @ weights.swapaxes(1, 2)
    y = np.moveaxis(parts.reshape(groups, x.shape[0], *sizes, -1), (1, 0, -1), (0, 1, 2))
    y = y.reshape(x.shape[0], w.shape[0], *sizes)
    if b is not None:
        y = y + b.reshape(-1, *[1] * rank)
    return (y,)


def conv_transpose(
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    num_outputs: int,
    auto_pad: str | None = None,
    dilations: Ints | None = None,
    group: int | None = None,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> tuple[Array, ...]:
    """Return the transposed convolution of `x` (N, C, ...) with `w` (C, M / group, *kernel) plus the bias `b` (M)."""
    assert num_outputs == 1, "ConvTranspose has one output"
    rank, groups = x.ndim - 2, group or 1
    kernel = w.shape[2:]
    if kernel_shape and tuple(kernel_shape) != kernel:
        raise ValueError(f"kernel_shape {tuple(kernel_shape)} differs from the kernel of W {w.shape}")
    if x.shape[1] != w.shape[0] or w.shape[0] % groups:
        raise ValueError(f"{groups} groups do not fit X {x.shape} and W {w.shape}")
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    extra = output_padding or [0] * rank
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    full = [strides[axis] * (x.shape[axis + 2] - 1) + spans[axis] + extra[axis] for axis in range(rank)]
    before, sizes = [], []
    for axis in range(rank):
        size = output_shape[axis] if output_shape else x.shape[axis + 2] * strides[axis]
        total = full[axis] - size
        if auto_pad == "SAME_UPPER":
            start = total // 2
        elif output_shape or auto_pad == "SAME_LOWER":
            start = total - total // 2
        else:
            start, end = (pads[axis], pads[axis + rank]) if pads and auto_pad != "VALID" else (0, 0)
            size = full[axis] - start - end
        before.append(start)
        sizes.append(size)
    reach = [max(full[axis], before[axis] + sizes[axis], spans[axis]) for axis in range(rank)]
    canvas = np.zeros((x.shape[0], w.shape[1] * groups, *reach), dtype=x.dtype)
    # One matrix product per group and kernel position: (G, N * sizes, C / G) with (G, C / G, M / G).
    inputs = np.moveaxis(x.reshape(x.shape[0], groups, -1, *x.shape[2:]), (1, 2), (0, -1))
    rows = inputs.reshape(groups, -1, x.shape[1] // groups)
    weights = w.reshape(groups, x.shape[1] // groups, *w.shape[1:])
    for offsets in product(*map(range, kernel)):
        steps = [
            slice(offset * dilation, offset * dilation + (count - 1) * stride + 1, stride)
            for offset, dilation, stride, count in zip(offsets, dilations, strides, x.shape[2:], strict=True)
        ]
        term = rows @ np.moveaxis(weights, (0, 1, 2), (-3, -2, -1))[offsets]
        term = np.moveaxis(term.reshape(*inputs.shape[:-1], w.shape[1]), (1, 0, -1), (0, 1, 2))
        canvas[tuple([slice(None), slice(None), *steps])] += term.reshape(x.shape[0], -1, *x.shape[2:])
    crop = [slice(start, start + size) for start, size in zip(before, sizes, strict=True)]
    y = canvas[tuple([slice(None), slice(None), *crop])]
    return (y if b is None else y + b.reshape(-1, *[1] * rank),)


def lrn(x: Array, *, num_outputs: int, size: int, alpha: float, beta: float, bias: float) -> tuple[Array, ...]:
    """Return local response normalisation over channels; `onnx.reference` normalises the first N channels only."""
    assert num_outputs == 1, "LRN has one output"
    before = (size - 1) // 2
    pads = [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)]
    total = sliding_window_view(np.pad(x * x, pads), size, axis=1).sum(axis=-1)
    return ((x / (bias + alpha / size * total) ** beta).astype(x.dtype),)


def group_normalization(
    x: Array,
    scale: Array,
    bias: Array,
    *,
    num_outputs: int,
    num_groups: int,
    epsilon: float | None = None,
    stash_type: int | None = None,
) -> tuple[Array, ...]:
    """Return `x` normalised over groups of channels; `onnx.reference` computes the statistics in float32."""
    assert num_outputs == 1, "GroupNormalization has one output"
    channels = x.shape[1]
    if channels % num_groups or scale.shape != (channels,) or bias.shape != (channels,):
        raise ValueError(f"{channels} channels in {num_groups} groups with scale {scale.shape} and bias {bias.shape}")
    grouped = x.reshape(x.shape[0], num_groups, -1)
    centred = grouped - grouped.mean(axis=2, keepdims=True)
    deviation = np.sqrt((centred * centred).mean(axis=2, keepdims=True) + (1e-5 if epsilon is None else epsilon))
    column = (channels, *[1] * (x.ndim - 2))
    normal = (centred / deviation).reshape(x.shape)
    return ((normal * scale.reshape(column) + bias.reshape(column)).astype(x.dtype),)


def gather_elements(x: Array, indices: Array, *, num_outputs: int, axis: int = 0) -> tuple[Array, ...]:
    """Return the element each index picks along the axis; `onnx.reference` wraps indices that are out of range."""
    assert num_outputs == 1, "GatherElements has one output"
    dim = axis % x.ndim
    if any(d != dim and size > x.shape[d] for d, size in enumerate(indices.shape)):
        raise ValueError(f"indices {indices.shape} reach beyond data {x.shape} in a dim other than {dim}")
    reach = [slice(None) if d == dim else slice(size) for d, size in enumerate(indices.shape)]
    return (np.take_along_axis(x[tuple(reach)], indices, axis=dim),)


def lp_normalization(x: Array, *, num_outputs: int, axis: int | None = None, p: int | None = None) -> tuple[Array, ...]:
    """Return `x` by its norm along an axis; `onnx.reference` takes no absolute values for the norm of order 1."""
    assert num_outputs == 1, "LpNormalization has one output"
    dim, order = -1 if axis is None else axis, p or 2
    norm = (np.abs(x) ** order).sum(axis=dim, keepdims=True) ** (1 / order)
    return (np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)).astype(x.dtype),)


def erf(x: Array, *, num_outputs: int) -> tuple[Array, ...]:
    """Return the error function in float64 precision; that of `onnx.reference` is float32."""
    assert num_outputs == 1, "Erf has one output"
    return (np.asarray(_erf(x), np.float64).astype(x.dtype),)


def gelu(x: Array, *, num_outputs: int, approximate: str | None = None) -> tuple[Array, ...]:
    """Return x times the normal distribution function of x, exact or by its approximation with tanh."""
    assert num_outputs == 1, "Gelu has one output"
    if approximate == "tanh":
        doubled = 1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        doubled = 1 + erf(x * math.sqrt(0.5), num_outputs=1)[0]
    return ((0.5 * x * doubled).astype(x.dtype),)


_erf = np.frompyfunc(math.erf, 1, 1)


def split(
    x: Array, sizes: Array | None = None, *, num_outputs: int, axis: int | None = None, split: Ints | None = None
) -> tuple[Array, ...]:
    """Return the parts of a dim, which make it up; without sizes (before opset 13 an attribute) they are equal."""
    dim = axis or 0
    whole = x.shape[dim]
    each = -(-whole // num_outputs)
    equal = [each] * (num_outputs - 1) + [whole - each * (num_outputs - 1)]
    parts = [int(size) for size in (sizes if sizes is not None else split or equal)]
    if sum(parts) != whole or min(parts) < 0:
        raise ValueError(f"parts of {parts} do not make up dim {dim} of size {whole}")
    return tuple(np.split(x, np.cumsum(parts)[:-1], axis=dim))


def grid_sample(
    x: Array,
    grid: Array,
    *,
    num_outputs: int,
    align_corners: int | None = None,
    mode: str | None = None,
    padding_mode: str | None = None,
) -> tuple[Array, ...]:
    """Return an image at the places of a grid; the reference of ONNX computes places in float32 whatever comes in."""
    assert num_outputs == 1, "GridSample has one output"
    sizes, mode, padding = x.shape[2:], mode or "linear", padding_mode or "zeros"
    taps: list[list[tuple[Array, Array]]] = []
    for dim, size in enumerate(sizes):
        given = grid[..., len(sizes) - 1 - dim]
        place = (given + 1) / 2 * (size - 1) if align_corners else ((given + 1) * size - 1) / 2
        place = np.rint(place) if mode == "nearest" else place
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        beyond = (place < low) | (place > high)
        place = np.where(beyond, _padded(place, size, padding, bool(align_corners)), place)
        taps.append(_taps(np.rint(place) if mode == "nearest" else place, mode))
    batch = np.arange(len(x)).reshape(-1, *[1] * len(sizes))
    total = np.zeros((len(x), *grid.shape[1:-1], x.shape[1]), x.dtype)
    for chosen in product(*taps):
        weight: Array = np.ones(grid.shape[:-1], x.dtype)
        indices = []
        for size, (index, share) in zip(sizes, chosen, strict=True):
            index = _padded(index, size, padding, bool(align_corners))
            weight = weight * share * ((index >= 0) & (index < size))
            indices.append(np.clip(np.rint(index), 0, size - 1).astype(np.int64))
        total += weight[..., None] * np.moveaxis(x, 1, -1)[(batch, *indices)]
    return (np.moveaxis(total, -1, 1),)


def _padded(place: Array, size: int, padding: str, aligned: bool) -> Array:
    """Return places moved into the image, where the padding says so."""
    if padding == "border":
        return np.clip(place, 0, size - 1)
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if aligned else (-0.5, float(size))
        return low + span - np.abs(np.mod(np.abs(place - low), 2 * span) - span) if span else np.zeros_like(place)
    return place


def _taps(place: Array, mode: str) -> list[tuple[Array, Array]]:
    """Return the pixels that are read along a dim, and how much each counts."""
    if mode == "nearest":
        return [(place, np.ones_like(place))]
    first = np.floor(place)
    part = place - first
    if mode == "linear":
        return [(first, 1 - part), (first + 1, part)]
    a = -0.75  # of the cubic convolution, as ONNX fixes it
    found = []
    for step in range(-1, 3):
        far = np.abs(part - step)
        inner, outer = ((a + 2) * far - (a + 3)) * far**2 + 1, ((far - 5) * far + 8) * far * a - 4 * a
        found.append((first + step, np.where(far <= 1, inner, outer)))
    return found


KERNELS = {
    "Erf": erf,
    "GatherElements": gather_elements,
    "Gelu": gelu,
    "GridSample": grid_sample,
    "GroupNormalization": group_normalization,
    "LRN": lrn,
    "LpNormalization": lp_normalization,
    "Split": split,
    "GlobalMaxPool": global_max_pool,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
}
"""The kernels by ONNX op type."""
