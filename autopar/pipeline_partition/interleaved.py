"""Partitioning for schedules without a closed-form step time: interleaved stages, and split backward passes.

Candidate cuts minimise the slowest stage, minimise the sum over chunks of the slowest stage, or place the larger stages
in one run (`waves.py`); they ignore memory. For each cut, every group of devices chooses the recompute of its stages: a
Lagrangian price per byte, found by bisection, and greedy refinement stage by stage (`interleaved_kernel.py`). The
optimizer state of the first blocks of a group moves to host memory where that is faster. The step time is the longest
path through the schedule's tasks (`formulate/scheduled_step.py`), the memory of a group its fullest moment. The fastest
cut is taken, and may be improved by moving blocks between stages (local search). Schedules: interleaved 1F1B (Narayanan
et al. 2021), zero bubble (Qi et al. 2023).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from random import Random

import numpy as np

from autopar.cost.overlap import state_buffers
from autopar.formulate.block_memory import ChainBytes, FloatArray
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.hosted_state import HostedState, needed_state
from autopar.formulate.scheduled_step import StageWork, scheduled_step, works_of
from autopar.formulate.step_time import Hop, Pipeline, Split, StepTime
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.block_ranges import IntArray, windows
from autopar.pipeline_partition.p2p import StageTransfers, hop_seconds
from autopar.pipeline_partition.recompute_pareto import RecomputeMixtures, mixtures
from autopar.pipeline_partition.stage_cuts import ROUNDING, UNLIMITED, symbols_for
from autopar.pipeline_partition.waves import Ranges, cut_evenly, cuts_in_runs, cuts_in_waves
from autopar.recompute import Hosted, Recompute
from autopar.schedule import SCHEDULES, chunks_of
from autopar.schedule.holding import moments

PRICE_STEPS = 24
"""Steps of the bisection for the price of a byte; each halves the range of its logarithm."""

STEPS = 64
"""Resolution of block seconds, relative to the longest block, when cutting the chain."""

RUNS = 3
"""Cuts with the larger stages in one run that are evaluated with memory, fastest first."""

FEWEST_RUNS, MOST_RUNS, RUN_TASKS = 8, 48, 1_000_000
"""Least and most run positions compared, and the total number of tasks that may be scheduled for the comparison."""

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a group's optimizer state of which mixtures are chosen with no more in host memory."""

MOST_SHIFTS, PATIENCE = 400, 80
"""Most cuts tried in the local search, and consecutive failures after which it stops."""


def grouped_time(
    passes: FloatArray, totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, split: Split, hop: Hop
) -> StepTime:
    """Return the step time of a split under any schedule.

    Arguments as in `RecomputeChooser`, `hop` as in `step_time`.
    """
    splits = SCHEDULES[pipeline.schedule].splits
    return _time(works_of(passes * pipeline.with_turns, totals, chain, split, splits=splits), pipeline, hop)


def _time(works: Sequence[StageWork], pipeline: Pipeline, hop: Hop) -> StepTime:
    hops: tuple[float | FloatArray, float | FloatArray] = (hop, hop)
    if isinstance(hop, np.ndarray):  # forward from each stage but the last, backward from each but the first
        hops = np.append(hop[:, 0], 0.0), np.append(0.0, hop[:, 1])
    seconds = scheduled_step(pipeline.schedule, pipeline.num_groups, pipeline.num_microbatches, works, hops)
    each = np.array([work.forward + work.backward + work.weight for work in works])
    return StepTime(seconds + pipeline.fixed, seconds, 0.0, each)


@dataclass(frozen=True, slots=True)
class _StageChoice:
    """Choice of a stage: recompute flavours of its blocks, and whose optimizer state is in host memory."""

    flavours: tuple[Recompute, ...]
    away: tuple[bool, ...]


