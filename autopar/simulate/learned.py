"""Kernels of a segment priced by a learned cost, where a cost model has one that holds for its device."""

from collections.abc import Mapping, Sequence
from math import prod

from autopar.cost import Fused, Kernel
from autopar.cost.fused_groups import GroupTensor, group_of
from autopar.cost.fusion import POINTWISE, ROWWISE, Work
from autopar.cost.learned_kernels import LearnedKernels
from autopar.program.records import Compute, Segment

_DTYPES = {1: "bool", 2: "bfloat16", 4: "float32", 8: "int64"}
"""Element types by their bytes; groups of other ones than float32 and bool are outside of what was trained on."""


def typed_values(computes: Sequence[Compute]) -> dict[str, GroupTensor]:
    """Return the values of some ops with their local shapes, by the name the ops know them by."""
    found = {}
    for compute in computes:
        names = (*compute.op.inputs, *compute.op.outputs)
        for name, operand in zip(names, (*compute.inputs, *compute.outputs), strict=True):
            if operand is not None:
                each = round(operand.bytes / max(1, prod(operand.shape)))
                found[name] = GroupTensor(operand.shape, _DTYPES.get(each, "float64"))
    return found


def learned_seconds(
    segment: Segment,
    fused: Mapping[str, Fused],
    stated: Sequence[Kernel],
    ranks: Mapping[str, int],
    kernels: LearnedKernels,
) -> dict[str, float]:
    """Return seconds of ops whose kernels have learned costs: those of the kernel for its first op, 0 for others.

    Args:
        segment: The segment.
        fused: What is left to each of its ops.
        stated: Kernels that the plan states.
        ranks: Number of dims of values by name.
        kernels: The learned costs.
    """
    computes = [item for item in segment.instructions if isinstance(item, Compute)]
    work = Work.of([own.op for own in computes], ranks, "chains")
    again = {own.ops[0]: own.again for own in stated}
    units: dict[str, list[str]] = {}
    for op in work.kernels:
        if op.kind in POINTWISE or op.kind in ROWWISE:
            label = fused[op.name].kernel if op.name in fused else ""
            units.setdefault(label or op.name, []).append(op.name)
    typed = typed_values(computes)
    stored = (store.value for store in segment.stores)
    leaving = {own.value for own in (*segment.outputs, *segment.exports, *segment.saved, *stored)}
    groups = {
        first: group
        for first, names in units.items()
        if first == names[0]
        and (group := group_of(Kernel(tuple(names), again.get(first, ())), work, typed, frozenset(leaving)))
    }
    found: dict[str, float] = {}
    for first, seconds in zip(groups, kernels.seconds(groups.values()), strict=True):
        if seconds is not None:
            found |= dict.fromkeys(units[first], 0.0)
            found[first] = seconds
    return found
