"""The verdict on a search: its best candidates lowered, verified, simulated and ranked."""

import math
from dataclasses import replace
from itertools import islice

from autopar.cost import CostModel
from autopar.errors import InfeasibleError, InterruptedSearchError, PinError
from autopar.formulate.fold import Folded
from autopar.formulate.step import model_flops
from autopar.pins import broken
from autopar.pins.apply import words
from autopar.plan import PhaseTime, Plan, SearchReport, Simulated, StageMemory
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.program.lower import lower
from autopar.program.verify import verify_program
from autopar.search.assemble import assemble
from autopar.search.outcome import Outcome
from autopar.search.parts import step_parts
from autopar.search.space import describe
from autopar.simulate import Timeline, simulate
from autopar.task import PhaseClock, Task

VERIFY = 3  # candidates simulated per plan asked for: the simulator, not the formula, ranks the plans that are returned


def conclude(outcome: Outcome, task: Task, method: str, top_k: int, clock: PhaseClock) -> Plan:
    """Return the plan a search comes to: its best candidates lowered, verified, simulated and ranked.

    Args:
        outcome: What a search of the task's space found.
        task: The task.
        method: What found it, for the report.
        top_k: Number of plans wanted.
        clock: Has timed the search.

    Raises:
        InfeasibleError: If there is no candidate, or none fits when simulated.
        PinError: If no candidate keeps to the pins.
        InterruptedSearchError: If the search was stopped before the first.
    """
    if not outcome.candidates and outcome.stopped:
        why = "interrupted" if outcome.stopped == "interrupted" else f"stopped by the {outcome.stopped}"
        raise InterruptedSearchError(f"{why} before the first plan", hint="allow more time")
    with clock("simulate"):
        astray: list[str] = []
        verified = (
            _verify(assemble(candidate, task.workload.info(), task.job), task, astray)
            for candidate in outcome.candidates
        )
        plans = list(islice((plan for plan in verified if plan is not None), VERIFY * top_k))
        if not plans and astray:
            raise PinError(f"no plan that was found keeps to the pins: {astray[0]}", hint="pin something else")
        if not plans:
            raise InfeasibleError("every plan exceeds the memory limit when simulated", hint="raise --memory-limit")
        plans = _distinct(plans)
    report = _report(outcome, task, plans[0].objective, method, clock.times)
    runners_up = tuple(plan.without_alternatives() for plan in plans[1:top_k])
    return replace(plans[0], search=report, alternatives=runners_up)


def _distinct(plans: list[Plan]) -> list[Plan]:
    """Return the plans by simulated time, of those that read alike (the same degrees on other meshes) the fastest."""
    kept: dict[str, Plan] = {}
    for plan in sorted(plans, key=lambda plan: plan.simulated.step_seconds if plan.simulated else math.inf):
        kept.setdefault(plan.summary, plan)
    return list(kept.values())


def _verify(plan: Plan, task: Task, astray: list[str]) -> Plan | None:
    """Return the plan with the simulator's verdict; None if it exceeds the memory limit, or goes astray of the pins."""
    costs, folded = task.costs, task.workload.folded(plan.microbatch)
    program = lower(plan, folded, costs)
    verify_program(program, folded, task.rules_of(folded))
    timeline = simulate(program, costs)
    if timeline.peak_bytes > plan.job.memory_limit:
        return None
    if differs := broken(plan, task.pins, folded):
        astray.extend(differs)
        return None
    return simulated(plan, timeline, folded, costs)


def simulated(plan: Plan, timeline: Timeline, folded: Folded, costs: CostModel) -> Plan:
    """Return a plan with what the simulator found for it."""
    busiest = timeline.busiest
    peak = costs.cluster.device.peak(costs.policy.numbers)
    flops = model_flops(folded) * plan.num_microbatches
    return replace(
        plan,
        simulated=Simulated(
            step_seconds=timeline.step_seconds,
            compute_seconds=busiest.busy_seconds,
            exposed_seconds=busiest.collective_seconds + busiest.gather_seconds,
            gradient_seconds=busiest.gradient_seconds,
            bubble_seconds=busiest.bubble_seconds + busiest.wait_seconds,
            mfu=flops / (timeline.step_seconds * peak * plan.job.gpus),
            stages=tuple(
                StageMemory(stage.memory.bytes, {str(c): amount for c, amount in stage.memory.breakdown if amount})
                for stage in timeline.stages
            ),
            parts=step_parts(plan, timeline, folded),
            error=timeline.error,
        ),
    )


def _report(outcome: Outcome, task: Task, objective: float, solver: str, times: tuple[PhaseTime, ...]) -> SearchReport:
    proven = outcome.bound >= objective * (1 - OPTIMALITY_TOLERANCE)
    return SearchReport(
        solver=solver,
        termination=outcome.stopped or ("optimal" if proven else "exhausted"),
        objective=objective,
        bound=min(outcome.bound, objective),
        space=(*describe(task.space, task.constraints.flavours()), *words(task.pins)),
        configurations=len(task.space),
        solved=outcome.solved,
        pruned=outcome.pruned,
        phases=times,
        history=outcome.history.points,
    )
