"""Problems made from other problems by their structure alone, to see how solvers do on what they were not made for.

`python -m tests.derived FROM TO` reads the problems of one folder and writes variants of them into another one, for
`autopar benchmark --problems TO`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar import iopddl
from autopar.problem import FORBIDDEN, Limit, Problem, Usage

Entry = tuple[int, int, Any, float]


def least_peak(problem: Problem) -> float:
    """Return the largest sum of the least uses at any time, which no choice undercuts."""
    changes: dict[int, float] = {}
    for usage in problem.usages:
        if usage.start < usage.end:
            least = usage.amounts.min().item()
            changes[usage.start] = changes.get(usage.start, 0) + least
            changes[usage.end] = changes.get(usage.end, 0) - least
    return max(accumulate(changes[time] for time in sorted(changes)), default=0)


def tighter(problem: Problem, share: float) -> Problem:
    """Return the problem with a share of the memory that its limit leaves above the least peak."""
    least = least_peak(problem)
    limits = tuple(
        replace(limit, amount=type(limit.amount)(least + share * (limit.amount - least))) for limit in problem.limits
    )
    return replace(problem, limits=limits, name=f"{problem.name} tighter {share:g}")


def rescaled(problem: Problem, *, most: int = 4, seed: int = 0) -> Problem:
    """Return the problem with the costs of each node and each table times a random whole number up to `most`.

    Equal parts of a model thereby become different ones.
    """
    rng = np.random.default_rng(seed)
    factors = rng.integers(1, most, problem.num_nodes, endpoint=True)
    costs = tuple(_times(c, int(f)) for c, f in zip(problem.node_costs, factors, strict=True))
    weights = problem.edge_weights * rng.integers(1, most, problem.num_edges, endpoint=True)
    return replace(problem, node_costs=costs, edge_weights=weights, name=f"{problem.name} rescaled")


def _times(costs: NDArray[Any], factor: int) -> NDArray[Any]:
    return np.where(costs >= FORBIDDEN, costs, costs * factor)


def joined(problems: Sequence[Problem], *, shift: float, name: str) -> Problem:
    """Return problems side by side under one limit, the sum of theirs.

    Args:
        problems: What to join; each has one limit.
        shift: When the next one begins, as a share of the duration of the one before.
        name: Of the whole.
    """
    costs: list[Any] = []
    edges: list[Entry] = []
    usages: list[Usage] = []
    clock = 0
    for problem in problems:
        first = len(costs)
        costs += problem.node_costs
        edges += [(first + a, first + b, table, weight) for a, b, table, weight in _edges(problem)]
        usages += [Usage(first + u.node, clock + u.start, clock + u.end, u.amounts) for u in problem.usages]
        clock += int(shift * max(u.end for u in problem.usages))
    whole = Problem.build(costs, edges, usages=usages, name=name)
    least = least_peak(whole)
    spare = max(p.limits[0].amount / least_peak(p) for p in problems)
    end = max(u.end for u in usages)
    return replace(whole, limits=(Limit(int(spare * least), min(u.start for u in usages), end),))


def window(problem: Problem, begin: float, end: float) -> Problem:
    """Return the nodes from one share of all to another one, and what joins them, under the limit left per use."""
    first, last = int(begin * problem.num_nodes), int(end * problem.num_nodes)
    edges = [(a - first, b - first, t, w) for a, b, t, w in _edges(problem) if first <= min(a, b) and max(a, b) < last]
    usages = [replace(u, node=u.node - first) for u in problem.usages if first <= u.node < last]
    part = Problem.build(problem.node_costs[first:last], edges, usages=usages)
    spare = problem.limits[0].amount / least_peak(problem)
    limit = replace(problem.limits[0], amount=int(spare * least_peak(part)))
    return replace(part, limits=(limit,), name=f"{problem.name} window {begin:g} {end:g}")


def denser(problem: Problem, share: float, *, reach: int = 50, seed: int = 0) -> Problem:
    """Return the problem with more edges, a share of those it has, between nodes near each other in time.

    Each gets a table that already joins nodes with as many strategies and forbids nothing.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[tuple[int, int], list[NDArray[Any]]] = {}
    for table in problem.edge_tables:
        if (table < FORBIDDEN).all() and (table != table[:1]).any() and (table != table[:, :1]).any():
            shapes.setdefault((table.shape[0], table.shape[1]), []).append(table)
    edges = list(_edges(problem))
    sizes = problem.num_strategies
    missing = int(share * len(edges))
    while missing > 0:
        a = int(rng.integers(problem.num_nodes - 1))
        b = min(problem.num_nodes - 1, a + int(rng.integers(1, reach, endpoint=True)))
        fitting = shapes.get((sizes[a], sizes[b]))
        missing -= 1
        if fitting and a != b:
            edges.append((a, b, fitting[int(rng.integers(len(fitting)))], 1))
    result = Problem.build(problem.node_costs, edges, usages=problem.usages, limit=problem.limits)
    return replace(result, name=f"{problem.name} denser {share:g}")


def _edges(problem: Problem) -> list[Entry]:
    ids, weights = problem.edge_table_ids.tolist(), problem.edge_weights.tolist()
    return [
        (a, b, problem.edge_tables[index], weight)
        for (a, b), index, weight in zip(problem.edge_nodes.tolist(), ids, weights, strict=True)
    ]


VARIANTS: dict[str, Callable[[Problem], Problem]] = {
    "tighter-0.3": lambda problem: tighter(problem, 0.3),
    "tighter-0.03": lambda problem: tighter(problem, 0.03),
    "rescaled": lambda problem: rescaled(problem),
    "twice": lambda problem: joined([problem, rescaled(problem)], shift=0.3, name=f"{problem.name} twice"),
    "half": lambda problem: window(problem, 0.0, 0.5),
    "denser-0.5": lambda problem: denser(problem, 0.5),
}
"""What is made of each problem, by name."""


def write_variants(source: Path, folder: Path) -> None:
    """Write the variants of the problems in one folder into another one."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.json*")):
        problem = iopddl.load(path)
        if len(problem.limits) != 1:
            continue
        for name, make in VARIANTS.items():
            iopddl.save(make(problem), folder / f"{path.name.split('.')[0]}_{name}.json.gz")


if __name__ == "__main__":
    write_variants(Path(sys.argv[1]), Path(sys.argv[2]))
