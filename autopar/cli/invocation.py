"""How and when this program was called."""

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

_STAT = Path("/proc/self/stat")
_START_FIELD = 19
"""Of /proc/PID/stat, counted after the program's name: clock ticks from boot to its begin (man 5 proc)."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One run of the command line.

    Attributes:
        arguments: What was typed after the program's name.
        began: When it began, on the monotonic clock.
    """

    arguments: tuple[str, ...]
    began: float

    @classmethod
    def of(cls, arguments: Sequence[str], *, is_program: bool) -> "Invocation":
        """Return a run that begins now or, if it is this whole program, began when its process did."""
        now = time.monotonic()
        return cls(tuple(arguments), now - _age() if is_program else now)


def typed_command(context: click.Context) -> str:
    """Return the command as it was typed, quoted for a shell; its path alone if it was not typed."""
    typed = context.obj.arguments if isinstance(context.obj, Invocation) else ()
    return shlex.join(("autopar", *typed)) if typed else context.command_path


def _age() -> float:
    """Return for how many seconds this process has been running; 0 where the system does not tell."""
    if not _STAT.exists():
        return 0.0
    after_name = _STAT.read_text().rpartition(")")[2].split()
    began = int(after_name[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
