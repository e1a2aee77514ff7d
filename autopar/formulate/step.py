"""From the seconds of blocks to the seconds of a step, and to the problem a solver sees.

With f_s, b_s the forward and backward seconds of stage s for one microbatch (full recompute adds f_s to b_s, selective
recompute what of it runs again), g_s its gradient traffic per microbatch, a_s its gathers of parameters, r_s its
gradient reduction per step, u_s its update, h the seconds of one hop between stages, p stages and m microbatches; e the
share of traffic that overlaps nothing and d the slowdown of what does:

    t_s    = max(f_s + b_s + e g_s, g_s + a_s) + (d - 1) min(f_s + b_s, (1 - e) g_s)
    pace   = max_{s<=q} (sum_{s<=i<=q} t_i + 2 (q - s) h) / (q - s + 1)   with 1F1B; else max_s t_s
    flow   = sum_s t_s + (m - 1) pace + 2 (p - 1) h
    e_s    = max_j (sum_{i<=j} (1 - e) r_i - sum_{i<j} b_i)   over the blocks i of stage s
    left_s = max(0, (1 - e) r_s + g_s - b_s, e_s)     what the last backward does not hide
    slow_s = (d - 1) ((1 - e) r_s - max(0, e_s))      what hiding the rest costs it
    tail_s = left_s + e r_s + u_s                     and the update
    step   = max_s (flow + sum_{q>=s} slow_q - sum_{q<s} b_q - s h + tail_s) + fixed

f and b of a block are those of `autopar.cost.overlap`. Traffic runs beside compute, one thing at a time. Under 1F1B a
stage waits for its oldest microbatch to come back before it takes a new one: between stages s and q there are
q - s + 1 microbatches at a time, each of which passes all of these stages and the hops between them there and back.
The backward ends with the first block, and what is reduced per step starts when the backward of its block ends: e_s is
what the first blocks leave no time for.
Stage 0 ends last; a stage s > 0 ends its last backward sum_{q<s} (b_q + h) earlier. Inference has only f. The event
simulator computes the same quantities from the lowered program by events; the formula is what the solver minimises and
its error against the simulator is reported.

Lower bound on `step` over all splits into stages: max_s t_s >= mean_s t_s, and tail_0 >= max(0, r_0 - b_0) when there
is one stage; what hides behind compute counts as if there were always enough of it. All are linear in the prices of
blocks, which makes the best choice of strategies a `Problem`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost import Overlap, op_flops
from autopar.cost.overlap import HIDING, LEAST_GATHER, LEAST_WAIT
from autopar.formulate.fold import Folded
from autopar.formulate.memory import KEPT, RESIDENT, FloatArray, RangeBytes
from autopar.formulate.options import whole_shapes
from autopar.formulate.tables import AGAIN, Decision, Memory, Slot, Tables
from autopar.ir.graph import Phase
from autopar.problem import Limit, Problem, Usage
from autopar.recompute import ON_DEVICE, Recompute
from autopar.schedule import SCHEDULES


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a step is cut in time.

    Attributes:
        num_stages: Number of stages.
        num_microbatches: Microbatches per step.
        schedule: Their order.
        overlap: How compute and communication share time.
        fixed: Seconds added to every step.
        num_chunks: Stages per group of devices; above 1 they are interleaved.
        turns: By what share of itself a pass is longer where a device holds several stages.
    """

    num_stages: int
    num_microbatches: int
    schedule: str
    overlap: Overlap = HIDING
    fixed: float = 0.0
    num_chunks: int = 1
    turns: float = 0.0

    def hops(self, hop: float) -> float:
        """Return the seconds of all hops of one microbatch, at `hop` seconds each."""
        return (2 if SCHEDULES[self.schedule].trains else 1) * (self.num_stages - 1) * hop

    def pace(self, stages: FloatArray, hop: float) -> float:
        """Return the seconds from one microbatch to the next, given those of each group of devices."""
        if self.schedule != "1f1b" or not hop:
            return float(stages.max())
        sums = np.concatenate([[0.0], np.cumsum(stages)])
        first, last = np.triu_indices(len(stages))
        return float(((sums[last + 1] - sums[first] + 2 * (last - first) * hop) / (last - first + 1)).max())

    def in_flight(self, stage: int) -> int:
        """Return the microbatches whose activations a stage holds at its fullest."""
        return SCHEDULES[self.schedule].in_flight(stage, self.num_stages, self.num_microbatches)


