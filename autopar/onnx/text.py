"""Names and other texts of a model, which have to be UTF-8.

protobuf hands out what is not UTF-8 as `bytes`, as if nothing were wrong; here it is refused before anyone takes it
for a name.
"""

from collections.abc import Iterable, Iterator

import onnx

from autopar.errors import ModelError

_SHOWN = 40  # bytes of a text that is refused


def check_texts(model: onnx.ModelProto) -> None:
    """Check that all names of a model are text.

    Raises:
        ModelError: If one is not UTF-8.
    """
    for texts in (_of_model(model), _of_graph(model.graph), *map(_of_function, model.functions)):
        for text in texts:
            if isinstance(text, bytes):
                raise ModelError(
                    f"the model has a name that is not UTF-8: {text[:_SHOWN]!r}",
                    hint="the file is damaged: copy or export it again",
                )


def _of_model(model: onnx.ModelProto) -> Iterator[object]:
    yield from (model.producer_name, model.producer_version)
    yield from (item.domain for item in model.opset_import)
    yield from _of_entries(model.metadata_props)


def _of_function(function: onnx.FunctionProto) -> Iterator[object]:
    yield from (function.name, function.domain, function.overload)
    yield from function.input
    yield from function.output
    yield from function.attribute
    yield from (item.domain for item in function.opset_import)
    yield from _of_nodes(function.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[object]:
    yield graph.name
    for item in (*graph.input, *graph.output, *graph.value_info):
        yield item.name
        yield from _of_entries(item.metadata_props)
        yield from (dim.dim_param for dim in item.type.tensor_type.shape.dim)
    for tensor in graph.initializer:
        yield from _of_tensor(tensor)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[object]:
    for node in nodes:
        attributes = node.attribute
        names = [attribute.name for attribute in attributes]
        texts = (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output, *names)
        yield next(
            (text for text in texts if type(text) is bytes), None
        )  # one at a time would take three times as long
        for attribute in attributes:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _of_graph(attribute.g)
            elif attribute.type == onnx.AttributeProto.TENSOR:
                yield from _of_tensor(attribute.t)


def _of_tensor(tensor: onnx.TensorProto) -> Iterator[object]:
    yield tensor.name
    yield from _of_entries(tensor.metadata_props)
    yield from _of_entries(tensor.external_data)


def _of_entries(entries: Iterable[onnx.StringStringEntryProto]) -> Iterator[object]:
    for entry in entries:
        yield from (entry.key, entry.value)
