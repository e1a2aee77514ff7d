"""What a step takes at least under schedules without a closed form, given what every stage takes: rows as they are due.

The order of tasks says how long a step is, and that is a maximum over very many ways through it. A step program knows
what each stage takes as variables; whenever these make a way longer than the program's step, that way becomes a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.formulate.memory import FloatArray
from autopar.formulate.step import Pipeline
from autopar.formulate.tables import IntArray
from autopar.schedule import SCHEDULES, chunks_of
from autopar.schedule.critical import Loads, Way, longest_ways

TOLERANCE = 1e-6
"""Relative: by how much a way has to be longer than the step."""


@dataclass(frozen=True, slots=True, eq=False)
class StageWays:
    """What stages take, as variables of a step program, and the rows that follow for its step.

    Attributes:
        pipeline: The order of tasks.
        halves: Least seconds of the two halves of a split backward of all blocks that are alike.
        flow: The variable of the step.
        share: (stages,) variables: the share of a stage in the blocks that are alike.
        forward: (stages,) of its forward.
        backward: (stages,) of its backward, both halves.
        update: (stages,) of its update.
        ahead: (links, stages) of what its forward waits for.
        behind: (links, stages) of what its backward waits for.
        gradient: (links, stages) of gradients on their way after every microbatch.
        reduced: (links, stages) of those that are reduced once.
    """

    pipeline: Pipeline
    halves: tuple[float, float]
    flow: int
    share: IntArray
    forward: IntArray
    backward: IntArray
    update: IntArray
    ahead: IntArray
    behind: IntArray
    gradient: IntArray
    reduced: IntArray

    def rows(self, values: FloatArray) -> list[dict[int, float]]:
        """Return what variables of these values do not keep to: sums of variables that have to be at least 0."""
        pipeline = self.pipeline
        schedule = SCHEDULES[pipeline.schedule]
        seconds = np.zeros((len(self.share), 3))
        seconds[:, 0], seconds[:, 1] = values[self.forward], values[self.backward]
        if schedule.splits:
            least = values[self.share][:, None] * np.array(self.halves)
            rest = np.maximum(0.0, seconds[:, 1] - least.sum(axis=1))
            halves = least + rest[:, None] * np.array(self.halves) / max(sum(self.halves), 1e-30)
            seconds[:, 1:] = halves
        nothing = np.zeros(len(self.share))
        loads = [
            Loads(np.stack([values[ahead], values[behind], nothing], axis=1), values[gradient], values[reduced])
            for ahead, behind, gradient, reduced in zip(
                self.ahead, self.behind, self.gradient, self.reduced, strict=True
            )
        ]
        found = longest_ways(
            schedule, pipeline.num_groups, pipeline.num_microbatches, pipeline.with_turns * seconds, loads
        )
        rows = [self._row(way) for way in found]
        return [row for row in rows if _sum(row, values) < -TOLERANCE * values[self.flow]]

    def _row(self, way: Way) -> dict[int, float]:
        """Return the step less a way."""
        row = {self.flow: 1.0}

        def less(variables: IntArray, counts: FloatArray) -> None:
            for variable, count in zip(variables.tolist(), counts.tolist(), strict=True):
                if count:
                    row[variable] = row.get(variable, 0.0) - count

        turns, splits = self.pipeline.with_turns, SCHEDULES[self.pipeline.schedule].splits
        forward, backward, weight = turns * way.passes.T
        less(self.forward, forward)
        if splits:
            # What is not known to be of one half may be of the other one.
            either = np.minimum(backward, weight)
            less(self.backward, either)
            less(self.share, (backward - either) * self.halves[0] + (weight - either) * self.halves[1])
        else:
            less(self.backward, backward)
        if way.link >= 0:
            less(self.ahead[way.link], way.waited[:, 0].astype(float))
            less(self.behind[way.link], way.waited[:, 1].astype(float))
            less(self.gradient[way.link], way.behind.astype(float))
            less(self.reduced[way.link], way.once.astype(float))
        groups = SCHEDULES[self.pipeline.schedule].groups(self.pipeline.num_groups, self.pipeline.num_chunks)
        own = np.isin(np.arange(len(self.share)), chunks_of(groups)[way.group])
        less(self.update, own.astype(float))
        return row


def _sum(row: Mapping[int, float], values: FloatArray) -> float:
    return float(sum(factor * values[variable] for variable, factor in row.items()))
