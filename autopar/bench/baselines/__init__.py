"""The baselines: what others would do, on the same costs, judged by the same simulator.

Each is a function that takes a job and gives a `Result`; adding one is a module and a line in `BASELINES`. Those that
state a plan by degrees work on a `Race` and leave what they priced there; those that place ops fill an `Outcome` as the
planner does. Either way as many of the best are lowered, verified and simulated, and ranked by the simulator.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.bench.baselines.alpa import alpa_search
from autopar.bench.baselines.annealing import annealing
from autopar.bench.baselines.beam import beam, greedy
from autopar.bench.baselines.grid import grid
from autopar.bench.baselines.mcts import mcts
from autopar.bench.baselines.megatron import megatron
from autopar.bench.baselines.race import Race
from autopar.bench.baselines.recipes import recipe_search
from autopar.bench.records import PlanFigures, Result, nothing
from autopar.degrees import Degrees
from autopar.errors import InfeasibleError
from autopar.plan import PhaseTime, Plan
from autopar.progress import ProgressCallback, StopCallback
from autopar.search.outcome import Outcome
from autopar.sizing.fewer import LEAST_SECONDS, least_seconds, links_are_slow, of_part, parts, reserved
from autopar.task import Effort, PhaseClock, Task
from autopar.verdict import LONGER, VERIFY, conclude, searching, step_seconds

Find = Callable[[Task, Effort, str, ProgressCallback, StopCallback], Result]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A method to compare with.

    Attributes:
        title: What it does, in a few words.
        find: Returns what it comes to; told the job, the effort, its own name, and the callbacks.
    """

    title: str
    find: Find


def by_degrees(
    method: Callable[[Race], None],
    task: Task,
    effort: Effort,
    name: str,
    progress: ProgressCallback,
    should_stop: StopCallback,
) -> Result:
    """Return what a method comes to that states plans by degrees; as of `raced`."""
    race, plans, stopped, phases = raced(method, task, effort, name, progress, should_stop)
    figures, evaluated = tuple(PlanFigures.of(plan, task.job.gpus) for plan in plans[: effort.top_k]), len(race.prices)
    why = stopped or ("exhausted" if plans else "infeasible")
    notes = [f"tactics cannot place {race.refused} of its plans"] if race.refused else []
    if not plans:
        notes.insert(0, "none of its plans fits")
    space = evaluated + race.skipped if method is grid and not stopped else 0
    return Result(name, why, figures, 0.0, space, evaluated, phases, "; ".join(notes), race.history.points)


def raced(
    method: Callable[[Race], None],
    task: Task,
    effort: Effort,
    name: str,
    progress: ProgressCallback,
    should_stop: StopCallback,
    kind: type[Race] = Race,
) -> tuple[Race, list[Plan], str, tuple[PhaseTime, ...]]:
    """Return what a method leaves that states plans by degrees, of the space of a kind of race.

    As for the planner, host memory is part of the space if nothing fits without, and some of the time limit is left to
    the simulator.

    Returns:
        The race with all that was priced; its best plans that fit, simulated, the fastest first; why it was stopped, or
        ""; and the seconds of its phases.
    """
    clock, began = PhaseClock(progress, before=task.phases), time.monotonic()
    for own in (task, task.opened) if task.constraints.reserve else (task,):
        race = kind(own, name, _end(searching(effort, task), began), progress, should_stop)
        with clock("search"):
            method(race)
            stopped = race.stopped
        with clock("simulate"):
            plans = best_simulated(race, race.finalists(), effort.top_k, _end(effort, began))
        if plans or stopped:
            break
    return race, plans, stopped, clock.times


def _end(effort: Effort, began: float) -> float:
    """Return when an effort that began at some time is over, by `time.monotonic`."""
    return began + (math.inf if effort.time_limit is None else effort.time_limit)


def best_simulated(race: Race, finalists: Sequence[Degrees], top_k: int, end: float) -> list[Plan]:
    """Return the best plans that fit by simulated time; of those that read alike the fastest.

    They are looked at in the order given, that of the formula; as for the planner, none is once one fits and the time
    is over that the next one may take.
    """
    found: list[Plan] = []
    longest = 0.0
    for degrees in finalists:
        began = time.monotonic()
        if found and began + LONGER * longest > end:
            break
        plan = race.simulate(degrees)
        longest = max(longest, time.monotonic() - began)
        if plan is not None:
            found.append(plan)
        if len(found) == VERIFY * top_k:
            break
    kept: dict[str, Plan] = {}
    for plan in sorted(found, key=step_seconds):
        kept.setdefault(plan.summary, plan)
    return list(kept.values())


