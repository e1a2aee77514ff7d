"""Plans on fewer GPUs than asked for: where links between nodes are slow, half of the devices may be faster than all.

The space of a job has plans that use all its devices. Here the job is searched again on half of them, a quarter and so
on down to one node, wherever a plan there can be faster than what was found on all.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster import cluster_from_dict
from autopar.errors import InfeasibleError, InterruptedSearchError
from autopar.plan import HistoryPoint, PhaseTime, Plan, Remark, SearchReport
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.remarks import why_idle
from autopar.search.backends import HERE, Engine
from autopar.simplicity import NEAR
from autopar.task import Effort, PhaseClock, Task, resized
from autopar.task_search import search_plans
from autopar.units import format_seconds
from autopar.verdict import conclude, searching, step_seconds

SHARE = 0.25
"""Share of a time limit that is kept for fewer GPUs where links between nodes are slow."""

LEAST_SECONDS = 1.0
"""With less time than this left nothing is searched again."""


def fewer_counts(task: Task) -> tuple[int, ...]:
    """Return the numbers of devices to look at besides all: half of them, a quarter, ... that fill nodes.

    There are none where pins say what the plan is like, or where the nodes differ.
    """
    node, count = task.costs.cluster.devices_per_node, task.job.gpus
    found: list[int] = []
    while not task.pins and not task.costs.cluster.groups and count % (2 * node) == 0:
        count //= 2
        found.append(count)
    return tuple(found)


def links_are_slow(task: Task) -> bool:
    """Whether reducing the gradients between nodes alone takes longer than half of a step does at least.

    Each byte of the gradients passes twice over the links of a node, of which every device has its own.
    """
    if task.job.mode != "train":
        return False
    cluster, policy = task.costs.cluster, task.costs.policy
    folded = task.workload.folded(task.workload.fixed_batch or task.job.global_batch)
    gradients = sum(parameter.count * parameter.value.size for parameter in folded.parameters) * policy.gradient_wire
    return 2 * gradients / (cluster.devices_per_node * cluster.inter.bandwidth) > 0.5 * least_seconds(task)


def least_seconds(task: Task) -> float:
    """Return a lower bound on the step time of any plan of a task: the least of its space without communication."""
    return min(map(task.context(Effort()).least, zip(task.space)), default=math.inf)


def reserved(task: Task, effort: Effort) -> float:
    """Return the seconds of an effort that are kept for fewer GPUs."""
    if effort.time_limit is None or not fewer_counts(task) or not links_are_slow(task):
        return 0.0
    return SHARE * effort.time_limit


def best_on_fewer(
    task: Task,
    plan: Plan,
    effort: Effort,
    end: float,
    *,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    engine: Engine = HERE,
) -> Plan:
    """Return a plan on fewer GPUs if one is faster than the plan on all, else that plan; its bound holds for both.

    Args:
        task: The job.
        plan: What was found on all its devices.
        effort: How hard to look.
        end: When to have done, on the monotonic clock.
        progress: Told how far it is.
        should_stop: Polled; once true what is known is returned.
        engine: Where to search.
    """
    told, others = list[str](), list[Plan]()
    bound = plan.search.bound if plan.search is not None else 0.0
    for count in fewer_counts(task):
        fewer = resized(task, gpus=count)
        least = least_seconds(fewer)
        unseen = ""
        if least >= min(map(step_seconds, (plan, *others))):
            unseen = f"on {count} GPUs or fewer no plan"
        elif should_stop() or time.monotonic() + LEAST_SECONDS > end:
            unseen = f"not searched: plans on {count} GPUs or fewer; none"
        if unseen:
            bound = min(bound, least)
            told.append(f"{unseen} is faster than {format_seconds(least)}")
            break
        found, proven = _planned(fewer, effort, end, progress, should_stop, engine)
        least = max(least, proven)
        bound = min(bound, least)
        if found is not None:
            told.append(f"on {count} GPUs: {format_seconds(step_seconds(found))}")
            others.append(found)
        elif math.isinf(least):
            told.append(f"on {count} GPUs no plan fits")
        else:
            told.append(f"on {count} GPUs: no plan was found that fits; none is faster than {format_seconds(least)}")
    enough = (1 + NEAR) * min(map(step_seconds, (plan, *others)))
    best = next((other for other in reversed(others) if step_seconds(other) <= enough), plan)  # the fewest GPUs
    return _joined(plan, best, others, bound, told) if told else plan


def _planned(
    task: Task, effort: Effort, end: float, progress: ProgressCallback, should_stop: StopCallback, engine: Engine
) -> tuple[Plan | None, float]:
    """Return the best plan of a task, and seconds that none stays below: infinity if it is proven that none fits.

    The plan is None if none was found until the end: there is one on all devices already.
    """

    def is_over() -> bool:
        return should_stop() or time.monotonic() > end

    limited = effort if math.isinf(end) else replace(effort, time_limit=max(LEAST_SECONDS, end - time.monotonic()))
    clock = PhaseClock(progress)
    with clock("search"):
        outcome = search_plans(task, searching(limited, task), progress=progress, should_stop=is_over, engine=engine)
    try:
        plan = conclude(outcome, task, effort.solver, effort.top_k, clock, end, is_over, effort.fusion)
    except (InfeasibleError, InterruptedSearchError):
        return None, outcome.bound if outcome.proves_none or not math.isinf(outcome.bound) else 0.0
    report = plan.search
    assert report is not None, "it was searched for"
    if report.termination == "interrupted" and not should_stop():
        plan = replace(plan, search=replace(report, termination="time limit"))
    return plan, report.bound


def _joined(plan: Plan, best: Plan, others: Sequence[Plan], bound: float, told: Sequence[str]) -> Plan:
    """Return the best of a plan on all devices and of others on fewer, with a report of all that was searched."""
    assert plan.search is not None, "it was searched for"
    searches = [plan.search, *(other.search for other in others if other.search is not None)]
    objective = best.objective
    bound = min(bound, objective)
    stopped = next((own.termination for own in searches if own.termination in ("time limit", "interrupted")), "")
    proven = bound >= objective * (1 - OPTIMALITY_TOLERANCE)
    report = replace(
        plan.search,
        objective=objective,
        bound=bound,
        termination=stopped or ("optimal" if proven else "exhausted"),
        space=(*plan.search.space, "; ".join(("plans on fewer GPUs", *told))),
        configurations=sum(own.configurations for own in searches),
        solved=sum(own.solved for own in searches),
        pruned=sum(own.pruned for own in searches),
        cut=sum(own.cut for own in searches),
        complete=min(own.complete for own in searches),
        phases=_phases(searches),
        history=_history(searches, bound),
    )
    if best is plan:
        return replace(plan, search=report)
    assert best.simulated is not None, "it was simulated"
    cluster = cluster_from_dict(plan.job.cluster)
    remark = Remark(
        "idle",
        f"{plan.job.gpus - best.job.gpus} of {plan.job.gpus} GPUs are left free: {why_idle(cluster)}",
    )
    simulated = replace(best.simulated, remarks=(remark, *best.simulated.remarks))
    beside = sorted((plan, *plan.alternatives, *best.alternatives), key=step_seconds)[: max(1, len(plan.alternatives))]
    return replace(
        best,
        simulated=simulated,
        search=report,
        alternatives=tuple(other.without_alternatives() for other in beside),
    )


def _phases(searches: Sequence[SearchReport]) -> tuple[PhaseTime, ...]:
    """Return the phases of searches one after the other, those of one name added up."""
    found: dict[str, PhaseTime] = {}
    for phase in (phase for own in searches for phase in own.phases):
        known = found.get(phase.name, PhaseTime(phase.name, 0.0, 0.0))
        most = max(known.peak_bytes, phase.peak_bytes)
        found[phase.name] = PhaseTime(phase.name, known.seconds + phase.seconds, most)
    return tuple(found.values())


def _history(searches: Sequence[SearchReport], bound: float) -> tuple[HistoryPoint, ...]:
    """Return the histories of searches one after the other, with what is proven for all of them."""
    found: list[HistoryPoint] = []
    took = 0.0
    for own in searches:
        for point in own.history:
            best = min(point.objective, found[-1].objective if found else math.inf)
            found.append(HistoryPoint(took + point.seconds, best, min(point.bound, bound)))
        took += sum(phase.seconds for phase in own.phases)
    return tuple(found)
