"""Predict the published rows of zero-bubble schedules; print how throughput grows with microbatches and schedules.

    python docs/benchmarks/zero_bubble.py DATA_DIR

DATA_DIR holds `train.json`, as for `autopar validate`; its rows `zb-*` are tables 3 and 4 of arXiv:2401.10241. Nothing
is fitted to them. ZB-1p and ZB-2p of the paper are searched for measured seconds of passes under a limit of memory;
here ZB-H1 and ZB-H2 stand for them, which hold as much. The memory is measured / predicted.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from usage import show_usage

from autopar.cost import Stack
from autopar.report.text import format_change, format_table
from autopar.validation.express import express
from autopar.validation.records import Row, load_rows
from autopar.validation.run import Outcome, predict_rows

Runs = Mapping[tuple[str, int], Outcome]


def _stack(row: Row) -> Stack:
    """Return the software stack a row ran on."""
    return express(row).stack


def _change(run: Outcome, base: Outcome) -> tuple[str, str, str]:
    """Return how much faster per microbatch a run is than another one, measured and predicted, and the difference."""
    assert run.row.global_batch, run.row.id
    assert base.row.global_batch, base.row.id
    assert run.measured, run.row.id
    assert base.measured, base.row.id
    assert run.predicted, run.row.id
    assert base.predicted, base.row.id
    size = run.row.global_batch / base.row.global_batch
    measured, predicted = size * base.measured / run.measured, size * base.predicted / run.predicted
    return format_change(measured, 1.0), format_change(predicted, 1.0), format_change(predicted, measured)


def _growth(model: str, runs: Runs) -> list[tuple[str, ...]]:
    """Return the rows of each schedule against its fewest microbatches."""
    rows: list[tuple[str, ...]] = []
    for schedule in dict.fromkeys(name for name, _ in runs):
        counts = sorted(count for name, count in runs if name == schedule)
        for count in counts[1:]:
            found = _change(runs[schedule, count], runs[schedule, counts[0]])
            rows.append((model, schedule, f"{counts[0]} to {count}", *found))
    return rows


def _against(model: str, runs: Runs) -> list[tuple[str, ...]]:
    """Return the rows of the other schedules against 1F1B with as many microbatches."""
    rows: list[tuple[str, ...]] = []
    for (schedule, count), run in runs.items():
        base = runs.get(("1F1B", count))
        if base is not None and base is not run:
            rows.append((model, schedule, str(count), *_change(run, base)))
    return rows


def main(folder: str) -> None:
    """Print three tables."""
    rows = [row for row in load_rows(Path(folder)) if row.id.startswith("zb-")]
    runs: dict[str, dict[tuple[str, int], Outcome]] = defaultdict(dict)
    unfitted = tuple({stack.name: replace(stack, scalars=(), fit=None) for stack in map(_stack, rows)}.values())
    for outcome in sorted(predict_rows(rows, stacks=unfitted), key=lambda each: each.row.id):
        assert not outcome.reason, (outcome.row.id, outcome.reason)
        row = outcome.row
        assert row.model, row.id
        assert row.schedule, row.id
        assert row.num_microbatches, row.id
        runs[row.model][row.schedule, row.num_microbatches] = outcome
    sizes = [
        (
            model,
            schedule,
            str(count),
            f"{run.measured:.2f} s",
            f"{run.predicted:.2f} s",
            format_change(run.predicted, run.measured),
            f"{run.row.memory_gb:.0f} / {run.peak_bytes / 1e9:.0f}",
        )
        for model, known in sorted(runs.items())
        for (schedule, count), run in sorted(known.items())
        if run.measured and run.predicted and run.row.memory_gb
    ]
    titles = ("model", "schedule", "microbatches", "measured", "predicted", "error")
    growth = [line for model, known in sorted(runs.items()) for line in _growth(model, known)]
    against = [line for model, known in sorted(runs.items()) for line in _against(model, known)]
    lines = [
        *format_table((*titles, "GB"), sizes),
        "",
        "throughput with more microbatches",
        *format_table(titles, growth),
        "",
        "throughput over 1F1B",
        *format_table(titles, against),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    show_usage(__doc__)
    main(sys.argv[1])
