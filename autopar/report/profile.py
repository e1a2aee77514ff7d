"""A profile as text: how many events there are of which type, what they take, and how far repeats lie apart."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from autopar.escaping import one_line
from autopar.events import Database, Entry
from autopar.report.text import format_entries, format_table
from autopar.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sized

_SHOWN = 5
"""Events that could not be timed, with the reason."""


class Extracted(Protocol):
    """Distinct events of plans."""

    naive: int

    @property
    def tasks(self) -> "Sized":
        """The distinct events."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of distinct events by type."""


def format_extraction(found: Extracted) -> str:
    """Return how many distinct events there are, against the instructions of unrolled steps."""
    by_type = ", ".join(f"{count} {name}" for name, count in sorted(found.counts.items()))
    text = f"{len(found.tasks)} distinct events: {by_type or 'none'}"
    if found.naive:
        text += f"; {found.naive:,} instructions if every device, layer and microbatch counts"
    return text + "\n"


def format_profile(database: Database, folder: Path | None) -> str:
    """Return what a profile holds."""
    kinds: defaultdict[str, list[Entry]] = defaultdict(list)
    for name, entry in database.events.items():
        kinds[name.partition("-")[0]].append(entry)
    rows = []
    for kind, entries in sorted(kinds.items()):
        found = [one for entry in entries for one in entry.measured]
        rows.append(
            (
                kind,
                str(len(entries)),
                str(sum(bool(entry.measured) for entry in entries)),
                format_seconds(median(one.seconds for one in found)) if found else "-",
                f"{100 * median(one.spread for one in found):.0f} %" if found else "-",
            )
        )
    machines = "; ".join(
        f"{machine.device}, {machine.backend}, {machine.threads} thread{'s' if machine.threads > 1 else ''} per rank"
        for machine in database.machines.values()
    )
    problems = [(name, entry.problem) for name, entry in database.events.items() if entry.problem]
    lines = [
        *format_entries(
            [
                ("profile", one_line(str(folder)) if folder is not None else "-"),
                ("measured on", one_line(machines) or "-"),
                ("precision", ", ".join(database.precisions) or "-"),
            ]
        ),
        "",
        *format_table(("type", "events", "measured", "median", "spread"), rows),
    ]
    for name, problem in problems[:_SHOWN]:
        lines.append(f"not timed: {name}: {one_line(problem)}")
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more")
    return "\n".join(lines) + "\n"
