"""Parts of a field that have nothing to do with each other: no table and no limit joins them.

Two nodes belong together if they have a table, or if both can change the use in a segment of time that can break its
limit; and so on, from neighbour to neighbour. The optimum is the sum of the parts' optima.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solvers.field import Field, Ints
from autopar.solvers.memory import Memory


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A connected part.

    Attributes:
        nodes: Its nodes in the numbering of the whole, ascending.
        field: Their costs, without the constant of the whole.
        memory: The limits that can bind them.
    """

    nodes: Ints
    field: Field
    memory: Memory


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A field in parts, and the way back.

    Attributes:
        parts: Those with most labels first.
        num_nodes: Nodes of the whole.
        constant: Cost of the whole that does not depend on the choice.
    """

    parts: tuple[Part, ...]
    num_nodes: int
    constant: float

    def invert(self, choices: Sequence[Sequence[int]]) -> list[int]:
        """Return the labels of all nodes given those of each part; nodes that are gone get label 0."""
        result = [0] * self.num_nodes
        for part, choice in zip(self.parts, choices, strict=True):
            for node, label in zip(part.nodes.tolist(), choice, strict=True):
                result[node] = int(label)
        return result


def split(field: Field, memory: Memory) -> Parts:
    """Return the connected parts of what is left of a field under limits."""
    memory = memory.restrict([np.arange(max(1, len(u))) for u in field.unary])
    count = len(field.unary)
    runs = _runs(memory)
    root = list(range(count + int(runs.max(initial=-1)) + 1))  # a node per run of rows stands for what binds its users

    def find(v: int) -> int:
        while root[v] != v:
            root[v] = root[root[v]]
            v = root[v]
        return v

    run_of = runs[memory.first]
    joined = [*field.tables, *zip(memory.nodes.tolist(), (count + run_of).tolist(), strict=True)]
    for a, b in joined:
        root[find(a)] = find(b)
    members: dict[int, list[int]] = {}
    for node, unary in enumerate(field.unary):
        if len(unary):
            members.setdefault(find(node), []).append(node)
    groups = list(members.values())
    part_of = np.full(count, -1)
    place = np.full(count, -1)
    for number, group in enumerate(groups):
        part_of[group] = number
        place[group] = np.arange(len(group))
    fields = [Field([field.unary[n] for n in group]) for group in groups]
    for (a, b), table in field.tables.items():
        part, first, second = fields[part_of[a]], int(place[a]), int(place[b])
        part.tables[first, second] = table
        part.adjacent[first].add(second)
        part.adjacent[second].add(first)
    usages: list[list[int]] = [[] for _ in groups]
    for usage, node in enumerate(memory.nodes.tolist()):
        usages[part_of[node]].append(usage)
    parts = [
        Part(np.array(group), part, _share(memory, np.array(own, np.int64), place))
        for group, part, own in zip(groups, fields, usages, strict=True)
    ]
    parts.sort(key=lambda part: -sum(map(len, part.field.unary)))
    return Parts(tuple(parts), count, field.constant)


def _runs(memory: Memory) -> Ints:
    """Return per row the number of its run; a use that covers two rows puts them into the same run."""
    joins = np.zeros(memory.num_rows + 1, np.int64)  # uses that cover both row t and row t + 1
    np.add.at(joins, memory.first, 1)
    np.add.at(joins, memory.last - 1, -1)
    apart = np.cumsum(joins)[: max(0, memory.num_rows - 1)] == 0
    return np.concatenate([[0], np.cumsum(apart)])[: memory.num_rows]


def _share(memory: Memory, usages: Ints, place: Ints) -> Memory:
    """Return the rows that some usages cover, with these usages alone."""
    if len(usages) == 0:
        return Memory.unlimited()
    first, last = int(memory.first[usages].min()), int(memory.last[usages].max())
    rows = slice(first, last)
    return Memory(
        memory.times[rows],
        memory.limits[rows],
        memory.scales[rows],
        place[memory.nodes[usages]],
        memory.first[usages] - first,
        memory.last[usages] - first,
        tuple(memory.amounts[u] for u in usages.tolist()),
    )
