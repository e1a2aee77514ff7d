"""The least of a convex function of several sums over one choice: a program of whole numbers.

Each *criterion* k is a sum of numbers of single nodes and of pairs, v_k(x). In one of several *modes* f, of which a
choice has shares a_f that sum to 1, its rows are

    minimise  cost . y   such that   lhs y >= sum_f a_f (least_f + weights_f . v(x)),   y >= 0

which says every sum and every maximum of sums of criteria. With x allowed to be a mean of choices it is a linear
program (column generation finds its prices); here x is one choice. What no choice below a ceiling consists of is known
from these prices (`below`), and mostly that is nearly everything: the rest is a small program for branch and bound.

    x[i, s] in {0, 1}     label s of node i;     sum_s x[i, s] = 1
    z[e, p, q] >= 0       labels p and q of a pair e;     sum_q z[e, p, q] = x[a, p],  sum_p z[e, p, q] = x[b, q]

Criteria whose weights differ from mode to mode have columns of x and z for each mode, which sum to a_f where those of
a choice sum to 1, and to the x and z of the choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solvers.backends import highs
from autopar.solvers.base import Budget
from autopar.solvers.bounds.local_polytope import LinearProgram
from autopar.solvers.model.graphical_model import Floats
from autopar.solvers.reductions.reduced_cost_fixing import Left

FEASIBILITY = 1e-9
"""By how much rows may be broken: what a row is short of may count as often as a step has microbatches."""

Columns = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """What a node or a pair adds to a criterion: numbers >= 0 per strategy, or per pair of strategies.

    Attributes:
        nodes: One node, or two that differ.
        criterion: Number of the criterion.
        values: (strategies,) or (strategies of the first node, of the second); infinity is forbidden and adds nothing.
    """

    nodes: tuple[int, ...]
    criterion: int
    values: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Composite:
    """A convex function of criteria; see the top of the module.

    Attributes:
        cost: (variables,) weights of y.
        lhs: (rows, variables).
        least: (rows, modes).
        weights: (rows, modes, criteria).
        terms: What criteria consist of.
        parts: Shares of modes are multiples of 1 / parts.
    """

    cost: Floats
    lhs: Floats
    least: Floats
    weights: Floats
    terms: tuple[Term, ...]
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Least:
    """What is known of the least value.

    Attributes:
        bound: No choice among those left has less; infinity if there is none below the ceiling.
        choice: The best one found; None if there is none.
    """

    bound: float
    choice: tuple[int, ...] | None


def minimise(composite: Composite, left: Left, ceiling: float, budget: Budget) -> Least:
    """Return the best choice among those left, and a bound on all of them.

    Args:
        composite: What to minimise.
        left: What choices consist of.
        ceiling: Choices of a higher value need not be found; the bound is then infinite, and true up to there.
        budget: Work and time.
    """
    builder = _Builder(composite, left)
    outcome = highs.run(builder.program(), True, budget, ceiling, FEASIBILITY)
    choice = None if outcome.solution is None else builder.choice(outcome.solution)
    return Least(outcome.bound, choice)


class _Builder:
    """Writes the program."""

    def __init__(self, composite: Composite, left: Left) -> None:
        self._composite = composite
        self._modes = composite.least.shape[1]
        self._labels = [np.flatnonzero(own) for own in left.labels]
        self._left = left
        self._count = 0
        self._rows: list[tuple[Columns, Floats]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._split = (composite.weights != composite.weights[:, :1]).any(axis=(0, 1))
        # Per criterion and mode the columns it adds up, and how much of each.
        self._sums: dict[tuple[int, int], list[tuple[Columns, Floats]]] = {}

    def choice(self, solution: Floats) -> tuple[int, ...]:
        """Return the strategies of a solution."""
        return tuple(int(own[solution[at].argmax()]) for own, at in zip(self._labels, self._whole, strict=True))

    def program(self) -> LinearProgram:
        """Return the program."""
        composite = self._composite
        self._whole = [self._columns(len(own)) for own in self._labels]
        self._shares = self._columns(self._modes)
        num_whole = self._count
        for at in self._whole:
            self._row(at, 1.0, 1.0, 1.0)
        self._row(self._shares, 1.0, composite.parts, composite.parts)
        singles, pairs = self._grouped()
        parts = self._parts(singles, pairs)
        for node, own in singles.items():
            for criterion, values in own.items():
                self._add(criterion, parts.get(node) or [self._whole[node]], values)
        for (a, b), own in pairs.items():
            self._pair(a, b, own, parts)
        y = self._columns(len(composite.cost))
        self._write(y)
        cost = np.zeros(self._count)
        cost[y] = composite.cost
        upper = np.full(self._count, np.inf)
        upper[:num_whole] = 1.0
        upper[self._shares] = composite.parts
        return self._assembled(cost, upper, num_whole)

    def _grouped(self) -> tuple[dict[int, dict[int, Floats]], dict[tuple[int, int], dict[int, Floats]]]:
        """Return what is left of the terms, by node and by pair; what is a sum of both sides goes to the nodes."""
        singles: dict[int, dict[int, Floats]] = {}
        pairs: dict[tuple[int, int], dict[int, Floats]] = {at: {} for at in self._left.pairs}
        for term in self._composite.terms:
            nodes, values = term.nodes, np.where(np.isfinite(term.values), term.values, 0.0)
            if len(nodes) == 2:
                a, b = sorted(nodes)
                table = values if nodes == (a, b) else values.T
                of_pair = pairs.setdefault((a, b), {})
                of_pair[term.criterion] = of_pair.get(term.criterion, 0.0) + self._part(table, a, b)
            else:
                _count_in(singles, nodes[0], term.criterion, values[self._labels[nodes[0]]])
        apart = {at: own for at, own in pairs.items() if not self._permitted(*at).all() or not _are_sums(own)}
        for at in pairs.keys() - apart.keys():
            for criterion, table in pairs[at].items():
                _count_in(singles, at[0], criterion, table[:, 0])
                _count_in(singles, at[1], criterion, table[0] - table[0, 0])
        return singles, {at: apart[at] for at in sorted(apart)}

    def _part(self, table: Floats, a: int, b: int) -> Floats:
        return np.asarray(table[np.ix_(self._labels[a], self._labels[b])])

    def _permitted(self, a: int, b: int) -> NDArray[np.bool_]:
        return np.asarray(self._left.pair(a, b)[np.ix_(self._labels[a], self._labels[b])])

    def _parts(
        self, singles: dict[int, dict[int, Floats]], pairs: dict[tuple[int, int], dict[int, Floats]]
    ) -> dict[int, list[Columns]]:
        """Return the columns of each mode, of the nodes that are told apart by mode."""
        if self._modes == 1:
            return {}
        nodes = {node for node, own in singles.items() if self._split[list(own)].any()}
        nodes |= {node for at, own in pairs.items() if own and self._split[list(own)].any() for node in at}
        found = {}
        for node in sorted(nodes):
            whole = self._whole[node]
            parts = [self._columns(len(whole)) for _ in range(self._modes)]
            for mode, at in enumerate(parts):
                columns = np.append(at, self._shares[mode])
                self._row(columns, np.append(np.ones(len(at)), -1.0 / self._composite.parts), 0.0, 0.0)
            for label, column in enumerate(whole.tolist()):
                self._row(np.array([*(at[label] for at in parts), column]), [*[1.0] * self._modes, -1.0], 0.0, 0.0)
            found[node] = parts
        return found

    def _pair(self, a: int, b: int, own: dict[int, Floats], parts: dict[int, list[Columns]]) -> None:
        """Write the columns of a pair, and its numbers."""
        first, second = np.nonzero(self._permitted(a, b))
        apart = bool(own) and self._modes > 1 and bool(self._split[list(own)].any())
        ends = list(zip(parts[a], parts[b], strict=True)) if apart else [(self._whole[a], self._whole[b])]
        found = []
        for ones, others in ends:
            at = self._columns(len(first))
            for side, columns in ((first, ones), (second, others)):
                for label, column in enumerate(columns.tolist()):
                    mine = at[side == label]
                    self._row(np.append(mine, column), np.append(np.ones(len(mine)), -1.0), 0.0, 0.0)
            found.append(at)
        for criterion, table in own.items():
            self._add(criterion, found, table[first, second])

    def _add(self, criterion: int, columns: Sequence[Columns], values: Floats) -> None:
        """Count values of columns, given whole or by mode, in a criterion."""
        for mode, at in enumerate(columns):
            used = values != 0
            if used.any():
                place = mode if self._split[criterion] else 0
                self._sums.setdefault((criterion, place), []).append((at[used], values[used]))

    def _write(self, y: Columns) -> None:
        """Write the criteria and the rows."""
        composite = self._composite
        sums: list[tuple[Columns, Floats]] = [(np.zeros(0, np.int64), np.zeros(0)) for _ in composite.least]
        for (criterion, mode), entries in sorted(self._sums.items(), key=lambda item: item[0]):
            columns = np.concatenate([at for at, _ in entries])
            values = np.concatenate([own for _, own in entries])
            unit = float(np.abs(values).max())
            total = self._columns(1)
            self._row(np.append(columns, total), np.append(values / unit, -1.0), 0.0, 0.0)
            for row in np.flatnonzero(composite.weights[:, mode, criterion]).tolist():
                at, own = sums[row]
                sums[row] = np.append(at, total), np.append(own, -composite.weights[row, mode, criterion] * unit)
        for row, (at, own) in enumerate(sums):
            used = np.flatnonzero(composite.lhs[row])
            columns = np.concatenate([y[used], at, self._shares])
            shares = -composite.least[row] / composite.parts
            self._row(columns, np.concatenate([composite.lhs[row, used], own, shares]), 0.0, np.inf)

    def _columns(self, number: int) -> Columns:
        self._count += number
        return np.arange(self._count - number, self._count)

    def _row(self, columns: Columns, values: Floats | Sequence[float] | float, lower: float, upper: float) -> None:
        self._rows.append((columns, np.broadcast_to(np.asarray(values, dtype=np.float64), columns.shape)))
        self._lower.append(lower)
        self._upper.append(upper)

    def _assembled(self, cost: Floats, upper: Floats, num_whole: int) -> LinearProgram:
        used = [values != 0 for _, values in self._rows]
        columns = [at[own] for (at, _), own in zip(self._rows, used, strict=True)]
        values = [of[own] for (_, of), own in zip(self._rows, used, strict=True)]
        return LinearProgram(
            cost,
            num_whole,
            np.cumsum([0, *map(len, self._whole)]),
            np.array(self._lower),
            np.array(self._upper),
            np.cumsum([0, *map(len, columns)]).astype(np.int32),
            np.concatenate(columns).astype(np.int32),
            np.concatenate(values),
            0.0,
            1.0,
            (),
            upper=upper,
        )


def _count_in(singles: dict[int, dict[int, Floats]], node: int, criterion: int, values: Floats) -> None:
    own = singles.setdefault(node, {})
    own[criterion] = own[criterion] + values if criterion in own else values


def _are_sums(tables: dict[int, Floats]) -> bool:
    """Whether all tables are a number per row plus a number per column."""
    return all(
        np.allclose(table - table[:, :1], table[:1] - table[0, 0], rtol=0.0, atol=1e-12 * float(table.max(initial=0.0)))
        for table in tables.values()
    )
