"""The commands that let a plan run: through the simulator, and on processes of this machine."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_file
from autopar.cli.options import (
    cache_options,
    echo_json,
    executed_argument,
    json_option,
    moved_model_option,
    other_stack_option,
    profile_option,
    program_options,
    resolve_cache_dir,
    seed_option,
)
from autopar.cli.values import file_path, not_negative, not_negative_number, positive_number, positive_whole, share
from autopar.display import show_progress
from autopar.program.files import is_program

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.program.listing import Listing
    from autopar.sharding import Axis
    from autopar.simulate.comparison import Comparison
    from autopar.simulate.kineto import Recording
    from autopar.simulate.timeline import Timeline


def _read(path: Path) -> "Plan | Listing":
    """Return the plan or the program in a file; what is wrong with it is said before the rest is imported."""
    if is_program(path):
        from autopar.program.listing import read_listing

        return read_listing(path)
    from autopar.plan import Plan

    return Plan.load(path)


def _settings(path: Path, cluster: str | None, stack: str | None, precision: str | None) -> dict[str, str]:
    """Return what is stated besides a program; a plan has its cluster and precision.

    Raises:
        click.UsageError: If they are given with a plan.
    """
    for option, given in (("--cluster", cluster), ("--precision", precision)):
        if given is not None and not is_program(path):
            raise click.UsageError(f"{option} belongs to the text of a program: a plan has its own")
    stated = {"cluster": cluster, "stack": stack, "precision": precision}
    return {name: value for name, value in stated.items() if value is not None}


def check_against(against: tuple[Path, ...], rank: int | None, trace_out: Path | None = None) -> None:
    """Check options that go with --against.

    Raises:
        click.UsageError: If one is given without it, or one rank for several traces.
    """
    for option, given in (("--rank", rank), ("--trace-out", trace_out)):
        if given is not None and not against:
            raise click.UsageError(f"{option} goes with --against TRACE")
    if rank is not None and len(against) > 1:
        raise click.UsageError("--rank goes with one trace: several have to name theirs")


def read_recordings(against: tuple[Path, ...], rank: int | None) -> "list[Recording]":
    """Return what measured traces hold, before anything is simulated."""
    if not against:
        return []
    from autopar.simulate.kineto import read_trace

    found = [read_trace(path) for path in against]
    return [replace(recording, rank=rank) for recording in found] if rank is not None else found


def _compare(
    timeline: "Timeline",
    meshes: "Sequence[tuple[tuple[int, int], tuple[Axis, ...]]]",
    against: tuple[Path, ...],
    recordings: "Sequence[Recording]",
    trace_out: Path | None,
) -> "list[Comparison]":
    """Return measured traces beside the stages that they belong to, and write both if a file is given."""
    if not against:
        return []
    from autopar.simulate.comparison import Place, compare, stage_of
    from autopar.simulate.trace import write_trace_of_both

    axes = {devices: {axis.name: axis.size for axis in mesh} for devices, mesh in reversed(meshes)}
    places = [Place(devices, axes[devices]) for devices in dict.fromkeys(devices for devices, _ in meshes)]
    stages = [stage_of(recording, places, repr(str(path))) for path, recording in zip(against, recordings, strict=True)]
    if trace_out is not None:
        write_trace_of_both(timeline, list(zip(stages, recordings, strict=True)), trace_out)
    return [
        compare(timeline, timeline.stages[stage].index, places[stage].sizes, recording)
        for stage, recording in zip(stages, recordings, strict=True)
    ]


@click.command()
@executed_argument
@moved_model_option
@other_stack_option
@profile_option
@program_options
@click.option("--trace", type=file_path(), metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
@click.option("--critical-path", is_flag=True, help="Print what the step consists of, added up by kind of block.")
@click.option("--flat", is_flag=True, help="Also simulate every device apart, and print by how much it differs.")
@click.option(
    "--bucket-mb",
    type=not_negative_number,
    metavar="MB",
    help="Gradients that travel together; 0: each alone. [default: the buckets of the plan, else 25, or 2 per device "
    "of a group where that is more]",
)
@click.option(
    "--stragglers",
    type=share,
    default=0.0,
    show_default=True,
    metavar="SIGMA",
    help="Spread of the speed of devices; a stage is as slow as its slowest.",
)
@seed_option("Seed of the stragglers.")
@click.option(
    "--against",
    type=file_path(),
    multiple=True,
    metavar="TRACE",
    help="Trace of the PyTorch profiler, .json or .json.gz: print measured beside simulated seconds; can be repeated.",
)
@click.option("--rank", type=not_negative(), metavar="N", help="Rank of the trace; default: the one it names.")
@click.option("--trace-out", type=file_path(), metavar="FILE", help="Write both steps into one trace.")
@cache_options
@json_option
def simulate(
    plan_file: Path,
    model: str | None,
    stack: str | None,
    profile: Path | None,
    cluster: str | None,
    precision: str | None,
    trace: Path | None,
    critical_path: bool,
    flat: bool,
    bucket_mb: float | None,
    stragglers: float,
    seed: int,
    against: tuple[Path, ...],
    rank: int | None,
    trace_out: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> None:
    """Simulate one step of a plan, or of a program.

    PLAN is a plan.json, PROGRAM.txt a distributed program that `autopar explain PLAN --program` prints, or that is
    written by hand. It is checked that either computes its model. Prints time and memory of every stage, or with
    --against where a measured step differs.
    """
    check_against(against, rank, trace_out)
    settings = _settings(plan_file, cluster, stack, precision)
    if is_program(plan_file) and model is not None:
        raise click.UsageError("--model belongs to a plan: the text of a program has its graph in it")
    given = _read(plan_file)
    for written in (trace, trace_out):
        if written is not None:
            prepare_file(written)
    recordings = read_recordings(against, rank)
    from autopar import api
    from autopar.plan import Plan
    from autopar.report import format_flat, format_path, format_timeline
    from autopar.simulate import Stragglers, simulate_flat, write_chrome_trace
    from autopar.simulate import simulate as run_simulator

    traced, cache = trace is not None or critical_path or bool(against), resolve_cache_dir(cache_dir, no_cache=no_cache)
    request: dict[str, Any] = {
        "bucket": None if bucket_mb is None else bucket_mb * 1e6,
        "stragglers": Stragglers(stragglers, seed),
    }
    if isinstance(given, Plan):
        of_plan: dict[str, Any] = {"model": model, "stack": stack, "cache_dir": cache, "profile": profile, **request}
        plan, timeline = api.simulate_again(given, trace=traced, **of_plan)
        assert plan.simulated is not None, "it was simulated"
        remarks = plan.simulated.remarks
        meshes = [(stage.devices, plan.all_variants[stage.variant].mesh) for stage in plan.stages]
        devices = api.simulate_devices(plan, **of_plan) if flat else None
    else:
        from autopar.program.listing import doubts
        from autopar.remarks import program_remarks
        from autopar.task import rules_for

        program, costs, folded = api.open_program(given, profile=profile, **settings)
        timeline = run_simulator(program, costs, trace=traced, verified=True, **request)
        doubted = doubts(program, folded, rules_for(folded, cache_dir=cache))
        remarks = program_remarks(program, timeline, costs, doubted)
        meshes = [(stage.devices, stage.mesh.axes) for stage in program.stages]
        devices = simulate_flat(program, costs, **request) if flat else None
    if trace is not None:
        write_chrome_trace(timeline, trace)
    compared = _compare(timeline, meshes, against, recordings, trace_out)
    if as_json:
        found = {
            "step_seconds": timeline.step_seconds,
            "band": timeline.band,
            **({} if timeline.measured is None else {"measured": timeline.measured}),
            "peak_bytes": timeline.peak_bytes,
            "host": timeline.host,
            "stages": timeline.stages,
            "remarks": remarks,
            **({"critical_path": timeline.path} if critical_path else {}),
            **({} if devices is None else {"flat_seconds": devices.step_seconds}),
            **({"against": compared} if against else {}),
        }
        echo_json(found)
        return
    if against:
        from autopar.report.against import format_comparison

        click.echo("\n".join(map(format_comparison, compared)), nl=False)
    else:
        click.echo(format_timeline(timeline, remarks), nl=False)
    if critical_path:
        click.echo("\n" + format_path(timeline.path), nl=False)
    if devices is not None:
        click.echo("\n" + format_flat(devices, timeline), nl=False)


@click.command()
@executed_argument
@click.option("--ranks", type=positive_whole(), metavar="N", help="Number of processes: one per GPU of the plan.")
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    default="gloo",
    show_default=True,
    help="How ranks talk: gloo on CPUs; nccl, with a GPU each, has not been tried on hardware.",
)
@click.option(
    "--steps",
    type=positive_whole(),
    default=3,
    show_default=True,
    metavar="S",
    help="Steps to run; the first one warms up, and the first and the last one are compared.",
)
@moved_model_option
@program_options
@click.option("--stack", metavar="NAME|FILE", help="What a program runs on: a software stack; default: default.")
@seed_option("Seed of weights and data.")
@click.option(
    "--tolerance", type=positive_number, metavar="X", help="Relative error allowed; default: 1e-4 for float32."
)
@click.option(
    "--threads", type=positive_whole(), default=1, show_default=True, metavar="N", help="CPU threads per rank."
)
@profile_option
@click.option("--pin", is_flag=True, help="Keep each process on cores of its own, as far as the system can.")
@click.option(
    "--compare/--no-compare",
    default=True,
    show_default=True,
    help="Compare the first and the last step with the unpartitioned model, or only time all steps.",
)
@json_option
def run(
    plan_file: Path,
    ranks: int | None,
    cluster: str | None,
    stack: str | None,
    precision: str | None,
    profile: Path | None,
    as_json: bool,
    **request: Any,
) -> int:
    """Run a plan, or a program, on processes of this machine.

    PLAN is a plan.json, PROGRAM.txt a distributed program that `autopar explain PLAN --program` prints, or that is
    written by hand. Each process does what one GPU would do; loss, gradients and updated parameters are compared with
    those of the unpartitioned model, and measured seconds with predicted ones. Started by torchrun, a process is one
    rank. Weights of a program are those of --model, or of the model it names; without either they are random.
    """
    if stack is not None and not is_program(plan_file):
        raise click.UsageError("--stack belongs to the text of a program: a plan has its own")
    request |= _settings(plan_file, cluster, stack, precision)
    request["profile"] = None if profile is None else str(profile.resolve())
    world = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if world is None and ranks is None:
        raise click.UsageError("give --ranks N, the number of GPUs of the plan")
    _read(plan_file)
    from autopar.ranks.launch import run_plan, run_under_torchrun
    from autopar.ranks.records import RunRequest
    from autopar.ranks.run_table import format_run

    with show_progress() as progress:
        if world is not None:
            report = run_under_torchrun(
                RunRequest(str(plan_file), int(world), **request), int(os.environ["RANK"]), progress
            )
        else:
            assert ranks is not None, "asked for above"
            report = run_plan(RunRequest(str(plan_file), ranks, **request), progress)
    if report is None:
        return ExitCode.DONE
    if as_json:
        echo_json(report)
    else:
        click.echo(format_run(report), nl=False)
    return ExitCode.DONE if report.passed else ExitCode.DEVIATES
