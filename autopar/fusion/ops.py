"""Search for the ops that run in one kernel, segment by segment.

A kernel of several ops reads once what enters it and writes what others read, and is launched once; the analytic cost
of `autopar.cost` says what that takes. Moves: fuse the kernels of a value's producer and of its reader, or of two
readers of one value; let a kernel compute a value again that another one makes (duplicate); take an op out (split).

Start: the kernels of the stack. Then every fusion that saves most, until none saves anything; then the backtracking
search of DisCo (Yi et al., TPDS 2022, algorithm 1): of the best state in the queue each kind of move is applied up to
beta times at random, and a state joins the queue if it costs no more than alpha times the best.

The gradients of a step are there when the backward of their block ends, so that the order of kernels inside a block
moves no gradient; what a segment saves makes all gradients after it earlier. So ops are fused for the least seconds of
their segment, and gradients are cut after that.
"""

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum

from autopar.cost import ALONE, CostModel, Fused
from autopar.cost.fusion import POINTWISE, ROWWISE, Kernel, Work
from autopar.fusion_plan import USUAL_ALPHA, USUAL_BETA, OpGroup
from autopar.program.op_groups import find_cycle
from autopar.program.records import Compute, Program, Segment, SegmentPhase
from autopar.simulate.layout import compute_seconds, ranks_of

PHASES = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.WEIGHT)

Groups = tuple[Kernel, ...]
"""Kernels of more than one op, in order of their first ops."""


@dataclass(frozen=True, slots=True)
class OpSearch:
    """How hard to look for kernels.

    Attributes:
        alpha: States up to so many times the cost of the best one are gone on from.
        beta: Most moves of a kind that are applied at once.
        unchanged: States without improvement after which the search of a segment ends.
        seed: Of the moves that are drawn.
    """

    alpha: float = USUAL_ALPHA
    beta: int = USUAL_BETA
    unchanged: int = 200
    seed: int = 0


USUAL = OpSearch()


@dataclass(frozen=True, slots=True)
class OpFusion:
    """Kernels found for a program.

    Attributes:
        groups: Groups of ops, by variant and kind.
        before: Kernel seconds of all segments that were searched, by the rule of the stack.
        after: The same with the groups.
        evaluated: States that were priced.
    """

    groups: tuple[OpGroup, ...]
    before: float
    after: float
    evaluated: int


