"""What each stage takes and what groups hold of the most frequent kind of blocks, as rows of a step program.

For schedules without a closed form: every stage has flavours and placements of its own, what it takes is a variable,
and ways through the step are rows as they are due (`ways.py`). The first and the last block of the chain are of the
first and the last stage, whatever their kind; others are left out.
"""

from collections.abc import Mapping

import numpy as np

from autopar.formulate.keeping import put_off
from autopar.formulate.memory import KEPT, RESIDENT
from autopar.formulate.rows import SHARE, Counting, IntArray, Mask, Name, Pass, Rows
from autopar.formulate.step import Pipeline
from autopar.formulate.tables import Slot, Tables
from autopar.formulate.ways import StageWays
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, chunks_of
from autopar.schedule.holding import fullest


class StageRows:
    """Writes them.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, one schedule.
        limit: Bytes per device.
        rows: Where to.
        each: How often prices count.
        stage_of: (flavours,) the stage of each.
    """

    def __init__(
        self, tables: Tables, pipeline: Pipeline, limit: float, rows: Rows, each: Counting, stage_of: IntArray
    ) -> None:
        self._tables, self._pipeline, self._rows, self._each, self._stage_of = tables, pipeline, rows, each, stage_of
        self._limit = limit - tables.folded.buffer_bytes
        self._main, self._count = each.main, float(each.counts[each.main])
        chain, last = tables.folded.chain, pipeline.num_stages - 1
        outer = ((0, chain[0]), (last, chain[-1]))
        self._ends = [[kind for at, kind in outer if at == stage and kind != self._main] for stage in range(last + 1)]

    def write(self, passes: Mapping[Pass, float], halves: tuple[float, float]) -> StageWays:
        """Write the rows, and return what further ones follow from.

        Args:
            passes: Variables of the passes of an instance of each kind, and how often each is in a microbatch.
            halves: Least seconds of the halves of a split backward of all blocks of the most frequent kind.
        """
        pipeline, schedule = self._pipeline, SCHEDULES[self._pipeline.schedule]
        stages = range(pipeline.num_stages)
        for stage in stages:
            self._shares(stage)
            self._passes(stage, passes)
            self._update(stage)
        loads = {name: self._loads(name) for name in ("ahead", "behind", "gradient", "reduced")}
        for group, own in enumerate(chunks_of(schedule.groups(pipeline.num_groups, pipeline.num_chunks))):
            here = np.isin(self._stage_of, own)
            slowest: dict[Name, float] = {"pace": 1.0 / pipeline.with_turns}
            slowest.update({name: -f for name, f in passes.items() if name[1] == self._main and here[name[2]]})
            self._rows.add(slowest)
            self._holds(group, own)
        return StageWays(
            pipeline,
            halves,
            self._rows.variable("flow"),
            *(self._variables(name) for name in (SHARE, "forward", "backward", "update")),
            **loads,
        )

    def _variable(self, name: str, stage: int) -> Name:
        return name if name == SHARE else f"stage {name}", stage, None

    def _variables(self, name: str) -> IntArray:
        return np.array([self._rows.variable(self._variable(name, stage)) for stage in range(len(self._ends))])

    def _shares(self, stage: int) -> None:
        """Write what share of the blocks a stage has."""
        self._rows.add({self._variable(SHARE, stage): 1.0}, host=(self._stage_of == stage).astype(np.float64))

    def _passes(self, stage: int, passes: Mapping[Pass, float]) -> None:
        """Write what the forward and the backward of a stage take; what runs again is part of the latter."""
        forward: dict[Name, float] = {self._variable("forward", stage): 1.0}
        backward: dict[Name, float] = {self._variable("backward", stage): 1.0}
        for name, total in passes.items():
            what, kind, flavour = name
            if flavour is None and kind not in self._ends[stage]:
                continue
            if flavour is not None and self._stage_of[flavour] != stage:
                continue
            instances = float(self._each.counts[kind])
            once = instances if what == "forward" else 0.0
            share = 1.0 if flavour is not None else 1 / instances
            forward[name], backward[name] = -once * share, -(total - once) * share
        self._rows.add(forward)
        self._rows.add(backward)

    def _update(self, stage: int) -> None:
        """Write what the update of a stage takes."""
        update = self._each.prices(self._main, {Slot.UPDATE: self._count}) * self._of(stage)
        for kind in self._ends[stage]:
            update += self._each.prices(kind, {Slot.UPDATE: 1.0})
        self._rows.add({self._variable("update", stage): 1.0}, update)

    def _loads(self, name: str) -> IntArray:
        """Write what blocks of the most frequent kind put on links, and return the variables, (links, stages).

        Blocks of other kinds may have no gradients where these have some, or the other way round, and only stages with
        gradients wait for their links.
        """
        each, blocks = self._each, self._each.counts * (np.arange(len(self._each.counts)) == self._main)
        loads = {"ahead": each.ahead, "behind": each.behind, "gradient": each.gradients, "reduced": each.reduced}[name]
        found = []
        for link, load in enumerate(loads(blocks)):
            for stage in range(len(self._ends)):
                self._rows.add({self._variable(f"{name} {link}", stage): 1.0}, load * self._of(stage))
            found.append(self._variables(f"{name} {link}"))
        return np.array(found)

    def _of(self, stage: int) -> Mask:
        """Return which flavours are of a stage, to be multiplied with prices."""
        return np.asarray((self._stage_of == stage)[:, None, None])

    def _holds(self, group: int, stages: tuple[int, ...]) -> None:
        """Write that a group holds no more than a device can, at its fullest moments.

        What is put off until weight passes is there whatever runs again.
        """
        pipeline, flavours, tables = self._pipeline, self._each.flavours, self._tables
        size = pipeline.num_groups, pipeline.num_microbatches, pipeline.num_chunks
        late = sum(memory.least(tables.mesh.shape) for memory in put_off(tables.folded, tables.costs))
        for counts in fullest(SCHEDULES[pipeline.schedule], group, *size).reshape(-1, 2, len(stages)):
            amounts = np.zeros((len(flavours), len(tables.bytes)))
            waiting = np.zeros(len(flavours))
            for stage, flying, put_back in zip(stages, *counts.tolist(), strict=True):
                own = np.flatnonzero(self._stage_of == stage).tolist()
                waiting[own] = put_back * late * self._count / self._limit
                for index, item in enumerate(tables.bytes):
                    times = (1.0 if item.memory in RESIDENT else flying) / self._limit
                    if item.kind == self._main:
                        for flavour in own:
                            if item.memory in (*RESIDENT, *KEPT[flavours[flavour]]):
                                amounts[flavour, index] = times * self._count
                    elif item.kind in self._ends[stage] and item.memory in (*RESIDENT, *KEPT[Recompute.FULL]):
                        amounts[:, index] = times
            self._rows.add({"short": 1.0}, amounts=amounts, least=-1.0, host=waiting, with_memory=True)
