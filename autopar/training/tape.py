"""The writing end of a training step: ops are appended in order, with shapes and types known at once.

Ops are written *for* something, a forward op or a parameter, and take their names and their block from there. So two
blocks of the same form get the same backward ops, in the same order, under names that differ in one prefix only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ModelError, UnsupportedOpError
from autopar.ir.graph import Attr, Graph, Op, Phase, Value

Shape = tuple[int, ...]


class Tape:
    """Collects the values, constants and ops of a step, starting from a forward graph.

    Attributes:
        values: Every value by name, in order of definition.
        constants: Known data by value name.
        ops: The ops so far.
        needed: The values whose gradient is wanted.
    """

    def __init__(self, graph: Graph) -> None:
        self.values: dict[str, Value] = dict(graph.values)
        self.constants: dict[str, NDArray[np.generic]] = dict(graph.constants)
        self.ops: list[Op] = list(graph.ops)
        self.needed: frozenset[str] = frozenset()
        self._op_names = {op.name for op in graph.ops}
        self._place = {op.name: index for index, op in enumerate(graph.ops)}
        self._pool: dict[tuple[str, Shape, bytes], str] = {}
        self._written: dict[str, int] = {}
        self._phase, self._block, self._origin, self._stem = Phase.FORWARD, -1, "", ""

    def write_for(self, phase: Phase, block: int, *, stem: str, origin: str = "") -> None:
        """Set what the ops written from here on belong to; `stem` is the prefix of their names."""
        self._phase, self._block, self._origin, self._stem = phase, block, origin, stem

    def shape(self, name: str) -> Shape:
        """Return the shape of a value."""
        return self.values[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of a value."""
        return self.values[name].dtype

    def needs(self, op: Op, index: int) -> bool:
        """Whether input `index` of an op exists and its gradient is wanted."""
        return index < len(op.inputs) and op.inputs[index] in self.needed

    def known(self, op: Op, index: int) -> NDArray[Any] | None:
        """Return the data of a constant input of an op, None if it is absent.

        Raises:
            UnsupportedOpError: If the input is computed at run time.
        """
        if index >= len(op.inputs) or not op.inputs[index]:
            return None
        if op.inputs[index] not in self.constants:
            raise unsupported(op, f"its input {op.inputs[index]!r} is not a constant")
        return self.constants[op.inputs[index]]

    def output(self, op: Op, index: int, shape: Shape, dtype: str) -> str:
        """Return an output of an op of the forward graph; one that nobody asked for gets a name and a type now."""
        place = self._place[op.name]
        current = self.ops[place]
        outputs = [*current.outputs, *[""] * (index + 1 - len(current.outputs))]
        if not outputs[index]:
            outputs[index] = self.fresh(f"{op.name}.{index}")
            self.values[outputs[index]] = Value(outputs[index], shape, dtype)
            self.ops[place] = replace(current, outputs=tuple(outputs))
        return outputs[index]

    def ints(self, numbers: Iterable[int]) -> str:
        """Return an int64 vector constant (a shape, axes, sizes); equal ones are stored once."""
        return self._constant(np.asarray(tuple(numbers), np.int64), "int64")

    def array(self, data: NDArray[np.generic]) -> str:
        """Return a constant of numpy's own dtypes; equal ones are stored once."""
        return self._constant(data, str(data.dtype))

    def numbers(self, data: NDArray[np.generic], dtype: str) -> str:
        """Return a constant of the given dtype, also bfloat16; equal ones are stored once."""
        return self._constant(data.astype(scalar_array(0.0, dtype).dtype), dtype)

    def scalar(self, number: float, dtype: str) -> str:
        """Return a scalar constant of the given dtype; equal ones are stored once."""
        return self._constant(scalar_array(number, dtype), dtype)

    def _constant(self, array: NDArray[np.generic], dtype: str) -> str:
        key = (dtype, array.shape, array.tobytes())
        name = self._pool.get(key)
        if name is None:
            name = self._pool[key] = self.fresh(f"step.const.{len(self._pool)}")
            self.values[name] = Value(name, array.shape, dtype)
            self.constants[name] = array
        return name

    def fresh(self, name: str) -> str:
        """Return `name`, lengthened until no value or op has it."""
        while name in self.values or name in self._op_names:
            name += "_"
        return name

    def constant(self, name: str, array: NDArray[np.generic], dtype: str) -> str:
        """Define a constant of its own, not shared with equal ones."""
        self.constants[name] = array
        return self.define(name, array.shape, dtype)

    def define(self, name: str, shape: Shape, dtype: str) -> str:
        """Give a type to a value that has no producing op (an input or a state), or whose op is added by `append`.

        Raises:
            ModelError: If the model has a value of that name.
        """
        if name in self.values:
            raise ModelError(
                f"the model has a value {self.values[name]}, a name the training step needs", hint=f"rename {name!r}"
            )
        self.values[name] = Value(name, shape, dtype)
        return name

    def append(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attrs: Attr) -> None:
        """Write an op under a name of its own; its outputs have been defined."""
        assert name not in self._op_names, f"op {name} is written twice"
        self._op_names.add(name)
        self.ops.append(
            Op(
                name,
                kind,
                tuple(inputs),
                tuple(outputs),
                tuple(sorted(attrs.items())),
                self._phase,
                self._block,
                self._origin,
            )
        )

    def emit_all(
        self, kind: str, inputs: Sequence[str], shapes: Sequence[Shape], dtype: str, **attrs: Attr
    ) -> tuple[str, ...]:
        """Write an op with several outputs of one dtype and return their names."""
        number = self._written.get(self._stem, 0)
        self._written[self._stem] = number + 1
        name = self.fresh(f"{self._stem}.{number}")
        outputs = [name] if len(shapes) == 1 else [self.fresh(f"{name}.{index}") for index in range(len(shapes))]
        for output, shape in zip(outputs, shapes, strict=True):
            self.values[output] = Value(output, shape, dtype)
        self.append(kind, inputs, outputs, name, **attrs)
        return tuple(outputs)

    def emit(self, kind: str, inputs: Sequence[str], shape: Shape, dtype: str, **attrs: Attr) -> str:
        """Write an op with one output and return its name."""
        return self.emit_all(kind, inputs, (shape,), dtype, **attrs)[0]

    def map(self, kind: str, *inputs: str, **attrs: Attr) -> str:
        """Write an element-wise op: the dtype is that of its first float input, the shape the broadcast of all."""
        shape = np.broadcast_shapes(*(self.values[name].shape for name in inputs))
        dtype = next(self.values[name].dtype for name in inputs if self.values[name].is_float)
        return self.emit(kind, inputs, shape, dtype, **attrs)

    def times(self, x: str, factor: float) -> str:
        """Return `x` times a number; `x` itself if that is 1."""
        return x if factor == 1.0 else self.map("Mul", x, self.scalar(factor, self.dtype(x)))

    def row_numbers(self, count: int) -> str:
        """Return 0 ... count - 1 as the result of an op, so that it can be sharded."""
        bounds = [self.scalar(number, "int64") for number in (0, count, 1)]
        return self.emit("Range", bounds, (count,), "int64")

    def sum(self, x: str, axes: Sequence[int], *, keep: bool = False) -> str:
        """Return the sum of `x` over non-negative axes; `x` itself if there are none."""
        if not axes:
            return x
        shape = self.shape(x)
        kept = tuple(1 if dim in axes else size for dim, size in enumerate(shape) if keep or dim not in axes)
        return self.emit("ReduceSum", [x, self.ints(axes)], kept, self.dtype(x), keepdims=int(keep))

    def reshape(self, x: str, shape: Shape) -> str:
        """Return `x` in another shape.

        The target copies leading dims it shares with `x` and leaves the next one open, so that it holds for shards of
        these dims as well.
        """
        old = self.shape(x)
        if old == shape:
            return x
        common = 0
        while common < min(len(old), len(shape)) and old[common] == shape[common]:
            common += 1
        target = [0] * common + list(shape[common:])
        if common < len(shape) and 0 not in shape:
            target[common] = -1
        return self.emit("Reshape", [x, self.ints(target)], shape, self.dtype(x))

    def unsqueeze(self, x: str, axes: Sequence[int]) -> str:
        """Return `x` with dims of size 1 at these positions of the result."""
        if not axes:
            return x
        rest = iter(self.shape(x))
        shape = tuple(1 if dim in axes else next(rest) for dim in range(len(self.shape(x)) + len(axes)))
        return self.emit("Unsqueeze", [x, self.ints(axes)], shape, self.dtype(x))

    def squeeze(self, x: str, axes: Sequence[int]) -> str:
        """Return `x` without these dims of size 1."""
        if not axes:
            return x
        shape = tuple(size for dim, size in enumerate(self.shape(x)) if dim not in axes)
        return self.emit("Squeeze", [x, self.ints(axes)], shape, self.dtype(x))

    def expand(self, x: str, shape: Shape) -> str:
        """Return `x` repeated along dims of size 1. The target names no other dim, so it holds for shards of those."""
        old = self.shape(x)
        if old == shape:
            return x
        target = tuple(1 if size == before else size for size, before in zip(shape, old, strict=True))
        return self.emit("Expand", [x, self.ints(target)], shape, self.dtype(x))

    def transpose(self, x: str, perm: Sequence[int]) -> str:
        """Return `x` with permuted dims."""
        shape = self.shape(x)
        return self.emit("Transpose", [x], tuple(shape[dim] for dim in perm), self.dtype(x), perm=tuple(perm))

    def zeros(self, shape: Shape, dtype: str) -> str:
        """Return zeros."""
        return self.emit("Expand", [self.scalar(0.0, dtype), self.ints(shape)], shape, dtype)

    def reduce_to(self, x: str, shape: Shape) -> str:
        """Undo a broadcast: sum `x` over the dims that a tensor of `shape` was repeated along."""
        old = self.shape(x)
        if old == shape:
            return x
        extra = len(old) - len(shape)
        leading = tuple(range(extra))
        ones = tuple(extra + dim for dim, size in enumerate(shape) if size == 1 and old[extra + dim] != 1)
        if not ones:
            return self.sum(x, leading)
        return self.squeeze(self.sum(x, leading + ones, keep=True), leading)


