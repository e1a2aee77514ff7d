"""Types of op outputs, by the shape inference of the `onnx` package, asked once per distinct signature.

It is asked in a process of its own (`isolated`), because what an op of a file holds may crash it.
"""

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from autopar.errors import ModelError
from autopar.ir.graph import Attr, Value
from autopar.onnx.isolated import Isolated, RefusedError
from autopar.onnx.own import is_own, own_types
from autopar.onnx.schema import check_shape
from autopar.onnx.tensors import ELEM_TYPES, dtype_name

Type = tuple[tuple[int, ...], str]
"""Shape and dtype."""

_LIKE_FIRST = frozenset({"RotaryEmbedding", "CastLike", "GroupNormalization", "MeanVarianceNormalization"})
"""Ops whose output has the shape of the first input, where onnx's own inference may not say so."""


class Inference:
    """Infers output types and remembers them.

    Args:
        opset: Version of the default domain.
        domains: Versions of the others.
        process: Where they are inferred.
    """

    def __init__(self, opset: int, domains: dict[str, int], process: Isolated) -> None:
        self._versions = {**domains, "": opset}
        self._process = process
        self._known: dict[tuple[object, ...], tuple[Type | None, ...]] = {}

    def infer(
        self,
        name: str,
        kind: str,
        attrs: tuple[tuple[str, Attr], ...],
        inputs: Sequence[Value | None],
        data: Sequence[NDArray[np.generic] | None],
        num_outputs: int,
    ) -> tuple[Type | None, ...]:
        """Return the type of each output; None where the shape depends on data that is not known.

        Args:
            name: Name of the op, for errors.
            kind: Kind of the op.
            attrs: Its attributes.
            inputs: Types of its inputs, None for absent ones.
            data: What is known of the inputs' elements.
            num_outputs: Number of outputs asked for.

        Raises:
            ModelError: If the inputs' types do not fit the op.
        """
        key = (
            kind, attrs, num_outputs,
            tuple([None if value is None else (value.shape, value.dtype) for value in inputs]),
            tuple([None if array is None else array.tobytes() for array in data]),
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._ask(name, kind, attrs, inputs, data, num_outputs)
        return self._known[key]

    def _ask(
        self,
        name: str,
        kind: str,
        attrs: tuple[tuple[str, Attr], ...],
        inputs: Sequence[Value | None],
        data: Sequence[NDArray[np.generic] | None],
        num_outputs: int,
    ) -> tuple[Type | None, ...]:
        domain, _, op_type = kind.rpartition("::")
        if domain == "autopar":
            return own_types(kind, attrs, inputs, name) if is_own(kind) else (_product(inputs),)
        names = [f"i{index}" if value is not None else "" for index, value in enumerate(inputs)]
        outputs = [f"o{index}" for index in range(num_outputs)]
        node = helper.make_node(op_type, names, outputs, domain=domain, **dict(attrs))
        types = {
            slot: helper.make_tensor_type_proto(ELEM_TYPES[value.dtype], value.shape).SerializeToString()
            for slot, value in zip(names, inputs, strict=True)
            if value is not None
        }
        tensors = {
            slot: numpy_helper.from_array(array).SerializeToString()
            for slot, array in zip(names, data, strict=True)
            if array is not None
        }
        schema = op_type, self._versions.get(domain, 1), domain
        try:
            found = self._process.infer(
                schema, node.SerializeToString(), types, tensors, self._versions, onnx.IR_VERSION
            )
        except RefusedError as error:
            given = ", ".join("-" if value is None else f"{value.dtype}{list(value.shape)}" for value in inputs)
            raise ModelError(f"node {name!r} ({kind}) does not fit its inputs {given}: {error}") from error
        protos = {output: onnx.TypeProto.FromString(data) for output, data in found.items()}
        result = [_type(protos.get(output), f"output of node {name!r} ({kind})") for output in outputs]
        first = inputs[0] if inputs else None
        if result and result[0] is None and op_type in _LIKE_FIRST and first is not None:
            result[0] = (first.shape, first.dtype)
        return tuple(result)


def _product(inputs: Sequence[Value | None]) -> Type:
    """Return the type of a product with a packed weight, the ops of domain `autopar` that only an import makes."""
    x, weight = inputs[:2]
    assert x is not None, "a product has two operands"
    assert weight is not None, "a product has two operands"
    return (*x.shape[:-1], weight.shape[0]), x.dtype


def _type(proto: onnx.TypeProto | None, what: str) -> Type | None:
    if proto is None or proto.WhichOneof("value") is None:
        return None
    if not proto.HasField("tensor_type"):
        raise ModelError(f"{what} is a {proto.WhichOneof('value').removesuffix('_type')}, not a tensor")
    tensor = proto.tensor_type
    if not tensor.HasField("shape") or not tensor.elem_type:
        return None
    if not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return None
    shape = tuple(dim.dim_value for dim in tensor.shape.dim)
    check_shape(shape, what)
    return shape, dtype_name(tensor.elem_type, what)
