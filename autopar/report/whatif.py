"""One model on several clusters and numbers of GPUs, as text."""

from autopar.plan import Remark
from autopar.report.text import bar, format_entries, format_items, format_share, format_table, heading
from autopar.scenarios import Cell, WhatIf
from autopar.units import format_bytes, format_count, format_seconds

_BAR = 30  # characters of the longest bar


def format_whatif(found: WhatIf) -> str:
    """Return a table, a plot of throughput, the best plan of each cell, and why others have none."""
    lines = [found.model]
    solved = [cell for cell in found.cells if cell.plan is not None]
    failed = [cell for cell in found.cells if cell.plan is None]
    if solved:
        priced = any(cell.price_per_million is not None for cell in solved)
        batches = {cell.plan.job.global_batch for cell in solved if cell.plan is not None}
        header = ["cluster", "GPUs", "step", f"{found.unit}s/s", "MFU", "peak", "gap"]
        header += [f"per M {found.unit}s"] if priced else []
        header += ["batch"] if len(batches) > 1 else []
        lines += ["", *format_table(header, [_row(cell, priced, len(batches) > 1) for cell in solved])]
        if len(batches) == 1:
            lines.append(f"global batch {batches.pop()}")
        lines += [*heading(f"{found.unit.capitalize()}s per second"), *_bars(solved)]
        lines += heading("Best plans")
        lines += format_entries([(_name(cell), _plan(cell)) for cell in solved])
        noted = [(_name(cell), remark.text) for cell in solved for remark in _remarks(cell)]
        lines += [*heading("Notes"), *format_entries(noted)] if noted else []
    if failed:
        lines += heading("Without a plan")
        lines += format_items(
            [f"{_name(cell)}: {cell.outcome}{f': {cell.why}' if cell.why else ''}" for cell in failed]
        )
    return "\n".join(lines) + "\n"


def whatif_table(found: WhatIf) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of a table of all cells, those without a plan with the reason."""
    unit = found.unit
    header = ("cluster", "GPUs", "step", f"{unit}s/s", "MFU", "peak", "gap", f"per M {unit}s", "batch", "plan")
    rows: list[tuple[str, ...]] = []
    for cell in found.cells:
        if cell.plan is not None:
            rows.append((*_row(cell, True, True), _plan(cell)))
        else:
            reason = f"{cell.outcome}{f': {cell.why}' if cell.why else ''}"
            rows.append((cell.cluster, str(cell.gpus), *["-"] * (len(header) - 3), reason))
    return header, rows


def _name(cell: Cell) -> str:
    return f"{cell.gpus} × {cell.cluster}"


def _row(cell: Cell, priced: bool, batches: bool) -> list[str]:
    plan = cell.plan
    assert plan is not None, "only cells with a plan have a row"
    assert plan.simulated is not None, "plans that were searched for are simulated"
    row = [
        cell.cluster,
        str(cell.gpus),
        format_seconds(cell.step_seconds or 0.0),
        format_count(cell.items_per_second or 0.0),
        f"{100 * plan.simulated.mfu:.1f} %",
        format_bytes(cell.peak_bytes or 0.0),
        "-" if plan.search is None else f"{100 * plan.search.gap:.1f} %",
    ]
    if priced:
        row.append("-" if cell.price_per_million is None else f"{cell.price_per_million:.4g}")
    if batches:
        row.append(str(plan.job.global_batch))
    return row


def _bars(cells: list[Cell]) -> list[str]:
    most = max(cell.items_per_second or 0.0 for cell in cells)
    rows = []
    for cell in cells:
        speed = cell.items_per_second or 0.0
        rows.append((_name(cell), bar(speed, most, _BAR), format_share(speed, most)))
    return format_table(("", "", "of the fastest"), rows)


def _remarks(cell: Cell) -> tuple[Remark, ...]:
    simulated = None if cell.plan is None else cell.plan.simulated
    return () if simulated is None else simulated.remarks


def _plan(cell: Cell) -> str:
    assert cell.plan is not None, "only cells with a plan are listed"
    search = cell.plan.search
    cut = search is not None and search.termination in ("time limit", "interrupted")
    return cell.plan.summary + ("; search cut off" if cut else "")
