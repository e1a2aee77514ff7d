"""What a step takes at least, whose blocks are spread over stages, whatever each of them takes and holds.

Of blocks that are alike stage s has n_s. What they take together is a vector Y_s (`Take`): seconds of passes, bytes
that a microbatch keeps, bytes that stay, seconds of links. What is known of single blocks is one of

    what some take        Y_s >= sum_i n_si P_i,  sum_i n_si = n_s       points: the step of these, in any mixture
    what none goes below  C_k . Y_s >= c_k n_s                           cuts: no step is shorter

and the rest follows from the order of tasks:

    min T   such that   the later task of two begins no earlier than the first one ends, nor is T before a task's end
                        T >= m sum_s link_s + sum_s update_s                      of the stages of a group
                        T >= start_i + gradients and reductions from task i on + sum_s update_s
                        others_g + beside + sum_s (resident_s + x_js kept_s + y_js late n_s) <= 1 + short   at moments j
                        beside >= sum_s (beside_s + running_s + stages_g received_s) / blocks + next_g
                        next_g >= sum_s next_s / blocks             of groups that have more blocks than stages
                        sum n = blocks,   sum rest >= rest,   sum rest + sum_s plain_s >= whole,   sum others = others

Blocks are whole, which a linear program knows of two cases: the group that has most has w >= ceil(blocks / groups), and
no group has more, or some group has w + 1:

                        T >= m w sum_s plain_s / blocks + waits,   sum_s n_s <= w         of the stages of a group
                        n_s >= 1                                            of stages that have no other blocks alone

Prices of Y_s in the first program say what points are missing. What a block takes at least at these prices is a cut.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.bounds.task_graph import Excerpt, excerpt
from autopar.bounds.task_lp import SLACK, Basis, LeastProgram, Row, add_order, durations_of
from autopar.schedule.base import Schedule, chunks_of
from autopar.schedule.holding import some_fullest

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST_SPREAD = 192
"""Stages that blocks are spread over: for more, the linear programs take seconds."""

SHORTAGE = 10.0
"""Price of memory that is not there, in times of all that blocks take at least, for a whole device: enough to prefer
whatever fits."""


HOLDS = 1e-6
"""Of the highest dual of a cut: one with less says nothing."""


class Take(IntEnum):
    """What a block takes."""

    FORWARD = 0
    """Seconds of a forward."""
    BACKWARD = 1
    """Seconds of a backward, with what runs again, and of the weight pass."""
    KEPT = 2
    """What it keeps of a microbatch, a share of a device."""
    RESIDENT = 3
    """What it holds through the step, the same."""
    UPDATE = 4
    """Seconds of its update."""
    LINK = 5
    """Seconds that a microbatch has the outermost link."""
    GRADIENT = 6
    """Of these, what follows its last pass."""
    ONCE = 7
    """Seconds that a step has it once, after the last pass."""
    BESIDE = 8
    """What is there beside where such blocks run, a share of a device; it is the same of all that are alike."""
    PLAIN = 9
    """Seconds of a forward and a backward without what runs again; it is the same of all, too."""
    RUNNING = 10
    """What is there at least while a pass of it runs, besides all that it keeps, a share of a device, where backwards
    are not split; the same of all, too."""
    NEXT = 11
    """What is there besides where a stage has two of them in a row, a share of a device; the same of all, too."""
    RECEIVED = 12
    """What a stage of such blocks receives meanwhile from both of its neighbours, the same."""


COMMON = (Take.FORWARD, Take.RESIDENT, Take.UPDATE, Take.GRADIENT, Take.ONCE, Take.PLAIN)
"""What blocks that are alike take whatever runs again: as much each, for they have one choice of placements."""


MEANS = (Take.BESIDE, Take.RUNNING, Take.NEXT, Take.RECEIVED)
"""What is there as often as it is for one block, not for each: of the mean one, for they have one choice."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which task follows which.

    Attributes:
        schedule: The schedule.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        num_chunks: Stages per group.
    """

    schedule: Schedule
    num_groups: int
    num_microbatches: int
    num_chunks: int

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.num_groups * self.num_chunks

    @property
    def excerpt(self) -> Excerpt:
        """Who waits for whom."""
        return excerpt(self.schedule, self.num_groups, self.num_microbatches, self.num_chunks)

    @property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each group."""
        return chunks_of(self.schedule.groups(self.num_groups, self.num_chunks))

    def share(self, blocks: int) -> int:
        """Return how many whole blocks some group has at least."""
        return math.ceil(blocks / self.num_groups)

    def fullest(self, group: int) -> FloatArray:
        """Return what a group holds at some of its fullest moments, (moments, 2 chunks)."""
        return some_fullest(self.schedule, group, self.num_groups, self.num_microbatches, self.num_chunks)


