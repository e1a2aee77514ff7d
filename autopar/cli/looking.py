"""The commands that show a plan: as a page, and as figures."""

from pathlib import Path

import click

from autopar.cli.executing import check_against, read_recordings
from autopar.cli.files import prepare_file, prepare_folder
from autopar.cli.options import (
    cache_options,
    folder_option,
    moved_model_option,
    other_stack_option,
    plan_argument,
    resolve_cache_dir,
    together,
)
from autopar.cli.values import file_path
from autopar.escaping import one_line

_shown_options = together(
    plan_argument,
    click.option(
        "--with",
        "others",
        multiple=True,
        type=file_path(),
        metavar="PLAN",
        help="Another plan of the model: for other GPUs, for the chart of scaling, or for the same job. Repeatable.",
    ),
    other_stack_option,
    moved_model_option,
)
"""What page and figures have in common."""


@click.command()
@_shown_options
@click.option(
    "--against",
    multiple=True,
    type=file_path(),
    metavar="TRACE",
    help="Trace of the PyTorch profiler, .json or .json.gz: show its step beside the simulated one. Repeatable.",
)
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Rank of the trace; default: the one it names.")
@click.option("-o", "--output", required=True, type=file_path(), metavar="FILE.html", help="Where to write the page.")
@cache_options
def report(
    plan_file: Path,
    others: tuple[Path, ...],
    against: tuple[Path, ...],
    rank: int | None,
    model: str | None,
    stack: str | None,
    output: Path,
    cache_dir: Path | None,
    no_cache: bool,
) -> None:
    """Write an HTML page that shows a plan.

    PLAN is a plan.json or its folder.
    The page is one HTML file with all it needs in it: it opens from disk, offline. It shows the
    machine, where the time and the memory of every stage go over the step, how the search went, other plans, and each
    distinct block, sharded.
    """
    from autopar.plan import Plan

    check_against(against, rank)
    prepare_file(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    plan, *plans = [Plan.load(path) for path in (plan_file, *others)]
    traces = dict(zip(map(str, against), read_recordings(against, rank), strict=True))
    from autopar.page import look, write_page

    write_page(look(plan, others=plans, traces=traces, model=model, stack=stack, cache_dir=cache), output)
    click.echo(one_line(f"wrote {output}"), err=True)


@click.command()
@_shown_options
@folder_option("Where to write.", required=True)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["png", "svg", "pdf"]),
    default=("png", "svg"),
    show_default=True,
    help="What to write each figure as. Repeatable.",
)
@cache_options
def figures(
    plan_file: Path,
    others: tuple[Path, ...],
    model: str | None,
    stack: str | None,
    output: Path,
    formats: tuple[str, ...],
    cache_dir: Path | None,
    no_cache: bool,
) -> None:
    """Draw a plan as figures for a paper.

    PLAN is a plan.json or its folder.
    Writes the timeline, memory over time, where time and memory go, the search, and scaling where
    --with gives other plans. It takes matplotlib: pip install "autopar[figures]".
    """
    from autopar.page import check_formats, look, write_figures
    from autopar.plan import Plan

    check_formats(formats)
    prepare_folder(output)
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    plans = [Plan.load(path) for path in others]
    view = look(Plan.load(plan_file), others=plans, model=model, stack=stack, cache_dir=cache)
    for path in write_figures(view, output, formats):
        click.echo(one_line(f"wrote {path}"), err=True)
