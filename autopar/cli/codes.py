"""Exit codes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the exit code of the process says."""

    DONE = 0
    BAD_INPUT = 2
    INFEASIBLE = 3
    DEVIATES = 4  # a run does not compute what the model computes
    RANK_FAILED = 5
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it
    OUTPUT_CLOSED = 141  # 128 + SIGPIPE, likewise: nobody reads standard output any more
