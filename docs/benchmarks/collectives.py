"""Print what the cost model says of published timings of collectives, table by table.

python docs/benchmarks/collectives.py comm.json > docs/benchmarks/collectives.md
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
from usage import show_usage

from autopar.cost.measured_collectives import Timing, collective_report

HEAD = """\
# Collectives against published timings

`python docs/benchmarks/collectives.py comm.json` prints this page; docs/collectives.md has the formulas.
Errors are absolute shares of the measured time; bias is the mean of signed ones.
Held out: every third message size of a table, and whole tables of other hands; no constant was fitted to them.
"""


def write(text: str) -> None:
    """Print a line."""
    sys.stdout.write(text + "\n")


def figures(timings: list[Timing]) -> str:
    """Return rows, mean, median, 90th percentile and bias as cells of a table."""
    errors = np.array([timing.error for timing in timings])
    sizes = np.abs(errors)
    return (
        f"{len(errors)} | {sizes.mean():.1%} | {np.median(sizes):.1%} | {np.percentile(sizes, 90):.1%} | "
        f"{errors.mean():+.1%}"
    )


def main(path: Path) -> None:
    """Print the report."""
    report = collective_report(path)
    write(HEAD)
    write("| rows | number | mean | median | p90 | bias |")
    write("|---|---|---|---|---|---|")
    for held_out in (True, False):
        chosen = [timing for timing in report.timings if timing.held_out is held_out]
        name = "held out" if held_out else "fitted"
        write(f"| {name} | {figures(chosen)} |")
        write(f"| {name}, from 1 MB on | {figures([timing for timing in chosen if timing.nbytes >= 1e6])} |")
    write("\n| source | hardware | operation | devices | use | rows | mean | median | p90 | bias |")
    write("|---|---|---|---|---|---|---|---|---|---|")
    for (source, gpu, operation, devices, held_out), rows in report.tables().items():
        use = "held out" if held_out else "fitted"
        write(f"| {source.split(' (')[0]} | {gpu} | {operation} | {devices} | {use} | {figures(list(rows))} |")
    write("\n| cannot be priced | rows |\n|---|---|")
    for reason, number in Counter(entry.reason for entry in report.unpriced).most_common():
        write(f"| {reason} | {number} |")


if __name__ == "__main__":
    show_usage(__doc__)
    main(Path(sys.argv[1]))
