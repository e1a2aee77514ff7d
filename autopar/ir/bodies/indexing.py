"""Gradients of gathers, and indexing on a part of the indexed rows.

The kinds named `...Part` are what a device runs that holds only the rows from `start` on of `size` rows: the other rows
read as 0, and what would be written to them is dropped. So the sum over devices of what they gathered is what the op
gathers, and what they scattered, side by side, is what it scatters. Indices may count from the end, as in ONNX.
"""

INDEXING = """
GatherGrad <axis> (indices, rows, dy) => (dx)
{
    start = Constant <value_ints = [0]> ()
    end = Constant <value_ints = [9223372036854775807]> ()
    column = Constant <value_ints = [1]> ()
    unknown = Constant <value_ints = [-1]> ()
    axis = Constant <value_int: int = @axis> ()
    axis_1 = Unsqueeze (axis, start)
    shape = Shape (dy)
    index_shape = Shape (indices)
    index_rank = Shape (index_shape)
    after = Add (axis_1, index_rank)
    shape_before = Slice (shape, start, axis_1)
    shape_after = Slice (shape, after, end)
    before = ReduceProd <keepdims = 1> (shape_before)
    behind = ReduceProd <keepdims = 1> (shape_after)
    flat = Reshape (indices, unknown)
    count = Shape (flat)
    dy_shape = Concat <axis = 0> (before, count, behind)
    dy_AIB = Reshape (dy, dy_shape)
    flat_I1 = Unsqueeze (flat, column)
    flat_like = CastLike (flat_I1, rows)
    chosen = Equal (flat_like, rows)
    chosen_IR = CastLike (chosen, dy)
    dx_ARB = Einsum <equation = "aib,ir->arb"> (dy_AIB, chosen_IR)
    num_rows = Shape (rows)
    dx_shape = Concat <axis = 0> (shape_before, num_rows, shape_after)
    dx = Reshape (dx_ARB, dx_shape)
}

GatherNDGrad <batch_dims> (indices, rows, dy) => (dx)
{
    start = Constant <value_ints = [0]> ()
    end = Constant <value_ints = [9223372036854775807]> ()
    unknown = Constant <value_ints = [-1]> ()
    batch = Constant <value_int: int = @batch_dims> ()
    batch_1 = Unsqueeze (batch, start)
    shape = Shape (dy)
    index_shape = Shape <end = -1> (indices)
    index_rank = Shape (index_shape)
    shape_before = Slice (shape, start, batch_1)
    shape_count = Slice (shape, batch_1, index_rank)
    shape_after = Slice (shape, index_rank, end)
    before = ReduceProd <keepdims = 1> (shape_before)
    count = ReduceProd <keepdims = 1> (shape_count)
    behind = ReduceProd <keepdims = 1> (shape_after)
    dy_shape = Concat <axis = 0> (before, count, behind)
    dy_BIF = Reshape (dy, dy_shape)
    one = Constant <value_ints = [1]> ()
    flat_shape = Concat <axis = 0> (before, count, one)
    flat = Reshape (indices, flat_shape)
    flat_like = CastLike (flat, rows)
    chosen = Equal (flat_like, rows)
    chosen_BIR = CastLike (chosen, dy)
    dx_BRF = Einsum <equation = "bif,bir->brf"> (dy_BIF, chosen_BIR)
    num_rows = Shape (rows)
    dx_shape = Concat <axis = 0> (shape_before, num_rows, shape_after)
    dx = Reshape (dx_BRF, dx_shape)
}

GatherND2Grad <batch_dims> (indices, rows, columns, dy) => (dx)
{
    start = Constant <value_ints = [0]> ()
    end = Constant <value_ints = [9223372036854775807]> ()
    two = Constant <value_ints = [2]> ()
    batch = Constant <value_int: int = @batch_dims> ()
    batch_1 = Unsqueeze (batch, start)
    shape = Shape (dy)
    index_shape = Shape <end = -1> (indices)
    index_rank = Shape (index_shape)
    shape_before = Slice (shape, start, batch_1)
    shape_count = Slice (shape, batch_1, index_rank)
    shape_after = Slice (shape, index_rank, end)
    before = ReduceProd <keepdims = 1> (shape_before)
    count = ReduceProd <keepdims = 1> (shape_count)
    behind = ReduceProd <keepdims = 1> (shape_after)
    dy_shape = Concat <axis = 0> (before, count, behind)
    dy_BIF = Reshape (dy, dy_shape)
    flat_shape = Concat <axis = 0> (before, count, two)
    flat = Reshape (indices, flat_shape)
    flat_like = CastLike (flat, rows)
    row, column = Split <axis = -1, num_outputs = 2> (flat_like)
    in_row = Equal (row, rows)
    in_column = Equal (column, columns)
    in_row_BIR = CastLike (in_row, dy)
    in_column_BIC = CastLike (in_column, dy)
    dx_BRCF = Einsum <equation = "bif,bir,bic->brcf"> (dy_BIF, in_row_BIR, in_column_BIC)
    num_rows = Shape (rows)
    num_columns = Shape (columns)
    dx_shape = Concat <axis = 0> (shape_before, num_rows, num_columns, shape_after)
    dx = Reshape (dx_BRCF, dx_shape)
}

GatherElementsGrad <axis> (indices, rows, dy) => (dx)
{
    start = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    unknown = Constant <value_ints = [-1]> ()
    axis = Constant <value_int: int = @axis> ()
    axis_1 = Unsqueeze (axis, start)
    next = Add (axis_1, one)
    shape = Shape (dy)
    rank = Shape (shape)
    behind = Sub (rank, next)
    ones = Expand (one, behind)
    column = Concat <axis = 0> (unknown, ones)
    rows_R1 = Reshape (rows, column)
    spread = Unsqueeze (indices, next)
    spread_like = CastLike (spread, rows)
    chosen = Equal (spread_like, rows_R1)
    dy_spread = Unsqueeze (dy, next)
    mask = CastLike (chosen, dy)
    terms = Mul (dy_spread, mask)
    dx = ReduceSum <keepdims = 0> (terms, axis_1)
}
"""

