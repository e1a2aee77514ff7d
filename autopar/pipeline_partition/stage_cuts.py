"""Partitioning of the chain of blocks into stages with recompute per block: the least step time within memory.

    end_{s+1} = max(end_s, A_s - s h + tail_s) + t_s + slow_s,    step = end_p + (m - 1) T + 2 (p - 1) h + fixed

`formulate/step_time.py` has the full formula. For a cap T on the slowest stage the rest is a dynamic program over
stages whose state is the latest end so far; A_s are the forward seconds of the stages before s, as t_q - b_q = f_q with
and without recompute. Hops that slow the pace are left out. The earliest end falls with the cap: a range of caps has
the lower bound end(last cap) + (m - 1) * first cap, so best-first search over ranges tries few caps. Caps on the
slowest stage: Alpa (Zheng et al. 2022); chain partitioning: Pinar and Aykanat 2004; stages by dynamic programming:
PipeDream (Narayanan et al. 2019). Blocks may also offload saved values, and stages the optimizer state, to host memory.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from autopar.formulate.block_memory import ChainBytes, FloatArray
from autopar.formulate.constraints import FREE, Constraints, Mask
from autopar.formulate.hosted_state import HostedState, needed_state
from autopar.formulate.step_time import Pipeline, Split, StepTime, step_time
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.balance import least_load
from autopar.pipeline_partition.block_ranges import IntArray, Windows, symbols_of, windows
from autopar.pipeline_partition.p2p import StageTransfers, hop_seconds
from autopar.pipeline_partition.recompute_pareto import RecomputeMixtures, mixtures, special_blocks
from autopar.recompute import Recompute

_RECOMPUTE_ORDER = [Recompute.FULL, Recompute.SELECTIVE, Recompute.OFFLOAD, Recompute.NONE]
"""Order of flavours within equal blocks of a stage: most recompute first."""

UNLIMITED = 1e300
"""More bytes than any stage holds, but less than the bytes of forbidden choices."""

ROUNDING = 1e-9
"""Relative rounding error of sums of equal blocks."""

MOST_OPTIONS = 8
"""Options of a stage, evenly chosen among those between the fastest and the one that ends earliest."""


def best_split(
    totals: FloatArray,
    memory: ChainBytes,
    pipeline: Pipeline,
    limit: float,
    hop: StageTransfers | float,
    constraints: Constraints = FREE,
) -> tuple[Split, StepTime] | None:
    """Return the split into stages with recompute and the least step time; None if none fits.

    A stage takes the fastest feasible mixture of flavours (`recompute_pareto.py`), or the one whose reductions end
    earliest. Where optimizer state may lie in host memory, a mixture has no more of it there than it needs to fit
    (`hosted_state.py`), and mixtures between these two are taken, too: they copy less. Among these splits the optimum
    is exact if gradient traffic hides behind compute (g_s + a_s <= f_s + b_s), hops are equal at all cuts and do not
    slow the pace, and forwards wait for no copies. Otherwise the search minimises a lower bound of the step time, in
    which such a stage delays later stages only by its forward and the slowest stage sets the pace; the split with the
    least true step time among those visited is returned.

    Args:
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        memory: Bytes of ranges of the chain of blocks.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        hop: Seconds of handing one microbatch on or back: one number, or by where the chain is cut.
        constraints: Allowed cuts, recompute and host memory.
    """
    chain, num_stages = memory.chain, pipeline.num_stages
    if num_stages > len(chain):
        return None
    symbols = symbols_for(memory, constraints)
    best: tuple[Split, StepTime] | None = None
    for longest in _lengths(len(chain), num_stages):
        found = windows(symbols, longest, num_stages == 1)
        stages = fitting_stages(found, totals, memory, pipeline, min(limit, UNLIMITED), constraints)
        best = _best_cut(stages, totals, chain, pipeline, hop)
        if longest == len(chain) or not stages.grow:
            break
        if best is not None and best[1].seconds <= _longer_stage_bound(totals, chain, pipeline, longest):
            break
    if best is None:
        return None
    return _with_sorted_flavours(*best, totals, memory, pipeline, limit, hop, constraints)


def symbols_for(memory: ChainBytes, constraints: Constraints) -> tuple[int, ...]:
    """Return the equivalence class of each block with regard to a stage's seconds, bytes and allowed recompute."""
    alike = [
        tuple(block for block, own in enumerate(each) if own == allowed)
        for each in (constraints.keeps, constraints.states)
        for allowed in set(each)
    ]
    return symbols_of(memory.chain, (*special_blocks(memory), *alike))


