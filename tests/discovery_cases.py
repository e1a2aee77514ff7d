"""Ops with the strategies they have, worked out from what the op computes, beside those of `test_discover_ops`.

A rule is written like an einsum. Each letter is a strategy: all dims it stands on are sharded together. `c/3` is a dim
sharded block-cyclic in three chunks. Behind it, what is special about a strategy, and those on partial sums:

    [b,c],[c,a],[a]->[b,a]; c: sum, #2 partial; P,R,P->P (sum mean); R,P,P->P (sum mean)

An op passes the reductions in parentheses on: from partial sums come partial sums, from terms of a mean terms of the
mean; without parentheses it is sums alone. A replicated tensor is a term of a mean, a maximum or a minimum as it is, so
of those only the largest sets of inputs are strategies of their own: sets of one, two (where there are not many), or
all. The order of letters and notes means nothing. The strategy that replicates everything is never written.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.discover import Rule
from autopar.ir.graph import Graph, Op
from autopar.sharding import REDUCTIONS, Partial
from tests.single_ops import Input, Tensor, flags, floats, indices, ints, positive, single_op

B, S, D, H, K, V, C, G, E = 8, 16, 96, 12, 8, 40, 16, 6, 10
"""Batch, sequence, hidden (H * K), heads, head size, vocabulary, channels, groups of tokens, experts."""

BFLOAT16 = 16
"""The number of the type in ONNX."""
LINEAR = "sum mean"
ORDER = "max min"
ANY = " ".join(REDUCTIONS)
"""Reductions passed on by ops that are linear, that keep the order of numbers, and that only move numbers."""


@dataclass(frozen=True)
class Case:
    """An op with its rule.

    Attributes:
        kind: Op kind.
        inputs: Inputs; arrays are constants.
        rule: All strategies, as the module describes.
        attrs: Attributes.
        num_outputs: Number of outputs.
        reason: How the reason begins if the op offers less than it could; "" if nothing is left out.
    """

    kind: str
    inputs: Sequence[Input]
    rule: str
    attrs: dict[str, Any] = field(default_factory=dict)
    num_outputs: int = 1
    reason: str = ""

    def build(self) -> tuple[Graph, Op]:
        """Return a graph of the op, and the op."""
        return single_op(self.kind, self.inputs, self.num_outputs, **self.attrs)


def strategies(rule: str) -> set[str]:
    """Return the strategies of a rule as they print.

    >>> sorted(strategies("[b,c],[c,a],[a]->[b,a]; c: sum, #2 partial"))
    ['R,S(1),S(0) -> S(1)', 'S(0),R,R -> S(0)', 'S(1),S(0),P -> P']
    >>> sorted(strategies("[a]->[a]; a: as autopar::Part from #0 dim 0; P->P (sum max)"))
    ['P -> P', 'P(max) -> P(max)', 'S(0) -> S(0) as autopar::Part from #0 dim 0']
    """
    dims, *notes = rule.split("; ")
    sides = [re.findall(r"\[[^]]*\]|_", side) for side in dims.split("->")]
    placed: dict[str, list[list[str]]] = {}
    for side, tensors in enumerate(sides):
        for index, tensor in enumerate(tensors):
            for dim, letters in enumerate(tensor.strip("[]_").split(",")):
                for letter, chunks in re.findall(r"([a-z])(/\d+)?", letters):
                    empty = [["R"] * len(tensors) for tensors in sides]
                    placed.setdefault(letter, empty)[side][index] = f"S({dim}{chunks})"
    suffixes = dict.fromkeys(placed, "")
    found = set()
    for note in notes:
        letter, colon, remarks = note.partition(": ")
        if not colon:
            terms, _, kinds = note.replace("->", " -> ").partition(" (")
            for reduce in (kinds.rstrip(")") or "sum").split():
                found.add(terms.replace("P", str(Partial(reduce))) if kinds else terms)
            continue
        inputs, outputs = placed[letter]
        for remark in remarks.split(", "):
            if match := re.fullmatch(r"#(\d+) partial", remark):
                inputs[int(match[1])] = "P"
            elif " " in remark or "=" in remark or "[" in remark:
                more = "," if remark.split(" ")[0] not in _VERBS else ""
                suffixes[letter] += f"{more} {remark}"
            else:
                reduced = "P" if remark == "sum" else f"P({remark})"
                outputs[:] = [reduced if placement == "R" else placement for placement in outputs]
    for letter, (inputs, outputs) in placed.items():
        found.add(f"{','.join(inputs)} -> {','.join(outputs)}{suffixes[letter]}")
    return found


_VERBS = ("scaling", "with", "as")
"""How a strategy's remarks begin that are more than placements; a remark without goes on with the one before."""


