"""Exact min-sum elimination of nodes (bucket elimination, Dechter 1999; Bertele and Brioschi 1972), and min-marginals.

    m(x_N) = min_v [ c_v(v) + sum_{n in N} t_vn(v, x_n) ]

Eliminating node v with neighbours N leaves the table m on N; the optimum stays, and the best v follows from x_N. With
at most two neighbours the result is again a pairwise field; eliminating all nodes costs exponential in the treewidth.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solvers.base import Budget
from autopar.solvers.model.graphical_model import Field, Floats
from autopar.solvers.model.table_kernels import min_sum_product

MAX_ENTRIES = 2_000_000
"""Largest table of an exact elimination, in entries (16 MB)."""
MAX_WORK = 40_000_000
"""Entries of all tables of an exact elimination, times the tables added up in each; about half a second."""


@dataclass(frozen=True, slots=True, eq=False)
class _EliminatedNode:
    """An eliminated node with its tables at that moment (its labels first)."""

    node: int
    unary: Floats
    neighbours: tuple[int, ...]
    tables: tuple[Floats, ...]


@dataclass(slots=True)
class ReducedField:
    """A field with some nodes eliminated, and the map back.

    Attributes:
        field: The remaining field; eliminated nodes have no labels.
        removed: The eliminated nodes in order.
    """

    field: Field
    removed: list[_EliminatedNode]

    def invert(self, choice: Sequence[int]) -> list[int]:
        """Return optimal labels of all nodes given those of the remaining ones (entries of the others are ignored)."""
        result = list(choice)
        for step in reversed(self.removed):
            costs = step.unary
            for neighbour, table in zip(step.neighbours, step.tables, strict=True):
                costs = costs + table[:, result[neighbour]]
            result[step.node] = int(costs.argmin())
        return result


def eliminate(field: Field, keep: Collection[int] = ()) -> ReducedField:
    """Eliminate nodes with at most two neighbours, except those in `keep`, until there is none."""
    work = field.copy()
    removed: list[_EliminatedNode] = []
    kept = set(keep)
    heap = [
        (_effort(work, v), v)
        for v, u in enumerate(work.unary)
        if len(u) and v not in kept and len(work.adjacent[v]) <= 2
    ]
    heapq.heapify(heap)
    while heap:
        effort, v = heapq.heappop(heap)
        if len(work.unary[v]) == 0:
            continue
        if (now := _effort(work, v)) != effort:  # stale: a neighbour has changed, so requeue with the current effort
            if len(work.adjacent[v]) <= 2:
                heapq.heappush(heap, (now, v))
            continue
        neighbours = tuple(sorted(work.adjacent[v]))
        unary = work.unary[v]
        tables = tuple(work.table(v, n) for n in neighbours)
        removed.append(_EliminatedNode(v, unary, neighbours, tables))
        raw = [work.tables[min(v, n), max(v, n)] for n in neighbours]
        for n in neighbours:
            work.cut(v, n)
        work.unary[v] = unary[:0]
        if not neighbours:
            work.constant += float(unary.min())
        elif len(neighbours) == 1:
            work.unary[neighbours[0]] = work.unary[neighbours[0]] + (unary[:, None] + tables[0]).min(axis=0)
        else:
            one, two = neighbours
            work.add(one, two, min_sum_product(unary, raw[0], v > one, raw[1], v > two))
        for n in neighbours:
            if n not in kept and len(work.adjacent[n]) <= 2:
                heapq.heappush(heap, (_effort(work, n), n))
    return ReducedField(work, removed)


def _effort(field: Field, v: int) -> int:
    effort = len(field.unary[v])
    for n in field.adjacent[v]:
        effort *= len(field.unary[n])
    return effort


def elimination_order(field: Field, max_entries: int, max_work: int) -> list[int] | None:
    """Return an elimination order of all nodes, greedily by table size (min-size order); None if too expensive."""
    adjacent = [set(n) for n in field.adjacent]
    sizes = [len(u) for u in field.unary]
    left = {v for v, s in enumerate(sizes) if s}

    def entries(v: int) -> int:
        total = sizes[v]
        for n in adjacent[v]:
            total *= sizes[n]
        return total

    heap = [(entries(v), v) for v in left]
    heapq.heapify(heap)
    order: list[int] = []
    work = 0
    while heap:
        size, v = heapq.heappop(heap)
        if v not in left:
            continue
        if (now := entries(v)) != size:
            heapq.heappush(heap, (now, v))
            continue
        work += size * (1 + len(adjacent[v]))
        if size > max_entries or work > max_work:
            return None
        left.discard(v)
        order.append(v)
        neighbours = adjacent[v]
        for n in neighbours:
            adjacent[n] |= neighbours
            adjacent[n] -= {n, v}
        for n in neighbours:
            heapq.heappush(heap, (entries(n), n))
    return order


def drop_weak_tables(field: Field, max_entries: int, max_work: int) -> tuple[Field, list[int]]:
    """Return a field of costs >= 0 without its weakest tables, cheap enough to eliminate, and the elimination order.

    Relaxes: the dropped tables. Valid when: all costs are >= 0. Costs: a binary search over elimination orders. A
    maximum spanning forest by mean cost always stays. Source: edge deletion, cf. mini-buckets (Dechter and Rish 2003).
    """
    strength = {pair: float(np.minimum(table, 1e300).mean()) for pair, table in field.tables.items()}
    root = list(range(len(field.unary)))

    def find(v: int) -> int:
        while root[v] != v:
            root[v] = root[root[v]]
            v = root[v]
        return v

    forest: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for a, b in sorted(field.tables, key=lambda pair: -strength[pair]):
        if find(a) != find(b):
            root[find(a)] = find(b)
            forest.append((a, b))
        else:
            others.append((a, b))

    def trial(count: int) -> tuple[Field, list[int] | None]:
        kept = forest + others[:count]
        part = Field(field.unary, {pair: field.tables[pair] for pair in kept}, constant=field.constant)
        return part, elimination_order(part, max_entries, max_work)

    low, high = 0, len(others) + 1
    best, order = trial(0)
    while high - low > 1:
        middle = (low + high) // 2
        part, found = trial(middle)
        if found is None:
            high = middle
        else:
            low, best, order = middle, part, found
    return best, order if order is not None else [v for v, u in enumerate(field.unary) if len(u)]


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Result of eliminating one node: `total` has the axes `(*scope, node)`."""

    scope: tuple[int, ...]
    total: Floats
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Marginals:
    """Rise of the optimum per label and per pair: min-marginals minus the optimum, >= 0.

    Attributes:
        nodes: Per node, shape (labels,).
        pairs: Per pair with a table, in the table's shape.
    """

    nodes: list[Floats]
    pairs: dict[tuple[int, int], Floats]

    def forbid_above(self, field: Field, room: float) -> Field:
        """Return `field`, of equal nodes and pairs, with labels and pairs forbidden whose rise exceeds `room`."""
        result = field.copy()
        result.unary = [np.where(rise > room, np.inf, u) for u, rise in zip(field.unary, self.nodes, strict=True)]
        for pair, rise in self.pairs.items():
            result.tables[pair] = np.where(rise > room, np.inf, field.tables[pair])
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Eliminated:
    """A field with all nodes eliminated.

    Attributes:
        field: The field.
        order: The elimination order.
        buckets: Result of each elimination, by node.
        optimum: The least cost.
    """

    field: Field
    order: tuple[int, ...]
    buckets: dict[int, _Bucket]
    optimum: float

    def choice(self) -> list[int]:
        """Return an optimal choice, decoded in reverse elimination order."""
        result = [0] * len(self.field.unary)
        for v in reversed(self.order):
            bucket = self.buckets[v]
            result[v] = int(bucket.total[tuple(result[n] for n in bucket.scope)].argmin())
        return result

    def marginals(self) -> "Marginals":
        """Return the min-marginals minus the optimum of all labels and pairs, by a downward pass over the buckets."""
        nodes = [np.zeros(len(u)) for u in self.field.unary]
        pairs: dict[tuple[int, int], Floats] = {}
        beliefs: dict[int, tuple[tuple[int, ...], Floats]] = {}
        for v in reversed(self.order):
            bucket = self.buckets[v]
            axes = (*bucket.scope, v)
            if bucket.scope:
                outer_axes, outer = beliefs[bucket.scope[0]]
                needed = outer.min(axis=tuple(i for i, n in enumerate(outer_axes) if n not in bucket.scope))
                left = [n for n in outer_axes if n in bucket.scope]
                needed = needed.transpose([left.index(n) for n in bucket.scope])
                message = bucket.total.min(axis=-1)
                rest = np.where(np.isinf(message), np.inf, needed - np.where(np.isinf(message), 0.0, message))
                belief = bucket.total + rest[..., None]
            else:
                belief = bucket.total - bucket.total.min()
            beliefs[v] = (axes, belief)
            nodes[v] = belief.min(axis=tuple(range(len(axes) - 1)))
            for a, b in bucket.pairs:
                first, second = axes.index(a), axes.index(b)
                pair = belief.min(axis=tuple(i for i in range(len(axes)) if i not in (first, second)))
                pairs[a, b] = pair if first < second else pair.T
        return Marginals(nodes, pairs)


