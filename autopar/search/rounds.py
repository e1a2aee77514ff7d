"""The order in which pipelines of one mesh and one size of microbatches are bounded by spreading blocks.

All are bounded by the first cuts. Then more is found out of the one with the least bound, until that rises no more; of
others it is still looked up what the choices known allow, for they may have the best plan.
"""

import math
from collections.abc import Callable

from autopar.schedule.spread import Order, Rest
from autopar.search.space import Configuration
from autopar.search.spreader import Spreaded, Spreader

NEAR = 2e-3
"""A bound as near to what the choices known allow, relative, is not raised further."""

RISE, IDLE = 1e-3, 2
"""Nor is one that, like what these allow, has moved by no more than a share of itself so many times in a row."""


class Rounds:
    """Knows how far each pipeline is.

    Args:
        spreader: Spreads blocks.
        tasks: By pipeline the order of its tasks, and what there is besides blocks; not kept.
        enough: A bound that need not be raised further.

    Attributes:
        spreader: The same.
    """

    def __init__(self, spreader: Spreader, tasks: dict[Configuration, tuple[Order, Rest]], enough: float) -> None:
        self.spreader = spreader
        bounded = {own: spreader.bound(*task, enough) for own, task in tasks.items()}
        self._bounds = {own: found.seconds for own, found in bounded.items()}
        self._cases = {own: found.case for own, found in bounded.items()}
        self._values = dict.fromkeys(tasks, math.inf)
        self._idle = 0

    @property
    def bound(self) -> float:
        """No plan of any of them has a lower objective, in seconds."""
        return min(self._bounds.values())

    def next(self, enough: float) -> Configuration | None:
        """Return the pipeline to find out more of; None if nothing more helps.

        Args:
            enough: A bound that need not be raised further.
        """
        if self.bound >= enough:
            return None
        if self._idle < IDLE:
            return min(self._bounds, key=self._bounds.__getitem__)
        left = (own for own, value in self._values.items() if math.isinf(value) and self._bounds[own] < enough)
        return next(left, None)

    def spread(
        self, own: Configuration, order: Order, rest: Rest, enough: float, should_stop: Callable[[], bool]
    ) -> Spreaded:
        """Spread the blocks of a pipeline, raise its bound, and return what the choices known allow.

        Args:
            own: The pipeline.
            order: The order of its tasks.
            rest: What there is besides blocks.
            enough: A bound that need not be raised further.
            should_stop: Whether to leave its bound as it is.
        """
        found, known = self.spreader.spread(order, rest, self._cases[own]), self._bounds[own]
        if found.cuts and not should_stop():
            seconds, self._cases[own] = self.spreader.bound(order, rest, enough)
            self._bounds[own] = max(known, seconds)
        rises = self._bounds[own] > known * (1 + RISE) or found.value < self._values[own] * (1 - RISE)
        self._values[own] = min(self._values[own], found.value)
        is_done = not found.cuts or self._bounds[own] >= found.value * (1 - NEAR)
        if self._idle < IDLE:
            self._idle = IDLE if is_done else 0 if rises else self._idle + 1
        return found
