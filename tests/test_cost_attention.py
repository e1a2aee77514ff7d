"""Attention as one kernel or as several: what is multiplied, moved and kept, by hand; alignment of channels."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import load_cluster
from autopar.cost import CostModel, Stack, op_bytes, op_flops
from autopar.cost.attention import attention_work, fused_flops, kept_bytes, unfused_products, unfused_traffic
from autopar.ir.graph import Op

FUSED = CostModel(load_cluster("a100"))
UNFUSED = CostModel(load_cluster("a100"), stack=Stack("unfused", attention="unfused"))
FORWARD = Op("f", "Attention", ("q", "k", "v"), ("y",), (("is_causal", 1),))
BACKWARD = Op("b", "autopar::AttentionGrad", ("q", "k", "v", "dy"), ("dq", "dk", "dv"), (("is_causal", 1),))
SIZES = dict.fromkeys(("q", "k", "v", "y", "dy", "dq", "dk", "dv"), 2.0)


def heads(batch: int, number: int, length: int, channels: int) -> np.ndarray:
    return np.array([(batch, number, length, channels)], np.int64)


def seconds(costs: CostModel, op: Op, channels: int, number: int = 8) -> float:
    block = heads(4, number, 2048, channels)
    return float(costs.op_seconds(op, [block] * len(op.inputs), [block] * len(op.outputs), SIZES)[0])


def test_unfused_attention_moves_9_bytes_per_score_forward_and_11_backward() -> None:
    """2 x 3 heads, 64 queries, 64 keys: 24,576 scores. Softmax and dropout read and write 2 bytes, a mask has 1."""
    block = heads(2, 3, 64, 16)
    forward = attention_work(FORWARD, [block] * 3, [block])
    backward = attention_work(BACKWARD, [block] * 4, [block] * 3)

    assert forward.scores == [24_576]
    assert unfused_traffic(forward, 2.0) == [9 * 24_576]
    assert unfused_traffic(backward, 2.0) == [11 * 24_576]


def test_unfused_attention_keeps_5_bytes_per_score_and_fused_attention_4_per_query() -> None:
    """Korthikanti et al. 2022: 5 a s / h x s b h bytes per layer; only the forward keeps anything."""
    block = heads(2, 3, 64, 16)
    arguments = FORWARD, [block] * 3, [block], SIZES

    assert UNFUSED.kept_bytes(*arguments) == [5 * 24_576]
    assert FUSED.kept_bytes(*arguments) == [4 * 2 * 3 * 64]
    assert kept_bytes(attention_work(BACKWARD, [block] * 4, [block] * 3), 2.0, fused=False) == [0]
    assert UNFUSED.kept_bytes(Op("r", "Relu", ("x",), ("y",)), [block], [block], SIZES) == [0]


def test_products_of_unfused_attention_are_those_of_the_formula() -> None:
    """Of all queries with all keys: twice the FLOPs of a causal model forward, and 4 products backward."""
    block = heads(2, 3, 64, 16)
    forward = attention_work(FORWARD, [block] * 3, [block])
    backward = attention_work(BACKWARD, [block] * 4, [block] * 3)

    assert sum(float(product.flops[0]) for product in unfused_products(forward)) == 2 * forward.flops[0]
    # 4 products of all scores, where the model counts 5 of half of them
    assert sum(float(product.flops[0]) for product in unfused_products(backward)) == 8 / 5 * backward.flops[0]


def test_fused_attention_multiplies_whole_fragments_and_blocks() -> None:
    """80 channels take the time of 96; of 2048 causal keys 1024 are attended, and half a block of 128 besides."""
    plain, padded = (attention_work(FORWARD, [heads(1, 1, 2048, c)] * 3, [heads(1, 1, 2048, c)]) for c in (96, 80))

    assert fused_flops(plain) == [2 * 2048 * (96 + 96) * (1024 + 64)]
    assert fused_flops(padded) == fused_flops(plain)


@pytest.mark.parametrize("kind", ["autopar::AttentionPart", "autopar::ScaledAttentionPart"])
def test_a_shard_of_causal_queries_has_its_share_of_the_products(kind: str) -> None:
    """Of 2048 queries 512 lie on each of 4 devices, and attend to 1024 keys on average: balanced as in frameworks.

    Contiguous shards attend to 256, 768, 1280 and 1792 keys.
    """
    shard, whole = heads(1, 8, 512, 96), heads(1, 8, 2048, 96)
    start = np.zeros((1, 0), np.int64)
    part = replace(FORWARD, kind=kind, attrs=(*FORWARD.attrs, ("size", 2048)))
    gradient = replace(BACKWARD, kind="autopar::AttentionGradPart", attrs=part.attrs)

    forward = attention_work(part, [shard, whole, whole, start], [shard])
    backward = attention_work(gradient, [shard, whole, whole, shard, start], [shard, whole, whole])

    assert forward.attended == backward.attended == 1024
    assert forward.flops == attention_work(FORWARD, [whole] * 3, [whole]).flops / 4
    assert backward.flops == attention_work(BACKWARD, [whole] * 4, [whole] * 3).flops / 4


LIMITED = Op("f", "autopar::CausalAttention", ("q", "k", "v"), ("y",), (("scale", 0.1),))


def limited(**attrs: int) -> Op:
    return replace(LIMITED, attrs=(*attrs.items(), *LIMITED.attrs))


def attended(op: Op, queries: int, keys: int) -> float:
    q, kv = heads(2, 8, queries, 64), heads(2, 2, keys, 64)
    return float(attention_work(op, [q, kv, kv], [q]).attended[0])


@given(tokens=st.integers(1, 600), last=st.integers(1, 600), window=st.integers(0, 700), chunk=st.integers(0, 700))
def test_keys_seen_are_those_of_the_mask_but_for_half_a_key(tokens: int, last: int, window: int, chunk: int) -> None:
    """The usual causal half, S / 2 where the mask has (S + 1) / 2, counts a query's own key half.

    Of a full window all w keys count, as half a key lies before it.
    """
    queries = min(tokens, last)
    i, j = np.arange(tokens - queries, tokens)[:, None], np.arange(tokens)
    seen = (j <= i) & ((i - j < window) | (window == 0)) & ((i // max(chunk, 1) == j // max(chunk, 1)) | (chunk == 0))

    mean = attended(limited(window=window, chunk=chunk), queries, tokens)

    assert seen.sum() / queries - 0.5 - 1e-9 <= mean <= seen.sum() / queries + 1e-9


def test_keys_seen_by_hand() -> None:
    """Of 2048 tokens: 2048 / 2; 512 - 512^2 / 4096; 256 / 2; the last query alone sees what its window or chunk has."""
    assert attended(limited(), 2048, 2048) == attended(FORWARD, 2048, 2048) == 1024
    assert attended(limited(window=512), 2048, 2048) == 448
    assert attended(limited(window=4096), 2048, 2048) == 1024
    assert attended(limited(chunk=256), 2048, 2048) == 128
    assert attended(limited(chunk=256, window=128), 2048, 2048) == 128 - 128**2 / 512
    assert attended(limited(window=512), 1, 2048) == 512
    assert attended(limited(chunk=512), 1, 2040) == 503.5  # the last of three chunks and 504 tokens


def test_sinks_soft_caps_and_gradients_have_the_products_of_their_window() -> None:
    """2 products of 448 keys forward and 5 backward; some queries or heads have their share."""
    whole, shard, sinks, start = heads(1, 8, 2048, 96), heads(1, 8, 512, 96), np.array([(8,)]), np.zeros((1, 0), int)
    flops = 2 * 8 * 2048 * (96 + 96) * 448
    attrs = (("scale", 0.1), ("softcap", 50.0), ("window", 512))

    for kind, with_sinks in (("Causal", []), ("Sink", [sinks])):
        op = Op("f", f"autopar::{kind}Attention", ("q", "k", "v", "sinks")[: 3 + len(with_sinks)], ("y",), attrs)
        back = replace(op, kind=f"{op.kind}Grad", inputs=(*op.inputs, "dy"), outputs=("dq", "dk", "dv"))
        part = replace(op, kind=f"{op.kind}Part", inputs=(*op.inputs, "start"), attrs=(*attrs, ("size", 2048)))
        own = replace(part, kind=f"{op.kind}HeadsPart", attrs=(*attrs, ("size", 8)))
        back_part = replace(part, kind=f"{op.kind}GradPart", inputs=(*back.inputs, "start"), outputs=back.outputs)
        two = heads(1, 2, 2048, 96)

        assert op_flops(op, [whole] * 3 + with_sinks, [whole]) == [flops]
        assert op_flops(back, [whole] * 3 + with_sinks + [whole], [whole] * 3) == [2.5 * flops]
        assert op_flops(part, [shard, whole, whole, *with_sinks, start], [shard]) == [flops / 4]
        assert op_flops(back_part, [shard, whole, whole, *with_sinks, shard, start], [whole] * 3) == [2.5 * flops / 4]
        assert op_flops(own, [two, whole, whole, *with_sinks, start], [two]) == [flops / 4]


def test_a_window_cuts_a_second_block_where_it_begins() -> None:
    """Queries up to 512 waste half a block of 128 on the diagonal, the other 3 of 4 half a block more."""
    whole = heads(1, 1, 2048, 96)
    window, chunk = (attention_work(op, [whole] * 3, [whole]) for op in (limited(window=512), limited(chunk=512)))

    assert fused_flops(window) == [2 * 2048 * (96 + 96) * (448 + 64 + 48)]
    assert fused_flops(chunk) == [2 * 2048 * (96 + 96) * (256 + 64)]


@pytest.mark.parametrize(
    ("op", "queries", "keys"),
    [
        (limited(), 64, 1024),
        (limited(window=256), 1024, 1024),
        (limited(window=256), 1, 256),  # the last of 1024 tokens sees itself and 255 before
        (limited(chunk=256), 1, 256),
        (limited(chunk=300), 1, 124),  # of the fourth chunk
        (replace(limited(window=256, size=1024), kind="autopar::CausalAttentionPart"), 128, 128 + 255),
        (replace(limited(chunk=512, size=1024), kind="autopar::CausalAttentionPart"), 128, 128 + 192),
        (replace(limited(chunk=128, size=1024), kind="autopar::CausalAttentionPart"), 256, 256),
    ],
)
def test_only_keys_that_a_query_sees_are_read(op: Op, queries: int, keys: int) -> None:
    """Of 1024 keys and values, in 2-byte numbers, of 2 heads; 8 heads of queries are read and written."""
    q, kv = heads(1, 8, queries, 64), heads(1, 2, 1024, 64)

    nbytes = op_bytes(op, [q, kv, kv], [q], SIZES)

    assert nbytes == [2 * 64 * (2 * 8 * queries + 2 * 2 * keys)]


def test_attention_with_a_window_keeps_what_attention_keeps() -> None:
    """Kernels that are not fused compute the scores of all keys and mask them."""
    block, op = heads(2, 3, 64, 16), limited(window=8)
    arguments = [block] * 3, [block], SIZES

    for costs in (FUSED, UNFUSED):
        assert costs.kept_bytes(op, *arguments) == costs.kept_bytes(FORWARD, *arguments)
    assert seconds(UNFUSED, op, 96) == seconds(UNFUSED, FORWARD, 96)
    assert seconds(FUSED, limited(), 96) == seconds(FUSED, FORWARD, 96)
    assert seconds(FUSED, limited(window=256), 96) < 0.4 * seconds(FUSED, FORWARD, 96)


def test_channels_that_are_no_multiple_of_8_keep_unfused_attention_from_the_tensor_cores() -> None:
    """BLOOM's topology search: a step of a 200B model took 27 % longer with 150 channels per head than with 144."""
    for op in (FORWARD, BACKWARD):
        assert seconds(UNFUSED, op, 150) > 3 * seconds(UNFUSED, op, 144)
        assert seconds(FUSED, op, 150) < 1.2 * seconds(FUSED, op, 144)


