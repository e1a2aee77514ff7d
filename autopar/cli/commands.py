"""The commands: each checks what it was given, calls one public function and prints its result.

Heavy parts are imported inside the commands, so that `autopar --help` answers at once.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar import __version__
from autopar.cli.codes import ExitCode
from autopar.cli.completion import complete_model, completion
from autopar.cli.doctor import doctor
from autopar.cli.explaining import explain
from autopar.cli.exporting import export, import_config
from autopar.cli.files import prepare_file, prepare_folder
from autopar.cli.interruption import Interruption
from autopar.cli.invocation import Invocation
from autopar.cli.job_file import JOB_FILE, read_job_file
from autopar.cli.looking import figures, report
from autopar.cli.options import (
    cache_options,
    comma_separated,
    echo_json,
    engine_options,
    file_path,
    job_options,
    json_option,
    model_options,
    positive_number,
    resolve_cache_dir,
    solver_names,
)
from autopar.cli.partitioning import diff, partition
from autopar.cli.predicting import predict
from autopar.cli.scheduling import schedules
from autopar.cli.selecting import select
from autopar.cli.sizing import question, sizing_options
from autopar.cli.validating import calibrate, validate
from autopar.cli.whatif import whatif
from autopar.display import show_progress
from autopar.errors import InfeasibleError
from autopar.units import format_bytes

if TYPE_CHECKING:
    from autopar.bench import Comparison
    from autopar.bench.jobs import BenchJob
    from autopar.bench.problems import ProblemRun
    from autopar.plan import Plan

DEFAULT_PROBLEM_SOLVER = "portfolio"
"""Solver of problem files: the one that always has an answer, whatever their size."""
DEFAULT_PROBLEM_SECONDS = 60.0
"""Time limit of each solver on each problem, the shortest of the contest."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autopar")
@click.option(
    "--job",
    type=file_path(),
    metavar="FILE",
    help=f"Job file: options in TOML; default: {JOB_FILE} if the current folder has one.",
)
@click.pass_context
def app(context: click.Context, job: Path | None) -> None:
    """Find out how to parallelise a model over a cluster.

    MODEL is an .onnx file, a model of the zoo, such as zoo:gpt2, or a local Hugging Face configuration, such as
    hf:config.json. No command needs a GPU.
    """
    path = job or Path(JOB_FILE)
    if job is not None or path.exists():
        assert isinstance(context.command, click.Group)
        context.default_map = read_job_file(path, context.command.commands)
        click.echo(f"job file {path}", err=True)


app.add_command(completion)
app.add_command(doctor)
app.add_command(explain)
app.add_command(whatif)
app.add_command(select)
app.add_command(partition)
app.add_command(diff)
app.add_command(predict)
app.add_command(schedules)
app.add_command(validate)
app.add_command(calibrate)
app.add_command(export)
app.add_command(import_config)
app.add_command(report)
app.add_command(figures)


@app.command()
@click.argument("model", shell_complete=complete_model)
@job_options(gpus_required=False)
@sizing_options
@model_options
@click.option(
    "--top-k", type=click.IntRange(min=1), default=3, show_default=True, metavar="K", help="How many plans to return."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of what solvers draw at random.",
)
@click.option(
    "--pin", "pins", type=file_path(), metavar="FILE", help="What the plan has to keep to; docs/pins.md tells more."
)
@engine_options
@click.option("--dump-problem", type=file_path(), metavar="FILE", help="Also write the placement problem, as JSON.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write plan.json, report.txt, report.html and trace.json there.",
)
@cache_options
@json_option
def solve(
    model: str,
    output: Path | None,
    dump_problem: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    **request: Any,
) -> int:
    """Plan how to run MODEL on a cluster.

    Prints the best plan found, and a bound on how much better any other could be. Ctrl-C ends the search with the best
    plan found so far.
    """
    asked = question(request["gpus"], request)
    if output is not None:
        prepare_folder(output)
    if dump_problem is not None:
        prepare_file(dump_problem)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    if asked is not None:
        return _find_gpus(model, output, cache, {**request, **asked}, as_json=as_json)
    from autopar import api
    from autopar.report import format_report

    with Interruption() as interruption, show_progress() as progress, _infeasible_as_json(as_json):
        plan = api.solve(
            model,
            cache_dir=cache,
            dump_problem=dump_problem,
            progress=progress,
            should_stop=interruption.requested,
            **request,
        )
    if output is not None:
        _write_folder(plan, output, cache)
    click.echo(plan.to_json().decode() if as_json else format_report(plan), nl=as_json)
    interrupted = plan.search is not None and plan.search.termination == "interrupted"
    return ExitCode.INTERRUPTED if interrupted else ExitCode.DONE


