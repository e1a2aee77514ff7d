"""Which files hold programs; apart from what reads them, so that a command line need not import that to ask."""

from pathlib import Path

SUFFIX = ".txt"


def is_program(path: str | Path) -> bool:
    """Whether a file is taken for the text of a program by its name; others are taken for plans.

    >>> is_program("out/program.txt"), is_program("out/plan.json")
    (True, False)
    """
    return Path(path).suffix == SUFFIX