def _with_sorted_flavours(
    split: Split,
    time: StepTime,
    totals: FloatArray,
    memory: ChainBytes,
    pipeline: Pipeline,
    limit: float,
    hop: StageTransfers | float,
    constraints: Constraints,
) -> tuple[Split, StepTime]:
    """Return the split with the flavours of equal blocks sorted, in stages where that fits and if it is no slower.

    Earlier blocks end their backward later, so recompute there hides more reductions. The order also has the least
    memory peak.
    """
    found = []
    hosted = split.away
    for stage, ((start, stop), flavours) in enumerate(zip(split.ranges, split.recompute, strict=True)):
        kinds = memory.chain[start:stop]
        of_kind = {
            kind: sorted(
                (own for own, other in zip(flavours, kinds, strict=True) if other == kind), key=_RECOMPUTE_ORDER.index
            )
            for kind in set(kinds)
        }
        ordered = tuple(of_kind[kind].pop(0) for kind in kinds)
        allowed = not constraints.keeps or all(map(operator.contains, constraints.keeps[start:stop], ordered))
        peak = memory.peak(start, stop, pipeline.in_flight(stage), ordered, away=hosted[stage])
        found.append(ordered if allowed and peak <= limit else flavours)
    other = replace(split, recompute=tuple(found))
    found_time = step_time(totals, memory.chain, pipeline, other, hop_seconds(other, hop))
    return (other, found_time) if found_time.seconds <= time.seconds * (1 + ROUNDING) else (split, time)


def least_flow(seconds: Sequence[float] | FloatArray, chain: Sequence[int] | IntArray, pipeline: Pipeline) -> float:
    """Lower bound on the step time: the least `flow` of any split, a block of kind k taking `seconds[k]`.

    Relaxes: memory, hops and reductions; blocks stay whole. Valid when: `seconds` are lower bounds per kind. Costs: a
    dynamic program over blocks and stages. Source: chain partitioning (Pinar and Aykanat 2004); with several chunks,
    `balance.least_load`.
    """
    from autopar.pipeline_partition.partition_kernel import chain_bottleneck  # imported late: loads the compiler

    blocks = np.asarray(seconds)[np.asarray(chain)]
    bottleneck = float(blocks.sum())
    if pipeline.num_chunks > 1:
        bottleneck = least_load(Counter(blocks.tolist()), pipeline.num_groups)
    elif pipeline.num_stages > 1:
        bottleneck = chain_bottleneck(np.concatenate([[0.0], np.cumsum(blocks)]), pipeline.num_stages)
    if not pipeline.fills:
        return pipeline.num_microbatches * bottleneck
    return float(blocks.sum() + (pipeline.num_microbatches - 1) * bottleneck)


def _lengths(num_blocks: int, num_stages: int) -> Iterator[int]:
    """Yield limits on the blocks of a stage: about twice an even share, then doubled, at last all blocks."""
    longest = 2 * -(-num_blocks // num_stages) + 2
    while longest < num_blocks:
        yield longest
        longest *= 2
    yield num_blocks


def _longer_stage_bound(totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, longest: int) -> float:
    """Lower bound on the step time of splits with a stage of more than `longest` blocks.

    Relaxes: everything but the longest stage's seconds and the total. Valid when: always. Costs: prefix sums.
    """
    blocks = (totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD])[np.asarray(chain)]
    sums = np.concatenate([[0.0], np.cumsum(blocks)])
    least = float((sums[longest + 1 :] - sums[: -longest - 1]).min())
    return float(sums[-1]) + (pipeline.num_microbatches - 1) * least


