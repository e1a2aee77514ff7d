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
"""
