"""Lower bound on the load of the fullest group of devices if groups hold whole blocks, in any order of the chain."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

MOST_OTHERS = 4
"""Most blocks of minority sizes whose assignments are enumerated."""

ROUNDING = 1e-9
"""Relative rounding error of sums of equal blocks."""


def least_load(sizes: Mapping[float, int], num_groups: int) -> float:
    """Lower bound on the load of the fullest group.

    Relaxes: the order of blocks in the chain (makespan of identical machines). Valid when: groups hold whole blocks.
    Costs: the enumeration of partitions of at most `MOST_OTHERS` blocks. Exact if at most that many blocks differ from
    the most frequent size; else the larger of the mean load and the largest block (McNaughton 1959).

    Args:
        sizes: Number of blocks of each size.
        num_groups: Number of groups.

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
    """Return the least maximum load after adding `count` blocks of one size to groups with the given loads.

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
    """Yield all set partitions of the items."""
    if not items:
        yield []
        return
    for parts in _partitions(items[1:]):
        yield [[items[0]], *parts]
        for number in range(len(parts)):
            yield [*parts[:number], [items[0], *parts[number]], *parts[number + 1 :]]
