"""Random small models as hypothesis strategies: a chain of ops over float tensors, some of it repeated as layers.

A model is drawn step by step. A step reads values of its *region* (the values since the region began) and appends to
it; all that is drawn is fixed in the step, so that a region can be written again with parameters of its own, which
makes it a layer. Sizes are multiples of small numbers, so that most dims can be split on most axes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.execute import Executor
from autopar.ir.graph import Attr, Graph, Op, Role, State, Value
from autopar.ir.verify import verify

Array = NDArray[Any]
Step = Callable[["Writer", Sequence[str]], list[str]]
"""Writes ops that read values of a region, the first of which is what entered it; returns what they define."""
Draw = st.DrawFn

EXECUTOR = Executor()
OPSET = 24
LARGEST = 4096  # elements of a value at most
VOCABULARY = 24


def _ints(content: Any) -> Array:
    return np.asarray(content, np.int64)


class Writer:
    """A forward graph being written.

    Attributes:
        shapes: Shape of every value by name.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.arrays: dict[str, Array] = {}  # every value on one random input, which also tells its shape
        self.constants: dict[str, Array] = {}
        self.inputs: list[str] = []
        self.parameters: list[str] = []
        self.ops: list[Op] = []
        self._rng = np.random.default_rng(0)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.arrays[name].shape

    def input(self, shape: tuple[int, ...], *, high: int = 0) -> str:
        """Return a new input: floats, or with `high` whole numbers below it."""
        name = "tokens" if high else "x"
        self.arrays[name] = self._rng.integers(0, high, shape) if high else self._rng.normal(size=shape)
        self.inputs.append(name)
        return name

    def parameter(self, *shape: int) -> str:
        """Return a new parameter with numbers around 1, none of them near 0."""
        name = f"w{len(self.parameters)}"
        self.arrays[name] = self._rng.uniform(0.5, 1.5, shape) / max(1, shape[-1] if len(shape) == 2 else 1)
        self.parameters.append(name)
        return name

    def constant(self, content: Any) -> str:
        """Return a new constant."""
        name = f"c{len(self.constants)}"
        self.arrays[name] = self.constants[name] = np.asarray(content)
        return name

    def emit(self, kind: str, inputs: Sequence[str], num_outputs: int = 1, /, **attrs: Attr) -> list[str]:
        """Append an op and return its outputs."""
        name = f"op{len(self.ops)}"
        outputs = tuple(f"{name}.{index}" for index in range(num_outputs))
        op = Op(name, kind, tuple(inputs), outputs, tuple(sorted(attrs.items())))
        results = EXECUTOR.run(op, [self.arrays[each] if each else None for each in inputs], OPSET)
        self.arrays.update(zip(outputs, results, strict=True))
        self.ops.append(op)
        return list(outputs)

    def graph(self, output: str) -> Graph:
        """Return what was written as a verified model."""
        used = {name for op in self.ops for name in op.inputs}
        parameters = [name for name in self.parameters if name in used]
        made = [name for op in self.ops for name in op.outputs]
        kept = [*self.inputs, *parameters, *self.constants, *made]
        values = {name: Value(name, self.arrays[name].shape, str(self.arrays[name].dtype)) for name in kept}
        states = tuple(State(name, name, Role.PARAMETER, name) for name in parameters)
        graph = Graph(
            "random", OPSET, values, tuple(self.inputs), states, self.constants, tuple(self.ops), (output,)
        )  # fmt: skip
        verify(graph)
        return graph


@dataclass(frozen=True, slots=True)
class Model:
    """A drawn model.

    Attributes:
        graph: Its forward graph in float64.
        states: Start values of its parameters.
        loss: A loss that applies to it.
        classes: Number of classes if that is the cross-entropy.
    """

    graph: Graph
    states: dict[str, Array]
    loss: str
    classes: int


