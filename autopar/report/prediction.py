"""A plan stated by degrees as text: what it comes to, and whether it fits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.plan import Plan
from autopar.report.answer import format_commands
from autopar.report.summary import (
    assumptions,
    buckets,
    fullest_stage,
    headline,
    notes,
    occupied,
    price,
    spent,
    step_band,
    throughput,
)
from autopar.report.text import format_entries, format_table, heading
from autopar.report.timeline import format_host, format_timeline
from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:  # the simulator is not needed to read its result
    from autopar.simulate.timeline import Timeline


def format_prediction(
    plan: Plan, timeline: "Timeline", commands: Sequence[tuple[str, str]] = (), *, tables: bool = True
) -> str:
    """Return the report of a plan by degrees and its simulated step.

    Args:
        plan: The plan, simulated.
        timeline: Its step.
        commands: What to do next: commands, and what each is for.
        tables: Whether time and memory of every stage follow.
    """
    assert plan.simulated is not None, "a predicted plan is simulated"
    step = timeline.step_seconds
    _, fullest, limit = fullest_stage(plan, plan.simulated)
    over = sum(stage.peak > own for stage, own in zip(plan.simulated.stages, plan.stage_limits, strict=True))
    fits = f"fits: peak {format_bytes(fullest.peak)} of {format_bytes(limit)}"
    if over:
        fits = (
            f"does not fit: peak {format_bytes(fullest.peak)} is over the limit of {format_bytes(limit)} "
            f"on {over} of {len(timeline.stages)} {timeline.unit}s"
        )
    entries = [
        ("plan", plan.summary),
        ("step time", f"{format_seconds(step)}{step_band(plan, plan.simulated)}"),
        ("throughput", f"{throughput(plan, step)}, MFU {100 * plan.simulated.mfu:.1f} %"),
        *price(plan, plan.simulated),
        ("memory", fits),
        *occupied(plan, plan.simulated),
        *format_host(timeline),
        ("spent on", spent(plan.simulated)),
        *buckets(plan),
        *assumptions(plan),
        *notes(plan.simulated, without="fit"),  # the line above has it
    ]
    lines = [*headline(plan), "", *format_entries(entries), *format_commands(commands)]
    if not tables:
        return "\n".join(lines) + "\n"
    lines += heading("Stages")
    offloads = any(stage.offload for stage in plan.stages)
    lines += format_table(
        ("stage", "devices", "blocks", "recompute", *(("offload",) if offloads else ())),
        [
            (
                str(n),
                f"{s.devices[0]}-{s.devices[1] - 1}",
                f"{s.blocks[0]}-{s.blocks[1] - 1}",
                s.recompute,
                *((s.offload or "-",) if offloads else ()),
            )
            for n, s in enumerate(plan.apart.stages)
        ],
    )
    return "\n".join(lines) + "\n\n" + format_timeline(timeline)
