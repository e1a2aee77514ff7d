"""Lazy constraints: solve the local polytope, add the limits and covers the solution violates, repeat."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE, Problem
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.bounds.cover_cuts import covers
from autopar.solvers.bounds.local_polytope import Basis, LinearProgram, linear_program, scale_of
from autopar.solvers.bounds.rounding_cuts import rounding_cuts
from autopar.solvers.model.graphical_model import Field, Floats, Ints, prepare
from autopar.solvers.model.memory_rows import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Result of a linear or integer programming back end.

    Attributes:
        finished: Whether the program was solved or proven infeasible; false if a limit was hit.
        solution: Value per column, None if none was found.
        bound: Lower bound in problem units; infinity if the program is infeasible.
        duals: Multiplier per row of a relaxation; None if the back end gives none.
        basis: Optimal basis of a relaxation; None if the back end gives none.
    """

    finished: bool
    solution: Floats | None
    bound: float
    duals: Floats | None = None
    basis: Basis | None = None


COVER_ROUNDS = 10
"""Most rounds of cover separation."""
LEAST_GAIN = 1e-4
"""Relative rise of the bound below which cover separation stops: each round costs a linear program."""
LEAST_DROPPED = 0.1
"""Share of the labels that must be fixed by reduced costs for another relaxation on the remaining labels."""

ProgramSolver = Callable[[LinearProgram, bool, Budget], Outcome]
"""(program, whether label columns must be integer, budget) -> outcome."""


class MipSolver(Solver):
    """Exact: the local polytope of the whole problem with lazy limits, on the back end `solve_program`."""

    relaxes: ClassVar[bool] = False
    """Whether the LP relaxation is solved before branching."""

    @abstractmethod
    def solve_program(self, program: LinearProgram, integer: bool, budget: Budget) -> Outcome:
        """Solve one program.

        Raises:
            SolverError: If the back end refuses the program.
        """

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        prepared = prepare(problem)
        memory = Memory.of(problem, prepared.labels) if prepared is not None else None
        if prepared is None or memory is None or memory.is_infeasible():
            budget.raise_bound(math.inf)
            return
        budget.raise_bound(prepared.field.lowest_cost(), EXACT)  # a back end's bound of 0 may come out slightly below

        def offer(labels: Sequence[int]) -> bool:
            return budget.offer(prepared.strategies(labels))

        minimise(
            prepared.field,
            memory,
            budget,
            self.solve_program,
            offer,
            relax=self.relaxes,
            cover_rounds=COVER_ROUNDS,
            start=None if budget.choice is None else prepared.choice(budget.choice),
            ceiling=lambda: budget.upper,
        )


def minimise(
    field: Field,
    memory: Memory,
    budget: Budget,
    solve_program: ProgramSolver,
    offer: Callable[[list[int]], bool],
    *,
    relax: bool = True,
    report: Callable[[float], None] | None = None,
    violated_times: set[int] | None = None,
    cover_rounds: int = 0,
    start: Sequence[int] | None = None,
    ceiling: Callable[[], float] | None = None,
) -> list[int] | None:
    """Minimise a field under limits by lazy constraints.

    Args:
        field: Costs; removed nodes have no labels.
        memory: Limits on the field's labels.
        budget: Time, work and targets.
        solve_program: The back end.
        offer: Called with labels that the field permits; returns whether they are within the limits.
        relax: Whether to solve the LP relaxation first and branch only if it is fractional.
        report: Receives lower bounds; the budget by default.
        violated_times: Times whose limits are in the program from the start; violated ones are added to the set.
        cover_rounds: Most rounds of cover separation.
        start: Warm start, for back ends that accept one.
        ceiling: Returns the cost below which choices are of interest. Reduced-cost fixing drops the labels that the
            relaxation proves to cost more; bounds are then valid up to the ceiling.

    Returns:
        Labels that are optimal for the field under the limits, None if none were found and proven.
    """
    report = report or budget.raise_bound
    before = set() if violated_times is None else violated_times
    if relax:
        relaxed = relaxation(field, memory, budget, solve_program, before, cover_rounds=cover_rounds, report=report)
        program, outcome = relaxed.program, relaxed.outcome
        if outcome.solution is None or not outcome.finished or budget.spent():
            return None
        labels, integral = program.labels(outcome.solution)
        if (integral or ceiling is not None) and offer(labels) and integral:
            return labels
        if ceiling is not None:
            highest = ceiling()
            kept = _labels_below(program, outcome, highest)
            if sum(map(len, kept)) <= (1 - LEAST_DROPPED) * program.num_labels:

                def report_capped(bound: float) -> None:
                    report(min(bound, highest))

                minimise_restricted = partial(
                    minimise,
                    budget=budget,
                    solve_program=solve_program,
                    report=report_capped,
                    violated_times=before,
                    cover_rounds=cover_rounds,
                    ceiling=ceiling,
                )
                return _minimise_restricted(kept, field, memory, offer, start, report_capped, minimise_restricted)
    else:
        program = linear_program(field, scale_of(field))
        program = program.with_rows(memory, _rows_at(memory, before))
    if start is not None:
        program = program.with_start(start)
    while not budget.spent():
        outcome = solve_program(program, True, budget)
        if outcome.bound > -math.inf:
            report(outcome.bound)
        if outcome.solution is None:
            return None
        labels, integral = program.labels(outcome.solution)
        if integral and offer(labels) and outcome.finished:
            return labels
        if not outcome.finished:
            return None
        profile = memory.profile(labels) if integral else _fractional_profile(program, memory, outcome.solution)
        broken = [t for t in memory.peaks(profile, 8) if t not in program.limits]
        if not broken:
            return None  # the choice keeps the limits only within the back end's tolerance, so `offer` refused it
        program = program.with_rows(memory, broken)
        before |= set(memory.times[broken].tolist())
    return None


