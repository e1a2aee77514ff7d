"""The pairwise graphical model solvers work on: a Markov random field, equivalently a binary WCSP, in float64.

    cost(x) = constant + sum_i unary_i[x_i] + sum_{a < b} table_ab[x_a, x_b]        infinity: forbidden

A `Field` has *nodes* (variables) with *labels* (domain values): the strategies of a `Problem` that survived
preprocessing. Each reduction keeps what is needed to map a choice of labels back to strategies.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled
from autopar.problem import FORBIDDEN, Numbers, Problem
from autopar.solvers.model import table_kernels
from autopar.solvers.model.table_kernels import SAME_COLUMNS, SAME_ROWS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled
def _propagate(offsets: Ints, alive: NDArray[np.bool_], pairs: Ints, permitted: NDArray[np.bool_]) -> None:
    """Enforce arc consistency: clear `alive` for labels without a permitted partner (AC-3, Mackworth 1977).

    `pairs` has rows (first node, second node, offset of the pair's flags in `permitted`).
    """
    count = len(pairs)
    starts = np.zeros(len(offsets), np.int64)
    for e in range(count):
        starts[pairs[e, 0] + 1] += 1
        starts[pairs[e, 1] + 1] += 1
    starts = np.cumsum(starts)
    fill = starts.copy()
    of = np.zeros(2 * count, np.int64)  # the pairs of each node, concatenated
    for e in range(count):
        for side in range(2):
            of[fill[pairs[e, side]]] = e
            fill[pairs[e, side]] += 1
    queued = np.ones(count, np.bool_)
    pending = np.arange(count)  # a ring buffer: each pair is in it at most once
    head, waiting = 0, count
    while waiting > 0:
        e = pending[head]
        head = (head + 1) % count
        waiting -= 1
        queued[e] = False
        for side in range(2):
            node, other = pairs[e, side], pairs[e, 1 - side]
            size, partners = offsets[node + 1] - offsets[node], offsets[other + 1] - offsets[other]
            along, across = (partners, 1) if side == 0 else (1, size)
            changed = False
            for x in range(size):
                if not alive[offsets[node] + x]:
                    continue
                found = False
                for y in range(partners):
                    if alive[offsets[other] + y] and permitted[pairs[e, 2] + x * along + y * across]:
                        found = True
                        break
                if not found:
                    alive[offsets[node] + x] = False
                    changed = True
            if not changed:
                continue
            for k in range(starts[node], starts[node + 1]):
                if not queued[of[k]]:
                    queued[of[k]] = True
                    pending[(head + waiting) % count] = of[k]
                    waiting += 1


@dataclass(slots=True)
class Field:
    """Pairwise Markov random field (binary WCSP): unary and pairwise costs; infinity is forbidden.

    Attributes:
        unary: Costs per node, shape (labels,); an empty array for a removed node.
        tables: Costs per pair (a, b), a < b, shape (labels of a, labels of b). Arrays may be shared between pairs and
            are never written to.
        adjacent: Neighbours of each node.
        constant: Cost independent of the choice.
    """

    unary: list[Floats]
    tables: dict[tuple[int, int], Floats] = field(default_factory=dict)
    adjacent: list[set[int]] = field(default_factory=list)
    constant: float = 0.0

    def __post_init__(self) -> None:
        if not self.adjacent:
            self.adjacent = [set() for _ in self.unary]
            for a, b in self.tables:
                self.adjacent[a].add(b)
                self.adjacent[b].add(a)

    def table(self, a: int, b: int) -> Floats:
        """Return the table of a pair with the labels of `a` first."""
        return self.tables[a, b] if a < b else self.tables[b, a].T

    def add(self, a: int, b: int, table: Floats, known: dict[int, int] | None = None) -> None:
        """Add `table`, labels of `a` first, to a pair; a table constant along one node becomes unary costs.

        Args:
            a: First node.
            b: Second node.
            table: Costs.
            known: Cache of `table_kernels.same_lines` by table id, for callers that add the same array many times and
                keep it alive.
        """
        if a > b:
            a, b, table, known = b, a, np.ascontiguousarray(table.T), None
        old = self.tables.get((a, b))
        if old is not None:
            table, known = old + table, None
        same = table_kernels.same_lines(table) if known is None else known.get(id(table))
        if same is None:
            assert known is not None, "without a cache the lines were compared"
            same = known[id(table)] = table_kernels.same_lines(table)
        if same == SAME_ROWS:
            self.unary[b] = self.unary[b] + table[0]
        elif same == SAME_COLUMNS:
            self.unary[a] = self.unary[a] + table[:, 0]
        else:
            self.tables[a, b] = table
            self.adjacent[a].add(b)
            self.adjacent[b].add(a)
            return
        if old is not None:
            self.cut(a, b)

    def cut(self, a: int, b: int) -> None:
        """Remove the table of a pair."""
        del self.tables[min(a, b), max(a, b)]
        self.adjacent[a].discard(b)
        self.adjacent[b].discard(a)

    def copy(self) -> "Field":
        """Return a field that can be changed without changing this one (table arrays are shared)."""
        return Field(list(self.unary), dict(self.tables), [set(n) for n in self.adjacent], self.constant)

    def cost(self, labels: Sequence[int]) -> float:
        """Return the cost of one label per node (any label for removed nodes)."""
        total = self.constant + math.fsum(u[labels[i]] for i, u in enumerate(self.unary) if len(u))
        return total + math.fsum(t[labels[a], labels[b]] for (a, b), t in self.tables.items())

    def highest_cost(self) -> float:
        """Return an upper bound on the cost of every permitted choice: the sum of all maxima."""
        return self._extremes()[1]

    def lowest_cost(self) -> float:
        """Return a lower bound on the cost of every choice: the sum of all minima.

        Relaxes: the agreement of tables on the labels of a node. Valid when: always. Costs: one pass over the tables.
        """
        return self._extremes()[0]

    def _extremes(self) -> tuple[float, float]:
        """Return the sums of all minima and of all permitted maxima."""
        place: dict[int, int] = {}  # shared arrays are scanned once
        distinct: list[Floats] = []
        each: list[int] = []
        for costs in (*(u for u in self.unary if len(u)), *self.tables.values()):
            number = place.setdefault(id(costs), len(distinct))
            if number == len(distinct):
                distinct.append(costs.ravel())
            each.append(number)
        if not distinct:
            return self.constant, self.constant
        entries_of = np.concatenate(distinct)
        starts = np.cumsum([0, *map(len, distinct[:-1])])
        least = np.minimum.reduceat(entries_of, starts).tolist()
        most = np.maximum.reduceat(np.where(np.isinf(entries_of), -np.inf, entries_of), starts).tolist()
        highest = self.constant
        for number in each:
            highest += most[number] if most[number] > -math.inf else 0.0
        return self.constant + math.fsum(least[number] for number in each), highest

    def softened(self) -> "Field":
        """Return the field with a large finite penalty for infinity, for local search through forbidden choices."""
        dear = penalty(*self._extremes())
        cache: dict[int, Floats] = {}

        def soft(costs: Floats) -> Floats:
            if id(costs) not in cache:
                cache[id(costs)] = costs if is_finite(costs) else np.where(np.isinf(costs), dear, costs)
            return cache[id(costs)]

        return Field(
            [soft(u) for u in self.unary], {k: soft(t) for k, t in self.tables.items()}, constant=self.constant
        )

    def permitted(self) -> list[Ints]:
        """Return the permitted labels of each node."""
        flat = np.isfinite(np.concatenate([np.zeros(0), *self.unary]))
        return labels_of(flat, np.cumsum([0, *map(len, self.unary)]))

    def propagate(self) -> bool:
        """Enforce arc consistency: forbid labels without a permitted partner; return False if a node has none left."""
        place: dict[int, int] = {}  # offset of a table's flags, -1 if the table forbids nothing
        flags: list[NDArray[np.bool_]] = []
        length = 0
        pairs: list[tuple[int, int, int]] = []
        for (a, b), table in self.tables.items():
            at = place.get(id(table))
            if at is None:
                at = place[id(table)] = -1 if is_finite(table) else length
                if at >= 0:
                    flags.append(np.isfinite(table).ravel())
                    length += table.size
            if at >= 0:
                pairs.append((a, b, at))
        if pairs:
            offsets = np.concatenate([[0], np.cumsum([len(u) for u in self.unary])])
            alive = np.isfinite(np.concatenate(self.unary))
            before = alive.copy()
            _propagate(offsets, alive, np.array(pairs, np.int64), np.concatenate(flags))
            for node in np.unique(np.searchsorted(offsets, np.flatnonzero(alive != before), "right") - 1).tolist():
                self.unary[node] = np.where(alive[offsets[node] : offsets[node + 1]], self.unary[node], np.inf)
        nodes = [u for u in self.unary if len(u)]
        if not nodes:
            return True
        least = np.minimum.reduceat(np.concatenate(nodes), np.cumsum([0, *map(len, nodes[:-1])]))
        return bool((least < math.inf).all())

    def restrict(self, kept: Sequence[Ints]) -> "Field":
        """Return the field on the labels `kept` of each node, renumbered."""
        result = Field([u[k] for u, k in zip(self.unary, kept, strict=True)], constant=self.constant)
        result.adjacent = [set() for _ in self.unary]
        whole = [len(k) == len(u) for u, k in zip(self.unary, kept, strict=True)]
        names: dict[bytes, int] = {}  # equal selections get one number, so that each is compared once
        number = [names.setdefault(k.tobytes(), len(names)) for k in kept]
        cache: dict[tuple[int, int, int], Floats] = {}
        known: dict[int, int] = {}
        for (a, b), table in self.tables.items():
            if whole[a] and whole[b]:
                part = table
            else:
                key = (id(table), number[a], number[b])
                if key not in cache:
                    cache[key] = table_kernels.part(table, kept[a], kept[b])
                part = cache[key]
            result.add(a, b, part, known)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A problem as a field, with the map from labels back to strategies.

    Attributes:
        field: Costs of the permitted strategies.
        labels: Per node the strategy of each label.
    """

    field: Field
    labels: tuple[Ints, ...]

    def strategies(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Return the strategies of a choice of labels."""
        return tuple(int(kept[label]) for kept, label in zip(self.labels, choice, strict=True))

    def choice(self, strategies: Sequence[int]) -> list[int] | None:
        """Return the labels of a choice of strategies; None if one of the strategies was removed."""
        result = []
        for kept, strategy in zip(self.labels, strategies, strict=True):
            place = int(np.searchsorted(kept, strategy))
            if place == len(kept) or kept[place] != strategy:
                return None
            result.append(place)
        return result


def prepare(problem: Problem, allowed: Iterable[Sequence[int]] | None = None) -> Prepared | None:
    """Return the problem without forbidden strategies, with parallel edges merged; None if no choice is permitted.

    Args:
        problem: The problem; its usages and limits are read separately (`Memory.of`).
        allowed: Strategies to keep per node; all by default.
    """
    return permitted(join(problem, allowed))


def join(problem: Problem, allowed: Iterable[Sequence[int]] | None = None) -> Field:
    """Return the problem's costs with parallel edges merged and one label per strategy; see `prepare`."""
    costs = {id(c): as_floats(c) for c in problem.node_costs}
    raw = Field([costs[id(c)] for c in problem.node_costs])
    if allowed is not None:
        for node, strategies in enumerate(allowed):
            mask = np.full(len(raw.unary[node]), np.inf)
            mask[list(strategies)] = 0.0
            raw.unary[node] = raw.unary[node] + mask
    scaled: dict[tuple[int, float, bool], Floats] = {}
    tables = [as_floats(t) for t in problem.edge_tables]
    known: dict[int, int] = {}
    for (a, b), index, weight in zip(
        problem.edge_nodes.tolist(), problem.edge_table_ids.tolist(), problem.edge_weights.tolist(), strict=True
    ):
        key = (index, weight, a > b)
        if key not in scaled:
            table = tables[index]
            if weight != 1:
                table = table_kernels.weighted(table, weight)
            scaled[key] = np.ascontiguousarray(table.T) if a > b else table
        raw.add(min(a, b), max(a, b), scaled[key], known)
    return raw


def permitted(field: Field) -> Prepared | None:
    """Return the arc-consistent part of a field; None if a node has no permitted label.

    `field` is changed.
    """
    if not field.propagate():
        return None
    labels = tuple(field.permitted())
    return Prepared(field.restrict(labels), labels)


def labels_of(flags: NDArray[np.bool_], offsets: Ints) -> list[Ints]:
    """Return the flagged labels of each node; `offsets` holds where each node's flags begin, and the end."""
    chosen = np.flatnonzero(flags)
    ends = np.searchsorted(chosen, offsets)
    labels = chosen - np.repeat(offsets[:-1], np.diff(ends))
    return [labels[first:last] for first, last in pairwise(ends.tolist())]


def penalty(lowest: float, highest: float) -> float:
    """Return a finite penalty above every permitted cost, given a lower and an upper bound on permitted costs."""
    return 2.0 * (abs(highest) + abs(lowest)) + 1.0


def is_finite(costs: Floats) -> bool:
    """Return whether no entry is forbidden."""
    return bool(table_kernels.is_finite(costs.ravel()))


def as_floats(costs: Numbers) -> Floats:
    """Return costs in float64, infinity for forbidden entries."""
    if costs.dtype == np.float64:
        return costs
    return np.where(costs >= FORBIDDEN, np.inf, costs.astype(np.float64))
