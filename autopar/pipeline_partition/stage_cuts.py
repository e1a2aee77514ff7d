"""Cuts of the chain of blocks into stages, and what the blocks of each recompute: the least step time that fits.

Where host memory may be used, blocks may also keep there what they save, and stages the optimizer's state.

`formulate/step_time.py` has the formula. For a cap T on the slowest stage the rest of it is a dynamic program over
stages: with A_s the forward seconds of the stages before s, its state is the latest end so far,

    end_{s+1} = max(end_s, A_s - s h + tail_s) + t_s + slow_s    as t_q - b_q = f_q with and without recompute,

so that step = end_p + (m - 1) T + 2 (p - 1) h + fixed, but for a pace that hops make slower. The larger the cap, the
earlier the end: of the caps from one to another none gives less than the end of the last with the T of the first, so
that few of them are tried.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from autopar.formulate.block_memory import ChainBytes, FloatArray
from autopar.formulate.constraints import FREE, Constraints, Mask
from autopar.formulate.step_time import Pipeline, Split, StepTime, step_time
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.balance import least_load
from autopar.pipeline_partition.block_ranges import IntArray, Windows, symbols_of, windows
from autopar.pipeline_partition.p2p import Hops, between
from autopar.pipeline_partition.recompute_pareto import Mixtures, mixtures, special_blocks
from autopar.recompute import Recompute

_LEAST = [Recompute.FULL, Recompute.SELECTIVE, Recompute.OFFLOAD, Recompute.NONE]
"""Flavours in the order in which equal blocks of a stage have them, from those that run most again."""

UNLIMITED = 1e300
"""Bytes that are more than any stage holds, and less than what must not be."""

ROUNDING = 1e-9
"""Sums of equal blocks differ by rounding only: relative."""


def best_split(
    totals: FloatArray,
    memory: ChainBytes,
    pipeline: Pipeline,
    limit: float,
    hop: Hops | float,
    constraints: Constraints = FREE,
) -> tuple[Split, StepTime] | None:
    """Return the split into stages, and what their blocks recompute, with the least step time; None if none fits.

    A stage takes the fastest mixture of flavours that fits (`recompute_pareto.py`), or the one that ends earliest with
    its reductions; with the optimizer's state on the device or, where more fits then, in host memory. Among those
    splits the best is found exactly if gradient traffic hides behind compute (g_s + a_s <= f_s + b_s), hops are the
    same wherever the chain is cut and take no time from the pace, and forwards wait for no copies; else the split
    minimises a slightly smaller step time, in which such a stage delays only the stages after it by its forward, and
    the slowest stage sets the pace. Of the splits that are looked at the one that takes least is returned.

    Args:
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        memory: What ranges of the chain of blocks hold.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        hop: Seconds of handing one microbatch on or back: between any stages, or by where the chain is cut.
        constraints: Cuts, recompute and what may lie in host memory.
    """
    chain, num_stages = memory.chain, pipeline.num_stages
    if num_stages > len(chain):
        return None
    symbols = symbols_for(memory, constraints)
    best: tuple[Split, StepTime] | None = None
    for longest in _lengths(len(chain), num_stages):
        found = windows(symbols, longest, num_stages == 1)
        stages = fitting_stages(found, totals, memory, pipeline, min(limit, UNLIMITED), constraints)
        best = _best(stages, totals, chain, pipeline, hop)
        if longest == len(chain) or not stages.grow:
            break
        if best is not None and best[1].seconds <= _beyond(totals, chain, pipeline, longest):
            break
    if best is None:
        return None
    return _sorted(*best, totals, memory, pipeline, limit, hop, constraints)


def symbols_for(memory: ChainBytes, constraints: Constraints) -> tuple[int, ...]:
    """Return what each block is as far as its stage's seconds, bytes and recompute depend on it."""
    alike = [
        tuple(block for block, own in enumerate(each) if own == allowed)
        for each in (constraints.keeps, constraints.states)
        for allowed in set(each)
    ]
    return symbols_of(memory.chain, (*special_blocks(memory), *alike))


def _sorted(
    split: Split,
    time: StepTime,
    totals: FloatArray,
    memory: ChainBytes,
    pipeline: Pipeline,
    limit: float,
    hop: Hops | float,
    constraints: Constraints,
) -> tuple[Split, StepTime]:
    """Return the split with equal blocks of a stage in the order of `_LEAST`, wherever that fits and is no slower.

    Earlier blocks end their backwards later, and hide more of what is reduced when they recompute. It is also the order
    that fills a device least, and the one that is read most easily.
    """
    found = []
    hosted = split.offload or (False,) * len(split.ranges)
    for stage, ((start, stop), flavours) in enumerate(zip(split.ranges, split.recompute, strict=True)):
        kinds = memory.chain[start:stop]
        of_kind = {
            kind: sorted((own for own, other in zip(flavours, kinds, strict=True) if other == kind), key=_LEAST.index)
            for kind in set(kinds)
        }
        ordered = tuple(of_kind[kind].pop(0) for kind in kinds)
        allowed = not constraints.keeps or all(map(operator.contains, constraints.keeps[start:stop], ordered))
        peak = memory.peak(start, stop, pipeline.in_flight(stage), ordered, offload=hosted[stage])
        found.append(ordered if allowed and peak <= limit else flavours)
    other = Split(split.ranges, tuple(found), split.offload)
    found_time = step_time(totals, memory.chain, pipeline, other, between(other, hop))
    return (other, found_time) if found_time.seconds <= time.seconds * (1 + ROUNDING) else (split, time)


