"""Work on meshes of three axes, where the least bound is, as long as it may take.

They are twice as many as all others and seldom better by much, so that they get a share of the work that the others
took. All schedules are looked at together: the configuration with the least bound is next, be it a floor, what follows
from others on its mesh (`bounds/transfer.py`), or its own. So the least bound, which is what is proven, rises soonest.
In between, the one with the best plan is gone on with as long as that becomes better: it excludes more of the others.
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence

from autopar.bounds.transfer import Carried
from autopar.configuration import Configuration, Family, alike
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.schedule import SCHEDULES
from autopar.search.context import SearchContext
from autopar.search.frontier import Series
from autopar.search.outcome import Outcome, stage_of
from autopar.search.phases import EVERY
from autopar.search.reporting import tell
from autopar.search.tasks import Finding, Piece, Work

MOST_SCOUTS, SCOUT_PIECES = 6, 2
"""Configurations that are worked on before others of more than one stage, where plans may be much better there, and how
many pieces of work there are for each."""

NEARBY = 0.03
"""A plan is made better where it is slower than the best one by no more, relative."""


def scouts(space: Sequence[Family], global_batch: int, bound: Callable[[Family], float]) -> list[Family]:
    """Return the configurations that are most like what is set up by hand, one per number of stages, best bounds first.

    The minor axis is as large as can be, a microbatch has one sample for each row of devices along it, groups take
    several stages in turn; of several meshes the one with the least bound, and of equal ones that which can shard
    parameters over most devices without a way through all of them.

    Args:
        space: Configurations on meshes of three axes.
        global_batch: Samples per step.
        bound: Returns the least step time of one, in seconds.
    """
    inner = max((family[0].mesh.shape[2] for family in space), default=0)
    best: dict[int, tuple[float, int, Family]] = {}
    for family in space:
        dp, outer, minor = family[0].mesh.shape
        alike = family[0].num_chunks > 1 and not SCHEDULES[family[0].schedule].splits and minor == inner
        if not alike or global_batch != family[0].num_microbatches * dp * outer:
            continue
        found = bound(family), -outer, family
        known = best.get(family[0].num_stages)
        if known is None or found[:2] < known[:2]:
            best[family[0].num_stages] = found
    return [family for *_, family in sorted(best.values(), key=lambda each: each[:2])[:MOST_SCOUTS]]


class ThirdAxis(Series):
    """Works on the configuration with the least bound until none can have a better plan.

    Args:
        search: What it is part of.
        outcome: What is known, and is added to.
        space: The configurations.
        carried: What follows from what is known of others; added to.
        elsewhere: See below.
        spreads_first: See `Piece`; those whose blocks take as much are worked on together then.

    Attributes:
        elsewhere: No plan of the other configurations has a lower objective, in seconds.
        near: Configurations with bounds as near to the best plan, relative, are not worked on.
        enough: Nor are those with bounds as high, in seconds.
        until: When to end, on the monotonic clock.
    """

    def __init__(
        self,
        search: SearchContext,
        outcome: Outcome,
        space: list[Family],
        carried: Carried,
        elsewhere: float,
        *,
        spreads_first: bool = False,
    ) -> None:
        done = outcome.done(space)
        space = [family for family in space if family not in done]
        self._spreads_first = spreads_first
        self._search, self._outcome, self._carried = search, outcome, carried
        self._parts = alike(space, search.spreads) if spreads_first else [(family,) for family in space]
        self._space = [tuple(own for family in parts for own in family) for parts in self._parts]
        self.elsewhere, self.near, self.enough, self.until = elsewhere, OPTIMALITY_TOLERANCE, math.inf, math.inf
        self._counted = (0, 0)
        known = outcome.standings
        each = {own: max(search.least(own), known[own].bound if own in known else 0.0) for own in space}
        bounds = (min(each[own] for own in parts) for parts in self._parts)
        self._open = sorted((bound, number) for number, bound in enumerate(bounds))
        self._done = list(done.values())
        self._busy: dict[int, tuple[float, int]] = {}
        self._seen: set[int] = set()
        self._worked: set[int] = set()
        plans = {plan.configuration: plan.objective for plan in reversed(outcome.candidates)}
        found = {number: [plans[own] for own in family if own in plans] for number, family in enumerate(self._space)}
        self._plans = {number: min(each) for number, each in found.items() if each}
        """Of those whose last piece of work made them better."""
        self._last = self._plans.copy()

    @property
    def own(self) -> float:
        """No plan of these configurations has a lower objective, in seconds."""
        return min([*self._done, *(bound for bound, _ in (*self._open, *self._busy.values()))], default=math.inf)

    @property
    def left(self) -> tuple[Configuration, ...]:
        """Those that may have a better plan and were not worked on to the end."""
        return tuple(configuration for number in sorted(self._rivals) for configuration in self._space[number])

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        if time.monotonic() > self.until:
            return True
        self._carry()
        return not self._busy and not (self._open and self._is_far(self._open[0][0]))

    def piece(self, index: int) -> Piece | None:
        """See `Series.piece`: there is nothing to do while others are at what could be done."""
        if not self._open or not self._is_far(self._open[0][0]):
            return None
        bound, number = self._busy[index] = self._next(index)
        family, cutoff = self._space[number], self._outcome.best
        urgent = not self._outcome.candidates
        if number in self._seen:
            self._worked.add(number)
            return Piece(Work.ADVANCE, family, bound, cutoff, urgent=urgent)
        self._seen.add(number)
        hint, first = self._carried.hint(family), self._spreads_first
        return Piece(Work.BOUND, family, bound, cutoff, urgent=urgent, hint=hint, spreads_first=first)

    def _next(self, index: int) -> tuple[float, int]:
        """Return bound and number of the next one: that with the least bound, or, in between, a plan to make better."""
        if index % EVERY == EVERY - 1:
            better = [(self._plans[head[1]], head) for head in self._open if head[1] in self._plans]
            plan, head = min(better, default=(math.inf, self._open[0]))
            if plan < self._outcome.best * (1 + NEARBY) and self._is_far(head[0]):
                self._open.remove(head)
                heapq.heapify(self._open)
                return head
        return heapq.heappop(self._open)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        if finding is None:
            return
        known, number = self._busy.pop(index)
        family, bound = self._space[number], max(known, finding.bound)
        if number not in self._worked:
            self._carried.learn(family, finding)
        self._outcome.take(finding, self._search.keep)
        if number in self._worked:
            plan, last = math.inf if finding.best is None else finding.best.objective, self._last.get(number, math.inf)
            self._plans.pop(number, None)
            if plan < last * (1 - OPTIMALITY_TOLERANCE):
                self._plans[number] = self._last[number] = plan
        is_done = finding.is_final and number in self._worked
        stage = stage_of(finding, is_new=number not in self._worked)
        for own in self._parts[number]:
            self._outcome.note(own, bound, stage)
        if is_done:
            self._done.append(bound)
        else:
            heapq.heappush(self._open, (bound, number))
        lowest = min(self.own, self.elsewhere)
        tell(self._search, self._outcome, "third axis", len(self._seen), len(self._space), lowest, str(family[0]))

    @property
    def worked(self) -> int:
        """How many configurations were worked on until there was nothing left to do."""
        return sum(len(self._space[number]) for number in self._worked - self._rivals)

    @property
    def excluded(self) -> int:
        """How many configurations are excluded by their bounds, and were not worked on."""
        rest = set(range(len(self._space))) - self._worked - self._rivals
        return sum(len(self._space[number]) for number in rest)

    def note(self) -> None:
        """Take down in the outcome what was done and what is left."""
        self._carry()
        self._outcome.closed, self._outcome.closed_floor = self.left, self.own
        worked, excluded = self._counted
        self._counted = self.worked, self.excluded
        self._outcome.solved += self.worked - worked
        self._outcome.pruned += self.excluded - excluded

    @property
    def _rivals(self) -> set[int]:
        """The configurations on which there is something to do."""
        return {number for bound, number in (*self._open, *self._busy.values()) if self._is_rival(bound)}

    def _carry(self) -> None:
        """Raise the bounds of what is next by what follows from others."""
        self._carried.raise_least(self._open, self._space, self._outcome.best, self._seen.__contains__)

    def _is_far(self, bound: float) -> bool:
        """Whether a bound is so far from the best plan that there is something to do."""
        return bound < min(self.enough, self._outcome.best * (1 - self.near))

    def _is_rival(self, bound: float) -> bool:
        """Whether there may be a plan that is better than the best."""
        return bound < self._outcome.best * (1 - OPTIMALITY_TOLERANCE)
