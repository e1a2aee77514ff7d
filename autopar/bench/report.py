"""Comparisons as text: one table on the terminal, a Markdown file for docs/benchmarks/."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from autopar.bench.baselines import BASELINES
from autopar.bench.conditions import Conditions
from autopar.bench.records import Comparison, PlanFigures, Result
from autopar.bench.svg import Axis, Curve, chart
from autopar.report.summary import WHY_STOPPED, describe_job, describe_model, headline
from autopar.report.text import format_entries, format_table, heading
from autopar.units import format_bytes, format_seconds
from autopar.writing import write_atomically

TABLE_WIDTH = 100
SAME = 0.05
"""Percent below which two step times are called equal: what the table shows."""

_HEADER = ("method", "step", "to ours", "objective", "gap", "MFU", "peak", "search", "evaluated", "stopped")
_GAP = _HEADER.index("gap")
_PAGE_HEADER = (*_HEADER[:_GAP], "bound", *_HEADER[_GAP:])
_CASES = ("case", "ours", "best baseline", "its step", "to ours", "our gap", "our search", "its search")
NEAREST, FARTHEST = 0.1, 200.0
"""Percent above the least step time that plots tell apart; what is nearer or farther is on the edge."""
FAR_APART = 20.0
"""Time is logarithmic in plots if the last method ends after so many times what the first takes."""
_SHORT = {"exhausted": "done"}


def format_comparison(comparison: Comparison) -> str:
    """Return the table of a comparison for a terminal of 100 columns, with the plans and the verdict."""
    results = comparison.results
    lines = [*headline(comparison), ""]
    lines += format_table(_HEADER, [_cells(result, comparison) for result in results], TABLE_WIDTH)
    lines += ["", *format_entries([(result.method, _plan(result)) for result in results], TABLE_WIDTH)]
    lines += ["", *format_entries([("verdict", verdict(comparison))], TABLE_WIDTH)]
    lines += heading("Time and memory of our search")
    lines += format_table(("phase", "time", "peak memory"), _phases(comparison.ours), TABLE_WIDTH)
    return "\n".join(lines) + "\n"


def verdict(comparison: Comparison) -> str:
    """Return in one sentence how our plan compares with the best of all baselines, both simulated."""
    speedup, rival = comparison.speedup, comparison.rival
    if speedup is None or rival is None:
        if comparison.ours.best is None:
            return "no plan of ours fits" + (f", but one of {rival.method} does" if rival is not None else "")
        return "no baseline was run" if len(comparison.results) == 1 else "no baseline finds a plan"
    change = 100 * (1 / speedup - 1)
    best = f"the best baseline ({rival.method}), simulated"
    if abs(change) < SAME:
        return f"ours takes as long per step as {best}"
    return f"ours takes {abs(change):.1f} % {'more' if change > 0 else 'less'} time per step than {best}"


def format_markdown(
    comparisons: Sequence[Comparison], conditions: Conditions, images: Mapping[str, str] | None = None
) -> str:
    """Return a page about comparisons.

    Args:
        comparisons: What to report.
        conditions: How they were run.
        images: By the name of a case the image to show.

    Raises:
        ValueError: If there is nothing to report.
    """
    if not comparisons:
        raise ValueError("a page needs at least one comparison")
    lines = [
        f"# Our planner and the baselines, {conditions.day.isoformat()}",
        "",
        *_conditions(comparisons, conditions),
    ]
    lines += ["", *markdown_table(_CASES, [_case_cells(comparison) for comparison in comparisons])]
    caption = "Best step time so far of each method, by the formula, until it ends"
    for comparison in comparisons:
        name = case_name(comparison)
        lines += ["", f"## {name}", "", f"{describe_model(comparison)}: {describe_job(comparison)}.", ""]
        lines += markdown_table(_PAGE_HEADER, [_page_cells(result, comparison) for result in comparison.results])
        lines += ["", f"{verdict(comparison).capitalize()}."]
        lines += [f"{result.method.capitalize()}: {result.note}." for result in comparison.results if result.note]
        if name in (images or {}):
            lines += ["", f"![{caption}]({(images or {})[name]})"]
        lines += ["", "Best plans by simulated step time:", ""]
        lines += markdown_table(("method", "#", "step", "objective", "MFU", "peak", "plan"), _ranking(comparison))
        lines += ["", "Phases of our search:", ""]
        lines += markdown_table(("phase", "time", "peak memory"), _phases(comparison.ours))
    return "\n".join(lines) + "\n"


def case_name(comparison: Comparison) -> str:
    """Return what a case is called: model, devices and cluster."""
    return f"{comparison.model.name} on {comparison.job.gpus} x {_cluster(comparison)}"


def best_so_far(comparison: Comparison) -> bytes | None:
    """Return the plot of the least step time so far of each method against time, as SVG; None if none found a plan.

    Step times are shown by how far they are above the least of all. While a method searches they are by the formula;
    its last point is the end of its search, and what the simulator says of its best plan. Ours is thick.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for result in comparison.results:
        if result.best is not None:
            points = found[result.method] = [(moment.seconds, moment.objective) for moment in result.history]
            points.append((max(result.seconds, points[-1][0] if points else 0.0), result.best.step_seconds))
    if not found:
        return None
    least = min(seconds for points in found.values() for _, seconds in points)
    looks = {name: look for look, name in enumerate(dict.fromkeys((comparison.ours.method, *BASELINES, *found)))}
    drawn = [
        Curve(
            name,
            tuple((moment, 100 * (seconds / least - 1)) for moment, seconds in points),
            bold=name == comparison.ours.method,
            look=looks[name],
        )
        for name, points in found.items()
    ]
    ends = [curve.points[-1][0] for curve in drawn]
    most = max(y for curve in drawn for _, y in curve.points)
    edge = f", {FARTHEST:g} at the edge" if most > FARTHEST else ""
    up = Axis(f"% above the best of all (log){edge}", NEAREST, min(FARTHEST, max(10 * NEAREST, most)), log=True)
    label, end = "seconds since the request, import and discovery included", max(1.0, *ends)
    across = Axis(label, 0.0, end)
    if end > FAR_APART * min(ends):
        first = max(0.01, min(x for curve in drawn for x, _ in curve.points))
        across = Axis(f"{label} (log)", first, max(end, 2 * first), log=True)
    return chart(f"{case_name(comparison)}: best so far", drawn, across, up, steps=True)


