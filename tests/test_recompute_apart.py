"""Searches once per kind of recompute: what is proven where not all kinds were searched."""

import pytest

from autopar import recompute_apart
from autopar.frameworks import restriction
from autopar.pins import Pins
from autopar.recompute_apart import plan_apart
from autopar.request import JobRequest
from autopar.search.outcome import Outcome
from autopar.sizing.fewer import least_seconds
from autopar.task import Effort, prepare
from autopar.task_search import search_plans
from tests.formulations import DIMS


def test_a_bound_holds_for_kinds_that_were_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the first of two kinds, only what holds for all plans is proven; the whole search proves more."""
    pins = restriction.kept_to("fsdp", Pins(), model="zoo:gpt2", gpus=2, cluster="h100")
    kinds = restriction.kinds_of_recompute("fsdp", pins)
    task = prepare(JobRequest("zoo:gpt2", gpus=2, cluster="h100", global_batch=4, dims=DIMS["gpt2"], pins=pins))
    whole = plan_apart(task, kinds, Effort(top_k=1))

    def interrupted(*args: object, **options: object) -> Outcome:
        outcome = search_plans(*args, **options)  # type: ignore[arg-type]
        outcome.stopped = "interrupted"
        return outcome

    monkeypatch.setattr(recompute_apart, "search_plans", interrupted)
    cut = plan_apart(task, kinds, Effort(top_k=1))

    assert len(kinds) == 2
    assert whole.search is not None
    assert cut.search is not None
    assert cut.search.termination == "interrupted"
    assert cut.search.bound <= least_seconds(task) < whole.search.bound
