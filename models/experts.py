"""Mixtures of experts of decoders: a router, experts as grouped products, experts that every token uses.

Dims: B batch, S sequence, d model width, E experts, K choices of a token, f width of an expert, G groups of experts.
"""

from autopar.models.decoder_config import TRANSPOSED, Experts, Mlp
from autopar.models.writer import Writer

_HIDDEN = -3e38
"""Score of an expert that may not be chosen: about the lowest float32."""


def experts(w: Writer, x_BSd: str, name: str, weights: str, part: Experts) -> str:
    """Return what routed and shared experts make of `x`.

    Args:
        w: Where to write.
        x_BSd: What goes to the experts.
        name: Prefix of all ops.
        weights: Prefix of all weights.
        part: The experts.
    """
    g, hidden = w.g, w.config.hidden
    _, fused, down, shared, shared_gate = part.names
    weight_BSK, expert_BSK = _routed(w, x_BSd, f"{name}.router", weights, part)
    numbers = g.constant(tuple(range(part.count)))
    given = g.op("Mul", x_BSd, weight_BSK, name=f"{name}.scaled") if part.scaled_input else x_BSd
    limits = {"groups": part.groups, "chosen_groups": part.chosen_groups} if part.groups > 1 else {}
    sent = g.op(
        "autopar::ExpertDispatch", given, expert_BSK, numbers, name=f"{name}.dispatch", fill=part.fill, **limits
    )
    rows = g.op("autopar::ExpertRows", sent, name=f"{name}.arrived")

    def product(x: str, which: str, matrix: str, num_in: int, num_out: int) -> str:
        of = f".{which}" if matrix == fused and part.gated else ""
        end = TRANSPOSED if part.transposed else ""
        held = g.parameter(f"{weights}.{matrix}{of}{end}", (part.count, num_in, num_out), f"normal {num_in**-0.5:.6g}")
        if not part.bias:
            return g.op("autopar::GroupedMatMul", x, held, name=f"{name}.{which}", fill=part.fill)
        y = g.op("autopar::GroupedMatMul", x, held, name=f"{name}.{which}.matmul", fill=part.fill)
        bias = g.parameter(f"{weights}.{matrix}_bias{of}", (part.count, num_out), "constant 0")
        column = g.op("Unsqueeze", bias, g.constant((1, 2)), name=f"{name}.{which}.bias")
        return g.op("Add", y, column, name=f"{name}.{which}")

    if part.gated:
        gate, up = (product(rows, which, fused, hidden, part.width) for which in ("gate", "up"))
        inner = _inner(w, gate, up, name, part)
    else:
        inner = w.activated(product(rows, "up", fused, hidden, part.width), name, part.activation)
    made = g.op("autopar::ExpertRows", product(inner, "down", down, part.width, hidden), name=f"{name}.returned")
    routed = name if not part.shared else f"{name}.routed"
    if part.scaled_input:
        y = g.op("autopar::ExpertSum", made, expert_BSK, numbers, name=routed, fill=part.fill, **limits)
    else:
        y = g.op("autopar::ExpertCombine", made, weight_BSK, expert_BSK, numbers, name=routed, fill=part.fill)
    if not part.shared:
        return y
    of_shared = Mlp(part.shared, part.activation, gated=part.gated)
    projections = _SHARED if part.gated else _SHARED[1:]
    own = mlp(w, x_BSd, f"{name}.shared", f"{weights}.{shared}", of_shared, projections)
    if part.shared_gate:
        logit = w.linear(x_BSd, f"{name}.shared.share", f"{weights}.{shared_gate}", hidden, 1)
        share = g.op("Sigmoid", logit, name=f"{name}.shared.sigmoid")
        own = g.op("Mul", own, share, name=f"{name}.shared.scaled")
    return g.op("Add", y, own, name=name)


def _inner(w: Writer, gate: str, up: str, name: str, part: Experts) -> str:
    """Return what gate and up make together."""
    g = w.g
    if not part.limit:
        return g.op("Mul", w.activated(gate, name, part.activation), up, name=f"{name}.gated")
    low, high = g.scalar(-part.limit), g.scalar(part.limit)
    gate = g.op("Clip", gate, "", high, name=f"{name}.gate.clipped")
    up = g.op("Clip", up, low, high, name=f"{name}.up.clipped")
    active = g.op("Swish", gate, name=f"{name}.swish", alpha=_GPT_OSS_ALPHA)
    return g.op("Mul", active, g.op("Add", up, g.scales((1.0,)), name=f"{name}.up.raised"), name=f"{name}.gated")