class RecomputeChooser:
    """Chooses recompute and offload for cuts of one chain; results shared by cuts are cached.

    Args:
        passes: (kinds, 3) seconds of one instance, `autopar.formulate.scheduled_step.pass_seconds`.
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        memory: Bytes of ranges of the chain, with the backward split if the schedule splits it.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        hop: Seconds of handing one microbatch on or back: one number, or by where the chain is cut.
        constraints: Allowed cuts, recompute and host memory.
    """

    def __init__(
        self,
        passes: FloatArray,
        totals: FloatArray,
        memory: ChainBytes,
        pipeline: Pipeline,
        limit: float,
        hop: StageTransfers | float,
        constraints: Constraints = FREE,
    ) -> None:
        self._passes, self._totals, self._memory = passes * pipeline.with_turns, totals, memory
        self._pipeline, self._limit, self._hop, self._constraints = pipeline, min(limit, UNLIMITED), hop, constraints
        self._joint = totals.copy()
        self._joint[:, Slot.BACKWARD] = passes[:, 1] + passes[:, 2]
        self._schedule = SCHEDULES[pipeline.schedule]
        self._chunks = chunks_of(self._schedule.groups(pipeline.num_groups, pipeline.num_chunks))
        self._edges = constraints.edges(len(memory.chain))
        self._longest = 0

    def best(self, cutoff: float = math.inf) -> tuple[Split, StepTime] | None:
        """Return the best split among the candidate cuts, with its step time; None if none fits.

        Heuristic. Block seconds are rounded to `STEPS` steps, so that similar choices share their cuts.

        Args:
            cutoff: Step time from which on splits are of no interest.
        """
        chain, pipeline = self._memory.chain, self._pipeline
        seconds = (self._joint[:, Slot.FORWARD] + self._joint[:, Slot.BACKWARD])[: max(chain) + 1]
        steps = np.ceil(seconds / seconds.max() * STEPS) if seconds.max() > 0 else np.ones(len(seconds))
        cuts = _cuts(tuple(steps.tolist()), chain, pipeline.num_groups, pipeline.num_chunks, tuple(self._edges))
        if not cuts:
            return None
        passes = self._passes[: max(chain) + 1]
        passes = np.ceil(passes / seconds.max() * STEPS) if seconds.max() > 0 else np.ones_like(passes)
        size = pipeline.num_groups, pipeline.num_microbatches, pipeline.num_chunks
        runs = _runs(tuple(map(tuple, passes.tolist())), chain, pipeline.schedule, *size, tuple(self._edges))
        cuts = tuple(dict.fromkeys((*cuts, *runs)))
        self._prepare_windows(max(stop - start for ranges in cuts for start, stop in ranges))
        best = None
        for ranges in cuts:
            found = self._best_split_of(ranges, cutoff)
            if found is not None and (best is None or found[1].seconds < best[1].seconds):
                best, cutoff = found, min(cutoff, found[1].seconds)
        return best

    def improve_by_moves(
        self, found: tuple[Split, StepTime], should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[Split, StepTime]:
        """Improve a split by moving blocks between stages; return a split that is no slower.

        Heuristic: local search with random moves (fixed seed), which keeps a move that lowers the step time.

        Args:
            found: The split and its step time.
            should_stop: Whether to stop early.
        """
        ranges, edges, best = found[0].ranges, self._edges, found
        place = {edge: number for number, edge in enumerate(edges)}
        sizes = [place[stop] - place[start] for start, stop in ranges]
        self._prepare_windows(2 * max(stop - start for start, stop in ranges))
        draw, idle, tried = Random(len(ranges)), 0, {tuple(sizes)}
        for _ in range(MOST_SHIFTS):
            if idle == PATIENCE or should_stop():
                break
            idle += 1
            moved = _with_moved_blocks(sizes, draw)
            cut = tuple(pairwise(edges[number] for number in (0, *accumulate(moved))))
            if tuple(moved) in tried or max(stop - start for start, stop in cut) > self._longest:
                continue
            tried.add(tuple(moved))
            other = self._best_split_of(cut, best[1].seconds)
            if other is not None and other[1].seconds < best[1].seconds * (1 - ROUNDING):
                best, sizes, idle = other, moved, 0
        return best

    def _prepare_windows(self, longest: int) -> None:
        """Compute windows and mixtures for stages of up to `longest` blocks, unless they are there already."""
        longest = min(_rounded_up(longest), len(self._memory.chain))
        if longest <= self._longest:
            return
        memory, pipeline, constraints = self._memory, self._pipeline, self._constraints
        self._longest = longest
        self._windows = windows(symbols_for(memory, constraints), longest, pipeline.num_stages == 1)
        self._mixed = mixtures(
            self._windows,
            self._joint,
            memory,
            pipeline.overlap,
            self._limit,
            (1, pipeline.num_microbatches),
            constraints,
            pipeline.num_chunks,
        )
        self._places = HostedState.of(memory, constraints, self._totals)
        self._stages: dict[int, _Stage] = {}
        self._chosen: dict[tuple[int, ...], tuple[list[_StageChoice], ...]] = {}
        self._works: dict[tuple[int, _StageChoice], StageWork] = {}

    def _best_split_of(self, ranges: Ranges, cutoff: float) -> tuple[Split, StepTime] | None:
        """Return the split of a cut with its groups' choices, and its step time; None if infeasible or too slow.

        Both ways of choosing mixtures are tried: waiting times depend on whether the groups recompute in equal stages.
        """
        each = [int(self._windows.at[start, stop - start - 1]) for start, stop in ranges]
        best = self._split_of(0, ranges, each, cutoff)
        other = self._split_of(1, ranges, each, cutoff if best is None else min(cutoff, best[1].seconds))
        if best is None or other is None:
            return best or other
        return min(best, other, key=lambda found: found[1].seconds)

    def _split_of(self, way: int, ranges: Ranges, each: Sequence[int], cutoff: float) -> tuple[Split, StepTime] | None:
        """Return the split of a cut if groups choose in way 0 or 1; groups in order, as early ones hold most memory."""
        count, fixed = self._pipeline.num_microbatches, self._pipeline.fixed
        found: dict[int, tuple[_StageChoice, StageWork]] = {}
        for group, chunks in enumerate(self._chunks):
            key = (group, *(each[stage] for stage in chunks))
            if key not in self._chosen:
                self._chosen[key] = self._choose_mixtures(group, key[1:])
            if not self._chosen[key]:
                return None
            chosen = self._chosen[key][way]
            busy = 0.0
            for stage, what in zip(chunks, chosen, strict=True):
                work = self._work(each[stage], ranges[stage], what)
                found[stage] = what, work
                busy += work.forward + work.backward + work.weight
            if count * busy * (1 - ROUNDING) + fixed >= cutoff:
                return None
        every = [found[stage] for stage in range(len(ranges))]
        recompute, offload = tuple(what.flavours for what, _ in every), tuple(what.away for what, _ in every)
        split = Split.of_stages(ranges, recompute, offload, self._places.shared, self._places.what)
        return split, _time([work for _, work in every], self._pipeline, hop_seconds(split, self._hop))

    def _stage(self, window: int) -> "_Stage":
        if window not in self._stages:
            start, stop = int(self._windows.start[window]), int(self._windows.stop[window])
            self._stages[window] = _Stage.of(self._mixed, self._memory, self._places, start, stop, window)
        return self._stages[window]

    def _work(self, window: int, blocks: tuple[int, int], what: _StageChoice) -> StageWork:
        """Return the seconds of a stage's passes."""
        if (window, what) not in self._works:
            split = Split.of_stages((blocks,), (what.flavours,), (what.away,), self._places.shared)
            split = replace(split, ranges=((0, blocks[1] - blocks[0]),))
            chain = self._memory.chain[slice(*blocks)]
            (work,) = works_of(self._passes, self._totals, chain, split, splits=self._schedule.splits)
            self._works[window, what] = work
        return self._works[window, what]

    def _choose_mixtures(self, group: int, each: tuple[int, ...]) -> tuple[list[_StageChoice], ...]:
        """Return the choices of a group's stages, given their windows, in two ways; empty if nothing fits."""
        pipeline = self._pipeline
        rows = moments(self._schedule, group, pipeline.num_groups, pipeline.num_microbatches, pipeline.num_chunks)
        own = [self._stage(window) for window in each]
        limit, room = self._limit, self._memory.host_room
        best: dict[int, tuple[float, list[int], tuple[int, ...]]] = {}
        for most in dict.fromkeys(_first_blocks(own, share, room) for share in _SHARES):
            for number, taken in enumerate(_fastest_mixtures(own, rows, limit, room, most)):
                hosted = _least_hosted(own, rows, limit, taken, most)
                again = sum(float(stage.again[mixture]) for stage, mixture in zip(own, taken, strict=True))
                copies = sum(float(stage.copying[count]) for stage, count in zip(own, hosted, strict=True))
                added = pipeline.num_microbatches * again + copies
                if number not in best or added < best[number][0]:
                    best[number] = added, taken, hosted
        return tuple(
            [
                _StageChoice(
                    self._mixed.flavours(stage.window, int(stage.numbers[mixture])),
                    self._places.away(stage.start, stage.start + len(stage.states) - 1, stage.start + count),
                )
                for stage, mixture, count in zip(own, taken, hosted, strict=True)
            ]
            for _, taken, hosted in best.values()
        )


def _rounded_up(longest: int) -> int:
    """Round up to four significant bits, so that few distinct lengths need windows.

    >>> [_rounded_up(longest) for longest in (7, 65, 66, 251)]
    [7, 72, 72, 256]
    """
    step = 1 << max(0, longest.bit_length() - 4)
    return -(-longest // step) * step


def _with_moved_blocks(sizes: Sequence[int], draw: Random) -> list[int]:
    """Return the sizes of stages after one or two random moves of a block that leave no stage empty."""
    found = list(sizes)
    for _ in range(draw.choice((1, 1, 2))):
        source, target = draw.randrange(len(found)), draw.randrange(len(found))
        if found[source] > 1:
            found[source] -= 1
            found[target] += 1
    return found


@lru_cache(maxsize=1024)
def _cuts(
    seconds: tuple[float, ...], chain: tuple[int, ...], num_groups: int, num_chunks: int, edges: tuple[int, ...]
) -> tuple[Ranges, ...]:
    """Return cuts that balance the seconds of each kind, regardless of memory; none if there are too few blocks."""
    stages = num_groups * num_chunks
    if len(edges) <= stages:
        return ()
    blocks = np.array(seconds)[np.asarray(chain)]
    waves = cuts_in_waves(blocks, num_groups, num_chunks, edges)
    return tuple(dict.fromkeys((cut_evenly(blocks, stages, edges), *waves)))


@lru_cache(maxsize=1024)
def _runs(
    passes: tuple[tuple[float, ...], ...],
    chain: tuple[int, ...],
    schedule: str,
    num_groups: int,
    num_microbatches: int,
    num_chunks: int,
    edges: tuple[int, ...],
) -> tuple[Ranges, ...]:
    """Return the fastest cuts with larger stages in one run, given the passes of each kind, regardless of memory."""
    blocks = np.array(passes)[np.asarray(chain)]
    tasks = len(blocks[0]) * num_groups * num_chunks * num_microbatches
    most = min(MOST_RUNS, max(FEWEST_RUNS, RUN_TASKS // tasks))
    sums, found = np.concatenate([np.zeros((1, len(blocks[0]))), np.cumsum(blocks, axis=0)]), []
    for ranges in cuts_in_runs(blocks.sum(axis=1), num_groups * num_chunks, edges, most):
        works = [StageWork(*each) for each in np.diff(sums[[0, *(stop for _, stop in ranges)]], axis=0).tolist()]
        found.append((scheduled_step(schedule, num_groups, num_microbatches, works), ranges))
    return tuple(ranges for _, ranges in sorted(found)[:RUNS])


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """A stage with its feasible mixtures: (mixtures,) arrays, and bytes that do not depend on the mixture.

    The columns of `sizes`, (mixtures, 5), are those of `moments`. `states` and `copying`, (blocks + 1,), are the bytes
    of optimizer state in host memory, and what copies of it add to the update, by how many of the first blocks have
    theirs there. `streamed` are bytes beside passes of what comes from there for them, `what` says what of the state.
    """

    window: int
    start: int
    numbers: IntArray
    sizes: FloatArray
    again: FloatArray
    transit: FloatArray
    hosted: FloatArray
    resident: float
    gathered: float
    reducing: float
    received: float
    update: float
    states: FloatArray
    copying: FloatArray
    streamed: float = 0.0
    what: Hosted = Hosted.OPTIMIZER

    @classmethod
    def of(
        cls, mixed: RecomputeMixtures, memory: ChainBytes, places: HostedState, start: int, stop: int, window: int
    ) -> "_Stage":
        late, weight = memory.deferred_bytes(start, stop)
        numbers, fixed = np.flatnonzero(np.isfinite(mixed.running[window])), mixed.fixed
        kept, running = mixed.kept[window, numbers], mixed.running[window, numbers]
        every = np.ones(len(numbers))
        ends = np.array(start), np.array(stop), np.arange(start, stop + 1)
        return cls(
            window=window,
            start=start,
            numbers=numbers,
            sizes=np.stack([kept, late * every, running, running, weight * every], axis=1),
            again=mixed.again[window, numbers],
            transit=mixed.transit[window, numbers],
            hosted=mixed.hosted[window, numbers],
            resident=float(fixed.resident[window]),
            gathered=float(fixed.gathered[window]),
            reducing=float(fixed.reducing[window]),
            received=float(fixed.received[window]),
            update=float(fixed.update[window]),
            states=places.bytes(*ends),
            copying=places.seconds(*ends),
            streamed=float(places.stream(*ends[:2])),
            what=places.what,
        )


def _first_blocks(stages: Sequence[_Stage], share: float, room: float) -> tuple[int, ...]:
    """Return of how many first blocks of each stage the state is in host memory: a share of all, as there is room.

    Stages are filled in their order; a stage whose state must be there has it there, whatever the share.
    """
    wanted = share * sum(float(stage.states[-1]) for stage in stages)
    bytes_left = min(wanted, room) - sum(float(stage.states[0]) for stage in stages)
    found = []
    for stage in stages:
        added = stage.states - stage.states[0]
        count = int(np.searchsorted(added, max(bytes_left, 0.0) * (1 + ROUNDING), side="right")) - 1
        bytes_left -= float(added[count])
        found.append(int(np.searchsorted(added, added[count], side="left")))
    return tuple(found)


def _least_hosted(
    stages: Sequence[_Stage], rows: FloatArray, limit: float, taken: Sequence[int], most: Sequence[int]
) -> tuple[int, ...]:
    """Return of how many first blocks of each stage the state has to be in host memory for mixtures to fit.

    Args:
        stages: The stages of the group.
        rows: As of `_fastest_mixtures`.
        limit: Bytes per device.
        taken: Mixture of each stage.
        most: How many have it there at most; with these they fit.
    """
    if not any(most):
        return tuple(most)
    counts = rows.reshape(len(rows), len(stages), 5)
    sizes = np.array([stage.sizes[mixture] for stage, mixture in zip(stages, taken, strict=True)])
    transit = max(float(stage.transit[mixture]) for stage, mixture in zip(stages, taken, strict=True))
    passes = float((counts * sizes).sum(axis=(1, 2)).max()) + transit + _beside(stages)
    passes += max(stage.streamed for stage in stages)
    resident = sum(stage.resident for stage in stages)
    update = max(stage.update for stage in stages)
    needed = float(needed_state(np.array(resident), np.array(passes), np.array(update), limit, stages[0].what))
    needed *= 1 + ROUNDING
    needed -= sum(float(stage.states[0]) for stage in stages)
    found = []
    for stage, count in zip(stages, most, strict=True):
        added = stage.states - stage.states[0]
        least = min(count, int(np.searchsorted(added, max(needed, 0.0), side="left")))
        needed -= float(added[least])
        found.append(least)
    return tuple(found)


def _beside(stages: Sequence[_Stage]) -> float:
    """Return the bytes of communication buffers of a group of stages while passes run."""
    beside = max(stage.gathered for stage in stages) + max(stage.reducing for stage in stages)
    return beside + sum(stage.received for stage in stages)


def _fastest_mixtures(
    stages: Sequence[_Stage], rows: FloatArray, limit: float, host_room: float, hosted: Sequence[int]
) -> tuple[list[int], ...]:
    """Return mixtures of a group's stages that fit together with little recompute, in two ways; empty if none fit.

    Args:
        stages: The stages of the group.
        rows: (moments, 5 stages) number of each kind of bytes held while tasks run, see `moments`.
        limit: Bytes per device.
        host_room: Bytes of host memory per device.
        hosted: Of how many first blocks of each stage the optimizer state is in host memory.
    """
    from autopar.pipeline_partition.interleaved_kernel import (
        fastest_together,  # imported late: loads the compiler
    )

    if not all(len(stage.numbers) for stage in stages):
        return ()
    counts = rows.reshape(len(rows), len(stages), 5)
    states = [float(stage.states[count]) for stage, count in zip(stages, hosted, strict=True)]
    fixed, beside = sum(stage.resident for stage in stages) - sum(states), _beside(stages)
    beside += max(stage.streamed for stage in stages) if any(states) else 0.0
    what = stages[0].what
    update = max(stage.update + float(state_buffers(state, what)) for stage, state in zip(stages, states, strict=True))
    held = np.maximum(counts[..., 0].max(axis=0), 1.0)
    if fixed + update > limit:
        return ()
    most = max(len(stage.numbers) for stage in stages)
    sizes = np.zeros((len(stages), most, 5))
    again, priced, transit, away = np.zeros((4, len(stages), most))
    order = np.zeros((len(stages), most), dtype=np.int64)
    for own, (stage, count) in enumerate(zip(stages, held, strict=True)):
        number = len(stage.numbers)
        sizes[own, :number], again[own, :number], transit[own, :number] = stage.sizes, stage.again, stage.transit
        priced[own, :number] = count * stage.sizes[:, 0] + stage.sizes[:, 2] + stage.transit
        away[own, :number] = (count + 1) * stage.hosted
        order[own, :number] = np.argsort(stage.again, kind="stable")
    number_of = np.array([len(stage.numbers) for stage in stages])
    bytes_of = sizes, again, priced, transit, away, order
    found, *taken = fastest_together(
        counts, number_of, *bytes_of, limit - fixed - beside, host_room - sum(states), PRICE_STEPS, ROUNDING
    )
    return tuple(list(map(int, own)) for own in taken) if found else ()