def test_decomposed_attention_costs_what_the_products_of_unfused_attention_cost() -> None:
    """Graphs that spell attention out are priced by the same class: batches of small products."""
    block, scores = heads(4, 8, 2048, 96), heads(4, 8, 2048, 2048)
    swapped = heads(4, 8, 96, 2048)
    product = Op("p", "MatMul", ("a", "b"), ("c",))
    sizes = dict.fromkeys("abc", 2.0)
    first = UNFUSED.op_seconds(product, [block, swapped], [scores], sizes)
    second = UNFUSED.op_seconds(product, [scores, block], [block], sizes)

    whole = seconds(UNFUSED, FORWARD, 96)

    work = attention_work(FORWARD, [block] * 3, [block])
    between = unfused_traffic(work, 2.0) / (2.039e12 * 0.8 * 1.1) + 2 * 0.3 * 4.2e-6
    assert whole == pytest.approx(float((first + second + between)[0]))


def test_large_products_of_a_batch_reach_what_large_products_reach() -> None:
    """Experts are a batch, too: 8 products of 4096 x 4096 x 4096 take as long as 8 products one by one but launches."""
    batch, one = np.array([(8, 4096, 4096)]), np.array([(4096, 4096)])
    product = Op("p", "MatMul", ("a", "b"), ("c",))
    sizes = dict.fromkeys("abc", 2.0)

    together = FUSED.op_seconds(product, [batch, batch], [batch], sizes)
    alone = FUSED.op_seconds(product, [one, one], [one], sizes)

    assert together == pytest.approx(8 * alone, rel=0.05)


def test_kernels_are_counted_for_the_host() -> None:
    """Unfused attention is 4 kernels forward and 6 backward; backward kernels are launched faster."""
    stack = Stack("eager", attention="unfused", scalars=(("host_launch", 10e-6),))
    eager = CostModel(load_cluster("a100"), stack=stack)
    view = Op("v", "Reshape", ("x", "s"), ("y",))

    assert eager.op_kernels(FORWARD, 4) == 4
    assert eager.op_kernels(BACKWARD, 4) == 6
    assert FUSED.op_kernels(BACKWARD, 4) == 1
    assert eager.op_kernels(view, 4) == 0
    assert eager.host_seconds(FORWARD, 4) == pytest.approx(40e-6)
    assert FUSED.host_seconds(FORWARD, 4) == 0
