"""Attention whose scores have a trained bias per head and distance between query and key, and its gradient.

`RelativeAttention` is the attention of T5 (Raffel et al. 2020, section 2.1). Its inputs are

    q [B, H, S, D], k [B, Hkv, S, D], v [B, Hkv, S, F], b [H, R], with Hkv a divisor of H and R = 2 r + 1,

where r is the reach: query i adds b[h, clip(j - i, -r, r) + r] to its score with key j. Attributes are `scale`, the
factor of the products of queries and keys, and `is_causal`, 1 where no query sees a later key. The biases of all pairs
[H, S, S] are not formed: a fused kernel looks them up, as FlexAttention (PyTorch) does.
"""

from autopar.ir.bodies.attention import ALL_QUERIES, attention_gradient

_BIAS = """
    size_1 = Shape <start = 1, end = 2> (b)
    size = Squeeze (size_1, axis0)
    two = Constant <value_int = 2> ()
    reach = Div (size, two)
    least = Neg (reach)
    distance = Sub (j_T, i_S1)
    at_least = Max (distance, least)
    within = Min (at_least, reach)
    shifted_index = Add (within, reach)
    last = Sub (size, one)
    index_ST = Min (shifted_index, last)
    bias_HST = Gather <axis = 1> (b, index_ST)
"""
"""The biases of all pairs. The minimum with the last index matters to an even R only: no model has one, a proxy may."""

_FORWARD = f"""
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_ints = [1]> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    queries_1 = Shape <start = 2, end = 3> (q)
    keys_1 = Shape <start = 2, end = 3> (k)
    queries = Squeeze (queries_1, axis0)
    keys = Squeeze (keys_1, axis0)
{ALL_QUERIES}
    i_S1 = Unsqueeze (i_S, axis1)
    j_T = Range (zero, keys, one)
{_BIAS}
    bias = Unsqueeze (bias_HST, axis0)
    y = Attention <scale: float = @scale, is_causal: int = @is_causal> (q, k, v, bias)
}}
"""

_SCORES = f"""{_BIAS}
    grouped = Concat <axis = 0> (axis1, heads, unknown, queries_1, keys_1)
    bias_1KGST = Reshape (bias_HST, grouped)
    scores = Add (scores_causal, bias_1KGST)
"""

_BIAS_GRADIENT = """
    dscores_KGST = ReduceSum <keepdims = 0> (dscores, axis0)
    pairs = Concat <axis = 0> (unknown, queries_1, keys_1)
    dscores_HST = Reshape (dscores_KGST, pairs)
    r_R = Range (zero, size, one)
    index_ST1 = Unsqueeze (index_ST, unknown)
    is_own = Equal (index_ST1, r_R)
    is_own_STR = CastLike (is_own, q)
    db = Einsum <equation = "hst,str->hr"> (dscores_HST, is_own_STR)
}
"""

RELATIVE_ATTENTION = f"""
RelativeAttention <scale, is_causal: int = 0> (q, k, v, b) => (y)
{{{_FORWARD}
RelativeAttentionGrad <scale, is_causal: int = 0> (q, k, v, b, dy) => (dq, dk, dv, db)
{{{attention_gradient(ALL_QUERIES, _SCORES).rstrip().removesuffix("}")}{_BIAS_GRADIENT}"""
