"""A model with some of its layers left out, as a model of its own that can be imported."""

from collections.abc import Mapping, Set
from dataclasses import replace

import onnx

from autopar.onnx.reader import Source


def abridged(source: Source, joins: Mapping[str, str], dropped: Set[str]) -> Source | None:
    """Return a model in which some values take the place of others, without what nothing needs any more.

    Data inputs stay, whether they are needed or not.

    Args:
        source: The model.
        joins: By value that is left out, the value that is read in its place.
        dropped: Outputs that are no longer asked for.

    Returns:
        The model, which keeps the hash of the whole one; None if that is not a plain list of nodes.
    """
    graph = source.model.graph
    if any(attribute.HasField("g") for node in graph.node for attribute in node.attribute):
        return None  # the body of an op may read any value
    outputs = [item for item in graph.output if item.name not in dropped]
    needed = {joins.get(item.name, item.name) for item in outputs}
    kept: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(joins.get(name, name) for name in node.input)
            kept.append(node)
    weights = {tensor.name for tensor in graph.initializer}
    model = onnx.ModelProto(ir_version=source.model.ir_version, opset_import=source.model.opset_import)
    model.producer_name, model.producer_version = source.model.producer_name, source.model.producer_version
    model.metadata_props.extend(source.model.metadata_props)
    model.graph.name = graph.name
    model.graph.node.extend(reversed(kept))
    model.graph.input.extend(item for item in graph.input if item.name in needed or item.name not in weights)
    model.graph.output.extend(outputs)
    model.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in needed)
    model.graph.value_info.extend(item for item in graph.value_info if item.name in weights)  # their metadata
    model.graph.sparse_initializer.extend(graph.sparse_initializer)
    for node in model.graph.node:
        for slot, name in enumerate(node.input):
            if name in joins:
                node.input[slot] = joins[name]
    return replace(source, model=model)