def found(rule: Rule) -> set[str]:
    """Return the strategies of a rule, without the one that replicates."""
    return {str(strategy) for strategy in rule.strategies if not strategy.is_replicate}


def low(dtype: str, *shape: int) -> Tensor:
    """Return an input of a graph in lower precision."""
    return Tensor(shape, dtype)


def _pointwise() -> Iterator[Case]:
    """One letter per dim; linear ops pass sums on, monotone ones maxima."""
    for kind in ("Gelu", "HardSwish"):  # they fall, then rise
        yield Case(kind, [floats(B, S, D)], "[a,b,c]->[a,b,c]")
    for kind in ("Erf", "Sigmoid", "Softplus", "Tanh", "Ceil"):
        yield Case(kind, [floats(B, S, D)], f"[a,b,c]->[a,b,c]; P->P ({ORDER})")
    yield Case("Gelu", [floats(B, S, D)], "[a,b,c]->[a,b,c]", {"approximate": "tanh"})
    # The exponential of a sum is a product, and the sum of exponentials has a name.
    yield Case("Exp", [floats(B, S)], f"[a,b]->[a,b]; P(logsumexp)->P; P->P ({ORDER})")
    yield Case("Neg", [floats(B, S)], f"[a,b]->[a,b]; P->P ({LINEAR}); P(max)->P(min); P(min)->P(max)")
    yield Case("Identity", [floats(B, S)], f"[a,b]->[a,b]; P->P ({ANY})")
    yield Case("Cast", [floats(B, S)], f"[a,b]->[a,b]; P->P ({ORDER})", {"to": 7})  # truncated
    yield Case("Cast", [floats(B, S)], f"[a,b]->[a,b]; P->P ({ANY})", {"to": BFLOAT16})  # rounded
    yield Case("Cast", [floats(B, S)], f"[a,b]->[a,b]; P->P ({ORDER})", {"to": 17})  # to 8 bits
    yield Case(
        "Sub",
        [floats(B, S)] * 2,
        f"[a,b],[a,b]->[a,b]; P,P->P ({LINEAR}); P,R->P ({ORDER} logsumexp); R,P(max)->P(min); R,P(min)->P(max)",
    )
    yield Case("Mul", [floats(B, S)] * 2, f"[a,b],[a,b]->[a,b]; P,R->P ({LINEAR}); R,P->P ({LINEAR}); P,P->P (prod)")
    yield Case(
        "Div", [floats(B, S, D), positive(B, S, 1)], f"[a,b,c],[a,b,.]->[a,b,c]; P,R->P ({LINEAR}); P,P->P (prod)"
    )
    # The larger one of a minimum and another number is the smallest of the larger ones.
    yield Case("Max", [floats(B, S), floats(S)], "[a,b],[b]->[a,b]; P,P->P (max); P,R->P (min); R,P->P (min)")
    yield Case(
        "Mean",
        [floats(B, S)] * 3,
        f"[a,b],[a,b],[a,b]->[a,b]; P,P,P->P ({LINEAR}); P,R,R->P ({ORDER}); R,P,R->P ({ORDER}); R,R,P->P ({ORDER})",
    )
    # Where x is negative, a larger slope gives a smaller result; where it is not, the slope is not seen.
    yield Case(
        "PRelu", [floats(B, S), floats(S)], "[a,b],[b]->[a,b]; R,P->P (mean); R,P(max)->P(min); R,P(min)->P(max)"
    )
    yield Case("Clip", [floats(B, S), np.array(-0.5), np.array(0.5)], f"[a,b],[],[]->[a,b]; P,R,R->P ({ORDER})")
    yield Case("Equal", [indices(4, B, S), indices(4, B, S)], "[a,b],[a,b]->[a,b]")
    yield Case("Equal", [floats(B, S), floats(B, S)], "[a,b],[a,b]->[a,b]")
    yield Case("IsNaN", [floats(B, S)], "[a,b]->[a,b]")
    yield Case("And", [flags(B, S), flags(S)], "[a,b],[b]->[a,b]")
    yield Case("Where", [flags(B, S), floats(B, S), floats(B, S)], f"[a,b],[a,b],[a,b]->[a,b]; R,P,P->P ({ANY})")
    # Odd sizes: nothing of them is left in the proxies.
    yield Case(
        "Add",
        [floats(7, 13), floats(13)],
        f"[a,b],[b]->[a,b]; P,P->P ({LINEAR}); P,R->P ({ORDER} logsumexp); R,P->P ({ORDER} logsumexp)",
    )
    yield Case("Dropout", [floats(B, S)], f"[a,b]->[a,b]; P->P ({ANY})")  # inference: the identity


