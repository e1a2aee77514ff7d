"""The hot loop of what groups of devices choose, compiled."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _holding(counts: Floats, sizes: Floats, stage: int, mixture: int, held: Floats) -> None:
    """Write what a stage holds at each moment if it has a mixture."""
    for moment in range(len(counts)):
        total = 0.0
        for column in range(counts.shape[2]):
            total += counts[moment, stage, column] * sizes[stage, mixture, column]
        held[moment] = total


_holds = compiled(_holding)


def _fitting(held: Floats, room: float) -> bool:
    """Whether what stages hold together, (stages, moments), has room at each moment."""
    for moment in range(held.shape[1]):
        total = 0.0
        for stage in range(len(held)):
            total += held[stage, moment]
        if total > room:
            return False
    return True


_fits = compiled(_fitting)


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


_is_full_at = compiled(_too_full)


def _growing(
    best: Ints,
    counts: Floats,
    number: Ints,
    sizes: Floats,
    again: Floats,
    transit: Floats,
    hosted: Floats,
    order: Ints,
    room: float,
    host_room: float,
    rounding: float,
) -> None:
    """Let stages run again less where there is room.

    The most seconds first, of equal ones those of the last stage: so early stages of all groups run again what has to.

    Arguments are those of `_fastest_together`, and mixtures that fit, (stages,), that are changed in place.
    """
    num_stages = len(number)
    held, other = np.empty((num_stages, len(counts))), np.empty(len(counts))
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
            return
        best[changed] = mixture
        _holds(counts, sizes, changed, mixture, held[changed])


_grows = compiled(_growing)


def _giving_way(
    taken: Ints,
    counts: Floats,
    number: Ints,
    sizes: Floats,
    again: Floats,
    transit: Floats,
    hosted: Floats,
    room: float,
    host_room: float,
) -> bool:
    """Let stages run again more, until all fits, and return whether it does.

    Each time what takes the fewest seconds per byte that is too much at the fullest moment; what is more than enough
    counts for nothing.

    Arguments are those of `_fastest_together`, and mixtures, (stages,), that are changed in place.
    """
    num_stages = len(number)
    held, total = np.empty((num_stages, len(counts))), np.empty(len(counts))
    for stage in range(num_stages):
        _holds(counts, sizes, stage, taken[stage], held[stage])
    for _ in range(number.sum()):  # what has room at one moment may lack it at another: not for ever
        moved, away = 0.0, 0.0
        total[:] = 0.0
        for stage in range(num_stages):
            moved, away = max(moved, transit[stage, taken[stage]]), away + hosted[stage, taken[stage]]
            total += held[stage]
        fullest = int(total.argmax())
        excess = total[fullest] - (room - moved)
        if excess <= 0:
            return away <= host_room
        least, changed, mixture = np.inf, -1, 0
        for stage in range(num_stages):
            for index in range(number[stage]):
                held_then = 0.0
                for column in range(counts.shape[2]):
                    held_then += counts[fullest, stage, column] * sizes[stage, index, column]
                freed = min(held[stage, fullest] - held_then, excess)
                more = again[stage, index] - again[stage, taken[stage]]
                if freed <= 0 or more < 0:
                    continue
                cost = more / freed
                if cost < least:
                    least, changed, mixture = cost, stage, index
        if changed < 0:
            return False
        taken[changed] = mixture
        _holds(counts, sizes, changed, mixture, held[changed])
    return False


_gives_way = compiled(_giving_way)


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
) -> tuple[bool, Ints, Ints]:
    """Return whether any mixtures of a group's stages fit together, and those that are fastest, nearly, in two ways.

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
    taken, best = np.zeros(num_stages, dtype=np.int64), np.zeros(num_stages, dtype=np.int64)
    over = np.zeros(num_stages, dtype=np.int64)
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
                return True, best, best
            high = middle
        else:
            over[:] = taken
            low = middle if turn else low
    if not found:
        return False, best, best
    # Equal blocks change at one price, all of them at once. Which ones need not run again, or have to, is told stage by
    # stage: from what fits, and from what just does not.
    rest = counts, number, sizes, again, transit, hosted
    _grows(best, *rest, order, room, host_room, rounding)
    if not _gives_way(over, *rest, room, host_room):
        return True, best, best
    _grows(over, *rest, order, room, host_room, rounding)
    return True, best, over


fastest_together: Callable[..., tuple[bool, Ints, Ints]] = compiled(_fastest_together)
