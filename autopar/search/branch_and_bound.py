"""The search over hybrids: per configuration the best placements, stage boundaries and recompute, with bounds.

1. What seems to have room for everything is tried, else what is set up by hand, for a plan to begin with (`phases.py`).
   Where nothing of it fits, host memory is needed, or there is time for a few configurations only, better ones are
   looked for next to the best plan (`configuration_descent.py`). Where it is a pipeline, a few on meshes of three axes
   whose devices take several stages in turn are looked at first.
2. Configurations are bounded in the order of their floors (`bounds/roofline.py`) or of bounds from others
   (`bounds/transfer.py`), without memory limits, which also finds most plans that fit anyway (`node_solver.py`). Of
   plain schedules, those with the least bounds and the best plans are worked on in between.
3. The configuration with the lowest bound is worked on, a piece at a time, until none is below the best plan. Where
   plans may be much better, schedules that are not plain are looked at near the best plan before all others of them.
4. Configurations on meshes of three axes take twice as long as all others. Once plain schedules are worked on, what
   microbatches take on their free axes alone bounds many of them at once (`microbatch_bounding.py`), and with a limit
   of time what ops take alone bounds stages with meshes of their own (`heterogeneous_nodes.py`). If in the end the
   bound of the others is `WEAK` times their own, they are searched in the same way with plain schedules. Those that are
   left are worked on for a share of the work, least bounds first, and, after stages with meshes of their own, for some
   more while the least bound of all is theirs and a percent below the best plan (`outer_data_parallel.py`).
5. If further plans are wanted, the best of those akin to no better one are looked for (`runners_up.py`).
6. What is left of a limit of time, but for a share for these plans, goes to meshes of three axes, until nothing there
   is better by a percent.

All is done in pieces, by this process or others; the answer is the same whoever does them (`frontier.py`).

The reported bound is the least over all configurations, searched or not.
"""

import heapq
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.bounds.transfer import ROOM, Carried
from autopar.configuration import PLAIN, Configuration, Family, families
from autopar.formulate.data_major import is_data_major
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.schedule import SCHEDULES
from autopar.search.configuration_descent import Climbing
from autopar.search.context import SearchContext
from autopar.search.executor import Alone, Crew
from autopar.search.frontier import sweep
from autopar.search.heterogeneous_nodes import UnequalSearch
from autopar.search.history import History
from autopar.search.microbatch_bounding import Pacing
from autopar.search.outcome import Outcome
from autopar.search.outer_data_parallel import SCOUT_PIECES, ThirdAxis, scouts
from autopar.search.phases import NEAR_ENOUGH, PATIENCE, Advancing, Aside, Beginning, Bounding, Clock, Settling
from autopar.search.reporting import tell
from autopar.search.runners_up import RunnersUp
from autopar.search.tasks import Finding

WEAK = 1.15
"""With plain schedules, meshes of three axes are searched in full if all plans on others are so much slower than their
least bound."""

THIRD_SHARE, THIRD_LEAST = 0.1, 6
"""Pieces of other work on meshes of three axes: a share of those on others, and how many there may always be."""

THIRD_MORE = 4
"""While the least bound of all is theirs and not `NEAR_ENOUGH`, there may be so many times as many pieces more, and
what is left of a limit of time is spent on them."""

NEARS = (0.02, 0.0175, 0.015, 0.0125, NEAR_ENOUGH)
"""With a limit of time, bounds that are as near to the best plan, relative, are not raised further while those on
meshes of three axes are lower, nor these: first to the first of these, then to the next."""

SHORT = 0.55
"""If less of a limit of time is left once plain schedules are bounded, all others are bounded by what these say before
any is worked on; and plain ones are worked on until less is left, if there are others."""

FAR_OFF = 0.05
"""If plans on meshes of three axes may be better by so much, relative, some of them are looked for once plain schedules
are worked on: the better the best plan is, the less has to be done on all others."""

EARLY = 0.8
"""Some of them are looked for before others are bounded only if more of a limit of time is left then."""

FARTHER_OFF = 0.11
"""If any plans may be better by so much, relative, those near the best one that are not plain are looked for first."""

OP_SECONDS, FEW = 1e-3, 100
"""About what bounding a configuration takes for each op of distinct blocks: U-Net has 3,401 and takes 3 s, LLaMA has 99
and takes 0.1 s. Where a limit of time is enough for no more than so few, and for a part of plain schedules, plans are
looked for next to the best one first."""

