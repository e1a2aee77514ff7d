"""What a search finds: candidate plans, the bound, and how far it came."""

import math
from dataclasses import dataclass, field

from autopar.formulate.step import Split, StepTime
from autopar.formulate.tables import Tables
from autopar.problem import Choice
from autopar.search.history import History
from autopar.search.space import Configuration

KEEP = 8
"""Candidates kept per plan wanted: the simulator ranks some of them, and some do not fit when simulated."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A plan before it is written down."""

    configuration: Configuration
    tables: Tables
    choice: Choice
    split: Split
    time: StepTime

    @property
    def objective(self) -> float:
        """Step seconds by the planner's formula."""
        return self.time.seconds


@dataclass(slots=True)
class Outcome:
    """What the search found.

    Attributes:
        candidates: Best first.
        bound: No plan of the space has a lower objective.
        solved: Configurations whose placement problem was solved.
        pruned: Configurations excluded by their bound.
        history: What was known when.
        stopped: "" if the space was exhausted, else "time limit" or "interrupted".
    """

    candidates: list[Candidate] = field(default_factory=list)
    bound: float = math.inf
    solved: int = 0
    pruned: int = 0
    history: History = field(default_factory=History)
    stopped: str = ""

    def take(self, found: Candidate | None, keep: int) -> None:
        """Add the best plan of a configuration in place of an earlier one of the same; only the best few are kept."""
        if found is None:
            return
        others = [other for other in self.candidates if other.configuration != found.configuration]
        self.candidates = sorted([*others, found], key=lambda candidate: candidate.objective)[: KEEP * keep]