def _find_gpus(model: str, output: Path | None, cache: Path | None, request: dict[str, Any], *, as_json: bool) -> int:
    """Answer how many GPUs a job takes, with the plan for them."""
    from autopar.report.sizing import format_sizing
    from autopar.sizing.gpus import find_gpus

    del request["gpus"]
    if request.pop("workers") is not None or request.pop("engine") != "local" or request.pop("ray_address"):
        raise click.UsageError("numbers of GPUs are searched one after the other: leave out --workers and --engine")
    with Interruption() as interruption, show_progress() as progress, _infeasible_as_json(as_json):
        found = find_gpus(model, cache_dir=cache, progress=progress, should_stop=interruption.requested, **request)
    if output is not None and found.plan is not None:
        _write_folder(found.plan, output, cache)
    if as_json:
        echo_json(found)
    else:
        click.echo(format_sizing(found), nl=False)
    return ExitCode.INTERRUPTED if interruption.requested() else ExitCode.DONE


@contextmanager
def _infeasible_as_json(wanted: bool) -> Iterator[None]:
    """Print what is known of a job that does not fit, if JSON is wanted, on the way of the error out."""
    try:
        yield
    except InfeasibleError as error:
        if wanted:
            echo_json({"error": "infeasible", "message": error.args[0], "infeasible": error.report})
        raise


def _write_folder(plan: "Plan", folder: Path, cache: Path | None) -> None:
    from autopar.page import look, write_page
    from autopar.plan import write_atomically
    from autopar.report import format_report
    from autopar.simulate import write_chrome_trace

    plan.save(folder / "plan.json")
    write_atomically(folder / "report.txt", format_report(plan).encode())
    view = look(plan, cache_dir=cache)
    write_chrome_trace(view.timeline, folder / "trace.json")
    write_page(view, folder / "report.html")
    click.echo(f"wrote plan.json, report.txt, report.html and trace.json into {folder}", err=True)


