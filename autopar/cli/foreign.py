"""The command for profiles that other planners measured."""

from pathlib import Path

import click

from autopar.cli.options import echo_json, json_option
from autopar.cli.values import file_path, positive_whole

_SAMPLES = 16  # per device and step, as in the published searches of Aceso and Mist on such databases
_USABLE = 7 / 8  # of a device's memory, as there


@click.command()
@click.argument("database", type=file_path())
@click.option("--model", metavar="NAME", help="Model of the database, such as gpt-1.3b; left out: list them.")
@click.option("--gpus", type=positive_whole(), metavar="N", help="Number of devices.")
@click.option(
    "--gpus-per-node", type=positive_whole(), default=8, show_default=True, metavar="N", help="Devices of a node."
)
@click.option(
    "--memory", type=positive_whole(), metavar="MIB", help="Memory of a device; a plan uses at most 7/8 of it."
)
@click.option(
    "--global-batch", type=positive_whole(), metavar="N", help="Samples of a step. [default: 16 per device]"
)  # fmt: skip
@click.option("--layers", type=positive_whole(), metavar="N", help="Layers, where the model's name does not say them.")
@click.option("--max-stages", type=positive_whole(), metavar="N", help="Most pipeline stages. [default: --gpus]")
@json_option
def aceso(
    database: Path,
    model: str | None,
    gpus: int | None,
    gpus_per_node: int,
    memory: int | None,
    global_batch: int | None,
    layers: int | None,
    max_stages: int | None,
    as_json: bool,
) -> None:
    """Plan a GPT on a profile database of Aceso, in its cost model.

    DATABASE is a folder of measured ops, collectives and bandwidths in Aceso's form (EuroSys 2024), or a tar archive of
    one. Stages, their devices, tensor- and data-parallel degrees, the microbatch size and the ops that run again in the
    backward are chosen; a lower bound on all such plans is proven.
    """
    from autopar.aceso import CostModel, Database, plan

    opened = Database.open(database)
    if model is None:
        if as_json:
            echo_json({"models": opened.models})
        else:
            click.echo("\n".join(opened.models))
        return
    if gpus is None or memory is None:
        raise click.UsageError("give --gpus N and --memory MIB, the memory of a device, beside --model")
    costs = CostModel.of(
        opened, model, devices=gpus, node=gpus_per_node, global_batch=global_batch or _SAMPLES * gpus, layers=layers
    )
    from autopar.aceso.measured_step import step_seconds
    from autopar.report.aceso import format_found

    limit = memory * 2**20 * _USABLE
    found = plan(costs, limit, most_stages=max_stages)
    simulated = step_seconds(costs, found.configuration)
    if as_json:
        echo_json({"found": found, "gap": found.gap, "simulated_seconds": simulated})
    else:
        click.echo(format_found(costs, found, limit, simulated), nl=False)
