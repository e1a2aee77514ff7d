"""The local polytope of a field as a linear program, with rows for limits and their cuts.

    x[i, s] >= 0            label s of node i;           sum_s x[i, s] = 1
    y[e, p, q] >= 0         pair of label classes of e;  sum_q y[e, p, q] = sum_{s in p} x[a, s],
                                                         sum_p y[e, p, q] = sum_{s in q} x[b, s]
    sum_{i, s} use[t, i, s] x[i, s] <= limit[t]          for the segments asked for

Relaxes: x to fractions (Schlesinger 1976; Werner 2007; Wainwright and Jordan 2008). Labels whose rows (columns) of a
table differ by a constant form one class, the constant moving to the node's cost: the relaxation stays exactly as tight
as one y per pair of labels and becomes much smaller. Forbidden pairs have no y.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.solvers.bounds.cover_cuts import Cut
from autopar.solvers.model.graphical_model import Field, Floats, Ints
from autopar.solvers.model.memory_rows import Memory


@dataclass(frozen=True, slots=True, eq=False)
class PairColumns:
    """Columns of the pair variables y of one edge.

    Attributes:
        nodes: The edge.
        columns: Column of each pair of classes, -1 if forbidden, shape (classes of the first node, classes of the
            second).
        first_class: Class of each label of the first node.
        second_class: Class of each label of the second node.
    """

    nodes: tuple[int, int]
    columns: Ints
    first_class: Ints
    second_class: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """A simplex basis, in the back end's own words.

    Attributes:
        columns: Status of each column.
        rows: Status of each row; None for a row that was added since, which is basic.
    """

    columns: tuple[object, ...]
    rows: tuple[object | None, ...]

    def with_rows_at(self, place: int, count: int) -> "Basis":
        """Return the basis after `count` rows were inserted before row `place`."""
        return Basis(self.columns, (*self.rows[:place], *([None] * count), *self.rows[place:]))


@dataclass(frozen=True, slots=True, eq=False)
class LinearProgram:
    """min cost x + constant, row_lower <= A x <= row_upper, 0 <= x <= upper; the first `num_labels` columns integer.

    Attributes:
        cost: Per column, in units of `scale` problem units.
        num_labels: Number of label columns; pair columns come after them.
        offsets: First column of each node, shape (num_nodes + 1,).
        row_lower: Lower bound of each row.
        row_upper: Upper bound of each row.
        starts: Row-wise sparse matrix: where each row begins, shape (num_rows + 1,).
        columns: Column of each entry.
        values: Value of each entry.
        constant: Added to the objective, in problem units.
        scale: Problem units per unit of `cost`.
        pairs: Pair columns of each edge.
        limits: Segments of the memory rows, which are the last rows.
        start: Value per column of a warm start; None if there is none. It may break limits.
        upper: Upper bound per column; None for 1 everywhere.
        basis: Basis to start the relaxation from; None for none.
    """

    cost: Floats
    num_labels: int
    offsets: Ints
    row_lower: Floats
    row_upper: Floats
    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    values: Floats
    constant: float
    scale: float
    pairs: tuple[PairColumns, ...]
    limits: tuple[int, ...] = ()
    start: Floats | None = None
    upper: Floats | None = None
    basis: Basis | None = None

    def with_start(self, labels: Sequence[int]) -> "LinearProgram":
        """Return the program with the choice `labels` as warm start."""
        start = np.zeros(len(self.cost))
        for first, last, label in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), labels, strict=True):
            if first < last:
                start[first + label] = 1.0
        for pair in self.pairs:
            a, b = pair.nodes
            column = pair.columns[pair.first_class[labels[a]], pair.second_class[labels[b]]]
            if column >= 0:
                start[column] = 1.0
        return replace(self, start=start)

    def labels(self, solution: Floats) -> tuple[list[int], bool]:
        """Return the label of largest value per node, and whether the solution is integral."""
        chosen: list[int] = []
        integral = True
        for first, last in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            if first == last:
                chosen.append(0)
                continue
            part = solution[first:last]
            label = int(part.argmax())
            integral = integral and bool(part[label] > 1 - 1e-6)
            chosen.append(label)
        return chosen, integral

    def dual_bound(self, duals: Floats) -> float:
        """Return the Lagrangian bound of row multipliers, in problem units.

        Relaxes: all rows except one label per node. Valid when: always, whatever the multipliers' accuracy. Costs: one
        product with the matrix. Rows `<=` take multipliers <= 0; the least reduced cost of each node's labels counts,
        that of a pair if it is negative.
        """
        free, reduced = self._reduced(duals)
        total = float(free @ self.row_upper) + float(np.minimum(reduced[self.num_labels :], 0.0).sum())
        firsts = self.offsets[:-1][np.diff(self.offsets) > 0]
        if len(firsts):
            total += float(np.minimum.reduceat(reduced[: self.num_labels], firsts).sum())
        return total * self.scale + self.constant

    def reduced_cost_field(self, duals: Floats) -> Field:
        """Return the reduced costs of labels and pairs above `dual_bound`, as a field of costs >= 0.

        A choice within the limits costs at least `dual_bound` plus its cost in this field.
        """
        reduced = self._reduced(duals)[1] * self.scale
        unary = []
        for first, last in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            part = reduced[first:last]
            unary.append(part - part.min() if len(part) else part)
        above = np.append(np.maximum(reduced, 0.0), np.inf)  # column -1 is a forbidden pair
        result = Field(unary)
        for pair in self.pairs:
            result.add(*pair.nodes, above[pair.columns][np.ix_(pair.first_class, pair.second_class)])
        return result

    def _reduced(self, duals: Floats) -> tuple[Floats, Floats]:
        """Return the multipliers clipped to their valid sign, and the reduced cost of each column."""
        free = np.where(np.isneginf(self.row_lower), np.minimum(duals, 0.0), duals)
        rows = np.repeat(np.arange(len(free)), np.diff(self.starts))
        return free, self.cost - np.bincount(self.columns, self.values * free[rows], minlength=len(self.cost))

    def prices(self, duals: Floats) -> Floats:
        """Return the price of each segment of `limits`, in problem units per scale of use."""
        return np.maximum(-duals[len(duals) - len(self.limits) :], 0.0) * self.scale

    def with_rows(self, memory: Memory, rows: Sequence[int]) -> "LinearProgram":
        """Return the program with the limits of the segments `rows` added, each in units of its scale."""
        added = [self.memory_row(memory, t) for t in rows]
        upper = [float(memory.limits[t] / memory.scales[t]) for t in rows]
        return replace(self._with_upper_rows(added, upper), limits=(*self.limits, *rows))

    def with_cuts(self, cuts: Sequence[Cut]) -> "LinearProgram":
        """Return the program with a row per cut added; must be called before `with_rows`."""
        assert not self.limits, "the memory rows are the last ones"
        return self._with_upper_rows([(cut.columns, cut.values) for cut in cuts], [cut.most for cut in cuts])

    def _with_upper_rows(
        self, rows: Sequence[tuple[NDArray[np.int32], Floats]], upper: Sequence[float]
    ) -> "LinearProgram":
        """Return the program with rows (columns, values) <= `upper` added."""
        ends = int(self.starts[-1]) + np.cumsum([len(at) for at, _ in rows], dtype=np.int32)
        return replace(
            self,
            row_lower=np.concatenate([self.row_lower, np.full(len(upper), -np.inf)]),
            row_upper=np.concatenate([self.row_upper, upper]),
            starts=np.concatenate([self.starts, ends]).astype(np.int32),
            columns=np.concatenate([self.columns, *(at for at, _ in rows)]),
            values=np.concatenate([self.values, *(values for _, values in rows)]),
        )

    def memory_row(self, memory: Memory, t: int) -> tuple[NDArray[np.int32], Floats]:
        """Return columns and values of the limit of segment `t`, in units of its scale."""
        use = np.zeros(self.num_labels)
        for u in np.flatnonzero((memory.first <= t) & (t < memory.last)).tolist():
            first = self.offsets[memory.nodes[u]]
            use[first : first + len(memory.amounts[u])] += memory.amounts[u] / memory.scales[t]
        at = np.flatnonzero(use)
        return at.astype(np.int32), use[at]


def linear_program(field: Field, scale: float) -> LinearProgram:
    """Return the local polytope of `field` without limits, costs divided by `scale`."""
    unary = [u / scale for u in field.unary]
    offsets = np.concatenate([[0], np.cumsum([len(u) for u in unary])]).astype(np.int64)
    num_labels = int(offsets[-1])
    rows: list[Ints] = []
    columns: list[Ints] = []
    values: list[Floats] = []
    pair_costs: list[Floats] = []
    pairs: list[PairColumns] = []
    first_row = first_column = 0
    for i, u in enumerate(unary):
        if len(u):
            rows.append(np.full(len(u), first_row))
            columns.append(np.arange(offsets[i], offsets[i + 1]))
            values.append(np.ones(len(u)))
            first_row += 1
    num_ones = first_row
    first_column = num_labels
    for (a, b), table in field.tables.items():
        table = table / scale
        least = table.min(axis=1)
        table = table - least[:, None]
        unary[a] = unary[a] + least
        least = table.min(axis=0)
        table = table - least[None, :]
        unary[b] = unary[b] + least
        class_a, distinct_a = _row_classes(table)
        class_b, distinct_b = _row_classes(np.ascontiguousarray(table.T))
        if len(distinct_a) == 1 or len(distinct_b) == 1:
            continue
        small = table[np.ix_(distinct_a, distinct_b)]
        p, q = np.nonzero(np.isfinite(small))
        y = np.arange(first_column, first_column + len(p))
        num_p, num_q = small.shape
        rows += [first_row + p, first_row + class_a, first_row + num_p + q, first_row + num_p + class_b]
        columns += [y, np.arange(offsets[a], offsets[a + 1]), y, np.arange(offsets[b], offsets[b + 1])]
        ones = np.ones(len(p))
        values += [ones, -np.ones(len(class_a)), ones, -np.ones(len(class_b))]
        pair_costs.append(small[p, q])
        place = np.full(small.shape, -1)
        place[p, q] = y
        pairs.append(PairColumns((a, b), place, class_a, class_b))
        first_column += len(p)
        first_row += num_p + num_q
    row = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    order = np.argsort(row, kind="stable")
    bounds = np.zeros(first_row)
    bounds[:num_ones] = 1.0
    return LinearProgram(
        np.concatenate([*unary, *pair_costs]) if unary else np.zeros(0),
        num_labels,
        offsets,
        bounds,
        bounds.copy(),
        np.concatenate([[0], np.cumsum(np.bincount(row, minlength=first_row))]).astype(np.int32),
        (np.concatenate(columns)[order] if columns else row).astype(np.int32),
        np.concatenate(values)[order] if values else np.zeros(0),
        field.constant,
        scale,
        tuple(pairs),
    )


def scale_of(field: Field) -> float:
    """Return problem units per unit of scaled cost: the largest spread of costs in a node or pair becomes 500 to 1000.

    It is a power of two, so scaling rounds nothing and integer costs stay exact.
    """
    spread = 0.0
    for costs in (*(u for u in field.unary if len(u)), *field.tables.values()):
        finite = costs[np.isfinite(costs)]
        if len(finite):
            spread = max(spread, float(finite.max() - finite.min()))
    return 2.0 ** math.ceil(math.log2(spread / 1000)) if spread > 0 else 1.0


def _row_classes(table: Floats) -> tuple[Ints, list[int]]:
    """Return the class of each row, equal rows being one class, and one row of each class."""
    seen: dict[bytes, int] = {}
    distinct: list[int] = []
    of = np.empty(len(table), np.int64)
    for s, row in enumerate(table):
        index = seen.setdefault(row.tobytes(), len(distinct))
        if index == len(distinct):
            distinct.append(s)
        of[s] = index
    return of, distinct
