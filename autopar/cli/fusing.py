"""The command that cuts the gradients of a plan into buckets, and compares that with what others do."""

from pathlib import Path
from typing import TYPE_CHECKING

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
    seed_option,
)
from autopar.cli.values import positive_number, positive_whole
from autopar.fusion_plan import BUCKETS, JOINT, USUAL_ALPHA, USUAL_BETA

if TYPE_CHECKING:
    from autopar.fusion import Joint


def _told(joint: "Joint | None") -> dict[str, float] | None:
    """Return the steps with and without fused ops."""
    names = ("neither", "ops_only", "buckets_only", "both")
    return None if joint is None else {name: getattr(joint, name) for name in names}


@click.command()
@plan_argument
@moved_model_option
@other_stack_option
@click.option(
    "--fusion",
    type=click.Choice([BUCKETS, JOINT]),
    default=BUCKETS,
    show_default=True,
    help="Cut gradients into buckets, or fuse ops of a block into kernels, too.",
)
@click.option(
    "--alpha",
    type=positive_number,
    default=USUAL_ALPHA,
    show_default=True,
    metavar="X",
    help="With joint: the search goes on from kernels that take up to so many times as long as the best.",
)
@click.option(
    "--beta",
    type=positive_whole(),
    default=USUAL_BETA,
    show_default=True,
    metavar="N",
    help="With joint: most changes at once.",
)
@click.option(
    "--kernel-costs",
    metavar="NAME|FILE",
    help="With joint: learned seconds of fused ops, for plans on the processor they were measured on. "
    "autopar comes with onnxruntime.",
)
@seed_option("Seed of the search for kernels.")
@folder_option("Write plan.json with what was found there.")
@cache_options
@json_option
def fuse(
    plan_file: Path,
    model: str | None,
    stack: str | None,
    fusion: str,
    alpha: float,
    beta: int,
    kernel_costs: str | None,
    seed: int,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Cut the gradients of a plan into buckets, or fuse its ops, too.

    PLAN is a plan.json of a training job, or its folder.
    Prints the step before and after, the bound that no buckets are faster than,
    what the sizes of frameworks come to, and the buckets in time. `autopar solve` cuts gradients already: this shows
    what it brought, or does it for plans by degrees.
    """
    if output is not None:
        prepare_folder(output)
    from autopar.plan import Plan

    given = Plan.load(plan_file)
    from autopar import api
    from autopar.fusion import OpSearch
    from autopar.report.fusing import format_fusion

    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    search = OpSearch(alpha, beta, seed=seed)
    plan, found, joint = api.fuse_plan(
        given, fusion=fusion, search=search, model=model, stack=stack, kernels=kernel_costs, cache_dir=cache
    )
    file = None if output is None else output / "plan.json"
    if as_json:
        if file is not None:
            plan.save(file)
        echo_json({"fusion": plan.fusion, "comparison": found, "joint": _told(joint)})
    else:
        give_plan(plan, format_fusion(plan, found, joint), file, as_json=False)
    return ExitCode.DONE
