"""Problems that are akin, of which costs differ and nothing else: what follows from what is forbidden is found once.

A placement problem is solved at hundreds of prices. Which strategies are permitted and which nodes follow others
(`merge`) is the same at all of them, so that the costs of the nodes that are left are sums over the same entries. These
sums, and the elimination of nodes with at most two neighbours, are compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.problem import Problem
from autopar.solvers.compiled import compiled
from autopar.solvers.eliminate import MAX_ENTRIES, MAX_WORK, order_of
from autopar.solvers.entries import separate
from autopar.solvers.field import Floats, Ints, prepare
from autopar.solvers.flat import Flat
from autopar.solvers.memory import Flags, Memory
from autopar.solvers.merge import merge


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """What is left of a problem without nodes that have at most two neighbours.

    Attributes:
        flat: Its costs; nodes are numbered anew.
        nodes: Roots that its nodes are.
        removed: Roots that were removed, in order, with their neighbours (-1 for none) and where `best` begins for
            them, (removed, 4).
        best: The best label of a removed root for all pairs of labels of its neighbours.
    """

    flat: Flat
    nodes: Ints
    removed: Ints
    best: Ints


class Frame:
    """What problems that are akin have in common.

    Args:
        problem: One of them, of floats and without limits.

    Attributes:
        is_permitted: Whether any choice is.
    """

    def __init__(self, problem: Problem) -> None:
        forbidden = replace(
            problem,
            node_costs=tuple(np.where(np.isinf(own), np.inf, 0.0) for own in problem.node_costs),
            edge_tables=tuple(np.where(np.isinf(own), np.inf, 0.0) for own in problem.edge_tables),
            kinship=None,
        )
        prepared = prepare(forbidden)
        merged = None if prepared is None else merge(prepared.field, Memory.unlimited())
        self.is_permitted = merged is not None
        if prepared is None or merged is None:
            return
        maps = [kept[own] for kept, own in zip(prepared.labels, merged.labels, strict=True)]
        self._roots = merged.roots
        self._sizes = np.array([len(own) for own in merged.field.unary], np.int64)
        self._cost_at = _starts([len(own) for own in problem.node_costs])
        self._maps, self._map_at = np.concatenate(maps), _starts([len(own) for own in maps])
        ends = self._roots[problem.edge_nodes]
        low, high = ends.min(axis=1, initial=len(maps)), ends.max(axis=1, initial=0)
        apart = np.flatnonzero(low != high)
        self._pairs, numbers = np.unique(np.stack([low[apart], high[apart]], axis=1), axis=0, return_inverse=True)
        self._pair_of = np.full(len(ends), -1)
        self._pair_of[apart] = numbers.reshape(-1)
        self._orders: dict[tuple[bytes, bytes], list[int] | None] = {}

    def core(self, problem: Problem) -> Core:
        """Return what is left of a problem."""
        tables = problem.edge_tables
        entries = np.concatenate([np.zeros(0), *(table.ravel() for table in tables)])
        shapes = np.array([table.shape for table in tables], np.int64).reshape(-1, 2)
        unary, unary_at, pairs, pair_at = _assembled(
            np.concatenate([np.zeros(0), *problem.node_costs]), self._cost_at, self._roots, self._sizes,
            self._maps, self._map_at, problem.edge_nodes, problem.edge_table_ids, problem.edge_weights,
            entries, _starts(shapes.prod(axis=1)), shapes[:, 1].copy(), self._pairs, self._pair_of,
        )  # fmt: skip
        edges, pair_at, pairs, removed, best, left, constant = _reduced(
            self._sizes, unary, unary_at, self._pairs, pairs, pair_at
        )
        nodes, place = np.flatnonzero(left), np.cumsum(left, dtype=np.int64) - 1
        order = np.lexsort((edges[:, 1], edges[:, 0]))
        edges, pair_at, sizes = edges[order], pair_at[order], self._sizes[nodes]
        lengths = self._sizes[edges].prod(axis=1)
        whole = np.arange(int(lengths.sum())) + np.repeat(pair_at - _starts(lengths)[:-1], lengths)
        chosen = np.repeat(left, self._sizes)
        flat = Flat.of_tables(sizes, unary[chosen], place[edges].reshape(-1, 2), pairs[whole], constant)
        return Core(flat, nodes, removed, best)

    def order(self, core: Core) -> list[int] | None:
        """Return an order to eliminate what is left in; None if tables get too large. Others have the same."""
        key = core.nodes.tobytes(), core.flat.edges.tobytes()
        if key not in self._orders:
            self._orders[key] = order_of(core.flat.field, MAX_ENTRIES, MAX_WORK)
        return self._orders[key]

    def strategies(self, core: Core, labels: Sequence[int]) -> tuple[int, ...]:
        """Return the best choice with given labels of the nodes of a core."""
        chosen = np.zeros(len(self._sizes), np.int64)
        chosen[core.nodes] = labels
        _invert(core.removed, core.best, self._sizes, chosen)
        return tuple(self._maps[self._map_at[:-1] + chosen[self._roots]].tolist())


def frame_of(problem: Problem) -> Frame | None:
    """Return what a problem has in common with those akin to it; None if it is not made to be one of many."""
    kinship = problem.kinship
    if kinship is None or problem.limits or problem.is_whole:
        return None
    if not isinstance(kinship.known, Frame):
        kinship.known = Frame(problem)
    return kinship.known


def _starts(sizes: Sequence[int] | Ints) -> Ints:
    """Return where consecutive runs of `sizes` begin, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64), dtype=np.int64)])


