"""The local polytope on the CBC binary bundled with PuLP.

PuLP's `status` calls an incumbent at the time limit "Optimal"; `sol_status` distinguishes the two. CBC's bound is not
passed on, so a run that hit its limit proves no bound.
"""

import math

import numpy as np
import pulp

from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.backends.lazy_rows import MipSolver, Outcome
from autopar.solvers.base import Budget
from autopar.solvers.bounds.local_polytope import LinearProgram


class PulpCbc(MipSolver):
    """Exact: the CBC bundled with PuLP."""

    def solve_program(self, program: LinearProgram, integer: bool, budget: Budget) -> Outcome:
        """Solve one program."""
        model = pulp.LpProblem("local_polytope", pulp.LpMinimize)
        columns = [
            model.add_variable(f"c{i}", 0, 1, "Integer" if integer and i < program.num_labels else "Continuous")
            for i in range(len(program.cost))
        ]
        model += pulp.LpAffineExpression(zip(columns, program.cost.tolist(), strict=True))
        starts, indexes, values = program.starts.tolist(), program.columns.tolist(), program.values.tolist()
        for row, (lower, upper) in enumerate(zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)):
            entries = range(starts[row], starts[row + 1])
            terms = pulp.LpAffineExpression([(columns[indexes[k]], values[k]) for k in entries])
            sense = pulp.LpConstraintEQ if lower == upper else pulp.LpConstraintLE
            model += pulp.LpConstraint(terms, sense, rhs=upper)
        warm = integer and program.start is not None
        if program.start is not None:
            for column, value in zip(columns, program.start.tolist(), strict=True):
                column.setInitialValue(value)
        limit = max(0.1, budget.remaining) if math.isfinite(budget.remaining) else None
        binary = pulp.PULP_CBC_CMD.pulp_cbc_path
        gap = OPTIMALITY_TOLERANCE / 4
        model.solve(
            pulp.COIN_CMD(
                path=binary, msg=False, threads=1, timeLimit=limit, gapRel=gap, warmStart=warm, keepFiles=False
            )
        )
        if model.sol_status == pulp.LpSolutionInfeasible:
            return Outcome(True, None, math.inf)
        if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return Outcome(False, None, -math.inf)
        solution = np.array([column.value() or 0.0 for column in columns])
        if model.sol_status != pulp.LpSolutionOptimal:
            return Outcome(False, solution, -math.inf)
        bound = float(program.cost @ solution) * program.scale + program.constant
        return Outcome(True, solution, bound - OPTIMALITY_TOLERANCE / 4 * abs(bound))
