"""Loops over the tasks of a schedule, compiled.

The order in which tasks can run is asked for once per schedule and size, of which large ones have a hundred thousand,
the longest path once per candidate of a search.
"""

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


def _longest_ways(begins: Ints, before: Ints, source: Ints, seconds: Floats) -> tuple[Floats, Ints]:
    """Return how long the longest way from some tasks to the start of each task is, and the task before it there.

    It is minus infinity where there is none, and -1 where nothing is before.

    Args:
        begins: Tasks to begin with.
        before: The task before each of its group, -1 if it is the first one; tasks come after those they wait for.
        source: The task whose message each task waits for; -1 if none.
        seconds: Duration of each task.
    """
    starts, previous = np.full(len(before), -np.inf), np.full(len(before), -1)
    for task in begins:
        starts[task] = 0.0
    for task in range(len(before)):
        for other in (before[task], source[task]):
            if other >= 0 and starts[other] + seconds[other] > starts[task]:
                starts[task] = starts[other] + seconds[other]
                previous[task] = other
    return starts, previous


longest_ways: Callable[..., tuple[Floats, Ints]] = numba.njit(cache=True, nogil=True)(_longest_ways)


FORWARD, BACKWARD, WEIGHT = range(3)


def _runnable(
    stage: Ints, kind: Ints, microbatch: Ints, begins: Ints, group_of: Ints, num_microbatches: int
) -> tuple[Ints, int]:
    """Return tasks in an order in which each comes after those it needs, and how many can run at all.

    Args:
        stage: Stage of each task; tasks are listed group by group, in the order of their group.
        kind: 0, 1, 2 for forwards, backwards and weight passes.
        microbatch: Microbatch of each.
        begins: (groups + 1,) place of the first task of each group, and the number of all.
        group_of: (stages,) group of each stage.
        num_microbatches: Microbatches per step.
    """
    num_groups, num_stages = len(begins) - 1, len(group_of)
    done = np.zeros((num_stages, 3, num_microbatches), dtype=np.bool_)
    order, count = np.empty(len(stage), dtype=np.int64), 0
    place = begins[:-1].copy()
    waiting, awake = np.arange(num_groups), np.ones(num_groups, dtype=np.bool_)  # a ring of groups to look at
    first, size = 0, num_groups
    while size > 0:
        group = waiting[first]
        first, size = (first + 1) % num_groups, size - 1
        awake[group] = False
        while place[group] < begins[group + 1]:
            task = place[group]
            own, what, batch = stage[task], kind[task], microbatch[task]
            reader = -1
            if what == FORWARD:
                ready = own == 0 or done[own - 1, FORWARD, batch]
                reader = own + 1 if own + 1 < num_stages else -1
            elif what == BACKWARD:
                ready = done[own, FORWARD, batch] and (own + 1 == num_stages or done[own + 1, BACKWARD, batch])
                reader = own - 1
            else:
                ready = done[own, BACKWARD, batch]
            if not ready:
                break
            done[own, what, batch] = True
            order[count] = task
            count += 1
            place[group] += 1
            if reader >= 0 and group_of[reader] != group and not awake[group_of[reader]]:
                awake[group_of[reader]] = True
                waiting[(first + size) % num_groups] = group_of[reader]
                size += 1
    return order, count


runnable: Callable[..., tuple[Ints, int]] = numba.njit(cache=True, nogil=True)(_runnable)
