"""Work limits are deterministic: a slow machine stops at the point of a fast one, and finds the same plan."""

import time
from itertools import count, pairwise

import pytest

from autopar import solvers
from autopar.problem import OPTIMALITY_TOLERANCE, Termination
from autopar.request import JobRequest
from autopar.search.branch_and_bound import search as run_search
from autopar.search.outcome import Outcome
from autopar.search.settings import DEFAULT_SETTINGS, NodeSettings, SearchSettings
from autopar.solvers import limited
from autopar.solvers.base import Work
from autopar.task import Effort, prepare
from tests.checks import check_solution
from tests.formulations import DIMS
from tests.instances import k_tree

HARD = k_tree(60, width=6, tightness=0.35, num_strategies=6, seed=3)
"""A problem that no method closes at once: a wide graph under a limit."""

COUNTING = [name for name in solvers.available() if solvers.load(name).counts_work]


def _slow(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """Advance the clock by `step` seconds at every read."""
    ticks = count()
    monkeypatch.setattr(time, "monotonic", lambda: step * next(ticks))


def test_work_is_counted_in_its_parent() -> None:
    """The remaining work of a part is at most that of its parent."""
    whole = Work(100)
    part = Work(80, whole)

    part.spend(30)
    whole.spend(60)

    assert (whole.done, part.done) == (90, 30)
    assert (whole.left, part.left) == (10, 10)
    part.spend(20)
    assert whole.left == part.left == 0


def test_the_default_solver_counts_its_work() -> None:
    """Otherwise placement problems would be limited by the clock."""
    assert "auto" in COUNTING


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("limit", [1e5, 1e7, 1e8])
def test_a_work_limit_is_deterministic(name: str, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs, the second with a fast clock, stop at the same work with equal, valid solutions."""
    first, second = Work(limit), Work(limit)

    found = solvers.load(name).solve(HARD, work=first)
    _slow(monkeypatch, 100.0)
    again = solvers.load(name).solve(HARD, work=second)

    check_solution(HARD, found)
    assert (found, first.done) == (again, second.done)
    assert first.left == 0
    assert found.termination in (Termination.FEASIBLE, Termination.UNKNOWN)


@pytest.mark.parametrize("name", COUNTING)
def test_more_work_is_no_worse(name: str) -> None:
    """The bound rises and the cost falls."""
    found = [solvers.load(name).solve(HARD, work=Work(limit)) for limit in (1e5, 1e7, 1e9)]

    for less, more in pairwise(found):
        assert more.cost <= less.cost
        assert more.bound >= less.bound


def _outcome(time_limit: float | None = None, settings: SearchSettings = DEFAULT_SETTINGS) -> Outcome:
    task = prepare(JobRequest("zoo:mlp-xs", gpus=2, global_batch=4, dims=DIMS["mlp-xs"] | {"num_layers": 2}))
    return run_search(task.space, task.context(Effort(top_k=3, time_limit=time_limit, settings=settings)))


def test_of_a_limit_of_time_no_problem_takes_more_than_a_part() -> None:
    """One that is cut has a bound all the same; without a limit none is."""
    hurried, found = _outcome(600.0, SearchSettings(node=NodeSettings(priced_work=1e-3))), _outcome()

    assert hurried.cut > 0
    assert found.cut == 0
    assert hurried.bound <= found.best * (1 + OPTIMALITY_TOLERANCE)
    assert hurried.best >= found.bound


@pytest.mark.parametrize("limit", [None, 100.0])
def test_a_slow_machine_finds_the_same_plans(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one that takes minutes from each look at the clock to the next; also where limits of work cut problems."""
    if limit is not None:
        monkeypatch.setattr(limited, "PLACEMENT_WORK", limit)

    found = _outcome()
    _slow(monkeypatch, 60.0)
    again = _outcome()

    assert (found.cut > 0) is (limit is not None)
    assert _answer(found) == _answer(again)


def _answer(outcome: Outcome) -> tuple[object, ...]:
    """Return all of an outcome but the clock."""
    plans = [(plan.configuration, plan.choice, plan.split, plan.objective) for plan in outcome.candidates]
    return plans, outcome.bound, outcome.complete, outcome.cut, outcome.solved, outcome.pruned, outcome.work
