"""Partial candidates: inputs that are terms still to be put together.

An op that is linear in an input maps partial sums to partial sums, a monotone one partial maxima to partial maxima, a
logarithm partial products to partial sums. Which it is shows when the input is split into random terms.
"""

from collections.abc import Iterator
from itertools import combinations

from autopar.discover.sketch import Sketch
from autopar.sharding import REDUCTIONS, Partial, Placement, Replicate

_MAX_PAIRED_SUMS, _MAX_PAIRED = 6, 3
"""Up to this many inputs all pairs are tried, as terms of sums and of others; above, single ones and all."""
_MAX_TRIED = 6
"""Up to this many inputs terms of others than sums are tried at all."""


def float_inputs(sketch: Sketch) -> list[int]:
    """Return the inputs that could be terms: tensors of floats."""
    return [
        i
        for i, operand in enumerate(sketch.inputs)
        if operand is not None and operand.is_float and operand.content is None
    ]


def _integer_inputs(sketch: Sketch) -> list[int]:
    """Return the tensors of signed integers."""
    return [
        i
        for i, operand in enumerate(sketch.inputs)
        if operand is not None and operand.dtype.startswith("int") and operand.content is None
    ]


def term_sets(sketch: Sketch) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Iterate over (reduction, inputs that could be terms together): one, two, or all; integers if there are no floats.

    Sums come first. A replicated tensor is a term of a mean, a maximum or a minimum as it is, so for those a larger set
    says all that its parts say, and comes before them.
    """
    floats = float_inputs(sketch)
    inputs = floats or _integer_inputs(sketch)
    for reduce in REDUCTIONS if floats else INTEGER_REDUCTIONS:
        if reduce != "sum" and len(inputs) > _MAX_TRIED:
            continue
        sets: list[tuple[int, ...]] = [(i,) for i in inputs]
        if len(inputs) <= (_MAX_PAIRED_SUMS if reduce == "sum" else _MAX_PAIRED):
            sets += combinations(inputs, 2)
        if len(inputs) > 2:
            sets.append(tuple(inputs))
        for chosen in reversed(sets) if reduce in IDEMPOTENT else sets:
            yield reduce, chosen


INTEGER_REDUCTIONS = ("sum", "max", "min")
"""Reductions of integers."""
IDEMPOTENT = ("mean", "max", "min")
"""Reductions that give back what all terms are."""


def as_terms(sketch: Sketch, reduce: str, chosen: tuple[int, ...]) -> tuple[Placement, ...]:
    """Return the placements in which these inputs are terms and the others replicated."""
    return tuple(Partial(reduce) if i in chosen else Replicate() for i in range(len(sketch.inputs)))