CLIMB_SHARE = 0.5
"""Of what is left of a limit of time, what looking for plans next to the best one may take where memory is short, and
where schedules are not plain."""

OVERTIME_SECONDS = 30.0
"""How long a search without a plan goes on after its time limit: until the first one, but no longer."""

RUNNERS_UP_SHARE = 0.1
"""Of a limit of time, what is kept for other plans than the best meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class BranchAndBound:
    """One search.

    Attributes:
        context: What it works on.
        hire: Returns who does the work.
    """

    context: SearchContext
    hire: Callable[[SearchContext], Crew] = Alone

    def run(self, space: Sequence[Configuration]) -> Outcome:
        """Search the space and return the candidates found, best first, and the bound.

        Raises:
            WorkerError: If processes of the search keep dying.
        """
        outcome = Outcome(history=History(self.context.before), hosted=self.context.constraints.hosted)
        fewer = self._left([each for each in space if not is_data_major(each.mesh)], outcome)
        more = self._left([each for each in space if is_data_major(each.mesh)], outcome)
        outcome.closed, outcome.closed_floor = tuple(more), self._least(more)
        clock = Clock(self.context, outcome)
        carried = Carried(
            self.context.folded,
            self.context.floor,
            self.context.costs.stack,
            self.context.global_batch,
            self.context.room,
            clock.stops,
            clock.is_late,
        )
        third, limited = None, math.isfinite(self.context.time_limit)
        unequal = UnequalSearch(self.context, outcome, clock.stops, clock.end)
        with self.hire(self.context) as crew:
            waves = _waves(families(fewer))
            first = waves[0] if waves else []
            beginning = Beginning(self.context, outcome, first, carried)
            sweep(crew, beginning, beginning.count, clock.end, clock.stops, clock.heard)
            is_heavy = limited and self._is_heavy(first, clock)
            is_short = bool(self.context.constraints.hosted) or is_heavy
            if (fewer or more) and not outcome.candidates and not clock.stops():
                is_short = True
                self._take_spare(outcome, clock)
            settling = Settling(self.context, outcome, beginning.begun)
            sweep(crew, settling, settling.count, clock.end, clock.stops, clock.heard)
            if is_short and waves and outcome.candidates and not clock.stops():
                climbing = Climbing(self.context, outcome, first, carried, clock.after(CLIMB_SHARE))
                sweep(crew, climbing, sys.maxsize, clock.end, clock.stops, clock.heard)
            is_heavy = is_heavy and bool(outcome.candidates)
            if is_heavy and more:  # there may be no time to look at any of these
                rough = Pacing(self.context, outcome, families(more), carried, 0.0)
                outcome.closed_floor = rough.raised(outcome.best, ROOM)

            def scout(elsewhere: float) -> None:
                best = outcome.best
                ahead = scouts(families(more), self.context.global_batch, lambda family: carried.least(family, best))
                first = ThirdAxis(self.context, outcome, ahead, carried, elsewhere, spreads_first=True)
                sweep(crew, first, SCOUT_PIECES * len(ahead), clock.end, clock.stops, clock.heard)

            pacing: Pacing | None = None
            is_piped = bool(outcome.candidates) and outcome.candidates[0].configuration.num_stages > 1
            if more and is_piped and clock.left() > EARLY:
                scout(self._least(fewer))  # what several stages in turn save excludes much of all that is bounded next

            def climb(lowest: float) -> None:
                if outcome.candidates and not outcome.stopped and lowest < outcome.best * (1 - FARTHER_OFF):
                    rivals = [family for wave in waves[1:] for family in wave if all(map(self.context.spreads, family))]
                    climbing = Climbing(
                        self.context, outcome, rivals, carried, clock.after(CLIMB_SHARE), lowest, probes=True
                    )
                    sweep(crew, climbing, sys.maxsize, clock.end, clock.stops, clock.heard)

            def midway(elsewhere: float) -> bool:
                nonlocal pacing
                waits = False
                if more and not outcome.stopped and outcome.candidates:
                    pacing = Pacing(self.context, outcome, families(more), carried, elsewhere)
                    sweep(crew, pacing, pacing.count, clock.end, clock.stops, clock.heard)
                    outcome.closed_floor = max(outcome.closed_floor, pacing.raised(outcome.best, ROOM))
                    if outcome.closed_floor < outcome.best * (1 - FAR_OFF):
                        scout(elsewhere)
                        waits = limited and outcome.closed_floor < outcome.best * (1 - FAR_OFF)
                if limited and outcome.candidates:
                    unequal.glance()
                return waits

            lowest, aside, later = self._search(
                crew, waves, outcome, clock, carried, midway=midway, climb=climb, is_heavy=is_heavy
            )
            opened = _waves(families(more))
            if later:
                waiting = [family for wave in (*waves[1:], *opened) for family in wave]
                done = outcome.done(waiting)
                outcome.closed = tuple(own for family in waiting if family not in done for own in family)
                outcome.closed_floor = min(outcome.closed_floor, later)
            elif pacing is not None and not outcome.stopped and _with(lowest, aside) >= WEAK * outcome.closed_floor:
                outcome.closed_floor = max(outcome.closed_floor, pacing.raised(_with(lowest, aside)))
            if more and not later and not outcome.stopped and _with(lowest, aside) >= WEAK * outcome.closed_floor:
                plain, *opened = opened
                rest = [each for wave in opened for family in wave for each in family]
                outcome.closed, outcome.closed_floor = tuple(rest), self._least(rest)
                lowest, idle, _ = self._search(crew, [plain], outcome, clock, carried, _with(lowest, aside))
                aside += idle
                waves.append(plain)
            if opened and not outcome.stopped:
                left = [family for wave in ((*waves[1:], *opened) if later else opened) for family in wave]
                third = ThirdAxis(self.context, outcome, left, carried, _with(lowest, aside), spreads_first=later > 0)
                count = max(THIRD_LEAST, int(THIRD_SHARE * outcome.pieces))
                sweep(crew, third, count, clock.end, clock.stops, clock.heard)
                third.note()
            if third is None and pacing is not None and outcome.stopped == "time limit":
                last = pacing.raised(_with(lowest, aside), ends=True)
                outcome.closed_floor = min(max(outcome.closed_floor, last), later or math.inf)
            # A look takes seconds in which workers have nothing to do: it waits where others limit the bound.
            waits = limited and unequal.is_open and unequal.bound >= min(_with(lowest, aside), outcome.closed_floor)
            if self.context.costs.cluster.groups or not waits:
                unequal.look(NEARS[0] if limited else OPTIMALITY_TOLERANCE)

            def third_axis(near: float, until: float, count: int = sys.maxsize, *, ends: bool = False) -> None:
                if third is not None and not outcome.stopped:
                    third.elsewhere = min(_with(lowest, aside), unequal.bound)
                    third.near, third.until = near, until
                    third.enough = math.inf if ends else third.elsewhere
                    sweep(crew, third, count, clock.end, clock.stops, clock.heard)
                    third.note()

            if limited:
                until = clock.end() - RUNNERS_UP_SHARE * self.context.time_limit
                third_axis(NEARS[0], until)
                if time.monotonic() < until and waits:
                    unequal.look(NEARS[0])
                    third_axis(NEARS[0], until)
                for near in NEARS[1:]:
                    if third is not None and not outcome.stopped and time.monotonic() < until:
                        lowest, aside = self._go_on(crew, outcome, clock, lowest, aside, near=near)
                        third_axis(near, until)
                if time.monotonic() < until:
                    unequal.look()
            elif third is not None:
                third_axis(NEAR_ENOUGH, math.inf, THIRD_MORE * count)
                if aside and not outcome.stopped:  # what is left aside must not be what limits the bound
                    stuck = min(lowest, unequal.bound, outcome.closed_floor)
                    lowest, aside = self._go_on(crew, outcome, clock, lowest, aside, patience=0, stuck=stuck)
            complete = _with(lowest, aside)
            if self.context.keep > 1 and not outcome.stopped and outcome.candidates:
                known = [family for wave in waves for family in wave]
                reached = min(complete, unequal.bound, outcome.closed_floor)
                complete = self._runners_up(crew, known, outcome, clock, reached, aside)
            if limited:
                third_axis(NEAR_ENOUGH, math.inf)
                if aside and not outcome.stopped:
                    stuck = min(unequal.bound, outcome.closed_floor)
                    lowest, aside = self._go_on(crew, outcome, clock, lowest, aside, patience=PATIENCE, stuck=stuck)
                third_axis(NEAR_ENOUGH, math.inf, ends=True)
            outcome.workers_bytes = crew.peak_bytes
        outcome.left = sum(len(each.family) for each in aside) + unequal.left
        lowest, others = _with(lowest, aside), min(unequal.bound, outcome.closed_floor)
        lowest, outcome.complete = min(lowest, others), min(complete, others)
        best = outcome.best
        outcome.bound = min(best, lowest)
        outcome.history.note(best, outcome.bound)
        return outcome

    def _is_heavy(self, space: list[Family], clock: Clock) -> bool:
        """Whether there is time to bound a few of some configurations only."""
        if not space:
            return False
        folded = self.context.folded(self.context.global_batch // space[0][0].num_microbatches)
        each = OP_SECONDS * sum(len(kind.ops) for kind in folded.kinds)
        return clock.end() - time.monotonic() < each * min(FEW, len(space))

    def _take_spare(self, outcome: Outcome, clock: Clock) -> None:
        """Begin with a plan that is not found by looking for time, if there is one: to return, and to beat."""
        spare = self.context.spare()
        if spare is not None:
            finding = Finding(0.0, spare, 0)
            clock.heard(finding)
            outcome.take(finding, self.context.keep)
            tell(self.context, outcome, "begin", 1, 1, 0.0, str(spare.configuration))

    def _runners_up(
        self, crew: Crew, known: list[Family], outcome: Outcome, clock: Clock, lowest: float, aside: Sequence[Aside]
    ) -> float:
        """Look for the best of the plans akin to no better one; return up to where none is missing."""
        others = RunnersUp(self.context, outcome, known, lowest, {each.family for each in aside})
        sweep(crew, others, sys.maxsize, clock.end, clock.stops, clock.heard)
        if outcome.stopped == "time limit":
            outcome.stopped = ""  # the space was searched
        return others.complete

    def _search(
        self,
        crew: Crew,
        waves: list[list[Family]],
        outcome: Outcome,
        clock: Clock,
        carried: Carried,
        known: float = math.inf,
        *,
        midway: Callable[[float], bool] = lambda elsewhere: False,
        climb: Callable[[float], None] = lambda lowest: None,
        is_heavy: bool = False,
    ) -> tuple[float, list[Aside], float]:
        """Bound configurations and work on them, plain schedules first.

        Args:
            crew: Who does the work.
            waves: The configurations.
            outcome: Added to.
            clock: When to stop.
            carried: What follows from what is known of others; added to.
            known: The least bound of configurations that were worked on before.
            midway: Called once plain schedules are worked on, with the least bound of all that are listed here; returns
                whether the others are left for later.
            climb: Called after that, unless they are, with the least bound of all that is known then.
            is_heavy: Whether there may be no time to look at most of them, so that all are bounded roughly first.

        Returns:
            The least of all bounds but those of what was put aside or left for later, what was put aside, and the least
            bound of what is left for later; 0 if nothing is.
        """
        ahead = [sorted((self.context.least(family), number) for number, family in enumerate(wave)) for wave in waves]
        for heap, wave in zip(ahead, waves, strict=True) if is_heavy else ():
            carried.raise_least(heap, wave, outcome.best, lambda number: False, ROOM)
        lowest = known
        aside: list[Aside] = []

        def heads(start: int) -> list[float]:
            return [heap[0][0] for heap in ahead[start:] if heap]

        def leave_out(start: int) -> None:
            nonlocal lowest
            for heap, wave in zip(ahead[start:], waves[start:], strict=True):
                done = outcome.done(wave)
                lowest = min([lowest, *done.values()])
                heap[:] = [own for own in heap if wave[own[1]] not in done]
                heapq.heapify(heap)

        is_told = is_left = False

        def look_ahead() -> None:
            nonlocal is_told, is_left
            is_first, is_told = not is_told, True
            if is_first:
                is_left = midway(min([lowest, *heads(1), *(each.bound for each in aside)]))
            for heap, wave in () if is_left else zip(ahead[1:], waves[1:], strict=True):
                carried.raise_least(heap, wave, outcome.best, lambda number: False, ROOM)
            if is_first and not is_left:
                climb(min([lowest, outcome.closed_floor, *heads(1), *(each.bound for each in aside)]))
                leave_out(1)

        # Plain schedules come first, and what is found there excludes most of the others. Those are all bounded before
        # any is worked on, so that a limit of time leaves none of them with a floor for a bound. Proofs come last, and
        # what only serves to find better plans, where none was found for long: it is left then, or for later.
        leave_out(0)
        for start, stop in ((0, 1), (1, len(waves))):
            if start:
                look_ahead()
                if is_left:
                    return lowest, aside, min(heads(1), default=0.0)
            bounded: list[Bounding] = []
            for number, wave in enumerate(waves[start:stop], start):
                elsewhere = [lowest, *heads(number + 1), *(each.own for each in bounded)]
                elsewhere += [each.bound for each in aside]
                bounded.append(
                    Bounding(self.context, outcome, wave, ahead[number], min(elsewhere), carried, rivals=number > 0)
                )
                sweep(crew, bounded[-1], sys.maxsize, clock.end, clock.stops, clock.heard)
                aside += bounded[-1].worked
            if not start and clock.left() < SHORT:
                look_ahead()  # what a limit cuts has to be bounded before plans are looked for
            if bounded:
                is_last, elsewhere = stop == len(waves), [lowest, *heads(stop)]
                stuck = min([known, *(each.stuck for each in bounded)])
                is_elsewhere = is_last and outcome.closed_floor < outcome.best * (1 - NEARS[0])
                waits = is_elsewhere and math.isfinite(self.context.time_limit)
                advancing = Advancing(
                    self.context,
                    outcome,
                    bounded,
                    min(elsewhere),
                    aside,
                    proves=is_last and not waits,
                    patience=PATIENCE,
                    stuck=min(stuck, outcome.closed_floor) if is_elsewhere else stuck,
                    near=NEARS[0] if waits else 0.0,
                    until=math.inf if start or not ahead[1:] else clock.at(SHORT),
                )
                sweep(crew, advancing, sys.maxsize, clock.end, clock.stops, clock.heard)
                lowest, aside = min(lowest, advancing.proven), advancing.aside
        return lowest, aside, 0.0

    def _go_on(
        self,
        crew: Crew,
        outcome: Outcome,
        clock: Clock,
        lowest: float,
        aside: list[Aside],
        *,
        near: float = 0.0,
        patience: float = math.inf,
        stuck: float = math.inf,
    ) -> tuple[float, list[Aside]]:
        """Work on what was put aside until a limit of time; arguments and result as of `_search` and `Advancing`."""
        advancing = Advancing(
            self.context, outcome, (), lowest, aside, near=near, proves=not near, patience=patience, stuck=stuck
        )
        sweep(crew, advancing, sys.maxsize, clock.end, clock.stops, clock.heard)
        return min(lowest, advancing.proven), advancing.aside

    def _left(self, space: list[Configuration], outcome: Outcome) -> list[Configuration]:
        """Return the configurations that need to be looked at; the others count as excluded."""
        left = [each for each in space if self.context.may_fit(each)]
        outcome.pruned += len(space) - len(left)
        return left

    def _least(self, space: list[Configuration]) -> float:
        """Return the least floor in seconds; infinity if there is none."""
        return min((self.context.least((each,)) for each in space), default=math.inf)


def _with(lowest: float, aside: Sequence[Aside]) -> float:
    """Return the least bound, what was put aside included."""
    return min([lowest, *(each.bound for each in aside)])


def _waves(known: list[Family]) -> list[list[Family]]:
    """Return the families by the kind of their schedules, which are bounded one kind after the other.

    Those with plain schedules come first: fewer of the others can be excluded by their bounds. What is known of joint
    backwards says something about split ones, and what is known of one stage per group about several.
    """
    kinds: dict[tuple[bool, ...], list[Family]] = {}
    for family in known:
        schedule, chunks = family[0].schedule, family[0].num_chunks
        kinds.setdefault((schedule not in PLAIN, SCHEDULES[schedule].splits, chunks > 1), []).append(family)
    return [kinds[kind] for kind in sorted(kinds)]


def search(
    space: Sequence[Configuration], context: SearchContext, hire: Callable[[SearchContext], Crew] = Alone
) -> Outcome:
    """Search the space and return the candidates found, best first, and the bound.

    Raises:
        WorkerError: If processes of the search keep dying.
    """
    return BranchAndBound(context, hire).run(space)
