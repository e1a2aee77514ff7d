"""Gradients of recurrent layers, one direction each, from the first step to the last.

T steps, B batch, I inputs, H hidden, G gates times H. The forward pass is computed again, as nothing of it but the
hidden states is an output of the op: `Scan` goes over the steps forwards, then backwards over the gradients.

    w [G, I], r [G, H] and biases [G] as in ONNX; dy (T, B, H) the gradient of all hidden states, dh of the last one.
"""

_ENDS = """
    first = Constant <value_ints = [0]> ()
    last = Constant <value_ints = [-1]> ()
    before = Constant <value_ints = [-9223372036854775807]> ()
    both = Constant <value_ints = [0, 1]> ()
    one_f = Constant <value_float = 1.0> ()
    one = CastLike (one_f, x)
    w_IG = Transpose <perm = [1, 0]> (w)
    r_HG = Transpose <perm = [1, 0]> (r)
"""

_BACKWARDS = "Slice ({}, last, before, first, last)"
"""A sequence from its last step to its first."""


def _turned(name: str) -> str:
    return f"    {name}_back = {_BACKWARDS.format(name)}\n"


_LSTM = f"""
LSTMGrad (x, w, r, bias, h0, c0, dy, dh, dc) => (dx, dw, dr, dbias, dh0, dc0)
{{{_ENDS}
    x_product = MatMul (x, w_IG)
    x_gates = Add (x_product, bias)
    h_end, c_end, h_all, c_all, c_next_all, gates_all = Scan <num_scan_inputs = 1, body = forward
        (h, c, x_gates_t) => (h_next, c_next, h_kept, c_kept, c_next_kept, gates) {{
            h_gates = MatMul (h, r_HG)
            z = Add (x_gates_t, h_gates)
            zi, zo, zf, zg = Split <axis = -1, num_outputs = 4> (z)
            i = Sigmoid (zi)
            o = Sigmoid (zo)
            f = Sigmoid (zf)
            g = Tanh (zg)
            kept = Mul (f, c)
            added = Mul (i, g)
            c_next = Add (kept, added)
            shown = Tanh (c_next)
            h_next = Mul (o, shown)
            h_kept = Identity (h)
            c_kept = Identity (c)
            c_next_kept = Identity (c_next)
            gates = Concat <axis = -1> (i, o, f, g)
        }}> (h0, c0, x_gates)
{_turned("dy")}{_turned("c_all")}{_turned("c_next_all")}{_turned("gates_all")}
    dh0, dc0, dz_back = Scan <num_scan_inputs = 4, body = backward
        (dh_t, dc_t, dy_t, c_t, c_next_t, gates_t) => (dh_before, dc_before, dz_t) {{
            i, o, f, g = Split <axis = -1, num_outputs = 4> (gates_t)
            dh_all = Add (dy_t, dh_t)
            shown = Tanh (c_next_t)
            do = Mul (dh_all, shown)
            shown_square = Mul (shown, shown)
            shown_slope = Sub (one, shown_square)
            dshown = Mul (dh_all, o)
            dc_shown = Mul (dshown, shown_slope)
            dc_all = Add (dc_t, dc_shown)
            di = Mul (dc_all, g)
            dg = Mul (dc_all, i)
            df = Mul (dc_all, c_t)
            dc_before = Mul (dc_all, f)
            iof = Concat <axis = -1> (i, o, f)
            diof = Concat <axis = -1> (di, do, df)
            rest = Sub (one, iof)
            slope = Mul (iof, rest)
            dz_iof = Mul (diof, slope)
            g_square = Mul (g, g)
            g_slope = Sub (one, g_square)
            dz_g = Mul (dg, g_slope)
            dz_t = Concat <axis = -1> (dz_iof, dz_g)
            dh_before = MatMul (dz_t, r)
        }}> (dh, dc, dy_back, c_all_back, c_next_all_back, gates_all_back)
    dz = {_BACKWARDS.format("dz_back")}
    dx = MatMul (dz, w)
    dw = Einsum <equation = "tbg,tbi->gi"> (dz, x)
    dr = Einsum <equation = "tbg,tbh->gh"> (dz, h_all)
    dbias = ReduceSum <keepdims = 0> (dz, both)
}}
"""

