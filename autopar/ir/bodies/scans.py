"""Scans over the tokens of a sequence: state spaces of Mamba and Mamba 2, the gated delta rule, and their gradients.

`StateSpaceScan` is the selective state-space scan of Mamba 2 (Dao and Gu 2024, section 5). Each head has a state
h [P, N], zeros before the first token, that decays by a number per token:

    step_t = clip(softplus(dt_t + dt_bias), least, most)
    h_t = exp(-step_t exp(a_log)) h_(t-1) + step_t x_t b_t^T        y_t = h_t c_t + d x_t

Its body is the quadratic form of the paper's section 3.1, `y = (L * (C B^T)) (step x) + d x`, where L holds the
products of the decays between two tokens. Inputs are

    x [B, S, H, P], dt [B, S, H], a_log [H], b [B, S, G, N], c [B, S, G, N], d [H], dt_bias [H], with G a divisor of H,

and attributes the least step and the most, 0 for none.

`SelectiveScan` is the scan of Mamba (Gu and Dao 2023, equation 2 with the discretisation of its section 3.6). Each
channel has a state h [N], zeros before the first token, and each number of the state decays at its own rate:

    step_t = softplus(dt_t + dt_bias)
    h_t = exp(-step_t exp(a_log)) h_(t-1) + step_t x_t b_t        y_t = h_t . c_t + d x_t

Inputs are x [B, S, C], dt [B, S, C], a_log [C, N], b [B, S, N], c [B, S, N], d [C], dt_bias [C]. Its body goes from
token to token, and its gradient back over the states, which it computes again.

`GatedDeltaRule` is linear attention that overwrites what the state holds for a key (Yang et al. 2024, Gated Delta
Networks, equation 10). Each head has a state s [K, V] that maps keys to values:

    u_t = exp(-softplus(a_t + dt_bias) exp(a_log)) s_(t-1)
    s_t = u_t + sigmoid(b_t) k_t (v_t - u_t^T k_t)^T        y_t = scale s_t^T q_t

where queries and keys are of length 1: the op normalises them, as the kernels of flash-linear-attention do. Inputs are

    q [B, S, G, K], k [B, S, G, K], v [B, S, H, V], a [B, S, H], b [B, S, H], a_log [H], dt_bias [H],

with G a divisor of H. Its body goes from token to token, and its gradient back over the states, which it computes
again.

The kinds named `Cached...` are steps of decoding: their first input is the state that earlier tokens left, which the
kernel overwrites with the one behind the last token,

    state [B, H, P, N] of `StateSpaceScan`, [B, C, N] of `SelectiveScan`, [B, H, K, V] of `GatedDeltaRule`,

and `CachedConvolution` is the short causal convolution of each channel before such a scan, behind the R tokens that
its taps reach back to:

    cache [B, R, C], x [B, S, C], weight [C, 1, R + 1]

What makes steps, rates and decays is part of the ops, as it is of kernels: whatever their inputs, states decay.

Names: B samples, S positions, H heads, G groups of heads that share two of the inputs, M heads of a group, T source
positions, P channels of a head, C channels, N size of the state, K and V channels of keys and values.
"""

