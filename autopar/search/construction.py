"""Primal heuristics that find the first incumbent: construction from degrees, and settling on constructed plans."""

import math
from collections.abc import Sequence

from autopar.bounds.transfer import Carried
from autopar.configuration import Family, first_tries, roomy_try
from autopar.search.context import SearchContext
from autopar.search.ordered_execution import Series
from autopar.search.outcome import Outcome, stage_of
from autopar.search.reporting import tell
from autopar.search.tasks import Finding, Piece, Work


class Construction(Series):
    """Constructs a first plan from degrees: an incumbent to return, and to prune with.

    Tried first: the configuration with few stages whose memory seems to suffice for all saved activations, if there is
    one; a plan there ends the construction. Else the degrees that engineers set up by hand: nodes for tensor
    parallelism, one sample per row of devices, and as few stages as fit, or more while that is faster.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
        space: Nodes with plain schedules.
        carried: Bounds from other nodes; added to.

    Attributes:
        count: Number of configurations to try.
        begun: Nodes with a plan that may have a better one: objective of the best plan, bound and family.
    """

    def __init__(self, search: SearchContext, outcome: Outcome, space: list[Family], carried: Carried) -> None:
        self._search, self._outcome, self._carried = search, outcome, carried
        family_of = {family[0]: family for family in space}
        tries = first_tries([*family_of], search.global_batch, search.least_bytes)
        roomy = roomy_try([*family_of], search.global_batch, search.room.seems_roomy)
        self._is_roomy = roomy is not None
        self.lead = 0 if self._is_roomy else 1  # a plan there makes all other tries needless
        self._tries = [family_of[first] for first in dict.fromkeys([*([] if roomy is None else [roomy]), *tries])]
        self.count = len(self._tries)
        self.begun: list[tuple[float, float, Family]] = []
        self._best, self._worse = math.inf, 0

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        return self._worse >= self._search.settings.tries_worse or (self._is_roomy and bool(self._outcome.candidates))

    def piece(self, index: int) -> Piece:
        """See `Series.piece`."""
        return Piece(Work.BOUND, self._tries[index], 0.0, math.inf, urgent=True)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        assert finding is not None, "every try is made"
        self._carried.learn(self._tries[index], finding)
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(self._tries[index], finding.bound, stage_of(finding, is_new=True))
        if finding.best is not None:
            if not finding.is_final:
                self.begun.append((finding.best.objective, finding.bound, self._tries[index]))
            self._worse = 0 if finding.best.objective < self._best else self._worse + 1
            self._best = min(self._best, finding.best.objective)
        tell(self._search, self._outcome, "begin", index + 1, self.count, 0.0, str(self._tries[index][0]))


class Settling(Series):
    """Improves the constructed plans, the best first, while the incumbent is far above the bound of its node.

    Under tight memory the first plan that fits may take several times as long as the best one of its node, and prunes
    nothing until it is improved.

    Args:
        search: Inputs of the search.
        outcome: What is known; added to.
        begun: Objective of the best plan, bound and family of each constructed plan.
    """

    lead = 0

    def __init__(self, search: SearchContext, outcome: Outcome, begun: Sequence[tuple[float, float, Family]]) -> None:
        self._search, self._outcome = search, outcome
        self._begun = sorted(begun, key=lambda each: each[0])[: search.settings.settled]
        self.count = len(self._begun)

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        return False

    def piece(self, index: int) -> Piece | None:
        """See `Series.piece`; None where the incumbent is near the bound of the node."""
        _, bound, family = self._begun[index]
        if self._outcome.best <= self._search.settings.far * bound:
            return None
        return Piece(Work.ADVANCE, family, bound, self._outcome.best)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        if finding is None:
            return
        _, bound, family = self._begun[index]
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(family, max(bound, finding.bound), stage_of(finding, is_new=False))
        tell(self._search, self._outcome, "begin", index + 1, self.count, 0.0, str(family[0]))
