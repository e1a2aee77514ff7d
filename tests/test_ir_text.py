"""The text form of graphs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import GraphError
from autopar.ir.graph import ITEM_BYTES, Attr, Graph, Op, Phase, Role, State, Value
from autopar.ir.text import format_graph, numpy_dtype, parse_graph, same_graph
from autopar.ir.verify import verify

NAMES = st.text(min_size=1, max_size=6) | st.sampled_from(
    ["x", "as", "of", "_", "->", "onnx::MatMul_3", 'a"b', "\u2028"]
)
SCALARS: st.SearchStrategy[int | float | str] = (
    st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=4)
)
ATTRS: st.SearchStrategy[Attr] = SCALARS | st.one_of(
    st.lists(st.integers(-9, 9), max_size=3).map(tuple),
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=3).map(tuple),
    st.lists(st.text(max_size=3), min_size=1, max_size=2).map(tuple),
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph that verifies: any names, types, constants, states, phases, blocks and attributes."""
    names = iter(draw(st.lists(NAMES, min_size=24, max_size=24, unique=True)))
    values: dict[str, Value] = {}

    def value(shape: tuple[int, ...] | None = None) -> str:
        sizes = shape if shape is not None else draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
        name = next(names)
        values[name] = Value(name, sizes, draw(st.sampled_from(sorted(ITEM_BYTES))))
        return name

    inputs = tuple(value() for _ in range(draw(st.integers(1, 2))))
    states = []
    for role in draw(st.lists(st.sampled_from([Role.PARAMETER, Role.BUFFER]), max_size=2)):
        name = value()
        states.append(State(name, name, role, name))
    constants = {}
    for _ in range(draw(st.integers(0, 3))):
        name = value(draw(st.sampled_from([None, (9, 9)])))
        seed = draw(st.integers(0, 99))
        dtype = numpy_dtype(values[name].dtype)
        raw = np.random.default_rng(seed).integers(
            0, 2 if dtype == np.bool_ else 256, values[name].size * dtype.itemsize
        )
        constants[name] = np.frombuffer(raw.astype(np.uint8).tobytes(), dtype).reshape(values[name].shape)
    ops: list[Op] = []
    for phase, block in draw(st.sampled_from([[], [("forward", 0), ("forward", 2), ("backward", 0), ("update", -1)]])):
        operands = tuple(draw(st.sampled_from(["", *values])) for _ in range(draw(st.integers(0, 2))))
        results = (value(), "") if draw(st.booleans()) else (value(),)
        attrs = tuple(sorted(draw(st.dictionaries(st.text(min_size=1, max_size=3), ATTRS, max_size=3)).items()))
        kind = draw(st.sampled_from(["MatMul", "autopar::Adam", "a b"]))
        origin = draw(st.sampled_from(["", *(op.name for op in ops)]))
        name = draw(st.sampled_from([results[0], f"op {len(ops)}"]))
        ops.append(Op(name, kind, operands, results, attrs, Phase(phase), block, origin))
    return Graph(
        name=draw(NAMES),
        opset=draw(st.integers(1, 30)),
        values=values,
        inputs=inputs,
        states=tuple(states),
        constants=constants,
        ops=tuple(ops),
        outputs=(draw(st.sampled_from(sorted(values))),),
        metadata=draw(st.dictionaries(NAMES, st.text(max_size=5), max_size=2)),
    )


@given(graph=graphs())
def test_parsing_undoes_printing(graph: Graph) -> None:
    """Print then parse is the identity, on every field of every graph that verifies."""
    verify(graph)

    parsed = parse_graph(format_graph(graph))

    assert same_graph(parsed, graph)


TINY = """\
graph tiny opset=24
metadata producer = "a \\"b\\""
input %x: float32[8,4]
state %w: float32[4,2] -> %w' parameter
state %w.m: float32[4,2] moment of w
const %two: float32[] = 2.0
const %axes: int64[2] = [0, -1]
const %on: bool[1] = [true]
%h: float32[8,2], _ = MatMul(%x, _, %w) {alpha=0.5, mode="a", perm=[1, 0]} #0
%y: float32[8,2] = autopar::Pow(%h, %two) @backward #0 of h as "y op"
%w': float32[4,2] = Add(%w, %w) @update of w
output %y
"""


def test_text_is_as_documented() -> None:
    """Golden text: one line of every kind."""
    graph = parse_graph(TINY)

    assert format_graph(graph) == TINY
    assert graph.states[0] == State("w", "w'", Role.PARAMETER, "w")
    assert graph.ops[0] == Op(
        "h", "MatMul", ("x", "", "w"), ("h", ""), (("alpha", 0.5), ("mode", "a"), ("perm", (1, 0))), block=0
    )
    assert graph.constants["axes"].tolist() == [0, -1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("input x: float32[8]", "expected '%'"),
        ("input %x: float31[8]", "unknown dtype 'float31'"),
        ("input %x: float32[8", "expected ','"),
        ("state %w: float32[8] weight", "unknown role 'weight'"),
        ("const %c: int64[2] = [1]", "1 elements for shape [2]"),
        ("const %c: int64[1] = [1.5]", "'1.5' is not a whole number"),
        ("const %c: bool[] = 1", "'1' is neither true nor false"),
        ('const %c: int64[1] = base64 "?"', "bad base64"),
        ("%y: float32[8] = Relu(%x) @sideways", "unknown phase 'sideways'"),
        ("%y: float32[8] = Relu(%x) {a=[[1]]}", "lists in lists"),
        ("%y: float32[8] = Relu(%x) {a=b}", "neither a number nor a string"),
        ("%y: float32[8] = Relu(%x) trailing", "unexpected 'trailing'"),
        ("%y: float32[8] ~ Relu(%x)", "unexpected character '~'"),
        ("%a: float32[8] = Relu(%a)", "value 'a' is defined twice"),
    ],
)
def test_parse_errors_name_the_line(line: str, message: str) -> None:
    """What is wrong, and the number of the line."""
    with pytest.raises(GraphError) as error:
        parse_graph(f"graph g opset=24\ninput %a: float32[8]\n{line}\n")

    assert str(error.value).startswith("line 3: ")
    assert message in str(error.value)


def test_empty_text_is_no_graph() -> None:
    with pytest.raises(GraphError, match="no graph"):
        parse_graph("\n// nothing\n")
