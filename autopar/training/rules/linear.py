"""Gradients of products: one `Einsum` each, so that no transposed weight and no weight gradient per sample is stored.

y = x @ w with x [B, S, d] and w [d, f] has dx = Einsum("amn,kn->amk")(dy, w) and dw = Einsum("amk,amn->kn")(x, dy):
labels a, b, c ... for batch dims, m for rows, k for the contracted dim, n for columns.
"""

from collections.abc import Mapping, Sequence
from string import ascii_letters

import numpy as np

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


def _grads(
    t: Tape,
    op: Op,
    dy: str,
    labels: Sequence[str],
    target: str,
    factor: float = 1.0,
    constants: Sequence[tuple[str, str]] = (),
) -> list[str | None]:
    """Return the gradients of y = factor * (product of the labelled inputs and labelled constants)."""
    sizes: dict[str, int] = {}
    for name, label in (*zip(op.inputs, labels, strict=False), *constants):
        for letter, size in zip(label, t.shape(name), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    result: list[str | None] = []
    for index, label in enumerate(labels):
        if not t.needs(op, index):
            result.append(None)
            continue
        others = [(op.inputs[other], labels[other]) for other in range(len(labels)) if other != index]
        others += constants
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
    labels, diagonals = _without_repeats(t, op, labels, target)
    return _grads(t, op, grad_of(grads), labels, target, constants=diagonals)


def _without_repeats(t: Tape, op: Op, labels: Sequence[str], target: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Give each dim of an operand a label of its own: a repeated label is a product with the unit matrix."""
    unused = iter(letter for letter in ascii_letters if letter not in "".join(labels) + target)
    distinct: list[str] = []
    diagonals: list[tuple[str, str]] = []
    for name, label in zip(op.inputs, labels, strict=True):
        own = ""
        for letter, size in zip(label, t.shape(name), strict=True):
            if letter in own:
                other = next(unused)
                diagonals.append((t.numbers(np.eye(size), t.dtype(name)), letter + other))
                letter = other
            own += letter
        distinct.append(own)
    return distinct, diagonals


def _dft(t: Tape, op: Op, grads: Grads) -> Grads:
    """Return the transform of dy in the other direction: the adjoint of a DFT of N numbers is N times its inverse.

    The last dim holds real and imaginary parts. Of a transform of real numbers to frequencies from 0 to N / 2 the
    other frequencies have gradient 0.
    """
    x, dy = op.inputs[0], grad_of(grads)
    shape, rank = t.shape(x), len(t.shape(x))
    given = t.known(op, 2)
    axis = (int(given.item()) if given is not None else -2) % rank
    inverse, onesided = int_attr(op, "inverse", 0), int_attr(op, "onesided", 0)
    length = t.known(op, 1)
    if (length is not None and int(length.item()) != shape[axis]) or (inverse and onesided):
        raise unsupported(op, "it pads or cuts its input, or makes real numbers of one-sided frequencies")
    missing = shape[axis] - t.shape(dy)[axis]
    full = (*shape[:-1], 2)
    if missing:
        pads = [0] * (2 * rank)
        pads[rank + axis] = missing
        dy = t.emit("Pad", [dy, t.ints(pads)], full, t.dtype(dy))
    inputs = [dy, "", t.scalar(axis, "int64")]
    turned = t.emit("DFT", inputs, full, t.dtype(dy), inverse=1 - inverse, onesided=0)
    dx = t.times(turned, 1.0 / shape[axis] if inverse else float(shape[axis]))
    if shape[-1] == 1:
        dx = t.emit("Slice", [dx, t.ints((0,)), t.ints((1,)), t.ints((rank - 1,))], shape, t.dtype(dy))
    return (dx,)


def _packed_matmul(t: Tape, op: Op, grads: Grads) -> Grads:
    """A packed weight is not trained; what is, as with LoRA, comes before it."""
    if any(t.needs(op, index) for index in range(1, len(op.inputs))):
        raise unsupported(op, "its packed weight or scales are trained")
    x, attrs = op.inputs[0], {name: int_attr(op, name, 0) for name in ("bits", "block_size")}
    inputs = [grad_of(grads), *op.inputs[1:]]
    return (t.emit(f"{op.kind}Grad", inputs, t.shape(x), t.dtype(x), **attrs),)


LINEAR: Mapping[str, Rule] = {
    "DFT": _dft,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _matmul,
    **{f"autopar::MatMulNBits{zeros}": _packed_matmul for zeros in ("", "Packed", "Shifted")},
}
