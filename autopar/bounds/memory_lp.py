"""What a step takes at least where what its tasks hold has to fit into memory.

Of blocks that are alike, group g of a pipeline has n_gcf in its chunk c that keep what flavour f of recompute says. It
holds most at a few moments j (`holding.fullest`), when all that x_gcj microbatches keep is there, and all that y_gcj of
them put off until their weight pass, which no recompute makes less. With r the resident bytes of a block, k_f what a
microbatch keeps of it, l what it puts off, a_f the seconds that it runs again, 1 its seconds without, and o_g the bytes
and e_g the seconds of other blocks, all shares of a device or of a block's seconds:

    min T   such that   o_g + sum_cf n_gcf (r + x_gcj k_f + y_gcj l) <= 1        for every moment j of every group
                        z >= t_g = e_g + sum_cf n_gcf (1 + a_f),   sum n = blocks,   sum e = rest,   sum o = others
                        T >= m z,  or  T >= sum_g t_g + (m - 1) z  where a step takes a pass through all groups

Where less may stay if a link carries more in every microbatch, blocks have ways to lie besides flavours, r_w and s_w,
and z >= sum_cfw n_gcfw s_w is the busy link of a group.

It knows neither where a chain can be cut nor placements. Where a schedule holds more than fits of evenly cut stages,
blocks have to go to other groups, and no mean over groups says that.

Of more than 64 groups neighbours count as one: what each row says of them adds up, with what the emptiest one holds.

Where groups wait for each other without a closed form, T is the end of the last task, and stages have blocks of their
own, of which passes take so long (`critical_path.py`): uneven stages make for a bubble, and recompute is part of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.bounds.task_graph import excerpt
from autopar.bounds.task_lp import SLACK, LeastProgram, Row, add_order, durations_of
from autopar.schedule.base import Schedule, chunks_of
from autopar.schedule.holding import MOST_MOMENTS, fullest, least_held, some_fullest

FloatArray = NDArray[np.float64]

DIGITS = 10
"""Binary digits that loads are cut to, so that one program serves many meshes: by two thousandths of each at most."""


MOST_GROUPS = 64
"""Groups that are told apart where it does not matter who waits for whom: of more, neighbours count as one."""

MOST_STAGES = 512
"""Of a step whose order of tasks is looked at: for more, the linear program takes seconds."""

RESTS = 16
"""In how many parts of what blocks take that are alike the seconds of others are told apart where a program is solved;
between them its prices serve."""

REST = -2
"""The row of a program that says what the rest takes, from its end."""


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to be done and held, in seconds of a block's passes without recompute and shares of a device.

    Attributes:
        blocks: Number of blocks that are alike.
        rest: Seconds of the others.
        again: By flavour of recompute, the seconds that a block runs again.
        kept: By flavour, what a block keeps of a microbatch for its backward.
        late: What it puts off of a microbatch until its weight pass, where there is one.
        resident: What it holds through the step.
        others: What the others hold through the step, together.
        thrifty: Other ways to lie: what a block holds through the step then, and for how many seconds of a microbatch
            it has a link.
        received: What a stage receives meanwhile from the one before, and from the next one.
        outer: How many of the first and of the last stages may have none of these blocks.
    """

    blocks: int
    rest: float
    again: tuple[float, ...]
    kept: tuple[float, ...]
    late: float
    resident: float
    others: float
    thrifty: tuple[tuple[float, float], ...] = ()
    received: tuple[float, float] = (0.0, 0.0)
    outer: tuple[int, int] = (0, 0)

    def rounded(self) -> "Load":
        """Return a load that is a little less in everything."""
        return Load(
            self.blocks,
            _cut(self.rest),
            tuple(map(_cut, self.again)),
            tuple(map(_cut, self.kept)),
            _cut(self.late),
            _cut(self.resident),
            _cut(self.others),
            tuple((_cut(resident), _cut(link)) for resident, link in self.thrifty),
            (_cut(self.received[0]), _cut(self.received[1])),
            self.outer,
        )

    @property
    def ways(self) -> tuple[tuple[float, float, float, float], ...]:
        """Of each way to lie and flavour: what stays, seconds of the link, seconds run again, and what is kept."""
        lies = ((self.resident, 0.0), *self.thrifty)
        return tuple(
            (resident, link, again, kept)
            for resident, link in lies
            for again, kept in zip(self.again, self.kept, strict=True)
        )


