"""Staging problems as integer programs: a path of stages, level by level, with the recursions of R and W as rows.

    R_l >= R_{l-1} + sum (t + slow) x + sum (h + h') y      W_l >= R_l + sum tail x
    W_l >= W_{l-1} + sum (t - b) x + sum h y                P >= sum t x

A stage is a binary x from (level, block, device, option) to the block and device after it; its hand-over is a binary y
to the option of the next level. Sums are over the stages and hand-overs of a level, symbols as in `autopar.staging`.
The objective is W of the highest level plus (m - 1) P. Levels beyond the number of stages have no arcs and copy W.
Only arcs of routes better than a known route are listed (`survivors`).
"""

import math
from collections import defaultdict
from dataclasses import dataclass

import highspy
import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.staging.dynamic_program import MOST_BYTES, ROOM, bytes_per_room
from autopar.solvers.staging.staging_kernel import (
    END,
    REST,
    bottleneck,
    pareto_suffixes,
    prefix_bounds,
    surviving_stages,
)
from autopar.staging import FloatArray, Leg, Route, Staged, Staging

_TOTAL = 2.0**44
"""Largest scaled seconds for CP-SAT's integers: below 2^53, above which its linear relaxation is not exact."""

_SLACK = 1e-9
"""Relative tolerance within which arcs of routes as good as the known one are kept."""


@dataclass(frozen=True, slots=True)
class Row:
    """A linear constraint: terms (column, coefficient) >= `least`, or == if `exact`."""

    terms: tuple[tuple[int, float], ...]
    least: float
    exact: bool


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """An integer program; the first columns are binary, the others seconds >= 0.

    Attributes:
        legs: Stage of each of the first columns, with its level.
        num_binary: Number of binary columns: stages, then hand-overs.
        num_columns: Number of columns.
        rows: The constraints.
        cost: Objective: (column, coefficient).
        fixed: Constant of the objective.
    """

    legs: tuple[tuple[int, Leg], ...]
    num_binary: int
    num_columns: int
    rows: tuple[Row, ...]
    cost: tuple[tuple[int, float], ...]
    fixed: float

    def route(self, values: FloatArray) -> Route:
        """Return the route of a solution."""
        taken = [leg for (_, leg), value in zip(self.legs, values, strict=False) if value > 0.5]
        return tuple(sorted(taken, key=lambda leg: leg.start))


def survivors(problem: Staging, most: float, *, one_each: bool = False) -> list[tuple[int, Leg]]:
    """Return the stages, with their levels, that a route of at most `most` seconds may have.

    Args:
        problem: The staging problem.
        most: Value of the route, in seconds.
        one_each: Whether one stage per option is enough.
    """
    problem, unit = problem.in_units()
    fastest = problem.seconds.min(axis=3)
    counts = np.array([level + 1 in problem.counts for level in range(problem.levels)])
    lowest = bottleneck(problem.at, problem.sizes, problem.starts, fastest, counts)
    if not math.isfinite(lowest):
        return []
    cap = math.inf if problem.follow == 0 else (most - problem.fixed) / problem.follow
    leads = np.where(np.isfinite(problem.seconds), problem.lead, np.inf).min(axis=(0, 3))
    least, first = prefix_bounds(problem.at, problem.sizes, problem.starts, fastest.min(axis=0), leads, cap)
    late = math.nextafter(most * (1 + _SLACK) - problem.fixed - problem.follow * lowest, math.inf)
    room, enough = ROOM, False
    while not enough:
        kept, number, enough = pareto_suffixes(
            problem.at, problem.sizes, problem.starts, problem.seconds, problem.lead, problem.slow, problem.tails,
            problem.ends, problem.classes, problem.ahead, problem.back, least, first, cap, late, room,
        )  # fmt: skip
        room *= 2
        if not enough and room * bytes_per_room(problem) > MOST_BYTES:
            break
    if enough:
        known = np.arange(kept.shape[4]) < number[..., None]
        rest, end = (np.where(known, kept[..., which], np.inf).min(axis=(3, 4)) for which in (REST, END))
    else:  # no lower bounds on the later stages
        rest = end = np.zeros(kept.shape[:3])
    found = surviving_stages(
        problem.at, problem.sizes, problem.starts, problem.seconds, problem.lead, problem.slow, counts, least, first,
        rest, end, lowest, problem.follow, most * (1 + _SLACK) - problem.fixed, one_each,
    )  # fmt: skip
    return [
        (level, Leg(start, stop, device * unit, option, column))
        for level, start, stop, device, option, column in found.tolist()
    ]


