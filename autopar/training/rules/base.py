"""What all rules share."""

from collections.abc import Callable, Sequence

from autopar.ir.graph import Op
from autopar.training.tape import Tape

Grads = Sequence[str | None]
"""Names of gradients, one per output or input; None where there is none."""

Rule = Callable[[Tape, Op, Grads], Grads]
"""Writes the gradients of an op's inputs, given those of its outputs (at least one); trailing ones may be left out."""


def grad_of(grads: Grads) -> str:
    """Return the gradient of the first output, the only one of most ops."""
    assert grads[0] is not None, "a rule is called only if an output has a gradient"
    return grads[0]


def pass_on(t: Tape, op: Op, grads: Grads) -> Grads:
    """Return the gradient as it is."""
    return (grads[0],)


def int_attr(op: Op, name: str, default: int) -> int:
    """Return an integer attribute."""
    value = op.attr(name, default)
    assert isinstance(value, int), f"{name} of {op.kind} is an integer"
    return value


def float_attr(op: Op, name: str, default: float) -> float:
    """Return a float attribute."""
    value = op.attr(name, default)
    assert isinstance(value, int | float), f"{name} of {op.kind} is a number"
    return float(value)


def ints_attr(op: Op, name: str, default: Sequence[int]) -> tuple[int, ...]:
    """Return an attribute that is a list of integers; an empty one counts as absent."""
    value = op.attr(name)
    if not value:
        return tuple(default)
    assert isinstance(value, tuple), f"{name} of {op.kind} is a list of integers"
    return tuple(int(item) for item in value)


def axis_attr(t: Tape, op: Op, default: int) -> int:
    """Return attribute `axis`, counted from the front of the first input."""
    axis = int_attr(op, "axis", default)
    return axis + len(t.shape(op.inputs[0])) if axis < 0 else axis


def axes_of(t: Tape, op: Op, rank: int) -> tuple[int, ...]:
    """Return the axes of an op (second input or attribute), counted from the front; () if there are none."""
    given = t.known(op, 1)
    axes = ints_attr(op, "axes", ()) if given is None else tuple(int(axis) for axis in given.ravel())
    return tuple(sorted(axis % rank for axis in axes))
