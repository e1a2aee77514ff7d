"""Losses of a microbatch: the sum over its elements times the constant `1 / (number of elements)`.

The sum and the factor are separate ops, so that shards of a batch are terms of a plain sum: the factor is the global
one in every shard. When k microbatches make a step, dividing the constant named in the graph's metadata under
`LOSS_SCALE` by k makes the sum of their gradients the mean over the whole batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from autopar.errors import JobError
from autopar.ir.graph import Graph, Value
from autopar.training.chunked_loss import CHUNKED
from autopar.training.tape import Shape, Tape, scalar_array

LOSS_SCALE = "loss_scale"
"""Metadata key: name of the constant the sum over all elements is multiplied with."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss written to a tape.

    Attributes:
        value: The scalar.
        scale: The constant factor; also the gradient of the loss with respect to the sum.
        inputs: Data it reads beside the model's output.
        backward: Writes and returns the gradient with respect to the model's output.
    """

    value: str
    scale: str
    inputs: tuple[str, ...]
    backward: Callable[[], str]


def _scaled(t: Tape, total: str, count: int, backward: Callable[[str], str], inputs: tuple[str, ...] = ()) -> Loss:
    """Finish a loss whose sum over `count` elements is `total`; `backward` takes the gradient of the sum."""
    dtype = t.dtype(total)
    scale = t.constant(t.fresh("loss.scale"), scalar_array(1.0 / count, dtype), dtype)
    value = t.define(t.fresh("loss"), (), dtype)
    t.append("Mul", [total, scale], [value], value)
    return Loss(value, scale, inputs, lambda: backward(scale))


def _data(t: Tape, name: str, shape: Shape, dtype: str) -> str:
    """Return a new input of the step, or the model's own of that name.

    Raises:
        JobError: If the model uses the name for something else.
    """
    if name not in t.values:
        return t.define(name, shape, dtype)
    if t.values[name] != Value(name, shape, dtype):
        raise JobError(
            f"the loss reads {Value(name, shape, dtype)}, but the model has a value {t.values[name]}",
            hint=f"rename {name!r} in the model",
        )
    return name


def _cross_entropy(t: Tape, y: str) -> Loss:
    """Cross-entropy of logits [..., V] against input `labels` int64 [...]: mean of log(sum(exp(y))) - y[label].

    It is computed as log(sum(exp(y - max))) + max - y[label]. The maximum and the sums over classes are outputs of ops,
    and the classes are numbered by an op, so that logits can stay split over the classes (the
    vocabulary-parallel loss of Megatron-LM).
    """
    shape, dtype = t.shape(y), t.dtype(y)
    ones = [dim for dim in range(2, len(shape)) if prod(shape[dim:]) == 1]
    logits = t.squeeze(y, ones)
    shape = t.shape(logits)
    rows = (*shape[:-1], 1)
    labels = _data(t, "labels", shape[:-1], "int64")
    classes = t.row_numbers(shape[-1])
    row_max = t.emit("ReduceMax", [logits, t.ints((len(shape) - 1,))], rows, dtype, keepdims=1)
    stats = [logits, row_max, labels, classes]
    sum_exp, picked = t.emit_all("autopar::CrossEntropyStats", stats, [rows, rows], dtype)
    total = t.emit("autopar::CrossEntropy", [row_max, sum_exp, picked], (), dtype)

    def backward(dtotal: str) -> str:
        inputs = [logits, row_max, sum_exp, labels, classes, dtotal]
        return t.unsqueeze(t.emit("autopar::CrossEntropyGrad", inputs, shape, dtype), ones)

    return _scaled(t, total, prod(shape[:-1]), backward, (labels,))


def _squared_error(t: Tape, y: str) -> Loss:
    """Mean of (y - targets)^2 over all elements, with input `targets` like y."""
    targets = _data(t, "targets", t.shape(y), t.dtype(y))
    difference = t.map("Sub", y, targets)
    total = t.sum(t.map("Mul", difference, difference), range(len(t.shape(y))))
    return _scaled(
        t, total, t.values[y].size, lambda dtotal: t.map("Mul", t.times(difference, 2.0), dtotal), (targets,)
    )


def _mean(t: Tape, y: str) -> Loss:
    """Mean of the output."""
    shape, dtype = t.shape(y), t.dtype(y)
    total = t.sum(y, range(len(shape)))
    return _scaled(t, total, t.values[y].size, lambda dtotal: t.emit("Expand", [dtotal, t.ints(shape)], shape, dtype))


LOSSES: Mapping[str, Callable[[Tape, str], Loss]] = {
    "cross-entropy": _cross_entropy,
    CHUNKED: _cross_entropy,  # `without_logits` makes of the step what it is
    "mse": _squared_error,
    "mean": _mean,
}
"""Every loss by name; a function writes it for an output of the model."""


_IMAGE_RANK = 4


def choose_loss(graph: Graph, name: str) -> tuple[str, Callable[[Tape, str], Loss]]:
    """Return the output of the model to train, and the loss to write for it.

    "auto" is the cross-entropy of the first float output with two dims or more. If that is a Softmax over its classes,
    what enters the Softmax are the logits. If it is an image as large as one that goes in, of as many channels or a
    multiple of them, as the noise (and its variances) that a denoiser finds, "auto" is the mean squared error.

    Raises:
        JobError: If there is no such loss, or no output it applies to.
    """
    if name != "auto" and name not in LOSSES:
        raise JobError(f"there is no loss {name!r}", hint=f"choose auto, {', '.join(LOSSES)}")
    kind = ("mse" if _makes_images(graph) else "cross-entropy") if name == "auto" else name
    scores = kind in ("cross-entropy", CHUNKED)
    rank = 2 if scores else 0
    outputs = [graph.values[output] for output in graph.outputs]
    for value in outputs:
        if value.is_float and len(value.shape) >= rank:
            output = _logits(graph, value) if scores else value.name
            return output, LOSSES[kind]
    raise JobError(
        f"no output of {graph.name!r} can be trained with loss {kind!r}: {', '.join(map(str, outputs)) or 'none'}",
        hint=f"it takes float numbers of {rank} or more dims; use --mode infer or another loss",
    )


def _makes_images(graph: Graph) -> bool:
    """Whether the first float output is an image as large as a float input, of a multiple of its channels."""
    floats = [value.shape for value in map(graph.values.__getitem__, graph.outputs) if value.is_float]
    data = [value.shape for value in map(graph.values.__getitem__, graph.inputs) if value.is_float]
    if not floats or len(floats[0]) < _IMAGE_RANK:
        return False
    batch, channels, *sides = floats[0]
    return any(
        shape[0] == batch and list(shape[2:]) == sides and shape[1] and channels % shape[1] == 0
        for shape in data if len(shape) >= _IMAGE_RANK
    )  # fmt: skip


def _logits(graph: Graph, output: Value) -> str:
    """Return what enters the Softmax that makes `output`, or `output` itself."""
    op = graph.producers().get(output.name)
    if op is None or op.kind != "Softmax":
        return output.name
    axis = op.attr("axis", -1)
    assert isinstance(axis, int), "axis of Softmax is an integer"
    classes = len(output.shape) - 1
    while classes > 1 and output.shape[classes] == 1:
        classes -= 1
    return op.inputs[0] if axis % len(output.shape) == classes else output.name
