"""The commands that let a plan run: through the simulator, and on processes of this machine."""

import os
from pathlib import Path
from typing import Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_file
from autopar.cli.options import (
    cache_options,
    echo_json,
    json_option,
    moved_model_option,
    other_stack_option,
    plan_argument,
    resolve_cache_dir,
    seed_option,
)
from autopar.cli.values import file_path, not_negative_number, positive_number, positive_whole, share
from autopar.display import show_progress


@click.command()
@plan_argument
@moved_model_option
@other_stack_option
@click.option("--trace", type=file_path(), metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
@click.option("--critical-path", is_flag=True, help="Print what the step consists of, added up by kind of block.")
@click.option("--flat", is_flag=True, help="Also simulate every device apart, and print by how much it differs.")
@click.option(
    "--bucket-mb",
    type=not_negative_number,
    default=25.0,
    show_default=True,
    metavar="MB",
    help="Gradients that travel together; 0: each alone.",
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
    from autopar.plan import Plan

    plan = Plan.load(plan_file)
    if trace is not None:
        prepare_file(trace)
    from autopar import api
    from autopar.report import format_flat, format_path, format_timeline
    from autopar.simulate import Stragglers, write_chrome_trace

    request: dict[str, Any] = {
        "model": model,
        "stack": stack,
        "bucket": bucket_mb * 1e6,
        "stragglers": Stragglers(stragglers, seed),
        "cache_dir": resolve_cache_dir(cache_dir, no_cache=no_cache),
    }
    plan, timeline = api.simulate_again(plan, trace=trace is not None or critical_path, **request)
    assert plan.simulated is not None, "it was simulated"
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
            "remarks": plan.simulated.remarks,
            **({"critical_path": timeline.path} if critical_path else {}),
            **({} if devices is None else {"flat_seconds": devices.step_seconds}),
        }
        echo_json(found)
        return
    click.echo(format_timeline(timeline, plan.simulated.remarks), nl=False)
    if critical_path:
        click.echo("\n" + format_path(timeline.path), nl=False)
    if devices is not None:
        click.echo("\n" + format_flat(devices, timeline), nl=False)


@click.command()
@plan_argument
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
@seed_option("Seed of weights and data.")
@click.option(
    "--tolerance", type=positive_number, metavar="X", help="Relative error allowed; default: 1e-4 for float32."
)
@click.option(
    "--threads", type=positive_whole(), default=1, show_default=True, metavar="N", help="CPU threads per rank."
)
@json_option
def run(plan_file: Path, ranks: int | None, as_json: bool, **settings: Any) -> int:
    """Run a plan on processes of this machine.

    PLAN is a plan.json. Each process does what one GPU would do; loss, gradients and updated parameters are compared
    with those of the unpartitioned model, and measured seconds with predicted ones. Started by torchrun, a process is
    one rank.
    """
    from autopar.plan import Plan

    world = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if world is None and ranks is None:
        raise click.UsageError("give --ranks N, the number of GPUs of the plan")
    Plan.load(plan_file)  # what is wrong with it is said before the rest is imported
    from autopar.ranks.launch import run_plan, run_under_torchrun
    from autopar.ranks.records import RunRequest
    from autopar.ranks.table import format_run

    with show_progress() as progress:
        if world is not None:
            request = RunRequest(str(plan_file), int(world), **settings)
            report = run_under_torchrun(request, int(os.environ["RANK"]), progress)
        else:
            assert ranks is not None, "asked for above"
            report = run_plan(RunRequest(str(plan_file), ranks, **settings), progress)
    if report is None:
        return ExitCode.DONE
    if as_json:
        echo_json(report)
    else:
        click.echo(format_run(report), nl=False)
    return ExitCode.DONE if report.passed else ExitCode.DEVIATES
