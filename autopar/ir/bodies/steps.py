"""Losses and optimizers."""

_NEWTON_SCHULZ = "".join(
    f"""
    gram_{step} = Einsum <equation = "...ij,...kj->...ik"> (x_{step}, x_{step})
    square_{step} = MatMul (gram_{step}, gram_{step})
    linear_{step} = Mul (b, gram_{step})
    cubic_{step} = Mul (c, square_{step})
    both_{step} = Add (linear_{step}, cubic_{step})
    bent_{step} = MatMul (both_{step}, x_{step})
    kept_{step} = Mul (a, x_{step})
    x_{step + 1} = Add (kept_{step}, bent_{step})"""
    for step in range(5)
)
"""Five iterations x' = a x + (b (x x^T) + c (x x^T)^2) x, after which all singular values are near 1."""

LOSS = """
CrossEntropyStats (logits, row_max, labels, classes) => (sum_exp, picked)
{
    last = Constant <value_ints = [-1]> ()
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, logits)
    shifted = Sub (logits, row_max)
    weight = Exp (shifted)
    sum_exp = ReduceSum <keepdims = 1> (weight, last)
    labels_1 = Unsqueeze (labels, last)
    hit = Equal (labels_1, classes)
    own = Where (hit, logits, zero)
    picked = ReduceSum <keepdims = 1> (own, last)
}

CrossEntropy (row_max, sum_exp, picked) => (loss)
{
    log_sum = Log (sum_exp)
    log_total = Add (row_max, log_sum)
    terms = Sub (log_total, picked)
    loss = ReduceSum <keepdims = 0> (terms)
}

CrossEntropyGrad (logits, row_max, sum_exp, labels, classes, dloss) => (dlogits)
{
    last = Constant <value_ints = [-1]> ()
    shifted = Sub (logits, row_max)
    weight = Exp (shifted)
    probability = Div (weight, sum_exp)
    labels_1 = Unsqueeze (labels, last)
    hit = Equal (labels_1, classes)
    target = CastLike (hit, logits)
    difference = Sub (probability, target)
    dlogits = Mul (difference, dloss)
}
"""

_UNPACKED = """
    last = Constant <value_ints = [-1]> ()
    half_f = Constant <value_float = 128.0> ()
    half = CastLike (half_f, p)
    steps1_f = Constant <value_float = 127.0> ()
    steps1 = CastLike (steps1_f, p)
    steps2_f = Constant <value_float = 255.0> ()
    steps2 = CastLike (steps2_f, p)
    tiny_f = Constant <value_float = 1e-30> ()
    tiny = CastLike (tiny_f, p)
    leading = Shape <end = -1> (p)
    numbers = Shape <start = -1> (m_scale)
    grouped = Concat <axis = 0> (leading, numbers, last)
    whole = Shape (p)
    m_parts = CastLike (m_bytes, p)
    m_signed = Sub (m_parts, half)
    m_grouped = Reshape (m_signed, grouped)
    m_scale1 = Unsqueeze (m_scale, last)
    m_scaled = Mul (m_grouped, m_scale1)
    m_steps = Div (m_scaled, steps1)
    m = Reshape (m_steps, whole)
    v_parts = CastLike (v_bytes, p)
    v_grouped = Reshape (v_parts, grouped)
    v_scale1 = Unsqueeze (v_scale, last)
    v_scaled = Mul (v_grouped, v_scale1)
    v_steps = Div (v_scaled, steps2)
    v = Reshape (v_steps, whole)"""
"""Moments in 8 bits as numbers."""

_PACKED = """
    m_blocks = Reshape (m_next, grouped)
    m_sizes = Abs (m_blocks)
    m_scale_next = ReduceMax <keepdims = 0> (m_sizes, last)
    m_unit1 = Unsqueeze (m_scale_next, last)
    m_unit = Max (m_unit1, tiny)
    m_shares = Div (m_blocks, m_unit)
    m_levels = Mul (m_shares, steps1)
    m_round = Round (m_levels)
    m_shifted = Add (m_round, half)
    m_stored = Cast <to = 2> (m_shifted)
    m_bytes_next = Reshape (m_stored, whole)
    v_blocks = Reshape (v_next, grouped)
    v_sizes = Abs (v_blocks)
    v_scale_next = ReduceMax <keepdims = 0> (v_sizes, last)
    v_unit1 = Unsqueeze (v_scale_next, last)
    v_unit = Max (v_unit1, tiny)
    v_shares = Div (v_sizes, v_unit)
    v_levels = Mul (v_shares, steps2)
    v_round = Round (v_levels)
    v_stored = Cast <to = 2> (v_round)
    v_bytes_next = Reshape (v_stored, whole)"""
"""Numbers as moments in 8 bits."""