@dataclass(frozen=True, slots=True)
class Split:
    """Blocks to stages.

    Attributes:
        ranges: Half-open ranges of the chain of blocks.
        recompute: What each stage recomputes, or keeps in host memory.
        offload: Whether each stage keeps the optimizer's state in host memory; empty if none does.
    """

    ranges: tuple[tuple[int, int], ...]
    recompute: tuple[Recompute, ...]
    offload: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepTime:
    """Step seconds by the formula of this module, and its parts for the slowest stage."""

    seconds: float
    flow: float
    tail: float
    stage_seconds: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class StageTimes:
    """Seconds of stages, (stages,) each: the f_s, b_s, g_s, a_s, r_s, u_s and e_s of this module."""

    forward: FloatArray
    backward: FloatArray
    gradient: FloatArray
    gathers: FloatArray
    reduced: FloatArray
    update: FloatArray
    late: FloatArray


def stage_times(totals: FloatArray, chain: Sequence[int], split: Split, overlap: Overlap) -> StageTimes:
    """Return the seconds of the stages of a split; arguments as of `step_time`."""
    flavours = np.repeat(np.arange(len(split.ranges)), [stop - start for start, stop in split.ranges])
    blocks = totals[np.asarray(chain)]
    forward, update = blocks[:, Slot.FORWARD].copy(), blocks[:, Slot.UPDATE].copy()
    again, gathers = np.zeros(len(blocks)), np.zeros(len(blocks))
    for recompute in set(split.recompute):
        chosen = np.array([flavour == recompute for flavour in split.recompute])[flavours]
        again[chosen], gathers[chosen] = _again(blocks[chosen], recompute), _gathers(blocks[chosen], recompute)
        if recompute is Recompute.OFFLOAD:
            forward[chosen] += blocks[chosen, Slot.OFFLOAD]
    if split.offload:
        update += np.where(np.array(split.offload)[flavours], blocks[:, Slot.STATE], 0.0)
    starts = np.array([start for start, _ in split.ranges])
    backward, reduced = blocks[:, Slot.BACKWARD] + again, (1 - overlap.share) * blocks[:, Slot.REDUCE]
    spent, due = np.cumsum(backward), np.cumsum(reduced)
    before, owed = spent - backward, due - reduced  # of the blocks before each
    late = np.maximum.reduceat(due - before, starts) - owed[starts] + before[starts]
    sums = np.add.reduceat(blocks, starts)
    return StageTimes(
        np.add.reduceat(forward, starts),
        np.add.reduceat(backward, starts),
        sums[:, Slot.GRADIENT],
        np.add.reduceat(gathers, starts),
        sums[:, Slot.REDUCE],
        np.add.reduceat(update, starts),
        np.maximum(0.0, late),
    )


def step_time(totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, split: Split, hop: float) -> StepTime:
    """Return the step time of blocks split into stages.

    Args:
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        chain: Kind of every block.
        pipeline: Stages, microbatches, schedule.
        split: Blocks to stages.
        hop: Seconds of sending one microbatch's boundary from a stage to the next.
    """
    return time_of(stage_times(totals, chain, split, pipeline.overlap), pipeline, hop)


