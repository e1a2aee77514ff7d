"""Matrix products inside ops, on local shapes: one table, `_PRODUCTS`.

Every matrix product, convolution and gradient of one is b products of (m, k) by (k, n). A convolution is the implicit
product of its windows: m results of one channel, n channels, k weights per result; groups are batches. Of depthwise
convolutions, one channel per group, matrix units make nothing: their arithmetic runs behind the bytes.

Shape arrays are (n, rank), one row per strategy; so are the sizes of a product, (n,).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from string import ascii_letters

import numpy as np

from autopar.cost.arrays import FloatArray, IntArray, Product, Shapes, num_elements, shape_of
from autopar.cost.scans import SCAN_PRODUCTS
from autopar.ir.fills import fill_of
from autopar.ir.graph import Op


def _matmul(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Leading dims are rows of one product where the right operand has none of its own."""
    a, b = shape_of(inputs, 0), shape_of(inputs, 1)
    k = a[:, -1].astype(np.float64)
    n = b[:, -1].astype(np.float64) if b.shape[1] > 1 else np.ones(len(b))
    total = num_elements(shape_of(outputs, 0))
    batch = num_elements(b[:, :-2]) if b.shape[1] > 2 else np.ones(len(b))
    rows = total / np.maximum(n, 1)
    return [Product(batch, rows / np.maximum(batch, 1), n, k)]


