"""How often the passes of all stages count at least in a step, however unevenly the stages are cut.

The time of a step is that of its longest path, so each path is a lower bound: a sum over stages of how often the path
has their forwards and backwards. A mean of several paths is one, too. If each stage has at least f forwards and b
backwards in such a mean, a step takes at least f times the forwards of all stages and b times their backwards, for one
microbatch: a bound that knows the bubble, but neither where the chain is cut nor what a stage takes.

Of blocks that are alike a stage has a share, of all their passes the same one. What these blocks take at least is work
that is alike; a mean of paths has at least c times all of it if it has so much of each stage. That says more of a
schedule that splits the backward: its bubble is gone where one stage has nothing but passes of weights.

Where steps overlap, a step takes what the slowest group takes from its first task to its last one, and paths count that
begin and end there.

The best mean is the dual of a linear program: seconds of stages, with given sums, and starts of tasks that make the
step short.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.bounds.task_graph import excerpt
from autopar.bounds.task_lp import SLACK, LeastProgram, add_order, durations_of
from autopar.schedule.base import Schedule

MOST_STAGES = 256
"""Of a step whose paths are looked at: for more, the linear program takes seconds."""

PARTS = 600
"""Shares of passes are rounded to so many parts, so that one program serves many meshes."""


@dataclass(frozen=True, slots=True)
class LeastPath:
    """A lower bound on a step: work that is alike, and the rest wherever it is.

    Attributes:
        seconds: What the step takes for the work that is alike.
        forward: How often a second counts that the forwards of all stages take besides, for one microbatch.
        backward: The same of backwards.
        alike: The work that is alike, for one microbatch: its forwards, and its backwards with passes of weights.
    """

    seconds: float
    forward: float
    backward: float
    alike: tuple[float, float]

    @property
    def constant(self) -> float:
        """What is left of the step's seconds when all forwards and backwards are counted, alike or not."""
        return self.seconds - self.forward * self.alike[0] - self.backward * self.alike[1]

    def step(self, forward: float, backward: float) -> float:
        """Return the least seconds of a step whose forwards and backwards take so long together, for one microbatch."""
        assert forward >= self.alike[0] * (1 - SLACK), "the work that is alike is part of it"
        assert backward >= self.alike[1] * (1 - SLACK), "the work that is alike is part of it"
        return self.constant + self.forward * forward + self.backward * backward

    def joined(self, other: "LeastPath") -> "LeastPath":
        """Return what holds for steps for which this or the other one holds, of which the same work is alike."""
        assert self.alike == other.alike, "they differ in the schedule"
        return LeastPath(
            min(self.seconds, other.seconds),
            min(self.forward, other.forward),
            min(self.backward, other.backward),
            self.alike,
        )


def is_looked_at(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether the paths through a step are looked at: several groups wait for each other, with not too many stages."""
    return num_groups > 1 and num_groups * num_chunks <= MOST_STAGES


def least_path(
    schedule: Schedule,
    num_groups: int,
    num_microbatches: int,
    num_chunks: int,
    alike: Sequence[float],
    rest: Sequence[float],
) -> LeastPath | None:
    """Return a lower bound on the seconds of a step, or None if there are too many tasks.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        num_chunks: Stages per group.
        alike: Seconds of each pass of one microbatch through all stages that every stage has the same share of.
        rest: About the seconds of forwards and of backwards besides, for which the bound is best. It holds for any.

    >>> from autopar.schedule import SCHEDULES
    >>> found = least_path(SCHEDULES["zb-h1"], 2, 4, 1, alike=(2.0, 2.0, 2.0), rest=(0.0, 0.0))
    >>> round(found.seconds, 3)
    13.0
    """
    assert len(alike) == len(schedule.passes), "one number per pass"
    total = sum(alike)
    if not is_looked_at(schedule, num_groups, num_microbatches, num_chunks) or total <= 0:
        return None
    parts = tuple(int(part / total * PARTS) for part in alike)
    besides = tuple(round(part / total * PARTS) for part in rest)
    seconds, forward, backward = _counts(schedule, num_groups, num_microbatches, num_chunks, parts, besides)
    whole = total / PARTS
    held = whole * parts[0], whole * sum(parts[1:])
    return LeastPath(whole * seconds, forward, backward, held)


@lru_cache(maxsize=4096)
def _counts(
    schedule: Schedule,
    num_groups: int,
    num_microbatches: int,
    num_chunks: int,
    alike: tuple[float, ...],
    rest: tuple[float, ...],
) -> tuple[float, float, float]:
    """Solve the linear program and return its duals, a little lowered: of all that is alike, and of the rest by pass.

    Variables are the starts of tasks, the share of every stage in what is alike, the rest of each of its passes, and
    the seconds of the step.
    """
    found = excerpt(schedule, num_groups, num_microbatches, num_chunks)
    num_nodes = len(found.stage) + len(found.middles)
    num_stages, num_passes = num_groups * num_chunks, len(schedule.passes)
    besides = num_nodes + num_stages
    step = besides + num_stages * num_passes
    stages = [
        [{num_nodes + stage: own, besides + num_passes * stage + kind: 1.0} for kind, own in enumerate(alike)]
        for stage in range(num_stages)
    ]
    program = LeastProgram()
    add_order(program, found, durations_of(found, stages), step, overlap=schedule.steps_overlap)
    program.total(range(num_nodes, besides), 1.0)
    passes = range(besides, step)
    program.total(passes[::num_passes], rest[0])  # that are counted as forwards
    program.total([number for kind in range(1, num_passes) for number in passes[kind::num_passes]], rest[1])
    optimum = program.minimised({step: 1.0}, step + 1)
    seconds, forward, backward = np.maximum(0.0, optimum.duals[-3:]) * (1 - SLACK)
    return float(seconds), float(forward), float(backward)
