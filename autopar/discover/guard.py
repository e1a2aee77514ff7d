"""Runs of kernels that may crash, hang or end their process, inside a process that may die of them.

Searching for a rule is deterministic: the same op makes the same runs in the same order. So a run has a number, which
is announced in shared memory before it starts. Whoever watches the process knows the number if it dies, and has the
search done again with that run refused, which makes the candidate it belonged to a "no" and nothing else.
"""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from mmap import mmap
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from autopar.discover.rules import Rule
from autopar.discover.search import find_rule, no_rule
from autopar.discover.shrink import Proxy, shrink
from autopar.discover.sketch import Sketch
from autopar.errors import ExecutionError
from autopar.execute import Executor
from autopar.ir.graph import Attr
from autopar.progress import never

Proxies = tuple[Proxy, Proxy]

_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Shrinking:
    """The task to find the proxies of an op."""

    sketch: Sketch


@dataclass(frozen=True, slots=True)
class Searching:
    """The task to find the rule of an op on its proxies."""

    proxies: Proxies


Task = Shrinking | Searching


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process that ran kernels.

    Attributes:
        number: Number of the last run it started; 0 if it started none.
        cause: What ended it, in words that go with "a run".
        hung: Whether the run took too long.
    """

    number: int
    cause: str
    hung: bool = False


def new_board() -> mmap:
    """Return memory that forked processes share, for the number of the last run."""
    return mmap(-1, _NUMBER_BYTES)


def read_board(board: mmap) -> int:
    """Return the number of the last run that was announced."""
    return int.from_bytes(board[:], "little")


class Guard(Executor):
    """An executor that announces its runs, refuses some, and ends its process when one takes too long.

    Attributes:
        number: Number of the last run of the task.
    """

    def __init__(self, executor: Executor, board: mmap) -> None:
        """Guard an executor.

        Args:
            executor: What really runs ops.
            board: From `new_board`.
        """
        super().__init__()
        self.number = 0
        self._inner = executor
        self._board = board
        self._max_seconds = 0.0
        self._refused: Collection[int] = ()

    def begin(self, refused: Collection[int], max_seconds: float) -> None:
        """Start counting for a new task; see `perform`."""
        self._refused = refused
        self._max_seconds = max_seconds
        self._announce(0)

    def end(self) -> None:
        """End a task: the clock stops."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def run_kind(
        self,
        kind: str,
        attrs: tuple[tuple[str, Attr], ...],
        inputs: Sequence[NDArray[Any] | None],
        num_outputs: int,
        opset: int,
        name: str = "",
    ) -> tuple[NDArray[Any], ...]:
        """Run an op, see `Executor.run`.

        Raises:
            ExecutionError: Also if this run ended a process before.
            MemoryError: If there is no memory left for it; what follows would fail for the same reason.
        """
        self._announce(self.number + 1)
        if self.number in self._refused:
            raise ExecutionError(f"op {name!r} ({kind}) ended its process when it was run like that")
        try:
            return self._inner.run_kind(kind, attrs, inputs, num_outputs, opset, name)
        except ExecutionError as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from error
            raise

    def _announce(self, number: int) -> None:
        self.number = number
        self._board[:] = number.to_bytes(_NUMBER_BYTES, "little")
        # The default action of SIGALRM ends the process, even inside a kernel that never returns to Python.
        signal.setitimer(signal.ITIMER_REAL, self._max_seconds)


def perform(task: Task, guard: Guard, refused: Collection[int], stop: int | None, max_seconds: float) -> Proxies | Rule:
    """Do a task.

    Args:
        task: The task.
        guard: Runs the ops.
        refused: Numbers of runs that count as failed.
        stop: A search tries no more candidates from the run of this number on; None lets it finish.
        max_seconds: Within this time after the start of a run, the next one has to start.

    Returns:
        The proxies of an op, or its rule, also if it has no proxies.
    """
    start = perf_counter()
    guard.begin(refused, max_seconds)
    try:
        match task:
            case Shrinking(sketch):
                return shrink(sketch, guard) or no_rule(sketch)
            case Searching(proxies):
                should_stop = never if stop is None else (lambda: guard.number >= stop)
                rule = find_rule(proxies[0].sketch, proxies, guard, should_stop)
                shapes = tuple(dict.fromkeys(proxy.sketch.shapes for proxy in proxies))
                settings = proxies[0].sketch.settings
                return replace(rule, shapes=shapes, settings=settings, seconds=perf_counter() - start)
    finally:
        guard.end()
