"""Several ops as one ONNX model, so that a runtime compiles and runs them as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.execute.executor import split_kind
from autopar.ir.functions import DOMAIN
from autopar.ir.graph import Attr
from autopar.onnx.tensors import ELEM_TYPES
from autopar.ranks.kernels import runtime_function

Array = NDArray[Any]

_IR_VERSION = 10  # of the file format: what opset 21 came with; every runtime that knows opset 24 reads it


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that enters or leaves a model; `dtype` is a name of the IR."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Node:
    """One op of a model; "" stands for an absent input or an unwanted output."""

    kind: str
    attrs: tuple[tuple[str, Attr], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def assemble(
    nodes: Sequence[Node],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    constants: Mapping[str, Array],
    opset: int,
) -> bytes:
    """Return a serialised ONNX model; kinds of domain `autopar` come along as local functions.

    Args:
        nodes: The ops in order.
        inputs: What it is fed with.
        outputs: What it returns.
        constants: Known data by name, baked in.
        opset: Version of the default domain.
    """
    from onnx import helper, numpy_helper

    functions: dict[str, Any] = {}
    protos = []
    for index, node in enumerate(nodes):
        domain, op_type = split_kind(node.kind)
        results = list(node.outputs)
        if domain == DOMAIN:
            results += [""] * (len(_collect(node.kind, functions).output) - len(results))
        # functions and many ops have no optional outputs: what nobody asked for gets a name that nobody reads
        results = [name or f"unused.{index}.{slot}" for slot, name in enumerate(results)]
        protos.append(helper.make_node(op_type, node.inputs, results, results[0], domain=domain, **dict(node.attrs)))
    graph = helper.make_graph(
        protos,
        "segment",
        [_value_info(port) for port in inputs],
        [_value_info(port) for port in outputs],
        [numpy_helper.from_array(np.asarray(array, order="C"), name) for name, array in constants.items()],
    )
    opsets = {"": opset} | ({DOMAIN: 1} if functions else {})
    opsets |= {domain: 1 for domain, _ in map(split_kind, {node.kind for node in nodes}) if domain not in opsets}
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        functions=list(functions.values()),
        ir_version=_IR_VERSION,
    )
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def _value_info(port: Port) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(port.name, ELEM_TYPES[port.dtype], port.shape)


def _collect(kind: str, functions: dict[str, Any]) -> Any:
    """Return the function of a kind, and add it and those it calls."""
    if kind not in functions:
        proto = runtime_function(kind)
        for node in proto.node:
            if node.domain == DOMAIN:
                _collect(f"{DOMAIN}::{node.op_type}", functions)
        functions[kind] = proto
    return functions[kind]
