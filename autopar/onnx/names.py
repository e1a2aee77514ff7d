"""Names of a model as they are shown: control characters in them become escapes, once, where a model is read.

So names are the same in errors, reports, pages, plans, traces and generated scripts, and what is printed can be typed
in again. Models with such names are rare; all others are only looked through.
"""

from collections.abc import Iterable, Iterator

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]

from autopar.escaping import is_plain, one_line

_KEPT = frozenset({"external_data", "metadata_props", "doc_string"})
"""Fields whose texts are no names: places of data, and what nobody shows."""


def with_plain_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose names have no control characters: the model itself if that is so."""
    if all(is_plain("".join(texts)) for texts in _texts(model)):
        return model
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    _escape(plain)
    return plain


def _texts(model: onnx.ModelProto) -> Iterator[Iterable[str]]:
    """Yield the names of a model, graph by graph."""
    yield (model.producer_name, model.producer_version, model.domain)
    for function in model.functions:
        yield (function.name, function.domain, *function.input, *function.output, *function.attribute)
        yield from _of_nodes(function.node)
    yield from _of_graph(model.graph)


def _of_graph(graph: onnx.GraphProto) -> Iterator[Iterable[str]]:
    yield (graph.name,)
    ports = (*graph.input, *graph.output, *graph.value_info)
    yield (port.name for port in ports)
    yield (dim.dim_param for port in ports for dim in port.type.tensor_type.shape.dim)
    yield (tensor.name for tensor in graph.initializer)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[Iterable[str]]:
    yield (text for node in nodes for text in (node.name, node.op_type, node.domain, *node.input, *node.output))
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _of_graph(attribute.g)


def _escape(message: Message) -> None:
    """Escape the texts of a message and of all inside it."""
    for field, value in message.ListFields():
        if field.name in _KEPT:
            continue
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                _escape(inner)
        elif field.type == field.TYPE_STRING and field.is_repeated:
            value[:] = [one_line(text) for text in value]
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, one_line(value))
