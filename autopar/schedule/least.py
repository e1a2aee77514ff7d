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

import highspy
import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Schedule
from autopar.schedule.excerpt import Excerpt, excerpt, num_tasks

FORWARD_SHARE = 1 / 3
"""Of both passes: what the counts are best for. They hold for any share."""

MOST_TASKS = 49152
"""Of a step whose paths are looked at; in longer ones the bubble is small beside the microbatches."""

SLACK = 1e-6
"""Relative: by how much the counts are lowered, for duals are exact to a tolerance."""

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
    """Whether the paths through a step are looked at: several groups wait for each other, in not too many tasks."""
    return num_groups > 1 and num_tasks(schedule, num_groups, num_microbatches, num_chunks) <= MOST_TASKS


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
def least_counts(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[float, float]:
    """Return how often the forwards and the backwards of all stages count at least, for one microbatch.

    Without a bubble both are microbatches per group: that is what every group does itself, on average.

    >>> from autopar.schedule import SCHEDULES
    >>> [round(count, 4) for count in least_counts(SCHEDULES["1f1b"], num_groups=2, num_microbatches=4)]
    [2.5, 2.5]
    """
    assert schedule.trains, "both passes"
    assert not schedule.splits, "and no third one"
    own = num_microbatches / num_groups
    if not is_looked_at(schedule, num_groups, num_microbatches, num_chunks):
        return own, own
    rest = FORWARD_SHARE, 1 - FORWARD_SHARE
    _, forward, backward = _counts(schedule, num_groups, num_microbatches, num_chunks, (0, 0), rest)
    if FORWARD_SHARE * forward + (1 - FORWARD_SHARE) * backward <= own:
        return own, own
    return forward, backward


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
    step = num_nodes + num_stages * (1 + num_passes)
    durations = _durations(found, np.asarray(alike, dtype=np.float64), num_nodes)
    rows: list[dict[int, float]] = []
    # the later task of a pair is no earlier than the end of the first one
    for first, second in zip(found.first.tolist(), found.second.tolist(), strict=True):
        rows.append({second: 1.0, first: -1.0, **durations[first]})
    # nor is the step shorter than a group's tasks from the first to the last, or than all until then
    for begin, last in zip(found.begins.tolist(), found.ends.tolist(), strict=True):
        rows.append({step: 1.0, last: -1.0, **durations[last]})
        if schedule.steps_overlap:
            rows[-1][begin] = rows[-1].get(begin, 0.0) + 1.0
    sums = [list(range(num_nodes, num_nodes + num_stages))]
    passes = [[0], list(range(1, num_passes))]  # that are counted as forwards, and as backwards
    sums += [[num_nodes + num_stages + number for number in _places(num_stages, num_passes, own)] for own in passes]
    amounts = [1.0, *rest]
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    model = highspy.HighsLp()
    num_rows = len(rows)
    model.num_col_, model.num_row_ = step + 1, num_rows + len(sums)
    model.col_cost_ = np.append(np.zeros(step), 1.0)
    model.col_lower_, model.col_upper_ = np.zeros(step + 1), np.full(step + 1, highspy.kHighsInf)
    model.row_lower_ = np.append(np.zeros(num_rows), amounts)
    model.row_upper_ = np.append(np.full(num_rows, highspy.kHighsInf), amounts)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    rows += [dict.fromkeys(own, 1.0) for own in sums]
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    model.a_matrix_.index_ = np.array([column for row in rows for column in row], dtype=np.int32)
    model.a_matrix_.value_ = np.array([factor for row in rows for factor in row.values()])
    highs.passModel(model)
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal, "any seconds will do"
    seconds, forward, backward = np.maximum(0.0, np.array(highs.getSolution().row_dual)[-3:]) * (1 - SLACK)
    return float(seconds), float(forward), float(backward)


def _durations(found: Excerpt, alike: NDArray[np.float64], num_nodes: int) -> list[dict[int, float]]:
    """Return by node what it takes, as factors of variables below zero: shares of what is alike, and the rest."""
    num_stages, num_passes = found.middles.shape[1:]
    taken = []
    for stage, kind in zip(found.stage.tolist(), found.kind.tolist(), strict=True):
        more = num_nodes + num_stages + num_passes * stage + kind
        taken.append({num_nodes + stage: -float(alike[kind]), more: -1.0})
    for counts in found.middles:
        stages = np.flatnonzero(counts.any(axis=1)).tolist()
        own = {num_nodes + stage: -float(counts[stage] @ alike) for stage in stages}
        for stage, kind in np.argwhere(counts).tolist():
            own[num_nodes + num_stages + num_passes * stage + kind] = -float(counts[stage, kind])
        taken.append(own)
    return taken


def _places(num_stages: int, num_passes: int, own: Sequence[int]) -> list[int]:
    """Return the places of some passes of all stages among all passes of all stages."""
    return [num_passes * stage + number for stage in range(num_stages) for number in own]
