"""Attention in the equations of a program: two products with a softmax between them, in any order of dims.

Dims are called by labels, one per dim of the softmax that is not 1: those that queries, keys and values share (samples,
heads of keys), those of queries alone (positions, heads that share keys), that of keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.jaxprs.equations import Equation, Value, constant
from autopar.jaxprs.fused import Facts, Replaced
from autopar.jaxprs.positions import Causal, content, unit_dims_moved

_LOWEST = -1e4
"""Scores from which on a softmax gives 0: that is how masks are written."""

Label = int
Labels = tuple[Label | None, ...]
"""Label per dim; None where the size is 1."""
_SIZE, _WIDTH = -1, -2
"""Labels of what queries and keys are multiplied over, and of the width of values."""


@dataclass(slots=True)
class _Scores:
    """What a walk from a softmax up to the product of queries and keys collects."""

    scale: float = 1.0
    is_causal: bool = False
    causal: tuple[Label | None, Label | None] = (None, None)
    mask: tuple[Value, Labels, float] | None = None


def attention(equation: Equation, facts: Facts, done: set[Equation]) -> Replaced | None:
    """Return attention in place of its second product, None if the equation is none."""
    for side in (0, 1):
        found = _attention(equation, side, facts)
        if found is not None:
            return found
    return None


def _attention(equation: Equation, side: int, facts: Facts) -> Replaced | None:
    contracted, _ = equation.params["dimension_numbers"]
    shares, values = equation.inputs[side], equation.inputs[1 - side]
    if len(contracted[side]) != 1:
        return None
    # From the product up to the softmax, then on to the first product.
    labels: Labels = tuple(dim if size > 1 else None for dim, size in enumerate(shares.shape))
    key = labels[int(contracted[side][0])]
    made, up = _above(shares, labels, facts)
    if made is None or made.kind != "Softmax" or key is None or up[-1] != key:
        return None
    scores = _Scores()
    product, at_product = _product(made.inputs[0], up, facts, scores)
    if product is None:
        return None
    operands = _operand_labels(product, at_product)
    if operands is None:
        return None
    (q, q_labels), (k, k_labels) = operands if key in operands[1][1] else operands[::-1]
    v_labels = _value_labels(equation, side, labels, values)
    if v_labels is None or v_labels.count(_WIDTH) != 1 or k_labels.count(key) != 1:
        return None
    shared = [label for label in q_labels if label in k_labels and label not in (None, _SIZE)]
    own = [label for label in q_labels if label not in (None, _SIZE) and label not in k_labels]
    if len(shared) > 2 or len(own) not in (1, 2) or key in q_labels:
        return None
    if set(k_labels) - {None} != {*shared, key, _SIZE} or set(v_labels) - {None} != {*shared, key, _WIDTH}:
        return None
    position = scores.causal[0] if scores.is_causal else max(own, key=lambda label: q.shape[q_labels.index(label)])
    if position not in own or (scores.is_causal and scores.causal[1] != key):
        return None
    groups = [label for label in own if label != position]
    sizes = {
        label: size
        for label, size in zip((*q_labels, *k_labels, *v_labels), (*q.shape, *k.shape, *values.shape), strict=True)
    }
    if scores.is_causal and sizes[position] != sizes[key]:
        return None
    if scores.mask is not None and (groups or scores.is_causal):
        return None
    samples, heads = [*shared, None, None][:2]
    build = _Build(equation, sizes)
    rows = [samples, heads, *groups, position]
    q4 = build.ordered(q, q_labels, [*rows, _SIZE], merged=len(groups) > 0)
    k4 = build.ordered(k, k_labels, [samples, heads, key, _SIZE])
    v4 = build.ordered(values, v_labels, [samples, heads, key, _WIDTH])
    inputs = [q4, k4, v4]
    if scores.mask is not None:
        inputs.append(build.mask(scores.mask, [samples, heads, position, key], q.dtype))
    y4 = build.op(
        "Attention", inputs, (*q4.shape[:3], v4.shape[3]), scale=scores.scale, is_causal=int(scores.is_causal)
    )
    build.result(y4, [*rows, _WIDTH], _result_labels(equation, side, labels, values))
    return build.made


def _above(value: Value, labels: Labels, facts: Facts) -> tuple[Equation | None, Labels]:
    """Return the first equation above a value that does more than order dims, and the labels of what it makes.

    Conversions between float types are passed, too: kernels of attention sum in float32, whatever their operands are.
    """
    while True:
        made = facts.made.get(value)
        if made is None:
            return None, labels
        source = made.inputs[0] if made.inputs else None
        if made.kind == "transpose" and source is not None:
            found: list[Label | None] = [None] * len(labels)
            for to, dim in enumerate(made.params["permutation"]):
                found[int(dim)] = labels[to]
            labels = tuple(found)
        elif made.kind in ("reshape", "squeeze", "broadcast_in_dim", "convert_element_type") and source is not None:
            where = unit_dims_moved(source.shape, made.output.shape)
            if where is None or ("float" in source.dtype) != ("float" in made.output.dtype):
                return made, labels
            labels = tuple(labels[where[dim]] if dim in where else None for dim in range(len(source.shape)))
        else:
            return made, labels
        assert source is not None
        value = source


def _product(value: Value, labels: Labels, facts: Facts, scores: _Scores) -> tuple[Equation | None, Labels]:
    """Walk from the operand of a softmax up to a product; note scale and mask."""
    while True:
        made, labels = _above(value, labels, facts)
        if made is None:
            return None, labels
        if made.kind == "dot_general":
            return made, labels
        if made.kind == "mul" and (scaled := _scaled(made, facts)) is not None:
            value, factor = scaled
            scores.scale *= factor
        elif made.kind == "div" and (number := facts.scalar(made.inputs[1])):
            value = made.inputs[0]
            scores.scale /= number
        elif made.kind == "select_n" and _note_mask(made, labels, facts, scores):
            value = made.inputs[2] if facts.scalar(made.inputs[1]) is not None else made.inputs[1]
        else:
            return None, labels


def _scaled(made: Equation, facts: Facts) -> tuple[Value, float] | None:
    for value, factor in facts.either(made.output, "mul"):
        number = facts.scalar(factor)
        if number is not None:
            return value, number
    return None


def _note_mask(made: Equation, labels: Labels, facts: Facts, scores: _Scores) -> bool:
    """Note what a choice between scores and a low number hides; whether that can be said of attention."""
    condition, *cases = made.inputs
    if len(cases) != 2 or scores.is_causal or scores.mask is not None or scores.scale != 1 or not condition.shape:
        return False
    low = facts.scalar(cases[0])
    hides_where_true = low is None
    low = facts.scalar(cases[1]) if low is None else low
    if low is None or low > _LOWEST:
        return False
    found = content(condition, facts.made)
    if isinstance(found, Causal) and not hides_where_true:
        scores.is_causal, scores.causal = True, (labels[found.query], labels[found.key])
        return True
    if hides_where_true:
        return False
    scores.mask = condition, labels, low
    return True


def _operand_labels(product: Equation, labels: Labels) -> tuple[tuple[Value, Labels], tuple[Value, Labels]] | None:
    """Return both operands of a product with the labels of their dims, given those of its result."""
    contracted, batches = product.params["dimension_numbers"]
    if len(contracted[0]) != 1 or "permutation" in product.params:
        return None
    shared = labels[: len(batches[0])]
    at = len(shared)
    found: list[tuple[Value, Labels]] = []
    for side, operand in enumerate(product.inputs):
        dims: list[Label | None] = [None] * len(operand.shape)
        dims[int(contracted[side][0])] = _SIZE
        for dim, label in zip(batches[side], shared, strict=True):
            dims[int(dim)] = label
        for dim in _free(product, side):
            dims[dim] = labels[at]
            at += 1
        found.append((operand, tuple(dims)))
    return found[0], found[1]


def _free(product: Equation, side: int) -> list[int]:
    contracted, batches = product.params["dimension_numbers"]
    taken = {int(dim) for dim in (*contracted[side], *batches[side])}
    return [dim for dim in range(len(product.inputs[side].shape)) if dim not in taken]


def _value_labels(product: Equation, side: int, labels: Labels, values: Value) -> Labels | None:
    """Return the labels of values, given those of the shares that they are multiplied by."""
    contracted, batches = product.params["dimension_numbers"]
    found: list[Label | None] = [None] * len(values.shape)
    for mine, dim in zip((*batches[side], *contracted[side]), (*batches[1 - side], *contracted[1 - side]), strict=True):
        found[int(dim)] = labels[int(mine)]
    for dim in _free(product, 1 - side):
        found[dim] = _WIDTH if values.shape[dim] > 1 else None
    return tuple(found)


def _result_labels(product: Equation, side: int, labels: Labels, values: Value) -> Labels:
    """Return the labels of the result of a product."""
    _, batches = product.params["dimension_numbers"]
    of_shares = [labels[dim] for dim in _free(product, side)]
    of_values: list[Label | None] = [_WIDTH if values.shape[dim] > 1 else None for dim in _free(product, 1 - side)]
    shared = [labels[int(dim)] for dim in batches[side]]
    return tuple(shared + (of_shares + of_values if side == 0 else of_values + of_shares))


class _Build:
    """Collects the equations of one attention.

    Args:
        equation: The equation that they replace.
        sizes: Size of each label.
    """

    def __init__(self, equation: Equation, sizes: dict[Label | None, int]) -> None:
        self._equation = equation
        self._sizes = {**sizes, None: 1}
        self.made: Replaced = []

    def op(
        self, kind: str, inputs: Sequence[Value], shape: tuple[int, ...], dtype: str = "", **params: object
    ) -> Value:
        """Append an equation and return its result."""
        output = Value(tuple(shape), dtype or inputs[-1].dtype)
        self.made.append(Equation(kind, tuple(inputs), (output,), params, self._equation.scope))
        return output

    def ordered(self, value: Value, labels: Labels, order: Sequence[Label | None], *, merged: bool = False) -> Value:
        """Return a value with dims in the given order, those of heads merged into one where there are two."""
        value = self._transposed(value, labels, [label for label in order if label is not None])
        shape = tuple(self._sizes[label] for label in order)
        if merged:
            shape = (shape[0], shape[1] * shape[2], *shape[3:])
        return self._reshaped(value, shape)

    def mask(self, mask: tuple[Value, Labels, float], order: Sequence[Label | None], dtype: str) -> Value:
        """Return what is added to scores: 0 where a key is seen."""
        seen, labels, low = mask
        seen = self.ordered(seen, labels, order)
        hidden, shown = constant(max(low, float(np.finfo("float32").min)), "float32"), constant(0.0, "float32")
        added = self.op("select_n", [seen, hidden, shown], seen.shape)
        return added if dtype == "float32" else self.op("convert_element_type", [added], seen.shape, dtype)

    def result(self, value: Value, order: Sequence[Label | None], labels: Labels) -> None:
        """Bring what attention makes into the order of the product's result, and give it that name."""
        shape = tuple(self._sizes[label] for label in labels if label is not None)
        named = [label for label in order if label is not None]
        value = self._reshaped(value, tuple(self._sizes[label] for label in named))
        value = self._transposed(value, tuple(named), [label for label in labels if label is not None])
        assert value.shape == shape, "a product has the dims of its operands"
        last = self._equation.output
        self.made.append(
            Equation("reshape", (value,), (last,), {"new_sizes": last.shape, "dimensions": None}, self._equation.scope)
        )

    def _reshaped(self, value: Value, shape: tuple[int, ...]) -> Value:
        if value.shape == shape:
            return value
        return self.op("reshape", [value], shape, new_sizes=shape, dimensions=None)

    def _transposed(self, value: Value, labels: Labels, order: Sequence[Label]) -> Value:
        """Return a value without dims of size 1, the others in the given order."""
        named = [label for label in labels if label is not None]
        value = self._reshaped(
            value, tuple(size for size, label in zip(value.shape, labels, strict=True) if label is not None)
        )
        perm = tuple(named.index(label) for label in order)
        if perm == tuple(range(len(perm))):
            return value
        return self.op("transpose", [value], tuple(value.shape[dim] for dim in perm), permutation=perm)