def time_of(stages: StageTimes, pipeline: Pipeline, hop: float) -> StepTime:
    """Return the step time of stages; `hop` as of `step_time`."""
    overlap, chunks = pipeline.overlap, pipeline.num_chunks
    backward, late = stages.backward, stages.late
    trains = bool(backward.any())
    stage = _stage_seconds(stages.forward + backward, stages.gradient, stages.gathers, overlap)
    if chunks > 1:
        stage = stage * (1 + pipeline.turns)
    # Devices that hold several stages are as busy as all of them; a microbatch fills the pipeline one stage at a time.
    groups = stage.reshape(chunks, -1).sum(axis=0)
    busiest = groups.max()
    follow = (pipeline.num_microbatches - 1) * pipeline.pace(groups, hop)
    flow = float(groups.sum() + (chunks - 1) * busiest) / chunks + follow + pipeline.hops(hop)
    reduced = (1 - overlap.share) * stages.reduced
    left = np.maximum(late, reduced + stages.gradient - backward)
    slow = (overlap.slowdown - 1) * (reduced - late)
    # The first chunk of a group is the last to run backwards; what the others reduce has had time until then.
    first = slice(0, len(groups))
    once = (overlap.share * stages.reduced + stages.update).reshape(chunks, -1).sum(axis=0)
    tail = left[first] + once
    earlier = np.concatenate([[0.0], np.cumsum(backward[first])[:-1]]) + hop * np.arange(len(groups))
    ends = flow - (earlier if trains else 0.0) + np.cumsum(slow[first][::-1])[::-1] + tail + pipeline.fixed
    slowest = int(ends.argmax())
    return StepTime(float(ends[slowest]), flow, float(tail[slowest]), stage)


def _stage_seconds(passes: FloatArray, gradient: FloatArray, gathers: FloatArray, overlap: Overlap) -> FloatArray:
    """Return t_s from the seconds of both passes, of gradient traffic and of gathers."""
    beside = np.minimum(passes, (1 - overlap.share) * gradient)
    busiest = np.maximum(passes + overlap.share * gradient, np.where(gradient > 0, gradient + gathers, 0.0))
    return np.asarray(busiest + (overlap.slowdown - 1) * beside)


def _again(seconds: FloatArray, recompute: Recompute) -> FloatArray:
    """Return what runs again before a backward, or is waited for, given (..., slots) seconds."""
    match recompute:
        case Recompute.NONE:
            return np.zeros(seconds.shape[:-1])
        case Recompute.SELECTIVE:
            return np.asarray(seconds[..., Slot.SELECTIVE])
        case Recompute.FULL:
            return np.asarray(seconds[..., Slot.FORWARD])
        case Recompute.OFFLOAD:
            return np.asarray(seconds[..., Slot.FETCH])


def _gathers(seconds: FloatArray, recompute: Recompute) -> FloatArray:
    """Return the gathers of parameters of both passes and of what runs again, given (..., slots) seconds."""
    once = np.asarray(seconds[..., Slot.FORWARD_GATHER] + seconds[..., Slot.BACKWARD_GATHER])
    match recompute:
        case Recompute.NONE | Recompute.OFFLOAD:
            return once
        case Recompute.SELECTIVE:
            return once + seconds[..., Slot.SELECTIVE_GATHER]
        case Recompute.FULL:
            return once + seconds[..., Slot.FORWARD_GATHER]


def best_split(
    totals: FloatArray, memory: RangeBytes, chain: Sequence[int], pipeline: Pipeline, limit: float, hop: float
) -> tuple[Split, StepTime] | None:
    """Return the split into stages with the least step time whose stages all fit, or None.

    Recompute is chosen per stage, the fastest flavour that fits: none, else selective, else full. Among those splits
    the best is found exactly if gradient traffic hides behind compute (g_s + a_s <= f_s + b_s) and hops take no time
    from the pace; else the split minimises a slightly smaller step time, in which such a stage delays only the stages
    after it by its forward, and the slowest stage sets the pace.

    For a cap T on the slowest stage the rest of the formula is a dynamic program over stages: with A_s the forward
    seconds of the stages before s, its state is the latest end so far,

        end_{s+1} = max(end_s, A_s - s h + tail_s) + t_s + slow_s    as t_q - b_q = f_q with and without recompute,

    so that step = end_p + (m - 1) T + 2 (p - 1) h + fixed, but for a pace that hops make slower. Caps are tried in
    ascending order until (m - 1) T is too much.
    """
    if pipeline.num_stages > len(chain):
        return None
    stages = _stage_options(totals, memory, chain, pipeline, limit)
    slowest = _dynamic_program(stages.seconds, np.maximum)
    if not np.isfinite(slowest):
        return None
    best: tuple[Split, StepTime] | None = None
    follow = pipeline.num_microbatches - 1
    hops = pipeline.hops(hop) + pipeline.fixed
    least, ranges = _earliest_end(stages, np.inf, hop)
    caps = stages.seconds[np.isfinite(stages.seconds) & (stages.seconds >= slowest * (1 - 1e-12))]
    for cap in [np.inf] if follow == 0 else _distinct(caps):
        # No split with a slowest stage of at least `cap` is better than this.
        if best is not None and follow and follow * cap + least + hops >= best[1].seconds * (1 - 1e-9):
            break
        if np.isfinite(cap):
            _, ranges = _earliest_end(stages, cap * (1 + 1e-9), hop)
        split = Split(ranges, tuple(_FLAVOURS[stages.recompute[s, a, b]] for s, (a, b) in enumerate(ranges)))
        time = step_time(totals, chain, pipeline, split, hop)
        if best is None or time.seconds < best[1].seconds:
            best = (split, time)
    return best


