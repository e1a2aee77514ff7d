"""The command that predicts a plan stated by degrees."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.answers import give_plan
from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_folder
from autopar.cli.invocation import typed_command
from autopar.cli.options import (
    Option,
    cache_options,
    cluster_option,
    folder_option,
    json_option,
    memory_limit_option,
    model_argument,
    model_options,
    precision_option,
    profile_option,
    recompute_modules_option,
    resolve_cache_dir,
    shared_overlap_option,
    stack_option,
    training_options,
)
from autopar.cli.preflight import check_request
from autopar.cli.values import positive_whole
from autopar.units import parse_whole

if TYPE_CHECKING:
    from autopar.degrees import Degrees
    from autopar.prediction import Setting

_SOME = 0.05
"""Share of the parameters that ZeRO leaves whole from which on that is told."""


def _layers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    if value is None:
        return ()
    numbers = [parse_whole(part.strip()) for part in value.split(",")]
    layers = tuple(number for number in numbers if number is not None)
    if len(layers) < len(numbers):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers, e.g. 9,10,10,9", ctx, param)
    return layers


def _shares(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[tuple[int, int], ...]:
    if value is None:
        return ()
    found = []
    for part in value.split(","):
        count, _, each = part.partition("x")
        numbers = parse_whole(count.strip()), parse_whole(each.strip())
        if None in numbers:
            raise click.BadParameter(f"{value!r} is not a list of devices x microbatches, e.g. 8x5,8x3", ctx, param)
        found.append(numbers)
    return tuple(found)  # type: ignore[arg-type]  # none is None


def _stages_of(layout: str | None, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return layers, modules of multi-token prediction and stages per group that a layout states, if there is one."""
    from autopar.errors import JobError

    if layout is None:
        return {"predictions": ()}
    from autopar.frameworks.megatron import parse_layout

    if request["layers"] or request["interleave"] > 1:
        raise JobError("stages are stated by --layout and by --layers or --interleave", hint="leave the latter out")
    layers, predictions = parse_layout(layout)
    interleave, rest = divmod(len(layers), request["pp"])
    if rest:
        raise JobError(f"the layout has {len(layers)} stages for pp {request['pp']}", hint="a multiple of pp has them")
    return {"layers": layers, "predictions": predictions, "interleave": interleave}


def _degree(name: str, text: str) -> Option:
    return click.option(f"--{name}", type=positive_whole(), default=1, show_default=True, metavar="N", help=text)


def _with_microbatch(setting: "Setting", degrees: "Degrees", limit: float | None) -> "Degrees":
    """Return degrees with the microbatch that is fastest by formula, and say which that is if there was a choice."""
    from autopar.estimates.microbatch import choose_microbatch

    found = choose_microbatch(setting, degrees, limit)
    if not found.is_only:
        size, tried = found.degrees.microbatch, ", ".join(map(str, found.tried))
        among = f"the fastest of {tried} that fits, by formula" if found.fits else "none fits"
        click.echo(f"microbatch {size}: {among}; --microbatch N takes another", err=True)
    return found.degrees


