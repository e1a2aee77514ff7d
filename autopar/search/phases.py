"""The course of a search: a first plan, bounds of all configurations, then work on those that may be better.

Each part is a series of pieces (`frontier.py`).
"""

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.bounds.transfer import ALL, ROOM, Carried
from autopar.configuration import Family, first_tries, roomy_try
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.context import SearchContext
from autopar.search.frontier import LAG, Series
from autopar.search.outcome import Outcome, Stage, stage_of
from autopar.search.reporting import tell
from autopar.search.tasks import Finding, Piece, Work

TRIES_WORSE = 2
"""Numbers of stages in a row that give no better plan before the search for a first one ends."""

FAR, HURRIES = 1.25, 6
"""While the best plan is so much slower than a configuration's bound, a plan is looked for there before the other
configurations are bounded, until so many times no better one was found."""

SETTLED = 3
"""Configurations that were begun with on which more is done at most before the others are bounded."""

EVERY = 4
"""One in so many pieces on plain schedules bounds no other configuration, but goes on with the one that has the least
bound, which has to be raised anyway, or, in turn, with the one that has the best plan, until that is no longer the best
of all: a better one excludes more of what is not bounded yet."""

PATIENCE = 16
"""Pieces of work in a row that find no better plan, where they cannot raise the least bound, before the rest waits."""


NEAR_ENOUGH = 0.01
"""Bounds that are as near to the best plan, relative, are raised further once no others are lower."""

LATE_SECONDS, LATE_SHARE = 2.5, 0.05
"""How long bounds are raised by what is known of others after a search has stopped, and what share of a limit of time
that is at most, which ends as much earlier."""


class Clock:
    """When a search ends."""

    def __init__(self, search: SearchContext, outcome: Outcome) -> None:
        self._search, self._outcome = search, outcome
        self._late = min(LATE_SECONDS, LATE_SHARE * search.time_limit)
        self._end = time.monotonic() + search.time_limit - self._late
        self._first = math.inf
        self._stopped = math.inf

    def end(self) -> float:
        """Return when a piece that is started now should be done."""
        return self._end

    def left(self) -> float:
        """Return what share of a limit of time is left; 1 without one."""
        if math.isinf(self._search.time_limit):
            return 1.0
        return (self._end - time.monotonic()) / max(self._search.time_limit, 1e-9)

    def at(self, left: float) -> float:
        """Return when a share of a limit of time is left, on the monotonic clock; infinity without one."""
        return self._end - left * self._search.time_limit if math.isfinite(self._end) else math.inf

    def after(self, share: float) -> float:
        """Return when a share of what is left of a limit of time is over, on the monotonic clock."""
        now = time.monotonic()
        return now + share * max(0.0, self._end - now)

    def stops(self) -> bool:
        """Whether to stop, and why, noted in the outcome; a limit waits for the first plan, but not for long."""
        if self._search.should_stop():
            self._outcome.stopped = "interrupted"
        elif time.monotonic() > self._end + (self._search.overtime if math.isinf(self._first) else 0.0):
            self._outcome.stopped = "time limit"
        if self._outcome.stopped:
            self._stopped = min(self._stopped, time.monotonic())
        return bool(self._outcome.stopped)

    def is_late(self) -> bool:
        """Whether the search has stopped so long ago that what is known has to do."""
        return self.stops() and time.monotonic() > self._stopped + self._late

    def heard(self, finding: Finding) -> None:
        """Take down what was found, before it is its turn."""
        if finding.best is not None:
            self._first = min(self._first, finding.best.objective)
            self._outcome.history.note(finding.best.objective, 0.0)


