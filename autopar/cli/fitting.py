"""The command that tells whether a model fits on a number of devices."""

from pathlib import Path
from typing import Any

import click

from autopar.cli.codes import ExitCode
from autopar.cli.interruption import Interruption
from autopar.cli.options import (
    cache_options,
    cluster_option,
    echo_json,
    global_batch_option,
    json_option,
    memory_limit_option,
    model_argument,
    model_options,
    precision_option,
    resolve_cache_dir,
    stack_option,
    training_options,
)
from autopar.cli.preflight import check_request
from autopar.cli.values import positive_whole


@click.command()
@model_argument
@click.option("--gpus", type=positive_whole(), required=True, metavar="N", help="Number of devices.")
@cluster_option
@global_batch_option
@click.option(
    "--microbatch",
    type=positive_whole(),
    default=1,
    show_default=True,
    metavar="N",
    help="Samples per microbatch and data-parallel device.",
)
@click.option("--max-batch", is_flag=True, help="Also find the largest microbatch of each layout, recomputing all.")
@memory_limit_option
@stack_option
@precision_option
@training_options
@model_options
@cache_options
@json_option
def fit(
    model: str,
    gpus: int,
    global_batch: int | None,
    microbatch: int,
    max_batch: bool,
    memory_limit: float | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
    **request: Any,
) -> int:
    """Check whether MODEL fits on a number of GPUs.

    The layouts people try first are looked at, from plain data parallelism to pipelines of tensor-parallel groups, each
    with the least recompute it fits with: memory of its fullest rank, and the step time by the planner's formula. Exit
    code 3 if none fits.
    """
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    check_request(model, request["dims"], request["cluster"])
    from autopar.estimates.fitting import fit_layouts
    from autopar.prediction import open_setting
    from autopar.report.fitting import fit_to_json, format_fit

    with Interruption() as interruption:
        setting = open_setting(model, cache_dir=cache, **request)
        found = fit_layouts(
            setting,
            gpus,
            global_batch=global_batch,
            microbatch=microbatch,
            memory_limit=memory_limit,
            max_batch=max_batch,
            should_stop=interruption.requested,
        )
    if as_json:
        echo_json(fit_to_json(found))
    else:
        click.echo(format_fit(found), nl=False)
    if found.stopped:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if any(layout.fits for layout in found.layouts) else ExitCode.INFEASIBLE
