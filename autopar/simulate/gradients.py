"""When gradient traffic runs: beside compute, in the gaps the rest of the traffic leaves on the link.

Compute never waits for it, only the optimizer does. So the pipeline is timed first, and this traffic is fitted in
afterwards: per link first in, first out, interrupted whenever a collective that compute waits for, or a transfer
between stages, has the link.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.simulate.layout import Resource

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
    """

    resource: Resource
    name: str
    ready: float
    seconds: float
    after: int


def fit_in(jobs: Sequence[Job], busy: Mapping[Resource, Iterable[Interval]]) -> list[Interval]:
    """Return when each job runs, from its first to its last moment on the link.

    Args:
        jobs: In the order in which they are issued.
        busy: When each link has something more urgent to do; intervals may overlap.

    >>> fit_in([Job(Resource.INTRA, "a", 1.0, 2.0, -1)], {Resource.INTRA: [(0.0, 1.5), (2.0, 3.0)]})
    [(1.5, 4.5)]
    """
    intervals = {resource: sorted(parts) for resource, parts in busy.items()}
    position = dict.fromkeys(Resource, 0)
    free = dict.fromkeys(Resource, 0.0)
    done: list[Interval] = []
    for job in jobs:
        urgent = intervals.get(job.resource, [])
        i = position[job.resource]
        now = max(job.ready, free[job.resource], done[job.after][1] if job.after >= 0 else 0.0)
        begin, left = None, job.seconds
        while True:
            # everything urgent that has started by now comes first
            while i < len(urgent) and urgent[i][0] <= now:
                now = max(now, urgent[i][1])
                i += 1
            begin = now if begin is None else begin
            gap = urgent[i][0] - now if i < len(urgent) else left
            if left <= gap:
                now += left
                break
            left -= gap
            now = urgent[i][0]
        position[job.resource] = i
        free[job.resource] = now
        done.append((begin, now))
    return done