def _cut(number: float) -> float:
    """Return a number with its first binary digits only.

    >>> _cut(0.3), _cut(1000.0), _cut(1001.0 + 1 / 3)
    (0.2998046875, 1000.0, 1001.0)
    """
    fraction, exponent = math.frexp(number)
    return math.ldexp(math.floor(fraction * 2**DIGITS), exponent - DIGITS)


def least_crowded(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, load: Load) -> float:
    """Return the least time of a step, in seconds of a block's passes; infinity if nothing fits.

    >>> from autopar.schedule import SCHEDULES
    >>> roomy = Load(blocks=8, rest=0.0, again=(0.0,), kept=(0.01,), late=0.01, resident=0.01, others=0.0)
    >>> least_crowded(SCHEDULES["zb-h1"], 2, 4, 1, roomy)
    16.0
    >>> full = Load(blocks=8, rest=0.0, again=(0.0,), kept=(0.01,), late=0.15, resident=0.01, others=0.0)
    >>> round(least_crowded(SCHEDULES["zb-h1"], 2, 4, 1, full), 1)
    19.1
    """
    size = num_groups, num_microbatches, num_chunks
    fills = num_chunks == 1 and not schedule.steps_overlap
    if fits_evenly(schedule, *size, load):
        rounds = num_microbatches + (num_groups - 1 if fills else 0)
        return rounds * (load.blocks * (1 + min(load.again)) + load.rest) / num_groups
    return _least(schedule, *size, load.rounded(), fills)


def least_ordered(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, load: Load, passes: Sequence[float]
) -> float:
    """Return the same for a schedule without a closed form, with what groups wait for each other.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        num_chunks: Stages per group.
        load: What there is to be done and held.
        passes: Seconds of each pass of a block without recompute, of the same unit: together 1 at most.

    >>> from autopar.schedule import SCHEDULES
    >>> full = Load(blocks=8, rest=0.0, again=(0.0,), kept=(0.01,), late=0.15, resident=0.01, others=0.0)
    >>> round(least_ordered(SCHEDULES["zb-h1"], 2, 4, 1, full, (0.25, 0.5, 0.25)), 1)
    20.3
    """
    each, own = tuple(map(_cut, passes)), load.rounded()
    near = load.blocks / RESTS * (math.floor(own.rest / load.blocks * RESTS) + 0.5)
    about = replace(own, rest=near)
    least, slope = _least_ordered(schedule, num_groups, num_microbatches, num_chunks, about, each)
    return least + slope * (own.rest - near)  # the least of a program is convex in its totals


def fits_evenly(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, load: Load) -> bool:
    """Whether the fastest flavour fits if all groups have as much of everything, and one of them all that is left."""
    kept = load.kept[int(np.argmin(load.again))]
    flying, late, chunks = _held_in_all(schedule, num_groups, num_microbatches, num_chunks)
    most = float((flying * kept + late * load.late).max())
    room = 1 - max(_receiving(schedule, num_groups, num_chunks, load))
    return bool(load.blocks / num_groups * (load.resident + most / chunks) + load.others <= room)


