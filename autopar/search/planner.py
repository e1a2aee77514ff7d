"""The search over hybrids: per configuration the best placements, stage boundaries and recompute, with bounds.

1. Configurations are bounded in the order of their floors (`floor.py`), without memory limits, which also finds most
   plans that fit anyway (`attempt.py`).
2. The configuration with the lowest bound is worked on, a piece at a time, until none is below the best plan.
3. Configurations on meshes of three axes are opened if the best plan on others is `WEAK` times as slow as their least
   floor. Else there is little to gain, and they take twice as long as all others.
4. If further plans are wanted, the best of those akin to no better one are looked for (`runners_up.py`).

All is done in pieces, by this process or others; the answer is the same whoever does them (`sweep.py`).

The reported bound is the least over all configurations, searched or not.
"""

import heapq
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.cost import CostModel
from autopar.discover import Rules
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.data_major import is_data_major
from autopar.formulate.fold import Folded
from autopar.formulate.recipes import BatchDims
from autopar.formulate.tables import Tables
from autopar.problem import OPTIMALITY_TOLERANCE, Problem
from autopar.progress import Progress, ProgressCallback, StopCallback, never, silent
from autopar.search.attempt import OVERTIME_SECONDS, Attempt
from autopar.search.crew import Alone, Crew
from autopar.search.floor import Floor
from autopar.search.history import History
from autopar.search.outcome import Outcome, Stage
from autopar.search.pieces import Finding, Piece, Work
from autopar.search.runners_up import RunnersUp
from autopar.search.space import PLAIN, Configuration, Family, families, first_tries
from autopar.search.submeshes import Unequal
from autopar.search.sweep import Series, sweep
from autopar.search.unequal import search_unequal
from autopar.solvers import Solver

KEEP_WITHIN = 1.05
"""Configurations that are not excluded up to this factor of the best plan are bounded further, for the runners-up."""

TRIES_WORSE = 2
"""Numbers of stages in a row that give no better plan before the search for a first one ends."""

WEAK = 1.15
"""Meshes of three axes are opened if the best plan on others is at least this much slower than their least floor."""

