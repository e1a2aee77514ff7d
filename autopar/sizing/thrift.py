"""The thriftiest plan of a task: what fits if anything does, found in seconds."""

import math
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from autopar.formulate.cuts import best_split
from autopar.formulate.memory import KEPT, RESIDENT, UNHOSTED
from autopar.formulate.step import step_time
from autopar.formulate.tables import Decision, Memory
from autopar.formulate.thrift import byte_problem, least_split
from autopar.program.lower import lower
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES
from autopar.search.assemble import assemble
from autopar.search.attempt import Attempt
from autopar.search.outcome import Candidate
from autopar.search.planner import Search
from autopar.search.space import PLAIN, Configuration
from autopar.simulate import simulate
from autopar.sizing.records import Held, Shortage
from autopar.task import Effort, Task

LOOKS = 12
"""Configurations whose placements are solved for bytes, those with the lowest floors first."""

WEIGHTS = ((0.0, 0.0), (1.0, 0.0), (1.0, 0.1))
"""Weights of passing bytes, and shares of time in the costs, that are tried per configuration: the best is kept."""

TENSORS = 3
"""Largest tensors that are named."""

SOLVE_SECONDS = 3.0
"""Longest time one placement problem of bytes may take."""


@dataclass(frozen=True, slots=True, eq=False)
class Thrifty:
    """The plan with the least memory that was found.

    Attributes:
        candidate: The plan.
        bytes: Peak of its fullest stage.
        floor: The least proven floor of the configurations listed, all of which were looked at if `complete`.
        complete: Whether time sufficed to look at all that could be better.
    """

    candidate: Candidate | None
    bytes: float
    floor: float
    complete: bool


def thriftiest(task: Task, *, enough: float = 0.0, end: float = math.inf) -> Thrifty:
    """Return the plan with the least memory that is found.

    Args:
        task: The task; its memory limit does not matter.
        enough: Bytes that are little enough to stop.
        end: When to stop, on the monotonic clock.
    """
    search = task.search(Effort(top_k=1))
    attempts: list[tuple[float, int, Attempt]] = []
    complete = True
    for number, configuration in enumerate(_thrifty(task.space, task.job.global_batch)):
        if time.monotonic() > end and attempts:
            complete = False
            break
        attempt = search.attempt((configuration,), end)
        if attempt is not None:
            attempts.append((min(attempt.least_bytes.values()), number, attempt))
    attempts.sort(key=lambda entry: entry[:2])
    floor = attempts[0][0] if attempts else math.inf
    best, found = math.inf, None
    for done, (least, _, attempt) in enumerate(attempts):
        late = time.monotonic() > end and found is not None
        if least >= best or best <= enough or done == LOOKS or late:
            complete &= not late and done < LOOKS
            break
        own = _thrifty_plan(attempt, search)
        if own is not None and own[0] < best:
            best, found = own
    return Thrifty(found, best, floor, complete)


def _thrifty(space: list[Configuration], batch: int) -> list[Configuration]:
    """Return the configurations with small microbatches: the smallest, and one sample per device of a stage.

    A microbatch of fewer samples than devices may be harder to split. Schedules that trade memory for time hold at
    least as much as 1F1B does, which stands for them.
    """
    plain = (own if own.schedule in PLAIN else replace(own, schedule="1f1b", num_chunks=1) for own in space)
    space = list(dict.fromkeys(plain))
    most = Counter[tuple[object, ...]]()
    each: dict[tuple[object, ...], int] = {}
    for own in space:
        key = (own.num_stages, own.mesh, own.schedule)
        most[key] = max(most[key], own.num_microbatches)
        if batch // own.num_microbatches >= own.mesh.size:
            each[key] = max(each.get(key, 0), own.num_microbatches)
    return [
        own
        for own in space
        if own.num_microbatches in (most[key := (own.num_stages, own.mesh, own.schedule)], each.get(key))
    ]


