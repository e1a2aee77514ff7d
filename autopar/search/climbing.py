"""Plans where memory is short: from the best one to configurations like it, as long as these have better ones.

Where most of memory is taken, the configurations with the least bounds are those that need most of it. They are worked
on for long, and have no plan that fits; those that have one are found next to others that do.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.carried import Carried
from autopar.search.outcome import Outcome, Stage
from autopar.search.pieces import Finding, Piece, Work
from autopar.search.space import Configuration, Family
from autopar.search.sweep import Series

if TYPE_CHECKING:  # it knows this module
    from autopar.search.planner import Search

REACH = 2.0
"""Factors of two that configurations which are looked at are away from the best one."""

TURNS = 3
"""Pieces of work on each beyond the first, as long as it may have a better plan."""

FAILURES = 12
"""Configurations in a row that have no better plan before it ends."""


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
    """

    careful = True

    def __init__(
        self, search: "Search", outcome: Outcome, space: Sequence[Family], carried: Carried, until: float = math.inf
    ) -> None:
        self._search, self._outcome, self._space, self._carried = search, outcome, space, carried
        self._until = until
        self._bounds: dict[int, float] = {}
        self._turns = dict.fromkeys(range(len(space)), 0)
        self._over: set[int] = set()
        self._busy: dict[int, int] = {}
        self._failures = 0

    def ends(self, index: int) -> bool:
        """See `Series.ends`."""
        is_over = self._failures >= FAILURES or time.monotonic() > self._until
        return is_over or (not self._busy and self._next() is None)

    def piece(self, index: int) -> Piece | None:
        """See `Series.piece`: there is nothing to do while others are at what could be done."""
        number = self._next()
        if number is None:
            return None
        self._busy[index] = number
        work = Work.ADVANCE if self._turns[number] else Work.BOUND
        family, bound = self._space[number], self._bounds.get(number, 0.0)
        hint = self._carried.hint(family)
        return Piece(work, family, bound, self._outcome.best, hasty=math.inf, hint=hint)

    def take(self, index: int, finding: Finding | None) -> None:
        """See `Series.take`."""
        if finding is None:
            return
        number, best = self._busy.pop(index), self._outcome.best
        family = self._space[number]
        if not self._turns[number]:
            self._carried.learn(family, finding)
        self._turns[number] += 1
        self._bounds[number] = max(finding.bound, self._bounds.get(number, 0.0))
        self._outcome.take(finding, self._search.keep)
        self._outcome.note(family, self._bounds[number], Stage.NEW if finding.is_final else Stage.OPEN)
        is_better = self._outcome.best < best * (1 - OPTIMALITY_TOLERANCE)
        if finding.is_final or finding.is_settled or self._turns[number] > TURNS:
            self._over.add(number)
        if is_better:
            self._failures = 0
        elif number in self._over:
            self._failures += 1
        self._search.tell(self._outcome, "begin", len(self._over), len(self._space), 0.0, str(family[0]))

    def _next(self) -> int | None:
        """Return the configuration to work on next; None if there is none in reach."""
        best = self._outcome.candidates[0].configuration
        at_work = set(self._busy.values())
        waiting = (
            (distance(family[0], best), -self._turns[number], number)
            for number, family in enumerate(self._space)
            if number not in self._over and number not in at_work and self._bounds.get(number, 0.0) < self._outcome.best
        )
        found = min(waiting, default=(math.inf, 0, 0))
        return found[2] if found[0] <= REACH else None
