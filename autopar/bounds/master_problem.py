"""Master problem: the step time of a configuration as a linear program over mixtures of its choices.

```text
T(sum_i a_i V_i) <= sum_i a_i T(V_i)                                  the step time T is convex in the slots V

min flow + tail + penalty short
such that   lhs y >= least + sum_i a_i (seconds . V_i + host)         one row per term of each maximum
            sum_i a_i bytes_i / limit <= 1 + short,   sum_i a_i = 1,   a, y >= 0
```

Look here for what the rows are; `docs/bounds.md` lists them. The step time is built from sums and maxima of sums of the
slots, hence convex, so that its minimum over convex combinations is a lower bound on every choice. y are the seconds of
passes, stages, tail and step.

A column is a choice with a recompute flavour of the most frequent kind. With host memory, y contains shares of memory
that lie there, which take time of the host link (`HostRates`).

`column_generation.py` solves the program, and states the bound, its validity, cost and sources.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np

from autopar.bounds.critical_path import CriticalPath
from autopar.bounds.master_rows import COPIED, HOSTED_STATE, PassVariable, RowWriter, SlotCounts, StepProgram, Variable
from autopar.bounds.pass_rows import PassRows
from autopar.bounds.reshard_buffers import BufferUse, buffers
from autopar.bounds.saved_values import main_kind
from autopar.cost.overlap import LEAST_COPY
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.mean_memory import mean_bytes
from autopar.formulate.offload_costs import HostRates
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Slot, Tables
from autopar.recompute import ON_DEVICE, STATE_KINDS, Hosted, Recompute
from autopar.schedule import SCHEDULES

SHORTAGE = 10.0
"""Price of missing memory, in step times per device of memory: high enough to prefer any choice that fits."""


def step_program(
    tables: Tables,
    pipeline: Pipeline,
    limit: float,
    *,
    flavours: Sequence[Recompute] = ON_DEVICE,
    fastest: Sequence[Recompute] = (),
    hosted: Collection[Hosted] = (),
    path: CriticalPath | None = None,
) -> StepProgram:
    """Write the master problem of a configuration.

    - *Relaxes*: how blocks fall into stages, and gradients that blocks inside the chain reduce late.
    - *Valid when*: always; with `limit` infinite, without rows of memory.
    - *Cost*: writing is cheap; every column and price costs as `column_generation.py` says.
    - *Source*: inner linearisation of a convex function, Dantzig and Wolfe, 1960; Geoffrion, 1970.

    Args:
        tables: The placement problem's tables.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        flavours: Recompute flavours, from fastest to slowest.
        fastest: For each kind, the least that its blocks recompute; nothing if not given.
        hosted: What may lie in host memory.
        path: Critical path bound that is valid for every schedule of the node.
    """
    least = tuple(fastest) or (Recompute.NONE,) * len(tables.folded.kinds)
    return _MasterProblem(tables, pipeline, limit, tuple(flavours), least, hosted, path).program()


class _MasterProblem:
    """Writes the rows of one configuration."""

    def __init__(
        self,
        tables: Tables,
        pipeline: Pipeline,
        limit: float,
        flavours: tuple[Recompute, ...],
        fastest: tuple[Recompute, ...],
        hosted: Collection[Hosted],
        path: CriticalPath | None,
    ) -> None:
        self.fastest, self.hosted, self.path = fastest, hosted, path
        self.tables, self.pipeline, self.limit = tables, pipeline, limit
        self.overlap = pipeline.overlap
        self.kinds = tables.folded.kinds
        self.main = main_kind(tables.folded).id
        self.trains = SCHEDULES[pipeline.schedule].trains
        allowed = flavours if self.trains else (Recompute.NONE,)
        useful = [flavour for flavour in allowed if flavour is not Recompute.SELECTIVE or tables.selective[self.main]]
        self.flavours = tuple(useful or allowed[:1])
        self.rows, self.slot_counts = RowWriter(tables, self.flavours), SlotCounts(tables, self.flavours)
        self.counts = self.slot_counts.counts
        rates = HostRates.of(tables.costs.cluster.known_host()) if hosted else HostRates(0.0, 0.0, 0.0)
        self.rates = rates.per(limit - tables.folded.buffer_bytes) if np.isfinite(limit) else rates
        self.hosts_state = any(own in hosted for own in STATE_KINDS)
        # Updates on the host are no faster than on the device: what a byte there costs besides is taken as nothing.
        self.state_rate = self.rates.both if Hosted.OPTIMIZER in hosted else 0.0
        self.least_copy = self.overlap.exposed(LEAST_COPY)

    def program(self) -> StepProgram:
        """Write all rows and return the program."""
        pipeline, rows = self.pipeline, self.rows
        groups = pipeline.num_groups
        passes = PassRows(self.tables, pipeline, rows, self.slot_counts, self.fastest, self.rates).write()
        self._minus_all_passes: dict[Variable, float] = {name: -factor for name, factor in passes.items()}
        self._write_stage_sums(passes)
        rows.add({"pace": 1.0, "all": -1.0 / groups})
        if groups > 1:
            self._write_whole_blocks(groups)
            self._write_first_block()
        else:
            self._write_tail()
        if np.isfinite(self.limit):
            self._write_memory()
        self._write_flow(passes)
        return rows.program({"flow": 1.0, "tail": 1.0, "short": SHORTAGE}, pipeline.fixed)

    def _write_stage_sums(self, passes: Mapping[PassVariable, float]) -> None:
        """Write sum_s t_s: a sum of maxima is at least each maximum of sums."""
        share, slowdown = self.overlap.share, self.overlap.slowdown - 1
        reductions, counts = self.slot_counts.of_all_blocks(Slot.GRADIENT), self.counts
        turns = self.pipeline.with_turns
        exposed: dict[Variable, float] = {"all": 1 / turns}
        exposed.update({name: -factor for name, factor in passes.items()})
        self.rows.add(exposed, (share + slowdown * (1 - share)) * reductions)
        for parts in zip(
            self.slot_counts.microbatch_reductions(counts),
            self.slot_counts.forward_waits(counts),
            self.slot_counts.backward_waits(counts),
            strict=True,
        ):
            self.rows.add({"all": 1 / turns}, sum(parts, np.zeros(self.slot_counts.shape)))
        if slowdown > 0:
            slowed: dict[Variable, float] = {"all": 1 / turns}
            slowed.update({name: -slowdown * factor for name, factor in passes.items()})
            self.rows.add(slowed, reductions)

    def _write_flow(self, passes: Mapping[PassVariable, float]) -> None:
        """Write the seconds of all microbatches.

        ```text
        flow >= sum_g t_g + (m - 1) max_g t_g                       1F1B, GPipe, inference
        flow >= m max_g t_g,   flow >= mean_g of m t_g + update,
        flow >= critical path bound                                 other schedules
        ```
        """
        pipeline, rows = self.pipeline, self.rows
        if pipeline.fills:
            rows.add({"flow": 1.0, "all": -1.0, "pace": 1.0 - pipeline.num_microbatches})
            return
        per_stage = pipeline.num_microbatches / pipeline.num_groups
        rows.add({"flow": 1.0, "pace": -float(pipeline.num_microbatches)})
        rows.add({"flow": 1.0, "all": -per_stage}, self.slot_counts.of_all_blocks(Slot.UPDATE) / pipeline.num_groups)
        if self.path is not None:
            longest = self._path_row(passes, self.path.forward, self.path.backward)
            rows.add(longest, least=pipeline.with_turns * self.path.constant)

    def _path_row(self, passes: Mapping[PassVariable, float], forward: float, backward: float) -> dict[Variable, float]:
        """Factors of the row of the critical path bound, with its duals of forwards and backwards."""
        turns = self.pipeline.with_turns
        row: dict[Variable, float] = {"flow": 1.0}
        for name, count in passes.items():
            # Recomputed forwards belong to the backward.
            forwards = self.counts[name[1]] if name[0] == "forward" else 0.0
            row[name] = -turns * (forward * forwards + backward * (count - forwards))
        return row

    def _write_whole_blocks(self, groups: int) -> None:
        """Write that the slowest group holds at least ceil(count / groups) blocks of any one kind."""
        for kind, count in enumerate(self.counts):
            num_whole = float(np.ceil(count / groups))
            if num_whole * groups > count:
                indices = range(len(self.flavours)) if kind == self.main else (None,)
                names: list[Variable] = [(name, kind, index) for name in ("forward", "backward") for index in indices]
                passes_of_kind = {name: -num_whole for name in names if name in self.rows.names}
                self.rows.add(
                    {"pace": 1.0, **passes_of_kind},
                    self.slot_counts.of_kind(kind, {Slot.GRADIENT: num_whole * self.overlap.share}),
                )
                blocks = num_whole * (np.arange(len(self.counts)) == kind)
                for parts in zip(
                    self.slot_counts.microbatch_reductions(blocks),
                    self.slot_counts.forward_waits(blocks),
                    self.slot_counts.backward_waits(blocks),
                    strict=True,
                ):
                    self.rows.add({"pace": 1.0}, sum(parts, np.zeros(self.slot_counts.shape)))

    def _write_first_block(self) -> None:
        """Write that the first group waits for the reduction and update of its first block.

        These follow the passes of all groups, even if a link is busy for longer than the passes.
        """
        if self.trains and self.pipeline.fills:
            first = self.tables.folded.chain[0]
            last_slots = {Slot.REDUCE: 1.0, Slot.GRADIENT: 1.0, Slot.UPDATE: 1.0}
            self.rows.add(
                {"all": 1.0, "tail": 1.0, **self._minus_all_passes}, self.slot_counts.of_kind(first, last_slots)
            )
            self.rows.add({"tail": 1.0}, self.slot_counts.of_kind(first, {Slot.UPDATE: 1.0}))
            if self.hosts_state:
                self._write_mean_copies()

    def _write_mean_copies(self) -> None:
        """Write that a mean stage waits for copies of its optimizer state.

        Stage s ends its last backward earlier than stage 0, by at most all backwards of a microbatch.
        """
        groups = self.pipeline.num_groups
        in_flight = np.array([self.pipeline.in_flight(group) for group in range(groups)], dtype=np.float64)
        scale = float((1 / in_flight).sum() * in_flight.max())  # of the mean stage's bytes, see `mean_bytes`
        backwards = dict[Variable, float]()
        for name, factor in self._minus_all_passes.items():
            first = self.counts[int(name[1])] if name[0] == "forward" else 0.0
            backwards[name] = -factor - first
        self.rows.add({"tail": 1.0, **backwards, HOSTED_STATE: -self.state_rate * scale / groups})

    def _write_tail(self) -> None:
        """Write the seconds after the last backward of a single stage: exposed gradient reductions and the update.

        t + left >= f + b + e in the formulas of `formulate/step_time.py`. b in e is what may be missing: the forward,
        the backward from some block on, and link seconds of later blocks.
        """
        share, slowdown, rows = self.overlap.share, self.overlap.slowdown - 1, self.rows
        after = share * self.slot_counts.of_all_blocks(Slot.REDUCE) + self.slot_counts.of_all_blocks(Slot.UPDATE)
        copies: dict[Variable, float] = {HOSTED_STATE: -self.least_copy * self.state_rate} if self.hosts_state else {}
        rows.add({"tail": 1.0, **copies}, after)
        if not self.trains:
            return
        if copies:
            rows.add({"tail": 1.0, HOSTED_STATE: -self.state_rate}, share * self.slot_counts.of_all_blocks(Slot.REDUCE))
        slowed = slowdown * (1 - share) * self.slot_counts.of_all_blocks(Slot.REDUCE)
        chain = self.tables.folded.chain
        for last in sorted({0, min(1, len(chain) - 1), max(0, len(chain) - 2), len(chain) - 1}):
            # Reductions of blocks up to this one follow the backwards of all blocks behind it.
            behind = np.bincount(chain[:last], minlength=len(self.counts)).astype(np.float64)
            up_to = behind.copy()
            up_to[chain[last]] += 1
            row: dict[Variable, float] = {"all": 1 - slowdown, "tail": 1.0, **copies}
            for name, factor in self._passes_behind(behind).items():
                row[name] = -(1 - slowdown) * factor
            reduced, gradients = self.slot_counts.step_reductions(up_to), self.slot_counts.microbatch_reductions(up_to)
            for link, waited in enumerate(self.slot_counts.backward_waits(behind)):
                traffic = (1 - share) * reduced[link] + gradients[link] + waited
                rows.add(row, after + slowed + (1 - slowdown) * traffic)

    def _passes_behind(self, excluded: FloatArray) -> dict[Variable, float]:
        """Count the forwards of all blocks and the backwards of all but the excluded ones."""
        total: dict[Variable, float] = {}
        for kind, count in enumerate(self.counts):
            for index in range(len(self.flavours)) if kind == self.main else (None,):
                total["forward", kind, index] = count
                total["backward", kind, index] = count - excluded[kind]
        return total

    def _write_memory(self) -> None:
        """Write that a mean stage fits into a device."""
        amounts = self._mean_weights(evenly=False)
        limit = self.limit - self.tables.folded.buffer_bytes
        row: dict[Variable, float] = {"short": 1.0}
        if Recompute.OFFLOAD in self.flavours:
            in_flight = [self.pipeline.in_flight(group) for group in range(self.pipeline.num_groups)]
            row[COPIED] = float(self.counts[self.main]) / sum(1 / count for count in in_flight)
        if self.hosts_state:
            row[HOSTED_STATE] = 1.0
        if self.pipeline.num_stages > 1:
            self.rows.add(row, amounts=amounts, least=-1.0)
            if not self.hosted:
                self.rows.add({"short": 1.0}, amounts=self._mean_weights(evenly=True), least=-1.0)
            return
        # One stage holds all blocks, gathered parameters of two neighbours, and gradients of one block.
        self.rows.buffers = buffers(self.tables)
        chain = self.tables.folded.chain
        for first, second in dict.fromkeys(pairwise(chain)) or {(chain[0], chain[0]): None}:
            for use in (BufferUse.FORWARD, BufferUse.BACKWARD):
                neighbours = Counter((first, second) if len(chain) > 1 else (first,))
                factors = [
                    float(neighbours[buffer.kind]) if buffer.use is use
                    else float(buffer.use is BufferUse.REDUCING and buffer.kind == self.main)
                    for buffer in self.rows.buffers
                ]  # fmt: skip
                self.rows.add(row, amounts=amounts, pairs=np.array(factors) / limit, least=-1.0)

    def _mean_weights(self, *, evenly: bool) -> FloatArray:
        """Shares of the limit per byte of each item of a mean stage, (flavours, items)."""
        amounts = []
        least_kept = [Recompute.OFFLOAD if Hosted.ACTIVATIONS in self.hosted else Recompute.FULL] * len(self.kinds)
        last = self.tables.folded.chain[-1]
        if self.pipeline.num_stages == 1 and not self.hosted and self.counts[last] == 1:
            # The backward of the last block runs first, when all its saved values exist, kept or recomputed.
            least_kept[last] = Recompute.NONE
        for flavour in self.flavours:
            kept_flavour = Recompute.NONE if flavour is Recompute.OFFLOAD else flavour  # copied bytes are a variable
            keeps = [
                kept_flavour if kind.id == self.main or not self.trains else least_kept[kind.id] for kind in self.kinds
            ]
            mean = mean_bytes(self.tables, self.pipeline, self.limit, keeps, evenly=evenly)
            amounts.append(mean.factors / mean.limit)
        return np.array(amounts)
