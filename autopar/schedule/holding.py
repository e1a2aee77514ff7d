"""What a group of devices holds of activations, task after task."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.schedule.base import Pass, Schedule

_PASSES = list(Pass)

MOST_MOMENTS = 12
"""Moments of a group that a linear program has rows for: most of many are nearly alike."""


def moments(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> NDArray[np.float64]:
    """Return what is held while the tasks of a group run, the distinct moments, (moments, 5 chunks).

    In a row, for every chunk: how many other microbatches wait for their backward, and how many for their weight pass;
    then whether a forward, a backward or a weight pass of the chunk is running. With what these take in bytes as a
    vector, the largest entry of the product is the peak.

    >>> from autopar.schedule import SCHEDULES
    >>> moments(SCHEDULES["1f1b"], group=0, num_groups=2, num_microbatches=4).astype(int).tolist()
    [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 1, 0, 0]]
    """
    return _moments(schedule, group, num_groups, _enough(schedule, num_groups, num_microbatches), num_chunks)


def _enough(schedule: Schedule, num_groups: int, num_microbatches: int) -> int:
    """Return how many microbatches say all: groups hold no more of more of them."""
    return int(min(num_microbatches, schedule.enough(num_groups)))


@lru_cache(maxsize=256)  # of many chunks a megabyte each
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
    """Return what a group holds at its fullest moments, (moments, 2 chunks).

    In a row, for every chunk: of how many microbatches all is there that its stage keeps for the backward, then of how
    many all that it puts off until the weight pass. A backward begins with the one and ends with the other. No row is
    at least as large as another one in every place.

    >>> from autopar.schedule import SCHEDULES
    >>> fullest(SCHEDULES["1f1b"], group=0, num_groups=2, num_microbatches=4).astype(int).tolist()
    [[2, 0]]
    >>> fullest(SCHEDULES["zb-h1"], group=1, num_groups=2, num_microbatches=4).astype(int).tolist()
    [[0, 2], [1, 1]]
    """
    return _fullest(schedule, group, num_groups, _enough(schedule, num_groups, num_microbatches), num_chunks)


def some_fullest(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1
) -> NDArray[np.float64]:
    """Return some rows of `fullest`: at equal distances in lexical order, and the one with most microbatches."""
    found = fullest(schedule, group, num_groups, num_microbatches, num_chunks)
    if len(found) <= MOST_MOMENTS:
        return found
    chosen = np.linspace(0, len(found) - 1, MOST_MOMENTS - 1).astype(np.int64)
    return np.asarray(found[np.union1d(chosen, found.sum(axis=1).argmax())])


@lru_cache(maxsize=4096)
def _fullest(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int
) -> NDArray[np.float64]:
    return np.unique(_most(schedule, group, num_groups, num_microbatches, num_chunks)[0], axis=0).astype(np.float64)


def least_held(schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> int:
    """Return of how many microbatches a group holds what every one of its chunks keeps, at the fullest moment.

    >>> from autopar.schedule import SCHEDULES
    >>> least_held(SCHEDULES["1f1b"], group=0, num_groups=2, num_microbatches=4)
    2
    """
    return _least_held(schedule, group, num_groups, _enough(schedule, num_groups, num_microbatches), num_chunks)


@lru_cache(maxsize=65536)
def _least_held(schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int) -> int:
    # asked of all groups of all configurations, so that only the number is kept
    return _most(schedule, group, num_groups, num_microbatches, num_chunks)[1]


@lru_cache(maxsize=1024)
def _most(
    schedule: Schedule, group: int, num_groups: int, num_microbatches: int, num_chunks: int
) -> tuple[NDArray[np.int64], int]:
    from autopar.schedule.kernel import held_most  # compiling is loaded when it is needed only

    kinds, _, chunks = zip(*schedule.order(group, num_groups, num_microbatches, num_chunks), strict=True)
    # hundreds of thousands of tasks are asked for: looking a pass up takes longer than comparing it with the first ones
    forward, backward = Pass.FORWARD, Pass.BACKWARD
    place = np.array([0 if kind is forward else 1 if kind is backward else 2 for kind in kinds])
    return held_most(place, np.array(chunks), num_chunks, _PASSES.index(schedule.passes[-1]))