def write_pages(
    comparisons: Sequence[Comparison], conditions: Conditions, folder: Path, name: str | None = None
) -> list[Path]:
    """Write comparisons as Markdown with images and as JSON with everything, and return the files.

    Args:
        comparisons: What to write.
        conditions: How they were run.
        folder: Where to.
        name: Name of the files without suffix, and of the folder of images; None for `planner_<date>`.

    Raises:
        PlanError: If the folder cannot be written to.
    """
    stem = name or f"planner_{conditions.day.isoformat()}"
    page, data = folder / f"{stem}.md", folder / f"{stem}.json"
    pictures = {case_name(comparison): best_so_far(comparison) for comparison in comparisons}
    images = {case: f"{stem}/{case.replace(' ', '_')}.svg" for case, picture in pictures.items() if picture is not None}
    for case, image in images.items():
        write_atomically(folder / image, pictures[case] or b"")
    write_atomically(page, format_markdown(comparisons, conditions, images).encode())
    record = {"conditions": conditions, "comparisons": list(comparisons)}
    write_atomically(data, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return [page, data, *(folder / image for image in images.values())]


def condition_lines(conditions: Conditions) -> list[str]:
    """Return how something was run, as items of a list in Markdown."""
    memory = f", {format_bytes(conditions.memory)} of memory" if conditions.memory else ""
    return [
        f"- command: `{conditions.command}`",
        f"- searched on: {conditions.cpu}, {conditions.cores} cores{memory}, {conditions.system}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in conditions.versions.items())}",
    ]


def _conditions(comparisons: Sequence[Comparison], conditions: Conditions) -> list[str]:
    limits = list(dict.fromkeys(comparison.time_limit for comparison in comparisons))
    allowed = ", ".join("none" if limit is None else format_seconds(limit) for limit in limits)
    return [
        *condition_lines(conditions),
        f"- time limit of each method: {allowed}; seed 0",
        "- step, MFU and peak are simulated; objective, bound and gap are by the planner's formula; search is wall "
        "time on the machine above; methods of one case run one after the other in one process, ours first",
        *(f"- {name}: {BASELINES[name].title}" for name in dict.fromkeys(_methods(comparisons)) if name in BASELINES),
    ]


def _methods(comparisons: Sequence[Comparison]) -> list[str]:
    return [result.method for comparison in comparisons for result in comparison.results]


def _cluster(comparison: Comparison) -> str:
    return str(comparison.job.cluster.get("name", "cluster"))


def _case_cells(comparison: Comparison) -> tuple[str, ...]:
    ours, rival, speedup = comparison.ours, comparison.rival, comparison.speedup
    return (
        case_name(comparison),
        "-" if ours.best is None else format_seconds(ours.best.step_seconds),
        "-" if rival is None else rival.method,
        "-" if rival is None or rival.best is None else format_seconds(rival.best.step_seconds),
        "-" if speedup is None else f"{100 * (speedup - 1):+.1f} %",
        "-" if ours.gap is None else f"{100 * ours.gap:.1f} %",
        format_seconds(ours.search_seconds),
        "-" if rival is None else format_seconds(rival.search_seconds),
    )


def _cells(result: Result, comparison: Comparison) -> tuple[str, ...]:
    best, gap, ours = result.best, result.gap, comparison.ours.best
    figures = ("-",) * 5
    if best is not None:
        other = "-" if ours is None else f"{100 * (best.step_seconds / ours.step_seconds - 1):+.1f} %"
        figures = (
            format_seconds(best.step_seconds),
            other,
            format_seconds(best.objective),
            "-" if gap is None else f"{100 * gap:.1f} %",
            f"{100 * best.mfu:.1f} %",
        )
    space = f"/{result.configurations}" if result.configurations else ""
    return (
        result.method,
        *figures,
        "-" if best is None else format_bytes(best.peak_bytes),
        format_seconds(result.search_seconds),
        f"{result.solved}{space}",
        _SHORT.get(result.termination, result.termination),
    )


def _page_cells(result: Result, comparison: Comparison) -> tuple[str, ...]:
    """Return the cells of a terminal, and the bound before the gap that it makes."""
    cells = _cells(result, comparison)
    bound = "-" if result.bound <= 0 else format_seconds(result.bound)
    return (*cells[:_GAP], bound, *cells[_GAP:])


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
