"""Small linear programs over the tasks of a step."""

import math
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

from autopar.bounds.task_graph import Excerpt

SLACK = 1e-6
"""Relative: by how much what is found is lowered, for optima are exact to a tolerance."""

LARGE = 1500
"""Rows from which on an interior point is sought first, which takes a third of the time there, or less: the simplex
method takes as long to go on from a known optimum as from nothing."""


_STATUS = {int(own): own for own in highspy.HighsBasisStatus.__members__.values()}


Row = Mapping[int, float]
"""A sum of variables, by number, so many times each."""


DUAL, PRIMAL = 1, 4
"""Simplex methods, as HiGHS numbers them."""


class Basis(NamedTuple):
    """Where the simplex method ended: the status of each variable and of each row, as HiGHS numbers them."""

    variables: NDArray[np.int8]
    rows: NDArray[np.int8]


class Optimum(NamedTuple):
    """The least cost, the duals of the rows, the variables, and where it is; infinity and none if nothing is."""

    value: float
    duals: NDArray[np.float64]
    values: NDArray[np.float64]
    basis: Basis | None


class LeastProgram:
    """Minimises costs >= 0 of variables >= 0 under rows."""

    def __init__(self) -> None:
        self._index: list[Sequence[int]] = []
        self._values: list[Sequence[float]] = []
        self._least: list[float] = []
        self._most: list[float] = []

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self._least)

    def copy(self) -> "LeastProgram":
        """Return a program with the same rows."""
        other = LeastProgram()
        other._index, other._values = self._index.copy(), self._values.copy()
        other._least, other._most = self._least.copy(), self._most.copy()
        return other

    def add(self, row: Row, *, least: float = -math.inf, most: float = math.inf) -> None:
        """Add that a sum of variables by number, so many times each, is at least and at most something."""
        self._index.append(tuple(row))
        self._values.append(tuple(row.values()))
        self._least.append(least)
        self._most.append(most)

    def total(self, variables: Collection[int], total: float) -> None:
        """Add what some variables are together."""
        self.add(dict.fromkeys(variables, 1.0), least=total, most=total)

    def minimised(
        self, cost: Row, num_variables: int, start: Basis | None = None, *, is_reducible: bool = False
    ) -> Optimum:
        """Return the least cost.

        Args:
            cost: The cost.
            num_variables: Variables are numbered below that.
            start: Where a program had its optimum that has the first ones of these variables and rows; large programs
                are solved anew.
            is_reducible: Whether a large program is made smaller first, which pays where rows outnumber variables by
                far: most of the rows of cuts, say, say nothing.
        """
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
        highs.setOptionValue("run_crossover", "off")  # what costs least is asked, or prices, but for no vertex
        highs.passModel(model)
        is_large = len(self._least) >= LARGE
        if not _is_solved(highs, is_large, None if is_large else start, is_reducible=is_reducible):
            return Optimum(math.inf, np.zeros(0), np.zeros(0), None)
        solution, found = highs.getSolution(), highs.getBasis()
        value = float(highs.getInfo().objective_function_value)
        basis = None
        if found.valid:
            each = found.col_status, found.row_status
            basis = Basis(*(np.array(list(map(int, own)), dtype=np.int8) for own in each))
        return Optimum(value, np.array(solution.row_dual), np.array(solution.col_value), basis)


class _Way(StrEnum):
    """How a program may be solved: `WARM` goes on from a known optimum, `PRESOLVED` makes it smaller first."""

    WARM = "warm"
    SIMPLEX = "simplex"
    INTERIOR = "interior"
    PRESOLVED = "presolved"


_ALONE = _Way.SIMPLEX, _Way.INTERIOR, _Way.PRESOLVED
_LARGE = _Way.INTERIOR, _Way.SIMPLEX, _Way.PRESOLVED


