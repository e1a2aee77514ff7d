"""The step time of a configuration as a linear program over its choices: a bound that sees all maxima at once.

Every term of the step time is convex in the prices of blocks: sums, and maxima of sums. So what the formula gives for a
mean of several choices is at most the mean of what it gives for each, and the least over all means is a lower bound on
the step time of every choice. With one number a_i >= 0 per choice i, sum a_i = 1, that is a linear program

    min T   such that   lhs y >= least + sum_i a_i (seconds . V_i + host),   sum_i a_i bytes_i <= limit

with V_i the prices of choice i by kind and slot, and y the seconds of passes, stages, tail and step, one row for each
term of each maximum. Blocks of the most frequent kind have flavours of recompute in any mixture: a column is a choice
and a flavour, and what a flavour adds is counted on its own columns. Each of a few parts of the pipeline, groups of
devices or several neighbours, has flavours of its own, for the first ones hold more microbatches and may have to
recompute where the last ones do not.
Where host memory may be used, y has the shares of memory that lie there, too, which make room on the device and take
the time of the host link (`HostRates`).

By duality, prices of the rows make the rest linear in V: with p >= 0, p lhs <= the cost of y,

    step >= p least + min over choices and flavours of p (seconds . V + host)

which is a placement problem per flavour. `autopar.bounds.column_generation` looks for the best prices.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from autopar.bounds.critical_path import LeastPath
from autopar.bounds.master_rows import AWAY, COPIED, Counting, Name, Pass, Rows, StepProgram
from autopar.bounds.pass_rows import PassRows
from autopar.bounds.reshard_buffers import BufferUse, buffers
from autopar.bounds.saved_values import main_kind
from autopar.cost.overlap import LEAST_COPY
from autopar.formulate.block_memory import KEPT, RESIDENT, FloatArray
from autopar.formulate.mean_memory import mean_bytes, stage_weights
from autopar.formulate.offload_costs import HostRates
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Slot, Tables
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.schedule import SCHEDULES

MOST_APART = 4
"""Parts of a pipeline of which it is said apart what they hold, each a group of devices or several neighbours: each
asks for placements of its own."""

SHORTAGE = 10.0
"""Price of memory that is not there, in step times for all that there is: enough to prefer any choice that fits."""


def step_program(
    tables: Tables,
    pipeline: Pipeline,
    limit: float,
    *,
    flavours: Sequence[Recompute] = ON_DEVICE,
    fastest: Sequence[Recompute] = (),
    hosted: Collection[Hosted] = (),
    path: LeastPath | None = None,
    finely: bool = False,
) -> StepProgram:
    """Return the linear program of a configuration.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        flavours: What blocks may recompute, from fastest to slowest.
        fastest: By kind the least that its blocks recompute; nothing if not given.
        hosted: What may lie in host memory.
        path: What is known of the longest path through a step, under each of its schedules.
        finely: Whether parts of long pipelines are apart, too, which takes several times as long to price.
    """
    least = tuple(fastest) or (Recompute.NONE,) * len(tables.folded.kinds)
    return _Step(tables, pipeline, limit, tuple(flavours), least, hosted, path, finely).program()


def parts_of(num_groups: int) -> tuple[range, ...]:
    """Return the groups of a pipeline in parts of about equal length, one each if they are few.

    >>> parts_of(6)
    (range(0, 1), range(1, 3), range(3, 4), range(4, 6))
    """
    count = min(num_groups, MOST_APART)
    ends = [part * num_groups // count for part in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(ends))


class _Step:
    """Writes the rows of one configuration."""

    def __init__(
        self,
        tables: Tables,
        pipeline: Pipeline,
        limit: float,
        flavours: tuple[Recompute, ...],
        fastest: tuple[Recompute, ...],
        hosted: Collection[Hosted],
        path: LeastPath | None,
        finely: bool,
    ) -> None:
        self.fastest, self.hosted, self.path = fastest, hosted, path
        self.tables, self.pipeline, self.limit = tables, pipeline, limit
        self.overlap = pipeline.overlap
        self.kinds = tables.folded.kinds
        self.main = main_kind(tables.folded).id
        self.trains = SCHEDULES[pipeline.schedule].trains
        allowed = flavours if self.trains else (Recompute.NONE,)
        useful = [own for own in allowed if own is not Recompute.SELECTIVE or tables.selective[self.main]]
        each = tuple(useful or allowed[:1])
        apart = pipeline.num_groups <= MOST_APART or finely
        limited = self.trains and np.isfinite(limit) and not hosted
        self.parts = parts_of(pipeline.num_groups) if apart and limited else (range(pipeline.num_groups),)
        self.flavours, self.part_of = each * len(self.parts), np.repeat(np.arange(len(self.parts)), len(each))
        self.rows, self.each = Rows(tables, self.flavours), Counting(tables, self.flavours)
        self.counts = self.each.counts
        rates = HostRates.of(tables.costs.cluster.known_host()) if hosted else HostRates(0.0, 0.0, 0.0)
        self.rates = rates.per(limit - tables.folded.buffer_bytes) if np.isfinite(limit) else rates
        self.least_copy = self.overlap.exposed(LEAST_COPY)

    def program(self) -> StepProgram:
        pipeline, rows = self.pipeline, self.rows
        groups = pipeline.num_groups
        passes = PassRows(self.tables, pipeline, rows, self.each, self.fastest, self.rates).write()
        self._whole: dict[Name, float] = {name: -factor for name, factor in passes.items()}
        self._groups(passes)
        rows.add({"pace": 1.0, "all": -1.0 / groups})
        if groups > 1:
            self._undivided(groups)
            self._first_block()
        else:
            self._tail()
        if np.isfinite(self.limit):
            self._memory()
        self._flow(passes)
        if len(self.parts) > 1:
            self._by_part(passes)
        return rows.program({"flow": 1.0, "tail": 1.0, "short": SHORTAGE}, pipeline.fixed)

    def _groups(self, passes: Mapping[Pass, float]) -> None:
        """Write the rows of t_s, summed over all stages: a sum of maxima is at least each maximum of sums."""
        share, slower = self.overlap.share, self.overlap.slowdown - 1
        gradient, counts = self.each.sums(Slot.GRADIENT), self.counts
        turns = self.pipeline.with_turns
        whole: dict[Name, float] = {"all": 1 / turns}
        whole.update({name: -factor for name, factor in passes.items()})
        self.rows.add(whole, (share + slower * (1 - share)) * gradient)
        for parts in zip(self.each.gradients(counts), self.each.ahead(counts), self.each.behind(counts), strict=True):
            self.rows.add({"all": 1 / turns}, sum(parts, np.zeros(self.each.shape)))
        if slower > 0:
            slow: dict[Name, float] = {"all": 1 / turns}
            slow.update({name: -slower * factor for name, factor in passes.items()})
            self.rows.add(slow, gradient)

    def _flow(self, passes: Mapping[Pass, float]) -> None:
        """Write what all microbatches take.

        1F1B and GPipe: sum_g t_g + (m - 1) max_g t_g. Where the backward is split, or groups hold several stages, the
        first of which may be short: what the slowest group does, m max_g t_g; what all groups do on average, and then
        update; and what the longest path has of all passes (`least_path`).
        """
        pipeline, rows = self.pipeline, self.rows
        if pipeline.fills:
            rows.add({"flow": 1.0, "all": -1.0, "pace": 1.0 - pipeline.num_microbatches})
            return
        own = pipeline.num_microbatches / pipeline.num_groups
        rows.add({"flow": 1.0, "pace": -float(pipeline.num_microbatches)})
        rows.add({"flow": 1.0, "all": -own}, self.each.sums(Slot.UPDATE) / pipeline.num_groups)
        if self.path is not None:
            longest = self._longest(passes, self.path.forward, self.path.backward)
            rows.add(longest, least=pipeline.with_turns * self.path.constant)

    def _longest(self, passes: Mapping[Pass, float], forward: float, backward: float) -> dict[Name, float]:
        """Return the flow less so many times what all forwards and all backwards take."""
        turns = self.pipeline.with_turns
        path: dict[Name, float] = {"flow": 1.0}
        for name, count in passes.items():
            once = self.counts[name[1]] if name[0] == "forward" else 0.0  # what runs again is part of the backward
            path[name] = -turns * (forward * once + backward * (count - once))
        return path

    def _undivided(self, groups: int) -> None:
        """Write that the slowest group holds at least its share of any one kind, in whole blocks."""
        for kind, count in enumerate(self.counts):
            held = float(np.ceil(count / groups))
            if held * groups > count:
                passes = range(len(self.flavours)) if kind == self.main else (None,)
                names: list[Name] = [(name, kind, index) for name in ("forward", "backward") for index in passes]
                own = {name: -held for name in names if name in self.rows.names}
                self.rows.add({"pace": 1.0, **own}, self.each.prices(kind, {Slot.GRADIENT: held * self.overlap.share}))
                blocks = held * (np.arange(len(self.counts)) == kind)
                for parts in zip(
                    self.each.gradients(blocks), self.each.ahead(blocks), self.each.behind(blocks), strict=True
                ):
                    self.rows.add({"pace": 1.0}, sum(parts, np.zeros(self.each.shape)))

    def _first_block(self) -> None:
        """Write that the first group waits for what its first block reduces and updates.

        So it does for what its passes and those of the others take, even if a link is busier than they are.
        """
        if self.trains and self.pipeline.fills:
            first = self.tables.folded.chain[0]
            own = {Slot.REDUCE: 1.0, Slot.GRADIENT: 1.0, Slot.UPDATE: 1.0}
            self.rows.add({"all": 1.0, "tail": 1.0, **self._whole}, self.each.prices(first, own))
            self.rows.add({"tail": 1.0}, self.each.prices(first, {Slot.UPDATE: 1.0}))
            if Hosted.OPTIMIZER in self.hosted:
                self._mean_copies()

    def _mean_copies(self) -> None:
        """Write that a mean stage waits for the copies of its optimizer's state.

        Stage s is done with its last backward earlier than stage 0, but by no more than all backwards of a microbatch.
        """
        groups = self.pipeline.num_groups
        flying = np.array([self.pipeline.in_flight(group) for group in range(groups)], dtype=np.float64)
        whole = float((1 / flying).sum() * flying.max())  # of the mean stage's bytes, see `mean_bytes`
        backwards = dict[Name, float]()
        for name, factor in self._whole.items():
            first = self.counts[int(name[1])] if name[0] == "forward" else 0.0
            backwards[name] = -factor - first
        self.rows.add({"tail": 1.0, **backwards, AWAY: -self.rates.both * whole / groups})

    def _tail(self) -> None:
        """Write what one stage does after its last backward: what that does not hide of gradients, and the update.

        t + left >= f + b + e by the formulas of `formulate/step_time.py`, and b in e is what is not there: f, and the
        backward from a block on, and the links of what comes after.
        """
        share, slower, rows = self.overlap.share, self.overlap.slowdown - 1, self.rows
        once = share * self.each.sums(Slot.REDUCE) + self.each.sums(Slot.UPDATE)
        away: dict[Name, float] = {AWAY: -self.least_copy * self.rates.both} if Hosted.OPTIMIZER in self.hosted else {}
        rows.add({"tail": 1.0, **away}, once)
        if not self.trains:
            return
        if away:
            rows.add({"tail": 1.0, AWAY: -self.rates.both}, share * self.each.sums(Slot.REDUCE))
        rest = slower * (1 - share) * self.each.sums(Slot.REDUCE)
        chain = self.tables.folded.chain
        for last in sorted({0, min(1, len(chain) - 1), max(0, len(chain) - 2), len(chain) - 1}):
            # The blocks up to this one are done with their backward and all they reduce comes after the blocks behind.
            before = np.bincount(chain[:last], minlength=len(self.counts)).astype(np.float64)
            upto = before.copy()
            upto[chain[last]] += 1
            time: dict[Name, float] = {"all": 1 - slower, "tail": 1.0, **away}
            for name, factor in self._lasting(before).items():
                time[name] = -(1 - slower) * factor
            reduced, gradients = self.each.reduced(upto), self.each.gradients(upto)
            for link, waited in enumerate(self.each.behind(before)):
                due = (1 - share) * reduced[link] + gradients[link] + waited
                rows.add(time, once + rest + (1 - slower) * due)

    def _lasting(self, before: FloatArray) -> dict[Name, float]:
        """Return the forwards of all blocks and the backwards of those that are not `before`, at least."""
        total: dict[Name, float] = {}
        for kind, count in enumerate(self.counts):
            for index in range(len(self.flavours)) if kind == self.main else (None,):
                total["forward", kind, index] = count
                total["backward", kind, index] = count - before[kind]
        return total

    def _memory(self) -> None:
        """Write that the mean stage fits."""
        amounts = self._mean(evenly=False)
        limit = self.limit - self.tables.folded.buffer_bytes
        room: dict[Name, float] = {"short": 1.0}
        if Recompute.OFFLOAD in self.flavours:
            flying = [self.pipeline.in_flight(group) for group in range(self.pipeline.num_groups)]
            room[COPIED] = float(self.counts[self.main]) / sum(1 / count for count in flying)
        if Hosted.OPTIMIZER in self.hosted:
            room[AWAY] = 1.0
        if self.pipeline.num_stages > 1:
            self.rows.add(room, amounts=amounts, least=-1.0)
            if not self.hosted:
                self.rows.add({"short": 1.0}, amounts=self._mean(evenly=True), least=-1.0)
            return
        # One stage holds all blocks, and buffers for two neighbours and for one block besides.
        self.rows.buffers = buffers(self.tables)
        chain = self.tables.folded.chain
        for first, second in dict.fromkeys(pairwise(chain)) or {(chain[0], chain[0]): None}:
            for use in (BufferUse.FORWARD, BufferUse.BACKWARD):
                together = Counter((first, second) if len(chain) > 1 else (first,))
                held = [
                    float(together[own.kind]) if own.use is use
                    else float(own.use is BufferUse.REDUCING and own.kind == self.main)
                    for own in self.rows.buffers
                ]  # fmt: skip
                self.rows.add(room, amounts=amounts, pairs=np.array(held) / limit, least=-1.0)

    def _by_part(self, passes: Mapping[Pass, float]) -> None:
        """Write what each part of the pipeline does and holds of the most frequent kind: a block is in one of them.

        Its groups do no more than so many of the slowest group, and the mean of them, weighted as of `stage_weights`,
        holds no more than a device can.
        """
        share, slower = self.overlap.share, self.overlap.slowdown - 1
        count, limit = float(self.counts[self.main]), self.limit - self.tables.folded.buffer_bytes
        for number, groups in enumerate(self.parts):
            own = self.part_of == number
            time: dict[Name, float] = {"pace": len(groups) / self.pipeline.with_turns}
            time.update({name: -factor for name, factor in passes.items() if name[1] == self.main and own[name[2]]})
            seconds = self.each.prices(self.main, {Slot.GRADIENT: (share + slower * (1 - share)) * count})
            self.rows.add(time, seconds * own[:, None, None], with_memory=True)
            for evenly in (True, False) if len(groups) > 1 else (True,):
                held, kept = stage_weights(self.pipeline, groups, evenly=evenly)
                amounts = np.zeros((len(self.flavours), len(self.tables.bytes)))
                for flavour in np.flatnonzero(own):
                    for index, item in enumerate(self.tables.bytes):
                        if item.kind == self.main and item.memory in RESIDENT:
                            amounts[flavour, index] = held * count / limit
                        elif item.kind == self.main and item.memory in KEPT[self.flavours[flavour]]:
                            amounts[flavour, index] = kept * count / limit
                self.rows.add({"short": 1.0}, amounts=amounts, least=-1.0, with_memory=True)

    def _mean(self, *, evenly: bool) -> FloatArray:
        """Return the shares of the limit that a byte of each item is of a mean stage, (flavours, items)."""
        amounts = []
        least = [Recompute.OFFLOAD if Hosted.ACTIVATIONS in self.hosted else Recompute.FULL] * len(self.kinds)
        last = self.tables.folded.chain[-1]
        if self.pipeline.num_stages == 1 and not self.hosted and self.counts[last] == 1:
            least[last] = Recompute.NONE  # its backward is the first one: all it saves is there, or there again
        for flavour in self.flavours:
            own = Recompute.NONE if flavour is Recompute.OFFLOAD else flavour  # less what is copied
            keeps = [own if kind.id == self.main or not self.trains else least[kind.id] for kind in self.kinds]
            mean = mean_bytes(self.tables, self.pipeline, self.limit, keeps, evenly=evenly)
            amounts.append(mean.factors / mean.limit)
        return np.array(amounts)
