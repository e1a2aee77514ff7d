"""The local polytope on HiGHS: the LP relaxation, which is usually integral, and branch and bound where it is not."""

import math
from typing import Any, ClassVar

import highspy
import numpy as np

from autopar.errors import SolverError
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.backends.lazy_rows import MipSolver, Outcome
from autopar.solvers.base import Budget
from autopar.solvers.bounds.local_polytope import Basis, LinearProgram

STEP_BASE = 10_000
"""Fixed work of a step, in nonzeros."""
SIMPLEX_STEP, BRANCH_STEP = 1.0, 3000.0
"""Units of work per nonzero: of a simplex iteration, and between two callbacks of branch and bound."""

FEASIBILITY, LP_FEASIBILITY = 1e-6, 1e-7
"""Row tolerances of HiGHS's branch and bound and of its LP solver; its defaults."""

_ROOT_HEURISTICS = ("mip_heuristic_run_rens", "mip_heuristic_run_root_reduced_cost")
"""Sub-programs that HiGHS solves at the root to find solutions. Where a ceiling near the optimum is known and branch
and bound ends, they take most of the time: without, proofs of GPT-2 on 8 devices take 0.3 and 0.4 s, not 1.3 and 1.4.
"""
_FEW_COLUMNS = 10_000
"""Columns up to which branch and bound usually ends; where it is cut off, these sub-programs find its solutions."""

_FEASIBLE = 2
"""`kSolutionStatusFeasible` of HiGHS, which highspy returns as an integer."""


class HighsSolver(MipSolver):
    """Exact: HiGHS on the whole problem, without our reductions."""

    relaxes: ClassVar[bool] = True
    counts_work: ClassVar[bool] = True

    def solve_program(self, program: LinearProgram, integer: bool, budget: Budget) -> Outcome:
        """Solve one program."""
        return run(program, integer, budget)


def run(
    program: LinearProgram,
    integer: bool,
    budget: Budget,
    ceiling: float = math.inf,
    feasibility: float = FEASIBILITY,
) -> Outcome:
    """Solve the LP relaxation or the integer program.

    Args:
        program: The program.
        integer: Whether label columns must be integer.
        budget: Time and work.
        ceiling: Objective from which on solutions need not be found; the bound is then infinite, and valid up to the
            ceiling.
        feasibility: Row tolerance.

    Raises:
        SolverError: If HiGHS refuses the program.
    """
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    if math.isfinite(budget.remaining):
        highs.setOptionValue("time_limit", budget.remaining)
    model = highspy.HighsLp()
    num_columns, num_rows = len(program.cost), len(program.row_lower)
    model.num_col_, model.num_row_ = num_columns, num_rows
    model.col_cost_ = program.cost
    model.col_lower_ = np.zeros(num_columns)
    model.col_upper_ = np.ones(num_columns) if program.upper is None else program.upper
    model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = program.starts
    model.a_matrix_.index_ = program.columns
    model.a_matrix_.value_ = program.values
    if not integer:
        # HiGHS's presolve finds little in a local polytope: the relaxation is solved five times faster without.
        highs.setOptionValue("presolve", "off")
    else:
        highs.setOptionValue("mip_rel_gap", OPTIMALITY_TOLERANCE / 4)
        highs.setOptionValue("mip_feasibility_tolerance", feasibility)
        highs.setOptionValue("primal_feasibility_tolerance", min(feasibility, LP_FEASIBILITY))
        kinds = [highspy.HighsVarType.kInteger] * program.num_labels
        if math.isfinite(ceiling):
            highs.setOptionValue("objective_bound", (ceiling - program.constant) / program.scale * (1 + 1e-9))
            for name in _ROOT_HEURISTICS if num_columns <= _FEW_COLUMNS else ():
                highs.setOptionValue(name, False)
        model.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (num_columns - program.num_labels)
    if highs.passModel(model) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS refused the linear program")
    if not integer and program.basis is not None:
        start_basis = highspy.HighsBasis()
        start_basis.col_status = program.basis.columns
        basic = highspy.HighsBasisStatus.kBasic
        start_basis.row_status = [basic if row is None else row for row in program.basis.rows]
        highs.setBasis(start_basis)
    if integer and program.start is not None:
        start = highspy.HighsSolution()
        start.col_value = program.start.tolist()
        highs.setSolution(start)
    # Python's signal handlers do not run while HiGHS does, so callbacks poll for an interruption. HiGHS calls them at
    # deterministic points, so counting the calls gives a deterministic work limit.
    size = STEP_BASE + len(program.values)
    events = ((highs.cbSimplexInterrupt, SIMPLEX_STEP * size), (highs.cbMipInterrupt, BRANCH_STEP * size))
    for event, units in events:

        def ask(call: Any, units: float = units) -> None:
            budget.work.spend(units)
            out_of_budget = budget.work.left == 0.0 or budget.remaining == 0.0
            call.interrupt(budget.stopped() or out_of_budget or budget.targets_met())

        event.subscribe(ask)
    highs.run()
    status = highs.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kObjectiveBound):
        return Outcome(True, None, math.inf)
    finished = status == highspy.HighsModelStatus.kOptimal
    solution = highs.getSolution()
    if integer:
        info = highs.getInfo()
        found = info.primal_solution_status == _FEASIBLE
        bound = (
            info.mip_dual_bound * program.scale + program.constant if math.isfinite(info.mip_dual_bound) else -math.inf
        )
        return Outcome(finished, np.array(solution.col_value) if found else None, bound)
    if not finished:
        return Outcome(False, None, -math.inf)
    duals = np.array(solution.row_dual)
    last = highs.getBasis()
    basis = Basis(tuple(last.col_status), tuple(last.row_status)) if last.valid else None
    return Outcome(True, np.array(solution.col_value), program.dual_bound(duals), duals, basis)
