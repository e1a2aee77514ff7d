"""A search once per kind of recompute, for frameworks whose layers all run the same again.

Pins say what a layer may recompute, not that all layers do the same. So the space is cut into one part per kind, each
of which is searched for its share of the time; the best plan of all is returned with the least of the bounds.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.collector import seldom_collected
from autopar.errors import InfeasibleError
from autopar.pins import Pins
from autopar.plan import Plan
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.search.backends import HERE, Engine
from autopar.search.outcome import Outcome
from autopar.sizing.explain import explain_infeasible
from autopar.sizing.fewer import least_seconds
from autopar.task import Effort, PhaseClock, Task, pinned
from autopar.task_search import search_plans
from autopar.verdict import conclude, searching, step_seconds

LEAST_SECONDS = 1.0
"""What each kind is searched for at least."""


@seldom_collected()
def plan_apart(
    task: Task,
    kinds: Sequence[Pins],
    effort: Effort,
    *,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    engine: Engine = HERE,
) -> Plan:
    """Return the best plan of all kinds of recompute, and a bound on the plans of all.

    Args:
        task: The job.
        kinds: Pins of each kind, the fastest first: where that does not fit, its search ends early, and leaves its time
            to the others.
        effort: How hard to look, for all kinds together.
        progress: Told how far the searches are.
        should_stop: Polled; once true the best plan so far is returned.
        engine: Where to search.

    Raises:
        InfeasibleError: If no plan of any kind fits.
        InterruptedSearchError: If it was stopped before the first plan.
    """
    end = math.inf if effort.time_limit is None else time.monotonic() + effort.time_limit
    plans: list[Plan] = []
    outcomes: list[tuple[Task, Outcome]] = []
    for number, pins in enumerate(kinds):
        one, own = pinned(task, pins), effort
        if not math.isinf(end):
            own = replace(effort, time_limit=max(LEAST_SECONDS, (end - time.monotonic()) / (len(kinds) - number)))
        until = math.inf if own.time_limit is None else time.monotonic() + own.time_limit
        clock = PhaseClock(progress, task.phases)
        with clock("search"):
            outcome = search_plans(one, searching(own, one), progress=progress, should_stop=should_stop, engine=engine)
        outcomes.append((one, outcome))
        is_last = number == len(kinds) - 1 or outcome.stopped == "interrupted"
        if outcome.candidates or (is_last and not plans and outcome.stopped):
            try:
                plans.append(conclude(outcome, one, own.solver, own.top_k, clock, until, should_stop, own.fusion))
            except InfeasibleError:  # it fits by the formula, and not when simulated
                continue
        if outcome.stopped == "interrupted":
            break
    if not plans:
        one, outcome = outcomes[-1]
        raise explain_infeasible(one, effort, outcome, end=end, progress=progress, should_stop=should_stop)
    bound = min(outcome.bound for _, outcome in outcomes)
    if len(outcomes) < len(kinds):  # nothing is proven of the others but what holds for all plans
        bound = min(bound, least_seconds(task))
    stopped = next((outcome.stopped for _, outcome in reversed(outcomes) if outcome.stopped), "")
    return _best(plans, bound, stopped, effort.top_k)


def _best(plans: Sequence[Plan], bound: float, stopped: str, top_k: int) -> Plan:
    """Return the fastest of plans, the others and their alternatives behind it, with a bound on all."""
    best = min(plans, key=step_seconds)
    assert best.search is not None, "it was searched"
    others = [own.without_alternatives() for own in plans if own is not best]
    others = sorted([*best.alternatives, *others], key=step_seconds)[: max(0, top_k - 1)]
    proven = bound >= best.search.objective
    report = replace(
        best.search,
        bound=min(bound, best.search.objective),
        termination=stopped or ("optimal" if proven else "exhausted"),
        history=(),
        complete=0.0,
    )
    return replace(best, search=report, alternatives=tuple(others))
