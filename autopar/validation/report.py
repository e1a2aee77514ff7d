"""Validation as text and as a page of docs/benchmarks/."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from autopar.bench.conditions import Conditions
from autopar.bench.report import condition_lines, markdown_table
from autopar.cost.stack import IDEAL, SCALARS, format_scalar
from autopar.report.text import format_entries, format_table, heading
from autopar.units import format_bytes, format_quantity, format_seconds
from autopar.validation.calibrate import Calibration
from autopar.validation.gates import BEST_PLAN, MEMORY, POSED, TOO_LOW, Gate, by_class, memory_errors, posed, rivals
from autopar.validation.micro import MicroError
from autopar.validation.own_machine import OwnMachine
from autopar.validation.reserve_fit import ReserveFit
from autopar.validation.run import Outcome
from autopar.validation.score import GOOD_REGRET, NEAR, Errors, errors, good_share, rankings
from autopar.writing import write_atomically

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
    """Return a line per source whose rows state memory, one for all and one for those held out: errors in percent."""
    held_out = [outcome for outcome in outcomes if not outcome.row.calibrates]
    return [
        (
            source,
            str(found.rows),
            _percent(found.median),
            _percent(found.mean),
            f"{100 * found.too_low:.0f} %",
            _percent(found.bias, "+"),
        )
        for source, members in [*by_source(outcomes).items(), ("all", list(outcomes)), ("held out", held_out)]
        if (found := memory_errors(members)) is not None
    ]


def _gate_cells(gate: Gate, found: Errors) -> tuple[str, str]:
    limits = [
        f"{name} < {100 * limit:g}"
        for name, limit in (("median", gate.median), ("mean", gate.mean))
        if limit is not None
    ]
    met = (gate.median is None or found.median < gate.median) and (gate.mean is None or found.mean < gate.mean)
    return ", ".join(limits), ("met" if met else "missed") if limits else ""


def class_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return a line per class of rows: name, rows, errors in percent, its gate and whether it is met."""
    return [
        (
            gate.name,
            str(found.rows),
            _percent(found.median),
            _percent(found.mean),
            _percent(found.bias, "+"),
            *_gate_cells(gate, found),
        )
        for gate, found in by_class(outcomes)
    ]


