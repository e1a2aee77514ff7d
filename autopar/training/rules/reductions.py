"""Gradients of reductions over dims: sums, means, norms, extrema, products."""

from collections.abc import Mapping
from math import prod

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, axes_of, axis_attr, grad_of, int_attr
from autopar.training.tape import Shape, Tape, unsupported


def _shape(t: Tape, op: Op) -> Shape:
    return t.shape(op.inputs[0])


def _reduced(t: Tape, op: Op) -> tuple[int, ...]:
    """Return the axes an op reduces; all of them if none are given."""
    rank = len(_shape(t, op))
    axes = axes_of(t, op, rank)
    if axes or int_attr(op, "noop_with_empty_axes", 0):
        return axes
    return tuple(range(rank))


def _with_axes(t: Tape, op: Op, value: str) -> str:
    """Return a result of a reduction with the reduced dims as dims of size 1."""
    return value if int_attr(op, "keepdims", 1) else t.unsqueeze(value, _reduced(t, op))


def _sum(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.expand(_with_axes(t, op, grad_of(grads)), _shape(t, op)),)


def _mean(t: Tape, op: Op, grads: Grads) -> Grads:
    shape = _shape(t, op)
    share = t.times(grad_of(grads), 1.0 / prod(shape[axis] for axis in _reduced(t, op)))
    return (t.expand(_with_axes(t, op, share), shape),)


def _extremum(t: Tape, op: Op, grads: Grads) -> Grads:
    y, dy = _with_axes(t, op, op.outputs[0]), _with_axes(t, op, grad_of(grads))
    return (_share_extremum(t, op.inputs[0], y, dy, _reduced(t, op)),)


def _share_extremum(t: Tape, x: str, y: str, dy: str, axes: tuple[int, ...]) -> str:
    """Share the gradient equally among all elements that attain the extremum."""
    shape = t.shape(x)
    hit = t.emit("CastLike", [t.emit("Equal", [x, y], shape, "bool"), dy], shape, t.dtype(x))
    return t.map("Mul", hit, t.map("Div", dy, t.sum(hit, axes, keep=True)))


def _global_max_pool(t: Tape, op: Op, grads: Grads) -> Grads:
    axes = tuple(range(2, len(_shape(t, op))))
    return (_share_extremum(t, op.inputs[0], op.outputs[0], grad_of(grads), axes),)


def _norm_gradient(t: Tape, x: str, y: str, dy: str, order: int) -> str:
    """Return the gradient of a norm; 0 where all that is reduced is 0, as PyTorch does."""
    if order == 1:
        return t.map("Mul", dy, t.map("Sign", x))
    return t.map("Mul", x, t.map("Div", dy, _not_zero(t, y)))


def _not_zero(t: Tape, y: str) -> str:
    """Return numbers to divide by: 1 in place of 0."""
    dtype = t.dtype(y)
    empty = t.emit("Equal", [y, t.scalar(0.0, dtype)], t.shape(y), "bool")
    return t.emit("Where", [empty, t.scalar(1.0, dtype), y], t.shape(y), dtype)


def _l1(t: Tape, op: Op, grads: Grads) -> Grads:
    y, dy = _with_axes(t, op, op.outputs[0]), _with_axes(t, op, grad_of(grads))
    return (_norm_gradient(t, op.inputs[0], y, dy, 1),)


def _l2(t: Tape, op: Op, grads: Grads) -> Grads:
    y, dy = _with_axes(t, op, op.outputs[0]), _with_axes(t, op, grad_of(grads))
    return (_norm_gradient(t, op.inputs[0], y, dy, 2),)


def _order(op: Op) -> int:
    order = int_attr(op, "p", 2)
    if order not in (1, 2):
        raise unsupported(op, f"it takes norms of order {order}, not 1 or 2")
    return order


def _lp_normalization(t: Tape, op: Op, grads: Grads) -> Grads:
    """Of y = x / n(x): (dy - dn(x) sum(dy y)) / n(x)."""
    x, y, dy, order = op.inputs[0], op.outputs[0], grad_of(grads), _order(op)
    axis = axis_attr(t, op, -1)
    shape = tuple(1 if dim == axis else size for dim, size in enumerate(t.shape(x)))
    norm = t.emit(f"ReduceL{order}", [x, t.ints((axis,))], shape, t.dtype(x), keepdims=1)
    total = t.sum(t.map("Mul", dy, y), (axis,), keep=True)
    along = t.map("Mul", t.map("Sign", x) if order == 1 else y, total)
    return (t.map("Div", t.map("Sub", dy, along), _not_zero(t, norm)),)


def _sum_square(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Mul", t.times(_with_axes(t, op, grad_of(grads)), 2.0), op.inputs[0]),)


def _log_sum(t: Tape, op: Op, grads: Grads) -> Grads:
    y, dy = _with_axes(t, op, op.outputs[0]), _with_axes(t, op, grad_of(grads))
    return (t.expand(t.map("Div", dy, t.map("Exp", y)), _shape(t, op)),)


def _log_sum_exp(t: Tape, op: Op, grads: Grads) -> Grads:
    y, dy = _with_axes(t, op, op.outputs[0]), _with_axes(t, op, grad_of(grads))
    return (t.map("Mul", dy, t.map("Exp", t.map("Sub", op.inputs[0], y))),)


def _product(t: Tape, op: Op, grads: Grads) -> Grads:
    """Return dy times the product of the other elements, which may be 0.

    If none of the elements is 0, that is the product by the element; if one is, all others have gradient 0.
    """
    x, dy, axes = op.inputs[0], _with_axes(t, op, grad_of(grads)), _reduced(t, op)
    shape, dtype = t.shape(x), t.dtype(x)
    zero, one = t.scalar(0.0, dtype), t.scalar(1.0, dtype)
    empty = t.emit("Equal", [x, zero], shape, "bool")
    number = t.sum(t.emit("CastLike", [empty, x], shape, dtype), axes, keep=True)
    filled = t.emit("Where", [empty, one, x], shape, dtype)
    kept = t.shape(number)
    others = t.emit("ReduceProd", [filled, t.ints(axes)], kept, dtype, keepdims=1) if axes else filled
    alone = t.emit("Equal", [number, one], kept, "bool")
    none = t.emit("Equal", [number, zero], kept, "bool")
    at_empty = t.map("Where", alone, others, zero)
    at_filled = t.map("Where", none, t.map("Div", others, filled), zero)
    return (t.map("Mul", dy, t.map("Where", empty, at_empty, at_filled)),)


REDUCTIONS: Mapping[str, Rule] = {
    "GlobalMaxPool": _global_max_pool,
    "LpNormalization": _lp_normalization,
    "ReduceL1": _l1,
    "ReduceL2": _l2,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _extremum,
    "ReduceMean": _mean,
    "ReduceMin": _extremum,
    "ReduceProd": _product,
    "ReduceSum": _sum,
    "ReduceSumSquare": _sum_square,
}