@dataclass(frozen=True, slots=True)
class Rest:
    """What there is besides what blocks that are alike take.

    Attributes:
        blocks: Number of blocks that are alike.
        late: What one of them puts off of a microbatch until its weight pass, a share of a device, whatever runs again.
        halves: The least seconds of the halves of its backward, if that is split.
        seconds: Of all other blocks, for a microbatch.
        resident: What they hold, shares of a device together.
        whole: Of all blocks, without what runs again.
        outer: How many of the first and of the last stages may have none of the blocks that are alike.
        ends: The least seconds of each pass of the first and of the last block, which the first and the last stage
            have; part of those of all other blocks, and 0 of blocks that are alike.
        edges: The least seconds of all passes of these two blocks together, where more is known of them.
        received: What a stage of blocks that are alike receives meanwhile from the one before, and from the next one,
            shares of a device.
        hop: The least seconds of a message from one group to another.
        turns: How many times as long a pass is as said.
        fixed: Seconds added to every step.
    """

    blocks: int
    late: float
    halves: tuple[float, float]
    seconds: float
    resident: float
    whole: float
    outer: tuple[int, int]
    turns: float
    fixed: float = 0.0
    ends: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    edges: tuple[float, float] = (0.0, 0.0)
    received: tuple[float, float] = (0.0, 0.0)
    hop: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Spreading:
    """How blocks of some points are spread best.

    Attributes:
        seconds: Of the step.
        shares: (stages, points) how many blocks of each stage are like each point.
        prices: (stages, takes) what more of each would add to the step.
        basis: Where the program has its optimum.
    """

    seconds: float
    shares: FloatArray
    prices: FloatArray
    basis: Basis | None


class Cutting(NamedTuple):
    """A step that none is shorter than, in seconds, where its program has its optimum, and which cuts say so."""

    seconds: float
    basis: Basis | None
    holding: Mask


