"""The command that plans one model on several clusters and numbers of GPUs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_folder
from autopar.cli.interruption import Interruption
from autopar.cli.options import (
    cache_options,
    echo_json,
    folder_option,
    global_batch_option,
    json_option,
    memory_limit_option,
    model_argument,
    model_options,
    precision_option,
    resolve_cache_dir,
    solver_option,
    stack_option,
    time_limit_option,
)
from autopar.cli.values import comma_separated, price_by_cluster, whole_numbers
from autopar.display import show_progress

if TYPE_CHECKING:
    from autopar.scenarios import WhatIf


@click.command()
@model_argument
@click.option("--gpus", type=whole_numbers, required=True, metavar="N,...", help="Numbers of devices.")
@click.option(
    "--cluster",
    "clusters",
    type=comma_separated,
    default="h100",
    show_default=True,
    metavar="NAME|FILE,...",
    help="Presets or YAML files.",
)
@click.option(
    "--gpu-hour-price", type=price_by_cluster, metavar="X|NAME=X,...", help="Price of a GPU for an hour, by cluster."
)
@global_batch_option
@memory_limit_option
@stack_option
@precision_option
@model_options
@solver_option
@time_limit_option("Seconds for the search of each plan.", 60.0)
@folder_option("Write the table, all plans, and a figure of scaling there.")
@cache_options
@json_option
def whatif(
    model: str, output: Path | None, cache_dir: Path | None, no_cache: bool, as_json: bool, **request: Any
) -> int:
    """Plan MODEL on several clusters and numbers of GPUs.

    Prints a table of step time, throughput, memory and price, and the best plan of each. Ctrl-C ends it with what was
    found so far. Plans in DIR are called CLUSTER-GPUS.json: `autopar report` shows one, --with others.
    """
    if output is not None:
        prepare_folder(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    from autopar.report.whatif import format_whatif
    from autopar.scenarios import whatif as ask

    with Interruption() as interruption, show_progress() as progress:
        found = ask(model, cache_dir=cache, progress=progress, should_stop=interruption.requested, **request)
    if output is not None:
        _write(found, output)
    if as_json:
        echo_json(found.to_mapping())
    else:
        click.echo(format_whatif(found), nl=False)
    if found.stopped:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if found.plans else ExitCode.INFEASIBLE


def _write(found: "WhatIf", folder: Path) -> None:
    import importlib.util

    import msgspec

    from autopar.page import write_scaling
    from autopar.plan import write_atomically
    from autopar.report.whatif import format_whatif

    written = ["whatif.txt", "whatif.json"]
    write_atomically(folder / "whatif.txt", format_whatif(found).encode())
    write_atomically(folder / "whatif.json", msgspec.json.format(msgspec.json.encode(found.to_mapping()), indent=1))
    for cell in found.cells:
        if cell.plan is not None:
            name = f"{Path(cell.cluster).stem}-{cell.gpus}.json"
            cell.plan.save(folder / name)
            written.append(name)
    if len(found.plans) > 1 and importlib.util.find_spec("matplotlib") is not None:
        written += [path.name for path in write_scaling(found.plans, folder, ("png", "svg"))]
    click.echo(f"wrote {', '.join(written)} into {folder}", err=True)
