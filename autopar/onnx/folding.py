"""Ops computed while a model is imported, because all they read is known: shape arithmetic above all."""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ModelError
from autopar.execute import Executor
from autopar.ir.graph import Attr
from autopar.onnx.inference import Type
from autopar.onnx.isolated import Isolated, RefusedError
from autopar.onnx.tensors import MAX_CONSTANT
from autopar.onnx.upgrade import Draft

_CHEAP = frozenset(
    {
        "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "Cos", "Div", "Equal", "Erf", "Exp",
        "Expand", "Flatten", "Floor", "Gather", "Gelu", "Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN",
        "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Range", "Reciprocal",
        "Relu", "Reshape", "Round", "Sigmoid", "Sign", "Sin", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum",
        "Tanh", "Tile", "Transpose", "Unsqueeze", "Where", "Xor",
    }
)  # fmt: skip
"""Ops whose kernels take time and memory in proportion to the elements they read and make."""


class Folding:
    """Computes ops of known inputs.

    Args:
        process: Where ops run whose cost is not known beforehand.
        opset: Version of the default domain.
    """

    def __init__(self, process: Isolated, opset: int) -> None:
        self._process = process
        self._opset = opset
        self._executor = Executor()

    def fold(
        self,
        draft: Draft,
        attrs: tuple[tuple[str, Attr], ...],
        data: Sequence[NDArray[np.generic] | None],
        types: Sequence[Type | None],
    ) -> tuple[NDArray[np.generic], ...] | None:
        """Return the outputs of an op; None if it reads what is not known, or makes too much.

        Args:
            draft: The op.
            attrs: Its attributes.
            data: What is known of its inputs.
            types: Types of its outputs; None where they depend on data.

        Raises:
            ModelError: If a run takes too much time or memory, or ends its process.
            ExecutionError: If the kernel does not take the inputs.
        """
        if not all(array is not None or not name for array, name in zip(data, draft.inputs, strict=True)):
            return None
        if any(kept is not None and prod(kept[0]) > MAX_CONSTANT for kept in types):
            return None
        if draft.kind in _CHEAP and None not in types:
            return self._executor.run_kind(draft.kind, attrs, data, len(draft.outputs), self._opset, draft.name)
        try:
            return self._process.run_kind(draft.kind, attrs, data, len(draft.outputs), self._opset, draft.name)
        except RefusedError as error:
            raise ModelError(
                f"node {draft.name!r} ({draft.kind}) reads constants only and cannot be computed: {error}"
            ) from error
