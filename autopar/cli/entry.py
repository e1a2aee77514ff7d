"""The entry point: runs a command and turns what may go wrong into a message and an exit code."""

import io
import re
import sys
from collections.abc import Sequence

import click

from autopar.cli.codes import ExitCode
from autopar.cli.commands import app
from autopar.cli.invocation import Invocation
from autopar.cli.output import OutputClosedError, abandon_output, open_streams
from autopar.errors import AutoparError, InfeasibleError, InterruptedSearchError, RankError
from autopar.escaping import lines, one_line


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        args: Arguments after the program's name; None takes those of the process.
    """
    if args is None:
        open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show "×" gets "?" instead of a traceback
    invocation = Invocation.of(sys.argv[1:] if args is None else args, is_program=args is None)
    try:
        result = app.main(args=args, prog_name="autopar", standalone_mode=False, obj=invocation)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return ExitCode.BAD_INPUT
    except click.ClickException as error:
        return _report(one_line(error.format_message()), _usage_hint(error), ExitCode.BAD_INPUT)
    except InfeasibleError as error:
        return _report_infeasible(error)
    except InterruptedSearchError as error:
        return _report(error.args[0], error.hint, ExitCode.INTERRUPTED)
    except RankError as error:
        return _report(error.args[0], error.hint, ExitCode.RANK_FAILED)
    except AutoparError as error:
        return _report(error.args[0], error.hint, ExitCode.BAD_INPUT)
    except click.Abort:
        return _report("interrupted", "", ExitCode.INTERRUPTED)
    except OutputClosedError:
        abandon_output()
        return ExitCode.OUTPUT_CLOSED
    return result if isinstance(result, int) else ExitCode.DONE


def _report_infeasible(error: InfeasibleError) -> int:
    code = _report(error.args[0], error.hint, ExitCode.INFEASIBLE)
    if error.report is None:
        return code
    from autopar.report.infeasible import format_infeasibility
    from autopar.sizing.records import Infeasibility

    assert isinstance(error.report, Infeasibility), "what is known of a job that does not fit"
    click.echo(format_infeasibility(error.report), err=True, nl=False)
    return ExitCode.INTERRUPTED if error.report.interrupted else code


def _usage_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"see '{context.command_path} --help'" if context is not None else ""


def _report(message: str, hint: str, code: ExitCode) -> int:
    click.echo(f"error: {_shown(message)}", err=True)
    if hint:
        click.echo(f"hint: {_shown(hint)}", err=True)
    return code


def _shown(message: str) -> str:
    """Return a message whose further lines, which a name may have made, are told from ours by two spaces."""
    return re.sub(r"\n(?! )", "\n  ", lines(message))
