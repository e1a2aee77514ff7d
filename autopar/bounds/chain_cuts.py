"""What a step takes at least if a chain of blocks that differ is cut into stages, whatever the cut.

Means of paths (`critical_path.py`) let stages share all that is alike, and have the rest wherever it is. A short chain
has few cuts, and each is a bound on the plans that have it: no stage takes less than its blocks do at least. The least
of all cuts sees that blocks are not divided, and who waits for whom when they differ.
"""

import math

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Schedule
from autopar.schedule.timing import tasks_of

Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""Of sums of seconds, relative."""

MOST_TASKS, MOST_VISITS = 1 << 12, 1 << 24
"""Tasks of a step that is looked at, and those of all its cuts together: for more it takes over a tenth of a second. Of
many microbatches there is little more to say than how long the slowest stage takes."""


def least_of_cuts(
    schedule: Schedule, num_groups: int, num_microbatches: int, num_chunks: int, passes: Floats, whole: Floats
) -> float:
    """Return the least seconds of a step whatever the cut; 0 if there are too many cuts to look at, or none.

    Args:
        schedule: The order of tasks.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        num_chunks: Stages per group.
        passes: (blocks, 3) seconds of a forward, a backward and a weight pass of each block at least.
        whole: (blocks,) seconds of all three at least, which may be more.

    >>> from autopar.schedule import SCHEDULES
    >>> each = np.array([[1.0, 1.0, 1.0]] * 3)
    >>> [round(least_of_cuts(SCHEDULES["zb-h1"], 2, 4, 1, each, np.full(3, own)), 3) for own in (3.0, 4.0)]
    [24.0, 32.0]
    """
    from autopar.schedule.kernel import least_cut  # compiling is loaded when it is needed only

    num_stages = num_groups * num_chunks
    if not 1 < num_stages <= len(passes):
        return 0.0
    num_tasks = num_stages * num_microbatches * len(schedule.passes)
    if num_tasks > MOST_TASKS or num_tasks * math.comb(len(passes) - 1, num_stages - 1) > MOST_VISITS:
        return 0.0
    tasks = tasks_of(schedule, num_groups, num_microbatches, num_chunks)
    if not schedule.splits:
        passes = np.stack([passes[:, 0], passes[:, 1:].sum(axis=1), np.zeros(len(passes))], axis=1)
    each = np.concatenate([passes, np.maximum(whole, passes.sum(axis=1))[:, None]], axis=1)
    sums = np.concatenate([np.zeros((1, 4)), np.cumsum(each, axis=0)])
    found = least_cut(
        tasks.stage, tasks.kind, tasks.group, tasks.source, np.asarray(schedule.groups(num_groups, num_chunks)),
        num_groups, num_microbatches, sums, schedule.steps_overlap,
    )  # fmt: skip
    return float(found) * (1 - ROUNDING)
