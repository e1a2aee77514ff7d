"""The pieces a search is made of: what is to be done on one configuration, and what came of it.

A piece depends on nothing but itself and what was done on its configuration before, so it can be done anywhere.
"""

from dataclasses import dataclass
from enum import StrEnum

from autopar.bounds.microbatch import NO_HINT, UNKNOWN, Hint, Pace
from autopar.configuration import Family
from autopar.problem import Choice
from autopar.search.branching import Branch
from autopar.search.candidate import Candidate


class Work(StrEnum):
    """Kinds of tasks: `BOUND` comes first; `SUBMESH` bounds microbatches on the free axes of meshes of three axes."""

    BOUND = "bound"
    ADVANCE = "advance"
    SUBMESH = "submesh"


@dataclass(frozen=True, slots=True, eq=False)
class SearchTask:
    """Something to be done on a configuration.

    Attributes:
        work: What.
        family: On what: configurations that differ in the schedule only.
        bound: No plan of the configuration has a lower objective, in seconds.
        cutoff: Plans that take longer interest nobody, in seconds.
        urgent: Whether no plan is known yet, so that any will do.
        hasty: Bound below which a plan is looked for as well, in seconds.
        hint: What is known of the same microbatches under other schedules.
        branches: What plans of the configuration have to do to be of interest.
        starts: Choices that are known to be worth considering, of the tables of these branches.
        proves: Whether the bound is raised as far as can be; runners-up need no proof.
        spreads_first: Whether pipelines are bounded by blocks that are spread over stages at once, which takes longer
            than what says nothing of memory, and is worth it where that says little.
    """

    work: Work
    family: Family
    bound: float
    cutoff: float
    urgent: bool = False
    hasty: float = 0.0
    hint: Hint = NO_HINT
    branches: tuple[Branch, ...] = ()
    starts: tuple[Choice, ...] = ()
    proves: bool = True
    spreads_first: bool = False

    @property
    def cell(self) -> "Cell":
        """What it is on; pieces on the same go on with one another."""
        return self.family, self.branches


Cell = tuple[Family, tuple[Branch, ...]]
"""The plans of a family on some branches."""


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """What came of a piece.

    Attributes:
        bound: No plan of the configuration has a lower objective, in seconds; infinity if it has none that fits.
        best: Its best plan so far.
        is_final: Whether nothing more can be done.
        is_settled: Whether nothing but a proof of its best plan can be done, which may take longer than all before.
        others: Plans of other signatures that were found on the way, the best of each.
        work: Units of work of placement problems meanwhile.
        cut: Placement problems that their limit of work or time has cut meanwhile.
        state: All of what was done so far, for going on in another process; None if this one goes on.
        pace: What a microbatch takes at least, whatever memory it takes.
        split_pace: That with split backwards, if both were looked for.
        unlimited: Lower bound on every plan, whatever memory it takes; 0 if unknown.
        choices: Placements that are good at some prices, the best one without limits first.
        peak_bytes: Memory that the worker it comes of has had at most; 0 if this process did it.
    """

    bound: float
    best: Candidate | None
    cut: int
    state: bytes | None = None
    is_final: bool = True
    is_settled: bool = False
    others: tuple[Candidate, ...] = ()
    pace: Pace = UNKNOWN
    split_pace: Pace = UNKNOWN
    unlimited: float = 0.0
    choices: tuple[Choice, ...] = ()
    work: float = 0.0
    peak_bytes: float = 0.0

    @property
    def plans(self) -> tuple[Candidate, ...]:
        """All of its plans."""
        return self.others if self.best is None else (self.best, *self.others)
