"""The local polytope on CP-SAT, scaled to integers so that its bound stays valid.

Costs and uses are rounded down, limits up: the scaled problem is a relaxation, so its bound holds for the original. One
worker with `linearization_level=2` closes these problems; CP-SAT's default portfolio on few cores does not.
"""

import math

import numpy as np
from ortools.sat.python import cp_model

from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.backends.lazy_rows import MipSolver, Outcome
from autopar.solvers.base import Budget
from autopar.solvers.bounds.local_polytope import LinearProgram

_COST_TOTAL = 2.0**46
"""Largest sum of scaled costs: below 2^53, above which CP-SAT's linear relaxation is not exact."""
_ROW_TOTAL = 2.0**40
"""Largest sum of a scaled row."""


class CpSat(MipSolver):
    """Exact up to the scaling error of 2^-46 of the sum of all costs."""

    def solve_program(self, program: LinearProgram, integer: bool, budget: Budget) -> Outcome:
        """Solve one program; CP-SAT solves the integer program whether `integer` is set or not."""
        model = cp_model.CpModel()
        columns = [model.new_bool_var("") for _ in program.cost]
        largest = float(np.abs(program.cost).sum())
        factor = 2.0 ** math.floor(math.log2(_COST_TOTAL / largest)) if largest > 0 else 1.0
        costs = np.floor(program.cost * factor).astype(np.int64)
        model.minimize(cp_model.LinearExpr.weighted_sum(columns, costs.tolist()))
        num_columns_of = np.diff(program.starts)
        for row in range(len(num_columns_of)):
            inside = slice(int(program.starts[row]), int(program.starts[row + 1]))
            terms = [columns[c] for c in program.columns[inside].tolist()]
            values, upper = program.values[inside], float(program.row_upper[row])
            if program.row_lower[row] == upper:
                model.add(cp_model.LinearExpr.weighted_sum(terms, values.astype(np.int64).tolist()) == int(upper))
            else:
                scale = _ROW_TOTAL / max(1e-300, float(np.abs(values).sum()), abs(upper))
                scaled = np.floor(values * scale).astype(np.int64)
                model.add(cp_model.LinearExpr.weighted_sum(terms, scaled.tolist()) <= math.ceil(upper * scale))
        if program.start is not None:
            for column, value in zip(columns, program.start.tolist(), strict=True):
                model.add_hint(column, round(value))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.linearization_level = 2
        solver.parameters.relative_gap_limit = OPTIMALITY_TOLERANCE / 4
        if math.isfinite(budget.remaining):
            solver.parameters.max_time_in_seconds = budget.remaining
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return Outcome(True, None, math.inf)
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        solution = np.array([float(solver.value(c)) for c in columns]) if found else None
        bound = solver.best_objective_bound / factor * program.scale + program.constant
        return Outcome(status == cp_model.OPTIMAL, solution, bound)