def by_search(
    search: Callable[[Task, Effort, ProgressCallback, StopCallback], Outcome],
    task: Task,
    effort: Effort,
    name: str,
    progress: ProgressCallback,
    should_stop: StopCallback,
) -> Result:
    """Return what a method comes to that places ops in the configurations of the planner.

    As for the planner, fewer devices are looked at where links between nodes are slow, in a share of the time limit.
    """
    clock, began = PhaseClock(progress, before=task.phases), time.monotonic()
    end, kept = _end(effort, began), reserved(task, effort)
    result = _searched(search, task, effort.after(kept), name, clock, task.job.gpus, progress, should_stop)
    for part in parts(task) if links_are_slow(task) else ():
        fewer, best = of_part(task, part), result.best.step_seconds if result.best else math.inf
        left = end - time.monotonic()
        if should_stop() or left < LEAST_SECONDS or least_seconds(fewer) >= best:
            continue
        limited = effort if math.isinf(left) else replace(effort, time_limit=left)
        found = _searched(search, fewer, limited, name, clock, task.job.gpus, progress, should_stop)
        plans = sorted((*result.plans, *found.plans), key=lambda plan: plan.step_seconds)[: effort.top_k]
        first = found if result.best is None and found.best is not None else result
        result = replace(
            first,
            plans=tuple(plans),
            configurations=result.configurations + found.configurations,
            solved=result.solved + found.solved,
            phases=clock.times,
        )
    return result


def _searched(
    search: Callable[[Task, Effort, ProgressCallback, StopCallback], Outcome],
    task: Task,
    effort: Effort,
    name: str,
    clock: PhaseClock,
    gpus: int,
    progress: ProgressCallback,
    should_stop: StopCallback,
) -> Result:
    """Return what a method comes to on the devices of a task, for a job on a number of devices."""
    end = _end(effort, time.monotonic())
    with clock("search"):
        outcome = search(task, searching(effort, task), progress, should_stop)
    size = len(task.space)
    if not outcome.candidates:
        why, note = outcome.stopped or "infeasible", "nothing it tried fits"
        return nothing(name, why, clock.times, size, outcome.solved, note)
    try:
        plan = conclude(outcome, task, name, effort.top_k, clock, end, should_stop, effort.fusion)
    except InfeasibleError as error:
        return nothing(name, "infeasible", clock.times, size, outcome.solved, error.args[0])
    return replace(Result.of(name, plan, gpus), bound=0.0)


def _recipes(task: Task, effort: Effort, progress: ProgressCallback, should_stop: StopCallback) -> Outcome:
    return recipe_search(task.context(effort, progress=progress, should_stop=should_stop), task.space, task.batch_dims)


def _alpa(task: Task, effort: Effort, progress: ProgressCallback, should_stop: StopCallback) -> Outcome:
    return alpa_search(task.context(effort, progress=progress, should_stop=should_stop), task.space)


BASELINES: Mapping[str, Baseline] = {
    "grid": Baseline("every plan by degrees", partial(by_degrees, grid)),
    "megatron": Baseline("the documentation of Megatron-LM, written down", partial(by_degrees, megatron)),
    "greedy": Baseline("one degree after the other", partial(by_degrees, greedy)),
    "beam": Baseline("the best 16 beginnings of plans by degrees", partial(by_degrees, beam)),
    "annealing": Baseline("simulated annealing over degrees", partial(by_degrees, annealing)),
    "mcts": Baseline("Monte Carlo tree search over degrees", partial(by_degrees, mcts)),
    "recipes": Baseline("hand-made recipes per mesh axis, completed by a solver", partial(by_search, _recipes)),
    "alpa": Baseline(
        "an ILP per mesh axis over the folded model, stages by dynamic programming", partial(by_search, _alpa)
    ),
}
"""Every baseline by name, in the order of the table."""
