"""A search once per kind of recompute, for frameworks whose layers all run the same again.

Pins say what a layer may recompute, not that all layers do the same. So the space is cut into one part per kind, each
of which is searched for its share of the time; the best plan of all is returned with the least of the bounds.

Plans by degrees come first (`seeding.py`): the kind that has the fastest one is searched first, and each kind looks for
plans only that are faster than all that are known. The time limit is that of all together: a kind whose turn comes
after the limit is not searched, and nothing is proven of it.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.collector import seldom_collected
from autopar.errors import InfeasibleError
from autopar.pins import Pins
from autopar.plan import PhaseTime, Plan
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.search.backends import HERE, Engine
from autopar.search.outcome import Outcome
from autopar.seeding import NO_SEEDS, Seeds, seeds_of
from autopar.simplicity import NEAR
from autopar.sizing.explain import explain_parts
from autopar.sizing.fewer import least_seconds
from autopar.task import Effort, PhaseClock, Task, pinned
from autopar.task_search import search_plans
from autopar.verdict import conclude, none_found, search_report, searching, step_seconds

LEAST_SECONDS = 1.0
"""What each kind is searched for at least, if it is."""


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
        kinds: Pins of each kind, the fastest first.
        effort: How hard to look, for all kinds together.
        progress: Told how far the searches are.
        should_stop: Polled; once true the best plan so far is returned.
        engine: Where to search.

    Raises:
        InfeasibleError: If no plan of any kind fits.
        InterruptedSearchError: If it was stopped before the first plan.
    """
    end = math.inf if effort.time_limit is None else time.monotonic() + effort.time_limit
    clock = PhaseClock(progress, task.phases)
    with clock("degrees"):
        seeds = _seeds(task, kinds, effort, progress, should_stop)
    kinds = sorted(kinds, key=lambda pins: min(map(seeds.seconds, _flavours(pins))))  # the given order where equal
    best, plans, outcomes = seeds.objective, list[Plan](), list[tuple[Task, Outcome]]()
    for number, pins in enumerate(kinds):
        left, is_last = end - time.monotonic(), number == len(kinds) - 1
        if outcomes and math.isfinite(best) and left <= 0:
            break
        one = pinned(task, pins)
        overtime = effort.settings.overtime_seconds + min(0.0, left) if is_last and math.isinf(best) else 0.0
        own = replace(effort, settings=replace(effort.settings, overtime_seconds=max(0.0, overtime)))
        if not math.isinf(end):
            own = replace(own, time_limit=max(LEAST_SECONDS, left / (len(kinds) - number)))
        until = math.inf if own.time_limit is None else time.monotonic() + own.time_limit
        with clock("search"):
            outcome = search_plans(
                one,
                searching(own, one),
                progress=progress,
                should_stop=should_stop,
                engine=engine,
                incumbent=best,
                starts=seeds.starts(_flavours(pins)),
            )
        outcomes.append((one, outcome))
        if outcome.candidates and outcome.candidates[0].objective <= (1 + NEAR) * best:
            with suppress(InfeasibleError):  # it fits by the formula, and not when simulated
                plans.append(conclude(outcome, one, own.solver, own.top_k, clock, until, should_stop, own.fusion))
                best = min(best, *(plan.objective for plan in (plans[-1], *plans[-1].alternatives)))
        if outcome.stopped == "interrupted":
            break
    one, outcome = outcomes[-1]
    if not plans and seeds.plan is None:
        if outcome.stopped:
            raise none_found(outcome)
        raise explain_parts(outcomes, effort, end=end, progress=progress, should_stop=should_stop)
    if not plans:
        plans = [seeds.alone(search_report(outcome, one, best, effort.solver, clock.times), task, effort.fusion)]
    bound = min(outcome.bound for _, outcome in outcomes)
    left_out = [flavour for pins in kinds[len(outcomes) :] for flavour in _flavours(pins)]
    if left_out:  # nothing is proven of these but what holds for all plans
        bound = min(bound, least_seconds(task))
    stopped = next((outcome.stopped for _, outcome in reversed(outcomes) if outcome.stopped), "")
    plan = _best(plans, bound, stopped or ("time limit" if left_out else ""), left_out, effort.top_k)
    assert plan.search is not None, "it was searched"
    plan = replace(plan, search=replace(plan.search, phases=_together(clock.times)))
    return seeds.beside(plan, task, effort.fusion)


def _together(times: Sequence[PhaseTime]) -> tuple[PhaseTime, ...]:
    """Return phases of one name as one, in the order of the first of each name."""
    found: dict[str, PhaseTime] = {}
    for own in times:
        known = found.get(own.name, PhaseTime(own.name, 0.0, 0.0))
        found[own.name] = PhaseTime(own.name, known.seconds + own.seconds, max(known.peak_bytes, own.peak_bytes))
    return tuple(found.values())


def _flavours(pins: Pins) -> list[str]:
    """Return the kinds of recompute of pins."""
    return [str(flavour) for item in pins.pin.recompute for flavour in item.flavours]


def _seeds(
    task: Task, kinds: Sequence[Pins], effort: Effort, progress: ProgressCallback, should_stop: StopCallback
) -> Seeds:
    """Return the plans by degrees to begin with; none where pins of a user, which plans by degrees may break, count."""
    if task.runs is None:
        return NO_SEEDS
    flavours = [flavour for pins in kinds for flavour in _flavours(pins)]
    return seeds_of(task, task.runs, flavours, effort, progress=progress, should_stop=should_stop)


def _best(plans: Sequence[Plan], bound: float, stopped: str, left_out: Sequence[str], top_k: int) -> Plan:
    """Return the fastest of plans, the others and their alternatives behind it.

    Args:
        plans: The best plan of each kind of recompute that has one.
        bound: Lower bound on the plans of all kinds, in seconds.
        stopped: Why the search ended before its end; "" if it did not.
        left_out: Kinds of recompute that were not searched.
        top_k: Number of plans wanted.
    """
    best = min(plans, key=step_seconds)
    assert best.search is not None, "it was searched"
    others = [own.without_alternatives() for own in plans if own is not best]
    others = sorted([*best.alternatives, *others], key=step_seconds)[: max(0, top_k - 1)]
    proven = bound >= best.search.objective
    words = (f"not searched for lack of time: {' and '.join(left_out)} recompute",) if left_out else ()
    report = replace(
        best.search,
        bound=min(bound, best.search.objective),
        termination=stopped or ("optimal" if proven else "exhausted"),
        space=(*best.search.space, *words),
        history=(),
        complete=0.0,
    )
    return replace(best, search=report, alternatives=tuple(others))
