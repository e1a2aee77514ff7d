"""Repeated calls timed one by one: by the clock of the host, or by events of a GPU's stream."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from autopar.ranks.communicator import Memory

WARMUP = 3
"""Calls before the first timed one: they allocate, compile and fill caches."""
LEAST, MOST = 7, 300
"""Timed calls of an event, whatever time they take."""


class Clock(Protocol):
    """What times calls."""

    def times(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Return the seconds of each of some calls."""


class HostClock(Clock):
    """The clock of the host: a call is over when it returns."""

    def times(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Return the seconds of each call."""
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        return found


class StreamClock(Clock):
    """Events of the CUDA stream that calls work on: a call is over when the stream has done its work."""

    def times(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Return the seconds of each call."""
        import torch

        pairs = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) * 1e-3 for start, end in pairs]


def clock_of(memory: Memory) -> Clock:
    """Return the clock for calls that work in a memory."""
    return StreamClock() if memory.device == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one event.

    Attributes:
        seconds: Median; of collectives the mean.
        low: The time that a tenth stays below.
        high: The time that a tenth exceeds.
        repeats: Timed calls.
        warmup: Calls before these.
    """

    seconds: float
    low: float
    high: float
    repeats: int
    warmup: int = WARMUP


def sample_of(times: list[float], typical: Callable[[list[float]], float] = median) -> Sample:
    """Return a typical time and the tenths of some times.

    >>> sample_of([3.0, 1.0, 2.0])
    Sample(seconds=2.0, low=1.0, high=3.0, repeats=3, warmup=3)
    """
    ordered = sorted(times)
    tenth = len(ordered) // 10
    return Sample(typical(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


def repeats_for(call_seconds: float, budget: float) -> int:
    """Return how often to call what takes so long, given the seconds there are for it.

    >>> repeats_for(1.0, 0.3), repeats_for(0.01, 0.3), repeats_for(1e-6, 0.3)
    (7, 30, 300)
    """
    return max(LEAST, min(MOST, round(budget / max(call_seconds, 1e-9))))
