"""The verdict: of what is simulated the fastest plan is returned, and nothing that may be faster is left out."""

import math
import time
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

import autopar
from autopar import verdict
from autopar.describe.signature import Signature
from autopar.plan import PhaseTime, Plan
from autopar.request import JobRequest
from autopar.search.outcome import Outcome
from autopar.task import NO_SECONDS, Effort, PhaseClock, Task, prepare
from tests.formulations import DIMS


@dataclass(frozen=True)
class _Known:
    """A candidate whose simulation is known before."""

    objective: float
    simulated: float
    signature: Signature


@cache
def _task() -> Task:
    return prepare(JobRequest("zoo:mlp-xs", gpus=1, global_batch=8, dims=DIMS["mlp-xs"]))


@cache
def _plan() -> Plan:
    return autopar.solve("zoo:mlp-xs", gpus=1, global_batch=8, dims=DIMS["mlp-xs"])


def _returned(
    known: list[_Known],
    top_k: int,
    monkeypatch: pytest.MonkeyPatch,
    end: float = math.inf,
    fits: int = 0,
    takes: float = 1.0,
) -> tuple[list[float], int]:
    """Return the simulated seconds of the plans returned, and how many were simulated; the first `fits` do not fit.

    The clock starts at 0, and each takes so many seconds.
    """
    looked: list[_Known] = []
    pattern, found = _plan(), _plan().simulated
    assert found is not None

    def simulate(candidate: _Known, task: Task, astray: list[str], fusion: str) -> Plan | None:
        looked.append(candidate)
        if len(looked) <= fits:
            return None
        return replace(
            pattern, objective=candidate.objective, simulated=replace(found, step_seconds=candidate.simulated)
        )

    monkeypatch.setattr(verdict, "_verify", simulate)
    monkeypatch.setattr(verdict, "time", SimpleNamespace(monotonic=lambda: takes * len(looked)))
    outcome = Outcome(candidates=known)  # type: ignore[arg-type]
    plan = verdict.conclude(outcome, _task(), "test", top_k, PhaseClock(), end)
    plans = (plan, *plan.alternatives)
    return [each.simulated.step_seconds for each in plans if each.simulated is not None], len(looked)


def _candidates(*times: tuple[float, float]) -> list[_Known]:
    """Return candidates by objective and simulated seconds, each with a degree of its own."""
    return [
        _Known(objective, simulated, Signature((("dp", 0, number),), 1, "", 1, "none"))
        for number, (objective, simulated) in enumerate(times)
    ]


def test_an_interruption_is_answered_after_the_candidate_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is simulated by then; it counts as interrupted, so that no cache keeps it as the answer."""
    plan = _plan()
    monkeypatch.setattr(verdict, "_verify", lambda candidate, task, astray, fusion: plan)
    outcome = Outcome(candidates=_candidates((1.0, 1.0), (2.0, 2.0)))  # type: ignore[arg-type]

    found = verdict.conclude(outcome, _task(), "test", 3, PhaseClock(), should_stop=lambda: True)

    assert found.search is not None
    assert found.search.termination == "interrupted"
    assert found.alternatives == ()


def test_what_may_be_faster_than_the_fastest_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth is faster by the formula than any before it is simulated; the fifth is not."""
    known = _candidates((1.0, 2.0), (1.1, 1.9), (1.2, 1.8), (1.3, 1.4), (1.5, 1.0))

    assert _returned(known, 1, monkeypatch) == ([1.4], 4)


def test_one_plan_is_no_slower_than_the_best_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _candidates(*((1.0 + number / 100, 3.0 - number / 10) for number in range(12)))

    (one, _), (three, _) = (_returned(known, top_k, monkeypatch) for top_k in (1, 3))

    assert one[0] == three[0] == min(known[number].simulated for number in range(verdict.VERIFY_MOST))
    assert three == sorted(three)
    assert len(three) == 3


def test_no_more_is_simulated_than_may_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _candidates(*((1.0 + number / 100, 1.0 + number / 100) for number in range(12)))

    assert _returned(known, 1, monkeypatch) == ([1.0], verdict.VERIFY)


@pytest.mark.parametrize("fits", [0, 2])
def test_when_the_time_is_over_the_first_plan_that_fits_is_returned(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known = _candidates(*((1.0 + number / 100, 3.0 - number / 10) for number in range(12)))

    assert _returned(known, 3, monkeypatch, end=0.0, fits=fits) == ([3.0 - fits / 10], fits + 1)


@pytest.mark.parametrize(("end", "simulated"), [(13.0, 2), (14.0, 3)])
def test_nothing_is_simulated_that_takes_longer_than_there_is_left(
    end: float, simulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as those before can tell: of four seconds each, of which another may take six, a third fits in 14."""
    known = _candidates(*((1.0 + number / 100, 3.0 - number / 10) for number in range(12)))

    assert _returned(known, 3, monkeypatch, end=end, takes=4.0)[1] == simulated


@pytest.mark.parametrize(
    ("limit", "took", "left"),
    [
        (None, 9.0, None),
        (100.0, 1.0, 95.0),  # a share
        (400.0, 1.0, 390.0),  # but no more than so much
        (38.0, 4.0, 35.0),  # a plan takes longer to verify if the model took longer to import
        (8.0, 4.0, 6.0),  # where most of the limit is still there to search in
        (400.0, 100.0, 390.0),
    ],
)
def test_a_part_of_a_limit_is_kept_for_the_verdict(limit: float | None, took: float, left: float | None) -> None:
    task = replace(_task(), phases=(PhaseTime("import", took, 0.0), PhaseTime("discover", 50.0, 0.0)))

    assert verdict.searching(Effort(time_limit=limit), task).time_limit == left


def test_what_is_left_of_an_effort_is_never_less_than_nothing() -> None:
    assert Effort(time_limit=9.0).after(2.0).time_limit == 7.0
    assert Effort(time_limit=9.0).after(10.0).time_limit == NO_SECONDS
    assert Effort().after(10.0).time_limit is None


def test_the_limit_of_a_job_counts_from_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the search is given is what the import of the model has left of the limit."""
    spent, left, answer = list[float](), list[float | None](), _plan()

    def slow(*args: Any, **options: Any) -> Task:
        start = time.monotonic()
        time.sleep(0.05)
        task = prepare(*args, **options)
        spent.append(time.monotonic() - start)
        return task

    def planned(task: Task, effort: Effort, **_: Any) -> Plan:
        left.append(effort.time_limit)
        return answer

    monkeypatch.setattr("autopar.api.prepare", slow)
    monkeypatch.setattr("autopar.api.plan_task", planned)
    start = time.monotonic()

    autopar.solve("zoo:mlp-xs", gpus=1, global_batch=8, dims=DIMS["mlp-xs"], time_limit=1000.0)

    assert left[0] is not None
    assert 1000 - (time.monotonic() - start) <= left[0] <= 1000 - spent[0]


def test_the_printed_space_knows_the_nodes_of_the_job() -> None:
    """Two nodes of eight: which devices a stage has matters there, and not within one."""
    jobs = [prepare(JobRequest("zoo:mlp-xs", gpus=gpus, global_batch=16, dims=DIMS["mlp-xs"])) for gpus in (8, 16)]

    one, two = (verdict.search_report(Outcome(), task, 1.0, "auto", ()).space[0] for task in jobs)

    assert "of consecutive devices" in two
    assert "of consecutive devices" not in one
