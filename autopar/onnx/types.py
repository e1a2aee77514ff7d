"""The types a graph declares, checked against its ops: for graphs that are written by hand.

A graph that is imported has inferred types. What works on graphs (cost formulas, discovery, the simulator) takes for
granted that an op's inputs and outputs have the number of dims and the sizes its definition asks for.
"""

from collections.abc import Sequence

import onnx
from onnx import helper, numpy_helper

from autopar.errors import GraphError, ModelError
from autopar.execute.executor import split_kind
from autopar.ir.functions import DOMAIN, FUNCTIONS, function_proto
from autopar.ir.graph import Graph, Op
from autopar.onnx.isolated import RefusedError, isolated
from autopar.onnx.schema import check_node, check_shape, is_known
from autopar.onnx.tensors import ELEM_TYPES

_IR_VERSION = 10
"""Of the file format: the first with the functions and the opset of `autopar.ir.functions`."""
_HINT = "print the program of a plan with `autopar explain PLAN --program` and edit that"


def check_types(graph: Graph, ops: Sequence[Op]) -> None:
    """Check that ops are well formed, and that the types of their values are those that ONNX infers.

    Args:
        graph: The graph, whose laws (`autopar.ir.verify`) hold.
        ops: Its ops, or of ops that are alike one.

    Raises:
        GraphError: If they are not; the message is ONNX's.
        ExecutionError: If no process can be started to ask ONNX in.
    """
    model = _model(graph, ops)
    try:
        with isolated() as process:
            process.check(model.SerializeToString())
    except RefusedError as error:
        raise GraphError(f"the types of graph {graph.name!r} do not fit its ops: {error}", hint=_HINT) from None


def _model(graph: Graph, ops: Sequence[Op]) -> onnx.ModelProto:
    """Return ops as a model: what none of them makes is an input, what each makes has the type the graph declares."""
    values = graph.values
    made = {name for op in ops for name in op.outputs if name}
    read = dict.fromkeys(name for op in ops for name in op.inputs if name and name not in made)
    functions: dict[str, onnx.FunctionProto] = {}
    try:
        for name in (*read, *made):
            check_shape(values[name].shape, f"value {name!r}")
        nodes = [_node(op, index, graph.opset, functions) for index, op in enumerate(ops)]
    except ModelError as error:
        raise GraphError(error.args[0], hint=_HINT) from None
    inputs, outputs = (
        [helper.make_tensor_value_info(name, ELEM_TYPES[values[name].dtype], values[name].shape) for name in names]
        for names in ([name for name in read if name not in graph.constants], sorted(made))
    )
    constants = [
        numpy_helper.from_array(graph.constants[name].copy(order="C"), name) for name in read if name in graph.constants
    ]
    opsets = [helper.make_opsetid("", graph.opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(
        helper.make_graph(nodes, "graph", inputs, outputs, constants),
        opset_imports=opsets,
        functions=list(functions.values()),
        ir_version=_IR_VERSION,
    )


def _node(op: Op, index: int, opset: int, functions: dict[str, onnx.FunctionProto]) -> onnx.NodeProto:
    """Return an op as a node that is well formed, and note the functions it calls."""
    domain, op_type = split_kind(op.kind)
    what = f"op {op.name!r} ({op.kind})"
    results = [name or f"unused.{index}.{slot}" for slot, name in enumerate(op.outputs)]
    node = helper.make_node(op_type, op.inputs, results, op.name, domain=domain, **dict(op.attrs))
    if domain == DOMAIN:
        if op.kind not in FUNCTIONS:
            raise GraphError(f"{what} is none of the functions of domain {DOMAIN!r}", hint=_HINT)
        _call(node, op, functions, what)
    elif domain or not is_known(op_type, domain, opset):
        raise GraphError(f"{what} is unknown at opset {opset}", hint=_HINT)
    else:
        check_node(node, domain, opset, what)
    return node


def _call(node: onnx.NodeProto, op: Op, functions: dict[str, onnx.FunctionProto], what: str) -> None:
    """Check a call of a function, and note the function and those it calls."""
    proto = _collect(op.kind, functions)
    for given, known, kind in ((op.inputs, proto.input, "inputs"), (op.outputs, proto.output, "outputs")):
        if len(given) > len(known):
            raise GraphError(f"{what} has {len(given)} {kind}, not at most {len(known)}", hint=_HINT)
    missing = sorted(set(proto.attribute) - {name for name, _ in op.attrs})
    if missing:
        raise GraphError(f"{what} lacks attribute {missing[0]!r}", hint=_HINT)
    node.output.extend(f"{node.output[0]}.unused.{slot}" for slot in range(len(op.outputs), len(proto.output)))


def _collect(kind: str, functions: dict[str, onnx.FunctionProto]) -> onnx.FunctionProto:
    """Return the function of a kind, and note it and those it calls."""
    if kind not in functions:
        functions[kind] = function_proto(kind)
        for node in functions[kind].node:
            if node.domain == DOMAIN:
                _collect(f"{DOMAIN}::{node.op_type}", functions)
    return functions[kind]
