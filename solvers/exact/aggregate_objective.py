"""Minimum of a convex piecewise-linear function of several sums over one choice, as an integer program.

    minimise  cost . y   such that   lhs y >= sum_f a_f (least_f + weights_f . v(x)),   y >= 0

Each *criterion* k is a sum v_k(x) of node and pair values. A choice has shares a_f of several *modes* f that sum to 1.
The rows express every sum and every maximum of sums of criteria. For x a convex combination of choices this is a linear
program, whose prices column generation finds (`autopar/bounds/column_generation.py`); here x is one choice. The prices
prove which labels and pairs a choice below a ceiling can contain (`survivors_below`), usually very few; branch and
bound solves the small program on them:

    x[i, s] in {0, 1}     label s of node i;     sum_s x[i, s] = 1
    z[e, p, q] >= 0       labels p and q of a pair e;     sum_q z[e, p, q] = x[a, p],  sum_p z[e, p, q] = x[b, q]

Criteria whose weights differ between modes have copies of x and z for each mode, which sum to a_f where x and z sum to
1, and over the modes to x and z.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solvers.backends import highs
from autopar.solvers.base import Budget
from autopar.solvers.bounds.local_polytope import LinearProgram
from autopar.solvers.model.graphical_model import Floats
from autopar.solvers.reductions.reduced_cost_fixing import Survivors

FEASIBILITY = 1e-9
"""Row tolerance: a row's violation may be multiplied by the number of microbatches of a step."""

Columns = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """Values a node or a pair adds to a criterion: numbers >= 0 per strategy, or per pair of strategies.

    Attributes:
        nodes: One node, or two different nodes.
        criterion: Index of the criterion.
        values: (strategies,) or (strategies of the first node, of the second); infinity is forbidden and adds nothing.
    """

    nodes: tuple[int, ...]
    criterion: int
    values: Floats


@dataclass(frozen=True, slots=True, eq=False)
class AggregateObjective:
    """A convex function of criteria; see the top of the module.

    Attributes:
        cost: (variables,) weights of y.
        lhs: (rows, variables).
        least: (rows, modes), the constants.
        weights: (rows, modes, criteria).
        terms: Values of the criteria.
        parts: Shares of modes are multiples of 1 / parts.
    """

    cost: Floats
    lhs: Floats
    least: Floats
    weights: Floats
    terms: tuple[Term, ...]
    parts: int = 1


@dataclass(frozen=True, slots=True)
class AggregateMinimum:
    """Result of a minimisation.

    Attributes:
        bound: Lower bound on the value of all surviving choices; infinity if there is none below the ceiling.
        choice: The best choice found; None if there is none.
    """

    bound: float
    choice: tuple[int, ...] | None


def minimise(objective: AggregateObjective, survivors: Survivors, ceiling: float, budget: Budget) -> AggregateMinimum:
    """Return the best surviving choice, and a lower bound on all of them.

    Args:
        objective: The function to minimise.
        survivors: Labels and pairs of the choices to consider.
        ceiling: Value from which on choices need not be found; the bound is then infinite, and valid up to the ceiling.
        budget: Work and time.
    """
    builder = _Builder(objective, survivors)
    outcome = highs.run(builder.program(), True, budget, ceiling, FEASIBILITY)
    choice = None if outcome.solution is None else builder.choice(outcome.solution)
    return AggregateMinimum(outcome.bound, choice)