@compiled
def _assembled(
    costs: Floats,
    cost_at: Ints,
    roots: Ints,
    sizes: Ints,
    maps: Ints,
    map_at: Ints,
    ends: Ints,
    table_of: Ints,
    weights: Floats,
    entries: Floats,
    entry_at: Ints,
    widths: Ints,
    pairs: Ints,
    pair_of: Ints,
) -> tuple[Floats, Ints, Floats, Ints]:
    """Return the costs of labels of roots and where they begin, and those of pairs of roots and where they begin."""
    unary_at = np.zeros(len(sizes) + 1, np.int64)
    for root in range(len(sizes)):
        unary_at[root + 1] = unary_at[root] + sizes[root]
    pair_at = np.zeros(len(pairs) + 1, np.int64)
    for pair in range(len(pairs)):
        pair_at[pair + 1] = pair_at[pair] + sizes[pairs[pair, 0]] * sizes[pairs[pair, 1]]
    unary, joined = np.zeros(unary_at[-1]), np.zeros(pair_at[-1])
    for node in range(len(roots)):
        begin, own = unary_at[roots[node]], map_at[node]
        for label in range(sizes[roots[node]]):
            unary[begin + label] += costs[cost_at[node] + maps[own + label]]
    limits = np.zeros(len(widths), np.bool_)  # which tables forbid something
    for table in range(len(widths)):
        for entry in range(entry_at[table], entry_at[table + 1]):
            if np.isinf(entries[entry]):
                limits[table] = True
                break
    for edge in range(len(ends)):
        weight, table = weights[edge], table_of[edge]
        if weight == 0.0 and not limits[table]:
            continue
        first, second = ends[edge, 0], ends[edge, 1]
        own, other = map_at[first], map_at[second]
        width, start = widths[table], entry_at[table]
        one, two = roots[first], roots[second]
        if one == two:
            for label in range(sizes[one]):
                cost = entries[start + maps[own + label] * width + maps[other + label]]
                unary[unary_at[one] + label] += cost if np.isinf(cost) else weight * cost
            continue
        begin = pair_at[pair_of[edge]]
        along, across = (sizes[two], 1) if one < two else (1, sizes[one])
        for x in range(sizes[one]):
            row = start + maps[own + x] * width
            for y in range(sizes[two]):
                cost = entries[row + maps[other + y]]
                joined[begin + x * along + y * across] += cost if np.isinf(cost) else weight * cost
    return unary, unary_at, joined, pair_at


