"""Where to cut a sequence of jobs into batches for one server, exactly.

Jobs come in order, job j at `release[j]`. A batch of jobs i to j - 1 starts when the server is free and its last job is
there. It takes what a law says of the sizes of its jobs added up:

    finish(j) = min over i < j of max(finish(i), release[j - 1]) + seconds(size[i] + ... + size[j - 1])

A server that is free earlier never ends later, so this is the earliest end of all 2^(n - 1) cuts, from n (n + 1) / 2
values of the law. Where the seconds of all batches count besides their end, cuts are labels (end, total), and those
stay that no other label of the same jobs beats in both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

Law = Callable[[FloatArray], FloatArray]
"""Seconds of batches by their sizes, element by element."""

MOST_LABELS = 16
"""Labels that are kept of the same jobs; beyond that the front of ends and totals is thinned, its ends stay."""

_ROUNDING = 1e-12
"""Relative difference of totals that is rounding."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """A sequence of jobs cut into batches.

    Attributes:
        ends: One past the last job of each batch, ascending.
        finish: When the server is done with the last batch.
        total: Seconds of all batches.
    """

    ends: tuple[int, ...]
    finish: float
    total: float


def cut_batches(
    release: Sequence[float] | FloatArray,
    sizes: Sequence[float] | FloatArray,
    seconds: Law,
    *,
    free: float = 0.0,
    allowed: NDArray[np.bool_] | None = None,
) -> Cuts:
    """Return the cuts with the earliest end; arguments are as of `cut_front`.

    >>> cut_batches([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], lambda size: 1.0 + size)
    Cuts(ends=(1, 3), finish=5.0, total=5.0)
    """
    return cut_front(release, sizes, seconds, free=free, allowed=allowed, most=1)[0]


def cut_front(
    release: Sequence[float] | FloatArray,
    sizes: Sequence[float] | FloatArray,
    seconds: Law,
    *,
    free: float = 0.0,
    allowed: NDArray[np.bool_] | None = None,
    most: int = MOST_LABELS,
) -> tuple[Cuts, ...]:
    """Return the cuts that no other ones beat in end and total: the earliest end first, the least total last.

    Args:
        release: When each job is there, (jobs,). A job waits for those before it.
        sizes: Size of each job, (jobs,).
        seconds: Seconds of batches by size; larger ones take no less, infinitely long where they may not be.
        free: From when on the server is free.
        allowed: Whether a batch may end before job j, (jobs + 1,); None if it may anywhere. The last one always may.
        most: Labels that are kept of the same jobs. The first cuts have the earliest end however few these are.
    """
    count = len(sizes)
    if not count:
        return (Cuts((), free, 0.0),)
    there = np.maximum.accumulate(np.asarray(release, np.float64))
    loads = np.concatenate([[0.0], np.cumsum(np.asarray(sizes, np.float64))])
    room = 1 + count * most
    finish, total = np.zeros(room), np.zeros(room)
    place, before = np.zeros(room, np.int64), np.full(room, -1, np.int64)
    finish[0], known, last = free, 1, slice(0, 1)
    for job in range(1, count + 1):
        if allowed is not None and job < count and not allowed[job]:
            continue
        spent = seconds(loads[job] - loads[:job])[place[:known]]
        ends = np.maximum(finish[:known], there[job - 1]) + spent
        totals = total[:known] + spent
        # a server that waits for the next job is free for it, whenever it has become so
        front = _front(np.maximum(ends, there[job]) if job < count else ends, totals, most)
        last = slice(known, known + len(front))
        finish[last], total[last], place[last], before[last] = ends[front], totals[front], job, front
        known += len(front)
    return tuple(_cuts(label, finish, total, place, before) for label in range(last.start, last.stop))


def _front(ends: FloatArray, totals: FloatArray, most: int) -> NDArray[np.int64]:
    """Return the labels that no other one beats in both, by ascending ends."""
    earliest = np.flatnonzero(ends == ends.min())
    first = int(earliest[np.argmin(totals[earliest])])
    if most == 1:
        return np.array([first])
    better = np.flatnonzero(totals < totals[first] * (1 - _ROUNDING))
    order = better[np.lexsort((totals[better], ends[better]))]
    least = np.minimum.accumulate(totals[order]) if len(order) else totals[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = totals[order[1:]] < least[:-1] * (1 - _ROUNDING)
    front = np.concatenate([[first], order[new]])
    if len(front) <= most:
        return front
    return np.asarray(front[np.unique(np.linspace(0, len(front) - 1, most).round().astype(np.int64))])


def _cuts(
    label: int, finish: FloatArray, total: FloatArray, place: NDArray[np.int64], before: NDArray[np.int64]
) -> Cuts:
    """Return the cuts that a label stands for."""
    ends: list[int] = []
    at = label
    while at > 0:
        ends.append(int(place[at]))
        at = int(before[at])
    return Cuts(tuple(reversed(ends)), float(finish[label]), float(total[label]))
