"""Causal attention of which a query sees only the keys nearby, its gradient, and both for some queries or heads.

`CausalAttention` is the attention of models whose layers have a sliding window (Mistral, Gemma 2 and 3, gpt-oss) or
chunks of tokens (Llama 4), or whose scores have a soft cap (Gemma 2). `SinkAttention` has besides a logit per query
head that takes part in the denominator of the softmax and yields no value (gpt-oss). Their inputs are

    q [B, H, S, D], k [B, Hkv, T, D], v [B, Hkv, T, F], sinks [H], with Hkv a divisor of H and S at most T,

and their attributes, of which 0 stands for none,

    scale      factor of the products of queries and keys
    window     a query sees so many keys, its own the last of them
    chunk      a query sees keys of its own chunk: tokens 0 to chunk - 1 are the first chunk
    softcap    scores are softcap * tanh(scores / softcap)

The queries are those of the last S of T tokens. The kinds named `...Part` and `...HeadsPart` are run by devices that
hold some of the queries or some of the query heads, as in `attention`.

The kinds named `Cached...` are steps of decoding: keys and values of the C tokens before lie in caches, and those of
the S tokens of the step are written behind them. `CachedLatentAttention` is the absorbed form of multi-head latent
attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2): one vector per token, of `rank` latent elements and those of
the rotated key, is the key of all heads, and its latent elements are the value. Their inputs are

    q [B, H, S, D], cached_k [B, Hkv, C, D], cached_v [B, Hkv, C, F], k [B, Hkv, S, D], v [B, Hkv, S, F], sinks [H]
    q [B, H, S, E], cache [B, C, E], latent [B, S, E]
"""

from autopar.ir.bodies.attention import OPERANDS_GRADIENT, SCORES_GRADIENT, SELECT_KEY_HEADS, heads_gradient

_ATTRS = "scale, window: int = 0, chunk: int = 0, softcap: float = 0.0"

OUT_OF_REACH = """\
    window = Constant <value_int: int = @window> ()
    has_window = Greater (window, zero)
    behind = GreaterOrEqual (distance, window)
    too_far = And (behind, has_window)
    chunk = Constant <value_int: int = @chunk> ()
    has_chunk = Greater (chunk, zero)
    chunk_size = Max (chunk, one)
    chunk_of_i = Div (i_S1, chunk_size)
    chunk_of_j = Div (j_T, chunk_size)
    before = Less (chunk_of_j, chunk_of_i)
    other_chunk = And (before, has_chunk)
    out_of_reach = Or (too_far, other_chunk)
"""
"""Whether keys `j_T` lie outside of the window or the chunk of queries `i_S1`, which are `distance` tokens later."""

_SCORES = """
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_ints = [1]> ()
    unknown = Constant <value_ints = [-1]> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    minus = Constant <value = float {-inf}> ()
    minus_inf = CastLike (minus, q)
    zero_f = Constant <value_float = 0.0> ()
    zero_q = CastLike (zero_f, q)
    one_f = Constant <value_float = 1.0> ()
    one_q = CastLike (one_f, q)
    scale_f = Constant <value_float: float = @scale> ()
    scale = CastLike (scale_f, q)
    batch = Shape <start = 0, end = 1> (k)
    heads = Shape <start = 1, end = 2> (k)
    length_q = Shape <start = 2, end = 4> (q)
    q_grouped = Concat <axis = 0> (batch, heads, unknown, length_q)
    q_BKGSE = Reshape (q, q_grouped)
    product = Einsum <equation = "bkgse,bkte->bkgst"> (q_BKGSE, k)
    scaled = Mul (product, scale)
    softcap_f = Constant <value_float: float = @softcap> ()
    softcap = CastLike (softcap_f, q)
    uncapped = Equal (softcap, zero_q)
    divisor = Where (uncapped, one_q, softcap)
    quotient = Div (scaled, divisor)
    bent = Tanh (quotient)
    bent_scaled = Mul (bent, divisor)
    capped = Where (uncapped, scaled, bent_scaled)
    queries_1 = Shape <start = 2, end = 3> (q)
    keys_1 = Shape <start = 2, end = 3> (k)
    queries = Squeeze (queries_1, axis0)
    keys = Squeeze (keys_1, axis0)
POSITIONS
    last = Add (first, queries)
    i_S = Range (first, last, one)
    i_S1 = Unsqueeze (i_S, axis1)
    j_T = Range (zero, keys, one)
    distance = Sub (i_S1, j_T)
    later = Less (distance, zero)
OUT_OF_REACH
    hidden = Or (later, out_of_reach)
    scores = Where (hidden, minus_inf, capped)
""".replace("OUT_OF_REACH\n", OUT_OF_REACH)

