"""Gradients of convolution and pooling.

Dims: N batch, C channels in, M channels out, then spatial dims. dx of a convolution is a transposed convolution with
the same weight; dw is the convolution of x with dy, with stride and dilation exchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from autopar.ir.graph import Attr, Op
from autopar.training.rules.base import Grads, Rule, grad_of, int_attr, ints_attr
from autopar.training.tape import Shape, Tape, unsupported


@dataclass(frozen=True, slots=True)
class Window:
    """How a window moves over the spatial dims; one number per dim, `pads` all beginnings, then all ends."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]

    @property
    def spans(self) -> tuple[int, ...]:
        """Input elements from the first to the last tap."""
        return tuple((size - 1) * step + 1 for size, step in zip(self.kernel, self.dilations, strict=True))

    def widened(self) -> "Window":
        """Return the window of the same data with a spatial dim of size 1 put in front."""
        ends = len(self.pads) // 2
        pads = (0, *self.pads[:ends], 0, *self.pads[ends:])
        return Window((1, *self.kernel), (1, *self.strides), (1, *self.dilations), pads)


def window_of(op: Op, kernel: Sequence[int], space: Shape, space_y: Shape) -> Window:
    """Return the window of a convolution or pooling op with its padding worked out (ONNX `auto_pad`)."""
    rank = len(space)
    strides = ints_attr(op, "strides", (1,) * rank)
    dilations = ints_attr(op, "dilations", (1,) * rank)
    pads = ints_attr(op, "pads", (0,) * (2 * rank))
    mode = op.attr("auto_pad", "NOTSET")
    window = Window(tuple(kernel), strides, dilations, pads)
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max(0, (size_y - 1) * stride + span - size)
            for size, size_y, stride, span in zip(space, space_y, strides, window.spans, strict=True)
        ]
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        begins, ends = (small, large) if mode == "SAME_UPPER" else (large, small)
        return Window(window.kernel, strides, dilations, (*begins, *ends))
    return Window(window.kernel, strides, dilations, (0,) * (2 * rank)) if mode == "VALID" else window


def _conv(t: Tape, op: Op, grads: Grads) -> Grads:
    dy, (x, w) = grad_of(grads), op.inputs[:2]
    space, space_y = t.shape(x)[2:], t.shape(dy)[2:]
    rank = len(space)
    window = window_of(op, t.shape(w)[2:], space, space_y)
    group = int_attr(op, "group", 1)
    dx = dw = db = None
    if t.needs(op, 0):
        # Rows at the end of x that no window reaches are appended by output_padding.
        rest = tuple(
            size + begin + end - (size_y - 1) * stride - span
            for size, size_y, begin, end, stride, span in zip(
                space, space_y, window.pads[:rank], window.pads[rank:], window.strides, window.spans, strict=True
            )
        )
        dx = t.emit(
            "ConvTranspose",
            [dy, w],
            t.shape(x),
            t.dtype(x),
            dilations=window.dilations,
            group=group,
            kernel_shape=window.kernel,
            output_padding=rest,
            pads=window.pads,
            strides=window.strides,
        )
    if t.needs(op, 1):
        dw = t.emit(
            "autopar::ConvWeightGrad",
            [x, dy],
            t.shape(w),
            t.dtype(w),
            dilations=window.dilations,
            group=group,
            kernel_shape=window.kernel,
            pads=window.pads,
            strides=window.strides,
        )
    if t.needs(op, 2):
        db = t.sum(dy, [dim for dim in range(rank + 2) if dim != 1])
    return dx, dw, db


def _conv_transpose(t: Tape, op: Op, grads: Grads) -> Grads:
    """A transposed convolution is the gradient of one: dx is the convolution of dy with the same weight.

    The weight is (C, M / group, *kernel): that of a convolution from M channels to C.
    """
    dy, (x, w) = grad_of(grads), op.inputs[:2]
    rank = len(t.shape(x)) - 2
    window = _transposed_window(op, t.shape(w)[2:], t.shape(x)[2:], t.shape(dy)[2:])
    attrs: dict[str, Attr] = {**_attrs(window), "group": int_attr(op, "group", 1)}
    dx = t.emit("Conv", [dy, w], t.shape(x), t.dtype(x), **attrs) if t.needs(op, 0) else None
    dw = t.emit("autopar::ConvWeightGrad", [dy, x], t.shape(w), t.dtype(w), **attrs) if t.needs(op, 1) else None
    db = t.sum(dy, [dim for dim in range(rank + 2) if dim != 1]) if t.needs(op, 2) else None
    return dx, dw, db