_DECAYS = """
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_int = 1> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    source = Constant <value_ints = [3]> ()
    target = Constant <value_ints = [4]> ()
    unknown = Constant <value_ints = [-1]> ()
    lowest = Constant <value = float {-inf}> ()
    minus_inf = CastLike (lowest, x)
    x_shape = Shape (x)
    dt_shape = Shape (dt)
    tokens = Shape <start = 0, end = 2> (x)
    groups = Shape <start = 2, end = 3> (b)
    size = Shape <start = 3> (x)
    of_heads = Concat <axis = 0> (tokens, groups, unknown)
    of_channels = Concat <axis = 0> (of_heads, size)
    raw_step = Add (dt, dt_bias)
    free_step = Softplus (raw_step)
    least_f = Constant <value_float: float = @least> ()
    most_f = Constant <value_float: float = @most> ()
    least = CastLike (least_f, x)
    most_given = CastLike (most_f, x)
    none = Sub (least, least)
    is_limited = Greater (most_given, none)
    highest = Constant <value = float {inf}> ()
    infinity = CastLike (highest, x)
    most = Where (is_limited, most_given, infinity)
    step = Clip (free_step, least, most)
    exp_a = Exp (a_log)
    a = Neg (exp_a)
    rate = Mul (step, a)
    total_BSH = CumSum (rate, axis1)
    total_BSGM = Reshape (total_BSH, of_heads)
    total_BGMS = Transpose <perm = [0, 2, 3, 1]> (total_BSGM)
    total_BGMS1 = Unsqueeze (total_BGMS, target)
    total_BGM1T = Unsqueeze (total_BGMS, source)
    difference = Sub (total_BGMS1, total_BGM1T)
    first = Constant <value_int = 0> ()
    length_1 = Shape <start = 1, end = 2> (x)
    length = Squeeze (length_1, axis0)
    i_T = Range (first, length, axis1)
    i_S1 = Unsqueeze (i_T, axis_1)
    seen = GreaterOrEqual (i_S1, i_T)
    logarithm = Where (seen, difference, minus_inf)
    decay = Exp (logarithm)
    step_BSH1 = Unsqueeze (step, unknown)
    dtx_BSHP = Mul (step_BSH1, x)
    dtx = Reshape (dtx_BSHP, of_channels)
    scores = Einsum <equation = "bsgn,btgn->bgst"> (c, b)
    scores_1 = Unsqueeze (scores, axis_2)
    weights = Mul (scores_1, decay)
    d_H1 = Unsqueeze (d, unknown)
"""
"""`decay`, the products of decays from token T to token S, and `weights`, these times the products of C and B."""

_STATE_SPACE = f"""
StateSpaceScan <least: float = 0.0, most: float = 0.0> (x, dt, a_log, b, c, d, dt_bias) => (y)
{{{_DECAYS}
    y_BSGMP = Einsum <equation = "bgmst,btgmp->bsgmp"> (weights, dtx)
    scanned = Reshape (y_BSGMP, x_shape)
    passed = Mul (d_H1, x)
    y = Add (scanned, passed)
}}

StateSpaceScanGrad <least: float = 0.0, most: float = 0.0> (x, dt, a_log, b, c, d, dt_bias, dy)
    => (dx, ddt, da_log, db, dc, dd, ddt_bias)
{{{_DECAYS}
    dy_BSGMP = Reshape (dy, of_channels)
    ddtx_BTGMP = Einsum <equation = "bgmst,bsgmp->btgmp"> (weights, dy_BSGMP)
    dweights = Einsum <equation = "bsgmp,btgmp->bgmst"> (dy_BSGMP, dtx)
    dscores = Einsum <equation = "bgmst,bgmst->bgst"> (dweights, decay)
    dc = Einsum <equation = "bgst,btgn->bsgn"> (dscores, b)
    db = Einsum <equation = "bgst,bsgn->btgn"> (dscores, c)
    dlogarithm = Mul (dweights, weights)
    from_S = ReduceSum <keepdims = 0> (dlogarithm, target)
    from_T = ReduceSum <keepdims = 0> (dlogarithm, source)
    dtotal_BGMS = Sub (from_S, from_T)
    dtotal_BSGM = Transpose <perm = [0, 3, 1, 2]> (dtotal_BGMS)
    dtotal = Reshape (dtotal_BSGM, dt_shape)
    drate = CumSum <reverse = 1> (dtotal, axis1)
    ddtx = Reshape (ddtx_BTGMP, x_shape)
    dstep_rate = Mul (drate, a)
    dstep_x = Einsum <equation = "bshp,bshp->bsh"> (ddtx, x)
    dstep_any = Add (dstep_rate, dstep_x)
    is_free = Equal (step, free_step)
    free = CastLike (is_free, x)
    dstep = Mul (dstep_any, free)
    slope = Sigmoid (raw_step)
    ddt = Mul (dstep, slope)
    of_tokens = Constant <value_ints = [0, 1]> ()
    ddt_bias = ReduceSum <keepdims = 0> (ddt, of_tokens)
    da = Einsum <equation = "bsh,bsh->h"> (drate, step)
    da_log = Mul (da, a)
    dx_scanned = Mul (ddtx, step_BSH1)
    dx_passed = Mul (d_H1, dy)
    dx = Add (dx_scanned, dx_passed)
    dd = Einsum <equation = "bshp,bshp->h"> (dy, x)
}}
"""

