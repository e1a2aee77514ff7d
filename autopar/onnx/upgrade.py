"""Ops of older opsets rewritten for opset 24, so that every later pass knows one form of each op.

Only changes of form between opset 7 and 24 need a rule; where a newer version takes all that an older one took,
nothing is done. Sources: the change log of ONNX operators.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ModelError
from autopar.ir.graph import Attr, Value
from autopar.ir.text import numpy_dtype

TARGET_OPSET = 24
"""What models of older opsets are brought to."""


@dataclass(slots=True)
class Draft:
    """An op being imported; outputs are the names of the model."""

    name: str
    kind: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Attr] = field(default_factory=dict)


class Context(Protocol):
    """What a rule may ask of the import."""

    def constant(self, array: NDArray[np.generic], hint: str) -> str:
        """Add a constant and return its name."""

    def value(self, name: str) -> Value:
        """Return the type of a value."""


Rule = Callable[[Draft, int, Context], list[Draft]]


def upgrade(draft: Draft, opset: int, context: Context) -> list[Draft]:
    """Return ops of opset 24 that do what `draft` did at `opset`.

    Raises:
        ModelError: If an old form has no new one.
    """
    before, rule = RULES.get(draft.kind, (0, _keep))
    return rule(draft, opset, context) if opset < before else [draft]


def _keep(draft: Draft, opset: int, context: Context) -> list[Draft]:
    return [draft]


def _attrs_to_inputs(*names: str) -> Rule:
    """Return a rule that turns integer attributes into inputs behind the first one, in this order."""

    def rule(draft: Draft, opset: int, context: Context) -> list[Draft]:
        inputs = draft.inputs[:1]
        for name in names:
            value = draft.attrs.pop(name, None)
            inputs.append("" if value is None else context.constant(np.array(value, np.int64), f"{draft.name}.{name}"))
        while inputs and not inputs[-1]:
            inputs.pop()
        draft.inputs = inputs
        return [draft]

    return rule


def _reduce(draft: Draft, opset: int, context: Context) -> list[Draft]:
    return _attrs_to_inputs("axes")(draft, opset, context) if len(draft.inputs) == 1 else [draft]


def _slice(draft: Draft, opset: int, context: Context) -> list[Draft]:
    starts = draft.attrs["starts"]
    assert isinstance(starts, tuple), "ONNX's schema makes starts a list"
    draft.attrs.setdefault("axes", tuple(range(len(starts))))
    return _attrs_to_inputs("starts", "ends", "axes")(draft, opset, context)


def _split(draft: Draft, opset: int, context: Context) -> list[Draft]:
    if len(draft.inputs) == 1 and "split" in draft.attrs:
        return _attrs_to_inputs("split")(draft, opset, context)
    if len(draft.inputs) == 1:
        draft.attrs["num_outputs"] = len(draft.outputs)
    return [draft]


def _top_k(draft: Draft, opset: int, context: Context) -> list[Draft]:
    k = draft.attrs.pop("k", None)
    if k is not None:
        draft.inputs = [draft.inputs[0], context.constant(np.array([k], np.int64), f"{draft.name}.k")]
    return [draft]


def _clip(draft: Draft, opset: int, context: Context) -> list[Draft]:
    for name in ("min", "max"):
        limit = draft.attrs.pop(name, None)
        draft.inputs.append("" if limit is None else _scalar_like(draft, limit, name, context))
    return [draft]


def _pad(draft: Draft, opset: int, context: Context) -> list[Draft]:
    fill = draft.attrs.pop("value", 0.0)
    _attrs_to_inputs("pads")(draft, opset, context)
    draft.inputs.append(_scalar_like(draft, fill, "value", context))
    return [draft]


def _scalar_like(draft: Draft, number: Attr, hint: str, context: Context) -> str:
    """Return a scalar constant of the type of the op's first input."""
    dtype = numpy_dtype(context.value(draft.inputs[0]).dtype)
    return context.constant(np.array(number, dtype), f"{draft.name}.{hint}")


def _softmax(draft: Draft, opset: int, context: Context) -> list[Draft]:
    """Before opset 13 all dims from `axis` on were normalised together."""
    shape = context.value(draft.inputs[0]).shape
    axis = draft.attrs.get("axis", 1)
    assert isinstance(axis, int), "ONNX's schema makes axis an integer"
    axis += len(shape) if axis < 0 else 0
    if prod(shape[axis + 1 :]) == 1 and axis < len(shape):
        draft.attrs["axis"] = axis
        return [draft]
    flat, result = f"{draft.outputs[0]}.flat", f"{draft.outputs[0]}.rows"
    target = context.constant(np.array(shape, np.int64), f"{draft.name}.shape")
    return [
        Draft(f"{draft.name}.flatten", "Flatten", draft.inputs, [flat], {"axis": axis}),
        Draft(draft.name, draft.kind, [flat], [result], {"axis": -1}),
        Draft(f"{draft.name}.unflatten", "Reshape", [result, target], draft.outputs),
    ]


def _resize(draft: Draft, opset: int, context: Context) -> list[Draft]:
    """`Upsample`, and `Resize` of opset 10, map coordinates by scaling alone."""
    scales = draft.attrs.pop("scales", None)
    if scales is not None:
        draft.inputs.append(context.constant(np.array(scales, np.float32), f"{draft.name}.scales"))
    draft.kind = "Resize"
    draft.inputs = [draft.inputs[0], "", draft.inputs[1]]
    draft.attrs |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return [draft]


def _scatter(draft: Draft, opset: int, context: Context) -> list[Draft]:
    draft.kind = "ScatterElements"
    return [draft]


def _batch_normalization(draft: Draft, opset: int, context: Context) -> list[Draft]:
    if draft.attrs.pop("spatial", 1) != 1:
        raise ModelError(f"node {draft.name!r} normalises each position apart (spatial=0), which opset 9 removed")
    draft.outputs = draft.outputs[:1]
    return [draft]


def _grid_sample(draft: Draft, opset: int, context: Context) -> list[Draft]:
    renamed = {"bilinear": "linear", "bicubic": "cubic"}
    mode = str(draft.attrs.get("mode", "bilinear"))
    draft.attrs["mode"] = renamed.get(mode, mode)
    return [draft]


def _group_normalization(draft: Draft, opset: int, context: Context) -> list[Draft]:
    raise ModelError(
        f"node {draft.name!r} is a GroupNormalization with one scale per group, a form that opset 21 removed",
        hint="export with opset 21 or newer",
    )


RULES: Mapping[str, tuple[int, Rule]] = {
    "Squeeze": (13, _attrs_to_inputs("axes")),
    "Unsqueeze": (13, _attrs_to_inputs("axes")),
    "ReduceSum": (13, _attrs_to_inputs("axes")),
    **{
        f"Reduce{name}": (18, _reduce)
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
    "Split": (18, _split),
    "Slice": (10, _slice),
    "TopK": (10, _top_k),
    "Clip": (11, _clip),
    "Pad": (11, _pad),
    "Softmax": (13, _softmax),
    "LogSoftmax": (13, _softmax),
    "Hardmax": (13, _softmax),
    "Upsample": (10, _resize),
    "Resize": (11, _resize),
    "Scatter": (11, _scatter),
    "BatchNormalization": (14, _batch_normalization),
    "GridSample": (20, _grid_sample),
    "GroupNormalization": (21, _group_normalization),
}
"""Per op type: the opset from which on its form is today's, and the rule for older ones."""
