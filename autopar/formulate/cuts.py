"""Cuts of the chain of blocks into stages, and what the stages recompute: the least step time that fits.

`step.py` has the formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.memory import FloatArray, RangeBytes
from autopar.formulate.step import Pipeline, Split, StepTime, gather_seconds, rerun_seconds, stage_seconds, step_time
from autopar.formulate.tables import Slot
from autopar.recompute import ON_DEVICE


def best_split(
    totals: FloatArray,
    memory: RangeBytes,
    chain: Sequence[int],
    pipeline: Pipeline,
    limit: float,
    hop: float,
    constraints: Constraints = FREE,
) -> tuple[Split, StepTime] | None:
    """Return the split into stages with the least step time whose stages all fit and keep to the constraints, or None.

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
    stages = _stage_options(totals, memory, chain, pipeline, limit, constraints)
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
"""From fastest to slowest."""


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
    totals: FloatArray,
    memory: RangeBytes,
    chain: Sequence[int],
    pipeline: Pipeline,
    limit: float,
    constraints: Constraints,
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
        passes = forward + backward + rerun_seconds(spans, recompute)
        taken = stage_seconds(passes, gradient, gather_seconds(spans, recompute), overlap)
        each.append((taken, *tail(sums[:, Slot.BACKWARD] + rerun_seconds(sums, recompute))))
    seconds = np.full((num_stages, num_blocks, num_blocks + 1), np.inf)
    tails, slow = np.zeros(seconds.shape), np.zeros(seconds.shape)
    chosen = np.zeros(seconds.shape, dtype=np.int8)
    for stage in range(num_stages):
        for number in reversed(range(len(flavours))):  # the fastest that fits has the last word
            fits = memory.peaks(pipeline.in_flight(stage), flavours[number]) <= limit
            fits &= constraints.stages(flavours[number], num_blocks)
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
