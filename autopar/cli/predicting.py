"""The command that predicts a plan stated by degrees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.completion import complete_model
from autopar.cli.files import prepare_folder
from autopar.cli.options import (
    Command,
    cache_options,
    json_option,
    memory_limit_option,
    model_options,
    positive_whole,
    precision_option,
    resolve_cache_dir,
    stack_option,
)


def _layers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    if value is None:
        return ()
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers, e.g. 9,10,10,9", ctx, param)
    return tuple(int(part) for part in parts)


def _degree(name: str, text: str) -> Callable[[Command], Command]:
    return click.option(f"--{name}", type=positive_whole(), default=1, show_default=True, metavar="N", help=text)


@click.command()
@click.argument("model", shell_complete=complete_model)
@click.option("--gpus", type=positive_whole(), metavar="N", help="Number of devices, to check the degrees against.")
@_degree("dp", "Data-parallel degree, expert groups included.")
@_degree("tp", "Tensor-parallel degree.")
@_degree("pp", "Pipeline degree: groups of devices.")
@_degree("cp", "Context-parallel degree.")
@_degree("ep", "Expert-parallel degree; divides dp.")
@click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage over dp.")
@click.option("--sequence-parallel", is_flag=True, help="Split along the sequence what tp would copy.")
@click.option(
    "--recompute",
    type=click.Choice(["none", "selective", "full", "offload"]),
    default="none",
    show_default=True,
    help="What runs again in the backward pass; offload keeps it in host memory instead.",
)
@click.option(
    "--offload",
    type=click.Choice(["optimizer"]),
    callback=lambda _context, _option, value: value or "",
    help="What lies in host memory between steps.",
)
@click.option("--schedule", default="1f1b", show_default=True, metavar="NAME", help="Order of microbatches.")
@_degree("interleave", "Stages per group of devices.")
@click.option("--layers", callback=_layers, metavar="N,N,...", help="Layers per stage; default: an even cut.")
@_degree("microbatch", "Samples per microbatch and data-parallel device.")
@click.option(
    "--global-batch", type=positive_whole(), required=True, metavar="B", help="Samples per step, over all devices."
)
@click.option("--cluster", default="h100", show_default=True, metavar="NAME|FILE", help="Preset or YAML file.")
@stack_option
@precision_option
@memory_limit_option
@click.option("--loss", default="auto", show_default=True, metavar="NAME", help="Loss of the training step.")
@click.option("--optimizer", default="adam", show_default=True, metavar="NAME", help="Optimizer.")
@model_options
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Write plan.json there.")
@cache_options
@json_option
def predict(
    model: str,
    gpus: int | None,
    mode: str,
    dims: dict[str, int],
    cluster: str,
    stack: str,
    precision: str,
    memory_limit: float | None,
    loss: str,
    optimizer: str,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    **stated: Any,
) -> int:
    """Predict a plan that is stated by degrees.

    Prints the time of a step, where it goes, and the memory of every stage. A plan that does not fit is predicted all
    the same.
    """
    if output is not None:
        prepare_folder(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    from autopar import prediction
    from autopar.degrees import Degrees
    from autopar.errors import JobError
    from autopar.report.prediction import format_prediction

    degrees = Degrees(**stated)
    if gpus is not None and gpus != degrees.gpus:
        product = f"dp {degrees.dp} x cp {degrees.cp} x tp {degrees.tp} x pp {degrees.pp}"
        raise JobError(
            f"{product} are {degrees.gpus} devices, not {gpus}",
            hint=f"--gpus {degrees.gpus}, or other degrees",
        )
    found = prediction.predict(
        model,
        degrees,
        cluster=cluster,
        stack=stack,
        precision=precision,
        mode=mode,
        dims=dims,
        memory_limit=memory_limit,
        loss=loss,
        optimizer=optimizer,
        cache_dir=cache,
    )
    if output is not None:
        found.plan.save(output / "plan.json")
        click.echo(f"wrote plan.json into {output}", err=True)
    click.echo(found.plan.to_json().decode() if as_json else format_prediction(found.plan, found.timeline), nl=as_json)
    return ExitCode.DONE
