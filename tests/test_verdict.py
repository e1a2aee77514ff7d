"""The verdict: of what is simulated the fastest plan is returned, and nothing that may be faster is left out."""

from dataclasses import dataclass, replace
from functools import cache

import pytest

import autopar
from autopar import verdict
from autopar.plan import Plan
from autopar.search.outcome import Outcome
from autopar.search.signature import Signature
from autopar.task import PhaseClock, Task, prepare
from tests.formulations import DIMS


@dataclass(frozen=True)
class _Known:
    """A candidate whose simulation is known before."""

    objective: float
    simulated: float
    signature: Signature


@cache
def _task() -> Task:
    return prepare("zoo:mlp-xs", gpus=1, global_batch=8, dims=DIMS["mlp-xs"])


@cache
def _plan() -> Plan:
    return autopar.solve("zoo:mlp-xs", gpus=1, global_batch=8, dims=DIMS["mlp-xs"])


def _returned(known: list[_Known], top_k: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], int]:
    """Return the simulated seconds of the plans returned, and how many were simulated."""
    looked: list[_Known] = []
    pattern, found = _plan(), _plan().simulated
    assert found is not None

    def simulate(candidate: _Known, task: Task, astray: list[str]) -> Plan:
        looked.append(candidate)
        return replace(
            pattern, objective=candidate.objective, simulated=replace(found, step_seconds=candidate.simulated)
        )

    monkeypatch.setattr(verdict, "_verify", simulate)
    outcome = Outcome(candidates=known)  # type: ignore[arg-type]
    plan = verdict.conclude(outcome, _task(), "test", top_k, PhaseClock())
    plans = (plan, *plan.alternatives)
    return [each.simulated.step_seconds for each in plans if each.simulated is not None], len(looked)


def _candidates(*times: tuple[float, float]) -> list[_Known]:
    """Return candidates by objective and simulated seconds, each with a degree of its own."""
    return [
        _Known(objective, simulated, Signature((("dp", 0, number),), 1, "", 1, "none"))
        for number, (objective, simulated) in enumerate(times)
    ]


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
