"""The hot loop of what groups of devices choose, compiled."""

from collections.abc import Callable

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _holding(counts: Floats, sizes: Floats, stage: int, mixture: int, held: Floats) -> None:
    """Write what a stage holds at each moment if it has a mixture."""
    for moment in range(len(counts)):
        total = 0.0
        for column in range(counts.shape[2]):
            total += counts[moment, stage, column] * sizes[stage, mixture, column]
        held[moment] = total


_holds = numba.njit(cache=True, nogil=True)(_holding)


def _fitting(held: Floats, room: float) -> bool:
    """Whether what stages hold together, (stages, moments), has room at each moment."""
    for moment in range(held.shape[1]):
        total = 0.0
        for stage in range(len(held)):
            total += held[stage, moment]
        if total > room:
            return False
    return True


_fits = numba.njit(cache=True, nogil=True)(_fitting)


def _too_full(counts: Floats, sizes: Floats, stage: int, mixture: int, held: Floats, room: float, first: int) -> int:
    """Return a moment at which there is no room for a mixture of a stage beside the others; -1 if there is none.

    Args:
        counts: (moments, stages, 5) as of `_fastest_together`.
        sizes: (stages, mixtures, 5) as of `_fastest_together`.
        stage: The stage.
        mixture: The mixture.
        held: (moments,) bytes of the others.
        room: Bytes there are.
        first: The moment to look at first: what is too large for one is mostly too large at the same.
    """
    for turn in range(-1, len(counts)):
        moment = first if turn < 0 else turn
        total = held[moment]
        for column in range(counts.shape[2]):
            total += counts[moment, stage, column] * sizes[stage, mixture, column]
        if total > room:
            return moment
    return -1


_is_full_at = numba.njit(cache=True, nogil=True)(_too_full)


def _fastest_together(
    counts: Floats,
    number: Ints,
    sizes: Floats,
    again: Floats,
    priced: Floats,
    transit: Floats,
    hosted: Floats,
    order: Ints,
    room: float,
    host_room: float,
    num_prices: int,
    rounding: float,
) -> tuple[bool, Ints]:
    """Return whether any mixtures of the stages of a group fit together, and those that are fastest, nearly.

    Args:
        counts: (moments, stages, 5) what is held while tasks run, see `holding.moments`.
        number: (stages,) how many mixtures each has.
        sizes: (stages, mixtures, 5) bytes of each, as many as the columns of `counts`.
        again: (stages, mixtures) seconds that run again.
        priced: Bytes that have a price.
        transit: Bytes on their way to and from the host; of all stages only the most is there at once.
        hosted: Bytes on the host.
        order: Mixtures in the order of the seconds that run again.
        room: Bytes there are for all of that on the device.
        host_room: The same in host memory.
        num_prices: Steps of the bisection for the price of a byte.
        rounding: Relative: seconds that differ by less are the same.
    """
    num_stages = len(number)
    held = np.empty((num_stages, len(counts)))
    other = np.empty(len(counts))
    taken, best = np.zeros(num_stages, dtype=np.int64), np.zeros(num_stages, dtype=np.int64)
    low, high = -20.0, 3.0  # seconds per byte, to the power of ten: from nothing to more than any stage takes
    found = False
    for turn in range(num_prices + 1):  # at no price first
        middle = (low + high) / 2
        price = 10.0**middle if turn else 0.0
        moved, away = 0.0, 0.0
        for stage in range(num_stages):
            least = np.inf
            for mixture in range(number[stage]):
                value = again[stage, mixture] + price * priced[stage, mixture]
                if value < least:
                    least, taken[stage] = value, mixture
            moved, away = max(moved, transit[stage, taken[stage]]), away + hosted[stage, taken[stage]]
        fits = away <= host_room
        if fits:
            for stage in range(num_stages):
                _holds(counts, sizes, stage, taken[stage], held[stage])
            fits = _fits(held, room - moved)
        if fits:
            found = True
            best[:] = taken
            if not turn:
                return True, best
            high = middle
        elif turn:
            low = middle
    if not found:
        return False, best
    # Equal blocks change at one price, all of them at once: what they need not run again is told stage by stage, the
    # most seconds first, of equal ones those of the last stage: so early stages of all groups run again what has to.
    for stage in range(num_stages):
        _holds(counts, sizes, stage, best[stage], held[stage])
    first = 0
    while True:
        saved, changed, mixture = 0.0, -1, 0
        for stage in range(num_stages - 1, -1, -1):
            own = again[stage, best[stage]]
            moved, away = 0.0, 0.0
            other[:] = 0.0
            for rest in range(num_stages):
                if rest != stage:
                    moved, away = max(moved, transit[rest, best[rest]]), away + hosted[rest, best[rest]]
                    for moment in range(len(other)):
                        other[moment] += held[rest, moment]
            for place in range(number[stage]):
                index = order[stage, place]
                if not again[stage, index] < own - saved * (1 + rounding):
                    break
                if away + hosted[stage, index] > host_room:
                    continue
                full = _is_full_at(counts, sizes, stage, index, other, room - max(moved, transit[stage, index]), first)
                if full >= 0:
                    first = full
                else:
                    saved, changed, mixture = own - again[stage, index], stage, index
                    break
        if changed < 0:
            return True, best
        best[changed] = mixture
        _holds(counts, sizes, changed, mixture, held[changed])


fastest_together: Callable[..., tuple[bool, Ints]] = numba.njit(cache=True, nogil=True)(_fastest_together)
