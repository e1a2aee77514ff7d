"""Validation as text and as a page of docs/benchmarks/."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar.bench.conditions import Conditions
from autopar.bench.report import condition_lines, markdown_table
from autopar.cost.stack import SCALARS, format_scalar
from autopar.plan import write_atomically
from autopar.report.text import format_entries, format_table, heading
from autopar.validation.calibrate import Calibration
from autopar.validation.micro import MicroError
from autopar.validation.run import Outcome
from autopar.validation.score import GOOD_REGRET, NEAR, Errors, errors, good_share, memory_errors, rankings

_WIDTH = 120
_HEADER = ("source", "rows", "predicted", "held out", "MAPE", "median", "p90", f"<{100 * NEAR:g} %", "bias", "others")

OTHERS = {
    "sc21t1": "Calculon 10.3 %",
    "sc21t2": "Calculon 10.3 %",
    "korth": "Calculon 3.7 % (in-sample)",
    "vtm": "vTrain 14.7 %, Calculon 15.3 %",
    "vts": "vTrain 8.4 %, Calculon 39 %",
    "bloom": "Calculon 33.5 %",
}
"""What other simulators reach on a source: Calculon run again on the same rows, vTrain as its paper says."""


def _percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}"


def _cells(found: Errors | None) -> tuple[str, ...]:
    if found is None:
        return ("-",) * 5
    return (
        _percent(found.mean),
        _percent(found.median),
        _percent(found.p90),
        f"{100 * found.near:.0f} %",
        _percent(found.bias, "+"),
    )


def by_source(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return outcomes by source, in the order in which sources appear by name."""
    found: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.row.id):
        found.setdefault(outcome.row.source, []).append(outcome)
    return found


def table(outcomes: Sequence[Outcome], *, held_out_only: bool) -> list[tuple[str, ...]]:
    """Return a line per source and one for all, errors in percent; of all rows or of those held out."""
    rows = []
    for source, members in [*by_source(outcomes).items(), ("all", list(outcomes))]:
        predicted = [outcome for outcome in members if outcome.predicted is not None]
        held_out = [outcome for outcome in predicted if not outcome.row.calibrates]
        counted = held_out if held_out_only else predicted
        found = errors([outcome.error for outcome in counted])
        rows.append(
            (
                source,
                str(len(members)),
                str(len(predicted)),
                str(len(held_out)),
                *_cells(found),
                OTHERS.get(source, ""),
            )
        )
    return rows


