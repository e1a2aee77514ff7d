"""Attention as one kernel or as several: what is multiplied, moved and kept, by hand; alignment of channels."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.cluster import load_cluster
from autopar.cost import CostModel, Stack
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
