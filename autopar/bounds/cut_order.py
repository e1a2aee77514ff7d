"""The order in which pipelines of one mesh and one size of microbatches are bounded by spreading blocks.

The first one, which has most stages per group, is bounded by cuts at prices of no memory, and, where that is not
enough, by some at usual prices of it, which all others have from the start. Large programs have these at once. Then
more is found out of the one with the least bound, until that rises no more, by its own cuts or by those of others; of
others it is still looked up what the choices known allow, for they may have the best plan.
"""

import math
from collections.abc import Callable, Sequence

from autopar.bounds.cut_lp import Order, Rest
from autopar.bounds.priced_cuts import Bounded, Spreaded, Spreader
from autopar.bounds.task_lp import Basis
from autopar.configuration import Configuration

NEAR = 2e-3
"""A bound as near to what the choices known allow, relative, is not raised further."""

RISE, IDLE = 1e-3, 2
"""Nor is one that, like what these allow, has moved by no more than a share of itself so many times in a row."""

SOON = 32
"""Stages of a pipeline whose program is solved sooner than the placement problems of two prices: with no more, it is
looked at after each level of memory prices whether others are needed."""

TaskOf = Callable[[Configuration], tuple[Order, Rest]]
"""Returns the order of the tasks of a pipeline, and what there is besides blocks."""


class Rounds:
    """Knows how far each pipeline is.

    Args:
        spreader: Spreads blocks.
        pipelines: The pipelines.
        task_of: Returns the order of the tasks of a pipeline, and what there is besides blocks.
        enough: A bound that need not be raised further.
        should_stop: Whether to leave bounds as they are.

    Attributes:
        spreader: The same.
    """

    def __init__(
        self,
        spreader: Spreader,
        pipelines: Sequence[Configuration],
        task_of: TaskOf,
        enough: float,
        should_stop: Callable[[], bool],
    ) -> None:
        self.spreader = spreader
        # The more stages there are, the lower is the bound, mostly: the others need not be bounded without memory.
        ordered = sorted(pipelines, key=lambda own: -own.num_chunks)
        self._bounds = dict.fromkeys(ordered, 0.0)
        self._known: dict[Configuration, Bounded] = {}
        self._starts: dict[Configuration, Basis | None] = dict.fromkeys(ordered)
        self._values = dict.fromkeys(ordered, math.inf)
        self._idle = 0
        self._levels: list[float] | None = None
        self.next(task_of, enough, should_stop)

    @property
    def bound(self) -> float:
        """No plan of any of them has a lower objective, in seconds."""
        return min(self._bounds.values())

    def next(self, task_of: TaskOf, enough: float, should_stop: Callable[[], bool]) -> Configuration | None:
        """Return the pipeline to find out more of; None if nothing more helps.

        Cuts that were found for one pipeline may raise the bounds of others: those are looked at again where they are
        the least ones.

        Args:
            task_of: Returns the order of the tasks of a pipeline, and what there is besides blocks.
            enough: A bound that need not be raised further.
            should_stop: Whether to leave bounds as they are.
        """
        while not should_stop() and self.bound < enough:
            least = min(self._bounds, key=self._bounds.__getitem__)
            order, rest = task_of(least)
            if self._levels is None and order.num_stages > SOON:
                self._price_memory(order, rest, enough)  # a program without them takes as long as they do
            says_all = least in self._known and self._known[least].seen == self.spreader.num_cuts
            if says_all and self._levels == []:
                break
            if not says_all:
                known = self._bounds[least]
                self._raise(least, task_of, enough)
                self._idle = 0 if self._bounds[least] > known * (1 + RISE) else self._idle
            if self._levels != [] and self._bounds[least] < enough:
                self._price_memory(order, rest, enough)
        if self.bound >= enough:
            return None
        if self._idle < IDLE:
            return min(self._bounds, key=self._bounds.__getitem__)
        left = (own for own, value in self._values.items() if math.isinf(value) and self._bounds[own] < enough)
        return next(left, None)

    def spread(self, own: Configuration, task_of: TaskOf, enough: float, should_stop: Callable[[], bool]) -> Spreaded:
        """Spread the blocks of a pipeline, raise its bound, and return what the choices known allow.

        Args:
            own: The pipeline.
            task_of: Returns the order of the tasks of a pipeline, and what there is besides blocks.
            enough: A bound that need not be raised further.
            should_stop: Whether to leave its bound as it is.
        """
        if own not in self._known:
            self._raise(own, task_of, enough)
        found = self.spreader.spread(*task_of(own), self._known[own].case, self._starts[own])
        known, self._starts[own] = self._bounds[own], found.basis
        if found.cuts and not should_stop():
            self._raise(own, task_of, enough)
        rises = self._bounds[own] > known * (1 + RISE) or found.value < self._values[own] * (1 - RISE)
        self._values[own] = min(self._values[own], found.value)
        is_done = not found.cuts or self._bounds[own] >= found.value * (1 - NEAR)
        if self._idle < IDLE:
            self._idle = IDLE if is_done else 0 if rises else self._idle + 1
        return found

    def _price_memory(self, order: Order, rest: Rest, enough: float) -> None:
        """Add cuts at usual prices of memory: at those of one level where a program takes less time than these."""
        self._levels = self.spreader.levels(order) if self._levels is None else self._levels
        count = 1 if order.num_stages <= SOON else len(self._levels)
        self.spreader.price_memory(order, rest, self._levels[:count], enough)
        self._levels = self._levels[count:]

    def _raise(self, own: Configuration, task_of: TaskOf, enough: float) -> None:
        """Raise the bound of a pipeline by all cuts there are."""
        found = self._known[own] = self.spreader.bound(*task_of(own), enough, self._known.get(own))
        self._bounds[own] = max(self._bounds[own], found.seconds)
