"""The command that finds the best plan for a model on a cluster, or how many GPUs it takes."""

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.answers import infeasible_as_json, write_folder
from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_file, prepare_folder
from autopar.cli.interruption import Interruption
from autopar.cli.invocation import Invocation, typed_command
from autopar.cli.options import (
    cache_options,
    echo_json,
    engine_options,
    folder_option,
    job_options,
    json_option,
    model_argument,
    model_options,
    profile_option,
    recompute_modules_option,
    resolve_cache_dir,
    seed_option,
    shared_overlap_option,
    top_k_option,
)
from autopar.cli.preflight import check_request
from autopar.cli.sizing import question, refuse_alone, sizing_options
from autopar.cli.values import AUTO_PRECISION, file_path, not_negative_number
from autopar.display import show_progress
from autopar.fusion_plan import BUCKETS, FUSIONS
from autopar.progress import Progress, ProgressCallback, StopCallback

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.practice import Practice
    from autopar.task import Task


@click.command()
@model_argument
@job_options(
    gpus_required=False,
    limit="Time limit in seconds, including import and verification, not the grid baseline or writing files.",
)
@sizing_options
@model_options
@top_k_option("How many plans to return.")
@seed_option("Random seed of the solvers; proofs do not depend on it.")
@click.option(
    "--pin", "pins", type=file_path(), metavar="FILE", help="Decisions that the plan must keep, as YAML (docs/pins.md)."
)
@click.option(
    "--for",
    "framework",
    metavar="NAME",
    help="Search only what a framework runs: megatron, nemo, torchtitan, deepspeed, accelerate, trainer, fsdp or "
    "maxtext.",
)
@click.option(
    "--grid",
    "grid_seconds",
    type=not_negative_number,
    metavar="S",
    help="Seconds for grid search, and a quarter of that for Megatron's rules, to compare with; a faster plan of "
    "theirs is returned. 0 for none; default: a tenth of the search.",
)
@click.option(
    "--fusion",
    type=click.Choice(FUSIONS),
    default=BUCKETS,
    show_default=True,
    help="What is fused in plans: gradients, in buckets cut for each plan (buckets); ops, too (joint); or nothing "
    "beyond what the stack does (off).",
)
@click.option(
    "--max-batch",
    is_flag=True,
    help="Also list the largest microbatch with which each usual layout fits, beside that of the fastest plan.",
)
@recompute_modules_option
@shared_overlap_option
@profile_option
@engine_options
@click.option("--dump-problem", type=file_path(), metavar="FILE", help="Also write the placement problem, as JSON.")
@folder_option("Write plan.json, report.txt, report.html and trace.json there.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Print all: memory by stage, space that was searched, other plans, phases."
)
@cache_options
@json_option
@click.pass_context
def solve(
    context: click.Context,
    /,
    model: str,
    output: Path | None,
    dump_problem: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    verbose: bool,
    grid_seconds: float | None,
    max_batch: bool,
    **request: Any,
) -> int:
    """Plan how to run MODEL on a cluster.

    Prints the best plan found, and a bound on how much better any other could be. Ctrl-C ends the search with the best
    plan found so far. If nothing fits, the error says what is missing and the cheapest way out.

    --precision auto plans in bf16 and lists what the plan would come to in each precision that the devices have.

    With --find-min-gpus, --target-time or --budget numbers of GPUs are searched one after the other, each for
    --time-limit seconds, 30 unless told otherwise, with uniform buckets of gradients. --gpus, --workers, --engine,
    --ray-address, --dump-problem and --grid do not go with them.
    """
    asked = question(request["gpus"], request)
    compares = request["precision"] == AUTO_PRECISION
    if max_batch and (asked is not None or as_json):
        raise click.UsageError(
            "--max-batch lists layouts for a number of --gpus, as text; autopar fit has them as JSON"
        )
    if asked is not None:
        refuse_alone(context)
        if request.pop("framework") is not None:
            raise click.UsageError("--for is for a number of --gpus")
        if compares:
            raise click.UsageError("--precision auto compares precisions for a number of --gpus; name one precision")
    if output is not None:
        prepare_folder(output)
    if dump_problem is not None:
        prepare_file(dump_problem)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    if compares:
        request["precision"] = "mixed"
    check_request(model, request["dims"], request["cluster"])
    if asked is not None:
        return _find_gpus(model, output, cache, {**request, **asked}, as_json=as_json)
    from autopar import api
    from autopar.precisions import in_other_precisions
    from autopar.report import format_answer, format_report, next_commands
    from autopar.report.precisions import format_precisions
    from autopar.search.backends import usual_workers

    if request["workers"] is None and request["engine"] == "local" and dump_problem is None:
        request["workers"] = usual_workers()
    with Interruption() as interruption, infeasible_as_json(as_json):
        with show_progress() as shown:
            progress = interruption.watch(shown)
            plan = api.solve(
                model,
                cache_dir=cache,
                dump_problem=dump_problem,
                progress=progress,
                should_stop=interruption.requested,
                rival=None if grid_seconds == 0 else partial(_practice, grid_seconds, progress, interruption.requested),
                preview=partial(_preview, progress),
                began=context.obj.began if isinstance(context.obj, Invocation) else None,
                **request,
            )
        try:
            if output is not None:
                write_folder(plan, output, cache)
        finally:  # a full disk does not cost the answer
            if as_json:
                click.echo(plan.to_json().decode())
            elif verbose:
                click.echo(format_report(plan), nl=False)
            else:
                folder = None if output is None else shlex.quote(str(output))
                click.echo(format_answer(plan, next_commands(plan, folder, typed_command(context))), nl=False)
        if max_batch:
            click.echo(_largest_batches(plan, cache, request, interruption.requested), nl=False)
        if compares:
            click.echo(format_precisions(in_other_precisions(plan, cache_dir=cache)), nl=False, err=as_json)
    interrupted = plan.search is not None and plan.search.termination == "interrupted"
    return ExitCode.INTERRUPTED if interrupted else ExitCode.DONE