def _distinct(values: FloatArray) -> FloatArray:
    """Return the values in ascending order, one of each that differ by rounding only: sums of equal blocks do."""
    ordered = np.sort(values)
    return np.asarray(ordered[np.concatenate([[True], np.diff(ordered) > 1e-9 * ordered[1:]])])


_FLAVOURS = ON_DEVICE
"""What a split chooses from, from fastest to slowest."""


@dataclass(frozen=True, slots=True, eq=False)
class _StageOptions:
    """What stages can hold; (stages, blocks, blocks + 1) arrays: stage s with blocks a to b.

    Attributes:
        seconds: t_s, infinity if it cannot fit.
        tails: tail_s.
        slow: slow_s.
        recompute: What it recomputes, as an index of `_FLAVOURS`.
        before: (blocks + 1,) forward seconds of the blocks before a.
        trains: Whether there are backward passes.
    """

    seconds: FloatArray
    tails: FloatArray
    slow: FloatArray
    recompute: NDArray[np.int8]
    before: FloatArray
    trains: bool


def least_flow(seconds: Sequence[float] | FloatArray, chain: Sequence[int], pipeline: Pipeline) -> float:
    """Return the least `flow` of any split, whatever memory it takes, when a block of kind k takes `seconds[k]`.

    With a lower bound per kind it is a lower bound on the step time that sees that blocks are not divided between
    stages.
    """
    index = np.asarray(chain)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(seconds)[index])])
    spans = sums[None, :] - sums[:-1, None]
    spans[np.arange(len(index) + 1)[None, :] <= np.arange(len(index))[:, None]] = np.inf
    slowest = _dynamic_program(np.broadcast_to(spans, (pipeline.num_stages, *spans.shape)), np.maximum)
    return float(sums[-1] + (pipeline.num_microbatches - 1) * slowest)


