"""Losses and optimizers."""

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

OPTIMIZERS = """
Adam <learning_rate, beta1, beta2, epsilon, weight_decay> (p, m, v, g, step) => (p_next, m_next, v_next)
{
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
    p_next = Sub (p, change)
}

SGD <learning_rate, momentum> (p, m, g) => (p_next, m_next)
{
    rate_f = Constant <value_float: float = @learning_rate> ()
    rate = CastLike (rate_f, p)
    momentum_f = Constant <value_float: float = @momentum> ()
    momentum = CastLike (momentum_f, p)
    kept = Mul (momentum, m)
    m_next = Add (kept, g)
    change = Mul (rate, m_next)
    p_next = Sub (p, change)
}
"""
