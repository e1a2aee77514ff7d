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

# What heads share with cross-entropies of logits, given `logits`.
_STATS = """\
    last = Constant <value_ints = [-1]> ()
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, logits)
    shifted = Sub (logits, row_max)
    exponential = Exp (shifted)
    sum_exp = ReduceSum <keepdims = 1> (exponential, last)
    labels_1 = Unsqueeze (labels, last)
    hit = Equal (labels_1, classes)
    own = Where (hit, logits, zero)
    picked = ReduceSum <keepdims = 1> (own, last)
"""
_GRADIENT = """\
    last = Constant <value_ints = [-1]> ()
    shifted = Sub (logits, row_max)
    exponential = Exp (shifted)
    probability = Div (exponential, sum_exp)
    labels_1 = Unsqueeze (labels, last)
    hit = Equal (labels_1, classes)
    target = CastLike (hit, logits)
    difference = Sub (probability, target)
    dlogits = Mul (difference, dloss)
"""

LOSS = f"""
CrossEntropyStats (logits, row_max, labels, classes) => (sum_exp, picked)
{{
{_STATS}}}

CrossEntropy (row_max, sum_exp, picked) => (loss)
{{
    log_sum = Log (sum_exp)
    log_total = Add (row_max, log_sum)
    terms = Sub (log_total, picked)
    loss = ReduceSum <keepdims = 0> (terms)
}}

CrossEntropyGrad (logits, row_max, sum_exp, labels, classes, dloss) => (dlogits)
{{
{_GRADIENT}}}
"""

HEADS = f"""
HeadRowMax (hidden, weight) => (row_max)
{{
    last = Constant <value_ints = [-1]> ()
    logits = MatMul (hidden, weight)
    row_max = ReduceMax <keepdims = 1> (logits, last)
}}

HeadStats (hidden, weight, row_max, labels, classes) => (sum_exp, picked)
{{
    logits = MatMul (hidden, weight)
{_STATS}}}

HeadGrad (hidden, weight, row_max, sum_exp, labels, classes, dloss) => (dhidden, dweight)
{{
    logits = MatMul (hidden, weight)
{_GRADIENT}    turned = Transpose <perm = [1, 0]> (weight)
    dhidden = MatMul (dlogits, turned)
    width = Shape <start = -1> (hidden)
    number = Shape <start = -1> (dlogits)
    hidden_shape = Concat <axis = 0> (last, width)
    dlogits_shape = Concat <axis = 0> (last, number)
    hidden_2 = Reshape (hidden, hidden_shape)
    dlogits_2 = Reshape (dlogits, dlogits_shape)
    columns = Transpose <perm = [1, 0]> (hidden_2)
    dweight = MatMul (columns, dlogits_2)
}}
"""
"""Heads with their cross-entropy (`autopar.training.chunked_loss`)."""

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

_ADAFACTOR_DIRECTION = """
    epsilon1_f = Constant <value_float: float = @epsilon1> ()
    epsilon1 = CastLike (epsilon1_f, g)
    rows_f = Constant <value_float: float = @rows> ()
    rows = CastLike (rows_f, g)
    mean = Div (total, rows)
    mean_1 = Max (mean, epsilon1)
    outer = Mul (row, column)
    variance = Div (outer, mean_1)"""
"""The second moment that row and column sums stand for."""

_ADAFACTOR_VECTOR_DIRECTION = """
    epsilon1_f = Constant <value_float: float = @epsilon1> ()
    epsilon1 = CastLike (epsilon1_f, g)
    variance = Identity (v)"""

_ADAFACTOR_MOVE = """
    least = Mul (epsilon1, epsilon1)
    spread = Max (variance, least)
    root = Sqrt (spread)
    direction = Div (g, root)"""
"""The step before it is scaled."""