def _stage_options(
    totals: FloatArray, memory: RangeBytes, chain: Sequence[int], pipeline: Pipeline, limit: float
) -> _StageOptions:
    """Return seconds, tail and recompute for every stage and every range of blocks."""
    num_blocks, num_stages = len(chain), pipeline.num_stages
    index = np.asarray(chain)
    sums = np.concatenate([np.zeros((1, totals.shape[1])), np.cumsum(totals[index], axis=0)])
    spans = sums[None, :, :] - sums[:-1, None, :]  # [a, b]: blocks a to b
    forward, backward, gradient = (spans[..., slot] for slot in (Slot.FORWARD, Slot.BACKWARD, Slot.GRADIENT))
    overlap = pipeline.overlap
    reduced = (1 - overlap.share) * spans[..., Slot.REDUCE]
    once = overlap.share * spans[..., Slot.REDUCE] + spans[..., Slot.UPDATE]

    def tail(backward_sums: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return tail_s and slow_s of every range from the (blocks + 1,) backward seconds before each block."""
        reduce_sums = (1 - overlap.share) * sums[:, Slot.REDUCE]
        due = reduce_sums[1:] - backward_sums[:-1]
        late = np.zeros((num_blocks, num_blocks + 1))
        for start in range(num_blocks):
            late[start, start + 1 :] = np.maximum.accumulate(due[start:])
            late[start, start + 1 :] += backward_sums[start] - reduce_sums[start]
        late = np.maximum(0.0, late)
        left = np.maximum(late, reduced + gradient - (backward_sums[None, :] - backward_sums[:-1, None]))
        return left + once, (overlap.slowdown - 1) * (reduced - late)

    trains = bool(totals[:, Slot.BACKWARD].any())
    empty = np.arange(num_blocks + 1)[None, :] <= np.arange(num_blocks)[:, None]
    flavours = _FLAVOURS if trains else _FLAVOURS[:1]
    each = []
    for recompute in flavours:
        passes = forward + backward + _again(spans, recompute)
        taken = _stage_seconds(passes, gradient, _gathers(spans, recompute), overlap)
        each.append((taken, *tail(sums[:, Slot.BACKWARD] + _again(sums, recompute))))
    seconds = np.full((num_stages, num_blocks, num_blocks + 1), np.inf)
    tails, slow = np.zeros(seconds.shape), np.zeros(seconds.shape)
    chosen = np.zeros(seconds.shape, dtype=np.int8)
    for stage in range(num_stages):
        for number in reversed(range(len(flavours))):  # the fastest that fits has the last word
            fits = memory.peaks(pipeline.in_flight(stage), flavours[number]) <= limit
            for table, values in zip((seconds, tails, slow), each[number], strict=True):
                table[stage] = np.where(fits, values, table[stage])
            chosen[stage] = np.where(fits, number, chosen[stage])
        seconds[stage][empty] = np.inf
    return _StageOptions(seconds, tails, slow, chosen, sums[:, Slot.FORWARD], trains)


def _dynamic_program(seconds: FloatArray, combine: np.ufunc) -> float:
    """Return the least combined seconds of a split of all blocks into one range per stage."""
    num_stages, num_blocks, _ = seconds.shape
    best = np.full(num_blocks + 1, np.inf)
    best[0] = 0.0
    for stage in range(num_stages):
        best = combine(best[:num_blocks, None], seconds[stage]).min(axis=0)
    return float(best[num_blocks])


def _earliest_end(stages: _StageOptions, cap: float, hop: float) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Return end_p of `best_split` and the ranges of blocks that reach it, with no stage slower than `cap`."""
    num_stages, num_blocks, _ = stages.seconds.shape
    end = np.full(num_blocks + 1, np.inf)
    end[0] = 0.0
    cuts = []
    for stage in range(num_stages):
        seconds = np.where(stages.seconds[stage] <= cap, stages.seconds[stage], np.inf)
        start = stages.before[:num_blocks] - (stage * hop if stages.trains else 0.0)
        ends = np.maximum(end[:num_blocks, None], start[:, None] + stages.tails[stage])
        ends = ends + seconds + stages.slow[stage]
        cuts.append(ends.argmin(axis=0))
        end = ends.min(axis=0)
    ranges = []
    stop = num_blocks
    for stage in reversed(range(num_stages)):
        first = int(cuts[stage][stop])
        ranges.append((first, stop))
        stop = first
    return float(end[num_blocks]), tuple(reversed(ranges))


def model_flops(folded: Folded) -> float:
    """Return the FLOPs of the model for one microbatch, forward and backward, recompute not counted."""
    total = 0.0
    for kind in folded.kinds:
        for op in kind.ops:
            if op.phase is not Phase.UPDATE:
                inputs, outputs = whole_shapes(folded.graph, op)
                total += kind.count * float(op_flops(op, inputs, outputs)[0])
    return total


@dataclass(frozen=True, slots=True)
class Weights:
    """Times each slot of each kind counts, (kinds, slots), and whether the optimum is then a lower bound on `step`."""

    factors: FloatArray
    is_bound: bool


def weights(
    tables: Tables,
    pipeline: Pipeline,
    *,
    recompute: Recompute | Sequence[Recompute],
    hidden: float,
    bounding: bool,
    slowest: Sequence[float] | None = None,
    traffic: float | None = 0.0,
    early: bool = False,
) -> Weights:
    """Return the weights that make the step time linear.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        recompute: What blocks run again, for all kinds or by kind.
        hidden: Multiplier in [0, 1] on `r - b`, the gradient reduction the last backward does not hide: any value gives
            a lower bound when there is one stage, the best one closes the gap (Lagrange).
        bounding: Whether the optimum must be a lower bound for every split; else terms are added for an even split that
            make better plans.
        slowest: Instances of each kind taken to be on the slowest stage; an even share of all if None. For a bound
            every split must have a stage at least as slow (`busiest_share`).
        traffic: Multiplier in [0, 1] that shares the time of a stage between compute and the gradient traffic beside
            it, max(f + b, g) >= (1 - traffic) (f + b) + traffic g: again any value gives a lower bound and the best one
            closes the gap. None prices both in full, which is no bound but keeps choices away from such traffic.
        early: Whether to price what is reduced after the last backward of a block as if nothing hid it, which is no
            bound but prefers gradients that are reduced as soon as they are there.
    """
    counts = np.array([kind.count for kind in tables.folded.kinds], dtype=np.float64)
    num_stages, num_microbatches = pipeline.num_stages, pipeline.num_microbatches
    flow = counts + (num_microbatches - 1) * (counts / num_stages if slowest is None else np.asarray(slowest))
    share = counts / num_stages
    flavours = [recompute] * len(counts) if isinstance(recompute, Recompute) else recompute
    full = np.array([flavour is Recompute.FULL for flavour in flavours], dtype=np.float64)
    selective = np.array([flavour is Recompute.SELECTIVE for flavour in flavours], dtype=np.float64)
    factors = np.zeros((len(counts), len(Slot)))
    inline, beside = (1.0, 1.0) if traffic is None else (1.0 - traffic, traffic)
    if bounding and num_stages == 1:
        hidden = min(hidden, inline * num_microbatches)  # no weight may be negative: `problem` would raise it to zero
    overlap = pipeline.overlap
    factors[:, Slot.FORWARD] = flow * (1 + full) * inline
    factors[:, Slot.SELECTIVE] = flow * selective * inline
    factors[:, Slot.BACKWARD] = flow * inline
    factors[:, Slot.GRADIENT] = flow * (beside + overlap.share * inline)
    if num_stages == 1 or not bounding:
        factors[:, Slot.BACKWARD] -= hidden * share
        factors[:, Slot.FORWARD] -= hidden * share * full
        factors[:, Slot.SELECTIVE] -= hidden * share * selective
        factors[:, Slot.REDUCE] = hidden * share
        factors[:, Slot.UPDATE] = share
        factors[:, Slot.GRADIENT] += hidden * share
        if early:
            factors[:, Slot.REDUCE] = share
    _share_passes(factors, overlap if bounding else Overlap(share=1.0))
    if bounding and not early and num_stages == 1:
        factors[:, Slot.REDUCE] = (hidden * (1 - overlap.share) + overlap.share) * share
    return Weights(factors, bounding and traffic is not None and not early)


def _share_passes(factors: FloatArray, overlap: Overlap) -> None:
    """Give the other slots of a pass their part of its weight; hidden as far as anything could hide it."""
    factors[:, Slot.SELECTIVE_WAIT] = factors[:, Slot.SELECTIVE]
    factors[:, Slot.SELECTIVE_GATHER] = factors[:, Slot.SELECTIVE] * overlap.price(LEAST_GATHER)
    factors[:, Slot.FORWARD_WAIT] = factors[:, Slot.FORWARD]
    factors[:, Slot.FORWARD_GATHER] = factors[:, Slot.FORWARD] * overlap.price(LEAST_GATHER)
    factors[:, Slot.BACKWARD_WEIGHT] = factors[:, Slot.BACKWARD]
    factors[:, Slot.BACKWARD_WAIT] = factors[:, Slot.BACKWARD] * overlap.price(LEAST_WAIT)
    factors[:, Slot.BACKWARD_GATHER] = factors[:, Slot.BACKWARD] * overlap.price(LEAST_GATHER)


def kind_weights(tables: Tables, kind: int, traffic: float) -> Weights:
    """Return the weights whose optimum is the least a block of `kind` adds to its stage; `traffic` as in `weights`."""
    factors = np.zeros((len(tables.folded.kinds), len(Slot)))
    factors[kind, [Slot.FORWARD, Slot.BACKWARD]] = 1.0 - traffic
    factors[kind, Slot.GRADIENT] = traffic
    _share_passes(factors, Overlap.of(tables.costs.stack))
    return Weights(factors, True)


def busiest_share(tables: Tables, totals: FloatArray, num_stages: int) -> tuple[float, ...] | None:
    """Return instances per kind that some stage of every split outweighs in seconds, if more than an even share.

    Whatever the split, one stage holds the most expensive block whole, and one holds at least ceil(n / p) of the n
    instances of a kind.
    """
    counts = np.array([kind.count for kind in tables.folded.kinds], dtype=np.float64)
    seconds = totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD]
    even = float(counts @ seconds) / num_stages
    held = np.ceil(counts / num_stages)
    most = int((held * seconds).argmax())
    if held[most] * seconds[most] <= even * (1 + 1e-9):
        return None
    share = np.zeros(len(counts))
    share[most] = held[most]
    return tuple(float(s) for s in share)


