"""Synthetic problems: the sharding of a training step, and a family of any size, tree-width and tightness.

`python -m tests.instances DIR` writes problems of the family as files, for `autopar benchmark --problems DIR`;
`python -m tests.instances DIR large` writes two of 65,000 nodes, in one of which no two tables are alike, and
`python -m tests.instances DIR hubs` three around hubs, with tight limits;
`python -m tests.instances DIR tensors` five of tensors on a mesh, a few of which fill the memory.
"""

import argparse
from itertools import accumulate, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar import iopddl
from autopar.problem import FORBIDDEN, Problem, Usage

MATMUL = (("R", "R", "R"), ("S0", "R", "S0"), ("R", "S1", "S1"), ("S1", "S0", "P"))
"""Strategies of a product on one mesh axis: activations, weight, output."""
POINTWISE = (("R", "R"), ("S0", "S0"), ("S1", "S1"))
SHARDS = ("R", "S0", "S1")


def reshard(source: tuple[str, ...], target: tuple[str, ...], size: float, mesh: tuple[int, ...]) -> float:
    """Return the seconds to change the placement of `size` bytes, axis by axis; nothing can become a partial sum."""
    seconds = 0.0
    for i, (a, b, n) in enumerate(zip(source, target, mesh, strict=True)):
        local = size
        for j, (p, m) in enumerate(zip(source, mesh, strict=True)):
            local /= m if j != i and p.startswith("S") else 1
        speed = 300e9 if i else 40e9
        if a == b or (a == "R" and b != "P"):
            continue
        if b == "P":
            return np.inf
        factor = {("P", "R"): 2.0, ("P", "S0"): 1.0, ("P", "S1"): 1.0}.get((a, b), 1.0 if b == "R" else 1.0 / n)
        seconds += 1e-5 + factor * local * (n - 1) / n / speed
    return seconds