def rival_rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return a line per source with a simulator of its own: median and mean error, ours and theirs, in percent."""
    return [
        (
            rival.source,
            rival.what,
            str(rival.rows),
            *(_percent(value) for value in (*rival.ours, *rival.theirs)),
            "ours" if rival.ours[1] < rival.theirs[1] else "theirs",
        )
        for rival in rivals(outcomes)
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
_FIT = ("rows", "number", "MAPE", "median", "p90", f"<{100 * NEAR:g} %", "bias")
_MEMORY = ("source", "rows", "median", "mean", f"below {100 * TOO_LOW:g} % of measured", "bias")
_CLASSES = ("class", "rows", "median", "mean", "bias", "gate", "")
_RIVALS = ("source", "of", "rows", "our median", "our mean", "their median", "their mean", "smaller mean")
_WHY = ("source", "rows", "why")
_ASSUMED = ("source", "rows", "assumed")


def _ranked(outcomes: Sequence[Outcome]) -> str:
    found = rankings(outcomes)
    share = f"{100 * good_share(found):.0f} %"
    near = f"within {100 * GOOD_REGRET:g} % of the best measured"
    return f"the plan predicted best is {near} in {share} of {len(found)} groups (gate: {100 * BEST_PLAN:g} %)"


def _posed(outcomes: Sequence[Outcome]) -> str:
    done, stated = posed(outcomes)
    share = f"{100 * done / stated:.0f} %" if stated else "none"
    return f"{done} of {stated} rows with stated degrees are posed: {share} (gate: {100 * POSED:g} %)"


_OF_MEMORY = "gate: median < {:g}, mean < {:g}, at most {:g} % of the rows predicted too low".format(
    *(100 * limit for limit in MEMORY)
)


def format_validation(outcomes: Sequence[Outcome], micro: Sequence[MicroError] = ()) -> str:
    """Return the report on a terminal of 120 columns."""
    lines = heading("Step time by class, all rows: errors in %")[1:]
    lines += [*format_table(_CLASSES, class_rows(outcomes), _WIDTH), "", _posed(outcomes)]
    lines += heading("Step time, all rows: errors in %")
    lines += format_table(_HEADER, table(outcomes, held_out_only=False), _WIDTH)
    lines += heading("Step time, rows held out of calibration: errors in %")
    lines += format_table(_HEADER, table(outcomes, held_out_only=True), _WIDTH)
    lines += heading("Ranking of plans")
    lines += [*format_table(_RANKING, ranking_rows(outcomes), _WIDTH), "", _ranked(outcomes)]
    lines += heading("Peak memory: errors in %")
    lines += [*format_table(_MEMORY, memory_rows(outcomes), _WIDTH), "", _OF_MEMORY]
    if rival_rows(outcomes):
        lines += heading("Beside the sources' own simulators, on the same rows: errors in %")
        lines += format_table(_RIVALS, rival_rows(outcomes), _WIDTH)
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
        "## By class, all rows",
        "",
        *markdown_table(_CLASSES, class_rows(outcomes)),
        "",
        f"{_posed(outcomes)}.",
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
        f"Predicted peak beside measured, errors in percent; {_OF_MEMORY}.",
        "",
        *markdown_table(_MEMORY, memory_rows(outcomes)),
        "",
        "## Beside the sources' own simulators",
        "",
        *markdown_table(_RIVALS, rival_rows(outcomes)),
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


def format_reserve(found: ReserveFit) -> str:
    """Return a fitted reserve: its two numbers, and the errors of memory before and after."""
    entries = [
        ("gaps", f"{100 * found.stack.gaps:.1f} % of what is allocated (default {100 * IDEAL.gaps:g} %)"),
        ("outside", f"{format_bytes(found.stack.outside)} (default {format_bytes(IDEAL.outside)})"),
    ]
    kinds = (("before", found.before), ("fitted", found.fitted), ("held out", found.held_out))
    rows = [(kind, str(each.rows) if each else "0", *_cells(each)) for kind, each in kinds]
    return "\n".join([*format_entries(entries), "", *format_table(_FIT, rows, _WIDTH)]) + "\n"


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
    lines += ["", *format_table(_FIT, rows, _WIDTH)]
    entries = [
        ("kernels", f"attention {stack.attention}, element-wise fusion {stack.fusion}"),
        ("fitted to", ", ".join(f"{source.source} ({source.rows})" for source in stack.fit.data)),
        ("valid for", valid),
    ]
    return "\n".join([f"stack {stack.name}", "", *lines, "", *format_entries(entries, _WIDTH)]) + "\n"


def format_machine(found: OwnMachine) -> str:
    """Return a cluster and a stack fitted to a profile, with the errors of their formulas on its events."""
    device, fit = found.cluster.device, found.stack.fit
    assert fit is not None, "it was fitted"
    peak = next(iter(device.peaks))[1]
    entries = [
        ("device", f"{device.name}: {format_quantity(peak, 'FLOP/s')}, {format_bytes(device.memory)}"),
        ("memory", f"{format_bytes(device.memory_bandwidth)}/s"),
        ("launch", format_seconds(device.launch)),
        *((name, format_scalar(name, found.stack[name])) for name in fit.fitted),
        ("fitted to", ", ".join(f"{source.rows} {source.source}" for source in fit.data)),
    ]
    links = [("in a node", found.cluster.intra)]
    if found.cluster.inter != found.cluster.intra:
        links.append(("between nodes", found.cluster.inter))
    rows = [
        (where, own.operation, str(own.members), format_seconds(own.latency), f"{format_bytes(own.bandwidth)}/s")
        for where, link in links
        for own in link.tunings or (link.plain,)
    ]
    found_errors = [
        (kind, str(each.rows) if each else "0", *_cells(each))
        for kind, each in (("ops", found.ops), ("transfers", found.transfers))
    ]
    lines = [
        f"cluster {found.cluster.name}, stack {found.stack.name}",
        "",
        *format_entries(entries, _WIDTH),
        "",
        *format_table(("link", "operation", "members", "latency", "bandwidth"), rows, _WIDTH),
        "",
        *format_table(("formula against", "events", *_FIT[2:]), found_errors, _WIDTH),
    ]
    return "\n".join(lines) + "\n"


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
            "shown_bytes": outcome.shown_bytes,
            "memory_bytes": outcome.row.memory_bytes,
            "claimed_s": outcome.row.claimed_seconds,
            "claimed_bytes": outcome.row.claimed_bytes,
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
