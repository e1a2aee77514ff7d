"""The distinct ranges (*windows*) of a chain of blocks, so that equal ranges are evaluated once.

In a chain of a thousand equal blocks, ranges of equal length are equal except at the ends.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The distinct ranges of a chain up to a length.

    Attributes:
        start: First block of the first range of each window, (windows,).
        stop: Block after the last of that range, (windows,).
        parent: Window without the last block, which has a smaller index; -1 for windows of one block.
        at: (blocks, longest) window of the range that starts at a block and has `column + 1` blocks; -1 if none.
    """

    start: IntArray
    stop: IntArray
    parent: IntArray
    at: IntArray

    @property
    def longest(self) -> int:
        """Blocks of the longest ranges."""
        return int(self.at.shape[1])


@lru_cache(maxsize=64)
def windows(symbols: tuple[int, ...], longest: int, from_first: bool) -> Windows:
    """Return the distinct ranges of a chain.

    Args:
        symbols: Equivalence class of each block, including its position as far as that matters.
        longest: Most blocks of a range.
        from_first: Whether only ranges from the first block on are needed.

    >>> found = windows((0, 1, 1, 1, 2), 2, False)
    >>> list(zip(found.start.tolist(), found.stop.tolist()))
    [(0, 1), (0, 2), (1, 2), (1, 3), (3, 5), (4, 5)]
    """
    known: dict[tuple[int, int], int] = {}
    count = len(symbols)
    start: list[int] = []
    stop: list[int] = []
    parent: list[int] = []
    at = np.full((count, min(longest, count)), -1, dtype=np.int64)
    for first in range(1 if from_first else count):
        window = -1
        for block in range(first, min(count, first + at.shape[1])):
            key = (window, symbols[block])
            if key not in known:
                known[key] = len(parent)
                start.append(first)
                stop.append(block + 1)
                parent.append(window)
            window = known[key]
            at[first, block - first] = window
    return Windows(np.array(start), np.array(stop), np.array(parent), at)


@lru_cache(maxsize=64)  # one chain has many configurations
def symbols_of(chain: tuple[int, ...], special: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the equivalence class of each block: its kind, whether it is first or last, and its `special` groups.

    Args:
        chain: Kind of every block.
        special: Groups of blocks that differ from others of their kind.

    >>> symbols_of((0, 0, 0, 0, 0), ((3,),))
    (0, 1, 1, 2, 3)
    """
    last = len(chain) - 1
    groups = [frozenset(group) for group in special]
    known: dict[object, int] = {}
    found = []
    for block, kind in enumerate(chain):
        what = (kind, block == 0, block == last, *(block in group for group in groups))
        found.append(known.setdefault(what, len(known)))
    return tuple(found)
