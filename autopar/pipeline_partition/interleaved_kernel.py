"""Compiled kernels that choose the mixtures of a group's stages under its memory limit (`interleaved.Groups`)."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _write_held_python(counts: Floats, sizes: Floats, stage: int, mixture: int, held: Floats) -> None:
    """Write the bytes a stage holds at each moment with a mixture."""
    for moment in range(len(counts)):
        total = 0.0
        for column in range(counts.shape[2]):
            total += counts[moment, stage, column] * sizes[stage, mixture, column]
        held[moment] = total


_write_held = compiled(_write_held_python)


def _fits_python(held: Floats, room: float) -> bool:
    """Return whether the bytes of all stages together, (stages, moments), fit at each moment."""
    for moment in range(held.shape[1]):
        total = 0.0
        for stage in range(len(held)):
            total += held[stage, moment]
        if total > room:
            return False
    return True


_fits = compiled(_fits_python)


def _overfull_moment_python(
    counts: Floats, sizes: Floats, stage: int, mixture: int, held: Floats, room: float, first: int
) -> int:
    """Return a moment at which a mixture of a stage does not fit beside the other stages; -1 if there is none.

    Args:
        counts: (moments, stages, 5), as in `_fastest_together`.
        sizes: (stages, mixtures, 5), as in `_fastest_together`.
        stage: The stage.
        mixture: The mixture.
        held: (moments,) bytes of the other stages.
        room: Bytes available.
        first: Moment tested first; the last overfull moment is usually overfull again.
    """
    for turn in range(-1, len(counts)):
        moment = first if turn < 0 else turn
        total = held[moment]
        for column in range(counts.shape[2]):
            total += counts[moment, stage, column] * sizes[stage, mixture, column]
        if total > room:
            return moment
    return -1


_overfull_moment = compiled(_overfull_moment_python)


def _reduce_recompute_python(
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
    """Reduce recompute greedily where memory permits: the most saved seconds first, later stages on ties.

    Thus the early stages of all groups keep the recompute that is needed. `best`, (stages,) feasible mixtures, is
    changed in place; the other arguments are those of `_fastest_together`.
    """
    num_stages = len(number)
    held, other = np.empty((num_stages, len(counts))), np.empty(len(counts))
    for stage in range(num_stages):
        _write_held(counts, sizes, stage, best[stage], held[stage])
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
                full = _overfull_moment(
                    counts, sizes, stage, index, other, room - max(moved, transit[stage, index]), first
                )
                if full >= 0:
                    first = full
                else:
                    saved, changed, mixture = own - again[stage, index], stage, index
                    break
        if changed < 0:
            return
        best[changed] = mixture
        _write_held(counts, sizes, changed, mixture, held[changed])


_reduce_recompute = compiled(_reduce_recompute_python)


def _add_recompute_python(
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
    """Add recompute greedily until all stages fit; return whether they do.

    Each step takes the mixture with the fewest seconds per byte freed at the fullest moment, bytes beyond the excess
    not counted. `taken`, (stages,) mixtures, is changed in place; the other arguments are those of `_fastest_together`.
    """
    num_stages = len(number)
    held, total = np.empty((num_stages, len(counts))), np.empty(len(counts))
    for stage in range(num_stages):
        _write_held(counts, sizes, stage, taken[stage], held[stage])
    for _ in range(number.sum()):  # bounded, as a mixture that fits at one moment may not fit at another
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
        _write_held(counts, sizes, changed, mixture, held[changed])
    return False


_add_recompute = compiled(_add_recompute_python)


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
    """Choose mixtures of a group's stages that fit together with nearly the least recompute, in two ways.

    Heuristic for a multiple-choice knapsack problem (Sinha and Zoltners 1979): a Lagrangian price on bytes (Everett
    1963), found by bisection, then greedy refinement from the feasible and from the infeasible side of the price.

    Args:
        counts: (moments, stages, 5) number of each kind of bytes held while tasks run, see `holding.moments`.
        number: (stages,) number of mixtures of each stage.
        sizes: (stages, mixtures, 5) bytes of each mixture, columns as in `counts`.
        again: (stages, mixtures) recompute seconds.
        priced: (stages, mixtures) bytes subject to the price.
        transit: (stages, mixtures) bytes in transit to and from the host; only the largest of all stages counts.
        hosted: (stages, mixtures) bytes on the host.
        order: (stages, mixtures) mixtures by ascending recompute seconds.
        room: Bytes available on the device.
        host_room: Bytes available in host memory.
        num_prices: Steps of the bisection.
        rounding: Relative difference below which seconds are equal.

    Returns:
        Whether any mixtures fit together, and the mixtures of both ways.
    """
    num_stages = len(number)
    held = np.empty((num_stages, len(counts)))
    taken, best = np.zeros(num_stages, dtype=np.int64), np.zeros(num_stages, dtype=np.int64)
    over = np.zeros(num_stages, dtype=np.int64)
    low, high = -20.0, 3.0  # decimal logarithms of the price in seconds per byte: from nothing to prohibitive
    found = False
    for turn in range(num_prices + 1):  # the first turn is without a price
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
                _write_held(counts, sizes, stage, taken[stage], held[stage])
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
    # Equal blocks change at one price, all at once. The greedy steps split such ties stage by stage, once from the
    # feasible mixtures and once from the cheapest infeasible ones.
    rest = counts, number, sizes, again, transit, hosted
    _reduce_recompute(best, *rest, order, room, host_room, rounding)
    if not _add_recompute(over, *rest, room, host_room):
        return True, best, best
    _reduce_recompute(over, *rest, order, room, host_room, rounding)
    return True, best, over


fastest_together: Callable[..., tuple[bool, Ints, Ints]] = compiled(_fastest_together)
