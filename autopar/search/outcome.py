"""What a search finds: candidate plans, the bound, and how far it came."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from autopar.configuration import Configuration, Family
from autopar.describe.signature import distinct
from autopar.recompute import Hosted
from autopar.search.candidate import Candidate
from autopar.search.history import History
from autopar.search.settings import DEFAULT_SETTINGS, SearchSettings
from autopar.search.submesh_space import UnequalSpace
from autopar.search.tasks import Finding


class Stage(StrEnum):
    """How far the work on a configuration is: `NEW` if a bound is all that is known, `OPEN` if there is more to do.

    If it is `SETTLED`, nothing but a proof of its best plan is left; if it is `DONE`, nothing raises its bound further,
    and no better plan is found.
    """

    NEW = "new"
    OPEN = "open"
    SETTLED = "settled"
    DONE = "done"


def stage_of(finding: Finding, *, is_new: bool) -> Stage:
    """Return how far the work is after a piece, given whether it only was to bound the configuration."""
    if not finding.is_final:
        return Stage.SETTLED if finding.is_settled else Stage.OPEN
    return Stage.NEW if is_new else Stage.DONE


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a family of configurations.

    Attributes:
        bound: No plan of it has a lower objective, in seconds.
        stage: How far the work on it is.
    """

    bound: float
    stage: Stage


@dataclass(slots=True)
class Outcome:
    """What the search found.

    Attributes:
        candidates: Best first.
        bound: No plan of the space has a lower objective.
        solved: Configurations whose placement problem was solved.
        pruned: Configurations excluded by their bound.
        complete: No plan that is not akin to one of the best few has a lower objective; 0 if unknown.
        cut: Placement problems that their limit of work or time cut.
        work: Units of work of all placement problems.
        standings: What is known of the families that were looked at.
        history: What was known when.
        stopped: "" if the space was exhausted, else "time limit" or "interrupted".
        num_tasks: Pieces of work that were done.
        left: Configurations that were put aside: they may have a better plan, but do not limit the bound.
        closed: Configurations on meshes of three axes that may have a better plan and were not worked on to the end.
        closed_floor: No plan on these meshes has a lower objective unless all were searched; infinity then.
        hosted: What could lie in host memory.
        needed: What of it was only opened because nothing was found that fits without.
        reserve: What could have lain there besides, and was not opened: it is not part of the space.
        reserve_floor: No plan that has any of that there has a lower objective.
        unequal: What became of the stages with meshes of their own; None if the job has none.
        workers_bytes: What the workers had of memory at most, together, besides this process.
        settings: Constants of the search.
    """

    candidates: list[Candidate] = field(default_factory=list)
    bound: float = math.inf
    solved: int = 0
    pruned: int = 0
    complete: float = 0.0
    cut: int = 0
    history: History = field(default_factory=History)
    stopped: str = ""
    left: int = 0
    closed: tuple[Configuration, ...] = ()
    closed_floor: float = math.inf
    hosted: frozenset[Hosted] = frozenset()
    needed: frozenset[Hosted] = frozenset()
    reserve: frozenset[Hosted] = frozenset()
    reserve_floor: float = 0.0
    work: float = 0.0
    num_tasks: int = 0
    standings: dict[Family, Standing] = field(default_factory=dict)
    unequal: UnequalSpace | None = None
    workers_bytes: float = 0.0
    settings: SearchSettings = DEFAULT_SETTINGS

    @property
    def best(self) -> float:
        """Objective of the best candidate in seconds; infinity without one."""
        return self.candidates[0].objective if self.candidates else math.inf

    @property
    def proves_none(self) -> bool:
        """Whether it is proven that there is no plan."""
        return not self.candidates and not self.stopped and self.bound == math.inf

    def distinct(self) -> list[Candidate]:
        """Return the candidates that are akin to no better one, best first."""
        return distinct(self.candidates, lambda candidate: candidate.signature)

    def threshold(self, keep: int) -> float:
        """Return the step time in seconds above which a plan is not among the `keep` best."""
        if not self.candidates:
            return math.inf
        found = self.distinct()
        last = found[keep - 1].objective if len(found) >= keep else math.inf
        return min(self.settings.keep_within * self.best, last)

    def record_standing(self, family: Family, bound: float, stage: Stage) -> None:
        """Take down how far the work on a family is."""
        known = self.standings.get(family)
        self.standings[family] = Standing(max(bound, known.bound if known else 0.0), stage)

    def finished_nodes(self, space: Iterable[Family]) -> dict[Family, float]:
        """Return the families of a space on which there is nothing more to do, and their bounds in seconds."""
        known = ((family, self.standings.get(family)) for family in space)
        return {family: own.bound for family, own in known if own is not None and own.stage is Stage.DONE}

    def add_finding(self, finding: Finding, keep: int) -> None:
        """Add plans of a configuration in place of earlier ones of the same and of their signature.

        Only the best few are kept, but as many distinct ones as are wanted, if there are.
        """
        self.num_tasks += 1
        self.cut += finding.cut
        self.work += finding.work
        for found in finding.plans:
            known = found.drafted()
            key = (known.configuration, known.signature)
            others = [other for other in self.candidates if (other.configuration, other.signature) != key]
            rivals = [other for other in self.candidates if (other.configuration, other.signature) == key]
            best = min([known, *rivals], key=lambda candidate: candidate.objective)
            self.candidates = sorted([*others, best], key=lambda candidate: candidate.objective)
        wanted = self.distinct()[:keep]
        self.candidates = [
            candidate
            for number, candidate in enumerate(self.candidates)
            if number < self.settings.keep * keep or any(candidate is other for other in wanted)
        ]
