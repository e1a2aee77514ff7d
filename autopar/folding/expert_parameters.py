"""Which parameters hold one matrix per expert, told by what ops do with them.

A mixture of experts chooses some of E experts for every token, by a TopK (or an ArgMax) over E scores, and multiplies
by matrices [E, in, out], all experts in one batched product. A parameter of three dims that is used otherwise (a kernel
of a convolution, a table of positions, one matrix per head) is no mixture.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from autopar.folding.fold import Folded
from autopar.folding.graph_facts import states_of
from autopar.ir.graph import Op, Phase, Value

_CHOICES = ("TopK", "ArgMax", "Hardmax")
"""Ops that choose among scores along a dim."""
_PRODUCTS = ("MatMul", "Einsum")
"""Ops that multiply by one matrix per expert."""


def experts_of(folded: Folded) -> frozenset[str]:
    """Return the parameters that hold one matrix per expert."""
    return _experts(folded.pattern)


@lru_cache(maxsize=32)
def _experts(folded: Folded) -> frozenset[str]:
    parameters, values = states_of(folded).parameters, folded.graph.values
    ops = [op for kind in folded.kinds for op in kind.ops if op.phase is Phase.FORWARD]
    numbers = set(_choices(ops, values))
    if not numbers:
        return frozenset()
    origin = _matrices(ops, values, {name for name in parameters if len(values[name].shape) == 3})
    used = {
        origin[name]
        for op in ops
        if op.kind in _PRODUCTS
        for name in op.inputs
        if name in origin and values[name].shape[0] in numbers
    }
    # Distinct blocks name the parameters of one instance each; those of the others are alike.
    alike = {item.producer for item in folded.parameters if item.value.name in used}
    return frozenset(name for name in parameters if folded.by_value[name] in alike)


def _choices(ops: Iterable[Op], values: Mapping[str, Value]) -> Iterator[int]:
    """Yield among how many scores ops choose; one is no choice."""
    for op in ops:
        if op.kind in _CHOICES:
            shape = values[op.inputs[0]].shape
            axis = op.attr("axis", 0 if op.kind == "ArgMax" else -1)
            if isinstance(axis, int) and shape and shape[axis] > 1:
                yield shape[axis]


def _matrices(ops: Sequence[Op], values: Mapping[str, Value], parameters: Iterable[str]) -> dict[str, str]:
    """Return the parameter that each value is: itself, or what is made of it alone and has its first dim."""
    found = {name: name for name in parameters}
    for op in ops:
        first = op.inputs[0] if op.inputs else ""
        made = op.outputs[0] if op.outputs else ""
        if (
            first in found
            and made in values
            and op.kind in ("Transpose", "Cast", "Identity", "Slice", "Split")
            and values[made].shape[:1] == values[first].shape[:1]
        ):
            found.update((name, found[first]) for name in op.outputs if name)
    return found
