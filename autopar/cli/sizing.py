"""Options of `autopar solve` that ask how many GPUs a job takes."""

from typing import Any

import click

from autopar.cli.options import together
from autopar.cli.values import positive_number, positive_whole

QUESTIONS = ("find_min_gpus", "target_time", "budget", "per", "steps", "max_gpus")

ALONE = ("workers", "engine", "ray_address", "dump_problem", "grid_seconds")
"""Parameters of a search for one number of GPUs that no question for a number goes with."""

sizing_options = together(
    click.option("--find-min-gpus", is_flag=True, help="Find the fewest GPUs on which a plan fits."),
    click.option(
        "--target-time",
        type=positive_number,
        metavar="SECONDS",
        help="Find the fewest GPUs whose simulated step takes at most this.",
    ),
    click.option("--budget", type=positive_number, metavar="X", help="Find the fastest plan that costs at most this."),
    click.option(
        "--per",
        type=click.Choice(["step", "million", "run"]),
        default="step",
        show_default=True,
        help="What the budget is for: a step, a million tokens, or --steps steps.",
    ),
    click.option("--steps", type=positive_whole(), metavar="N", help="Steps of a run."),
    click.option("--max-gpus", type=positive_whole(), metavar="N", help="Largest number looked at; default: 1024."),
)
"""Options that look for a number of GPUs in place of being told one."""


def question(gpus: int | None, request: dict[str, Any]) -> dict[str, Any] | None:
    """Take the options of sizing out of a request, and return them if a number of GPUs is asked for.

    Raises:
        click.UsageError: If neither a number is given nor asked for, or both, or options lack the one they belong to.
    """
    asked = {name: request.pop(name) for name in QUESTIONS}
    find = asked.pop("find_min_gpus")
    wanted = [name for name in ("target_time", "budget") if asked[name] is not None]
    if not (find or wanted):
        for name in ("steps", "max_gpus"):
            if asked[name] is not None:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{option} belongs to --find-min-gpus, --target-time or --budget")
        if gpus is None:
            raise click.UsageError("Missing option '--gpus'. Or ask for a number: --find-min-gpus")
        return None
    if gpus is not None:
        raise click.UsageError("--gpus N and a question for a number of GPUs; --max-gpus N bounds the answer")
    if find and wanted:
        raise click.UsageError(f"--find-min-gpus and --{wanted[0].replace('_', '-')}: ask one of them")
    asked["target_seconds"] = asked.pop("target_time")
    return {name: value for name, value in asked.items() if value is not None}


def refuse_alone(context: click.Context) -> None:
    """Refuse options that no question for a number of GPUs goes with, unless they say what holds in any case.

    Raises:
        click.UsageError: If there are any.
    """
    given = [
        max(own.opts, key=len)
        for own in context.command.params
        if own.name in ALONE and context.params[own.name] not in (None, "local", 0)
    ]
    if given:
        raise click.UsageError(
            "numbers of GPUs are searched one after the other, each in this process and without a grid search: leave "
            f"out {' and '.join(given)}",
            context,
        )
