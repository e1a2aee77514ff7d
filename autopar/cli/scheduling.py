"""The command that lists and draws pipeline schedules."""

import click

from autopar.cli.codes import ExitCode
from autopar.cli.values import positive_whole

_MOST_PASSES = 100_000
"""Forward passes of a chart: beyond, nobody reads it, and it takes minutes."""


@click.command()
@click.argument("name", required=False)
@click.option("--pp", type=positive_whole(), default=4, show_default=True, metavar="N", help="Groups of devices.")
@click.option("--microbatches", type=positive_whole(), default=8, show_default=True, metavar="N", help="Microbatches.")
@click.option(
    "--interleave",
    type=positive_whole(),
    default=1,
    show_default=True,
    metavar="N",
    help="Stages per group.",
)
@click.option(
    "--seconds",
    nargs=3,
    type=positive_whole(),
    default=(1, 1, 1),
    show_default=True,
    metavar="F B W",
    help="Seconds of a forward, a backward for inputs and one for weights.",
)
def schedules(name: str | None, pp: int, microbatches: int, interleave: int, seconds: tuple[int, int, int]) -> int:
    """List the pipeline schedules, or draw NAME.

    The list says what part of a step is idle if all stages are equal and nothing is sent, and how many microbatches a
    group of devices holds at most. A chart has a row per group of devices.
    """
    from autopar.errors import JobError
    from autopar.report.schedules import format_chart, format_schedules

    if pp * microbatches * interleave > _MOST_PASSES:
        raise JobError(
            f"{pp} groups x {interleave} stages x {microbatches} microbatches",
            hint=f"at most {_MOST_PASSES:,} passes are drawn",
        )

    forward, backward, weight = map(float, seconds)
    if name is None:
        click.echo(format_schedules(pp, microbatches, (forward, backward, weight)), nl=False)
    else:
        click.echo(format_chart(name, pp, microbatches, interleave, (forward, backward, weight)), nl=False)
    return ExitCode.DONE
