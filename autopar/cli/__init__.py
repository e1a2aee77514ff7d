"""The command line. Results go to standard output, progress and errors to standard error.

Exit codes: 0 done, 2 bad input, 3 nothing fits, 130 interrupted, 141 nobody reads the answer.
"""

import sys
from collections.abc import Sequence

from autopar.cli.codes import ExitCode
from autopar.cli.interruption import raise_on_signals

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        args: Arguments after the program's name; None takes those of the process.
    """
    try:
        if args is None:
            raise_on_signals()
        from autopar.cli import entry  # here, so that Ctrl-C while the commands are loaded ends in no traceback

        return entry.main(args)
    except KeyboardInterrupt:
        sys.stderr.write("\nerror: interrupted\n")
        return ExitCode.INTERRUPTED