_LAST_QUERIES = "    first = Sub (keys, queries)"
_FROM_START = """    whole_queries = Constant <value_int: int = @size> ()
    earlier = Sub (keys, whole_queries)
    first = Add (earlier, start)"""

_PLAIN = """
    p = Softmax <axis = -1> (scores)
"""

_WITH_SINKS = """
    sinks_grouped = Concat <axis = 0> (heads, unknown, axis1, axis1)
    sinks_KG11 = Reshape (sinks, sinks_grouped)
    largest_score = ReduceMax <keepdims = 1> (scores, unknown)
    largest = Max (largest_score, sinks_KG11)
    scores_shifted = Sub (scores, largest)
    sinks_shifted = Sub (sinks_KG11, largest)
    e_scores = Exp (scores_shifted)
    e_sinks = Exp (sinks_shifted)
    sum_scores = ReduceSum <keepdims = 1> (e_scores, unknown)
    denominator = Add (sum_scores, e_sinks)
    p = Div (e_scores, denominator)
"""

_RESULT = """
    y_BKGSF = Einsum <equation = "bkgst,bktf->bkgsf"> (p, v)
    front = Shape <start = 0, end = 3> (q)
    width = Shape <start = 3, end = 4> (v)
    y_shape = Concat <axis = 0> (front, width)
    y = Reshape (y_BKGSF, y_shape)
}
"""

_GRADIENT = f"""
    q_shape = Shape (q)
    length_y = Shape <start = 2, end = 4> (dy)
    y_grouped = Concat <axis = 0> (batch, heads, unknown, length_y)
    dy_BKGSF = Reshape (dy, y_grouped)
{SCORES_GRADIENT}
    bent_squared = Mul (bent, bent)
    slope_capped = Sub (one_q, bent_squared)
    slope = Where (uncapped, one_q, slope_capped)
    dscaled = Mul (dscores, slope)
    dproduct = Mul (dscaled, scale)
{OPERANDS_GRADIENT}
"""

# A sink's score adds nothing to y, so that its gradient is -p_sink * total.
_SINKS_GRADIENT = """
    p_sink = Div (e_sinks, denominator)
    dsinks_KG = Einsum <equation = "bkgso,bkgso->kg"> (p_sink, total)
    dsinks_H = Reshape (dsinks_KG, unknown)
    dsinks = Neg (dsinks_H)
"""

_SELECT_SINKS = """
    sinks = Gather <axis = 0> (all_sinks, head_H)
"""

_SUM_SINKS = """
    no_sinks = Mul (all_sinks, zero_q)
    dsinks = ScatterElements <axis = 0> (no_sinks, head_H, own_dsinks)
"""


def _forward(positions: str, *, sinks: bool) -> str:
    return _SCORES.replace("POSITIONS", positions) + (_WITH_SINKS if sinks else _PLAIN) + _RESULT


def _gradient(positions: str, *, sinks: bool) -> str:
    scores = _SCORES.replace("POSITIONS", positions) + (_WITH_SINKS if sinks else _PLAIN)
    return f"{scores}{_GRADIENT}{_SINKS_GRADIENT if sinks else ''}}}\n"


