"""Cuts for the schedules that have no closed form: stages in turn on groups of devices, and backwards in two passes.

The chain is cut so that the slowest stage is as fast as can be, whatever it holds. Then every group of devices chooses
what the blocks of its stages recompute: with a price on bytes every stage takes the mixture of least seconds and price,
and the least price at which the group fits is found by bisection. Where that is faster, the optimizer's state of all
its stages goes to host memory. The seconds of the step are those of the longest path through its tasks
(`scheduled.py`), the bytes of a group those of the fullest moment of its order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.overlap import state_buffers
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.cuts import UNLIMITED, best_split, may_lie, symbols_for
from autopar.formulate.memory import ChainBytes, FloatArray
from autopar.formulate.mixtures import Mixtures, mixtures
from autopar.formulate.scheduled import scheduled_step, works_of
from autopar.formulate.step import Pipeline, Split, StepTime
from autopar.formulate.tables import Slot
from autopar.formulate.windows import IntArray, windows
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, chunks_of
from autopar.schedule.holding import moments

PRICES = 40
"""Steps of the bisection for the price of a byte; it halves the logarithm of the range each time."""


def best_grouped(
    passes: FloatArray,
    totals: FloatArray,
    memory: ChainBytes,
    pipeline: Pipeline,
    limit: float,
    hop: float,
    constraints: Constraints = FREE,
) -> tuple[Split, StepTime] | None:
    """Return a good split into stages under any schedule, and its step time; None if none is found that fits.

    Args:
        passes: (kinds, 3) seconds of one instance, `scheduled.pass_seconds`.
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        memory: What ranges of the chain of blocks hold, with the backward split if the schedule splits it.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        hop: Seconds of sending one microbatch's boundary from a stage to the next.
        constraints: Cuts, recompute and what may lie in host memory.
    """
    joint = totals.copy()
    joint[:, Slot.BACKWARD] = passes[:, 1] + passes[:, 2]
    even = replace(pipeline, schedule="1f1b", num_chunks=1, num_microbatches=2 * pipeline.num_microbatches)
    nothing = ChainBytes.nothing(memory.chain, memory.flavours)
    cut = best_split(joint, nothing, even, np.inf, 0.0, replace(constraints, keeps=(), states=()))
    if cut is None:
        return None
    ranges = cut[0].ranges
    longest = max(stop - start for start, stop in ranges)
    found = windows(symbols_for(memory, constraints), longest, len(ranges) == 1)
    mixed = mixtures(
        found, joint, memory, pipeline.overlap, min(limit, UNLIMITED), (1, pipeline.num_microbatches), constraints
    )
    stages = [_Stage.of(mixed, memory, start, stop, int(found.at[start, stop - start - 1])) for start, stop in ranges]
    schedule = SCHEDULES[pipeline.schedule]
    recompute: list[tuple[Recompute, ...]] = [()] * len(stages)
    offload = [False] * len(stages)
    here, there = may_lie(found, constraints)
    for group, chunks in enumerate(chunks_of(schedule.groups(pipeline.num_groups, pipeline.num_chunks))):
        rows = moments(schedule, group, pipeline.num_groups, pipeline.num_microbatches, pipeline.num_chunks)
        own = [stages[stage] for stage in chunks]
        ways = (tuple(not here[stage.window] for stage in own), tuple(bool(there[stage.window]) for stage in own))
        best: tuple[float, list[int], tuple[bool, ...]] | None = None
        for hosted in dict.fromkeys(ways):
            taken = _fastest(own, rows, min(limit, UNLIMITED), memory.host_room, hosted)
            if taken is None:
                continue
            again = sum(float(stage.again[mixture]) for stage, mixture in zip(own, taken, strict=True))
            copies = sum(stage.copying for stage, away in zip(own, hosted, strict=True) if away)
            added = pipeline.num_microbatches * again + copies
            if best is None or added < best[0]:
                best = added, taken, hosted
        if best is None:
            return None
        for stage, mixture, away in zip(chunks, *best[1:], strict=True):
            recompute[stage] = mixed.flavours(stages[stage].window, int(stages[stage].numbers[mixture]))
            offload[stage] = away
    split = Split(ranges, tuple(recompute), tuple(offload) if any(offload) else ())
    return split, grouped_time(passes, totals, memory.chain, pipeline, split, hop)


def grouped_time(
    passes: FloatArray, totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, split: Split, hop: float
) -> StepTime:
    """Return the step time of a split under any schedule; arguments as of `best_grouped`."""
    splits = SCHEDULES[pipeline.schedule].splits
    turns = pipeline.with_turns
    works = works_of(passes * turns, totals, chain, split, splits=splits)
    seconds = scheduled_step(pipeline.schedule, pipeline.num_groups, pipeline.num_microbatches, works, (hop, hop))
    each = np.array([work.forward + work.backward + work.weight for work in works])
    return StepTime(seconds + pipeline.fixed, seconds, 0.0, each)


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """A stage and its mixtures that could fit; (mixtures,) arrays, and bytes that all of them have."""

    window: int
    numbers: IntArray
    again: FloatArray
    kept: FloatArray
    running: FloatArray
    transit: FloatArray
    hosted: FloatArray
    late: float
    weight: float
    resident: float
    gathered: float
    reducing: float
    received: float
    update: float
    state: float
    copying: float

    @classmethod
    def of(cls, mixed: Mixtures, memory: ChainBytes, start: int, stop: int, window: int) -> "_Stage":
        late, weight = memory.put_off(start, stop)
        numbers, fixed = np.flatnonzero(np.isfinite(mixed.running[window])), mixed.fixed
        return cls(
            window=window,
            numbers=numbers,
            again=mixed.again[window, numbers],
            kept=mixed.kept[window, numbers],
            running=mixed.running[window, numbers],
            transit=mixed.transit[window, numbers],
            hosted=mixed.hosted[window, numbers],
            late=late,
            weight=weight,
            resident=float(fixed.resident[window]),
            gathered=float(fixed.gathered[window]),
            reducing=float(fixed.reducing[window]),
            received=float(fixed.received[window]),
            update=float(fixed.update[window]),
            state=float(fixed.state[window]),
            copying=float(mixed.copying[window]),
        )


def _fastest(
    stages: Sequence[_Stage], rows: FloatArray, limit: float, host_room: float, offload: Sequence[bool]
) -> list[int] | None:
    """Return the mixtures of the stages of a group that are fastest together, nearly; None if none fit.

    Args:
        stages: The stages of the group.
        rows: (moments, 5 stages) what is held while tasks run, see `moments`.
        limit: Bytes per device.
        host_room: Bytes of host memory per device.
        offload: Of which stages the optimizer's state lies there.
    """
    if not all(len(stage.numbers) for stage in stages):
        return None
    counts = rows.reshape(len(rows), len(stages), 5)
    states = [stage.state if away else 0.0 for stage, away in zip(stages, offload, strict=True)]
    fixed = sum(stage.resident for stage in stages) - sum(states)
    beside = max(stage.gathered for stage in stages) + max(stage.reducing for stage in stages)
    beside += sum(stage.received for stage in stages)
    update = max(stage.update + float(state_buffers(state)) for stage, state in zip(stages, states, strict=True))
    held = np.maximum(counts[..., 0].max(axis=0), 1.0)

    def fits(taken: Sequence[int]) -> bool:
        kept = zip(stages, taken, held.tolist(), strict=True)
        away = sum(states) + sum((count + 1) * float(stage.hosted[own]) for stage, own, count in kept)
        return away <= host_room and peak(taken) <= limit

    def peak(taken: Sequence[int]) -> float:
        sizes = np.array(
            [
                (stage.kept[own], stage.late, stage.running[own], stage.running[own], stage.weight)
                for stage, own in zip(stages, taken, strict=True)
            ]
        )
        moved = max(float(stage.transit[own]) for stage, own in zip(stages, taken, strict=True))
        return fixed + max(float((rows @ sizes.ravel()).max()) + beside + moved, update)

    def at(price: float) -> list[int]:
        return [
            int((stage.again + price * (count * stage.kept + stage.running + stage.transit)).argmin())
            for stage, count in zip(stages, held.tolist(), strict=True)
        ]

    taken = at(0.0)
    if fits(taken):
        return taken
    low, high = -20.0, 3.0  # seconds per byte, to the power of ten: from nothing to more than any stage takes
    best = None
    for _ in range(PRICES):
        middle = (low + high) / 2
        taken = at(10.0**middle)
        if fits(taken):
            best, high = taken, middle
        else:
            low = middle
    return best
