"""Runs on selection problems as text: tables and a plot on the terminal, a page and its data for docs/benchmarks/."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar.bench.conditions import Conditions
from autopar.bench.plot import step_plot
from autopar.bench.problems import NEAR, SMALL_GAP, ProblemRun, problem_name, time_to, time_to_gap
from autopar.bench.report import condition_lines, markdown_table
from autopar.bench.svg import Axis, Curve, chart
from autopar.report.selection import STEPS_HEADER, selection_to_dict, step_rows
from autopar.report.text import format_table
from autopar.selection import Selection
from autopar.units import format_bytes
from autopar.writing import write_atomically

WIDTH = 100
_HEADER = (
    "solver",
    "cost",
    "bound",
    "gap",
    *(f"within {100 * near:g} %" for near in NEAR),
    "seconds",
    "memory",
    "stopped",
)
_BEST_SO_FAR = "best cost so far, above the best of all, relative to it"
_SCALING = "time to a small gap against the number of nodes; open: not reached in the time given"
_PLOT_FLOOR = 1e-7  # gaps below are drawn as 0: a proof promises no more than 1e-6


def format_run(run: ProblemRun) -> str:
    """Return presolve, solvers and best-so-far of one problem for a terminal of 100 columns."""
    lines = [_title(run), ""]
    lines += format_table(STEPS_HEADER, step_rows(run.steps), WIDTH)
    if run.selections:
        lines += ["", *format_table(_HEADER, [_cells(run, each) for each in run.selections], WIDTH)]
        lines += ["", *_plot(run)]
    lines += ["", *_notes(run)] if _notes(run) else []
    return "\n".join(lines) + "\n"


def format_page(runs: Sequence[ProblemRun], conditions: Conditions, images: Mapping[str, str] | None = None) -> str:
    """Return the page of docs/benchmarks/ about runs on selection problems.

    Args:
        runs: What to report.
        conditions: How they were run.
        images: By the name of a problem, and "" for all of them, the image to show; letters are drawn without one.

    Raises:
        ValueError: If there is nothing to report.
    """
    if not runs:
        raise ValueError("a page needs at least one problem")
    images = images or {}
    limits = sorted({each.time_limit for run in runs for each in run.selections})
    lines = [f"# Selection problems, {conditions.day.isoformat()}", "", *condition_lines(conditions)]
    lines += [
        f"- time limit of each solver: {' and '.join(f'{limit:g}' for limit in limits)} s of wall time, "
        "reading the file included",
        "- within: seconds until the best choice cost at most that much more than the best of all solvers",
        "",
        "## All",
        "",
        *markdown_table(("problem", *_HEADER), [(_name(run), *_cells(run, s)) for run in runs for s in run.selections]),
    ]
    if "" in images:
        lines += ["", f"![{_SCALING}]({images['']})"]
    for run in runs:
        lines += [
            "",
            f"## {_name(run)}",
            "",
            f"{_title(run)}.",
            "",
            *markdown_table(STEPS_HEADER, step_rows(run.steps)),
        ]
        if _name(run) in images:
            lines += ["", f"![{_BEST_SO_FAR}]({images[_name(run)]})"]
        elif run.selections:
            lines += ["", "```text", *_plot(run), "```"]
        lines += ["", *_notes(run)] if _notes(run) else []
    return "\n".join(lines) + "\n"


def write_page(runs: Sequence[ProblemRun], conditions: Conditions, folder: Path, name: str) -> list[Path]:
    """Write runs as Markdown with images, and as JSON with everything that was known when; return the files.

    Args:
        runs: What to write.
        conditions: How they were run.
        folder: Where to.
        name: What the problems are called; the files are `problems_<name>_<date>`, the images in a folder of that name.

    Raises:
        PlanError: If the folder cannot be written to.
    """
    stem = f"problems_{name}_{conditions.day.isoformat()}"
    page, data = folder / f"{stem}.md", folder / f"{stem}.json"
    pictures = {_name(run): best_so_far(run) for run in runs if math.isfinite(run.best_cost)}
    scaling = scaling_chart(runs)
    if scaling is not None:
        pictures[""] = scaling
    images = {key: f"{stem}/{key or 'scaling'}.svg" for key in pictures}
    for key, picture in pictures.items():
        write_atomically(folder / images[key], picture)
    write_atomically(page, format_page(runs, conditions, images).encode())
    record = {"conditions": conditions, "runs": [run_to_dict(run, choices=False) for run in runs]}
    write_atomically(data, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return [page, data, *(folder / image for image in images.values())]


def best_so_far(run: ProblemRun) -> bytes:
    """Return the plot of the best cost so far of each solver, above the best of all, as SVG.

    The problem must have a choice.
    """
    curves = [(name, [(x, y) for x, y in points if math.isfinite(y)]) for name, points in _curves(run)]
    for (_, points), each in zip(curves, run.selections, strict=True):
        points += [(max(x, each.seconds), y) for x, y in points[-1:]]  # until the solver ends
    values = [y for _, points in curves for _, y in points if y > _PLOT_FLOOR]
    axis = Axis("above the best of all (log)", _PLOT_FLOOR, max([10 * _PLOT_FLOOR, *values]), log=True)
    end = max(each.seconds for each in run.selections)
    drawn = [Curve(name, tuple(points)) for name, points in curves]
    return chart(f"{_name(run)}: {_BEST_SO_FAR}", drawn, Axis("seconds", 0.0, end), axis, steps=True)


def scaling_chart(runs: Sequence[ProblemRun]) -> bytes | None:
    """Return the plot of time against nodes of problems that differ in size, as SVG; None if there are none.

    Problems are of one kind if their names differ in what follows `_nodes-` only. Where the gap was never as small, the
    point is open, at the end of the run.
    """
    kinds: dict[str, list[ProblemRun]] = {}
    for run in runs:
        kind, found, _ = _name(run).rpartition("_nodes-")
        if found:
            kinds.setdefault(kind, []).append(run)
    curves = []
    for kind, members in kinds.items():
        members.sort(key=lambda run: run.num_nodes)
        solvers = [each.solver for each in members[0].selections]
        for number, solver in enumerate(solvers):
            points: list[tuple[float, float]] = []
            unreached: set[int] = set()
            for index, run in enumerate(r for r in members if len(r.selections) > number):
                selection = run.selections[number]
                seconds = time_to_gap(selection.history, SMALL_GAP)
                if math.isinf(seconds):
                    unreached.add(index)
                points.append((float(run.num_nodes), min(seconds, selection.seconds)))
            name = kind if len(solvers) == 1 else f"{kind}, {solver}"
            curves.append(Curve(name.replace("_", " "), tuple(points), frozenset(unreached)))
    numbers = [point for curve in curves for point in curve.points]
    if len({size for size, _ in numbers}) < 2:
        return None
    sizes = [each for each, _ in numbers]
    times = [each for _, each in numbers]
    across = Axis("nodes (log)", min(sizes), max(sizes), log=True)
    lowest = 10.0 ** math.floor(math.log10(max(min(times), 1e-3)))
    up = Axis(f"seconds to a gap of {100 * SMALL_GAP:g} % (log)", lowest, max([10 * lowest, *times]), log=True)
    return chart(_SCALING, curves, across, up)


def run_to_dict(run: ProblemRun, *, choices: bool = True) -> dict[str, Any]:
    """Return a run in values JSON knows.

    Args:
        run: The run.
        choices: Whether the choices themselves are part of it, which are long.
    """
    selections = [selection_to_dict(each) for each in run.selections]
    if not choices:
        for each in selections:
            del each["choice"]
    return {
        "file": run.file,
        "nodes": run.num_nodes,
        "edges": run.num_edges,
        "presolve": [
            {"step": step.name, "before": step.before, "after": step.after, "seconds": step.seconds}
            for step in run.steps
        ],
        "solvers": selections,
    }


def _title(run: ProblemRun) -> str:
    return f"{_name(run)}: {run.num_nodes:,} nodes, {run.num_edges:,} edges"


def _name(run: ProblemRun) -> str:
    return problem_name(Path(run.file))


def _cells(run: ProblemRun, selection: Selection) -> tuple[str, ...]:
    solution = selection.solution
    near = [time_to(selection.history, run.best_cost, each) for each in NEAR]
    return (
        selection.solver,
        f"{solution.cost:,}" if solution.choice is not None else "-",
        f"{solution.bound:,}" if math.isfinite(solution.bound) else "-",
        f"{100 * solution.gap:.3f} %" if math.isfinite(solution.gap) else "-",
        *("-" if math.isinf(seconds) else f"{seconds:.1f}" for seconds in near),
        f"{selection.seconds:.1f}",
        format_bytes(selection.peak_bytes),
        str(solution.termination),
    )


def _plot(run: ProblemRun) -> list[str]:
    """Return the plot of the best cost so far, above the best of all."""
    if math.isinf(run.best_cost):
        return ["no choice was found"]
    end = max(each.seconds for each in run.selections)
    return step_plot(_curves(run), end=round(end, 1), x_label="s", y_label=_BEST_SO_FAR, floor=_PLOT_FLOOR)


def _curves(run: ProblemRun) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return per solver (seconds, how far its best cost was above the best of all, relative to that)."""
    best = run.best_cost
    scale = abs(best) if best else 1.0
    return [
        (each.solver, [(known.seconds, (known.cost - best) / scale) for known in each.history])
        for each in run.selections
    ]


def _notes(run: ProblemRun) -> list[str]:
    """Return what has to be said about single solvers."""
    notes = [f"{each.solver} {each.failure}." for each in run.selections if each.failure]
    conflicts = {each.conflict.sentence() for each in run.selections if each.conflict is not None}
    return [*notes, *(f"No choice fits: {sentence}." for sentence in sorted(conflicts))]