@compiled
def _reduced(
    sizes: Ints, unary: Floats, unary_at: Ints, joined: Ints, pairs: Floats, pair_at: Ints
) -> tuple[Ints, Ints, Floats, Ints, Ints, Flags, float]:
    """Remove all nodes with at most two neighbours; `unary` is changed.

    Returns:
        The pairs that are left, where their tables begin, and these; the nodes that were removed and their best labels
        (`Core`); which nodes are left; and what the removed ones cost for certain.
    """
    count, known = len(sizes), len(joined)
    edges = np.zeros((known + count, 2), np.int64)  # one more for each node that is removed at most
    edges[:known] = joined
    at = np.zeros(known + count, np.int64)
    at[:known] = pair_at[:-1]
    stands = np.zeros(known + count, np.bool_)
    degree = np.zeros(count, np.int64)
    for edge in range(known):
        degree[edges[edge, 0]] += 1
        degree[edges[edge, 1]] += 1
    list_at = np.zeros(count + 1, np.int64)
    for node in range(count):
        list_at[node + 1] = list_at[node] + degree[node]
    links = np.zeros(list_at[-1], np.int64)  # edges of each node: never more than at first
    degree[:] = 0
    for edge in range(known):
        size = sizes[edges[edge, 0]] * sizes[edges[edge, 1]]
        if _absorbed(edges[edge], pairs[at[edge] : at[edge] + size], sizes, unary, unary_at):
            continue
        stands[edge] = True
        for side in range(2):
            node = edges[edge, side]
            links[list_at[node] + degree[node]] = edge
            degree[node] += 1
    removed = np.full((count, 4), -1, np.int64)
    best = np.zeros(1024, np.int64)
    num_removed, num_best, num_edges, num_entries = 0, 0, known, len(pairs)
    left = np.ones(count, np.bool_)
    constant = 0.0
    while True:
        chosen, least = -1, 0.0
        for node in range(count):
            if left[node] and degree[node] <= 2:
                effort = float(sizes[node])
                for k in range(degree[node]):
                    edge = links[list_at[node] + k]
                    effort *= sizes[edges[edge, 0] + edges[edge, 1] - node]
                if chosen < 0 or effort < least:
                    chosen, least = node, effort
        if chosen < 0:
            break
        left[chosen] = False
        own = unary[unary_at[chosen] : unary_at[chosen + 1]]
        neighbours, through = np.full(2, -1, np.int64), np.full(2, -1, np.int64)
        for k in range(degree[chosen]):
            edge = links[list_at[chosen] + k]
            neighbours[k], through[k] = edges[edge, 0] + edges[edge, 1] - chosen, edge
            stands[edge] = False
        if degree[chosen] == 2 and neighbours[0] > neighbours[1]:
            neighbours, through = neighbours[::-1].copy(), through[::-1].copy()
        one, two = neighbours[0], neighbours[1]
        rows = sizes[one] if one >= 0 else 1
        columns = sizes[two] if two >= 0 else 1
        while num_best + rows * columns > len(best):
            best = np.concatenate((best, np.zeros(len(best), np.int64)))
        removed[num_removed, 0], removed[num_removed, 1], removed[num_removed, 2] = chosen, one, two
        removed[num_removed, 3] = num_best
        for k in range(degree[chosen]):
            _unlink(links, list_at, degree, neighbours[k], through[k])
        total = np.full(rows * columns, np.inf)
        label_of = best[num_best : num_best + rows * columns]
        for label in range(sizes[chosen]):
            for x in range(rows):
                cost = own[label]
                if one >= 0:
                    cost += _entry(edges, at, pairs, sizes, through[0], chosen, label, x)
                if cost == np.inf:
                    continue
                if two < 0:
                    if cost < total[x]:
                        total[x], label_of[x] = cost, label
                    continue
                start = at[through[1]]
                along = 1
                if edges[through[1], 0] == chosen:
                    start += label * columns
                else:
                    start += label
                    along = sizes[chosen]
                for y in range(columns):
                    whole = cost + pairs[start + y * along]
                    if whole < total[x * columns + y]:
                        total[x * columns + y], label_of[x * columns + y] = whole, label
        num_removed += 1
        num_best += rows * columns
        if one < 0:
            constant += total[0]
        elif two < 0:
            for x in range(rows):
                unary[unary_at[one] + x] += total[x]
        else:
            edge = -1
            for k in range(degree[one]):
                if edges[links[list_at[one] + k], 1] == two:
                    edge = links[list_at[one] + k]
            is_new = edge < 0
            if is_new:
                edge = num_edges
                num_edges += 1
                edges[edge, 0], edges[edge, 1] = one, two
                while num_entries + len(total) > len(pairs):
                    pairs = np.concatenate((pairs, np.zeros(len(pairs) + 1024)))
                at[edge] = num_entries
                num_entries += len(total)
                pairs[at[edge] : at[edge] + len(total)] = total
                stands[edge] = True
                for node in (one, two):
                    links[list_at[node] + degree[node]] = edge
                    degree[node] += 1
            else:
                for entry in range(len(total)):
                    pairs[at[edge] + entry] += total[entry]
            if _absorbed(edges[edge], pairs[at[edge] : at[edge] + len(total)], sizes, unary, unary_at):
                stands[edge] = False
                _unlink(links, list_at, degree, one, edge)
                _unlink(links, list_at, degree, two, edge)
    kept = np.flatnonzero(stands[:num_edges])
    return edges[kept], at[kept], pairs, removed[:num_removed], best[:num_best], left, constant


