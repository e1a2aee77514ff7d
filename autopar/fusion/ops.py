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
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost import CostModel
from autopar.cost.fusion import POINTWISE, Kernel
from autopar.fusion.segment_kernels import Groups, SegmentKernels
from autopar.fusion_plan import USUAL_ALPHA, USUAL_BETA, OpGroup
from autopar.program.records import Program, Segment, SegmentPhase

PHASES = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.WEIGHT)


@dataclass(frozen=True, slots=True)
class OpSearch:
    """How hard to look for kernels.

    Attributes:
        alpha: States up to so many times the cost of the best one are gone on from.
        beta: Most moves of a kind that are applied at once.
        unchanged: States without improvement after which the search of a segment ends.
        seed: Of the moves that are drawn.
        duplicates: Whether kernels may compute again what others make.
    """

    alpha: float = USUAL_ALPHA
    beta: int = USUAL_BETA
    unchanged: int = 1000
    seed: int = 0
    duplicates: bool = True


USUAL = OpSearch()

_Move = tuple[list[Kernel], list[Kernel]]
"""Kernels that go, and those that come in their place."""


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


class _State:
    """Kernels of several ops of a segment, changed move by move.

    Attributes:
        kernels: The kernels, in the order in which they were made.
        owner: Kernel by op.
    """

    __slots__ = ("kernels", "owner")

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = dict.fromkeys(kernels)
        self.owner = {name: own for own in kernels for name in own.ops}

    def kernel_of(self, name: str) -> Kernel:
        """Return the kernel of an op."""
        return self.owner.get(name) or Kernel((name,))

    def swap(self, old: Sequence[Kernel], new: Sequence[Kernel]) -> None:
        """Put kernels in the place of others."""
        for own in old:
            self.kernels.pop(own, None)
            for name in own.ops:
                self.owner.pop(name, None)
        for own in new:
            if len(own.ops) > 1 or own.again:
                self.kernels[own] = None
                self.owner |= dict.fromkeys(own.ops, own)


class _Climb:
    """The search of one segment."""

    def __init__(self, segment: SegmentKernels, search: OpSearch) -> None:
        self.segment, self.search = segment, search
        self.pairs = segment.pairs()
        self.draw = random.Random(search.seed)
        self.best = segment.start
        self.cost = segment.cost(self.best)

    def run(self) -> None:
        """Fuse what saves most while anything does, then search on at random."""
        state = _State(self.best)
        while self._fuse_best(state):
            pass
        self.best = self.segment.ordered(state.kernels)
        self.cost = self.segment.cost(self.best)
        self._backtrack()

    def _fuse_best(self, state: _State) -> bool:
        """Fuse the pair of kernels that saves most; False if none saves anything."""
        found: tuple[float, list[Kernel], list[Kernel]] | None = None
        for pair in self.pairs:
            move = self._fuse(state, pair)
            if move is None:
                continue
            old, new = move
            self.segment.evaluated += 1
            saved = sum(map(self.segment.gain, new)) - sum(map(self.segment.gain, old))
            if saved > max(0.0 if found is None else found[0], self.cost * 1e-12) and self._try(state, old, new):
                state.swap(new, old)
                found = saved, old, new
        if found is None:
            return False
        state.swap(found[1], found[2])
        return True

    def _try(self, state: _State, old: list[Kernel], new: list[Kernel]) -> bool:
        """Make a move if it is lawful; say whether it was made."""
        state.swap(old, new)
        if self.segment.is_lawful([own for own in new if own in state.kernels], state.kernels):
            return True
        state.swap(new, old)
        return False

    def _backtrack(self) -> None:
        queue: list[tuple[float, int, Groups]] = [(self.cost, 0, self.best)]
        seen, unchanged = {self.best}, 0
        while queue and unchanged < self.search.unchanged:
            _, _, groups = heapq.heappop(queue)
            for draw in (self._random_fuse, self._random_duplicate, self._random_split):
                state = _State(groups)
                for _ in range(self.draw.randint(1, self.search.beta)):
                    move = draw(state)
                    if move is not None:
                        self._try(state, *move)
                unchanged += 1
                reached = self.segment.ordered(state.kernels)
                if reached in seen:
                    continue
                seen.add(reached)
                cost = self.segment.cost(reached)
                if cost < self.cost * (1 - 1e-12):
                    self.cost, self.best, unchanged = cost, reached, 0
                if cost <= self.search.alpha * self.cost:
                    heapq.heappush(queue, (cost, len(seen), reached))
            if not queue and unchanged < self.search.unchanged:
                heapq.heappush(queue, (self.cost, len(seen), self.best))

    def _random_fuse(self, state: _State) -> _Move | None:
        return self._fuse(state, self.draw.choice(self.pairs)) if self.pairs else None

    def _fuse(self, state: _State, pair: tuple[str, str]) -> _Move | None:
        """Return the kernels of two ops in one; None if they are in one already."""
        first, second = map(state.kernel_of, pair)
        if first == second:
            return None
        ops = (*first.ops, *second.ops)
        again = {*first.again, *second.again}.difference(ops)
        return [first, second], [self.segment.kernel(ops, again)]

    def _random_duplicate(self, state: _State) -> _Move | None:
        """Let the kernel of a reader compute again what it reads."""
        if not self.pairs or not self.search.duplicates:
            return None
        maker, reader = self.draw.choice(self.pairs)
        own = state.kernel_of(reader)
        if self.segment.computes[maker].op.kind not in POINTWISE or maker in (*own.ops, *own.again):
            return None
        return [own], [self.segment.kernel(own.ops, (*own.again, maker))]

    def _random_split(self, state: _State) -> _Move | None:
        """Take an op out of its kernel, or a repeated one."""
        if not state.kernels:
            return None
        own = self.draw.choice(list(state.kernels))
        name = self.draw.choice((*own.ops, *own.again))
        ops, again = ([other for other in names if other != name] for names in (own.ops, own.again))
        return [own], [self.segment.kernel(ops, again)] if ops else []


def segment_fusion(segment: Segment, costs: CostModel, search: OpSearch = USUAL) -> float:
    """Return the seconds of the kernels that a search finds for one segment."""
    climb = _Climb(SegmentKernels(segment, costs), search)
    climb.run()
    return climb.cost


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
        work = SegmentKernels(segment, costs)
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
