"""Ctrl-C: the first one asks the search to stop with what it has, the second one ends the process."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = b"\ninterrupted: finishing with the best so far; once more aborts\n"
_SHOW_CURSOR = (
    b"\x1b[?25h"  # progress bars hide it, and a second signal ends the process before they could show it again
)
_STDERR = 2


class Interruption:
    """While entered, signals set a flag.

    The first signal restores what signals did by default, so that a second one ends the process even inside a library
    that never returns to Python.
    """

    def __init__(self) -> None:
        self._requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Whether somebody wants the search to end."""
        return self._requested

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        for known in _SIGNALS:
            signal.signal(known, signal.SIG_DFL)
        # os.write, because a handler may run while the stream's own lock is held
        os.write(_STDERR, (_SHOW_CURSOR if os.isatty(_STDERR) else b"") + _NOTICE)
