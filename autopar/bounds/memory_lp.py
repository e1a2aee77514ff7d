"""Memory LP: lower bound on the step time if blocks are distributed over groups so that they fit into memory.

With n_gcr of the repeated blocks in chunk c of group g under recompute flavour r; X_gcj microbatches between forward
and backward and Y_gcj between backward and weight pass at moment j (`holding.fullest`); ρ resident and λ deferred bytes
of a block, k_r its kept bytes per microbatch, a_r its recompute seconds; o_g bytes and e_g seconds of other blocks.
Bytes are shares of a device, seconds multiples of a block's passes:

```text
min T   such that   o_g + sum_cr n_gcr (ρ + X_gcj k_r + Y_gcj λ) <= 1          every moment j of every group g
                    z >= t_g = e_g + sum_cr n_gcr (1 + a_r),   sum n = blocks,   sum e = rest,   sum o = others
                    T >= m z,    or    T >= sum_g t_g + (m - 1) z              a step passes through all groups once
```

Look here for the bound where a schedule holds more than fits with evenly cut stages, so that blocks move to other
groups. If resident bytes can be traded for link time per microbatch (sharded parameters and gradients), blocks have
further options (ρ_w, s_w), and z >= sum_cr n_gcrw s_w. For schedules without a closed form, T is the end of the last
task (`critical_path.py`), and every stage has its own blocks.

- *Relaxes*: integrality: blocks are fractional and may lie on any stage; placements; other blocks keep nothing per
  microbatch.
- *Valid when*: the numbers of `PipelineLoad` are lower bounds. With more than `MOST_GROUPS` groups neighbouring groups
  are merged: the sum of their rows, with the least that any of them holds.
- *Cost*: one linear program, shared by loads that are equal after rounding down; skipped if everything fits evenly.
- *Source*: linear programming relaxation; longest path as a linear program, Kelley and Walker, 1959.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.bounds.task_graph import excerpt
from autopar.bounds.task_lp import SLACK, Row, SparseLP, add_precedences, durations_of
from autopar.schedule.base import Schedule, chunks_of
from autopar.schedule.holding import MOST_MOMENTS, fullest, least_held, some_fullest

FloatArray = NDArray[np.float64]

DIGITS = 10
"""Binary digits that loads are rounded down to, so that one program serves many meshes: at most 0.2 % is lost."""

MOST_GROUPS = 64
"""Groups up to which `least_step` has rows for each; beyond, neighbouring groups are merged."""

MOST_STAGES = 512
"""Stages up to which the precedences of tasks are modelled; beyond, the linear program takes seconds."""

REST_GRID = 16
"""Grid points of `rest` per seconds of all repeated blocks at which programs are solved; duals serve between them."""

REST_ROW = -2
"""Index, from the end, of the row that fixes the other seconds."""


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """Work and bytes of a pipeline: seconds in passes of a block without recompute, bytes in shares of a device.

    Attributes:
        blocks: Number of repeated blocks.
        rest: Seconds of the other blocks.
        recompute: By flavour, the seconds that a block recomputes.
        kept: By flavour, the bytes that a block keeps of a microbatch for its backward.
        late: Bytes that a block retains of a microbatch until its weight pass.
        resident: Resident bytes of a block.
        others: Resident bytes of all other blocks together.
        alternatives: Other layouts of a block: resident bytes, and link seconds per microbatch.
        received: Bytes that a stage receives from the previous and from the next stage.
        outer: Number of first and of last stages that may have no repeated block.
    """

    blocks: int
    rest: float
    recompute: tuple[float, ...]
    kept: tuple[float, ...]
    late: float
    resident: float
    others: float
    alternatives: tuple[tuple[float, float], ...] = ()
    received: tuple[float, float] = (0.0, 0.0)
    outer: tuple[int, int] = (0, 0)

    def rounded(self) -> "PipelineLoad":
        """Return the load with every number rounded down to `DIGITS` binary digits."""
        return PipelineLoad(
            self.blocks,
            _rounded_down(self.rest),
            tuple(map(_rounded_down, self.recompute)),
            tuple(map(_rounded_down, self.kept)),
            _rounded_down(self.late),
            _rounded_down(self.resident),
            _rounded_down(self.others),
            tuple((_rounded_down(resident), _rounded_down(link)) for resident, link in self.alternatives),
            (_rounded_down(self.received[0]), _rounded_down(self.received[1])),
            self.outer,
        )

    @property
    def options(self) -> tuple[tuple[float, float, float, float], ...]:
        """Every layout with every flavour: resident bytes, link seconds, recompute seconds, kept bytes."""
        layouts = ((self.resident, 0.0), *self.alternatives)
        return tuple(
            (resident, link, recompute, kept)
            for resident, link in layouts
            for recompute, kept in zip(self.recompute, self.kept, strict=True)
        )


def _rounded_down(number: float) -> float:
    """Round down to `DIGITS` binary digits.

    >>> _rounded_down(0.3), _rounded_down(1000.0), _rounded_down(1001.0 + 1 / 3)
    (0.2998046875, 1000.0, 1001.0)
    """
    fraction, exponent = math.frexp(number)
    return math.ldexp(math.floor(fraction * 2**DIGITS), exponent - DIGITS)


def least_step(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, load: PipelineLoad
) -> float:
    """Lower bound on the step in block passes; infinity if nothing fits.

    >>> from autopar.schedule import SCHEDULES
    >>> roomy = PipelineLoad(blocks=8, rest=0.0, recompute=(0.0,), kept=(0.01,), late=0.01, resident=0.01, others=0.0)
    >>> least_step(SCHEDULES["zb-h1"], 2, 4, 1, roomy)
    16.0
    >>> full = PipelineLoad(blocks=8, rest=0.0, recompute=(0.0,), kept=(0.01,), late=0.15, resident=0.01, others=0.0)
    >>> round(least_step(SCHEDULES["zb-h1"], 2, 4, 1, full), 1)
    19.1
    """
    size = num_groups, num_microbatches, num_chunks
    fills = num_chunks == 1 and not schedule.steps_overlap
    if fits_evenly(schedule, *size, load):
        rounds = num_microbatches + (num_groups - 1 if fills else 0)
        return rounds * (load.blocks * (1 + min(load.recompute)) + load.rest) / num_groups
    return _solve_step(schedule, *size, load.rounded(), fills)


def least_scheduled_step(
    schedule: Schedule,
    num_groups: int,
    num_microbatches: int,
    num_chunks: int,
    load: PipelineLoad,
    passes: Sequence[float],
) -> float:
    """Lower bound on the step in block passes, with the precedences of a schedule without a closed form.

    The linear program is solved in the middle of the grid interval that contains `rest`; its dual extends the bound
    to `rest`.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        num_chunks: Stages per group.
        load: Work and bytes.
        passes: Seconds of each pass of a block without recompute, in block passes: at most 1 together.

    >>> from autopar.schedule import SCHEDULES
    >>> full = PipelineLoad(blocks=8, rest=0.0, recompute=(0.0,), kept=(0.01,), late=0.15, resident=0.01, others=0.0)
    >>> round(least_scheduled_step(SCHEDULES["zb-h1"], 2, 4, 1, full, (0.25, 0.5, 0.25)), 1)
    20.3
    """
    rounded_passes, rounded = tuple(map(_rounded_down, passes)), load.rounded()
    grid_point = load.blocks / REST_GRID * (math.floor(rounded.rest / load.blocks * REST_GRID) + 0.5)
    at_grid_point = replace(rounded, rest=grid_point)
    least, slope = _solve_scheduled_step(
        schedule, num_groups, num_microbatches, num_chunks, at_grid_point, rounded_passes
    )
    return least + slope * (rounded.rest - grid_point)  # the optimum is convex in the right-hand side


def fits_evenly(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, load: PipelineLoad
) -> bool:
    """Whether the fastest flavour fits if blocks are evenly divided and one group holds all other bytes."""
    kept = load.kept[int(np.argmin(load.recompute))]
    in_flight, late, chunks = _peaks_over_chunks(schedule, num_groups, num_microbatches, num_chunks)
    peak = float((in_flight * kept + late * load.late).max())
    room = 1 - max(_received_bytes(schedule, num_groups, num_chunks, load))
    return bool(load.blocks / num_groups * (load.resident + peak / chunks) + load.others <= room)


@lru_cache(maxsize=4096)
def _peaks_over_chunks(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int
) -> tuple[FloatArray, FloatArray, int]:
    """Microbatches in flight and deferred per moment, summed over chunks, and the number of chunks.

    Each is (moments,), distinct over all groups.
    """
    peaks = _peaks_of_groups(schedule, num_groups, num_microbatches, num_chunks)
    chunks = peaks[0].shape[1] // 2
    sums = [np.stack([rows[:, :chunks].sum(axis=1), rows[:, chunks:].sum(axis=1)], axis=1) for rows in peaks]
    in_flight, late = np.unique(np.concatenate(sums), axis=0).T
    return in_flight, late, chunks


def _received_bytes(schedule: Schedule, num_groups: int, num_chunks: int, load: PipelineLoad) -> list[float]:
    """By group, the bytes that those of its stages receive that certainly have repeated blocks."""
    (arriving, returning), (first, last) = load.received, load.outer
    last_stage, received = num_groups * num_chunks - 1, []
    for stages in chunks_of(schedule.groups(num_groups, num_chunks)):
        inner = [stage for stage in stages if first <= stage <= last_stage - last]
        received.append(
            arriving * sum(stage > 0 for stage in inner) + returning * sum(stage < last_stage for stage in inner)
        )
    return received


@lru_cache(maxsize=512)
def _peaks_of_groups(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int
) -> tuple[FloatArray, ...]:
    """Rows of `fullest` by group; chunks without deferred bytes are one that holds their least total."""
    size = num_groups, num_microbatches, num_chunks
    if schedule.splits:
        return tuple(fullest(schedule, group, *size) for group in range(num_groups))
    if num_chunks == 1:
        in_flight = [schedule.in_flight(group, num_groups, num_microbatches) for group in range(num_groups)]
        return tuple(np.array([[float(min(count, num_microbatches)), 0.0]]) for count in in_flight)
    return tuple(np.array([[float(least_held(schedule, group, *size)), 0.0]]) for group in range(num_groups))


@lru_cache(maxsize=512)
def _merged_groups(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[int, FloatArray], ...]:
    """Merge neighbours if there are more than `MOST_GROUPS` groups: their number, and the least that each holds.

    >>> from autopar.schedule import SCHEDULES
    >>> found = _merged_groups(SCHEDULES["1f1b"], MOST_GROUPS + 1, 128, 1)
    >>> [(count, rows.tolist()) for count, rows in found[:2]], found[-1][0]
    ([(2, [[64.0, 0.0]]), (2, [[62.0, 0.0]])], 1)
    """
    peaks = _peaks_of_groups(schedule, num_groups, num_microbatches, num_chunks)
    size, merged = -(-len(peaks) // MOST_GROUPS), []
    for start in range(0, len(peaks), size):
        part = peaks[start : start + size]
        count = min(MOST_MOMENTS, max(map(len, part)))
        chosen = [rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)] for rows in part]
        merged.append((len(part), np.min(chosen, axis=0)))
    return tuple(merged)


@lru_cache(maxsize=16384)
def _solve_step(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, load: PipelineLoad, fills: bool
) -> float:
    """Solve the linear program of `least_step`; the last variable is z."""
    merged = _merged_groups(schedule, num_groups, num_microbatches, num_chunks)
    chunks = merged[0][1].shape[1] // 2
    stages = _Stages(load, 0, len(merged) * chunks, len(merged), passes=(1.0,))
    program, pace = SparseLP(), stages.stop
    received = _received_bytes(schedule, num_groups, num_chunks, load)
    cost = {pace: float(num_microbatches - fills)}
    first = 0
    for number, (count, moments) in enumerate(merged):
        stages_of_group = range(number * chunks, (number + 1) * chunks)
        durations = {
            variable: factor for stage in stages_of_group for variable, factor in stages.durations(stage)[0].items()
        }
        program.add({pace: float(count), **{variable: -factor for variable, factor in durations.items()}}, least=0.0)
        stages.write_memory(program, number, stages_of_group, moments, count - sum(received[first : first + count]))
        stages.write_link(program, stages_of_group, {pace: float(count)})
        first += count
        if fills:
            cost.update(durations)
    stages.write_totals(program)
    return program.bound(cost, pace + 1).value * (1 - SLACK)


@lru_cache(maxsize=16384)
def _solve_scheduled_step(
    schedule: Schedule,
    num_groups: int,
    num_microbatches: int,
    num_chunks: int,
    load: PipelineLoad,
    passes: tuple[float, ...],
) -> tuple[float, float]:
    """Solve the linear program of `least_scheduled_step`; return its value, and its dual for `rest`.

    The first variables are the starts of tasks, the last one is T.
    """
    size = num_groups, num_microbatches, num_chunks
    graph = excerpt(schedule, *size)
    num_stages = num_groups * num_chunks
    stages = _Stages(load, len(graph.stage) + len(graph.aggregates), num_stages, num_groups, passes)
    program, step = SparseLP(), stages.stop
    durations = durations_of(graph, [stages.durations(stage) for stage in range(num_stages)])
    add_precedences(program, graph, durations, step, overlap=schedule.steps_overlap)
    received = _received_bytes(schedule, num_groups, num_chunks, load)
    for group, stages_of_group in enumerate(chunks_of(schedule.groups(num_groups, num_chunks))):
        stages.write_memory(
            program, group, stages_of_group, some_fullest(schedule, group, *size), 1.0 - received[group]
        )
        stages.write_link(program, stages_of_group, {step: 1.0 / num_microbatches})
    stages.write_totals(program)
    optimum = program.bound({step: 1.0}, step + 1)
    slope = float(optimum.duals[REST_ROW]) if len(optimum.duals) else 0.0
    return optimum.value * (1 - SLACK), slope


class _Stages:
    """Variables: blocks by stage and option, other seconds by stage and pass, other bytes by group.

    Args:
        load: Work and bytes.
        first: Number of the first variable.
        num_stages: Number of stages.
        num_groups: Number of groups.
        passes: Seconds of the passes of a block; recompute belongs to the second one, if there are several.
    """

    def __init__(
        self, load: PipelineLoad, first: int, num_stages: int, num_groups: int, passes: Sequence[float]
    ) -> None:
        self._load, self._first, self._passes = load, first, passes
        self._options = load.options
        self._resident, _, _, self._kept = np.array(self._options).T
        self._first_rest = first + num_stages * len(self._options)
        self._first_other_bytes = self._first_rest + num_stages * len(passes)
        self.stop = self._first_other_bytes + num_groups

    def durations(self, stage: int) -> list[Mapping[int, float]]:
        """Duration of each pass of a stage, as linear expressions."""
        recompute_pass = min(1, len(self._passes) - 1)
        return [
            {
                **{
                    number: seconds + (recompute if kind == recompute_pass else 0.0)
                    for number, (_, _, recompute, _) in zip(self._block_variables(stage), self._options, strict=True)
                },
                self._first_rest + stage * len(self._passes) + kind: 1.0,
            }
            for kind, seconds in enumerate(self._passes)
        ]

    def write_memory(
        self, program: SparseLP, group: int, stages: Sequence[int], moments: FloatArray, room: float
    ) -> None:
        """Write that a group has room for what its stages hold at each moment, (moments, 2 stages)."""
        count = len(stages)
        in_flight, late = moments[:, :count, None], moments[:, count:, None]
        held = self._resident + late * self._load.late + in_flight * self._kept
        numbers = [number for stage in stages for number in self._block_variables(stage)]
        for row in held.reshape(len(moments), -1).tolist():
            program.add({self._first_other_bytes + group: 1.0, **dict(zip(numbers, row, strict=True))}, most=room)

    def write_link(self, program: SparseLP, stages: Sequence[int], pace: Row) -> None:
        """Write that a microbatch takes at least the link seconds of a group; `pace` expresses its seconds."""
        links = {
            number: -link
            for stage in stages
            for number, (_, link, _, _) in zip(self._block_variables(stage), self._options, strict=True)
            if link
        }
        if links:
            program.add({**pace, **links}, least=0.0)

    def write_totals(self, program: SparseLP) -> None:
        """Write the totals as the last rows: blocks, other seconds (`REST_ROW`), other bytes."""
        program.fix_sum(range(self._first, self._first_rest), self._load.blocks)
        program.fix_sum(range(self._first_rest, self._first_other_bytes), self._load.rest)
        program.fix_sum(range(self._first_other_bytes, self.stop), self._load.others)

    def _block_variables(self, stage: int) -> range:
        """Variables of the blocks of a stage, by option."""
        width = len(self._options)
        return range(self._first + stage * width, self._first + (stage + 1) * width)
