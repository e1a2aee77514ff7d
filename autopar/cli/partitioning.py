"""The commands about plans made by hand: partition a model by tactics, compare two plans."""

from pathlib import Path
from typing import Any

import click

from autopar.cli.answers import give_plan
from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_folder
from autopar.cli.options import (
    cache_options,
    cluster_option,
    folder_option,
    global_batch_option,
    json_option,
    memory_limit_option,
    model_argument,
    model_options,
    resolve_cache_dir,
    stack_option,
    training_options,
)
from autopar.cli.preflight import check_request
from autopar.cli.values import file_path, positive_whole


@click.command()
@model_argument
@click.option("--mesh", required=True, metavar="AXIS=SIZE,...", help="Devices of one stage, neighbours last.")
@click.option("--tactics", required=True, type=file_path(), metavar="FILE", help="YAML file with the schedule.")
@cluster_option
@stack_option
@global_batch_option
@memory_limit_option
@click.option(
    "--trips", type=positive_whole(), default=1, show_default=True, metavar="N", help="Trips of a loop around MODEL."
)
@training_options
@model_options
@folder_option("Write plan.json there.")
@cache_options
@json_option
def partition(
    model: str,
    mesh: str,
    tactics: Path,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    **request: Any,
) -> int:
    """Partition MODEL by a schedule of tactics.

    Prints after every tactic the collectives it added, and what a step then takes in time and memory.
    """
    if output is not None:
        prepare_folder(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    check_request(model, request["dims"], request["cluster"])
    from autopar.partitioning import as_mesh, partition_steps
    from autopar.report.partitioning import format_partition
    from autopar.tactics.files import load_schedule

    found = partition_steps(model, as_mesh(mesh), load_schedule(tactics), cache_dir=cache, **request)
    file = output / "plan.json" if output is not None else None
    give_plan(found.plan, format_partition(found), file, as_json=as_json)
    return ExitCode.DONE


@click.command()
@click.argument("first", metavar="PLAN_A", type=file_path())
@click.argument("second", metavar="PLAN_B", type=file_path())
def diff(first: Path, second: Path) -> None:
    """Show what changes from PLAN_A to PLAN_B, and what it costs.

    Both are plan.json files of one model. Prints degrees, stages and placements that differ, and time and memory.
    """
    from autopar.plan import Plan

    plans = Plan.load(first), Plan.load(second)
    from autopar.report import format_difference

    click.echo(format_difference(*plans), nl=False)
