"""Of plans that are equally fast, as far as predictions can tell, the usual and simple one is taken."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.degrees import Degrees
from autopar.plan import Plan, StageMemory
from autopar.report.parts import why_lost
from autopar.report.ranking import reorderings
from autopar.request import JobRequest
from autopar.simplicity import NEAR, complexity
from autopar.task import Task, prepare
from autopar.verdict import simplest

_DIMS = {"hidden": 8, "num_layers": 4}


@cache
def _task() -> Task:
    return prepare(JobRequest("zoo:mlp-xs", gpus=2, global_batch=8, dims=_DIMS))


def _plan(seconds: float = 1.0, peak: float = 1e9, **degrees: Any) -> Plan:
    """Return a plan by degrees that takes so many seconds and bytes."""
    plan = autopar.predict("zoo:mlp-xs", Degrees(**degrees, global_batch=8), dims=_DIMS).plan
    assert plan.simulated is not None
    simulated = replace(plan.simulated, step_seconds=seconds, stages=(StageMemory(peak, {}),) * len(plan.stages))
    return replace(plan, objective=seconds, simulated=simulated)


def test_what_is_usual_counts_less() -> None:
    """Plain data parallelism and the distributed optimizer count nothing; everything else does."""
    ascending: list[dict[str, Any]] = [
        {"dp": 2, "zero": 2},
        {"dp": 2, "zero": 3},
        {"dp": 2, "zero": 3, "recompute": "full"},
        {"dp": 2, "pp": 2, "zero": 3, "schedule": "zb-h1", "recompute": "full"},
    ]
    folded = _task().workload.folded(8)

    found = [complexity(_plan(**own), folded) for own in ascending]

    assert complexity(_plan(dp=2), folded) == complexity(_plan(dp=2, zero=1), folded) == 0
    assert found == [1, 2, 3, 6]
    assert complexity(_plan(tp=2), folded) == complexity(_plan(pp=2), folded) == 1


@pytest.mark.parametrize(("behind", "chosen"), [(0.9 * NEAR, 1), (1.1 * NEAR, 0)])
def test_the_simpler_of_equally_fast_plans_is_taken(behind: float, chosen: int) -> None:
    """ZeRO-1 instead of ZeRO-3 for less than half a percent, and not for more; the faster plan is named."""
    fastest, simple = _plan(1.0, dp=2, zero=3), _plan(1.0 + behind, dp=2, zero=1)

    number, plan = simplest([fastest, simple], _task())

    assert number == chosen
    assert plan.summary == (fastest, simple)[chosen].summary
    assert plan.simulated is not None
    said = [remark.text for remark in plan.simulated.remarks if remark.kind == "choice"]
    assert len(said) == chosen
    assert all(fastest.summary in text for text in said)


def test_a_simpler_plan_that_leaves_little_memory_is_not_taken() -> None:
    """At 95 % of the limit and more it may not run at all."""
    fastest = _plan(1.0, dp=2, zero=3)
    tight = _plan(1.001, 0.96 * fastest.job.memory_limit, dp=2, zero=1)

    assert simplest([fastest, tight], _task())[0] == 0


def test_a_faster_runner_up_is_not_said_to_have_lost_in_the_simulator() -> None:
    """It is faster by less than predictions tell apart."""
    fastest, simple = _plan(1.0, dp=2, zero=3), _plan(1.001, dp=2, zero=1)

    assert "faster by less than the model's error, and less simple" in why_lost(simple, fastest)
    assert not reorderings((simple, fastest))
