"""Transformers in plain JAX and in Flax, as functions of parameters and tokens; needs jax and flax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

HEADS, VOCAB, SEQ, HIDDEN, WIDTH, LAYERS = 4, 48, 16, 32, 64, 2
Tree = Any


def norm(x: Any, p: Tree) -> Any:
    """Return a layer normalisation, written out."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def rms_norm(x: Any, p: Tree) -> Any:
    """Return an RMS normalisation whose scale is around 0, as Gemma has it."""
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + p["scale"])


def attention(x: Any, p: Tree) -> Any:
    """Return causal attention, written out; `jax.nn` computes its softmax in float32."""
    samples, seq, hidden = x.shape
    qkv = jnp.split(x @ p["qkv"] + p["qkv_bias"], 3, -1)
    q, k, v = (part.reshape(samples, seq, HEADS, hidden // HEADS) for part in qkv)
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * (hidden // HEADS) ** -0.5
    shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -jnp.inf), -1)
    return jnp.einsum("bhst,bthd->bshd", shares, v).reshape(samples, seq, hidden) @ p["out"]


def mlp(x: Any, p: Tree) -> Any:
    """Return two layers with a GELU."""
    return jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"]


def mixture(x: Any, p: Tree) -> Any:
    """Return experts that all tokens pass through, weighed by two of each token's choice."""
    weight, expert = jax.lax.top_k(jax.nn.softmax(x @ p["router"], -1), 2)
    weight = weight / weight.sum(-1, keepdims=True)
    share = jnp.einsum("bske,bsk->bse", jax.nn.one_hot(expert, p["router"].shape[1]), weight)
    inner = jax.nn.silu(jnp.einsum("bsd,edf->ebsf", x, p["gate"])) * jnp.einsum("bsd,edf->ebsf", x, p["up"])
    return jnp.einsum("bse,ebsd->bsd", share, jnp.einsum("ebsf,efd->ebsd", inner, p["down"]))


def block(x: Any, p: Tree) -> Any:
    """Return a decoder layer."""
    x = x + attention(norm(x, p["norm1"]), p["attn"])
    y = norm(x, p["norm2"])
    return x + (mixture(y, p["mlp"]) if "router" in p["mlp"] else mlp(y, p["mlp"]))


def decoder(p: Tree, tokens: Any) -> Any:
    """Return logits of a decoder whose layers are a list."""
    x = p["embed"][tokens] + p["pos"]
    for layer in p["layers"]:
        x = block(x, layer)
    return norm(x, p["norm"]) @ p["embed"].T


def scanned(p: Tree, tokens: Any) -> Any:
    """Return logits of a decoder whose layers are stacked and scanned over, with recompute."""

    def step(x: Any, layer: Tree) -> tuple[Any, None]:
        return jax.checkpoint(block)(x, layer), None

    x, _ = jax.lax.scan(step, p["embed"][tokens] + p["pos"], p["layers"])
    return norm(x, p["norm"]) @ p["embed"].T


def llama(p: Tree, tokens: Any) -> Any:
    """Return logits of a decoder with rotated positions, two heads of keys for four of queries, and gated MLPs."""
    x, size = p["embed"][tokens], HIDDEN // HEADS
    angles = jnp.arange(SEQ)[:, None] / 1e4 ** (jnp.arange(0, size, 2) / size)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]

    def rotated(x: Any) -> Any:
        one, two = jnp.split(x, 2, -1)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    for layer in p["layers"]:
        y = rms_norm(x, layer["norm1"])
        q, k, v = (jnp.einsum("bsd,dhk->bshk", y, layer[name]) for name in ("q", "k", "v"))
        y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + jnp.einsum("bshk,hkd->bsd", y, layer["out"])
        y = rms_norm(x, layer["norm2"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return rms_norm(x, p["norm"]) @ p["head"]


def parameters(experts: int = 0, layers: int = LAYERS, hidden: int = HIDDEN, seq: int = SEQ) -> Tree:
    """Return random parameters of `decoder`."""
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5 if len(shape) > 1 else jnp.zeros(shape)

    def of_norm() -> Tree:
        return {"scale": jnp.ones(hidden), "bias": normal(hidden)}

    def layer() -> Tree:
        width = 2 * hidden
        dense = {"up": normal(hidden, width), "up_bias": normal(width), "down": normal(width, hidden)}
        sparse = {"router": normal(hidden, experts), "gate": normal(experts, hidden, width)}
        sparse |= {"up": normal(experts, hidden, width), "down": normal(experts, width, hidden)}
        attn = {"qkv": normal(hidden, 3 * hidden), "qkv_bias": normal(3 * hidden), "out": normal(hidden, hidden)}
        return {"norm1": of_norm(), "norm2": of_norm(), "attn": attn, "mlp": sparse if experts else dense}

    rows = {"embed": normal(VOCAB, hidden), "pos": normal(seq, hidden), "norm": of_norm()}
    return {**rows, "layers": [layer() for _ in range(layers)]}


def stacked(layers: int = LAYERS, hidden: int = HIDDEN, seq: int = SEQ) -> Tree:
    """Return random parameters of `scanned`."""
    tree = parameters(0, layers, hidden, seq)
    return {**tree, "layers": jax.tree.map(lambda *parts: jnp.stack(parts), *tree["layers"])}


def llama_parameters() -> Tree:
    """Return random parameters of `llama`."""
    keys = iter(jax.random.split(jax.random.key(1), 100))
    size = HIDDEN // HEADS

    def normal(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) * HIDDEN**-0.5

    def layer() -> Tree:
        heads = {"q": normal(HIDDEN, HEADS, size), "k": normal(HIDDEN, 2, size), "v": normal(HIDDEN, 2, size)}
        rest = {"out": normal(HEADS, size, HIDDEN), "gate": normal(HIDDEN, WIDTH), "up": normal(HIDDEN, WIDTH)}
        norms = {name: {"scale": normal(HIDDEN)} for name in ("norm1", "norm2")}
        return {**heads, **rest, "down": normal(WIDTH, HIDDEN), **norms}

    rows = {"embed": normal(VOCAB, HIDDEN), "head": normal(HIDDEN, VOCAB), "norm": {"scale": normal(HIDDEN)}}
    return {**rows, "layers": [layer() for _ in range(LAYERS)]}


def linen() -> tuple[Callable[..., Any], Tree]:
    """Return a decoder of Flax's linen and its variables."""
    from flax import linen as nn

    class Block(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            mask = nn.make_causal_mask(x[..., 0])
            x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(HIDDEN)(nn.gelu(nn.Dense(WIDTH)(nn.LayerNorm()(x)), approximate=False))

    class Decoder(nn.Module):  # type: ignore[misc]
        @nn.compact  # type: ignore[untyped-decorator]
        def __call__(self, tokens: Any) -> Any:
            embed = nn.Embed(VOCAB, HIDDEN)
            x = embed(tokens) + nn.Embed(SEQ, HIDDEN)(jnp.arange(SEQ))
            for _ in range(LAYERS):
                x = Block()(x)
            return embed.attend(nn.RMSNorm()(x))

    model = Decoder()
    return model.apply, model.init(jax.random.key(0), jnp.zeros((2, SEQ), jnp.int32))


def nnx() -> tuple[Callable[..., Any], Tree]:
    """Return a decoder of Flax's nnx and its state."""
    from flax import nnx as nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.norm1, self.norm2 = nn.LayerNorm(HIDDEN, rngs=rngs), nn.LayerNorm(HIDDEN, rngs=rngs)
            self.attn = nn.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
            self.up, self.down = nn.Linear(HIDDEN, WIDTH, rngs=rngs), nn.Linear(WIDTH, HIDDEN, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attn(self.norm1(x), mask=nn.make_causal_mask(x[..., 0]))
            return x + self.down(nn.gelu(self.up(self.norm2(x))))

    class Decoder(nn.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.embed, self.pos = nn.Embed(VOCAB, HIDDEN, rngs=rngs), nn.Embed(SEQ, HIDDEN, rngs=rngs)
            self.blocks = nn.List([Block(rngs) for _ in range(LAYERS)])
            self.norm, self.head = nn.LayerNorm(HIDDEN, rngs=rngs), nn.Linear(HIDDEN, VOCAB, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens) + self.pos(jnp.arange(SEQ))
            for layer in self.blocks:
                x = layer(x)
            return self.head(self.norm(x))

    graph, state = nn.split(Decoder(nn.Rngs(0)))

    def apply(state: Tree, tokens: Any) -> Any:
        return nn.merge(graph, state)(tokens)

    return apply, state


MODELS: dict[str, Callable[[], tuple[Callable[..., Any], Tree]]] = {
    "gpt": lambda: (decoder, parameters()),
    "moe": lambda: (decoder, parameters(experts=4)),
    "scanned": lambda: (scanned, stacked()),
    "llama": lambda: (llama, llama_parameters()),
    "linen": linen,
    "nnx": nnx,
}
"""Functions and their parameters."""