class Beginning(Series):
    """Looks for a plan to begin with: to have one to return, and one to beat.

    What seems to have room for everything comes first, if there is such a configuration, and a plan there is enough.
    Else it is what is set up by hand: nodes for tensor parallelism, one sample per row of devices, and as few stages as
    fit, or more as long as that is faster.

    Attributes:
        count: How many tries there may be.
        begun: What was tried, has plans and can be gone on with: objective of the best plan, bound and family.
    """

    def __init__(self, search: SearchContext, outcome: Outcome, space: list[Family], carried: Carried) -> None:
        self._search, self._outcome, self._carried = search, outcome, carried
        family_of = {family[0]: family for family in space}
        tries = first_tries([*family_of], search.global_batch, search.least_bytes)
        roomy = roomy_try([*family_of], search.global_batch, search.room.seems_roomy)
        self._is_roomy = roomy is not None
        self.lead = 0 if self._is_roomy else 1  # a plan of that would make all others needless
        self._tries = [family_of[first] for first in dict.fromkeys([*([] if roomy is None else [roomy]), *tries])]
        self.count = len(self._tries)
        self.begun: list[tuple[float, float, Family]] = []
        self._best, self._worse = math.inf, 0

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        return self._worse >= TRIES_WORSE or (self._is_roomy and bool(self._outcome.candidates))

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
    """Works on what was begun with, the best plans first, while the best is far slower than what may be there.

    Where most of memory is taken the first plan that fits may take several times as long as the best one, and whatever
    is compared with it before that is known is worked on for nothing.

    Args:
        search: What it is part of.
        outcome: What is known, and is added to.
        begun: What was begun with: objective of the best plan, bound and family of each.
    """

    lead = 0

    def __init__(self, search: SearchContext, outcome: Outcome, begun: Sequence[tuple[float, float, Family]]) -> None:
        self._search, self._outcome = search, outcome
        self._begun = sorted(begun, key=lambda each: each[0])[:SETTLED]
        self.count = len(self._begun)

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        return False

    def piece(self, index: int) -> Piece | None:
        """See `Series.piece`: there is nothing to do where the best plan is near what may be there."""
        _, bound, family = self._begun[index]
        if self._outcome.best <= FAR * bound:
            return None
        return Piece(Work.ADVANCE, family, bound, self._outcome.best)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        if finding is None:
            return
        _, bound, family = self._begun[index]
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(family, max(bound, finding.bound), stage_of(finding, is_new=False))
        if finding.is_final:
            self._outcome.solved += len(family)
        tell(self._search, self._outcome, "begin", index + 1, self.count, 0.0, str(family[0]))