def _heads(*, sinks: bool) -> str:
    return SELECT_KEY_HEADS + (_SELECT_SINKS if sinks else "") + _forward(_LAST_QUERIES, sinks=sinks)


def _gradient_heads(*, sinks: bool) -> str:
    body = _gradient(_LAST_QUERIES, sinks=sinks)
    if sinks:
        own = body.replace("dsinks = Neg", "own_dsinks = Neg").rstrip().removesuffix("}")
        body = f"{own}{_SUM_SINKS}}}\n"
    summed = heads_gradient(body)
    return summed.replace(SELECT_KEY_HEADS, SELECT_KEY_HEADS + _SELECT_SINKS) if sinks else summed


def _kinds(name: str, *, sinks: bool) -> str:
    """Return attention with or without sinks, its gradient, and both for some queries and for some query heads."""
    with_sinks, dsinks = (", sinks", ", dsinks") if sinks else ("", "")
    all_sinks = ", all_sinks" if sinks else ""
    return f"""
{name} <{_ATTRS}> (q, k, v{with_sinks}) => (y)
{{{_forward(_LAST_QUERIES, sinks=sinks)}
{name}Grad <{_ATTRS}> (q, k, v{with_sinks}, dy) => (dq, dk, dv{dsinks})
{{{_gradient(_LAST_QUERIES, sinks=sinks)}
{name}Part <{_ATTRS}, size> (q, k, v{with_sinks}, start) => (y)
{{{_forward(_FROM_START, sinks=sinks)}
{name}GradPart <{_ATTRS}, size> (q, k, v{with_sinks}, dy, start) => (dq, dk, dv{dsinks})
{{{_gradient(_FROM_START, sinks=sinks)}
{name}HeadsPart <{_ATTRS}, size> (q, all_k, all_v{all_sinks}, start) => (y)
{{{_heads(sinks=sinks)}
{name}GradHeadsPart <{_ATTRS}, size> (q, all_k, all_v{all_sinks}, dy, start) => (dq, dk, dv{dsinks})
{{{_gradient_heads(sinks=sinks)}
"""


_JOINED = """
    {all}k = Concat <axis = 2> (cached_k, own_k)
    {all}v = Concat <axis = 2> (cached_v, own_v)
"""

_LATENT = """
    key_head_axis = Constant <value_ints = [1]> ()
    first_latent = Constant <value_ints = [0]> ()
    last_axis = Constant <value_ints = [3]> ()
    rank = Constant <value_int: int = @rank> ()
    end_latent = Unsqueeze (rank, first_latent)
    tokens_BTE = Concat <axis = 1> (cache, latent)
    k = Unsqueeze (tokens_BTE, key_head_axis)
    v = Slice (k, first_latent, end_latent, last_axis)
"""


def _cached(name: str, *, sinks: bool) -> str:
    """Return a step of decoding with or without sinks, and the same for some query heads."""
    inputs = "q, cached_k, cached_v, own_k, own_v"
    with_sinks, all_sinks = (", sinks", ", all_sinks") if sinks else ("", "")
    joined, all_joined = _JOINED.format(all=""), _JOINED.format(all="all_")
    return f"""
{name} <{_ATTRS}> ({inputs}{with_sinks}) => (y)
{{{joined}{_forward(_LAST_QUERIES, sinks=sinks)}
{name}HeadsPart <{_ATTRS}, size> ({inputs}{all_sinks}, start) => (y)
{{{all_joined}{_heads(sinks=sinks)}
"""


CAUSAL_ATTENTION = _kinds("CausalAttention", sinks=False) + _kinds("SinkAttention", sinks=True)

CACHED_ATTENTION = f"""
{_cached("CachedAttention", sinks=False)}
{_cached("CachedSinkAttention", sinks=True)}

CachedLatentAttention <{_ATTRS}, rank: int = 0> (q, cache, latent) => (y)
{{{_LATENT}{_forward(_LAST_QUERIES, sinks=False)}
"""
