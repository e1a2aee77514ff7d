"""Where the seconds of a step go on one rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("forward", "backward", "collectives", "transfers", "reduce", "update", "gather")
"""In the order in which they are reported.

- `forward` and `backward` are compute; recomputed forwards and weight passes are part of the backward.
- `collectives` are those that compute waits for.
- `transfers` are values from other stages and the wait for these values, such as updated parameters of several stages.
- `reduce` is the part of the gradient reduction that remains after the last backward.
- `update` is the optimizer, `gather` the collectives of the update.
"""


class Clock:
    """Adds up seconds by phase; nested phases count for the innermost one only."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._stack: list[str] = []
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what happens inside for a phase."""
        self._book()
        self._stack.append(phase)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    def _book(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now
