"""What commands do with a plan they have made: write it where it is wanted, print it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopar.cli.options import echo_json
from autopar.errors import InfeasibleError
from autopar.escaping import one_line

if TYPE_CHECKING:
    from autopar.page.view import View
    from autopar.plan import Plan


def give_plan(plan: "Plan", text: str, file: Path | None, *, as_json: bool) -> None:
    """Write a plan to a file, if one is wanted, and print it: as JSON, or the text that tells of it."""
    if file is not None:
        plan.save(file)
        click.echo(one_line(f"wrote {file}"), err=True)
    click.echo(plan.to_json().decode() if as_json else text, nl=as_json)


def write_folder(plan: "Plan", folder: Path, cache: Path | None) -> "View":
    """Write a plan with its report, its page and its trace, and return what is shown of it."""
    from autopar.page import look, write_page
    from autopar.report import format_report
    from autopar.simulate import write_chrome_trace
    from autopar.writing import write_atomically

    plan.save(folder / "plan.json")
    write_atomically(folder / "report.txt", format_report(plan).encode())
    view = look(plan, cache_dir=cache)
    write_chrome_trace(view.timeline, folder / "trace.json")
    write_page(view, folder / "report.html")
    click.echo(one_line(f"wrote plan.json, report.txt, report.html and trace.json into {folder}"), err=True)
    return view


@contextmanager
def infeasible_as_json(wanted: bool) -> Iterator[None]:
    """Print what is known of a job that does not fit, if JSON is wanted, on the way of the error out."""
    try:
        yield
    except InfeasibleError as error:
        if wanted:
            echo_json({"error": "infeasible", "message": error.args[0], "infeasible": error.report})
        raise
