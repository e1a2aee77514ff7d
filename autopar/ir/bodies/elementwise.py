"""Gradients of activations."""

ELEMENTWISE = """
ReluGrad (y, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, y)
    active = Greater (y, zero)
    mask = CastLike (active, dy)
    dx = Mul (dy, mask)
}

LeakyReluGrad <alpha> (x, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    alpha_f = Constant <value_float: float = @alpha> ()
    slope = CastLike (alpha_f, dy)
    positive = Greater (x, zero)
    leaked = Mul (dy, slope)
    dx = Where (positive, dy, leaked)
}

SigmoidGrad (y, dy) => (dx)
{
    square = Mul (y, y)
    slope = Sub (y, square)
    dx = Mul (dy, slope)
}

TanhGrad (y, dy) => (dx)
{
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, y)
    square = Mul (y, y)
    slope = Sub (one, square)
    dx = Mul (dy, slope)
}

ErfGrad (x, dy) => (dx)
{
    factor_d = Constant <value = double {1.1283791670955126}> ()
    factor = CastLike (factor_d, x)
    square = Mul (x, x)
    exponent = Neg (square)
    bell = Exp (exponent)
    slope = Mul (factor, bell)
    dx = Mul (dy, slope)
}

GeluGrad (x, dy) => (dx)
{
    half_d = Constant <value = double {0.5}> ()
    half = CastLike (half_d, x)
    root_half_d = Constant <value = double {0.7071067811865476}> ()
    root_half = CastLike (root_half_d, x)
    density_d = Constant <value = double {0.3989422804014327}> ()
    density = CastLike (density_d, x)
    argument = Mul (x, root_half)
    erf = Erf (argument)
    half_erf = Mul (half, erf)
    cdf = Add (half, half_erf)
    square = Mul (argument, argument)
    exponent = Neg (square)
    bell = Exp (exponent)
    pdf = Mul (density, bell)
    x_pdf = Mul (x, pdf)
    slope = Add (cdf, x_pdf)
    dx = Mul (dy, slope)
}

GeluTanhGrad (x, dy) => (dx)
{
    half_d = Constant <value = double {0.5}> ()
    half = CastLike (half_d, x)
    one_d = Constant <value = double {1.0}> ()
    one = CastLike (one_d, x)
    root_d = Constant <value = double {0.7978845608028654}> ()
    root = CastLike (root_d, x)
    cubic_d = Constant <value = double {0.044715}> ()
    cubic = CastLike (cubic_d, x)
    cubic3_d = Constant <value = double {0.134145}> ()
    cubic3 = CastLike (cubic3_d, x)
    square = Mul (x, x)
    bend = Mul (cubic, square)
    bent = Add (one, bend)
    scaled = Mul (root, x)
    argument = Mul (scaled, bent)
    t = Tanh (argument)
    one_t = Add (one, t)
    cdf = Mul (half, one_t)
    t_square = Mul (t, t)
    t_slope = Sub (one, t_square)
    bend3 = Mul (cubic3, square)
    bent3 = Add (one, bend3)
    inner = Mul (root, bent3)
    outer = Mul (t_slope, inner)
    half_x = Mul (half, x)
    tail = Mul (half_x, outer)
    slope = Add (cdf, tail)
    dx = Mul (dy, slope)
}

SwishGrad <alpha> (x, dy) => (dx)
{
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, x)
    alpha_f = Constant <value_float: float = @alpha> ()
    rate = CastLike (alpha_f, x)
    argument = Mul (rate, x)
    gate = Sigmoid (argument)
    rest = Sub (one, gate)
    bend = Mul (argument, rest)
    bent = Add (one, bend)
    slope = Mul (gate, bent)
    dx = Mul (dy, slope)
}

HardSigmoidGrad <alpha, beta> (x, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, x)
    alpha_f = Constant <value_float: float = @alpha> ()
    slope = CastLike (alpha_f, x)
    beta_f = Constant <value_float: float = @beta> ()
    shift = CastLike (beta_f, x)
    scaled = Mul (x, slope)
    line = Add (scaled, shift)
    above = Greater (line, zero)
    below = Less (line, one)
    inside = And (above, below)
    risen = Mul (dy, slope)
    dx = Where (inside, risen, zero)
}

HardSwishGrad (x, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, x)
    half_f = Constant <value_float = 0.5> ()
    half = CastLike (half_f, x)
    three_f = Constant <value_float = 3.0> ()
    three = CastLike (three_f, x)
    minus_three = Neg (three)
    third = Div (x, three)
    bent = Add (third, half)
    above = Greater (x, minus_three)
    below = Less (x, three)
    left = Where (above, bent, zero)
    slope = Where (below, left, one)
    dx = Mul (dy, slope)
}

EluGrad <alpha> (x, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, x)
    alpha_f = Constant <value_float: float = @alpha> ()
    height = CastLike (alpha_f, x)
    low = Min (x, zero)
    power = Exp (low)
    left = Mul (height, power)
    positive = Greater (x, zero)
    slope = Where (positive, one, left)
    dx = Mul (dy, slope)
}

SeluGrad <alpha, gamma> (x, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    alpha_f = Constant <value_float: float = @alpha> ()
    height = CastLike (alpha_f, x)
    gamma_f = Constant <value_float: float = @gamma> ()
    scale = CastLike (gamma_f, x)
    low = Min (x, zero)
    power = Exp (low)
    risen = Mul (height, power)
    left = Mul (scale, risen)
    positive = Greater (x, zero)
    slope = Where (positive, scale, left)
    dx = Mul (dy, slope)
}

CeluGrad <alpha> (x, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    alpha_f = Constant <value_float: float = @alpha> ()
    width = CastLike (alpha_f, x)
    low = Min (x, zero)
    narrow = Div (low, width)
    slope = Exp (narrow)
    dx = Mul (dy, slope)
}

MishGrad (x, dy) => (dx)
{
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, x)
    soft = Softplus (x)
    t = Tanh (soft)
    t_square = Mul (t, t)
    t_slope = Sub (one, t_square)
    gate = Sigmoid (x)
    inner = Mul (t_slope, gate)
    tail = Mul (x, inner)
    slope = Add (t, tail)
    dx = Mul (dy, slope)
}

SoftsignGrad (x, dy) => (dx)
{
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, x)
    size = Abs (x)
    base = Add (one, size)
    square = Mul (base, base)
    dx = Div (dy, square)
}

ThresholdedReluGrad <alpha> (x, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    alpha_f = Constant <value_float: float = @alpha> ()
    threshold = CastLike (alpha_f, x)
    active = Greater (x, threshold)
    dx = Where (active, dy, zero)
}

PReluGrad (x, slope, dy) => (dx)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    leaked = Mul (dy, slope)
    negative = Less (x, zero)
    dx = Where (negative, leaked, dy)
}

PReluSlopeGrad (x, dy) => (dslope)
{
    zero_f = Constant <value_float = 0.0> ()
    zero = CastLike (zero_f, x)
    low = Min (x, zero)
    dslope = Mul (low, dy)
}
"""
