"""Attention on local shapes: what it multiplies and what it moves, as one fused kernel or as several.

Fused (flash attention): causal blocks above the diagonal are left out, scores never leave the chip, the gradient
computes them again: 5 products where the forward has 2. Channels per head are padded to whole fragments.

Queries of causal attention that are sharded (context parallelism) are priced as balanced: each of cp devices has 1/cp
of the products, as where it holds the i-th and the (2 cp - 1 - i)-th of 2 cp chunks (Megatron-LM, torchtitan, zigzag
ring attention) or all queries of some heads (DeepSpeed-Ulysses). Of contiguous shards the last one would have 2 - 1/cp
times as many.

Of a window or of chunks (`autopar::CausalAttention`, `autopar::SinkAttention`) only the keys seen are multiplied and
read. A query at position p of the sequence, where p runs from 0 to T as a continuous number, sees p keys without limit,
which makes the usual T / 2 of causal attention, min(p, w) with a window of w keys, and p mod c in chunks of c. The mean
over the queries is the difference of the integrals

    G(p) = p^2 / 2 for p <= w, else w p - w^2 / 2               of a window
    F(p) = floor(p / c) G(c) + G(p mod c)                       of chunks

at the positions of the last and the first query: w - w^2 / 2T for the T queries of a sequence. Soft caps and sinks are
arithmetic on scores that are in registers, and cost nothing.

In a step of decoding (`autopar::CachedAttention` and the like) caches are read once, however many queries share them,
and keys and values of the step are read and written behind them. What heads make of latent vectors
(`autopar::CachedLatentAttention`, FlashMLA's kernel) are products with the whole vector of a token and with its latent
elements, which the kernel keeps on chip between the two: a token's vector is read once for all heads.

Where devices pass keys and values round in a ring (`autopar.cost.rings`), a kernel per block attends to that block, and
another one merges what it finds into the result so far: it reads both and writes one.

Unfused: batched products of all queries with all keys, and between them scale, mask, softmax and dropout in two
kernels that read and write the scores; probabilities, what dropout left of them and its mask are kept for the backward
pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.arrays import FloatArray, Product, Shapes, num_elements, shape_of
from autopar.ir.graph import Op
from autopar.ir.rings import RINGS

_PARTS = ("", "Part", "HeadsPart")
_RING_GRADIENTS = frozenset(kind for kind, ring in RINGS.items() if ring.travelling)
LIMITED_KINDS = frozenset(
    f"autopar::{name}Attention{grad}{part}" for name in ("Causal", "Sink") for grad in ("", "Grad") for part in _PARTS
)
"""Causal attention of which a query may see only the keys nearby; attributes `window` and `chunk`."""
CACHED_KINDS = frozenset(
    {"autopar::CachedLatentAttention"}
    | {f"autopar::Cached{sinks}Attention{part}" for sinks in ("", "Sink") for part in ("", "HeadsPart")}
)
"""Causal attention to caches and to keys and values of the step."""
_GRADIENT = (
    frozenset(
        f"autopar::{name}AttentionGrad{part}"
        for name in ("", "Masked", "Causal", "Relative", "Sink")
        for part in _PARTS
    )
    | _RING_GRADIENTS
)
# Of some queries (`size`: of how many), and of some query heads with all key heads.
_QUERIES_PARTS = frozenset(
    f"autopar::{name}Attention{grad}Part" for name in ("", "Scaled", "Causal", "Sink") for grad in ("", "Grad")
)
_HEADS_PARTS = frozenset(
    f"autopar::{scaled}{masked}AttentionHeadsPart" for scaled in ("", "Scaled") for masked in ("", "Masked")
)
_ALWAYS_CAUSAL = LIMITED_KINDS | CACHED_KINDS | {kind for kind, ring in RINGS.items() if ring.limited}
ATTENTION_KINDS = (
    frozenset({"Attention", "autopar::RelativeAttention"})
    | _QUERIES_PARTS
    | _HEADS_PARTS
    | _GRADIENT
    | LIMITED_KINDS
    | CACHED_KINDS
    | frozenset(RINGS)
)

BLOCK = 128  # queries a thread block of FlashAttention-2 takes, and keys it takes at a time
CHANNEL_BLOCK = 32  # FlashAttention-2 pads channels per head to a multiple of it
MASK_BYTES = 1  # of an element of dropout's masks (Korthikanti et al. 2022)
# Kernels of the unfused attention: product, scaled masked softmax, dropout, product; gradient: four products, dropout,
# softmax (Megatron-LM without flash attention).
UNFUSED_KERNELS: Mapping[bool, int] = {False: 4, True: 6}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWork:
    """What an attention op has to do; arrays (n,).

    Attributes:
        is_gradient: Whether it is the gradient.
        batch: Samples x heads.
        queries: Queries per head.
        keys: Keys per head.
        channels: Channels of a query or key.
        value_channels: Channels of a value.
        attended: Keys a query attends to on average.
        cut: Share of the queries of which a window hides keys.
        blocks: Blocks of keys that come one after the other: 1, or the steps of a ring.
    """

    is_gradient: bool
    batch: FloatArray
    queries: FloatArray
    keys: FloatArray
    channels: FloatArray
    value_channels: FloatArray
    attended: FloatArray
    cut: FloatArray
    blocks: FloatArray

    @property
    def flops(self) -> FloatArray:
        """Of the model: 2 products, half of them when causal; 5 products for the gradient, which has to repeat one."""
        per_key = 2.0 * self.batch * self.queries * (self.channels + self.value_channels)
        return (2.5 if self.is_gradient else 1.0) * per_key * self.attended

    @property
    def scores(self) -> FloatArray:
        """Number of scores that are stored when nothing is fused."""
        return self.batch * self.queries * self.keys


def attention_work(op: Op, inputs: Shapes, outputs: Shapes) -> AttentionWork:
    """Return the work of an op of `ATTENTION_KINDS`.

    Q, K and V are (batch, heads, length, channels) or (batch, length, heads x channels). Of a shard of causal queries,
    a kind named `...Part`, a query attends to as many keys on average as all `size` queries do; of fewer queries than
    keys, these are the last ones. In a ring each device has as many of the keys as of the `size` queries.
    """
    is_gradient = op.kind in _GRADIENT
    if is_gradient:  # (q, k, v, ..., dy) -> (dq, dk, dv); `...Part` is told its start in a scalar behind dy
        y = next(shape for shape in reversed(inputs) if shape is not None and shape.shape[1] >= 3)
    else:
        y = shape_of(outputs, 0)
    q, k = shape_of(inputs, 0), shape_of(inputs, 1)
    keys = k[:, -2]
    if not is_gradient and op.kind == "Attention" and len(inputs) > 4 and inputs[4] is not None:  # past_key
        keys = keys + inputs[4][:, -2]
    queries = q[:, -2]
    if op.kind in CACHED_KINDS:
        keys = keys + queries
    blocks = np.ones(len(q))
    if op.kind in RINGS:
        devices = np.maximum(_number(op, "size", 0) // np.maximum(queries, 1), 1)
        keys = keys * devices
        pairs = list(zip(queries.tolist(), devices.tolist(), strict=True))
        steps = {(rows, size): RINGS[op.kind].steps(op.attrs, max(1, rows), size) for rows, size in set(pairs)}
        blocks = np.array([float(steps[pair]) for pair in pairs])
    heads = q[:, 1] if q.shape[1] == 4 else np.full(len(q), max(1, int(_number(op, "q_num_heads", 1))))
    batch = (q[:, 0] * heads).astype(np.float64)
    rows = np.maximum(batch * queries, 1.0)
    attended, cut = keys.astype(np.float64), np.zeros(len(q))
    if op.attr("is_causal", 0) or op.kind in _ALWAYS_CAUSAL:
        is_part = op.kind in _QUERIES_PARTS or op.kind in RINGS
        all_queries = _number(op, "size", 0) if is_part else queries
        attended, cut = _means(op, np.minimum(all_queries, keys).astype(np.float64), keys.astype(np.float64))
    return AttentionWork(
        is_gradient, batch, queries.astype(np.float64), keys.astype(np.float64),
        num_elements(q) / rows, num_elements(y) / rows, attended, cut, blocks,
    )  # fmt: skip


def _means(op: Op, queries: FloatArray, keys: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the keys a query sees and whether a window hides some of it, as means over the queries, the last ones."""
    window, chunk = _number(op, "window", 0), _number(op, "chunk", 0)

    def within(position: FloatArray) -> tuple[FloatArray, FloatArray]:
        far = np.maximum(position - window, 0.0) if window else np.zeros_like(position)
        return (position**2 - far**2) / 2, far

    def integrals(position: FloatArray) -> tuple[FloatArray, FloatArray]:
        if not chunk:
            return within(position)
        chunks, (seen, far) = position // chunk, within(position % chunk)
        seen_of_chunk, far_of_chunk = within(np.full_like(position, chunk))
        return chunks * seen_of_chunk + seen, chunks * far_of_chunk + far

    (seen, far), (seen_before, far_before) = integrals(keys), integrals(keys - queries)
    number = np.maximum(queries, 1.0)
    return (seen - seen_before) / number, (far - far_before) / number