@dataclass(frozen=True, slots=True, eq=False)
class RelaxationResult:
    """An LP relaxation whose solution violates no limit.

    Attributes:
        program: The program, with the limits and covers that were violated on the way.
        outcome: Its outcome.
        plain: The program before covers were added: there the price of a limit holds its whole effect.
        plain_outcome: Its outcome.
    """

    program: LinearProgram
    outcome: Outcome
    plain: LinearProgram
    plain_outcome: Outcome


def relaxation(
    field: Field,
    memory: Memory,
    budget: Budget,
    solve_program: ProgramSolver,
    violated_times: set[int],
    *,
    cover_rounds: int = COVER_ROUNDS,
    report: Callable[[float], None] | None = None,
) -> RelaxationResult:
    """Solve the LP relaxation until its solution violates no limit, and no cover is separated; see `minimise`.

    Relaxes: labels to fractions, limits not violated so far. Valid when: always. Costs: an LP per round. Sources:
    `local_polytope`, `cover_cuts` and `rounding_cuts` of `autopar.solvers.bounds`.
    """
    report = report or budget.raise_bound
    base = linear_program(field, scale_of(field))
    rows = _rows_at(memory, violated_times)
    first: tuple[LinearProgram, Outcome] | None = None
    uncovered = -math.inf  # the bound before the last round of covers
    basis: Basis | None = None
    while True:
        program = replace(base.with_rows(memory, rows), basis=basis)
        outcome = solve_program(program, False, budget)
        if outcome.bound > -math.inf:
            report(outcome.bound)
        if outcome.solution is None or not outcome.finished or budget.spent():
            break
        broken = [t for t in memory.peaks(_fractional_profile(base, memory, outcome.solution), 8) if t not in rows]
        size, last = len(base.row_lower), len(program.row_lower)
        if broken:
            basis = None if outcome.basis is None else outcome.basis.with_rows_at(last, len(broken))
            rows += broken
            violated_times |= set(memory.times[broken].tolist())
            continue
        first = first or (program, outcome)
        useful = outcome.bound - uncovered > LEAST_GAIN * abs(outcome.bound)
        found = []
        if cover_rounds and useful:
            found = [
                *covers(memory, base.offsets, rows, outcome.solution),
                *rounding_cuts(memory, base.offsets, rows, outcome.solution),
            ]
        if not found:
            break
        cover_rounds -= 1
        uncovered = outcome.bound
        base = base.with_cuts(found)
        basis = None if outcome.basis is None else outcome.basis.with_rows_at(size, len(found))
    return RelaxationResult(program, outcome, *(first or (program, outcome)))


def _rows_at(memory: Memory, times: set[int]) -> list[int]:
    return [t for t, time in enumerate(memory.times.tolist()) if time in times]


def _labels_below(program: LinearProgram, outcome: Outcome, ceiling: float) -> list[Ints]:
    """Return per node the labels that choices below `ceiling` may have; all if the back end gave no multipliers."""
    sizes = np.diff(program.offsets).tolist()
    if outcome.duals is None or math.isinf(ceiling):
        return [np.arange(size) for size in sizes]
    room = ceiling - program.dual_bound(outcome.duals) + OPTIMALITY_TOLERANCE * abs(ceiling)
    return [np.flatnonzero(above <= room) for above in program.reduced_cost_field(outcome.duals).unary]


def _minimise_restricted(
    kept: Sequence[Ints],
    field: Field,
    memory: Memory,
    offer: Callable[[list[int]], bool],
    start: Sequence[int] | None,
    report: Callable[[float], None],
    solve: Callable[..., list[int] | None],
) -> list[int] | None:
    """Minimise on the labels `kept` of each node, by `solve`; see `minimise`."""
    if any(len(k) == 0 for k, u in zip(kept, field.unary, strict=True) if len(u)):
        report(math.inf)
        return None
    part = field.restrict(kept)
    if not part.propagate():
        report(math.inf)
        return None
    alive = [np.flatnonzero(np.isfinite(u)) for u in part.unary]
    labels_of = [k[a] for k, a in zip(kept, alive, strict=True)]
    part = part.restrict(alive)
    fewer = memory.restrict([k if len(k) else np.arange(1) for k in labels_of])

    def whole(choice: Sequence[int]) -> list[int]:
        return [int(k[s]) if len(k) else 0 for k, s in zip(labels_of, choice, strict=True)]

    begin = None
    if start is not None and all(s in k for s, k in zip(start, labels_of, strict=True) if len(k)):
        begin = [int(np.searchsorted(k, s)) if len(k) else 0 for s, k in zip(start, labels_of, strict=True)]
    found = solve(part, fewer, offer=lambda choice: offer(whole(choice)), start=begin)
    return None if found is None else whole(found)


def _fractional_profile(program: LinearProgram, memory: Memory, solution: Floats) -> Floats:
    """Return the use in each segment; a use within the back end's tolerance of the limit counts as the limit."""
    change = np.zeros(memory.num_rows + 1)
    for n, first, last, amounts in zip(
        memory.nodes.tolist(), memory.first.tolist(), memory.last.tolist(), memory.amounts, strict=True
    ):
        used = float(amounts @ solution[program.offsets[n] : program.offsets[n] + len(amounts)])
        change[first] += used
        change[last] -= used
    profile = np.cumsum(change)[:-1]
    return np.where(profile > memory.limits + 1e-6 * memory.scales, profile, np.minimum(profile, memory.limits))
