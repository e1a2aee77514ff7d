"""Cut LP: lower bound on the step time if repeated blocks are distributed over the stages of a pipeline.

Look here for the bound on pipelines under a memory limit, where a mean stage says too little.
Stage s has n_s repeated blocks, which together need the vector Y_s (`Component`): seconds of passes, bytes kept per
microbatch, resident bytes, link seconds. The set of possible vectors of a block is approximated from two sides:

```text
inner:  Y_s >= sum_i n_si P_i,   sum_i n_si = n_s         convex combinations of known points P_i
outer:  C_k . Y_s >= c_k n_s                              cuts k: no block is below c_k at prices C_k
```

Both programs have these rows:

```text
min T   such that   start_v >= start_u + duration_u (+ hop)                       v waits for u
                    T >= end of the last task of group g + sum_s update_s
                    T >= m sum_s link_s + sum_s update_s                          stages of a group
                    T >= start_i + gradients and reductions from task i on + sum_s update_s
                    others_g + transient_g + sum_s (resident_s + X_sj kept_s + Y_sj late n_s) <= 1 + shortage
                                                                                  moments j of a group
                    transient_g >= sum_s (beside_s + running_s + stages_g received_s) / blocks + following_g
                    following_g >= sum_s next_s / blocks                          more blocks than stages in g
                    sum n = blocks,   sum rest_s >= rest,   sum rest_s + sum plain_s >= whole,   sum others_g = others
```

The closed form of 1F1B takes the place of the first four rows:

```text
                    t_s >= forward_s + backward_s,   t_s >= link_s,   pace >= t_s
                    T >= sum t + (m - 1) pace - sum_(q<s) backward_q + update_s + hops
                    T >= sum_(q/=s) t_q + (m - 1) pace - sum_(q<s) backward_q + forward_s
                         + gradients_s + reductions_s + update_s + hops           link of stage s after its last forward
```

A linear program divides blocks. Two cases restore some integrality, with w = ceil(blocks / groups): no group has more
than w blocks, or some group has at least w + 1.

```text
                    T >= m w' sum_s plain_s / blocks + waits                      w' = w or w + 1, by case
                    sum_s n_s <= w                                                stages of a group, in the first case
                    n_s >= 1                                                      stages without other blocks alone
```

The duals of Y_s in the inner program price the next cut.

- *Relaxes*: integrality of placements, as stages hold convex combinations of choices; other blocks are known by lower
  bounds only.
- *Valid when*: cuts and `RemainingCosts` are lower bounds, and repeated blocks have one choice of placements. It is
  used where memory is limited, and there are at most `MOST_CUT_STAGES` stages.
- *Cost*: linear programs, warm started; cuts are shared by all schedules of a mesh and microbatch size.
- *Source*: outer linearisation, Kelley, 1960, with cuts from a priced subproblem as in Benders, 1962; inner
  linearisation, Dantzig and Wolfe, 1960.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.bounds.task_graph import Excerpt, excerpt
from autopar.bounds.task_lp import SLACK, Basis, Row, SparseLP, add_precedences, durations_of
from autopar.schedule import SCHEDULES
from autopar.schedule.base import Schedule, chunks_of
from autopar.schedule.holding import some_fullest

FloatArray = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST_CUT_STAGES = 192
"""Stages up to which blocks are distributed by linear programs; beyond, these take seconds."""

SHORTAGE = 10.0
"""Price of one missing device of memory, in step times of evenly distributed blocks: high enough to prefer whatever
fits."""

BINDING = 1e-6
"""Share of the highest dual of all cuts from which on a cut counts as binding."""


class Component(IntEnum):
    """Components of the vector that one block needs."""

    FORWARD = 0
    """Seconds of the forward pass."""
    BACKWARD = 1
    """Seconds of the backward, with recompute, and of the weight pass."""
    KEPT = 2
    """Bytes kept per microbatch between forward and backward, as a share of a device."""
    RESIDENT = 3
    """Resident bytes, as a share of a device."""
    UPDATE = 4
    """Seconds of the optimizer update."""
    LINK = 5
    """Seconds that a microbatch occupies the outermost link."""
    GRADIENT = 6
    """Part of `LINK` that follows the last pass of the microbatch: gradient reductions."""
    LINK_ONCE = 7
    """Seconds that the step occupies the link once, after the last pass."""
    BUFFERS = 8
    """Transient buffers of one running block, as a share of a device; equal for all repeated blocks."""
    PLAIN = 9
    """Seconds of forward and backward without recompute; equal for all repeated blocks."""
    RUNNING = 10
    """Least transient bytes of a running pass besides all kept bytes, as a share of a device, where backwards are not
    split; equal for all repeated blocks."""
    NEXT_BUFFERS = 11
    """Further transient buffers where a stage has two consecutive blocks, as a share of a device; equal for all."""
    RECEIVED = 12
    """Bytes that a stage of such blocks receives from both neighbours, as a share of a device; equal for all."""


COMMON = (
    Component.FORWARD,
    Component.RESIDENT,
    Component.UPDATE,
    Component.GRADIENT,
    Component.LINK_ONCE,
    Component.PLAIN,
)
"""Components that do not depend on recompute: equal for all repeated blocks, which have one choice of placements."""


SHARED = (Component.BUFFERS, Component.RUNNING, Component.NEXT_BUFFERS, Component.RECEIVED)
"""Components that a group holds once, not per block: those of the mean block, as all blocks have one choice."""


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """The schedule of a pipeline and its size, which fix the order of tasks.

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
        """Number of stages."""
        return self.num_groups * self.num_chunks

    @property
    def excerpt(self) -> Excerpt:
        """Precedence graph of the tasks."""
        return excerpt(self.schedule, self.num_groups, self.num_microbatches, self.num_chunks)

    @property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each group."""
        return chunks_of(self.schedule.groups(self.num_groups, self.num_chunks))

    @property
    def has_closed_form(self) -> bool:
        """Whether plans are timed by the closed form of `step_time.py`: those of GPipe by the longest path, too."""
        fills = self.num_chunks == 1 and not self.schedule.steps_overlap
        return fills and self.schedule is not SCHEDULES["gpipe"]

    def least_of_fullest(self, blocks: int) -> int:
        """Lower bound on the number of whole blocks of the fullest group."""
        return math.ceil(blocks / self.num_groups)

    def held_at_peaks(self, group: int) -> FloatArray:
        """Microbatches in flight and waiting for their weight pass at some peaks of a group, (moments, 2 chunks).

        The first half of the columns counts microbatches between forward and backward by chunk, the second half those
        between backward and weight pass.
        """
        return some_fullest(self.schedule, group, self.num_groups, self.num_microbatches, self.num_chunks)


@dataclass(frozen=True, slots=True)
class RemainingCosts:
    """What a step needs besides its repeated blocks, and lower bounds on these blocks that hold for any placement.

    Attributes:
        blocks: Number of repeated blocks.
        late: Bytes that a block retains per microbatch until its weight pass, with any recompute flavour; as a share
            of a device's memory.
        halves: Least seconds of input-gradient and weight pass of a block, if the backward is split.
        seconds: Least seconds of all other blocks for a microbatch.
        resident: Resident bytes of all other blocks together, as shares of a device.
        whole: Least seconds of all blocks for a microbatch, without recompute.
        outer: Number of first and of last stages that may have no repeated block.
        turns: Factor on the seconds of every pass.
        fixed: Seconds added to every step.
        ends: Least seconds of each pass of the first and of the last block, which belong to the first and the last
            stage; part of `seconds`, and 0 for repeated blocks.
        edges: Least seconds of all passes of the first and of the last block together, if tighter than `ends`.
        received: Bytes that a stage of repeated blocks receives from the previous and from the next stage; shares of a
            device.
        hop: Least seconds of a message between groups.
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
class InnerSolution:
    """Optimum over convex combinations of known points: an upper estimate of the bound, and prices.

    Attributes:
        seconds: Optimal value; infinity if there are too few blocks for the stages.
        shares: (stages, points) blocks of each stage per point.
        prices: (stages, components) duals: seconds that the step rises per unit of each component.
        basis: Final basis; None after an interior point method.
    """

    seconds: float
    shares: FloatArray
    prices: FloatArray
    basis: Basis | None


