"""Floating-point operations of an op on local shapes: one table, `_FLOPS`.

A multiply and an add count 2. Only matrix products, convolutions and attention are counted; the arithmetic of
element-wise ops, norms and reductions runs on vector units behind the memory traffic and is neglected (their time is
that of their bytes, see `autopar.cost.traffic`). Recomputed forwards are not counted, so that summed over a step
these are the model FLOPs of MFU.

Shape arrays are (n, rank), one row per strategy; results are (n,).
"""

from collections.abc import Callable, Mapping, Sequence
from string import ascii_letters

import numpy as np

from autopar.cost.arrays import FloatArray, IntArray, num_elements
from autopar.ir.graph import Op

Shapes = Sequence[IntArray | None]
"""Local shapes of the operands of an op, in their order; None for an absent operand."""


def _shape(shapes: Shapes, index: int) -> IntArray:
    shape = shapes[index]
    assert shape is not None, f"operand {index} is absent"
    return shape


def _matmul(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    return 2.0 * num_elements(_shape(outputs, 0)) * _shape(inputs, 0)[:, -1]


def _gemm(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    return 2.0 * num_elements(_shape(outputs, 0)) * _shape(inputs, 0)[:, 0 if op.attr("transA", 0) else 1]


def _einsum_labels(term: str, rank: int) -> str:
    """Return one label per dim; the dims of an ellipsis are labelled from the right with digits, as they align."""
    if "..." not in term:
        return term
    before, after = term.split("...")
    free = rank - len(before) - len(after)
    return before + "".join(str(index) for index in reversed(range(free))) + after


def _einsum(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    """Count the pairwise contractions from left to right: 2 x the product of all sizes that take part in each."""
    equation = str(op.attr("equation", "")).replace(" ", "")
    left, _, right = equation.partition("->")
    shapes = [shape for shape in inputs if shape is not None]
    terms = [_einsum_labels(term, shape.shape[1]) for term, shape in zip(left.split(","), shapes, strict=True)]
    if "->" in equation:
        result = set(_einsum_labels(right, _shape(outputs, 0).shape[1]))
    else:
        joined = "".join(terms)
        result = {label for label in joined if joined.count(label) == 1 or label not in ascii_letters}
    sizes: dict[str, IntArray] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for dim, label in enumerate(term):
            sizes[label] = np.maximum(sizes.get(label, shape[:, dim]), shape[:, dim])
    total = np.zeros(len(shapes[0]))
    kept = set(terms[0])
    for index, term in enumerate(terms[1:], start=1):
        kept |= set(term)
        total += 2.0 * np.prod([sizes[label] for label in sorted(kept)], axis=0, dtype=np.float64)
        kept &= result.union(*terms[index + 1 :])
    return total


def _conv(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    """Count 2 x outputs x weights per output; the weight is (out channels, in channels / group, *kernel)."""
    return 2.0 * num_elements(_shape(outputs, 0)) * num_elements(_shape(inputs, 1)[:, 1:])


def _conv_transpose(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    """Count 2 x inputs x weights per input; the weight is (in channels, out channels / group, *kernel)."""
    return 2.0 * num_elements(_shape(inputs, 0)) * num_elements(_shape(inputs, 1)[:, 1:])


def _attended(op: Op, q_len: IntArray, k_len: IntArray) -> FloatArray:
    """Return the keys a query attends to on average; of a causal block the last one counts, where the most are left."""
    keys = k_len.astype(np.float64)
    return keys - np.minimum(q_len, k_len) / 2.0 if op.attr("is_causal", 0) else keys


def _attention(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    """Count the products with K and with V: 2 x queries x keys x channels each; half of it when causal.

    Q, K, V are (batch, heads, length, channels) or (batch, length, heads x channels): the length is next to last in
    both.
    """
    q, k = _shape(inputs, 0), _shape(inputs, 1)
    k_len = k[:, -2]
    if len(inputs) > 4 and inputs[4] is not None:  # past_key
        k_len = k_len + inputs[4][:, -2]
    return 2.0 * (num_elements(q) + num_elements(_shape(outputs, 0))) * _attended(op, q[:, -2], k_len)


def _conv_weight_grad(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    """Count what the convolution counts, from (x, dy) -> dw: 2 x results x weights per result."""
    return 2.0 * num_elements(_shape(inputs, 1)) * num_elements(_shape(outputs, 0)[:, 1:])


def _attention_grad(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    """Count 5 products where the forward has 2: scores again, gradients of P, V, Q, K; from (q, k, ..., dy)."""
    return 2.5 * _attention(op, inputs[:3], inputs[-1:])


_FLOPS: Mapping[str, Callable[[Op, Shapes, Shapes], FloatArray]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Attention": _attention,
    "autopar::ConvWeightGrad": _conv_weight_grad,
    "autopar::AttentionPart": _attention,
    "autopar::ScaledAttentionPart": _attention,
    "autopar::AttentionGrad": _attention_grad,
    "autopar::AttentionGradPart": _attention_grad,
    "autopar::MaskedAttentionGrad": _attention_grad,
}


def op_flops(op: Op, inputs: Shapes, outputs: Shapes) -> FloatArray:
    """Return the floating-point operations of one device for each strategy.

    Args:
        op: The operation.
        inputs: Local shape arrays (n, rank) of its inputs.
        outputs: Local shape arrays (n, rank) of its outputs.

    >>> op = Op("fc", "MatMul", ("x", "w"), ("y",))
    >>> op_flops(op, [np.array([[8, 4]]), np.array([[4, 6]])], [np.array([[8, 6]])])  # 2 x 8 x 6 x 4
    array([384.])
    """
    count = _FLOPS.get(op.kind)
    if count is None:
        return np.zeros(next((len(shape) for shape in (*outputs, *inputs) if shape is not None), 0))
    return count(op, inputs, outputs)