_GPT_OSS_ALPHA = 1.702
"""Factor within the sigmoid of gpt-oss's activation (`swiglu_alpha`)."""
_SHARED = ("gate_proj", "up_proj", "down_proj")


def _routed(w: Writer, x_BSd: str, name: str, weights: str, part: Experts) -> tuple[str, str]:
    """Return the weights of the chosen experts and their numbers, both [B, S, K]."""
    g = w.g
    router = f"{weights}.{part.names[0]}"
    logits = w.linear(x_BSd, f"{name}.logits", router, w.config.hidden, part.count, bias=part.bias)
    names = f"{name}.chosen", f"{name}.expert"
    k = g.constant((part.top_k,))
    match part.scores:
        case "chosen":
            best, expert = g.ops("TopK", logits, k, names=names, axis=-1)
            return g.op("Softmax", best, name=f"{name}.weight", axis=-1), expert
        case "softmax":
            scores = g.op("Softmax", logits, name=f"{name}.scores", axis=-1)
        case "sigmoid":
            scores = g.op("Sigmoid", logits, name=f"{name}.scores")
    if not part.correction and part.groups == 1:
        weight, expert = g.ops("TopK", scores, k, names=names, axis=-1)
    else:
        choice = scores
        if part.correction:
            bias = g.buffer(f"{router}.e_score_correction_bias", (part.count,), "constant 0")
            choice = g.op("Add", scores, bias, name=f"{name}.corrected")
        if part.groups > 1:
            choice = _of_best_groups(w, choice, name, part)
        _, expert = g.ops("TopK", choice, k, names=names, axis=-1)
        weight = g.op("GatherElements", scores, expert, name=f"{name}.weight", axis=-1)
    if part.normalized:
        total = g.op("ReduceSum", weight, g.constant((-1,)), name=f"{name}.total", keepdims=1)
        weight = g.op("Div", weight, total, name=f"{name}.normalized")
    return w.scaled(weight, part.scale), expert


def _of_best_groups(w: Writer, choice_BSE: str, name: str, part: Experts) -> str:
    """Return scores with those outside the best groups lowered below all others."""
    g, seq, size = w.g, w.config.seq, part.count // part.groups
    last = g.constant((-1,))
    grouped = g.op("Reshape", choice_BSE, g.constant((0, seq, part.groups, size)), name=f"{name}.groups")
    if part.group_by == "best":
        of_group = g.op("ReduceMax", grouped, last, name=f"{name}.group_scores", keepdims=0)
    else:
        best, _ = g.ops("TopK", grouped, g.constant((2,)), names=(f"{name}.two", f"{name}.two.index"), axis=-1)
        of_group = g.op("ReduceSum", best, last, name=f"{name}.group_scores", keepdims=0)
    count = g.constant((part.chosen_groups,))
    _, chosen = g.ops("TopK", of_group, count, names=(f"{name}.best", f"{name}.group"), axis=-1)
    onehot = g.op("OneHot", chosen, g.constant(part.groups), g.constant((0, 1)), name=f"{name}.group.onehot", axis=-1)
    held = g.op("ReduceSum", onehot, g.constant((2,)), name=f"{name}.group.held", keepdims=0)
    open_BSG1 = g.op("Unsqueeze", g.op("Cast", held, name=f"{name}.group.mask", to=9), last, name=f"{name}.group.open")
    lowered = g.op("Where", open_BSG1, grouped, g.scales((_HIDDEN,)), name=f"{name}.group.lowered")
    return g.op("Reshape", lowered, g.constant((0, seq, part.count)), name=f"{name}.choice")


def mlp(w: Writer, x: str, name: str, weights: str, part: Mlp, names: tuple[str, ...]) -> str:
    """Return an MLP applied to `x`.

    Args:
        w: Where to write.
        x: Input [..., d].
        name: Prefix of all ops.
        weights: Prefix of all weights.
        part: The MLP.
        names: Names of its projections, as in `Names.mlp`.
    """

    def project(which: str, index: int, value: str, num_in: int, num_out: int, fused: bool = False) -> str:
        return w.linear(
            value, f"{name}.{which}", f"{weights}.{names[index]}", num_in, num_out,
            bias=part.bias, part=f".{which}" if fused else "", transposed=part.transposed,
        )  # fmt: skip

    hidden, width, last = w.config.hidden, part.width, len(names) - 1
    if not part.gated:
        inner = w.activated(project("up", 0, x, hidden, width), name, part.activation)
    else:
        gate = w.activated(project("gate", 0, x, hidden, width, part.fused), name, part.activation)
        up = project("up", 0 if part.fused else 1, x, hidden, width, part.fused)
        inner = w.g.op("Mul", gate, up, name=f"{name}.gated")
    return project("down", last, inner, width, hidden)