@dataclass(slots=True)
class _Segment:
    """A segment whose ops are fused.

    Attributes:
        segment: The segment.
        costs: What ops cost.
        known: Seconds of kernels that were priced.
        evaluated: States that were priced.
        computes: Its ops by name.
        work: Those that may start kernels.
        leaving: Values that leave it.
        saved: Values that are kept for the backward.
    """

    segment: Segment
    costs: CostModel
    known: dict[Kernel, float] = field(default_factory=dict)
    evaluated: int = 0
    computes: dict[str, Compute] = field(init=False)
    work: Work = field(init=False)
    leaving: frozenset[str] = field(init=False)
    saved: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        stored = (store.value for store in self.segment.stores)
        out = (*self.segment.outputs, *self.segment.exports, *stored)
        self.leaving = frozenset(operand.value for operand in out)
        self.saved = frozenset(operand.value for operand in self.segment.saved)
        self.computes = {item.op.name: item for item in self.segment.instructions if isinstance(item, Compute)}
        listed = list(self.computes.values())
        self.work = Work.of([own.op for own in listed], ranks_of(listed), self.costs.stack.fusion)

    @property
    def start(self) -> Groups:
        """The kernels of the stack."""
        listed = list(self.computes.values())
        found = self.costs.fuse([own.op for own in listed], ranks_of(listed))
        groups: dict[str, list[str]] = {}
        for name, fused in found.items():
            if name not in self.work.fixed and fused.kernel:
                groups.setdefault(fused.kernel, [fused.kernel]).append(name)
        return self.ordered(Kernel(tuple(names)) for names in groups.values())

    def ordered(self, kernels: Iterable[Kernel]) -> Groups:
        """Return kernels in order of their first ops."""
        number = self.work.numbers
        sorted_ops = (
            Kernel(tuple(sorted(own.ops, key=number.__getitem__)), tuple(sorted(own.again, key=number.__getitem__)))
            for own in kernels
            if len(own.ops) > 1 or own.again
        )
        return tuple(sorted(sorted_ops, key=lambda own: number[own.ops[0]]))

    def seconds(self, groups: Groups) -> float:
        """Return the seconds of all kernels that may be fused."""
        self.evaluated += 1
        inside = {name for group in groups for name in group.ops}
        alone = (Kernel((op.name,)) for op in self.work.kernels if op.name not in inside and is_fusible(op.kind))
        return fsum(self._kernel_seconds(own) for own in (*groups, *alone))

    def _kernel_seconds(self, kernel: Kernel) -> float:
        if kernel not in self.known:
            fused = self.work.fused(kernel)
            seconds = [self._op_seconds(name, fused.get(name, ALONE)) for name in kernel.ops]
            seconds += [self._op_seconds(name, own) for name, own in self.work.repeated(kernel).items()]
            self.known[kernel] = fsum(seconds)
        return self.known[kernel]

    def _op_seconds(self, name: str, fused: Fused) -> float:
        compute = self.computes[name]
        first = next((own for own in compute.inputs if own is not None), None)
        host = self.costs.host_seconds(compute.op, 0 if first is None else len(first.shape), fused)
        return max(compute_seconds(compute, self.costs, fused), host)

    def is_lawful(self, groups: Groups) -> bool:
        """Whether kernels wait for none of each other, run over the same elements and reduce once at most."""
        for group in groups:
            kinds = [self.computes[name].op.kind for name in group.ops]
            if sum(kind in ROWWISE for kind in kinds) > 1 or not self._is_even(group) or not self._is_inside(group):
                return False
        kernel = {name: group.ops[0] for group in groups for name in group.ops}
        again = {group.ops[0]: group.again for group in groups if group.again}
        return not find_cycle([own.op for own in self.computes.values()], kernel, again)

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
        sizes = {name: self._elements(name) for name in (*group.ops, *group.again)}
        most = max(max(own) for own in sizes.values())
        reduced = {
            size for name in group.ops if self.computes[name].op.kind in ROWWISE for size in self._made(name)
        } | {most}
        return all(
            max(own) == most if self.computes[name].op.kind in ROWWISE else max(own) in reduced
            for name, own in sizes.items()
        )

    def _elements(self, name: str) -> list[int]:
        compute = self.computes[name]
        values = [*compute.inputs, *compute.outputs] if compute.op.kind in ROWWISE else compute.outputs
        return [_count(own.shape) for own in values if own is not None] or [0]

    def _made(self, name: str) -> list[int]:
        return [_count(own.shape) for own in self.computes[name].outputs if own is not None]

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


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def is_fusible(kind: str) -> bool:
    """Whether an op of a kind may share a kernel."""
    return kind in POINTWISE or kind in ROWWISE