@lru_cache(maxsize=4096)
def _held_in_all(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int
) -> tuple[FloatArray, FloatArray, int]:
    """Return what groups hold in all chunks at their fullest moments, what they put off, and how many chunks that is.

    Each is (moments,), the distinct ones of all groups.
    """
    rows = _held(schedule, num_groups, num_microbatches, num_chunks)
    chunks = rows[0].shape[1] // 2
    sums = [np.stack([own[:, :chunks].sum(axis=1), own[:, chunks:].sum(axis=1)], axis=1) for own in rows]
    flying, late = np.unique(np.concatenate(sums), axis=0).T
    return flying, late, chunks


def _receiving(schedule: Schedule, num_groups: int, num_chunks: int, load: Load) -> list[float]:
    """Return by group what those of its stages receive that have some of the blocks."""
    (arriving, returning), (first, last) = load.received, load.outer
    end, found = num_groups * num_chunks - 1, []
    for own in chunks_of(schedule.groups(num_groups, num_chunks)):
        inner = [stage for stage in own if first <= stage <= end - last]
        found.append(arriving * sum(stage > 0 for stage in inner) + returning * sum(stage < end for stage in inner))
    return found


@lru_cache(maxsize=512)
def _held(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[FloatArray, ...]:
    """Return `fullest` by group; chunks that put nothing off are as one that always holds the least of them."""
    size = num_groups, num_microbatches, num_chunks
    if schedule.splits:
        return tuple(fullest(schedule, group, *size) for group in range(num_groups))
    if num_chunks == 1:
        flying = [schedule.in_flight(group, num_groups, num_microbatches) for group in range(num_groups)]
        return tuple(np.array([[float(min(own, num_microbatches)), 0.0]]) for own in flying)
    return tuple(np.array([[float(least_held(schedule, group, *size)), 0.0]]) for group in range(num_groups))


@lru_cache(maxsize=512)
def _neighbours(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[int, FloatArray], ...]:
    """Return groups that count as one where there are many: how many they are, and what each of them holds at least.

    >>> from autopar.schedule import SCHEDULES
    >>> found = _neighbours(SCHEDULES["1f1b"], MOST_GROUPS + 1, 128, 1)
    >>> [(count, rows.tolist()) for count, rows in found[:2]], found[-1][0]
    ([(2, [[64.0, 0.0]]), (2, [[62.0, 0.0]])], 1)
    """
    held = _held(schedule, num_groups, num_microbatches, num_chunks)
    size, found = -(-len(held) // MOST_GROUPS), []
    for start in range(0, len(held), size):
        own = held[start : start + size]
        count = min(MOST_MOMENTS, max(map(len, own)))
        chosen = [rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)] for rows in own]
        found.append((len(own), np.min(chosen, axis=0)))
    return tuple(found)


@lru_cache(maxsize=16384)
def _least(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, load: Load, fills: bool
) -> float:
    """Solve the linear program; the last variable is z."""
    held = _neighbours(schedule, num_groups, num_microbatches, num_chunks)
    chunks = held[0][1].shape[1] // 2
    stages = _Stages(load, 0, len(held) * chunks, len(held), passes=(1.0,))
    program, pace = LeastProgram(), stages.stop
    receiving = _receiving(schedule, num_groups, num_chunks, load)
    cost = {pace: float(num_microbatches - fills)}
    first = 0
    for number, (count, moments) in enumerate(held):
        own = range(number * chunks, (number + 1) * chunks)
        taken = {each: factor for stage in own for each, factor in stages.durations(stage)[0].items()}
        program.add({pace: float(count), **{each: -factor for each, factor in taken.items()}}, least=0.0)
        stages.fit(program, number, own, moments, count - sum(receiving[first : first + count]))
        stages.carry(program, own, {pace: float(count)})
        first += count
        if fills:
            cost.update(taken)
    stages.spread(program)
    return program.minimised(cost, pace + 1).value * (1 - SLACK)


