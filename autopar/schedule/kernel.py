"""The longest path through the tasks of a schedule, compiled: it is asked for once per candidate of a search."""

from collections.abc import Callable

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _longest_path(
    group: Ints, seconds: Floats, source: Ints, link: Ints, hop: Floats, num_groups: int, num_links: int
) -> tuple[Floats, Floats]:
    """Return when each task starts and ends.

    Args:
        group: Group of each task; tasks come after those they wait for, and in the order of their group.
        seconds: Duration of each task.
        source: The task of another group whose message each task waits for, or of its own group; -1 if none.
        link: Which channel carries the message of each task to another group; -1 if it sends none.
        hop: Seconds of that message.
        num_groups: Number of groups.
        num_links: Number of channels.
    """
    starts, ends, arrivals = np.empty(len(group)), np.empty(len(group)), np.empty(len(group))
    clock, free = np.zeros(num_groups), np.zeros(num_links)
    for task in range(len(group)):
        start = clock[group[task]]
        if source[task] >= 0:
            start = max(start, arrivals[source[task]])
        end = start + seconds[task]
        starts[task], ends[task], arrivals[task] = start, end, end
        clock[group[task]] = end
        if link[task] >= 0:
            arrivals[task] = max(end, free[link[task]]) + hop[task]
            free[link[task]] = arrivals[task]
    return starts, ends


longest_path: Callable[..., tuple[Floats, Floats]] = numba.njit(cache=True, nogil=True)(_longest_path)
