"""Linear programs: cuts of the limits, reduced-cost fixing, and warm starts."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import solvers
from autopar.problem import Problem, Termination, Usage
from autopar.solvers.backends import highs, lazy_rows
from autopar.solvers.backends.lazy_rows import MipSolver, Outcome
from autopar.solvers.base import Budget
from autopar.solvers.bounds.cover_cuts import covers
from autopar.solvers.bounds.local_polytope import Basis, LinearProgram, linear_program, scale_of
from autopar.solvers.bounds.rounding_cuts import rounding_cuts
from autopar.solvers.model.csr import indicator
from autopar.solvers.model.graphical_model import prepare
from autopar.solvers.model.memory_rows import Memory
from tests.checks import check_solution, choices, close
from tests.instances import k_tree, knapsack
from tests.strategies import problems

CODES = ("highs", "ortools-highs", "ortools-scip", "ortools-cbc", "pulp-cbc", "cp-sat")


def test_a_violated_cover_is_separated() -> None:
    """Uses 2, 2 and 3/0 with node 2 at one third: 2 + 2 + 3 > 4, so at most two of the three."""
    problem = knapsack()
    memory = Memory.of(problem, [np.arange(2)] * 3)
    solution = np.array([0.0, 1.0, 0.0, 1.0, 2 / 3, 1 / 3])

    (cover,) = covers(memory, np.array([0, 2, 4, 6]), [0], solution)

    assert cover.columns.tolist() in ([1, 3, 5], [1, 5], [3, 5])
    assert cover.most == len(cover.columns) - 1
    assert solution[cover.columns].sum() > cover.most


def test_covers_raise_the_bound_of_the_relaxation() -> None:
    """By hand: the limit alone allows uses of 4 of 7, which costs 10 at node 2; with pairs barred nothing is halved."""
    problem = Problem.build([[10, 0]] * 3, usages=[Usage(node, 0, 1, np.array([0, 3])) for node in range(3)], limit=5)
    prepared = prepare(problem)
    assert prepared is not None
    memory = Memory.of(problem, prepared.labels)
    plain = linear_program(prepared.field, scale_of(prepared.field)).with_rows(memory, [0])

    alone = highs.run(plain, False, budget(problem)).bound
    relaxed = lazy_rows.relaxation(prepared.field, memory, budget(problem), highs.run, set())

    assert alone == pytest.approx(10 * (3 - 5 / 3))
    assert relaxed.plain_outcome.bound == pytest.approx(alone)
    assert relaxed.outcome.bound == pytest.approx(20)
    assert len(relaxed.program.row_lower) > len(plain.row_lower)


@given(problem=problems(limited=True), data=st.data())
@settings(max_examples=200)
def test_feasible_choices_satisfy_every_cut(problem: Problem, data: st.DataObject) -> None:
    """For any point of the relaxation at which cuts are separated, which violates them."""
    memory = Memory.of(problem, [np.arange(size) for size in problem.num_strategies])
    offsets = np.concatenate([[0], np.cumsum(problem.num_strategies)])
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    solution = np.concatenate([random.dirichlet(np.full(size, 0.3)) for size in problem.num_strategies])

    rows = range(memory.num_rows)
    for cut in (*covers(memory, offsets, rows, solution), *rounding_cuts(memory, offsets, rows, solution)):
        assert float(cut.values @ solution[cut.columns]) > cut.most
        for choice in choices(problem):
            if problem.fits(choice):
                taken = indicator(offsets, choice)
                assert float(cut.values @ taken[cut.columns]) <= cut.most


def test_rounding_closes_a_gap_that_covers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four nodes use 0, 2 or 3 of 7 for 10, 4 or 0: one must pay 10 and two 4, covers prove 16 2/3.

    From the second round on, the program starts from the basis of the one before.
    """
    usages = [Usage(node, 0, 1, np.array([0, 2, 3])) for node in range(4)]
    problem = Problem.build([[10, 4, 0]] * 4, usages=usages, limit=7)
    prepared = prepare(problem)
    assert prepared is not None
    memory = Memory.of(problem, prepared.labels)
    bases: list[Basis | None] = []

    def run(program: LinearProgram, integer: bool, limits: Budget) -> Outcome:
        bases.append(program.basis)
        return highs.run(program, integer, limits)

    rounded = lazy_rows.relaxation(prepared.field, memory, budget(problem), run, set()).outcome.bound
    monkeypatch.setattr(lazy_rows, "rounding_cuts", lambda *_: [])
    covered = lazy_rows.relaxation(prepared.field, memory, budget(problem), highs.run, set()).outcome.bound

    assert covered == pytest.approx(16 + 2 / 3)
    assert rounded == pytest.approx(18)
    assert min(problem.cost(c) for c in choices(problem) if problem.fits(c)) == 18
    assert bases[0] is None
    assert all(basis is not None for basis in bases[1:])


@given(problem=problems())
@settings(max_examples=100)
def test_a_warm_start_satisfies_the_program(problem: Problem) -> None:
    """The warm start satisfies every row but limits, at its cost."""
    prepared = prepare(problem)
    if prepared is None:
        return
    plain = linear_program(prepared.field, scale_of(prepared.field))
    for choice in choices(problem):
        labels = prepared.choice(choice)
        if labels is None or problem.cost(choice) == math.inf:
            continue

        start = plain.with_start(labels).start

        assert start is not None
        rows = np.repeat(np.arange(len(plain.row_lower)), np.diff(plain.starts))
        activity = np.bincount(rows, plain.values * start[plain.columns], minlength=len(plain.row_lower))
        assert activity == pytest.approx(plain.row_lower)
        cost = float(plain.cost @ start) * plain.scale + plain.constant
        assert cost == pytest.approx(float(problem.cost(choice)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", CODES)
def test_back_ends_receive_the_warm_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every integer program receives the warm start, and the optimum does not change."""
    problem = k_tree(12, width=2, tightness=0.3)
    best = solvers.load("auto").solve(problem)
    assert best.choice is not None
    solver = solvers.load(name)
    assert isinstance(solver, MipSolver)
    begun: list[bool] = []
    original = type(solver).solve_program

    def solve_program(self: Any, program: Any, integer: bool, budget: Budget) -> Any:
        if integer:
            begun.append(program.start is not None)
        return original(self, program, integer, budget)

    monkeypatch.setattr(type(solver), "solve_program", solve_program)

    solution = solver.solve(problem, start=best.choice)

    check_solution(problem, solution)
    assert solution.termination is Termination.OPTIMAL
    assert close(problem, solution.cost, best.cost)
    assert begun
    assert all(begun)


def test_reduced_cost_fixing_shrinks_the_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the optimum, HiGHS branches on fewer labels and proves the optimum."""
    problem = k_tree(60, width=2, tightness=0.97, seed=1)
    best = solvers.load("auto").solve(problem)
    assert best.choice is not None
    sizes: list[int] = []
    original = highs.run

    def run(program: Any, whole: bool, budget: Budget, ceiling: float = math.inf) -> Any:
        sizes.append(program.num_labels)
        return original(program, whole, budget, ceiling)

    monkeypatch.setattr(highs, "run", run)

    solution = solvers.load("highs").solve(problem, start=best.choice)

    assert solution.termination is Termination.OPTIMAL
    assert close(problem, solution.cost, best.cost)
    assert sizes[-1] < 0.9 * sizes[0]


def budget(problem: Problem) -> Budget:
    """Return a budget without limits."""
    return Budget(problem, math.inf, None, math.inf, 0.0, None)
