"""Contraction of functionally determined nodes: exact, with or without limits.

If every label of node a permits exactly one label of node b (a functional constraint), b follows a: its costs, tables
and use are added to those of a. The relation is transitive and may be cyclic (two nodes that determine each other);
each strongly connected component without predecessors keeps one node, its root, and all its descendants are folded into
the root. A node that follows two roots is folded into one; its tie to the other becomes a table between the roots.

Afterwards arc consistency is restored, separable tables (a cost per row plus a cost per column) are absorbed by their
nodes, and the search for functional constraints is repeated until there is none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solvers.model import table_kernels
from autopar.solvers.model.graphical_model import Field, Floats, Ints
from autopar.solvers.model.memory_rows import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Contraction:
    """A field and its limits contracted to fewer nodes, with the map back.

    Attributes:
        field: Costs of the roots.
        memory: Limits on the roots.
        roots: Root of each original node, as a node of `field`.
        labels: Per original node, its label for each label of its root.
        decided: Original nodes fixed to one label; their root is arbitrary.
    """

    field: Field
    memory: Memory
    roots: Ints
    labels: tuple[Ints, ...]
    decided: frozenset[int] = frozenset()

    def invert(self, choice: Sequence[int]) -> list[int]:
        """Return the labels of all original nodes given those of the roots."""
        return [int(mine[choice[root]]) for root, mine in zip(self.roots.tolist(), self.labels, strict=True)]

    def choice(self, labels: Sequence[int]) -> list[int] | None:
        """Return the labels of the roots that stand for a choice of the original nodes; None if there are none."""
        # Several labels of a root may map to one label of a follower: keep those on which all followers agree.
        fitting: list[Ints | None] = [None] * len(self.field.unary)
        for node, (root, mine, label) in enumerate(zip(self.roots.tolist(), self.labels, labels, strict=True)):
            if node in self.decided:
                continue
            left = fitting[root]
            fitting[root] = left = np.flatnonzero(mine == label) if left is None else left[mine[left] == label]
            if len(left) == 0:
                return None
        return [-1 if left is None else int(left[0]) for left in fitting]

    def restrict(self, kept: Sequence[Ints]) -> "Contraction":
        """Return the contraction restricted to the labels `kept` of each root."""
        field, memory = self.field.restrict(kept), self.memory.restrict(kept)
        return _compose(self, Contraction(field, memory, np.arange(len(kept)), tuple(kept)))

    def decide(self, labels: Mapping[int, int]) -> "Contraction":
        """Return the contraction without the roots `labels`, fixed to the given labels.

        At least one root must remain, which the fixed nodes refer to.
        """
        if not labels:
            return self
        count = len(self.field.unary)
        left = np.array([node for node in range(count) if node not in labels], np.int64)
        place = np.zeros(count, np.int64)
        place[left] = np.arange(len(left))
        sizes = [len(unary) for unary in self.field.unary]
        whole: list[Ints] = [np.arange(size) for size in sizes]
        for node, label in labels.items():
            whole[node] = np.full(sizes[left[0]], label)
        constant = math.fsum(float(self.field.unary[node][label]) for node, label in labels.items())
        field = Field([self.field.unary[node] for node in left.tolist()], constant=self.field.constant + constant)
        for (a, b), table in self.field.tables.items():
            if a in labels and b in labels:
                field.constant += float(table[labels[a], labels[b]])
            elif a in labels:
                field.unary[place[b]] = field.unary[place[b]] + table[labels[a]]
            elif b in labels:
                field.unary[place[a]] = field.unary[place[a]] + table[:, labels[b]]
            else:
                field.add(int(place[a]), int(place[b]), table)
        kept = [np.array([labels[node]]) if node in labels else whole[node] for node in range(count)]
        memory = self.memory
        if set(memory.nodes.tolist()) & labels.keys():
            memory = memory.restrict(kept)
        memory = replace(memory, nodes=place[memory.nodes])
        return _compose(self, Contraction(field, memory, place, tuple(whole), frozenset(labels)))


def contract(field: Field, memory: Memory) -> Contraction | None:
    """Return the contraction of a field and its limits; None if no choice is permitted."""
    count = len(field.unary)
    result = Contraction(field, memory, np.arange(count), tuple(np.arange(len(u)) for u in field.unary))
    while True:
        followers = _functional_constraints(result.field)
        step = _fold(result.field, result.memory, followers) if followers is not None else None
        if step is not None:
            result = _compose(result, step)
        absorbed = _absorb_separable(result.field)
        if not absorbed.propagate():
            return None
        kept = absorbed.permitted()
        if all(len(k) == len(u) for k, u in zip(kept, absorbed.unary, strict=True)):
            result = replace(result, field=absorbed)
            if step is None:
                return result
            continue
        result = replace(result, field=absorbed).restrict(kept)


def _compose(first: Contraction, then: Contraction) -> Contraction:
    """Return the contraction `then` applied after `first`."""
    labels = tuple(mine[then.labels[root]] for root, mine in zip(first.roots.tolist(), first.labels, strict=True))
    decided = first.decided
    if then.decided:
        decided |= {node for node, root in enumerate(first.roots.tolist()) if root in then.decided}
    return Contraction(then.field, then.memory, then.roots[first.roots], labels, decided)


def _functional_constraints(field: Field) -> dict[tuple[int, int], Ints] | None:
    """Return the functional constraints: for each (a, b), b determined by a, the label of b per label of a."""
    known: dict[int, tuple[Ints | None, Ints | None]] = {}
    tied: dict[tuple[int, int], Ints] = {}
    for (a, b), table in field.tables.items():
        maps = known.get(id(table))
        if maps is None:
            maps = known[id(table)] = _functional_maps(table)
        if maps[0] is not None:
            tied[a, b] = maps[0]
        if maps[1] is not None:
            tied[b, a] = maps[1]
    return tied or None


def _functional_maps(table: Floats) -> tuple[Ints | None, Ints | None]:
    """Return the only permitted column per row and the only permitted row per column; None where not unique."""
    found = table_kernels.functional_sides(table)
    if not found:
        return None, None
    finite = np.isfinite(table)
    rows = finite.argmax(axis=1) if found & table_kernels.BY_ROWS else None
    columns = finite.argmax(axis=0) if found & table_kernels.BY_COLUMNS else None
    return rows, columns


def _fold(field: Field, memory: Memory, tied: dict[tuple[int, int], Ints]) -> Contraction:
    """Return the field with every functionally determined node folded into a root."""
    count = len(field.unary)
    followers_of: list[list[int]] = [[] for _ in range(count)]
    for leader, follower in tied:
        followers_of[leader].append(follower)
    roots = np.full(count, -1)
    labels: list[Ints] = [np.arange(0)] * count
    chosen: list[int] = []
    for root in _source_components(followers_of, [len(u) for u in field.unary]):
        roots[root] = len(chosen)
        labels[root] = np.arange(len(field.unary[root]))
        chosen.append(root)
        pending = [root]
        while pending:
            node = pending.pop()
            for follower in followers_of[node]:
                if roots[follower] < 0:
                    roots[follower] = roots[root]
                    labels[follower] = tied[node, follower][labels[node]]
                    pending.append(follower)
    small = Field([np.zeros(len(field.unary[root])) for root in chosen], constant=field.constant)
    for node, unary in enumerate(field.unary):
        small.unary[roots[node]] = small.unary[roots[node]] + unary[labels[node]]
    cache: dict[tuple[int, bytes, bytes], Floats] = {}
    for (a, b), table in field.tables.items():
        if roots[a] == roots[b]:
            small.unary[roots[a]] = small.unary[roots[a]] + table[labels[a], labels[b]]
            continue
        key = (id(table), labels[a].tobytes(), labels[b].tobytes())
        part = cache.get(key)
        if part is None:
            part = cache[key] = table_kernels.part(table, labels[a], labels[b])
        small.add(int(roots[a]), int(roots[b]), part)
    return Contraction(small, memory.contracted(roots, labels), roots, tuple(labels))


def _source_components(followers_of: Sequence[Sequence[int]], sizes: Sequence[int]) -> Iterator[int]:
    """Yield the node with the fewest labels of every strongly connected component without predecessors.

    Components are found by an iterative version of Tarjan's algorithm (1972).
    """
    count = len(followers_of)
    order = [-1] * count
    low = [0] * count
    component = [-1] * count
    stack: list[int] = []
    members: list[list[int]] = []
    clock = 0
    for start in range(count):
        if order[start] >= 0:
            continue
        work = [(start, 0)]
        while work:
            node, position = work.pop()
            if position == 0:
                order[node] = low[node] = clock
                clock += 1
                stack.append(node)
            for index in range(position, len(followers_of[node])):
                follower = followers_of[node][index]
                if order[follower] < 0:
                    work.append((node, index + 1))
                    work.append((follower, 0))
                    break
                if component[follower] < 0:
                    low[node] = min(low[node], low[follower])
            else:
                if low[node] == order[node]:
                    group: list[int] = []
                    while not group or group[-1] != node:
                        group.append(stack.pop())
                        component[group[-1]] = len(members)
                    members.append(group)
                if work:
                    above = work[-1][0]
                    low[above] = min(low[above], low[node])
    led = {component[f] for node in range(count) for f in followers_of[node] if component[f] != component[node]}
    for number, group in enumerate(members):
        if number not in led:
            yield min(group, key=lambda node: (sizes[node], node))


def _absorb_separable(field: Field) -> Field:
    """Return the field with separable tables (cost per row plus cost per column) moved to the unary costs."""
    result = Field(list(field.unary), constant=field.constant)
    result.adjacent = [set() for _ in field.unary]
    known: dict[int, tuple[Floats, Floats] | None] = {}
    for (a, b), table in field.tables.items():
        if id(table) not in known:
            known[id(table)] = _row_and_column_costs(table)
        parts = known[id(table)]
        if parts is None:
            result.tables[a, b] = table
            result.adjacent[a].add(b)
            result.adjacent[b].add(a)
        else:
            result.unary[a] = result.unary[a] + parts[0]
            result.unary[b] = result.unary[b] + parts[1]
    return result


def _row_and_column_costs(table: Floats) -> tuple[Floats, Floats] | None:
    """Return costs per row and per column that add up to the table; None if it is not separable."""
    rows, columns = np.empty(table.shape[0]), np.empty(table.shape[1])
    return (rows, columns) if table_kernels.separate(table, rows, columns) else None