_ADAFACTOR_STEP = """
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, p)
    rate_f = Constant <value_float: float = @learning_rate> ()
    rate = CastLike (rate_f, p)
    epsilon2_f = Constant <value_float: float = @epsilon2> ()
    epsilon2 = CastLike (epsilon2_f, p)
    clip_f = Constant <value_float: float = @clip> ()
    clip = CastLike (clip_f, p)
    decay_f = Constant <value_float: float = @weight_decay> ()
    decay = CastLike (decay_f, p)
    elements_f = Constant <value_float: float = @elements> ()
    elements = CastLike (elements_f, p)
    t = CastLike (step, p)
    t_root = Sqrt (t)
    falling = Div (one, t_root)
    relative = Min (rate, falling)
    least_length = Max (length, epsilon2)
    alpha = Mul (relative, least_length)
    mean_moved = Div (moved, elements)
    moved_root = Sqrt (mean_moved)
    over = Div (moved_root, clip)
    denominator = Max (one, over)
    factor = Div (alpha, denominator)
    change = Mul (factor, direction)
    shrunk = Mul (rate, decay)
    left = Sub (one, shrunk)
    kept = Mul (left, p)
    p_next = Sub (kept, change)
    squares = Mul (p_next, p_next)
    square = ReduceSum <keepdims = 0> (squares)"""

_ADAFACTOR_FRESH = """
    power_f = Constant <value_float: float = @decay_power> ()
    power = CastLike (power_f, step)
    fresh_f = Pow (step, power)"""
"""Weight of a new square in a moment."""

_ADAFACTOR = f"""
AdafactorSquares (g) => (rows, columns)
{{
    last = Constant <value_ints = [-1]> ()
    before = Constant <value_ints = [-2]> ()
    squares = Mul (g, g)
    rows = ReduceSum <keepdims = 1> (squares, last)
    columns = ReduceSum <keepdims = 1> (squares, before)
}}

AdafactorRows <decay_power, columns> (row, row_sum, step) => (row_next, total)
{{{_ADAFACTOR_FRESH}
    fresh = CastLike (fresh_f, row)
    columns_f = Constant <value_float: float = @columns> ()
    num_columns = CastLike (columns_f, row)
    mean = Div (row_sum, num_columns)
    change = Sub (mean, row)
    moved = Mul (fresh, change)
    row_next = Add (row, moved)
    before = Constant <value_ints = [-2]> ()
    total = ReduceSum <keepdims = 1> (row_next, before)
}}

AdafactorColumns <decay_power, rows> (column, column_sum, step) => (column_next)
{{{_ADAFACTOR_FRESH}
    fresh = CastLike (fresh_f, column)
    rows_f = Constant <value_float: float = @rows> ()
    num_rows = CastLike (rows_f, column)
    mean = Div (column_sum, num_rows)
    change = Sub (mean, column)
    moved = Mul (fresh, change)
    column_next = Add (column, moved)
}}

AdafactorMoved <epsilon1, rows> (g, row, column, total) => (moved)
{{{_ADAFACTOR_DIRECTION}{_ADAFACTOR_MOVE}
    squares = Mul (direction, direction)
    moved = ReduceSum <keepdims = 0> (squares)
}}

Adafactor <learning_rate, epsilon1, epsilon2, clip, weight_decay, elements, rows>
(p, g, row, column, total, moved, length, step) => (p_next, square)
{{{_ADAFACTOR_DIRECTION}{_ADAFACTOR_MOVE}{_ADAFACTOR_STEP}
}}

AdafactorVariance <decay_power> (v, g, step) => (v_next)
{{{_ADAFACTOR_FRESH}
    fresh = CastLike (fresh_f, v)
    squares = Mul (g, g)
    v_change = Sub (squares, v)
    v_step = Mul (fresh, v_change)
    v_next = Add (v, v_step)
}}

AdafactorVectorMoved <epsilon1> (g, v) => (moved)
{{{_ADAFACTOR_VECTOR_DIRECTION}{_ADAFACTOR_MOVE}
    squares = Mul (direction, direction)
    moved = ReduceSum <keepdims = 0> (squares)
}}

AdafactorVector <learning_rate, epsilon1, epsilon2, clip, weight_decay, elements> (p, g, v, moved, length, step)
    => (p_next, square)
{{{_ADAFACTOR_VECTOR_DIRECTION}{_ADAFACTOR_MOVE}{_ADAFACTOR_STEP}
}}

AdafactorLength <elements> (length, square) => (length_next)
{{
    elements_f = Constant <value_float: float = @elements> ()
    elements = CastLike (elements_f, length)
    mean = Div (square, elements)
    length_next = Sqrt (mean)
}}
"""

OPTIMIZERS = f"""{_ADAFACTOR}
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
