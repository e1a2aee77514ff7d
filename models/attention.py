"""Attention: of heads that share keys and values in groups, and of latent keys and values.

Dims: B batch, S sequence, T sequence of keys and values, H heads, D head size, d model width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.models import layers
from autopar.models.decoder_config import PER_HEAD, Attention, LatentAttention, Names
from autopar.models.writer import Writer


@dataclass(frozen=True, slots=True)
class Memory:
    """A sequence that another one attends to.

    Attributes:
        value: The sequence [B, T, d].
        seq: Its length.
    """

    value: str
    seq: int


def grouped_attention(
    w: Writer,
    x_BSd: str,
    name: str,
    weights: str,
    part: Attention,
    names: Names,
    *,
    memory: Memory | None = None,
    distance_bias: str = "",
) -> str:
    """Return grouped-query attention of `x`, its output projection included.

    Args:
        w: Where to write.
        x_BSd: What attends.
        name: Prefix of all ops.
        weights: Prefix of all weights.
        part: The attention.
        names: Names of its weights.
        memory: What `x` attends to; None for itself.
        distance_bias: Value [H, R] that is added to the scores by distance (`autopar::RelativeAttention`); "" without.
    """
    g, hidden, seq = w.g, w.config.hidden, w.config.seq
    keys = memory or Memory(x_BSd, seq)

    def project(which: str, index: int, heads: int) -> str:
        fused, source = bool(part.fused), Memory(x_BSd, seq) if which == "q" else keys
        has_bias = part.qkv_bias and (which != "k" or part.key_bias)
        of = f"{weights}.{names.qkv[0 if fused else index]}"
        flat = w.linear(
            source.value, f"{name}.{which}", of, hidden, heads * part.size,
            bias=has_bias, part=f".{which}" if fused or (part.gated and which == "q") else "",
            transposed=part.transposed,
        )  # fmt: skip
        if which != "v" and part.qk_norm == "width":
            flat = w.norm(flat, f"{name}.{which}_norm", f"{weights}.{names.qk_norm[index]}", heads * part.size)
        if which != "v" and part.qk_norm == "head":
            flat = g.op("Reshape", flat, g.constant((0, source.seq, heads, part.size)), name=f"{name}.{which}.split")
            flat = w.norm(flat, f"{name}.{which}_norm", f"{weights}.{names.qk_norm[index]}", part.size)
            return g.op("Transpose", flat, name=f"{name}.{which}.heads", perm=(0, 2, 1, 3))
        return layers.split_heads(g, flat, f"{name}.{which}", source.seq, heads, part.size)

    q, k = project("q", 0, part.heads), project("k", 1, part.kv_heads)
    v = project("v", 2, part.kv_heads)
    if part.rope is not None:
        q, k = w.rotated(name, part.rope, part.size, {"q": q, "k": k}, interleaved=part.interleaved)
    if part.qk_norm == "unit":
        q, k = (w.unit_norm(value, f"{name}.{which}.unit", part.size) for which, value in (("q", q), ("k", k)))
    if part.temperature is not None:
        step, growth = part.temperature
        behind = f":{part.first}" if part.first else ""
        table = g.buffer(f"{weights}.self_attn.temperature", (seq, 1), f"temperature {step!r}:{growth!r}{behind}")
        q = g.op("Mul", q, table, name=f"{name}.q.tempered")
    if part.slopes:
        assert not distance_bias, "biases by distance are trained or follow from slopes"
        distance_bias = w.distance_bias(part.slopes)
    y_BHSD = _core(w, q, k, v, f"{name}.core", weights, part, distance_bias)
    width = part.heads * part.size
    merged = layers.merge_heads(g, y_BHSD, f"{name}.core", seq, width)
    if part.gated:
        logit = w.linear(
            x_BSd, f"{name}.gate", f"{weights}.{names.qkv[0]}", hidden, width,
            bias=part.qkv_bias, part=".gate", transposed=part.transposed,
        )  # fmt: skip
        merged = g.op("Mul", merged, g.op("Sigmoid", logit, name=f"{name}.gate.sigmoid"), name=f"{name}.gated")
    return w.linear(
        merged, f"{name}.out", f"{weights}.{names.out}", width, hidden, bias=part.out_bias, transposed=part.transposed
    )


def _core(w: Writer, q: str, k: str, v: str, name: str, weights: str, part: Attention, distance_bias: str = "") -> str:
    """Return what queries make of keys and values: by the op of the standard, where it says all there is."""
    limits = {"window": part.window, "chunk": part.chunk}
    limits = {kind: size for kind, size in limits.items() if 0 < size < part.cached + w.config.seq}
    if distance_bias:
        assert not limits, "attention with biases by distance has no window and no chunks"
        assert not part.sinks, "attention with biases by distance has no sinks"
        assert not part.softcap, "attention with biases by distance has no soft cap"
        scale = part.scale or part.size**-0.5
        return w.g.op(
            "autopar::RelativeAttention", q, k, v, distance_bias, name=name, scale=scale, is_causal=int(part.causal)
        )
    if part.first:
        return _behind_cache(w, q, k, v, name, weights, part, limits)
    if not limits and not part.softcap and not part.sinks:
        given = {} if part.scale is None else {"scale": part.scale}
        return w.g.op("Attention", q, k, v, name=name, is_causal=int(part.causal), **given)
    if not part.causal and set(limits) == {"chunk"} and not part.softcap and not part.sinks:
        return _within_chunks(w, q, k, v, name, part)
    assert part.causal, "windows, soft caps and sinks are those of causal attention"
    given = {"window": 0, "chunk": 0, **limits, "softcap": part.softcap, "scale": part.scale or part.size**-0.5}
    if not part.sinks:
        return w.g.op("autopar::CausalAttention", q, k, v, name=name, **given)
    return w.g.op("autopar::SinkAttention", q, k, v, _sinks(w, weights, part), name=name, **given)


def _sinks(w: Writer, weights: str, part: Attention) -> str:
    return w.g.parameter(f"{weights}.self_attn.sinks", (part.heads,), "constant 0")


def _behind_cache(
    w: Writer, q: str, k: str, v: str, name: str, weights: str, part: Attention, limits: Mapping[str, int]
) -> str:
    """Return what queries make of the keys and values of a cache and of their own; the first chunk has no cache."""
    given = {"window": 0, "chunk": 0, **limits, "softcap": part.softcap, "scale": part.scale or part.size**-0.5}
    kind, more = "Causal", [k, v]
    if part.cached:
        shape = "batch", part.kv_heads, part.cached, part.size
        caches = [w.g.input(f"{name}.cached_{which}", shape) for which in ("keys", "values")]
        kind, more = "Cached", [*caches, k, v]
    if not part.sinks:
        return w.g.op(f"autopar::{kind}Attention", q, *more, name=name, **given)
    kind = {"Causal": "Sink", "Cached": "CachedSink"}[kind]
    return w.g.op(f"autopar::{kind}Attention", q, *more, _sinks(w, weights, part), name=name, **given)


def _within_chunks(w: Writer, q: str, k: str, v: str, name: str, part: Attention) -> str:
    """Return attention of tokens to all others of their chunk, each chunk of a head a head of its own."""
    g, seq, count = w.g, w.config.seq, w.config.seq // part.chunk
    assert part.kv_heads == part.heads, "each head has keys of its own"
    assert count * part.chunk == seq, "chunks are of one length"
    cut = g.constant((0, part.heads * count, part.chunk, part.size))
    chunks = (g.op("Reshape", x, cut, name=f"{name}.{which}.chunks") for which, x in (("q", q), ("k", k), ("v", v)))
    given = {} if part.scale is None else {"scale": part.scale}
    y = g.op("Attention", *chunks, name=f"{name}.of_chunks", is_causal=0, **given)
    return g.op("Reshape", y, g.constant((0, part.heads, seq, part.size)), name=name)


def latent_attention(w: Writer, x_BSd: str, name: str, weights: str, part: LatentAttention) -> str:
    """Return multi-head latent attention of `x`, its output projection included; arguments as above.

    What the checkpoint holds in one matrix is split by what it makes: rotated and plain parts of queries, the latent
    vector and the rotated key, keys and values. The order of elements within a rotated part differs from DeepSeek's in
    queries and keys alike, which changes no score.
    """
    g, hidden, seq, heads, rope = w.g, w.config.hidden, w.config.seq, part.heads, part.rope
    of = f"{weights}.self_attn"

    def split(flat: str, which: str, count: int, size: int) -> str:
        return layers.split_heads(g, flat, f"{name}.{which}", seq, count, size)

    source, wide, queries = x_BSd, hidden, f"{of}.q_proj"
    if part.query_rank:
        latent = w.linear(x_BSd, f"{name}.q_latent", f"{of}.q_a_proj", hidden, part.query_rank, bias=part.bias)
        source = w.norm(latent, f"{name}.q_latent_norm", f"{of}.q_a_layernorm", part.query_rank)
        wide, queries = part.query_rank, f"{of}.q_b_proj"
    q_plain = split(
        w.linear(source, f"{name}.q_plain", queries, wide, heads * part.plain, part=".plain"), "q_plain", heads,
        part.plain,
    )  # fmt: skip
    q_turned = split(
        w.linear(source, f"{name}.q", queries, wide, heads * rope.size, part=".rope"), "q", heads, rope.size
    )
    down = f"{of}.kv_a_proj_with_mqa"
    latent = w.linear(x_BSd, f"{name}.latent", down, hidden, part.latent_rank, bias=part.bias, part=".latent")
    latent = w.norm(latent, f"{name}.latent_norm", f"{of}.kv_a_layernorm", part.latent_rank)
    k_turned = split(
        w.linear(x_BSd, f"{name}.k", down, hidden, rope.size, bias=part.bias, part=".rope"), "k", 1, rope.size
    )
    q_turned, k_turned = w.rotated(name, rope, rope.size, {"q": q_turned, "k": k_turned}, interleaved=part.interleaved)
    up = f"{of}.kv_b_proj"
    width = heads * part.value
    if part.cached:
        y_BHSD = _absorbed(w, q_plain, q_turned, latent, k_turned, name, up, part)
        merged = layers.merge_heads(g, y_BHSD, f"{name}.core", seq, width)
        return w.linear(merged, f"{name}.out", f"{of}.o_proj", width, hidden, bias=part.bias)
    k_plain = split(
        w.linear(latent, f"{name}.k_plain", up, part.latent_rank, heads * part.plain, part=".k"), "k_plain", heads,
        part.plain,
    )  # fmt: skip
    v = split(
        w.linear(latent, f"{name}.v", up, part.latent_rank, heads * part.value, part=".v"), "v", heads, part.value
    )
    k_all = g.op("Expand", k_turned, g.constant((1, heads, 1, 1)), name=f"{name}.k.all_heads")
    q = g.op("Concat", q_plain, q_turned, name=f"{name}.q.whole", axis=-1)
    k = g.op("Concat", k_plain, k_all, name=f"{name}.k.whole", axis=-1)
    core = Attention(heads, heads, part.plain + rope.size, scale=part.scale, chunk=part.chunk)
    y_BHSD = _core(w, q, k, v, f"{name}.core", weights, core)
    merged = layers.merge_heads(g, y_BHSD, f"{name}.core", seq, width)
    return w.linear(merged, f"{name}.out", f"{of}.o_proj", width, hidden, bias=part.bias)


def _absorbed(
    w: Writer, q_plain: str, q_turned: str, latent: str, k_turned: str, name: str, up: str, part: LatentAttention
) -> str:
    """Return what heads make of the cache of latent vectors and rotated keys, [B, H, S, D].

    Keys and values are not made of latent vectors: the projection to keys is applied to queries, that to values to the
    result (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2 and appendix C), head by head. What is kept of a token is what
    all heads read.

    Args:
        w: Where to write.
        q_plain: Parts of queries that are not rotated [B, H, S, D].
        q_turned: Those that are.
        latent: Normalised latent vectors [B, S, R].
        k_turned: Rotated keys [B, 1, S, P].
        name: Prefix of all ops.
        up: Prefix of the projection from latent vectors.
        part: The attention.
    """
    g, seq, heads, rank, turned = w.g, w.config.seq, part.heads, part.latent_rank, part.rope.size
    init = f"normal {rank**-0.5:.6g}"
    to_keys = g.parameter(f"{up}.weight.k{PER_HEAD}", (heads, part.plain, rank), init)
    to_values = g.parameter(f"{up}.weight.v{PER_HEAD}", (heads, rank, part.value), init)
    q_latent = g.op("MatMul", q_plain, to_keys, name=f"{name}.q_absorbed")
    q = g.op("Concat", q_latent, q_turned, name=f"{name}.q.whole", axis=-1)
    flat = g.op("Reshape", k_turned, g.constant((0, seq, turned)), name=f"{name}.k.flat")
    own = g.op("Concat", latent, flat, name=f"{name}.latent.whole", axis=-1)
    cache = g.input(f"{name}.core.cached_latents", ("batch", part.cached, rank + turned))
    limits = {"chunk": part.chunk} if 0 < part.chunk < part.cached + seq else {}
    y = g.op(
        "autopar::CachedLatentAttention", q, cache, own, name=f"{name}.core.latent", rank=rank,
        scale=part.scale or (part.plain + turned) ** -0.5, **{"window": 0, "chunk": 0, "softcap": 0.0, **limits},
    )  # fmt: skip
    return g.op("MatMul", y, to_values, name=f"{name}.core")
