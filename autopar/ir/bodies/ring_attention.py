"""One step of ring attention, and of its gradient: attention of some queries to one block of keys and values.

Devices that hold blocks of queries, keys and values pass their keys and values round in a ring (`autopar.ir.rings`).
Each step merges the attention to one block into the result so far by the log-sum-exp of the scores (online softmax, Liu
et al. 2023, arXiv:2310.01889):

    lse' = log(exp(lse) + exp(lse_block))        y' = y exp(lse - lse') + y_block exp(lse_block - lse')

It begins with y = 0 and lse = -inf, or the sinks of `SinkAttention`, which are scores without a value. The gradient of
a block needs nothing of other blocks but the final y and lse:

    p = exp(scores - lse)    dv += p^T dy    dscores = p (dy v^T - sum(y dy))    dq += dscores k    dk += dscores^T q
    dsinks = -sum(exp(sinks - lse) sum(y dy)), in the first step

Inputs are those of the op that runs whole elsewhere, then what is carried from step to step, then the positions of the
first query (`start`) and of the first key of the block (`block_start`); outputs are what is carried on. Attributes are
those of `Attention` and of `causal_attention`; a scale of 0 stands for the inverse root of the channels. Queries and
keys are tokens of the same sequence. A device begins with its own block, which `start` and `block_start` tell.

A mask that is an input stays where it is: a device holds the columns of all keys, for its own queries or for all, and
takes those of the block in each step. Numbers are added to the scores; of truth values, false hides a key.
"""

from autopar.ir.bodies.causal_attention import OUT_OF_REACH

_ATTRS = "scale: float = 0.0, is_causal: int = IS_CAUSAL, softcap: float = 0.0, window: int = 0, chunk: int = 0"

_SCORES = """
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    minus = Constant <value = float {-inf}> ()
    minus_inf = CastLike (minus, q)
    zero_f = Constant <value_float = 0.0> ()
    zero_q = CastLike (zero_f, q)
    one_f = Constant <value_float = 1.0> ()
    one_q = CastLike (one_f, q)
    scale_f = Constant <value_float: float = @scale> ()
    given_scale = CastLike (scale_f, q)
    has_scale = Greater (given_scale, zero_q)
    width_1 = Shape <start = 3, end = 4> (q)
    width = Squeeze (width_1, axis0)
    width_q = CastLike (width, q)
    root = Sqrt (width_q)
    usual_scale = Div (one_q, root)
    scale = Where (has_scale, given_scale, usual_scale)
    softcap_f = Constant <value_float: float = @softcap> ()
    softcap = CastLike (softcap_f, q)
    uncapped = Equal (softcap, zero_q)
    divisor = Where (uncapped, one_q, softcap)
    batch = Shape <start = 0, end = 1> (k)
    heads = Shape <start = 1, end = 2> (k)
    lengths = Shape <start = 2, end = 3> (q)
    q_width = Concat <axis = 0> (batch, heads, last, lengths, width_1)
    q_BKGSE = Reshape (q, q_width)
    product = Einsum <equation = "bkgse,bkte->bkgst"> (q_BKGSE, k)
    scaled = Mul (product, scale)
    quotient = Div (scaled, divisor)
    bent = Tanh (quotient)
    bent_scaled = Mul (bent, divisor)
    capped = Where (uncapped, scaled, bent_scaled)
    queries_1 = Shape <start = 2, end = 3> (q)
    keys_1 = Shape <start = 2, end = 3> (k)
    queries = Squeeze (queries_1, axis0)
    keys = Squeeze (keys_1, axis0)
    end_S = Add (start, queries)
    end_T = Add (block_start, keys)
    i_S = Range (start, end_S, one)
    j_T = Range (block_start, end_T, one)
    i_S1 = Unsqueeze (i_S, axis1)
    later = Greater (j_T, i_S1)
    causal_i = Constant <value_int: int = @is_causal> ()
    causal = Cast <to = 9> (causal_i)
    too_late = And (later, causal)
    distance = Sub (i_S1, j_T)
OUT_OF_REACH
    hidden = Or (too_late, out_of_reach)
    scores = Where (hidden, minus_inf, capped)
""".replace("OUT_OF_REACH\n", OUT_OF_REACH)