class _Climb:
    """The search of one segment."""

    def __init__(self, segment: _Segment, search: OpSearch) -> None:
        self.segment, self.search = segment, search
        self.pairs = segment.pairs()
        self.draw = random.Random(search.seed)
        self.best = segment.start
        self.cost = segment.seconds(self.best)

    def run(self) -> None:
        """Fuse what saves most while anything does, then search on at random."""
        while True:
            tried = [(self.segment.seconds(own), own) for own in map(self._fuse_in_best, self.pairs) if own is not None]
            cost, groups = min(tried, key=lambda item: item[0], default=(self.cost, self.best))
            if cost >= self.cost * (1 - 1e-12):
                break
            self.cost, self.best = cost, groups
        self._backtrack()

    def _fuse_in_best(self, pair: tuple[str, str]) -> Groups | None:
        return self._lawful(_fuse(self.best, pair))

    def _lawful(self, kernels: Iterable[Kernel] | None) -> Groups | None:
        if kernels is None:
            return None
        groups = self.segment.ordered(kernels)
        return groups if self.segment.is_lawful(groups) else None

    def _backtrack(self) -> None:
        queue: list[tuple[float, int, Groups]] = [(self.cost, 0, self.best)]
        seen, unchanged = {self.best}, 0
        while queue and unchanged < self.search.unchanged:
            _, _, state = heapq.heappop(queue)
            for move in (self._random_fuse, self._random_duplicate, self._random_split):
                groups = state
                for _ in range(self.draw.randint(1, self.search.beta)):
                    groups = self._lawful(move(groups)) or groups
                unchanged += 1
                if groups in seen:
                    continue
                seen.add(groups)
                cost = self.segment.seconds(groups)
                if cost < self.cost * (1 - 1e-12):
                    self.cost, self.best, unchanged = cost, groups, 0
                if cost <= self.search.alpha * self.cost:
                    heapq.heappush(queue, (cost, len(seen), groups))
            if not queue and unchanged < self.search.unchanged:
                heapq.heappush(queue, (self.cost, len(seen), self.best))

    def _random_fuse(self, groups: Groups) -> list[Kernel] | None:
        return _fuse(groups, self.draw.choice(self.pairs)) if self.pairs else None

    def _random_duplicate(self, groups: Groups) -> list[Kernel] | None:
        """Let the kernel of a reader compute again what it reads."""
        if not self.pairs:
            return None
        maker, reader = self.draw.choice(self.pairs)
        own = _kernel_of(groups, reader)
        if self.segment.computes[maker].op.kind not in POINTWISE or maker in (*own.ops, *own.again):
            return None
        rest = [group for group in groups if group != own]
        return [*rest, Kernel(own.ops, (*own.again, maker))]

    def _random_split(self, groups: Groups) -> list[Kernel] | None:
        """Take an op out of its kernel, or a repeated one."""
        if not groups:
            return None
        own = self.draw.choice(groups)
        name = self.draw.choice((*own.ops, *own.again))
        ops, again = (tuple(other for other in names if other != name) for names in (own.ops, own.again))
        rest = [group for group in groups if group != own]
        return [*rest, Kernel(ops, again)] if ops else rest


def _kernel_of(groups: Groups, name: str) -> Kernel:
    return next((group for group in groups if name in group.ops), Kernel((name,)))


def _fuse(groups: Groups, pair: tuple[str, str]) -> list[Kernel] | None:
    """Return kernels with those of two ops in one; None if they are in one already."""
    first, second = (_kernel_of(groups, name) for name in pair)
    if first == second:
        return None
    ops = (*first.ops, *second.ops)
    again = tuple(name for name in dict.fromkeys((*first.again, *second.again)) if name not in ops)
    return [*(group for group in groups if group not in (first, second)), Kernel(ops, again)]


def fuse_ops(program: Program, costs: CostModel, num_kinds: int, search: OpSearch = USUAL) -> OpFusion:
    """Return kernels of several ops for the blocks of a program, where they take less time than the stack's.

    Args:
        program: A lawful program that states no kernels.
        costs: What its ops cost.
        num_kinds: Kinds of blocks of the graph, of which those of a program are made (`autopar.program.kinds`).
        search: How hard to look.
    """
    groups: list[OpGroup] = []
    before, after, evaluated = 0.0, 0.0, 0
    better: set[int] = set()
    found: dict[int, list[Kernel]] = {}
    for segment in program.segments:
        if segment.phase not in PHASES:
            continue
        work = _Segment(segment, costs)
        climb = _Climb(work, search)
        own = climb.cost
        climb.run()
        before, after, evaluated = before + own, after + climb.cost, evaluated + work.evaluated
        found.setdefault(segment.kind, []).extend(climb.best)
        if climb.cost < own:
            better.add(segment.kind)
    for kind in sorted(better):
        variant, graph_kind = divmod(kind, num_kinds)
        groups += [OpGroup(graph_kind, kernel.ops, kernel.again, variant) for kernel in found[kind]]
    return OpFusion(tuple(groups), before, after, evaluated)
