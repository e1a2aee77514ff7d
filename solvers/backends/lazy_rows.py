"""The loop around a linear-programming code: solve, add the limits that are broken, repeat."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE, Problem
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.bounds.cover_cuts import covers
from autopar.solvers.bounds.local_polytope import LinearProgram, linear_program, scale_of
from autopar.solvers.model.graphical_model import Field, Floats, Ints, prepare
from autopar.solvers.model.memory_rows import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a linear-programming code says.

    Attributes:
        finished: Whether it solved the program, or proved that it has no solution; false if it hit a limit.
        solution: Value per column, None if it has none.
        bound: Lower bound in problem units; infinity if there is no solution.
        duals: Multiplier per row of a relaxation; None if the code did not give them.
    """

    finished: bool
    solution: Floats | None
    bound: float
    duals: Floats | None = None


COVER_ROUNDS = 10
"""How often covers are added to a relaxation at most."""
LEAST_GAIN = 1e-4
"""Rise of the bound, relative to it, below which no more covers are looked for: each time costs a linear program."""
LEAST_DROPPED = 0.1
"""Share of the labels that have to go before the relaxation is solved again without them."""

Code = Callable[[LinearProgram, bool, Budget], Outcome]
"""(program, whether labels must be whole, budget) -> outcome."""


class MipSolver(Solver):
    """Exact: the local polytope of the whole problem, limits added when broken, solved by `code`."""

    relaxes: ClassVar[bool] = False
    """Whether the relaxation is tried before branching."""

    @abstractmethod
    def code(self, program: LinearProgram, whole: bool, budget: Budget) -> Outcome:
        """Solve one program.

        Raises:
            SolverError: If the code refuses it.
        """

    def run(self, problem: Problem, budget: Budget) -> None:
        """See `Solver.run`."""
        prepared = prepare(problem)
        memory = Memory.of(problem, prepared.labels) if prepared is not None else None
        if prepared is None or memory is None or memory.hopeless():
            budget.raise_bound(math.inf)
            return
        budget.raise_bound(prepared.field.lowest_cost(), EXACT)  # a code's bound of 0 may come out a little below

        def offer(labels: Sequence[int]) -> bool:
            return budget.offer(prepared.strategies(labels))

        minimise(
            prepared.field,
            memory,
            budget,
            self.code,
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
    code: Code,
    offer: Callable[[list[int]], bool],
    *,
    relax: bool = True,
    report: Callable[[float], None] | None = None,
    broken_before: set[int] | None = None,
    cover_rounds: int = 0,
    start: Sequence[int] | None = None,
    ceiling: Callable[[], float] | None = None,
) -> list[int] | None:
    """Minimise a field under limits.

    Args:
        field: Costs; nodes that are gone have no labels.
        memory: Limits on the field's labels.
        budget: Time and targets.
        code: Solves linear programs.
        offer: Called with labels that satisfy the field; says whether they fit.
        relax: Whether to branch only once the relaxation is fractional.
        report: Takes the bounds; by default the budget does.
        broken_before: Times whose limits are in the program from the start; those found broken are added.
        cover_rounds: How often covers are added to the relaxation.
        start: Labels to begin from, for codes that can.
        ceiling: What a choice has to cost less than to be of interest, now. Bounds then hold up to there: labels go
            that the relaxation proves to cost more (fixing by reduced costs).

    Returns:
        Labels that are optimal for the field under the limits, None if none were found and proven.
    """
    report = report or budget.raise_bound
    before = set() if broken_before is None else broken_before
    if relax:
        relaxed = relaxation(field, memory, budget, code, before, cover_rounds=cover_rounds, report=report)
        program, outcome = relaxed.program, relaxed.outcome
        if outcome.solution is None or not outcome.finished or budget.spent():
            return None
        labels, integral = program.labels(outcome.solution)
        if (integral or ceiling is not None) and offer(labels) and integral:
            return labels
        if ceiling is not None:
            highest = ceiling()
            kept = _kept(program, outcome, highest)
            if sum(map(len, kept)) <= (1 - LEAST_DROPPED) * program.num_labels:

                def below(bound: float) -> None:
                    report(min(bound, highest))

                again = partial(
                    minimise,
                    budget=budget,
                    code=code,
                    report=below,
                    broken_before=before,
                    cover_rounds=cover_rounds,
                    ceiling=ceiling,
                )
                return _on_labels(kept, field, memory, offer, start, below, again)
    else:
        program = linear_program(field, scale_of(field))
        program = program.with_rows(memory, _rows(memory, before))
    if start is not None:
        program = program.beginning(start)
    while not budget.spent():
        outcome = code(program, True, budget)
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
            return None  # the choice keeps the limits to the code's tolerance only, so it was refused
        program = program.with_rows(memory, broken)
        before |= set(memory.times[broken].tolist())
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """A relaxation that breaks none of the limits.

    Attributes:
        program: It, with the limits and covers that earlier ones broke.
        outcome: What the code said of it.
        plain: The same before covers were added: there all that a limit costs is in its own price.
        plain_outcome: What the code said of that.
    """

    program: LinearProgram
    outcome: Outcome
    plain: LinearProgram
    plain_outcome: Outcome


