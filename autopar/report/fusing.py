"""Buckets of gradients compared, as text."""

from typing import TYPE_CHECKING

from autopar.report.text import format_change, format_entries, format_table
from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autopar.fusion import Comparison
    from autopar.plan import Plan

_MOST = 12
"""Buckets that are listed."""


def format_fusion(plan: "Plan", found: "Comparison") -> str:
    """Return the report of `autopar fuse`: before and after, the bound, other ways, and the buckets in time."""
    ours, uniform = found.found.found, found.found.uniform
    before, after = uniform.step_seconds, ours.step_seconds
    lines = format_entries(
        [
            ("plan", plan.summary),
            ("step time", f"{format_seconds(after)}, {format_change(after, before)} against the uniform rule"),
            (
                "exposed gradients",
                f"{format_seconds(ours.exposed_seconds)}, {format_seconds(uniform.exposed_seconds)} before",
            ),
            ("full overlap", f"no buckets make a step shorter than {format_seconds(found.found.bound)}"),
            ("found in", format_seconds(found.seconds)),
            *(
                []
                if found.found.is_worth_it
                else [("note", "the gain is below 0.1 %: the plan keeps the uniform rule")]
            ),
        ]
    )
    rows = [(way.name, way.timed) for way in found.ways] + [("ours: cut for this plan", ours)]
    table = format_table(
        ("buckets", "number", "step", "exposed", "over bound"),
        [
            (
                name,
                f"{timed.num_buckets:,}",
                format_seconds(timed.step_seconds),
                format_seconds(timed.exposed_seconds),
                format_change(timed.step_seconds, found.found.bound),
            )
            for name, timed in rows
        ],
    )
    listed = format_table(
        ("bucket", "size", "ready", "starts", "ends"),
        [
            (own.name, format_bytes(own.nbytes), *map(format_seconds, (own.ready, own.start, own.end)))
            for own in found.buckets[-_MOST:]
        ],
    )
    more = f", the last {_MOST} of {len(found.buckets)}" if len(found.buckets) > _MOST else ""
    title = f"Buckets of the last backward{more}; compute ends at {format_seconds(found.compute_end)}"
    return "\n".join([*lines, "", *table, "", title, "", *listed]) + "\n"
