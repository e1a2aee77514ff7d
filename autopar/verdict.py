"""The verdict on a search: its best candidates lowered, verified, simulated and ranked."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.configuration import closed_words, describe, hosted_words, left_words
from autopar.cost import CostModel, stage_limit
from autopar.describe.signature import Signature, distinct
from autopar.describe.step_parts import step_parts
from autopar.errors import InfeasibleError, InterruptedSearchError, PinError
from autopar.folding.fold import Folded
from autopar.formulate.step_time import StepTime, model_flops
from autopar.fusion import LEAST_GAIN, cut_gradients, fuse_jointly
from autopar.fusion_plan import BUCKETS, JOINT, FusionPlan
from autopar.pins import broken
from autopar.pins.apply import words
from autopar.plan import PartTimes, PhaseTime, Plan, Remark, SearchReport, Simulated, StageMemory
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.program.buckets import with_buckets
from autopar.program.lower import lower
from autopar.program.records import Program
from autopar.program.verify import verify_program
from autopar.progress import StopCallback, never
from autopar.remarks import is_tight, remarks
from autopar.search.candidate import Candidate
from autopar.search.candidate_plan import assemble
from autopar.search.outcome import Outcome
from autopar.simplicity import NEAR, complexity
from autopar.simulate import Timeline, simulate
from autopar.task import Effort, PhaseClock, Task
from autopar.units import format_bytes

VERIFY = 3
"""Candidates simulated per plan asked for at least: the simulator, not the formula, ranks the plans returned."""

VERIFY_MOST = 9
"""Candidates simulated at most if fewer would do but for how much slower they are than by the formula."""

VERIFY_SHARE, VERIFY_SECONDS = 0.05, 10.0
"""Of a time limit, what is kept for that: a share, but no more than so many seconds. When the limit is over, no further
candidate is simulated, unless none has fitted so far; nor is one that may take longer than there is left."""

AS_IMPORT, MOST_SHARE = 0.75, 0.25
"""It is no less than so many times what the import took, but no more than such a share of the limit: a thousand layers
take 4 s to import, and 2.5 s to verify."""

LONGER = 1.5
"""How many times as long a candidate may take as any before it."""


def searching(effort: Effort, task: Task) -> Effort:
    """Return the part of an effort that is for the search, the rest being for the verdict on it."""
    limit = effort.time_limit
    if limit is None:
        return effort
    own = sum(phase.seconds for phase in task.phases if phase.name == "import")
    return effort.after(min(VERIFY_SECONDS, max(VERIFY_SHARE * limit, min(AS_IMPORT * own, MOST_SHARE * limit))))


def conclude(
    outcome: Outcome,
    task: Task,
    method: str,
    top_k: int,
    clock: PhaseClock,
    end: float = math.inf,
    should_stop: StopCallback = never,
    fusion: str = BUCKETS,
) -> Plan:
    """Return the plan a search comes to: its best candidates lowered, verified, simulated and ranked.

    Args:
        outcome: What a search of the task's space found.
        task: The task.
        method: What found it, for the report.
        top_k: Number of plans wanted.
        clock: Has timed the search.
        end: When to have done, on the monotonic clock: then the best plan so far is returned.
        should_stop: Polled between two candidates; once true the best plan so far is returned, as of an interrupted
            search.
        fusion: What is fused, as of `Effort`.

    Raises:
        InfeasibleError: If there is no candidate, or none fits when simulated.
        PinError: If no candidate keeps to the pins.
        InterruptedSearchError: If the search was stopped before the first.
    """
    if not outcome.candidates and outcome.stopped:
        raise none_found(outcome)
    with clock("simulate"):
        astray: list[str] = []
        plans = _verified(outcome, task, top_k, astray, end, should_stop, fusion)
        if not plans and astray:
            raise PinError(f"no plan that was found keeps to the pins: {astray[0]}", hint="pin something else")
        if not plans:
            raise InfeasibleError("every plan exceeds the memory limit when simulated", hint="raise --memory-limit")
    number, chosen = simplest(plans, task)
    report = search_report(outcome, task, chosen.objective, method, clock.times)
    others = (*plans[:number], *plans[number + 1 :])
    return replace(
        chosen, search=report, alternatives=tuple(plan.without_alternatives() for plan in others[: top_k - 1])
    )


def none_found(outcome: Outcome) -> InterruptedSearchError:
    """Return the error of a search that was stopped before the first plan."""
    if outcome.stopped == "interrupted":
        return InterruptedSearchError("interrupted before the first plan")
    return InterruptedSearchError("no plan found until well after the time limit", hint="allow more time")


def simplest(plans: Sequence[Plan], task: Task) -> tuple[int, Plan]:
    """Return number and plan of the simplest of the plans that are equally fast as far as predictions can tell.

    A plan that leaves little memory is not taken for another one that leaves more.

    Args:
        plans: Simulated plans, the fastest first.
        task: Their task.
    """
    fastest = plans[0]
    near = [plan for plan in plans if step_seconds(plan) <= (1 + NEAR) * step_seconds(fastest)]
    if len(near) == 1 or task.pins:
        return 0, fastest

    def order(number: int) -> tuple[bool, int]:
        plan = near[number]
        return is_tight(plan), complexity(plan, task.workload.folded(plan.microbatch))

    number = min(range(len(near)), key=order)
    chosen = near[number]
    if number == 0:
        return 0, fastest
    assert chosen.simulated is not None, "it was simulated"
    faster = 100 * (1 - step_seconds(fastest) / step_seconds(chosen))
    remark = Remark(
        "choice",
        f"equal within the model's error: {fastest.summary} ({faster:.1f} % faster by the simulator); this plan is the "
        "simplest",
    )
    return number, replace(chosen, simulated=replace(chosen.simulated, remarks=(remark, *chosen.simulated.remarks)))


def _verified(
    outcome: Outcome,
    task: Task,
    top_k: int,
    astray: list[str],
    end: float,
    should_stop: StopCallback,
    fusion: str,
) -> list[Plan]:
    """Return the best plans by simulated time, none akin to a better one; note how others go astray of the pins.

    A candidate that is faster by the formula than the fastest plan simulated may be faster still: it is simulated, too,
    until there are `VERIFY_MOST`. Candidates come in the order of the formula, so that those the end cuts off are the
    slowest by it.
    """
    found: list[tuple[Plan, Signature]] = []
    best, longest = math.inf, 0.0
    for candidate in outcome.candidates:
        began = time.monotonic()
        if found and began + LONGER * longest > end:
            break
        if found and should_stop():
            outcome.stopped = "interrupted"
            break
        known = [own for _, own in found]
        enough = len(found) >= VERIFY * top_k and (candidate.objective >= best or len(found) >= VERIFY_MOST)
        if enough and (
            len(distinct(known, lambda own: own)) >= top_k or any(candidate.signature.is_akin_to(own) for own in known)
        ):
            continue  # enough of what is known already
        plan = _verify(candidate, task, astray, fusion)
        longest = max(longest, time.monotonic() - began)
        if plan is not None:
            found.append((plan, candidate.signature))
            best = min(best, step_seconds(plan))
    found.sort(key=lambda item: step_seconds(item[0]))
    return [plan for plan, _ in distinct(found, lambda item: item[1])]


def step_seconds(plan: Plan) -> float:
    """Return the seconds of a step of a simulated plan."""
    assert plan.simulated is not None, "only simulated plans are ranked"
    return plan.simulated.step_seconds


def _verify(candidate: Candidate, task: Task, astray: list[str], fusion: str) -> Plan | None:
    """Return a candidate's plan as simulated; None if it exceeds the memory limit, or goes astray of the pins.

    Its gradients are cut into buckets, and its ops fused, where that is asked for and saves enough.
    """
    plan = assemble(candidate, task.workload.info(), task.job)
    costs, folded = candidate.configuration.costs(task.costs), task.workload.folded(plan.microbatch)
    program = lower(plan, folded, costs)
    verify_program(program, folded, task.rules_of(folded))
    plan, program = fused(plan, program, folded, costs, fusion)
    timeline = simulate(program, costs, verified=True)
    found = simulated(plan, timeline, folded, costs)
    assert found.simulated is not None, "it was simulated"
    if not timeline.fits(*found.stage_limits):
        return None
    if differs := broken(plan, task.pins, folded):
        astray.extend(differs)
        return None
    count = plan.num_microbatches
    if plan.shares:
        count = plan.shares[timeline.busiest.index * len(plan.shares) // len(timeline.stages)].num_microbatches
    parts = _against(candidate.time, count, timeline)
    return replace(found, simulated=replace(found.simulated, against=parts))


def fused(plan: Plan, program: Program, folded: Folded, costs: CostModel, fusion: str) -> tuple[Plan, Program]:
    """Return a plan with its program whose gradients are cut into buckets, and ops fused, where that saves enough.

    Args:
        plan: The plan.
        program: The plan lowered.
        folded: The graph of one of its microbatches.
        costs: What its instructions take.
        fusion: What is fused, as of `Effort`.
    """
    if plan.shares:  # buckets follow the uniform rule
        return plan, program
    if fusion == JOINT:
        joint = fuse_jointly(plan, program, folded, costs)
        return replace(plan, fusion=joint.fusion), joint.program
    if fusion == BUCKETS and program.trains:
        found = cut_gradients(program, costs, least_gain=LEAST_GAIN)
        if found.is_worth_it:
            plan = replace(plan, fusion=FusionPlan.of_cuts(found.cuts))
            return plan, with_buckets(program, plan.fusion)
    return plan, program


def _against(time: StepTime, num_microbatches: int, timeline: Timeline) -> tuple[PartTimes, ...]:
    """Return the parts of a step by the formula and simulated."""
    passes = num_microbatches * float(time.stage_seconds.max())
    own = timeline.busiest
    return (
        PartTimes("passes", passes, own.compute_seconds + own.collective_seconds + own.delay_seconds),
        # Passes of the slowest stage alone are within the flow, but for rounding.
        PartTimes("waits", max(0.0, time.flow - passes), own.bubble_seconds + own.wait_seconds),
        PartTimes("end", time.seconds - time.flow, own.gradient_seconds + own.update_seconds + own.gather_seconds),
    )


def simulated(plan: Plan, timeline: Timeline, folded: Folded, costs: CostModel) -> Plan:
    """Return a plan with what the simulator found for it."""
    busiest = timeline.busiest
    flops = model_flops(folded) * float(plan.mean_microbatches)
    limits = [stage_limit(costs.cluster, plan.job.memory_limit, range(*own)) for own in plan.device_ranges]
    found = Simulated(
        step_seconds=timeline.step_seconds,
        compute_seconds=busiest.busy_seconds,
        exposed_seconds=busiest.collective_seconds + busiest.gather_seconds,
        gradient_seconds=busiest.gradient_seconds,
        bubble_seconds=busiest.bubble_seconds + busiest.wait_seconds,
        mfu=flops / (timeline.step_seconds * costs.cluster.total_peak(costs.policy.numbers, plan.job.gpus)),
        stages=tuple(
            StageMemory(
                stage.memory.bytes,
                {str(c): amount for c, amount in stage.memory.breakdown if amount},
                stage.host_bytes,
                limit if limit != plan.job.memory_limit else 0.0,
            )
            for stage, limit in zip(timeline.stages, limits, strict=True)
        ),
        host_bytes=timeline.host.bytes if timeline.host else 0.0,
        parts=step_parts(plan, timeline, folded),
        error=timeline.error,
    )
    return replace(plan, simulated=replace(found, remarks=remarks(plan, found, folded, costs, timeline.measured)))


def _with_workers(phase: PhaseTime, outcome: Outcome) -> PhaseTime:
    """Return a phase with the memory of those that searched."""
    return replace(phase, peak_bytes=phase.peak_bytes + outcome.workers_bytes) if phase.name == "search" else phase


def _memory_words(task: Task) -> tuple[str, ...]:
    """Return what is said of memory that groups of nodes have and equal stages do not use."""
    limit, most = task.job.memory_limit, task.largest_limit
    if most == limit:
        return ()
    held = f"equal stages use at most {format_bytes(limit)} per device, as much as the smallest group of nodes has"
    if task.unequal is None:
        return (f"{held}; the largest has {format_bytes(most)}",)
    return (f"{held}; stages with meshes of their own use what their group has, up to {format_bytes(most)}",)


def search_report(
    outcome: Outcome, task: Task, objective: float, solver: str, times: tuple[PhaseTime, ...]
) -> SearchReport:
    """Return how a plan was found.

    Args:
        outcome: What a search found.
        task: Its task.
        objective: Of the plan, in seconds.
        solver: What found it.
        times: Phases of the search.
    """
    proven = outcome.bound >= objective * (1 - OPTIMALITY_TOLERANCE)
    opened = replace(task.constraints, hosted=outcome.hosted)
    space, nodes = task.space, -(-task.job.gpus // task.costs.cluster.devices_per_node)
    return SearchReport(
        solver=solver,
        termination=outcome.stopped or ("optimal" if proven else "exhausted"),
        objective=objective,
        bound=min(outcome.bound, objective),
        space=(
            *describe(space, opened.flavours(), hosts_optimizer=opened.hosts_optimizer, num_nodes=nodes),
            *closed_words(outcome.closed, outcome.closed_bound),
            *left_words(outcome.left),
            *hosted_words(outcome.needed, outcome.reserve, outcome.reserve_bound, restaged=outcome.restaged),
            *(outcome.unequal.words(objective) if outcome.unequal else ()),
            *(outcome.shares.words(objective) if outcome.shares else ()),
            *_memory_words(task),
            *words(task.pins),
        ),
        configurations=len(space)
        + (len(outcome.unequal.opened) if outcome.unequal else 0)
        + (len(outcome.shares.opened) if outcome.shares else 0),
        solved=outcome.solved,
        pruned=outcome.pruned,
        phases=tuple(_with_workers(phase, outcome) for phase in times),
        history=outcome.history.points,
        complete=outcome.complete if math.isfinite(outcome.complete) else 0.0,
        cut=outcome.cut,
    )
