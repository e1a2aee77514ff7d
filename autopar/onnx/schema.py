"""What ONNX's schemas say of a node's form, checked before anything relies on it."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod

import onnx
import onnx.defs
from onnx import AttributeProto

from autopar.errors import ModelError

MAX_RANK = 16
"""Dims of a tensor; gradients of products are written with one of 26 letters per dim, and ops may add some."""
MAX_ELEMENTS = 2**53
"""Elements of a tensor; beyond, a double, in which costs are computed, no longer counts each."""

MICROSOFT = "com.microsoft"
"""Domain of ops that ONNX Runtime writes."""

_CHECK = "check the model with onnx.checker"
_LISTS = {AttributeProto.INTS: "ints", AttributeProto.FLOATS: "floats", AttributeProto.STRINGS: "strings"}
_MAY_BE_EMPTY: Mapping[str, tuple[str, ...]] = {
    "Constant": ("value_floats", "value_ints", "value_strings"),
    "Transpose": ("perm",),
    **{
        f"Reduce{name}": ("axes",)
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    **dict.fromkeys(("GRU", "LSTM", "RNN"), ("activations", "activation_alpha", "activation_beta")),
}
"""Lists that mean the same whether they are empty or absent, or that hold elements."""

_FLAGS = frozenset({
    "align_corners", "allowzero", "antialias", "ceil_mode", "center_point_box", "count_include_pad",
    "detect_negative", "detect_positive", "exclude_outside", "exclusive", "fmod", "input_forget", "interleaved",
    "inverse", "is_causal", "keepdims", "largest", "layout", "linear_before_reset", "new_axis",
    "noop_with_empty_axes", "onesided", "periodic", "reverse", "saturate", "select_last_index", "sorted",
    "storage_order", "training_mode", "transA", "transB", "upper",
})  # fmt: skip
"""Attributes that are 0 or 1. ONNX's shape inference takes other numbers for either, ONNX Runtime for the other."""


def is_known(op_type: str, domain: str, version: int) -> bool:
    """Whether ONNX defines an op in a version of a domain."""
    return bool(onnx.defs.has(op_type, version, domain))


def unknown_op(domain: str, version: int, what: str) -> ModelError:
    """Return the error for a node whose op nobody defines."""
    unknown = f"is of the unknown domain {domain!r}"
    hint = "export with standard ONNX ops only, or add the op to the model as a local function"
    if domain == f"{MICROSOFT}.nchwc":
        unknown = "has images laid out for one CPU by ONNX Runtime"
        hint = "let ONNX Runtime save the model at ORT_ENABLE_EXTENDED, not ORT_ENABLE_ALL"
    if domain == MICROSOFT:
        unknown = "is an op of ONNX Runtime that standard ops cannot replace"
    if not domain or domain == "ai.onnx.ml":
        unknown = f"is unknown at opset {version}"
    return ModelError(f"{what} {unknown}", hint=hint)


def check_node(node: onnx.NodeProto, domain: str, version: int, what: str) -> None:
    """Check that a node has the inputs, outputs and attributes that its op has to have.

    Args:
        node: The node; its op is known.
        domain: Its domain, "" for the default one.
        version: The version of the domain that the model imports.
        what: The node, for errors.

    Raises:
        ModelError: If the node has another form.
    """
    schema = _schema(node.op_type, version, domain)
    _check_slots("inputs", node.input, schema.inputs, schema.min_input, schema.max_input, what)
    _check_slots("outputs", node.output, schema.outputs, schema.min_output, schema.max_output, what)
    check_results(node, what)
    attributes = {attribute.name: attribute for attribute in node.attribute}
    for name, known in schema.attributes.items():
        if name in attributes:
            may_be_empty = name in _MAY_BE_EMPTY.get(node.op_type, ())
            _check_attribute(attributes[name], int(known.type.value), what, may_be_empty=may_be_empty)
        elif known.required:
            raise ModelError(f"{what} lacks attribute {name!r}", hint=_CHECK)


def check_results(node: onnx.NodeProto, what: str) -> None:
    """Check that a node makes something.

    Raises:
        ModelError: If no output has a name.
    """
    if not any(node.output):
        raise ModelError(f"{what} has no output with a name", hint=_CHECK)


def check_shape(shape: tuple[int, ...], what: str) -> None:
    """Check that a tensor can be planned with.

    Raises:
        ModelError: If a dim is negative, or there are too many dims or elements.
    """
    shown = f"{list(shape[:8])}{' ...' if len(shape) > 8 else ''}"
    if any(size < 0 for size in shape):
        raise ModelError(f"{what} has the shape {shown}, with a negative dim", hint=_CHECK)
    if len(shape) > MAX_RANK:
        raise ModelError(f"{what} has {len(shape)} dims; up to {MAX_RANK} can be planned")
    if prod(shape) > MAX_ELEMENTS:
        raise ModelError(
            f"{what} has the shape {shown}: {prod(shape):.3g} elements; up to {MAX_ELEMENTS:.3g} can be planned"
        )


@cache
def _schema(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(op_type, version, domain)


def _check_slots(
    kind: str,
    names: Sequence[str],
    formal: Sequence[onnx.defs.OpSchema.FormalParameter],
    least: int,
    most: int,
    what: str,
) -> None:
    if not least <= len(names) <= most:
        limits = f"{least}" if least == most else f"at least {least}" if len(names) < least else f"at most {most}"
        raise ModelError(f"{what} has {len(names)} {kind}, not {limits}", hint=_CHECK)
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    if kind == "inputs":
        for index, name in enumerate(names):
            if not name and formal[min(index, len(formal) - 1)].option != optional:
                raise ModelError(f"{what} lacks input {index}, which is not optional", hint=_CHECK)


def _check_attribute(attribute: AttributeProto, expected: int, what: str, *, may_be_empty: bool) -> None:
    named = f"{what} has attribute {attribute.name!r}"
    if attribute.ref_attr_name:
        raise ModelError(f"{named} that is an attribute {attribute.ref_attr_name!r} of no function", hint=_CHECK)
    if attribute.type != expected:
        types = AttributeProto.AttributeType
        given = types.Name(attribute.type) if attribute.type in types.values() else attribute.type
        raise ModelError(f"{named} of type {given}, not {types.Name(expected)}", hint=_CHECK)
    if attribute.name in _FLAGS and expected == AttributeProto.INT and attribute.i not in (0, 1):
        raise ModelError(f"{named} that is {attribute.i}, not 0 or 1", hint=_CHECK)
    items = _LISTS.get(expected)
    if items is not None and not getattr(attribute, items) and not may_be_empty:
        raise ModelError(f"{named} that is an empty list", hint=_CHECK)
