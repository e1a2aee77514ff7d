"""What of a model decides how it is imported, as a hash: the file, and what is read of the files beside it."""

import hashlib
from collections.abc import Iterator
from math import prod

import numpy as np
import onnx

from autopar.ir.graph import Role
from autopar.onnx.border import border
from autopar.onnx.external import is_external
from autopar.onnx.reader import Source
from autopar.onnx.roles import Roles
from autopar.onnx.tensors import has_data, read_array, tensor_type


@border
def content_digest(source: Source) -> str:
    """Return the hash of a model's content, in hexadecimal.

    Two models of the same hash are imported alike. The elements of trained tensors in other files are left out: they
    are not read when a model is imported, and may be as large as a disk.

    Raises:
        ModelError: If a file beside the model holds too few elements.
    """
    digest = hashlib.sha256(source.sha256.encode())
    roles = Roles(source)
    for name, tensor, is_initializer in _tensors(source.model.graph):
        if not is_external(tensor):
            continue
        shape, dtype = tensor_type(tensor, f"tensor {name!r}")
        there = has_data(tensor, source.folder)
        role = roles.of(tensor, source) if is_initializer else roles.of_constant(name, prod(shape), "float" in dtype)
        digest.update(f"{name}\0{role}\0{there}\0".encode())
        if there and role is not Role.PARAMETER:
            digest.update(np.ascontiguousarray(read_array(tensor, source.folder)).view(np.uint8).data)
    return digest.hexdigest()


def _tensors(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto, bool]]:
    """Yield the initializers and constants of a graph and of the branches in it.

    Yields:
        Name, tensor, and whether it is an initializer.
    """
    for tensor in graph.initializer:
        yield tensor.name, tensor, True
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _tensors(attribute.g)
            if node.op_type == "Constant" and attribute.name == "value" and node.output:
                yield node.output[0], attribute.t, False
