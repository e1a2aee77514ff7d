"""Bodies of functions that a runtime executes faster than those of `autopar.ir.functions`, which define them.

The gradient of an embedding is defined as a product with a one-hot matrix of tokens by rows, so that it can be run on
any shard of anything: for a real vocabulary that matrix is larger than the model. Here the rows of `dy` are added where
they belong. `rows` holds the numbers of the rows of the result, in any order; tokens whose row is not among them are
left out.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from autopar.ir.functions import DOMAIN, OPSET, function_proto

FASTER: Mapping[str, str] = {
    f"{DOMAIN}::GatherGrad": """
GatherGrad <axis> (indices, rows, dy) => (dx)
{
    first = Constant <value_ints = [0]> ()
    second = Constant <value_ints = [1]> ()
    last_two = Constant <value_ints = [1, 2]> ()
    end = Constant <value_ints = [9223372036854775807]> ()
    unknown = Constant <value_ints = [-1]> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_f = Constant <value_float = 0.0> ()
    zero_like = CastLike (zero_f, dy)
    axis = Constant <value_int: int = @axis> ()
    axis_1 = Unsqueeze (axis, first)
    shape = Shape (dy)
    index_shape = Shape (indices)
    index_rank = Shape (index_shape)
    after = Add (axis_1, index_rank)
    shape_before = Slice (shape, first, axis_1)
    shape_after = Slice (shape, after, end)
    before = ReduceProd <keepdims = 1> (shape_before)
    behind = ReduceProd <keepdims = 1> (shape_after)
    flat_any = Reshape (indices, unknown)
    flat = Cast <to = 7> (flat_any)
    rows_I = Cast <to = 7> (rows)
    count = Shape (flat)
    num_rows = Shape (rows)
    num_rows_0 = Squeeze (num_rows, first)
    top = ReduceMax <keepdims = 0> (rows_I)
    size = Add (top, one)
    size_1 = Unsqueeze (size, first)
    nowhere = ConstantOfShape <value = int64[1] {-1}> (size_1)
    places = Range (zero, num_rows_0, one)
    place_of = ScatterElements <axis = 0> (nowhere, rows_I, places)
    known_above = GreaterOrEqual (flat, zero)
    known_below = LessOrEqual (flat, top)
    known = And (known_above, known_below)
    safe = Where (known, flat, zero)
    found = Gather <axis = 0> (place_of, safe)
    here = GreaterOrEqual (found, zero)
    kept = And (known, here)
    place = Where (kept, found, zero)
    place_I1 = Unsqueeze (place, second)
    dy_shape = Concat <axis = 0> (before, count, behind)
    dy_AIB = Reshape (dy, dy_shape)
    dy_IAB = Transpose <perm = [1, 0, 2]> (dy_AIB)
    kept_I11 = Unsqueeze (kept, last_two)
    terms = Where (kept_I11, dy_IAB, zero_like)
    sum_shape = Concat <axis = 0> (num_rows, before, behind)
    empty = Expand (zero_like, sum_shape)
    dx_RAB = ScatterND <reduction = "add"> (empty, place_I1, terms)
    dx_ARB = Transpose <perm = [1, 0, 2]> (dx_RAB)
    dx_shape = Concat <axis = 0> (shape_before, num_rows, shape_after)
    dx = Reshape (dx_ARB, dx_shape)
}
""",
}
"""ONNX text by kind."""


@cache
def runtime_function(kind: str) -> Any:
    """Return the `onnx.FunctionProto` a runtime is given for a kind; treat it as read-only.

    Raises:
        KeyError: If there is no such function.
    """
    if kind not in FASTER:
        return function_proto(kind)
    from onnx import parser

    return parser.parse_function(f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n{FASTER[kind].strip()}\n')
