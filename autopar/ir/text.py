r"""The text form of a graph: one line per op, exact in both directions (`parse_graph(format_graph(g))` equals `g`).

    graph tiny opset=24
    input %x: float32[8,4]
    state %w: float32[4,2] parameter
    const %two: float32[] = 2.0
    %h: float32[8,2] = MatMul(%x, %w) #0
    %y: float32[8,2] = Pow(%h, %two) #0 as square
    output %y

An op line is `results = kind(operands) {attributes} @phase #block of origin as name`; what equals the default is left
out: the phase `forward`, block -1, no origin, a name equal to that of the first result. `_` is an absent operand or
result. Names with other characters than letters, digits and `_.-/+'$` are written as JSON strings: `%"a b"`.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.errors import GraphError
from autopar.ir.graph import ITEM_BYTES, Attr, Graph, Linear, Op, Phase, Role, State, Value, parse_linear

_BARE = re.compile(r"[\w.\-/+'$]+(?:::[\w.\-/+'$]+)*", re.ASCII)
_MAX_INLINE = 64  # elements of a constant written out one by one
_MAX_WHOLE = 2**63
_SHOWN = 200
"""Characters of a line that an error shows."""
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<arrow>->)|(?P<word>[\w.\-/+'$]+(?:::[\w.\-/+'$]+)*)|(?P<mark>[%:\[\](){},=@\#]))""",
    re.ASCII,
)


def _word(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(name: str, values: Mapping[str, Value]) -> str:
    value = values.get(name)
    if value is None:
        return f"%{_word(name)}: ?"
    return f"%{_word(name)}: {value.dtype}[{','.join(map(str, value.shape))}]"


def _attr(value: Attr) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_attr, value))}]"
    return repr(value)


def format_op(op: Op, values: Mapping[str, Value]) -> str:
    """Return the line of an op; results missing from `values` have type `?`.

    >>> format_op(Op("y", "Relu", ("x",), ("y",), block=3), {"y": Value("y", (8, 4), "float32")})
    '%y: float32[8,4] = Relu(%x) #3'
    """
    results = ", ".join(_value(name, values) if name else "_" for name in op.outputs)
    operands = ", ".join(f"%{_word(name)}" if name else "_" for name in op.inputs)
    parts = [f"{results or '()'} = {_word(op.kind)}({operands})"]
    if op.attrs:
        parts.append("{" + ", ".join(f"{_word(key)}={_attr(value)}" for key, value in op.attrs) + "}")
    if op.phase is not Phase.FORWARD:
        parts.append(f"@{op.phase}")
    if op.block != -1:
        parts.append(f"#{op.block}")
    if op.origin:
        parts.append(f"of {_word(op.origin)}")
    if op.linear is not None:
        parts.append(f"linear {_word(str(op.linear))}")
    if not op.outputs or op.name != op.outputs[0]:
        parts.append(f"as {_word(op.name)}")
    return " ".join(parts)


def _reads_back(texts: list[str], array: NDArray[np.generic]) -> bool:
    """Whether the numbers, written so, give the same bits (not so for NaNs with a payload)."""
    number = float if "float" in str(array.dtype) else int
    return np.array([number(text) for text in texts], array.dtype).tobytes() == array.tobytes()


def _format_constant(array: NDArray[np.generic]) -> str:
    """Return the data of a constant: a scalar, a list in row-major order, or base64 of little-endian bytes."""
    if array.size <= _MAX_INLINE:
        texts = [str(item).lower() for item in array.ravel()]
        if array.dtype == np.bool_ or _reads_back(texts, array):
            return texts[0] if array.ndim == 0 else f"[{', '.join(texts)}]"
    itemsize = array.dtype.itemsize
    bits = np.frombuffer(array.tobytes(), np.dtype(f"u{itemsize}"))
    return "base64 " + json.dumps(base64.b64encode(bits.astype(f"<u{itemsize}").tobytes()).decode())


def _format_state(state: State, values: Mapping[str, Value]) -> str:
    parts = [f"state {_value(state.input, values)}"]
    if state.output != state.input:
        parts.append(f"-> %{_word(state.output)}")
    parts.append(str(state.role))
    if state.owner != state.input:
        parts.append(f"of {_word(state.owner)}")
    return " ".join(parts)


def format_graph(graph: Graph) -> str:
    """Return a graph as text that `parse_graph` reads back."""
    values = graph.values
    lines = [f"graph {_word(graph.name)} opset={graph.opset}"]
    lines += [f"metadata {_word(key)} = {json.dumps(text)}" for key, text in graph.metadata.items()]
    lines += [f"input {_value(name, values)}" for name in graph.inputs]
    lines += [_format_state(state, values) for state in graph.states]
    lines += [f"const {_value(name, values)} = {_format_constant(array)}" for name, array in graph.constants.items()]
    defined = {*graph.inputs, *(state.input for state in graph.states), *graph.constants}
    defined.update(name for op in graph.ops for name in op.outputs)
    lines += [f"value {_value(name, values)}" for name in values if name not in defined]
    lines += [format_op(op, values) for op in graph.ops]
    lines += [f"output %{_word(name)}" for name in graph.outputs]
    return "\n".join(lines) + "\n"