# The part of a mask of any rank up to 4 that is about the queries of a device and the keys of a block.
_MASK = """
    ones4 = Constant <value_ints = [1, 1, 1, 1]> ()
    mask_given = Shape (mask)
    mask_padded = Concat <axis = 0> (ones4, mask_given)
    last_four = Constant <value_ints = [-4]> ()
    behind_all = Constant <value_ints = [8]> ()
    mask_dims = Slice (mask_padded, last_four, behind_all)
    mask_BHRC = Reshape (mask, mask_dims)
    mask_heads = Shape <start = 1, end = 2> (mask_BHRC)
    mask_rows = Shape <start = 2, end = 3> (mask_BHRC)
    mask_columns = Shape <start = 3, end = 4> (mask_BHRC)
    start_1 = Reshape (start, last)
    block_start_1 = Reshape (block_start, last)
    of_all_queries = Greater (mask_rows, queries_1)
    row_begin = Where (of_all_queries, start_1, axis0)
    rows_end = Add (start_1, queries_1)
    row_end = Where (of_all_queries, rows_end, mask_rows)
    block_number = Div (block_start_1, queries_1)
    columns_begin = Mul (block_number, keys_1)
    columns_end = Add (columns_begin, keys_1)
    of_keys = Greater (mask_columns, axis1)
    column_begin = Where (of_keys, columns_begin, axis0)
    column_end = Where (of_keys, columns_end, mask_columns)
    mask_begin = Concat <axis = 0> (row_begin, column_begin)
    mask_end = Concat <axis = 0> (row_end, column_end)
    mask_axes = Constant <value_ints = [2, 3]> ()
    mask_block = Slice (mask_BHRC, mask_begin, mask_end, mask_axes)
    of_heads = Greater (mask_heads, axis1)
    mask_groups = Where (of_heads, heads, axis1)
    mask_inside = Div (mask_heads, mask_groups)
    mask_batch = Shape <start = 0, end = 1> (mask_block)
    mask_area = Shape <start = 2, end = 4> (mask_block)
    mask_shape = Concat <axis = 0> (mask_batch, mask_groups, mask_inside, mask_area)
    mask_BKGST = Reshape (mask_block, mask_shape)
"""

_SEEN = "    scores = Where (hidden, minus_inf, capped)\n"
_MASKS = {
    "": _SEEN,
    "numbers": f"""{_MASK}
    seen = Where (hidden, minus_inf, capped)
    scores = Add (seen, mask_BKGST)
""",
    "truths": f"""{_MASK}
    masked = Not (mask_BKGST)
    hidden_or_masked = Or (hidden, masked)
    scores = Where (hidden_or_masked, minus_inf, capped)
""",
}
"""How scores are masked, by what an input says of it."""

_FORWARD = f"""{_SCORES}
    largest_any = ReduceMax <keepdims = 1> (scores, last)
    none_seen = Equal (largest_any, minus_inf)
    largest = Where (none_seen, zero_q, largest_any)
    shifted = Sub (scores, largest)
    e = Exp (shifted)
    sum_any = ReduceSum <keepdims = 1> (e, last)
    sum_e = Where (none_seen, one_q, sum_any)
    log_sum = Log (sum_e)
    lse_seen = Add (largest, log_sum)
    lse_grouped = Where (none_seen, minus_inf, lse_seen)
    p = Div (e, sum_e)
    y_grouped = Einsum <equation = "bkgst,bktf->bkgsf"> (p, v)
    front = Shape <start = 0, end = 3> (q)
    value_width = Shape <start = 3, end = 4> (v)
    y_shape = Concat <axis = 0> (front, value_width)
    lse_shape = Concat <axis = 0> (front, axis1)
    y_block = Reshape (y_grouped, y_shape)
    lse_block = Reshape (lse_grouped, lse_shape)
    top_any = Max (lse, lse_block)
    nothing_yet = Equal (top_any, minus_inf)
    top = Where (nothing_yet, zero_q, top_any)
    lse_shifted = Sub (lse, top)
    block_shifted = Sub (lse_block, top)
    weight = Exp (lse_shifted)
    block_weight = Exp (block_shifted)
    total_any = Add (weight, block_weight)
    total = Where (nothing_yet, one_q, total_any)
    log_total = Log (total)
    lse_sum = Add (top, log_total)
    new_lse = Where (nothing_yet, minus_inf, lse_sum)
    y_weighted = Mul (y, weight)
    block_weighted = Mul (y_block, block_weight)
    y_sum = Add (y_weighted, block_weighted)
    new_y = Div (y_sum, total)
"""

_SINKS = """
    sinks_shape = Constant <value_ints = [1, -1, 1, 1]> ()
    sinks_1H11 = Reshape (sinks, sinks_shape)
    is_first = Equal (start, block_start)
"""

_BEGIN_WITH_SINKS = """
    lse_given_shape = Shape (lse_given)
    sinks_BHS1 = Expand (sinks_1H11, lse_given_shape)
    lse = Where (is_first, sinks_BHS1, lse_given)
"""