def least_flow(seconds: Sequence[float] | FloatArray, chain: Sequence[int] | IntArray, pipeline: Pipeline) -> float:
    """Return the least `flow` of any split, whatever memory it takes, when a block of kind k takes `seconds[k]`.

    With a lower bound per kind it is a lower bound on the step time that sees that blocks are not divided between
    stages.
    """
    from autopar.pipeline_partition.partition_kernel import evenest  # compiling is loaded when it is needed only

    blocks = np.asarray(seconds)[np.asarray(chain)]
    slowest = float(blocks.sum())
    if pipeline.num_chunks > 1:
        slowest = least_load(Counter(blocks.tolist()), pipeline.num_groups)
    elif pipeline.num_stages > 1:
        slowest = evenest(np.concatenate([[0.0], np.cumsum(blocks)]), pipeline.num_stages)
    if not pipeline.fills:
        return pipeline.num_microbatches * slowest
    return float(blocks.sum() + (pipeline.num_microbatches - 1) * slowest)


def _lengths(num_blocks: int, num_stages: int) -> Iterator[int]:
    """Yield how long a stage may be: about twice an even share, then ever longer, at last all blocks."""
    longest = 2 * -(-num_blocks // num_stages) + 2
    while longest < num_blocks:
        yield longest
        longest *= 2
    yield num_blocks


def _beyond(totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, longest: int) -> float:
    """Return a lower bound on the step time of splits with a stage of more than `longest` blocks."""
    blocks = (totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD])[np.asarray(chain)]
    sums = np.concatenate([[0.0], np.cumsum(blocks)])
    least = float((sums[longest + 1 :] - sums[: -longest - 1]).min())
    return float(sums[-1]) + (pipeline.num_microbatches - 1) * least


@dataclass(frozen=True, slots=True, eq=False)
class FittingStages:
    """What stages can hold; (stages, windows, options) arrays.

    Of the mixtures that fit, the first option is the fastest, the second the one whose reductions end earliest; the
    next two are the same with the optimizer's state in host memory, where more fits then.

    Attributes:
        at: Windows of the ranges that may be stages, as in `Windows.at`.
        mixtures: Their mixtures.
        seconds: t_s, infinity if none fits.
        tails: tail_s.
        slow: slow_s.
        taken: Number of the mixture.
        before: (blocks + 1,) forward seconds of the blocks before each.
        trains: Whether there are backward passes.
        grow: Whether ranges of more blocks might fit.
    """

    at: IntArray
    mixtures: Mixtures
    seconds: FloatArray
    tails: FloatArray
    slow: FloatArray
    taken: IntArray
    before: FloatArray
    trains: bool
    grow: bool


def fitting_stages(
    found: Windows,
    totals: FloatArray,
    memory: ChainBytes,
    pipeline: Pipeline,
    limit: float,
    constraints: Constraints,
) -> FittingStages:
    """Return what ranges of blocks can be as stages; arguments as of `best_split`, of the windows found."""
    flying = [pipeline.in_flight(stage) for stage in range(pipeline.num_stages)]
    mixed = mixtures(found, totals, memory, pipeline.overlap, limit, (min(flying), max(flying)), constraints)
    ends = mixed.seconds + mixed.slow + mixed.tails
    options = 4 if constraints.hosts_optimizer else 2
    taken = np.zeros((pipeline.num_stages, len(found.start), options), dtype=np.int64)
    fits = np.full(taken.shape, False)
    here, there = may_lie(found, constraints)
    for in_flight in sorted(set(flying)):
        rows = [stage for stage, count in enumerate(flying) if count == in_flight]
        room = _fitting(mixed, in_flight, limit, memory.host_room, offload=False) & here[:, None]
        rooms = [room]
        if options > 2:
            more = _fitting(mixed, in_flight, limit, memory.host_room, offload=True) & there[:, None]
            gains = np.asarray((more & ~room).any(axis=1))  # else the device is as good, and faster
            rooms.append(more & gains[:, None])
        for number, fitting in enumerate(rooms):
            taken[rows, :, 2 * number] = np.where(fitting, mixed.seconds, np.inf).argmin(axis=1)
            taken[rows, :, 2 * number + 1] = np.where(fitting, ends, np.inf).argmin(axis=1)
            fits[rows, :, 2 * number : 2 * number + 2] = np.asarray(fitting.any(axis=1))[:, None]
    used = 2 + 2 * bool(fits[..., 2:].any())
    taken, fits = taken[..., :used], fits[..., :used]
    each = np.arange(len(found.start))[None, :, None]
    tails = mixed.tails[each, taken]
    tails[..., 2:] += mixed.copying[None, :, None]
    return FittingStages(
        at=np.where(constraints.ranges(*found.at.shape), found.at, -1),
        mixtures=mixed,
        seconds=np.where(fits, mixed.seconds[each, taken], np.inf),
        tails=tails,
        slow=mixed.slow[each, taken],
        taken=taken,
        before=np.concatenate([[0.0], np.cumsum(totals[np.asarray(memory.chain), Slot.FORWARD])]),
        trains=bool(totals[:, Slot.BACKWARD].any()),
        grow=bool(mixed.grows[found.at[found.at[:, -1] >= 0, -1]].any()),
    )