class _Line:
    """A cursor over the tokens of one line."""

    def __init__(self, text: str, number: int) -> None:
        self.number = number
        self.text = text
        self._tokens: list[tuple[str, str]] = []
        self._next = 0
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.error(f"unexpected character {text[position:].lstrip()[0]!r}")
            assert match.lastgroup is not None, "every alternative of the token pattern is named"
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()

    def error(self, message: str) -> GraphError:
        shown = self.text.strip()
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        return GraphError(
            f"line {self.number}: {message}\n  {self.number} | {shown}",
            hint="docstring of autopar.ir.text has an example of every kind of line",
        )

    def peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def take(self, mark: str) -> bool:
        """Consume `mark` if it is next."""
        if self._next < len(self._tokens) and self._tokens[self._next] in (
            ("mark", mark),
            ("word", mark),
            ("arrow", mark),
        ):
            self._next += 1
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise self.error(f"expected {mark!r}, found {self.peek() or 'the end of the line'!r}")

    def word(self) -> str:
        if self._next == len(self._tokens) or self._tokens[self._next][0] in ("mark", "arrow"):
            raise self.error(f"expected a name, found {self.peek() or 'the end of the line'!r}")
        group, text = self._tokens[self._next]
        self._next += 1
        return self._loads(text) if group == "string" else text

    def _loads(self, text: str) -> str:
        try:
            return str(json.loads(text, strict=False))
        except json.JSONDecodeError as error:
            raise self.error(f"bad string {text[:_SHOWN]}: {error.msg}") from error

    def name(self) -> str:
        self.expect("%")
        return self.word()

    def operand(self) -> str:
        return "" if self.take("_") else self.name()

    def integer(self) -> int:
        word = self.word()
        try:
            number = int(word)
        except ValueError:
            raise self.error(f"{word[:_SHOWN]!r} is not a whole number") from None
        return self._checked(number)

    def _checked(self, number: int) -> int:
        if not -_MAX_WHOLE <= number < 2 * _MAX_WHOLE:  # unsigned ones have 64 bits
            raise self.error(f"about 2^{abs(number).bit_length() - 1} is a number of more than 64 bits")
        return number

    def attr(self) -> Attr:
        if not self.take("["):
            return self.scalar()
        items: list[int | float | str] = []
        while not self.take("]"):
            if items:
                self.expect(",")
            items.append(self.scalar())
        if len({type(item) for item in items}) > 1:
            raise self.error("numbers of two kinds, or numbers and texts, in one list")
        return tuple(items)  # type: ignore[return-value]

    def scalar(self) -> int | float | str:
        if self.peek() == "[":
            raise self.error("lists in lists are no attribute")
        is_text = self._next < len(self._tokens) and self._tokens[self._next][0] == "string"
        word = self.word()
        if is_text:
            return word
        for kind in (int, float):
            try:
                number = kind(word)
            except ValueError:
                continue
            return self._checked(number) if isinstance(number, int) else number
        raise self.error(f"{word[:_SHOWN]!r} is neither a number nor a string in quotes")

    def base64(self) -> bytes:
        try:
            return base64.b64decode(self.word(), validate=True)
        except ValueError as error:
            raise self.error(f"bad base64: {error}") from error

    def end(self) -> None:
        if self._next < len(self._tokens):
            raise self.error(f"unexpected {self.peek()!r}")


