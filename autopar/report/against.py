"""A simulated step beside a measured one, as text."""

from autopar.report.text import format_change, format_entries, format_table
from autopar.simulate.comparison import Comparison
from autopar.units import format_seconds


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
    return "\n".join([*format_entries(entries), "", *format_table(header, rows)]) + "\n"
