"""A simulated step as text: where the time of every stage goes, and when its memory is fullest."""

from collections.abc import Sequence
from math import fsum
from typing import TYPE_CHECKING

from autopar.plan import Remark
from autopar.report.text import format_entries, format_share, format_table
from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:  # the simulator is not needed to read its result
    from autopar.simulate.flat import Devices
    from autopar.simulate.path import PathStep
    from autopar.simulate.timeline import Timeline


_TASK_WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
"""Passes of a microbatch by the letter that names of tasks begin with."""


def format_band(timeline: "Timeline") -> str:
    """Return the step time, with the band that the error of calibration gives."""
    text = format_seconds(timeline.step_seconds)
    if timeline.band is None:
        return f"{text} (software stack not calibrated)"
    low, high = timeline.band
    return f"{text}, between {format_seconds(low)} and {format_seconds(high)} (mean error of the stack's calibration)"


def format_flat(devices: "Devices", timeline: "Timeline") -> str:
    """Return what simulating every device apart has given, beside the step of stages."""
    count = len(devices.ends)
    apart = devices.step_seconds / timeline.step_seconds - 1
    entries = [
        ("every device apart", f"{format_seconds(devices.step_seconds)} on {count} devices, {apart:+.4%}"),
        (
            "computing",
            f"{format_share(devices.compute.min(), devices.step_seconds)} of the step at least, "
            f"{format_share(devices.compute.max(), devices.step_seconds)} at most",
        ),
    ]
    return "\n".join(format_entries(entries)) + "\n"


def format_path(path: "Sequence[PathStep]", limit: int = 20) -> str:
    """Return the critical path, what is alike in it added up, longest first."""
    total = fsum(piece.seconds for piece in path)
    parts: dict[tuple[str, str, str], list[float]] = {}
    for piece in path:
        block = str(piece.block) if piece.block >= 0 else ""
        parts.setdefault((piece.what, block, piece.kind), []).append(piece.seconds)
    order = sorted(parts.items(), key=lambda item: -fsum(item[1]))
    rows = [
        (*key, str(len(found)), format_seconds(fsum(found)), format_share(fsum(found), total))
        for key, found in order[:limit]
    ]
    stages = len({piece.stage for piece in path})
    lines = [
        f"critical path: {format_seconds(total)} in {len(path)} pieces on {stages} of the stages",
        "",
        *format_table(("what", "block kind", "by", "times", "seconds", "share"), rows),
    ]
    if len(order) > limit:
        rest = fsum(seconds for _, found in order[limit:] for seconds in found)
        lines.append(f"and {len(order) - limit} more that take {format_seconds(rest)}")
    return "\n".join(lines) + "\n"


def format_host(timeline: "Timeline") -> list[tuple[str, str]]:
    """Return the entry that says what lies in host memory, if anything does."""
    host = timeline.host
    if host is None:
        return []
    verb = "fits" if host.fits else "does not fit"
    return [("host memory", f"{verb}: {format_bytes(host.bytes)} of {format_bytes(host.usable)} on the fullest host")]


def _copies(timeline: "Timeline") -> list[str]:
    """Return the table of copies to and from host memory, if there are any."""
    if timeline.host is None:
        return []
    rows = [
        (
            str(stage.index),
            format_seconds(stage.host_link_seconds),
            format_seconds(stage.copy_seconds),
            format_bytes(stage.host_bytes),
        )
        for stage in timeline.stages
    ]
    return ["", *format_table((timeline.unit, "host link", "waited for", "in host memory"), rows)]


def format_timeline(timeline: "Timeline", remarks: Sequence[Remark] = ()) -> str:
    """Return the report of a simulated step. The times of a stage, waits for its host included, add up to the step.

    Args:
        timeline: The step.
        remarks: What is unusual about it.
    """
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
            format_seconds(stage.delay_seconds),
        )
        for stage in timeline.stages
    ]
    fullest = [
        (
            str(stage.index),
            format_share(stage.busy_seconds, step),
            format_bytes(stage.memory.bytes),
            format_task(stage.memory.during),
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
        *format_entries(
            [
                ("step time", format_band(timeline)),
                ("peak", format_bytes(timeline.peak_bytes)),
                *format_host(timeline),
                *(("note", remark.text) for remark in remarks),
            ]
        ),
        "",
        *format_table(
            (timeline.unit, "compute", "collective", "wait", "bubble", "gradients", "update", "gather", "delay"),
            parts,
        ),
        "",
        *format_table((timeline.unit, "busy", "peak", "during", "at"), fullest),
        "",
        *format_table((timeline.unit, *map(str, categories)), memory),
        *_copies(timeline),
    ]
    return "\n".join(lines) + "\n"


def format_task(name: str) -> str:
    """Return a task of a timeline in words.

    >>> format_task("F0"), format_task("B3.1"), format_task("update")
    ('forward 0', 'backward 3, chunk 1', 'update')
    """
    word = _TASK_WORDS.get(name[:1], "")
    microbatch, _, chunk = name[1:].partition(".")
    if not word or not microbatch.isdigit():
        return name
    return f"{word} {microbatch}" + (f", chunk {chunk}" if chunk else "")
