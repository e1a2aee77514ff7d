"""Plans on fewer GPUs than asked for: where links between nodes are slow, half of the devices may be faster than all.

The space of a job has plans that use all its devices. Here the job is searched again on parts of them, wherever a plan
there can be faster than what was found on all: on half of the devices, a quarter and so on down to one node; of
different nodes also on each kind alone, and on each mixture of some kinds.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from autopar.cluster import Cluster, NodeGroup, cluster_from_dict
from autopar.cost import default_limit
from autopar.errors import InfeasibleError, InterruptedSearchError
from autopar.plan import HistoryPoint, PhaseTime, Plan, SearchReport
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.progress import ProgressCallback, StopCallback, never, silent
from autopar.remarks import left_free
from autopar.search.backends import HERE, Engine
from autopar.simplicity import NEAR
from autopar.task import Effort, PhaseClock, Task, job_machine, resized
from autopar.task_search import search_plans
from autopar.units import format_seconds
from autopar.verdict import conclude, searching, step_seconds

SHARE = 0.25
"""Share of a time limit that is kept for fewer GPUs where links between nodes are slow."""

LEAST_SECONDS = 1.0
"""With less time than this left nothing is searched again."""

MOST_KINDS = 4
"""Kinds of nodes from which on mixtures of some kinds are not looked at: there are as many as subsets of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some devices of a cluster, the others being free.

    Attributes:
        gpus: How many.
        cluster: Their cluster; a job on its first devices is meant.
        name: Which nodes of different ones they are; "" where all nodes are equal.
    """

    gpus: int
    cluster: Cluster
    name: str = ""

    @property
    def machine(self) -> Cluster:
        """What a job on these devices gets."""
        return job_machine(self.gpus, self.cluster)

    def __str__(self) -> str:
        return f"{self.gpus} GPUs{f' of {self.name}' if self.name else ''}"


def parts(task: Task) -> tuple[Part, ...]:
    """Return the parts of a job's devices to look at besides all, those with the most devices first.

    There are none where pins say what the plan is like.
    """
    if task.pins:
        return ()
    whole = task.costs.cluster
    if not whole.groups:
        return tuple(_halves(task.cluster, task.job.gpus, ""))
    found = [part for kinds in _mixtures(_used(whole, task.job.gpus)) for part in _of_kinds(whole, kinds)]
    # Of as many devices of several kinds, those that compute most come first.
    numbers = task.costs.policy.numbers
    return tuple(sorted(found, key=lambda part: (-part.gpus, -part.cluster.total_peak(numbers, part.gpus))))


def _used(cluster: Cluster, gpus: int) -> list[tuple[NodeGroup, int]]:
    """Return the kinds of nodes that a job uses, and how many devices of each."""
    found, left = [], gpus
    for group in cluster.groups:
        if left > 0:
            found.append((group, min(left, group.devices)))
        left -= group.devices
    return found


def _mixtures(kinds: Sequence[tuple[NodeGroup, int]]) -> Iterator[tuple[tuple[NodeGroup, int], ...]]:
    """Yield each kind alone, and each mixture of some kinds, but not all, where there are few."""
    for size in range(1, len(kinds) if len(kinds) <= MOST_KINDS else 2):
        yield from combinations(kinds, size)


def _of_kinds(whole: Cluster, kinds: Sequence[tuple[NodeGroup, int]]) -> Iterator[Part]:
    """Yield the part of all devices of some kinds, and smaller ones of a kind alone."""
    name = " and ".join(group.cluster.device.name for group, _ in kinds)
    gpus = sum(count for _, count in kinds)
    if len(kinds) == 1:
        cluster = kinds[0][0].cluster
        yield Part(gpus, cluster, name)
        yield from _halves(cluster, gpus, name)
        return
    assert whole.between is not None, "a link connects different nodes"
    yield Part(gpus, Cluster.mixed(f"{whole.name}: {name}", tuple(group for group, _ in kinds), whole.between), name)


def _halves(cluster: Cluster, gpus: int, name: str) -> Iterator[Part]:
    """Yield half of the devices, a quarter, ... that fill nodes."""
    node = cluster.of_job(gpus).devices_per_node
    while gpus % (2 * node) == 0:
        gpus //= 2
        yield Part(gpus, cluster, name)


def of_part(task: Task, part: Part) -> Task:
    """Return a task on a part of its devices, which have what memory they have unless a limit was given."""
    limited = task.job.memory_limit != default_limit(task.costs.cluster)
    limit = task.job.memory_limit if limited else default_limit(part.machine)
    return resized(replace(task, cluster=part.cluster), gpus=part.gpus, memory_limit=limit)


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
    if effort.time_limit is None or not parts(task) or not links_are_slow(task):
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
    told, others, places = list[str](), list[Plan](), list[Part]()
    bound = plan.search.bound if plan.search is not None else 0.0
    for part in parts(task):
        fewer = of_part(task, part)
        least = least_seconds(fewer)
        unseen, which = "", str(part) if part.name else f"{part} or fewer"
        if least >= min(map(step_seconds, (plan, *others))):
            unseen = f"on {which} no plan"
        elif should_stop() or time.monotonic() + LEAST_SECONDS > end:
            unseen = f"not searched: plans on {which}; none"
        if unseen:
            bound = min(bound, least)
            told.append(f"{unseen} is faster than {format_seconds(least)}")
            if part.name:
                continue
            break
        found, proven = _planned(fewer, effort, end, progress, should_stop, engine)
        least = max(least, proven)
        bound = min(bound, least)
        if found is not None:
            told.append(f"on {part}: {format_seconds(step_seconds(found))}")
            others.append(found)
            places.append(part)
        elif math.isinf(least):
            told.append(f"on {part} no plan fits")
        else:
            told.append(f"on {part}: no plan was found that fits; none is faster than {format_seconds(least)}")
    enough = (1 + NEAR) * min(map(step_seconds, (plan, *others)))
    best = next((other for other in reversed(others) if step_seconds(other) <= enough), plan)  # the fewest GPUs
    kinds = next((part.name for part, other in zip(places, others, strict=True) if other is best), "")
    return _joined(plan, best, others, bound, told, kinds) if told else plan


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


def _joined(plan: Plan, best: Plan, others: Sequence[Plan], bound: float, told: Sequence[str], kinds: str) -> Plan:
    """Return the best of a plan on all devices and of others on fewer, with a report of all that was searched.

    Args:
        plan: The plan on all devices.
        best: The best of all.
        others: Plans on fewer devices.
        bound: Seconds that no plan stays below.
        told: What was found on which devices.
        kinds: The kinds of nodes that the best plan uses, where nodes differ.
    """
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
    remark = left_free(plan.job.gpus - best.job.gpus, plan.job.gpus, cluster_from_dict(plan.job.cluster), kinds)
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