@dataclass(frozen=True, slots=True, eq=False)
class MeanBytes:
    """Bytes of a mean stage: no split has all stages below it.

    Stage s with n_s blocks and f_s microbatches in flight holds n_s (resident + f_s saved) and more. Weighting stages
    by (1 / f_s) / H, H = sum 1 / f_s, the mean of saved activations is total / H for every split, that of resident
    bytes at least total / (H max f).

    Attributes:
        factors: Per item of `Tables.bytes` its weight in the mean.
        limit: Bytes the mean may reach.
    """

    factors: FloatArray
    limit: float

    def excess(self, tables: Tables, choice: Sequence[int]) -> float:
        """Return by how many bytes the mean of a choice is over the limit; negative if it is under."""
        used = sum(
            factor * item.amounts[choice[item.node]]
            for factor, item in zip(self.factors, tables.bytes, strict=True)
            if factor
        )
        return float(used) - self.limit

    def priced(self, instance: Problem, tables: Tables, price: float) -> Problem:
        """Return the problem with every byte of the mean priced at `price` seconds."""
        costs = [cost.copy() for cost in instance.node_costs]
        for factor, item in zip(self.factors, tables.bytes, strict=True):
            if factor:
                costs[item.node] += price * factor * item.amounts
        return replace(instance, node_costs=tuple(costs))