class Spread:
    """Spreads blocks over stages.

    Args:
        order: The order of tasks.
        rest: What is known besides.
        most: Blocks that some group has; its share if not given.
        is_most: Whether no group has more.
        cap: Blocks that no group has more of, if that is known besides.
    """

    def __init__(
        self, order: Order, rest: Rest, most: int | None = None, *, is_most: bool = False, cap: int | None = None
    ) -> None:
        self._order, self._rest = order, rest
        self._most, self._is_most = order.share(rest.blocks) if most is None else most, is_most
        self._cap = self._most if is_most else rest.blocks if cap is None else max(cap, self._most)
        found, stages = order.excerpt, order.num_stages
        self._first = len(found.stage) + len(found.middles)
        self._passes = len(order.schedule.passes)
        self._halves = 2 if order.schedule.splits else 0
        self._width = 1 + len(Take) + self._halves + self._passes
        self._others = self._first + stages * self._width
        self._step = self._others + order.num_groups
        self._short = self._step + 1
        self._mean_of = {take: self._short + 1 + number for number, take in enumerate(MEANS)}
        self._next = self._short + 1 + len(MEANS)
        self._means = self._next + order.num_groups
        self._fixed = self._means + len(COMMON)  # further variables are of points
        self._program = LeastProgram()
        self._write(found)

    @property
    def num_rows(self) -> int:
        """Rows of its programs that do not depend on blocks."""
        return self._program.num_rows

    def of_points(self, points: FloatArray, start: Basis | None = None) -> Spreading:
        """Return the least step of blocks that are like points, (points, takes), in any mixture.

        It takes forever, at no prices, if there are too few blocks for the stages.

        Args:
            points: The points.
            start: Where the program of the first ones has its optimum, blocks as whole as here or not.
        """
        program, count, first = self._program.copy(), self._order.num_stages, self._fixed
        begins, end = program.num_rows, first + count * len(points)
        for stage in range(count):
            own = range(first + stage, end, count)  # further points are further variables
            for take, amounts in zip(Take, points.T.tolist(), strict=True):
                row = {number: -amount for number, amount in zip(own, amounts, strict=True) if amount}
                program.add({self._of(stage, take): 1.0, **row}, least=0.0)
            program.add({self._blocks(stage): 1.0, **dict.fromkeys(own, -1.0)}, least=0.0, most=0.0)
        found = program.minimised(self._cost(points[:, :2].sum(axis=1).min()), end, start)
        if math.isinf(found.value):
            return Spreading(math.inf, np.zeros((count, len(points))), np.zeros((count, len(Take))), None)
        prices = found.duals[begins:].reshape(count, len(Take) + 1)[:, :-1]
        shares = found.values[first:].reshape(-1, count).T
        return Spreading(found.value + self._rest.fixed, shares, np.maximum(0.0, prices), found.basis)

    def of_cuts(self, cuts: Sequence[tuple[FloatArray, float]], block: float, start: Basis | None = None) -> Cutting:
        """Return a step that none is shorter than whose blocks are above cuts.

        It takes forever, whatever the cuts, if there are too few blocks for the stages.

        Args:
            cuts: Prices, (takes,), and what a block takes at least at these.
            block: About what passes of a block take, for the price of memory that is not there.
            start: Where the program of the first ones has its optimum, blocks as whole as here or not.
        """
        program = self._program.copy()
        begins = program.num_rows
        for prices, least in cuts:
            own = [(take, price) for take, price in zip(Take, prices.tolist(), strict=True) if price]
            for stage in range(self._order.num_stages):
                row = {self._of(stage, take): price for take, price in own}
                program.add({**row, self._blocks(stage): -least}, least=0.0)
        found = program.minimised(self._cost(block), self._fixed, start, is_reducible=True)
        if math.isinf(found.value):
            return Cutting(math.inf, None, np.ones(len(cuts), dtype=bool))
        duals = np.abs(found.duals[begins:]).reshape(len(cuts), self._order.num_stages).max(axis=1, initial=0.0)
        holding = np.asarray(duals > HOLDS * duals.max(initial=0.0))
        return Cutting(found.value * (1 - SLACK) + self._rest.fixed, found.basis, holding)

    def _cost(self, block: float) -> dict[int, float]:
        whole = block * self._rest.blocks * self._order.num_microbatches / self._order.num_groups
        return {self._step: 1.0, self._short: SHORTAGE * whole}

    def _blocks(self, stage: int) -> int:
        return self._first + stage * self._width

    def _of(self, stage: int, take: Take) -> int:
        return self._first + stage * self._width + 1 + take

    def _half(self, stage: int, number: int) -> int:
        return self._first + stage * self._width + 1 + len(Take) + number

    def _besides(self, stage: int, number: int) -> int:
        return self._first + (stage + 1) * self._width - self._passes + number

    def _write(self, found: Excerpt) -> None:
        """Write all that does not depend on blocks: the same rows in each case, so that one goes on from another."""
        order, rest, program = self._order, self._rest, self._program
        stages = range(order.num_stages)
        durations = durations_of(found, [self._lasting(stage) for stage in stages])
        updates: list[Row] = [{self._of(stage, Take.UPDATE): 1.0 for stage in own} for own in order.stages_of]
        overlap = order.schedule.steps_overlap
        add_order(program, found, durations, self._step, overlap=overlap, after=updates, hop=rest.hop)
        for group, own in enumerate(order.stages_of):
            self._carry(found, group, own, updates[group])
            self._fit(group, own)
        for stage in stages if self._halves else ():
            each = [self._half(stage, number) for number in range(2)]
            program.add({**dict.fromkeys(each, 1.0), self._of(stage, Take.BACKWARD): -1.0}, least=0.0)
            for number, least in zip(each, rest.halves, strict=True):
                program.add({number: 1.0, self._blocks(stage): -least}, least=0.0)
        for take, number in self._mean_of.items():  # more than the mean would leave less for those who hold two
            every = {self._of(stage, take): -1.0 / rest.blocks for stage in stages}
            program.add({number: 1.0, **every}, least=0.0, most=0.0 if take is Take.NEXT else math.inf)
        program.add({self._mean_of[Take.RECEIVED]: 1.0}, least=sum(rest.received))
        self._write_whole()
        self._write_alike()
        for stage, passes, all_passes in zip((0, order.num_stages - 1), rest.ends, rest.edges, strict=True):
            for number, least in enumerate(passes):
                program.add({self._besides(stage, number): 1.0}, least=least)
            program.add({self._besides(stage, number): 1.0 for number in range(self._passes)}, least=all_passes)
        program.total([self._blocks(stage) for stage in stages], rest.blocks)
        besides = dict.fromkeys([self._besides(stage, own) for stage in stages for own in range(self._passes)], 1.0)
        program.add(besides, least=rest.seconds)
        program.add({**besides, **{self._of(stage, Take.PLAIN): 1.0 for stage in stages}}, least=rest.whole)
        program.total(range(self._others, self._step), rest.resident)

    def _write_whole(self) -> None:
        """Write that blocks are whole: how many some group has, and that stages have one."""
        order, rest, program = self._order, self._rest, self._program
        stages, (first, last) = range(order.num_stages), rest.outer
        self._write_most()
        for own in order.stages_of:
            program.add({self._blocks(stage): 1.0 for stage in own}, most=self._cap)
        for stage in stages[first : len(stages) - last]:
            program.add({self._blocks(stage): 1.0}, least=1.0)
        for stage in stages:
            passes = {self._of(stage, Take.FORWARD): 1.0, self._of(stage, Take.BACKWARD): 1.0}
            program.add({**passes, self._of(stage, Take.PLAIN): -1.0}, least=0.0)

    def _write_most(self) -> None:
        """Write how long the group with most blocks takes: before it others run forwards, and after it backwards.

        If no group has more, all but a few have as many: one of the last of those that may have, at least.
        """
        order, rest = self._order, self._rest
        stages, begins = range(order.num_stages), sorted(own[0] for own in order.stages_of)
        fewer = self._most * order.num_groups - rest.blocks
        is_apart = self._is_most and not order.schedule.steps_overlap
        before = range(begins[max(0, order.num_groups - 1 - fewer)] if is_apart else 0)
        whole = rest.turns * order.num_microbatches * self._most / rest.blocks
        work = {self._of(stage, Take.PLAIN): -whole for stage in stages}
        update = {self._of(stage, Take.UPDATE): -self._most / rest.blocks for stage in stages}
        lasting = [self._lasting(stage)[: self._passes if not self._halves else 1] for stage in before]
        for passes, after in ((1, update), (len(order.schedule.passes), {})):
            waits = {each: -once for own in lasting for row in own[:passes] for each, once in row.items()}
            self._program.add({self._step: 1.0, **work, **waits, **after}, least=0.0)

    def _write_alike(self) -> None:
        """Write that blocks have one choice: what a group takes is as often that of a mean one as it has blocks.

        A choice that is a mean of several for all stages could else be one for some stages and another for others.
        """
        order, rest, program = self._order, self._rest, self._program
        count, first, last = order.num_stages, *rest.outer
        for number, take in enumerate(COMMON, self._means):
            every = {self._of(stage, take): -1.0 for stage in range(count)}
            program.add({number: float(rest.blocks), **every}, least=0.0, most=0.0)
        for own in order.stages_of:
            fewest, most = self._numbers(own)
            for number, take in enumerate(COMMON, self._means):
                taken = {self._of(stage, take): 1.0 for stage in own}
                program.add({**taken, number: -float(fewest)}, least=0.0)
                program.add({**taken, number: -float(most)}, most=0.0 if most < rest.blocks else math.inf)
            gradients = {self._of(stage, Take.GRADIENT): -1.0 for stage in own}
            program.add({**{self._of(stage, Take.LINK): 1.0 for stage in own}, **gradients}, least=0.0)
            if len(own) > 1:
                self._write_stages_alike([stage for stage in own if first <= stage < count - last], own)

    def _write_stages_alike(self, inner: Sequence[int], own: Sequence[int]) -> None:
        """Write the same of each stage of a group: those inside have a block at least, and leave one to each other."""
        for stage in own:
            fewest = int(stage in inner)
            for number, take in enumerate(COMMON, self._means):
                if fewest:
                    self._program.add({self._of(stage, take): 1.0, number: -1.0}, least=0.0)
                most = float(self._most - len(inner) + fewest)
                row = {self._of(stage, take): 1.0, number: -most}
                self._program.add(row, most=0.0 if self._is_most else math.inf)

    def _lasting(self, stage: int) -> list[Row]:
        """Return what each pass of a stage takes."""
        forward = self._of(stage, Take.FORWARD)
        if self._halves:
            own = [forward, self._half(stage, 0), self._half(stage, 1)]
        else:
            own = [forward, self._of(stage, Take.BACKWARD)][: self._passes]
        turns = self._rest.turns
        return [{each: turns, self._besides(stage, number): turns} for number, each in enumerate(own)]

    def _carry(self, found: Excerpt, group: int, stages: Sequence[int], update: Row) -> None:
        """Write what the link of a group carries: all of a step, and what is left from the last pass of a stage on."""
        count = float(self._order.num_microbatches)
        links = {self._of(stage, Take.LINK): -count for stage in stages}
        self._program.add({self._step: 1.0, **links, **{own: -1.0 for own in update}}, least=0.0)
        run, last = found.runs[group].tolist(), self._passes - 1
        left: dict[int, float] = {}
        begins = {run[0]: 1.0} if self._order.schedule.steps_overlap else {}
        for node in reversed(run):
            if node >= len(found.stage):
                for stage, done in enumerate(found.middles[node - len(found.stage), :, last].tolist()):
                    if done:
                        number = self._of(stage, Take.GRADIENT)
                        left[number] = left.get(number, 0.0) - done
                continue
            if found.kind[node] != last:
                continue
            stage = int(found.stage[node])
            once, each = self._of(stage, Take.ONCE), self._of(stage, Take.GRADIENT)
            left[each] = left.get(each, 0.0) - 1.0
            if once not in left:
                left[once] = -1.0
                row = {self._step: 1.0, **left, **{own: -1.0 for own in update}}
                for number, factor in ((node, -1.0), *begins.items()):
                    row[number] = row.get(number, 0.0) + factor
                self._program.add(row, least=0.0)

    def _fit(self, group: int, stages: Sequence[int]) -> None:
        """Write that a group holds no more than there is room for, but for what is short."""
        count, (first, last), end = len(stages), self._rest.outer, self._order.num_stages - 1
        inner = [stage for stage in stages if first <= stage <= end - last]
        between = [stage for stage in inner if 0 < stage < end]
        beside: dict[int, float] = {}
        if inner:
            self._follow(group, stages)
            beside = {self._mean_of[Take.BESIDE]: 1.0, self._next + group: 1.0}
            beside[self._mean_of[Take.RECEIVED]] = float(len(between))
        if len(inner) == count and not self._order.schedule.splits:  # whichever stage runs, it has such a block
            beside[self._mean_of[Take.RUNNING]] = 1.0
        arriving, returning = self._rest.received
        received = arriving * (end in inner and end > 0) + returning * (0 in inner and end > 0)
        for held in self._order.fullest(group).tolist():
            row = {self._others + group: 1.0, self._short: -1.0, **beside}
            for stage, flying, late in zip(stages, held[:count], held[count:], strict=True):
                row[self._of(stage, Take.RESIDENT)] = 1.0
                row[self._of(stage, Take.KEPT)] = flying
                row[self._blocks(stage)] = late * self._rest.late
            self._program.add(row, most=1.0 - received)

    def _follow(self, group: int, stages: Sequence[int]) -> None:
        """Write what a group holds where a block follows another one: with more blocks than stages, one does.

        How many it has is not said: between as many as it has stages and the most it may have, a share is there.
        """
        count, fewest, most = len(stages), *self._numbers(stages)
        number, mean = self._next + group, self._mean_of[Take.NEXT]
        if fewest > count:
            self._program.add({number: 1.0, mean: -1.0}, least=0.0)
        else:
            share = 1.0 / max(1, most - count)
            every = {self._of(stage, Take.NEXT): -share for stage in stages}
            self._program.add({number: 1.0, mean: count * share, **every}, least=0.0)

    def _numbers(self, stages: Sequence[int]) -> tuple[int, int]:
        """Return how many blocks a group of these stages has at least and at most."""
        order, rest = self._order, self._rest
        first, last, end = *rest.outer, order.num_stages
        own = sum(first <= stage < end - last for stage in stages)  # which have one each, as those of the others do
        others = max(0, end - first - last) - own
        return max(own, rest.blocks - self._cap * (order.num_groups - 1)), min(rest.blocks - others, self._cap)
