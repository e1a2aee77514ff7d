"""JAX functions as ONNX models without their weights.

The function is traced with shapes alone (`jax.make_jaxpr`); nothing is computed, and a model may be of any size. The
jaxpr becomes equations in a straight line (`equations`), of which some are joined to the ops that the planner knows as
one kernel (`fused`, `attention`, `positions`), and these are written as ONNX (`nodes`). Decision 24 says why not by
another road.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import ModelError
from autopar.jaxprs.equations import Program, Value, flatten
from autopar.jaxprs.fused import fuse
from autopar.jaxprs.nodes import Writer
from autopar.onnx import load
from autopar.writing import write_atomically

if TYPE_CHECKING:
    import onnx

_NEEDED = ("jax", "jaxlib")
_BUFFERS = ("batch_stats", "cache")
"""Collections of Flax whose arrays no optimizer changes."""


def from_jax(
    function: Callable[..., Any],
    parameters: Any,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    path: str | Path,
    *,
    frozen: Callable[[str], bool] | None = None,
) -> Path:
    """Write a JAX function to an ONNX file without weights, and return the file's path.

    Nothing is computed: parameters and inputs may be arrays or `jax.ShapeDtypeStruct`s, as `jax.eval_shape` gives them.
    A parameter is called by its path in the tree ("layers.0.attn.q"). Dim 0 of the inputs is the batch, which the
    planner changes; give 2 samples, so that it can be told from dims of size 1. If the function computes with that
    number so that it cannot be changed, a warning says so. A scan is unrolled, and parameters that it scans over become
    a parameter per step. Arrays that the function closes over are buffers. `jax.checkpoint`, shardings and
    `stop_gradient` say nothing to the planner.

    Args:
        function: Takes the parameters and the inputs: Flax's `model.apply`, or a function of your own. Its first result
            is what the loss is computed from.
        parameters: A tree of arrays. Arrays of integers, and those in Flax's collections "batch_stats" and "cache", are
            buffers.
        example_inputs: Positional arguments, or keyword arguments by name.
        path: The `.onnx` file to write. `autopar.solve` takes it as the model.
        frozen: Says by the name of a parameter whether it is not trained: no gradient, no optimizer state.

    Raises:
        ModelError: If JAX is not installed or cannot trace the function, or if a primitive of it has no ONNX form.
        PlanError: If the file cannot be written.
    """
    model = to_onnx(function, parameters, example_inputs, frozen=frozen)
    _check_batch(model)
    path = Path(path)
    write_atomically(path, model.SerializeToString(deterministic=True))
    return path


def to_onnx(
    function: Callable[..., Any],
    parameters: Any,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    frozen: Callable[[str], bool] | None = None,
) -> "onnx.ModelProto":
    """Return a JAX function as an ONNX model without weights; arguments and errors as of `from_jax`."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"reading JAX functions needs {', '.join(missing)}, which is not installed",
            hint='pip install "autopar[jax]"',
        )
    import jax

    named = isinstance(example_inputs, Mapping)
    given = dict(example_inputs) if isinstance(example_inputs, Mapping) else tuple(example_inputs)

    def called(parameters: Any, inputs: Any) -> Any:
        return function(parameters, **inputs) if named else function(parameters, *inputs)

    what = getattr(function, "__name__", type(function).__name__).strip("<>")
    try:
        shapes = jax.tree.map(_shape, (parameters, given))
        closed = jax.make_jaxpr(called)(*shapes)
    except (TypeError, ValueError, IndexError) as error:  # those of JAX are subclasses
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"JAX cannot trace {what}: {reason[0]}", hint="jax.make_jaxpr(function)(parameters, *inputs) says more"
        ) from error
    weights = _values(shapes[0], jax, [])
    inputs = _values(shapes[1], jax, [] if named else _names(function, len(given)))
    taken = {value.name for value in weights}
    inputs = [Value(value.shape, value.dtype, _beside(value.name, taken)) for value in inputs]
    program = flatten(closed, inputs, weights)
    fuse(program)
    _check_stopped(program)
    trained = [value for value in program.parameters if "float" in value.dtype and not _is_buffer(value.name)]
    if not trained:
        raise ModelError(f"{what} has no parameters to train", hint="give the tree of its parameters as an argument")
    buffers = [value for value in program.parameters if value not in trained]
    return Writer(program, what).model(
        buffers, [value for value in trained if frozen is not None and frozen(value.name)]
    )


def _shape(leaf: Any) -> Any:
    """Return the shape and type of an array."""
    import jax
    import numpy as np

    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    array = np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _values(tree: Any, jax: Any, first: Sequence[str]) -> list[Value]:
    """Return the leaves of a tree, called by their paths; the first part of a path may be replaced by a name."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [_part(key) for key in path]
        if first:
            parts[0] = first[int(parts[0])]
        if len(path) > 1 and getattr(path[-1], "name", "") == "value":  # of a variable of Flax's nnx
            parts.pop()
        name = ".".join(part for part in parts if part) or "parameters"
        found.append(Value(tuple(leaf.shape), str(leaf.dtype), name))
    return found


def _part(key: Any) -> str:
    """Return one step of a path: a key of a mapping, an index, or the name of an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """Return names for the positional arguments behind the parameters."""
    known = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    try:
        names = [item.name for item in signature(function).parameters.values() if item.kind in known][1:]
    except (TypeError, ValueError):
        names = []
    return [*names, *(f"input{index}" for index in range(len(names), count))]


def _beside(name: str, taken: set[str]) -> str:
    """Return a name that no parameter has."""
    while name in taken:
        name += "_"
    return name


def _is_buffer(name: str) -> bool:
    return name.split(".")[0] in _BUFFERS


def _check_stopped(program: Program) -> None:
    """Warn of gradients that the function stops and the planner does not, where they are no maximum of a softmax."""
    made = {output: each for each in program.equations for output in each.outputs}
    read = {value for each in program.equations for value in each.inputs}
    scopes = sorted({made[value].scope or made[value].kind for value in program.stopped & read & made.keys()})
    if scopes:
        warnings.warn(
            f"stop_gradient is not planned: the step has gradients of what is stopped at {', '.join(scopes[:3])}",
            stacklevel=4,
        )


def _check_batch(model: "onnx.ModelProto") -> None:
    """Warn if a model takes only the number of samples it was traced with."""
    traced = int(load(model).metadata.get("batch", "1"))
    try:
        load(model, batch=traced + 1)
    except ModelError as error:
        warnings.warn(
            f"{model.graph.name} is planned with microbatches of {traced}, the number of samples it was traced with: "
            f"{error.args[0]}",
            stacklevel=3,
        )
