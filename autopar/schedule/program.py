"""Small linear programs over the tasks of a step."""

import math
from collections.abc import Collection, Mapping, Sequence

import highspy
import numpy as np
from numpy.typing import NDArray

from autopar.schedule.excerpt import Excerpt

SLACK = 1e-6
"""Relative: by how much what is found is lowered, for optima are exact to a tolerance."""

LARGE = 1500
"""Rows from which on an interior point is sought first, which takes a third of the time there."""


class LeastProgram:
    """Minimises costs >= 0 of variables >= 0 under rows."""

    def __init__(self) -> None:
        self._index: list[Sequence[int]] = []
        self._values: list[Sequence[float]] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def add(self, row: Mapping[int, float], *, least: float = -math.inf, most: float = math.inf) -> None:
        """Add that a sum of variables by number, so many times each, is at least and at most something."""
        self._index.append(tuple(row))
        self._values.append(tuple(row.values()))
        self._least.append(least)
        self._most.append(most)

    def total(self, variables: Collection[int], total: float) -> None:
        """Add what some variables are together."""
        self.add(dict.fromkeys(variables, 1.0), least=total, most=total)

    def minimised(self, cost: Mapping[int, float], num_variables: int) -> tuple[float, NDArray[np.float64]]:
        """Return the least cost and the duals of the rows; infinity and none if nothing fulfils them."""
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
        highs.setOptionValue("presolve", "off")  # it takes as long as the rest, for nothing
        is_large = len(self._least) >= LARGE
        highs.setOptionValue("solver", "ipm" if is_large else "simplex")
        highs.passModel(model)
        highs.run()
        if is_large and highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            # An interior point may be missed where there is one: only the simplex method says that there is none.
            highs.clearSolver()
            highs.setOptionValue("solver", "simplex")
            highs.run()
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return math.inf, np.zeros(0)
        assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal, "no cost is below zero"
        return float(highs.getInfo().objective_function_value), np.array(highs.getSolution().row_dual)


def add_order(
    program: LeastProgram, found: Excerpt, durations: Sequence[Mapping[int, float]], step: int, *, overlap: bool
) -> None:
    """Add who waits for whom, of starts that are the first variables.

    Args:
        program: Added to.
        found: The tasks.
        durations: By node what it takes, as sums of variables.
        step: The variable that is the seconds of the step.
        overlap: Whether steps overlap: then one is no shorter than a group's tasks from the first to the last.
    """
    taken = [{number: -factor for number, factor in own.items()} for own in durations]
    # the later task of a pair is no earlier than the end of the first one
    for first, second in zip(found.first.tolist(), found.second.tolist(), strict=True):
        program.add({second: 1.0, first: -1.0, **taken[first]}, least=0.0)
    # nor is the step shorter than a group's tasks from the first to the last, or than all until then
    for begin, last in zip(found.begins.tolist(), found.ends.tolist(), strict=True):
        row = {step: 1.0, last: -1.0, **taken[last]}
        if overlap:
            row[begin] = row.get(begin, 0.0) + 1.0
        program.add(row, least=0.0)


def durations_of(found: Excerpt, stages: Sequence[Sequence[Mapping[int, float]]]) -> list[dict[int, float]]:
    """Return by node what it takes, given the sums of variables that each pass of each stage takes."""
    taken = [dict(stages[stage][kind]) for stage, kind in zip(found.stage.tolist(), found.kind.tolist(), strict=True)]
    for counts in found.middles:
        own = dict[int, float]()
        for stage, kind in np.argwhere(counts).tolist():
            for number, factor in stages[stage][kind].items():
                own[number] = own.get(number, 0.0) + float(counts[stage, kind]) * factor
        taken.append(own)
    return taken
