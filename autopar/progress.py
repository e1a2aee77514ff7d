"""What a long computation tells its caller while it works."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

TROUBLE = "cache"
"""Phase of a progress that says why something could not be kept for the next run; the work goes on."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A step forward.

    Attributes:
        phase: What is being done ("import", "discover", "solve", "simulate").
        done: Units of work finished in this phase.
        total: Units of work known in this phase; 0 if unknown.
        incumbent: Objective of the best plan so far in seconds; infinity before the first.
        bound: Proven lower bound so far in seconds.
        detail: What is being worked on, in a few words.
    """

    phase: str
    done: int = 0
    total: int = 0
    incumbent: float = inf
    bound: float = 0.0
    detail: str = ""


ProgressCallback = Callable[[Progress], None]
StopCallback = Callable[[], bool]


def silent(_: Progress) -> None:
    """Ignore progress."""


def never() -> bool:
    """Never ask to stop."""
    return False