class Bounding(Series):
    """Bounds configurations in the order of what is known of them: their floors, or what follows from others.

    In between, those with plain schedules that have the least bounds or the best plans are worked on.

    The latter is looked up when a configuration is next. Where floors are far too low, as on slow links, configurations
    like those that are known to be slow wait until others were looked at, and mostly need not be any more.

    Args:
        search: What it is part of.
        outcome: What is known, and is added to.
        space: The configurations.
        ahead: A heap of what is known of them, and their numbers.
        elsewhere: The least bound of configurations that are not worked on now.
        carried: What follows from what is known of others; added to.
        rivals: Whether only what could be better than the best plan is of interest, and no runner-up.

    Attributes:
        pending: Bound and number of the configurations that could be of interest.
        closed: The least bound of the others.
        stuck: The least bound of those that nothing raises further.
    """

    def __init__(
        self,
        search: SearchContext,
        outcome: Outcome,
        space: list[Family],
        ahead: list[tuple[float, int]],
        elsewhere: float,
        carried: Carried,
        *,
        rivals: bool,
    ) -> None:
        self.pending: list[tuple[float, int]] = []
        self.closed = self.stuck = math.inf
        self.space, self.elsewhere, self.rivals = space, elsewhere, rivals
        self.lead = LAG if rivals else 0  # of plain schedules the first ones find most of what excludes others
        self._search, self._outcome, self._carried = search, outcome, carried
        self._ahead = ahead
        self._busy: dict[int, tuple[float, int]] = {}
        self._worked: dict[int, Aside] = {}
        self._chosen: dict[int, tuple[float, int]] = {}
        self._raised: list[tuple[float, int]] = []
        self._cutoffs: dict[int, float] = {}
        self._plans: dict[int, float] = {}
        self._failures = 0

    def threshold(self) -> float:
        """Return the step time above which a configuration is of no interest."""
        if self.rivals and self._outcome.candidates:
            return self._outcome.best * (1 - OPTIMALITY_TOLERANCE)
        return self._outcome.threshold(self._search.keep)

    @property
    def unseen(self) -> float:
        """The least that is known of those that were not looked at and might have been."""
        waiting, best = [*self._ahead, *self._busy.values()], self._outcome.best
        heapq.heapify(waiting)
        for most in (ROOM, ALL) if waiting[:1] != self._raised else ():  # there may be no time for all
            self._carried.raise_least(waiting, self.space, best, lambda number: False, most, ends=True)
        self._raised = waiting[:1]
        known = {number: bound for bound, number in waiting}
        self._busy = {index: (known[number], number) for index, (_, number) in self._busy.items()}
        self._ahead = [head for head in waiting if head not in self._busy.values()]
        heapq.heapify(self._ahead)
        return waiting[0][0] if waiting else math.inf

    @property
    def own(self) -> float:
        """No plan of these configurations has a lower objective, in seconds."""
        return min([self.unseen, self.closed, *self._bounds])

    @property
    def worked(self) -> "list[Aside]":
        """The configurations that were worked on meanwhile, and can be gone on with."""
        busy = (Aside(bound, self.space[number], is_counted=True) for bound, number in self._chosen.values())
        return [*self._worked.values(), *busy]

    @property
    def _bounds(self) -> list[float]:
        """The bounds of the configurations that were looked at and could be of interest."""
        return [*(bound for bound, _ in self.pending), *(own.bound for own in self.worked)]

    def ends(self, index: int) -> bool:
        """See `Series.ends`: what follows from others for the next one may be enough, and all after it are no less."""
        self._carried.raise_least(self._ahead, self.space, self.threshold(), lambda number: False)
        if self._ahead and self._ahead[0][0] < self.threshold():
            return False
        for known, number in self._ahead:
            self._outcome.note(self.space[number], known, Stage.NEW)
            self._outcome.pruned += len(self.space[number])
            self.closed = min(self.closed, known)
        self._ahead = []
        return True

    def piece(self, index: int) -> Piece:
        """See `Series.piece`."""
        if not self.rivals and index % EVERY == EVERY - 1 and (piece := self._advance(index)) is not None:
            return piece
        known, number = self._busy[index] = heapq.heappop(self._ahead)
        self._cutoffs[index] = self.threshold()
        return Piece(
            Work.BOUND,
            self.space[number],
            known,
            self._cutoffs[index],
            urgent=not self._outcome.candidates,
            hasty=self._outcome.best / FAR if self._failures < HURRIES else 0.0,
            hint=self._carried.hint(self.space[number]),
        )

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        assert finding is not None, "every piece is done"
        if index in self._chosen:
            self._advanced(index, finding)
            return
        _, number = self._busy.pop(index)
        self._carried.learn(self.space[number], finding)
        best = self._outcome.best
        better = finding.best is not None and finding.best.objective < best
        self._failures += finding.bound * FAR < best and not better
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(self.space[number], finding.bound, stage_of(finding, is_new=True))
        if finding.bound >= self._cutoffs[index]:
            self.closed = min(self.closed, finding.bound)
            self._outcome.pruned += len(self.space[number])
        else:
            heapq.heappush(self.pending, (finding.bound, number))
            if finding.best is not None:
                self._plans[number] = finding.best.objective
        self._tell(number)

    def _advance(self, index: int) -> Piece | None:
        """Return work on a configuration that was looked at, the one with the least bound or the best plan, in turn.

        None if there is none.
        """
        begun = ((own.bound, number) for number, own in self._worked.items() if not own.is_settled)
        rivals = [head for head in (*self.pending, *begun) if head[0] < self._outcome.best * (1 - OPTIMALITY_TOLERANCE)]
        if not rivals:
            return None
        planned = [(self._plans[number], bound, number) for bound, number in rivals if number in self._plans]
        dives = planned and index // EVERY % 2 == 0
        bound, number = self._chosen[index] = min(planned)[1:] if dives else min(rivals)
        self._plans.pop(number, None)  # it had its turn
        if self._worked.pop(number, None) is None:
            self.pending.remove((bound, number))
            heapq.heapify(self.pending)
            self._outcome.solved += len(self.space[number])
        urgent = not self._outcome.candidates
        return Piece(Work.ADVANCE, self.space[number], bound, self._outcome.best, urgent=urgent)

    def _advanced(self, index: int, finding: Finding) -> None:
        """Take what came of that."""
        known, number = self._chosen.pop(index)
        bound, family = max(known, finding.bound), self.space[number]
        if finding.best is not None and finding.best.objective < self._outcome.best:
            self._plans[number] = finding.best.objective
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(family, bound, stage_of(finding, is_new=False))
        if finding.is_final:
            self.closed, self.stuck = min(self.closed, bound), min(self.stuck, bound)
        else:
            self._worked[number] = Aside(bound, family, is_counted=True, is_settled=finding.is_settled)
        self._tell(number)

    def _tell(self, number: int) -> None:
        """Tell what is known after a piece on a configuration."""
        left = (bound for bound, _ in (*self._ahead[:1], *self._busy.values()))
        lowest = min([self.closed, self.elsewhere, *left, *self._bounds])
        seen, count = len(self.space) - len(self._ahead) - len(self._busy), len(self.space)
        tell(self._search, self._outcome, "bound", seen, count, lowest, str(self.space[number][0]))