class _Builder:
    """Builds the integer program."""

    def __init__(self, objective: AggregateObjective, survivors: Survivors) -> None:
        self._objective = objective
        self._modes = objective.least.shape[1]
        self._labels = [np.flatnonzero(own) for own in survivors.labels]
        self._survivors = survivors
        self._count = 0
        self._rows: list[tuple[Columns, Floats]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._split = (objective.weights != objective.weights[:, :1]).any(axis=(0, 1))
        # Per criterion and mode: the columns added up, with their coefficients.
        self._sums: dict[tuple[int, int], list[tuple[Columns, Floats]]] = {}

    def choice(self, solution: Floats) -> tuple[int, ...]:
        """Return the strategies of a solution."""
        return tuple(int(own[solution[at].argmax()]) for own, at in zip(self._labels, self._whole, strict=True))

    def program(self) -> LinearProgram:
        """Return the integer program."""
        objective = self._objective
        self._whole = [self._new_columns(len(own)) for own in self._labels]
        self._shares = self._new_columns(self._modes)
        num_whole = self._count
        for at in self._whole:
            self._add_row(at, 1.0, 1.0, 1.0)
        self._add_row(self._shares, 1.0, objective.parts, objective.parts)
        singles, pairs = self._grouped_terms()
        parts = self._mode_columns(singles, pairs)
        for node, own in singles.items():
            for criterion, values in own.items():
                self._add_to_criterion(criterion, parts.get(node) or [self._whole[node]], values)
        for (a, b), own in pairs.items():
            self._add_pair(a, b, own, parts)
        y = self._new_columns(len(objective.cost))
        self._add_criterion_rows(y)
        cost = np.zeros(self._count)
        cost[y] = objective.cost
        upper = np.full(self._count, np.inf)
        upper[:num_whole] = 1.0
        upper[self._shares] = objective.parts
        return self._assemble(cost, upper, num_whole)

    def _grouped_terms(self) -> tuple[dict[int, dict[int, Floats]], dict[tuple[int, int], dict[int, Floats]]]:
        """Return the surviving terms by node and by pair; separable pair terms are moved to their nodes."""
        singles: dict[int, dict[int, Floats]] = {}
        pairs: dict[tuple[int, int], dict[int, Floats]] = {at: {} for at in self._survivors.pairs}
        for term in self._objective.terms:
            nodes, values = term.nodes, np.where(np.isfinite(term.values), term.values, 0.0)
            if len(nodes) == 2:
                a, b = sorted(nodes)
                table = values if nodes == (a, b) else values.T
                of_pair = pairs.setdefault((a, b), {})
                of_pair[term.criterion] = of_pair.get(term.criterion, 0.0) + self._kept_entries(table, a, b)
            else:
                _add_values(singles, nodes[0], term.criterion, values[self._labels[nodes[0]]])
        apart = {at: own for at, own in pairs.items() if not self._permitted(*at).all() or not _are_separable(own)}
        for at in pairs.keys() - apart.keys():
            for criterion, table in pairs[at].items():
                _add_values(singles, at[0], criterion, table[:, 0])
                _add_values(singles, at[1], criterion, table[0] - table[0, 0])
        return singles, {at: apart[at] for at in sorted(apart)}

    def _kept_entries(self, table: Floats, a: int, b: int) -> Floats:
        return np.asarray(table[np.ix_(self._labels[a], self._labels[b])])

    def _permitted(self, a: int, b: int) -> NDArray[np.bool_]:
        return np.asarray(self._survivors.pair(a, b)[np.ix_(self._labels[a], self._labels[b])])

    def _mode_columns(
        self, singles: dict[int, dict[int, Floats]], pairs: dict[tuple[int, int], dict[int, Floats]]
    ) -> dict[int, list[Columns]]:
        """Return the columns per mode, for nodes with a criterion whose weights differ between modes."""
        if self._modes == 1:
            return {}
        nodes = {node for node, own in singles.items() if self._split[list(own)].any()}
        nodes |= {node for at, own in pairs.items() if own and self._split[list(own)].any() for node in at}
        found = {}
        for node in sorted(nodes):
            whole = self._whole[node]
            parts = [self._new_columns(len(whole)) for _ in range(self._modes)]
            for mode, at in enumerate(parts):
                columns = np.append(at, self._shares[mode])
                self._add_row(columns, np.append(np.ones(len(at)), -1.0 / self._objective.parts), 0.0, 0.0)
            for label, column in enumerate(whole.tolist()):
                self._add_row(np.array([*(at[label] for at in parts), column]), [*[1.0] * self._modes, -1.0], 0.0, 0.0)
            found[node] = parts
        return found

    def _add_pair(self, a: int, b: int, own: dict[int, Floats], parts: dict[int, list[Columns]]) -> None:
        """Add the columns and marginalisation rows of a pair, and its values."""
        first, second = np.nonzero(self._permitted(a, b))
        apart = bool(own) and self._modes > 1 and bool(self._split[list(own)].any())
        ends = list(zip(parts[a], parts[b], strict=True)) if apart else [(self._whole[a], self._whole[b])]
        found = []
        for ones, others in ends:
            at = self._new_columns(len(first))
            for side, columns in ((first, ones), (second, others)):
                for label, column in enumerate(columns.tolist()):
                    mine = at[side == label]
                    self._add_row(np.append(mine, column), np.append(np.ones(len(mine)), -1.0), 0.0, 0.0)
            found.append(at)
        for criterion, table in own.items():
            self._add_to_criterion(criterion, found, table[first, second])

    def _add_to_criterion(self, criterion: int, columns: Sequence[Columns], values: Floats) -> None:
        """Add values of columns, common or per mode, to a criterion."""
        for mode, at in enumerate(columns):
            used = values != 0
            if used.any():
                place = mode if self._split[criterion] else 0
                self._sums.setdefault((criterion, place), []).append((at[used], values[used]))

    def _add_criterion_rows(self, y: Columns) -> None:
        """Add a column per criterion sum, and the rows of the objective."""
        objective = self._objective
        sums: list[tuple[Columns, Floats]] = [(np.zeros(0, np.int64), np.zeros(0)) for _ in objective.least]
        for (criterion, mode), entries in sorted(self._sums.items(), key=lambda item: item[0]):
            columns = np.concatenate([at for at, _ in entries])
            values = np.concatenate([own for _, own in entries])
            unit = float(np.abs(values).max())
            total = self._new_columns(1)
            self._add_row(np.append(columns, total), np.append(values / unit, -1.0), 0.0, 0.0)
            for row in np.flatnonzero(objective.weights[:, mode, criterion]).tolist():
                at, own = sums[row]
                sums[row] = np.append(at, total), np.append(own, -objective.weights[row, mode, criterion] * unit)
        for row, (at, own) in enumerate(sums):
            used = np.flatnonzero(objective.lhs[row])
            columns = np.concatenate([y[used], at, self._shares])
            shares = -objective.least[row] / objective.parts
            self._add_row(columns, np.concatenate([objective.lhs[row, used], own, shares]), 0.0, np.inf)

    def _new_columns(self, number: int) -> Columns:
        self._count += number
        return np.arange(self._count - number, self._count)

    def _add_row(self, columns: Columns, values: Floats | Sequence[float] | float, lower: float, upper: float) -> None:
        self._rows.append((columns, np.broadcast_to(np.asarray(values, dtype=np.float64), columns.shape)))
        self._lower.append(lower)
        self._upper.append(upper)

    def _assemble(self, cost: Floats, upper: Floats, num_whole: int) -> LinearProgram:
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


def _add_values(singles: dict[int, dict[int, Floats]], node: int, criterion: int, values: Floats) -> None:
    own = singles.setdefault(node, {})
    own[criterion] = own[criterion] + values if criterion in own else values


def _are_separable(tables: dict[int, Floats]) -> bool:
    """Return whether each table is separable: a number per row plus a number per column."""
    return all(
        np.allclose(table - table[:, :1], table[:1] - table[0, 0], rtol=0.0, atol=1e-12 * float(table.max(initial=0.0)))
        for table in tables.values()
    )
