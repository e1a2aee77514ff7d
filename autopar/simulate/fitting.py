"""Jobs on links: first in, first out, whenever nothing more urgent has the link.

A step may have a hundred thousand jobs, a few per microbatch and group of devices, all like those of one backward. So
they lie in arrays, and the loop over them is compiled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled
from autopar.sharding import Axis
from autopar.simulate.layout import NETWORK, Resource

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

Interval = tuple[float, float]
"""Start and end in seconds."""


@dataclass(frozen=True, slots=True)
class Job:
    """A collective to fit in.

    Attributes:
        resource: Its link.
        name: What to call it.
        ready: From when on it may run, in seconds.
        seconds: Time it needs on the link.
        after: Index of an earlier job that has to be done first; -1 if there is none.
        once: Whether it is a reduction of the step, not of one microbatch.
        axis: Over which devices; None if each is on its own.
        key: What its gradients have in common, as of `BucketCuts.key`; None if it is no bucket.
    """

    resource: Resource
    name: str
    ready: float
    seconds: float
    after: int
    once: bool = False
    axis: Axis | None = None
    key: tuple[str, str, str, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """Jobs in the order in which they are issued; arrays are (jobs,).

    Attributes:
        models: Jobs they are like, but for the numbers that follow.
        model: Which of these.
        ready: From when on they may run, in seconds.
        seconds: Time they need on their links.
        after: Indices of earlier jobs that have to be done first; -1 if there is none.
    """

    models: tuple[Job, ...]
    model: IntArray
    ready: FloatArray
    seconds: FloatArray
    after: IntArray

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> "Jobs":
        """Return jobs as arrays."""
        return cls(
            tuple(jobs),
            np.arange(len(jobs)),
            np.array([job.ready for job in jobs], dtype=np.float64),
            np.array([job.seconds for job in jobs], dtype=np.float64),
            np.array([job.after for job in jobs], dtype=np.int64),
        )

    @classmethod
    def joined(cls, parts: Sequence["Jobs"], starts: FloatArray, numbers: IntArray) -> "Jobs":
        """Return jobs of parts one after the other; the times of each part count from its start.

        Args:
            parts: What is repeated.
            starts: (repeats,) start of each repeat.
            numbers: (repeats,) which part it is.
        """
        if not len(numbers):
            return cls.of(())
        sizes = np.array([len(part) for part in parts])
        lengths = sizes[numbers]
        stops = np.cumsum(lengths)
        before = np.repeat(stops - lengths, lengths)  # jobs of earlier repeats
        own = np.arange(stops[-1]) - before + np.repeat((np.cumsum(sizes) - sizes)[numbers], lengths)
        after = np.concatenate([part.after for part in parts])[own]
        first = np.cumsum([0, *(len(part.models) for part in parts)])
        return cls(
            tuple(model for part in parts for model in part.models),
            np.concatenate([part.model + base for part, base in zip(parts, first[:-1], strict=True)])[own],
            np.concatenate([part.ready for part in parts])[own] + np.repeat(starts, lengths),
            np.concatenate([part.seconds for part in parts])[own],
            np.where(after < 0, after, after + before),
        )

    def __len__(self) -> int:
        return len(self.model)

    def __getitem__(self, index: int) -> Job:
        model: Job = self.models[int(self.model[index])]
        ready, seconds, after = self.ready[index], self.seconds[index], self.after[index]
        return replace(model, ready=float(ready), seconds=float(seconds), after=int(after))

    def __iter__(self) -> Iterator[Job]:
        return (self[index] for index in range(len(self)))

    def each(self, ask: Callable[[Job], Any]) -> NDArray[Any]:
        """Return what every job has in common with its model, (jobs,)."""
        return np.array([ask(model) for model in self.models])[self.model]


def fit_in(jobs: Jobs, busy: Mapping[Resource, FloatArray]) -> FloatArray:
    """Return when each job runs, from its first to its last moment on the link, (jobs, 2).

    Args:
        jobs: On links between devices.
        busy: When each link has something more urgent to do: starts and ends, (intervals, 2), which may overlap.

    >>> job = Job(Resource.INTRA, "a", ready=1.0, seconds=2.0, after=-1)
    >>> fit_in(Jobs.of([job]), {Resource.INTRA: np.array([(0.0, 1.5), (2.0, 3.0)])}).tolist()
    [[1.5, 4.5]]
    """
    if not len(jobs):
        return np.zeros((0, 2))
    urgent = [_in_order(busy.get(resource, np.zeros((0, 2)))) for resource in NETWORK]
    starts, ends = np.concatenate(urgent).T.copy()
    first = np.cumsum([0, *map(len, urgent)])
    link = jobs.each(lambda job: NETWORK.index(job.resource))
    begin, end = _fit_all(link, jobs.ready, jobs.seconds, jobs.after, starts, ends, first)
    return np.stack([begin, end], axis=1)


class Line:
    """A link on which jobs follow each other, whenever nothing more urgent has it.

    Args:
        urgent: When something more urgent has it: starts and ends, (intervals, 2), which may overlap.

    Attributes:
        free: When the last job is over, in seconds.
    """

    def __init__(self, urgent: FloatArray) -> None:
        self.free = 0.0
        self._starts, self._ends = _in_order(urgent).T.copy()
        self._next = 0

    def fit(self, ready: float, seconds: float) -> Interval:
        """Return when a job of `seconds` runs that may start at `ready`, from its first to its last moment."""
        now = max(ready, self.free)
        self._next, begin, self.free = _fit(self._starts, self._ends, self._next, len(self._starts), now, seconds)
        return begin, self.free


def _in_order(intervals: FloatArray) -> FloatArray:
    return intervals[np.argsort(intervals[:, 0], kind="stable")]


def _fit_one(
    starts: FloatArray, ends: FloatArray, place: int, stop: int, now: float, seconds: float
) -> tuple[int, float, float]:
    """Return the next urgent interval, and when a job runs that may start `now`.

    Args:
        starts: Of urgent intervals, in order.
        ends: Theirs.
        place: The first that is not over.
        stop: Where those of the link end.
        now: When the job may start.
        seconds: What it takes.
    """
    left, begin, begun = seconds, now, False
    while True:
        # everything urgent that has started by now comes first
        while place < stop and starts[place] <= now:
            now = max(now, ends[place])
            place += 1
        if not begun:
            begin, begun = now, True
        gap = starts[place] - now if place < stop else left
        if left <= gap:
            return place, begin, now + left
        left -= gap
        now = starts[place]


_fit: Callable[..., tuple[int, float, float]] = compiled(_fit_one)


def _fit_each(
    link: IntArray,
    ready: FloatArray,
    seconds: FloatArray,
    after: IntArray,
    starts: FloatArray,
    ends: FloatArray,
    first: IntArray,
) -> tuple[FloatArray, FloatArray]:
    """Return when each job begins and ends.

    Args:
        link: Of each job.
        ready: When it may start.
        seconds: What it takes.
        after: Index of the job that has to be over; -1 if there is none.
        starts: Of urgent intervals, link by link, in order.
        ends: Theirs.
        first: First urgent interval of each link, and their number.
    """
    place, free = first[:-1].copy(), np.zeros(len(first) - 1)
    begin, end = np.empty(len(link)), np.empty(len(link))
    for job in range(len(link)):
        own = link[job]
        now = max(ready[job], free[own])
        if after[job] >= 0:
            now = max(now, end[after[job]])
        place[own], begin[job], end[job] = _fit(starts, ends, place[own], first[own + 1], now, seconds[job])
        free[own] = end[job]
    return begin, end


_fit_all: Callable[..., tuple[FloatArray, FloatArray]] = compiled(_fit_each)
