"""The commands about plans made by hand: partition a model by tactics, compare two plans."""

from pathlib import Path

import click

from autopar.cli.codes import ExitCode
from autopar.cli.completion import complete_model
from autopar.cli.files import prepare_folder
from autopar.cli.options import (
    cache_options,
    file_path,
    json_option,
    memory_limit_option,
    model_options,
    positive_whole,
    resolve_cache_dir,
    stack_option,
)


@click.command()
@click.argument("model", shell_complete=complete_model)
@click.option("--mesh", required=True, metavar="AXIS=SIZE,...", help="Devices of one stage, neighbours last.")
@click.option(
    "--tactics", required=True, type=click.Path(path_type=Path), metavar="FILE", help="YAML file with the schedule."
)
@click.option("--cluster", default="h100", show_default=True, metavar="NAME|FILE", help="Preset or YAML file.")
@stack_option
@click.option("--global-batch", type=positive_whole(), metavar="B", help="Samples per step; default: the model's own.")
@memory_limit_option
@click.option(
    "--trips", type=positive_whole(), default=1, show_default=True, metavar="N", help="Trips of a loop around MODEL."
)
@click.option("--loss", default="auto", show_default=True, metavar="NAME", help="Loss of the training step.")
@click.option("--optimizer", default="adam", show_default=True, metavar="NAME", help="Optimizer.")
@model_options
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Write plan.json there.")
@cache_options
@json_option
def partition(
    model: str,
    mesh: str,
    tactics: Path,
    cluster: str,
    stack: str,
    global_batch: int | None,
    memory_limit: float | None,
    trips: int,
    loss: str,
    optimizer: str,
    mode: str,
    dims: dict[str, int],
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Partition MODEL by a schedule of tactics.

    Prints after every tactic the collectives it added, and what a step then takes in time and memory.
    """
    if output is not None:
        prepare_folder(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    from autopar.partitioning import as_mesh, partition_steps
    from autopar.report.partitioning import format_partition
    from autopar.tactics.files import load_schedule

    devices, schedule = as_mesh(mesh), load_schedule(tactics)
    found = partition_steps(
        model,
        devices,
        schedule,
        cluster=cluster,
        stack=stack,
        mode=mode,
        global_batch=global_batch,
        dims=dims,
        memory_limit=memory_limit,
        trips=trips,
        loss=loss,
        optimizer=optimizer,
        cache_dir=cache,
    )
    if output is not None:
        found.plan.save(output / "plan.json")
        click.echo(f"wrote plan.json into {output}", err=True)
    click.echo(found.plan.to_json().decode() if as_json else format_partition(found), nl=as_json)
    return ExitCode.DONE


@click.command()
@click.argument("first", metavar="PLAN_A", type=file_path())
@click.argument("second", metavar="PLAN_B", type=file_path())
def diff(first: Path, second: Path) -> None:
    """Say what changes from PLAN_A to PLAN_B, and what that costs.

    Both are plan.json files of one model. Prints degrees, stages and placements that differ, and time and memory.
    """
    from autopar.plan import Plan
    from autopar.report import format_difference

    click.echo(format_difference(Plan.load(first), Plan.load(second)), nl=False)
