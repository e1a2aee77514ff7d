"""The distinct ranges of a chain of blocks: what is alike is looked at once.

Of a chain of a thousand equal blocks, ranges of equal length are the same but for those at the ends.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Distinct ranges of up to so many blocks.

    Attributes:
        start: First block of the first range of each kind, (windows,).
        stop: Block behind its last one.
        parent: The window without its last block, which comes earlier; -1 for windows of one block.
        at: (blocks, longest) window of the range that starts at a block and has one block more than the column says; -1
            where there is none.
    """

    start: IntArray
    stop: IntArray
    parent: IntArray
    at: IntArray

    @property
    def longest(self) -> int:
        """The most blocks of a range."""
        return int(self.at.shape[1])


@lru_cache(maxsize=64)
def windows(symbols: tuple[int, ...], longest: int, from_first: bool) -> Windows:
    """Return the distinct ranges of a chain.

    Args:
        symbols: What each block is, its place included as far as it matters.
        longest: The most blocks of a range.
        from_first: Whether only ranges that start with the first block are wanted.

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


@lru_cache(maxsize=64)  # choices of one chain are many
def symbols_of(chain: tuple[int, ...], special: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return what each block is: its kind, whether it is the first or the last, and which of `special` have it.

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