def _thrifty_plan(attempt: Attempt, search: Search) -> tuple[float, Candidate] | None:
    """Return a plan of a configuration that needs little memory, with the bytes of its fullest stage."""
    tables, pipeline, constraints = attempt.tables, attempt.pipeline, search.constraints
    folded = tables.folded
    on_device = [own for own in attempt.least_bytes if own is not Recompute.OFFLOAD]
    flavour = min(on_device or attempt.least_bytes, key=lambda own: attempt.least_bytes[own])
    resident = UNHOSTED if constraints.hosts_optimizer else RESIDENT
    best: tuple[float, Candidate] | None = None
    counts = np.array([kind.count for kind in folded.kinds])
    second = 0.0  # bytes that a second is worth
    for passing, share in WEIGHTS:
        name = str(attempt.configuration)
        instance = byte_problem(
            tables, pipeline, flavour, passing=passing, second=share * second, resident=resident, name=name
        )
        solution = search.solver.solve(instance, time_limit=SOLVE_SECONDS)
        choice = solution.choice
        if choice is None:
            break
        memory, totals = attempt.weighed(choice)
        if not second:
            second = solution.cost / max(1e-12, float(counts @ totals.sum(axis=1)))
        found = least_split(memory, pipeline, constraints)
        if found is None or (best is not None and best[0] <= found[0]):
            continue
        peak, split = found
        # Within the same bytes there may be a faster split.
        faster = best_split(totals, memory, pipeline, peak, 0.0, constraints)
        own, seconds = faster or (split, step_time(totals, folded.chain, pipeline, split, 0.0))
        best = peak, Candidate(attempt.configuration, tables, choice, own, seconds)
    return best


def shortage(found: Thrifty, task: Task) -> Shortage:
    """Return what the thriftiest plan lacks, as the simulator has it."""
    candidate = found.candidate
    assert candidate is not None, "there is a plan to speak of"
    plan = assemble(candidate, task.workload.info(), task.job)
    folded = task.workload.folded(plan.microbatch)
    timeline = simulate(lower(plan, folded, task.costs), task.costs)
    fullest = max(range(len(timeline.stages)), key=lambda stage: timeline.stages[stage].memory.bytes)
    memory = timeline.stages[fullest].memory
    return Shortage(
        plan=plan.summary,
        stage=fullest,
        bytes=memory.bytes,
        limit=task.job.memory_limit,
        by_category={str(category): amount for category, amount in memory.breakdown if amount},
        tensors=_largest(candidate, fullest),
        step_seconds=timeline.step_seconds,
        floor=found.floor,
    )


def _largest(candidate: Candidate, stage: int) -> tuple[Held, ...]:
    """Return the tensors that take most on a device of a stage, whatever keeps them there."""
    tables, configuration = candidate.tables, candidate.configuration
    first, last = candidate.split.ranges[stage]
    kinds = tables.folded.chain[first:last]
    counts = Counter(kinds)
    kept = Counter(zip(kinds, candidate.split.recompute[stage], strict=True))
    schedule = SCHEDULES[configuration.schedule]
    flying = schedule.in_flight(stage, configuration.num_stages, configuration.num_microbatches)
    owners = {state.output: state.owner for state in tables.folded.graph.states}
    sums: dict[tuple[str, str], float] = {}
    for item in tables.bytes:
        if item.memory is Memory.OPTIMIZER and candidate.split.offload and candidate.split.offload[stage]:
            continue
        if item.memory in RESIDENT:
            what, times = str(item.memory), counts[item.kind]
        else:
            what = "activations"
            times = flying * sum(
                count for (kind, own), count in kept.items() if kind == item.kind and item.memory in KEPT[own]
            )
        node = tables.nodes[item.node]
        name = node.name
        if node.decision is Decision.OP:
            name = tables.folded.kinds[node.kind].ops[node.position].outputs[0] or node.name
        name = owners.get(name, name)
        amount = float(item.amounts[candidate.choice[item.node]]) * times
        sums[name, what] = sums.get((name, what), 0.0) + amount
    ranked = sorted(sums.items(), key=lambda entry: -entry[1])[:TENSORS]
    return tuple(Held(name, what, amount) for (name, what), amount in ranked if amount)
