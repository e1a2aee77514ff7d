"""Cuts of the chain of blocks into stages, and what the blocks of each recompute: the least step time that fits.

`step.py` has the formula. For a cap T on the slowest stage the rest of it is a dynamic program over stages: with A_s
the forward seconds of the stages before s, its state is the latest end so far,

    end_{s+1} = max(end_s, A_s - s h + tail_s) + t_s + slow_s    as t_q - b_q = f_q with and without recompute,

so that step = end_p + (m - 1) T + 2 (p - 1) h + fixed, but for a pace that hops make slower. Caps are tried in
ascending order until (m - 1) T is too much.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.loads import least_load
from autopar.formulate.memory import ChainBytes, FloatArray
from autopar.formulate.mixtures import Mixtures, mixtures, special_blocks
from autopar.formulate.step import Pipeline, Split, StepTime, step_time
from autopar.formulate.tables import Slot
from autopar.formulate.windows import IntArray, Windows, symbols_of, windows
from autopar.recompute import ON_DEVICE

_LEAST = list(reversed(ON_DEVICE))
"""Flavours from what keeps least."""

UNLIMITED = 1e300
"""Bytes that are more than any stage holds, and less than what must not be."""

ROUNDING = 1e-9
"""Sums of equal blocks differ by rounding only: relative."""


def best_split(
    totals: FloatArray,
    memory: ChainBytes,
    pipeline: Pipeline,
    limit: float,
    hop: float,
    constraints: Constraints = FREE,
) -> tuple[Split, StepTime] | None:
    """Return the split into stages, and what their blocks recompute, with the least step time; None if none fits.

    A stage takes the fastest mixture of flavours that fits (`mixtures.py`), or the one that ends earliest with its
    reductions. Among those splits the best is found exactly if gradient traffic hides behind compute
    (g_s + a_s <= f_s + b_s) and hops take no time from the pace; else the split minimises a slightly smaller step time,
    in which such a stage delays only the stages after it by its forward, and the slowest stage sets the pace.

    Args:
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        memory: What ranges of the chain of blocks hold.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        hop: Seconds of sending one microbatch's boundary from a stage to the next.
        constraints: Cuts and recompute that are left open.
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
        if longest == len(chain) or (best is not None and best[1].seconds <= _beyond(totals, chain, pipeline, longest)):
            break
    if best is None:
        return None
    split = _sorted(best[0], memory, pipeline, limit, constraints)
    return split, step_time(totals, chain, pipeline, split, hop)


def symbols_for(memory: ChainBytes, constraints: Constraints) -> tuple[int, ...]:
    """Return what each block is as far as its stage's seconds, bytes and recompute depend on it."""
    alike = [tuple(i for i, own in enumerate(constraints.keeps) if own == keeps) for keeps in set(constraints.keeps)]
    return symbols_of(memory.chain, [*special_blocks(memory), *alike])


def _sorted(split: Split, memory: ChainBytes, pipeline: Pipeline, limit: float, constraints: Constraints) -> Split:
    """Return the split with equal blocks of a stage in the order full, selective, none, wherever that fits.

    It takes no longer: earlier blocks end their backwards later, and hide more of what is reduced when they recompute.
    It is also the order that fills a device least, and the one that is read most easily.
    """
    found = []
    for stage, ((start, stop), flavours) in enumerate(zip(split.ranges, split.recompute, strict=True)):
        kinds = memory.chain[start:stop]
        of_kind = {
            kind: sorted((own for own, other in zip(flavours, kinds, strict=True) if other == kind), key=_LEAST.index)
            for kind in set(kinds)
        }
        ordered = tuple(of_kind[kind].pop(0) for kind in kinds)
        allowed = not constraints.keeps or all(map(operator.contains, constraints.keeps[start:stop], ordered))
        fits = memory.peak(start, stop, pipeline.in_flight(stage), ordered) <= limit
        found.append(ordered if allowed and fits else flavours)
    return Split(split.ranges, tuple(found))