_SELECTIVE = """
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    zero_f = Constant <value_float = 0.0> ()
    batch = Shape <start = 0, end = 1> (x)
    of_state = Shape (a_log)
    state_shape = Concat <axis = 0> (batch, of_state)
    zero = CastLike (zero_f, x)
    start = Expand (zero, state_shape)
    raw_step = Add (dt, dt_bias)
    step = Softplus (raw_step)
    exp_a = Exp (a_log)
    a = Neg (exp_a)
    written = Mul (step, x)
    step_S = Transpose <perm = [1, 0, 2]> (step)
    written_S = Transpose <perm = [1, 0, 2]> (written)
    b_S = Transpose <perm = [1, 0, 2]> (b)
    c_S = Transpose <perm = [1, 0, 2]> (c)
"""

_SELECTIVE_STEP = """
            step_BC1 = Unsqueeze (step_t, axis_2)
            rate = Mul (step_BC1, a)
            decay = Exp (rate)
            kept = Mul (decay, state)
            written_BC1 = Unsqueeze (written_t, axis_2)
            b_B1N = Unsqueeze (b_t, axis_1)
            added = Mul (written_BC1, b_B1N)
            next = Add (kept, added)
"""
"""From the state before a token to the state behind it."""

_DELTA = """
    three = Constant <value_ints = [3]> ()
    four = Constant <value_ints = [3, 4]> ()
    unknown = Constant <value_ints = [-1]> ()
    zero_f = Constant <value_float = 0.0> ()
    v_shape = Shape (v)
    a_shape = Shape (a)
    tokens = Shape <start = 0, end = 2> (v)
    batch = Shape <start = 0, end = 1> (v)
    groups = Shape <start = 2, end = 3> (k)
    keys = Shape <start = 3> (k)
    values = Shape <start = 3> (v)
    of_heads = Concat <axis = 0> (tokens, groups, unknown)
    of_values = Concat <axis = 0> (of_heads, values)
    v_BSGMV = Reshape (v, of_values)
    raw_step = Add (a, dt_bias)
    step = Softplus (raw_step)
    exp_a = Exp (a_log)
    speed = Neg (exp_a)
    g = Mul (step, speed)
    beta = Sigmoid (b)
    g_BSGM = Reshape (g, of_heads)
    beta_BSGM = Reshape (beta, of_heads)
    factor_BSGM = Exp (g_BSGM)
    members = Shape <start = 3, end = 4> (v_BSGMV)
    state_shape = Concat <axis = 0> (batch, groups, members, keys, values)
    zero = CastLike (zero_f, v)
    start = Expand (zero, state_shape)
    epsilon_f = Constant <value_float = 1e-6> ()
    epsilon = CastLike (epsilon_f, v)
    scale_f = Constant <value_float: float = @scale> ()
    scale = CastLike (scale_f, v)
    k_square = ReduceSumSquare <keepdims = 1> (k, unknown)
    k_raised = Add (k_square, epsilon)
    k_length = Sqrt (k_raised)
    k_unit = Div (k, k_length)
    q_square = ReduceSumSquare <keepdims = 1> (q, unknown)
    q_raised = Add (q_square, epsilon)
    q_length = Sqrt (q_raised)
    q_unit = Div (q, q_length)
    q_scaled = Mul (q_unit, scale)
    q_S = Transpose <perm = [1, 0, 2, 3]> (q_scaled)
    k_S = Transpose <perm = [1, 0, 2, 3]> (k_unit)
    v_S = Transpose <perm = [1, 0, 2, 3, 4]> (v_BSGMV)
    factor_S = Transpose <perm = [1, 0, 2, 3]> (factor_BSGM)
    beta_S = Transpose <perm = [1, 0, 2, 3]> (beta_BSGM)
"""

_STEP = """
            factor_11 = Unsqueeze (factor, four)
            kept = Mul (state, factor_11)
            known = Einsum <equation = "bgmkv,bgk->bgmv"> (kept, key)
            error = Sub (value, known)
            beta_1 = Unsqueeze (rate, three)
            written = Mul (error, beta_1)
            added = Einsum <equation = "bgk,bgmv->bgmkv"> (key, written)
            next = Add (kept, added)
"""
"""From the state before a token to the state behind it."""

