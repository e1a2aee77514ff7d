"""Small linear programs over the tasks of a step, solved by HiGHS.

Look here for how the critical path of a step is written as a linear program (Kelley and Walker, 1959), and for how
these programs are solved: warm started, by simplex or by an interior point.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

from autopar.bounds.task_graph import Excerpt

SLACK = 1e-6
"""Relative amount by which an optimal value is lowered before it counts as a bound: solvers are exact to a
tolerance."""

LARGE = 1500
"""Rows from which on an interior point method is tried first. It takes at most a third of the time of the simplex
method there, which gains nothing from a warm start at this size."""


_STATUS = {int(status): status for status in highspy.HighsBasisStatus.__members__.values()}


Row = Mapping[int, float]
"""A linear expression: the factor of each variable, by the number of the variable."""


DUAL, PRIMAL = 1, 4
"""Simplex strategies, as HiGHS numbers them."""


class Basis(NamedTuple):
    """Final basis of the simplex method: the status of each variable and of each row, as HiGHS numbers them."""

    variables: NDArray[np.int8]
    rows: NDArray[np.int8]


class Optimum(NamedTuple):
    """Optimal value, row duals, variables, and basis; infinity, empty arrays and None if infeasible."""

    value: float
    duals: NDArray[np.float64]
    values: NDArray[np.float64]
    basis: Basis | None


class SparseLP:
    """A linear program that minimises nonnegative costs of nonnegative variables under rows."""

    def __init__(self) -> None:
        self._index: list[Sequence[int]] = []
        self._values: list[Sequence[float]] = []
        self._least: list[float] = []
        self._most: list[float] = []

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self._least)

    def copy(self) -> "SparseLP":
        """Return a program with the same rows, to which further rows can be added."""
        other = SparseLP()
        other._index, other._values = self._index.copy(), self._values.copy()
        other._least, other._most = self._least.copy(), self._most.copy()
        return other

    def add(self, row: Row, *, least: float = -math.inf, most: float = math.inf) -> None:
        """Add the row `least <= sum of factor * variable <= most`."""
        self._index.append(tuple(row))
        self._values.append(tuple(row.values()))
        self._least.append(least)
        self._most.append(most)

    def fix_sum(self, variables: Collection[int], value: float) -> None:
        """Add the row that fixes the sum of some variables to a value."""
        self.add(dict.fromkeys(variables, 1.0), least=value, most=value)

    def minimise(
        self, cost: Row, num_variables: int, start: Basis | None = None, *, is_reducible: bool = False
    ) -> Optimum:
        """Minimise a cost over the rows.

        Args:
            cost: Cost per variable; 0 for variables that are not in it.
            num_variables: Variables are numbered from 0 to `num_variables - 1`.
            start: Final basis of a program with the first of these variables and rows; ignored for large programs.
            is_reducible: Whether presolve runs before an interior point method. It pays off if rows outnumber variables
                by far, as in a cut LP, most of whose rows are not binding.
        """
        found = self._solve(cost, num_variables, start, is_reducible=is_reducible)
        assert found is not None, "costs are nonnegative, but no method of HiGHS ended with an answer"
        return found

    def bound(self, cost: Row, num_variables: int) -> Optimum:
        """Minimise a cost as `minimise`, or return the zero dual if no method of HiGHS ends with an answer.

        Rounding can keep all of them from it. The zero dual is feasible, as costs and variables are nonnegative: the
        least cost is at least 0.
        """
        found = self._solve(cost, num_variables, None, is_reducible=False)
        return Optimum(0.0, np.zeros(self.num_rows), np.zeros(num_variables), None) if found is None else found

    def _solve(self, cost: Row, num_variables: int, start: Basis | None, *, is_reducible: bool) -> Optimum | None:
        """Return what `minimise` returns, None if no method of HiGHS ends with an answer."""
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = num_variables, len(self._least)
        costs = np.zeros(num_variables)
        costs[list(cost)] = list(cost.values())
        model.col_cost_ = costs
        model.col_lower_, model.col_upper_ = np.zeros(num_variables), np.full(num_variables, highspy.kHighsInf)
        model.row_lower_, model.row_upper_ = np.array(self._least), np.array(self._most)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, self._index)]).astype(np.int32)
        model.a_matrix_.index_ = np.array([number for row in self._index for number in row], dtype=np.int32)
        model.a_matrix_.value_ = np.array([factor for row in self._values for factor in row])
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("run_crossover", "off")  # callers need the value and the duals, not a vertex
        highs.passModel(model)
        is_large = len(self._least) >= LARGE
        is_feasible = _has_optimum(highs, is_large, None if is_large else start, is_reducible=is_reducible)
        if is_feasible is None:
            return None
        if not is_feasible:
            return Optimum(math.inf, np.zeros(0), np.zeros(0), None)
        solution, found_basis = highs.getSolution(), highs.getBasis()
        value = float(highs.getInfo().objective_function_value)
        basis = None
        if found_basis.valid:
            statuses = found_basis.col_status, found_basis.row_status
            basis = Basis(*(np.array(list(map(int, status)), dtype=np.int8) for status in statuses))
        return Optimum(value, np.array(solution.row_dual), np.array(solution.col_value), basis)


class _Method(StrEnum):
    """How HiGHS solves a program: `WARM` is simplex from a known basis, `PRESOLVED` is simplex after presolve.

    These are dual but for new variables after a warm start. Dual simplex may end without an answer on programs that are
    infeasible, which `PRIMAL` simplex proves.
    """

    WARM = "warm"
    SIMPLEX = "simplex"
    INTERIOR = "interior"
    PRESOLVED = "presolved"
    PRIMAL = "primal"


_METHODS = _Method.SIMPLEX, _Method.INTERIOR, _Method.PRESOLVED, _Method.PRIMAL
_METHODS_IF_LARGE = _Method.INTERIOR, _Method.SIMPLEX, _Method.PRESOLVED, _Method.PRIMAL


def _has_optimum(highs: highspy.Highs, is_large: bool, start: Basis | None, *, is_reducible: bool) -> bool | None:
    """Solve a program that is bounded below, and return whether it is feasible; None if no method says.

    Methods are tried in turn until one of them ends with an optimum or a proof of infeasibility.

    Args:
        highs: Holds the program.
        is_large: Whether an interior point method is tried first.
        start: Final basis of a program with fewer variables or rows, if there is one.
        is_reducible: Whether presolve runs before an interior point method.
    """
    methods = _METHODS_IF_LARGE if is_large else _METHODS if start is None else (_Method.WARM, *_METHODS)
    for method in methods:
        highs.setOptionValue("solver", "ipm" if method is _Method.INTERIOR else "simplex")
        # Otherwise presolve takes as long as the solver saves; it is the last resort where the other methods fail.
        presolves = method is _Method.PRESOLVED or (method is _Method.INTERIOR and is_reducible)
        highs.setOptionValue("presolve", "on" if presolves else "off")
        if method is _Method.PRIMAL:
            highs.setOptionValue("simplex_strategy", PRIMAL)
        if method is _Method.WARM:
            assert start is not None, "a warm start has a basis"
            num_variables, num_rows = highs.getNumCol(), highs.getNumRow()
            highs.setBasis(_extended_basis(start, num_variables, num_rows))
            has_new_variables = len(start.variables) < num_variables  # new variables keep the basis primal feasible
            highs.setOptionValue("simplex_strategy", PRIMAL if has_new_variables else DUAL)
        highs.run()
        # An interior point method may miss a feasible point: only the simplex method proves infeasibility. A warm
        # started simplex method may end without an answer.
        status = highs.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal:
            return True
        if status == highspy.HighsModelStatus.kInfeasible and method is not _Method.INTERIOR:
            return False
        highs.clearSolver()
        highs.setOptionValue("simplex_strategy", DUAL)
    return None


def _extended_basis(start: Basis, num_variables: int, num_rows: int) -> highspy.HighsBasis:
    """Return a HiGHS basis with further variables at their lower bound and further rows basic."""
    basis = highspy.HighsBasis()
    basis.col_status = [_STATUS[status] for status in start.variables.tolist()]
    basis.col_status += [highspy.HighsBasisStatus.kLower] * (num_variables - len(start.variables))
    basis.row_status = [_STATUS[status] for status in start.rows.tolist()]
    basis.row_status += [highspy.HighsBasisStatus.kBasic] * (num_rows - len(start.rows))
    basis.valid, basis.alien = True, False
    return basis


def add_precedences(
    program: SparseLP,
    graph: Excerpt,
    durations: Sequence[Row],
    step: int,
    *,
    overlap: bool,
    after: Sequence[Row] = (),
    hop: float = 0.0,
) -> None:
    """Add the precedence rows of a step, whose first variables are the starts of the nodes.

    ```text
    start_v >= start_u + duration_u (+ hop)             v waits for u
    T       >= start_last + duration_last + after       for each group; less start_first where steps overlap
    ```

    Args:
        program: The program to add rows to.
        graph: The tasks and their precedences.
        durations: Duration of each node, as a linear expression in the variables.
        step: Number of the variable T, the seconds of the step.
        overlap: Whether consecutive steps overlap: then T is at least each group's time from its first to its last
            task.
        after: Seconds of each group after its last task, as linear expressions; none if not given.
        hop: Seconds of a message from one group to another.
    """
    negated = [{number: -factor for number, factor in duration.items()} for duration in durations]
    group_of = {node: group for group, nodes in enumerate(graph.order_of_group) for node in nodes.tolist()}
    for predecessor, successor in zip(graph.predecessors.tolist(), graph.successors.tolist(), strict=True):
        is_sent = group_of[predecessor] != group_of[successor]
        program.add({successor: 1.0, predecessor: -1.0, **negated[predecessor]}, least=hop if is_sent else 0.0)
    for group, nodes in enumerate(graph.order_of_group):
        first, last = int(nodes[0]), int(nodes[-1])
        row = {step: 1.0, last: -1.0, **negated[last]}
        if overlap:
            row[first] = row.get(first, 0.0) + 1.0
        row.update((number, -factor) for number, factor in (after[group] if after else {}).items())
        program.add(row, least=0.0)


def durations_of(graph: Excerpt, stages: Sequence[Sequence[Row]]) -> list[dict[int, float]]:
    """Duration of each node of an excerpt as a linear expression.

    Args:
        graph: The excerpt.
        stages: For each stage and pass the duration of one task, as a linear expression in the variables.
    """
    durations = [
        dict(stages[stage][kind]) for stage, kind in zip(graph.stage.tolist(), graph.kind.tolist(), strict=True)
    ]
    for counts in graph.aggregates:
        duration = dict[int, float]()
        for stage, kind in np.argwhere(counts).tolist():
            for number, factor in stages[stage][kind].items():
                duration[number] = duration.get(number, 0.0) + float(counts[stage, kind]) * factor
        durations.append(duration)
    return durations
