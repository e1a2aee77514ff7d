"""Straight-line equations made of a closed jaxpr: calls inlined, scans unrolled, scalars computed.

A newcomer looks here for what happens to control flow. What the equations mean stays with JAX: `kind` is the name of
the primitive, `params` are its parameters. `autopar.jaxprs.fused` replaces some of them by ONNX ops, whose kinds begin
with a capital.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ModelError

LAYER = "layer"
"""Kind of an equation that takes entry `index` of dim 0, as the steps of a scan do with what they scan."""

_CALLS = frozenset({
    "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "jit",
    "pjit", "remat", "remat2",
})  # fmt: skip
"""Primitives that compute what the jaxpr among their parameters computes. Recompute is the planner's decision."""

_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters that hold the jaxpr of a call."""

_SAME = frozenset({
    "copy", "copy_p", "layout_constraint", "mesh_cast", "name", "optimization_barrier", "pvary", "reduce_precision",
    "reshard", "sharding_constraint", "stop_gradient",
})  # fmt: skip
"""Primitives whose results are their operands. Shardings of the source are no part of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An operand or a result; two of equal content are different values.

    Attributes:
        shape: Its shape.
        dtype: Its type, as numpy spells it ("float32", "bfloat16").
        name: Of inputs and parameters; "" for others.
        data: Elements, of constants.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str = ""
    data: NDArray[Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One primitive or ONNX op.

    Attributes:
        kind: Name of the primitive, or of the op.
        inputs: Operands.
        outputs: Results.
        params: Parameters of the primitive, or attributes of the op.
        scope: Where in the model it stands, as Flax and `jax.named_scope` say: "Block_0.Dense_1".
    """

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    params: Mapping[str, Any]
    scope: str = ""

    @property
    def output(self) -> Value:
        """The only result."""
        (output,) = self.outputs
        return output


@dataclass(slots=True)
class Program:
    """A function as equations in order.

    Attributes:
        inputs: Data.
        parameters: Arrays of the tree of parameters.
        outputs: Results.
        equations: In order.
        stopped: Values behind a `stop_gradient`.
    """

    inputs: list[Value]
    parameters: list[Value]
    outputs: list[Value]
    equations: list[Equation]
    stopped: set[Value]

    def without_unused(self) -> None:
        """Drop equations whose results nobody reads."""
        needed = set(self.outputs)
        kept: list[Equation] = []
        for equation in reversed(self.equations):
            if needed.isdisjoint(equation.outputs):
                continue
            needed.update(equation.inputs)
            kept.append(equation)
        self.equations = kept[::-1]


def constant(data: Any, dtype: str | None = None) -> Value:
    """Return a constant with the given elements."""
    array = np.asarray(data)
    array = array if dtype is None else array.astype(numpy_type(dtype))
    return Value(array.shape, str(array.dtype), data=array)


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return a type by name, those of `ml_dtypes` too."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def flatten(closed: Any, inputs: Sequence[Value], parameters: Sequence[Value]) -> Program:
    """Return the equations of a closed jaxpr whose arguments are the parameters, then the inputs.

    Raises:
        ModelError: If control flow depends on data.
    """
    sweep = _Sweep()
    outputs = sweep.run(closed.jaxpr, closed.consts, [*parameters, *inputs], "")
    program = Program(list(inputs), list(parameters), outputs, sweep.equations, sweep.stopped)
    program.without_unused()
    _unstack(program)
    return program


class _Sweep:
    """Walks jaxprs in order."""

    def __init__(self) -> None:
        self.equations: list[Equation] = []
        self.stopped: set[Value] = set()

    def run(self, jaxpr: Any, consts: Iterable[Any], args: Sequence[Value], scope: str) -> list[Value]:
        """Append the equations of a jaxpr and return its results."""
        held: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        for var, data in zip(jaxpr.constvars, consts, strict=True):
            held[var] = _constant_of(data, var.aval.dtype)

        def value(atom: Any) -> Value:
            return _constant_of(atom.val, atom.aval.dtype) if hasattr(atom, "val") else held[atom]

        for equation in jaxpr.eqns:
            inner = ".".join(part for part in (scope, _plain(equation.source_info.name_stack)) if part)
            operands = [value(atom) for atom in equation.invars]
            results = self._results(equation, operands, inner)
            held.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, operands: list[Value], scope: str) -> list[Value]:
        kind, params = equation.primitive.name, equation.params
        if any(_is_key(var.aval.dtype) for var in equation.outvars):
            raise _random(scope)
        if kind in _SAME:
            if kind == "stop_gradient":
                self.stopped.update(operands)
            return operands
        if kind in _CALLS:
            body = next(params[name] for name in _BODIES if name in params)
            return self.run(getattr(body, "jaxpr", body), getattr(body, "consts", ()), operands, scope)
        if kind == "scan":
            return self._scan(params, operands, scope)
        if kind == "cond" and operands[0].data is not None:
            branch = params["branches"][int(np.clip(operands[0].data, 0, len(params["branches"]) - 1))]
            return self.run(branch.jaxpr, branch.consts, operands[1:], scope)
        if kind in ("cond", "while"):
            raise ModelError(
                f"JAX primitive {kind!r}{at(scope)} is control flow that depends on data",
                hint="use jnp.where, or a lax.scan or fori_loop of a fixed number of steps",
            )
        known = [operand.data for operand in operands]
        shapes = [tuple(var.aval.shape) for var in equation.outvars]
        if all(data is not None for data in known) and known and all(shape == () for shape in shapes):
            found = equation.primitive.bind(*known, **params)
            return [constant(item) for item in (found if equation.primitive.multiple_results else [found])]
        results = [Value(shape, str(var.aval.dtype)) for shape, var in zip(shapes, equation.outvars, strict=True)]
        self.equations.append(Equation(kind, tuple(operands), tuple(results), params, scope))
        return results

    def _scan(self, params: Mapping[str, Any], operands: list[Value], scope: str) -> list[Value]:
        """Append the steps of a scan one after the other."""
        body, length = params["jaxpr"], params["length"]
        first, second = params["num_consts"], params["num_consts"] + params["num_carry"]
        shared, carry, scanned = operands[:first], operands[first:second], operands[second:]
        stacked: list[list[Value]] = []
        for step in reversed(range(length)) if params["reverse"] else range(length):
            entries = [self._emit(LAYER, [whole], whole.shape[1:], index=step, scope=scope) for whole in scanned]
            inner = ".".join(part for part in (scope, f"step{step}") if part)
            results = self.run(body.jaxpr, body.consts, [*shared, *carry, *entries], inner)
            carry = results[: len(carry)]
            stacked.append(results[len(carry) :])
        if params["reverse"]:
            stacked.reverse()
        return carry + [
            self._stack([row[at] for row in stacked], scope) for at in range(len(stacked[0]) if stacked else 0)
        ]

    def _stack(self, rows: list[Value], scope: str) -> Value:
        shape = rows[0].shape
        entries = [
            self._emit("reshape", [row], (1, *shape), new_sizes=(1, *shape), dimensions=None, scope=scope)
            for row in rows
        ]
        return self._emit("concatenate", entries, (len(rows), *shape), dimension=0, scope=scope)

    def _emit(self, kind: str, inputs: list[Value], shape: tuple[int, ...], *, scope: str, **params: Any) -> Value:
        output = Value(shape, inputs[0].dtype)
        self.equations.append(Equation(kind, tuple(inputs), (output,), params, scope))
        return output


def _unstack(program: Program) -> None:
    """Make a parameter of each layer of parameters that are only ever scanned: blocks have weights of their own."""
    others = {value for each in program.equations if each.kind != LAYER for value in each.inputs} | set(program.outputs)
    layers = {
        value: [Value(value.shape[1:], value.dtype, f"{value.name}.{index}") for index in range(value.shape[0])]
        for value in dict.fromkeys(each.inputs[0] for each in program.equations if each.kind == LAYER)
        if value in program.parameters and value not in others
    }
    renamed: dict[Value, Value] = {}
    kept: list[Equation] = []
    for each in program.equations:
        inputs = tuple(renamed.get(value, value) for value in each.inputs)
        if each.kind == LAYER and inputs[0] in layers:
            renamed[each.output] = layers[inputs[0]][each.params["index"]]
        else:
            kept.append(Equation(each.kind, inputs, each.outputs, each.params, each.scope))
    program.equations = kept
    program.outputs = [renamed.get(value, value) for value in program.outputs]
    program.parameters = [part for value in program.parameters for part in layers.get(value, [value])]


def _constant_of(data: Any, dtype: Any) -> Value:
    if _is_key(dtype):
        raise _random("")
    return constant(data, str(dtype))


def _is_key(dtype: Any) -> bool:
    """Whether a type is that of JAX's random keys, which is none of numpy's."""
    return str(dtype).startswith("key<")


def _random(scope: str) -> ModelError:
    return ModelError(f"the function draws random numbers{at(scope)}", hint="switch off dropout (deterministic=True)")


def at(scope: str) -> str:
    """Return words for a place in the model, "" for none."""
    return f" in {scope}" if scope else ""


def _plain(name_stack: Any) -> str:
    """Return a name stack of JAX with dots, without the transformations it lists."""
    return ".".join(part for part in str(name_stack).replace("(", "/").replace(")", "").split("/") if part)
