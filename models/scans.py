"""Scans of decoders in the place of attention: mixers of Mamba and Mamba 2, and the gated delta net of Qwen3-Next.

Dims: B batch, S sequence, d model width, H heads, P channels of a head, C any channels.

What a checkpoint holds in one matrix is split by what it makes, as in attention. So is the short causal convolution
before a scan, which goes over each channel by itself.
"""

from autopar.models.decoder_config import Activation, DeltaRule, Scan, SelectiveScan, StateSpace
from autopar.models.writer import Writer

_USUAL_STEP = -4.6
"""Start value of a bias of steps: its softplus is 0.01, within the 0.001 to 0.1 that Mamba draws steps from."""


def scan(w: Writer, x_BSd: str, name: str, weights: str, part: Scan) -> str:
    """Return what a scan makes of `x`, its projections included.

    Args:
        w: Where to write.
        x_BSd: What is mixed.
        name: Prefix of all ops.
        weights: Prefix of all weights.
        part: The scan.
    """
    match part:
        case StateSpace():
            return _state_space(w, x_BSd, name, weights, part)
        case SelectiveScan():
            return _selective_scan(w, x_BSd, name, weights, part)
        case DeltaRule():
            return _delta_rule(w, x_BSd, name, weights, part)


def _state_space(w: Writer, x_BSd: str, name: str, weights: str, part: StateSpace) -> str:
    """Return Mamba 2's mixer of `x` (Dao and Gu 2024, section 7)."""
    g, hidden, seq = w.g, w.config.hidden, w.config.seq
    inner = part.heads * part.size

    def project(which: str, size: int) -> str:
        of = f"{weights}.in_proj"
        return w.linear(x_BSd, f"{name}.{which}", of, hidden, size, bias=part.bias, part=f".{which}")

    def convolved(which: str, heads: int, size: int) -> str:
        of = f"{weights}.conv1d"
        x_BSC = _convolved(
            w, project(which, heads * size), f"{name}.{which}", of, heads * size, part.kernel, part.activation,
            bias=part.kernel_bias, part=f".{which}", continues=part.continues,
        )  # fmt: skip
        return _heads(w, x_BSC, f"{name}.{which}", heads, size)

    gate = project("gate", inner)
    x = convolved("x", part.heads, part.size)
    b, c = (convolved(which, part.groups, part.state) for which in "bc")
    rate, bias = _decays(w, weights, part.heads)
    passed = g.parameter(f"{weights}.D", (part.heads,), "constant 1")
    kind, *state = _cached(w, f"{name}.core", "StateSpaceScan", (part.heads, part.size, part.state), part)
    y = g.op(
        kind, *state, x, project("step", part.heads), rate, b, c, passed, bias, name=f"{name}.core",
        least=part.least_step, most=part.most_step,
    )  # fmt: skip
    y = g.op("Reshape", y, g.constant((0, seq, inner)), name=f"{name}.merge")
    y = g.op("Mul", y, w.activated(gate, f"{name}.gate", "silu"), name=f"{name}.gated")
    if part.groups == 1:
        scale = g.parameter(f"{weights}.norm.weight", (inner,), "constant 1")
        y = g.op("RMSNormalization", y, scale, name=f"{name}.norm", axis=-1, epsilon=w.config.norm.epsilon)
    else:
        y = _group_norm(w, y, f"{name}.norm", f"{weights}.norm", inner, part.groups)
    return w.linear(y, f"{name}.out", f"{weights}.out_proj", inner, hidden, bias=part.bias)


def _selective_scan(w: Writer, x_BSd: str, name: str, weights: str, part: SelectiveScan) -> str:
    """Return Mamba's mixer of `x` (Gu and Dao 2023, section 3.4 and appendix C)."""
    g, hidden, channels = w.g, w.config.hidden, part.channels

    def project(which: str) -> str:
        of = f"{weights}.in_proj"
        return w.linear(x_BSd, f"{name}.{which}", of, hidden, channels, bias=part.bias, part=f".{which}")

    x = _convolved(
        w, project("x"), f"{name}.x", f"{weights}.conv1d", channels, part.kernel, part.activation,
        bias=part.kernel_bias, continues=part.continues,
    )  # fmt: skip

    def selected(which: str, norm: str, size: int) -> str:
        y = w.linear(x, f"{name}.{which}", f"{weights}.x_proj", channels, size, part=f".{which}")
        if not part.norm:
            return y
        scale = g.scales((1.0,))
        if part.norm == "scaled":
            scale = g.parameter(f"{weights}.{norm}.weight", (size,), "constant 1")
        return g.op("RMSNormalization", y, scale, name=f"{name}.{which}.norm", axis=-1, epsilon=part.norm_epsilon)

    latent = selected("latent", "dt_layernorm", part.rank)
    step = w.linear(latent, f"{name}.step", f"{weights}.dt_proj", part.rank, channels)
    b, c = (selected(which, f"{which}_layernorm", part.state) for which in "bc")
    rate = g.parameter(f"{weights}.A_log", (channels, part.state), "constant 0")
    passed = g.parameter(f"{weights}.D", (channels,), "constant 1")
    bias = g.parameter(f"{weights}.dt_proj.bias", (channels,), f"constant {_USUAL_STEP}")
    kind, *state = _cached(w, f"{name}.core", "SelectiveScan", (channels, part.state), part)
    y = g.op(kind, *state, x, step, rate, b, c, passed, bias, name=f"{name}.core")
    y = g.op("Mul", y, w.activated(project("gate"), f"{name}.gate", "silu"), name=f"{name}.gated")
    return w.linear(y, f"{name}.out", f"{weights}.out_proj", channels, hidden, bias=part.bias)