def least_flow(seconds: Sequence[float] | FloatArray, chain: Sequence[int], pipeline: Pipeline) -> float:
    """Return the least `flow` of any split, whatever memory it takes, when a block of kind k takes `seconds[k]`.

    With a lower bound per kind it is a lower bound on the step time that sees that blocks are not divided between
    stages.
    """
    from autopar.formulate.kernel import evenest  # compiling is loaded when it is needed only

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
    """What stages can hold; (stages, windows, 2) arrays.

    Of the mixtures that fit, the first is the fastest, the second the one whose reductions end earliest.

    Attributes:
        at: Windows of the ranges that may be stages, as in `Windows.at`.
        mixtures: Their mixtures.
        seconds: t_s, infinity if none fits.
        tails: tail_s.
        slow: slow_s.
        taken: Number of the mixture.
        before: (blocks + 1,) forward seconds of the blocks before each.
        trains: Whether there are backward passes.
    """

    at: IntArray
    mixtures: Mixtures
    seconds: FloatArray
    tails: FloatArray
    slow: FloatArray
    taken: IntArray
    before: FloatArray
    trains: bool


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
    mixed = mixtures(found, totals, memory, pipeline.overlap, limit, min(flying), constraints.keeps)
    ends = mixed.seconds + mixed.slow + mixed.tails
    taken = np.zeros((pipeline.num_stages, len(found.start), 2), dtype=np.int64)
    fits = np.full(taken.shape, False)
    for in_flight in sorted(set(flying)):
        room = mixed.peaks(in_flight) <= limit
        rows = [stage for stage, count in enumerate(flying) if count == in_flight]
        taken[rows, :, 0] = np.where(room, mixed.seconds, np.inf).argmin(axis=1)
        taken[rows, :, 1] = np.where(room, ends, np.inf).argmin(axis=1)
        fits[rows] = room.any(axis=1, keepdims=True)
    each = np.arange(len(found.start))[None, :, None]
    return FittingStages(
        at=np.where(constraints.ranges(*found.at.shape), found.at, -1),
        mixtures=mixed,
        seconds=np.where(fits, mixed.seconds[each, taken], np.inf),
        tails=mixed.tails[each, taken],
        slow=mixed.slow[each, taken],
        taken=taken,
        before=np.concatenate([[0.0], np.cumsum(totals[np.asarray(memory.chain), Slot.FORWARD])]),
        trains=bool(totals[:, Slot.BACKWARD].any()),
    )


def _best(
    stages: FittingStages, totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, hop: float
) -> tuple[Split, StepTime] | None:
    """Return the best split into windows; see `best_split`."""
    from autopar.formulate.kernel import earliest_end, slowest  # compiling is loaded when it is needed only

    at, follow = stages.at, pipeline.num_microbatches - 1
    least_pace = slowest(at, stages.seconds[..., 0])
    if not np.isfinite(least_pace):
        return None
    starts = np.arange(pipeline.num_stages)[:, None] * (hop if stages.trains else 0.0)
    before = stages.before[None, :-1] - starts
    hops = pipeline.hops(hop) + pipeline.fixed
    seconds = stages.seconds
    least, *_ = earliest_end(at, seconds, stages.tails, stages.slow, before, np.inf)
    best: tuple[Split, StepTime] | None = None
    for cap in [np.inf] if follow == 0 else _distinct(seconds[np.isfinite(seconds) & (seconds >= least_pace)]):
        # No split with a slowest stage of at least `cap` is better than this.
        if best is not None and follow and follow * cap + least + hops >= best[1].seconds * (1 - ROUNDING):
            break
        end, stops, options = earliest_end(at, seconds, stages.tails, stages.slow, before, cap * (1 + ROUNDING))
        split, pace = _written(stages, stops, options)
        if best is not None and end + follow * pace + hops >= best[1].seconds * (1 - ROUNDING):
            continue
        time = step_time(totals, chain, pipeline, split, hop)
        if best is None or time.seconds < best[1].seconds:
            best = (split, time)
    return best


def _written(stages: FittingStages, stops: IntArray, options: IntArray) -> tuple[Split, float]:
    """Return the split of a cut, and the seconds of its slowest stage."""
    ranges, recompute, pace, start = [], [], 0.0, 0
    for stage, (stop, option) in enumerate(zip(stops.tolist(), options.tolist(), strict=True)):
        window = int(stages.at[start, stop - start - 1])
        ranges.append((start, stop))
        recompute.append(stages.mixtures.flavours(window, int(stages.taken[stage, window, option])))
        pace = max(pace, float(stages.seconds[stage, window, option]))
        start = stop
    return Split(tuple(ranges), tuple(recompute)), pace


def _distinct(values: FloatArray) -> FloatArray:
    """Return the values in ascending order, one of each that differ by rounding only: sums of equal blocks do."""
    ordered = np.sort(values)
    return np.asarray(ordered[np.concatenate([[True], np.diff(ordered) > ROUNDING * ordered[1:]])])
