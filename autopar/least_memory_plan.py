"""The thriftiest plan of a task: what fits if anything does, found in seconds."""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import combinations

import numpy as np

from autopar.bounds.reshard_buffers import buffers
from autopar.configuration import PLAIN, Configuration
from autopar.formulate.block_memory import KEPT, RESIDENT, ChainBytes
from autopar.formulate.building import build_tables
from autopar.formulate.constraints import Constraints
from autopar.formulate.least_memory import byte_problem, least_split, state_bytes
from autopar.formulate.scheduled_step import pass_seconds
from autopar.formulate.step_time import Pipeline, Split, StepTime, step_time
from autopar.formulate.tables import Decision, Memory
from autopar.pipeline_partition.interleaved import RecomputeChooser, grouped_time
from autopar.pipeline_partition.p2p import hop_seconds
from autopar.pipeline_partition.stage_cuts import best_split
from autopar.problem import Choice
from autopar.program.lower import lower
from autopar.progress import StopCallback, never
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, chunks_of
from autopar.search.candidate import Candidate
from autopar.search.candidate_plan import assemble
from autopar.search.context import SearchContext
from autopar.search.node_solver import NodeSolver, open_node
from autopar.sharding import Mesh
from autopar.shortage import Held, Shortage
from autopar.simulate import simulate
from autopar.task import Effort, Task

LOOKS = 12
"""Configurations whose placements are solved for bytes, those with the lowest floors first."""

WEIGHTS = ((0.0, 0.0), (1.0, 0.0), (1.0, 0.1))
"""Weights of passing bytes, and shares of time in the costs, that are tried per configuration: the best is kept."""

NEAR, HALVINGS = 0.005, 6
"""Share of the bytes that is not worth looking for, and how often the range in which more may be saved is halved."""

