"""Shares of a batch: rows of unequal devices take different numbers of microbatches of a step.

A row is the devices of a plan with one coordinate on the major axis of their mesh: a data-parallel replica. Every
microbatch of a row has the same number of samples; rows of faster devices run more of them before gradients are summed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from autopar.limits import MAX_MICROBATCHES


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of equal devices that run equally many microbatches.

    Attributes:
        rows: Half-open range of coordinates on the major mesh axis.
        num_microbatches: Microbatches of each row per step.
    """

    rows: tuple[int, int]
    num_microbatches: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rows[1] - self.rows[0]


def num_rows(shares: Sequence[Share]) -> int:
    """Return the number of rows of all shares."""
    return shares[-1].rows[1]


def row_microbatches(shares: Sequence[Share]) -> int:
    """Return the microbatches of a step, those of each row counted apart.

    >>> row_microbatches([Share((0, 2), 5), Share((2, 4), 3)])
    16
    """
    return sum(share.num_rows * share.num_microbatches for share in shares)


def mean_microbatches(shares: Sequence[Share]) -> Fraction:
    """Return the microbatches of a row on the mean of all rows.

    >>> mean_microbatches([Share((0, 1), 5), Share((1, 2), 2)])
    Fraction(7, 2)
    """
    return Fraction(row_microbatches(shares), num_rows(shares))


def of_row(shares: Sequence[Share], row: int) -> Share:
    """Return the share that a row is part of."""
    return next(share for share in shares if share.rows[0] <= row < share.rows[1])


def device_ranges(ranges: Iterable[tuple[int, int]], shares: Sequence[Share]) -> tuple[tuple[int, int], ...]:
    """Return the devices of each group that is simulated apart: those of a stage, share by share of its rows.

    >>> device_ranges([(0, 8), (8, 16)], [Share((0, 1), 5), Share((1, 4), 2)])
    ((0, 2), (8, 10), (2, 8), (10, 16))
    """
    distinct = dict.fromkeys(ranges)
    if not shares:
        return tuple(distinct)
    rows = num_rows(shares)
    return tuple(
        (first + share.rows[0] * ((last - first) // rows), first + share.rows[1] * ((last - first) // rows))
        for share in shares
        for first, last in distinct
    )


def faults(shares: Sequence[Share], num_microbatches: int) -> Iterator[str]:
    """Yield what is wrong with shares, given the microbatches of the busiest row."""
    start = 0
    for share in shares:
        if share.rows[0] != start or share.num_rows < 1:
            yield f"shares name rows {share.rows[0]} to {share.rows[1]} where rows from {start} on come next"
            return
        if not 1 <= share.num_microbatches <= MAX_MICROBATCHES:
            yield f"a share of {share.num_microbatches} microbatches, out of its range from 1 to {MAX_MICROBATCHES}"
            return
        start = share.rows[1]
    most = max(share.num_microbatches for share in shares)
    if most != num_microbatches:
        yield f"num_microbatches is {num_microbatches}, the largest share has {most}"


def balanced(
    rows: Sequence[int], total: int, seconds: Sequence[Callable[[int], float]], most: int = MAX_MICROBATCHES
) -> tuple[int, ...] | None:
    """Return the microbatches per row of each group of rows that end the slowest group soonest.

    Exact: a dynamic program over groups and the microbatches they have together; of equally good shares the one with
    the fewest in the first groups.

    Args:
        rows: Rows of each group.
        total: Microbatches of all rows together.
        seconds: Per group, the step time given the microbatches of each of its rows; it grows with them.
        most: Microbatches of a row at most.

    Returns:
        At least one microbatch for each row; None if rows cannot share `total` so.

    >>> balanced([8, 8], 64, [lambda count: 1.0 * count, lambda count: 1.7 * count])
    (5, 3)
    """
    best = np.full(total + 1, np.inf)
    best[0] = 0.0
    taken: list[NDArray[np.int64]] = []
    for number, of_count in zip(rows, seconds, strict=True):
        after, chosen = np.full(total + 1, np.inf), np.zeros(total + 1, dtype=np.int64)
        for count in range(1, min(most, total // number) + 1):
            added = number * count
            found = np.maximum(best[: total + 1 - added], of_count(count))
            better = found < after[added:]
            after[added:][better] = found[better]
            chosen[added:][better] = count
        taken.append(chosen)
        best = after
    if not np.isfinite(best[total]):
        return None
    left, counts = total, list[int]()
    for number, chosen in zip(reversed(rows), reversed(taken), strict=True):
        counts.append(int(chosen[left]))
        left -= number * counts[-1]
    return tuple(reversed(counts))
