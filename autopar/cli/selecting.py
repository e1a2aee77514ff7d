"""The command for bare strategy-selection problems, by the protocol of the IOPDDL contest."""

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopar.cli.codes import ExitCode
from autopar.cli.interruption import Interruption
from autopar.cli.invocation import Invocation
from autopar.cli.options import engine_options_for, json_option
from autopar.cli.values import file_path, not_negative, positive_number, positive_whole, solver_name
from autopar.errors import InfeasibleError, InterruptedSearchError

if TYPE_CHECKING:
    from autopar.problem import Choice
    from autopar.selection import Known, Selection

_INTERVAL = 1.0  # seconds between two lines of progress
_MUCH = 0.5  # a gap that is this part of the last one told is told at once


@click.command()
@click.argument("problem", type=file_path())
@click.argument("seconds", type=positive_number)
@click.option(
    "--solver", type=solver_name, default="portfolio", show_default=True, metavar="NAME", help="Solver of the problem."
)
@click.option(
    "--threads",
    type=positive_whole(),
    metavar="N",
    help="Threads of a process; default: 2 in one, 1 in each of several.",
)
@engine_options_for("solve it together", "one")
@click.option("--seed", type=not_negative(), default=0, show_default=True, metavar="S", help="Of random draws.")
@click.option("--stream", is_flag=True, help="Print every better choice when it is found, not only the last.")
@click.option("-v", "--verbose", is_flag=True, help="Say on standard error what presolve removes.")
@json_option
@click.pass_context
def select(
    context: click.Context,
    /,
    problem: Path,
    seconds: float,
    solver: str,
    threads: int | None,
    workers: int | None,
    engine: str,
    ray_address: str | None,
    seed: int,
    stream: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Choose one strategy per node of PROBLEM within SECONDS.

    PROBLEM is a file of the IOPDDL contest, .json or .json.gz. The last line on standard output is the choice as
    [i, j, ...], the line before it has cost, bound, gap and why it stopped. The seconds count from the start of this
    program; it ends before they are over. Ctrl-C and SIGTERM end it with the best choice so far.
    """
    if stream and as_json:
        raise click.UsageError("give either --stream or --json", context)
    began = context.obj.began if isinstance(context.obj, Invocation) else time.monotonic()
    # A signal while the heavy parts are imported must not lose anything either.
    with Interruption(keeps=True) as interruption:
        from autopar.engines import EngineRequest
        from autopar.report.selection import describe_nothing, format_choice, format_status, format_steps
        from autopar.report.selection import selection_to_dict as to_dict
        from autopar.selection import select as solve

        selection = solve(
            problem,
            time_limit=seconds,
            solver=solver,
            threads=threads,
            seed=seed,
            began=began,
            reductions=verbose,
            report=_Report(stream),
            should_stop=interruption.requested,
            engine=EngineRequest(engine, workers, ray_address),
        )
        choice = selection.solution.choice
        if as_json:
            import msgspec

            click.echo(msgspec.json.encode(to_dict(selection)).decode())
        elif choice is not None:
            click.echo(f"{format_status(selection)}\n{format_choice(choice)}")
        sys.stdout.flush()
    click.echo(format_steps(selection.steps), nl=False, err=True)
    if selection.failure:
        click.echo(f"warning: solver {solver!r} {selection.failure}; this is the best it had found", err=True)
    if choice is None:
        message, hint = describe_nothing(selection)
        error = InfeasibleError if _is_infeasible(selection) else InterruptedSearchError
        raise error(message, hint=hint)
    return ExitCode.INTERRUPTED if selection.solution.termination == "interrupted" else ExitCode.DONE


def _is_infeasible(selection: "Selection") -> bool:
    return selection.solution.termination == "infeasible"


class _Report:
    """Writes a line of progress now and then and when much has changed, and every better choice if asked to."""

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        self._last = -math.inf
        self._gap = math.inf

    def __call__(self, known: "Known", choice: "Choice | None") -> None:
        from autopar.problem import relative_gap
        from autopar.report.selection import format_choice, format_known

        if self._stream and choice is not None:
            click.echo(f"{format_known(known).strip()}\n{format_choice(choice)}")
        if known.bound == math.inf:
            return  # nothing fits, which is told with the reason
        gap = relative_gap(known.cost, known.bound) if math.isfinite(known.cost) else math.inf
        if known.seconds - self._last >= _INTERVAL or gap < _MUCH * self._gap:
            self._last, self._gap = known.seconds, gap
            click.echo(f"autopar: {format_known(known)}", err=True)
