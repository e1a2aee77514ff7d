"""Mixed-integer rounding (MIR) cuts of the memory rows, whose variables form one-label-per-node groups.

Let r_n be a reference label of node n; as each node takes one label, the limit of a segment is

    sum of a[n, s] x[n, s]  <=  b,     a[n, s] = use[n, s] - use[n, r_n],     b = limit - sum of use[n, r_n]

For each divisor d > 0, with f the fraction of b / d, every choice within the limit satisfies

    sum of F(a[n, s] / d) x[n, s]  <=  floor(b / d),     F(z) = floor(z) + max(0, z - floor(z) - f) / (1 - f)

(Gomory 1960; Nemhauser and Wolsey 1990). The change of references is bound complementation of one-label groups, and
divisors are the coefficients of fractional labels (c-MIR heuristic, Marchand and Wolsey 2001). Where few large tensors
fill a limit, these cuts raise the bound of the relaxation much further than covers.
"""

from collections.abc import Sequence

import numpy as np

from autopar.solvers.bounds.cover_cuts import LEAST_VIOLATION, Cut, GroupedRow
from autopar.solvers.model.graphical_model import Floats, Ints
from autopar.solvers.model.memory_rows import Memory

MOST_DIVISORS = 30
"""Most divisors that are tried per row and references: coefficients of the labels of largest value."""
MOST_SWITCHES = 30
"""Most nodes whose reference label is switched on trial."""
LEAST_FRACTION, LARGEST_FRACTION = 0.01, 0.99
"""Fractions of the right-hand side for which rounding errors of the cut stay far below its own tolerance."""
TOLERANCE = 1e-9
"""Added to the right-hand side, for rounding errors."""


def rounding_cuts(memory: Memory, offsets: Ints, times: Sequence[int], solution: Floats) -> list[Cut]:
    """Return MIR cuts violated by a solution of the relaxation, at most one per segment and choice of references.

    Args:
        memory: The limits.
        offsets: First column of each node.
        times: Segments to separate.
        solution: Value per column.
    """
    found = []
    for t in times:
        row = GroupedRow.of(memory, offsets, t)
        if row is not None:
            values = np.maximum(solution[row.columns], 0.0)
            for preferred in (-row.above, values):  # references: the least use, the largest value
                cut = _separate(row, values, _first_best(row.owner, preferred))
                if cut is not None:
                    found.append(cut)
    return found


def _first_best(owner: Ints, preferred: Floats) -> Ints:
    """Return the position of each node's first label of largest `preferred`."""
    order = np.lexsort((-preferred, owner))
    return order[np.searchsorted(owner, np.arange(int(owner[-1]) + 1))]


def _separate(row: GroupedRow, values: Floats, references: Ints) -> Cut | None:
    """Return the most violated cut over divisors, then over switches of single references; None if none is violated."""
    references = references.copy()
    fractional = np.flatnonzero((values > 1e-6) & (values < 1 - 1e-6))
    fractional = fractional[np.argsort(-values[fractional], kind="stable")]
    best, divisor = 0.0, 0.0
    gaps = np.abs(row.above - row.above[references][row.owner])[fractional]
    for candidate in np.unique(gaps[gaps > 0][:MOST_DIVISORS]).tolist():
        score = _violation(row, values, references, candidate)
        if score > best:
            best, divisor = score, candidate
    if divisor == 0.0:
        return None
    for factor in (2.0, 4.0, 8.0):
        score = _violation(row, values, references, divisor / factor)
        if score > best:
            best, divisor = score, divisor / factor
    for position in fractional[:MOST_SWITCHES].tolist():
        node = int(row.owner[position])
        before = int(references[node])
        references[node] = position
        score = _violation(row, values, references, divisor)
        if score > best:
            best = score
        else:
            references[node] = before
    coefficients, most = _rounded(row, references, divisor)
    used = np.flatnonzero(coefficients)
    if float(coefficients @ values) < most + LEAST_VIOLATION:
        return None
    return Cut(row.columns[used].astype(np.int32), coefficients[used], most)


def _violation(row: GroupedRow, values: Floats, references: Ints, divisor: float) -> float:
    """Return the violation of a cut relative to the norm of its coefficients; 0 if it is not safe."""
    coefficients, most = _rounded(row, references, divisor)
    norm = float(np.linalg.norm(coefficients))
    return (float(coefficients @ values) - most) / norm if norm > 0 and most < np.inf else 0.0


def _rounded(row: GroupedRow, references: Ints, divisor: float) -> tuple[Floats, float]:
    """Return coefficients and right-hand side of a cut; the latter is infinite if it is not safe."""
    reference = row.above[references]
    most = (row.room - float(reference.sum())) / divisor
    whole = float(np.floor(most))
    fraction = most - whole
    if not LEAST_FRACTION <= fraction <= LARGEST_FRACTION:
        return np.zeros(len(row.above)), np.inf
    scaled = (row.above - reference[row.owner]) / divisor
    floors = np.floor(scaled)
    coefficients = floors + np.maximum(0.0, scaled - floors - fraction) / (1.0 - fraction)
    return coefficients, whole + TOLERANCE * (1.0 + abs(whole))
