"""Local functions of a model: how many nodes their calls stand for, known before anything is inlined."""

from collections.abc import Iterator, Mapping, Sequence

import onnx

from autopar.errors import ModelError
from autopar.ir.functions import DOMAIN, FUNCTIONS, function_proto

MAX_NODES = 200_000
"""Nodes of a model with its functions inlined; large language models written out layer by layer have a tenth."""

_Key = tuple[str, str, str]
"""Domain, name and overload of a function."""


def without_own(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without the local functions that are ops of the IR, so that calls of them stay nodes.

    A function of the name of an op of ours with another body stays, to be inlined like any other.
    """
    own = [function for function in model.functions if _is_own(function)]
    if not own:
        return model
    kept = [function for function in model.functions if not _is_own(function)]
    found = onnx.ModelProto()
    found.CopyFrom(model)
    del found.functions[:]
    found.functions.extend(kept)
    return found


def _is_own(function: onnx.FunctionProto) -> bool:
    kind = f"{DOMAIN}::{function.name}"
    return function.domain == DOMAIN and kind in FUNCTIONS and function == function_proto(kind)


def check_functions(model: onnx.ModelProto) -> None:
    """Check that local functions can be inlined.

    Raises:
        ModelError: If a function calls itself, at once or by way of others, or calls stand for too many nodes.
    """
    bodies = {_key(function.domain, function.name, function.overload): function.node for function in model.functions}
    if len(bodies) < len(model.functions):
        raise ModelError("two local functions of the model have the same name", hint="export the model again")
    counts: dict[_Key, int] = {}
    for key in _called_first(bodies):
        counts[key] = _expanded(bodies[key], bodies, counts)
    total = _expanded(model.graph.node, bodies, counts)
    if total > MAX_NODES:
        raise ModelError(
            f"the calls of local functions stand for {total:.4g} nodes; up to {MAX_NODES} are read",
            hint="export the model with fewer layers, or with functions that call each other less often",
        )


def _called_first(bodies: Mapping[_Key, Sequence[onnx.NodeProto]]) -> list[_Key]:
    """Return the functions, each behind those it calls."""
    if not bodies:
        return []
    import networkx as nx  # a tenth of a second that models without functions need not spend

    calls = nx.DiGraph()
    calls.add_nodes_from(bodies)
    calls.add_edges_from((key, called) for key, body in bodies.items() for called in _called(body, bodies))
    try:
        return list(reversed(list(nx.topological_sort(calls))))
    except nx.NetworkXUnfeasible:
        names = [name for (_, name, _), _ in nx.find_cycle(calls)]
        raise ModelError(
            f"local function {names[0]!r} calls itself: {' -> '.join(map(repr, [*names, names[0]][:8]))}"
            f"{' ...' if len(names) > 7 else ''}",
            hint="export the model again without recursion",
        ) from None


def _expanded(
    nodes: Sequence[onnx.NodeProto],
    bodies: Mapping[_Key, Sequence[onnx.NodeProto]],
    counts: Mapping[_Key, int],
) -> int:
    keys = [_key(node.domain, node.op_type, node.overload) for node in _nested(nodes)]
    return sum(counts[key] if key in bodies else 1 for key in keys)


def _called(nodes: Sequence[onnx.NodeProto], bodies: Mapping[_Key, Sequence[onnx.NodeProto]]) -> Iterator[_Key]:
    for node in _nested(nodes):
        key = _key(node.domain, node.op_type, node.overload)
        if key in bodies:
            yield key


def _nested(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Iterate over nodes and those of the graphs in their attributes."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nested(graph.node)


def _key(domain: str, name: str, overload: str) -> _Key:
    return "" if domain == "ai.onnx" else domain, name, overload
