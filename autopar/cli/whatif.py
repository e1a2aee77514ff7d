"""The command that plans one model on several clusters and numbers of GPUs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_folder
from autopar.cli.interruption import Interruption
from autopar.cli.options import (
    as_json_text,
    cache_options,
    echo_json,
    folder_option,
    global_batch_option,
    json_option,
    memory_limit_option,
    model_argument,
    model_options,
    precision_option,
    profile_option,
    resolve_cache_dir,
    solver_option,
    stack_option,
    time_limit_option,
)
from autopar.cli.preflight import check_request
from autopar.cli.values import comma_separated, price_by_cluster, whole_numbers
from autopar.display import show_progress
from autopar.escaping import one_line

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
@profile_option
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
    found so far. DIR gets the plans, as CLUSTER-GPUS.json, and report.html: the fastest plan, and all in a table.
    """
    if output is not None:
        prepare_folder(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    check_request(model, request["dims"], *request["clusters"])
    from autopar.report.whatif import format_whatif
    from autopar.scenarios import whatif as ask

    with Interruption() as interruption:
        with show_progress() as shown:
            progress = interruption.watch(shown)
            found = ask(model, cache_dir=cache, progress=progress, should_stop=interruption.requested, **request)
        try:
            if output is not None:
                _write(found, output, cache)
        finally:  # a full disk does not cost the answer
            if as_json:
                echo_json(found.to_mapping())
            else:
                click.echo(format_whatif(found), nl=False)
    if found.stopped:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if found.plans else ExitCode.INFEASIBLE


def _write(found: "WhatIf", folder: Path, cache: Path | None) -> None:
    import importlib.util

    from autopar.page import look, write_page, write_scaling
    from autopar.report.whatif import format_whatif
    from autopar.writing import write_atomically

    written = ["whatif.txt", "whatif.json"]
    write_atomically(folder / "whatif.txt", format_whatif(found).encode())
    write_atomically(folder / "whatif.json", as_json_text(found.to_mapping()).encode())
    for cell in found.cells:
        if cell.plan is not None:
            name = f"{Path(cell.cluster).stem}-{cell.gpus}.json"
            cell.plan.save(folder / name)
            written.append(name)
    if len(found.plans) > 1 and importlib.util.find_spec("matplotlib") is not None:
        written += [path.name for path in write_scaling(found.plans, folder, ("png", "svg"))]
    if found.plans:
        fastest = max((cell for cell in found.cells if cell.plan), key=lambda cell: cell.items_per_second or 0.0).plan
        assert fastest is not None, "it was chosen among those with a plan"
        others = [plan for plan in found.plans if plan is not fastest]
        write_page(look(fastest, others=others, whatif=found, cache_dir=cache), folder / "report.html")
        written.append("report.html")
    click.echo(one_line(f"wrote {', '.join(written)} into {folder}"), err=True)
