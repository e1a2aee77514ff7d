"""Comparisons as text: one table on the terminal, a Markdown file for docs/benchmarks/."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from autopar.bench.conditions import Conditions
from autopar.bench.records import Comparison, PlanFigures, Result
from autopar.plan import write_atomically
from autopar.report.summary import WHY_STOPPED, describe_job, describe_model
from autopar.report.text import format_entries, format_table, heading
from autopar.units import format_bytes, format_seconds

TABLE_WIDTH = 100
SAME = 0.05
"""Percent below which two step times are called equal: what the table shows."""

_HEADER = ("method", "step", "objective", "bound", "gap", "MFU", "peak", "search", "solved", "stopped")
_SHORT = {"exhausted": "done"}


def format_comparison(comparison: Comparison) -> str:
    """Return the table of a comparison for a terminal of 100 columns, with the plans and the verdict."""
    results = comparison.results
    lines = [describe_model(comparison), describe_job(comparison), ""]
    lines += format_table(_HEADER, [_cells(result) for result in results], TABLE_WIDTH)
    lines += ["", *format_entries([(result.method, _plan(result)) for result in results], TABLE_WIDTH)]
    lines += ["", *format_entries([("verdict", verdict(comparison))], TABLE_WIDTH)]
    lines += heading("Time and memory of our search")
    lines += format_table(("phase", "time", "peak memory"), _phases(comparison.ours), TABLE_WIDTH)
    return "\n".join(lines) + "\n"


def verdict(comparison: Comparison) -> str:
    """Return in one sentence how our plan compares with the best of grid search, both simulated."""
    speedup = comparison.speedup
    if speedup is None:
        grid = comparison.grid
        if comparison.ours.best is None:
            return "no plan of ours fits" + (", but one of grid search does" if grid is not None and grid.best else "")
        return "grid search was not run" if grid is None else "grid search finds no plan"
    change = 100 * (1 / speedup - 1)
    if abs(change) < SAME:
        return "ours takes as long per step as the best of grid search, simulated"
    more_or_less = "more" if change > 0 else "less"
    return f"ours takes {abs(change):.1f} % {more_or_less} time per step than the best of grid search, simulated"


def format_markdown(comparisons: Sequence[Comparison], conditions: Conditions) -> str:
    """Return the page of docs/benchmarks/ about comparisons of one model.

    Raises:
        ValueError: If there is nothing to report.
    """
    if not comparisons:
        raise ValueError("a page needs at least one comparison")
    first = comparisons[0]
    lines = [f"# {first.model.name} on {_cluster(first)}, {conditions.day.isoformat()}", ""]
    lines += _conditions(comparisons, conditions)
    for comparison in comparisons:
        lines += ["", f"## {comparison.job.gpus} GPUs", ""]
        lines += [f"{describe_model(comparison)}: {describe_job(comparison)}.", ""]
        lines += markdown_table(_HEADER, [_cells(result) for result in comparison.results])
        lines += ["", f"{verdict(comparison).capitalize()}.", "", "Best plans by simulated step time:", ""]
        lines += markdown_table(("method", "#", "step", "objective", "MFU", "peak", "plan"), _ranking(comparison))
        lines += ["", "Phases of our search:", ""]
        lines += markdown_table(("phase", "time", "peak memory"), _phases(comparison.ours))
    return "\n".join(lines) + "\n"


def write_pages(
    comparisons: Sequence[Comparison], conditions: Conditions, folder: Path, name: str | None = None
) -> list[Path]:
    """Write comparisons of one model and cluster as Markdown and as JSON, and return the files.

    Args:
        comparisons: What to write.
        conditions: How they were run.
        folder: Where to.
        name: Name of the files without suffix; None for `<model>_<cluster>_<date>`.

    Raises:
        PlanError: If the folder cannot be written to.
    """
    first = comparisons[0]
    stem = name or f"{first.model.name}_{_cluster(first)}_{conditions.day.isoformat()}"
    page, data = folder / f"{stem}.md", folder / f"{stem}.json"
    write_atomically(page, format_markdown(comparisons, conditions).encode())
    record = {"conditions": conditions, "comparisons": list(comparisons)}
    write_atomically(data, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return [page, data]


def condition_lines(conditions: Conditions) -> list[str]:
    """Return how something was run, as items of a list in Markdown."""
    memory = f", {format_bytes(conditions.memory)} of memory" if conditions.memory else ""
    return [
        f"- command: `{conditions.command}`",
        f"- searched on: {conditions.cpu}, {conditions.cores} cores{memory}, {conditions.system}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in conditions.versions.items())}",
    ]


def _conditions(comparisons: Sequence[Comparison], conditions: Conditions) -> list[str]:
    limit = comparisons[0].time_limit
    return [
        *condition_lines(conditions),
        f"- time limit of each method: {'none' if limit is None else format_seconds(limit)}; "
        "seed: none, nothing is drawn at random",
        "- step, MFU and peak are simulated; objective and bound are by the planner's formula; "
        "search is wall time on the machine above",
        "- grid search has the same space, prices, stage boundaries and simulator; it proves no bound",
    ]


def _cluster(comparison: Comparison) -> str:
    return str(comparison.job.cluster.get("name", "cluster"))


def _cells(result: Result) -> tuple[str, ...]:
    best, gap = result.best, result.gap
    figures = (
        ("-", "-") if best is None else (format_seconds(best.step_seconds), format_seconds(best.objective)),
        ("-", "-") if gap is None else (format_seconds(result.bound), f"{100 * gap:.1f} %"),
        ("-", "-") if best is None else (f"{100 * best.mfu:.1f} %", format_bytes(best.peak_bytes)),
    )
    return (
        result.method,
        *(cell for pair in figures for cell in pair),
        format_seconds(result.search_seconds),
        f"{result.solved}/{result.configurations}",
        _SHORT.get(result.termination, result.termination),
    )


def _plan(result: Result) -> str:
    return result.best.summary if result.best is not None else f"none: {result.note or WHY_STOPPED[result.termination]}"


def _phases(result: Result) -> list[tuple[str, ...]]:
    return [(phase.name, format_seconds(phase.seconds), format_bytes(phase.peak_bytes)) for phase in result.phases]


def _ranking(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (result.method, *_rank(number, plan))
        for result in comparison.results
        for number, plan in enumerate(result.plans, start=1)
    ]


def _rank(number: int, plan: PlanFigures) -> tuple[str, ...]:
    return (
        str(number),
        format_seconds(plan.step_seconds),
        format_seconds(plan.objective),
        f"{100 * plan.mfu:.1f} %",
        format_bytes(plan.peak_bytes),
        plan.summary,
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [_markdown_row(header), _markdown_row(["---"] * len(header)), *(_markdown_row(row) for row in rows)]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