def _products() -> Iterator[Case]:
    """Contractions, in any precision."""
    both = f"; P,R->P ({LINEAR}); R,P->P ({LINEAR})"
    for dtype in ("float16", "bfloat16"):
        yield Case("MatMul", [low(dtype, B, S, D), low(dtype, D, V)], "[a,b,d],[d,c]->[a,b,c]; d: sum" + both)
    yield Case("MatMul", [floats(B, S, D), floats(D)], "[a,b,c],[c]->[a,b]; c: sum" + both)
    yield Case("MatMul", [floats(7, 15), floats(15, 9)], "[a,b],[b,c]->[a,c]; b: sum" + both)
    yield Case("Gemm", [floats(D, S), floats(V, D)], "[b,a],[c,b]->[a,c]; b: sum" + both, {"transA": 1, "transB": 1})
    for equation, left, right, rule in (
        ("bhsk,bhtk->bhst", (B, H, S, K), (B, H, V, K), "[a,b,c,e],[a,b,d,e]->[a,b,c,d]; e: sum"),
        ("bhst,bhtk->bhsk", (B, H, S, V), (B, H, V, K), "[a,b,c,e],[a,b,e,d]->[a,b,c,d]; e: sum"),
        ("gsec,gsm->egcm", (G, S, E, C), (G, S, D), "[a,b,c,d],[a,b,e]->[c,a,d,e]; b: sum"),  # dispatch
        ("gsec,egcm->gsm", (G, S, E, C), (E, G, C, D), "[a,b,c,d],[c,a,d,e]->[a,b,e]; c: sum; d: sum"),  # combine
        ("egcm,emh->egch", (E, G, C, D), (E, D, V), "[a,b,c,d],[a,d,e]->[a,b,c,e]; d: sum"),  # experts
    ):
        yield Case("Einsum", [floats(*left), floats(*right)], rule + both, {"equation": equation})
    yield Case(
        "Einsum",
        [floats(B, S), floats(S, D), floats(B, D)],
        f"[a,b],[b,c],[a,c]->[a]; b: sum; c: sum; P,R,R->P ({LINEAR}); R,P,R->P ({LINEAR}); R,R,P->P ({LINEAR})",
        {"equation": "bi,ij,bj->b"},
    )
    yield Case("Einsum", [floats(B, S, S)], f"[a,.,.]->[a,.]; P->P ({ANY})", {"equation": "bii->bi"})
    bytes_ = Tensor((S, D), "uint8", 200), Tensor((D, V), "uint8", 200)
    yield Case("MatMulInteger", bytes_, "[a,b],[b,c]->[a,c]; b: sum")


