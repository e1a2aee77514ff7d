"""Gradients of attention and of rotary positions, and causal attention of some of the queries.

The kinds named `...Part` are what a device runs that holds only the queries from `start` on, and all keys: a query
attends to the keys up to its own position in the whole sequence.
"""

_BODY = """
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_ints = [1]> ()
    unknown = Constant <value_ints = [-1]> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    minus = Constant <value = float {-inf}> ()
    minus_inf = CastLike (minus, q)
    zero_f = Constant <value_float = 0.0> ()
    zero_q = CastLike (zero_f, q)
    scale_f = Constant <value_float: float = @scale> ()
    scale = CastLike (scale_f, q)
    q_shape = Shape (q)
    batch = Shape <start = 0, end = 1> (k)
    heads = Shape <start = 1, end = 2> (k)
    length_q = Shape <start = 2, end = 4> (q)
    length_y = Shape <start = 2, end = 4> (dy)
    q_grouped = Concat <axis = 0> (batch, heads, unknown, length_q)
    y_grouped = Concat <axis = 0> (batch, heads, unknown, length_y)
    q_BKGSE = Reshape (q, q_grouped)
    dy_BKGSF = Reshape (dy, y_grouped)
    product = Einsum <equation = "bkgse,bkte->bkgst"> (q_BKGSE, k)
    scaled = Mul (product, scale)
    queries_1 = Shape <start = 2, end = 3> (q)
    keys_1 = Shape <start = 2, end = 3> (k)
    queries = Squeeze (queries_1, axis0)
    keys = Squeeze (keys_1, axis0)
POSITIONS
    j_T = Range (zero, keys, one)
    i_S1 = Unsqueeze (i_S, axis1)
    later = Greater (j_T, i_S1)
    causal_i = Constant <value_int: int = @is_causal> ()
    causal = Cast <to = 9> (causal_i)
    hidden = And (later, causal)
    bias_ST = Where (hidden, minus_inf, zero_q)
    scores_causal = Add (scaled, bias_ST)
    MASK
    p_raw = Softmax <axis = -1> (scores)
    p_nan = IsNaN (p_raw)
    p = Where (p_nan, zero_q, p_raw)
    dv = Einsum <equation = "bkgst,bkgsf->bktf"> (p, dy_BKGSF)
    dp = Einsum <equation = "bkgsf,bktf->bkgst"> (dy_BKGSF, v)
    weighted = Mul (p, dp)
    total = ReduceSum <keepdims = 1> (weighted, unknown)
    shifted = Sub (dp, total)
    dscores = Mul (p, shifted)
    dproduct = Mul (dscores, scale)
    dq_BKGSE = Einsum <equation = "bkgst,bkte->bkgse"> (dproduct, k)
    dq = Reshape (dq_BKGSE, q_shape)
    dk = Einsum <equation = "bkgst,bkgse->bkte"> (dproduct, q_BKGSE)
}
"""

_MASK = """
    heads_q = Shape <start = 0, end = 3> (q)
    full = Concat <axis = 0> (heads_q, keys_1)
    mask_BHST = Expand (mask, full)
    lengths = Concat <axis = 0> (queries_1, keys_1)
    grouped = Concat <axis = 0> (batch, heads, unknown, lengths)
    mask_BKGST = Reshape (mask_BHST, grouped)
    scores = Add (scores_causal, mask_BKGST)
"""

_ALL = "    i_S = Range (zero, queries, one)"
_FROM_START = """    i_0 = Range (zero, queries, one)
    i_S = Add (i_0, start)"""


def _gradient(positions: str, mask: str = "    scores = Identity (scores_causal)") -> str:
    return _BODY.replace("POSITIONS", positions).replace("    MASK", mask)


_SEEN = """
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_ints = [1]> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    queries_1 = Shape <start = 2, end = 3> (q)
    keys_1 = Shape <start = 2, end = 3> (k)
    queries = Squeeze (queries_1, axis0)
    keys = Squeeze (keys_1, axis0)
    i_0 = Range (zero, queries, one)
    i_S = Add (i_0, start)
    j_T = Range (zero, keys, one)
    i_S1 = Unsqueeze (i_S, axis1)
    later = Greater (j_T, i_S1)
    causal_i = Constant <value_int: int = @is_causal> ()
    causal = Cast <to = 9> (causal_i)
    hidden = And (later, causal)
    seen = Not (hidden)
"""

CAUSAL_PARTS = f"""
AttentionPart <size: int = 0, is_causal: int = 0, softcap: float = 0.0> (q, k, v, start) => (y)
{{{_SEEN}
    y = Attention <softcap: float = @softcap> (q, k, v, seen)
}}

ScaledAttentionPart <scale, size: int = 0, is_causal: int = 0, softcap: float = 0.0> (q, k, v, start) => (y)
{{{_SEEN}
    y = Attention <scale: float = @scale, softcap: float = @softcap> (q, k, v, seen)
}}

AttentionGradPart <scale, is_causal, size: int = 0> (q, k, v, dy, start) => (dq, dk, dv)
{{{_gradient(_FROM_START)}"""
"""A scale of 0 stands for the usual one, the inverse root of the channels."""

ATTENTION = f"""
AttentionGrad <scale, is_causal> (q, k, v, dy) => (dq, dk, dv)
{{{_gradient(_ALL)}

MaskedAttentionGrad <scale, is_causal> (q, k, v, mask, dy) => (dq, dk, dv)
{{{_gradient(_ALL, _MASK)}

RotaryEmbeddingGrad <interleaved, num_heads, rotary_embedding_dim> (dy, cos, sin, positions) => (dx)
{{
    back = Neg (sin)
    dx = RotaryEmbedding <interleaved: int = @interleaved, num_heads: int = @num_heads,
                          rotary_embedding_dim: int = @rotary_embedding_dim> (dy, cos, back, positions)
}}
"""
