"""The rules of single ops, worked out by hand, and the law that every strategy keeps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autopar.discover import Strategy, discover, format_rule
from autopar.sharding import Partial, Shard
from tests.single_ops import (
    Input,
    Tensor,
    check_rule,
    draw_all,
    flags,
    floats,
    indices,
    ints,
    positive,
    single_op,
    with_sums,
)

B, S, D, H, K, V, C = 8, 16, 96, 12, 8, 40, 16
"""Batch, sequence, hidden (H * K), heads, head size, vocabulary, channels."""
SCALAR = np.array(2.0)

Case = tuple[str, Sequence[Input], int, dict[str, Any], str]

ELEMENTWISE: list[Case] = [
    ("Relu", [floats(B, S, D)], 1, {}, "[a,b,c]->[a,b,c]"),
    ("Sqrt", [positive(B, S)], 1, {}, "[a,b]->[a,b]"),
    ("Log", [positive(B, S)], 1, {}, "[a,b]->[a,b]"),
    ("Neg", [floats(B, S)], 1, {}, "[a,b]->[a,b]; P->P"),
    ("Cast", [floats(B, S)], 1, {"to": 11}, "[a,b]->[a,b]; P->P"),
    ("Add", [floats(B, S, D), floats(D)], 1, {}, "[a,b,c],[c]->[a,b,c]; P,P->P"),
    ("Add", [floats(B, S), floats(B, S)], 1, {}, "[a,b],[a,b]->[a,b]; P,P->P"),
    ("Mul", [floats(B, S), floats()], 1, {}, "[a,b],[]->[a,b]; P,R->P; R,P->P"),
    ("Mul", [floats(B, S), floats(B, 1)], 1, {}, "[a,b],[a,.]->[a,b]; P,R->P; R,P->P"),
    ("Pow", [floats(B, S), SCALAR], 1, {}, "[a,b],[]->[a,b]"),
    (
        "Where",
        [flags(B, 1, S), floats(B, H, S), np.array(0.0)],
        1,
        {},
        "[a,.,b],[a,c,b],[]->[a,c,b]; R,P,R->P",
    ),
    ("Sum", [floats(B, S)] * 4, 1, {}, "[a,b],[a,b],[a,b],[a,b]->[a,b]; P,P,P,P->P"),
]

PRODUCTS: list[Case] = [
    # The contraction c is the dim MetaDist loses in low precision; batch dims of the left operand stay.
    ("MatMul", [floats(B, S, D), floats(D, V)], 1, {}, "[a,b,c],[c,d]->[a,b,d]; c: sum; P,R->P; R,P->P"),
    (
        "MatMul",
        [floats(B, H, S, K), floats(B, H, K, S)],
        1,
        {},
        "[a,b,c,d],[a,b,d,e]->[a,b,c,e]; d: sum; P,R->P; R,P->P",
    ),
    # The bias is added once: with the contraction sharded it has to be a partial sum itself.
    (
        "Gemm",
        [floats(S, D), floats(D, V), floats(V)],
        1,
        {},
        "[a,b],[b,c],[c]->[a,c]; b: sum, #2 partial; P,R,P->P; R,P,P->P",
    ),
    (
        "Einsum",  # the gradient of a weight: batch and sequence are contracted
        [floats(B, S, D), floats(B, S, V)],
        1,
        {"equation": "bsd,bsv->dv"},
        "[a,b,c],[a,b,d]->[c,d]; a: sum; b: sum; P,R->P; R,P->P",
    ),
    (
        "Conv",
        [floats(4, C, 8, 8), floats(2 * C, C, 3, 3), floats(2 * C)],
        1,
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)},
        "[a,b,c,d],[e,b,.,.],[e]->[a,e,c,d]; b: sum, #2 partial; c: halo #0 dim 2 +1+1, sets pads[0]=0, pads[2]=0; "
        "d: halo #0 dim 3 +1+1, sets pads[1]=0, pads[3]=0; P,R,P->P; R,P,P->P",
    ),
    (
        "Conv",  # a depthwise convolution: the channels go with the groups
        [floats(4, C, 8, 8), floats(C, 1, 3, 3)],
        1,
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "group": C},
        "[a,b,c,d],[b,.,.,.]->[a,b,c,d]; b: scales group[0]; c: halo #0 dim 2 +1+1, sets pads[0]=0, pads[2]=0; "
        "d: halo #0 dim 3 +1+1, sets pads[1]=0, pads[3]=0; P,R->P; R,P->P",
    ),
    (
        "MaxPool",
        [floats(4, C, 8, 8)],
        1,
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)},
        "[a,b,c,d]->[a,b,c,d]; c: halo #0 dim 2 +1+0 lowest, sets pads[0]=0, pads[2]=0; "
        "d: halo #0 dim 3 +1+0 lowest, sets pads[1]=0, pads[3]=0",
    ),
    ("GlobalAveragePool", [floats(4, C, 7, 7)], 1, {}, "[a,b,c,d]->[a,b,.,.]; c: mean; d: mean; P->P"),
]

NORMS: list[Case] = [
    ("Softmax", [floats(B, S, D)], 1, {"axis": -1}, "[a,b,.]->[a,b,.]"),
    (
        "LayerNormalization",
        [floats(B, S, D), floats(D), floats(D)],
        1,
        {"axis": -1},
        "[a,b,.],[.],[.]->[a,b,.]; R,P,P->P",
    ),
    ("RMSNormalization", [floats(B, S, D), floats(D)], 1, {"axis": -1}, "[a,b,.],[.]->[a,b,.]; R,P->P"),
    (
        "BatchNormalization",  # inference: the statistics are inputs
        [floats(4, C, 8, 8), floats(C), floats(C), floats(C), positive(C)],
        1,
        {},
        "[a,b,c,d],[b],[b],[b],[b]->[a,b,c,d]; R,P,P,R,R->P",
    ),
    ("ReduceSum", [floats(B, S, D), ints(0, 1)], 1, {"keepdims": 0}, "[a,b,c],_->[c]; a: sum; b: sum; P,R->P"),
    ("ReduceMean", [floats(B, S, D), ints(-1)], 1, {}, "[a,b,c],_->[a,b,.]; c: mean; P,R->P"),
    ("ReduceMax", [floats(B, S, D), ints(-1)], 1, {}, "[a,b,c],_->[a,b,.]; c: max"),
    ("ReduceMin", [floats(B, S, D), ints(-1)], 1, {}, "[a,b,c],_->[a,b,.]; c: min"),
    ("ArgMax", [floats(B, S, D)], 1, {"axis": 2, "keepdims": 0}, "[a,b,.]->[a,b]"),
    ("CumSum", [floats(B, S, D), np.array(1)], 1, {}, "[a,.,b],_->[a,.,b]; P,R->P"),
    (
        "Trilu",
        [floats(B, S, S)],
        1,
        {},
        "[a,b,c]->[a,b,c]; b: runs autopar::TriluRowsPart from #0 dim 1; "
        "c: runs autopar::TriluColumnsPart from #0 dim 2; P->P",
    ),
]

ATTENTION: list[Case] = [
    # A device with some of the queries of causal attention has to know where they start. The values' head size is free.
    (
        "Attention",
        [floats(B, H, S, K)] * 3,
        1,
        {"is_causal": 1},
        "[a,b,c|d,.],[a,b,c,.],[a,b,c,e]->[a,b,c|d,e]; c: runs autopar::RingAttention from #0 dim 2; "
        "d: runs autopar::AttentionPart from #0 dim 2; R,R,P->P",
    ),
    (
        "Attention",
        [floats(B, H, S, K)] * 3,
        1,
        {},
        "[a,b,c|d,.],[a,b,c,.],[a,b,c,e]->[a,b,c|d,e]; c: runs autopar::RingAttention from #0 dim 2; R,R,P->P",
    ),
    (
        "Attention",  # grouped queries: 4 query heads to each key head
        [floats(2, 16, S, K), floats(2, 4, S, K), floats(2, 4, S, K)],
        1,
        {"is_causal": 1},
        "[a,b|c,d|e,.],[a,b,d,.],[a,b,d,f]->[a,b|c,d|e,f]; c: runs autopar::AttentionHeadsPart from #0 dim 1; "
        "d: runs autopar::RingAttention from #0 dim 2; e: runs autopar::AttentionPart from #0 dim 2; R,R,P->P",
    ),
    (
        "Attention",  # the mask is sharded with the queries
        [floats(B, H, S, K)] * 3 + [floats(B, 1, S, S)],
        1,
        {},
        "[a,b,c|d|e,.],[a,b,c|d,.],[a,b,c|d,f],[a,.,c|e,.]->[a,b,c|d|e,f]; "
        "c: runs autopar::RingMaskedAttention from #0 dim 2; d: runs autopar::RingMaskedAttention from #0 dim 2; "
        "R,R,P,R->P",
    ),
    (
        "autopar::CausalAttention",
        [floats(B, H, S, K)] * 3,
        1,
        {"scale": 0.3, "window": 12},
        "[a,b,c|d,.],[a,b,c,.],[a,b,c,e]->[a,b,c|d,e]; c: runs autopar::RingCausalAttention from #0 dim 2; "
        "d: runs autopar::CausalAttentionPart from #0 dim 2; R,R,P->P",
    ),
    (
        "autopar::CausalAttentionGrad",  # grouped queries: 4 query heads to each key head
        [floats(2, 16, S, K), floats(2, 4, S, K), floats(2, 4, S, K), floats(2, 16, S, K)],
        3,
        {"scale": 0.3, "chunk": 4, "softcap": 20.0},
        "[a,b|c,d|e,.],[a,b,d,.],[a,b,d,f],[a,b|c,d|e,f]->[a,b|c,d|e,.],[a,b,d,.],[a,b,d,f]; "
        "c: sum, runs autopar::CausalAttentionGradHeadsPart from #0 dim 1; "
        "d: runs autopar::RingCausalAttentionGrad from #0 dim 2; "
        "e: sum, runs autopar::CausalAttentionGradPart from #0 dim 2; f: sum; R,R,P,R->P,P,R; R,R,R,P->P,P,P",
    ),
    (
        "autopar::CachedLatentAttention",  # all heads read one cache
        [floats(B, H, 3, 12), floats(B, S, 12), floats(B, 3, 12)],
        1,
        {"scale": 0.3, "rank": 8},
        "[a,b,.,.],[a,.,.],[a,.,.]->[a,b,.,.]",
    ),
    (
        "autopar::SinkAttention",  # sinks are sharded with the query heads
        [floats(B, H, S, K)] * 3 + [floats(H)],
        1,
        {"scale": 0.3, "window": 12},
        "[a,b,c|d,.],[a,b,c,.],[a,b,c,e],[b]->[a,b,c|d,e]; c: runs autopar::RingSinkAttention from #0 dim 2; "
        "d: runs autopar::SinkAttentionPart from #0 dim 2; R,R,P,R->P",
    ),
    (
        "autopar::SinkAttentionGrad",
        [floats(B, H, S, K)] * 3 + [floats(H), floats(B, H, S, K)],
        4,
        {"scale": 0.3},
        "[a,b,c|d,.],[a,b,c,.],[a,b,c,e],[b],[a,b,c|d,e]->[a,b,c|d,.],[a,b,c,.],[a,b,c,e],[b]; a: sum; "
        "c: sum, runs autopar::RingSinkAttentionGrad from #0 dim 2; "
        "d: sum, runs autopar::SinkAttentionGradPart from #0 dim 2; e: sum; "
        "R,R,P,R,R->P,P,R,P; R,R,R,R,P->P,P,P,P",
    ),
    (
        "RotaryEmbedding",
        [floats(B, H, S, K), floats(B, S, K // 2), floats(B, S, K // 2)],
        1,
        {},
        "[a,b,c,.],[a,c,.],[a,c,.]->[a,b,c,.]; P,R,R->P; R,P,P->P",
    ),
]

SHAPES: list[Case] = [
    ("Transpose", [floats(B, S, H, K)], 1, {"perm": (0, 2, 1, 3)}, "[a,b,c,d]->[a,c,b,d]; P->P"),
    # Splitting the hidden dim: its shards are shards of the heads, and the target shape has to shrink. Sharding the
    # head size (d) instead, the hidden dim holds one chunk per head.
    (
        "Reshape",
        [floats(B, S, D), ints(B, S, H, K)],
        1,
        {},
        "[a,b,c|d/12],_->[a,b,c,d]; a: scales #1[0]; b: scales #1[1]; c: scales #1[2]; d: scales #1[3]; P,R->P",
    ),
    ("Reshape", [floats(B, S, H, K), ints(0, 0, -1)], 1, {}, "[a,b,c,d],_->[a,b,c|d/12]; P,R->P"),
    ("Reshape", [floats(B, S, D), ints(-1, D)], 1, {}, "[a,b,c],_->[a|b/8,c]; c: scales #1[1]; P,R->P"),
    # Six common factors, the patches of an image: proxies are used for several, and no dim is split in chunks.
    (
        "Reshape",
        [floats(B, 6, 6, C, 2, 2), ints(0, 36, 4 * C)],
        1,
        {},
        "[a,b,.,c,.,.],_->[a,b,c]; b: scales #1[1]; c: scales #1[2]; P,R->P",
    ),
    # Parts whose sizes have nothing in common: two streams that attend together.
    ("Split", [floats(B, 4, 37, K), ints(5, 32)], 2, {"axis": 2}, "[a,b,.,c],_->[a,b,.,c],[a,b,.,c]; P,R->P,P"),
    ("Flatten", [floats(B, C, 3, 3)], 1, {"axis": 1}, "[a,b,c,d]->[a,b|c/16|d/48]; P->P"),
    ("Unsqueeze", [floats(B, S, D), ints(2)], 1, {}, "[a,b,c],_->[a,b,.,c]; P,R->P"),
    ("Squeeze", [floats(B, 1, D), ints(1)], 1, {}, "[a,.,b],_->[a,b]; P,R->P"),
    (
        "Expand",  # the dims made from the shape alone (b, d) can be made in shards
        [floats(B, 1, S, 1), ints(B, H, S, V)],
        1,
        {},
        "[a,.,b,.],_->[a,c,b,d]; a: scales #1[0]; b: scales #1[2]; c: scales #1[1]; d: scales #1[3]; P,R->P",
    ),
    (
        "Slice",
        [floats(B, S, D), ints(0), ints(S // 2), ints(1)],
        1,
        {},
        "[a,b/2,c],_,_,_->[a,b,c]; b: scales #2[0]; P,R,R,R->P",
    ),
    # Each device has its share of both parts, side by side: the result is sharded block-cyclic.
    ("Concat", [floats(B, S, D)] * 2, 1, {"axis": 2}, "[a,b,c],[a,b,c]->[a,b,c/2]; P,P->P"),
    # A contiguous shard of a fused projection is not a shard of each of its parts, but one in chunks is.
    (
        "Split",
        [floats(B, S, 3 * D), ints(D, D, D)],
        3,
        {"axis": 2},
        "[a,b,c/3],_->[a,b,c],[a,b,c],[a,b,c]; c: scales #1[0], #1[1], #1[2]; P,R->P,P,P",
    ),
    (
        "Split",
        [floats(B, S, 6 * K), ints(4 * K, K, K)],
        3,
        {"axis": 2},
        "[a,b,c/6],_->[a,b,c/4],[a,b,c],[a,b,c]; c: scales #1[0], #1[1], #1[2]; P,R->P,P,P",
    ),
    ("Shape", [floats(B, S)], 1, {}, "[.,.]->[.]; P->R"),
]

INDEXING: list[Case] = [
    (
        "Gather",
        [floats(V, D), indices(V, B, S)],
        1,
        {},
        "[a,b],[c,d]->[c,d,b]; a: sum, runs autopar::GatherPart from #0 dim 0; P,R->P",
    ),
    (
        "Gather",
        [floats(B, S, D), np.array(3)],
        1,
        {"axis": 1},
        "[a,b,c],_->[a,c]; b: sum, runs autopar::GatherPart from #0 dim 1; P,R->P",
    ),
    (
        "GatherND",
        [floats(B, S, D), indices(S, B, 5, 1)],
        1,
        {"batch_dims": 1},
        "[a,b,c],[a,d,.]->[a,d,c]; b: sum, runs autopar::GatherNDPart from #0 dim 1; P,R->P",
    ),
    (
        "GatherElements",
        [floats(B, S), indices(S, B, 4)],
        1,
        {"axis": 1},
        "[a,b],[a,c]->[a,c]; b: sum, runs autopar::GatherElementsPart from #0 dim 1; P,R->P",
    ),
    (
        "ScatterElements",
        [floats(B, S), indices(S, B, 4), floats(B, 4)],
        1,
        {"axis": 1, "reduction": "add"},
        "[a,b],[a,c],[a,c]->[a,b]; b: runs autopar::ScatterElementsPart from #0 dim 1; c: sum, #0 partial; P,R,P->P",
    ),
    ("TopK", [floats(B, S, V), ints(2)], 2, {"axis": -1}, "[a,b,.],_->[a,b,.],[a,b,.]"),
    (
        "OneHot",
        [indices(V, B, S), np.array(V), floats(2)],
        1,
        {"axis": -1},
        "[a,b],_,[.]->[a,b,.]; R,R,P->P",
    ),
]

FUNCTIONS: list[Case] = [
    # The rows of the table come in as their numbers, so the vocabulary (b) can be sharded.
    (
        "autopar::GatherGrad",
        [indices(V, B, S), np.arange(V), floats(B, S, D)],
        1,
        {"axis": 0},
        "[a,b],[c],[a,b,d]->[c,d]; a: sum; b: sum; R,R,P->P",
    ),
    # Heads (b) are sharded with the groups whose B and C they read; all heads of one group read them whole.
    (
        "autopar::StateSpaceScan",
        [floats(B, S, 8, K), floats(B, S, 8), floats(8), *[floats(B, S, 4, V)] * 2, floats(8), floats(8)],
        1,
        {"least": 0.001},
        "[a,.,b,c],[a,.,b],[b],[a,.,b,d],[a,.,b,d],[b],[b]->[a,.,b,c]; d: sum, #5 partial; P,R,R,R,R,R,R->P",
    ),
    # States of steps of decoding are sharded with what writes them.
    (
        "autopar::CachedStateSpaceScan",
        [
            floats(6, 8, 10, V),
            floats(6, 3, 8, 10),
            floats(6, 3, 8),
            floats(8),
            *[floats(6, 3, 4, V)] * 2,
            floats(8),
            floats(8),
        ],
        1,
        {"least": 0.001},
        "[a,b,c,d],[a,.,b,c],[a,.,b],[b],[a,.,b,d],[a,.,b,d],[b],[b]->[a,.,b,c]; d: sum, #6 partial",
    ),
    (
        "autopar::CachedSelectiveScan",
        [floats(6, 8, V), *[floats(6, 3, 8)] * 2, floats(8, V), *[floats(6, 3, V)] * 2, floats(8), floats(8)],
        1,
        {},
        "[a,b,c],[a,.,b],[a,.,b],[b,c],[a,.,c],[a,.,c],[b],[b]->[a,.,b]; c: sum, #6 partial",
    ),
    (
        "autopar::CachedGatedDeltaRule",
        [
            floats(6, 8, 10, V),
            *[floats(6, 3, 4, 10)] * 2,
            floats(6, 3, 8, V),
            *[floats(6, 3, 8)] * 2,
            floats(8),
            floats(8),
        ],
        1,
        {"scale": 0.3},
        "[a,b,.,c],[a,.,b,.],[a,.,b,.],[a,.,b,c],[a,.,b],[a,.,b],[b],[b]->[a,.,b,c]",
    ),
    (
        "autopar::CachedConvolution",
        [floats(6, 3, 10), floats(6, S, 10), floats(10, 1, 4)],
        1,
        {},
        "[a,.,b],[a,.,b],[b,.,.]->[a,.,b]; R,R,P->P; P,P,R->P",
    ),
    (
        "autopar::StateSpaceScanGrad",
        [
            floats(2, S, H, K),
            floats(2, S, H),
            floats(H),
            *[floats(2, S, 1, V)] * 2,
            floats(H),
            floats(H),
            floats(2, S, H, K),
        ],
        7,
        {},
        "[a,.,b,c],[a,.,b],[b],[a,.,.,.],[a,.,.,.],[b],[b],[a,.,b,c]->"
        "[a,.,b,c],[a,.,b],[b],[a,.,.,.],[a,.,.,.],[b],[b]; "
        "a: sum; b: sum; c: sum; P,R,R,R,R,R,R,R->R,P,P,P,P,P,P; R,R,R,R,R,R,R,P->P,P,P,P,P,P,P",
    ),
    # Channels (b) share B and C; numbers of state (c) are summed over.
    (
        "autopar::SelectiveScan",
        [*[floats(B, S, C)] * 2, floats(C, K), *[floats(B, S, K)] * 2, *[floats(C)] * 2],
        1,
        {},
        "[a,.,b],[a,.,b],[b,c],[a,.,c],[a,.,c],[b],[b]->[a,.,b]; c: sum, #5 partial; P,R,R,R,R,R,R->P",
    ),
    (
        "autopar::SelectiveScanGrad",
        [*[floats(2, S, H)] * 2, floats(H, K), *[floats(2, S, K)] * 2, *[floats(H)] * 2, floats(2, S, H)],
        7,
        {},
        "[a,.,b],[a,.,b],[b,.],[a,.,.],[a,.,.],[b],[b],[a,.,b]->[a,.,b],[a,.,b],[b,.],[a,.,.],[a,.,.],[b],[b]; "
        "a: sum; b: sum; P,R,R,R,R,R,R,R->R,P,P,P,P,P,P; R,R,R,R,R,R,R,P->P,P,P,P,P,P,P",
    ),
    (
        "autopar::GatedDeltaRule",
        [*[floats(2, S, 4, K)] * 2, floats(2, S, 8, V), *[floats(2, S, 8)] * 2, floats(8), floats(8)],
        1,
        {"scale": 0.25},
        "[a,.,b,.],[a,.,b,.],[a,.,b,c],[a,.,b],[a,.,b],[b],[b]->[a,.,b,c]; R,R,P,R,R,R,R->P",
    ),
    (
        "autopar::GatedDeltaRuleGrad",
        [
            *[floats(2, S, 4, K)] * 2,
            floats(2, S, 8, V),
            *[floats(2, S, 8)] * 2,
            floats(8),
            floats(8),
            floats(2, S, 8, V),
        ],
        7,
        {"scale": 0.25},
        "[a,.,b,.],[a,.,b,.],[a,.,b,c],[a,.,b],[a,.,b],[b],[b],[a,.,b,c]->"
        "[a,.,b,.],[a,.,b,.],[a,.,b,c],[a,.,b],[a,.,b],[b],[b]; "
        "a: sum; c: sum; R,R,P,R,R,R,R,R->P,P,R,P,P,P,P; R,R,R,R,R,R,R,P->P,P,P,P,P,P,P",
    ),
    (
        "Conv",  # causal and depthwise: each channel by itself, and a few tokens of the neighbour
        [floats(B, 48, S), floats(48, 1, 4), floats(48)],
        1,
        {"group": 48, "kernel_shape": (4,), "pads": (3, 0)},
        "[a,b,c],[b,.,.],[b]->[a,b,c]; b: scales group[0]; c: halo #0 dim 2 +3+0, sets pads[0]=0; P,R,P->P; R,P,P->P",
    ),
    (
        "autopar::LayerNormalizationGrad",
        [floats(B, S, D), floats(D), floats(B, S, D)],
        3,
        {"axis": 2, "epsilon": 1e-5},
        "[a,b,.],[.],[a,b,.]->[a,b,.],[.],[.]; a: sum; b: sum; R,P,R->P,R,R; R,R,P->P,P,P",
    ),
    (
        "autopar::CrossEntropyStats",
        [floats(B, S, V), floats(B, S, 1), indices(V, B, S), np.arange(V)],
        2,
        {},
        "[a,b,c],[a,b,.],[a,b],[c]->[a,b,.],[a,b,.]; c: sum",
    ),
    (
        "autopar::BatchNormStats",
        [floats(4, C, 8, 8)],
        2,
        {},
        "[a,b,c,d]->[b],[b]; a: sum; c: sum; d: sum",
    ),
    (
        "autopar::BatchNormMeans",
        [floats(4, C, 8, 8)],
        2,
        {},
        "[a,b,c,d]->[b],[b]; a: mean; c: mean; d: mean",
    ),
    (
        "autopar::Adam",  # not linear in anything, not even in a gradient that is still partial
        [floats(D, V), floats(D, V), positive(D, V), floats(D, V), positive()],
        3,
        {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1},
        "[a,b],[a,b],[a,b],[a,b],[]->[a,b],[a,b],[a,b]",
    ),
    (
        "SoftmaxCrossEntropyLoss",
        [floats(B * S, V), indices(V, B * S)],
        1,
        {"reduction": "mean"},
        "[a,.],[a]->[]; a: mean",
    ),
    # Places (b, c) are read each by itself, pixels (d, e) come in as their numbers.
    (
        "autopar::GridSampleGrad",
        [floats(4, 6, 10, 2), np.arange(8), np.arange(12), floats(4, 16, 6, 10)],
        1,
        {},
        "[a,b,c,.],[d],[e],[a,f,b,c]->[a,f,d,e]; b: sum; c: sum; R,R,R,P->P",
    ),
    (
        "autopar::GridSamplePlacesGrad",
        [floats(4, 6, 10, 2), floats(4, 16, 8, 12), np.arange(8), np.arange(12), floats(4, 16, 6, 10)],
        1,
        {},
        "[a,b,c,.],[a,d,e,f],[e],[f],[a,d,b,c]->[a,b,c,.]; d: sum; e: sum; f: sum; R,P,R,R,R->P; R,R,R,R,P->P",
    ),
]

CASES = [*ELEMENTWISE, *PRODUCTS, *NORMS, *ATTENTION, *SHAPES, *INDEXING, *FUNCTIONS]
every_case = pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])


@every_case
def test_rule_is_the_one_worked_out_by_hand(case: Case) -> None:
    """All strategies of the op, and no other, are found by execution alone."""
    kind, inputs, num_outputs, attrs, expected = case
    graph, op = single_op(kind, inputs, num_outputs, **attrs)

    rule = discover(graph).of(op)

    assert format_rule(with_sums(rule)) == expected


CHUNKS: list[tuple[str, Sequence[Input], int, dict[str, Any], str]] = [
    # Queries, keys and values side by side: a device has its heads of each.
    (
        "Split",
        [floats(B, S, 3 * D), ints(D, D, D)],
        3,
        {"axis": 2},
        "S(2/3),R -> S(2),S(2),S(2) scaling #1[0], #1[1], #1[2]",
    ),
    ("Split", [floats(B, S, 2 * D)], 2, {"axis": 2}, "S(2/2) -> S(2),S(2)"),
    # Four query heads to each key head: 6 chunks of one size, 4 of them queries.
    (
        "Split",
        [floats(B, S, 6 * K), ints(4 * K, K, K)],
        3,
        {"axis": 2},
        "S(2/6),R -> S(2/4),S(2),S(2) scaling #1[0], #1[1], #1[2]",
    ),
    ("Concat", [floats(B, S, n * K) for n in (4, 1, 1)], 1, {"axis": 2}, "S(2/4),S(2),S(2) -> S(2/6)"),
    ("Concat", [floats(B, S, D)] * 2, 1, {"axis": 2}, "S(2),S(2) -> S(2/2)"),
    ("Reshape", [floats(B, S, 3 * D), ints(B, S, 3, H, K)], 1, {}, "S(2/3),R -> S(3) scaling #1[3]"),
    ("Reshape", [floats(B, S, 3, H, K), ints(B, S, 3 * D)], 1, {}, "S(3),R -> S(2/3) scaling #1[2]"),
    # The sequence sharded while batch and sequence are one dim: each sample is a chunk.
    ("Reshape", [floats(B, S, D), ints(-1, D)], 1, {}, "S(1),R -> S(0/8)"),
    ("Reshape", [floats(B * S, D), ints(B, S, D)], 1, {}, "S(0/8),R -> S(1) scaling #1[1]"),
    # The second third, and its gradient.
    ("Slice", [floats(B, 3 * D), ints(D), ints(2 * D), ints(1)], 1, {}, "S(1/3),R,R,R -> S(1) scaling #1[0], #2[0]"),
    ("Pad", [floats(B, D), ints(0, D, 0, D)], 1, {}, "S(1),R -> S(1/3) scaling #1[1], #1[3]"),
    # The size of the parts is that of another dim, too, as when hidden and sequence are both 1024.
    ("Split", [floats(B, D, 3 * D)], 3, {"axis": 2}, "S(2/3) -> S(2),S(2),S(2)"),
    ("Tile", [floats(B, D), ints(1, 3)], 1, {}, "S(1),R -> S(1/3)"),
]


@pytest.mark.parametrize("case", CHUNKS, ids=[f"{case[0]}-{i}" for i, case in enumerate(CHUNKS)])
def test_dims_that_hold_several_things_are_sharded_in_chunks(case: Case) -> None:
    """The number of chunks is the real one, whatever the proxies are; multiples of it are not listed again."""
    kind, inputs, num_outputs, attrs, expected = case
    graph, op = single_op(kind, inputs, num_outputs, **attrs)

    found = [str(strategy) for strategy in discover(graph).of(op).strategies if has_chunks(strategy)]

    assert expected in found
    assert len(found) <= 2


def has_chunks(strategy: Strategy) -> bool:
    return any(isinstance(p, Shard) and p.chunks > 1 for p in (*strategy.inputs, *strategy.outputs))


TERMS: list[tuple[str, Sequence[Input], dict[str, Any], str]] = [
    # Monotone ops keep maxima and minima, falling ones turn them round; affine ops keep means.
    ("Relu", [floats(B, S)], {}, "P(max)->P(max) P(min)->P(min)"),
    ("Mul", [floats(B, S), np.array(-2.0)], {}, "P,R->P P(mean),R->P(mean) P(max),R->P(min) P(min),R->P(max)"),
    (
        "Mul",
        [floats(B, S), floats(B, S)],
        {},
        "P,R->P R,P->P R,P(mean)->P(mean) P(mean),R->P(mean) P(prod),P(prod)->P(prod)",
    ),
    (
        "Add",
        [floats(B, S), floats(S)],
        {},
        "P,P->P P(mean),P(mean)->P(mean) R,P(max)->P(max) P(max),R->P(max) R,P(min)->P(min) P(min),R->P(min) "
        "P(logsumexp),R->P(logsumexp) R,P(logsumexp)->P(logsumexp)",
    ),
    ("Max", [floats(B, S), floats(B, S)], {}, "P(max),P(max)->P(max) R,P(min)->P(min) P(min),R->P(min)"),
    (
        "Transpose",
        [floats(B, S)],
        {"perm": (1, 0)},
        "P->P P(mean)->P(mean) P(max)->P(max) P(min)->P(min) P(prod)->P(prod) P(logsumexp)->P(logsumexp)",
    ),
    # An exponential makes products of sums, and sums of what log-sum-exp puts together.
    ("Exp", [floats(B, S)], {}, "P(max)->P(max) P(min)->P(min) P(logsumexp)->P"),
    ("Reciprocal", [floats(B, S)], {}, "P(prod)->P(prod)"),
    ("Gelu", [floats(B, S)], {}, ""),
    # Whether a factor is positive, nobody knows; nor which side is picked.
    (
        "Mul",
        [floats(B, S), floats()],
        {},
        "P,R->P R,P->P R,P(mean)->P(mean) P(mean),R->P(mean) P(prod),P(prod)->P(prod)",
    ),
    (
        "Mul",
        [floats(B, S), floats(2, 1, 1)],
        {},
        "P,R->P R,P->P R,P(mean)->P(mean) P(mean),R->P(mean) P(prod),P(prod)->P(prod)",
    ),
    (
        "Where",
        [flags(), floats(B, S), floats(B, S)],
        {},
        "R,P,P->P R,P(mean),P(mean)->P(mean) R,P(max),P(max)->P(max) R,P(min),P(min)->P(min) "
        "R,P(prod),P(prod)->P(prod) R,P(logsumexp),P(logsumexp)->P(logsumexp)",
    ),
    # Counts are integers; numbers that index are no terms.
    ("Cast", [indices(9, B, S)], {"to": 11}, "P->P P(max)->P(max) P(min)->P(min)"),
    ("ReduceSum", [indices(9, B, S), ints(1)], {}, "P,R->P"),
    ("MatMulInteger", [Tensor((B, S), "int8", 5), Tensor((S, V), "int8", 5)], {}, "P,R->P R,P->P"),
    ("Mod", [indices(9, B, S), np.array(3)], {}, ""),
    ("OneHot", [indices(V, B, S), np.array(V), ints(0, 1)], {"axis": -1}, ""),
    # Thresholds that normal data never reach are reached.
    (
        "Clip",
        [floats(B, S), np.array(-1000.0), np.array(1000.0)],
        {},
        "P(max),R,R->P(max) P(min),R,R->P(min)",
    ),
    ("Shrink", [floats(B, S)], {"lambd": 0.001, "bias": 0.0}, "P(max)->P(max) P(min)->P(min)"),
    ("ThresholdedRelu", [floats(B, S)], {"alpha": -50.0}, ""),
    # What is the same for all data tried need not be for terms.
    ("IsNaN", [floats(B, S)], {}, ""),
    ("IsInf", [floats(B, S)], {}, ""),
    ("Less", [floats(B, S), np.array(1000.0)], {}, ""),
    ("NonZero", [positive(B, S)], {}, ""),
    ("Shape", [floats(B, S)], {}, "P->R"),
]


@pytest.mark.parametrize("case", TERMS, ids=[f"{case[0]}-{i}" for i, case in enumerate(TERMS)])
def test_terms_of_every_reduction_stay_terms_where_they_may(case: tuple[str, Sequence[Input], Any, str]) -> None:
    """A replicated input is a term of a mean, a maximum or a minimum itself, so only the largest sets are listed."""
    kind, inputs, attrs, expected = case
    graph, op = single_op(kind, inputs, **attrs)

    rule = discover(graph).of(op)

    found = [s for s in rule.strategies if any(isinstance(p, Partial) for p in s.inputs)]
    assert sorted(str(strategy).replace(" -> ", "->") for strategy in found) == sorted(expected.split())


REDUCTIONS: list[tuple[str, Sequence[Input], dict[str, Any], str | None]] = [
    ("ReduceSum", [floats(B, S, D), ints(1)], {}, "S(1),R -> P"),
    ("ReduceMean", [floats(B, S, D), ints(1)], {}, "S(1),R -> P(mean)"),
    ("ReduceMax", [floats(B, S, D), ints(1)], {}, "S(1),R -> P(max)"),
    ("ReduceMin", [floats(B, S, D), ints(1)], {}, "S(1),R -> P(min)"),
    ("ReduceProd", [floats(B, S, D), ints(1)], {}, "S(1),R -> P(prod)"),
    ("ReduceLogSumExp", [floats(B, S, D), ints(1)], {}, "S(1),R -> P(logsumexp)"),
    ("ReduceL1", [floats(B, S, D), ints(1)], {}, "S(1),R -> P"),
    ("ReduceSumSquare", [floats(B, S, D), ints(1)], {}, "S(1),R -> P"),
    ("GlobalMaxPool", [floats(B, C, 8, 8)], {}, "S(2) -> P(max)"),
    ("ReduceSum", [indices(9, B, S, D), ints(1)], {}, "S(1),R -> P"),
    ("ReduceMax", [indices(9, B, S, D), ints(1)], {}, "S(1),R -> P(max)"),
    ("ReduceProd", [indices(9, B, S, D), ints(1)], {}, "S(1),R -> P(prod)"),
    # The logarithm of a sum whose parts may be negative, the root of a sum of squares, a rounded mean, the position of
    # a maximum: the parts do not tell.
    ("ReduceLogSum", [positive(B, S, D), ints(1)], {}, None),
    ("ReduceL2", [floats(B, S, D), ints(1)], {}, None),
    ("ReduceMean", [indices(9, B, S, D), ints(1)], {}, None),
    ("ArgMax", [floats(B, S, D)], {"axis": 1}, None),
    ("LogSoftmax", [floats(B, S, D)], {"axis": 1}, None),
]


@pytest.mark.parametrize("case", REDUCTIONS, ids=[f"{case[0]}-{i}" for i, case in enumerate(REDUCTIONS)])
def test_reduced_dim_is_sharded_if_the_results_can_be_put_together(
    case: tuple[str, Sequence[Input], Any, str | None],
) -> None:
    """Sums, means, maxima, minima, products and log-sum-exps; nothing where the whole is not a function of them."""
    kind, inputs, attrs, expected = case
    graph, op = single_op(kind, inputs, **attrs)

    rule = discover(graph).of(op)

    reduced = [str(s) for s in rule.strategies if s.inputs[0] == Shard(2 if kind == "GlobalMaxPool" else 1)]
    assert reduced == ([] if expected is None else [expected])


@pytest.mark.parametrize("ignored", [-100, -1, V - 1])
def test_mean_over_labels_is_no_mean_of_means_if_some_are_ignored(ignored: int) -> None:
    """A device may have fewer labels that count than another: the ignored label is among the data."""
    graph, op = single_op(
        "SoftmaxCrossEntropyLoss", [floats(B * S, V), indices(V, B * S)], reduction="mean", ignore_index=ignored
    )

    rule = discover(graph).of(op)

    assert all(strategy.is_replicate for strategy in rule.strategies)


COUNTS: list[tuple[str, Sequence[Input], dict[str, Any], str]] = [
    (
        "Conv",
        [floats(4, 64, 8, 8), floats(128, 8, 3, 3)],
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "group": 8},
        "S(1),S(0) -> S(1) scaling group[0]",
    ),
    (
        "Conv",
        [floats(4, 128, 8, 8), floats(128, 4, 3, 3)],
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "group": 32},
        "S(1),S(0) -> S(1) scaling group[0]",
    ),
    (
        "Conv",
        [floats(4, 8, 8, 8), floats(16, 1, 3, 3)],
        {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1), "group": 8},
        "S(1),S(0) -> S(1) scaling group[0]",
    ),
    (
        "GroupNormalization",
        [floats(4, 80, 6, 6), floats(80), floats(80)],
        {"num_groups": 8},
        "S(1),S(0),S(0) -> S(1) scaling num_groups[0]",
    ),
    (
        "Attention",  # 4 query heads to each key head, in dims of heads times head size
        [floats(B, 20, 64), floats(B, 24, 16), floats(B, 24, 16)],
        {"q_num_heads": 8, "kv_num_heads": 2},
        "S(2),S(2),S(2) -> S(2) scaling kv_num_heads[0], q_num_heads[0]",
    ),
]


@pytest.mark.parametrize("case", COUNTS, ids=[f"{case[0]}-{i}" for i, case in enumerate(COUNTS)])
def test_groups_and_heads_are_divided_with_the_dim_they_count(case: tuple[str, Sequence[Input], Any, str]) -> None:
    """Numbers in attributes that count parts, small ones as well; their proxies keep the sizes multiples of them."""
    kind, inputs, attrs, expected = case
    graph, op = single_op(kind, inputs, **attrs)

    rule = discover(graph).of(op)

    assert expected in map(str, rule.strategies)
    for size in (2, 4):
        check_rule(graph, op, rule, draw_all(inputs, seed=size), size)


FLAGS: list[tuple[str, Sequence[Input], dict[str, Any], str, bool, bool]] = [
    ("Relu", [floats(B, S)], {}, "S(1) -> S(1)", True, True),
    ("MatMul", [floats(B, S, D), floats(D, V)], {}, "S(2),S(0) -> P", True, True),
    ("ReduceMax", [floats(B, S), ints(1)], {}, "S(1),R -> P(max)", True, True),
    # The mean of unequal means is another one.
    ("ReduceMean", [floats(B, S), ints(1)], {}, "S(1),R -> P(mean)", True, False),
    # Dims of other sizes are cut at other places, and divided numbers have one value on all devices.
    ("Flatten", [floats(B, S, D)], {"axis": 2}, "S(0) -> S(0)", True, False),
    ("Reshape", [floats(B, S, D), ints(B, S, H, K)], {}, "S(2),R -> S(2) scaling #1[2]", True, False),
    ("Split", [floats(B, S, 2 * D)], {"axis": 2}, "S(2/2) -> S(2),S(2)", True, False),
    # A chunk of half a group cannot be normalised.
    (
        "GroupNormalization",
        [floats(4, 80, 6, 6), floats(80), floats(80)],
        {"num_groups": 8},
        "S(1),S(0),S(0) -> S(1) scaling num_groups[0]",
        False,
        False,
    ),
]


@pytest.mark.parametrize("case", FLAGS, ids=[f"{case[0]}-{i}" for i, case in enumerate(FLAGS)])
def test_strategies_say_whether_they_hold_on_other_shards(
    case: tuple[str, Sequence[Input], Any, str, bool, bool],
) -> None:
    """Block-cyclic ones and blocks of unequal sizes."""
    kind, inputs, attrs, wanted, cyclic, uneven = case
    graph, op = single_op(kind, inputs, 2 if kind == "Split" else 1, **attrs)

    (strategy,) = (s for s in discover(graph).of(op).strategies if str(s) == wanted)

    assert (strategy.cyclic, strategy.uneven) == (cyclic, uneven)


@every_case
def test_devices_that_follow_a_strategy_compute_what_one_device_computes(case: Case) -> None:
    """Sharded op == whole op on the real shapes, which are not those of the discovery, on axes of 2, 3 and 4."""
    kind, inputs, num_outputs, attrs, _ = case
    graph, op = single_op(kind, inputs, num_outputs, **attrs)
    rule = discover(graph).of(op)

    for size in (2, 3, 4):
        check_rule(graph, op, rule, draw_all(inputs, seed=size), size)
