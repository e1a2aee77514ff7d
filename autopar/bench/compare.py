"""One job, several methods: the model is prepared once, every method searches the same space at the same prices.

What a method finds goes through the same door: its best candidates by the formula are lowered, simulated and ranked by
the simulator, as many of one method as of the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autopar.api import plan_task
from autopar.bench.records import GRID, Comparison, Result, planner
from autopar.cluster import Cluster
from autopar.cost import DEFAULT, Stack
from autopar.errors import InfeasibleError, InterruptedSearchError
from autopar.plan import PhaseTime
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.search.grid import grid_search
from autopar.task import Effort, PhaseClock, Task, prepare
from autopar.verdict import conclude


def compare(
    model: str | Path,
    *,
    gpus: int,
    cluster: str | Path | Cluster = "h100",
    mode: str = "train",
    global_batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    top_k: int = 3,
    time_limit: float | None = None,
    solver: str = "auto",
    baselines: Sequence[str] = (),
    memory_limit: float | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    stack: str | Path | Stack = DEFAULT,
    precision: str = "mixed",
    cache_dir: Path | None = None,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> Comparison:
    """Return what our planner, grid search and other solvers come to on one job.

    Args:
        model: Path of an ONNX file, or `zoo:NAME`.
        gpus: Number of devices.
        cluster: Preset name, YAML file or record.
        mode: "train" or "infer".
        global_batch: Samples per step; None for the model's published batch, else 8 per GPU.
        dims: Dynamic dims by name; for zoo models fields of the configuration.
        top_k: Number of plans wanted of each method.
        time_limit: Seconds for the search of each method; None for no limit.
        solver: Solver of the placement problems, for our planner and for what a recipe of grid search leaves open.
        baselines: Other solvers to run our planner with.
        memory_limit: Bytes per device a plan may use; None for most of the device's memory.
        loss: "auto", "cross-entropy", "mse" or "mean".
        optimizer: "adam" or "sgd".
        stack: What the software makes of the hardware: name, YAML file or record.
        precision: What is stored in which precision, a key of `autopar.cost.POLICIES`.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.
        progress: Told how far each method is; phases of others than ours start with the name of the method.
        should_stop: Polled; once true the method at work ends with its best plan and no other is begun.

    Raises:
        AutoparError: If the model, cluster or request is wrong. That nothing fits is a result, not an error.
    """
    effort = Effort(solver, top_k, time_limit)
    others = [Effort(name, top_k, time_limit).solver for name in dict.fromkeys(baselines) if name != solver]
    task = prepare(
        model,
        gpus=gpus,
        cluster=cluster,
        mode=mode,
        global_batch=global_batch,
        dims=dims,
        memory_limit=memory_limit,
        loss=loss,
        optimizer=optimizer,
        stack=stack,
        precision=precision,
        cache_dir=cache_dir,
        progress=progress,
    )
    results: list[Result] = []
    for method in (solver, GRID, *others):
        if results and should_stop():
            break
        shown = progress if method == solver else _named(progress, method)
        find = _grid if method == GRID else _plan
        results.append(find(task, replace(effort, solver=solver if method == GRID else method), shown, should_stop))
    return Comparison(task.workload.info(), task.job, time_limit, tuple(results))


def _plan(task: Task, effort: Effort, progress: ProgressCallback, should_stop: StopCallback) -> Result:
    method = planner(effort.solver)
    try:
        return Result.of(method, plan_task(task, effort, progress=progress, should_stop=should_stop))
    except InfeasibleError as error:
        return _nothing(method, "infeasible", task, note=f"{error.args[0]}; {error.hint}")
    except InterruptedSearchError as error:
        return _nothing(method, "interrupted" if should_stop() else "time limit", task, note=error.args[0])


def _grid(task: Task, effort: Effort, progress: ProgressCallback, should_stop: StopCallback) -> Result:
    clock = PhaseClock(before=task.phases)
    with clock("search"):
        search = task.search(effort, progress=progress, should_stop=should_stop)
        outcome = grid_search(search, task.space, task.batch_dims)
    if outcome.candidates:
        try:
            return Result.of(GRID, conclude(outcome, task, GRID, effort.top_k, clock))
        except InfeasibleError as error:
            return _nothing(GRID, "infeasible", task, outcome.solved, clock.times, error.args[0])
    why = outcome.stopped or "infeasible"
    return _nothing(GRID, why, task, outcome.solved, clock.times, "no recipe fits in any configuration")


def _nothing(
    method: str, why: str, task: Task, solved: int = 0, phases: tuple[PhaseTime, ...] = (), note: str = ""
) -> Result:
    return Result(method, why, (), 0.0, len(task.space), solved, phases or task.phases, note)


def _named(progress: ProgressCallback, method: str) -> ProgressCallback:
    def tell(step: Progress) -> None:
        progress(replace(step, phase=step.phase if method in step.phase else f"{method}: {step.phase}"))

    return tell