@st.composite
def models(draw: Draw) -> Model:
    """Draw a model: a beginning, some ops, perhaps layers of some ops, and some more."""
    writer = Writer(draw(st.sampled_from([4, 8, 12])))
    current = _start(draw, writer)
    for most, layers in ((3, 1), (4, draw(st.integers(1, 3))), (2, 1)):
        region, steps = _region(draw, writer, current, draw(st.integers(0, most)))
        for _ in range(1, layers):
            if writer.shape(region[-1]) == writer.shape(current):
                region = _again(writer, steps, region[-1])
        current = region[-1]
    shape = writer.shape(current)
    losses = ["mse", "mean"] + ["cross-entropy"] * (len(shape) > 1 and shape[-1] > 1)
    states = {name: writer.arrays[name] for name in writer.parameters}
    return Model(writer.graph(current), states, draw(st.sampled_from(losses)), shape[-1] if shape else 1)


def _start(draw: Draw, writer: Writer) -> str:
    """Draw what the model begins with: an embedding or a projection, so that there is something to train."""
    sizes = st.sampled_from([4, 6, 8, 12])
    if draw(st.booleans()):
        tokens = writer.input((writer.batch, draw(sizes)), high=VOCABULARY)
        return writer.emit("Gather", [writer.parameter(VOCABULARY, draw(sizes)), tokens])[0]
    x = writer.input((writer.batch, *draw(st.lists(sizes, min_size=1, max_size=3))))
    shape = writer.shape(x)
    if draw(st.booleans()):
        return writer.emit("MatMul", [x, writer.parameter(shape[-1], draw(sizes))])[0]
    return writer.emit("Mul", [x, writer.parameter(*shape[draw(st.integers(1, len(shape) - 1)) :])])[0]


def _region(draw: Draw, writer: Writer, start: str, count: int) -> tuple[list[str], list[Step]]:
    """Draw steps; return the values of the region and the steps."""
    region, steps = [start], []
    for _ in range(count):
        index = draw(st.sampled_from([len(region) - 1, len(region) - 1, *range(len(region))]))
        step = draw(st.sampled_from(_fitting(writer, region, index)))(draw, writer, region, index)
        made = step(writer, region)
        if any(writer.arrays[name].size > LARGEST for name in made):
            continue
        region += made
        steps.append(step)
    return region, steps


def _again(writer: Writer, steps: Sequence[Step], start: str) -> list[str]:
    """Write a region once more, with other parameters."""
    region = [start]
    for step in steps:
        region += step(writer, region)
    return region


Maker = Callable[[Draw, Writer, Sequence[str], int], Step]
"""Draws a step that reads value number `index` of a region."""


def _fitting(writer: Writer, region: Sequence[str], index: int) -> list[Maker]:
    """Return what can be done with a value; simple things first, to which examples shrink."""
    shape = writer.shape(region[index])
    rank = len(shape)
    makers: list[Maker] = [_unary, _affine, _binary, _where, _expand, _split_dim]
    if rank > 0:
        makers += [_project, _softmax, _normalization, _reduce, _transpose, _slice, _take, _concat, _cumulate, _pad]
        makers += [_merge_dims] * (rank > 1) + [_trilu] * (rank > 1) + [_gemm] * (rank == 2)
        makers += [_einsum] * (2 <= rank <= 3) + [_pairs] * (rank in (2, 3))
        makers += [_split] * any(size % 2 == 0 for size in shape)
        makers += [_squeeze]
    if rank in (3, 4) and min(shape[2:]) > 2:
        makers += [_conv, _pool] * 4  # images are few, and windows have the most to get wrong
    return makers


