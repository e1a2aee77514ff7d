"""Gradients of ops that move, select or reduce elements."""

from collections.abc import Mapping
from math import prod

import numpy as np

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, axis_attr, grad_of, int_attr, ints_attr
from autopar.training.tape import Shape, Tape, unsupported


def _input_shape(t: Tape, op: Op) -> Shape:
    return t.shape(op.inputs[0])


def _axes(t: Tape, op: Op, rank: int) -> tuple[int, ...]:
    """Return the axes of an op (second input or attribute), counted from the front; () if there are none."""
    given = t.known(op, 1)
    axes = ints_attr(op, "axes", ()) if given is None else tuple(int(axis) for axis in given.ravel())
    return tuple(sorted(axis % rank for axis in axes))


def _reshape(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.reshape(grad_of(grads), _input_shape(t, op)),)


def _squeeze(t: Tape, op: Op, grads: Grads) -> Grads:
    shape = _input_shape(t, op)
    axes = _axes(t, op, len(shape)) or tuple(dim for dim, size in enumerate(shape) if size == 1)
    return (t.unsqueeze(grad_of(grads), axes),)


def _unsqueeze(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    return (t.squeeze(dy, _axes(t, op, len(t.shape(dy)))),)


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
    x, axis = op.inputs[0], axis_attr(t, op, 0)
    if not all(op.outputs):
        raise unsupported(op, "some of its outputs have no name")
    parts = [grad or t.zeros(t.shape(name), t.dtype(x)) for grad, name in zip(grads, op.outputs, strict=True)]
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
            dy = _scatter_rows(t, t.ints(range(start, end, step)), dy, dim, shape[dim])
    if not any(before) and not any(after):
        return (dy,)
    return (t.emit("Pad", [dy, t.ints(before + after)], shape, t.dtype(dy)),)


def _scatter_rows(t: Tape, indices: str, dy: str, axis: int, size: int) -> str:
    """Return the gradient of a gather of rows along an axis of the given size."""
    before, after = t.shape(dy)[:axis], t.shape(dy)[axis + len(t.shape(indices)) :]
    inputs = [indices, t.row_numbers(size), dy]
    return t.emit("autopar::GatherGrad", inputs, (*before, size, *after), t.dtype(dy), axis=axis)


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


def _front_indices(t: Tape, op: Op, size: int) -> str:
    """Return the indices of a gather; known ones are counted from the front."""
    name = op.inputs[1]
    known = t.known(op, 1) if name in t.constants else None
    if known is None or known.min(initial=0) >= 0:
        return name
    return t.array(known % size)


def _gather(t: Tape, op: Op, grads: Grads) -> Grads:
    shape, axis = _input_shape(t, op), axis_attr(t, op, 0)
    return (_scatter_rows(t, _front_indices(t, op, shape[axis]), grad_of(grads), axis, shape[axis]),)


def _gather_elements(t: Tape, op: Op, grads: Grads) -> Grads:
    shape, axis = _input_shape(t, op), axis_attr(t, op, 0)
    return (_scatter_elements(t, op, _front_indices(t, op, shape[axis]), grad_of(grads), axis),)


def _scatter_elements(t: Tape, op: Op, indices: str, dy: str, axis: int) -> str:
    shape = _input_shape(t, op)
    if any(a != b for dim, (a, b) in enumerate(zip(shape, t.shape(dy), strict=True)) if dim != axis):
        raise unsupported(op, "its indices cover a part of the other dims")
    return t.emit(
        "autopar::GatherElementsGrad", [indices, t.row_numbers(shape[axis]), dy], shape, t.dtype(dy), axis=axis
    )


def _top_k(t: Tape, op: Op, grads: Grads) -> Grads:
    return (_scatter_elements(t, op, op.outputs[1], grad_of(grads), axis_attr(t, op, -1)),)


def _gather_nd(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, shape, indices = grad_of(grads), _input_shape(t, op), op.inputs[1]
    batch = int_attr(op, "batch_dims", 0)
    depth = t.shape(indices)[-1]
    if depth > len(_GATHER_ND):
        raise unsupported(op, f"its indices have {depth} coordinates")
    rows = [t.row_numbers(size) for size in shape[batch : batch + depth]]
    return (t.emit(_GATHER_ND[depth - 1], [indices, *rows, dy], shape, t.dtype(dy), batch_dims=batch),)


_GATHER_ND = ("autopar::GatherNDGrad", "autopar::GatherND2Grad")
"""Gradient of GatherND by the number of coordinates of an index."""


def _reduced_axes(t: Tape, op: Op) -> tuple[int, ...]:
    """Return the axes a reduction sums over; all of them if none are given."""
    rank = len(_input_shape(t, op))
    axes = _axes(t, op, rank)
    if axes or int_attr(op, "noop_with_empty_axes", 0):
        return axes
    return tuple(range(rank))


def _with_axes(t: Tape, op: Op, value: str) -> str:
    """Return a result of a reduction with the reduced dims as dims of size 1."""
    return value if int_attr(op, "keepdims", 1) else t.unsqueeze(value, _reduced_axes(t, op))


def _reduce_sum(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.expand(_with_axes(t, op, grad_of(grads)), _input_shape(t, op)),)


def _reduce_mean(t: Tape, op: Op, grads: Grads) -> Grads:
    shape = _input_shape(t, op)
    share = t.times(grad_of(grads), 1.0 / prod(shape[axis] for axis in _reduced_axes(t, op)))
    return (t.expand(_with_axes(t, op, share), shape),)


def _reduce_extremum(t: Tape, op: Op, grads: Grads) -> Grads:
    """Share the gradient equally among all elements that attain the extremum."""
    x, shape = op.inputs[0], _input_shape(t, op)
    y, dy = _with_axes(t, op, op.outputs[0]), _with_axes(t, op, grad_of(grads))
    hit = t.emit("CastLike", [t.emit("Equal", [x, y], shape, "bool"), dy], shape, t.dtype(x))
    share = t.map("Div", dy, t.sum(hit, _reduced_axes(t, op), keep=True))
    return (t.map("Mul", hit, share),)


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
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Pad": _pad,
    "ReduceMax": _reduce_extremum,
    "ReduceMean": _reduce_mean,
    "ReduceMin": _reduce_extremum,
    "ReduceSum": _reduce_sum,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}
