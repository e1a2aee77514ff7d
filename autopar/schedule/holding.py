"""Activations that a group of devices holds while it runs its tasks, counted in microbatches.

`moments` lists every distinct state of a group, `fullest` the states that no other state dominates, `least_held` one
number per group.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Pass, Schedule

_PASSES = list(Pass)

MOST_MOMENTS = 12
"""Most states per group that become rows of a linear program; in a long list, neighbouring states are nearly equal."""


def moments(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> NDArray[np.float64]:
    """Return the distinct holding states of a group while its tasks run, (states, 5 chunks).

    A row has five entries per chunk: the other microbatches that wait for their backward, those that wait for their
    weight pass, then 1 if a forward, a backward or a weight pass of the chunk is running and 0 else. The product of
    this matrix with the bytes of each entry has the peak of the group as its largest element.

    >>> from autopar.schedule import SCHEDULES
    >>> moments(SCHEDULES["1f1b"], group=0, num_groups=2, num_microbatches=4).astype(int).tolist()
    [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 1, 0, 0]]
    """
    return _moments(
        schedule, group, num_groups, _relevant_microbatches(schedule, num_groups, num_microbatches), num_chunks
    )


def _relevant_microbatches(schedule: Schedule, num_groups: int, num_microbatches: int) -> int:
    """Return the number of microbatches to enumerate: beyond `Schedule.enough` further ones add no state."""
    return int(min(num_microbatches, schedule.enough(num_groups)))


@lru_cache(maxsize=256)  # with many chunks an entry takes a megabyte
def _moments(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int
) -> NDArray[np.float64]:
    held = [0] * (5 * num_chunks)
    found = set()
    last = _PASSES.index(schedule.passes[-1])
    for task in schedule.order(group, num_groups, num_microbatches, num_chunks):
        own, place = 5 * task.chunk, _PASSES.index(task.kind)
        if place:
            held[own + place - 1] -= 1
        held[own + 2 + place] = 1
        found.add(tuple(held))
        held[own + 2 + place] = 0
        if place != last:
            held[own + place] += 1
    return np.array(sorted(found), dtype=np.float64)


def fullest(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> NDArray[np.float64]:
    """Return the holding states of a group that no other state dominates, (states, 2 chunks).

    A row has two entries per chunk: the microbatches whose activations the stage keeps for the backward, then those
    whose activations it keeps for the weight pass. A split backward counts in the first entry when it starts and in the
    second when it ends. No row is at least as large as another row in every entry.

    >>> from autopar.schedule import SCHEDULES
    >>> fullest(SCHEDULES["1f1b"], group=0, num_groups=2, num_microbatches=4).astype(int).tolist()
    [[2, 0]]
    >>> fullest(SCHEDULES["zb-h1"], group=1, num_groups=2, num_microbatches=4).astype(int).tolist()
    [[0, 2], [1, 1]]
    """
    return _fullest(
        schedule, group, num_groups, _relevant_microbatches(schedule, num_groups, num_microbatches), num_chunks
    )


def some_fullest(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> NDArray[np.float64]:
    """Return at most `MOST_MOMENTS` rows of `fullest`: equally spaced ones, and the row of most microbatches."""
    found = fullest(schedule, group, num_groups, num_microbatches, num_chunks)
    if len(found) <= MOST_MOMENTS:
        return found
    chosen = np.linspace(0, len(found) - 1, MOST_MOMENTS - 1).astype(np.int64)
    return np.asarray(found[np.union1d(chosen, found.sum(axis=1).argmax())])


@lru_cache(maxsize=4096)
def _fullest(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int
) -> NDArray[np.float64]:
    return np.unique(_held_states(schedule, group, num_groups, num_microbatches, num_chunks)[0], axis=0).astype(
        np.float64
    )


def least_held(schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
    """Return the largest number of microbatches whose kept activations every chunk of a group holds at one moment.

    >>> from autopar.schedule import SCHEDULES
    >>> least_held(SCHEDULES["1f1b"], group=0, num_groups=2, num_microbatches=4)
    2
    """
    return _least_held(
        schedule, group, num_groups, _relevant_microbatches(schedule, num_groups, num_microbatches), num_chunks
    )


@lru_cache(maxsize=65536)
def _least_held(schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int) -> int:
    # called for every group of every configuration: this cache keeps only the number
    return _held_states(schedule, group, num_groups, num_microbatches, num_chunks)[1]


@lru_cache(maxsize=1024)
def _held_states(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int
) -> tuple[NDArray[np.int64], int]:
    from autopar.schedule.task_loops import held_most  # numba is imported only when it is needed

    kinds, _, chunks = zip(*schedule.order(group, num_groups, num_microbatches, num_chunks), strict=True)
    # schedules have up to hundreds of thousands of tasks, and two comparisons are faster than a dictionary lookup
    forward, backward = Pass.FORWARD, Pass.BACKWARD
    place = np.array([0 if kind is forward else 1 if kind is backward else 2 for kind in kinds])
    return held_most(place, np.array(chunks), num_chunks, _PASSES.index(schedule.passes[-1]))
