"""Print how well predictions tell two plans of one job apart, from a table of predicted and measured steps.

    python docs/benchmarks/pairs.py docs/benchmarks/validation_2026-11-29.json FOLDER_OF_ROWS...

The first argument is the JSON of `autopar validate`, each folder has the `train.json` that it read. Rows of one job
(framework, sizes of the model, device, number of devices, precision) are paired. The error of a pair is the difference
of the two logarithms of predicted over measured time per sample: what is wrong about both alike does not count.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path

from usage import show_usage

JOB = ("framework", "arch", "layers", "hidden", "heads", "seq", "gpu", "n_gpus", "precision")
"""Fields in which plans of one job agree."""

EDGES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, math.inf)
"""Bounds of predicted differences by which pairs are counted."""


def main() -> None:
    """Print the quantiles of the error of pairs, and the share of pairs in the right order by predicted difference."""
    outcomes = json.loads(Path(sys.argv[1]).read_text())
    rows = {row["id"]: row for folder in sys.argv[2:] for row in json.loads((Path(folder) / "train.json").read_text())}
    jobs = defaultdict(list)
    for outcome in outcomes:
        row = rows.get(outcome["id"])
        if row and row.get("global_batch") and outcome["predicted_s"] and outcome["measured_s"]:
            key = tuple(row.get(field) for field in JOB)
            jobs[key].append(
                (outcome["predicted_s"] / row["global_batch"], outcome["measured_s"] / row["global_batch"])
            )
    pairs = []
    for members in jobs.values():
        for (predicted, measured), (other, its_measured) in combinations(members, 2):
            change, true = math.log(predicted / other), math.log(measured / its_measured)
            pairs.append((abs(change), true if change >= 0 else -true, abs(change - true)))
    errors = sorted(error for _, _, error in pairs)
    lines = [
        f"{len(pairs)} pairs of {sum(len(own) > 1 for own in jobs.values())} jobs",
        f"error of a pair: median {statistics.median(errors):.1%}, 90 % below {errors[int(0.9 * len(errors))]:.1%}",
        "",
        "| predicted difference | pairs | in the right order | true difference, mean |",
        "|---|---|---|---|",
    ]
    for low, high in pairwise(EDGES):
        true = [own for change, own, _ in pairs if low <= change < high]
        if true:
            right = sum(own > 0 for own in true) / len(true)
            lines.append(f"| {low:.0%} to {high:.0%} | {len(true)} | {right:.0%} | {statistics.mean(true):.1%} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    show_usage(__doc__)
    main()