_GRU = f"""
NAME (x, w, r, bias_x, bias_h, h0, dy, dh) => (dx, dw, dr, dbias_x, dbias_h, dh0)
{{{_ENDS}
SETUP
    x_product = MatMul (x, w_IG)
    x_gates = Add (x_product, bias_x)
FORWARD
{_turned("dy")}{_turned("h_all")}{_turned("gates_all")}
BACKWARD
    dz = {_BACKWARDS.format("dz_back")}
    dv = {_BACKWARDS.format("dv_back")}
    dx = MatMul (dz, w)
    dw = Einsum <equation = "tbg,tbi->gi"> (dz, x)
    dbias_x = ReduceSum <keepdims = 0> (dz, both)
    dbias_h = ReduceSum <keepdims = 0> (dv, both)
WEIGHT
}}
"""

_GATED = """
            xz, xr, xn = Split <axis = -1, num_outputs = 3> (x_gates_t)
            vz, vr, vn = Split <axis = -1, num_outputs = 3> (h_gates)
            az = Add (xz, vz)
            ar = Add (xr, vr)
            z = Sigmoid (az)
            reset = Sigmoid (ar)
"""

_MIXED = """
            n = Tanh (an)
            rest = Sub (one, z)
            new = Mul (rest, n)
            old = Mul (z, h)
            h_next = Add (new, old)
            h_kept = Identity (h)
            gates = Concat <axis = -1> (z, reset, n, inner)
"""

_FORWARD_SCAN = """    h_end, h_all, gates_all = Scan <num_scan_inputs = 1, body = forward
        (h, x_gates_t) => (h_next, h_kept, gates) {{
            h_product = MatMul (h, r_HG)
            h_gates = Add (h_product, bias_h){gated}{candidate}{mixed}        }}> (h0, x_gates)
"""

_BACKWARD_SCAN = """    dh0, dz_back, dv_back = Scan <num_scan_inputs = 3, body = backward
        (dh_t, dy_t, h_t, gates_t) => (dh_before, dz_t, dv_t) {{
            z, reset, n, inner = Split <axis = -1, num_outputs = 4> (gates_t)
            dh_all = Add (dy_t, dh_t)
            rest = Sub (one, z)
            dn = Mul (dh_all, rest)
            n_square = Mul (n, n)
            n_slope = Sub (one, n_square)
            dan = Mul (dn, n_slope)
            difference = Sub (h_t, n)
            dz_gate = Mul (dh_all, difference)
            z_slope = Mul (z, rest)
            daz = Mul (dz_gate, z_slope)
            reset_rest = Sub (one, reset)
            reset_slope = Mul (reset, reset_rest)
            dh_kept = Mul (dh_all, z)
{own}        }}> (dh, dy_back, h_all_back, gates_all_back)
"""

_AFTER = {
    "candidate": """            inner = Identity (vn)
            gated = Mul (reset, vn)
            an = Add (xn, gated)""",
    "own": """            dreset = Mul (dan, inner)
            dar = Mul (dreset, reset_slope)
            dvn = Mul (dan, reset)
            dz_t = Concat <axis = -1> (daz, dar, dan)
            dv_t = Concat <axis = -1> (daz, dar, dvn)
            dh_through = MatMul (dv_t, r)
            dh_before = Add (dh_kept, dh_through)
""",
    "weight": '    dr = Einsum <equation = "tbg,tbh->gh"> (dv, h_all)',
}
"""The reset gate acts on the product with the hidden state (`linear_before_reset`), as in PyTorch."""

