"""Sizes of the data inputs: dynamic dims bound by name, and the batch put in place of another.

A model exported for a fixed batch has that number in constants. It is imported with that batch first; a second sweep
with the new one then compares shapes, and puts the new number in place of the old one in target shapes of `Reshape`
and `Expand`, and in constants whose rows along dim 0 are all equal, of which one is kept (it broadcasts).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from numpy.typing import NDArray

from autopar.errors import ModelError
from autopar.ir.graph import Value
from autopar.onnx.reader import Source
from autopar.onnx.schema import check_shape
from autopar.onnx.tensors import dtype_name

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of a model.

    Attributes:
        size: Samples per microbatch.
        exported: Samples the model was exported for; equal to `size` if dim 0 was dynamic or is left as it is.
        inputs: Data inputs whose dim 0 is the batch.
    """

    size: int
    exported: int
    inputs: tuple[str, ...]

    @property
    def replaced(self) -> bool:
        """Whether constants of the model may hold another batch."""
        return self.size != self.exported

    def one_row(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return one row of a constant that repeats it for every sample of the exported batch; others as they are."""
        if not self.replaced or self.exported == 1 or array.ndim < 2 or array.shape[0] != self.exported:
            return array
        return array[:1] if all(bool((row == array[0]).all()) for row in array) else array

    def target(self, kind: str, before: tuple[int, ...], after: tuple[int, ...], result: tuple[int, ...]) -> Dims:
        """Return the shape that a `Reshape` or `Expand` has to give.

        Args:
            kind: Which of the two.
            before: Shape of its input at the exported batch.
            after: Shape of its input now.
            result: Shape of its output at the exported batch.
        """
        if before == after:
            is_batch = kind == "Expand" and self.exported > 1 and result[:1] == (self.exported,)
            return (self.size, *result[1:]) if is_batch else result
        changed = [axis for axis, sizes in enumerate(zip(before, after, strict=False)) if sizes[0] != sizes[1]]
        # The dim whose elements lie as far apart as those of the batch dim did.
        ahead = prod(before[: changed[0]]) if changed else 1
        heads = [prod(result[:axis]) for axis in range(len(result))]
        axis = heads.index(ahead) if ahead in heads else max(sum(head < ahead for head in heads) - 1, 0)
        return tuple(size * self.size // self.exported if at == axis else size for at, size in enumerate(result))


def resolve(entries: Sequence[int], source: Dims, *, zero_is_copy: bool) -> Dims | None:
    """Return the shape that the target of a `Reshape` means for an input of shape `source`; None if it does not fit."""
    sizes = [
        source[at] if entry == 0 and zero_is_copy and at < len(source) else entry for at, entry in enumerate(entries)
    ]
    rest = prod(size for size in sizes if size != -1)
    if -1 in sizes and rest:
        sizes[sizes.index(-1)] = prod(source) // rest
    return tuple(sizes) if prod(sizes) == prod(source) else None


@dataclass(frozen=True, slots=True)
class Ports:
    """Data inputs with static shapes.

    Attributes:
        inputs: In the model's order.
        dims: Sizes given to dynamic dims.
        batch: None if no data input has a dim 0.
    """

    inputs: tuple[Value, ...]
    dims: Mapping[str, int]
    batch: Batch | None


def bind(source: Source, dims: Mapping[str, int | float], batch: int | None) -> Ports:
    """Return the data inputs with every dim bound.

    Raises:
        ModelError: If dims are unbound, no positive whole numbers, or not in the model.
    """
    bound: dict[str, int] = {}
    for name, size in dims.items():
        if isinstance(size, float) or size < 1:
            raise ModelError(f"dim {name!r} is set to {size}", hint="sizes are positive whole numbers")
        bound[name] = int(size)
    if batch is not None and batch < 1:
        raise ModelError(f"dim 'batch' is set to {batch}", hint="sizes are positive whole numbers")
    graph = source.model.graph
    weights = {tensor.name for tensor in graph.initializer}
    data = [item for item in graph.input if item.name not in weights]
    shapes = [_shape(item) for item in data]
    fixed = [shape[0] for shape in shapes if shape and isinstance(shape[0], int)]
    exported = fixed[0] if fixed else None
    if batch is not None:
        for shape in shapes:
            if shape and isinstance(shape[0], str):
                bound[shape[0]] = batch
    names = list(dict.fromkeys(dim for shape in shapes for dim in shape if isinstance(dim, str)))
    unknown = [name for name in dims if name not in names]
    if unknown:
        has = f"its dynamic dims are {', '.join(names)}" if names else "it has no dynamic dims"
        raise ModelError(f"the model has no dim {unknown[0]!r}: {has}", hint="set only these")
    unbound = [name for name in names if name not in bound]
    if unbound:
        raise ModelError(
            f"dims {', '.join(map(repr, unbound))} of the model's inputs have no size",
            hint=" ".join(f"--set {name}=..." for name in unbound),
        )
    values: list[Value] = []
    batched: list[str] = []
    for item, shape in zip(data, shapes, strict=True):
        sizes = [bound[dim] if isinstance(dim, str) else dim for dim in shape]
        if shape and batch is not None and shape[0] == exported:
            sizes[0] = batch
        if shape and (isinstance(shape[0], str) or shape[0] == exported):
            batched.append(item.name)
        dtype = dtype_name(item.type.tensor_type.elem_type, f"input {item.name!r}")
        check_shape(tuple(sizes), f"input {item.name!r}")
        values.append(Value(item.name, tuple(sizes), dtype))
    return Ports(tuple(values), {name: bound[name] for name in names}, _batch(values, batched, exported))


def _batch(values: Sequence[Value], batched: Sequence[str], exported: int | None) -> Batch | None:
    sizes = [value.shape[0] for value in values if value.name in batched]
    return Batch(sizes[0], exported or sizes[0], tuple(batched)) if sizes else None


def _shape(item: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    """Return sizes of static dims and names of dynamic ones.

    Raises:
        ModelError: If the input is no tensor, or of unknown rank.
    """
    tensor = item.type.tensor_type
    if not item.type.HasField("tensor_type") or not tensor.HasField("shape"):
        raise ModelError(
            f"input {item.name!r} is no tensor of known rank", hint="export it with a shape, dynamic dims named"
        )
    return tuple(
        dim.dim_value if dim.dim_value > 0 else dim.dim_param or f"{item.name}.{axis}"
        for axis, dim in enumerate(tensor.shape.dim)
    )
