"""The local polytope on OR-Tools back ends: HiGHS and SCIP through MathOpt, CBC through `pywraplp`."""

import math
from datetime import timedelta
from typing import Any

import numpy as np
from ortools.linear_solver import linear_solver_pb2, pywraplp
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autopar.errors import SolverError
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.backends.lazy_rows import MipSolver, Outcome
from autopar.solvers.base import Budget
from autopar.solvers.bounds.local_polytope import LinearProgram


class OrtoolsHighs(MipSolver):
    """Exact: the HiGHS bundled with OR-Tools."""

    def solve_program(self, program: LinearProgram, integer: bool, budget: Budget) -> Outcome:
        """Solve one program."""
        return _mathopt(program, integer, budget, mathopt.SolverType.HIGHS)


class OrtoolsScip(MipSolver):
    """Exact: the SCIP bundled with OR-Tools."""

    def solve_program(self, program: LinearProgram, integer: bool, budget: Budget) -> Outcome:
        """Solve one program."""
        return _mathopt(program, integer, budget, mathopt.SolverType.GSCIP)


class OrtoolsCbc(MipSolver):
    """Exact: the CBC bundled with OR-Tools."""

    def solve_program(self, program: LinearProgram, integer: bool, budget: Budget) -> Outcome:
        """Solve one program."""
        return _cbc(program, integer, budget)


def _mathopt(program: LinearProgram, integer: bool, budget: Budget, kind: Any) -> Outcome:
    num_columns, num_rows = len(program.cost), len(program.row_lower)
    model = model_pb2.ModelProto()
    model.variables.ids.extend(range(num_columns))
    model.variables.lower_bounds.extend([0.0] * num_columns)
    model.variables.upper_bounds.extend([1.0] * num_columns)
    model.variables.integers.extend([integer] * program.num_labels + [False] * (num_columns - program.num_labels))
    model.objective.linear_coefficients.ids.extend(range(num_columns))
    model.objective.linear_coefficients.values.extend(program.cost.tolist())
    model.linear_constraints.ids.extend(range(num_rows))
    model.linear_constraints.lower_bounds.extend(program.row_lower.tolist())
    model.linear_constraints.upper_bounds.extend(program.row_upper.tolist())
    rows = np.repeat(np.arange(num_rows), np.diff(program.starts))
    order = np.lexsort((program.columns, rows))
    model.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
    model.linear_constraint_matrix.column_ids.extend(program.columns[order].tolist())
    model.linear_constraint_matrix.coefficients.extend(program.values[order].tolist())
    limit = timedelta(seconds=budget.remaining) if math.isfinite(budget.remaining) else None
    parameters = mathopt.SolveParameters(time_limit=limit, relative_gap_tolerance=OPTIMALITY_TOLERANCE / 4)
    built = mathopt.Model.from_model_proto(model)
    hints = []
    if integer and program.start is not None and kind is not mathopt.SolverType.HIGHS:  # MathOpt gives HiGHS no hints
        values = dict(zip(built.variables(), program.start.tolist(), strict=True))
        hints.append(mathopt.SolutionHint(variable_values=values))
    result = mathopt.solve(
        built, kind, params=parameters, model_params=mathopt.ModelSolveParameters(solution_hints=hints)
    )
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Outcome(True, None, math.inf)  # all columns are within 0 and 1, so the program is not unbounded
    solution = None
    if result.has_primal_feasible_solution():
        solution = np.zeros(num_columns)
        for variable, value in result.variable_values().items():
            solution[variable.id] = value
    dual = result.termination.objective_bounds.dual_bound
    bound = dual * program.scale + program.constant if math.isfinite(dual) else -math.inf
    return Outcome(reason == mathopt.TerminationReason.OPTIMAL, solution, bound)


def _cbc(program: LinearProgram, integer: bool, budget: Budget) -> Outcome:
    model = linear_solver_pb2.MPModelProto()
    for column, cost in enumerate(program.cost.tolist()):
        is_integer = integer and column < program.num_labels
        model.variable.add(lower_bound=0.0, upper_bound=1.0, is_integer=is_integer, objective_coefficient=cost)
    starts, columns, values = program.starts.tolist(), program.columns.tolist(), program.values.tolist()
    for row, (lower, upper) in enumerate(zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)):
        inside = slice(starts[row], starts[row + 1])
        model.constraint.add(
            lower_bound=lower, upper_bound=upper, var_index=columns[inside], coefficient=values[inside]
        )
    solver = pywraplp.Solver.CreateSolver("CBC")
    refused = solver.LoadModelFromProto(model) if solver is not None else "it is not in this build of OR-Tools"
    if refused:
        raise SolverError(f"CBC of OR-Tools refused the program: {refused}", hint="use --solver pulp-cbc")
    if integer and program.start is not None:
        solver.SetHint(solver.variables(), program.start.tolist())
    if math.isfinite(budget.remaining):
        solver.SetTimeLimit(max(1, int(budget.remaining * 1000)))
    parameters = pywraplp.MPSolverParameters()
    parameters.SetDoubleParam(parameters.RELATIVE_MIP_GAP, OPTIMALITY_TOLERANCE / 4)
    status = solver.Solve(parameters)
    if status == pywraplp.Solver.INFEASIBLE:
        return Outcome(True, None, math.inf)
    solution = None
    if status in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
        solution = np.array([variable.solution_value() for variable in solver.variables()])
    dual = solver.Objective().BestBound()
    bound = dual * program.scale + program.constant if math.isfinite(dual) and solution is not None else -math.inf
    return Outcome(status == pywraplp.Solver.OPTIMAL, solution, bound)
