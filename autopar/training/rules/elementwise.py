"""Gradients of element-wise ops. Where the slope follows from the output, the output is read instead of the input."""

from collections.abc import Mapping

import numpy as np

from autopar.ir.graph import Attr, Op
from autopar.training.rules.base import Grads, Rule, grad_of, pass_on
from autopar.training.tape import Tape, unsupported

TENSOR_TYPE: Mapping[str, int] = {"float32": 1, "float16": 10, "float64": 11, "bfloat16": 16}
"""Codes of `onnx.TensorProto.DataType`."""


def _to(t: Tape, op: Op, index: int, value: str) -> str:
    """Return a gradient summed to the shape of an input that was broadcast."""
    return t.reduce_to(value, t.shape(op.inputs[index]))


def _add(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    return [_to(t, op, index, dy) if t.needs(op, index) else None for index in range(len(op.inputs))]


def _sub(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    da = _to(t, op, 0, dy) if t.needs(op, 0) else None
    db = t.map("Neg", _to(t, op, 1, dy)) if t.needs(op, 1) else None
    return da, db


def _mul(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, (a, b) = grad_of(grads), op.inputs
    da = _to(t, op, 0, t.map("Mul", dy, b)) if t.needs(op, 0) else None
    db = _to(t, op, 1, t.map("Mul", dy, a)) if t.needs(op, 1) else None
    return da, db


def _div(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, b, y = grad_of(grads), op.inputs[1], op.outputs[0]
    quotient = t.map("Div", dy, b)
    da = _to(t, op, 0, quotient) if t.needs(op, 0) else None
    db = t.map("Neg", _to(t, op, 1, t.map("Mul", quotient, y))) if t.needs(op, 1) else None
    return da, db


def _mean(t: Tape, op: Op, grads: Grads) -> Grads:
    return _add(t, op, [t.times(grad_of(grads), 1.0 / len(op.inputs))])


def _pow(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, (x, exponent), y = grad_of(grads), op.inputs, op.outputs[0]
    da = db = None
    if t.needs(op, 0):
        power = t.constants.get(exponent)
        if power is not None and power.size == 1:
            number = float(power.astype(np.float64).item())
            slope = x if number == 2.0 else t.map("Pow", x, t.scalar(number - 1.0, t.dtype(x)))
            da = t.times(t.map("Mul", dy, slope), number)
        elif t.values[exponent].is_float:
            less = t.map("Sub", exponent, t.scalar(1.0, t.dtype(exponent)))
            da = t.map("Mul", t.map("Mul", dy, exponent), t.map("Pow", x, less))
        else:
            raise unsupported(op, "its exponent is neither one number nor a float tensor")
        da = _to(t, op, 0, da)
    if t.needs(op, 1):
        db = _to(t, op, 1, t.map("Mul", t.map("Mul", dy, y), t.map("Log", x)))
    return da, db


def _where(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, condition = grad_of(grads), op.inputs[0]
    zero = t.scalar(0.0, t.dtype(dy))
    da = _to(t, op, 1, t.map("Where", condition, dy, zero)) if t.needs(op, 1) else None
    db = _to(t, op, 2, t.map("Where", condition, zero, dy)) if t.needs(op, 2) else None
    return None, da, db


def _extremum(t: Tape, op: Op, grads: Grads) -> Grads:
    """Max or Min; the gradient of a tie goes to the first input."""
    dy = grad_of(grads)
    if len(op.inputs) == 1:
        return (dy,)
    if len(op.inputs) != 2:
        raise unsupported(op, f"it has {len(op.inputs)} inputs")
    a, y = op.inputs[0], op.outputs[0]
    first = t.emit("Equal", [a, y], t.shape(y), "bool")
    zero = t.scalar(0.0, t.dtype(dy))
    da = _to(t, op, 0, t.map("Where", first, dy, zero)) if t.needs(op, 0) else None
    db = _to(t, op, 1, t.map("Where", first, zero, dy)) if t.needs(op, 1) else None
    return da, db


def _clip(t: Tape, op: Op, grads: Grads) -> Grads:
    """The gradient passes where the value passed."""
    if any(t.needs(op, index) for index in (1, 2)):
        raise unsupported(op, "its bounds are trained")
    dy, x, y = grad_of(grads), op.inputs[0], op.outputs[0]
    free = t.emit("Equal", [x, y], t.shape(y), "bool")
    return (t.map("Where", free, dy, t.scalar(0.0, t.dtype(dy))),)


def _cast(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, x = grad_of(grads), op.inputs[0]
    if t.dtype(x) == t.dtype(dy):
        return (dy,)
    return (t.emit("Cast", [dy], t.shape(dy), t.dtype(x), to=TENSOR_TYPE[t.dtype(x)]),)


def _dropout(t: Tape, op: Op, grads: Grads) -> Grads:
    """Without `training_mode` dropout is the identity; with it, the random mask would have to be kept."""
    training = t.known(op, 2)
    if training is not None and bool(training.item()):
        raise unsupported(op, "it drops at random (training_mode is true)")
    return (grads[0],)


def _neg(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Neg", grad_of(grads)),)


def _exp(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Mul", grad_of(grads), op.outputs[0]),)


def _log(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Div", grad_of(grads), op.inputs[0]),)


def _sqrt(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.times(t.map("Div", grad_of(grads), op.outputs[0]), 0.5),)


def _reciprocal(t: Tape, op: Op, grads: Grads) -> Grads:
    y = op.outputs[0]
    return (t.map("Neg", t.map("Mul", grad_of(grads), t.map("Mul", y, y))),)


def _sin(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Mul", grad_of(grads), t.map("Cos", op.inputs[0])),)


def _cos(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Neg", t.map("Mul", grad_of(grads), t.map("Sin", op.inputs[0]))),)


def _softplus(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Mul", grad_of(grads), t.map("Sigmoid", op.inputs[0])),)


def _abs(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Mul", grad_of(grads), t.map("Sign", op.inputs[0])),)


def _gelu(t: Tape, op: Op, grads: Grads) -> Grads:
    kind = "autopar::GeluTanhGrad" if op.attr("approximate", "none") == "tanh" else "autopar::GeluGrad"
    return (t.map(kind, op.inputs[0], grad_of(grads)),)


def _p_relu(t: Tape, op: Op, grads: Grads) -> Grads:
    """The slope of the negative side is broadcast to the input, and trained."""
    dy, (x, slope) = grad_of(grads), op.inputs
    dx = t.map("autopar::PReluGrad", x, slope, dy) if t.needs(op, 0) else None
    dslope = _to(t, op, 1, t.map("autopar::PReluSlopeGrad", x, dy)) if t.needs(op, 1) else None
    return dx, dslope


def _tan(t: Tape, op: Op, grads: Grads) -> Grads:
    y = op.outputs[0]
    return (t.map("Mul", grad_of(grads), t.map("Add", t.map("Mul", y, y), t.scalar(1.0, t.dtype(y)))),)


def _sinh(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Mul", grad_of(grads), t.map("Cosh", op.inputs[0])),)


def _cosh(t: Tape, op: Op, grads: Grads) -> Grads:
    return (t.map("Mul", grad_of(grads), t.map("Sinh", op.inputs[0])),)


def _inverse(square: int, shift: int, *, root: bool) -> Rule:
    """Return the rule dx = dy / (square * x^2 + shift), or dy by the root of that: inverse functions of angles."""

    def rule(t: Tape, op: Op, grads: Grads) -> Grads:
        dy, x = grad_of(grads), op.inputs[0]
        base = t.map("Add", t.times(t.map("Mul", x, x), float(square)), t.scalar(float(shift), t.dtype(x)))
        return (t.map("Div", dy, t.map("Sqrt", base) if root else base),)

    return rule


def _acos(t: Tape, op: Op, grads: Grads) -> Grads:
    (dx,) = _inverse(-1, 1, root=True)(t, op, grads)
    assert dx is not None, "the rule above returns a gradient"
    return (t.map("Neg", dx),)


def _of_input(kind: str, **attrs: Attr) -> Rule:
    """Return the rule dx = kind(x, dy), with attributes of the op given by their defaults."""

    def rule(t: Tape, op: Op, grads: Grads) -> Grads:
        given = {name: default if (value := op.attr(name)) is None else value for name, default in attrs.items()}
        return (t.map(kind, op.inputs[0], grad_of(grads), **given),)

    return rule


def _of_output(kind: str) -> Rule:
    """Return the rule dx = kind(y, dy)."""

    def rule(t: Tape, op: Op, grads: Grads) -> Grads:
        return (t.map(kind, op.outputs[0], grad_of(grads)),)

    return rule


ELEMENTWISE: Mapping[str, Rule] = {
    "Abs": _abs,
    "Acos": _acos,
    "Acosh": _inverse(1, -1, root=True),
    "Add": _add,
    "Asin": _inverse(-1, 1, root=True),
    "Asinh": _inverse(1, 1, root=True),
    "Atan": _inverse(1, 1, root=False),
    "Atanh": _inverse(-1, 1, root=False),
    "Cast": _cast,
    "CastLike": _cast,
    "Celu": _of_input("autopar::CeluGrad", alpha=1.0),
    "Clip": _clip,
    "Cos": _cos,
    "Cosh": _cosh,
    "Div": _div,
    "Dropout": _dropout,
    "Elu": _of_input("autopar::EluGrad", alpha=1.0),
    "Erf": _of_input("autopar::ErfGrad"),
    "Exp": _exp,
    "Gelu": _gelu,
    "HardSigmoid": _of_input("autopar::HardSigmoidGrad", alpha=0.2, beta=0.5),
    "HardSwish": _of_input("autopar::HardSwishGrad"),
    "Identity": pass_on,
    "LeakyRelu": _of_input("autopar::LeakyReluGrad", alpha=0.01),
    "Log": _log,
    "Max": _extremum,
    "Mean": _mean,
    "Min": _extremum,
    "Mish": _of_input("autopar::MishGrad"),
    "Mul": _mul,
    "Neg": _neg,
    "PRelu": _p_relu,
    "Pow": _pow,
    "Reciprocal": _reciprocal,
    "Relu": _of_output("autopar::ReluGrad"),
    "Selu": _of_input("autopar::SeluGrad", alpha=1.6732632, gamma=1.050701),
    "Sigmoid": _of_output("autopar::SigmoidGrad"),
    "Sin": _sin,
    "Sinh": _sinh,
    "Softplus": _softplus,
    "Softsign": _of_input("autopar::SoftsignGrad"),
    "Sqrt": _sqrt,
    "Sub": _sub,
    "Sum": _add,
    "Swish": _of_input("autopar::SwishGrad", alpha=1.0),
    "Tan": _tan,
    "Tanh": _of_output("autopar::TanhGrad"),
    "ThresholdedRelu": _of_input("autopar::ThresholdedReluGrad", alpha=1.0),
    "Where": _where,
}
