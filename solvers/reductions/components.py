"""Parts of a field that have nothing to do with each other: no table and no limit joins them.

Two nodes belong together if they have a table, or if both can change the use in a segment of time that can break its
limit; and so on, from neighbour to neighbour. So time falls into windows wherever no use that matters spans two times.
The optimum is the sum of the parts' optima: parts without limits that are eliminated quickly are decided at once
(`settle`), the others solved one after another (`solve_apart`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.problem import FORBIDDEN, OPTIMALITY_TOLERANCE, Choice, Limit, Numbers, Problem, Usage
from autopar.solvers.base import Budget
from autopar.solvers.model.graphical_model import Field, Floats, Ints, Prepared
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.contraction import Merged
from autopar.solvers.reductions.elimination import eliminate, eliminate_all, order_of

MAX_ENTRIES, MAX_WORK = 200_000, 2_000_000
"""Largest table, and entries of all tables, of a part that is decided by elimination; some 20 ms."""
LEAST_LABELS = 500
"""Parts with fewer labels are solved together with the next ones: each call of a solver takes some milliseconds."""
EXACT_NUMBERS = 2**53
"""Whole numbers below this are exact in float64."""


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

    def problem(self) -> Problem:
        """Return the part as a problem of its own, of whole numbers if its costs and uses are whole."""
        costs = (*self.field.unary, *self.field.tables.values())
        whole = all(_is_whole(c) for c in costs)
        uses = (*self.memory.amounts, self.memory.limits)
        counted = all(_is_whole(a) for a in uses[:-1])
        rows = range(self.memory.num_rows)
        limits = np.floor(self.memory.limits) if counted else self.memory.limits
        return Problem.build(
            [_written(u, whole) for u in self.field.unary],
            [(a, b, _written(table, whole)) for (a, b), table in self.field.tables.items()],
            usages=[
                Usage(node, first, last, amounts.astype(np.int64) if counted else amounts)
                for node, first, last, amounts in zip(
                    self.memory.nodes.tolist(),
                    self.memory.first.tolist(),
                    self.memory.last.tolist(),
                    self.memory.amounts,
                    strict=True,
                )
            ],
            limit=[Limit(float(limits[t]), t, t + 1) for t in rows],
        )


def _is_whole(numbers: Floats) -> bool:
    finite = numbers[np.isfinite(numbers)]
    return bool((np.abs(finite) < EXACT_NUMBERS).all() and (finite == np.floor(finite)).all())


def _written(costs: Floats, whole: bool) -> Numbers:
    if not whole:
        return costs
    return np.where(np.isinf(costs), FORBIDDEN, np.where(np.isinf(costs), 0.0, costs).astype(np.int64))


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


def settle(merged: Merged) -> tuple[Merged, int]:
    """Return a reduction without the nodes of parts that no limit binds and that are eliminated quickly.

    These nodes have their best labels from now on, whatever the others take.

    Args:
        merged: The reduction, its memory as `Memory.restrict` returns it.

    Returns:
        What is left, and in how many parts.
    """
    parts = split(merged.field, merged.memory)
    decided: dict[int, int] = {}
    left = 0
    for part in parts.parts:
        if part.memory.num_rows:
            left += 1
            continue
        if len(part.nodes) == 1:
            decided[int(part.nodes[0])] = int(part.field.unary[0].argmin())
            continue
        reduced = eliminate(part.field)
        order = order_of(reduced.field, MAX_ENTRIES, MAX_WORK)
        eliminated = None if order is None else eliminate_all(reduced.field, order, None)
        if eliminated is not None:
            labels = reduced.invert(eliminated.choice())
            decided.update(zip(part.nodes.tolist(), labels, strict=True))
        else:
            left += 1
    if len(decided) == len(merged.field.unary):
        del decided[next(reversed(decided))]  # the others have to follow somebody
    return merged.decide(decided), left


def solve_apart(prepared: Prepared, merged: Merged, budget: Budget, solve: Callable[[Problem, Budget], None]) -> bool:
    """Solve the parts of what is left, one after another; return whether there were several.

    Args:
        prepared: The problem of the budget.
        merged: What is left of it.
        budget: Gets the sum of the parts' bounds, and the choices of all parts together.
        solve: Solves a part.
    """
    groups = _groups(split(merged.field, merged.memory))
    if len(groups) < 2:
        return False
    _Apart(prepared, merged, budget, groups).run(solve)
    return True


def _groups(parts: Parts) -> list[Part]:
    """Return parts, small ones put together, those with fewest labels first."""
    groups: list[list[Part]] = [[]]
    labels = 0
    for part in reversed(parts.parts):
        if labels >= LEAST_LABELS:
            groups.append([])
            labels = 0
        groups[-1].append(part)
        labels += sum(map(len, part.field.unary))
    return [_together(group) for group in groups if group]


def _together(parts: Sequence[Part]) -> Part:
    """Return several parts as one; their limits hold one after another."""
    if len(parts) == 1:
        return parts[0]
    result = Field([unary for part in parts for unary in part.field.unary])
    nodes, rows = 0, 0
    shifts = []
    for part in parts:
        for (a, b), table in part.field.tables.items():
            result.tables[a + nodes, b + nodes] = table
            result.adjacent[a + nodes].add(b + nodes)
            result.adjacent[b + nodes].add(a + nodes)
        shifts.append((nodes, rows))
        nodes += len(part.nodes)
        rows += part.memory.num_rows
    memories = [part.memory for part in parts]
    memory = Memory(
        np.arange(rows),
        np.concatenate([m.limits for m in memories]),
        np.concatenate([m.scales for m in memories]),
        np.concatenate([m.nodes + at for m, (at, _) in zip(memories, shifts, strict=True)]),
        np.concatenate([m.first + at for m, (_, at) in zip(memories, shifts, strict=True)]),
        np.concatenate([m.last + at for m, (_, at) in zip(memories, shifts, strict=True)]),
        tuple(amounts for m in memories for amounts in m.amounts),
    )
    return Part(np.concatenate([part.nodes for part in parts]), result, memory)


class _Apart:
    """Parts that are solved one after another, and what is known of each."""

    def __init__(self, prepared: Prepared, merged: Merged, budget: Budget, parts: Sequence[Part]) -> None:
        self._prepared = prepared
        self._merged = merged
        self._budget = budget
        self._parts = parts
        known = None if budget.choice is None else prepared.choice(budget.choice)
        labels = None if known is None else merged.choice(known)
        self._choices: list[Choice | None] = [
            None if labels is None else tuple(labels[n] for n in part.nodes.tolist()) for part in parts
        ]
        self._bounds = [part.field.lowest_cost() for part in parts]

    def run(self, solve: Callable[[Problem, Budget], None]) -> None:
        """Solve the parts, each in a share of what is left that its labels are of those to come."""
        sizes = [sum(map(len, part.field.unary)) for part in self._parts]
        for number, part in enumerate(self._parts):
            if self._budget.spent():
                return
            share = sizes[number] / sum(sizes[number:])
            problem = part.problem()

            def watch(choice: Choice | None, _cost: float, bound: float, number: int = number) -> None:
                self._take(number, choice, bound)

            own = self._budget.apart(problem, share, self._choices[number], watch)
            solve(problem, own)
            self._take(number, own.choice, own.bound)
            if own.bound == math.inf:
                return

    def _take(self, number: int, choice: Choice | None, bound: float) -> None:
        """Hand over what is known of all parts once more is known of one."""
        if bound > self._bounds[number]:
            self._bounds[number] = bound
            total = self._merged.field.constant + sum(self._bounds)
            size = sum(map(abs, self._bounds))
            # Each bound is true to a part of its own size; the sum may be smaller than they are.
            unsure = OPTIMALITY_TOLERANCE * (size - abs(total)) if math.isfinite(size) else 0.0
            self._budget.raise_bound(total - max(0.0, unsure))
        if choice is not None and choice != self._choices[number]:
            self._choices[number] = choice
            if all(each is not None for each in self._choices):
                labels = [0] * len(self._merged.field.unary)
                for part, chosen in zip(self._parts, self._choices, strict=True):
                    assert chosen is not None, "all of them are known"
                    for node, label in zip(part.nodes.tolist(), chosen, strict=True):
                        labels[node] = label
                self._budget.offer(self._prepared.strategies(self._merged.invert(labels)))


def split(field: Field, memory: Memory) -> Parts:
    """Return the connected parts of a field under limits.

    Args:
        field: Costs; nodes that are gone have no labels.
        memory: Limits without constant use, as `Memory.restrict` returns them: a use that does not matter joins nobody.
    """
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