def _is_solved(highs: highspy.Highs, is_large: bool, start: Basis | None, *, is_reducible: bool) -> bool:
    """Solve a program that has an optimum or no solution, and return whether it has one.

    Args:
        highs: What has the program.
        is_large: Whether an interior point is sought first.
        start: Where to go on, if it was solved before with fewer variables or rows.
        is_reducible: Whether it is made smaller before an interior point is sought.
    """
    ways = _LARGE if is_large else _ALONE if start is None else (_Way.WARM, *_ALONE)
    for way in ways:
        highs.setOptionValue("solver", "ipm" if way is _Way.INTERIOR else "simplex")
        # Elsewhere it takes as long as the rest, for nothing, unless all else gets stuck.
        shrinks = way is _Way.PRESOLVED or (way is _Way.INTERIOR and is_reducible)
        highs.setOptionValue("presolve", "on" if shrinks else "off")
        if way is _Way.WARM:
            assert start is not None, "what it goes on from"
            num_variables, num_rows = highs.getNumCol(), highs.getNumRow()
            highs.setBasis(_extended(start, num_variables, num_rows))
            more = len(start.variables) < num_variables  # then what was found still fulfils all rows
            highs.setOptionValue("simplex_strategy", PRIMAL if more else DUAL)
        highs.run()
        # An interior point may be missed where there is one: only the simplex method says that there is none. That may
        # get stuck where it goes on.
        if (status := highs.getModelStatus()) == highspy.HighsModelStatus.kOptimal:
            return True
        if status == highspy.HighsModelStatus.kInfeasible and way is not _Way.INTERIOR:
            return False
        highs.clearSolver()
        highs.setOptionValue("simplex_strategy", DUAL)
    raise AssertionError(f"no cost is below zero, but a program ended as {status}")


def _extended(start: Basis, num_variables: int, num_rows: int) -> highspy.HighsBasis:
    """Return a basis for HiGHS, in which further variables are 0, and further rows say nothing yet."""
    found = highspy.HighsBasis()
    found.col_status = [_STATUS[own] for own in start.variables.tolist()]
    found.col_status += [highspy.HighsBasisStatus.kLower] * (num_variables - len(start.variables))
    found.row_status = [_STATUS[own] for own in start.rows.tolist()]
    found.row_status += [highspy.HighsBasisStatus.kBasic] * (num_rows - len(start.rows))
    found.valid, found.alien = True, False
    return found


def add_order(
    program: LeastProgram,
    found: Excerpt,
    durations: Sequence[Row],
    step: int,
    *,
    overlap: bool,
    after: Sequence[Row] = (),
    hop: float = 0.0,
) -> None:
    """Add who waits for whom, of starts that are the first variables.

    Args:
        program: Added to.
        found: The tasks.
        durations: By node what it takes, as sums of variables.
        step: The variable that is the seconds of the step.
        overlap: Whether steps overlap: then one is no shorter than a group's tasks from the first to the last.
        after: By group what it takes after its last task, as sums of variables; nothing if not given.
        hop: What a message from one group to another takes.
    """
    taken = [{number: -factor for number, factor in own.items()} for own in durations]
    group_of = {node: group for group, run in enumerate(found.runs) for node in run.tolist()}
    # the later task of a pair is no earlier than the end of the first one
    for first, second in zip(found.first.tolist(), found.second.tolist(), strict=True):
        is_sent = group_of[first] != group_of[second]
        program.add({second: 1.0, first: -1.0, **taken[first]}, least=hop if is_sent else 0.0)
    # nor is the step shorter than a group's tasks from the first to the last, or than all until then
    for group, run in enumerate(found.runs):
        begin, last = int(run[0]), int(run[-1])
        row = {step: 1.0, last: -1.0, **taken[last]}
        if overlap:
            row[begin] = row.get(begin, 0.0) + 1.0
        row.update((number, -factor) for number, factor in (after[group] if after else {}).items())
        program.add(row, least=0.0)


def durations_of(found: Excerpt, stages: Sequence[Sequence[Row]]) -> list[dict[int, float]]:
    """Return by node what it takes, given the sums of variables that each pass of each stage takes."""
    taken = [dict(stages[stage][kind]) for stage, kind in zip(found.stage.tolist(), found.kind.tolist(), strict=True)]
    for counts in found.middles:
        own = dict[int, float]()
        for stage, kind in np.argwhere(counts).tolist():
            for number, factor in stages[stage][kind].items():
                own[number] = own.get(number, 0.0) + float(counts[stage, kind]) * factor
        taken.append(own)
    return taken
