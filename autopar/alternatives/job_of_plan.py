"""The job of a plan, ready to be searched again."""

from pathlib import Path

from autopar.cluster import cluster_from_dict
from autopar.errors import PlanError
from autopar.formulate.agreement import check_blocks
from autopar.pins import pins_from
from autopar.plan import Plan
from autopar.progress import ProgressCallback, silent
from autopar.request import JobRequest
from autopar.task import Task, prepare
from autopar.training import NO_LORA
from autopar.workload import job_stack


def task_of(
    plan: Plan,
    *,
    model: str | Path | None = None,
    cache_dir: str | Path | None = None,
    progress: ProgressCallback = silent,
) -> Task:
    """Return the task a plan was found for.

    Args:
        plan: A plan, solved or read from a file.
        model: Where the model is now; None for where it was.
        cache_dir: Where discovered rules are kept between runs; None to keep nothing.
        progress: Told what is being done.

    Raises:
        ModelError: If there is no such model.
        PlanError: If it is another one than the plan was made for.
    """
    job = plan.job
    request = JobRequest(
        model or plan.model.source,
        gpus=job.gpus,
        cluster=cluster_from_dict(job.cluster).by_node,
        mode=job.mode,
        global_batch=job.global_batch,
        dims=dict(plan.model.dims),
        memory_limit=job.memory_limit,
        loss=job.loss,
        optimizer=job.optimizer,
        sync_batchnorm=job.sync_batchnorm,
        lora=job.lora or NO_LORA,
        stack=job_stack(job),
        precision=job.precision,
        cache_dir=cache_dir,
        pins=pins_from(job.pins) if job.pins else None,
    )
    task = prepare(request, progress=progress)
    folded = task.workload.folded(plan.microbatch)  # the model's numbers are known once it is imported
    if task.workload.info().sha256 != plan.model.sha256:
        raise PlanError(
            f"{task.workload.source!r} is not the model the plan was made for (its hash differs)",
            hint="solve again, or pass the original file with --model",
        )
    check_blocks(plan, folded)
    return task
