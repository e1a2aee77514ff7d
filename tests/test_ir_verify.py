"""The verifier: every law, broken once."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import GraphError
from autopar.ir.graph import Graph, Op, Phase, Role, State, Value
from autopar.ir.text import parse_graph
from autopar.ir.verify import verify

GRAPH = parse_graph(
    """\
graph step opset=24
input %x: float32[8,4]
state %w: float32[4,2] -> %w.new parameter
state %w.m: float32[4,2] moment of w
const %two: float32[] = 2.0
%h: float32[8,2] = MatMul(%x, %w) #0
%y: float32[8,2] = Mul(%h, %two) #1
%g: float32[4,2] = MatMul(%x, %y) @backward of h
%w.new: float32[4,2] = Add(%w, %g) @update of w
output %y
"""
)


def _value(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Graph:
    return replace(GRAPH, values={**GRAPH.values, name: Value(name, shape, dtype)})


def _op(index: int, op: Op) -> Graph:
    ops = list(GRAPH.ops)
    ops[index] = op
    return replace(GRAPH, ops=tuple(ops))


H, Y, G, W = GRAPH.ops
MOMENT = GRAPH.states[1]

BROKEN: dict[str, tuple[Graph, str]] = {
    "negative dim": (_value("x", (8, -4)), "negative dim"),
    "unknown dtype": (_value("x", (8, 4), "float31"), "unknown dtype 'float31'"),
    "misfiled value": (
        replace(GRAPH, values={**GRAPH.values, "x": Value("z", (8, 4), "float32")}),
        "value 'z' is filed under 'x'",
    ),
    "dangling value": (_value("z", (1,)), "value z: float32[1] is neither"),
    "input without type": (replace(GRAPH, inputs=("x", "z")), "'z' is an input"),
    "input twice": (replace(GRAPH, inputs=("x", "w")), "'w' is defined twice"),
    "moment of nothing": (
        replace(GRAPH, states=(GRAPH.states[0], State("w.m", "w.m", Role.MOMENT, "v"))),
        "which is no parameter",
    ),
    "parameter of another": (
        replace(GRAPH, states=(State("w", "w.new", Role.PARAMETER, "v"), MOMENT)),
        "belongs to 'v'",
    ),
    "state without result": (
        replace(GRAPH, states=(State("w", "v", Role.PARAMETER, "w"), MOMENT)),
        "leaves the step as 'v'",
    ),
    "state of another shape": (
        replace(GRAPH, states=(State("w", "y", Role.PARAMETER, "w"), MOMENT)),
        "another shape",
    ),
    "constant of another shape": (replace(GRAPH, constants={"two": np.ones(3, np.float32)}), "holds float32[3]"),
    "constant of another dtype": (replace(GRAPH, constants={"two": np.ones((), np.int64)}), "holds int64[]"),
    "output undefined": (replace(GRAPH, outputs=("z",)), "output 'z' is not defined"),
    "use before definition": (replace(GRAPH, ops=(Y, H, G, W)), "reads 'h', which is used before it is defined"),
    "use of nothing": (_op(1, replace(Y, inputs=("z", "two"))), "reads 'z', which is not defined"),
    "result without type": (_op(1, replace(Y, outputs=("y", "z"))), "defines 'z', which has no type"),
    "result twice": (_op(1, replace(Y, outputs=("y", "h"))), "defines 'h' a second time"),
    "result twice in one op": (_op(1, replace(Y, outputs=("y", "y"))), "defines 'y' a second time"),
    "op name twice": (_op(1, replace(Y, name="h")), "op name 'h' is empty or used twice"),
    "op without name": (_op(1, replace(Y, name="")), "op name '' is empty"),
    "attributes unsorted": (_op(1, replace(Y, attrs=(("b", 1), ("a", 1)))), "not sorted"),
    "phases mixed": (_op(1, replace(Y, phase=Phase.UPDATE)), "of phase backward follows one of phase update"),
    "blocks not a chain": (_op(0, replace(H, block=2)), "of block 1 follows one of block 2"),
    "block below -1": (_op(0, replace(H, block=-2)), "has block -2"),
    "origin unknown": (_op(2, replace(G, origin="z")), "belongs to 'z'"),
}


def test_a_lawful_graph_verifies() -> None:
    """The graph that is broken below has nothing wrong itself."""
    verify(GRAPH)


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_law_is_found(name: str) -> None:
    """One law broken, one error that says which."""
    graph, message = BROKEN[name]

    with pytest.raises(GraphError) as error:
        verify(graph)

    assert message in str(error.value)


def test_errors_show_the_neighbours() -> None:
    """Two ops before and after the one at fault, which is marked."""
    with pytest.raises(GraphError) as error:
        verify(_op(1, replace(Y, inputs=("z", "two"))))

    assert str(error.value) == (
        "op 'y' reads 'z', which is not defined\n"
        "      0: %h: float32[8,2] = MatMul(%x, %w) #0\n"
        "  --> 1: %y: float32[8,2] = Mul(%z, %two) #1\n"
        "      2: %g: float32[4,2] = MatMul(%x, %y) @backward of h\n"
        "      3: %w.new: float32[4,2] = Add(%w, %g) @update of w"
    )
