"""Print the law that published timings of products beside transfers follow, group by group.

python docs/benchmarks/overlap.py bandwidth-merged-a100-sxm4-40gb.json.xz > docs/benchmarks/overlap.md
"""

import json
import lzma
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from usage import show_usage

from autopar.cluster import load_cluster
from autopar.units import parse_quantity

HEAD = """\
# Products beside transfers

`python docs/benchmarks/overlap.py FILE` prints this page from the table that Dazz993/Mist publishes (A100-SXM4-40GB,
`mist/tools/results-final/bandwidth-merged-a100-sxm4-40gb.json`): products of bfloat16, transfers between devices, and
both at once. Each time of both is held against those of either alone, c and t seconds:

    stretched   max(t, c + k t)               transfers keep their pace, products stand still for a share k of them
    saved       c + t - (1 - k) min(c, t)     what `autopar/cost/overlap.py` has, with k the overlap slowdown less 1

k is the one with the least mean error of the group; the last column is the cost model's for the tier: 0.126 was
measured by Hetu-Galvatron, 0.02 by calculon-ai/calculon. Bundled stacks were fitted with these, and make up for them
with `overlap_slowdown`, `exposed_share` and slowdowns of links; the law "stretched" would ask for all
of them to be fitted again.
"""


@dataclass(frozen=True)
class Beside:
    """A product and a transfer, alone and at once, in seconds."""

    compute: float
    transfer: float
    both: float


def timings(path: Path) -> dict[tuple[int, int], list[Beside]]:
    """Return the timings by devices of a node and nodes of a group; those with copies to the host are left out."""
    with lzma.open(path) as file:
        (table,) = json.load(file).values()
    alone: dict[tuple[int, ...], float] = {}
    for row in table.values():
        if row["cpu_to_gpu_mbytes"] == row["gpu_to_cpu_mbytes"] == "0":
            sizes = (row["compute_n"], row["gpu_to_gpu_mbytes"])
            group = (row["intra_group_size"], row["inter_group_size"])
            alone[*map(int, group), *map(int, sizes)] = parse_quantity(row["latency"], "s")
    found = defaultdict(list)
    for (inside, nodes, rows, moved), seconds in alone.items():
        compute, transfer = alone.get((inside, nodes, rows, 0)), alone.get((inside, nodes, 0, moved))
        if rows and moved and compute and transfer:
            found[inside, nodes].append(Beside(compute, transfer, seconds))
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def stretched(one: Beside, share: float) -> float:
    """Return the seconds of both if transfers keep their pace and products stand still for a share of theirs."""
    return max(one.transfer, one.compute + share * one.transfer)


def saved(one: Beside, share: float) -> float:
    """Return the seconds of both if hiding them makes both slower by the same factor."""
    return one.compute + one.transfer - (1 - share) * min(one.compute, one.transfer)


def fitted(group: list[Beside], law: Callable[[Beside, float], float]) -> tuple[float, float]:
    """Return the best share in steps of a hundredth, and the mean absolute error with it."""

    def error(share: float) -> float:
        return float(np.mean([abs(law(one, share) / one.both - 1) for one in group]))

    best = min((step / 100 for step in range(101)), key=error)
    return best, error(best)


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    yield "| devices of a group | timings | stretched: k | mean error | saved: k | mean error | cost model's k |"
    yield "|---|---|---|---|---|---|---|"
    cluster = load_cluster("a100-40")
    for (inside, nodes), group in timings(path).items():
        link = cluster.intra if nodes == 1 else cluster.inter
        cells = [f"{share:.2f} | {error:.1%}" for share, error in (fitted(group, stretched), fitted(group, saved))]
        where = f"{inside} of one node" if nodes == 1 else f"{inside} of each of {nodes} nodes"
        yield f"| {where} | {len(group)} | {cells[0]} | {cells[1]} | {link.overlap_slowdown - 1:.2f} |"


def main(path: Path) -> None:
    """Print the page."""
    sys.stdout.write("\n".join(lines(path)) + "\n")


if __name__ == "__main__":
    show_usage(__doc__)
    main(Path(sys.argv[1]))