def _gemm(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    k = shape_of(inputs, 0)[:, 0 if op.attr("transA", 0) else 1].astype(np.float64)
    m, n = shape_of(outputs, 0).T.astype(np.float64)
    return [Product(np.ones(len(k)), m, n, k)]


@lru_cache(maxsize=4096)
def _einsum_terms(equation: str, ranks: tuple[int, ...], rank: int) -> tuple[tuple[str, ...], str]:
    """Return the labels of each operand and of the result; dims of an ellipsis have digits, aligned from the right."""

    def labels(term: str, rank: int) -> str:
        if "..." not in term:
            return term
        before, after = term.split("...")
        free = rank - len(before) - len(after)
        return before + "".join(str(index) for index in reversed(range(free))) + after

    left, _, right = equation.replace(" ", "").partition("->")
    terms = tuple(labels(term, operand) for term, operand in zip(left.split(","), ranks, strict=True))
    if "->" in equation:
        return terms, labels(right, rank)
    joined = "".join(terms)
    kept = {label for label in joined if joined.count(label) == 1 or label not in ascii_letters}
    return terms, "".join(sorted(kept))


def _einsum(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Contract operands pairwise from left to right; what both have and the result keeps is a batch."""
    shapes = [shape for shape in inputs if shape is not None]
    equation = str(op.attr("equation", ""))
    terms, result = _einsum_terms(equation, tuple(shape.shape[1] for shape in shapes), shape_of(outputs, 0).shape[1])
    sizes: dict[str, IntArray] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for dim, label in enumerate(term):
            sizes[label] = np.maximum(sizes.get(label, shape[:, dim]), shape[:, dim])

    def size(labels: set[str]) -> FloatArray:
        total = np.ones(len(shapes[0]))
        for label in sorted(labels):
            total = total * sizes[label]
        return total

    products = []
    left = set(terms[0])
    for index, term in enumerate(terms[1:], start=1):
        right = set(term)
        kept = (left | right) & set(result).union(*terms[index + 1 :])
        both = left & right
        products.append(Product(size(both & kept), size(left - both), size(right - both), size(both - kept)))
        left = kept
    return products


def _is_depthwise(weight: IntArray, other: IntArray, groups: FloatArray) -> bool:
    """Whether a convolution has one channel of either side per group.

    Args:
        weight: Shapes of the weight, whose dim 1 is the channels of one side per group.
        other: Shapes of the data of the other side.
        groups: Number of groups.
    """
    return bool((weight[:, 1] == 1).all() and (other[:, 1] == groups).all())


def _conv(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """The weight is (out channels, in channels / group, *kernel)."""
    y, weight = shape_of(outputs, 0), shape_of(inputs, 1)
    groups = np.maximum(shape_of(inputs, 0)[:, 1] / weight[:, 1], 1.0)
    m = num_elements(y) / np.maximum(y[:, 1], 1)
    return [Product(groups, m, y[:, 1] / groups, num_elements(weight[:, 1:]), _is_depthwise(weight, y, groups))]


def _conv_transpose(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """The weight is (in channels, out channels / group, *kernel)."""
    x, weight = shape_of(inputs, 0), shape_of(inputs, 1)
    groups = np.maximum(shape_of(outputs, 0)[:, 1] / weight[:, 1], 1.0)
    m = num_elements(x) / np.maximum(x[:, 1], 1)
    return [Product(groups, m, num_elements(weight[:, 1:]), x[:, 1] / groups, _is_depthwise(weight, x, groups))]


def _conv_weight_grad(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Of (x, dy) -> dw: results of one channel are summed over."""
    dy, weight = shape_of(inputs, 1), shape_of(outputs, 0)
    groups = np.maximum(shape_of(inputs, 0)[:, 1] / weight[:, 1], 1.0)
    k = num_elements(dy) / np.maximum(dy[:, 1], 1)
    return [Product(groups, dy[:, 1] / groups, num_elements(weight[:, 1:]), k, _is_depthwise(weight, dy, groups))]


def _packed_matmul(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Rows (..., k) or, in a gradient, (..., n) times a packed weight."""
    x, y = shape_of(inputs, 0), shape_of(outputs, 0)
    k = x[:, -1].astype(np.float64)
    return [Product(np.ones(len(k)), num_elements(y[:, :-1]), y[:, -1].astype(np.float64), k)]


def _grouped(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Rows (experts, samples, positions, k), as far as they are filled, times one matrix per expert."""
    x, y = shape_of(inputs, 0), shape_of(outputs, 0)
    rows = num_elements(x[:, 1:3]) * fill_of(op)
    return [Product(x[:, 0].astype(np.float64), rows, y[:, 3].astype(np.float64), x[:, 3].astype(np.float64))]


def _grouped_weight_grad(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Of (rows, dy) -> dw: rows are summed over."""
    x, dy = shape_of(inputs, 0), shape_of(inputs, 1)
    rows = num_elements(x[:, 1:3]) * fill_of(op)
    return [Product(x[:, 0].astype(np.float64), x[:, 3].astype(np.float64), dy[:, 3].astype(np.float64), rows)]


def _muon(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Five iterations of two products over the longer side of a matrix, and one of squares over the shorter one."""
    sides = np.sort(shape_of(inputs, 0)[:, -2:].astype(np.float64), axis=1)
    short, long = sides.T
    batch = num_elements(shape_of(inputs, 0)[:, :-2])
    return [Product(batch, short, *pair) for pair in 5 * [(short, long), (short, short), (long, short)]]


def _recurrent(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Inputs of all steps (T * B, I) by (I, G) and, T times, the hidden state (B, H) by (H, G), for each direction."""
    x, w, r = (shape_of(inputs, index).astype(np.float64) for index in range(3))
    steps, batch = (x[:, 1], x[:, 0]) if op.attr("layout", 0) else (x[:, 0], x[:, 1])
    directions = w[:, 0]
    return [
        Product(directions, steps * batch, w[:, 1], w[:, 2]),
        Product(directions * steps, batch, r[:, 1], r[:, 2]),
    ]


def _recurrent_gradient(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Each product of the forward pass (of one direction) has a gradient of either operand."""
    x, w, r = (shape_of(inputs, index).astype(np.float64) for index in range(3))
    steps, batch, rows = x[:, 0], x[:, 1], x[:, 0] * x[:, 1]
    one = np.ones(len(x))
    return [
        Product(one, rows, w[:, 1], w[:, 0]),
        Product(one, w[:, 0], w[:, 1], rows),
        Product(steps, batch, r[:, 1], r[:, 0]),
        Product(one, r[:, 0], r[:, 1], rows),
    ]


def _head(count: int) -> Callable[[Op, Shapes, Shapes], list[Product]]:
    """Return so many products of tokens, classes and width, those of a head with its cross-entropy."""

    def products(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
        hidden, weight = shape_of(inputs, 0), shape_of(inputs, 1)
        k, n = weight.T.astype(np.float64)
        rows = num_elements(hidden) / np.maximum(k, 1)
        return [Product(np.ones(len(k)), rows, n, k)] * count

    return products


_PRODUCTS: Mapping[str, Callable[[Op, Shapes, Shapes], list[Product]]] = {
    # The kernel that sums exponentials finds the largest logit, too; a gradient makes the logits once more.
    "autopar::HeadStats": _head(1),
    "autopar::HeadGrad": _head(3),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "autopar::ConvWeightGrad": _conv_weight_grad,
    **SCAN_PRODUCTS,
    "autopar::GroupedMatMul": _grouped,
    "autopar::GroupedMatMulGrad": _grouped,
    "autopar::GroupedMatMulWeightGrad": _grouped_weight_grad,
    "autopar::Muon": _muon,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **{f"autopar::{kind}Grad": _recurrent_gradient for kind in ("GRU", "GRUReset", "LSTM", "RNN")},
    **{
        f"autopar::MatMulNBits{zeros}{phase}": _packed_matmul
        for zeros in ("", "Packed", "Shifted")
        for phase in ("", "Grad")
    },
}

PRODUCT_KINDS = frozenset(_PRODUCTS)
"""Kinds whose work is matrix products."""
GROUPED_WEIGHT = "autopar::GroupedMatMulWeightGrad"
GROUPED_KINDS = frozenset({"autopar::GroupedMatMul", "autopar::GroupedMatMulGrad", GROUPED_WEIGHT})
"""Kinds that multiply the rows of each expert with a matrix of its own."""


def op_products(op: Op, inputs: Shapes, outputs: Shapes) -> list[Product]:
    """Return the matrix products an op of `PRODUCT_KINDS` consists of, for each strategy; none for other ops.

    >>> op = Op("fc", "MatMul", ("x", "w"), ("y",))
    >>> (product,) = op_products(op, [np.array([[2, 8, 4]]), np.array([[4, 6]])], [np.array([[2, 8, 6]])])
    >>> [float(size[0]) for size in (product.batch, product.m, product.n, product.k)]
    [1.0, 16.0, 6.0, 4.0]
    """
    make = _PRODUCTS.get(op.kind)
    return [] if make is None else make(op, inputs, outputs)
