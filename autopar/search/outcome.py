"""Result of a search: incumbent and other candidate plans, bound, standing of each node, and counters.

Tasks return findings (`tasks.py`); the phases of the search add them to one `Outcome`.
"""

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
from autopar.search.share_space import ShareResult
from autopar.search.submesh_space import UnequalResult
from autopar.search.tasks import Finding


class NodeStatus(StrEnum):
    """State of a node: `NEW` before its tables are written, `OPEN` while tasks may raise its bound or improve its plan.

    Of a `SETTLED` node only the proof of its best plan is left; no task raises the bound of a `DONE` node.
    """

    NEW = "new"
    OPEN = "open"
    SETTLED = "settled"
    DONE = "done"


def status_of(finding: Finding, *, is_new: bool) -> NodeStatus:
    """Return the status of a node after a task, given whether the task was its first one."""
    if not finding.is_final:
        return NodeStatus.SETTLED if finding.is_settled else NodeStatus.OPEN
    return NodeStatus.NEW if is_new else NodeStatus.DONE


@dataclass(frozen=True, slots=True)
class Standing:
    """Bound and status of a node.

    Attributes:
        bound: Lower bound on its plans, in seconds.
        status: State of its work.
    """

    bound: float
    status: NodeStatus


@dataclass(slots=True)
class Outcome:
    """Result of a search.

    Attributes:
        known: Objective in seconds of a plan known beside the search; infinity without one.
        candidates: Plans found, best first.
        bound: Lower bound on all plans of the space, in seconds.
        solved: Configurations whose placement problem was solved.
        pruned: Configurations excluded by their bound.
        complete: Lower bound on plans that are not akin to one of the best few, in seconds; 0 if unknown.
        cut: Placement problems that their limit of work or time has cut.
        work: Units of work of all placement problems.
        standings: Bound and status of each node with tasks.
        history: Incumbent and bound over time.
        stopped: "" if the space was exhausted, else "time limit" or "interrupted".
        num_tasks: Findings that were added.
        left: Configurations of nodes that are still open: they may have a better plan.
        closed: Configurations on meshes with an outer data-parallel axis that are still open.
        closed_bound: Lower bound on their plans, in seconds; infinity without any.
        frontier_bound: Lower bound on plans of the frontier's nodes so far, in seconds.
        unequal_bound: Lower bound on pipelines with unequal stages that are searched so far, in seconds.
        shares_bound: Lower bound on rows with different shares of the batch that are searched so far, in seconds.
        hosted: What may lie in host memory.
        needed: What of it was opened only because no plan without it fits.
        reserve: What else could lie in host memory and was not opened: such plans are not part of the space.
        reserve_bound: Lower bound on such plans, in seconds.
        restaged: Whether the placements of the best plans were tried with it.
        unequal: Result of pipelines with unequal stages; None if the job has none.
        shares: Result of rows with different shares of the batch; None if the job has none.
        workers_bytes: Sum of the peak memory of the workers, in bytes, without this process.
        settings: Constants of the search.
    """

    known: float = math.inf
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
    closed_bound: float = math.inf
    frontier_bound: float = 0.0
    unequal_bound: float = math.inf
    shares_bound: float = math.inf
    hosted: frozenset[Hosted] = frozenset()
    needed: frozenset[Hosted] = frozenset()
    reserve: frozenset[Hosted] = frozenset()
    reserve_bound: float = 0.0
    restaged: bool = False
    work: float = 0.0
    num_tasks: int = 0
    standings: dict[Family, Standing] = field(default_factory=dict)
    unequal: UnequalResult | None = None
    shares: ShareResult | None = None
    workers_bytes: float = 0.0
    settings: SearchSettings = DEFAULT_SETTINGS

    @property
    def best(self) -> float:
        """Objective of the best plan, found or known, in seconds; infinity without one."""
        return min([self.known, *(candidate.objective for candidate in self.candidates[:1])])

    @property
    def proves_none(self) -> bool:
        """Whether it is proven that there is no plan, or none below the known one."""
        return not self.candidates and not self.stopped and self.bound == math.inf

    def distinct(self) -> list[Candidate]:
        """Return the candidates that are akin to no better candidate, best first."""
        return distinct(self.candidates, lambda candidate: candidate.signature)

    def threshold(self, keep: int) -> float:
        """Return the step time in seconds above which a plan is not among the `keep` best."""
        if math.isinf(self.best):
            return math.inf
        found = self.distinct()
        last = found[keep - 1].objective if len(found) >= keep else math.inf
        return min(self.settings.runner_up_ratio * self.best, last)

    def record_standing(self, family: Family, bound: float, status: NodeStatus) -> None:
        """Record bound and status of a node; the bound never falls."""
        known = self.standings.get(family)
        self.standings[family] = Standing(max(bound, known.bound if known else 0.0), status)

    def finished_nodes(self, space: Iterable[Family]) -> dict[Family, float]:
        """Return the `DONE` nodes of a space with their bounds, in seconds."""
        known = ((family, self.standings.get(family)) for family in space)
        return {family: own.bound for family, own in known if own is not None and own.status is NodeStatus.DONE}

    def add_finding(self, finding: Finding, keep: int) -> None:
        """Add the plans and counters of a finding.

        Per configuration and signature the best plan is kept, and overall the best `SearchSettings.keep` per plan
        wanted, with at least `keep` distinct plans.

        Args:
            finding: The finding.
            keep: Number of plans wanted.
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
            if number < self.settings.kept_per_plan * keep or any(candidate is other for other in wanted)
        ]
