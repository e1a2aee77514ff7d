"""What ONNX lets an op leave open, written down: how a window slides, and to which sizes an image is resized.

A rule for sharding an op changes such numbers (the padding of a block is not that of the whole), so they have to be
there, and numbers of one form only. What describes an output that nobody reads is left out.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Attr
from autopar.onnx.upgrade import Context, Draft

_KERNELS = frozenset({"Conv", "ConvTranspose"})
_SLIDING = frozenset({"Conv", "MaxPool", "AveragePool", "LpPool"})
_SCORES = 3
"""Number of the output of attention that holds its scores; trailing outputs that nobody reads are dropped."""
_SPATIAL = 2
"""The first spatial dim of an image."""


def make_explicit(
    draft: Draft, result: tuple[int, ...] | None, known: Mapping[str, NDArray[np.generic]], context: Context
) -> None:
    """Write down what follows from shapes.

    Args:
        draft: The op, of the target opset; it is changed.
        result: Shape of its first output.
        known: Data of constants.
        context: The import.
    """
    if draft.kind in _KERNELS:
        draft.attrs.setdefault("kernel_shape", context.value(draft.inputs[1]).shape[_SPATIAL:])
    if draft.kind in _SLIDING and result is not None:
        _pads(draft, context.value(draft.inputs[0]).shape[_SPATIAL:], result[_SPATIAL:])
    if draft.kind == "Resize" and result is not None:
        _sizes(draft, result, known, context)
    if draft.kind == "Attention" and len(draft.outputs) <= _SCORES:
        draft.attrs.pop("qk_matmul_output_mode", None)  # which kernels of parts do not take


def _pads(draft: Draft, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Replace `auto_pad` by the padding it stands for."""
    mode = draft.attrs.pop("auto_pad", "NOTSET")
    if mode == "VALID":
        draft.attrs["pads"] = (0, 0) * len(before)
    elif mode != "NOTSET":
        each = zip(before, after, *(_numbers(draft, name, len(before)) for name in _NAMES), strict=True)
        totals = [
            max(0, (out - 1) * stride + (kernel - 1) * step + 1 - size) for size, out, kernel, stride, step in each
        ]
        small, large = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
        draft.attrs["pads"] = (*small, *large) if mode == "SAME_UPPER" else (*large, *small)


_NAMES = ("kernel_shape", "strides", "dilations")


def _numbers(draft: Draft, name: str, count: int) -> tuple[int, ...]:
    value: Attr = draft.attrs.get(name, (1,) * count)
    assert isinstance(value, tuple), "ONNX's schema makes it a list"
    return tuple(entry for entry in value if isinstance(entry, int))


def _sizes(draft: Draft, result: tuple[int, ...], known: Mapping[str, NDArray[np.generic]], context: Context) -> None:
    """Replace scales by the sizes they lead to, where these lead back to the scales."""
    if len(draft.inputs) != 3 or "axes" in draft.attrs:
        return
    scales, shape = known.get(draft.inputs[2]), context.value(draft.inputs[0]).shape
    if scales is None or draft.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return
    if all(out == size * scale for out, size, scale in zip(result, shape, scales.tolist(), strict=True)):
        sizes = context.constant(np.array(result, np.int64), f"{draft.name}.sizes")
        draft.inputs = [draft.inputs[0], "", "", sizes]