@dataclass(frozen=True, slots=True, eq=False)
class FittingStages:
    """The feasible stages; (stages, windows, options) arrays.

    Options 0 and 1 are the fastest feasible mixture and the one whose reductions end earliest. Where optimizer state
    may lie in host memory, options are the mixtures that no other one beats in both, from the fastest on.

    Attributes:
        at: Windows of the ranges that may be stages, as in `Windows.at`.
        mixtures: Mixtures of the windows.
        seconds: t_s, infinity if none fits.
        tails: tail_s.
        slow: slow_s.
        taken: Index of the mixture.
        boundary: Block of the window's first range up to which optimizer state lies in host memory, where it may.
        places: Where the optimizer state of blocks may lie.
        before: (blocks + 1,) forward seconds of the blocks before each.
        trains: Whether there are backward passes.
        grow: Whether longer ranges might fit.
    """

    at: IntArray
    mixtures: RecomputeMixtures
    seconds: FloatArray
    tails: FloatArray
    slow: FloatArray
    taken: IntArray
    boundary: IntArray
    places: HostedState
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
    """Return the feasible stages among the windows `found`; other arguments as in `best_split`."""
    flying = [pipeline.in_flight(stage) for stage in range(pipeline.num_stages)]
    mixed = mixtures(found, totals, memory, pipeline.overlap, limit, (min(flying), max(flying)), constraints)
    places = HostedState.of(memory, constraints, totals)
    options = MOST_OPTIONS if constraints.hosts_optimizer else 2
    shape = pipeline.num_stages, len(found.start), options
    taken, boundary = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    seconds, tails = np.full(shape, np.inf), np.zeros(shape)
    every = np.arange(len(found.start))[:, None]
    for in_flight in sorted(set(flying)):
        rows = [stage for stage, count in enumerate(flying) if count == in_flight]
        until, fits = _least_hosted(mixed, in_flight, limit, memory.host_room, places, found)
        ends_of = found.start[:, None], found.stop[:, None], until
        own = np.where(fits, mixed.seconds + places.pass_seconds(*ends_of), np.inf)
        tail = mixed.tails + places.seconds(*ends_of)
        ends = own + mixed.slow + tail
        if constraints.hosts_optimizer:
            chosen, is_there = _unbeaten(own, ends, options)
        else:
            chosen, is_there = (
                np.stack([own.argmin(axis=1), ends.argmin(axis=1)], axis=1),
                np.asarray(fits.any(axis=1))[:, None],
            )
        taken[rows], boundary[rows] = chosen, until[every, chosen]
        seconds[rows], tails[rows] = np.where(is_there, own[every, chosen], np.inf), tail[every, chosen]
    used = max(2, int(np.isfinite(seconds).any(axis=(0, 1)).sum()))
    return FittingStages(
        at=np.where(constraints.ranges(*found.at.shape), found.at, -1),
        mixtures=mixed,
        seconds=np.ascontiguousarray(seconds[..., :used]),  # compiled loops take no others
        tails=np.ascontiguousarray(tails[..., :used]),
        slow=mixed.slow[every[None], taken[..., :used]],
        taken=taken[..., :used],
        boundary=boundary[..., :used],
        places=places,
        before=np.concatenate([[0.0], np.cumsum(totals[np.asarray(memory.chain), Slot.FORWARD])]),
        trains=bool(totals[:, Slot.BACKWARD].any()),
        grow=bool(mixed.grows[found.at[found.at[:, -1] >= 0, -1]].any()),
    )


def _least_hosted(
    mixed: RecomputeMixtures, in_flight: int, limit: float, host_room: float, places: HostedState, found: Windows
) -> tuple[IntArray, Mask]:
    """Return the least boundary of hosted optimizer state with which each mixture fits, and whether it fits with it."""
    start, stop = found.start[:, None], found.stop[:, None]
    if not any(places.may):
        fits = (mixed.peaks(in_flight) <= limit) & (mixed.host_bytes(in_flight) <= host_room)
        return np.broadcast_to(start, fits.shape), np.asarray(fits)
    resident, passes, update = mixed.fixed.resident[:, None], mixed.passes(in_flight), mixed.fixed.update[:, None]
    stream = places.stream(start, stop)
    needed = needed_state(resident, passes, update, limit, places.what)
    needed = np.where(needed > 0, needed_state(resident, passes + stream, update, limit, places.what), 0.0)
    boundary = np.minimum(places.least(start, stop, needed), stop)
    hosted = places.bytes(start, stop, boundary)
    streamed = np.where(hosted > 0, stream, 0.0)
    peaks = mixed.peaks(in_flight, hosted, streamed, places.what)
    fits = (peaks <= limit) & (mixed.host_bytes(in_flight, hosted) <= host_room)
    return boundary, np.asarray(fits)