@compiled
def _absorbed(edge: Ints, table: Floats, sizes: Ints, unary: Floats, unary_at: Ints) -> bool:
    """Give a table that is a cost per row plus a cost per column to its nodes, and return whether it is one."""
    one, two = edge[0], edge[1]
    of_rows, of_columns = np.empty(sizes[one]), np.empty(sizes[two])
    if not separate(table.reshape((sizes[one], sizes[two])), of_rows, of_columns):
        return False
    for x in range(sizes[one]):
        unary[unary_at[one] + x] += of_rows[x]
    for y in range(sizes[two]):
        unary[unary_at[two] + y] += of_columns[y]
    return True


@compiled
def _unlink(links: Ints, list_at: Ints, degree: Ints, node: int, edge: int) -> None:
    """Take an edge from those of a node; the last one gets its place."""
    for k in range(degree[node]):
        if links[list_at[node] + k] == edge:
            degree[node] -= 1
            links[list_at[node] + k] = links[list_at[node] + degree[node]]
            return


@compiled
def _entry(edges: Ints, at: Ints, pairs: Floats, sizes: Ints, edge: int, node: int, label: int, other: int) -> float:
    """Return what a label of a node costs with a label of the other node of an edge."""
    if edges[edge, 0] == node:
        return float(pairs[at[edge] + label * sizes[edges[edge, 1]] + other])
    return float(pairs[at[edge] + other * sizes[node] + label])


@compiled
def _invert(removed: Ints, best: Ints, sizes: Ints, chosen: Ints) -> None:
    """Write the labels of removed nodes, given those of all others."""
    for step in range(len(removed) - 1, -1, -1):
        one, two = removed[step, 1], removed[step, 2]
        place = chosen[one] if one >= 0 else 0
        if two >= 0:
            place = place * sizes[two] + chosen[two]
        chosen[removed[step, 0]] = best[removed[step, 3] + place]
