"""Gradients of convolution and pooling.

Dims: N batch, C channels in, M channels out, then spatial dims. dx of a convolution is a transposed convolution with
the same weight; dw is the convolution of x with dy, with stride and dilation exchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import Op
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


def _pool_window(t: Tape, op: Op) -> Window:
    """Return the window of a pooling op in two spatial dims."""
    space, space_y = t.shape(op.inputs[0])[2:], t.shape(op.outputs[0])[2:]
    if len(space) not in (1, 2):
        raise unsupported(op, f"it pools over {len(space)} spatial dims")
    window = window_of(op, ints_attr(op, "kernel_shape", ()), space, space_y)
    return window if len(space) == 2 else window.widened()


def _max_pool(t: Tape, op: Op, grads: Grads) -> Grads:
    """The gradient of a window goes to its first largest element."""
    window = _pool_window(t, op)
    extra = [2] * (4 - len(t.shape(op.inputs[0])))
    x, dy = t.unsqueeze(op.inputs[0], extra), t.unsqueeze(grad_of(grads), extra)
    dx = t.emit(
        "autopar::MaxPoolGrad",
        [x, dy],
        t.shape(x),
        t.dtype(x),
        crop=(0,) * len(window.pads),
        dilations=window.dilations,
        kernel_shape=window.kernel,
        pads=window.pads,
        strides=window.strides,
    )
    return (t.squeeze(dx, extra),)


def _average_pool(t: Tape, op: Op, grads: Grads) -> Grads:
    window = _pool_window(t, op)
    extra = [2] * (4 - len(t.shape(op.inputs[0])))
    dy = t.unsqueeze(grad_of(grads), extra)
    space = (1,) * len(extra) + t.shape(op.inputs[0])[2:]
    dx = t.emit(
        "autopar::AveragePoolGrad",
        [dy, t.ints(space)],
        (*t.shape(dy)[:2], *space),
        t.dtype(dy),
        count_include_pad=int_attr(op, "count_include_pad", 0),
        dilations=window.dilations,
        kernel_shape=window.kernel,
        pads=window.pads,
        strides=window.strides,
    )
    return (t.squeeze(dx, extra),)


def _global_average_pool(t: Tape, op: Op, grads: Grads) -> Grads:
    shape = t.shape(op.inputs[0])
    return (t.expand(t.times(grad_of(grads), 1.0 / prod(shape[2:])), shape),)


def _resize(t: Tape, op: Op, grads: Grads) -> Grads:
    """Of an image made larger by whole numbers, each pixel repeated: sums over the copies of a pixel."""
    x, dy = op.inputs[0], grad_of(grads)
    shape, larger = t.shape(x), t.shape(dy)
    factors = tuple(after // before for before, after in zip(shape, larger, strict=True))
    way = (op.attr("coordinate_transformation_mode", "half_pixel"), op.attr("nearest_mode", "round_prefer_floor"))
    repeats = op.attr("mode", "nearest") == "nearest" and way in _REPEATS
    whole = all(before * factor == after for before, factor, after in zip(shape, factors, larger, strict=True))
    if not (repeats and whole and factors[:2] == (1, 1) and len(shape) > len(("N", "C"))):
        raise unsupported(op, "it does more than repeat each pixel a whole number of times")
    mean = t.emit("AveragePool", [dy], shape, t.dtype(x), kernel_shape=factors[2:], strides=factors[2:])
    return (t.times(mean, float(prod(factors))),)


_REPEATS = (("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil"))
"""Ways to find the nearest pixel that, for whole factors, take each as often as the others."""

CONVOLUTION: Mapping[str, Rule] = {
    "AveragePool": _average_pool,
    "Conv": _conv,
    "GlobalAveragePool": _global_average_pool,
    "MaxPool": _max_pool,
    "Resize": _resize,
}
