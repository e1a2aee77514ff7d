"""The command that explains a plan."""

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
    json_option,
    moved_model_option,
    plan_argument,
    resolve_cache_dir,
    time_limit_option,
)
from autopar.display import show_progress
from autopar.escaping import one_line

if TYPE_CHECKING:
    from autopar.alternatives import Weighing
    from autopar.plan import Plan

SECONDS = 120.0
"""Time for all alternatives together if nobody says."""


@click.command()
@plan_argument
@click.option("--ops", is_flag=True, help="List the placements of every op too.")
@click.option("--tactics", is_flag=True, help="Print a schedule of tactics that makes the plan again, as YAML.")
@click.option("--pins", is_flag=True, help="Print pins that leave this plan only, as YAML: edit and give to --pin.")
@click.option(
    "--program", is_flag=True, help="Print the distributed program, as text for `autopar simulate` and `run`."
)
@click.option("--alternatives", is_flag=True, help="Solve again with each decision changed, and print what it costs.")
@click.option("--op", "name", metavar="NAME", help="One tensor or op: where it is, what moves it, other placements.")
@moved_model_option
@folder_option("With --alternatives: write them there, as text and JSON, and report.html with them in it.")
@time_limit_option("Seconds for all that is solved again, together.", SECONDS)
@cache_options
@json_option
def explain(
    plan_file: Path,
    ops: bool,
    tactics: bool,
    pins: bool,
    program: bool,
    alternatives: bool,
    name: str | None,
    model: str | None,
    time_limit: float,
    output: Path | None,
    cache_dir: Path | None,
    no_cache: bool,
    as_json: bool,
) -> int:
    """Explain a plan.

    PLAN is a plan.json or its folder.
    Prints where time and memory go, which tensor lies where, and why the runners-up lost. With
    --alternatives the job is solved again with one decision pinned to another value at a time, those nearest to the
    plan's first; Ctrl-C ends that with what is known.
    """
    from autopar.plan import Plan

    options = {
        "--tactics": tactics,
        "--pins": pins,
        "--program": program,
        "--alternatives": alternatives,
        "--op": name is not None,
    }
    asked = [option for option, given in options.items() if given]
    if len(asked) > 1:
        raise click.UsageError(f"{' and '.join(asked)}: ask one of them")
    solves = alternatives or name is not None
    if output is not None:
        if not alternatives:
            raise click.UsageError("-o belongs to --alternatives")
        prepare_folder(output)
    if as_json and not solves:
        raise click.UsageError("--json belongs to --alternatives and --op; plan.json has the rest")
    plan = Plan.load(plan_file)
    if not asked:
        from autopar.report import format_explain

        click.echo(format_explain(plan, ops=ops), nl=False)
        return ExitCode.DONE
    cache = resolve_cache_dir(cache_dir, no_cache=no_cache)
    if solves:
        return _solve_again(plan, name, model, cache, time_limit, output, as_json=as_json)
    if pins:
        from autopar.partitioning import read_pins
        from autopar.pins import format_pins

        click.echo(format_pins(read_pins(plan, model=model, cache_dir=cache)), nl=False)
    elif program:
        from autopar.api import program_text

        click.echo(program_text(plan, model=model, cache_dir=cache), nl=False)
    else:
        from autopar.partitioning import read_tactics
        from autopar.tactics import format_schedule

        click.echo(format_schedule(read_tactics(plan, model=model, cache_dir=cache)), nl=False)
    return ExitCode.DONE


def _solve_again(
    plan: "Plan",
    name: str | None,
    model: str | None,
    cache: Path | None,
    seconds: float,
    folder: Path | None,
    *,
    as_json: bool,
) -> int:
    """Print what the alternatives to the plan's decisions cost, or to the placement of one tensor."""
    from autopar.alternatives import Weighing, view_tensor, weigh
    from autopar.report.alternatives import format_tensor, format_weighing

    with Interruption() as interruption:
        with show_progress() as progress:
            request: dict[str, Any] = {
                "time_limit": seconds,
                "model": model,
                "cache_dir": cache,
                "progress": progress,
                "should_stop": interruption.requested,
            }
            found = weigh(plan, **request) if name is None else view_tensor(plan, name, **request)
        stopped = interruption.requested()
        try:
            if folder is not None and isinstance(found, Weighing):
                _write(plan, found, folder, model, cache)
        finally:  # a full disk does not cost the answer
            if as_json:
                echo_json(found)
            else:
                click.echo(format_weighing(found) if isinstance(found, Weighing) else format_tensor(found), nl=False)
    return ExitCode.INTERRUPTED if stopped else ExitCode.DONE


def _write(plan: "Plan", found: "Weighing", folder: Path, model: str | None, cache: Path | None) -> None:
    from autopar.page import look, write_page
    from autopar.report.alternatives import format_weighing
    from autopar.writing import write_atomically

    write_atomically(folder / "alternatives.txt", format_weighing(found).encode())
    write_atomically(folder / "alternatives.json", as_json_text(found).encode())
    write_page(look(plan, weighing=found, model=model, cache_dir=cache), folder / "report.html")
    click.echo(one_line(f"wrote alternatives.txt, alternatives.json and report.html into {folder}"), err=True)
