"""Primal heuristics that find the first incumbent: construction from degrees, and improvement of these plans."""

import math
from collections.abc import Sequence

from autopar.bounds.transfer import TransferBounds
from autopar.configuration import Family, first_tries, fitting_try
from autopar.search.context import SearchContext
from autopar.search.ordered_execution import TaskSeries
from autopar.search.outcome import Outcome, status_of
from autopar.search.reporting import report_progress
from autopar.search.tasks import Finding, SearchTask, TaskKind


class Construction(TaskSeries):
    """Constructs a first plan from degrees: an incumbent to return, and to prune with.

    Tried first: the configuration with few stages whose memory seems to suffice for all saved activations, if there is
    one; a plan there ends the construction. Else the degrees that engineers set up by hand: nodes for tensor
    parallelism, one sample per row of devices, and as few stages as fit, or more while that is faster. Where
    plans are known beside the search, their nodes are tried in place of these.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
        space: Nodes with plain schedules.
        transfer_bounds: Bounds from other nodes; added to.
        starts: Nodes of plans known beside the search, the best first.

    Attributes:
        count: Number of configurations to try.
        constructed: Nodes with a plan that may have a better one: objective of the best plan, bound and family.
    """

    def __init__(
        self,
        search: SearchContext,
        outcome: Outcome,
        space: list[Family],
        transfer_bounds: TransferBounds,
        starts: Sequence[Family] = (),
    ) -> None:
        self._search, self._outcome, self._transfer_bounds = search, outcome, transfer_bounds
        self._has_fitting_try = False
        self._tries = [*starts] or self._tries_by_hand(space)
        self.lead = 0 if self._has_fitting_try else 1  # a plan there makes all other tries needless
        self.count = len(self._tries)
        self.constructed: list[tuple[float, float, Family]] = []
        self._best, self._worse = math.inf, 0

    def _tries_by_hand(self, space: list[Family]) -> list[Family]:
        """Return the nodes that are tried where no plan is known."""
        search, family_of = self._search, {family[0]: family for family in space}
        tries = first_tries([*family_of], search.global_batch, search.least_bytes)
        fitting = fitting_try([*family_of], search.global_batch, search.memory_bounds.seems_to_fit)
        self._has_fitting_try = fitting is not None
        return [family_of[first] for first in dict.fromkeys([*([] if fitting is None else [fitting]), *tries])]

    def is_over(self, index: int) -> bool:
        """See `TaskSeries.is_over`."""
        return self._worse >= self._search.settings.construction_failures or (
            self._has_fitting_try and bool(self._outcome.candidates)
        )

    def next_task(self, index: int) -> SearchTask:
        """See `TaskSeries.next_task`."""
        return SearchTask(TaskKind.BOUND, self._tries[index], 0.0, math.inf, needs_plan=True)

    def record_finding(self, index: int, finding: Finding | None) -> None:
        """See `TaskSeries.record_finding`."""
        assert finding is not None, "every try is made"
        self._transfer_bounds.record_finding(self._tries[index], finding)
        self._outcome.add_finding(finding, self._search.keep)
        self._outcome.record_standing(self._tries[index], finding.bound, status_of(finding, is_new=True))
        if finding.best is not None:
            if not finding.is_final:
                self.constructed.append((finding.best.objective, finding.bound, self._tries[index]))
            self._worse = 0 if finding.best.objective < self._best else self._worse + 1
            self._best = min(self._best, finding.best.objective)
        report_progress(self._search, self._outcome, "begin", index + 1, self.count, self._tries[index][0].words)


class ImproveConstructed(TaskSeries):
    """Improves the constructed plans, the best first, while the incumbent is far above the bound of its node.

    Under tight memory the first plan that fits may take several times as long as the best one of its node, and prunes
    nothing until it is improved.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
        constructed: Objective of the best plan, bound and family of each constructed plan.
    """

    lead = 0

    def __init__(
        self, search: SearchContext, outcome: Outcome, constructed: Sequence[tuple[float, float, Family]]
    ) -> None:
        self._search, self._outcome = search, outcome
        self._constructed = sorted(constructed, key=lambda each: each[0])[: search.settings.most_improved]
        self.count = len(self._constructed)

    def is_over(self, index: int) -> bool:
        """See `TaskSeries.is_over`."""
        return False

    def next_task(self, index: int) -> SearchTask | None:
        """See `TaskSeries.next_task`; None where the incumbent is near the bound of the node."""
        _, bound, family = self._constructed[index]
        if self._outcome.best <= self._search.settings.weak_bound_ratio * bound:
            return None
        return SearchTask(TaskKind.ADVANCE, family, bound, self._outcome.best)

    def record_finding(self, index: int, finding: Finding | None) -> None:
        """See `TaskSeries.record_finding`."""
        if finding is None:
            return
        _, bound, family = self._constructed[index]
        self._outcome.add_finding(finding, self._search.keep)
        self._outcome.record_standing(family, max(bound, finding.bound), status_of(finding, is_new=False))
        report_progress(self._search, self._outcome, "begin", index + 1, self.count, family[0].words)