def relaxation(
    field: Field,
    memory: Memory,
    budget: Budget,
    code: Code,
    broken_before: set[int],
    *,
    cover_rounds: int = COVER_ROUNDS,
    report: Callable[[float], None] | None = None,
) -> Relaxed:
    """Solve the relaxation until it breaks no limit, nor a cover that is found; see `minimise`."""
    report = report or budget.raise_bound
    base = linear_program(field, scale_of(field))
    rows = _rows(memory, broken_before)
    first: tuple[LinearProgram, Outcome] | None = None
    uncovered = -math.inf  # the bound before the last covers
    while True:
        program = base.with_rows(memory, rows)
        outcome = code(program, False, budget)
        if outcome.bound > -math.inf:
            report(outcome.bound)
        if outcome.solution is None or not outcome.finished or budget.spent():
            break
        broken = [t for t in memory.peaks(_fractional_profile(base, memory, outcome.solution), 8) if t not in rows]
        if broken:
            rows += broken
            broken_before |= set(memory.times[broken].tolist())
            continue
        first = first or (program, outcome)
        useful = outcome.bound - uncovered > LEAST_GAIN * abs(outcome.bound)
        found = covers(memory, base.offsets, rows, outcome.solution) if cover_rounds and useful else []
        if not found:
            break
        cover_rounds -= 1
        uncovered = outcome.bound
        base = base.with_covers(found)
    return Relaxed(program, outcome, *(first or (program, outcome)))


def _rows(memory: Memory, times: set[int]) -> list[int]:
    return [t for t, time in enumerate(memory.times.tolist()) if time in times]


def _kept(program: LinearProgram, outcome: Outcome, ceiling: float) -> list[Ints]:
    """Return per node the labels that a choice below `ceiling` may have; all if the code gave no multipliers."""
    sizes = np.diff(program.offsets).tolist()
    if outcome.duals is None or math.isinf(ceiling):
        return [np.arange(size) for size in sizes]
    room = ceiling - program.dual_bound(outcome.duals) + OPTIMALITY_TOLERANCE * abs(ceiling)
    return [np.flatnonzero(above <= room) for above in program.residual(outcome.duals).unary]


def _on_labels(
    kept: Sequence[Ints],
    field: Field,
    memory: Memory,
    offer: Callable[[list[int]], bool],
    start: Sequence[int] | None,
    report: Callable[[float], None],
    solve: Callable[..., list[int] | None],
) -> list[int] | None:
    """Minimise on some labels of each node only, by `solve`; see `minimise`."""
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
    """Return the use in each segment, what is within a code's tolerance of the limit counted as the limit."""
    change = np.zeros(memory.num_rows + 1)
    for n, first, last, amounts in zip(
        memory.nodes.tolist(), memory.first.tolist(), memory.last.tolist(), memory.amounts, strict=True
    ):
        used = float(amounts @ solution[program.offsets[n] : program.offsets[n] + len(amounts)])
        change[first] += used
        change[last] -= used
    profile = np.cumsum(change)[:-1]
    return np.where(profile > memory.limits + 1e-6 * memory.scales, profile, np.minimum(profile, memory.limits))
