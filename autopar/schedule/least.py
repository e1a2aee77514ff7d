"""How often the passes of all stages count at least in a step, however unevenly the stages are cut.

The time of a step is that of its longest path, so each path is a lower bound: a sum over stages of how often the path
has their forwards and backwards. A mean of several paths is one, too. If each stage has at least f forwards and b
backwards in such a mean, a step takes at least f times the forwards of all stages and b times their backwards, for one
microbatch: a bound that knows the bubble, but neither where the chain is cut nor what a stage takes.

The best mean is the dual of a linear program: seconds of stages, with given sums, and starts of tasks that make the
step short.
"""

from functools import lru_cache

import highspy
import numpy as np

from autopar.schedule.base import Schedule
from autopar.schedule.timing import waits

FORWARD_SHARE = 1 / 3
"""Of both passes: what the counts are best for. They hold for any share."""

MOST_TASKS = 2048
"""Of a step whose paths are looked at; in longer ones the bubble is small beside the microbatches."""

SLACK = 1e-6
"""Relative: by how much the counts are lowered, for duals are exact to a tolerance."""


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
    if num_groups == 1 or 2 * num_groups * num_chunks * num_microbatches > MOST_TASKS:
        return own, own
    forward, backward = (count * (1 - SLACK) for count in _duals(schedule, num_groups, num_microbatches, num_chunks))
    if FORWARD_SHARE * forward + (1 - FORWARD_SHARE) * backward <= own:
        return own, own
    return forward, backward


def _duals(schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int) -> tuple[float, float]:
    """Solve the linear program and return the duals of both sums.

    Variables are the starts of tasks, the seconds of both passes of every stage, and those of the step.
    """
    found = waits(schedule, num_groups, num_microbatches, num_chunks)
    num_tasks, num_stages = len(found.stage), num_groups * num_chunks
    seconds = num_tasks + 2 * found.stage + found.kind
    step = num_tasks + 2 * num_stages
    # the later task of a pair, or the end of the step, is no earlier than the end of the first one
    first = np.concatenate([found.first, np.arange(num_tasks)])
    second = np.concatenate([found.second, np.full(num_tasks, step)])
    pairs = np.column_stack([second, first, seconds[first]])
    sums = [list(range(num_tasks + number, step, 2)) for number in (0, 1)]
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = step + 1, len(pairs) + 2
    model.col_cost_ = np.append(np.zeros(step), 1.0)
    model.col_lower_, model.col_upper_ = np.zeros(step + 1), np.full(step + 1, highspy.kHighsInf)
    shares = [FORWARD_SHARE, 1 - FORWARD_SHARE]
    model.row_lower_ = np.append(np.zeros(len(pairs)), shares)
    model.row_upper_ = np.append(np.full(len(pairs), highspy.kHighsInf), shares)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lengths = [3] * len(pairs) + [num_stages] * 2
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    model.a_matrix_.index_ = np.concatenate([pairs.ravel(), *sums]).astype(np.int32)
    model.a_matrix_.value_ = np.concatenate([np.tile([1.0, -1.0, -1.0], len(pairs)), np.ones(2 * num_stages)])
    highs.passModel(model)
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal, "any seconds will do"
    forward, backward = np.maximum(0.0, np.array(highs.getSolution().row_dual)[-2:]).tolist()
    return forward, backward
