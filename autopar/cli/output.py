"""The standard streams of the program, when they cannot be written to: a closed pipe, a full disk.

What goes to standard output is the answer: that it did not arrive ends the program. What goes to standard error is
progress and notices, which are not worth a search that goes on: there they are dropped.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from autopar.errors import JobError


class OutputClosedError(Exception):
    """Nobody reads standard output any more, as after `| head -1`."""


class Answers(io.TextIOWrapper):
    """Standard output."""

    def write(self, text: str, /) -> int:
        """Write text.

        Raises:
            OutputClosedError: If its reader has gone.
            JobError: If it cannot be written.
        """
        with _told():
            return super().write(text)

    def flush(self) -> None:
        """Write what is buffered; errors as of `write`."""
        with _told():
            super().flush()


class Notices(io.TextIOWrapper):
    """Standard error."""

    def write(self, text: str, /) -> int:
        """Write text, or drop it."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        with suppress(OSError):
            super().flush()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise OutputClosedError from None
    except OSError as error:
        raise JobError(
            f"cannot write standard output: {error.strerror}", hint="see where it is redirected to"
        ) from None


def open_streams() -> None:
    """Have the standard streams of this program write as said above."""
    for name, kind in (("stdout", Answers), ("stderr", Notices)):
        stream: TextIO = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            buffered = stream.line_buffering
            setattr(sys, name, kind(stream.buffer, stream.encoding, stream.errors, line_buffering=buffered))


def abandon_output() -> None:
    """Send what is still buffered for standard output nowhere, so that the end of the program does not try again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
