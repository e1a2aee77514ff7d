"""Types, tensors and attributes of ONNX as records of the IR."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, numpy_helper

from autopar.errors import ModelError
from autopar.ir.graph import Attr
from autopar.onnx.external import has_file, is_external, map_elements
from autopar.onnx.schema import check_shape

DTYPES: Mapping[int, str] = {
    TensorProto.BOOL: "bool", TensorProto.INT8: "int8", TensorProto.UINT8: "uint8", TensorProto.INT16: "int16",
    TensorProto.UINT16: "uint16", TensorProto.INT32: "int32", TensorProto.UINT32: "uint32", TensorProto.INT64: "int64",
    TensorProto.UINT64: "uint64", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
    TensorProto.FLOAT: "float32", TensorProto.DOUBLE: "float64",
}  # fmt: skip
"""Names of the element types a graph can hold."""

ELEM_TYPES: Mapping[str, int] = {name: number for number, name in DTYPES.items()}
"""The inverse of `DTYPES`."""

MAX_CONSTANT = 4096
"""Tensors of known data up to so many elements are constants of the graph; larger ones are states without data."""


def dtype_name(elem_type: int, what: str) -> str:
    """Return the name of an element type.

    Raises:
        ModelError: If graphs cannot hold it (strings, complex numbers, 4- and 8-bit floats).
    """
    if elem_type not in DTYPES:
        known = TensorProto.DataType.Name(elem_type) if elem_type in TensorProto.DataType.values() else elem_type
        raise ModelError(
            f"{what} has element type {known}, which is not supported", hint="export in float32 or bfloat16"
        )
    return DTYPES[elem_type]


def has_data(tensor: TensorProto, folder: Path | None) -> bool:
    """Whether the elements are in the file, or in an external file that is there."""
    return not is_external(tensor) or has_file(tensor, folder)


def tensor_type(tensor: TensorProto, what: str) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of a tensor, whose elements are not looked at.

    Raises:
        ModelError: If graphs cannot hold it.
    """
    dtype, shape = dtype_name(tensor.data_type, what), tuple(tensor.dims)
    check_shape(shape, what)
    return shape, dtype


def read_array(tensor: TensorProto, folder: Path | None) -> NDArray[np.generic]:
    """Return the elements of a tensor; those in another file are read when they are looked at.

    Args:
        tensor: The tensor.
        folder: Folder of the model, where other files lie; None if unknown.

    Raises:
        ModelError: If graphs cannot hold it, its file may not be read, or the elements do not fill its shape.
    """
    shape, _ = tensor_type(tensor, f"tensor {tensor.name!r}")
    if is_external(tensor):
        return map_elements(tensor, folder)
    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelError(f"tensor {tensor.name!r} has not the {prod(shape)} elements of its shape: {error}") from error
    return np.asarray(array)


def read_attrs(attributes: Iterable[AttributeProto], what: str) -> dict[str, Attr]:
    """Return attributes by name, but for empty lists: of a node whose form was checked, they mean nothing.

    Raises:
        ModelError: If one is a tensor, graph or type.
    """
    found: dict[str, Attr] = {}
    for attribute in attributes:
        match attribute.type:
            case AttributeProto.INT:
                found[attribute.name] = int(attribute.i)
            case AttributeProto.FLOAT:
                found[attribute.name] = float(attribute.f)
            case AttributeProto.STRING:
                found[attribute.name] = attribute.s.decode()
            case AttributeProto.INTS:
                found[attribute.name] = tuple(attribute.ints)
            case AttributeProto.FLOATS:
                found[attribute.name] = tuple(attribute.floats)
            case AttributeProto.STRINGS:
                found[attribute.name] = tuple(item.decode() for item in attribute.strings)
            case _:
                kind = AttributeProto.AttributeType.Name(attribute.type)
                raise ModelError(f"{what} has attribute {attribute.name!r} of type {kind}, which is not supported")
    return {name: attr for name, attr in found.items() if attr != ()}


def constant_tensor(node: onnx.NodeProto, what: str) -> TensorProto:
    """Return what a `Constant` node holds.

    Raises:
        ModelError: If it holds strings or a sparse tensor, or nothing.
    """
    for attribute in node.attribute:
        match attribute.name:
            case "value":
                return attribute.t
            case "value_float":
                return numpy_helper.from_array(np.array(attribute.f, np.float32))
            case "value_floats":
                return numpy_helper.from_array(np.array(attribute.floats, np.float32))
            case "value_int":
                return numpy_helper.from_array(np.array(attribute.i, np.int64))
            case "value_ints":
                return numpy_helper.from_array(np.array(attribute.ints, np.int64))
    raise ModelError(f"{what} holds neither numbers nor a dense tensor")
