"""What tactics did, as text."""

from collections import Counter
from typing import TYPE_CHECKING

from autopar.plan import Plan
from autopar.report.summary import headline
from autopar.report.text import format_entries, format_table, heading, wrap
from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:  # the engine is not needed to read its result
    from autopar.partitioning import Partition
    from autopar.tactics.draft import Step

_MOST = 6
"""Names listed before the rest is counted."""
_MOST_EVENTS = 3
"""The same of conflicts, and of what was refused."""


def format_partition(partition: "Partition") -> str:
    """Return the report of a schedule of tactics: what it comes to, and what each tactic added."""
    plan = partition.plan
    lines = [*headline(plan), "", *format_entries(_verdict(plan, partition))]
    for number, step in enumerate(partition.steps, start=1):
        before = partition.steps[number - 2] if number > 1 else None
        lines += ["", *format_step(number, step, before)]
    if partition.steps:
        lines += _unsplit(partition.steps[-1])
    return "\n".join(lines) + "\n"


def _verdict(plan: Plan, partition: "Partition") -> list[tuple[str, str]]:
    limit, peak = plan.job.memory_limit, partition.timeline.peak_bytes
    fits = "fits" if peak <= limit else "does not fit"
    seconds = partition.timeline.step_seconds
    loop = f", {format_seconds(seconds * partition.trips)} for {partition.trips} trips" if partition.trips > 1 else ""
    return [
        ("plan", plan.summary),
        ("mesh of a stage", str(plan.device_mesh)),
        ("step time", format_seconds(seconds) + loop),
        ("memory", f"{fits}: peak {format_bytes(peak)} of {format_bytes(limit)}"),
    ]


def format_step(number: int, step: "Step", before: "Step | None") -> list[str]:
    """Return what a tactic did.

    Args:
        number: Its place in the schedule, from 1.
        step: What it did.
        before: What the one before it did.
    """
    lines = wrap(f"{number}. {step.tactic}", 80, "", "   ")
    entries = [
        ("step time", f"{format_seconds(step.seconds)}{_from(before, 'seconds')}"),
        ("memory", f"{format_bytes(step.peak_bytes)} per device{_from(before, 'peak_bytes')}"),
    ]
    if step.split:
        places = Counter((axis, dim) for _, axis, dim in step.split)
        reached = ", ".join(f"{count} over {axis} along dim {dim}" for (axis, dim), count in sorted(places.items()))
        entries.append(("split", f"{len(step.split)} distinct values: {reached}"))
    lines += ["   " + line for line in format_entries(entries)]
    for what, items in (("conflict", step.conflicts), ("refused", step.refused)):
        for item in items[:_MOST_EVENTS]:
            lines += wrap(f"{what}: {item}", 80, "   ", "     ")
        if len(items) > _MOST_EVENTS:
            lines.append(f"   {what}: {len(items) - _MOST_EVENTS} more")
    if before is not None and step.traffic == before.traffic:
        return lines
    known = {(item.collective, item.axis): item.count for item in before.traffic} if before is not None else {}
    rows = []
    for entry in step.traffic:
        added = entry.count - known.get((entry.collective, entry.axis), 0)
        rows.append((str(entry.collective), entry.axis, f"{entry.count:,}", f"{added:+,}", format_bytes(entry.bytes)))
    if rows:
        table = format_table(("collective", "axis", "count", "added", "bytes on a device"), rows)
        lines += ["   " + line for line in table]
    return lines


def _from(before: "Step | None", name: str) -> str:
    if before is None:
        return ""
    old = getattr(before, name)
    return f", before {format_seconds(old) if name == 'seconds' else format_bytes(old)}"


def _unsplit(step: "Step") -> list[str]:
    """Return which parameters still lie whole, by reason."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for item in step.unsplit:
        by_reason.setdefault((item.axis, item.reason), []).append(item.value)
    if not by_reason:
        return []
    lines = heading("Whole on every device of an axis")
    for (axis, reason), names in by_reason.items():
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        lines += wrap(f"{axis}: {reason}: {', '.join(names[:_MOST])}{more}", 80, "", "  ")
    return lines
