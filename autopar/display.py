"""Progress on standard error: bars on a terminal, a line now and then in a log file."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, isfinite

import click

from autopar.progress import TROUBLE, Progress, ProgressCallback
from autopar.units import format_seconds

_PHASES = {
    "import": "read the model",
    "discover": "find sharding rules",
    "usual": "estimate usual plans while kernels compile",
    "degrees": "estimate plans by degrees",
    "compile": "compile kernels, this first time only",
    "search": "prepare the search",
    "begin": "find first plans",
    "descent": "improve plans",
    "bound": "bound configurations",
    "stages": "stages with meshes of their own",
    "runners-up": "find other good plans",
    "simulate": "simulate the best plans",
    "grid": "grid search, to compare",
}
"""Phases of a search in a user's words; other phases are called as they are."""

_LOG_INTERVAL = 10.0  # seconds between lines of a log file within one phase


@contextmanager
def show_progress() -> Iterator[ProgressCallback]:
    """Yield a callback that shows progress until the context ends.

    On a terminal and in a notebook as bars, with the best plan and the bound so far; in a log file as lines.

        with autopar.show_progress() as progress:
            plan = autopar.solve("zoo:gpt2", gpus=8, progress=progress)
    """
    if sys.stderr.isatty() or _in_notebook():
        with _bars() as callback:
            yield callback
    else:
        yield LogProgress().update


def _in_notebook() -> bool:
    """Whether this runs in a notebook's kernel, which has a display of its own."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def format_incumbent(progress: Progress) -> str:
    """Return best objective, bound and gap so far; "" before the first plan.

    >>> format_incumbent(Progress("solve", incumbent=0.02, bound=0.019))
    'best 20 ms, bound 19 ms, gap 5.0 %'
    """
    if not isfinite(progress.incumbent):
        return ""
    if progress.bound <= 0:
        return f"best {format_seconds(progress.incumbent)}"
    gap = max(0.0, 1 - progress.bound / progress.incumbent) if progress.incumbent > 0 else 0.0
    return f"best {format_seconds(progress.incumbent)}, bound {format_seconds(progress.bound)}, gap {100 * gap:.1f} %"


def _named(phase: str) -> str:
    return _PHASES.get(phase, phase)


class LogProgress:
    """Writes a line when a phase begins, and at most every ten seconds within one."""

    def __init__(self) -> None:
        self._phase = ""
        self._last = -inf

    def update(self, progress: Progress) -> None:
        """Show one step forward."""
        now = time.monotonic()
        if progress.phase == self._phase and now - self._last < _LOG_INTERVAL:
            return
        self._phase, self._last = progress.phase, now
        count = f" {progress.done}/{progress.total}" if progress.total else ""
        rest = ", ".join(text for text in (format_incumbent(progress), progress.detail) if text)
        click.echo(f"autopar: {_named(progress.phase)}{count}{': ' if rest else ''}{rest}", err=True)


@contextmanager
def _bars() -> Iterator[ProgressCallback]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=Console(stderr=not _in_notebook()), transient=True) as bars:

        def update(progress: Progress) -> None:
            if progress.phase == TROUBLE:  # it stays when the bars go
                bars.console.print(f"{TROUBLE}: {progress.detail}", markup=False, highlight=False)
                return
            if progress.phase not in tasks:
                for known in tasks.values():  # phases follow each other: a new one ends those before it
                    bars.update(known, total=1, completed=1)
                    bars.stop_task(known)
                tasks[progress.phase] = bars.add_task(_named(progress.phase), total=None, state="")
            state = format_incumbent(progress) or progress.detail
            bars.update(tasks[progress.phase], completed=progress.done, total=progress.total or None, state=state)

        yield update
