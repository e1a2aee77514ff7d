"""Gradients of ops that pick and place single elements by index.

The gradient of a pick is a sum into zeros at the same places, that of a placement a pick from the same places.
"""

from collections.abc import Callable, Mapping

import numpy as np

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, axis_attr, grad_of, int_attr
from autopar.training.tape import Shape, Tape, unsupported

_EXTREMA = ("max", "min")
_Pick = Callable[[str], str]
_Place = Callable[[str, str, str], str]


def _front(t: Tape, name: str, size: int) -> str:
    """Return indices; known ones are counted from the front."""
    known = t.constants.get(name)
    if known is None or known.min(initial=0) >= 0:
        return name
    return t.array(known % size)


def rows_into(t: Tape, indices: str, dy: str, axis: int, size: int) -> str:
    """Return the gradient of a gather of rows along an axis of the given size."""
    before, after = t.shape(dy)[:axis], t.shape(dy)[axis + len(t.shape(indices)) :]
    inputs = [indices, t.row_numbers(size), dy]
    return t.emit("autopar::GatherGrad", inputs, (*before, size, *after), t.dtype(dy), axis=axis)


def elements_into(t: Tape, indices: str, dy: str, axis: int, shape: Shape) -> str:
    """Return the gradient of a gather of elements along an axis of a tensor of the given shape."""
    dtype = t.dtype(dy)
    if any(a != b for dim, (a, b) in enumerate(zip(shape, t.shape(dy), strict=True)) if dim != axis):
        inputs = [t.zeros(shape, dtype), indices, dy]
        return t.emit("ScatterElements", inputs, shape, dtype, axis=axis, reduction="add")
    return t.emit("autopar::GatherElementsGrad", [indices, t.row_numbers(shape[axis]), dy], shape, dtype, axis=axis)


def _gather(t: Tape, op: Op, grads: Grads) -> Grads:
    size, axis = t.shape(op.inputs[0])[axis_attr(t, op, 0)], axis_attr(t, op, 0)
    return (rows_into(t, _front(t, op.inputs[1], size), grad_of(grads), axis, size),)


def _gather_elements(t: Tape, op: Op, grads: Grads) -> Grads:
    shape, axis = t.shape(op.inputs[0]), axis_attr(t, op, 0)
    return (elements_into(t, _front(t, op.inputs[1], shape[axis]), grad_of(grads), axis, shape),)


def _top_k(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    indices = t.output(op, 1, t.shape(dy), "int64")
    return (elements_into(t, indices, dy, axis_attr(t, op, -1), t.shape(op.inputs[0])),)


_GATHER_ND = ("autopar::GatherNDGrad", "autopar::GatherND2Grad")
"""Gradient of GatherND by the number of coordinates of an index."""


def _gather_nd(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, shape, indices = grad_of(grads), t.shape(op.inputs[0]), op.inputs[1]
    batch = int_attr(op, "batch_dims", 0)
    depth = t.shape(indices)[-1]
    indices = _front_coordinates(t, indices, shape[batch : batch + depth])
    if depth <= len(_GATHER_ND):
        rows = [t.row_numbers(size) for size in shape[batch : batch + depth]]
        return (t.emit(_GATHER_ND[depth - 1], [indices, *rows, dy], shape, t.dtype(dy), batch_dims=batch),)
    places = _with_batch(t, indices, batch)
    inputs = [t.zeros(shape, t.dtype(dy)), places, dy]
    return (t.emit("ScatterND", inputs, shape, t.dtype(dy), reduction="add"),)


def _front_coordinates(t: Tape, name: str, sizes: Shape) -> str:
    """Return indices of several coordinates each; known ones are counted from the front."""
    known = t.constants.get(name)
    if known is None or known.min(initial=0) >= 0:
        return name
    return t.array(known % np.asarray(sizes, known.dtype))


def _with_batch(t: Tape, indices: str, batch: int) -> str:
    """Return indices with the positions along the batch dims as their first coordinates."""
    before = (*t.shape(indices)[:-1], 1)
    parts = []
    for dim in range(batch):
        column = t.unsqueeze(t.row_numbers(before[dim]), [other for other in range(len(before)) if other != dim])
        parts.append(t.expand(column, before))
    shape = (*before[:-1], t.shape(indices)[-1] + batch)
    return t.emit("Concat", [*parts, indices], shape, t.dtype(indices), axis=-1) if parts else indices


def _scatter_elements(t: Tape, op: Op, grads: Grads) -> Grads:
    axis = axis_attr(t, op, 0)

    def pick(x: str) -> str:
        return t.emit("GatherElements", [x, indices], t.shape(indices), t.dtype(x), axis=axis)

    def place(x: str, values: str, reduction: str) -> str:
        inputs = [x, indices, values]
        return t.emit("ScatterElements", inputs, t.shape(x), t.dtype(x), axis=axis, reduction=reduction)

    indices = op.inputs[1]
    return _scattered(t, op, grad_of(grads), pick, place)


def _scatter_nd(t: Tape, op: Op, grads: Grads) -> Grads:
    def pick(x: str) -> str:
        return t.emit("GatherND", [x, indices], t.shape(op.inputs[2]), t.dtype(x))

    def place(x: str, values: str, reduction: str) -> str:
        return t.emit("ScatterND", [x, indices, values], t.shape(x), t.dtype(x), reduction=reduction)

    indices = op.inputs[1]
    return _scattered(t, op, grad_of(grads), pick, place)


def _scattered(t: Tape, op: Op, dy: str, pick: _Pick, place: _Place) -> Grads:
    """Return the gradients of `data` and `updates`, given how to pick from and place at the op's indices."""
    data, _, updates = op.inputs
    reduction = str(op.attr("reduction", "none"))
    if reduction in _EXTREMA:
        return _extremum(t, op, dy, pick, place)
    if reduction not in ("none", "add"):
        raise unsupported(op, f"its reduction is {reduction!r}")
    ddata = None
    if t.needs(op, 0):
        ddata = dy if reduction == "add" else place(dy, t.zeros(t.shape(updates), t.dtype(data)), "none")
    return ddata, None, pick(dy) if t.needs(op, 2) else None


def _extremum(t: Tape, op: Op, dy: str, pick: _Pick, place: _Place) -> Grads:
    """Share the gradient of an element equally among all that attain the extremum."""
    data, _, updates = op.inputs
    y, dtype = op.outputs[0], t.dtype(dy)
    kept = t.emit("CastLike", [t.emit("Equal", [data, y], t.shape(y), "bool"), dy], t.shape(y), dtype)
    same = t.emit("Equal", [updates, pick(y)], t.shape(updates), "bool")
    taken = t.emit("CastLike", [same, dy], t.shape(updates), dtype)
    share = t.map("Div", dy, place(kept, taken, "add"))
    dupdates = t.map("Mul", pick(share), taken) if t.needs(op, 2) else None
    return t.map("Mul", share, kept) if t.needs(op, 0) else None, None, dupdates


SCATTER: Mapping[str, Rule] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TopK": _top_k,
}
