"""Gradients of ops that move elements, or select rows of them."""

from collections.abc import Mapping

import numpy as np

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, axes_of, axis_attr, grad_of, int_attr, ints_attr
from autopar.training.rules.scatter import rows_into
from autopar.training.tape import Shape, Tape, unsupported


def _input_shape(t: Tape, op: Op) -> Shape:
    return t.shape(op.inputs[0])


def _reshape(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.reshape(grad_of(grads), _input_shape(t, op)),)


def _squeeze(t: Tape, op: Op, grads: Grads) -> Grads:
    shape = _input_shape(t, op)
    axes = axes_of(t, op, len(shape)) or tuple(dim for dim, size in enumerate(shape) if size == 1)
    return (t.unsqueeze(grad_of(grads), axes),)


def _unsqueeze(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    return (t.squeeze(dy, axes_of(t, op, len(t.shape(dy)))),)


def _transpose(t: Tape, op: Op, grads: Grads) -> Grads:
    rank = len(_input_shape(t, op))
    perm = ints_attr(op, "perm", tuple(reversed(range(rank))))
    return (t.transpose(grad_of(grads), tuple(int(dim) for dim in np.argsort(perm))),)


def _expand(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.reduce_to(grad_of(grads), _input_shape(t, op)),)


def _tile(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, shape, repeats = grad_of(grads), _input_shape(t, op), t.known(op, 1)
    assert repeats is not None, "Tile has repeats"
    split: list[int] = []
    for size, count in zip(shape, repeats.ravel(), strict=True):
        split += [int(count), size]
    return (t.sum(t.reshape(dy, tuple(split)), tuple(range(0, len(split), 2))),)


def _concat(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, axis = grad_of(grads), axis_attr(t, op, 0)
    shapes = [t.shape(name) for name in op.inputs]
    if len(shapes) == 1:
        return (dy,)
    sizes = t.ints(shape[axis] for shape in shapes)
    return t.emit_all("Split", [dy, sizes], shapes, t.dtype(dy), axis=axis)


def _split(t: Tape, op: Op, grads: Grads) -> Grads:
    x, axis, given = op.inputs[0], axis_attr(t, op, 0), t.known(op, 1)
    shape, count = t.shape(x), len(op.outputs)
    each = -(-shape[axis] // count)
    sizes = [each] * (count - 1) + [shape[axis] - each * (count - 1)] if given is None else given.tolist()
    shapes = [(*shape[:axis], int(size), *shape[axis + 1 :]) for size in sizes]
    parts = [grad or t.zeros(part, t.dtype(x)) for grad, part in zip(grads, shapes, strict=True)]
    return (t.emit("Concat", parts, t.shape(x), t.dtype(x), axis=axis),)


def _slice(t: Tape, op: Op, grads: Grads) -> Grads:
    """Pad dims cut with step 1; put rows taken with another step back where they came from."""
    dy, shape = grad_of(grads), _input_shape(t, op)
    starts, ends, axes, steps = (t.known(op, index) for index in range(1, 5))
    assert starts is not None, "Slice has starts"
    assert ends is not None, "Slice has ends"
    dims = range(len(starts)) if axes is None else [int(axis) % len(shape) for axis in axes]
    before, after = [0] * len(shape), [0] * len(shape)
    for position, dim in enumerate(dims):
        step = 1 if steps is None else int(steps[position])
        start, end, step = slice(int(starts[position]), int(ends[position]), step).indices(shape[dim])
        if step == 1:
            before[dim], after[dim] = start, shape[dim] - max(start, end)
        else:
            dy = rows_into(t, t.ints(range(start, end, step)), dy, dim, shape[dim])
    if not any(before) and not any(after):
        return (dy,)
    return (t.emit("Pad", [dy, t.ints(before + after)], shape, t.dtype(dy)),)


def _pad(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, shape = grad_of(grads), _input_shape(t, op)
    pads, axes = t.known(op, 1), t.known(op, 3)
    if op.attr("mode", "constant") != "constant":
        raise unsupported(op, f"its mode is {op.attr('mode')}")
    assert pads is not None, "Pad has pads"
    dims = list(range(len(shape))) if axes is None else [int(axis) % len(shape) for axis in axes]
    if pads.min() < 0:
        raise unsupported(op, "it has negative pads")
    starts = [int(pad) for pad in pads[: len(dims)]]
    cut = [dim for dim in range(len(dims)) if t.shape(dy)[dims[dim]] != shape[dims[dim]]]
    if not cut:
        return (dy,)
    bounds = [
        t.ints(starts[index] for index in cut),
        t.ints(starts[index] + shape[dims[index]] for index in cut),
        t.ints(dims[index] for index in cut),
    ]
    return (t.emit("Slice", [dy, *bounds], shape, t.dtype(dy)),)


def _cum_sum(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, exclusive = grad_of(grads), int_attr(op, "exclusive", 0)
    reverse = 1 - int_attr(op, "reverse", 0)
    inputs = [dy, op.inputs[1]]
    return (t.emit("CumSum", inputs, t.shape(dy), t.dtype(dy), exclusive=exclusive, reverse=reverse),)


def _trilu(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    return (t.emit("Trilu", [dy, *op.inputs[1:]], t.shape(dy), t.dtype(dy), upper=int_attr(op, "upper", 1)),)


SHAPES: Mapping[str, Rule] = {
    "Concat": _concat,
    "CumSum": _cum_sum,
    "Expand": _expand,
    "Flatten": _reshape,
    "Pad": _pad,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}