_ADAM = """
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, p)
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, p)
    rate_f = Constant <value_float: float = @learning_rate> ()
    rate = CastLike (rate_f, p)
    beta1_f = Constant <value_float: float = @beta1> ()
    beta1 = CastLike (beta1_f, p)
    beta2_f = Constant <value_float: float = @beta2> ()
    beta2 = CastLike (beta2_f, p)
    epsilon_f = Constant <value_float: float = @epsilon> ()
    epsilon = CastLike (epsilon_f, p)
    decay_f = Constant <value_float: float = @weight_decay> ()
    decay = CastLike (decay_f, p)
    t = CastLike (step, p)
    fresh1 = Sub (one, beta1)
    fresh2 = Sub (one, beta2)
    m_old = Mul (beta1, m)
    m_new = Mul (fresh1, g)
    m_next = Add (m_old, m_new)
    square = Mul (g, g)
    v_old = Mul (beta2, v)
    v_new = Mul (fresh2, square)
    v_next = Add (v_old, v_new)
    power1 = Pow (beta1, t)
    power2 = Pow (beta2, t)
    correction1 = Sub (one, power1)
    correction2 = Sub (one, power2)
    mean = Div (m_next, correction1)
    spread = Div (v_next, correction2)
    # A sum of squares is never negative; random probes may be.
    variance = Max (spread, zero)
    root = Sqrt (variance)
    padded = Add (root, epsilon)
    direction = Div (mean, padded)
    decayed = Mul (decay, p)
    full = Add (direction, decayed)
    change = Mul (rate, full)
    p_next = Sub (p, change)"""

OPTIMIZERS = f"""
Adam <learning_rate, beta1, beta2, epsilon, weight_decay> (p, m, v, g, step) => (p_next, m_next, v_next)
{{{_ADAM}
}}

Adam8Bit <learning_rate, beta1, beta2, epsilon, weight_decay>
(p, m_bytes, m_scale, v_bytes, v_scale, g, step) => (p_next, m_bytes_next, m_scale_next, v_bytes_next, v_scale_next)
{{{_UNPACKED}{_ADAM}{_PACKED}
}}

SGD <learning_rate, momentum> (p, m, g) => (p_next, m_next)
{{
    rate_f = Constant <value_float: float = @learning_rate> ()
    rate = CastLike (rate_f, p)
    momentum_f = Constant <value_float: float = @momentum> ()
    momentum = CastLike (momentum_f, p)
    kept = Mul (momentum, m)
    m_next = Add (kept, g)
    change = Mul (rate, m_next)
    p_next = Sub (p, change)
}}

Lion <learning_rate, beta1, beta2, weight_decay> (p, m, g) => (p_next, m_next)
{{
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, p)
    rate_f = Constant <value_float: float = @learning_rate> ()
    rate = CastLike (rate_f, p)
    beta1_f = Constant <value_float: float = @beta1> ()
    beta1 = CastLike (beta1_f, p)
    beta2_f = Constant <value_float: float = @beta2> ()
    beta2 = CastLike (beta2_f, p)
    decay_f = Constant <value_float: float = @weight_decay> ()
    decay = CastLike (decay_f, p)
    fresh1 = Sub (one, beta1)
    fresh2 = Sub (one, beta2)
    m_seen = Mul (beta1, m)
    g_seen = Mul (fresh1, g)
    mixed = Add (m_seen, g_seen)
    direction = Sign (mixed)
    m_old = Mul (beta2, m)
    m_new = Mul (fresh2, g)
    m_next = Add (m_old, m_new)
    decayed = Mul (decay, p)
    full = Add (direction, decayed)
    change = Mul (rate, full)
    p_next = Sub (p, change)
}}

Muon <learning_rate, momentum, epsilon, weight_decay> (p, m, g) => (p_next, m_next)
{{
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, p)
    a_f = Constant <value_float = 3.4445> ()
    a = CastLike (a_f, p)
    b_f = Constant <value_float = -4.775> ()
    b = CastLike (b_f, p)
    c_f = Constant <value_float = 2.0315> ()
    c = CastLike (c_f, p)
    rate_f = Constant <value_float: float = @learning_rate> ()
    rate = CastLike (rate_f, p)
    momentum_f = Constant <value_float: float = @momentum> ()
    momentum = CastLike (momentum_f, p)
    epsilon_f = Constant <value_float: float = @epsilon> ()
    epsilon = CastLike (epsilon_f, p)
    decay_f = Constant <value_float: float = @weight_decay> ()
    decay = CastLike (decay_f, p)
    fresh = Sub (one, momentum)
    m_old = Mul (momentum, m)
    m_new = Mul (fresh, g)
    m_next = Add (m_old, m_new)
    ahead = Mul (momentum, m_next)
    wanted = Add (m_new, ahead)
    matrix = Constant <value_ints = [-2, -1]> ()
    norm = ReduceL2 <keepdims = 1> (wanted, matrix)
    length = Max (norm, epsilon)
    x_0 = Div (wanted, length){_NEWTON_SCHULZ}
    sides = Shape <start = -2> (p)
    longest_i = ReduceMax <keepdims = 0> (sides)
    longest = CastLike (longest_i, p)
    root = Sqrt (longest)
    fifth_f = Constant <value_float = 0.2> ()
    fifth = CastLike (fifth_f, p)
    scale = Mul (fifth, root)
    direction = Mul (scale, x_5)
    decayed = Mul (decay, p)
    full = Add (direction, decayed)
    change = Mul (rate, full)
    p_next = Sub (p, change)
}}
"""
