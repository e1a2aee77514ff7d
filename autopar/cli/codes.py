"""Exit codes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the exit code of the process says."""

    DONE = 0
    BAD_INPUT = 2
    INFEASIBLE = 3
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it
