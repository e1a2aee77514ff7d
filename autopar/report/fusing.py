"""Buckets of gradients compared, as text."""

from typing import TYPE_CHECKING

from autopar.report.text import format_change, format_entries, format_table
from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autopar.fusion import Comparison, Joint
    from autopar.plan import Plan

_MOST = 12
"""Buckets that are listed."""


def format_fusion(plan: "Plan", found: "Comparison", joint: "Joint | None" = None) -> str:
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
    return "\n".join([*lines, *_joint(joint), "", *table, "", title, "", *listed]) + "\n"


def _joint(joint: "Joint | None") -> list[str]:
    """Return what fused ops bring, beside cut gradients."""
    if joint is None:
        return []
    ops = joint.ops
    rows = [
        ("as the stack does", joint.neither),
        ("gradients cut", joint.buckets_only),
        ("ops fused", joint.ops_only),
        ("both", joint.both),
    ]
    repeated = sum(len(group.again) for group in ops.groups)
    told = (
        f"{len(ops.groups)} kernels of several ops, {repeated} ops repeated in them; {format_seconds(ops.before)} of "
        f"kernels become {format_seconds(ops.after)}; {ops.evaluated:,} states priced"
    )
    table = format_table(
        ("fused", "step", "change"),
        [(name, format_seconds(step), format_change(step, joint.neither)) for name, step in rows],
    )
    return [*format_entries([("ops", told), ("kernels priced", joint.prices)]), "", *table]
