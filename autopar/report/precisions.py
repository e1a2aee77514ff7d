"""A plan in several precisions, as text."""

from collections.abc import Sequence

from autopar.precisions import Effect
from autopar.report.text import format_table, heading
from autopar.units import format_bytes, format_seconds


def format_precisions(effects: Sequence[Effect]) -> str:
    """Return a table of a plan in several precisions, the first of which is its own."""
    own = effects[0]
    rows = [
        (
            each.precision,
            format_seconds(each.step_seconds),
            f"{own.step_seconds / each.step_seconds:.2f} x",
            format_bytes(each.peak_bytes) + ("" if each.fits else ", does not fit"),
        )
        for each in effects
    ]
    lines = heading("This plan in other precisions")
    lines += format_table(("precision", "step", "speed", "peak"), rows)
    lines.append(
        "Numerics are yours to choose: nothing was changed. --precision NAME searches for the best plan of one."
    )
    return "\n".join(lines) + "\n"