_BEFORE = {
    "candidate": """            inner = Mul (reset, h)
            n_product = MatMul (inner, rn_HH)
            n_hidden = Add (n_product, bias_n)
            an = Add (xn, n_hidden)""",
    "own": """            dz_t = Concat <axis = -1> (daz, dar, dan)
            dv_t = Identity (dz_t)
            dzr = Concat <axis = -1> (daz, dar)
            dh_gates = MatMul (dzr, r_zr)
            dh_reset = Mul (dinner, reset)
            dh_through = Add (dh_gates, dh_reset)
            dh_before = Add (dh_kept, dh_through)
""",
    "weight": """    dv_zr, dv_n = Split <axis = -1> (dv, parts)
    inner_all = Slice (gates_all, from_inner, to_inner, last)
    dr_zr = Einsum <equation = "tbg,tbh->gh"> (dv_zr, h_all)
    dr_n = Einsum <equation = "tbg,tbh->gh"> (dv_n, inner_all)
    dr = Concat <axis = 0> (dr_zr, dr_n)""",
}
"""The reset gate acts on the hidden state."""

_PARTS = """    hidden = Shape <start = 1> (r)
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    four = Constant <value_ints = [4]> ()
    hidden2 = Mul (hidden, two)
    from_inner = Mul (hidden, three)
    to_inner = Mul (hidden, four)
    parts = Concat <axis = 0> (hidden2, hidden)
    r_zr, r_n = Split <axis = 0> (r, parts)
    bias_zr, bias_n = Split <axis = 0> (bias_h, parts)
    rn_HH = Transpose <perm = [1, 0]> (r_n)
"""

_RESET_SLOPE = """            dinner = MatMul (dan, r_n)
            dreset = Mul (dinner, h_t)
            dar = Mul (dreset, reset_slope)
"""


def _gru(name: str, parts: dict[str, str], setup: str, slope: str) -> str:
    forward = _FORWARD_SCAN.format(gated=_GATED, candidate=parts["candidate"], mixed=_MIXED)
    backward = _BACKWARD_SCAN.format(own=slope + parts["own"])
    text = _GRU.replace("NAME", name).replace("FORWARD", forward).replace("BACKWARD", backward)
    return text.replace("SETUP", setup).replace("WEIGHT", parts["weight"])


_RNN = f"""
RNNGrad (x, w, r, bias, h0, dy, dh) => (dx, dw, dr, dbias, dh0)
{{{_ENDS}
    x_product = MatMul (x, w_IG)
    x_gates = Add (x_product, bias)
    h_end, h_all, h_next_all = Scan <num_scan_inputs = 1, body = forward
        (h, x_gates_t) => (h_next, h_kept, h_next_kept) {{
            h_gates = MatMul (h, r_HG)
            z = Add (x_gates_t, h_gates)
            h_next = Tanh (z)
            h_kept = Identity (h)
            h_next_kept = Identity (h_next)
        }}> (h0, x_gates)
{_turned("dy")}{_turned("h_next_all")}
    dh0, dz_back = Scan <num_scan_inputs = 2, body = backward (dh_t, dy_t, h_t) => (dh_before, dz_t) {{
            dh_all = Add (dy_t, dh_t)
            square = Mul (h_t, h_t)
            slope = Sub (one, square)
            dz_t = Mul (dh_all, slope)
            dh_before = MatMul (dz_t, r)
        }}> (dh, dy_back, h_next_all_back)
    dz = {_BACKWARDS.format("dz_back")}
    dx = MatMul (dz, w)
    dw = Einsum <equation = "tbg,tbi->gi"> (dz, x)
    dr = Einsum <equation = "tbg,tbh->gh"> (dz, h_all)
    dbias = ReduceSum <keepdims = 0> (dz, both)
}}
"""

RECURRENT = _LSTM + _gru("GRUGrad", _AFTER, "", "") + _gru("GRUResetGrad", _BEFORE, _PARTS, _RESET_SLOPE) + _RNN
