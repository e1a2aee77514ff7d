"""The command that cuts the gradients of a plan into buckets, and compares that with what others do."""

from pathlib import Path

import click

from autopar.cli.answers import give_plan
from autopar.cli.codes import ExitCode
from autopar.cli.files import prepare_folder
from autopar.cli.options import (
    cache_options,
    echo_json,
    folder_option,
    json_option,
    moved_model_option,
    other_stack_option,
    plan_argument,
    resolve_cache_dir,
)


@click.command()
@plan_argument
@moved_model_option
@other_stack_option
@folder_option("Write plan.json with the buckets there.")
@cache_options
@json_option
def fuse(
    plan_file: Path,
    model: str | None,
    stack: str | None,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Cut the gradients of a plan into buckets.

    PLAN is a plan.json of a training job. Prints the step before and after, the bound that no buckets are faster than,
    what the sizes of frameworks come to, and the buckets in time. `autopar solve` cuts gradients already: this shows
    what it brought, or does it for plans by degrees.
    """
    if output is not None:
        prepare_folder(output)
    from autopar.plan import Plan

    given = Plan.load(plan_file)
    from autopar import api
    from autopar.report.fusing import format_fusion

    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    plan, found = api.fuse_plan(given, model=model, stack=stack, cache_dir=cache)
    file = None if output is None else output / "plan.json"
    if as_json:
        if file is not None:
            plan.save(file)
        echo_json({"fusion": plan.fusion, "comparison": found})
    else:
        give_plan(plan, format_fusion(plan, found), file, as_json=False)
    return ExitCode.DONE