@click.command()
@model_argument
@click.option(
    "--gpus",
    type=positive_whole(),
    metavar="N",
    help="Number of devices, to check the degrees against; default: their product.",
)
@_degree("dp", "Data-parallel degree, expert groups included.")
@_degree("tp", "Tensor-parallel degree.")
@_degree("pp", "Pipeline degree: groups of devices.")
@_degree("cp", "Context-parallel degree.")
@click.option(
    "--cp-kind",
    type=click.Choice(["ring", "gather", "ulysses"]),
    callback=lambda _context, _option, value: value or "",
    help="How attention gets at positions of other devices; default: what the software stack runs.",
)
@_degree("ep", "Expert-parallel degree, all of cp and with --etp 1 tp within; divides dp x cp (x tp).")
@click.option(
    "--etp",
    type=positive_whole(),
    callback=lambda _context, _option, value: value or 0,
    metavar="N",
    help="Devices each expert is split over: the tensor-parallel ones, or 1; default: tp.",
)
@click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage over dp.")
@click.option(
    "--shard",
    type=positive_whole(),
    callback=lambda _context, _option, value: value or 0,
    metavar="N",
    help="Data-parallel devices that share what ZeRO splits; default: all, or as many as the dims have elements.",
)
@click.option("--sequence-parallel", is_flag=True, help="Split along the sequence what tp would copy.")
@click.option(
    "--recompute",
    type=click.Choice(["none", "selective", "full", "offload"]),
    default="none",
    show_default=True,
    help="What runs again in the backward pass; offload keeps it in host memory instead.",
)
@_degree("recompute-every", "Recompute only every N-th layer of a stage.")
@click.option(
    "--recompute-layers",
    type=positive_whole(),
    metavar="N",
    help="Recompute, or offload, only the first N layers of every stage.",
)
@click.option(
    "--offload",
    callback=lambda _context, _option, value: value or "",
    metavar="STATE[=SHARE]",
    help="What lies in host memory between steps: the optimizer's state (optimizer), with its update on the host "
    "(update), gradients too (gradients), or parameters too (parameters); optimizer=0.5 for a share of the blocks.",
)
@click.option(
    "--schedule",
    callback=lambda _context, _option, value: value or "",
    metavar="NAME",
    help="Order of microbatches; default: 1f1b, in inference forward-only.",
)
@_degree("interleave", "Stages per group of devices.")
@click.option("--layers", callback=_layers, metavar="N,N,...", help="Layers per stage; default: an even cut.")
@click.option(
    "--layout",
    metavar="TEXT",
    help="Stages in Megatron's words, in place of --layers and --interleave: 'Et*2|(tt|)*3t,L'; m is a module of "
    "multi-token prediction.",
)
@click.option(
    "--pp-inside", is_flag=True, help="Lay data parallelism around pipelines, not pipelines across nodes around it."
)
@click.option(
    "--shares",
    callback=_shares,
    metavar="NxM,NxM,...",
    help="Data-parallel devices, and microbatches of each: 8x5,8x3 for 8 fast and 8 slow ones; default: equally many.",
)
@click.option(
    "--microbatch",
    type=positive_whole(),
    metavar="N",
    help="Samples per microbatch and data-parallel device; default: the fastest that fits, by the planner's formula.",
)
@click.option(
    "--global-batch", type=positive_whole(), required=True, metavar="B", help="Samples per step, over all devices."
)
@cluster_option
@stack_option
@profile_option
@precision_option
@recompute_modules_option
@shared_overlap_option
@memory_limit_option
@training_options
@model_options
@folder_option("Write plan.json there.")
@cache_options
@json_option
@click.option("-v", "--verbose", is_flag=True, help="Print time and memory of every stage, too.")
@click.pass_context
def predict(
    context: click.Context,
    /,
    model: str,
    gpus: int | None,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    verbose: bool,
    **request: Any,
) -> int:
    """Predict time and memory of a plan stated by its degrees.

    Prints the time of a step, where it goes, and the memory of the fullest stage. A plan that does not fit is predicted
    all the same.
    """
    if output is not None:
        prepare_folder(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    from dataclasses import fields

    from autopar.degrees import Degrees
    from autopar.errors import JobError

    chosen, limit = request["microbatch"] is not None, request.pop("memory_limit")
    first_layers = request.pop("recompute_layers") or 0
    if first_layers and not chosen:
        raise JobError(
            f"--recompute-layers {first_layers} without a microbatch: the formula that chooses one knows nothing of it",
            hint="add --microbatch N",
        )
    if request["shares"] and not chosen:  # they say how many microbatches there are
        total = sum(count * each for count, each in request["shares"])
        request["microbatch"], chosen = request["global_batch"] // max(1, total), True
    request["microbatch"] = request["microbatch"] or 1
    request |= _stages_of(request.pop("layout"), request)
    degrees = Degrees(**{field.name: request.pop(field.name) for field in fields(Degrees)})
    product = f"dp {degrees.dp} x cp {degrees.cp} x tp {degrees.tp} x pp {degrees.pp}"
    if gpus is None:
        click.echo(f"{product}: predicting for {degrees.gpus} GPUs; --gpus N checks that", err=True)
    elif gpus != degrees.gpus:
        raise JobError(
            f"{product} are {degrees.gpus} devices, not {gpus}",
            hint=f"--gpus {degrees.gpus}, or other degrees",
        )
    check_request(model, request["dims"], request["cluster"])
    from autopar import prediction
    from autopar.report import next_commands
    from autopar.report.prediction import format_prediction

    setting = prediction.open_setting(model, cache_dir=cache, **request)
    found = setting.predict(
        degrees if chosen else _with_microbatch(setting, degrees, limit), memory_limit=limit, first_layers=first_layers
    )
    if found.whole > _SOME or (found.degrees.sharing < found.degrees.data and not degrees.shard):
        share = f"{100 * found.whole:.0f} % of the parameters stay whole, whose dims are too short"
        over = f"ZeRO over {found.degrees.sharing} of {found.degrees.data} data-parallel devices"
        click.echo(
            f"{over}: {share}" if found.whole > _SOME else f"{over}: more would split fewer of the dims", err=True
        )
    folder = None if output is None else shlex.quote(str(output))
    commands = next_commands(found.plan, folder, typed_command(context))
    text = format_prediction(found.plan, found.timeline, commands, tables=verbose)
    give_plan(found.plan, text, output / "plan.json" if output is not None else None, as_json=as_json)
    return ExitCode.DONE