@dataclass(slots=True)
class _Draft:
    """A graph being read."""

    name: str
    opset: int
    values: dict[str, Value] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    constants: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    def typed(self, line: _Line) -> str:
        """Read `%name: dtype[dims]` and note the value."""
        name = line.name()
        line.expect(":")
        dtype = line.word()
        if dtype not in ITEM_BYTES:
            raise line.error(f"unknown dtype {dtype!r}")
        line.expect("[")
        shape: list[int] = []
        while not line.take("]"):
            if shape:
                line.expect(",")
            shape.append(line.integer())
            if not 0 <= shape[-1] < _MAX_WHOLE:
                raise line.error(f"a dim of {shape[-1]} elements")
        if name in self.values:
            raise line.error(f"value {name!r} is defined twice")
        self.values[name] = Value(name, tuple(shape), dtype)
        return name

    def state(self, line: _Line) -> None:
        name = self.typed(line)
        output = line.name() if line.take("->") else name
        role = line.word()
        if role not in set(Role):
            raise line.error(f"unknown role {role!r}")
        owner = line.word() if line.take("of") else name
        self.states.append(State(name, output, Role(role), owner))

    def constant(self, line: _Line) -> None:
        name = self.typed(line)
        line.expect("=")
        value = self.values[name]
        dtype = numpy_dtype(value.dtype)
        if line.take("base64"):
            data = line.base64()
            if len(data) % dtype.itemsize:
                raise line.error(f"{len(data)} bytes for elements of {dtype.itemsize}")
            array = np.frombuffer(data, f"<u{dtype.itemsize}").astype(f"u{dtype.itemsize}").view(dtype)
        else:
            numbers = [_number(line, value.dtype) for _ in _items(line, value.shape)]
            try:
                with np.errstate(over="ignore"):  # a float that is too large is infinite
                    array = np.array(numbers, dtype)
            except OverflowError:
                raise line.error(f"a number is out of the range of {value.dtype}") from None
        if array.size != value.size:
            raise line.error(f"{array.size} elements for shape {list(value.shape)}")
        self.constants[name] = array.reshape(value.shape)

    def op(self, line: _Line) -> None:
        outputs: list[str] = []
        if line.take("("):
            line.expect(")")
        else:
            outputs.append("" if line.take("_") else self.typed(line))
            while line.take(","):
                outputs.append("" if line.take("_") else self.typed(line))
        line.expect("=")
        kind = line.word()
        line.expect("(")
        inputs: list[str] = []
        while not line.take(")"):
            if inputs:
                line.expect(",")
            inputs.append(line.operand())
        attrs: list[tuple[str, Attr]] = []
        if line.take("{"):
            while not line.take("}"):
                if attrs:
                    line.expect(",")
                key = line.word()
                line.expect("=")
                attrs.append((key, line.attr()))
        phase = line.word() if line.take("@") else Phase.FORWARD
        if phase not in set(Phase):
            raise line.error(f"unknown phase {phase!r}")
        block = line.integer() if line.take("#") else -1
        origin = line.word() if line.take("of") else ""
        linear = self.linear(line) if line.take("linear") else None
        name = line.word() if line.take("as") else outputs[0] if outputs else ""
        own = name, kind, tuple(inputs), tuple(outputs), tuple(attrs), Phase(phase), block, origin, linear
        self.ops.append(Op(*own))

    @staticmethod
    def linear(line: _Line) -> Linear:
        text = line.word()
        try:
            return parse_linear(text)
        except ValueError:
            raise line.error(f"{text!r} is no product of a linear layer, such as forward/own") from None


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype called `name`, `bfloat16` (of package ml_dtypes) included."""
    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)


def _items(line: _Line, shape: tuple[int, ...]) -> Iterable[int]:
    """Step over the brackets and commas of a list; each step stands before one element."""
    if not shape:
        yield 0
        return
    line.expect("[")
    index = 0
    while not line.take("]"):
        if index:
            line.expect(",")
        yield index
        index += 1


def _number(line: _Line, dtype: str) -> int | float | bool:
    if dtype == "bool":
        word = line.word()
        if word not in ("true", "false"):
            raise line.error(f"{word!r} is neither true nor false")
        return word == "true"
    if "float" not in dtype:
        return line.integer()
    number = line.attr()
    if not isinstance(number, int | float):
        raise line.error(f"{number!r} is not a number")
    return number


def parse_graph(text: str, first_line: int = 1) -> Graph:
    """Return the graph that prints as `text`.

    Blank lines and lines that start with `//` are skipped.

    Args:
        text: The text.
        first_line: Number of its first line in the file it is from, for errors.

    Raises:
        GraphError: If the text is no graph; the message gives line number and line. Laws of the IR are checked by
            `verify`.
    """
    draft: _Draft | None = None
    for number, content in enumerate(text.split("\n"), first_line):
        if not content.strip() or content.lstrip().startswith("//"):
            continue
        line = _Line(content, number)
        if draft is None:
            line.expect("graph")
            name = line.word()
            line.expect("opset")
            line.expect("=")
            draft = _Draft(name, line.integer())
        elif line.take("metadata"):
            key = line.word()
            line.expect("=")
            draft.metadata[key] = line.word()
        elif line.take("input"):
            draft.inputs.append(draft.typed(line))
        elif line.take("state"):
            draft.state(line)
        elif line.take("const"):
            draft.constant(line)
        elif line.take("value"):
            draft.typed(line)
        elif line.take("output"):
            draft.outputs.append(line.name())
        else:
            draft.op(line)
        line.end()
    if draft is None:
        raise GraphError("the text holds no graph", hint="its first line is `graph NAME opset=24`")
    return Graph(
        name=draft.name,
        opset=draft.opset,
        values=draft.values,
        inputs=tuple(draft.inputs),
        states=tuple(draft.states),
        constants=draft.constants,
        ops=tuple(draft.ops),
        outputs=tuple(draft.outputs),
        metadata=draft.metadata,
    )


def same_graph(one: Graph, other: Graph) -> bool:
    """Whether two graphs are equal in every field; constants are compared bit by bit, values in any order."""
    return (
        (one.name, one.opset, one.inputs, one.states, one.ops, one.outputs)
        == (other.name, other.opset, other.inputs, other.states, other.ops, other.outputs)
        and dict(one.values) == dict(other.values)
        and dict(one.metadata) == dict(other.metadata)
        and {name: _bits(array) for name, array in one.constants.items()}
        == {name: _bits(array) for name, array in other.constants.items()}
    )


def _bits(array: NDArray[np.generic]) -> tuple[str, tuple[int, ...], bytes]:
    return str(array.dtype), array.shape, array.tobytes()