@dataclass(frozen=True, slots=True)
class Aside:
    """A configuration that was put aside.

    Attributes:
        bound: No plan of it has a lower objective, in seconds.
        family: The configurations.
        is_counted: Whether it counts as solved.
        is_settled: Whether it only lacks a proof.
    """

    bound: float
    family: Family
    is_counted: bool
    is_settled: bool = False


class Advancing(Series):
    """Works on the configuration with the lowest bound that nobody works on, until none can have the best plan.

    Where nothing raises the bound of one of them further, bounds above that change nothing: the others may still have
    better plans, but are put aside once several pieces in a row have found none.

    Args:
        search: What it is part of.
        outcome: What is known, and is added to.
        bounded: The configurations, once they are bounded.
        elsewhere: The least bound of configurations that are not worked on now.
        before: Further ones that were put aside.
        proves: Whether best plans are proven; else configurations of which nothing else is left are put aside.
        patience: Pieces in a row that find no better plan before others are put aside that only serve to find one.
        stuck: The bound is known to stay below that whatever is done here.
        near: Configurations with bounds as near to the best plan, relative, are put aside as well.
        until: When all that is left is put aside, on the monotonic clock.

    Attributes:
        aside: The configurations that were put aside.
    """

    def __init__(
        self,
        search: SearchContext,
        outcome: Outcome,
        bounded: Sequence[Bounding],
        elsewhere: float,
        before: Sequence[Aside] = (),
        *,
        proves: bool = True,
        patience: float = math.inf,
        stuck: float = math.inf,
        near: float = 0.0,
        until: float = math.inf,
    ) -> None:
        self._search, self._outcome, self._elsewhere, self._proves = search, outcome, elsewhere, proves
        self._until = until
        self.aside = [each for each in before if each.is_settled and not proves]
        before = [each for each in before if not each.is_settled or proves]
        self._patience, self._idle, self._stuck, self._near = patience, 0, stuck, near
        self._solved = outcome.solved
        self._others = min((min(each.closed, each.unseen) for each in bounded), default=math.inf)
        pending = [(bound, each.space[number]) for each in bounded for bound, number in each.pending]
        self._before = {number for number, each in enumerate(before, len(pending)) if each.is_counted}
        pending += [(each.bound, each.family) for each in before]
        self._space = [family for _, family in pending]
        self._bounds = {number: bound for number, (bound, _) in enumerate(pending)}
        self._open = sorted((bound, number) for number, bound in self._bounds.items())
        self._chosen: dict[int, int] = {}
        self._busy: set[int] = set()
        self._worked: set[int] = set()

    @property
    def own(self) -> float:
        """No plan of these configurations has a lower objective, in seconds."""
        return min([self._others, *self._bounds.values(), *(each.bound for each in self.aside)])

    @property
    def proven(self) -> float:
        """No plan of those that are not put aside has a lower objective, in seconds."""
        left = {each.family for each in self.aside}
        return min(
            [self._others, *(bound for number, bound in self._bounds.items() if self._space[number] not in left)]
        )

    @property
    def lowest(self) -> float:
        """No plan of the space has a lower objective, in seconds."""
        return min(self.own, self._elsewhere)

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        self._drop()
        if self._open and (self._open[0][0] >= self._enough or time.monotonic() > self._until):
            for bound, number in self._open:
                self.aside.append(Aside(bound, self._space[number], self._is_counted(number)))
            self._open = []
        return not self._open and not self._busy

    @property
    def _enough(self) -> float:
        """The bound from which on configurations are put aside."""
        near = self._outcome.best * (1 - self._near) if self._near else math.inf
        return min(near, self._stuck if self._idle >= self._patience else math.inf)

    def piece(self, index: int) -> Piece | None:
        """See `Series.piece`: there is nothing to do while others are at what could be done."""
        if not self._open:
            return None
        bound, number = heapq.heappop(self._open)
        self._chosen[index] = number
        self._busy.add(number)
        self._worked.add(number)
        cutoff = self._outcome.best
        return Piece(Work.ADVANCE, self._space[number], bound, cutoff, urgent=not self._outcome.candidates)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        if finding is None:
            return
        number, best = self._chosen.pop(index), self._outcome.best
        self._busy.discard(number)
        self._bounds[number] = max(finding.bound, self._bounds[number])
        self._outcome.take(finding, self._search.keep)
        self._idle = self._idle + 1 if self._outcome.best >= best * (1 - OPTIMALITY_TOLERANCE) else 0
        if finding.is_final:
            self._stuck = min(self._stuck, self._bounds[number])
        self._outcome.note(self._space[number], self._bounds[number], stage_of(finding, is_new=False))
        if not finding.is_final and finding.is_settled and not self._proves:
            settled = Aside(self._bounds[number], self._space[number], is_counted=True, is_settled=True)
            self.aside.append(settled)
        elif not finding.is_final:
            heapq.heappush(self._open, (self._bounds[number], number))
        own = sum(len(self._space[other]) for other in self._worked - self._busy - self._before)
        self._outcome.solved = self._solved + own
        detail = str(self._space[number][0])
        tell(self._search, self._outcome, "solve", len(self._worked), len(self._bounds), self.lowest, detail)

    def _drop(self) -> None:
        """Let go of the configurations that cannot have the best plan."""
        while self._open:
            bound, number = self._open[0]
            if self._is_rival(bound):
                return
            self._outcome.pruned += len(self._space[number]) * (not self._is_counted(number))
            heapq.heappop(self._open)

    def _is_counted(self, number: int) -> bool:
        """Whether a configuration counts as solved, here or before."""
        return number in self._worked or number in self._before

    def _is_rival(self, bound: float) -> bool:
        """Whether there may be a plan that is better than the best."""
        return bound < self._outcome.best * (1 - OPTIMALITY_TOLERANCE)