def _fitting(mixed: Mixtures, in_flight: int, limit: float, host_room: float, *, offload: bool) -> Mask:
    """Return which mixtures of windows fit on the device and on its part of the host."""
    fits = mixed.peaks(in_flight, offload=offload) <= limit
    return np.asarray(fits & (mixed.host_bytes(in_flight, offload=offload) <= host_room))


def may_lie(found: Windows, constraints: Constraints) -> tuple[Mask, Mask]:
    """Return of which windows the optimizer's state may lie on the device, and of which in host memory."""
    if not constraints.states:
        every = np.ones(len(found.start), dtype=bool)
        return every, every & constraints.hosts_optimizer
    places = list(zip(found.start.tolist(), found.stop.tolist(), strict=True))
    here, there = (np.array([constraints.may_lie(*place, away=away) for place in places]) for away in (False, True))
    return here, there


def _best(
    stages: FittingStages, totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, hop: Hops | float
) -> tuple[Split, StepTime] | None:
    """Return the best split into windows; see `best_split`."""
    from autopar.pipeline_partition.partition_kernel import (  # compiling is loaded when it is needed only
        earliest_end,
        slowest,
    )

    at, follow = stages.at, pipeline.num_microbatches - 1
    least_pace = slowest(at, stages.seconds.min(axis=2))
    if not np.isfinite(least_pace):
        return None
    back = float(hop.mean[:, 1].mean()) if isinstance(hop, Hops) else hop
    starts = np.arange(pipeline.num_stages)[:, None] * (back if stages.trains else 0.0)
    before = stages.before[None, :-1] - starts
    hops = pipeline.hops(hop.least if isinstance(hop, Hops) else hop) + pipeline.fixed
    seconds = stages.seconds
    ends = at, stages.mixtures.lengths, seconds, stages.tails, stages.slow, before
    least, *_ = earliest_end(*ends, np.inf)
    caps = _distinct(seconds[np.isfinite(seconds) & (seconds >= least_pace)]) if follow else np.array([UNLIMITED])
    best: tuple[Split, StepTime] | None = None
    # Caps from one to another, the least seconds of splits with a slowest stage between them, and their earliest end.
    pending = [(follow * float(caps[0]) + least, 0, len(caps) - 1, least)]
    while pending:
        bound, first, last, earliest = heappop(pending)
        if best is not None and bound + hops >= best[1].seconds * (1 - ROUNDING):
            break
        middle = (first + last) // 2 if best is not None else first
        cap = float(caps[middle]) * (1 + ROUNDING)
        end, stops, options = earliest_end(*ends, cap)
        pace = _pace(stages, stops, options)
        if best is None or end + follow * pace + hops < best[1].seconds * (1 - ROUNDING):
            split = _written(stages, stops, options)
            time = step_time(totals, chain, pipeline, split, between(split, hop))
            if best is None or time.seconds < best[1].seconds:
                best = (split, time)
        # All caps from the pace of this split to its own one have the same end.
        below = int(np.searchsorted(caps, pace * (1 - ROUNDING)))
        if below > first:
            heappush(pending, (follow * float(caps[first]) + end, first, min(below, middle) - 1, end))
        if middle < last:
            heappush(pending, (follow * float(caps[middle + 1]) + earliest, middle + 1, last, earliest))
    return best


def _pace(stages: FittingStages, stops: IntArray, options: IntArray) -> float:
    """Return the seconds of the slowest stage of a cut."""
    starts = np.concatenate([[0], stops[:-1]])
    return float(stages.seconds[np.arange(len(stops)), stages.at[starts, stops - starts - 1], options].max())


def _written(stages: FittingStages, stops: IntArray, options: IntArray) -> Split:
    """Return the split of a cut."""
    ranges, recompute, offload, start = [], [], [], 0
    for stage, (stop, option) in enumerate(zip(stops.tolist(), options.tolist(), strict=True)):
        window = int(stages.at[start, stop - start - 1])
        ranges.append((start, stop))
        recompute.append(stages.mixtures.flavours(window, int(stages.taken[stage, window, option])))
        offload.append(option >= 2)
        start = stop
    return Split(tuple(ranges), tuple(recompute), tuple(offload) if any(offload) else ())


def _distinct(values: FloatArray) -> FloatArray:
    """Return the values in ascending order, one of each that differ by rounding only: sums of equal blocks do."""
    ordered = np.sort(values)
    return np.asarray(ordered[np.concatenate([[True], np.diff(ordered) > ROUNDING * ordered[1:]])])