def training_step(
    layers: int, *, mesh: tuple[int, ...] = (8, 8), tightness: float | None = None, seed: int = 0
) -> Problem:
    """Return a chain of products with residual connections, its mirrored backward pass, and updates.

    Args:
        layers: Residual blocks of two products each; about 21 nodes per block.
        mesh: Size of each mesh axis; strategies are products over axes.
        tightness: Limit between the least (0) and greatest (1) possible peak; None for no limit.
        seed: Of the sizes.
    """
    rng = np.random.default_rng(seed)
    kinds: dict[str, list[tuple[tuple[str, ...], ...]]] = {
        "matmul": [tuple(zip(*s, strict=True)) for s in product(MATMUL, repeat=len(mesh))],
        "pointwise": [tuple(zip(*s, strict=True)) for s in product(POINTWISE, repeat=len(mesh))],
        "state": [(s, s) for s in product(SHARDS, repeat=len(mesh))],
    }
    costs: list[NDArray[Any]] = []
    kind_of: list[str] = []
    spans: list[tuple[int, float, int, int]] = []
    edges: list[tuple[int, int, NDArray[Any]]] = []
    tables: dict[tuple[str, str, int, float], NDArray[Any]] = {}
    clock = 0

    def shards(placement: tuple[str, ...]) -> float:
        return float(np.prod([m for p, m in zip(placement, mesh, strict=True) if p.startswith("S")]))

    def node(kind: str, seconds: float) -> int:
        nonlocal clock
        clock += 1
        kind_of.append(kind)
        work = []
        for s in kinds[kind]:
            split = np.prod([m for axis, m in enumerate(mesh) if any(p[axis] != "R" for p in s)]) if seconds else 1.0
            work.append(seconds / split + (2e-6 if seconds else 0.0))
        costs.append(np.array(work))
        return len(costs) - 1

    def edge(source: int, target: int, operand: int, size: float) -> None:
        key = (kind_of[source], kind_of[target], operand, size)
        if key not in tables:
            tables[key] = np.array(
                [[reshard(s[-1], t[operand], size, mesh) for t in kinds[key[1]]] for s in kinds[key[0]]]
            )
        edges.append((source, target, tables[key]))

    size = 2.0**28
    residual = node("pointwise", 1e-4)
    saved: list[tuple[int, int, int, float, float]] = []
    for _ in range(layers):
        x = residual
        for _ in range(2):
            weight_size = float(2.0 ** rng.integers(24, 29))
            weight = node("state", 0.0)
            product_node = node("matmul", 6e-2)
            edge(x, product_node, 0, size)
            edge(weight, product_node, 1, weight_size)
            act = node("pointwise", 3e-4)
            edge(product_node, act, 0, size)
            saved.append((x, weight, act, size, weight_size))
            spans.append((x, size, clock, -1))
            x = act
        joined = node("pointwise", 2e-4)
        edge(x, joined, 0, size)
        edge(residual, joined, 0, size)
        residual = joined
    gradient = residual
    for index, (x, weight, act, size, weight_size) in reversed(list(enumerate(saved))):
        back = node("pointwise", 4e-4)
        edge(gradient, back, 0, size)
        edge(act, back, 0, size)
        by_input = node("matmul", 6e-2)
        edge(back, by_input, 0, size)
        edge(weight, by_input, 1, weight_size)
        by_weight = node("matmul", 6e-2)
        edge(x, by_weight, 0, size)
        edge(back, by_weight, 1, size)
        update = node("state", 0.0)
        edge(by_weight, update, 0, weight_size)
        edge(update, weight, 0, weight_size)
        spans.append((update, 6 * weight_size, 0, -2))
        spans.append((weight, weight_size, 0, -2))
        start = spans[index][2]
        spans[index] = (x, size, start, clock)
        gradient = by_input
    usages = []
    for user, bytes_, start, end in spans:
        amounts = np.array([bytes_ / shards(s[-1]) for s in kinds[kind_of[user]]])
        usages.append(Usage(user, start, clock + 1 if end == -2 else end, amounts))
    limit = None
    if tightness is not None:
        peaks = []
        for pick in (np.min, np.max):
            change = np.zeros(clock + 2)
            for u in usages:
                change[u.start] += pick(u.amounts)
                change[u.end] -= pick(u.amounts)
            peaks.append(float(np.cumsum(change).max()))
        limit = peaks[0] + tightness * (peaks[1] - peaks[0])
    return Problem.build(costs, edges, usages=usages, limit=limit, name=f"training-step-{layers}")


def knapsack() -> Problem:
    """Return three nodes, worked out by hand: dear (10) without use, or free with use 2, 2 and 3 of a limit of 4.

    The relaxation takes a quarter of one node off; only two of the three can use anything, so the optimum is 10.
    """
    usages = [Usage(node, 0, 1, np.array([0, use])) for node, use in enumerate((2, 2, 3))]
    return Problem.build([[10, 0]] * 3, usages=usages, limit=4)


FAMILY = tuple(
    (nodes, width, tightness) for width, tightness in ((2, 0.9), (2, 0.3), (4, 0.3)) for nodes in (100, 1000, 10_000)
)
"""Nodes, tree-width and tightness of the problems that are written as files."""