def _delta_rule(w: Writer, x_BSd: str, name: str, weights: str, part: DeltaRule) -> str:
    """Return the gated delta net of `x` (Yang et al. 2024, Gated Delta Networks, section 3.4), as in Qwen3-Next."""
    g, hidden, seq = w.g, w.config.hidden, w.config.seq
    width = part.heads * part.size

    def project(which: str, of: str, size: int) -> str:
        return w.linear(x_BSd, f"{name}.{which}", f"{weights}.{of}", hidden, size, part=f".{which}")

    def convolved(which: str, heads: int, size: int) -> str:
        x = project(which, "in_proj_qkvz", heads * size)
        of = f"{weights}.conv1d"
        x_BSC = _convolved(
            w, x, f"{name}.{which}", of, heads * size, part.kernel, part.activation, bias=False, part=f".{which}",
            continues=part.continues,
        )  # fmt: skip
        return _heads(w, x_BSC, f"{name}.{which}", heads, size)

    q, k = (convolved(which, part.key_heads, part.key_size) for which in "qk")
    v = convolved("v", part.heads, part.size)
    gate = project("gate", "in_proj_qkvz", width)
    step, beta = (project(which, "in_proj_ba", part.heads) for which in ("step", "beta"))
    decays = _decays(w, weights, part.heads)
    kind, *state = _cached(w, f"{name}.core", "GatedDeltaRule", (part.heads, part.key_size, part.size), part)
    y = g.op(kind, *state, q, k, v, step, beta, *decays, name=f"{name}.core", scale=part.key_size**-0.5)
    scale = g.parameter(f"{weights}.norm.weight", (part.size,), "constant 1")
    y = g.op("RMSNormalization", y, scale, name=f"{name}.norm", axis=-1, epsilon=w.config.norm.epsilon)
    y = g.op("Reshape", y, g.constant((0, seq, width)), name=f"{name}.merge")
    y = g.op("Mul", y, w.activated(gate, f"{name}.gate", "silu"), name=f"{name}.gated")
    return w.linear(y, f"{name}.out", f"{weights}.out_proj", width, hidden)


def _cached(w: Writer, name: str, kind: str, shape: tuple[int, ...], part: Scan) -> tuple[str, ...]:
    """Return the kind of a scan's op, and the state that it goes on from, if it does.

    Args:
        w: Where to write.
        name: The op.
        kind: Kind of the op of a whole sequence.
        shape: Shape of the state of a sample.
        part: The scan.
    """
    if not part.continues:
        return (f"autopar::{kind}",)
    return f"autopar::Cached{kind}", w.g.input(f"{name}.cached_state", ("batch", *shape))


def _convolved(
    w: Writer,
    x_BSC: str,
    name: str,
    weight: str,
    channels: int,
    kernel: int,
    activation: Activation,
    *,
    bias: bool,
    part: str = "",
    continues: bool = False,
) -> str:
    """Return `x` behind a causal convolution of each channel and a nonlinearity."""
    g = w.g
    if continues and kernel > 1:
        cache = g.input(f"{name}.conv.cached_tokens", ("batch", kernel - 1, channels))
        taps = g.parameter(f"{weight}.weight{part}", (channels, 1, kernel), f"normal {kernel**-0.5:.6g}")
        y = g.op("autopar::CachedConvolution", cache, x_BSC, taps, name=f"{name}.conv")
        if bias:
            shift = g.parameter(f"{weight}.bias{part}", (channels,), "constant 0")
            y = g.op("Add", y, shift, name=f"{name}.conv.shifted")
        return w.activated(y, name, activation)
    x_BCS = g.op("Transpose", x_BSC, name=f"{name}.channels", perm=(0, 2, 1))
    taps = g.parameter(f"{weight}.weight{part}", (channels, 1, kernel), f"normal {kernel**-0.5:.6g}")
    biases = (g.parameter(f"{weight}.bias{part}", (channels,), "constant 0"),) if bias else ()
    y_BCS = g.op(
        "Conv", x_BCS, taps, *biases, name=f"{name}.conv", group=channels, kernel_shape=(kernel,), pads=(kernel - 1, 0)
    )
    y_BSC = g.op("Transpose", y_BCS, name=f"{name}.tokens", perm=(0, 2, 1))
    return w.activated(y_BSC, name, activation)


def _heads(w: Writer, x_BSC: str, name: str, heads: int, size: int) -> str:
    """Return `x` as [B, S, heads, size]."""
    return w.g.op("Reshape", x_BSC, w.g.constant((0, w.config.seq, heads, size)), name=f"{name}.heads")


def _decays(w: Writer, weights: str, heads: int) -> tuple[str, str]:
    """Return the logarithm of the rate of decay of each head, and the bias of its steps."""
    rate = w.g.parameter(f"{weights}.A_log", (heads,), "constant 0")
    return rate, w.g.parameter(f"{weights}.dt_bias", (heads,), f"constant {_USUAL_STEP}")


def _group_norm(w: Writer, x_BSC: str, name: str, weight: str, channels: int, groups: int) -> str:
    """Return `x` divided by the root mean square of each group of channels, and scaled."""
    g, seq = w.g, w.config.seq
    grouped = g.op("Reshape", x_BSC, g.constant((0, seq, groups, channels // groups)), name=f"{name}.groups")
    ones = g.scales((1.0,))
    normed = g.op("RMSNormalization", grouped, ones, name=f"{name}.plain", axis=-1, epsilon=w.config.norm.epsilon)
    flat = g.op("Reshape", normed, g.constant((0, seq, channels)), name=f"{name}.flat")
    return g.op("Mul", flat, g.parameter(f"{weight}.weight", (channels,), "constant 1"), name=name)
