"""A list of jobs, each in a fresh process with a cold cache: its seconds and bytes are its own."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from autopar.bench.compare import DEFAULT_BASELINES, USUAL, compare
from autopar.bench.jobs import BenchJob
from autopar.bench.records import Comparison
from autopar.bench.specs import BenchSpec
from autopar.errors import InterruptedSearchError, WorkerError
from autopar.machine import follow_parent
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.request import JobRequest
from autopar.task import Effort

Compare = Callable[..., Comparison]
"""`compare`, or what stands for it."""


def in_fresh_process(*args: Any, **request: Any) -> Comparison:
    """Return what `compare` returns, computed by a process of its own; errors come back as they were raised.

    Raises:
        InterruptedSearchError: If that process was interrupted.
        WorkerError: If it was killed.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"), initializer=follow_parent) as pool:
        try:
            return pool.submit(compare, *args, **request).result()
        except KeyboardInterrupt:  # Ctrl-C reaches every process of the terminal
            raise InterruptedSearchError(
                "interrupted in the middle of a case", hint="run the rest with --gpus"
            ) from None
        except BrokenProcessPool:
            raise WorkerError(
                "the process of a case was killed", hint="out of memory? run the rest with --gpus"
            ) from None


def spec_jobs(spec: BenchSpec, gpus: int | None = None) -> list[BenchJob]:
    """Return the cases of a benchmark as jobs, those with `gpus` devices if that is given."""
    cases = [case for case in spec.sweep if gpus is None or case.gpus == gpus]
    return [BenchJob(model=spec.model, gpus=case.gpus, cluster=case.cluster) for case in cases]


def run_sweep(
    jobs: Sequence[BenchJob],
    effort: Effort = USUAL,
    *,
    progress: ProgressCallback = silent,
    should_stop: StopCallback = never,
    run: Compare = in_fresh_process,
    baselines: Sequence[str] = DEFAULT_BASELINES,
    solvers: Sequence[str] = (),
    **common: Any,
) -> Iterator[Comparison]:
    """Yield the comparison of every job as soon as it is done.

    Args:
        jobs: What to compare on.
        effort: How hard each method looks.
        progress: Told when a job begins.
        should_stop: Polled between jobs.
        run: What compares; gets the arguments of `compare`.
        baselines: As of `compare`.
        solvers: As of `compare`.
        **common: Fields of `JobRequest` for all jobs; what a job states comes first.

    Raises:
        AutoparError: As `compare` does.
    """
    for done, job in enumerate(jobs):
        if should_stop():
            return
        progress(Progress("benchmark", done, len(jobs), detail=f"{job.model} on {job.gpus} × {job.cluster}"))
        yield run(JobRequest(**{**common, **job.stated()}), effort, baselines=baselines, solvers=solvers)


def run_tiny(spec: BenchSpec, *, baselines: Sequence[str] = DEFAULT_BASELINES, **stated: Any) -> Comparison:
    """Return the comparison for a small stand-in of a benchmark's model on two devices, computed in this process.

    Args:
        spec: The benchmark.
        baselines: As of `compare`.
        **stated: Further fields of `JobRequest`.
    """
    cluster = spec.sweep[0].cluster
    request = JobRequest(spec.model, gpus=2, cluster=cluster, dims=spec.tiny, global_batch=2, **stated)
    return compare(request, baselines=baselines)