_LAST_TO_FIRST = "Slice ({}, last, before, first, last)"
"""A sequence from its last token to its first."""


def _turned(name: str) -> str:
    return f"    {name}_back = {_LAST_TO_FIRST.format(name)}\n"


_SELECTIVE_FORWARD = f"""
SelectiveScan (x, dt, a_log, b, c, d, dt_bias) => (y)
{{{_SELECTIVE}
    end, shown_S = Scan <num_scan_inputs = 4, body = forward
        (state, step_t, written_t, b_t, c_t) => (next, shown) {{{_SELECTIVE_STEP}
            shown = Einsum <equation = "bcn,bn->bc"> (next, c_t)
        }}> (start, step_S, written_S, b_S, c_S)
    shown_BSC = Transpose <perm = [1, 0, 2]> (shown_S)
    passed = Mul (d, x)
    y = Add (shown_BSC, passed)
}}
"""

_SELECTIVE_SCAN = f"""{_SELECTIVE_FORWARD}
SelectiveScanGrad (x, dt, a_log, b, c, d, dt_bias, dy) => (dx, ddt, da_log, db, dc, dd, ddt_bias)
{{{_SELECTIVE}
    first = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [-1]> ()
    before = Constant <value_ints = [-9223372036854775807]> ()
    dy_S = Transpose <perm = [1, 0, 2]> (dy)
    end, next_S, kept_S, decay_S = Scan <num_scan_inputs = 3, body = forward
        (state, step_t, written_t, b_t) => (next, next_kept, kept_kept, decay_kept) {{{_SELECTIVE_STEP}
            next_kept = Identity (next)
            kept_kept = Identity (kept)
            decay_kept = Identity (decay)
        }}> (start, step_S, written_S, b_S)
{"".join(map(_turned, ("step_S", "written_S", "b_S", "c_S", "dy_S", "next_S", "kept_S", "decay_S")))}
    zero_rates = Sub (a_log, a_log)
    dstart, da, dstep_turned, dwritten_turned, db_turned, dc_turned = Scan <num_scan_inputs = 8, body = backward
        (dstate, da_before, step_t, written_t, b_t, c_t, dshown, next, kept, decay)
        => (dbefore, da_behind, dstep_t, dwritten_t, db_t, dc_t) {{
            dc_t = Einsum <equation = "bcn,bc->bn"> (next, dshown)
            dnext_shown = Einsum <equation = "bc,bn->bcn"> (dshown, c_t)
            dnext = Add (dstate, dnext_shown)
            dwritten_t = Einsum <equation = "bcn,bn->bc"> (dnext, b_t)
            db_t = Einsum <equation = "bcn,bc->bn"> (dnext, written_t)
            drate = Mul (dnext, kept)
            dstep_t = Einsum <equation = "bcn,cn->bc"> (drate, a)
            da_t = Einsum <equation = "bcn,bc->cn"> (drate, step_t)
            da_behind = Add (da_before, da_t)
            dbefore = Mul (dnext, decay)
        }}> (start, zero_rates, step_S_back, written_S_back, b_S_back, c_S_back, dy_S_back, next_S_back, kept_S_back,
             decay_S_back)
    dstep_S = {_LAST_TO_FIRST.format("dstep_turned")}
    dwritten_S = {_LAST_TO_FIRST.format("dwritten_turned")}
    db_S = {_LAST_TO_FIRST.format("db_turned")}
    dc_S = {_LAST_TO_FIRST.format("dc_turned")}
    dstep_rate = Transpose <perm = [1, 0, 2]> (dstep_S)
    dwritten = Transpose <perm = [1, 0, 2]> (dwritten_S)
    db = Transpose <perm = [1, 0, 2]> (db_S)
    dc = Transpose <perm = [1, 0, 2]> (dc_S)
    dstep_x = Mul (dwritten, x)
    dstep = Add (dstep_rate, dstep_x)
    slope = Sigmoid (raw_step)
    ddt = Mul (dstep, slope)
    of_tokens = Constant <value_ints = [0, 1]> ()
    ddt_bias = ReduceSum <keepdims = 0> (ddt, of_tokens)
    da_log = Mul (da, a)
    dx_written = Mul (dwritten, step)
    dx_passed = Mul (d, dy)
    dx = Add (dx_written, dx_passed)
    dd = Einsum <equation = "bsc,bsc->c"> (dy, x)
}}
"""

