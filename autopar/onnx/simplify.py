"""Ops that leave their input as it is."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Op, Value
from autopar.onnx.inference import Type
from autopar.onnx.upgrade import Draft

_IF_SAME_TYPE = frozenset({"Cast", "CastLike", "Reshape", "Expand", "Flatten", "Squeeze", "Unsqueeze", "Tile"})
_IF_ALONE = frozenset({"Concat", "Sum", "Max", "Min", "Mean"})


def same_as(
    draft: Draft,
    values: Mapping[str, Value],
    known: Mapping[str, NDArray[np.generic]],
    made: Mapping[str, Op],
    types: Sequence[Type | None],
) -> str | None:
    """Return the value that the op's first output equals; None if there is none or other outputs are asked for.

    Args:
        draft: The op.
        values: Types of all values so far.
        known: Data of constants.
        made: Op that defines each value.
        types: Types of the op's outputs.
    """
    if any(draft.outputs[1:]) or not draft.inputs or not draft.inputs[0]:
        return None
    source = values[draft.inputs[0]]
    unchanged = types[0] == (source.shape, source.dtype)
    if draft.kind == "Identity":
        return source.name
    if draft.kind in _IF_SAME_TYPE:
        return source.name if unchanged else None
    if draft.kind in _IF_ALONE:
        return source.name if len(draft.inputs) == 1 else None
    check = _CHECKS.get(draft.kind)
    return check(draft, known, made) if check is not None and (unchanged or draft.kind == "Where") else None


def _transpose(draft: Draft, known: Mapping[str, NDArray[np.generic]], made: Mapping[str, Op]) -> str | None:
    perm = draft.attrs.get("perm")
    return draft.inputs[0] if isinstance(perm, tuple) and perm == tuple(range(len(perm))) else None


def _slice(draft: Draft, known: Mapping[str, NDArray[np.generic]], made: Mapping[str, Op]) -> str | None:
    if len(draft.inputs) < 5 or not draft.inputs[4]:
        return draft.inputs[0]
    steps = known.get(draft.inputs[4])
    return draft.inputs[0] if steps is not None and bool((steps == 1).all()) else None


def _pad(draft: Draft, known: Mapping[str, NDArray[np.generic]], made: Mapping[str, Op]) -> str | None:
    pads = known.get(draft.inputs[1])
    return draft.inputs[0] if pads is not None and not bool(pads.any()) else None


def _nan_guard(draft: Draft, known: Mapping[str, NDArray[np.generic]], made: Mapping[str, Op]) -> str | None:
    """`Where(IsNaN(x), c, x)`: PyTorch's guard of a softmax over rows that are masked throughout."""
    condition, fallback, value = draft.inputs
    test = made.get(condition)
    return (
        value if test is not None and test.kind == "IsNaN" and test.inputs[0] == value and fallback in known else None
    )


_Check = Callable[[Draft, Mapping[str, NDArray[np.generic]], Mapping[str, Op]], str | None]
_CHECKS: Mapping[str, _Check] = {"Transpose": _transpose, "Slice": _slice, "Pad": _pad, "Where": _nan_guard}
