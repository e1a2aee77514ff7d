"""The command line. Results go to standard output, progress and errors to standard error.

Exit codes: 0 done, 2 bad input, 3 nothing fits, 130 interrupted.
"""

from autopar.cli.entry import main

__all__ = ["main"]
