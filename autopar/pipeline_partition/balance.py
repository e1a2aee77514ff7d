"""How full the fullest group of devices is at least, if groups hold whole blocks, wherever in the chain these lie."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

MOST_OTHERS = 4
"""Blocks of other sizes than most that are looked at in every combination."""

ROUNDING = 1e-9
"""Sums of equal blocks differ by rounding only: relative."""


def least_load(sizes: Mapping[float, int], num_groups: int) -> float:
    """Return the least that the fullest group has, wherever whole blocks lie.

    Exact if all blocks but a few are of one size; else what follows from their sum and the largest of them.

    Args:
        sizes: How many blocks there are of each size.
        num_groups: Groups.

    >>> round(least_load({1.0: 32, 2.4: 1}, 16), 6), round(least_load({1.0: 96, 0.35: 1}, 8), 6)
    (3.0, 12.35)
    """
    mean = sum(size * count for size, count in sizes.items()) / num_groups
    least = max(mean, max(sizes))
    main, count = max(sizes.items(), key=lambda item: item[1])
    others = [size for size, number in sizes.items() if size != main for _ in range(number) if size]
    if not main or len(others) > MOST_OTHERS:
        return least
    best = math.inf
    for parts in _partitions(others):
        if len(parts) <= num_groups:
            loads = [sum(part) for part in parts] + [0.0] * (num_groups - len(parts))
            best = min(best, _fullest(loads, main, count))
    return max(least, best * (1 - ROUNDING))


def _fullest(loads: Sequence[float], size: float, count: int) -> float:
    """Return the least load of the fullest group when `count` blocks of one size are added to groups with loads.

    >>> _fullest([2.4, 0.0, 0.0], 1.0, 7)
    3.4
    """
    high, alike, numbers = max(loads), Counter(loads), range(count + 1)

    def holds(end: float) -> bool:
        room = (groups * int((end - load) / size + ROUNDING) for load, groups in alike.items())
        return end >= high and sum(room) >= count

    def least(load: float) -> float:
        number = bisect_left(numbers, True, key=lambda number: holds(load + number * size))
        return load + number * size if number <= count else math.inf

    return min(map(least, alike))


def _partitions(items: Sequence[float]) -> Iterator[list[list[float]]]:
    """Yield all ways to put items together."""
    if not items:
        yield []
        return
    for parts in _partitions(items[1:]):
        yield [[items[0]], *parts]
        for number in range(len(parts)):
            yield [*parts[:number], [items[0], *parts[number]], *parts[number + 1 :]]
