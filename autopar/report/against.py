"""A simulated step beside a measured one, as text."""

from autopar.report.text import format_change, format_entries, format_table
from autopar.simulate.comparison import Comparison
from autopar.units import format_seconds

_SHOWN = 8
"""Collectives of gradients that are shown one by one."""


def format_comparison(found: Comparison) -> str:
    """Return what a rank did beside what was simulated of its stage, term by term, and which terms are off."""
    rank = "of an unnamed rank" if found.rank is None else f"of rank {found.rank}"
    change = format_change(found.simulated_seconds, found.measured_seconds)
    off = [
        f"{row.name} ({format_change(row.simulated, row.measured)})" if row.measured and row.simulated
        else f"{row.name} ({'not simulated' if row.measured else 'not measured'})"
        for row in found.off
    ]  # fmt: skip
    entries = [
        ("measured", f"{format_seconds(found.measured_seconds)}, {rank}, mean of {found.steps} steps"),
        ("simulated", f"{format_seconds(found.simulated_seconds)}, {change}, stage {found.stage}"),
        ("off", ", ".join(off) or "no term by more than 10 % and 1 % of the step"),
    ]
    rows = [
        (
            row.name, format_seconds(row.simulated), format_seconds(row.measured),
            format_change(row.simulated, row.measured), "off" if row.is_off else "",
        )
        for row in found.rows
    ]  # fmt: skip
    header = ("term", "simulated", "measured", "change", "")
    lines = [*format_entries(entries), "", *format_table(header, rows)]
    if found.events:
        apart = sorted(found.events, key=lambda event: -event.apart)[:_SHOWN]
        own = [
            (event.name, *map(_span, (event.simulated, event.measured)), format_seconds(event.apart)) for event in apart
        ]
        title = f"the {len(own)} of {len(found.events)} collectives of gradients whose ends are furthest apart"
        lines += ["", title, *format_table(("collective", "simulated", "measured", "apart"), own)]
    return "\n".join(lines) + "\n"


def _span(span: tuple[float, float] | None) -> str:
    """Return start and length of a collective."""
    return "none" if span is None else f"{format_seconds(span[0])} + {format_seconds(span[1])}"
