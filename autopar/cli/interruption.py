"""Signals that ask for an end: Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed.

While there is nothing to keep, a signal raises KeyboardInterrupt: the command ends at once with one message, and what
it holds (processes, temporary folders) is let go on the way out. Once a search looks whether it is to stop, the first
signal asks it to stop with what it has, and the second one ends the process.
"""

import os
import signal
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from autopar.progress import Progress, ProgressCallback

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PREPARATION = ("import", "discover")
"""Phases that leave nothing but a cache; they look, too, whether they are to stop."""
_NOTICE = b"\ninterrupted: finishing with the best so far; once more aborts\n"
_SHOW_CURSOR = (
    b"\x1b[?25h"  # progress bars hide it, and a second signal ends the process before they could show it again
)
_STDERR = 2


def raise_on_signals() -> None:
    """Have every signal that asks for an end raise KeyboardInterrupt, but those that the caller ignores (`nohup`)."""
    for number in _heeded():
        signal.signal(number, signal.default_int_handler)


def _heeded() -> list[signal.Signals]:
    return [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


class Interruption:
    """While entered, signals set a flag once there is something to keep, and raise KeyboardInterrupt before.

    The first signal that sets the flag restores what signals do by default, so that a second one ends the process even
    inside a library that never returns to Python.

    Args:
        keeps: Whether there is something to keep from the beginning; else there is once `requested` has been called,
            for who calls it stops with what it has, unless a job is still being prepared.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._prepares = False
        self._requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Whether somebody wants the search to end."""
        self._keeps = self._keeps or not self._prepares
        return self._requested

    def watch(self, progress: ProgressCallback) -> ProgressCallback:
        """Return a callback that hands progress on, and knows by its phase that there is nothing to keep yet."""

        def tell(step: Progress) -> None:
            self._prepares = step.phase in _PREPARATION
            progress(step)

        return tell

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _heeded()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._keeps:
            raise KeyboardInterrupt
        self._requested = True
        for known in self._previous:
            signal.signal(known, signal.SIG_DFL)
        # os.write, because a handler may run while the stream's own lock is held
        with suppress(OSError):  # nobody may read it any more
            os.write(_STDERR, (_SHOW_CURSOR if os.isatty(_STDERR) else b"") + _NOTICE)
