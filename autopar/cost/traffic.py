"""Bytes an op moves through device memory, on local shapes.

Every kernel reads its inputs and writes its outputs once. What differs is in three tables: views move nothing,
indexing touches only the rows it selects, and a transposition of the last two dims is free because matrix products
read either order.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost.arrays import FloatArray, IntArray, num_elements
from autopar.ir.graph import Op

VIEWS = frozenset({"Constant", "Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze"})
"""Kinds that rename or describe their input and launch nothing."""

_GATHERS = ("Gather", "GatherElements", "GatherND")
INDEXED = frozenset({*_GATHERS, *(f"autopar::{kind}Part" for kind in _GATHERS), "Slice"})
"""Kinds that read from their first input only what they write to their first output."""


def _swaps_last_two(op: Op, rank: int) -> bool:
    order = op.attr("perm")
    if not isinstance(order, tuple):
        return rank == 2  # the default reverses all dims
    return order in {tuple(range(rank)), (*range(rank - 2), rank - 1, rank - 2)}


def is_view(op: Op, rank: int) -> bool:
    """Whether an op whose first input has `rank` dims moves no data and launches no kernel.

    >>> is_view(Op("t", "Transpose", ("x",), ("y",), (("perm", (0, 2, 1)),)), rank=3)
    True
    """
    return op.kind in VIEWS or (op.kind == "Transpose" and rank >= 2 and _swaps_last_two(op, rank))


def op_bytes(
    op: Op,
    inputs: Sequence[IntArray | None],
    outputs: Sequence[IntArray | None],
    element_bytes: Mapping[str, float],
) -> FloatArray:
    """Return the bytes one device reads and writes for each strategy.

    Args:
        op: The operation.
        inputs: Local shape arrays (n, rank) of its inputs; None where absent.
        outputs: Local shape arrays (n, rank) of its outputs; None where absent.
        element_bytes: Bytes per element by value name.

    Returns:
        (n,) bytes; 0 for a view.
    """
    first = next((shape for shape in inputs if shape is not None), None)
    total = np.zeros(next((len(shape) for shape in (*outputs, *inputs) if shape is not None), 0))
    if is_view(op, 0 if first is None else first.shape[1]):
        return total
    for index, (name, shape) in enumerate(zip(op.inputs, inputs, strict=True)):
        if not name or shape is None:
            continue
        if index == 0 and op.kind in INDEXED and outputs[0] is not None:
            shape = outputs[0]
        total += num_elements(shape) * element_bytes[name]
    for name, shape in zip(op.outputs, outputs, strict=True):
        if name and shape is not None:
            total += num_elements(shape) * element_bytes[name]
    return total
