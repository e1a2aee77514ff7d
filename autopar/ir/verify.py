"""The laws of the IR, checked.

A graph is in static single assignment form and in topological order; phases follow each other; every value has a
type; blocks are a chain.
"""

from collections.abc import Mapping
from itertools import pairwise

from autopar.errors import GraphError
from autopar.ir.graph import ITEM_BYTES, Graph, Op, Phase, Role, Value
from autopar.ir.text import format_op

_ORDER: Mapping[Phase, int] = {phase: index for index, phase in enumerate(Phase)}
_AROUND = 2  # ops shown before and after the one at fault


def neighbourhood(graph: Graph, index: int) -> str:
    """Return the lines of the ops around `graph.ops[index]`, which is marked by an arrow."""
    first = max(0, index - _AROUND)
    lines = []
    for position, op in enumerate(graph.ops[first : index + _AROUND + 1], first):
        lines.append(f"  {'-->' if position == index else '   '} {position}: {format_op(op, graph.values)}")
    return "\n".join(lines)


def verify(graph: Graph) -> None:
    """Check every law of the IR.

    Raises:
        GraphError: If a law is broken; the message shows the op at fault among its neighbours.
    """
    _verify_values(graph.values)
    defined = _verify_sources(graph)
    _verify_ops(graph, defined)
    for state in graph.states:
        if state.output not in defined:
            raise GraphError(f"state {state.input!r} leaves the step as {state.output!r}, which nothing defines")
        if graph.values[state.output].shape != graph.values[state.input].shape:
            raise GraphError(
                f"state {graph.values[state.input]} leaves the step with another shape: {graph.values[state.output]}"
            )
    for name in graph.outputs:
        if name not in defined:
            raise GraphError(f"output {name!r} is not defined")
    for name in graph.values:
        if name not in defined:
            raise GraphError(f"value {graph.values[name]} is neither an input nor the result of an op")


def _verify_values(values: Mapping[str, Value]) -> None:
    for name, value in values.items():
        if not name or value.name != name:
            raise GraphError(f"value {value.name!r} is filed under {name!r}")
        if any(size < 0 for size in value.shape):
            raise GraphError(f"value {value} has a negative dim")
        if value.dtype not in ITEM_BYTES:
            raise GraphError(f"value {value} has the unknown dtype {value.dtype!r}")


def _verify_sources(graph: Graph) -> set[str]:
    """Check inputs, states and constants, and return their names."""
    defined: set[str] = set()
    for source in (graph.inputs, tuple(state.input for state in graph.states), tuple(graph.constants)):
        for name in source:
            if name not in graph.values:
                raise GraphError(f"{name!r} is an input, state or constant, but no value")
            if name in defined:
                raise GraphError(f"value {name!r} is defined twice among inputs, states and constants")
            defined.add(name)
    owners = {state.input: state.role for state in graph.states}
    for state in graph.states:
        if state.role in (Role.GRADIENT, Role.MOMENT) and owners.get(state.owner) is not Role.PARAMETER:
            raise GraphError(f"{state.role} {state.input!r} belongs to {state.owner!r}, which is no parameter")
        if state.role is Role.PARAMETER and state.owner != state.input:
            raise GraphError(f"parameter {state.input!r} belongs to {state.owner!r}", hint="a parameter owns itself")
    for name, array in graph.constants.items():
        value = graph.values[name]
        if array.shape != value.shape or str(array.dtype) != value.dtype:
            raise GraphError(f"constant {value} holds {array.dtype}{list(array.shape)}")
    return defined


def _verify_ops(graph: Graph, defined: set[str]) -> None:
    """Check the ops in order, adding their results to `defined`."""
    names: set[str] = set()
    owners = {state.input for state in graph.states}
    last: Op | None = None
    for index, op in enumerate(graph.ops):
        problem = _problem(op, last, graph.values, defined, names)
        if not problem and op.origin and op.origin not in names and op.origin not in owners:
            problem = f"op {op.name!r} belongs to {op.origin!r}, which is neither an op before it nor a state"
        if problem:
            raise GraphError(f"{problem}\n{neighbourhood(graph, index)}")
        names.add(op.name)
        defined.update(name for name in op.outputs if name)
        last = op


def _problem(op: Op, last: Op | None, values: Mapping[str, Value], defined: set[str], names: set[str]) -> str:
    """Return what is wrong with an op that follows `last`; "" if nothing is."""
    if not op.name or op.name in names:
        return f"op name {op.name!r} is empty or used twice"
    for name in op.inputs:
        if name and name not in defined:
            state = "used before it is defined" if name in values else "not defined"
            return f"op {op.name!r} reads {name!r}, which is {state}"
    results = [name for name in op.outputs if name]
    for name in results:
        if name not in values:
            return f"op {op.name!r} defines {name!r}, which has no type"
        if name in defined or results.count(name) > 1:
            return f"op {op.name!r} defines {name!r} a second time"
    keys = [key for key, _ in op.attrs]
    if any(one >= other for one, other in pairwise(keys)):
        return f"attributes of op {op.name!r} are not sorted by name, each once"
    if op.block < -1:
        return f"op {op.name!r} has block {op.block}"
    if last is not None:
        if _ORDER[op.phase] < _ORDER[last.phase]:
            return f"op {op.name!r} of phase {op.phase} follows one of phase {last.phase}"
        if op.phase is last.phase is Phase.FORWARD and op.block < last.block:
            return f"op {op.name!r} of block {op.block} follows one of block {last.block}"
    return ""
