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
from autopar.onnx.dims import batch_axes, evaluate, named, variables
from autopar.onnx.reader import Source
from autopar.onnx.schema import check_shape
from autopar.onnx.tensors import dtype_name
from autopar.plan import DimSize

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of a model.

    Attributes:
        size: Samples per microbatch.
        exported: Samples the model was exported for; equal to `size` if dim 0 was dynamic or is left as it is.
        inputs: Data inputs that have the batch as a dim.
        axes: Which dim of each that is.
    """

    size: int
    exported: int
    inputs: tuple[str, ...]
    axes: tuple[int, ...]

    @property
    def replaced(self) -> bool:
        """Whether constants of the model may hold another batch."""
        return self.size != self.exported

    def one_row(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return one row of a constant that repeats it for every sample of the exported batch; others as they are."""
        if not self.replaced or self.exported == 1 or array.ndim < 2 or array.shape[0] != self.exported:
            return array
        return array[:1] if all(bool((row == array[0]).all()) for row in array) else array

    def target(
        self, kind: str, before: tuple[int, ...], after: tuple[int, ...], result: tuple[int, ...], inner: int = 1
    ) -> tuple[Dims, int]:
        """Return the shape that a `Reshape` or `Expand` has to give, and `inner` of its result.

        Args:
            kind: Which of the two.
            before: Shape of its input at the exported batch.
            after: Shape of its input now.
            result: Shape of its output at the exported batch.
            inner: Of the dim of the input that holds the batch, the elements ahead of the batch: the 6 of 6 x batch
                rows. 1 if the batch comes first in it or is a dim of its own.
        """
        if before == after:
            is_batch = kind == "Expand" and self.exported > 1 and result[:1] == (self.exported,)
            return ((self.size, *result[1:]) if is_batch else result), 1
        changed = [axis for axis, sizes in enumerate(zip(before, after, strict=False)) if sizes[0] != sizes[1]]
        # The dim whose elements lie as far apart as those of the batch did.
        ahead = prod(before[: changed[0]]) * inner if changed else 1
        heads = [prod(result[:axis]) for axis in range(len(result))]
        axis = heads.index(ahead) if ahead in heads else max(sum(head < ahead for head in heads) - 1, 0)
        if ahead in heads and result[axis] == 1 and self.exported > 1:
            axis = next((at for at in range(axis, len(result)) if result[at] > 1), axis)  # dims of size 1 hold none
        sizes = tuple(size * self.size // self.exported if at == axis else size for at, size in enumerate(result))
        return sizes, max(1, ahead // heads[axis])


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
        batch: None if no data input has a batch dim.
    """

    inputs: tuple[Value, ...]
    dims: Mapping[str, int]
    batch: Batch | None


def bind(source: Source, dims: Mapping[str, DimSize], batch: int | None) -> Ports:
    """Return the data inputs with every dim bound.

    Raises:
        ModelError: If dims are unbound, no positive whole numbers, or not in the model.
    """
    bound: dict[str, int] = {}
    for name, size in dims.items():
        if isinstance(size, float | tuple) or size < 1:
            raise ModelError(f"dim {name!r} is set to {size}", hint="sizes are positive whole numbers")
        bound[name] = int(size)
    if batch is not None and batch < 1:
        raise ModelError(f"dim 'batch' is set to {batch}", hint="sizes are positive whole numbers")
    graph = source.model.graph
    weights = {tensor.name for tensor in graph.initializer}
    data = [item for item in graph.input if item.name not in weights]
    shapes = [_shape(item) for item in data]
    axes = batch_axes(shapes)
    names = list(dict.fromkeys(dim for shape in shapes for dim in shape if isinstance(dim, str)))
    unknown = [name for name in dims if name not in names]
    if unknown:
        has = f"its dynamic dims are {', '.join(names)}" if names else "it has no dynamic dims"
        raise ModelError(f"the model has no dim {unknown[0]!r}: {has}", hint="set only these")
    if batch is not None and batch > 1 and shapes and all(axis is None for axis in axes):
        raise ModelError(
            f"the model works on one sample at a time, not {batch}: no dim of its inputs "
            f"{', '.join(repr(item.name) for item in data)} is a batch",
            hint="export it with a dynamic dim named batch",
        )
    batches = [shape[axis] for shape, axis in zip(shapes, axes, strict=True) if axis is not None]
    if batch is not None:
        bound |= {dim: batch for dim in batches if isinstance(dim, str) and not variables(dim, names)}
    _compute(bound, names)
    exported = next((dim for dim in batches if isinstance(dim, int)), None)
    values: list[Value] = []
    for item, shape, axis in zip(data, shapes, axes, strict=True):
        sizes = [bound[dim] if isinstance(dim, str) else dim for dim in shape]
        if axis is not None and batch is not None and isinstance(shape[axis], int):
            sizes[axis] = batch
        dtype = dtype_name(item.type.tensor_type.elem_type, f"input {item.name!r}")
        check_shape(tuple(sizes), f"input {item.name!r}")
        values.append(Value(item.name, tuple(sizes), dtype))
    found = [(value, axis) for value, axis in zip(values, axes, strict=True) if axis is not None]
    return Ports(tuple(values), {name: bound[name] for name in names}, _batch(found, exported))


def _compute(bound: dict[str, int], names: Sequence[str]) -> None:
    """Give sizes to the dims that are expressions of others.

    Raises:
        ModelError: If a dim has no size, or another one than its expression.
    """
    expressions = {name: variables(name, names) for name in names}
    unbound = [name for name in names if name not in bound and not expressions[name]]
    if unbound:
        raise ModelError(
            f"dims {', '.join(map(repr, unbound))} of the model's inputs have no size",
            hint=" ".join(f"--set {name}=..." for name in unbound),
        )
    for name, parts in expressions.items():
        if parts:
            size = evaluate(name, bound)
            if bound.setdefault(name, size) != size:
                given = ", ".join(f"{part}={bound[part]}" for part in parts)
                raise ModelError(
                    f"dim {name!r} is set to {bound[name]}, but it is {size} with {given}",
                    hint=f"leave out --set {name}={bound[name]}: the size follows",
                )


def _batch(found: Sequence[tuple[Value, int]], exported: int | None) -> Batch | None:
    """Return the batch of inputs, given with their batch dims."""
    if not found:
        return None
    size = found[0][0].shape[found[0][1]]
    return Batch(size, exported or size, tuple(value.name for value, _ in found), tuple(axis for _, axis in found))


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
        dim.dim_value if dim.dim_value > 0 else named(dim.dim_param, item.name, axis)
        for axis, dim in enumerate(tensor.shape.dim)
    )