def scalar_array(number: float, dtype: str) -> NDArray[np.generic]:
    """Return a number as an array without dims; `dtype` is that of a `Value`."""
    if dtype == "bfloat16":
        from ml_dtypes import bfloat16

        return np.asarray(number, bfloat16)
    return np.asarray(number, np.dtype(dtype))


def unsupported(op: Op, reason: str) -> UnsupportedOpError:
    """Return the error that says an op cannot be differentiated."""
    return UnsupportedOpError(f"no gradient for op {op.name!r} ({op.kind}): {reason}", hint=_NO_GRADIENT)


def together(errors: Sequence[tuple[Op, UnsupportedOpError]]) -> UnsupportedOpError:
    """Return one error about all ops that cannot be differentiated, a line for each kind of op and reason."""
    if len(errors) == 1:
        return errors[0][1]
    names: dict[str, list[str]] = {}
    for op, error in sorted(errors, key=lambda item: item[0].kind):
        reason = str(error.args[0]).removeprefix(f"no gradient for op {op.name!r} ({op.kind}): ")
        names.setdefault(f"{op.kind}: {reason}", []).append(op.name)
    lines = [f"  {what} ({_some(ops)})" for what, ops in names.items()]
    return UnsupportedOpError("\n".join([f"no gradient for {len(errors)} ops:", *lines]), hint=_NO_GRADIENT)


def _some(names: Sequence[str]) -> str:
    """Return the first of some names and how many there are."""
    return f"op {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


_NO_GRADIENT = "rewrite it with ops that have one (autopar.training.VJPS), or plan for inference with --mode infer"