_GATED_DELTA = f"""
GatedDeltaRule <scale> (q, k, v, a, b, a_log, dt_bias) => (y)
{{{_DELTA}
    end, y_S = Scan <num_scan_inputs = 5, body = forward
        (state, query, key, value, factor, rate) => (next, shown) {{{_STEP}
            shown = Einsum <equation = "bgmkv,bgk->bgmv"> (next, query)
        }}> (start, q_S, k_S, v_S, factor_S, beta_S)
    y_BSGMV = Transpose <perm = [1, 0, 2, 3, 4]> (y_S)
    y = Reshape (y_BSGMV, v_shape)
}}

GatedDeltaRuleGrad <scale> (q, k, v, a, b, a_log, dt_bias, dy) => (dq, dk, dv, da, db, da_log, ddt_bias)
{{{_DELTA}
    first = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [-1]> ()
    before = Constant <value_ints = [-9223372036854775807]> ()
    dy_BSGMV = Reshape (dy, of_values)
    dy_S = Transpose <perm = [1, 0, 2, 3, 4]> (dy_BSGMV)
    end, next_S, kept_S, error_S = Scan <num_scan_inputs = 4, body = forward
        (state, key, value, factor, rate) => (next, next_kept, kept_kept, error_kept) {{{_STEP}
            next_kept = Identity (next)
            kept_kept = Identity (kept)
            error_kept = Identity (error)
        }}> (start, k_S, v_S, factor_S, beta_S)
{"".join(map(_turned, ("q_S", "k_S", "factor_S", "beta_S", "dy_S", "next_S", "kept_S", "error_S")))}
    dstart, dq_turned, dk_turned, dv_turned, dg_turned, dbeta_turned = Scan <num_scan_inputs = 8, body = backward
        (dstate, query, key, factor, rate, dshown, next, kept, error)
        => (dbefore, dquery, dkey, dvalue, dg_t, drate) {{
            dquery = Einsum <equation = "bgmkv,bgmv->bgk"> (next, dshown)
            dnext_shown = Einsum <equation = "bgk,bgmv->bgmkv"> (query, dshown)
            dnext = Add (dstate, dnext_shown)
            beta_1 = Unsqueeze (rate, three)
            written = Mul (error, beta_1)
            dwritten = Einsum <equation = "bgmkv,bgk->bgmv"> (dnext, key)
            dvalue = Mul (dwritten, beta_1)
            drate = Einsum <equation = "bgmv,bgmv->bgm"> (dwritten, error)
            dkey_written = Einsum <equation = "bgmkv,bgmv->bgk"> (dnext, written)
            dkey_known = Einsum <equation = "bgmkv,bgmv->bgk"> (kept, dvalue)
            dkey = Sub (dkey_written, dkey_known)
            dkept_known = Einsum <equation = "bgk,bgmv->bgmkv"> (key, dvalue)
            dkept = Sub (dnext, dkept_known)
            dg_t = Einsum <equation = "bgmkv,bgmkv->bgm"> (dkept, kept)
            factor_11 = Unsqueeze (factor, four)
            dbefore = Mul (dkept, factor_11)
        }}> (start, q_S_back, k_S_back, factor_S_back, beta_S_back, dy_S_back, next_S_back, kept_S_back, error_S_back)
    dq_S = {_LAST_TO_FIRST.format("dq_turned")}
    dk_S = {_LAST_TO_FIRST.format("dk_turned")}
    dv_S = {_LAST_TO_FIRST.format("dv_turned")}
    dg_S = {_LAST_TO_FIRST.format("dg_turned")}
    dbeta_S = {_LAST_TO_FIRST.format("dbeta_turned")}
    dq_scaled = Transpose <perm = [1, 0, 2, 3]> (dq_S)
    dq_unit = Mul (dq_scaled, scale)
    dk_unit = Transpose <perm = [1, 0, 2, 3]> (dk_S)
    dq_along = Einsum <equation = "bsgk,bsgk,bsgl->bsgl"> (q_unit, dq_unit, q_unit)
    dk_along = Einsum <equation = "bsgk,bsgk,bsgl->bsgl"> (k_unit, dk_unit, k_unit)
    dq_across = Sub (dq_unit, dq_along)
    dk_across = Sub (dk_unit, dk_along)
    dq = Div (dq_across, q_length)
    dk = Div (dk_across, k_length)
    dv_BSGMV = Transpose <perm = [1, 0, 2, 3, 4]> (dv_S)
    dg_BSGM = Transpose <perm = [1, 0, 2, 3]> (dg_S)
    dbeta_BSGM = Transpose <perm = [1, 0, 2, 3]> (dbeta_S)
    dv = Reshape (dv_BSGMV, v_shape)
    dg = Reshape (dg_BSGM, a_shape)
    dbeta = Reshape (dbeta_BSGM, a_shape)
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, v)
    rest = Sub (one, beta)
    beta_slope = Mul (beta, rest)
    db = Mul (dbeta, beta_slope)
    dstep = Mul (dg, speed)
    step_slope = Sigmoid (raw_step)
    da = Mul (dstep, step_slope)
    of_tokens = Constant <value_ints = [0, 1]> ()
    ddt_bias = ReduceSum <keepdims = 0> (da, of_tokens)
    da_log = Einsum <equation = "bsh,bsh->h"> (dg, g)
}}
"""

