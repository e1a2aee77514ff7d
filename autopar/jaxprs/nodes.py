"""ONNX nodes of a program's equations.

A value that only repeats another one along some dims is kept as it was before (`Held.shape` has 1 there), because
element-wise ops broadcast by themselves: XLA materialises no such value either.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.errors import ModelError
from autopar.jaxprs.equations import Equation, Program, Value, at, numpy_type
from autopar.jaxprs.positions import unit_dims_moved

if TYPE_CHECKING:
    import onnx

OPSET = 24
_IR_VERSION = 12
_MOST_INLINE = 4096
"""Elements up to which a constant is written into the model; larger ones are buffers without data."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Held:
    """What holds a value in the model.

    Attributes:
        name: Its name there.
        shape: Its shape there: that of the value, or 1 in dims along which it is repeated; the first dims are missing
            where it is repeated along them.
    """

    name: str
    shape: tuple[int, ...]


class Writer:
    """Collects nodes and initializers.

    Args:
        program: What is written.
        name: Name of the graph.
    """

    def __init__(self, program: Program, name: str) -> None:
        self._program = program
        self._name = name
        self._held: dict[Value, Held] = {}
        self._names: set[str] = set()
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._initializers: list[onnx.TensorProto] = []
        self._buffers: list[str] = []
        for value in (*program.inputs, *program.parameters):
            self._names.add(value.name)
            self._held[value] = Held(value.name, value.shape)

    def model(self, buffers: Sequence[Value], frozen: Sequence[Value]) -> "onnx.ModelProto":
        """Return the program as a model without weights.

        Args:
            buffers: Parameters that no training changes.
            frozen: Parameters that this training does not change.

        Raises:
            ModelError: If a primitive has no ONNX form.
        """
        from onnx import StringStringEntryProto, TensorProto, helper

        from autopar.onnx.roles import BUFFERS_KEY, FROZEN_KEY

        for equation in self._program.equations:
            self._write(equation)
        outputs = []
        for index, value in enumerate(self._program.outputs):
            name = self._fresh("output" if index == 0 else f"output.{index}")
            self._node("Identity", [self.whole(value)], name)
            outputs.append(helper.make_tensor_value_info(name, elem_type(value.dtype), value.shape))
        read = {name for node in self._nodes for name in node.input}
        offset = 0
        for value in self._program.parameters:
            if value.name not in read:
                continue
            size = prod(value.shape) * itemsize(value.dtype)
            place = {"location": "weights.bin", "offset": str(offset), "length": str(size)}
            self._initializers.append(
                TensorProto(
                    name=value.name,
                    dims=value.shape,
                    data_type=elem_type(value.dtype),
                    data_location=TensorProto.EXTERNAL,
                    external_data=[StringStringEntryProto(key=key, value=text) for key, text in place.items()],
                    metadata_props=[StringStringEntryProto(key=FROZEN_KEY, value="1")] if value in frozen else [],
                )
            )
            offset += size
        graph = helper.make_graph(
            self._nodes,
            self._name,
            [
                helper.make_tensor_value_info(each.name, elem_type(each.dtype), each.shape)
                for each in self._program.inputs
                if each.name in read
            ],
            outputs,
            self._initializers,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION, producer_name="jax"
        )
        listed = [*self._buffers, *(value.name for value in buffers)]
        helper.set_model_props(model, {BUFFERS_KEY: ",".join(listed)})
        return model

    def held(self, value: Value) -> Held:
        """Return what holds a value, possibly without its repetitions."""
        if value not in self._held:
            assert value.data is not None, "values are constants, inputs, parameters or made by an equation before"
            self._held[value] = Held(self._constant(value.data), value.shape)
        return self._held[value]

    def whole(self, value: Value) -> str:
        """Return the name of a value with all its repetitions."""
        held = self.held(value)
        if held.shape == value.shape:
            return held.name
        name = self.node("Expand", [held.name, self.numbers(value.shape)], f"{held.name}.expanded")
        self._held[value] = Held(name, value.shape)
        return name

    def ranked(self, value: Value) -> Held:
        """Return what holds a value with as many dims as the value."""
        held = self.held(value)
        missing = len(value.shape) - len(held.shape)
        if not missing:
            return held
        shape = (1,) * missing + held.shape
        self._held[value] = Held(self.node("Reshape", [held.name, self.numbers(shape)], f"{held.name}.row"), shape)
        return self._held[value]

    def hold(self, value: Value, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Note what holds a value; its own shape if none is given."""
        self._held[value] = Held(name, value.shape if shape is None else shape)

    def numbers(self, values: Sequence[int]) -> str:
        """Return a list of integers as a constant."""
        return self._constant(np.array([int(value) for value in values], np.int64))

    def scalar(self, number: float, dtype: str) -> str:
        """Return a number as a constant."""
        return self._constant(np.asarray(number, numpy_type(dtype)))

    def node(self, kind: str, inputs: Sequence[str], name: str, **attrs: Any) -> str:
        """Append a node with one result; return the name it got."""
        name = self._fresh(name)
        self._node(kind, inputs, name, **attrs)
        return name

    def nodes(self, kind: str, inputs: Sequence[str], names: Sequence[str], **attrs: Any) -> list[str]:
        """Append a node with several results; return the names they got."""
        from onnx import helper

        fresh = [self._fresh(name) for name in names]
        self._nodes.append(helper.make_node(kind, inputs, fresh, fresh[0], **attrs))
        return fresh

    def _node(self, kind: str, inputs: Sequence[str], name: str, **attrs: Any) -> None:
        from onnx import helper

        self._nodes.append(helper.make_node(kind, inputs, [name], name, **attrs))

    def _fresh(self, name: str) -> str:
        found, number = name, 0
        while found in self._names:
            number += 1
            found = f"{name}.{number}"
        self._names.add(found)
        return found

    def _constant(self, data: Any) -> str:
        from onnx import TensorProto, helper

        array = np.asarray(data)
        if array.size > _MOST_INLINE:
            name = self._fresh("closure")
            tensor = TensorProto(
                name=name, dims=array.shape, data_type=elem_type(str(array.dtype)), data_location=TensorProto.EXTERNAL
            )
            entry = tensor.external_data.add()
            entry.key, entry.value = "location", "weights.bin"
            self._initializers.append(tensor)
            self._buffers.append(name)
            return name
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            name = self._constants[key] = self._fresh("const")
            tensor = helper.make_tensor(
                name, elem_type(str(array.dtype)), array.shape, np.ascontiguousarray(array).tobytes(), raw=True
            )
            self._nodes.append(helper.make_node("Constant", [], [name], name, value=tensor))
        return self._constants[key]

    def _write(self, equation: Equation) -> None:
        if equation.kind[0].isupper():
            _write_op(self, equation)
            return
        rule = _RULES.get(equation.kind)
        if equation.kind in _RAGGED:
            raise ModelError(
                f"JAX primitive {equation.kind!r}{at(equation.scope)} multiplies groups of rows whose sizes depend on "
                "data, and what sorted the rows into groups is not read here",
                hint="plan the model by its config.json (hf:) or zoo: name, whose experts are grouped products; an "
                "einsum over all experts is planned as what it is",
            )
        if rule is None:
            raise ModelError(
                f"JAX primitive {equation.kind!r}{at(equation.scope)} has no ONNX form here",
                hint="write it with other functions of jax.numpy",
            )
        rule(self, equation, name_of(equation))


_RAGGED = frozenset({"ragged_dot", "ragged_dot_general"})
"""Primitives of `lax.ragged_dot`."""


def elem_type(dtype: str) -> int:
    """Return the ONNX number of a type."""
    from onnx import helper

    try:
        return int(helper.np_dtype_to_tensor_dtype(numpy_type(dtype)))
    except (TypeError, ValueError, KeyError):
        raise ModelError(f"JAX type {dtype} is no ONNX type", hint="use float32, bfloat16 or integers") from None


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    return int(numpy_type(dtype).itemsize)


def name_of(equation: Equation) -> str:
    """Return the name of an equation's nodes, before it is made unique."""
    return f"{equation.scope}.{equation.kind}" if equation.scope else equation.kind


def _write_op(w: Writer, equation: Equation) -> None:
    """Write an equation that is an ONNX op already."""
    attrs = dict(equation.params)
    inputs = [w.whole(value) for value in equation.inputs]
    w.hold(equation.output, w.node(equation.kind, inputs, name_of(equation), **attrs))


def _elementwise(*kinds: str) -> "Rule":
    """Return a rule that writes a chain of element-wise ops, the first of all operands."""

    def rule(w: Writer, equation: Equation, name: str) -> None:
        held = [w.held(value) for value in equation.inputs]
        shape = np.broadcast_shapes(*(each.shape for each in held))
        result = w.node(kinds[0], [each.name for each in held], name)
        for kind in kinds[1:]:
            result = w.node(kind, [result], name)
        w.hold(equation.output, result, shape)

    return rule


def _logical(of_bool: str, of_integers: str) -> "Rule":
    def rule(w: Writer, equation: Equation, name: str) -> None:
        _elementwise(of_bool if equation.inputs[0].dtype == "bool" else of_integers)(w, equation, name)

    return rule


def _with_number(kind: str, number: float, *, first: bool = False) -> "Rule":
    """Return a rule that writes an element-wise op of the operand and a number."""

    def rule(w: Writer, equation: Equation, name: str) -> None:
        held = w.held(equation.inputs[0])
        operands = [held.name, w.scalar(number, equation.inputs[0].dtype)]
        w.hold(equation.output, w.node(kind, operands[::-1] if first else operands, name), held.shape)

    return rule


def _log1p(w: Writer, equation: Equation, name: str) -> None:
    held = w.held(equation.inputs[0])
    raised = w.node("Add", [held.name, w.scalar(1, equation.inputs[0].dtype)], name)
    w.hold(equation.output, w.node("Log", [raised], name), held.shape)


def _expm1(w: Writer, equation: Equation, name: str) -> None:
    held = w.held(equation.inputs[0])
    power = w.node("Exp", [held.name], name)
    w.hold(equation.output, w.node("Sub", [power, w.scalar(1, equation.inputs[0].dtype)], name), held.shape)


def _erfc(w: Writer, equation: Equation, name: str) -> None:
    held = w.held(equation.inputs[0])
    erf = w.node("Erf", [held.name], name)
    w.hold(equation.output, w.node("Sub", [w.scalar(1, equation.inputs[0].dtype), erf], name), held.shape)


def _square(w: Writer, equation: Equation, name: str) -> None:
    held = w.held(equation.inputs[0])
    w.hold(equation.output, w.node("Mul", [held.name, held.name], name), held.shape)


def _integer_pow(w: Writer, equation: Equation, name: str) -> None:
    power = int(equation.params["y"])
    if power == 2:
        _square(w, equation, name)
    elif power == -1:
        _elementwise("Reciprocal")(w, equation, name)
    else:
        _with_number("Pow", power)(w, equation, name)


def _remainder(w: Writer, equation: Equation, name: str) -> None:
    held = [w.held(value) for value in equation.inputs]
    shape = np.broadcast_shapes(*(each.shape for each in held))
    w.hold(equation.output, w.node("Mod", [each.name for each in held], name, fmod=1), shape)


def _not_equal(w: Writer, equation: Equation, name: str) -> None:
    _elementwise("Equal", "Not")(w, equation, name)


def _clamp(w: Writer, equation: Equation, name: str) -> None:
    low, x, high = (w.held(value) for value in equation.inputs)
    raised = w.node("Max", [x.name, low.name], name)
    shape = np.broadcast_shapes(low.shape, x.shape, high.shape)
    w.hold(equation.output, w.node("Min", [raised, high.name], name), shape)


def _select(w: Writer, equation: Equation, name: str) -> None:
    condition, *cases = equation.inputs
    if len(cases) != 2 or condition.dtype != "bool":
        raise ModelError(f"a choice of {len(cases)}{at(equation.scope)} has no ONNX form", hint="use jnp.where")
    held = [w.held(value) for value in (condition, cases[1], cases[0])]
    shape = np.broadcast_shapes(*(each.shape for each in held))
    w.hold(equation.output, w.node("Where", [each.name for each in held], name), shape)


def _cast(w: Writer, equation: Equation, name: str) -> None:
    held = w.held(equation.inputs[0])
    cast = w.node("Cast", [held.name], name, to=elem_type(equation.output.dtype))
    w.hold(equation.output, cast, held.shape)


def _broadcast(w: Writer, equation: Equation, name: str) -> None:
    x, target = equation.inputs[0], equation.output.shape
    dims = [int(dim) for dim in equation.params["broadcast_dimensions"]]
    if dims == list(range(len(target) - len(dims), len(target))):
        held = w.held(x)
        w.hold(equation.output, held.name, held.shape)
        return
    held, shape = w.ranked(x), [1] * len(target)
    for size, dim in zip(held.shape, dims, strict=True):
        shape[dim] = size
    w.hold(equation.output, _reshaped(w, held, tuple(shape), name), tuple(shape))


def _reshaped(w: Writer, held: Held, shape: tuple[int, ...], name: str) -> str:
    return held.name if held.shape == shape else w.node("Reshape", [held.name, w.numbers(shape)], name)


def _reshape(w: Writer, equation: Equation, name: str) -> None:
    if equation.kind == "reshape" and equation.params["dimensions"] is not None:
        raise ModelError(f"a reshape{at(equation.scope)} transposes, too", hint="use jnp.reshape without order")
    x, target = equation.inputs[0], equation.output.shape
    where, held = unit_dims_moved(x.shape, target), w.held(x)
    if target == (1,) * (len(target) - len(x.shape)) + x.shape:
        w.hold(equation.output, held.name, held.shape)
    elif where is None or held.shape == x.shape:
        w.hold(equation.output, _reshaped(w, Held(w.whole(x), x.shape), target, name))
    else:
        held, shape = w.ranked(x), [1] * len(target)
        for dim, to in where.items():
            shape[to] = held.shape[dim]
        w.hold(equation.output, _reshaped(w, held, tuple(shape), name), tuple(shape))


def _transpose(w: Writer, equation: Equation, name: str) -> None:
    held = w.ranked(equation.inputs[0])
    perm = [int(dim) for dim in equation.params["permutation"]]
    shape = tuple(held.shape[dim] for dim in perm)
    w.hold(equation.output, w.node("Transpose", [held.name], name, perm=perm), shape)


def _iota(w: Writer, equation: Equation, name: str) -> None:
    dim, output = equation.params["dimension"], equation.output
    size = output.shape[dim]
    line = w.node("Range", [w.scalar(number, "int64") for number in (0, size, 1)], name)
    shape = tuple(size if at == dim else 1 for at in range(len(output.shape)))
    line = _reshaped(w, Held(line, (size,)), shape, name)
    w.hold(output, w.node("Cast", [line], name, to=elem_type(output.dtype)), shape)


def _reduce(kind: str) -> "Rule":
    def rule(w: Writer, equation: Equation, name: str) -> None:
        axes = w.numbers(equation.params["axes"])
        w.hold(equation.output, w.node(kind, [w.whole(equation.inputs[0]), axes], name, keepdims=0))

    return rule


def _arg(kind: str) -> "Rule":
    def rule(w: Writer, equation: Equation, name: str) -> None:
        (axis,) = equation.params["axes"]
        found = w.node(kind, [w.whole(equation.inputs[0])], name, axis=int(axis), keepdims=0)
        w.hold(equation.output, w.node("Cast", [found], name, to=elem_type(equation.output.dtype)))

    return rule


def _cumsum(w: Writer, equation: Equation, name: str) -> None:
    axis = w.scalar(equation.params["axis"], "int64")
    x = w.whole(equation.inputs[0])
    w.hold(equation.output, w.node("CumSum", [x, axis], name, reverse=int(equation.params["reverse"])))


def _concatenate(w: Writer, equation: Equation, name: str) -> None:
    inputs = [w.whole(value) for value in equation.inputs]
    w.hold(equation.output, w.node("Concat", inputs, name, axis=equation.params["dimension"]))


def _split(w: Writer, equation: Equation, name: str) -> None:
    sizes = w.numbers(equation.params["sizes"])
    names = [f"{name}.{index}" for index in range(len(equation.outputs))]
    found = w.nodes("Split", [w.whole(equation.inputs[0]), sizes], names, axis=int(equation.params["axis"]))
    for value, part in zip(equation.outputs, found, strict=True):
        w.hold(value, part)


def _sliced(w: Writer, x: str, starts: Sequence[int], ends: Sequence[int], steps: Sequence[int], name: str) -> str:
    axes = range(len(starts))
    return w.node("Slice", [x, *(w.numbers(each) for each in (starts, ends, axes, steps))], name)


def _slice(w: Writer, equation: Equation, name: str) -> None:
    params, x = equation.params, equation.inputs[0]
    starts, ends = params["start_indices"], params["limit_indices"]
    steps = params["strides"] or (1,) * len(starts)
    cut = [dim for dim in range(len(starts)) if (starts[dim], ends[dim], steps[dim]) != (0, x.shape[dim], 1)]
    lists = [w.numbers([each[dim] for dim in cut]) for each in (starts, ends)]
    w.hold(
        equation.output, w.node("Slice", [w.whole(x), *lists, w.numbers(cut), w.numbers([steps[d] for d in cut])], name)
    )


def _dynamic_slice(w: Writer, equation: Equation, name: str) -> None:
    x, *starts = equation.inputs
    sizes = equation.params["slice_sizes"]
    known = [start.data for start in starts]
    if any(data is None for data in known):
        raise ModelError(
            f"a slice{at(equation.scope)} begins where data say", hint="slice at fixed places, or use jnp.take"
        )
    at_most = [max(0, size - wanted) for size, wanted in zip(x.shape, sizes, strict=True)]
    first = [min(max(int(data), 0), most) for data, most in zip(known, at_most, strict=True) if data is not None]
    ends = [start + size for start, size in zip(first, sizes, strict=True)]
    w.hold(equation.output, _sliced(w, w.whole(x), first, ends, [1] * len(first), name))


def _layer(w: Writer, equation: Equation, name: str) -> None:
    x, index = equation.inputs[0], equation.params["index"]
    picked = w.scalar(index, "int64")
    w.hold(equation.output, w.node("Gather", [w.whole(x), picked], name, axis=0))


def _pad(w: Writer, equation: Equation, name: str) -> None:
    x, number = equation.inputs
    lows, highs, inner = zip(*equation.params["padding_config"], strict=True)
    if any(inner):
        raise ModelError(f"a pad{at(equation.scope)} spreads its operand", hint="pad at the ends only")
    w.hold(equation.output, w.node("Pad", [w.whole(x), w.numbers((*lows, *highs)), w.held(number).name], name))


def _top_k(w: Writer, equation: Equation, name: str) -> None:
    best, index = equation.outputs
    k = w.numbers((equation.params["k"],))
    axis = int(equation.params.get("axis", -1))
    names = w.nodes("TopK", [w.whole(equation.inputs[0]), k], [name, f"{name}.index"], axis=axis)
    w.hold(best, names[0])
    w.hold(index, w.node("Cast", [names[1]], f"{name}.index", to=elem_type(index.dtype)))


def _gather(w: Writer, equation: Equation, name: str) -> None:
    """Write a gather that takes entries along one dim: of all others, or at the same place in them."""
    x, index = equation.inputs
    numbers, sizes = equation.params["dimension_numbers"], tuple(equation.params["slice_sizes"])
    places = index.shape[:-1]
    if len(numbers.start_index_map) == 1 and index.shape[-1:] == (1,):
        (axis,) = numbers.start_index_map
        batching = tuple(numbers.operand_batching_dims)
        others = tuple(dim for dim in range(len(x.shape)) if dim != axis)
        picked = Held(w.whole(index), index.shape)
        takes_one = tuple(numbers.collapsed_slice_dims) == (axis,)
        if (
            takes_one
            and not batching
            and sizes == tuple(1 if dim == axis else size for dim, size in enumerate(x.shape))
        ):
            offsets = tuple(range(axis)) + tuple(range(axis + len(places), len(x.shape) - 1 + len(places)))
            if tuple(numbers.offset_dims) == offsets:
                position = _reshaped(w, picked, places, f"{name}.index")
                w.hold(equation.output, w.node("Gather", [w.whole(x), position], name, axis=int(axis)))
                return
        along = takes_one and batching == others and tuple(numbers.start_indices_batching_dims) == others
        if along and set(sizes) == {1} and len(places) == len(x.shape):
            position = _reshaped(w, picked, places, f"{name}.index")
            w.hold(equation.output, w.node("GatherElements", [w.whole(x), position], name, axis=int(axis)))
            return
    raise ModelError(
        f"a gather{at(equation.scope)} takes more than entries along one dim",
        hint="use jnp.take or jnp.take_along_axis",
    )


def _dot(w: Writer, equation: Equation, name: str) -> None:
    """Write a product of two tensors: MatMul where dims lie so, else Einsum."""
    contracted, batches = equation.params["dimension_numbers"]
    x, y = equation.inputs
    letters = iter(_LETTERS)
    terms: list[dict[int, str]] = [{}, {}]
    for mine, other in (*zip(*batches, strict=True), *zip(*contracted, strict=True)):
        terms[0][int(mine)] = terms[1][int(other)] = next(letters)
    free = ["", ""]
    for side, operand in enumerate((x, y)):
        for dim in range(len(operand.shape)):
            if dim not in terms[side]:
                terms[side][dim] = next(letters)
                free[side] += terms[side][dim]
    left, right = ("".join(term[dim] for dim in range(len(term))) for term in terms)
    result = "".join(terms[0][int(dim)] for dim in batches[0]) + free[0] + free[1]
    order = equation.params.get("permutation")
    if order is not None:
        result = "".join(result[dim] for dim in order)
    common, output = str(np.result_type(*(numpy_type(value.dtype) for value in (x, y)))), equation.output.dtype
    names = [
        w.whole(value) if value.dtype == common else w.node("Cast", [w.whole(value)], name, to=elem_type(common))
        for value in (x, y)
    ]
    if _is_matmul(left, right, result):
        made = w.node("MatMul", names, name)
    elif _is_matmul(right, left, result):
        made = w.node("MatMul", names[::-1], name)
    else:
        made = w.node("Einsum", names, name, equation=f"{left},{right}->{result}")
    if common != output:
        made = w.node("Cast", [made], name, to=elem_type(output))
    w.hold(equation.output, made)


def _is_matmul(left: str, right: str, result: str) -> bool:
    """Whether a product in the letters of an Einsum is a MatMul."""
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        return False
    shared = right[:-2]
    return result == left[:-1] + right[-1] and (not shared or left[:-2] == shared)


def _conv(w: Writer, equation: Equation, name: str) -> None:
    params = equation.params
    numbers = params["dimension_numbers"]
    if params["batch_group_count"] != 1 or any(size != 1 for size in params["lhs_dilation"]):
        raise ModelError(f"a convolution{at(equation.scope)} has dilated inputs or groups of samples")
    x, kernel = (w.whole(value) for value in equation.inputs)
    lows, highs = zip(*params["padding"], strict=True)
    made = w.node(
        "Conv",
        [_permuted(w, x, numbers.lhs_spec, name), _permuted(w, kernel, numbers.rhs_spec, name)],
        name,
        strides=[int(size) for size in params["window_strides"]],
        pads=[int(size) for size in (*lows, *highs)],
        dilations=[int(size) for size in params["rhs_dilation"]],
        group=int(params["feature_group_count"]),
    )
    out = numbers.out_spec
    w.hold(equation.output, _permuted(w, made, [out.index(dim) for dim in range(len(out))], name))


def _permuted(w: Writer, x: str, perm: Sequence[int], name: str) -> str:
    order = [int(dim) for dim in perm]
    return x if order == sorted(order) else w.node("Transpose", [x], f"{name}.order", perm=order)


Rule = Callable[[Writer, Equation, str], None]
_RULES: Mapping[str, Rule] = {
    "abs": _elementwise("Abs"),
    "acos": _elementwise("Acos"),
    "add": _elementwise("Add"),
    "add_any": _elementwise("Add"),
    "and": _logical("And", "BitwiseAnd"),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "asin": _elementwise("Asin"),
    "atan": _elementwise("Atan"),
    "broadcast_in_dim": _broadcast,
    "ceil": _elementwise("Ceil"),
    "clamp": _clamp,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "convert_element_type": _cast,
    "cos": _elementwise("Cos"),
    "cosh": _elementwise("Cosh"),
    "cumsum": _cumsum,
    "div": _elementwise("Div"),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "eq": _elementwise("Equal"),
    "erf": _elementwise("Erf"),
    "erfc": _erfc,
    "exp": _elementwise("Exp"),
    "exp2": _with_number("Pow", 2, first=True),
    "expm1": _expm1,
    "floor": _elementwise("Floor"),
    "gather": _gather,
    "ge": _elementwise("GreaterOrEqual"),
    "gt": _elementwise("Greater"),
    "integer_pow": _integer_pow,
    "iota": _iota,
    "layer": _layer,
    "le": _elementwise("LessOrEqual"),
    "log": _elementwise("Log"),
    "log1p": _log1p,
    "logistic": _elementwise("Sigmoid"),
    "lt": _elementwise("Less"),
    "max": _elementwise("Max"),
    "min": _elementwise("Min"),
    "mul": _elementwise("Mul"),
    "ne": _not_equal,
    "neg": _elementwise("Neg"),
    "not": _logical("Not", "BitwiseNot"),
    "or": _logical("Or", "BitwiseOr"),
    "pad": _pad,
    "pow": _elementwise("Pow"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
    "reduce_prod": _reduce("ReduceProd"),
    "reduce_sum": _reduce("ReduceSum"),
    "rem": _remainder,
    "reshape": _reshape,
    "rsqrt": _elementwise("Sqrt", "Reciprocal"),
    "select_n": _select,
    "sign": _elementwise("Sign"),
    "sin": _elementwise("Sin"),
    "sinh": _elementwise("Sinh"),
    "slice": _slice,
    "split": _split,
    "sqrt": _elementwise("Sqrt"),
    "square": _square,
    "squeeze": _reshape,
    "sub": _elementwise("Sub"),
    "tan": _elementwise("Tan"),
    "tanh": _elementwise("Tanh"),
    "top_k": _top_k,
    "transpose": _transpose,
    "xor": _logical("Xor", "BitwiseXor"),
}