def keys_read(op: Op, inputs: Shapes) -> FloatArray:
    """Return how many keys, and values, an op of `LIMITED_KINDS` reads: those that one of its queries sees.

    Besides those of the queries themselves these are the tokens before the first query that its window and its chunk
    hold. Shards of the queries, the kinds named `...Part`, begin at multiples of their size: of the c tokens of a chunk
    (c - queries) / 2 lie before them on average.
    """
    queries, keys = (shape_of(inputs, index)[:, -2].astype(np.float64) for index in (0, 1))
    window, chunk = _number(op, "window", 0), _number(op, "chunk", 0)
    is_part = op.kind in _QUERIES_PARTS
    earlier = keys - queries
    if chunk:
        earlier = np.minimum(earlier, np.maximum(chunk - queries, 0.0) / 2 if is_part else earlier % chunk)
    if window:
        earlier = np.minimum(earlier, window - 1)
    result: FloatArray = np.minimum(queries + earlier, keys)
    return result


def _number(op: Op, name: str, default: int) -> int:
    value = op.attr(name, default)
    return value if isinstance(value, int) else default


def fused_flops(work: AttentionWork) -> FloatArray:
    """Return the FLOPs a fused kernel does: whole blocks of keys, whole fragments of channels."""
    channels = CHANNEL_BLOCK * (np.ceil(work.channels / CHANNEL_BLOCK) + np.ceil(work.value_channels / CHANNEL_BLOCK))
    # On the diagonal half a block of keys more than needed is multiplied, and half a block where a window begins.
    keys = np.minimum(work.attended + BLOCK / 2 * (1 + work.cut), work.keys)
    per_key = 2.0 * work.batch * work.queries * channels
    flops: FloatArray = (2.5 if work.is_gradient else 1.0) * per_key * keys
    return flops


