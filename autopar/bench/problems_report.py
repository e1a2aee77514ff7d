"""Runs on selection problems as text: tables and a plot on the terminal, a page and its data for docs/benchmarks/."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar.bench.conditions import Conditions
from autopar.bench.plot import step_plot
from autopar.bench.problems import NEAR, ProblemRun, problem_name, time_to
from autopar.bench.report import condition_lines, markdown_table
from autopar.plan import write_atomically
from autopar.report.selection import STEPS_HEADER, selection_to_dict, step_rows
from autopar.report.text import format_table
from autopar.selection import Selection
from autopar.units import format_bytes

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


def format_page(runs: Sequence[ProblemRun], conditions: Conditions) -> str:
    """Return the page of docs/benchmarks/ about runs on selection problems.

    Raises:
        ValueError: If there is nothing to report.
    """
    if not runs:
        raise ValueError("a page needs at least one problem")
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
    for run in runs:
        lines += [
            "",
            f"## {_name(run)}",
            "",
            f"{_title(run)}.",
            "",
            *markdown_table(STEPS_HEADER, step_rows(run.steps)),
        ]
        if run.selections:
            lines += ["", "```text", *_plot(run), "```"]
        lines += ["", *_notes(run)] if _notes(run) else []
    return "\n".join(lines) + "\n"


def write_page(runs: Sequence[ProblemRun], conditions: Conditions, folder: Path, name: str) -> list[Path]:
    """Write runs as Markdown and as JSON (with everything that was known when), and return the files.

    Args:
        runs: What to write.
        conditions: How they were run.
        folder: Where to.
        name: What the problems are called; the files are `problems_<name>_<date>`.

    Raises:
        PlanError: If the folder cannot be written to.
    """
    stem = f"problems_{name}_{conditions.day.isoformat()}"
    page, data = folder / f"{stem}.md", folder / f"{stem}.json"
    write_atomically(page, format_page(runs, conditions).encode())
    record = {"conditions": conditions, "runs": [run_to_dict(run, choices=False) for run in runs]}
    write_atomically(data, msgspec.json.format(msgspec.json.encode(record), indent=1))
    return [page, data]


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
    best = run.best_cost
    if math.isinf(best):
        return ["no choice was found"]
    scale = abs(best) if best else 1.0
    curves = [
        (each.solver, [(known.seconds, (known.cost - best) / scale) for known in each.history])
        for each in run.selections
    ]
    end = max(each.seconds for each in run.selections)
    label = "best cost so far, above the best of all, relative to it"
    return step_plot(curves, end=round(end, 1), x_label="s", y_label=label, floor=_PLOT_FLOOR)


def _notes(run: ProblemRun) -> list[str]:
    """Return what has to be said about single solvers."""
    notes = [f"{each.solver} {each.failure}." for each in run.selections if each.failure]
    conflicts = {each.conflict.sentence() for each in run.selections if each.conflict is not None}
    return [*notes, *(f"No choice fits: {sentence}." for sentence in sorted(conflicts))]