def _transposed_window(op: Op, kernel: Shape, space: Shape, space_y: Shape) -> Window:
    """Return the window of a transposed convolution with its padding worked out.

    ONNX: with `output_shape` or `auto_pad` the padding follows from the sizes, and the smaller half is at the end,
    but for SAME_UPPER at the beginning.
    """
    rank = len(space)
    ones = (1,) * rank
    strides, dilations = ints_attr(op, "strides", ones), ints_attr(op, "dilations", ones)
    pads = ints_attr(op, "pads", (0,) * (2 * rank))
    window = Window(tuple(kernel), strides, dilations, pads)
    mode = op.attr("auto_pad", "NOTSET")
    if mode == "VALID":
        return Window(window.kernel, strides, dilations, (0,) * (2 * rank))
    if mode == "NOTSET" and not op.attr("output_shape"):
        return window
    extra = ints_attr(op, "output_padding", (0,) * rank)
    totals = [
        stride * (size - 1) + more + span - size_y
        for stride, size, more, span, size_y in zip(strides, space, extra, window.spans, space_y, strict=True)
    ]
    if min(totals) < 0:
        raise unsupported(op, f"its result {list(space_y)} is larger than its windows reach")
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    begins, ends = (small, large) if mode == "SAME_UPPER" else (large, small)
    return Window(window.kernel, strides, dilations, (*begins, *ends))


def _pools(t: Tape, op: Op) -> list[tuple[Shape, Shape, Window]]:
    """Return pooling as steps over two spatial dims: (shape before, shape after, window) of each.

    One dim gets a dim of size 1 beside it. Of three dims the last two are pooled first, the first counting as
    channels, then the first, the last two being one.
    """
    x, y = t.shape(op.inputs[0]), t.shape(op.outputs[0])
    window = window_of(op, ints_attr(op, "kernel_shape", ()), x[2:], y[2:])
    if len(x) == len("NCH"):
        return [((*x[:2], 1, x[2]), (*y[:2], 1, y[2]), window.widened())]
    if len(x) == len("NCHW"):
        return [(x, y, window)]
    if len(x) != len("NCDHW"):
        raise unsupported(op, f"it pools over {len(x) - 2} spatial dims")
    batch, channels, depth = x[:3]
    area = y[3] * y[4]
    begins, ends = window.pads[:3], window.pads[3:]
    flat = Window(window.kernel[1:], window.strides[1:], window.dilations[1:], (*begins[1:], *ends[1:]))
    deep = Window((window.kernel[0], 1), (window.strides[0], 1), (window.dilations[0], 1), (begins[0], 0, ends[0], 0))
    return [
        ((batch, channels * depth, *x[3:]), (batch, channels * depth, *y[3:]), flat),
        ((batch, channels, depth, area), (batch, channels, y[2], area), deep),
    ]


def _max_pool(t: Tape, op: Op, grads: Grads) -> Grads:
    """The gradient of a window goes to its first largest element."""
    steps = _pools(t, op)
    x, dy = op.inputs[0], grad_of(grads)
    inputs = [_shaped(t, x, steps[0][0])]
    for (_, after, window), (before, _, _) in pairwise(steps):
        pooled = t.emit("MaxPool", [inputs[-1]], after, t.dtype(x), **_attrs(window))
        inputs.append(_shaped(t, pooled, before))
    for source, (before, after, window) in zip(reversed(inputs), reversed(steps), strict=True):
        attrs: dict[str, Attr] = {"crop": (0,) * len(window.pads), **_attrs(window)}
        dy = t.emit("autopar::MaxPoolGrad", [source, _shaped(t, dy, after)], before, t.dtype(x), **attrs)
    return (_shaped(t, dy, t.shape(x)),)


def _average_pool(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    for before, after, window in reversed(_pools(t, op)):
        attrs: dict[str, Attr] = {"count_include_pad": int_attr(op, "count_include_pad", 0), **_attrs(window)}
        inputs = [_shaped(t, dy, after), t.ints(before[2:])]
        dy = t.emit("autopar::AveragePoolGrad", inputs, before, t.dtype(dy), **attrs)
    return (_shaped(t, dy, t.shape(op.inputs[0])),)


def _attrs(window: Window) -> dict[str, Attr]:
    return {
        "dilations": window.dilations,
        "kernel_shape": window.kernel,
        "pads": window.pads,
        "strides": window.strides,
    }


def _shaped(t: Tape, x: str, shape: Shape) -> str:
    """Return `x` in another shape; a dim of size 1 comes and goes without naming the sizes of others."""
    old = t.shape(x)
    if shape == (*old[:2], 1, *old[2:]):
        return t.unsqueeze(x, [2])
    if old == (*shape[:2], 1, *shape[2:]):
        return t.squeeze(x, [2])
    return t.reshape(x, shape)


def _global_average_pool(t: Tape, op: Op, grads: Grads) -> Grads:
    shape = t.shape(op.inputs[0])
    return (t.expand(t.times(grad_of(grads), 1.0 / prod(shape[2:])), shape),)


CONVOLUTION: Mapping[str, Rule] = {
    "AveragePool": _average_pool,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "GlobalAveragePool": _global_average_pool,
    "MaxPool": _max_pool,
}