FAR, HURRIES = 1.25, 6
"""While the best plan is so much slower than a configuration's bound, a plan is looked for there before the other
configurations are bounded, until so many times none was found."""


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """What a search works on.

    Attributes:
        folded: Returns the folded graph for a number of samples per microbatch.
        rules: Returns the discovered strategies of a folded graph.
        costs: Cost model.
        solver: Solver of placement problems.
        floor: Floor under step times.
        global_batch: Samples per step.
        memory_limit: Bytes per device.
        keep: Number of candidates wanted.
        time_limit: Seconds.
        progress: Told after every configuration.
        should_stop: Polled.
        on_problem: Given every placement problem that is solved, but those with a price on memory.
        seed: Of whatever the solver draws at random.
        before: Seconds that have passed since the job was asked for.
        batch_dims: For solvers that follow recipes: the batch dim of every value.
        constraints: What else plans have to keep to.
        host_room: Bytes of host memory per device.
        hire: Returns who does the work.
        unequal: Stages with meshes of their own; None if there are none.
        floors: Floor under step times on each group of equal nodes.
    """

    folded: Callable[[int], Folded]
    rules: Callable[[Folded], Rules]
    costs: CostModel
    solver: Solver
    floor: Floor
    global_batch: int
    memory_limit: float
    keep: int
    time_limit: float
    progress: ProgressCallback
    should_stop: StopCallback
    on_problem: Callable[[Problem], None] | None = None
    seed: int = 0
    before: float = 0.0
    batch_dims: BatchDims | None = None
    constraints: Constraints = FREE
    host_room: float = math.inf
    hire: Callable[["Search"], Crew] = Alone
    unequal: Unequal | None = None
    floors: tuple[Floor, ...] = ()

    def run(self, space: list[Configuration]) -> Outcome:
        """Search the space and return the candidates found, best first, and the bound.

        Raises:
            WorkerError: If processes of the search keep dying.
        """
        outcome = Outcome(history=History(self.before), hosted=self.constraints.hosted)
        fewer = self._left([each for each in space if not is_data_major(each.mesh)], outcome)
        more = [each for each in space if is_data_major(each.mesh)]
        outcome.closed_floor = self._least(more)
        clock = _Clock(self, outcome)
        with self.hire(self) as crew:
            waves = _waves(families(fewer))
            beginning = _Beginning(self, outcome, waves[0] if waves else [])
            sweep(crew, beginning, beginning.count, clock.end, clock.stops, clock.heard)
            lowest = self._search(crew, waves, outcome, clock)
            if more and not outcome.stopped and outcome.best >= WEAK * outcome.closed_floor:
                outcome.closed_floor = math.inf
                opened = _waves(families(self._left(more, outcome)))
                lowest = self._search(crew, opened, outcome, clock, lowest)
                waves += opened
            else:
                outcome.closed = tuple(more)
            lowest = min(lowest, search_unequal(self, outcome, clock.stops, clock.end))
            outcome.complete = lowest
            if self.keep > 1 and not outcome.stopped and outcome.candidates:
                known = [family for wave in waves for family in wave]
                outcome.complete = self._runners_up(crew, known, outcome, clock, lowest)
        best = outcome.best
        outcome.bound = min(best, lowest)
        outcome.history.note(best, outcome.bound)
        return outcome

    def _runners_up(self, crew: Crew, known: list[Family], outcome: Outcome, clock: "_Clock", lowest: float) -> float:
        """Look for the best of the plans akin to no better one; return up to where none is missing."""
        others = RunnersUp(self, outcome, known, lowest)
        sweep(crew, others, sys.maxsize, clock.end, clock.stops, clock.heard)
        if outcome.stopped == "time limit":
            outcome.stopped = ""  # the space was searched
        return others.complete

    def _search(
        self, crew: Crew, waves: list[list[Family]], outcome: Outcome, clock: "_Clock", known: float = math.inf
    ) -> float:
        """Bound configurations and work on them, wave by wave; return the least of their bounds, and of what is known.

        Args:
            crew: Who does the work.
            waves: The configurations.
            outcome: Added to.
            clock: When to stop.
            known: The least bound of configurations that were worked on before.
        """
        floors = [min(self.least(family) for family in wave) for wave in waves]
        lowest = known
        for number, wave in enumerate(waves):
            elsewhere = min([lowest, *floors[number + 1 :]])
            bounding = _Bounding(self, outcome, wave, elsewhere, rivals=number > 0)
            sweep(crew, bounding, len(wave), clock.end, clock.stops, clock.heard)
            advancing = _Advancing(self, outcome, bounding)
            sweep(crew, advancing, sys.maxsize, clock.end, clock.stops, clock.heard)
            lowest = min(lowest, advancing.own)
        return lowest

    def _left(self, space: list[Configuration], outcome: Outcome) -> list[Configuration]:
        """Return the configurations that need to be looked at; the others count as excluded."""
        left = [each for each in space if self.least_bytes(each) <= self.memory_limit]
        outcome.pruned += len(space) - len(left)
        return left

    def _least(self, space: list[Configuration]) -> float:
        """Return the least floor in seconds; infinity if there is none."""
        return min((self.least((each,)) for each in space), default=math.inf)

    def least_bytes(self, configuration: Configuration) -> float:
        """Return what a device of a configuration holds at least, whatever the plan."""
        return self.floor.bytes(configuration, offload=self.constraints.hosts_optimizer)

    def portable(self) -> "Search":
        """Return what a worker elsewhere needs of the search: it tells and asks nobody, and hires nobody."""
        return replace(self, progress=silent, should_stop=never, on_problem=None, hire=Alone)

    def tables(self, family: Family) -> Tables | None:
        """Return the decisions of configurations that differ in the schedule; None if constraints exclude them."""
        folded = self.folded(self.global_batch // family[0].num_microbatches)
        return self.constraints.tables(folded, self.rules(folded), family[0].mesh, self.costs)

    def attempt(self, family: Family, end: float) -> Attempt | None:
        """Return the work on configurations that differ in the schedule; None if constraints exclude them."""
        tables = self.tables(family)
        return None if tables is None else Attempt(self, family, tables, end)

    def least(self, family: Family) -> float:
        """Return the floor of a family, in seconds."""
        fixed = self.costs.stack["step_seconds"]
        return min(self.floor.seconds(configuration, self.global_batch) for configuration in family) + fixed

    def tell(self, outcome: Outcome, phase: str, done: int, total: int, lowest: float, detail: str) -> None:
        """Tell what is known, and take it down."""
        lowest = min(lowest, outcome.closed_floor)
        outcome.history.note(outcome.best, lowest)
        self.progress(Progress(phase, done, total, outcome.best, min(outcome.best, lowest), detail))

    def threshold(self, outcome: Outcome) -> float:
        """Return the step time above which a configuration interests nobody."""
        if not outcome.candidates:
            return math.inf
        distinct = outcome.distinct()
        last = distinct[self.keep - 1].objective if len(distinct) >= self.keep else math.inf
        return min(KEEP_WITHIN * outcome.best, last)


def _waves(known: list[Family]) -> list[list[Family]]:
    """Return the families with plain schedules, and the others, which are worked on when the best of those is known.

    Fewer of the others can be excluded by their floors and bounds, which assume that their bubble is filled.
    """
    plain = [family for family in known if family[0].schedule in PLAIN]
    others = [family for family in known if family[0].schedule not in PLAIN]
    return [wave for wave in (plain, others) if wave]


class _Clock:
    """When a search ends."""

    def __init__(self, search: Search, outcome: Outcome) -> None:
        self._search, self._outcome = search, outcome
        self._end = time.monotonic() + search.time_limit
        self._first = math.inf

    def end(self) -> float:
        """Return when a piece that is started now should be done."""
        return self._end

    def stops(self) -> bool:
        """Whether to stop, and why, noted in the outcome; a limit waits for the first plan, but not for long."""
        if self._search.should_stop():
            self._outcome.stopped = "interrupted"
        elif time.monotonic() > self._end + (OVERTIME_SECONDS if math.isinf(self._first) else 0.0):
            self._outcome.stopped = "time limit"
        return bool(self._outcome.stopped)

    def heard(self, finding: Finding) -> None:
        """Take down what was found, before it is its turn."""
        if finding.best is not None:
            self._first = min(self._first, finding.best.objective)
            self._outcome.history.note(finding.best.objective, 0.0)


class _Beginning(Series):
    """Looks for a plan to begin with: to have one to return, and one to beat.

    What is tried is what is set up by hand: nodes for tensor parallelism, one sample per row of devices, and as few
    stages as fit, or more as long as that is faster.

    Attributes:
        count: How many tries there may be.
    """

    def __init__(self, search: Search, outcome: Outcome, space: list[Family]) -> None:
        self._search, self._outcome = search, outcome
        family_of = {family[0]: family for family in space}
        tries = first_tries([*family_of], search.global_batch, search.least_bytes)
        self._tries = [family_of[first] for first in tries]
        self.count = len(self._tries)
        self._best, self._worse = math.inf, 0

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        return self._worse >= TRIES_WORSE

    def piece(self, index: int) -> Piece:
        """See `Series.piece`."""
        return Piece(Work.BOUND, self._tries[index], 0.0, math.inf, urgent=True)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        assert finding is not None, "every try is made"
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(self._tries[index], finding.bound, Stage.NEW if finding.is_final else Stage.OPEN)
        if finding.best is not None:
            self._worse = 0 if finding.best.objective < self._best else self._worse + 1
            self._best = min(self._best, finding.best.objective)
        self._search.tell(self._outcome, "begin", index + 1, self.count, 0.0, str(self._tries[index][0]))


class _Bounding(Series):
    """Bounds configurations in the order of their floors.

    Attributes:
        pending: Bound and number of the configurations that could be of interest.
        closed: The least bound of the others.
        elsewhere: The least bound of configurations that are not worked on now.
        rivals: Whether only what could be better than the best plan is of interest, and no runner-up.
    """

    def __init__(
        self, search: Search, outcome: Outcome, space: list[Family], elsewhere: float, *, rivals: bool
    ) -> None:
        self.pending: list[tuple[float, int]] = []
        self.closed = math.inf
        self.space, self.elsewhere, self.rivals = space, elsewhere, rivals
        self._search, self._outcome = search, outcome
        self._floors = sorted((search.least(family), number) for number, family in enumerate(space))
        self._cutoffs: dict[int, float] = {}
        self._left = set(range(len(space)))
        self._failures = 0

    def threshold(self) -> float:
        """Return the step time above which a configuration is of no interest."""
        if self.rivals and self._outcome.candidates:
            return self._outcome.best * (1 - OPTIMALITY_TOLERANCE)
        return self._search.threshold(self._outcome)

    @property
    def unseen(self) -> float:
        """The least floor of those that were not looked at and might have been."""
        return min((self._floors[index][0] for index in self._left), default=math.inf)

    def ends(self, index: int) -> bool:
        """See `Series.ends`: floors ascend, so that all after one too slow are at least as slow."""
        least = self._floors[index][0]
        if least < self.threshold():
            return False
        self.closed = min(self.closed, least)
        self._outcome.pruned += sum(len(self.space[number]) for _, number in self._floors[index:])
        self._left -= set(range(index, len(self._floors)))
        return True

    def piece(self, index: int) -> Piece:
        """See `Series.piece`."""
        least, number = self._floors[index]
        self._cutoffs[index] = self.threshold()
        hasty = self._outcome.best / FAR if self._failures < HURRIES else 0.0
        urgent = not self._outcome.candidates
        return Piece(Work.BOUND, self.space[number], least, self._cutoffs[index], urgent=urgent, hasty=hasty)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        assert finding is not None, "no configuration is needless before the end"
        self._failures += finding.best is None and finding.bound * FAR < self._outcome.best
        least, number = self._floors[index]
        self._left.discard(index)
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(self.space[number], finding.bound, Stage.NEW if finding.is_final else Stage.OPEN)
        if finding.bound >= self._cutoffs[index]:
            self.closed = min(self.closed, finding.bound)
            self._outcome.pruned += len(self.space[number])
        else:
            self.pending.append((finding.bound, number))
        lowest = min([least, self.closed, self.elsewhere, *(bound for bound, _ in self.pending)])
        self._search.tell(self._outcome, "bound", index + 1, len(self._floors), lowest, str(self.space[number][0]))


class _Advancing(Series):
    """Works on the configuration with the lowest bound that nobody works on, until none can have the best plan."""

    def __init__(self, search: Search, outcome: Outcome, bounding: _Bounding) -> None:
        self._search, self._outcome, self._space = search, outcome, bounding.space
        self._elsewhere, self._solved = bounding.elsewhere, outcome.solved
        self._others = min(bounding.closed, bounding.unseen)
        self._bounds = {number: bound for bound, number in bounding.pending}
        self._open = sorted(bounding.pending)
        self._chosen: dict[int, int] = {}
        self._busy: set[int] = set()
        self._worked: set[int] = set()

    @property
    def own(self) -> float:
        """No plan of these configurations has a lower objective, in seconds."""
        return min([self._others, *self._bounds.values()])

    @property
    def lowest(self) -> float:
        """No plan of the space has a lower objective, in seconds."""
        return min(self.own, self._elsewhere)

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        self._drop()
        return not self._open and not self._busy

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
        number = self._chosen.pop(index)
        self._busy.discard(number)
        self._bounds[number] = max(finding.bound, self._bounds[number])
        self._outcome.take(finding, self._search.keep)
        stage = Stage.DONE if finding.is_final else Stage.OPEN
        self._outcome.note(self._space[number], self._bounds[number], stage)
        if not finding.is_final:
            heapq.heappush(self._open, (self._bounds[number], number))
        own = sum(len(self._space[other]) for other in self._worked - self._busy)
        self._outcome.solved = self._solved + own
        detail = str(self._space[number][0])
        self._search.tell(self._outcome, "solve", len(self._worked), len(self._bounds), self.lowest, detail)

    def _drop(self) -> None:
        """Let go of the configurations that cannot have the best plan."""
        while self._open:
            bound, number = self._open[0]
            if self._is_rival(bound):
                return
            self._outcome.pruned += len(self._space[number]) * (number not in self._worked)
            heapq.heappop(self._open)

    def _is_rival(self, bound: float) -> bool:
        """Whether there may be a plan that is better than the best."""
        return bound < self._outcome.best * (1 - OPTIMALITY_TOLERANCE)