SEARCHED, STEPS, SAVED = 3, 8, 0.04
"""Configurations that are searched for plans with less memory at last, how often at most, and which share less at
first. It is twice that where there is one, for placements with the least sum of bytes may need twice what others do at
their peak, and a quarter of it where there is none."""

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
        complete: Whether all that could be better was looked at.
        is_cut: Whether time ended before as many were looked at as are at most.
    """

    candidate: Candidate | None
    bytes: float
    floor: float
    complete: bool
    is_cut: bool


Looking = Generator[None, None, Thrifty]
"""A look for the thriftiest plan, a step at a time: whoever has better to do may leave it."""


def thriftiest(task: Task, *, enough: float = 0.0, end: float = math.inf, should_stop: StopCallback = never) -> Thrifty:
    """Return the plan with the least memory that is found.

    Args:
        task: The task; its memory limit does not matter.
        enough: Bytes that are little enough to stop.
        end: When to stop, on the monotonic clock.
        should_stop: Polled: once true, it is time to stop.
    """
    looking = look(task, enough=enough, end=end, should_stop=should_stop)
    while True:
        try:
            next(looking)
        except StopIteration as over:
            found: Thrifty = over.value
            return found


def look(task: Task, *, enough: float = 0.0, end: float = math.inf, should_stop: StopCallback = never) -> Looking:
    """Look for the plan with the least memory in steps of a second or a few; arguments as of `thriftiest`."""
    search = task.context(Effort(top_k=1), should_stop=should_stop)
    likely, others = _thrifty(task.space, task.job.global_batch)
    listed = [*likely, *others]
    # Least floor first: what the tables of a configuration say of its bytes is only asked when it is its turn.
    # The other families come last: pins or shapes may leave no plan with the smallest microbatches.
    heap = [(n >= len(likely), search.least_bytes(_plain(family)), n, False) for n, family in enumerate(listed)]
    heapify(heap)
    nodes: dict[int, NodeSolver] = {}
    complete, is_cut = True, False
    floor = best = math.inf
    found: Candidate | None = None
    looked: list[tuple[float, int, Configuration]] = []
    done = 0
    while heap:
        yield
        is_other, least, number, is_known = heappop(heap)
        if is_other and found is not None:
            break
        floor = min(floor, least) if is_known else floor
        late = _is_over(search, end) and found is not None
        if least >= best or best <= enough or done == LOOKS or late:
            complete &= not late and done < LOOKS
            is_cut |= late and best > enough
            break
        if not is_known:
            node = open_node(search, (_plain(listed[number]),), end)
            if node is not None:
                nodes[number] = node
                heappush(heap, (is_other, max(least, min(node.state.least_bytes.values())), number, True))
            continue
        own = _thrifty_plan(nodes.pop(number), listed[number], search)
        done += 1
        if own is not None:
            looked.append((own[0], number, own[1].configuration))
            if own[0] < best:
                best, found = own
    if best > enough and found is not None:
        nearest = [configuration for *_, configuration in sorted(looked)[:SEARCHED]]
        best, found = yield from _searched(search, nearest, best, found, enough, end)
        if best > enough and _is_over(search, end):  # configurations not looked at may have a plan that fits
            complete, is_cut = False, True
    return Thrifty(found, best, floor, complete, is_cut)


def _searched(
    search: SearchContext, nearest: Sequence[Configuration], best: float, found: Candidate, enough: float, end: float
) -> Generator[None, None, tuple[float, Candidate]]:
    """Return a plan that needs less than the best one, if a search of few configurations under less memory finds any.

    A search sees buffers that belong to no decision, and when what lives beside each other.

    Args:
        search: What finds plans.
        nearest: The configurations.
        best: Bytes of the best plan.
        found: The best plan.
        enough: Bytes that are little enough to stop.
        end: When to stop, on the monotonic clock.
    """
    saved = SAVED
    for step in range(STEPS):
        at_once = step == 0 and enough > 0
        saved = min(saved, (1 - enough / best) / 2)  # to half of the way at most: less than enough is for nobody
        limit = enough if at_once else best * (1 - saved)
        tight = replace(search, memory_limit=limit)
        for configuration in nearest:
            yield
            node = None if _is_over(search, end) else open_node(tight, (configuration,), end)
            if node is not None:
                node.solve(node.relax(math.inf), math.inf)
                if node.best is not None:
                    found, best = node.best, limit
                    if node.pipeline.fills:
                        best = node.finder.costs.peak(found.choice, found.split)
                    saved *= 2
                    break
        else:
            saved = saved if at_once else saved / 4
        if best <= enough or saved < NEAR or _is_over(search, end):
            break
    return best, found


def _is_over(search: SearchContext, end: float) -> bool:
    return time.monotonic() > end or search.should_stop()


def _thrifty(space: list[Configuration], batch: int) -> tuple[list[list[Configuration]], list[list[Configuration]]]:
    """Return the configurations with small microbatches, and all others; those together that differ in the schedule.

    The smallest microbatches hold least, and come first; they may be harder to split: there are also those with one
    sample for each device along some axes of the mesh. Where data parallelism lies around pipelines nothing needs
    less, nor where a schedule hides the all-to-all of experts: such configurations count if there are no others.
    """
    space = [own for own in space if not (own.block or own.hides_dispatch)] or space
    families: dict[tuple[int, Mesh, int], list[Configuration]] = {}
    for own in space:
        families.setdefault((own.num_stages, own.mesh, own.num_microbatches), []).append(own)
    most: dict[tuple[int, Mesh, int], int] = {}
    for stages, mesh, count in families:
        for size in range(len(mesh.axes) + 1):
            for axes in combinations(mesh.shape, size):
                devices = math.prod(axes)
                if batch // count >= devices or devices == 1:
                    key = stages, mesh, devices
                    most[key] = max(most.get(key, 0), count)
    counts: dict[tuple[int, Mesh], set[int]] = {}
    for (stages, mesh, _), count in most.items():
        counts.setdefault((stages, mesh), set()).add(count)
    ranked = [
        (rank, families[*key, count])
        for key, own in counts.items()
        for rank, count in enumerate(sorted(own, reverse=True))
    ]
    likely = [family for _, family in sorted(ranked, key=lambda entry: entry[0])]
    taken = {(stages, mesh, count) for (stages, mesh), own in counts.items() for count in own}
    return likely, [family for key, family in families.items() if key not in taken]


def _plain(family: list[Configuration]) -> Configuration:
    """Return the configuration with a plain schedule, or one like it: what all others hold at least where it is."""
    found = next((own for own in family if own.schedule in PLAIN), None)
    return found or replace(family[0], schedule="1f1b", num_chunks=1)


def _thrifty_plan(
    node: NodeSolver, family: list[Configuration], search: SearchContext
) -> tuple[float, Candidate] | None:
    """Return a plan of one of some configurations that needs little memory, with the bytes of its fullest stage.

    Of a pipeline only those groups of devices hold blocks that are no neighbours that take several stages in turn: with
    other schedules nothing needs less than with a plain one, which stands for them if it is there.
    """
    tables, pipeline, constraints = node.tables, node.pipeline, search.constraints
    on_device = [own for own in node.state.least_bytes if own is not Recompute.OFFLOAD]
    flavour = min(on_device or node.state.least_bytes, key=lambda own: node.state.least_bytes[own])
    resident = constraints.resident
    is_listed = node.state.configuration in family
    best: tuple[float, Candidate] | None = None
    choices: list[Choice] = []
    counts = np.array([kind.count for kind in tables.folded.kinds])
    second = 0.0  # bytes that a second is worth
    between = [(tables.edges[own.edge].first, tables.edges[own.edge].second, own.amounts) for own in buffers(tables)]
    for passing, share in WEIGHTS:
        name = str(node.state.configuration)
        instance = byte_problem(
            tables, pipeline, flavour, passing=passing, second=share * second, between=between, resident=resident,
            name=name,
        )  # fmt: skip
        solution = search.solver.solve(instance, time_limit=SOLVE_SECONDS)
        if solution.choice is None:
            break
        _, totals = node.finder.block_costs(solution.choice)
        if not second:
            second = solution.cost / max(1e-12, float(counts @ totals.sum(axis=1)))
        choices.append(solution.choice)
        if is_listed:
            best = _least(best, _in_line(node, solution.choice, constraints))
    for configuration in family:
        if configuration.num_chunks > 1 or not is_listed:
            for choice in dict.fromkeys(choices):
                best = _least(best, _in_turn(node, configuration, choice, search, best[0] if best else math.inf))
    return best


def _least(
    first: tuple[float, Candidate] | None, second: tuple[float, Candidate] | None
) -> tuple[float, Candidate] | None:
    """Return what needs fewer bytes, the first if both need the same."""
    if first is None or second is None:
        return first or second
    return second if second[0] < first[0] else first


def _in_line(node: NodeSolver, choice: Choice, constraints: Constraints) -> tuple[float, Candidate] | None:
    """Return the split of a choice under a plain schedule that needs least, with the bytes of its fullest stage."""
    memory, totals = node.finder.block_costs(choice)
    pipeline, chain = node.pipeline, node.tables.folded.chain
    hops = node.finder.costs.hops(choice, pipeline)
    found = least_split(memory, pipeline, constraints)
    if found is None:
        return None
    peak, split = found

    def fitted(limit: float) -> tuple[Split, StepTime] | None:
        return best_split(totals, memory, pipeline, limit, hops, constraints)

    # Within the same bytes there may be a faster split, and within fewer one whose blocks differ in what they keep.
    own = fitted(peak) or (split, step_time(totals, chain, pipeline, split, hop_seconds(split, hops)))
    peak, (split, step) = _lowered(fitted, node, peak) or (peak, own)
    if pipeline.schedule == "gpipe":  # the closed form lets forwards hide reductions, which GPipe's last passes do not
        passes = pass_seconds(node.tables, choice, splits=False)
        step = grouped_time(passes, totals, chain, pipeline, split, hop_seconds(split, hops))
    return peak, Candidate(node.state.configuration, node.tables, choice, split, step)


def _in_turn(
    node: NodeSolver, configuration: Configuration, choice: Choice, search: SearchContext, below: float
) -> tuple[float, Candidate] | None:
    """Return the split of a choice under any schedule that needs fewer than some bytes; None if none is found."""
    splits = SCHEDULES[configuration.schedule].splits
    passes = pass_seconds(node.tables, choice, splits=splits)
    memory = node.finder.costs.bytes(choice, splits=splits)
    totals = node.finder.costs.seconds_with_copies(choice, node.tables.block_seconds(choice), passes, splits=splits)
    pipeline = configuration.pipeline(search.costs.stack)
    hops = node.finder.costs.hops(choice, pipeline)

    def fitted(limit: float) -> tuple[Split, StepTime] | None:
        return RecomputeChooser(passes, totals, memory, pipeline, limit, hops, search.constraints).best()

    found = _lowered(fitted, node, below if math.isfinite(below) else _whole(memory, pipeline))
    return None if found is None else (found[0], Candidate(configuration, node.tables, choice, *found[1]))


def _whole(memory: ChainBytes, pipeline: Pipeline) -> float:
    """Return more bytes than any group of devices holds: those of all blocks, each microbatch in flight."""
    number = len(memory.chain)
    every = max(memory.peak(0, number, pipeline.num_microbatches, (own,) * number) for own in memory.flavours)
    late, weight = memory.deferred_bytes(0, number)
    return 2 * (every + pipeline.num_microbatches * late + weight)


def _lowered(
    fitted: Callable[[float], tuple[Split, StepTime] | None], node: NodeSolver, peak: float
) -> tuple[float, tuple[Split, StepTime]] | None:
    """Return fewer bytes in which something fits, and what does; None if nothing fits in `NEAR` fewer."""
    low, high = min(node.state.least_bytes.values()), peak * (1 - NEAR)
    best = fitted(high) if low < high else None
    if best is None:
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = fitted(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return high, best


def held_in_all(task: Task, resident: Sequence[Memory] = RESIDENT) -> float:
    """Return the bytes that all devices of a job hold at least together, however many they are: see `state_bytes`."""
    folded = task.workload.folded(task.workload.fixed_batch or 1)
    return state_bytes(build_tables(folded, task.rules_of(folded), Mesh.of(inner=1), task.costs), resident)


def shortage(found: Thrifty, task: Task) -> Shortage:
    """Return what the thriftiest plan lacks, as the simulator has it."""
    candidate = found.candidate
    assert candidate is not None, "there is a plan to speak of"
    plan = assemble(candidate, task.workload.info(), task.job)
    folded, costs = task.workload.folded(plan.microbatch), candidate.configuration.costs(task.costs)
    timeline = simulate(lower(plan, folded, costs), costs)
    fullest = max(range(len(timeline.stages)), key=lambda stage: timeline.stages[stage].memory.bytes)
    memory = timeline.stages[fullest].memory
    return Shortage(
        plan=plan.summary,
        stage=fullest,
        bytes=memory.bytes,
        limit=task.job.memory_limit,
        by_category={str(category): amount for category, amount in memory.breakdown if amount},
        tensors=_largest(candidate, task, fullest),
        step_seconds=timeline.step_seconds,
        floor=found.floor,
    )


def _largest(candidate: Candidate, task: Task, group: int) -> tuple[Held, ...]:
    """Return the tensors that take most on a device of a group, whatever keeps them there.

    None are told of stages with meshes of their own: a candidate has the placements of the first of them only.
    """
    configuration, split = candidate.configuration, candidate.split
    if candidate.draft is None:
        tables = candidate.tables
    else:  # who drafted it has kept them
        is_equal = configuration in task.space and not candidate.draft.variants
        known = task.context(Effort(top_k=1)).tables((configuration,)) if is_equal else None
        if known is None:
            return ()
        tables = known
    count, chunks = configuration.num_stages, configuration.num_chunks
    pipeline = Pipeline(count * chunks, configuration.num_microbatches, configuration.schedule, num_chunks=chunks)
    stages = chunks_of(SCHEDULES[configuration.schedule].groups(count, chunks))[group]
    kinds = [tables.folded.chain[first:last] for first, last in split.ranges]
    counts = Counter(kind for stage in stages for kind in kinds[stage])
    away = Counter(kind for stage in stages for kind, away in zip(kinds[stage], split.away[stage], strict=True) if away)
    kept = Counter(pair for stage in stages for pair in zip(kinds[stage], split.recompute[stage], strict=True))
    flying = pipeline.in_flight(group)
    owners = {state.output: state.owner for state in tables.folded.graph.states}
    sums: dict[tuple[str, str], float] = {}
    for item in tables.bytes:
        if item.memory in RESIDENT:
            what, times = str(item.memory), counts[item.kind]
            times -= away[item.kind] if item.memory is Memory.OPTIMIZER else 0
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