def _unbeaten(seconds: FloatArray, ends: FloatArray, most: int) -> tuple[IntArray, Mask]:
    """Return the columns of each row that no other one beats in both numbers, fastest first, and which are there.

    Args:
        seconds: (rows, columns) seconds; infinity where there is nothing.
        ends: The other number, likewise.
        most: Columns returned; of more, evenly chosen ones, the first and the last among them.
    """
    order = np.lexsort((ends, seconds), axis=1)
    ordered = np.take_along_axis(ends, order, axis=1)
    before = np.minimum.accumulate(
        np.concatenate([np.full((len(ordered), 1), np.inf), ordered[:, :-1]], axis=1), axis=1
    )
    keep = ordered < before
    front = np.take_along_axis(order, np.argsort(~keep, axis=1, kind="stable"), axis=1)
    count = keep.sum(axis=1)[:, None]
    numbers = np.arange(most)[None, :]
    spread = np.where(count > most, np.rint(numbers * (count - 1) / (most - 1)).astype(np.int64), numbers)
    return np.take_along_axis(front, np.minimum(spread, front.shape[1] - 1), axis=1), numbers < count


def _best_cut(
    stages: FittingStages, totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, hop: StageTransfers | float
) -> tuple[Split, StepTime] | None:
    """Return the best split into feasible stages by best-first search over ranges of caps; see `best_split`."""
    from autopar.pipeline_partition.partition_kernel import (  # imported late: loads the compiler
        bottleneck,
        earliest_end,
    )

    at, follow = stages.at, pipeline.num_microbatches - 1
    least_pace = bottleneck(at, stages.seconds.min(axis=2))
    if not np.isfinite(least_pace):
        return None
    back = float(hop.mean[:, 1].mean()) if isinstance(hop, StageTransfers) else hop
    starts = np.arange(pipeline.num_stages)[:, None] * (back if stages.trains else 0.0)
    before = stages.before[None, :-1] - starts
    hops = pipeline.hops(hop.least if isinstance(hop, StageTransfers) else hop) + pipeline.fixed
    seconds = stages.seconds
    ends = at, stages.mixtures.lengths, seconds, stages.tails, stages.slow, before
    least, *_ = earliest_end(*ends, np.inf)
    caps = _distinct(seconds[np.isfinite(seconds) & (seconds >= least_pace)]) if follow else np.array([UNLIMITED])
    best: tuple[Split, StepTime] | None = None
    # Ranges of caps: lower bound on splits whose slowest stage is in the range, first and last cap, earliest end.
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
            split = _split_of(stages, stops, options)
            time = step_time(totals, chain, pipeline, split, hop_seconds(split, hop))
            if best is None or time.seconds < best[1].seconds:
                best = (split, time)
        # All caps from the pace of this split up to its cap have the same end.
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


def _split_of(stages: FittingStages, stops: IntArray, options: IntArray) -> Split:
    """Return the split of a cut."""
    ranges, recompute, offload, start = [], [], [], 0
    for stage, (stop, option) in enumerate(zip(stops.tolist(), options.tolist(), strict=True)):
        window = int(stages.at[start, stop - start - 1])
        ranges.append((start, stop))
        recompute.append(stages.mixtures.flavours(window, int(stages.taken[stage, window, option])))
        beyond = int(stages.boundary[stage, window, option]) - stages.mixtures.first_blocks[window]
        offload.append(stages.places.away(start, stop, start + beyond))
        start = stop
    return Split.of_stages(ranges, recompute, offload, stages.places.shared, stages.places.what)


def _distinct(values: FloatArray) -> FloatArray:
    """Return the values in ascending order, values that differ by rounding only once."""
    ordered = np.sort(values)
    return np.asarray(ordered[np.concatenate([[True], np.diff(ordered) > ROUNDING * ordered[1:]])])