_SETTING = ("cluster", "stack", "mode", "dims", "loss", "optimizer", "sync_batchnorm", "lora", "precision", "profile")
"""Options that say what the largest microbatches of layouts are asked for."""


def _largest_batches(plan: "Plan", cache: Path | None, request: dict[str, Any], should_stop: StopCallback) -> str:
    """Return the largest microbatches of the usual layouts for the job of a plan, as text."""
    from autopar.estimates.fitting import fit_layouts
    from autopar.prediction import open_setting
    from autopar.report.fitting import format_largest

    setting = open_setting(plan.model.source, cache_dir=cache, **{name: request[name] for name in _SETTING})
    found = fit_layouts(
        setting, request["gpus"], global_batch=plan.job.global_batch, memory_limit=request["memory_limit"],
        max_batch=True, should_stop=should_stop,
    )  # fmt: skip
    return format_largest(found, plan)


def _practice(
    seconds: float | None, progress: ProgressCallback, should_stop: StopCallback, task: "Task", plan: "Plan"
) -> "Practice":
    """Return what usual practice finds beside a plan: what is known, unless there was less time for it than now."""
    from autopar.bench import usual_practice
    from autopar.practice import Practice

    known = plan.rival
    if known is not None and (not known.stopped or seconds is None or known.seconds >= seconds):
        return Practice(known, plan.by_rules)

    def tell(step: Progress) -> None:
        progress(replace(step, phase="grid"))

    return usual_practice(task, plan, seconds=seconds, progress=tell, should_stop=should_stop)


def _preview(progress: ProgressCallback, task: "Task", should_stop: StopCallback) -> None:
    """Tell what usual plans take while kernels compile."""
    from autopar.bench import usual_preview

    usual_preview(task, progress, should_stop)


def _find_gpus(model: str, output: Path | None, cache: Path | None, request: dict[str, Any], *, as_json: bool) -> int:
    """Answer how many GPUs a job takes, with the plan for them."""
    from autopar.report.sizing import format_sizing
    from autopar.sizing.gpus import find_gpus

    for name in ("gpus", "workers", "engine", "ray_address", "fusion"):
        del request[name]
    with Interruption() as interruption, infeasible_as_json(as_json):
        with show_progress() as shown:
            progress = interruption.watch(shown)
            found = find_gpus(model, cache_dir=cache, progress=progress, should_stop=interruption.requested, **request)
        stopped = interruption.requested()
        try:
            if output is not None and found.plan is not None:
                write_folder(found.plan, output, cache)
        finally:  # a full disk does not cost the answer
            if as_json:
                echo_json(found)
            else:
                click.echo(format_sizing(found), nl=False)
    return ExitCode.INTERRUPTED if stopped else ExitCode.DONE
