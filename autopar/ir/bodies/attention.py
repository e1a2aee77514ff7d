"""Gradients of attention and of rotary positions, and attention of some of the queries or of some of the heads.

The kinds named `...Part` are what a device runs that holds only the queries from `start` on, and all keys: a query
attends to the keys up to its own position in the whole sequence. The kinds named `...HeadsPart` are what a device runs
that holds only the query heads from `start` on of `size` heads, and all heads of keys and values: of these each query
head takes the one of its group (tensor parallelism over more devices than there are key heads).
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
SCORES_GRADIENT
    dproduct = Mul (dscores, scale)
OPERANDS_GRADIENT
}
"""

SCORES_GRADIENT = """
    dv = Einsum <equation = "bkgst,bkgsf->bktf"> (p, dy_BKGSF)
    dp = Einsum <equation = "bkgsf,bktf->bkgst"> (dy_BKGSF, v)
    weighted = Mul (p, dp)
    total = ReduceSum <keepdims = 1> (weighted, unknown)
    shifted = Sub (dp, total)
    dscores = Mul (p, shifted)
""".strip("\n")
"""From dy and the probabilities `p` to the gradients of the values and of the scores."""

OPERANDS_GRADIENT = """
    dq_BKGSE = Einsum <equation = "bkgst,bkte->bkgse"> (dproduct, k)
    dq = Reshape (dq_BKGSE, q_shape)
    dk = Einsum <equation = "bkgst,bkgse->bkte"> (dproduct, q_BKGSE)
""".strip("\n")
"""From the gradient of the products of queries with keys to those of queries and keys."""

_MASK = """
    heads_q = Shape <start = 0, end = 3> (q)
    full = Concat <axis = 0> (heads_q, keys_1)
    mask_BHST = Expand (mask, full)
    lengths = Concat <axis = 0> (queries_1, keys_1)
    grouped = Concat <axis = 0> (batch, heads, unknown, lengths)
    mask_BKGST = Reshape (mask_BHST, grouped)
    scores = Add (scores_causal, mask_BKGST)
"""

ALL_QUERIES = "    i_S = Range (zero, queries, one)"
_FROM_START = """    i_0 = Range (zero, queries, one)
    i_S = Add (i_0, start)"""


def attention_gradient(positions: str, mask: str = "    scores = Identity (scores_causal)") -> str:
    """Return the body of the gradient of attention, up to its closing brace.

    Args:
        positions: Lines that number the queries.
        mask: Lines from `scores_causal` to `scores`.
    """
    body = _BODY.replace("SCORES_GRADIENT", SCORES_GRADIENT).replace("OPERANDS_GRADIENT", OPERANDS_GRADIENT)
    return body.replace("POSITIONS", positions).replace("    MASK", mask)


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
{{{attention_gradient(_FROM_START)}"""
"""A scale of 0 stands for the usual one, the inverse root of the channels."""


SELECT_KEY_HEADS = """
    all_axis = Constant <value_ints = [0]> ()
    all_zero = Constant <value_int = 0> ()
    all_one = Constant <value_int = 1> ()
    own_1 = Shape <start = 1, end = 2> (q)
    groups_1 = Shape <start = 1, end = 2> (all_k)
    own = Squeeze (own_1, all_axis)
    groups = Squeeze (groups_1, all_axis)
    whole = Constant <value_int: int = @size> ()
    per_group = Div (whole, groups)
    first_H = Range (all_zero, own, all_one)
    head_H = Add (first_H, start)
    group_H = Div (head_H, per_group)
    k = Gather <axis = 1> (all_k, group_H)
    v = Gather <axis = 1> (all_v, group_H)
"""
"""The keys and values of the groups of the query heads a device holds."""

SUM_KEY_HEADS = """
    group_G = Range (all_zero, groups, all_one)
    group_G1 = Unsqueeze (group_G, axis1)
    is_own = Equal (group_G1, group_H)
    is_own_GH = CastLike (is_own, q)
    dk = Einsum <equation = "gh,bhte->bgte"> (is_own_GH, own_dk)
    dv = Einsum <equation = "gh,bhtf->bgtf"> (is_own_GH, own_dv)
}
"""
"""The gradients of all key and value heads: what the query heads of the device add to them."""


def heads_gradient(body: str) -> str:
    """Return the gradient of attention of some heads, given that of whole attention."""
    own = body.replace("dv = Einsum", "own_dv = Einsum").replace("dk = Einsum", "own_dk = Einsum")
    return f"{SELECT_KEY_HEADS}{own.rstrip().removesuffix('}')}{SUM_KEY_HEADS}"


def _heads(name: str, mask: str = "", scaled: str = "") -> str:
    """Return attention of some heads, with a mask or without, with a scale or the usual one."""
    scale = "scale: float = @scale, " if scaled else ""
    return f"""
{name} <{scaled}size, is_causal: int = 0, softcap: float = 0.0> (q, all_k, all_v, {mask}start) => (y)
{{{SELECT_KEY_HEADS}
    y = Attention <{scale}is_causal: int = @is_causal, softcap: float = @softcap> (q, k, v{", mask" if mask else ""})
}}
"""


HEADS_PARTS = f"""
{_heads("AttentionHeadsPart")}
{_heads("ScaledAttentionHeadsPart", scaled="scale, ")}
{_heads("MaskedAttentionHeadsPart", "mask, ")}
{_heads("ScaledMaskedAttentionHeadsPart", "mask, ", "scale, ")}

AttentionGradHeadsPart <scale, is_causal, size> (q, all_k, all_v, dy, start) => (dq, dk, dv)
{{{heads_gradient(attention_gradient(ALL_QUERIES))}

MaskedAttentionGradHeadsPart <scale, is_causal, size> (q, all_k, all_v, mask, dy, start) => (dq, dk, dv)
{{{heads_gradient(attention_gradient(ALL_QUERIES, _MASK))}"""

ATTENTION = f"""
AttentionGrad <scale, is_causal> (q, k, v, dy) => (dq, dk, dv)
{{{attention_gradient(ALL_QUERIES)}

MaskedAttentionGrad <scale, is_causal> (q, k, v, mask, dy) => (dq, dk, dv)
{{{attention_gradient(ALL_QUERIES, _MASK)}

RotaryEmbeddingGrad <interleaved, num_heads, rotary_embedding_dim> (dy, cos, sin, positions) => (dx)
{{
    back = Neg (sin)
    dx = RotaryEmbedding <interleaved: int = @interleaved, num_heads: int = @num_heads,
                          rotary_embedding_dim: int = @rotary_embedding_dim> (dy, cos, back, positions)
}}
"""