@lru_cache(maxsize=16384)
def _least_ordered(
    schedule: Schedule,
    num_groups: int,
    num_microbatches: int,
    num_chunks: int,
    load: Load,
    passes: tuple[float, ...],
) -> tuple[float, float]:
    """Solve the linear program, and return by how much it rises with the rest, too.

    The first variables are starts of tasks, and the last one is T.
    """
    size = num_groups, num_microbatches, num_chunks
    found = excerpt(schedule, *size)
    num_stages = num_groups * num_chunks
    stages = _Stages(load, len(found.stage) + len(found.middles), num_stages, num_groups, passes)
    program, step = LeastProgram(), stages.stop
    durations = durations_of(found, [stages.durations(stage) for stage in range(num_stages)])
    add_order(program, found, durations, step, overlap=schedule.steps_overlap)
    receiving = _receiving(schedule, num_groups, num_chunks, load)
    for group, own in enumerate(chunks_of(schedule.groups(num_groups, num_chunks))):
        stages.fit(program, group, own, some_fullest(schedule, group, *size), 1.0 - receiving[group])
        stages.carry(program, own, {step: 1.0 / num_microbatches})
    stages.spread(program)
    optimum = program.minimised({step: 1.0}, step + 1)
    slope = float(optimum.duals[REST]) if len(optimum.duals) else 0.0
    return optimum.value * (1 - SLACK), slope


class _Stages:
    """Variables of stages: blocks by way to lie and flavour, then seconds of the rest by pass; bytes of it by group.

    Args:
        load: What there is.
        first: Number of the first of them.
        num_stages: Stages.
        num_groups: Groups.
        passes: Seconds of the passes of a block; what runs again is part of the second one, if there are several.
    """

    def __init__(self, load: Load, first: int, num_stages: int, num_groups: int, passes: Sequence[float]) -> None:
        self._load, self._first, self._passes = load, first, passes
        self._ways = load.ways
        self._resident, _, _, self._kept = np.array(self._ways).T
        self._rest = first + num_stages * len(self._ways)
        self._others = self._rest + num_stages * len(passes)
        self.stop = self._others + num_groups

    def durations(self, stage: int) -> list[Mapping[int, float]]:
        """Return what each pass of a stage takes."""
        again = min(1, len(self._passes) - 1)
        return [
            {
                **{
                    number: own + (more if kind == again else 0.0)
                    for number, (_, _, more, _) in zip(self._blocks(stage), self._ways, strict=True)
                },
                self._rest + stage * len(self._passes) + kind: 1.0,
            }
            for kind, own in enumerate(self._passes)
        ]

    def fit(self, program: LeastProgram, group: int, stages: Sequence[int], moments: FloatArray, room: float) -> None:
        """Add that a group has room for what its stages hold, (moments, 2 stages)."""
        count = len(stages)
        flying, late = moments[:, :count, None], moments[:, count:, None]
        each = self._resident + late * self._load.late + flying * self._kept
        numbers = [number for stage in stages for number in self._blocks(stage)]
        for row in each.reshape(len(moments), -1).tolist():
            program.add({self._others + group: 1.0, **dict(zip(numbers, row, strict=True))}, most=room)

    def carry(self, program: LeastProgram, stages: Sequence[int], pace: Row) -> None:
        """Add that a microbatch takes no less than the link of a group carries; `pace` are its seconds."""
        links = {
            number: -link
            for stage in stages
            for number, (_, link, _, _) in zip(self._blocks(stage), self._ways, strict=True)
            if link
        }
        if links:
            program.add({**pace, **links}, least=0.0)

    def spread(self, program: LeastProgram) -> None:
        """Add that everything is somewhere, as the last rows: blocks, seconds of the rest (`REST`), and its bytes."""
        program.total(range(self._first, self._rest), self._load.blocks)
        program.total(range(self._rest, self._others), self._load.rest)
        program.total(range(self._others, self.stop), self._load.others)

    def _blocks(self, stage: int) -> range:
        """Return the variables of a stage's blocks by flavour."""
        width = len(self._ways)
        return range(self._first + stage * width, self._first + (stage + 1) * width)
