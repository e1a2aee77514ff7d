"""The pieces a search is made of: what is to be done on one configuration, and what came of it.

A piece depends on nothing but itself and what was done on its configuration before, so it can be done anywhere.
"""

import pickle
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from autopar.search.attempt import Attempt
from autopar.search.outcome import Candidate
from autopar.search.space import Configuration

if TYPE_CHECKING:  # it knows this module
    from autopar.search.planner import Search


class Work(StrEnum):
    """What is to be done: `BOUND` comes first."""

    BOUND = "bound"
    IMPROVE = "improve"


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Something to be done on a configuration.

    Attributes:
        work: What.
        configuration: On what.
        bound: No plan of the configuration has a lower objective, in seconds.
        cutoff: Plans that take longer interest nobody, in seconds.
        urgent: Whether no plan is known yet, so that any will do.
    """

    work: Work
    configuration: Configuration
    bound: float
    cutoff: float
    urgent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """What came of a piece.

    Attributes:
        bound: No plan of the configuration has a lower objective, in seconds; infinity if it has none that fits.
        best: Its best plan so far.
        others: Plans of other signatures that were found on the way, the best of each.
        cut: Placement problems that their clock has cut meanwhile.
        state: All of what was done so far, for going on in another process; None if this one goes on.
    """

    bound: float
    best: Candidate | None
    cut: int
    state: bytes | None = None
    others: tuple[Candidate, ...] = ()

    @property
    def plans(self) -> tuple[Candidate, ...]:
        """All of its plans."""
        return self.others if self.best is None else (self.best, *self.others)


class Workbench:
    """Does pieces, and keeps what was done on their configurations.

    Args:
        search: What they are pieces of.
        portable: Whether others may go on with them.
    """

    def __init__(self, search: "Search", *, portable: bool) -> None:
        self._search = search
        self._portable = portable
        self._attempts: dict[Configuration, Attempt] = {}

    def do(self, piece: Piece, seconds: float, state: bytes | None = None) -> Finding:
        """Return what comes of a piece.

        Args:
            piece: What is to be done.
            seconds: Seconds left for it.
            state: What was done before on its configuration, if that was elsewhere.
        """
        attempt = self._attempt(piece, time.monotonic() + seconds, state)
        if attempt is None:
            return Finding(float("inf"), None, 0)
        before = attempt.cut
        match piece.work:
            case Work.BOUND:
                bound = max(piece.bound, attempt.relaxed(piece.cutoff))
                if piece.urgent:
                    attempt.hurry()
            case Work.IMPROVE:
                bound = attempt.improve(piece.bound, piece.cutoff)
        if bound < piece.cutoff:
            self._attempts[piece.configuration] = attempt
        return Finding(bound, attempt.best, attempt.cut - before, pickle.dumps(attempt) if self._portable else None)

    def _attempt(self, piece: Piece, end: float, state: bytes | None) -> Attempt | None:
        """Return the work on a configuration as it stands; None if no plan of it keeps to the constraints."""
        attempt = self._attempts.pop(piece.configuration, None)
        if attempt is None or state is not None:
            attempt = self._search.attempt(piece.configuration, end)
            if attempt is not None and state is not None:
                attempt.resume(pickle.loads(state))
        if attempt is not None:
            attempt.end, attempt.urgent = end, piece.urgent
        return attempt