_CACHED_SELECTIVE = _SELECTIVE_FORWARD.replace("SelectiveScan (x,", "CachedSelectiveScan (cache, x,").replace(
    "start = Expand (zero, state_shape)", "start = Identity (cache)"
)

_CACHED = f"""{_CACHED_SELECTIVE}
CachedStateSpaceScan <least: float = 0.0, most: float = 0.0> (state, x, dt, a_log, b, c, d, dt_bias) => (y)
{{{_DECAYS}
    y_BSGMP = Einsum <equation = "bgmst,btgmp->bsgmp"> (weights, dtx)
    batch = Shape <start = 0, end = 1> (x)
    of_state = Shape <start = 2> (state)
    grouped = Concat <axis = 0> (batch, groups, unknown, of_state)
    state_BGMPN = Reshape (state, grouped)
    read_BSGMP = Einsum <equation = "bsgn,bgmpn->bsgmp"> (c, state_BGMPN)
    left_BSGM = Exp (total_BSGM)
    left_BSGM1 = Unsqueeze (left_BSGM, unknown)
    earlier = Mul (read_BSGMP, left_BSGM1)
    both = Add (y_BSGMP, earlier)
    scanned = Reshape (both, x_shape)
    passed = Mul (d_H1, x)
    y = Add (scanned, passed)
}}

CachedGatedDeltaRule <scale> (cache, q, k, v, a, b, a_log, dt_bias) => (y)
{{{_DELTA.replace("start = Expand (zero, state_shape)", "start = Reshape (cache, state_shape)")}
    end, y_S = Scan <num_scan_inputs = 5, body = forward
        (state, query, key, value, factor, rate) => (next, shown) {{{_STEP}
            shown = Einsum <equation = "bgmkv,bgk->bgmv"> (next, query)
        }}> (start, q_S, k_S, v_S, factor_S, beta_S)
    y_BSGMV = Transpose <perm = [1, 0, 2, 3, 4]> (y_S)
    y = Reshape (y_BSGMV, v_shape)
}}

CachedConvolution (cache, x, weight) => (y)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    axis0 = Constant <value_ints = [0]> ()
    axis1 = Constant <value_ints = [1]> ()
    tokens_1 = Shape <start = 1, end = 2> (x)
    tokens = Squeeze (tokens_1, axis0)
    taps_1 = Shape <start = 2, end = 3> (weight)
    taps = Squeeze (taps_1, axis0)
    i_S = Range (zero, tokens, one)
    i_S1 = Unsqueeze (i_S, axis1)
    j_R = Range (zero, taps, one)
    place = Add (i_S1, j_R)
    all = Concat <axis = 1> (cache, x)
    windows_BSRC = Gather <axis = 1> (all, place)
    weight_CR = Squeeze (weight, axis1)
    y = Einsum <equation = "bsrc,cr->bsc"> (windows_BSRC, weight_CR)
}}
"""

SCANS = _STATE_SPACE + _SELECTIVE_SCAN + _GATED_DELTA + _CACHED
