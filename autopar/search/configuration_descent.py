"""Better plans near the best one: on configurations like its own, as long as these have better ones.

Where most of memory is taken, the configurations with the least bounds are those that need most of it. They are worked
on for long, and have no plan that fits; those that have one are found next to others that do. So it is with schedules
that are not plain where bounds are far below the best plan, of which hundreds may have less than the best one has.
"""

import math
import time
from collections.abc import Sequence

from autopar.bounds.transfer import Carried
from autopar.configuration import Configuration, Family
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.context import SearchContext
from autopar.search.frontier import Series
from autopar.search.outcome import Outcome, stage_of
from autopar.search.reporting import tell
from autopar.search.tasks import Finding, Piece, Work

REACH = 2.0
"""Factors of two that configurations which are looked at are away from the best one."""

TURNS = 3
"""Pieces of work on each beyond the first, as long as it may have a better plan."""

FAILURES, PROBED = 12, 4
"""Configurations in a row that were worked on and have no better plan before it ends, and how many of those that were
all bounded before."""


def distance(first: Configuration, second: Configuration) -> float:
    """Return how far two configurations are apart: factors of two that devices and microbatches are moved by.

    >>> from autopar.sharding import Mesh
    >>> first = Configuration(2, Mesh.of(outer=2, inner=4), 8, "1f1b", 1)
    >>> distance(first, Configuration(4, Mesh.of(inner=4), 8, "1f1b", 1))
    1.0
    >>> distance(first, Configuration(2, Mesh.of(outer=4, inner=2), 16, "1f1b", 1))
    2.0
    """
    pairs = zip(_devices(first), _devices(second), strict=True)
    moved = sum(abs(math.log2(one / other)) for one, other in pairs) / 2
    return moved + abs(math.log2(first.num_microbatches / second.num_microbatches))


def _devices(configuration: Configuration) -> tuple[int, int, int]:
    """Return by what the devices are divided: stages, rows of a mesh, and devices of a row."""
    *rows, inner = configuration.mesh.shape
    return configuration.num_stages, math.prod(rows), inner


class Climbing(Series):
    """Works on the configurations nearest to that of the best plan.

    Args:
        search: What it is part of.
        outcome: What is known, and is added to.
        space: The configurations.
        carried: What follows from what is known of others; added to.
        until: When to end, on the monotonic clock.
        lowest: No plan of the whole space has a lower objective, in seconds.
        probes: Whether all that are near are bounded before any is worked on, those with the best plans first: where
            bounding finds most plans.
    """

    lead = 0

    def __init__(
        self,
        search: SearchContext,
        outcome: Outcome,
        space: Sequence[Family],
        carried: Carried,
        until: float = math.inf,
        lowest: float = 0.0,
        *,
        probes: bool = False,
    ) -> None:
        self._search, self._outcome, self._space, self._carried = search, outcome, space, carried
        self._until, self._lowest, self._probes = until, lowest, probes
        self._found: dict[int, float] = {}
        self._bounds: dict[int, float] = {}
        self._turns = dict.fromkeys(range(len(space)), 0)
        self._over: set[int] = set()
        self._busy: dict[int, int] = {}
        self._failures = 0

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        is_over = self._failures >= (PROBED if self._probes else FAILURES) or time.monotonic() > self._until
        return is_over or (not self._busy and self._next() is None)

    def piece(self, index: int) -> Piece | None:
        """See `Series.piece`: there is nothing to do while others are at what could be done."""
        number = self._next()
        if number is None:
            return None
        self._busy[index] = number
        work = Work.ADVANCE if self._turns[number] else Work.BOUND
        family, bound = self._space[number], self._bound(number)
        hint = self._carried.hint(family)
        return Piece(work, family, bound, self._outcome.best, hasty=math.inf, hint=hint)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        if finding is None:
            return
        number, best = self._busy.pop(index), self._outcome.best
        family, is_new = self._space[number], not self._turns[number]
        if is_new:
            self._carried.learn(family, finding)
        self._turns[number] += 1
        if finding.best is not None:
            self._found[number] = finding.best.objective
        self._bounds[number] = max(finding.bound, self._bound(number))
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(family, self._bounds[number], stage_of(finding, is_new=is_new))
        if finding.is_final and not is_new:
            self._outcome.solved += len(family)
        is_better = self._outcome.best < best * (1 - OPTIMALITY_TOLERANCE)
        if finding.is_final or finding.is_settled or self._turns[number] > TURNS:
            self._over.add(number)
        if is_better:
            self._failures = 0
        elif number in self._over and not is_new:
            self._failures += 1
        tell(self._search, self._outcome, "climb", len(self._over), len(self._space), self._lowest, str(family[0]))

    def _bound(self, number: int) -> float:
        """Return what is known of a configuration, which may be known from others."""
        if number not in self._bounds:
            family = self._space[number]
            self._bounds[number] = max(self._search.least(family), self._carried.rough(family))
        return self._bounds[number]

    def _next(self) -> int | None:
        """Return the configuration to work on next; None if there is none in reach."""
        best = self._outcome.candidates[0].configuration
        at_work = set(self._busy.values())
        apart = {number: distance(self._space[number][0], best) for number in self._turns.keys() - self._over - at_work}
        near = sorted((self._order(number, away), number) for number, away in apart.items() if away <= REACH)
        return next((number for _, number in near if self._bound(number) < self._outcome.best), None)

    def _order(self, number: int, away: float) -> tuple[float, ...]:
        """Return which configurations come first, given how far they are away: those with the least numbers."""
        turns = self._turns[number]
        if self._probes:
            return (turns > 0, self._found.get(number, math.inf), away)
        return (away, -turns)