_MINE = """
    size_0 = Constant <value_int: int = @size> ()
    zero_0 = Constant <value_int = 0> ()
    size = CastLike (size_0, index)
    zero = CastLike (zero_0, index)
    begin = CastLike (start, index)
    rows = CastLike (held, index)
    from_end = Less (index, zero)
    shifted = Add (index, size)
    from_front = Where (from_end, shifted, index)
    local = Sub (from_front, begin)
    not_before = GreaterOrEqual (local, zero)
    not_behind = Less (local, rows)
    mine = And (not_before, not_behind)
"""
"""From `index`, rows of the whole tensor, to `local`, rows of the `held` ones, where they are `mine`."""

_READ = f"""{_MINE}
    safe = Where (mine, local, zero)
    nothing_f = Constant <value_float = 0.0> ()
    nothing = CastLike (nothing_f, data)
"""

_WRITE = f"""{_MINE}
    target = Where (mine, local, rows)
"""
"""What belongs to other devices is written to a spare row at the end, which is cut off again: to write back what a row
of the device holds could undo an update of it."""

_COORDINATES = """
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_ints = [1]> ()
    end = Constant <value_ints = [9223372036854775807]> ()
    last = Constant <value_ints = [-1]> ()
    index = Slice (indices, axis0, axis1, last)
    others = Slice (indices, axis1, end, last)
"""
"""The first coordinate of each index, of which the device holds some rows, and the others, of which it holds all."""

PARTS = f"""
GatherPart <size, axis: int = 0> (data, indices, start) => (y)
{{
    axis = Constant <value_int: int = @axis> ()
    shape = Shape (data)
    held = Gather (shape, axis)
    index = Identity (indices)
{_READ}
    raw = Gather <axis: int = @axis> (data, safe)
    one = Constant <value_ints = [1]> ()
    rank = Shape (shape)
    dim = Mod (axis, rank)
    ahead = Add (dim, one)
    behind = Sub (rank, ahead)
    ones = ConstantOfShape <value = int64[1] {{1}}> (behind)
    index_shape = Shape (indices)
    mask_shape = Concat <axis = 0> (index_shape, ones)
    mask = Reshape (mine, mask_shape)
    y = Where (mask, raw, nothing)
}}

GatherElementsPart <size, axis: int = 0> (data, indices, start) => (y)
{{
    axis = Constant <value_int: int = @axis> ()
    shape = Shape (data)
    held = Gather (shape, axis)
    index = Identity (indices)
{_READ}
    raw = GatherElements <axis: int = @axis> (data, safe)
    y = Where (mine, raw, nothing)
}}

GatherNDPart <size, batch_dims: int = 0> (data, indices, start) => (y)
{{
    batch = Constant <value_int: int = @batch_dims> ()
    shape = Shape (data)
    held = Gather (shape, batch)
{_COORDINATES}{_READ}
    where = Concat <axis = -1> (safe, others)
    raw = GatherND <batch_dims: int = @batch_dims> (data, where)
    index_shape = Shape (indices)
    depth = Gather (index_shape, last)
    rank = Shape (shape)
    unbatched = Sub (rank, batch)
    behind = Sub (unbatched, depth)
    ones = ConstantOfShape <value = int64[1] {{1}}> (behind)
    before = Shape <end = -1> (indices)
    mask_shape = Concat <axis = 0> (before, ones)
    mask = Reshape (mine, mask_shape)
    y = Where (mask, raw, nothing)
}}

ScatterElementsPart <size, axis: int = 0, reduction: string = "none"> (data, indices, updates, start) => (y)
{{
    axis = Constant <value_int: int = @axis> ()
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_ints = [1]> ()
    axes = Unsqueeze (axis, axis0)
    shape = Shape (data)
    held = Gather (shape, axes)
    index = Identity (indices)
{_WRITE}
    spare = Slice (data, axis0, axis1, axes)
    longer = Concat <axis: int = @axis> (data, spare)
    written = ScatterElements <axis: int = @axis, reduction: string = @reduction> (longer, target, updates)
    y = Slice (written, axis0, held, axes)
}}

ScatterNDPart <size, reduction: string = "none"> (data, indices, updates, start) => (y)
{{
    held = Shape <end = 1> (data)
{_COORDINATES}{_WRITE}
    spare = Slice (data, axis0, axis1, axis0)
    longer = Concat <axis = 0> (data, spare)
    where = Concat <axis = -1> (target, others)
    written = ScatterND <reduction: string = @reduction> (longer, where, updates)
    y = Slice (written, axis0, held, axis0)
}}

TriluRowsPart <size: int = 0, upper: int = 1> (x, start) => (y)
{{
    y = Trilu <upper: int = @upper> (x, start)
}}

TriluColumnsPart <size: int = 0, upper: int = 1> (x, start) => (y)
{{
    diagonal = Neg (start)
    y = Trilu <upper: int = @upper> (x, diagonal)
}}

ShiftedTriluRowsPart <size: int = 0, upper: int = 1> (x, k, start) => (y)
{{
    diagonal = Add (k, start)
    y = Trilu <upper: int = @upper> (x, diagonal)
}}

ShiftedTriluColumnsPart <size: int = 0, upper: int = 1> (x, k, start) => (y)
{{
    diagonal = Sub (k, start)
    y = Trilu <upper: int = @upper> (x, diagonal)
}}
"""