# Once for all queries of a device, whatever the block.
_SINKS_GRADIENT = """
    sinks_shifted = Sub (sinks_1H11, lse)
    p_sink = Exp (sinks_shifted)
    p_total = Mul (p_sink, total)
    all_but_heads = Constant <value_ints = [0, 2, 3]> ()
    summed = ReduceSum <keepdims = 0> (p_total, all_but_heads)
    once = Where (is_first, one_q, zero_q)
    summed_once = Mul (summed, once)
    new_dsinks = Sub (dsinks, summed_once)
"""

_GRADIENT = f"""{_SCORES}
    lse_width = Concat <axis = 0> (batch, heads, last, lengths, axis1)
    lse_grouped = Reshape (lse, lse_width)
    none_seen = Equal (lse_grouped, minus_inf)
    lse_safe = Where (none_seen, zero_q, lse_grouped)
    shifted = Sub (scores, lse_safe)
    p = Exp (shifted)
    value_width = Shape <start = 3, end = 4> (v)
    dy_width = Concat <axis = 0> (batch, heads, last, lengths, value_width)
    dy_BKGSF = Reshape (dy, dy_width)
    y_dy = Mul (y, dy)
    total = ReduceSum <keepdims = 1> (y_dy, last)
    total_grouped = Reshape (total, lse_width)
    dv_block = Einsum <equation = "bkgst,bkgsf->bktf"> (p, dy_BKGSF)
    dp = Einsum <equation = "bkgsf,bktf->bkgst"> (dy_BKGSF, v)
    centred = Sub (dp, total_grouped)
    dscores = Mul (p, centred)
    bent_squared = Mul (bent, bent)
    slope_capped = Sub (one_q, bent_squared)
    slope = Where (uncapped, one_q, slope_capped)
    dscaled = Mul (dscores, slope)
    dproduct = Mul (dscaled, scale)
    q_shape = Shape (q)
    dq_grouped = Einsum <equation = "bkgst,bkte->bkgse"> (dproduct, k)
    dq_block = Reshape (dq_grouped, q_shape)
    dk_block = Einsum <equation = "bkgst,bkgse->bkte"> (dproduct, q_BKGSE)
    new_dq = Add (dq, dq_block)
    new_dk = Add (dk, dk_block)
    new_dv = Add (dv, dv_block)
"""


def _masked(name: str, mask: str, *, gradient: bool) -> str:
    """Return a step of ring attention with a mask, and one of its gradient.

    Args:
        name: Of the kind.
        mask: What the mask says, a key of `_MASKS`.
        gradient: Whether to return the step of the gradient, too.
    """
    attrs = f"{_ATTRS.replace('IS_CAUSAL', '0')}, size: int = 0"
    forward, backward = (body.replace(_SEEN, _MASKS[mask]) for body in (_FORWARD, _GRADIENT))
    found = f"""
Ring{name} <{attrs}> (q, k, v, mask, y, lse, start, block_start) => (new_y, new_lse)
{{{forward}}}
"""
    return (
        found
        if not gradient
        else f"""{found}
Ring{name}Grad <{attrs}> (q, k, v, mask, dy, y, lse, dq, dk, dv, start, block_start) => (new_dq, new_dk, new_dv)
{{{backward}}}
"""
    )


def _kinds(name: str, *, is_causal: int, sinks: bool = False) -> str:
    """Return a step of ring attention and one of its gradient.

    Args:
        name: Of the kind.
        is_causal: What holds unless the op states another.
        sinks: Whether it has sinks.
    """
    attrs = f"{_ATTRS.replace('IS_CAUSAL', str(is_causal))}, size: int = 0"
    if not sinks:
        return f"""
Ring{name} <{attrs}> (q, k, v, y, lse, start, block_start) => (new_y, new_lse)
{{{_FORWARD}}}

Ring{name}Grad <{attrs}> (q, k, v, dy, y, lse, dq, dk, dv, start, block_start) => (new_dq, new_dk, new_dv)
{{{_GRADIENT}}}
"""
    gradients = "dq, dk, dv, dsinks"
    return f"""
Ring{name} <{attrs}> (q, k, v, sinks, y, lse_given, start, block_start) => (new_y, new_lse)
{{{_SINKS}{_BEGIN_WITH_SINKS}{_FORWARD}}}

Ring{name}Grad <{attrs}> (q, k, v, sinks, dy, y, lse, {gradients}, start, block_start) =>
    (new_dq, new_dk, new_dv, new_dsinks)
{{{_SINKS}{_GRADIENT}{_SINKS_GRADIENT}}}
"""


RING_ATTENTION = (
    _kinds("Attention", is_causal=0)
    + _kinds("CausalAttention", is_causal=1)
    + _kinds("SinkAttention", is_causal=1, sinks=True)
    + _masked("MaskedAttention", "numbers", gradient=True)
    + _masked("HiddenAttention", "truths", gradient=False)
)