def _reductions() -> Iterator[Case]:
    """Dims folded away: how the parts come together is what the op does."""
    for kind, notes in (
        ("ReduceProd", "; c: prod; P,R->P (prod)"),
        ("ReduceLogSumExp", "; c: logsumexp; P,R->P (logsumexp)"),
        ("ReduceL1", "; c: sum"),
        ("ReduceSumSquare", "; c: sum"),
    ):
        yield Case(kind, [floats(B, S, D), ints(-1)], f"[a,b,c],_->[a,b,.]{notes}")
    # A part of a positive sum may be negative and has no logarithm; the root of a sum is none of roots.
    yield Case("ReduceLogSum", [positive(B, S, D), ints(-1)], "[a,b,.],_->[a,b,.]")
    yield Case("ReduceL2", [floats(B, S, D), ints(-1)], "[a,b,.],_->[a,b,.]")
    yield Case(
        "ReduceMean", [floats(B, S, D)], f"[a,b,c]->[]; a: mean; b: mean; c: mean; P->P ({LINEAR})", {"keepdims": 0}
    )
    yield Case("ReduceMax", [floats(B, S), ints(0, 1)], "[a,b],_->[]; a: max; b: max; P,R->P (max)", {"keepdims": 0})
    yield Case("ArgMin", [floats(B, S, D)], "[a,.,b]->[a,b]", {"axis": 1, "keepdims": 0})
    yield Case(
        "CumSum", [floats(B, S), np.array(0)], f"[.,a],_->[.,a]; P,R->P ({LINEAR})", {"reverse": 1, "exclusive": 1}
    )
    yield Case("NegativeLogLikelihoodLoss", [floats(S, V), indices(V, S)], f"[a,.],[a]->[]; a: mean; P,R->P ({LINEAR})")
    yield Case(
        "NegativeLogLikelihoodLoss",
        [floats(S, V), indices(V, S)],
        f"[a,.],[a]->[]; a: sum; P,R->P ({LINEAR})",
        {"reduction": "sum"},
    )
    yield Case("SoftmaxCrossEntropyLoss", [floats(S, V), indices(V, S)], "[a,.],[a]->[a]", {"reduction": "none"})


def _norms() -> Iterator[Case]:
    """What is normalised stays whole, the rest is free; scale and bias enter linearly, the bias alone as a shift."""
    affine = f"; R,P,P->P ({LINEAR}); R,R,P->P ({ORDER} logsumexp)"
    yield Case("LogSoftmax", [floats(B, S, D)], "[a,b,.]->[a,b,.]", {"axis": -1})
    yield Case("Softmax", [floats(B, H, S, S)], "[a,b,.,c]->[a,b,.,c]", {"axis": 2})
    yield Case("Hardmax", [floats(B, S)], "[a,.]->[a,.]", {"axis": -1})
    yield Case("LpNormalization", [floats(B, S)], "[a,.]->[a,.]", {"axis": -1})
    yield Case(
        "InstanceNormalization", [floats(4, C, 8, 8), floats(C), floats(C)], "[a,b,.,.],[b],[b]->[a,b,.,.]" + affine
    )
    yield Case(  # 32 groups of 4 channels: shards of the channels have fewer groups
        "GroupNormalization",
        [floats(4, 128, 8, 8), floats(128), floats(128)],
        "[a,b,.,.],[b],[b]->[a,b,.,.]; b: scaling num_groups[0]" + affine,
        {"num_groups": 32},
    )
    yield Case(  # training: the batch is normalised with its own statistics, on which the running ones do not act
        "BatchNormalization",
        [floats(4, C, 8, 8), floats(C), floats(C), floats(C), positive(C)],
        "[.,a,.,.],[a],[a],[a],[a]->[.,a,.,.],[a],[a]; R,P,P,R,R->P,R,R; R,P,R,R,R->P,R,R (mean); "
        f"R,R,P,R,R->P,R,R (mean {ORDER} logsumexp); R,R,R,P,R->R,P,R (mean {ORDER}); R,R,R,R,P->R,R,P (mean {ORDER})",
        {"training_mode": 1},
        num_outputs=3,
    )
    yield Case("LRN", [floats(4, C, 8, 8)], "[a,.,b,c]->[a,.,b,c]", {"size": 5})
    yield Case(
        "autopar::RMSNormalizationGrad",
        [floats(B, S, D), floats(D), floats(B, S, D)],
        f"[a,b,.],[.],[a,b,.]->[a,b,.],[.]; a: sum; b: sum; R,P,R->P,R ({LINEAR}); R,R,P->P,P ({LINEAR})",
        {"axis": 2, "epsilon": 1e-5},
        num_outputs=2,
    )
    for kind in ("autopar::SoftmaxGrad", "autopar::LogSoftmaxGrad"):
        yield Case(kind, [floats(B, S, D)] * 2, f"[a,b,.],[a,b,.]->[a,b,.]; R,P->P ({LINEAR})", {"axis": -1})
    yield Case(
        "autopar::BatchNorm",
        [floats(4, C, 8, 8), floats(C), floats(C), floats(C), positive(C)],
        "[a,b,c,d],[b],[b],[b],[b]->[a,b,c,d]; R,P,P,R,R->P; P,R,R,R,R->P (mean); R,P,R,R,R->P (mean); "
        f"R,R,P,R,R->P (mean {ORDER} logsumexp)",
        {"epsilon": 1e-5},
    )