def k_tree(num_nodes: int, *, width: int, tightness: float | None, num_strategies: int = 4, seed: int = 0) -> Problem:
    """Return whole-number costs on a random k-tree, where what costs less uses more for a while.

    Every node is joined to `width` earlier ones that are all joined to each other, so the tree-width is `width` exactly
    (if there are more nodes than that). It picks them among recent nodes, as the values of a program do.

    Args:
        num_nodes: Nodes.
        width: Tree-width.
        tightness: Limit between the peak if every node uses its least (0), which just fits, and that of the cheapest
            choice of each node alone (1); None for no limit.
        num_strategies: Strategies of each node.
        seed: Of everything random.
    """
    rng = np.random.default_rng(seed)
    cliques: list[tuple[int, ...]] = []
    edges: list[tuple[int, int, NDArray[Any]]] = []
    costs: list[NDArray[Any]] = []
    usages: list[Usage] = []
    tables = [_reshard_table(rng, num_strategies) for _ in range(64)]
    for node in range(num_nodes):
        recent = cliques[-4 * (width + 1) :]
        joined = recent[int(rng.integers(len(recent)))] if recent else tuple(range(node))
        edges += [(other, node, tables[int(rng.integers(len(tables)))]) for other in joined]
        grown = (*joined, node)
        if len(grown) == width:
            cliques.append(grown)
        cliques += [grown[:i] + grown[i + 1 :] for i in range(len(joined)) if len(joined) == width]
        shards = 2 ** np.arange(num_strategies)
        costs.append(rng.integers(0, 200, num_strategies) + 100 * np.arange(num_strategies))
        life = 1 + int(rng.geometric(1 / 40))
        usages.append(Usage(node, node, min(node + life, num_nodes), int(rng.integers(1, 1 << 20)) * 8 // shards))
    limit = None
    if tightness is not None:
        least = _peak(num_nodes, usages, [u.amounts.min() for u in usages])
        cheapest = _peak(num_nodes, usages, [u.amounts[c.argmin()] for u, c in zip(usages, costs, strict=True)])
        limit = int(least + tightness * (cheapest - least))
    name = f"k-tree-{num_nodes}-{width}-{'free' if tightness is None else tightness}"
    return Problem.build(costs, edges, usages=usages, limit=limit, name=name)


def layered(
    num_nodes: int,
    *,
    nodes_per_layer: int = 500,
    num_edges: int | None = None,
    max_strategies: int = 29,
    tied: float = 0.6,
    distinct: float = 0.0,
    tightness: float | None = 0.3,
    seed: int = 0,
) -> Problem:
    """Return whole-number costs of equal layers one after another, where most nodes follow others.

    It has the traits of the contest's files: few distinct tables, forbidden pairs in tables that tie two nodes, uses
    that live for a while, and a few strategies or dozens. A node is joined to an earlier one of its layer or
    of the layer before, unless that would come before the first.

    Args:
        num_nodes: Nodes.
        nodes_per_layer: Nodes of a layer; the last one may have fewer.
        num_edges: Edges, about; three for every two nodes by default, one for each node at least.
        max_strategies: Strategies of a node at most; at least half of that.
        tied: Share of the nodes that follow an earlier one.
        distinct: Share of the tables that are like no other one.
        tightness: As for `k_tree`; the least use may not fit, because followers have no choice.
        seed: Of everything random.
    """
    rng = np.random.default_rng(seed)
    layer = min(nodes_per_layer, num_nodes)
    sizes = rng.integers(max(1, max_strategies // 2), max_strategies + 1, layer)
    costs = [rng.integers(0, 10**6, size) for size in sizes]
    per_layer = round((num_edges if num_edges is not None else 1.5 * num_nodes) * layer / num_nodes)
    second = np.concatenate([np.arange(layer), rng.integers(0, layer, max(0, per_layer - layer))])
    back = 1 + rng.geometric(1 / 20, len(second)) % (layer - 1 if layer > 1 else 1)
    follows = np.concatenate([rng.random(layer) < tied, np.zeros(len(second) - layer, bool)])
    tables = []
    for node, distance, tie in zip(second.tolist(), back.tolist(), follows.tolist(), strict=True):
        rows, columns = int(sizes[(node - distance) % layer]), int(sizes[node])
        table = rng.integers(0, 10**6, (rows, columns)) * (rng.random((rows, columns)) < 0.7)
        if tie:
            partner = rng.integers(0, columns, rows)
            table = np.where(np.arange(columns) == partner[:, None], table, FORBIDDEN)
        tables.append(table)
    edges: list[tuple[int, int, NDArray[Any]]] = []
    usages: list[Usage] = []
    amounts = [(int(rng.integers(1, 1 << 30)) // (1 + rng.integers(0, 64, size))).astype(np.int64) for size in sizes]
    lives = 1 + rng.geometric(1 / 60, layer)
    for first in range(0, num_nodes, layer):
        for node, distance, table in zip(second.tolist(), back.tolist(), tables, strict=True):
            if first + node < num_nodes and first + node - distance >= 0:
                own = table + (rng.random(table.shape) < 0.1) if rng.random() < distinct else table
                edges.append((first + node - distance, first + node, own))
        for place in range(min(layer, num_nodes - first)):
            node = first + place
            usages.append(Usage(node, node, min(node + int(lives[place]), num_nodes), amounts[place]))
    node_costs = [costs[node % layer] for node in range(num_nodes)]
    limit = None
    if tightness is not None:
        least = _peak(num_nodes, usages, [u.amounts.min() for u in usages])
        cheapest = _peak(num_nodes, usages, [u.amounts[c.argmin()] for u, c in zip(usages, node_costs, strict=True)])
        limit = int(least + tightness * (cheapest - least))
    return Problem.build(node_costs, edges, usages=usages, limit=limit, name=f"layered-{num_nodes}")


def hubs(
    num_nodes: int,
    *,
    num_hubs: int = 4,
    leaves: float = 0.65,
    num_placements: int = 12,
    max_strategies: int = 16,
    spread: float = 2.0,
    density: int = 6,
    limit: float = 1.1,
    seed: int = 0,
) -> Problem:
    """Return whole-number costs around a few hubs, most nodes being leaves, without forbidden pairs.

    It has the traits of the contest's files that stay open: hubs that thousands of nodes are joined to, a majority of
    nodes with one neighbour, changes of placement that cost what is moved, and a limit just above the least peak. A
    strategy has a placement, and strategies of equal placement differ in their own cost only; what is cheap to compute
    or to join to a hub is not what uses little.

    Args:
        num_nodes: Nodes.
        num_hubs: Nodes among them that are joined to most of the leaves.
        leaves: Share of the nodes that have one neighbour.
        num_placements: Placements; placement k divides the use by 2**k.
        max_strategies: Strategies of a node at most; at least a quarter of that.
        spread: Standard deviation of the logarithm of the nodes' sizes.
        density: Edges from a node that is no leaf to earlier ones, at most; below this.
        limit: Limit, relative to the peak if every node uses its least.
        seed: Of everything random.
    """
    rng = np.random.default_rng(seed)
    points = rng.random((num_placements, 3))
    distance = np.abs(points[:, None, :] - points[None, :, :]).sum(axis=2)
    sizes = np.exp(rng.normal(0.0, spread, num_nodes))
    placements = [
        np.sort(rng.integers(0, num_placements, int(rng.integers(max(2, max_strategies // 4), max_strategies + 1))))
        for _ in range(num_nodes)
    ]
    costs = [
        (1000 * sizes[n] * (0.3 + rng.random(len(own))) * 1.25 ** (own * rng.random())).astype(np.int64)
        for n, own in enumerate(placements)
    ]
    is_leaf = rng.random(num_nodes) < leaves
    is_leaf[:num_hubs] = False
    body = np.flatnonzero(~is_leaf)[num_hubs:]
    edges: list[tuple[int, int, NDArray[Any]]] = []

    def join(first: int, second: int) -> None:
        moved = 2000 * min(sizes[first], sizes[second])
        table = (moved * distance[np.ix_(placements[first], placements[second])]).astype(np.int64)
        edges.append((first, second, table))

    for place, node in enumerate(body.tolist()):
        for _ in range(int(rng.integers(1, density))):
            if place:
                join(int(body[max(0, place - 1 - int(rng.geometric(1 / 6)))]), node)
        if rng.random() < 0.2:
            join(int(rng.integers(num_hubs)), node)
    for node in np.flatnonzero(is_leaf).tolist():
        to_hub = rng.random() < 0.7 or not len(body)
        join(int(num_hubs * rng.random() ** 2) if to_hub else int(rng.choice(body)), node)
    usages = []
    for node, own in enumerate(placements):
        amounts = ((1 << 16) * sizes[node] / 2.0**own).astype(np.int64)
        begin = int(rng.integers(num_nodes))
        life = num_nodes if rng.random() < 0.25 else 2 + int(rng.geometric(1 / 30))
        usages.append(Usage(node, 0 if life == num_nodes else begin, min(begin + life, num_nodes), amounts))
    least = _peak(num_nodes, usages, [u.amounts.min() for u in usages])
    name = f"hubs-{num_nodes}-{num_hubs}-{limit}"
    return Problem.build(costs, edges, usages=usages, limit=int(limit * least), name=name)


def tensors(
    num_nodes: int,
    *,
    mesh: tuple[int, ...] = (4, 8),
    num_dims: int = 3,
    num_hubs: int = 4,
    leaves: float = 0.65,
    density: int = 4,
    max_strategies: int = 16,
    spread: float = 3.0,
    turned: float = 0.3,
    contracted: float = 0.5,
    long_lives: float = 0.4,
    limit: float = 1.1,
    seed: int = 0,
) -> Problem:
    """Return whole-number costs of tensors on a mesh, where memory forces a few large ones to be sharded.

    It has what makes the contest's files without forbidden pairs hard to bound. Sizes are log-normal, so a handful of
    tensors fill the memory at a peak, and the room above the least peak is about what one of them frees or takes: the
    limit is a knapsack of few large items. A use differs between strategies by factors of the mesh only. Replicated
    tensors cost nothing to move and sharded ones much, by size, so most of the cost is what the limit causes.

    Args:
        num_nodes: Nodes, one tensor each; node n is computed at time n.
        mesh: Size of each mesh axis; a strategy gives each axis a dim of the tensor or none.
        num_dims: Dims of a tensor.
        num_hubs: Nodes among them that most of the leaves are joined to.
        leaves: Share of the nodes that have one neighbour.
        density: Edges from a node that is no leaf to earlier ones, at most; below this.
        max_strategies: Strategies of a node at most; at least a quarter of that, and one that uses the whole mesh.
        spread: Standard deviation of the logarithm of the sizes; the largest hundredth has one size.
        turned: Share of the edges over which the dims are permuted.
        contracted: Share of the nodes that must be reduced over the axes of one dim.
        long_lives: Share of the tensors whose life is log-uniform up to the whole time; others live for some steps.
        limit: Limit, relative to the peak if every node uses its least.
        seed: Of everything random.
    """
    rng = np.random.default_rng(seed)
    every = list(product(range(-1, num_dims), repeat=len(mesh)))
    whole = [k for k, placement in enumerate(every) if min(placement) >= 0]
    sizes = 2.0 ** np.round(rng.normal(0.0, spread / np.log(2), num_nodes))
    sizes = np.maximum(4096 * np.minimum(sizes, np.quantile(sizes, 0.99)), np.prod(mesh))

    def shards(placement: tuple[int, ...]) -> float:
        return float(np.prod([n for n, dim in zip(mesh, placement, strict=True) if dim >= 0]))

    def moved(source: tuple[int, ...], target: tuple[int, ...]) -> float:
        """Return what all-gathers and all-to-alls move, as a share of the tensor."""
        total = 0.0
        for axis, (a, b, n) in enumerate(zip(source, target, mesh, strict=True)):
            if a >= 0 and a != b:
                local = np.prod([1 / m for i, m in enumerate(mesh) if i != axis and source[i] >= 0])
                total += float(local) * (n - 1) / n * (1.0 if b < 0 else 4 / n)
        return total

    change = np.array([[moved(a, b) for b in every] for a in every])
    placements = []
    costs = []
    for size in sizes.tolist():
        count = min(len(every), max(4, int(rng.integers(max_strategies // 4, max_strategies + 1))))
        own = {0, *rng.choice(len(every), count, replace=False).tolist()}
        placements.append(np.array(sorted(own if own.intersection(whole) else {*own, int(rng.choice(whole))})))
        dim = int(rng.integers(num_dims)) if rng.random() < contracted else num_dims
        chosen = [every[k] for k in placements[-1].tolist()]
        costs.append(np.array([2 * size / shards(p) * p.count(dim) for p in chosen]).astype(np.int64))
    orders = [np.array(order) for order in permutations(range(num_dims))]
    renumbered = [
        np.array([every.index(tuple(int(order[dim]) if dim >= 0 else -1 for dim in p)) for p in every])
        for order in orders
    ]
    edges: list[tuple[int, int, NDArray[Any]]] = []

    def join(first: int, second: int) -> None:
        order = int(rng.integers(1, len(orders))) if rng.random() < turned and len(orders) > 1 else 0
        table = change[np.ix_(placements[first], renumbered[order][placements[second]])]
        edges.append((first, second, (min(sizes[first], sizes[second]) * table).astype(np.int64)))

    is_leaf = rng.random(num_nodes) < leaves
    is_leaf[:num_hubs] = False
    body = np.flatnonzero(~is_leaf)[num_hubs:]
    for place, node in enumerate(body.tolist()):
        recent = {place - int(rng.geometric(1 / 6)) for _ in range(int(rng.integers(1, density)))}
        for before in sorted({max(0, p) for p in recent}) if place else ():
            join(int(body[before]), node)
        if rng.random() < 0.2:
            join(int(rng.integers(num_hubs)), node)
    for node in np.flatnonzero(is_leaf).tolist():
        to_hub = rng.random() < 0.7 or not len(body)
        join(int(num_hubs * rng.random() ** 2) if to_hub else int(rng.choice(body)), node)
    usages = []
    for node, allowed in enumerate(placements):
        life = int(num_nodes ** rng.random()) if rng.random() < long_lives else 1 + int(rng.geometric(1 / 3))
        amounts = np.array([int(sizes[node] / shards(every[k])) for k in allowed.tolist()])
        usages.append(Usage(node, node, min(node + 1 + life, num_nodes + 1), amounts))
    least = _peak(num_nodes + 1, usages, [u.amounts.min() for u in usages])
    name = f"tensors-{num_nodes}-{limit}"
    return Problem.build(costs, edges, usages=usages, limit=int(limit * least), name=name)


def _reshard_table(rng: np.random.Generator, size: int) -> NDArray[np.int64]:
    """Return costs of a change that are 0 for no change."""
    table = rng.integers(1, 400, (size, size))
    np.fill_diagonal(table, 0)
    return table


def _peak(num_times: int, usages: list[Usage], used: list[Any]) -> int:
    change = [0] * (num_times + 1)
    for usage, amount in zip(usages, used, strict=True):
        change[usage.start] += int(amount)
        change[usage.end] -= int(amount)
    return max(accumulate(change))


def write_family(folder: Path) -> None:
    """Write the problems of `FAMILY` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for nodes, width, tightness in FAMILY:
        name = f"width-{width}_tightness-{tightness}_nodes-{nodes:05}.json.gz"
        iopddl.save(k_tree(nodes, width=width, tightness=tightness), folder / name)


def write_large(folder: Path, *, num_nodes: int = 65_000) -> None:
    """Write layered problems as large as the contest's largest, or larger, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, distinct in (("equal", 0.0), ("distinct", 1.0)):
        problem = layered(num_nodes, nodes_per_layer=max(1, num_nodes // 100), distinct=distinct)
        iopddl.save(problem, folder / f"layers-{name}.json.gz")


def write_hubs(folder: Path) -> None:
    """Write problems around hubs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for nodes in (1000, 5000, 20_000):
        iopddl.save(hubs(nodes), folder / f"hubs-{nodes:05}.json.gz")


def write_tensors(folder: Path) -> None:
    """Write problems of tensors on a mesh into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for nodes, seed in ((300, 7), (1000, 0), (1000, 1), (2000, 0), (5000, 0)):
        iopddl.save(tensors(nodes, seed=seed), folder / f"tensors-{nodes:05}-{seed}.json.gz")


_WRITERS = {"family": write_family, "large": write_large, "hubs": write_hubs, "tensors": write_tensors}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("which", nargs="?", default="family", choices=_WRITERS)
    given = parser.parse_args()
    _WRITERS[given.which](given.folder)
