"""Nodes tied to others become one: exact, whatever the limits.

Where every label of node a leaves exactly one permitted label of node b, b follows a, and its costs, tables and use can
be added to those of a. Following is transitive and may go round in circles (two nodes that tie each other); every
circle that follows nobody else keeps one node, its root, and all that follow it, directly or not, are folded into it.
A node that follows two roots is folded into one of them; what ties it to the other becomes a table between the roots.

Afterwards labels without a permitted partner go, tables that are sums of a row and a column are absorbed by their
nodes, and the search starts over, until nothing is tied.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solvers.model import table_kernels
from autopar.solvers.model.graphical_model import Field, Floats, Ints
from autopar.solvers.model.memory_rows import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """A field with its limits on fewer nodes, and the way back.

    Attributes:
        field: Its nodes are the roots.
        memory: The limits on them.
        roots: Per node of the field before, its root's number in `field`.
        labels: Per node of the field before, its label for each label of its root.
        decided: Nodes of the field before whose label is decided; they follow any root.
    """

    field: Field
    memory: Memory
    roots: Ints
    labels: tuple[Ints, ...]
    decided: frozenset[int] = frozenset()

    def invert(self, choice: Sequence[int]) -> list[int]:
        """Return the labels of all nodes of the field before."""
        return [int(mine[choice[root]]) for root, mine in zip(self.roots.tolist(), self.labels, strict=True)]

    def choice(self, labels: Sequence[int]) -> list[int] | None:
        """Return the labels of the roots that stand for labels of all nodes but those decided, None if some do not."""
        # Several labels of a root can mean one label of a node that follows it: all that follow must agree on one.
        fitting: list[Ints | None] = [None] * len(self.field.unary)
        for node, (root, mine, label) in enumerate(zip(self.roots.tolist(), self.labels, labels, strict=True)):
            if node in self.decided:
                continue
            left = fitting[root]
            fitting[root] = left = np.flatnonzero(mine == label) if left is None else left[mine[left] == label]
            if len(left) == 0:
                return None
        return [-1 if left is None else int(left[0]) for left in fitting]

    def restrict(self, kept: Sequence[Ints]) -> "Merged":
        """Return the reduction to the labels `kept` of each node of `field`."""
        field, memory = self.field.restrict(kept), self.memory.restrict(kept)
        return _compose(self, Merged(field, memory, np.arange(len(kept)), tuple(kept)))

    def decide(self, labels: Mapping[int, int]) -> "Merged":
        """Return the reduction without some nodes of `field`, given their labels.

        At least one node must be left, which the others follow.
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
        return _compose(self, Merged(field, memory, place, tuple(whole), frozenset(labels)))


def merge(field: Field, memory: Memory) -> Merged | None:
    """Return the field without nodes that follow others; None if no choice is permitted."""
    count = len(field.unary)
    result = Merged(field, memory, np.arange(count), tuple(np.arange(len(u)) for u in field.unary))
    while True:
        followers = _follow(result.field)
        step = _fold(result.field, result.memory, followers) if followers is not None else None
        if step is not None:
            result = _compose(result, step)
        absorbed = _absorb(result.field)
        if not absorbed.propagate():
            return None
        kept = absorbed.permitted()
        if all(len(k) == len(u) for k, u in zip(kept, absorbed.unary, strict=True)):
            result = replace(result, field=absorbed)
            if step is None:
                return result
            continue
        result = replace(result, field=absorbed).restrict(kept)


def _compose(first: Merged, then: Merged) -> Merged:
    """Return both reductions as one."""
    labels = tuple(mine[then.labels[root]] for root, mine in zip(first.roots.tolist(), first.labels, strict=True))
    decided = first.decided
    if then.decided:
        decided |= {node for node, root in enumerate(first.roots.tolist()) if root in then.decided}
    return Merged(then.field, then.memory, then.roots[first.roots], labels, decided)


def _follow(field: Field) -> dict[tuple[int, int], Ints] | None:
    """Return for every (a, b), b tied to a, the label of b for each label of a; None if nothing is tied."""
    known: dict[int, tuple[Ints | None, Ints | None]] = {}
    tied: dict[tuple[int, int], Ints] = {}
    for (a, b), table in field.tables.items():
        maps = known.get(id(table))
        if maps is None:
            maps = known[id(table)] = _maps(table)
        if maps[0] is not None:
            tied[a, b] = maps[0]
        if maps[1] is not None:
            tied[b, a] = maps[1]
    return tied or None


def _maps(table: Floats) -> tuple[Ints | None, Ints | None]:
    """Return the only permitted column of each row, and the only permitted row of each column, if it is the only."""
    found = table_kernels.deciders(table)
    if not found:
        return None, None
    finite = np.isfinite(table)
    rows = finite.argmax(axis=1) if found & table_kernels.BY_ROWS else None
    columns = finite.argmax(axis=0) if found & table_kernels.BY_COLUMNS else None
    return rows, columns


def _fold(field: Field, memory: Memory, tied: dict[tuple[int, int], Ints]) -> Merged:
    """Return the field with every node that follows another folded into a root."""
    count = len(field.unary)
    leads: list[list[int]] = [[] for _ in range(count)]
    for leader, follower in tied:
        leads[leader].append(follower)
    roots = np.full(count, -1)
    labels: list[Ints] = [np.arange(0)] * count
    chosen: list[int] = []
    for root in _sources(leads, [len(u) for u in field.unary]):
        roots[root] = len(chosen)
        labels[root] = np.arange(len(field.unary[root]))
        chosen.append(root)
        pending = [root]
        while pending:
            node = pending.pop()
            for follower in leads[node]:
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
    return Merged(small, memory.moved(roots, labels), roots, tuple(labels))


def _sources(leads: Sequence[Sequence[int]], sizes: Sequence[int]) -> Iterator[int]:
    """Yield one node, with the fewest labels, of every circle of nodes that follows no node outside it.

    Circles are the strongly connected components (Tarjan, 1972), found without recursion.
    """
    count = len(leads)
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
            for index in range(position, len(leads[node])):
                follower = leads[node][index]
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
    led = {component[f] for node in range(count) for f in leads[node] if component[f] != component[node]}
    for number, group in enumerate(members):
        if number not in led:
            yield min(group, key=lambda node: (sizes[node], node))


def _absorb(field: Field) -> Field:
    """Return the field without tables that are a cost per row plus a cost per column."""
    result = Field(list(field.unary), constant=field.constant)
    result.adjacent = [set() for _ in field.unary]
    known: dict[int, tuple[Floats, Floats] | None] = {}
    for (a, b), table in field.tables.items():
        if id(table) not in known:
            known[id(table)] = _separated(table)
        parts = known[id(table)]
        if parts is None:
            result.tables[a, b] = table
            result.adjacent[a].add(b)
            result.adjacent[b].add(a)
        else:
            result.unary[a] = result.unary[a] + parts[0]
            result.unary[b] = result.unary[b] + parts[1]
    return result


def _separated(table: Floats) -> tuple[Floats, Floats] | None:
    """Return costs per row and per column that add up to the table, None if there are none."""
    rows, columns = np.empty(table.shape[0]), np.empty(table.shape[1])
    return (rows, columns) if table_kernels.separate(table, rows, columns) else None
