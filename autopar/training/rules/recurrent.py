"""Gradients of LSTM, GRU and RNN: one kernel for each direction (`autopar.ir.bodies.recurrent`).

ONNX has x (T, B, I), weights (D, G, I) and (D, G, H), biases (D, 2 G) for input and hidden state, results (T, D, B, H)
and the last states (D, B, H); with `layout` 1 the batch is first. D directions, G gates times H.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, int_attr
from autopar.training.tape import Tape, unsupported

_DEFAULTS: Mapping[str, Sequence[str]] = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}
_X, _W, _R, _B, _LENGTHS, _H0, _C0, _PEEPHOLES = range(8)


def _kind(t: Tape, op: Op) -> str:
    """Return the kind of the gradient of one direction.

    Raises:
        UnsupportedOpError: If the op has a form without one.
    """
    given = op.attr("activations")
    directions = t.shape(op.inputs[_W])[0]
    names = tuple(str(name).lower() for name in given) if isinstance(given, tuple) and given else ()
    plain = tuple(_DEFAULTS[op.kind]) * directions
    if names not in ((), plain):
        raise unsupported(op, f"its activations are {', '.join(names)}")
    if op.attr("clip") is not None or int_attr(op, "input_forget", 0):
        raise unsupported(op, "it clips its gates or couples them (clip, input_forget)")
    if any(op.inputs[_PEEPHOLES:]):
        raise unsupported(op, "it has peepholes")
    lengths = t.constants.get(op.inputs[_LENGTHS]) if len(op.inputs) > _LENGTHS else None
    steps = t.shape(op.inputs[_X])[1 if int_attr(op, "layout", 0) else 0]
    if len(op.inputs) > _LENGTHS and op.inputs[_LENGTHS] and (lengths is None or bool((lengths != steps).any())):
        raise unsupported(op, "its sequences have lengths of their own (sequence_lens)")
    if op.kind == "GRU" and not int_attr(op, "linear_before_reset", 0):
        return "autopar::GRUResetGrad"
    return f"autopar::{op.kind}Grad"


def _recurrent(t: Tape, op: Op, grads: Grads) -> Grads:
    kind, dtype = _kind(t, op), t.dtype(op.inputs[_X])
    batch_first = bool(int_attr(op, "layout", 0))
    x = t.transpose(op.inputs[_X], (1, 0, 2)) if batch_first else op.inputs[_X]
    steps, batch, _ = t.shape(x)
    directions, hidden = t.shape(op.inputs[_W])[0], t.shape(op.inputs[_R])[2]
    has_cell, splits_bias = op.kind == "LSTM", op.kind == "GRU"

    def per_direction(name: str | None, shape: tuple[int, ...], at: int, order: tuple[int, ...]) -> list[str]:
        """Return the parts of a tensor (or zeros), one for each direction, which is dim `at`."""
        if not name:
            return [t.zeros(shape, dtype)] * directions
        name = t.transpose(name, order) if batch_first and order else name
        return _parts(t, name, at)

    def given(index: int) -> str | None:
        return op.inputs[index] if len(op.inputs) > index else None

    def grad(index: int) -> str | None:
        return grads[index] if len(grads) > index else None

    state, swap = (batch, hidden), (1, 0, 2)
    gates = t.shape(op.inputs[_W])[1]
    weights = [_parts(t, op.inputs[index], 0) for index in (_W, _R)]
    biases = per_direction(given(_B), (2 * gates,), 0, ())
    starts = [per_direction(given(index), state, 0, swap) for index in ((_H0, _C0) if has_cell else (_H0,))]
    ends = [per_direction(grad(index), state, 0, swap) for index in ((1, 2) if has_cell else (1,))]
    dys = per_direction(grad(0), (steps, batch, hidden), 1, (1, 2, 0, 3))
    results: list[Sequence[str]] = []
    for number in range(directions):
        backwards = number == 1 or op.attr("direction", "forward") == "reverse"
        sequence, dy = (_turned(t, value) if backwards else value for value in (x, dys[number]))
        both = t.emit_all("Split", [biases[number]], [(gates,)] * 2, dtype, axis=0, num_outputs=2)
        bias = list(both) if splits_bias else [t.map("Add", *both)]
        inputs = [sequence, *(weight[number] for weight in weights), *bias, *(start[number] for start in starts)]
        inputs += [dy, *(end[number] for end in ends)]
        shapes = [t.shape(name) for name in inputs[: len(inputs) - 1 - len(ends)]]
        dx, *others = t.emit_all(kind, inputs, shapes, dtype)
        results.append((_turned(t, dx) if backwards else dx, *others))
    return _gathered(t, op, results, batch_first=batch_first, splits_bias=splits_bias)


def _gathered(
    t: Tape, op: Op, results: Sequence[Sequence[str]], *, batch_first: bool, splits_bias: bool
) -> list[str | None]:
    """Return the gradients of the op's inputs, given for each direction those of x, w, r, the biases and the states."""
    dx = results[0][0]
    for result in results[1:]:
        dx = t.map("Add", dx, result[0])
    made: dict[int, str] = {_X: t.transpose(dx, (1, 0, 2)) if batch_first else dx}
    made[_W], made[_R] = (_stacked(t, [result[index] for result in results]) for index in (1, 2))
    halves = [result[3:5] if splits_bias else (result[3], result[3]) for result in results]
    made[_B] = _stacked(t, [_joined(t, pair) for pair in halves])
    first = 5 if splits_bias else 4
    for offset, slot in enumerate((_H0, _C0)[: len(results[0]) - first]):
        stacked = _stacked(t, [result[first + offset] for result in results])
        made[slot] = t.transpose(stacked, (1, 0, 2)) if batch_first else stacked
    return [made.get(index) if t.needs(op, index) else None for index in range(len(op.inputs))]


def _parts(t: Tape, name: str, axis: int) -> list[str]:
    """Return the slices of a tensor along an axis, without it."""
    shape = t.shape(name)
    count = shape[axis]
    if count == 1:
        return [t.squeeze(name, [axis])]
    part = (*shape[:axis], 1, *shape[axis + 1 :])
    parts = t.emit_all("Split", [name], [part] * count, t.dtype(name), axis=axis, num_outputs=count)
    return [t.squeeze(item, [axis]) for item in parts]


def _stacked(t: Tape, parts: Sequence[str]) -> str:
    """Return tensors stacked along a new first dim."""
    lifted = [t.unsqueeze(part, [0]) for part in parts]
    return lifted[0] if len(lifted) == 1 else _joined(t, lifted)


def _joined(t: Tape, parts: Sequence[str]) -> str:
    """Return tensors side by side along dim 0."""
    shape = (sum(t.shape(part)[0] for part in parts), *t.shape(parts[0])[1:])
    return t.emit("Concat", parts, shape, t.dtype(parts[0]), axis=0)


def _turned(t: Tape, x: str) -> str:
    """Return a sequence from its last step to its first."""
    bounds = [t.ints((-1,)), t.ints((int(np.iinfo(np.int64).min) + 1,)), t.ints((0,)), t.ints((-1,))]
    return t.emit("Slice", [x, *bounds], t.shape(x), t.dtype(x))


RECURRENT: Mapping[str, Rule] = {"GRU": _recurrent, "LSTM": _recurrent, "RNN": _recurrent}
