"""The loop around a linear-programming code: solve, add the limits that are broken, repeat."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autopar.problem import Problem
from autopar.solvers.base import EXACT, Budget, Solver
from autopar.solvers.field import Field, Floats, prepare
from autopar.solvers.memory import Memory
from autopar.solvers.polytope import LinearProgram, linear_program, scale_of


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

        minimise(prepared.field, memory, budget, self.code, offer, relax=self.relaxes)


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

    Returns:
        Labels that are optimal for the field under the limits, None if none were found and proven.
    """
    report = report or budget.raise_bound
    plain = linear_program(field, scale_of(field))
    before = set() if broken_before is None else broken_before
    rows = [t for t, time in enumerate(memory.times.tolist()) if time in before]
    whole = not relax
    while not budget.spent():
        outcome = code(plain.with_rows(memory, rows), whole, budget)
        if outcome.bound > -math.inf:
            report(outcome.bound)
        if outcome.solution is None:
            return None
        labels, integral = plain.labels(outcome.solution)
        if integral and offer(labels) and outcome.finished:
            return labels
        if not outcome.finished:
            return None
        profile = memory.profile(labels) if integral else _fractional_profile(plain, memory, outcome.solution)
        broken = [t for t in memory.peaks(profile, 8) if t not in rows]
        if broken:
            rows += broken
            before |= set(memory.times[broken].tolist())
        elif whole:
            return None  # the choice keeps the limits to the code's tolerance only, so it was refused
        else:
            whole = True
    return None


def relax(
    field: Field, memory: Memory, budget: Budget, code: Code, broken_before: set[int]
) -> tuple[LinearProgram, Outcome]:
    """Return the relaxation with every limit it breaks added, and its last outcome; see `minimise`."""
    plain = linear_program(field, scale_of(field))
    rows = [t for t, time in enumerate(memory.times.tolist()) if time in broken_before]
    while True:
        program = plain.with_rows(memory, rows)
        outcome = code(program, False, budget)
        if outcome.solution is None or not outcome.finished:
            return program, outcome
        profile = _fractional_profile(plain, memory, outcome.solution)
        broken = [t for t in memory.peaks(profile, 8) if t not in rows]
        if not broken:
            return program, outcome
        rows += broken
        broken_before |= set(memory.times[broken].tolist())


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