def program(problem: Staging, most: float) -> Program:
    """Return the integer program of the routes of at most `most` seconds."""
    legs = survivors(problem, most)
    levels = problem.levels
    hands: dict[tuple[int, int, int, int, int], int] = {}
    leaving: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    arriving: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for column, (level, leg) in enumerate(legs):
        after = leg.device + int(problem.sizes[leg.option])
        leaving[level, leg.stop, after, int(problem.ends[leg.option])].append(column)
        arriving[level, leg.start, leg.device, leg.option].append(column)
    for level, stop, after, end in leaving:
        for option in range(len(problem.sizes)):
            if level and (level - 1, stop, after, option) in arriving:
                hands[level, stop, after, end, option] = len(legs) + len(hands)
    binary = len(legs) + len(hands)
    rest, ends, pace = range(binary, binary + levels), range(binary + levels, binary + 2 * levels), binary + 2 * levels
    sums: list[list[dict[int, float]]] = [[{} for _ in range(levels)] for _ in range(4)]
    rests, leads, tails, paces = sums
    for column, (level, leg) in enumerate(legs):
        where = (level, leg.option, int(problem.at[leg.start, leg.stop - leg.start - 1]), leg.column)
        rests[level][column] = -float(problem.seconds[where] + problem.slow[where])
        leads[level][column] = -float(problem.lead[where])
        tails[level][column] = -float(problem.tails[where])
        paces[level][column] = -float(problem.seconds[where])
    for (level, stop, after, end, option), column in hands.items():
        way = (end, int(problem.ends[option]), int(problem.classes[stop]), after)
        rests[level][column] = -float(problem.ahead[way] + problem.back[way])
        leads[level][column] = -float(problem.ahead[way])
    rows = [Row(tuple((column, 1.0) for column, (_, leg) in enumerate(legs) if leg.start == 0), 1.0, True)]
    going: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    coming: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for (level, stop, after, end, option), column in hands.items():
        going[level, stop, after, end].append(column)
        coming[level - 1, stop, after, option].append(column)
    rows += [_balance(columns, going[key]) for key, columns in leaving.items() if key[0]]
    rows += [_balance(columns, coming[key]) for key, columns in arriving.items() if key[1]]
    for level in range(levels):
        before = ((rest[level - 1], -1.0),) if level else ()
        rows.append(Row(((rest[level], 1.0), *before, *rests[level].items()), 0.0, False))
        rows.append(Row(((ends[level], 1.0), (rest[level], -1.0), *tails[level].items()), 0.0, False))
        before = ((ends[level - 1], -1.0),) if level else ()
        rows.append(Row(((ends[level], 1.0), *before, *leads[level].items()), 0.0, False))
        rows.append(Row(((pace, 1.0), *paces[level].items()), 0.0, False))
    cost = ((ends[-1], 1.0), (pace, problem.follow))
    return Program(tuple(legs), binary, pace + 1, tuple(rows), cost, problem.fixed)


def _balance(one: list[int], other: list[int]) -> Row:
    return Row((*((column, 1.0) for column in one), *((column, -1.0) for column in other)), 0.0, True)