def _windows() -> Iterator[Case]:
    """Convolutions and pooling; windows that do not overlap are cut between."""
    both = f"; P,R->P ({LINEAR}); R,P->P ({LINEAR})"
    yield Case(
        "Conv",
        [floats(4, C, 8, 8), floats(2 * C, C, 1, 1)],
        "[a,e,c,d],[b,e,.,.]->[a,b,c,d]; e: sum" + both,
        {"kernel_shape": (1, 1)},
    )
    yield Case(  # patches of an image
        "Conv",
        [floats(4, C, 32, 32), floats(24, C, 4, 4)],
        "[a,e,c,d],[b,e,.,.]->[a,b,c,d]; e: sum" + both,
        {"kernel_shape": (4, 4), "strides": (4, 4)},
    )
    yield Case(  # 16 groups of 4 channels: with 8 outputs of each go its inputs
        "Conv",
        [floats(4, 64, 8, 8), floats(128, 4, 1, 1)],
        "[a,b,c,d],[b,.,.,.]->[a,b,c,d]; b: scaling group[0]" + both,
        {"kernel_shape": (1, 1), "group": 16},
    )
    yield Case(
        "ConvTranspose",
        [floats(4, C, 8, 8), floats(C, 2 * C, 2, 2)],
        "[a,e,c,d],[e,b,.,.]->[a,b,c,d]; e: sum" + both,
        {"kernel_shape": (2, 2), "strides": (2, 2)},
    )
    yield Case(  # the gradient of a kernel: samples are contracted; so is space where windows do not overlap
        "autopar::ConvWeightGrad",
        [floats(4, C, 8, 8), floats(4, 2 * C, 8, 8)],
        "[d,b,e,f],[d,a,e,f]->[a,b,.,.]; d: sum; e: sum; f: sum" + both,
        {"kernel_shape": (1, 1), "strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "group": 1},
    )
    pool = {"kernel_shape": (2, 2), "strides": (2, 2)}
    yield Case("MaxPool", [floats(4, C, 16, 16)], "[a,b,c,d]->[a,b,c,d]; P->P (max)", pool)
    yield Case("AveragePool", [floats(4, C, 16, 16)], f"[a,b,c,d]->[a,b,c,d]; P->P ({LINEAR})", pool)
    yield Case("GlobalMaxPool", [floats(4, C, 8, 8)], "[a,b,c,d]->[a,b,.,.]; c: max; d: max; P->P (max)")
    yield Case(  # each number goes to one place, or nowhere
        "autopar::MaxPoolGrad",
        [floats(4, C, 16, 16), floats(4, C, 8, 8)],
        f"[a,b,c,d],[a,b,c,d]->[a,b,c,d]; R,P->P ({LINEAR} {ORDER} prod)",
        {**pool, "pads": (0, 0, 0, 0), "dilations": (1, 1), "crop": (0, 0, 0, 0)},
    )
    yield Case(  # the shape of the image is an input
        "autopar::AveragePoolGrad",
        [floats(4, C, 8, 8), ints(16, 16)],
        f"[a,b,c,d],_->[a,b,c,d]; c: scaling #1[0]; d: scaling #1[1]; P,R->P ({LINEAR} {ORDER})",
        {**pool, "pads": (0, 0, 0, 0), "dilations": (1, 1), "count_include_pad": 0},
    )


def _attention() -> Iterator[Case]:
    """Attention over (batch, sequence, heads * head size), and its gradients."""
    yield Case(
        "Attention",
        [floats(B, S, D)] * 3,
        f"[a,b,c],[a,.,c],[a,.,c]->[a,b,c]; c: scaling kv_num_heads[0], q_num_heads[0]; R,R,P->P ({LINEAR})",
        {"q_num_heads": H, "kv_num_heads": H},
    )
    # Linear in the values, which the scores do not see, and in dy; not in both.
    linear = f"; R,R,P,R->P,P,R ({LINEAR}); R,R,R,P->P,P,P ({LINEAR})"
    yield Case(
        "autopar::AttentionGrad",
        [floats(B, H, S, K)] * 4,
        "[a,b,c|d,.],[a,b,c,.],[a,b,c,e],[a,b,c|d,e]->[a,b,c|d,.],[a,b,c,.],[a,b,c,e]; "
        "c: as autopar::RingAttentionGrad from #0 dim 2; d: sum; e: sum" + linear,
        {"scale": 0.35, "is_causal": 0},
        num_outputs=3,
    )
    yield Case(  # causal: a block of queries has to know where it starts
        "autopar::AttentionGrad",
        [floats(B, H, S, K), floats(B, 4, S, K), floats(B, 4, S, K), floats(B, H, S, K)],
        "[a,b|c,d|e,.],[a,b,d,.],[a,b,d,f],[a,b|c,d|e,f]->[a,b|c,d|e,.],[a,b,d,.],[a,b,d,f]; "
        "c: sum, as autopar::AttentionGradHeadsPart from #0 dim 1; "
        "d: as autopar::RingAttentionGrad from #0 dim 2; "
        "e: sum, as autopar::AttentionGradPart from #0 dim 2; f: sum" + linear,
        {"scale": 0.35, "is_causal": 1},
        num_outputs=3,
    )
    yield Case(
        "autopar::RotaryEmbeddingGrad",
        [floats(B, H, S, K), floats(B, S, K // 2), floats(B, S, K // 2)],
        f"[a,b,c,.],[a,c,.],[a,c,.]->[a,b,c,.]; P,R,R->P ({LINEAR}); R,P,P->P ({LINEAR})",
        {"interleaved": 0, "num_heads": 0, "rotary_embedding_dim": 0},
    )


def _shapes() -> Iterator[Case]:
    """Dims moved, split, merged, cut, repeated."""
    yield Case(
        "Reshape",
        [floats(8, 12, 10), ints(4, 24, 10)],  # 8 = 4 * 2 in front of 12, and 24 = 2 * 12
        "[a|d/4,c,b],_->[a,c/2|d,b]; a: scaling #1[0]; b: scaling #1[2]; c: scaling #1[1]; d: scaling #1[1]; "
        f"P,R->P ({ANY})",
    )
    yield Case("Transpose", [floats(S, D)], f"[a,b]->[b,a]; P->P ({ANY})")
    yield Case("Pad", [floats(B, S, D), ints(0, 0, 1, 0, 0, 1)], f"[a,b,.],_->[a,b,.]; P,R->P ({LINEAR} {ORDER} prod)")
    yield Case("Tile", [floats(B, S), ints(1, 2)], f"[a,b],_->[a,b/2]; P,R->P ({ANY})")
    yield Case(  # blocks first, then channels
        "DepthToSpace", [floats(4, 64, 8, 8)], f"[a,b/4,c,d]->[a,b,c,d]; P->P ({ANY})", {"blocksize": 2, "mode": "DCR"}
    )
    yield Case(  # channels first, then blocks
        "DepthToSpace", [floats(4, 64, 8, 8)], f"[a,b,c,d]->[a,b,c,d]; P->P ({ANY})", {"blocksize": 2, "mode": "CRD"}
    )
    yield Case("SpaceToDepth", [floats(4, C, 8, 8)], f"[a,b,c,d]->[a,b/4,c,d]; P->P ({ANY})", {"blocksize": 2})
    yield Case(  # gate and values of an MLP side by side, so their shards are, too
        "Split",
        [floats(B, S, 2 * D), ints(D, D)],
        f"[a,b,c/2],_->[a,b,c],[a,b,c]; c: scaling #1[0], #1[1]; P,R->P,P ({ANY})",
        {"axis": 2},
        num_outputs=2,
    )
    yield Case("Concat", [floats(B, S)] * 2, f"[a,b],[a,b]->[a,b/2]; P,P->P ({ANY})", {"axis": 1})
    # Every other column: a device that has an even number of them has its own ones.
    yield Case(
        "Slice",
        [floats(B, S), ints(0), ints(S), ints(1), ints(2)],
        f"[a,b],_,_,_,_->[a,b]; P,R,R,R,R->P ({ANY})",
    )
    yield Case("ConstantOfShape", [ints(B, S)], "_->[a,b]; a: scaling #0[0]; b: scaling #0[1]")
    yield Case("EyeLike", [floats(S, S)], "[.,.]->[.,.]; P->R")  # the shape is all it reads


def _indexing() -> Iterator[Case]:
    """Rows picked and put back."""
    yield Case(
        "Gather",
        [floats(B, V, D), indices(V, S)],
        f"[a,d,c],[b]->[a,b,c]; d: sum, as autopar::GatherPart from #0 dim 1; P,R->P ({ANY})",
        {"axis": 1},
    )
    yield Case(
        "GatherND",
        [floats(V, D), indices(V, B, S, 1)],
        f"[d,c],[a,b,.]->[a,b,c]; d: sum, as autopar::GatherNDPart from #0 dim 0; P,R->P ({ANY})",
    )
    yield Case(
        "ScatterND",
        [floats(V, D), indices(V, S, 1), floats(S, D)],
        "[c,b],[a,.],[a,b]->[c,b]; a: sum, #0 partial; c: as autopar::ScatterNDPart from #0 dim 0; "
        f"P,R,P->P ({LINEAR}); P,R,R->P ({ORDER} logsumexp)",
        {"reduction": "add"},
    )
    # Rows written over: the last one stays, so the order counts.
    yield Case(
        "ScatterND",
        [floats(V, D), indices(V, S, 1), floats(S, D)],
        f"[b,a],[.,.],[.,a]->[b,a]; b: as autopar::ScatterNDPart from #0 dim 0; P,R,P->P ({ANY})",
    )
    yield Case(
        "ScatterElements",
        [floats(B, S), indices(S, B, 4), floats(B, 4)],
        f"[a,b],[a,.],[a,.]->[a,b]; b: as autopar::ScatterElementsPart from #0 dim 1; P,R,P->P ({ANY})",
        {"axis": 1},
    )
    yield Case(  # rows of a cache of keys, written from another place on in every sample
        "TensorScatter",
        [floats(4, 32, 24), floats(4, 8, 24), indices(24, 4)],
        f"[a,.,b],[a,.,b],[a]->[a,.,b]; P,P,R->P ({ANY})",
        {"axis": 1},
    )
    yield Case(  # a block out of the middle is the middle ones of four
        "CenterCropPad",
        [floats(B, S), ints(B // 2, S)],
        f"[a/4,b],_->[a/2,b]; a: scaling #1[0]; b: scaling #1[1]; P,R->P ({ANY})",
    )
    yield Case("TopK", [floats(V, B), ints(3)], "[.,a],_->[.,a],[.,a]", {"axis": 0}, num_outputs=2)
    yield Case(
        "autopar::GatherElementsGrad",
        [indices(S, B, 4), np.arange(S), floats(B, 4)],
        f"[a,c],[b],[a,c]->[a,b]; c: sum; R,R,P->P ({LINEAR})",
        {"axis": 1},
    )


def _steps() -> Iterator[Case]:
    """Gradients of activations, the loss, the update."""
    yield Case(  # every number is kept or becomes 0
        "autopar::ReluGrad", [floats(B, S)] * 2, f"[a,b],[a,b]->[a,b]; R,P->P ({LINEAR} {ORDER} prod)"
    )
    for kind in ("autopar::GeluGrad", "autopar::TanhGrad"):
        yield Case(kind, [floats(B, S)] * 2, f"[a,b],[a,b]->[a,b]; R,P->P ({LINEAR})")
    yield Case(  # the sum over all rows of row_max + log(sum_exp) - picked
        "autopar::CrossEntropy",
        [floats(B, S, 1), positive(B, S, 1), floats(B, S, 1)],
        "[a,b,.],[a,b,.],[a,b,.]->[]; a: sum; b: sum; P,R,P->P (mean)",
    )
    yield Case(  # the vocabulary is sharded with the numbers of its classes
        "autopar::CrossEntropyGrad",
        [floats(B, S, V), floats(B, S, 1), positive(B, S, 1), indices(V, B, S), np.arange(V), floats()],
        f"[a,b,c],[a,b,.],[a,b,.],[a,b],[c],[]->[a,b,c]; R,R,R,R,R,P->P ({LINEAR})",
    )
    yield Case(  # m' = momentum * m + g and p' = p - rate * m', so m' grows and p' falls with m and with g
        "autopar::SGD",
        [floats(D, V)] * 3,
        f"[a,b],[a,b],[a,b]->[a,b],[a,b]; P,P,P->P,P ({LINEAR}); P,R,R->P,R ({ORDER} logsumexp); "
        "R,P(max),R->P(min),P(max); R,P(min),R->P(max),P(min); R,R,P(max)->P(min),P(max); R,R,P(min)->P(max),P(min)",
        {"learning_rate": 0.1, "momentum": 0.9},
        num_outputs=2,
    )


def _positions() -> Iterator[Case]:
    """What depends on where an element stands, on chance, or on the data."""
    yield Case(
        "Trilu",
        [floats(B, H, S, S)],
        "[a,b,c,d]->[a,b,c,d]; c: as autopar::TriluRowsPart from #0 dim 2; "
        f"d: as autopar::TriluColumnsPart from #0 dim 3; P->P ({LINEAR} {ORDER} prod)",
        {"upper": 0},
    )
    yield Case("RandomUniformLike", [floats(B, S)], "[.,.]->[.,.]", reason="replicated: two runs")
    yield Case(
        "Dropout",
        [floats(B, S), np.array(0.5), np.array(True)],
        "[.,.],[],[]->[.,.]",
        reason="replicated: two runs",
    )
    yield Case("Range", [np.array(0), np.array(S), np.array(1)], "_,_,_->[.]")


CASES: tuple[Case, ...] = (
    *_pointwise(),
    *_products(),
    *_reductions(),
    *_norms(),
    *_windows(),
    *_attention(),
    *_shapes(),
    *_indexing(),
    *_steps(),
    *_positions(),
)
