"""Lower bound on the step time by enumerating all cuts of a short chain of different blocks into stages.

Look here for the bound on schedules without a closed form whose blocks differ. Unlike the critical path bound
(`critical_path.py`), it keeps blocks whole and in their order.
"""

import math

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Schedule
from autopar.schedule.timing import tasks_of

Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""Relative rounding error of sums of seconds."""

MOST_TASKS, MOST_VISITS = 1 << 12, 1 << 24
"""Tasks of one step, and of one step for every cut, up to which cuts are enumerated: beyond, it takes over a tenth of a
second. With many microbatches the slowest stage decides, which cheaper bounds see as well."""


def least_step_over_cuts(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, passes: Floats, whole: Floats
) -> float:
    """Least seconds of a step over all cuts of the chain; 0 if there are none or too many to enumerate.

    - *Relaxes*: placements and memory: every block takes its least seconds; messages are free.
    - *Valid when*: `passes` and `whole` are lower bounds on the seconds of each block.
    - *Cost*: one timing of the schedule per cut, in compiled code; skipped above `MOST_TASKS` or `MOST_VISITS`.
    - *Source*: exhaustive enumeration of the cuts.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        num_chunks: Stages per group.
        passes: (blocks, 3) least seconds of the forward, backward and weight pass of each block.
        whole: (blocks,) least seconds of the three passes together, which may exceed the sum of `passes`.

    >>> from autopar.schedule import SCHEDULES
    >>> each = np.array([[1.0, 1.0, 1.0]] * 3)
    >>> [round(least_step_over_cuts(SCHEDULES["zb-h1"], 2, 4, 1, each, np.full(3, own)), 3) for own in (3.0, 4.0)]
    [24.0, 32.0]
    """
    from autopar.schedule.task_loops import least_cut  # numba is imported only where it is needed

    num_stages = num_groups * num_chunks
    if not 1 < num_stages <= len(passes):
        return 0.0
    num_tasks = num_stages * num_microbatches * len(schedule.passes)
    if num_tasks > MOST_TASKS or num_tasks * math.comb(len(passes) - 1, num_stages - 1) > MOST_VISITS:
        return 0.0
    tasks = tasks_of(schedule, num_groups, num_microbatches, num_chunks)
    if not schedule.splits:
        passes = np.stack([passes[:, 0], passes[:, 1:].sum(axis=1), np.zeros(len(passes))], axis=1)
    block_seconds = np.concatenate([passes, np.maximum(whole, passes.sum(axis=1))[:, None]], axis=1)
    prefix_sums = np.concatenate([np.zeros((1, 4)), np.cumsum(block_seconds, axis=0)])
    least = least_cut(
        tasks.stage, tasks.kind, tasks.group, tasks.source, np.asarray(schedule.groups(num_groups, num_chunks)),
        num_groups, num_microbatches, prefix_sums, schedule.steps_overlap,
    )  # fmt: skip
    return float(least) * (1 - ROUNDING)