def unfused_products(work: AttentionWork) -> Sequence[Product]:
    """Return the batched products: scores and results; for the gradient those of scores, values, queries and keys."""
    b, s, t, c, d = work.batch, work.queries, work.keys, work.channels, work.value_channels
    if not work.is_gradient:
        return [Product(b, s, t, c), Product(b, s, d, t)]
    return [Product(b, s, t, d), Product(b, t, d, s), Product(b, s, c, t), Product(b, t, c, s)]


def unfused_traffic(work: AttentionWork, element: float) -> FloatArray:
    """Return the bytes that scale, mask, softmax and dropout move, for elements of `element` bytes.

    Forward: softmax reads and writes, dropout reads and writes and leaves a mask: 9 bytes per score of 2-byte numbers.
    Backward: dropout reads, reads its mask and writes; softmax reads two and writes one: 11.
    """
    return work.scores * ((5 if work.is_gradient else 4) * element + MASK_BYTES)


def merged_bytes(work: AttentionWork, results: FloatArray) -> FloatArray:
    """Return the bytes that are moved to merge what each block gives into `results` bytes of the op's outputs."""
    return (work.blocks - 1) * 3 * results


def kept_bytes(work: AttentionWork, element: float, *, fused: bool, dropout: bool = True) -> FloatArray:
    """Return the bytes a forward attention keeps for its gradient besides its operands and its result.

    Unfused: probabilities, and with dropout what it left of them and its mask: 5 bytes per score of 2-byte numbers
    (Korthikanti et al. 2022). Fused: the logarithm of the sum of each query in float32.
    """
    if work.is_gradient:
        return np.zeros_like(work.scores)
    if fused:
        return 4.0 * work.batch * work.queries
    return work.scores * (2 * element + MASK_BYTES if dropout else element)
