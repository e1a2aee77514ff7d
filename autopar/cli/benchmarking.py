"""The command that compares our planner, and our solvers, with others."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.completion import complete_model
from autopar.cli.files import prepare_folder
from autopar.cli.interruption import Interruption
from autopar.cli.invocation import typed_command
from autopar.cli.options import (
    CLUSTER_CHANGES,
    cache_options,
    echo_json,
    folder_option,
    job_options,
    json_option,
    model_options,
    resolve_cache_dir,
    top_k_option,
)
from autopar.cli.preflight import check_request
from autopar.cli.values import comma_separated, file_path, solver_names
from autopar.display import show_progress
from autopar.escaping import one_line

if TYPE_CHECKING:
    from autopar.bench import Comparison
    from autopar.bench.conditions import Conditions
    from autopar.bench.jobs import BenchJob
    from autopar.bench.problems import ProblemRun
    from autopar.task import Effort

DEFAULT_PROBLEM_SOLVER = "portfolio"
"""Solver of problem files: the one that always has an answer, whatever their size."""
DEFAULT_PROBLEM_SECONDS = 60.0
"""Time limit of each solver on each problem, the shortest of the contest."""


@click.command()
@click.argument("model", required=False, shell_complete=complete_model)
@job_options(gpus_required=False)
@model_options
@top_k_option("Plans per method.")
@click.option(
    "--baselines",
    type=comma_separated,
    default="grid,megatron",
    show_default=True,
    metavar="NAME,...",
    help="What to compare with: all, none, or some of grid, megatron, greedy, beam, annealing, mcts, recipes, alpa.",
)
@click.option(
    "--solvers",
    type=solver_names,
    default=(),
    metavar="NAME,...",
    help="Also run our planner with other solvers of the placements.",
)
@click.option("--spec", "specs", multiple=True, metavar="NAME", help="Run a benchmark of our list instead of MODEL.")
@click.option("--all", "all_specs", is_flag=True, help="Run all benchmarks of our list.")
@click.option("--jobs", "jobs_file", type=file_path(), metavar="FILE", help="Run the jobs of a YAML list.")
@click.option(
    "--problems",
    type=file_path(),
    metavar="DIR",
    help="Run solvers on the selection problems in a folder instead of MODEL; by default the portfolio, for 60 s each.",
)
@folder_option("Write the tables there, as .md and .json.")
@cache_options
@json_option
@click.pass_context
def benchmark(
    context: click.Context,
    /,
    model: str | None,
    gpus: int | None,
    specs: tuple[str, ...],
    all_specs: bool,
    jobs_file: Path | None,
    problems: Path | None,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    **request: Any,
) -> int:
    """Compare our plan for MODEL with those of baselines.

    All are priced at the same costs and run in the same simulator. Among them are grid search over all degrees and what
    the documentation of Megatron-LM leads to. With --spec, --all or --jobs a list of jobs is run: every one in a
    process of its own and with a cold cache; --gpus then selects the cases of --spec and --all with that many devices.
    With --problems, --solver and the --solvers are compared on files of the IOPDDL contest. Ctrl-C ends the method at
    work with its best plan and keeps what is done.
    """
    command = typed_command(context)
    if output is not None:
        prepare_folder(output)
    if problems is not None:
        _refuse_with_problems(context, model, specs, all_specs or jobs_file is not None)
        is_given = context.get_parameter_source("solver") is click.core.ParameterSource.COMMANDLINE
        first = request["solver"] if is_given else DEFAULT_PROBLEM_SOLVER
        solvers = tuple(dict.fromkeys((first, *request["solvers"])))
        return _run_problems(problems, solvers, request["time_limit"], command, output, as_json)
    if specs or all_specs or jobs_file is not None:
        _refuse_with_jobs(context, model)
        if jobs_file is not None and (specs or all_specs or gpus is not None):
            raise click.UsageError("--jobs is combined with neither --spec and --all nor --gpus", context)
        del request["cluster"], request["dims"]
        from autopar.bench.jobs import load_jobs

        jobs = _listed(specs, all_specs, gpus) if jobs_file is None else load_jobs(jobs_file)
        return _run_jobs(jobs, command, output, as_json, request)
    if model is None or gpus is None:
        raise click.UsageError(
            "give a MODEL and --gpus N, or --spec NAME, or --all, or --jobs FILE, or --problems DIR", context
        )
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    check_request(model, request["dims"], request["cluster"])
    from autopar import bench
    from autopar.bench.conditions import conditions
    from autopar.bench.report import format_comparison
    from autopar.request import JobRequest

    begun, effort, methods = conditions(command), _effort(request), _methods(request)
    job = JobRequest(model, gpus=gpus, cache_dir=cache, **request)
    with Interruption() as interruption, show_progress() as progress:
        comparison = bench.compare(job, effort, progress=progress, should_stop=interruption.requested, **methods)
    if output is not None:
        _write_benchmark([comparison], begun, output, "benchmark")
    if as_json:
        echo_json(comparison)
    else:
        click.echo(format_comparison(comparison), nl=False)
    return _benchmark_code([comparison])


def _effort(request: dict[str, Any]) -> "Effort":
    """Take how hard to look out of what was asked."""
    from autopar.task import Effort

    return Effort(**{name: request.pop(name) for name in ("solver", "top_k", "time_limit")})


def _methods(request: dict[str, Any]) -> dict[str, Any]:
    """Take what is compared out of what was asked."""
    return {name: request.pop(name) for name in ("baselines", "solvers")}


def _refuse_with_problems(context: click.Context, model: str | None, specs: tuple[str, ...], all_specs: bool) -> None:
    """Refuse what has no meaning for a problem that is already formulated."""
    if model is not None or specs or all_specs:
        raise click.UsageError("give only one of MODEL, --spec or --all, and --problems", context)
    known = {"problems", "time_limit", "solver", "solvers", "output", "as_json"}
    for param in context.command.params:
        given = param.name and context.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
        if given and param.name not in known:
            raise click.UsageError(f"{param.opts[0]} cannot be combined with --problems", context)


def _run_problems(
    folder: Path,
    solvers: tuple[str, ...],
    time_limit: float | None,
    command: str,
    output: Path | None,
    as_json: bool,
) -> int:
    from autopar.bench.conditions import conditions
    from autopar.bench.problems import problem_files, problem_name, run_problems
    from autopar.bench.problems_report import format_run, run_to_dict, write_page

    files, begun = problem_files(folder), conditions(command)
    done: list[ProblemRun] = []
    written: list[Path] = []
    with Interruption() as interruption, show_progress() as progress:
        limit = DEFAULT_PROBLEM_SECONDS if time_limit is None else time_limit
        runs = run_problems(files, solvers, time_limit=limit, progress=progress, should_stop=interruption.requested)
        for run in runs:
            done.append(run)
            if not as_json:
                click.echo(format_run(run))
            if output is not None:  # after every problem, so that an interrupted run leaves what it has
                written = write_page(done, begun, output, problem_name(folder))
        stopped = interruption.requested()
    for path in written:
        click.echo(one_line(f"wrote {path}"), err=True)
    if as_json:
        echo_json([run_to_dict(run) for run in done])
    return ExitCode.INTERRUPTED if stopped else ExitCode.DONE


def _refuse_with_jobs(context: click.Context, model: str | None) -> None:
    """Refuse what a list of jobs decides itself, or what cannot hold for all of its models."""
    if model is not None:
        raise click.UsageError(f"give either MODEL ({model}) or --spec, --all and --jobs", context)
    machine = (("cluster", "--cluster"), *((name, f"--{name.replace('_', '-')}") for name in CLUSTER_CHANGES))
    for name, option in (*machine, ("dims", "--set"), ("cache_dir", "--cache-dir")):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} cannot be combined with --spec, --all and --jobs", context)


def _listed(names: tuple[str, ...], all_specs: bool, gpus: int | None) -> "list[BenchJob]":
    from autopar.bench.specs import SPECS, spec
    from autopar.bench.sweep import spec_jobs

    chosen = [spec(name) for name in (SPECS if all_specs else dict.fromkeys(names))]
    jobs = [job for each in chosen for job in spec_jobs(each, gpus)]
    if not jobs:
        raise click.UsageError(f"no case of {', '.join(each.name for each in chosen)} has {gpus} devices")
    return jobs


def _run_jobs(
    jobs: "Sequence[BenchJob]", command: str, output: Path | None, as_json: bool, request: dict[str, Any]
) -> int:
    from autopar.bench.conditions import conditions
    from autopar.bench.report import format_comparison
    from autopar.bench.sweep import run_sweep

    done: list[Comparison] = []
    begun = conditions(command)  # a page that is written again after midnight is still the same one
    effort, common = _effort(request), _methods(request) | request
    with Interruption() as interruption, show_progress() as progress:
        for comparison in run_sweep(jobs, effort, progress=progress, should_stop=interruption.requested, **common):
            done.append(comparison)
            if not as_json:
                click.echo(format_comparison(comparison))
            if output is not None:  # after every job, so that an interrupted run leaves what it has
                _write_benchmark(done, begun, output)
        stopped = interruption.requested()
    if as_json:
        echo_json(done)
    return ExitCode.INTERRUPTED if stopped else _benchmark_code(done)


def _write_benchmark(
    comparisons: "Sequence[Comparison]", begun: "Conditions", folder: Path, name: str | None = None
) -> None:
    from autopar.bench.report import write_pages

    for path in write_pages(comparisons, begun, folder, name):
        click.echo(one_line(f"wrote {path}"), err=True)


def _benchmark_code(comparisons: "Sequence[Comparison]") -> ExitCode:
    if any(comparison.interrupted for comparison in comparisons):
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if any(comparison.ours.best for comparison in comparisons) else ExitCode.INFEASIBLE
