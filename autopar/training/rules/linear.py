"""Gradients of products: one `Einsum` each, so that no transposed weight and no weight gradient per sample is stored.

y = x @ w with x [B, S, d] and w [d, f] has dx = Einsum("amn,kn->amk")(dy, w) and dw = Einsum("amk,amn->kn")(x, dy):
labels a, b, c ... for batch dims, m for rows, k for the contracted dim, n for columns.
"""

from collections.abc import Mapping, Sequence
from string import ascii_letters

from autopar.ir.graph import Op
from autopar.training.rules.base import Grads, Rule, float_attr, grad_of, int_attr
from autopar.training.tape import Shape, Tape, unsupported

_BATCH = "abcdefghijlopqrstuvwxyz"


def _contract(t: Tape, terms: Sequence[tuple[str, str]], target: str, shape: Shape, sizes: Mapping[str, int]) -> str:
    """Return the product of labelled tensors, summed over labels that are not in the target.

    Args:
        t: Where to write.
        terms: Tensors and the label of each of their dims. A dim of size 1 under a label of another size is broadcast.
        target: Label of each dim of the result.
        shape: Shape of the result; a dim of size 1 under a label of another size is summed over.
        sizes: Size of each label.
    """
    names, labels = [], []
    for name, label in terms:
        broadcast = [dim for dim, size in enumerate(t.shape(name)) if size != sizes[label[dim]]]
        names.append(t.squeeze(name, broadcast))
        labels.append("".join(letter for dim, letter in enumerate(label) if dim not in broadcast))
    present = set("".join(labels))
    kept = [dim for dim, letter in enumerate(target) if letter in present and shape[dim] == sizes[letter]]
    equation = f"{','.join(labels)}->{''.join(target[dim] for dim in kept)}"
    result = t.emit("Einsum", names, tuple(shape[dim] for dim in kept), t.dtype(names[0]), equation=equation)
    result = t.unsqueeze(result, [dim for dim in range(len(target)) if dim not in kept])
    return t.expand(result, shape)


def _grads(t: Tape, op: Op, dy: str, labels: Sequence[str], target: str, factor: float = 1.0) -> list[str | None]:
    """Return the gradients of y = factor * (product of the labelled inputs)."""
    sizes: dict[str, int] = {}
    for name, label in zip(op.inputs, labels, strict=False):
        for letter, size in zip(label, t.shape(name), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    result: list[str | None] = []
    for index, label in enumerate(labels):
        if not t.needs(op, index):
            result.append(None)
            continue
        others = [(op.inputs[other], labels[other]) for other in range(len(labels)) if other != index]
        # The gradient takes the place of the operand it replaces: (dy, w) for dx, (x, dy) for dw.
        terms = [(dy, target), *others] if index == 0 else [*others, (dy, target)]
        grad = _contract(t, terms, label, t.shape(op.inputs[index]), sizes)
        result.append(t.times(grad, factor))
    return result


def _matmul(t: Tape, op: Op, grads: Grads) -> Grads:
    rank_a, rank_b = (len(t.shape(name)) for name in op.inputs)
    batch = _BATCH[: max(rank_a, rank_b, 2) - 2]
    a = batch[len(batch) - rank_a + 2 :] + "mk" if rank_a > 1 else "k"
    b = batch[len(batch) - rank_b + 2 :] + "kn" if rank_b > 1 else "k"
    y = batch + ("m" if rank_a > 1 else "") + ("n" if rank_b > 1 else "")
    return _grads(t, op, grad_of(grads), [a, b], y)


def _gemm(t: Tape, op: Op, grads: Grads) -> Grads:
    dy = grad_of(grads)
    a = "km" if int_attr(op, "transA", 0) else "mk"
    b = "nk" if int_attr(op, "transB", 0) else "kn"
    result = _grads(t, op, dy, [a, b], "mn", float_attr(op, "alpha", 1.0))
    if t.needs(op, 2):
        result.append(t.times(t.reduce_to(dy, t.shape(op.inputs[2])), float_attr(op, "beta", 1.0)))
    return result


def _einsum(t: Tape, op: Op, grads: Grads) -> Grads:
    equation = str(op.attr("equation", "")).replace(" ", "")
    left, arrow, target = equation.partition("->")
    labels = left.split(",")
    if "..." in equation:
        unused = [letter for letter in ascii_letters if letter not in equation]
        free = max(
            len(t.shape(name)) - len(label) + 3 for name, label in zip(op.inputs, labels, strict=True) if "." in label
        )
        dots = "".join(unused[:free])
        labels = [
            label.replace("...", dots[free - (len(t.shape(name)) - len(label) + 3) :])
            for name, label in zip(op.inputs, labels, strict=True)
        ]
        target = target.replace("...", dots)
        if not arrow:
            target = dots
    if not arrow:
        joined = "".join(labels)
        target += "".join(sorted(letter for letter in set(joined) - set(target) if joined.count(letter) == 1))
    if any(len(set(label)) != len(label) for label in labels):
        raise unsupported(op, f"a label is repeated within one operand of {equation!r}")
    return _grads(t, op, grad_of(grads), labels, target)


LINEAR: Mapping[str, Rule] = {
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _matmul,
}