def solve_highs(problem: Staging, most: float, time_limit: float = math.inf) -> Staged:
    """Solve a staging problem with HiGHS; routes of more than `most` seconds need not be found.

    Args:
        problem: The staging problem.
        most: Value of a known route, in seconds.
        time_limit: Seconds.
    """
    coded = program(problem, most)
    if not coded.legs:
        return Staged((), math.inf, math.inf)
    highs = highspy.Highs()
    for name, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", OPTIMALITY_TOLERANCE / 4)):
        highs.setOptionValue(name, value)
    if math.isfinite(time_limit):
        highs.setOptionValue("time_limit", time_limit)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = coded.num_columns, len(coded.rows)
    cost = np.zeros(coded.num_columns)
    for column, factor in coded.cost:
        cost[column] = factor
    model.col_cost_, model.offset_ = cost, coded.fixed
    model.col_lower_ = np.zeros(coded.num_columns)
    whole = np.arange(coded.num_columns) < coded.num_binary
    model.col_upper_ = np.where(whole, 1.0, highspy.kHighsInf)
    model.integrality_ = [
        highspy.HighsVarType.kInteger if binary else highspy.HighsVarType.kContinuous for binary in whole.tolist()
    ]
    model.row_lower_ = np.array([row.least for row in coded.rows])
    model.row_upper_ = np.array([row.least if row.exact else highspy.kHighsInf for row in coded.rows])
    terms = [term for row in coded.rows for term in row.terms]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.cumsum([0, *(len(row.terms) for row in coded.rows)]).astype(np.int32)
    model.a_matrix_.index_ = np.array([column for column, _ in terms], dtype=np.int32)
    model.a_matrix_.value_ = np.array([value for _, value in terms])
    highs.passModel(model)
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Staged((), math.inf, math.inf)
    if not math.isfinite(info.objective_function_value) or info.primal_solution_status != 2:
        return Staged((), math.inf, float(info.mip_dual_bound))
    route = coded.route(np.array(highs.getSolution().col_value))
    return Staged(route, problem.value(route), float(info.mip_dual_bound))


def solve_cp_sat(problem: Staging, most: float, time_limit: float = math.inf) -> Staged:
    """Solve a staging problem with CP-SAT, seconds rounded down to 2^-44 of the largest; see `solve_highs`."""
    from ortools.sat.python import cp_model  # imports pandas, which no search needs

    coded = program(problem, most)
    if not coded.legs:
        return Staged((), math.inf, math.inf)
    largest = max(most, 1e-12)
    scale = 2.0 ** math.floor(math.log2(_TOTAL / (largest * (1 + problem.follow))))
    model = cp_model.CpModel()
    columns = [model.new_bool_var("") for _ in range(coded.num_binary)]
    ceiling = math.ceil(largest * scale * 4)
    columns += [model.new_int_var(0, ceiling, "") for _ in range(coded.num_columns - coded.num_binary)]
    for row in coded.rows:
        terms = [columns[column] for column, _ in row.terms]
        # Rounded coefficients shrink the seconds of arcs: the program is a relaxation, so its bound is valid.
        factors = [
            math.ceil(value * scale) if column < coded.num_binary and not row.exact else int(value)
            for column, value in row.terms
        ]
        total = cp_model.LinearExpr.weighted_sum(terms, factors)
        model.add(total == int(row.least) if row.exact else total >= int(row.least))
    model.minimize(
        cp_model.LinearExpr.weighted_sum(
            [columns[column] for column, _ in coded.cost], [int(factor) for _, factor in coded.cost]
        )
    )
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    solver.parameters.cp_model_presolve = False  # the presolve of OR-Tools 9.15 cuts off optima, see the tests
    solver.parameters.relative_gap_limit = OPTIMALITY_TOLERANCE / 4
    if math.isfinite(time_limit):
        solver.parameters.max_time_in_seconds = time_limit
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Staged((), math.inf, math.inf)
    bound = solver.best_objective_bound / scale + problem.fixed
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Staged((), math.inf, bound)
    route = coded.route(np.array([float(solver.value(column)) for column in columns[: len(coded.legs)]]))
    return Staged(route, problem.value(route), bound)
