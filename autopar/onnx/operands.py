"""Sizes of an op's inputs that have to go together, where onnx's shape inference does not compare them.

Source: the text of ONNX's operators, opset 24.
"""

from collections.abc import Callable, Mapping, Sequence

from autopar.errors import ModelError
from autopar.ir.graph import Value
from autopar.onnx.upgrade import Draft

_Shape = tuple[int, ...]
_Shapes = Sequence[_Shape | None]

_WITH_CHANNELS = 2  # dims of what has channels: dim 1


def check_operands(draft: Draft, inputs: Sequence[Value | None], result: _Shape | None) -> None:
    """Check the inputs of an op against each other.

    Args:
        draft: The op, of the target opset.
        inputs: Types of its inputs, None for absent ones; shape inference has passed.
        result: Shape of its first output; None if it is not known.

    Raises:
        ModelError: If the op is not defined for such sizes.
    """
    check = _CHECKS.get(draft.kind)
    if check is None:
        return
    problem = check(draft, [None if value is None else value.shape for value in inputs], result)
    if problem:
        given = ", ".join("-" if value is None else f"{value.dtype}{list(value.shape)}" for value in inputs)
        raise ModelError(f"node {draft.name!r} ({draft.kind}) does not fit its inputs {given}: {problem}")


def _conv(draft: Draft, shapes: _Shapes, result: _Shape | None) -> str:
    x, w, bias = shapes[0], shapes[1], _at(shapes, 2)
    assert x is not None, "ONNX's schema makes it required"
    assert w is not None, "ONNX's schema makes it required"
    if min(len(x), len(w)) < _WITH_CHANNELS:
        return "they have no dim of channels"
    if len(x) != len(w):
        return f"its images have {len(x)} dims, its weights {len(w)}"
    kernel = draft.attrs.get("kernel_shape")
    if isinstance(kernel, tuple) and kernel != w[_WITH_CHANNELS:]:
        return f"kernel_shape is {list(kernel)}, its weights are for {list(w[_WITH_CHANNELS:])}"
    groups = draft.attrs.get("group", 1)
    assert isinstance(groups, int), "ONNX's schema makes it an integer"
    if groups < 1:
        return f"{groups} groups"
    transposed = draft.kind == "ConvTranspose"
    read, made = (w[0], w[1] * groups) if transposed else (w[1] * groups, w[0])
    if x[1] != read:
        return f"it has {x[1]} channels, its weights are for {read}"
    if read % groups or made % groups:
        return f"its channels are not divisible by {groups} groups"
    return "" if bias in (None, (made,)) else f"its bias is not one number for each of {made} channels"


def _per_channel(draft: Draft, shapes: _Shapes, result: _Shape | None) -> str:
    x = shapes[0]
    channels = x[1:2] if x is not None else ()
    return "" if all(shape in (None, channels) for shape in shapes[1:]) else "scale and bias are not one per channel"


def _alike(draft: Draft, shapes: _Shapes, result: _Shape | None) -> str:
    """Check that there is an update for each index."""
    indices, updates = shapes[1:3]
    return "" if indices == updates else "there is not one update per index"


def _broadcast(slots: Sequence[int]) -> "_Check":
    """Return the check that some inputs can be repeated to the shape of the result."""

    def check(draft: Draft, shapes: _Shapes, result: _Shape | None) -> str:
        wrong = [slot for slot in slots if result is not None and not _repeats(_at(shapes, slot), result)]
        return f"input {wrong[0]} cannot be broadcast to {list(result or ())}" if wrong else ""

    return check


def _repeats(shape: _Shape | None, result: _Shape) -> bool:
    if shape is None:
        return True
    behind = result[len(result) - len(shape) :] if len(shape) <= len(result) else ()
    return len(behind) == len(shape) and all(own in (1, other) for own, other in zip(shape, behind, strict=True))


def _at(shapes: _Shapes, slot: int) -> _Shape | None:
    return shapes[slot] if slot < len(shapes) else None


_Check = Callable[[Draft, _Shapes, _Shape | None], str]
_CHECKS: Mapping[str, _Check] = {
    "Conv": _conv,
    "ConvTranspose": _conv,
    "InstanceNormalization": _per_channel,
    "GroupNormalization": _per_channel,
    "LayerNormalization": _broadcast((1, 2)),
    "RMSNormalization": _broadcast((1,)),
    "PRelu": _broadcast((1,)),
    "Gemm": _broadcast((2,)),
    "ScatterElements": _alike,
}