@app.command()
@click.argument("plan_file", metavar="PLAN", type=file_path())
@click.option("--model", help="Where the model is now, if it has moved since the plan was made.")
@click.option("--stack", metavar="NAME|FILE", help="Another software stack than the one the plan was made for.")
@click.option("--trace", type=file_path(), metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
@click.option("--critical-path", is_flag=True, help="Print what the step consists of, added up by kind of block.")
@click.option("--flat", is_flag=True, help="Also simulate every device apart, and print by how much it differs.")
@click.option(
    "--bucket-mb",
    type=click.FloatRange(min=0),
    default=25.0,
    show_default=True,
    metavar="MB",
    help="Gradients that travel together; 0: each alone.",
)
@click.option(
    "--stragglers",
    type=click.FloatRange(min=0, max=1),
    default=0.0,
    show_default=True,
    metavar="SIGMA",
    help="Spread of the speed of devices; a stage is as slow as its slowest.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Seed of the stragglers."
)
@cache_options
@json_option
def simulate(
    plan_file: Path,
    model: str | None,
    stack: str | None,
    trace: Path | None,
    critical_path: bool,
    flat: bool,
    bucket_mb: float,
    stragglers: float,
    seed: int,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Simulate one step of a plan.

    PLAN is a plan.json. It is checked that the plan computes the model. Prints time and memory of every stage.
    """
    from autopar import api
    from autopar.plan import Plan
    from autopar.report import format_flat, format_path, format_timeline
    from autopar.simulate import Stragglers, write_chrome_trace

    plan = Plan.load(plan_file)
    if trace is not None:
        prepare_file(trace)
    request: dict[str, Any] = {
        "model": model,
        "stack": stack,
        "bucket": bucket_mb * 1e6,
        "stragglers": Stragglers(stragglers, seed),
        "cache_dir": resolve_cache_dir(cache_dir, no_cache=no_cache),
    }
    timeline = api.simulate_plan(plan, trace=trace is not None or critical_path, **request)
    devices = api.simulate_devices(plan, **request) if flat else None
    if trace is not None:
        write_chrome_trace(timeline, trace)
    if as_json:
        found = {
            "step_seconds": timeline.step_seconds,
            "band": timeline.band,
            "peak_bytes": timeline.peak_bytes,
            "host": timeline.host,
            "stages": timeline.stages,
            **({"critical_path": timeline.path} if critical_path else {}),
            **({} if devices is None else {"flat_seconds": devices.step_seconds}),
        }
        echo_json(found)
        return
    click.echo(format_timeline(timeline), nl=False)
    if critical_path:
        click.echo("\n" + format_path(timeline.path), nl=False)
    if devices is not None:
        click.echo("\n" + format_flat(devices, timeline), nl=False)


@app.command()
@click.argument("plan_file", metavar="PLAN", type=file_path())
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="Number of processes: one per GPU of the plan.")
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    default="gloo",
    show_default=True,
    help="How ranks talk: on CPUs, or one GPU each.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="S",
    help="Steps to run; the first one warms up, and the first and the last one are compared.",
)
@click.option("--model", help="Where the model is now, if it has moved since the plan was made.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of weights and data.",
)
@click.option(
    "--tolerance", type=positive_number, metavar="X", help="Relative error allowed; default: 1e-4 for float32."
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="CPU threads per rank."
)
@json_option
def run(plan_file: Path, ranks: int | None, as_json: bool, **settings: Any) -> int:
    """Run a plan on processes of this machine.

    PLAN is a plan.json. Each process does what one GPU would do; loss, gradients and updated parameters are compared
    with those of the unpartitioned model, and measured seconds with predicted ones. Started by torchrun, a process is
    one rank.
    """
    from autopar.ranks.launch import run_plan, run_under_torchrun
    from autopar.ranks.records import RunRequest
    from autopar.ranks.table import format_run

    world = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    with show_progress() as progress:
        if world is not None:
            request = RunRequest(str(plan_file), int(world), **settings)
            report = run_under_torchrun(request, int(os.environ["RANK"]), progress)
        else:
            if ranks is None:
                raise click.UsageError("give --ranks N, the number of GPUs of the plan")
            report = run_plan(RunRequest(str(plan_file), ranks, **settings), progress)
    if report is None:
        return ExitCode.DONE
    if as_json:
        echo_json(report)
    else:
        click.echo(format_run(report), nl=False)
    return ExitCode.DONE if report.passed else ExitCode.DEVIATES


@app.command()
@click.argument("model", shell_complete=complete_model)
@model_options
@click.option("--op", "kind", metavar="KIND", help="Only ops of this kind, e.g. MatMul.")
@cache_options
@json_option
def rules(
    model: str, mode: str, dims: dict[str, int], kind: str | None, cache_dir: Path | None, no_cache: bool, as_json: bool
) -> None:
    """Print how the ops of a model can be sharded.

    The rules are found by running each distinct op of MODEL on shards of its inputs.
    """
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    from autopar import api
    from autopar.report import format_rules, rules_to_json

    found = api.rules(model, mode=mode, dims=dims, cache_dir=cache)
    if as_json:
        echo_json(rules_to_json(found, kind))
    else:
        click.echo(format_rules(found, kind), nl=False)


@app.command()
@click.argument("model", required=False, shell_complete=complete_model)
@job_options(gpus_required=False)
@model_options
@click.option(
    "--top-k", type=click.IntRange(min=1), default=3, show_default=True, metavar="K", help="Plans per method."
)
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
@click.option("--spec", "specs", multiple=True, metavar="NAME", help="Run a published benchmark instead of MODEL.")
@click.option("--all", "all_specs", is_flag=True, help="Run all published benchmarks.")
@click.option("--jobs", "jobs_file", type=file_path(), metavar="FILE", help="Run the jobs of a YAML list.")
@click.option(
    "--problems",
    type=file_path(),
    metavar="DIR",
    help="Run solvers on the selection problems in a folder instead of MODEL; by default the portfolio, for 60 s each.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Write the tables there, as .md and .json."
)
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
    """Compare our plan for MODEL with those of baselines, at the same costs and in the same simulator.

    Among them are grid search over all degrees and what the documentation of Megatron-LM leads to. With --spec, --all
    or --jobs a list of jobs is run: every one in a process of its own and with a cold cache; --gpus then selects the
    cases of --spec and --all with that many devices. With --problems, --solver and the --solvers are compared on files
    of the IOPDDL contest. Ctrl-C ends the method at work with its best plan and keeps what is done.
    """
    typed = context.obj.arguments if isinstance(context.obj, Invocation) else ()
    command = shlex.join(("autopar", *typed)) if typed else context.command_path
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
    from autopar import bench
    from autopar.bench.report import format_comparison

    with Interruption() as interruption, show_progress() as progress:
        comparison = bench.compare(
            model, gpus=gpus, cache_dir=cache, progress=progress, should_stop=interruption.requested, **request
        )
    if output is not None:
        _write_benchmark([comparison], command, output, "benchmark")
    if as_json:
        echo_json(comparison)
    else:
        click.echo(format_comparison(comparison), nl=False)
    return _benchmark_code([comparison])


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

    files = problem_files(folder)
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
                written = write_page(done, conditions(command), output, problem_name(folder))
        stopped = interruption.requested()
    for path in written:
        click.echo(f"wrote {path}", err=True)
    if as_json:
        echo_json([run_to_dict(run) for run in done])
    return ExitCode.INTERRUPTED if stopped else ExitCode.DONE


def _refuse_with_jobs(context: click.Context, model: str | None) -> None:
    """Refuse what a list of jobs decides itself, or what cannot hold for all of its models."""
    if model is not None:
        raise click.UsageError(f"give either MODEL ({model}) or --spec, --all and --jobs", context)
    for name, option in (("cluster", "--cluster"), ("dims", "--set"), ("cache_dir", "--cache-dir")):
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
    from autopar.bench.report import format_comparison
    from autopar.bench.sweep import run_sweep

    done: list[Comparison] = []
    with Interruption() as interruption, show_progress() as progress:
        for comparison in run_sweep(jobs, progress=progress, should_stop=interruption.requested, **request):
            done.append(comparison)
            if not as_json:
                click.echo(format_comparison(comparison))
            if output is not None:  # after every job, so that an interrupted run leaves what it has
                _write_benchmark(done, command, output)
        stopped = interruption.requested()
    if as_json:
        echo_json(done)
    return ExitCode.INTERRUPTED if stopped else _benchmark_code(done)


def _write_benchmark(comparisons: "Sequence[Comparison]", command: str, folder: Path, name: str | None = None) -> None:
    from autopar.bench.conditions import conditions
    from autopar.bench.report import write_pages

    for path in write_pages(comparisons, conditions(command), folder, name):
        click.echo(f"wrote {path}", err=True)


def _benchmark_code(comparisons: "Sequence[Comparison]") -> ExitCode:
    if any(comparison.interrupted for comparison in comparisons):
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if any(comparison.ours.best for comparison in comparisons) else ExitCode.INFEASIBLE


@app.command(name="model")
@click.argument("name", required=False)
@click.option("-o", "--output", type=file_path(), metavar="FILE.onnx", help="Where to write the model.")
@click.option("--list", "list_all", is_flag=True, help="List the models of the zoo.")
@json_option
def write_model(name: str | None, output: Path | None, list_all: bool, as_json: bool) -> None:
    """Write a model of the zoo, or list it.

    The file is ONNX without weights, so that it is small however large the model is.
    """
    if list_all:
        if name is not None or output is not None:
            raise click.UsageError("--list takes neither a name nor -o")
        _list_models(as_json)
        return
    if name is None or output is None:
        raise click.UsageError("give a name and -o FILE.onnx, or --list")
    from autopar import models

    entry = models.spec(name.removeprefix("zoo:"))
    prepare_file(output)
    models.save(models.build(entry.name), output)
    size = output.stat().st_size
    if as_json:
        echo_json({"name": entry.name, "parameters": entry.num_parameters, "file": str(output), "bytes": size})
    else:
        click.echo(
            f"wrote {output}: {entry.name}, {entry.num_parameters:,} parameters, {format_bytes(size)} without weights"
        )


def _list_models(as_json: bool) -> None:
    from autopar import models
    from autopar.report.text import format_table

    entries = [models.spec(name) for name in models.names()]
    if as_json:
        echo_json(
            [
                {
                    "name": entry.name,
                    "parameters": entry.num_parameters,
                    "layers": entry.num_layers,
                    "sample": entry.sample,
                    "sample_size": entry.sample_size,
                    "global_batch": entry.global_batch,
                }
                for entry in entries
            ]
        )
        return
    rows = [
        (
            entry.name,
            f"{entry.num_parameters:,}",
            str(entry.num_layers),
            f"{entry.sample} of {entry.sample_size}",
            str(entry.global_batch),
        )
        for entry in entries
    ]
    header = ("name", "parameters", "layers", "one sample", "samples per step")
    click.echo("\n".join(format_table(header, rows)))


@app.command()
@click.argument("name", required=False)
@json_option
def clusters(name: str | None, as_json: bool) -> None:
    """List the clusters known by name, or show one in full.

    NAME is one of them or a YAML file. The text shown is a cluster file, with where its constants come from.
    """
    from autopar.cluster import PRESETS, format_cluster, load_cluster, sources
    from autopar.report.text import format_table

    if name is not None:
        cluster = load_cluster(name)
        if as_json:
            echo_json(cluster.to_dict())
            return
        known = sources(cluster)
        click.echo(
            "".join(f"# {field}: {source}\n" for field, source in known.items()) + format_cluster(cluster), nl=False
        )
        return
    if as_json:
        echo_json({name: cluster.to_dict() for name, cluster in PRESETS.items()})
        return
    rows = [
        (
            name,
            f"{cluster.devices_per_node} × {cluster.device.name}",
            format_bytes(cluster.device.memory),
            cluster.intra.tier,
            cluster.inter.tier,
        )
        for name, cluster in PRESETS.items()
    ]
    click.echo("\n".join(format_table(("name", "node", "memory", "inside a node", "between nodes"), rows)))


@app.command()
@json_option
def stacks(as_json: bool) -> None:
    """List the software stacks known by name.

    A YAML file with the fields that --json prints describes any other.
    """
    from autopar.cost import bundled_stacks
    from autopar.report.stacks import format_stacks

    if as_json:
        echo_json({name: stack.to_dict() for name, stack in bundled_stacks().items()})
    else:
        click.echo(format_stacks(bundled_stacks()), nl=False)
