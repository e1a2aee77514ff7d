"""Gradients of mixtures of experts (`autopar.ir.bodies.experts`). The choice of experts has none."""

from collections.abc import Mapping

from autopar.ir.fills import fill_of
from autopar.ir.graph import Op
from autopar.ir.routing import groups_of
from autopar.training.rules.base import Grads, Rule, grad_of
from autopar.training.tape import Tape


def _dispatch(t: Tape, op: Op, grads: Grads) -> Grads:
    x, expert, numbers = op.inputs
    inputs = [grad_of(grads), expert, t.row_numbers(*t.shape(numbers))]
    return (t.emit("autopar::ExpertSum", inputs, t.shape(x), t.dtype(x), fill=fill_of(op), **groups_of(op)),)


def _rows(t: Tape, op: Op, grads: Grads) -> Grads:
    rows = op.inputs[0]
    return (t.emit("autopar::ExpertRows", [grad_of(grads)], t.shape(rows), t.dtype(rows)),)


def _sum(t: Tape, op: Op, grads: Grads) -> Grads:
    rows, expert, numbers = op.inputs
    inputs = [grad_of(grads), expert, t.row_numbers(*t.shape(numbers))]
    return (t.emit("autopar::ExpertDispatch", inputs, t.shape(rows), t.dtype(rows), fill=fill_of(op), **groups_of(op)),)


def _combine(t: Tape, op: Op, grads: Grads) -> Grads:
    rows, weight, expert, numbers = op.inputs
    inputs = [rows, weight, expert, t.row_numbers(*t.shape(numbers)), grad_of(grads)]
    shapes = [t.shape(rows), t.shape(weight)]
    return t.emit_all("autopar::ExpertCombineGrad", inputs, shapes, t.dtype(rows), fill=fill_of(op))


def _grouped_matmul(t: Tape, op: Op, grads: Grads) -> Grads:
    (rows, weight), dy, fill = op.inputs, grad_of(grads), fill_of(op)
    drows = dweight = None
    if t.needs(op, 0):
        drows = t.emit("autopar::GroupedMatMulGrad", [dy, weight], t.shape(rows), t.dtype(rows), fill=fill)
    if t.needs(op, 1):
        inputs = [rows, dy]
        dweight = t.emit("autopar::GroupedMatMulWeightGrad", inputs, t.shape(weight), t.dtype(weight), fill=fill)
    return drows, dweight


EXPERTS: Mapping[str, Rule] = {
    "autopar::ExpertDispatch": _dispatch,
    "autopar::ExpertRows": _rows,
    "autopar::ExpertSum": _sum,
    "autopar::ExpertCombine": _combine,
    "autopar::GroupedMatMul": _grouped_matmul,
}
"""Rules by kind."""
