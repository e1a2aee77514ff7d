"""One job, several methods: the model is prepared once, every method searches the same space at the same prices.

What a method finds goes through the same door: its best candidates by the formula are lowered, simulated and ranked by
the simulator, as many of one method as of the other.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autopar.api import plan_task
from autopar.bench.baselines import BASELINES
from autopar.bench.records import Comparison, Result, nothing, planner
from autopar.errors import InfeasibleError, InterruptedSearchError, JobError
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.request import JobRequest
from autopar.task import Effort, Task, prepare

DEFAULT_BASELINES = ("grid", "megatron")
"""What is compared with if nobody says."""
USUAL = Effort()


def compare(
    request: JobRequest,
    effort: Effort = USUAL,
    *,
    baselines: Sequence[str] = DEFAULT_BASELINES,
    solvers: Sequence[str] = (),
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> Comparison:
    """Return what our planner, baselines and other solvers come to on one job.

    Args:
        request: The job.
        effort: How hard each method looks: its solver is our planner's, and that of what baselines leave to one; its
            limit is for the search of each method.
        baselines: Baselines to run, keys of `autopar.bench.baselines.BASELINES`.
        solvers: Other solvers to run our planner with.
        progress: Told how far each method is; phases of others than ours start with the name of the method.
        should_stop: Polled; once true the method at work ends with its best plan and no other is begun.

    Raises:
        AutoparError: If the model, cluster or request is wrong. That nothing fits is a result, not an error.
    """
    methods = baselines_of(baselines)
    others = [replace(effort, solver=name) for name in dict.fromkeys(solvers) if name != effort.solver]
    task = prepare(request, progress=progress)
    results = [_plan(task, effort, progress, should_stop)]
    tasks = [partial(BASELINES[name].find, task, effort, name, _named(progress, name)) for name in methods]
    tasks += [partial(_plan, task, other, _named(progress, planner(other.solver))) for other in others]
    for find in tasks:
        if should_stop():
            break
        results.append(find(should_stop))
    return Comparison(task.workload.info(), task.job, effort.time_limit, tuple(results))


def baselines_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the baselines named, each once; "all" stands for all of them.

    Raises:
        JobError: If there is none of a name.
    """
    found = dict.fromkeys(known for name in names for known in (BASELINES if name == "all" else (name,)))
    for name in found:
        if name not in BASELINES:
            raise JobError(f"there is no baseline {name!r}", hint=f"choose all, {', '.join(BASELINES)}")
    return tuple(found)


def _plan(task: Task, effort: Effort, progress: ProgressCallback, should_stop: StopCallback) -> Result:
    method, size = planner(effort.solver), len(task.space)
    try:
        return Result.of(method, plan_task(task, effort, progress=progress, should_stop=should_stop), task.job.gpus)
    except InfeasibleError as error:
        return nothing(method, "infeasible", task.phases, size, note=f"{error.args[0]}; {error.hint}")
    except InterruptedSearchError as error:
        why = "interrupted" if should_stop() else "time limit"
        return nothing(method, why, task.phases, size, note=error.args[0])


def _named(progress: ProgressCallback, method: str) -> ProgressCallback:
    def tell(step: Progress) -> None:
        progress(replace(step, phase=step.phase if method in step.phase else f"{method}: {step.phase}"))

    return tell
