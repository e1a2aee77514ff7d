"""One job, several methods: the model is prepared once, every method searches the same space at the same prices.

What a method finds goes through the same door: its best candidates by the formula are lowered, simulated and ranked by
the simulator, as many of one method as of the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from autopar.api import plan_task
from autopar.bench.baselines import BASELINES
from autopar.bench.records import Comparison, Result, nothing, planner
from autopar.cluster import Cluster
from autopar.cost import DEFAULT, Stack
from autopar.errors import InfeasibleError, InterruptedSearchError, JobError
from autopar.plan import DimSize
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.task import Effort, Task, prepare

DEFAULT_BASELINES = ("grid", "megatron")
"""What is compared with if nobody says."""


def compare(
    model: str | Path,
    *,
    gpus: int,
    cluster: str | Path | Cluster = "h100",
    mode: str = "train",
    global_batch: int | None = None,
    dims: Mapping[str, DimSize] | None = None,
    top_k: int = 3,
    time_limit: float | None = None,
    solver: str = "auto",
    baselines: Sequence[str] = DEFAULT_BASELINES,
    solvers: Sequence[str] = (),
    memory_limit: float | None = None,
    loss: str = "auto",
    optimizer: str = "adam",
    sync_batchnorm: bool = False,
    stack: str | Path | Stack = DEFAULT,
    precision: str = "mixed",
    cache_dir: Path | None = None,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
) -> Comparison:
    """Return what our planner, baselines and other solvers come to on one job.

    Args:
        model: Path of an ONNX file, or `zoo:NAME`.
        gpus: Number of devices.
        cluster: Preset name, YAML file or record.
        mode: "train" or "infer".
        global_batch: Samples per step; None for the model's published batch, else 8 per GPU.
        dims: Dynamic dims by name; for zoo models fields of the configuration.
        top_k: Number of plans wanted of each method.
        time_limit: Seconds for the search of each method; None for no limit.
        solver: Solver of the placement problems, for our planner and for what baselines leave to one.
        baselines: Baselines to run, keys of `autopar.bench.baselines.BASELINES`.
        solvers: Other solvers to run our planner with.
        memory_limit: Bytes per device a plan may use; None for most of the device's memory.
        loss: "auto", "cross-entropy", "mse" or "mean".
        optimizer: "adam" or "sgd".
        sync_batchnorm: Whether devices that share a batch normalise it with statistics of all of it in training; else
            each with those of its own samples, as frameworks do by default.
        stack: What the software makes of the hardware: name, YAML file or record.
        precision: What is stored in which precision, a key of `autopar.cost.POLICIES`.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.
        progress: Told how far each method is; phases of others than ours start with the name of the method.
        should_stop: Polled; once true the method at work ends with its best plan and no other is begun.

    Raises:
        AutoparError: If the model, cluster or request is wrong. That nothing fits is a result, not an error.
    """
    effort = Effort(solver, top_k, time_limit)
    methods = baselines_of(baselines)
    others = [Effort(name, top_k, time_limit) for name in dict.fromkeys(solvers) if name != solver]
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
        sync_batchnorm=sync_batchnorm,
        stack=stack,
        precision=precision,
        cache_dir=cache_dir,
        progress=progress,
    )
    results = [_plan(task, effort, progress, should_stop)]
    tasks = [partial(BASELINES[name].find, task, effort, name, _named(progress, name)) for name in methods]
    tasks += [partial(_plan, task, other, _named(progress, planner(other.solver))) for other in others]
    for find in tasks:
        if should_stop():
            break
        results.append(find(should_stop))
    return Comparison(task.workload.info(), task.job, time_limit, tuple(results))


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