def reasons(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """Return the rows that could not be predicted: source, number, reason."""
    counted = Counter((outcome.row.source, outcome.reason) for outcome in outcomes if outcome.reason)
    return [(source, str(number), reason) for (source, reason), number in sorted(counted.items())]


def assumptions(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    """Return what was assumed where rows do not say: source, number, assumption."""
    counted = Counter((outcome.row.source, text) for outcome in outcomes for text in outcome.assumptions)
    return [(source, str(number), text) for (source, text), number in sorted(counted.items())]


def ranking_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return a line per group of plans: name, plans, tau, regret in percent."""
    return [
        (ranking.name, str(ranking.plans), f"{ranking.tau:.2f}", _percent(ranking.regret))
        for ranking in rankings(outcomes)
    ]


def memory_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return a line per source whose rows state memory: source, rows, errors in percent."""
    return [
        (source, str(found.rows), *_cells(found))
        for source, members in by_source(outcomes).items()
        if (found := memory_errors(members)) is not None
    ]


def micro_rows(found: Sequence[MicroError]) -> list[tuple[str, ...]]:
    """Return a line per group of timings of kernels and collectives, errors in percent."""
    return [
        (
            each.kind,
            each.group,
            str(each.timings),
            _percent(each.mean),
            _percent(each.median),
            _percent(each.p90),
            _percent(each.bias, "+"),
        )
        for each in found
    ]


_MICRO = ("kind", "group", "timings", "MAPE", "median", "p90", "bias")
_RANKING = ("group", "plans", "tau", "regret %")
_MEMORY = ("source", "rows", "MAPE", "median", "p90", f"<{100 * NEAR:g} %", "bias")
_WHY = ("source", "rows", "why")
_ASSUMED = ("source", "rows", "assumed")


def _ranked(outcomes: Sequence[Outcome]) -> str:
    found = rankings(outcomes)
    share = f"{100 * good_share(found):.0f} %"
    near = f"within {100 * GOOD_REGRET:g} % of the best measured"
    return f"the plan predicted best is {near} in {share} of {len(found)} groups"


def format_validation(outcomes: Sequence[Outcome], micro: Sequence[MicroError] = ()) -> str:
    """Return the report on a terminal of 120 columns."""
    lines = heading("Step time, all rows: errors in %")[1:]
    lines += format_table(_HEADER, table(outcomes, held_out_only=False), _WIDTH)
    lines += heading("Step time, rows held out of calibration: errors in %")
    lines += format_table(_HEADER, table(outcomes, held_out_only=True), _WIDTH)
    lines += heading("Ranking of plans")
    lines += [*format_table(_RANKING, ranking_rows(outcomes), _WIDTH), "", _ranked(outcomes)]
    lines += heading("Peak memory: errors in %")
    lines += format_table(_MEMORY, memory_rows(outcomes), _WIDTH)
    if micro:
        lines += heading("Kernels and collectives: errors in %")
        lines += format_table(_MICRO, micro_rows(micro), _WIDTH)
    lines += heading("Rows that could not be predicted")
    lines += format_table(_WHY, reasons(outcomes), _WIDTH)
    lines += heading("What was assumed where rows do not say")
    lines += format_table(_ASSUMED, assumptions(outcomes), _WIDTH)
    return "\n".join(lines) + "\n"


def format_page(outcomes: Sequence[Outcome], conditions: Conditions, micro: Sequence[MicroError] = ()) -> str:
    """Return the page of docs/benchmarks/."""
    lines = [f"# Predictions against published measurements, {conditions.day.isoformat()}", ""]
    lines += [*condition_lines(conditions), ""]
    lines += [
        "Errors are those of the step time in percent of the measured one; bias below zero is optimistic.",
        "A row is for calibration or held out by the hash of its configuration; stacks were fitted to the former only.",
        "",
        "## Rows held out",
        "",
        *markdown_table(_HEADER, table(outcomes, held_out_only=True)),
        "",
        "## All rows",
        "",
        *markdown_table(_HEADER, table(outcomes, held_out_only=False)),
        "",
        "## Ranking of plans",
        "",
        f"By seconds per sample; {_ranked(outcomes)}.",
        "",
        *markdown_table(_RANKING, ranking_rows(outcomes)),
        "",
        "## Peak memory",
        "",
        *markdown_table(_MEMORY, memory_rows(outcomes)),
        "",
        "## Kernels and collectives",
        "",
        *markdown_table(_MICRO, micro_rows(micro)),
        "",
        "## Rows that could not be predicted",
        "",
        *markdown_table(_WHY, reasons(outcomes)),
        "",
        "## What was assumed where rows do not say",
        "",
        *markdown_table(_ASSUMED, assumptions(outcomes)),
    ]
    return "\n".join(lines) + "\n"


def format_calibration(found: Calibration) -> str:
    """Return a fitted stack: its scalars, errors before and after, and what lies on a bound."""
    stack = found.stack
    assert stack.fit is not None, "a calibrated stack has a fit"
    bounds = {name: (SCALARS[name].low, SCALARS[name].high) for name in stack.fit.fitted}
    scalars = [
        (
            name,
            format_scalar(name, stack[name]),
            format_scalar(name, SCALARS[name].default),
            " to ".join(format_scalar(name, bound) for bound in bounds[name]),
            "on a bound" if name in stack.at_bounds else "",
        )
        for name in stack.fit.fitted
    ]
    kinds = (
        ("before", found.before),
        ("fitted", found.fitted),
        ("left out", found.left_out),
        ("held out", found.held_out),
    )
    rows = [(kind, str(each.rows) if each else "0", *_cells(each)) for kind, each in kinds]
    valid = ", ".join(f"{entry.name} {entry.low:g} to {entry.high:g}" for entry in stack.fit.valid)
    lines = format_table(("scalar", "fitted", "default", "bounds", ""), scalars, _WIDTH)
    lines += ["", *format_table(("rows", "number", *_MEMORY[2:]), rows, _WIDTH)]
    entries = [
        ("kernels", f"attention {stack.attention}, element-wise fusion {stack.fusion}"),
        ("fitted to", ", ".join(f"{source.source} ({source.rows})" for source in stack.fit.data)),
        ("valid for", valid),
    ]
    return "\n".join([f"stack {stack.name}", "", *lines, "", *format_entries(entries, _WIDTH)]) + "\n"


def to_dicts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return a record per row."""
    return [
        {
            "id": outcome.row.id,
            "reason": outcome.reason,
            "measured_s": outcome.measured,
            "predicted_s": outcome.predicted,
            "held_out": not outcome.row.calibrates,
            "stack": outcome.stack,
            "assumptions": outcome.assumptions,
            "peak_bytes": outcome.peak_bytes,
            "memory_gb": outcome.row.memory_gb,
            "fits": outcome.fits,
        }
        for outcome in sorted(outcomes, key=lambda outcome: outcome.row.id)
    ]


def write_pages(
    outcomes: Sequence[Outcome], conditions: Conditions, folder: Path, micro: Sequence[MicroError] = ()
) -> list[Path]:
    """Write the page and its data, and return the files.

    Raises:
        PlanError: If they cannot be written.
    """
    stem = folder / f"validation_{conditions.day.isoformat()}"
    page, data = stem.with_suffix(".md"), stem.with_suffix(".json")
    write_atomically(page, format_page(outcomes, conditions, micro).encode())
    write_atomically(data, msgspec.json.format(msgspec.json.encode(to_dicts(outcomes)), indent=1) + b"\n")
    return [page, data]
