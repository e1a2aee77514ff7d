"""Products with weights of a few bits, unpacked on the way: y = x W^T with W [N, K] in blocks along K.

Blocks lie as ONNX Runtime's MatMulNBits has them: `b_NGP` uint8, of G blocks each in P bytes, low bits first; a scale
per block; a zero point per block, by kind: the middle of the range, packed like the weight, or a number of its own.
"""

_UNPACK = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    two = Constant <value_int = 2> ()
    eight = Constant <value_int = 8> ()
    last = Constant <value_ints = [-1]> ()
    bits = Constant <value_int: int = @bits> ()
    levels = Pow (two, bits)
    highest = Sub (levels, one)
    mask = Cast <to = 2> (highest)
    steps = Range (zero, eight, bits)
    shifts = Cast <to = 2> (steps)
    bytes_1 = Unsqueeze (b_NGP, last)
    moved = BitShift <direction = "RIGHT"> (bytes_1, shifts)
    parts = BitwiseAnd (moved, mask)
    blocks = Constant <value_ints = [0, 0, -1]> ()
    q_NGK = Reshape (parts, blocks)
    rows = Constant <value_ints = [0, -1]> ()
    q = CastLike (q_NGK, x)
ZEROS
    scale_NG1 = Unsqueeze (scale_NG, last)
    scale = CastLike (scale_NG1, x)
    shifted = Sub (q, zero_points)
    w_NGK = Mul (shifted, scale)
    w_NK = Reshape (w_NGK, rows)
"""

_ZEROS = {
    "": """
    middle = Div (levels, two)
    zero_points = CastLike (middle, x)""",
    "Packed": """
    start = Constant <value_ints = [0]> ()
    column = Constant <value_ints = [1]> ()
    groups = Shape <start = 1, end = 2> (b_NGP)
    zeros_1 = Unsqueeze (zeros, last)
    zeros_moved = BitShift <direction = "RIGHT"> (zeros_1, shifts)
    zeros_parts = BitwiseAnd (zeros_moved, mask)
    zeros_all = Reshape (zeros_parts, rows)
    zeros_NG = Slice (zeros_all, start, groups, column)
    zeros_NG1 = Unsqueeze (zeros_NG, last)
    zero_points = CastLike (zeros_NG1, x)""",
    "Shifted": """
    zeros_NG1 = Unsqueeze (zeros, last)
    zero_points = CastLike (zeros_NG1, x)""",
}


def _functions(name: str, zeros: str) -> str:
    unpack = _UNPACK.replace("ZEROS", zeros)
    operands = "x, b_NGP, scale_NG" + (", zeros" if name else "")
    return f"""
MatMulNBits{name} <bits, block_size: int = 0> ({operands}) => (y)
{{{unpack}
    w_KN = Transpose <perm = [1, 0]> (w_NK)
    y = MatMul (x, w_KN)
}}

MatMulNBits{name}Grad <bits, block_size: int = 0> ({operands.replace("x,", "dy,")}) => (dx)
{{{unpack.replace(", x)", ", dy)")}
    dx = MatMul (dy, w_NK)
}}
"""


QUANTIZED = "".join(_functions(name, zeros) for name, zeros in _ZEROS.items())