def mean_bytes(tables: Tables, pipeline: Pipeline, limit: float, keeps: Sequence[Recompute]) -> MeanBytes:
    """Return the mean stage of a pipeline when kinds keep what their flavour of recompute says."""
    flying = np.array([pipeline.in_flight(stage) for stage in range(pipeline.num_stages)], dtype=np.float64)
    harmonic = float((1 / flying).sum())
    factors = np.zeros(len(tables.bytes))
    for index, item in enumerate(tables.bytes):
        count = tables.folded.kinds[item.kind].count
        if item.memory in RESIDENT:
            factors[index] = count / (harmonic * float(flying.max()))
        elif item.memory in KEPT[keeps[item.kind]]:
            factors[index] = count / harmonic
    return MeanBytes(factors, limit - tables.folded.buffer_bytes)


def least_bytes(
    tables: Tables, pipeline: Pipeline, allowed: Sequence[Sequence[int]] | None = None
) -> dict[Recompute, float]:
    """Return a lower bound on the peak bytes of the fullest stage, by flavour of recompute.

    Every item is taken at its smallest, and all stages at their mean.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        allowed: Strategies per node that may be chosen; None for all.
    """
    kinds = tables.folded.kinds
    totals = dict.fromkeys(Memory, 0.0)
    for item in tables.bytes:
        amounts = item.amounts if allowed is None else item.amounts[np.asarray(allowed[item.node])]
        totals[item.memory] += float(amounts.min()) * kinds[item.kind].count / pipeline.num_stages
    # The fullest stage holds at least the mean of all stages, and every stage at least the least number of
    # microbatches.
    least = min(pipeline.in_flight(stage) for stage in range(pipeline.num_stages))
    resident = sum(totals[memory] for memory in RESIDENT)
    return {flavour: resident + least * sum(totals[memory] for memory in KEPT[flavour]) for flavour in Recompute}


