"""What the scripts of this folder that take no options say with `--help`."""

import sys


def show_usage(text: str | None) -> None:
    """Print the docstring of a script and leave, if it is asked for."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(f"{text}\n")
        raise SystemExit
