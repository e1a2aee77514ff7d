"""Families of problems that differ in costs only: their structure is analysed once, their costs assembled per member.

A placement problem is solved at hundreds of dual prices. Its permitted strategies and its contraction (`contract`) do
not depend on the prices, so the costs of the remaining nodes are sums over fixed table entries. The sums and the
elimination of nodes with at most two neighbours are compiled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from autopar.compiled import compiled
from autopar.problem import Problem
from autopar.solvers.model.csr import FlatField
from autopar.solvers.model.graphical_model import Floats, Ints, prepare
from autopar.solvers.model.memory_rows import Flags, Memory
from autopar.solvers.model.table_kernels import separate
from autopar.solvers.reductions.contraction import contract
from autopar.solvers.reductions.elimination import MAX_ENTRIES, elimination_order

MOST_NEW = 1 << 14
"""Initial capacity for entries of tables created by elimination; doubled when exceeded."""

QUICK_WORK = 2_000_000
"""Operations up to which elimination is faster than message passing, which usually closes the gap."""


@dataclass(frozen=True, slots=True, eq=False)
class CoreProblem:
    """A problem after elimination of all nodes with at most two neighbours.

    Attributes:
        flat: Its costs; nodes are renumbered.
        nodes: Root of each remaining node.
        removed: Removed roots in order, shape (removed, 4): root, its two neighbours (-1 for none), and where its
            entries in `best` begin.
        best: The best label of a removed root for each pair of labels of its neighbours.
    """

    flat: FlatField
    nodes: Ints
    removed: Ints
    best: Ints


class ProblemFamily:
    """The structure shared by problems that differ in costs only.

    Args:
        problem: A member of the family, with float costs and without limits.

    Attributes:
        is_permitted: Whether any choice is permitted.
    """

    def __init__(self, problem: Problem) -> None:
        forbidden = replace(
            problem,
            node_costs=tuple(np.where(np.isinf(own), np.inf, 0.0) for own in problem.node_costs),
            edge_tables=tuple(np.where(np.isinf(own), np.inf, 0.0) for own in problem.edge_tables),
            kinship=None,
        )
        prepared = prepare(forbidden)
        contraction = None if prepared is None else contract(prepared.field, Memory.unlimited())
        self.is_permitted = contraction is not None
        if prepared is None or contraction is None:
            return
        maps = [kept[own] for kept, own in zip(prepared.labels, contraction.labels, strict=True)]
        self._roots = contraction.roots
        self._sizes = np.array([len(own) for own in contraction.field.unary], np.int64)
        self._cost_at = _starts([len(own) for own in problem.node_costs])
        self._maps, self._map_at = np.concatenate(maps), _starts([len(own) for own in maps])
        ends = self._roots[problem.edge_nodes]
        low, high = ends.min(axis=1, initial=len(maps)), ends.max(axis=1, initial=0)
        apart = np.flatnonzero(low != high)
        self._pairs, numbers = np.unique(np.stack([low[apart], high[apart]], axis=1), axis=0, return_inverse=True)
        self._pair_of = np.full(len(ends), -1)
        self._pair_of[apart] = numbers.reshape(-1)
        self._orders: dict[tuple[bytes, bytes], list[int] | None] = {}

    def core(self, problem: Problem) -> CoreProblem:
        """Return the core of a member: its costs on the roots that remain after elimination."""
        tables = problem.edge_tables
        entries = np.concatenate([np.zeros(0), *(table.ravel() for table in tables)])
        shapes = np.array([table.shape for table in tables], np.int64).reshape(-1, 2)
        unary, unary_at, pairs, pair_at = _assemble(
            np.concatenate([np.zeros(0), *problem.node_costs]), self._cost_at, self._roots, self._sizes,
            self._maps, self._map_at, problem.edge_nodes, problem.edge_table_ids, problem.edge_weights,
            entries, _starts(shapes.prod(axis=1)), shapes[:, 1].copy(), self._pairs, self._pair_of,
        )  # fmt: skip
        edges, pair_at, pairs, removed, best, left, constant = self._eliminate_small_degrees(
            unary, unary_at, pairs, pair_at
        )
        nodes, place = np.flatnonzero(left), np.cumsum(left, dtype=np.int64) - 1
        order = np.lexsort((edges[:, 1], edges[:, 0]))
        edges, pair_at, sizes = edges[order], pair_at[order], self._sizes[nodes]
        lengths = self._sizes[edges].prod(axis=1)
        whole = np.arange(int(lengths.sum())) + np.repeat(pair_at - _starts(lengths)[:-1], lengths)
        chosen = np.repeat(left, self._sizes)
        flat = FlatField.of_tables(sizes, unary[chosen], place[edges].reshape(-1, 2), pairs[whole], constant)
        return CoreProblem(flat, nodes, removed, best)

    def _eliminate_small_degrees(
        self, unary: Floats, unary_at: Ints, pairs: Floats, pair_at: Ints
    ) -> tuple[Ints, Ints, Floats, Ints, Ints, Flags, float]:
        """Eliminate all nodes with at most two neighbours; `unary` is changed.

        Returns:
            The remaining pairs, where their tables begin, and the tables; the removed nodes and their best labels (as
            in `CoreProblem`); flags of the remaining nodes; and the constant cost of the removed ones.
        """
        count, known = len(self._sizes), len(self._pairs)
        room = known + count  # each removal adds at most one edge
        edges, at = np.zeros((room, 2), np.int64), np.zeros(room, np.int64)
        edges[:known], at[:known] = self._pairs, pair_at[:-1]
        list_at = _starts(np.bincount(self._pairs.ravel(), minlength=count))
        length, costs = max(MOST_NEW, len(pairs)), unary.copy()
        while True:
            tables, best = np.empty(len(pairs) + length), np.empty(length, np.int64)
            tables[: len(pairs)] = pairs
            stands, left = np.zeros(room, bool), np.ones(count, bool)
            removed = np.full((count, 4), -1, np.int64)
            sums = np.zeros(1)
            reached = _reduce(
                self._sizes, unary, unary_at, edges, at, stands, np.zeros(int(list_at[-1]), np.int64), list_at,
                np.zeros(count, np.int64), tables, len(pairs), removed, best, left, sums, known,
            )  # fmt: skip
            if reached >= 0:
                break
            unary[:], length = costs, 2 * length
        kept = np.flatnonzero(stands)
        return edges[kept], at[kept], tables, removed[:reached], best, left, float(sums[0])

    def order(self, core: CoreProblem) -> list[int] | None:
        """Return an elimination order of a core, cached by its structure; None if elimination takes too long."""
        key = core.nodes.tobytes(), core.flat.edges.tobytes()
        if key not in self._orders:
            self._orders[key] = elimination_order(core.flat.field, MAX_ENTRIES, QUICK_WORK)
        return self._orders[key]

    def strategies(self, core: CoreProblem, labels: Sequence[int]) -> tuple[int, ...]:
        """Return the best strategies of all nodes given the labels of a core's nodes."""
        chosen = np.zeros(len(self._sizes), np.int64)
        chosen[core.nodes] = labels
        _invert(core.removed, core.best, self._sizes, chosen)
        return tuple(self._maps[self._map_at[:-1] + chosen[self._roots]].tolist())


