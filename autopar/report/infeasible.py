"""Why nothing fits, as text for a terminal."""

from autopar.report.text import format_change, format_entries, format_items, format_table, heading
from autopar.sizing.records import Infeasibility
from autopar.units import format_bytes, format_seconds


def format_infeasibility(report: Infeasibility) -> str:
    """Return what is missing where, what excludes each other, and the ways out with their step times."""
    lacking = report.shortage
    parts = sorted(lacking.by_category.items(), key=lambda part: -part[1])
    tensors = (f"{held.name} ({held.what}) {format_bytes(held.bytes)}" for held in lacking.tensors)
    lines = [
        *heading("What is missing"),
        *format_entries(
            [
                ("least memory", lacking.plan),
                (
                    "needs",
                    f"{format_bytes(lacking.bytes)} on stage {lacking.stage}, over by {format_bytes(lacking.over)}",
                ),
                ("of", ", ".join(f"{name} {format_bytes(amount)}" for name, amount in parts)),
                *([("largest", "; ".join(tensors) + ", with their equals in the stage")] if lacking.tensors else []),
                ("proof", "proven: every configuration needs more" if report.proven else _unproven(report)),
            ]
        ),
        *heading("Conflicting requirements"),
        *format_items(report.conflict),
    ]
    if not report.complete:
        lines += ["", *_cut(report)]
    elif len(report.conflict) > 1:
        lines += ["", "Without any one of them a plan fits."]
    if report.relaxations:
        rows = [
            [
                way.what,
                str(way.gpus),
                ("" if way.searched else "< ") + format_seconds(way.step_seconds),
                format_change(way.step_seconds, report.relaxations[0].step_seconds) if index else "-",
                format_bytes(way.peak_bytes),
                way.plan,
            ]
            for index, way in enumerate(report.relaxations)
        ]
        lines += [
            *heading("Possible fixes, each simulated, least device time first"),
            *format_table(("change", "GPUs", "step", "against", "peak", "plan"), rows),
        ]
        if not all(way.searched for way in report.relaxations):
            lines += ["", "<: the search was cut short, there may be a faster plan."]
    return "\n".join(lines) + "\n"


def _cut(report: Infeasibility) -> tuple[str, str]:
    """Return what is not known since not all was tried."""
    why = "The analysis was interrupted" if report.interrupted else "The time limit ended the analysis"
    return (
        f"{why}: some of these requirements may not matter,",
        "others may conflict too, and there may be more fixes.",
    )


def _unproven(report: Infeasibility) -> str:
    floor, lacking = report.shortage.floor, report.shortage
    if floor > lacking.limit:
        return f"no configuration that was tried can need less than {format_bytes(floor)}"
    return f"none was found; no less than {format_bytes(floor)} would do"