def eliminate_all(field: Field, order: Sequence[int], budget: Budget | None) -> Eliminated | None:
    """Eliminate all nodes in `order`; None if the budget, if there is one, ran out.

    Tables may have any number of dims; `elimination_order` bounds their size beforehand.
    """
    place = {v: i for i, v in enumerate(order)}
    terms: dict[int, list[tuple[tuple[int, ...], Floats]]] = {v: [((v,), field.unary[v])] for v in order}
    pairs: dict[int, list[tuple[int, int]]] = {v: [] for v in order}
    for (a, b), table in field.tables.items():
        first = a if place[a] < place[b] else b
        terms[first].append(((a, b), table))
        pairs[first].append((a, b))
    buckets: dict[int, _Bucket] = {}
    optimum = field.constant
    for v in order:
        if budget is not None and budget.spent():
            return None
        own = terms.pop(v)
        scope = tuple(sorted({n for nodes, _ in own for n in nodes} - {v}, key=place.__getitem__))
        axes = (*scope, v)
        total: Floats | None = None
        for nodes, table in sorted(
            own, key=lambda term: term[1].size
        ):  # the largest table last, so that the full product of dims is formed late
            aligned = table.transpose(sorted(range(len(nodes)), key=lambda i: axes.index(nodes[i])))
            aligned = aligned.reshape([len(field.unary[n]) if n in nodes else 1 for n in axes])
            total = aligned if total is None else total + aligned
            if budget is not None:
                budget.work.spend(total.size)
        assert total is not None, "every bucket holds the node's own costs"
        buckets[v] = _Bucket(scope, total, tuple(pairs[v]))
        if scope:
            terms[scope[0]].append((scope, total.min(axis=-1)))
        else:
            optimum += float(total.min())
    return Eliminated(field, tuple(order), buckets, optimum)
