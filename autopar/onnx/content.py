"""What of a model decides how it is imported, as a hash: the file, and what is read of the files beside it."""

import hashlib
from collections.abc import Iterator

import onnx

from autopar.ir.graph import Role
from autopar.onnx.reader import Source
from autopar.onnx.roles import Roles
from autopar.onnx.tensors import has_data, read_array


def content_digest(source: Source) -> str:
    """Return the hash of a model's content, in hexadecimal.

    Two models of the same hash are imported alike. The elements of trained tensors in other files are left out: they
    are not read when a model is imported, and may be as large as a disk.

    Raises:
        ModelError: If a file beside the model holds too few elements.
    """
    digest = hashlib.sha256(source.sha256.encode())
    roles = Roles(source)
    for tensor in _initializers(source.model.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        role, there = roles.of(tensor, source), has_data(tensor, source.folder)
        digest.update(f"{tensor.name}\0{role}\0{there}\0".encode())
        if there and role is not Role.PARAMETER:
            digest.update(read_array(tensor, source.folder).tobytes())
    return digest.hexdigest()


def _initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the initializers of a graph and of the branches in it."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _initializers(attribute.g)