def _unary(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    kinds: list[tuple[str, dict[str, Attr]]] = [
        *((kind, {}) for kind in ("Relu", "Tanh", "Sigmoid", "Gelu", "Neg", "Abs", "Softplus", "Cos", "Erf")),
        ("Gelu", {"approximate": "tanh"}),
        ("LeakyRelu", {"alpha": 0.1}),
    ]
    kind, attrs = draw(st.sampled_from(kinds))
    return lambda writer, region: writer.emit(kind, [region[index]], **attrs)


def _affine(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    """Add, multiply or divide by a parameter that is broadcast along some dims."""
    kind, first = draw(st.sampled_from(["Add", "Mul", "Sub", "Div"])), draw(st.booleans())
    shape = [size if draw(st.booleans()) else 1 for size in writer.shape(region[index])]
    while shape and shape[0] == 1 and draw(st.booleans()):
        del shape[0]

    def step(writer: Writer, region: Sequence[str]) -> list[str]:
        both = [region[index], writer.parameter(*shape)]
        return writer.emit(kind, both[::-1] if first and kind != "Div" else both)

    return step


def _partner(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> int:
    """Draw a value of the region that can be broadcast to another one, or that one itself."""
    shape = writer.shape(region[index])

    def fits(other: tuple[int, ...]) -> bool:
        pairs = zip(reversed(other), reversed(shape), strict=False)
        return len(other) <= len(shape) and all(size in (1, wanted) for size, wanted in pairs)

    return draw(st.sampled_from([i for i, name in enumerate(region) if fits(writer.shape(name))]))


def _binary(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    kind = draw(st.sampled_from(["Add", "Mul", "Sub", "Max", "Min"]))
    other = _partner(draw, writer, region, index)
    return lambda writer, region: writer.emit(kind, [region[index], region[other]])


def _where(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    other = _partner(draw, writer, region, index)

    def step(writer: Writer, region: Sequence[str]) -> list[str]:
        (chosen,) = writer.emit("Greater", [region[index], writer.constant(np.float64(0.1))])
        return writer.emit("Where", [chosen, region[index], region[other]])

    return step


def _expand(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    """Repeat a value along a new first dim or its dims of size 1."""
    size = draw(st.sampled_from([2, 4, 6]))
    shape = [size if each == 1 else each for each in writer.shape(region[index])]
    if shape == list(writer.shape(region[index])):
        shape = [size, *shape]
    return lambda writer, region: writer.emit("Expand", [region[index], writer.constant(_ints(shape))])


def _split_dim(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    """Cut a dim in two (a scalar gets a dim)."""
    shape = writer.shape(region[index])
    target: list[int] = [1]
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        factor = draw(st.sampled_from([f for f in range(1, shape[dim] + 1) if shape[dim] % f == 0]))
        target = [*shape[:dim], factor, shape[dim] // factor, *shape[dim + 1 :]]
    return lambda writer, region: writer.emit("Reshape", [region[index], writer.constant(_ints(target))])


def _merge_dims(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    shape = writer.shape(region[index])
    dim = draw(st.integers(0, len(shape) - 2))
    target = [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]]
    return lambda writer, region: writer.emit("Reshape", [region[index], writer.constant(_ints(target))])


def _project(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    columns = draw(st.sampled_from([4, 6, 8, 12]))
    rows = writer.shape(region[index])[-1]
    return lambda writer, region: writer.emit("MatMul", [region[index], writer.parameter(rows, columns)])


def _gemm(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    flip_a, flip_b = draw(st.booleans()), draw(st.booleans())
    columns = draw(st.sampled_from([4, 6, 8]))
    rows = writer.shape(region[index])[0 if flip_a else 1]
    bias = draw(st.sampled_from([(columns,), (1, columns), ()]))

    def step(writer: Writer, region: Sequence[str]) -> list[str]:
        weight = writer.parameter(*((columns, rows) if flip_b else (rows, columns)))
        extra = [writer.parameter(*bias)] if bias else []
        attrs = {"transA": int(flip_a), "transB": int(flip_b), "alpha": 0.5}
        return writer.emit("Gemm", [region[index], weight, *extra], **attrs)

    return step


def _pairs(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    """Multiply a matrix, or a batch of them, with its transpose."""
    rank = len(writer.shape(region[index]))
    perm = (*range(rank - 2), rank - 1, rank - 2)

    def step(writer: Writer, region: Sequence[str]) -> list[str]:
        x = region[index]
        (flipped,) = writer.emit("Transpose", [x], perm=perm)
        (scores,) = writer.emit("MatMul", [x, flipped])
        return writer.emit("Mul", [scores, writer.constant(np.float64(1 / writer.shape(x)[-1]))])

    return step


def _einsum(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    shape = writer.shape(region[index])
    equations = {
        2: ("ab,bc->ac", "ab,bc->ca", "ab,ab->ab"),
        3: ("abc,cd->abd", "abc,bcd->abd", "abc,bd->acd", "abc,bc->ab"),
    }
    equation = draw(st.sampled_from(equations[len(shape)]))
    sizes = dict(zip("abc", shape, strict=False)) | {"c" if len(shape) == 2 else "d": draw(st.sampled_from([4, 6]))}
    weight = [sizes[letter] for letter in equation.split(",")[1].split("->")[0]]
    return lambda writer, region: writer.emit("Einsum", [region[index], writer.parameter(*weight)], equation=equation)


def _softmax(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    kind = draw(st.sampled_from(["Softmax", "LogSoftmax"]))
    axis = draw(st.integers(-1, len(writer.shape(region[index])) - 2))
    return lambda writer, region: writer.emit(kind, [region[index]], axis=axis)


def _normalization(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    kind = draw(st.sampled_from(["LayerNormalization", "RMSNormalization"]))
    shape = writer.shape(region[index])
    axis = draw(st.sampled_from([-1, -1, *range(-len(shape), 0)]))
    bias = kind == "LayerNormalization" and draw(st.booleans())

    def step(writer: Writer, region: Sequence[str]) -> list[str]:
        scales = [writer.parameter(*shape[axis:]) for _ in range(1 + bias)]
        return writer.emit(kind, [region[index], *scales], axis=axis, epsilon=1e-2)

    return step


def _reduce(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    kind = draw(st.sampled_from(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"]))
    rank = len(writer.shape(region[index]))
    axes = sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1, max_size=2)))
    keep = int(draw(st.booleans()))
    return lambda writer, region: writer.emit(kind, [region[index], writer.constant(_ints(axes))], keepdims=keep)


def _transpose(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    perm = tuple(draw(st.permutations(range(len(writer.shape(region[index]))))))
    return lambda writer, region: writer.emit("Transpose", [region[index]], perm=perm)


def _slice(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    """Take every row, or every other one, from a first to a last."""
    shape = writer.shape(region[index])
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.sampled_from([0, shape[dim] // 2, min(1, shape[dim] - 1)]))
    end = draw(st.sampled_from([shape[dim], start + max(1, (shape[dim] - start) // 2)]))
    numbers = [[start], [end], [dim], [draw(st.sampled_from([1, 1, 2]))]]
    return lambda writer, region: writer.emit(
        "Slice", [region[index], *(writer.constant(_ints(number)) for number in numbers)]
    )


def _take(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    """Take rows by number, some of them twice."""
    shape = writer.shape(region[index])
    axis = draw(st.integers(0, len(shape) - 1))
    rows = draw(st.lists(st.integers(0, shape[axis] - 1), min_size=1, max_size=4))
    rows *= draw(st.sampled_from([1, 2]))
    return lambda writer, region: writer.emit("Gather", [region[index], writer.constant(_ints(rows))], axis=axis)


def _concat(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    shape = writer.shape(region[index])
    axis = draw(st.integers(0, len(shape) - 1))

    def fits(other: tuple[int, ...]) -> bool:
        return len(other) == len(shape) and all(
            other[d] == shape[d] for d in range(len(shape)) if d != axis
        )  # fmt: skip

    others = [i for i, name in enumerate(region) if fits(writer.shape(name))]
    other = draw(st.sampled_from([-1, *others]))  # -1: a parameter

    def step(writer: Writer, region: Sequence[str]) -> list[str]:
        second = writer.parameter(*shape) if other < 0 else region[other]
        return writer.emit("Concat", [region[index], second], axis=axis)

    return step


def _split(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    """Cut in two, equally or not; both parts can be used."""
    shape = writer.shape(region[index])
    axis = draw(st.sampled_from([dim for dim, size in enumerate(shape) if size % 2 == 0]))
    first = draw(st.sampled_from([shape[axis] // 2, 1 if shape[axis] == 2 else 2]))
    sizes = [first, shape[axis] - first] if first < shape[axis] else [1, shape[axis] - 1]
    return lambda writer, region: writer.emit("Split", [region[index], writer.constant(_ints(sizes))], 2, axis=axis)


def _squeeze(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    """Drop a dim of size 1 if there is one, else add one."""
    shape = writer.shape(region[index])
    ones = [dim for dim, size in enumerate(shape) if size == 1]
    kind = "Squeeze" if ones else "Unsqueeze"
    dim = draw(st.sampled_from(ones or range(len(shape) + 1)))
    return lambda writer, region: writer.emit(kind, [region[index], writer.constant(_ints([dim]))])


def _cumulate(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    axis = draw(st.integers(0, len(writer.shape(region[index])) - 1))
    attrs: dict[str, Attr] = {"exclusive": int(draw(st.booleans())), "reverse": int(draw(st.booleans()))}
    return lambda writer, region: writer.emit("CumSum", [region[index], writer.constant(_ints(axis))], **attrs)


def _pad(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    rank = len(writer.shape(region[index]))
    dim, rows = draw(st.integers(0, rank - 1)), draw(st.sampled_from([(1, 1), (2, 0), (0, 2)]))
    pads = [0] * (2 * rank)
    pads[dim], pads[rank + dim] = rows
    return lambda writer, region: writer.emit(
        "Pad", [region[index], writer.constant(_ints(pads)), writer.constant(np.float64(0.5))]
    )


def _trilu(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    upper, offset = int(draw(st.booleans())), draw(st.sampled_from([0, 1, -1]))
    return lambda writer, region: writer.emit("Trilu", [region[index], writer.constant(_ints(offset))], upper=upper)


def _conv(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    channels, *sizes = writer.shape(region[index])[1:]
    group = draw(st.sampled_from([g for g in (1, 2, channels) if channels % g == 0]))
    filters = group * draw(st.sampled_from([1, 2, 4]))
    kernel = draw(st.sampled_from([1, 2, 3]))
    pad, stride, bias = draw(st.sampled_from([0, kernel // 2])), draw(st.sampled_from([1, 2])), draw(st.booleans())
    dims = len(sizes)

    def step(writer: Writer, region: Sequence[str]) -> list[str]:
        weight = writer.parameter(filters, channels // group, *[kernel] * dims)
        extra = [writer.parameter(filters)] if bias else []
        return writer.emit(
            "Conv", [region[index], weight, *extra],
            group=group, kernel_shape=(kernel,) * dims, pads=(pad,) * (2 * dims), strides=(stride,) * dims,
        )  # fmt: skip

    return step


def _pool(draw: Draw, writer: Writer, region: Sequence[str], index: int) -> Step:
    dims = len(writer.shape(region[index])) - 2
    kind = draw(st.sampled_from(["MaxPool", "AveragePool", "GlobalAveragePool"]))
    kernel, stride = draw(st.sampled_from([(2, 2), (3, 1), (3, 2)]))
    pad = draw(st.sampled_from([0, kernel // 2]))
    attrs: dict[str, Attr] = {"kernel_shape": (kernel,) * dims, "pads": (pad,) * 2 * dims, "strides": (stride,) * dims}
    if kind == "AveragePool":
        attrs["count_include_pad"] = int(draw(st.booleans()))
    return lambda writer, region: writer.emit(kind, [region[index]], **({} if kind.startswith("Global") else attrs))
