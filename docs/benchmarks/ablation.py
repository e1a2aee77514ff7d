"""Run the yardstick's quick jobs without one part of the search after the other, and print what each part brings.

    python docs/benchmarks/ablation.py                       all rows, about an hour on one core
    python docs/benchmarks/ablation.py "relaxation steps"    some rows
    python docs/benchmarks/ablation.py --limited             on the jobs that a limit of time ends

Each job is planned by one process whose limits count processor seconds (`planner_regression.py --alone`), so that other
work on the machine does not decide. The first run is the search as it is; every ratio is of a run without a part to it.
A part whose removal costs less than 0.2 % of bound and objective and less than 5 % of CPU seconds on every job has not
earned its place.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from typing import Any

from planner_regression import LIMITED, run_all, say, worse  # the folder of this file is on the path of a script

JOBS = ("gpt2-8", "bert-large-16", "llama3-8b-16", "gpt3-2.7b-short", "mixtral-16", "vit-l16-16", "llama3-8b-infer")
"""Those of the yardstick that take less than a minute."""

LIMITED_JOBS = ("gpt3-175b-1024", *LIMITED)
"""Jobs that their limit ends."""

ROWS = {
    "relaxation steps": ["node.relaxed_steps=1"],
    "plans under memory beside a relaxation": ["weak_bound_ratio=1e9"],
    "improvement of constructed plans": ["most_improved=0"],
    "turns of the incumbent": ["incumbent_turn_every=1e9"],
    "patience": ["patience=1e9"],
    "outer data-parallel meshes": ["outer_tasks=0", "outer_share=0"],
    "limit on outer data-parallel tasks": ["outer_tasks=1e9"],
    "local search over configurations": ["descent_failures=0", "descent_share=0"],
    "corrections of lowered memory": ["node.corrections=1"],
    "rounds of the cut LP": ["node.cut_steps=1"],
    "smoothing of duals": ["autopar.bounds.column_generation:SMOOTHING=0.0"],
}
"""Parts of the search by name, and the settings, or constants of modules, that leave them out."""


def main() -> int:
    """Print one row per part: the worst job and the mean of objective, bound and CPU seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--limited", action="store_true", help="the jobs that a limit of time ends")
    parser.add_argument("--jobs", nargs="+", help="other jobs of the yardstick")
    asked = parser.parse_args()
    jobs = asked.jobs or (LIMITED_JOBS if asked.limited else JOBS)
    base, failed = run_all(jobs, (), alone=True)
    say("| without | settings | objective, worst | bound, worst | CPU s, worst | bound, mean | CPU s, mean |")
    say("|" + "---|" * 7)
    for name in asked.rows or ROWS:
        found, more = run_all(jobs, ROWS[name], alone=True)
        failed += more
        say(f"| {name} | `{' '.join(ROWS[name])}` | {_cells(base, found)} |")
    for line in failed:
        say(f"FAILED: {line}")
    return 1 if failed else 0


def _cells(base: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return worst ratios with their jobs, and means."""
    ratios = {
        each: {job: worse(each, base[job], found[job]) for job in found} for each in ("objective", "bound", "cpu")
    }
    worst = {each: max(own, key=lambda job: own[job]) for each, own in ratios.items()}
    mean = {each: math.exp(sum(map(math.log, own.values())) / len(own)) for each, own in ratios.items()}
    cells = [f"{ratios[each][job]:.4f} ({job})" for each, job in worst.items()]
    return " | ".join([*cells, f"{mean['bound']:.4f}", f"{mean['cpu']:.4f}"])


if __name__ == "__main__":
    sys.exit(main())
