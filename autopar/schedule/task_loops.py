"""Loops over the tasks of a schedule, compiled.

The order in which tasks can run is asked for once per schedule and size, of which large ones have a hundred thousand,
the longest path once per candidate of a search.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _longest_path(
    group: Ints, seconds: Floats, source: Ints, link: Ints, hop: Floats, num_groups: int, num_links: int
) -> tuple[Floats, Floats, Floats]:
    """Return when each task starts and ends, and when its message to another group leaves, if it sends one.

    Args:
        group: Group of each task; tasks come after those they wait for, and in the order of their group.
        seconds: Duration of each task.
        source: The task of another group whose message each task waits for, or of its own group; -1 if none.
        link: Which channel carries the message of each task to another group; -1 if it sends none.
        hop: Seconds of that message.
        num_groups: Number of groups.
        num_links: Number of channels.
    """
    starts, ends, departures = np.empty(len(group)), np.empty(len(group)), np.empty(len(group))
    clock, free = np.zeros(num_groups), np.zeros(num_links)
    for task in range(len(group)):
        start = clock[group[task]]
        sender = source[task]
        if sender >= 0:
            start = max(start, departures[sender] + (hop[sender] if link[sender] >= 0 else 0.0))
        end = start + seconds[task]
        starts[task], ends[task], departures[task] = start, end, end
        clock[group[task]] = end
        if link[task] >= 0:
            departures[task] = max(end, free[link[task]])
            free[link[task]] = departures[task] + hop[task]
    return starts, ends, departures


longest_path: Callable[..., tuple[Floats, Floats, Floats]] = compiled(_longest_path)


def _queue_ends(
    group: Ints, stage: Ints, kind: Ints, starts: Floats, final: Ints, loads: Floats, num_groups: int
) -> Floats:
    """Return when the links of each group are free, as of `timing.drained`.

    Args:
        group: Group of each task, in the order of their group.
        stage: Stage of each.
        kind: 0, 1, 2 for forwards, backwards and weight passes.
        starts: Start of each.
        final: The last task of each stage.
        loads: As of `timing.drained`.
        num_groups: Number of groups.
    """
    num_passes, num_links = loads.shape[1], loads.shape[2]
    ends, left = np.zeros(num_groups), np.zeros((num_groups, num_links))
    for task in range(len(group) - 1, -1, -1):
        own, what = group[task], kind[task]
        if final[stage[task]] == task:
            what = num_passes - 1
        for link in range(num_links):
            seconds = loads[stage[task], what, link, 1]
            if seconds > 0:
                ends[own] = max(ends[own], starts[task] + loads[stage[task], what, link, 0] + left[own, link])
                left[own, link] += seconds
    return ends


queue_ends: Callable[..., Floats] = compiled(_queue_ends)


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


runnable: Callable[..., tuple[Ints, int]] = compiled(_runnable)


def _held_most(place: Ints, chunk: Ints, num_chunks: int, last: int) -> tuple[Ints, int]:
    """Return what a group holds at its fullest moments, as of `holding.fullest`, and as of `holding.least_held`.

    Args:
        place: 0, 1, 2 for forwards, backwards and weight passes, in the order in which the group runs them.
        chunk: Chunk of each.
        num_chunks: Chunks of the group.
        last: The last pass of every microbatch.
    """
    found, count, least = np.zeros((16, 2 * num_chunks), dtype=np.int64), 0, 0
    held = np.zeros(2 * num_chunks, dtype=np.int64)  # microbatches that wait for their backward, then weight pass
    for task in range(len(place)):
        what, own = place[task], chunk[task]
        held[own] += what == FORWARD
        is_forward = what == FORWARD and last != FORWARD
        if is_forward and task + 1 < len(place) and place[task + 1] == FORWARD:
            continue  # at the next one there is more of everything
        if what != WEIGHT:
            least = max(least, held[:num_chunks].min())
        for after in range(2):
            if after == 0 and what == BACKWARD and task > 0 and place[task - 1] == FORWARD:
                continue  # as much is held as while that ran
            if after == 1:  # a backward that is split ends with what it puts off
                if what != BACKWARD or last != WEIGHT:
                    break
                held[own] -= 1
                held[num_chunks + own] += 1
            kept, is_below = 0, False
            for row in range(count):
                above = beneath = True
                for column in range(len(held)):
                    above &= found[row, column] >= held[column]
                    beneath &= found[row, column] <= held[column]
                    if not above and not beneath:
                        break
                if above:
                    is_below = True  # so that no row was beneath it
                    break
                if not beneath:
                    for column in range(len(held)):  # arrays that are assigned take seconds to compile
                        found[kept, column] = found[row, column]
                    kept += 1
            if is_below:
                continue
            if kept == len(found):
                found = np.concatenate((found, np.zeros_like(found)))
            for column in range(len(held)):
                found[kept, column] = held[column]
            count = kept + 1
        if what == last:
            held[num_chunks + own if what == WEIGHT else own] -= 1
    return found[:count], least


held_most: Callable[..., tuple[Ints, int]] = compiled(_held_most)


def _least_cut(
    stage: Ints,
    kind: Ints,
    group: Ints,
    source: Ints,
    group_of: Ints,
    num_groups: int,
    num_microbatches: int,
    sums: Floats,
    overlap: bool,
) -> float:
    """Return the least seconds of a step over all cuts of a chain into stages; see `autopar.bounds.chain_cuts`.

    Args:
        stage: Stage of each task; tasks come after those they wait for, and in the order of their group.
        kind: 0, 1, 2 for forwards, backwards and weight passes.
        group: Group of each task.
        source: The task whose result each waits for besides; -1 if none.
        group_of: (stages,) group of each stage.
        num_groups: Number of groups.
        num_microbatches: Microbatches per step.
        sums: (blocks + 1, 4) seconds of the passes of all blocks before each, and of all passes together, which may
            be more.
        overlap: Whether a step takes what the slowest group takes from its first task to its last one.
    """
    num_stages, num_blocks, best = len(group_of), len(sums) - 1, np.inf
    stops = np.arange(1, num_stages + 1)
    stops[-1] = num_blocks
    seconds, loads = np.empty((num_stages, 3)), np.empty(num_groups)
    ends, clock = np.empty(len(stage)), np.empty(num_groups)
    while True:
        loads[:] = 0.0
        for own in range(num_stages):
            before = stops[own - 1] if own > 0 else 0
            for what in range(3):
                seconds[own, what] = sums[stops[own], what] - sums[before, what]
            loads[group_of[own]] += num_microbatches * (sums[stops[own], 3] - sums[before, 3])
        if loads.max() < best:
            longest = loads.max()
            for first in range(num_groups if overlap else 1):
                clock[:] = -np.inf if overlap else 0.0
                clock[first] = 0.0
                for task in range(len(stage)):
                    own = group[task]
                    start = clock[own]
                    if source[task] >= 0:
                        start = max(start, ends[source[task]])
                    if not overlap and clock[own] == 0.0:
                        longest = max(longest, start + loads[own])  # nothing was done there before
                    ends[task] = clock[own] = start + seconds[stage[task], kind[task]]
                longest = max(longest, clock[first] if overlap else clock.max())
                if longest >= best:
                    break
            best = min(best, longest)
        last = num_stages - 2  # the next cut: the last stop that can move does, and those behind it follow
        while last >= 0 and stops[last] == num_blocks - num_stages + last + 1:
            last -= 1
        if last < 0:
            return best
        stops[last] += 1
        for own in range(last + 1, num_stages - 1):
            stops[own] = stops[own - 1] + 1


least_cut: Callable[..., float] = compiled(_least_cut)
