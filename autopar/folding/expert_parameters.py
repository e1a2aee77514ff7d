"""Expert parameters: the parameters that hold one matrix per expert, recognised by the ops that read them.

A mixture of experts chooses some of E experts per token, by a TopK (or ArgMax) over E scores, and multiplies by
matrices [E, in, out] in one batched product (Shazeer et al. 2017; GShard, Lepikhin et al. 2020). A parameter of three
dims that is used otherwise (a convolution kernel, a position table, one matrix per head) is no expert parameter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from autopar.folding.fold import Folded
from autopar.folding.graph_facts import states_of
from autopar.ir.graph import Op, Phase, Value

_CHOICES = ("TopK", "ArgMax", "Hardmax")
"""Ops that choose among scores along a dim."""
_GROUPED = "autopar::GroupedMatMul"
"""Op that multiplies the rows of each expert by its matrix."""
_PRODUCTS = ("MatMul", "Einsum", _GROUPED)
"""Ops that multiply by one matrix per expert."""


def experts_of(folded: Folded) -> frozenset[str]:
    """Return the names of the expert parameters."""
    return _experts(folded.pattern)


@lru_cache(maxsize=32)
def _experts(folded: Folded) -> frozenset[str]:
    parameters, values = states_of(folded).parameters, folded.graph.values
    ops = [op for kind in folded.kinds for op in kind.ops if op.phase is Phase.FORWARD]
    numbers = set(_expert_counts(ops, values))
    if not numbers:
        return frozenset()
    origin = _source_parameters(ops, values, {name for name in parameters if len(values[name].shape) == 3})
    used = {
        origin[name]
        for op in ops
        if op.kind in _PRODUCTS
        for name in op.inputs
        if name in origin and values[name].shape[0] in numbers
    }
    # A kind names the parameters of one instance; the corresponding parameters of other instances are added.
    alike = {item.producer for item in folded.parameters if item.value.name in used}
    return frozenset(name for name in parameters if folded.by_value[name] in alike)


def _expert_counts(ops: Iterable[Op], values: Mapping[str, Value]) -> Iterator[int]:
    """Yield the number of scores each routing op chooses among; a single score is no choice."""
    for op in ops:
        if op.kind in _CHOICES:
            shape = values[op.inputs[0]].shape
            axis = op.attr("axis", 0 if op.kind == "ArgMax" else -1)
            if isinstance(axis, int) and shape and shape[axis] > 1:
                yield shape[axis]
        elif op.kind == _GROUPED:
            yield values[op.inputs[1]].shape[0]


def _source_parameters(ops: Sequence[Op], values: Mapping[str, Value], parameters: Iterable[str]) -> dict[str, str]:
    """Return the parameter behind each value: the parameter itself, or a value made of it with its first dim."""
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
