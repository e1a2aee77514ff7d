"""Compiled kernels on single cost tables, which are small and many: a numpy call would cost more than its work.

Tables are two-dimensional, one node's labels as rows and another's as columns; infinity is forbidden. Every kernel
adds in the order numpy would, so results agree entry by entry.
"""

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

VARIED, SAME_ROWS, SAME_COLUMNS = 0, 1, 2
"""Which lines of a table are all equal: none; the rows (cost depends on the column only); the columns."""

BY_ROWS, BY_COLUMNS = 1, 2
"""Bit flags of `functional_sides`: each row permits exactly one column; each column exactly one row."""


@compiled
def same_lines(table: Floats) -> int:
    """Return which lines of a table are all equal; `SAME_ROWS` if both are."""
    rows, columns = table.shape
    same = True
    for x in range(1, rows):
        for y in range(columns):
            if table[x, y] != table[0, y]:
                same = False
                break
        if not same:
            break
    if same:
        return SAME_ROWS
    for x in range(rows):
        for y in range(1, columns):
            if table[x, y] != table[x, 0]:
                return VARIED
    return SAME_COLUMNS


@compiled
def is_finite(costs: Floats) -> bool:
    """Return whether no entry is forbidden."""
    permitted = True
    for cost in costs:
        permitted &= np.isfinite(cost)
    return permitted


@compiled
def weighted(table: Floats, weight: float) -> Floats:
    """Return a table times a weight; forbidden entries stay forbidden."""
    result = np.empty(table.shape)
    for x in range(table.shape[0]):
        for y in range(table.shape[1]):
            result[x, y] = np.inf if np.isinf(table[x, y]) else table[x, y] * weight
    return result


@compiled
def part(table: Floats, rows: Ints, columns: Ints) -> Floats:
    """Return the given rows and columns of a table."""
    result = np.empty((len(rows), len(columns)))
    for x in range(len(rows)):
        for y in range(len(columns)):
            result[x, y] = table[rows[x], columns[y]]
    return result


@compiled
def functional_sides(table: Floats) -> int:
    """Return as bits whether each row determines its column and each column its row (functional constraints)."""
    rows, columns = table.shape
    in_column = np.zeros(columns, np.int64)
    found = BY_ROWS | BY_COLUMNS
    for x in range(rows):
        in_row = 0
        for y in range(columns):
            if np.isfinite(table[x, y]):
                in_row += 1
                in_column[y] += 1
        if in_row != 1:
            found &= ~BY_ROWS
    for y in range(columns):
        if in_column[y] != 1:
            found &= ~BY_COLUMNS
    return found


@compiled
def separate(table: Floats, of_rows: Floats, of_columns: Floats) -> bool:
    """Write a table as a cost per row plus a cost per column; return whether that is possible exactly."""
    rows, columns = table.shape
    for x in range(rows):
        least = np.inf
        for y in range(columns):
            least = min(least, table[x, y])
        if np.isinf(least):
            return False
        of_rows[x] = least
    for y in range(columns):
        least = np.inf
        for x in range(rows):
            least = min(least, table[x, y] - of_rows[x])
        if np.isinf(least):
            return False
        of_columns[y] = least
        for x in range(rows):
            if of_rows[x] + least != table[x, y]:
                return False
    return True


@compiled
def min_sum_product(unary: Floats, first: Floats, turned: bool, second: Floats, turned_too: bool) -> Floats:
    """Return the min-sum elimination of v: min over v of unary[v] + first[v, a] + second[v, b], shape (a, b).

    Args:
        unary: Costs of the labels v.
        first: Costs of v and a.
        turned: Whether `first` has the labels a as rows.
        second: Costs of v and b.
        turned_too: Whether `second` has the labels b as rows.
    """
    count = len(unary)
    rows = first.shape[0] if turned else first.shape[1]
    columns = second.shape[0] if turned_too else second.shape[1]
    result = np.full((rows, columns), np.inf)
    line = np.empty(columns)
    for v in range(count):
        for b in range(columns):
            line[b] = second[b, v] if turned_too else second[v, b]
        for a in range(rows):
            left = (first[a, v] if turned else first[v, a]) + unary[v]
            if left < np.inf:
                for b in range(columns):
                    result[a, b] = min(result[a, b], left + line[b])
    return result
