"""Kernels of several ops that a plan states, held against the ops of their block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from autopar.cost.fusion import POINTWISE, ROWWISE
from autopar.errors import PlanError
from autopar.fusion_plan import OpGroup
from autopar.ir.graph import Op
from autopar.program.records import segment_phase

FUSIBLE = POINTWISE | ROWWISE
"""Kinds that may share a kernel; one of `ROWWISE` at most."""

_HINT = "`autopar fuse PLAN --fusion joint -o DIR` finds groups"
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Stated:
    """What a plan states of the kernels of a block.

    Attributes:
        kernel: First op of the kernel by op; ops that are not named are kernels of their own.
        again: Ops that run again in a kernel, by its first op.
    """

    kernel: Mapping[str, str] = field(default_factory=dict)
    again: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


NOTHING = Stated()


def stated(groups: Sequence[OpGroup], ops: Sequence[Op]) -> Stated:
    """Return the kernels of a block.

    Args:
        groups: The groups of its kind.
        ops: Its ops in order.

    Raises:
        PlanError: If a group names an op that is not there or cannot be fused, or groups wait for each other.
    """
    if not groups:
        return NOTHING
    known, order = {op.name: op for op in ops}, {op.name: number for number, op in enumerate(ops)}
    kernel: dict[str, str] = {}
    again: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for name in (*group.ops, *group.again):
            if name not in known:
                raise _fault(group, f"there is no op {name!r}{_around(name, group, ops)}")
            if known[name].kind not in FUSIBLE:
                raise _fault(group, f"op {name!r} ({known[name].kind}) starts a kernel of its own")
        if not group.ops or len({segment_phase(known[name].phase) for name in (*group.ops, *group.again)}) > 1:
            raise _fault(group, "its ops are of several phases, or there are none")
        if sum(known[name].kind in ROWWISE for name in group.ops) > 1:
            raise _fault(group, "more than one of its ops reduces rows or columns")
        twice = next((name for name in group.ops if name in kernel), "")
        if twice or set(group.ops) & set(group.again):
            raise _fault(group, f"op {twice or min(set(group.ops) & set(group.again))!r} is in it twice, or in another")
        first = min(group.ops, key=order.__getitem__)
        kernel |= dict.fromkeys(group.ops, first)
        if group.again:
            again[first] = group.again
    circle = _circle(ops, kernel, again)
    if circle:
        shown, between = (
            ", ".join(repr(op.name) for op in [op for op in circle if (op.name in kernel) is fused][:_SHOWN])
            for fused in (True, False)
        )
        raise PlanError(
            f"kernels of blocks of kind {groups[0].kind} wait for each other: {shown}"
            + (f", with {between} between them" if between else ""),
            hint=_HINT,
        )
    return Stated(kernel, again)


def find_cycle(ops: Sequence[Op], kernel: Mapping[str, str], again: Mapping[str, Sequence[str]]) -> list[str]:
    """Return ops of kernels that wait for each other; none if every kernel can run once what it reads is there."""
    return [op.name for op in _circle(ops, kernel, again) if op.name in kernel]


def _circle(ops: Sequence[Op], kernel: Mapping[str, str], again: Mapping[str, Sequence[str]]) -> list[Op]:
    """Return the ops of one circle of kernels, and of ops between them, that wait for each other; none if none do."""
    units = [kernel.get(op.name, op.name) for op in ops]
    maker = {name: number for number, op in enumerate(ops) for name in op.outputs if name}
    order = {op.name: number for number, op in enumerate(ops)}
    repeats = {unit: {order[name] for name in names} for unit, names in again.items()}
    needs: dict[str, set[str]] = {unit: set() for unit in units}
    for unit, op in zip(units, ops, strict=True):
        for name in op.inputs:
            made = maker.get(name)
            if made is None or units[made] == unit:
                continue
            if made in repeats.get(unit, ()):  # the kernel makes it, from what its maker reads
                needs[unit] |= {units[maker[read]] for read in ops[made].inputs if read in maker}
            else:
                needs[unit].add(units[made])
        needs[unit].discard(unit)
    readers: dict[str, list[str]] = {}
    for unit, before in needs.items():
        for own in before:
            readers.setdefault(own, []).append(unit)
    left = {unit: len(before) for unit, before in needs.items()}
    ready = [unit for unit, count in left.items() if not count]
    done = 0
    while ready:
        unit = ready.pop()
        done += 1
        for reader in readers.get(unit, ()):
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    if done == len(left):
        return []
    path = [next(unit for unit in units if left[unit])]
    while path.index(path[-1]) == len(path) - 1:  # whoever is left waits for another one that is
        path.append(next(before for before in units if before in needs[path[-1]] and left[before]))
    circle = set(path[path.index(path[-1]) :])
    return [op for unit, op in zip(units, ops, strict=True) if unit in circle]


def _around(name: str, group: OpGroup, ops: Sequence[Op]) -> str:
    """Return the ops around the place of one that is not there: next to the others of its group, or named alike."""
    near = get_close_matches(name, [op.name for op in ops], n=_SHOWN // 2)
    at = next((number for number, op in enumerate(ops) if op.name in group.ops), None)
    if not near and at is not None:
        near = [op.name for op in ops[max(0, at - _SHOWN // 2) : at + _SHOWN // 2]]
    return f"; there are {', '.join(map(repr, near))}" if near else ""


def _fault(group: OpGroup, problem: str) -> PlanError:
    shown = ", ".join(group.ops[:_SHOWN]) + (", ..." if len(group.ops) > _SHOWN else "")
    return PlanError(f"the kernel of {shown} in blocks of kind {group.kind}: {problem}", hint=_HINT)