@dataclass(frozen=True, slots=True)
class StageMix:
    """What one stage holds, for memory limits: instances per kind, microbatches in flight, recompute."""

    counts: tuple[int, ...]
    in_flight: int
    recompute: Recompute


def stage_mixes(chain: Sequence[int], pipeline: Pipeline, split: Split, num_kinds: int) -> tuple[StageMix, ...]:
    """Return the distinct stages of a split that no other stage dominates."""
    mixes = []
    for stage, (start, stop) in enumerate(split.ranges):
        counts = np.bincount(np.asarray(chain[start:stop]), minlength=num_kinds)
        mixes.append(StageMix(tuple(int(c) for c in counts), pipeline.in_flight(stage), split.recompute[stage]))
    distinct = list(dict.fromkeys(mixes))
    return tuple(mix for mix in distinct if not any(_dominates(other, mix) for other in distinct if other != mix))


def _dominates(big: StageMix, small: StageMix) -> bool:
    return (
        big.recompute == small.recompute
        and big.in_flight >= small.in_flight
        and all(b >= s for b, s in zip(big.counts, small.counts, strict=True))
    )


def problem(
    tables: Tables, weighting: Weights, mixes: Sequence[StageMix] = (), limit: float = np.inf, name: str = ""
) -> Problem:
    """Return the placement problem: weighted seconds, and the memory of every stage in `mixes` under `limit` bytes.

    Time runs through the ops of every kind of every stage in turn: persistent tensors and saved activations take memory
    throughout their stage, transient values while the ops that need them run.
    """
    factors = np.maximum(0.0, weighting.factors)
    times = np.array([factors[node.kind, node.slot] * node.share for node in tables.nodes])
    weight = np.array([factors[edge.kind, edge.slot] * edge.share for edge in tables.edges])
    if factors[:, Slot.SELECTIVE].any():
        for index in tables.again_nodes:
            node = tables.nodes[index]
            times[index] += factors[node.kind, AGAIN[node.slot]] * node.share
        for index in tables.again_edges:
            edge = tables.edges[index]
            weight[index] += factors[edge.kind, AGAIN[edge.slot]] * edge.share
    node_costs = [factor * node.seconds for factor, node in zip(times, tables.nodes, strict=True)]
    edges = [
        (edge.first, edge.second, edge.table, float(factor)) for factor, edge in zip(weight, tables.edges, strict=True)
    ]
    usages, limits = _usages(tables, mixes, limit)
    return Problem.build(
        node_costs,
        edges,
        usages=usages,
        limit=limits,
        node_names=[_node_name(node.decision, node.kind, node.name) for node in tables.nodes],
        name=name,
    )


def _node_name(decision: Decision, kind: int, name: str) -> str:
    return f"{decision.name.lower()}:{kind}:{name}"


def _usages(tables: Tables, mixes: Sequence[StageMix], limit: float) -> tuple[list[Usage], list[Limit]]:
    usages: list[Usage] = []
    limits: list[Limit] = []
    time = 0
    kinds = tables.folded.kinds
    for mix in mixes:
        begin = time
        starts = {}
        for kind in kinds:
            if mix.counts[kind.id]:
                starts[kind.id] = time
                time += max(1, len(kind.ops))
        for item in tables.bytes:
            count = mix.counts[item.kind]
            if not count:
                continue
            start = starts[item.kind]
            if item.memory in RESIDENT:
                usages.append(Usage(item.node, begin, time, item.amounts * count))
            elif item.memory is Memory.TRANSIENT:
                usages.append(Usage(item.node, start + item.start, start + item.end, item.amounts))
            elif item.memory in KEPT[mix.recompute]:
                usages.append(Usage(item.node, begin, time, item.amounts * (count * mix.in_flight)))
            elif item.memory in KEPT[Recompute.NONE]:  # made again before the backward
                usages.append(Usage(item.node, start, start + max(1, len(kinds[item.kind].ops)), item.amounts))
        limits.append(Limit(limit - tables.folded.buffer_bytes, begin, time))
    return usages, limits