class OuterSolution(NamedTuple):
    """Optimum over cuts: a lower bound on the step in seconds, the final basis, and which cuts are binding."""

    seconds: float
    basis: Basis | None
    is_binding: Mask


def _negative(row: Row) -> Row:
    """Return a row with all signs changed."""
    return {number: -factor for number, factor in row.items()}


class CutLP:
    """The linear program that distributes repeated blocks over stages.

    Args:
        order: The order of tasks.
        remaining: What the step needs besides repeated blocks.
        most: Blocks of the fullest group at least; `TaskOrder.least_of_fullest` if not given.
        is_most: Whether no group has more than `most`.
        cap: Upper bound on the blocks of a group, if one is known.
    """

    def __init__(
        self,
        order: TaskOrder,
        remaining: RemainingCosts,
        most: int | None = None,
        *,
        is_most: bool = False,
        cap: int | None = None,
    ) -> None:
        self._order, self._remaining = order, remaining
        self._most, self._is_most = order.least_of_fullest(remaining.blocks) if most is None else most, is_most
        self._cap = self._most if is_most else remaining.blocks if cap is None else max(cap, self._most)
        num_stages, graph = order.num_stages, None if order.has_closed_form else order.excerpt
        # First come the starts of tasks, or with a closed form the stages' seconds of a microbatch and the pace.
        self._first_stage = num_stages + 1 if graph is None else len(graph.stage) + len(graph.aggregates)
        self._num_passes = len(order.schedule.passes)
        self._num_halves = 2 if order.schedule.splits else 0
        self._stage_width = 1 + len(Component) + self._num_halves + self._num_passes
        self._other_bytes = self._first_stage + num_stages * self._stage_width
        self._step_seconds = self._other_bytes + order.num_groups
        self._shortage = self._step_seconds + 1
        self._shared = {component: self._shortage + 1 + number for number, component in enumerate(SHARED)}
        self._following = self._shortage + 1 + len(SHARED)
        self._first_common = self._following + order.num_groups
        self._num_fixed = self._first_common + len(COMMON)  # further variables are of points
        self._program = SparseLP()
        self._write(graph)

    @property
    def num_rows(self) -> int:
        """Number of rows that do not depend on points or cuts."""
        return self._program.num_rows

    def solve_inner(self, points: FloatArray, start: Basis | None = None) -> InnerSolution:
        """Minimise the step over convex combinations of points.

        Args:
            points: (points, components) what single blocks need.
            start: Final basis of the program of the first of these points, of either case.

        Returns:
            The optimum; infinite seconds and no prices if there are too few blocks for the stages.
        """
        program, num_stages, first_point = self._program.copy(), self._order.num_stages, self._num_fixed
        first_row, end = program.num_rows, first_point + num_stages * len(points)
        for stage in range(num_stages):
            # New points append variables, so that bases carry over.
            shares_of_stage = range(first_point + stage, end, num_stages)
            for component, amounts in zip(Component, points.T.tolist(), strict=True):
                row = {number: -amount for number, amount in zip(shares_of_stage, amounts, strict=True) if amount}
                program.add({self._amount(stage, component): 1.0, **row}, least=0.0)
            program.add({self._num_blocks(stage): 1.0, **dict.fromkeys(shares_of_stage, -1.0)}, least=0.0, most=0.0)
        optimum = program.minimise(self._cost(points[:, :2].sum(axis=1).min()), end, start)
        if math.isinf(optimum.value):
            return InnerSolution(
                math.inf, np.zeros((num_stages, len(points))), np.zeros((num_stages, len(Component))), None
            )
        prices = optimum.duals[first_row:].reshape(num_stages, len(Component) + 1)[:, :-1]
        shares = optimum.values[first_point:].reshape(-1, num_stages).T
        return InnerSolution(optimum.value + self._remaining.fixed, shares, np.maximum(0.0, prices), optimum.basis)

    def solve_outer(
        self, cuts: Sequence[tuple[FloatArray, float]], block: float, start: Basis | None = None
    ) -> OuterSolution:
        """Minimise the step over vectors that satisfy cuts.

        Args:
            cuts: Prices, (components,), and what a block needs at least at these prices.
            block: Approximate seconds of the passes of a block, which scale the price of missing memory.
            start: Final basis of the program of the first of these cuts, of either case.

        Returns:
            The lower bound; infinite if there are too few blocks for the stages.
        """
        program = self._program.copy()
        first_row = program.num_rows
        for prices, least in cuts:
            priced_components = [
                (component, price) for component, price in zip(Component, prices.tolist(), strict=True) if price
            ]
            for stage in range(self._order.num_stages):
                row = {self._amount(stage, component): price for component, price in priced_components}
                program.add({**row, self._num_blocks(stage): -least}, least=0.0)
        optimum = program.minimise(self._cost(block), self._num_fixed, start, is_reducible=True)
        if math.isinf(optimum.value):
            return OuterSolution(math.inf, None, np.ones(len(cuts), dtype=bool))
        duals = np.abs(optimum.duals[first_row:]).reshape(len(cuts), self._order.num_stages).max(axis=1, initial=0.0)
        is_binding = np.asarray(duals > BINDING * duals.max(initial=0.0))
        return OuterSolution(optimum.value * (1 - SLACK) + self._remaining.fixed, optimum.basis, is_binding)

    def _cost(self, block: float) -> dict[int, float]:
        """Objective: the step, and the price of missing memory given the seconds of a block."""
        even_step = block * self._remaining.blocks * self._order.num_microbatches / self._order.num_groups
        return {self._step_seconds: 1.0, self._shortage: SHORTAGE * even_step}

    def _num_blocks(self, stage: int) -> int:
        """Number of the variable n of a stage."""
        return self._first_stage + stage * self._stage_width

    def _amount(self, stage: int, component: Component) -> int:
        """Number of the variable of a component of Y of a stage."""
        return self._first_stage + stage * self._stage_width + 1 + component

    def _half_pass(self, stage: int, number: int) -> int:
        """Number of the variable of one half of a split backward of a stage."""
        return self._first_stage + stage * self._stage_width + 1 + len(Component) + number

    def _other_pass(self, stage: int, number: int) -> int:
        """Number of the variable of the other seconds of a stage in one of its passes."""
        return self._first_stage + (stage + 1) * self._stage_width - self._num_passes + number

    def _write(self, graph: Excerpt | None) -> None:
        """Write all rows that do not depend on points or cuts: as many in every case, so that bases carry over."""
        order, remaining, program = self._order, self._remaining, self._program
        stages = range(order.num_stages)
        updates: list[Row] = [
            {self._amount(stage, Component.UPDATE): 1.0 for stage in group_stages} for group_stages in order.stages_of
        ]
        if graph is None:
            self._write_closed_form()
        else:
            durations = durations_of(graph, [self._pass_seconds(stage) for stage in stages])
            overlap = order.schedule.steps_overlap
            add_precedences(
                program, graph, durations, self._step_seconds, overlap=overlap, after=updates, hop=remaining.hop
            )
        for group, group_stages in enumerate(order.stages_of):
            if graph is not None:
                self._write_link(graph, group, group_stages, updates[group])
            self._write_memory(group, group_stages)
        for stage in stages if self._num_halves else ():
            halves = [self._half_pass(stage, number) for number in range(2)]
            program.add({**dict.fromkeys(halves, 1.0), self._amount(stage, Component.BACKWARD): -1.0}, least=0.0)
            for number, least in zip(halves, remaining.halves, strict=True):
                program.add({number: 1.0, self._num_blocks(stage): -least}, least=0.0)
        # An equation for NEXT_BUFFERS: above the mean it would lower the interpolated rows of `_write_following`.
        for component, number in self._shared.items():
            mean = {self._amount(stage, component): -1.0 / remaining.blocks for stage in stages}
            program.add({number: 1.0, **mean}, least=0.0, most=0.0 if component is Component.NEXT_BUFFERS else math.inf)
        program.add({self._shared[Component.RECEIVED]: 1.0}, least=sum(remaining.received))
        self._write_whole_blocks()
        self._write_common()
        for stage, passes, together in zip((0, order.num_stages - 1), remaining.ends, remaining.edges, strict=True):
            for number, least in enumerate(passes):
                program.add({self._other_pass(stage, number): 1.0}, least=least)
            program.add({self._other_pass(stage, number): 1.0 for number in range(self._num_passes)}, least=together)
        program.fix_sum([self._num_blocks(stage) for stage in stages], remaining.blocks)
        others = dict.fromkeys(
            [self._other_pass(stage, number) for stage in stages for number in range(self._num_passes)], 1.0
        )
        program.add(others, least=remaining.seconds)
        program.add(
            {**others, **{self._amount(stage, Component.PLAIN): 1.0 for stage in stages}}, least=remaining.whole
        )
        program.fix_sum(range(self._other_bytes, self._step_seconds), remaining.resident)

    def _write_closed_form(self) -> None:
        """Write the closed form: the first microbatch passes all stages, the others follow at the pace of the slowest.

        Stage s ends after the backwards of the stages before it; then its update and what its link still carries. The
        gradients of its last microbatch and the reductions of the step travel after its last forward.
        """
        order, hop, program = self._order, self._remaining.hop, self._program
        num_stages = order.num_stages
        stages, pace = range(num_stages), num_stages  # numbers of the seconds of stages, and of the pace
        earlier: dict[int, float] = {}
        for stage in stages:
            forward, backward = self._pass_seconds(stage)
            link = self._amount(stage, Component.LINK)
            program.add({stage: 1.0, **_negative(forward), **_negative(backward)}, least=0.0)
            program.add({stage: 1.0, link: -1.0}, least=0.0)
            program.add({pace: 1.0, stage: -1.0}, least=0.0)
            follow = {self._step_seconds: 1.0, pace: 1.0 - order.num_microbatches}
            end = {**follow, **earlier, self._amount(stage, Component.UPDATE): -1.0}
            hops = (2.0 * (num_stages - 1) - stage) * hop
            program.add({**end, **dict.fromkeys(stages, -1.0)}, least=hops)
            others = dict.fromkeys((other for other in stages if other != stage), -1.0)
            traffic = {self._amount(stage, own): -1.0 for own in (Component.GRADIENT, Component.LINK_ONCE)}
            program.add({**end, **others, **_negative(forward), **traffic}, least=hops)
            earlier.update(backward)

    def _write_whole_blocks(self) -> None:
        """Write integrality of blocks: those of the fullest group, upper bounds, and one per inner stage."""
        order, remaining, program = self._order, self._remaining, self._program
        stages, (first, last) = range(order.num_stages), remaining.outer
        self._write_fullest_group()
        for group_stages in order.stages_of:
            program.add({self._num_blocks(stage): 1.0 for stage in group_stages}, most=self._cap)
        for stage in stages[first : len(stages) - last]:
            program.add({self._num_blocks(stage): 1.0}, least=1.0)
        for stage in stages:
            passes = {self._amount(stage, Component.FORWARD): 1.0, self._amount(stage, Component.BACKWARD): 1.0}
            program.add({**passes, self._amount(stage, Component.PLAIN): -1.0}, least=0.0)

    def _write_fullest_group(self) -> None:
        """Write lower bounds on the step from the group with most blocks, with the passes it waits for.

        Before its first task, groups before it run forwards, and after its last task their backwards. If no group has
        more than `most` blocks, at most `num_missing` groups have fewer, so that one of the last `num_missing + 1`
        groups has `most`.
        """
        order, remaining = self._order, self._remaining
        stages, first_stages = range(order.num_stages), sorted(group_stages[0] for group_stages in order.stages_of)
        num_missing = self._most * order.num_groups - remaining.blocks
        has_waits = self._is_most and not order.schedule.steps_overlap
        waited_for = range(first_stages[max(0, order.num_groups - 1 - num_missing)] if has_waits else 0)
        per_block = remaining.turns * order.num_microbatches * self._most / remaining.blocks
        work = {self._amount(stage, Component.PLAIN): -per_block for stage in stages}
        update = {self._amount(stage, Component.UPDATE): -self._most / remaining.blocks for stage in stages}
        durations = [
            self._pass_seconds(stage)[: self._num_passes if not self._num_halves else 1] for stage in waited_for
        ]
        for passes, after in ((1, update), (len(order.schedule.passes), {})):
            waits = {
                number: -factor
                for pass_durations in durations
                for row in pass_durations[:passes]
                for number, factor in row.items()
            }
            self._program.add({self._step_seconds: 1.0, **work, **waits, **after}, least=0.0)

    def _write_common(self) -> None:
        """Write that all blocks have one choice: a group of n blocks needs n times the mean of components in `COMMON`.

        Otherwise a convex combination over all stages could be one choice on some stages and another choice on others.
        """
        order, remaining, program = self._order, self._remaining, self._program
        num_stages, first, last = order.num_stages, *remaining.outer
        for number, component in enumerate(COMMON, self._first_common):
            total = {self._amount(stage, component): -1.0 for stage in range(num_stages)}
            program.add({number: float(remaining.blocks), **total}, least=0.0, most=0.0)
        for group_stages in order.stages_of:
            fewest, most = self._block_range(group_stages)
            for number, component in enumerate(COMMON, self._first_common):
                amounts = {self._amount(stage, component): 1.0 for stage in group_stages}
                program.add({**amounts, number: -float(fewest)}, least=0.0)
                program.add({**amounts, number: -float(most)}, most=0.0 if most < remaining.blocks else math.inf)
            gradients = {self._amount(stage, Component.GRADIENT): -1.0 for stage in group_stages}
            program.add(
                {**{self._amount(stage, Component.LINK): 1.0 for stage in group_stages}, **gradients}, least=0.0
            )
            if len(group_stages) > 1:
                self._write_common_of_stages(
                    [stage for stage in group_stages if first <= stage < num_stages - last], group_stages
                )

    def _write_common_of_stages(self, inner: Sequence[int], group_stages: Sequence[int]) -> None:
        """Write that each stage of a group needs as many means of components in `COMMON` as it has blocks.

        Inner stages have at least one block, which limits what is left for each other stage of the group.
        """
        for stage in group_stages:
            fewest = int(stage in inner)
            for number, component in enumerate(COMMON, self._first_common):
                if fewest:
                    self._program.add({self._amount(stage, component): 1.0, number: -1.0}, least=0.0)
                most = float(self._most - len(inner) + fewest)
                row = {self._amount(stage, component): 1.0, number: -most}
                self._program.add(row, most=0.0 if self._is_most else math.inf)

    def _pass_seconds(self, stage: int) -> list[Row]:
        """Duration of each pass of a stage, as linear expressions."""
        forward = self._amount(stage, Component.FORWARD)
        if self._num_halves:
            variables = [forward, self._half_pass(stage, 0), self._half_pass(stage, 1)]
        else:
            variables = [forward, self._amount(stage, Component.BACKWARD)][: self._num_passes]
        turns = self._remaining.turns
        return [{variable: turns, self._other_pass(stage, number): turns} for number, variable in enumerate(variables)]

    def _write_link(self, graph: Excerpt, group: int, stages: Sequence[int], update: Row) -> None:
        """Write that the link of a group is busy for its traffic: of the whole step, and from each last pass on."""
        microbatches = float(self._order.num_microbatches)
        links = {self._amount(stage, Component.LINK): -microbatches for stage in stages}
        self._program.add({self._step_seconds: 1.0, **links, **{variable: -1.0 for variable in update}}, least=0.0)
        nodes, last_pass = graph.order_of_group[group].tolist(), self._num_passes - 1
        pending: dict[int, float] = {}
        minus_first_start = {nodes[0]: 1.0} if self._order.schedule.steps_overlap else {}
        for node in reversed(nodes):
            if node >= len(graph.stage):
                for stage, count in enumerate(graph.aggregates[node - len(graph.stage), :, last_pass].tolist()):
                    if count:
                        number = self._amount(stage, Component.GRADIENT)
                        pending[number] = pending.get(number, 0.0) - count
                continue
            if graph.kind[node] != last_pass:
                continue
            stage = int(graph.stage[node])
            once, per_microbatch = self._amount(stage, Component.LINK_ONCE), self._amount(stage, Component.GRADIENT)
            pending[per_microbatch] = pending.get(per_microbatch, 0.0) - 1.0
            if once not in pending:
                pending[once] = -1.0
                row = {self._step_seconds: 1.0, **pending, **{variable: -1.0 for variable in update}}
                for number, factor in ((node, -1.0), *minus_first_start.items()):
                    row[number] = row.get(number, 0.0) + factor
                self._program.add(row, least=0.0)

    def _write_memory(self, group: int, stages: Sequence[int]) -> None:
        """Write that a group fits into its devices at each of its peaks, up to the shortage."""
        num_chunks, (first, last), last_stage = len(stages), self._remaining.outer, self._order.num_stages - 1
        inner = [stage for stage in stages if first <= stage <= last_stage - last]
        between = [stage for stage in inner if 0 < stage < last_stage]
        transient: dict[int, float] = {}
        if inner:
            self._write_following(group, stages)
            transient = {self._shared[Component.BUFFERS]: 1.0, self._following + group: 1.0}
            transient[self._shared[Component.RECEIVED]] = float(len(between))
        if len(inner) == num_chunks and not self._order.schedule.splits:  # any running stage has one
            transient[self._shared[Component.RUNNING]] = 1.0
        arriving, returning = self._remaining.received
        at_ends = arriving * (last_stage in inner and last_stage > 0) + returning * (0 in inner and last_stage > 0)
        for moment in self._order.held_at_peaks(group).tolist():
            row = {self._other_bytes + group: 1.0, self._shortage: -1.0, **transient}
            for stage, in_flight, late in zip(stages, moment[:num_chunks], moment[num_chunks:], strict=True):
                row[self._amount(stage, Component.RESIDENT)] = 1.0
                row[self._amount(stage, Component.KEPT)] = in_flight
                row[self._num_blocks(stage)] = late * self._remaining.late
            self._program.add(row, most=1.0 - at_ends)

    def _write_following(self, group: int, stages: Sequence[int]) -> None:
        """Write the transient bytes of consecutive blocks of a group, which occur if it has more blocks than stages.

        Between as many blocks as stages and the upper bound on its blocks, a linear interpolation is valid.
        """
        num_stages, fewest, most = len(stages), *self._block_range(stages)
        number, mean = self._following + group, self._shared[Component.NEXT_BUFFERS]
        if fewest > num_stages:
            self._program.add({number: 1.0, mean: -1.0}, least=0.0)
        else:
            share = 1.0 / max(1, most - num_stages)
            interpolated = {self._amount(stage, Component.NEXT_BUFFERS): -share for stage in stages}
            self._program.add({number: 1.0, mean: num_stages * share, **interpolated}, least=0.0)

    def _block_range(self, stages: Sequence[int]) -> tuple[int, int]:
        """Least and greatest number of blocks of a group with these stages."""
        order, remaining = self._order, self._remaining
        first, last, num_stages = *remaining.outer, order.num_stages
        # Every inner stage has at least one block.
        inner = sum(first <= stage < num_stages - last for stage in stages)
        inner_of_others = max(0, num_stages - first - last) - inner
        return max(inner, remaining.blocks - self._cap * (order.num_groups - 1)), min(
            remaining.blocks - inner_of_others, self._cap
        )
