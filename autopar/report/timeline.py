"""A simulated step as text: where the time of every stage goes, and when its memory is fullest."""

from typing import TYPE_CHECKING

from autopar.report.text import format_entries, format_share, format_table
from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:  # the simulator is not needed to read its result
    from autopar.simulate.timeline import Timeline


def format_timeline(timeline: "Timeline") -> str:
    """Return the report of a simulated step. The times of a stage add up to the step."""
    step = timeline.step_seconds
    parts = [
        (
            str(stage.index),
            format_seconds(stage.compute_seconds),
            format_seconds(stage.collective_seconds),
            format_seconds(stage.wait_seconds),
            format_seconds(stage.bubble_seconds),
            format_seconds(stage.gradient_seconds),
            format_seconds(stage.update_seconds),
            format_seconds(stage.gather_seconds),
        )
        for stage in timeline.stages
    ]
    fullest = [
        (
            str(stage.index),
            format_share(stage.busy_seconds, step),
            format_bytes(stage.memory.bytes),
            stage.memory.during,
            format_seconds(stage.memory.start),
        )
        for stage in timeline.stages
    ]
    sizes = [dict(stage.memory.breakdown) for stage in timeline.stages]
    categories = [category for category in sizes[0] if any(stage[category] for stage in sizes)]
    memory = [
        (str(stage.index), *(format_bytes(size[category]) for category in categories))
        for stage, size in zip(timeline.stages, sizes, strict=True)
    ]
    lines = [
        *format_entries([("step time", format_seconds(step)), ("peak", format_bytes(timeline.peak_bytes))]),
        "",
        *format_table(
            ("stage", "compute", "collective", "wait", "bubble", "gradients", "update", "gather"),
            parts,
        ),
        "",
        *format_table(("stage", "busy", "peak", "during", "at"), fullest),
        "",
        *format_table(("stage", *map(str, categories)), memory),
    ]
    return "\n".join(lines) + "\n"