def family_of(problem: Problem) -> ProblemFamily | None:
    """Return the family of a problem, created for its first member; None if the problem belongs to none."""
    kinship = problem.kinship
    if kinship is None or problem.limits or problem.is_whole:
        return None
    if not isinstance(kinship.known, ProblemFamily):
        kinship.known = ProblemFamily(problem)
    return kinship.known


def _starts(sizes: Sequence[int] | Ints) -> Ints:
    """Return where consecutive runs of `sizes` begin, and the end of the last run."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(sizes, np.int64), dtype=np.int64)])


@compiled
def _assemble(
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
    """Return the costs of the roots and of pairs of roots, each with the offsets where they begin."""
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
    limits = np.zeros(len(widths), np.bool_)  # whether each table forbids something
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
def _reduce(
    sizes: Ints,
    unary: Floats,
    unary_at: Ints,
    edges: Ints,
    at: Ints,
    stands: Flags,
    links: Ints,
    list_at: Ints,
    degree: Ints,
    tables: Floats,
    num_entries: int,
    removed: Ints,
    best: Ints,
    left: Flags,
    constant: Floats,
    num_edges: int,
) -> int:
    """Eliminate nodes with at most two neighbours; return their number, or -1 if `tables` or `best` is too small.

    `links` holds the edges of each node, never more than initially; `degree` their number.
    """
    for edge in range(num_edges):
        if not _absorb_separable(edges, edge, at, tables, sizes, unary, unary_at):
            stands[edge] = True
            for side in range(2):
                node = edges[edge, side]
                links[list_at[node] + degree[node]] = edge
                degree[node] += 1
    # Nodes with at most two neighbours, by effort; an entry is stale if the node's effort has changed since.
    queue = [
        (_effort(sizes, edges, links, list_at, degree, node), node) for node in range(len(sizes)) if degree[node] <= 2
    ]
    heapify(queue)
    count, num_best, one, two = 0, 0, -1, -1
    while True:
        for changed in (one, two):
            if changed >= 0 and degree[changed] <= 2:
                heappush(queue, (_effort(sizes, edges, links, list_at, degree, changed), changed))
        node = -1
        while queue and node < 0:
            effort, node = heappop(queue)
            if not left[node] or degree[node] > 2 or effort != _effort(sizes, edges, links, list_at, degree, node):
                node = -1
        if node < 0:
            return count
        left[node] = False
        one, two, first, second = -1, -1, -1, -1
        if degree[node] > 0:
            first = links[list_at[node]]
            one = edges[first, 0] + edges[first, 1] - node
        if degree[node] > 1:
            second = links[list_at[node] + 1]
            two = edges[second, 0] + edges[second, 1] - node
            if one > two:
                one, two, first, second = two, one, second, first
        length = (sizes[one] if one >= 0 else 1) * (sizes[two] if two >= 0 else 1)
        if num_best + length > len(best) or num_entries + length > len(tables):
            return -1
        removed[count, 0], removed[count, 1], removed[count, 2], removed[count, 3] = node, one, two, num_best
        count += 1
        _min_sum_product(sizes, unary, unary_at, edges, at, tables, node, first, second, num_entries, best, num_best)
        num_best += length
        if one < 0:
            constant[0] += tables[num_entries]
            continue
        stands[first] = False
        _unlink(links, list_at, degree, one, first)
        if two < 0:
            for x in range(length):
                unary[unary_at[one] + x] += tables[num_entries + x]
            continue
        stands[second] = False
        _unlink(links, list_at, degree, two, second)
        edge = -1
        for k in range(degree[one]):
            if edges[links[list_at[one] + k], 1] == two:
                edge = links[list_at[one] + k]
        if edge >= 0:
            for entry in range(length):
                tables[at[edge] + entry] += tables[num_entries + entry]
            if _absorb_separable(edges, edge, at, tables, sizes, unary, unary_at):
                stands[edge] = False
                _unlink(links, list_at, degree, one, edge)
                _unlink(links, list_at, degree, two, edge)
            continue
        edges[num_edges, 0], edges[num_edges, 1], at[num_edges] = one, two, num_entries
        if not _absorb_separable(edges, num_edges, at, tables, sizes, unary, unary_at):
            num_entries += length
            stands[num_edges] = True
            links[list_at[one] + degree[one]] = num_edges
            links[list_at[two] + degree[two]] = num_edges
            degree[one] += 1
            degree[two] += 1
            num_edges += 1


@compiled
def _effort(sizes: Ints, edges: Ints, links: Ints, list_at: Ints, degree: Ints, node: int) -> int:
    """Return the number of entries visited by the elimination of a node."""
    effort = sizes[node]
    for k in range(degree[node]):
        edge = links[list_at[node] + k]
        effort *= sizes[edges[edge, 0] + edges[edge, 1] - node]
    return int(effort)


@compiled
def _min_sum_product(
    sizes: Ints,
    unary: Floats,
    unary_at: Ints,
    edges: Ints,
    at: Ints,
    tables: Floats,
    node: int,
    first: int,
    second: int,
    into: int,
    best: Ints,
    best_at: int,
) -> None:
    """Write the min-sum elimination of a node: its least cost per pair of neighbour labels, and the best label.

    Args:
        sizes: Number of labels of each node.
        unary: Costs of the labels.
        unary_at: Where each node's costs begin.
        edges: Nodes of each edge.
        at: Where each edge's table begins.
        tables: The tables; the least costs are written there as well.
        node: The node.
        first: Its edge to one neighbour; -1 for none.
        second: Its edge to the other neighbour; -1 for none.
        into: Where the least costs are written in `tables`.
        best: The best labels are written here.
        best_at: Where they are written in `best`.
    """
    rows = sizes[edges[first, 0] + edges[first, 1] - node] if first >= 0 else 1
    columns = sizes[edges[second, 0] + edges[second, 1] - node] if second >= 0 else 1
    # Strides: from one label of the node, and of a neighbour, to the next.
    own, along = (rows, 1) if first >= 0 and edges[first, 0] == node else (1, sizes[node])
    other, across = (columns, 1) if second >= 0 and edges[second, 0] == node else (1, sizes[node])
    for entry in range(rows * columns):
        tables[into + entry] = np.inf
        best[best_at + entry] = 0
    for label in range(sizes[node]):
        for x in range(rows):
            cost = unary[unary_at[node] + label]
            if first >= 0:
                cost += tables[at[first] + label * own + x * along]
            if cost == np.inf:
                continue
            for y in range(columns):
                whole = cost
                if second >= 0:
                    whole += tables[at[second] + label * other + y * across]
                if whole < tables[into + x * columns + y]:
                    tables[into + x * columns + y] = whole
                    best[best_at + x * columns + y] = label


@compiled
def _absorb_separable(
    edges: Ints, edge: int, at: Ints, tables: Floats, sizes: Ints, unary: Floats, unary_at: Ints
) -> bool:
    """Add a separable table (cost per row plus cost per column) to the unary costs; return whether it is one."""
    one, two = edges[edge, 0], edges[edge, 1]
    rows, columns = sizes[one], sizes[two]
    of_rows, of_columns = np.empty(rows), np.empty(columns)
    table = tables[at[edge] : at[edge] + rows * columns].reshape((rows, columns))
    if not separate(table, of_rows, of_columns):
        return False
    for x in range(rows):
        unary[unary_at[one] + x] += of_rows[x]
    for y in range(columns):
        unary[unary_at[two] + y] += of_columns[y]
    return True


@compiled
def _unlink(links: Ints, list_at: Ints, degree: Ints, node: int, edge: int) -> None:
    """Remove an edge from a node's list; the last edge takes its place."""
    for k in range(degree[node]):
        if links[list_at[node] + k] == edge:
            degree[node] -= 1
            links[list_at[node] + k] = links[list_at[node] + degree[node]]
            return


@compiled
def _invert(removed: Ints, best: Ints, sizes: Ints, chosen: Ints) -> None:
    """Write the best labels of removed nodes, in reverse order of removal, given all other labels."""
    for step in range(len(removed) - 1, -1, -1):
        one, two = removed[step, 1], removed[step, 2]
        place = chosen[one] if one >= 0 else 0
        if two >= 0:
            place = place * sizes[two] + chosen[two]
        chosen[removed[step, 0]] = best[removed[step, 3] + place]
