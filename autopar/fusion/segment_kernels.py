"""The kernels of a segment: which may be, what they cost, and whether one waits for another that waits for it.

A search asks for the same kernels again and again. So a table keeps, for each kernel, how many seconds it saves against
its ops alone, whether it is allowed by itself, and which ops it waits for. A state of the search is a set of kernels; a
move changes one or two of them, and only these are looked at again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum, prod

from autopar.cost import ALONE, CostModel, Fused
from autopar.cost.fused_groups import GroupTensor, group_of
from autopar.cost.fusion import POINTWISE, ROWWISE, Kernel, Work
from autopar.program.records import Compute, Segment
from autopar.simulate.layout import compute_seconds, ranks_of
from autopar.simulate.learned import typed_values

Groups = tuple[Kernel, ...]
"""Kernels of more than one op, in order of their first ops."""


def is_fusible(kind: str) -> bool:
    """Whether an op of a kind may share a kernel."""
    return kind in POINTWISE or kind in ROWWISE


@dataclass(slots=True)
class SegmentKernels:
    """The kernels of a segment.

    Attributes:
        segment: The segment.
        costs: What ops cost.
        evaluated: States that were priced.
        computes: Its ops by name.
        work: Those that may start kernels.
        leaving: Values that leave it.
        saved: Values that are kept for the backward.
        fusible: Names of the ops that may share a kernel, in order.
        alone: Seconds of all of these as kernels of their own.
    """

    segment: Segment
    costs: CostModel
    evaluated: int = 0
    computes: dict[str, Compute] = field(init=False)
    work: Work = field(init=False)
    leaving: frozenset[str] = field(init=False)
    saved: frozenset[str] = field(init=False)
    fusible: tuple[str, ...] = field(init=False)
    alone: float = field(init=False)
    _op_prices: dict[tuple[str, Fused], float] = field(default_factory=dict)
    _seconds: dict[Kernel, float] = field(default_factory=dict)
    _gains: dict[Kernel, float] = field(default_factory=dict)
    _allowed: dict[Kernel, bool] = field(default_factory=dict)
    _masks: dict[Kernel, tuple[int, int]] = field(default_factory=dict)
    _position: dict[str, int] = field(init=False)
    _typed: Mapping[str, GroupTensor] = field(init=False)
    _needs: list[int] = field(init=False)
    _before: list[int] = field(init=False)
    _elements: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stored = (store.value for store in self.segment.stores)
        out = (*self.segment.outputs, *self.segment.exports, *stored)
        self.leaving = frozenset(operand.value for operand in out)
        self.saved = frozenset(operand.value for operand in self.segment.saved)
        self.computes = {item.op.name: item for item in self.segment.instructions if isinstance(item, Compute)}
        listed = list(self.computes.values())
        self.work = Work.of([own.op for own in listed], ranks_of(listed), self.costs.stack.fusion)
        self.fusible = tuple(op.name for op in self.work.kernels if is_fusible(op.kind))
        self._typed = typed_values(listed)
        self._reach(listed)
        self.alone = fsum(self.seconds(Kernel((name,))) for name in self.fusible)

    def _reach(self, listed: Sequence[Compute]) -> None:
        """Note which ops each op reads from, and which are before it, as bits by position."""
        self._position = {own.op.name: number for number, own in enumerate(listed)}
        maker = {name: number for number, own in enumerate(listed) for name in own.op.outputs if name}
        self._needs, self._before = [], []
        for own in listed:
            needs = before = 0
            for name in own.op.inputs:
                if name in maker:
                    needs |= 1 << maker[name]
                    before |= 1 << maker[name] | self._before[maker[name]]
            self._needs.append(needs)
            self._before.append(before)

    @property
    def start(self) -> Groups:
        """The kernels of the stack."""
        listed = list(self.computes.values())
        found = self.costs.fuse([own.op for own in listed], ranks_of(listed))
        groups: dict[str, list[str]] = {}
        for name, fused in found.items():
            if name not in self.work.fixed and fused.kernel:
                groups.setdefault(fused.kernel, [fused.kernel]).append(name)
        return self.ordered(self.kernel(names) for names in groups.values())

    def kernel(self, ops: Iterable[str], again: Iterable[str] = ()) -> Kernel:
        """Return a kernel with its ops in order."""
        place = self.work.numbers.__getitem__
        return Kernel(tuple(sorted(ops, key=place)), tuple(sorted(again, key=place)))

    def ordered(self, kernels: Iterable[Kernel]) -> Groups:
        """Return kernels of several ops in order of their first ops."""
        number = self.work.numbers
        several = (own for own in kernels if len(own.ops) > 1 or own.again)
        return tuple(sorted(several, key=lambda own: number[own.ops[0]]))

    def cost(self, kernels: Iterable[Kernel]) -> float:
        """Return the seconds of all kernels of a state: those of ops alone less what kernels of several save."""
        self.evaluated += 1
        return self.alone - fsum(map(self.gain, kernels))

    def gain(self, kernel: Kernel) -> float:
        """Return what a kernel saves against its ops as kernels of their own."""
        if kernel not in self._gains:
            apart = fsum(self.seconds(Kernel((name,))) for name in kernel.ops)
            self._gains[kernel] = apart - self.seconds(kernel)
        return self._gains[kernel]

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel: learned ones where they hold, else by the formulas of its ops."""
        if kernel not in self._seconds:
            self._seconds[kernel] = self._learned_seconds(kernel) or self._formula_seconds(kernel)
        return self._seconds[kernel]

    def _learned_seconds(self, kernel: Kernel) -> float | None:
        if self.costs.learned is None:
            return None
        group = group_of(kernel, self.work, self._typed, self.leaving | self.saved)
        return None if group is None else self.costs.learned.seconds([group])[0]

    def _formula_seconds(self, kernel: Kernel) -> float:
        fused = self.work.fused(kernel)
        seconds = [self._op_seconds(name, fused.get(name, ALONE)) for name in kernel.ops]
        seconds += [self._op_seconds(name, own) for name, own in self.work.repeated(kernel).items()]
        return fsum(seconds)

    def _op_seconds(self, name: str, fused: Fused) -> float:
        if (name, fused) not in self._op_prices:
            compute = self.computes[name]
            first = next((own for own in compute.inputs if own is not None), None)
            host = self.costs.host_seconds(compute.op, 0 if first is None else len(first.shape), fused)
            self._op_prices[name, fused] = max(compute_seconds(compute, self.costs, fused), host)
        return self._op_prices[name, fused]

    def is_lawful(self, changed: Iterable[Kernel], kernels: Mapping[Kernel, None]) -> bool:
        """Whether changed kernels of a state may be, and wait for none that waits for them.

        Args:
            changed: Kernels of the state that the last move made.
            kernels: All of its kernels of several ops.
        """
        return all(self.is_allowed(own) and not self._waits_for_itself(own, kernels) for own in changed)

    def are_lawful(self, groups: Groups) -> bool:
        """Whether kernels may be side by side."""
        return self.is_lawful(groups, dict.fromkeys(groups))

    def _waits_for_itself(self, kernel: Kernel, kernels: Mapping[Kernel, None]) -> bool:
        """Whether what a kernel needs is made by kernels that need what it makes.

        An op before a kernel counts as needed even if the only reader of it repeats what it would read.
        """
        own, reached = self._mask(kernel)
        left = [self._mask(other) for other in kernels if other != kernel]
        while True:
            if reached & own:
                return True
            met = [mask for mask in left if mask[0] & reached]
            if not met:
                return False
            left = [mask for mask in left if not mask[0] & reached]
            for _, needed in met:
                reached |= needed

    def _mask(self, kernel: Kernel) -> tuple[int, int]:
        """Return the ops of a kernel, and all that are before what it reads, as bits."""
        if kernel not in self._masks:
            inside = again = needed = 0
            for name in kernel.ops:
                inside |= 1 << self._position[name]
            for name in kernel.again:
                again |= 1 << self._position[name]
            reads = 0
            for name in kernel.ops:
                reads |= self._needs[self._position[name]]
            for name in kernel.again:
                if reads >> self._position[name] & 1:
                    needed |= self._needs[self._position[name]]
            needed |= reads & ~again
            needed &= ~inside
            before, rest = needed, needed
            while rest:
                low = rest & -rest
                before |= self._before[low.bit_length() - 1]
                rest ^= low
            self._masks[kernel] = inside, before
        return self._masks[kernel]

    def is_allowed(self, kernel: Kernel) -> bool:
        """Whether a kernel runs over equally many elements, reduces once at most, and keeps inside what it may."""
        if kernel not in self._allowed:
            kinds = [self.computes[name].op.kind for name in kernel.ops]
            single = sum(kind in ROWWISE for kind in kinds) <= 1
            self._allowed[kernel] = single and self._is_even(kernel) and self._is_inside(kernel)
        return self._allowed[kernel]

    def _is_inside(self, group: Kernel) -> bool:
        """Whether what a kernel need not write stays in it: nothing but its ops reads it, at the placement it has.

        Values that are saved may be made again in the backward from what element-wise ops read, as those of chains.
        """
        made = {out for name in (*group.ops, *group.again) for out in self.computes[name].op.outputs if out}
        for name in group.ops:
            compute = self.computes[name]
            for read, operand in zip(compute.op.inputs, compute.inputs, strict=True):
                if self.work.source(read) in made and operand is not None and operand.value != read:
                    return False
        reduces = any(self.computes[name].op.kind in ROWWISE for name in group.ops)
        leaving = self.leaving | self.saved if reduces else self.leaving
        members = {self.work.numbers[name] for name in group.ops}
        return not any(
            out in leaving and self.work.readers.get(out) and members.issuperset(self.work.readers[out])
            for name in group.ops
            for out in self.computes[name].op.outputs
        )

    def _is_even(self, group: Kernel) -> bool:
        """Whether the ops of a kernel go over as many elements as its largest one, or as what it reduces to."""
        sizes = {name: self._sizes(name) for name in (*group.ops, *group.again)}
        most = max(max(own) for own in sizes.values())
        reduced = {
            size for name in group.ops if self.computes[name].op.kind in ROWWISE for size in self._made(name)
        } | {most}
        return all(
            max(own) == most if self.computes[name].op.kind in ROWWISE else max(own) in reduced
            for name, own in sizes.items()
        )

    def _sizes(self, name: str) -> tuple[int, ...]:
        if name not in self._elements:
            compute = self.computes[name]
            values = [*compute.inputs, *compute.outputs] if compute.op.kind in ROWWISE else compute.outputs
            self._elements[name] = tuple(prod(own.shape) for own in values if own is not None) or (0,)
        return self._elements[name]

    def _made(self, name: str) -> list[int]:
        return [prod(own.shape) for own in self.computes[name].outputs if own is not None]

    def pairs(self) -> list[tuple[str, str]]:
        """Return ops that could share a kernel: a producer and its reader, or two readers of one value."""
        found: dict[tuple[str, str], None] = {}
        maker = {out: op.name for op in self.work.kernels for out in op.outputs if out}
        for value, readers in self.work.readers.items():
            names = [self.work.kernels[number].name for number in readers]
            names = [name for name in dict.fromkeys(names) if is_fusible(self.computes[name].op.kind)]
            own = maker.get(value)
            if own is not None and is_fusible(self.computes[own].op.kind):
                found |= dict.fromkeys((own, name) for name in names)
            found |= dict.fromkeys(pairwise(names))
        return list(found)
