"""The search of DisCo (Yi et al., TPDS 2022, algorithm 1) over fused ops and buckets of gradients, as published.

Start: no op fused, every gradient alone. Of the best state in the queue each of three moves is applied up to beta times
at random: fuse an op with a producer, let a reader compute again what it reads, merge two neighbouring buckets. A state
joins the queue if it takes no more than alpha times the best; the search ends after 1,000 states without improvement.
States are timed as there: one stream of compute, one of collectives in order. Its best state is what our simulator then
times.
"""

import heapq
import random
from dataclasses import dataclass, replace

from autopar.cost import CostModel
from autopar.cost.collectives import Collective
from autopar.cost.fusion import POINTWISE, Kernel
from autopar.fusion.buckets import BucketTimer, last_backward
from autopar.fusion.segment_kernels import Groups, SegmentKernels
from autopar.fusion_plan import BucketCuts, FusionPlan, OpGroup
from autopar.program.buckets import gradients
from autopar.program.records import Program, SegmentPhase
from autopar.schedule import SCHEDULES

UNCHANGED = 1000
_PHASES = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD)


@dataclass(frozen=True, slots=True)
class State:
    """Kernels by segment, and one past the last gradient of each bucket."""

    kernels: tuple[Groups, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Disco:
    """What the search found.

    Attributes:
        fusion: Its groups and buckets.
        states: States that were timed.
    """

    fusion: FusionPlan
    states: int


class _Streams:
    """One stream of compute and one of collectives: data parallelism on one axis, one microbatch."""

    def __init__(self, program: Program, costs: CostModel) -> None:
        timer = BucketTimer(program, costs)
        traffic = timer.traffic(timer.uncut)
        sim = timer.run(traffic)
        (stage,), issued = program.stages, traffic[0].issued
        self.key = issued[0].key
        assert all(own.key == self.key for own in issued), "gradients of one collective and axis"
        begin, _ = last_backward(timer, traffic, sim, 0, 0)
        listed = gradients(stage, program.table(), splits=SCHEDULES[program.schedule].splits)[self.key]
        self.begin, self.end = begin, sim.runs[0][-1].end
        self.ready = [own.ready for own in issued]
        self.sizes = [own.traffic.nbytes for own in issued]
        self.blocks = [own.block for own in listed]
        self.chain = stage.blocks
        self.segments = {
            (own.kind, own.phase): SegmentKernels(own, costs) for own in program.segments if own.phase in _PHASES
        }
        self.places = tuple(place for place, own in self.segments.items() if len(own.fusible) > 1 and own.pairs())
        self.stack = {place: self.segments[place].cost(self.segments[place].start) for place in self.places}
        self.costs, self.axis = costs, issued[0].traffic.axis

    def seconds(self, state: State) -> float:
        """Return when both streams are done."""
        changes = {
            place: self.segments[place].cost(kernels) - self.stack[place]
            for place, kernels in zip(self.places, state.kernels, strict=True)
        }
        forward = sum(changes.get((kind, SegmentPhase.FORWARD), 0.0) for kind in self.chain)
        done, late = [0.0] * len(self.chain), 0.0
        for block in reversed(range(len(self.chain))):
            late += changes.get((self.chain[block], SegmentPhase.BACKWARD), 0.0)
            done[block] = late
        end, first = 0.0, 0
        start = self.begin + forward
        for last in state.ends:
            ready = start + max(self.ready[number] + done[self.blocks[number]] for number in range(first, last))
            nbytes = sum(self.sizes[first:last])
            end = max(end, ready) + float(self.costs.collective_seconds(Collective(self.key[0]), nbytes, self.axis))
            first = last
        return max(end, self.end + forward + late)


def _fused(segment: SegmentKernels, groups: Groups, pair: tuple[str, str], *, again: bool) -> Groups:
    """Return kernels with those of two ops in one, or the first computed again by that of the second."""
    owner = {name: own for own in groups for name in own.ops}
    first, second = (owner.get(name) or Kernel((name,)) for name in pair)
    if first == second:
        return groups
    if again:
        if segment.computes[pair[0]].op.kind not in POINTWISE or pair[0] in second.again:
            return groups
        new, old = segment.kernel(second.ops, (*second.again, pair[0])), (second,)
    else:
        ops = (*first.ops, *second.ops)
        new, old = segment.kernel(ops, {*first.again, *second.again}.difference(ops)), (first, second)
    found = (*(own for own in groups if own not in old), new)
    return segment.ordered(found) if segment.is_lawful((new,), dict.fromkeys(found)) else groups


def search(
    program: Program, costs: CostModel, num_kinds: int, *, alpha: float = 1.05, beta: int = 10, seed: int = 0
) -> Disco:
    """Return what the search finds for a data-parallel program of one stage."""
    streams, draw = _Streams(program, costs), random.Random(seed)
    pairs = {place: streams.segments[place].pairs() for place in streams.places}

    def moved(state: State, move: str) -> State:
        if move == "merge":
            if len(state.ends) < 2:
                return state
            gone = draw.randrange(len(state.ends) - 1)
            return replace(state, ends=(*state.ends[:gone], *state.ends[gone + 1 :]))
        number = draw.randrange(len(streams.places))
        place, kernels = streams.places[number], list(state.kernels)
        kernels[number] = _fused(
            streams.segments[place], kernels[number], draw.choice(pairs[place]), again=move == "again"
        )
        return replace(state, kernels=tuple(kernels))

    best = State(((),) * len(streams.places), tuple(range(1, len(streams.sizes) + 1)))
    cost = streams.seconds(best)
    queue, count, unchanged, seen = [(cost, 0, best)], 1, 0, {best}
    while queue and unchanged < UNCHANGED:
        _, _, state = heapq.heappop(queue)
        for move in ("fuse", "again", "merge") if streams.places else ("merge",):
            other = state
            for _ in range(draw.randint(1, beta)):
                other = moved(other, move)
            unchanged += 1
            if other in seen:
                continue
            seen.add(other)
            seconds = streams.seconds(other)
            count += 1
            if seconds < cost:
                cost, best, unchanged = seconds, other, 0
            if seconds <= alpha * cost:
                heapq.heappush(queue, (seconds, count, other))
    return Disco(_plan(streams, best, num_kinds), count)


def _plan(streams: _Streams, state: State, num_kinds: int) -> FusionPlan:
    groups: list[OpGroup] = []
    for (kind, _), kernels in zip(streams.places, state.kernels, strict=True):
        variant, own = divmod(kind, num_kinds)
        groups += [OpGroup(own, kernel.ops, kernel.again, variant) for kernel in kernels]
    return replace(FusionPlan.of_cuts(((BucketCuts(*streams.key, state.ends),),)), groups=tuple(groups))
