"""Connected components of a field under limits: subproblems joined by neither a table nor a binding limit.

Two nodes are joined if they share a table, or if both can change the use of a segment that can break its limit;
components are the transitive closure. Time therefore splits into windows wherever no relevant usage spans two segments.
The optimum is the sum of the components' optima: components without limits that are eliminated quickly are fixed at
once (`fix_unconstrained`), the others are solved one after another (`solve_components`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.problem import FORBIDDEN, OPTIMALITY_TOLERANCE, Choice, Limit, Numbers, Problem, Usage
from autopar.solvers.base import Budget
from autopar.solvers.model.graphical_model import Field, Floats, Ints, Prepared
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.contraction import Contraction
from autopar.solvers.reductions.elimination import eliminate, eliminate_all, elimination_order

MAX_ENTRIES, MAX_WORK = 200_000, 2_000_000
"""Largest table, and entries of all tables, of a component that is fixed by elimination; about 20 ms."""
LEAST_LABELS = 500
"""Components with fewer labels are solved together: each call of a solver takes some milliseconds."""
EXACT_NUMBERS = 2**53
"""Integers below this are exact in float64."""


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """A connected component.

    Attributes:
        nodes: Its nodes in the numbering of the whole field, ascending.
        field: Their costs, without the constant of the whole field.
        memory: The limits that can bind on them.
    """

    nodes: Ints
    field: Field
    memory: Memory

    def problem(self) -> Problem:
        """Return the component as a `Problem`, of integers if its costs and uses are integers."""
        costs = (*self.field.unary, *self.field.tables.values())
        whole = all(_is_whole(c) for c in costs)
        uses = (*self.memory.amounts, self.memory.limits)
        counted = all(_is_whole(a) for a in uses[:-1])
        rows = range(self.memory.num_rows)
        limits = np.floor(self.memory.limits) if counted else self.memory.limits
        return Problem.build(
            [_as_numbers(u, whole) for u in self.field.unary],
            [(a, b, _as_numbers(table, whole)) for (a, b), table in self.field.tables.items()],
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


def _as_numbers(costs: Floats, whole: bool) -> Numbers:
    if not whole:
        return costs
    return np.where(np.isinf(costs), FORBIDDEN, np.where(np.isinf(costs), 0.0, costs).astype(np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """A field split into components.

    Attributes:
        parts: The components, by descending number of labels.
        num_nodes: Number of nodes of the whole field.
        constant: Cost of the whole field independent of the choice.
    """

    parts: tuple[Component, ...]
    num_nodes: int
    constant: float

    def invert(self, choices: Sequence[Sequence[int]]) -> list[int]:
        """Return the labels of all nodes given those of each component; removed nodes get label 0."""
        result = [0] * self.num_nodes
        for part, choice in zip(self.parts, choices, strict=True):
            for node, label in zip(part.nodes.tolist(), choice, strict=True):
                result[node] = int(label)
        return result


def fix_unconstrained(contraction: Contraction) -> tuple[Contraction, int]:
    """Fix the nodes of components that have no limit and are eliminated quickly to their optimal labels.

    Args:
        contraction: The contracted field, its memory as returned by `Memory.restrict`.

    Returns:
        The contraction without the fixed nodes, and the number of components left.
    """
    parts = split(contraction.field, contraction.memory)
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
        order = elimination_order(reduced.field, MAX_ENTRIES, MAX_WORK)
        eliminated = None if order is None else eliminate_all(reduced.field, order, None)
        if eliminated is not None:
            labels = reduced.invert(eliminated.choice())
            decided.update(zip(part.nodes.tolist(), labels, strict=True))
        else:
            left += 1
    if len(decided) == len(contraction.field.unary):
        del decided[next(reversed(decided))]  # a contraction keeps at least one root
    return contraction.decide(decided), left


def solve_components(
    prepared: Prepared, contraction: Contraction, budget: Budget, solve: Callable[[Problem, Budget], None]
) -> bool:
    """Solve the components one after another; return whether there were several.

    Args:
        prepared: The budget's problem.
        contraction: Its contraction.
        budget: Receives the sum of the components' bounds, and choices combined from all components.
        solve: Solves one component.
    """
    groups = _grouped(split(contraction.field, contraction.memory))
    if len(groups) < 2:
        return False
    _ComponentSolver(prepared, contraction, budget, groups).run(solve)
    return True


def _grouped(parts: Components) -> list[Component]:
    """Return the components by ascending number of labels, small ones combined."""
    groups: list[list[Component]] = [[]]
    labels = 0
    for part in reversed(parts.parts):
        if labels >= LEAST_LABELS:
            groups.append([])
            labels = 0
        groups[-1].append(part)
        labels += sum(map(len, part.field.unary))
    return [_combined(group) for group in groups if group]


def _combined(parts: Sequence[Component]) -> Component:
    """Return several components as one, their segments concatenated."""
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
    return Component(np.concatenate([part.nodes for part in parts]), result, memory)


class _ComponentSolver:
    """Solves components in turn, and combines their incumbents and bounds."""

    def __init__(
        self, prepared: Prepared, contraction: Contraction, budget: Budget, parts: Sequence[Component]
    ) -> None:
        self._prepared = prepared
        self._contraction = contraction
        self._budget = budget
        self._parts = parts
        known = None if budget.choice is None else prepared.choice(budget.choice)
        labels = None if known is None else contraction.choice(known)
        self._choices: list[Choice | None] = [
            None if labels is None else tuple(labels[n] for n in part.nodes.tolist()) for part in parts
        ]
        self._bounds = [part.field.lowest_cost() for part in parts]

    def run(self, solve: Callable[[Problem, Budget], None]) -> None:
        """Solve the components, each with its share (by labels) of the time and work left."""
        sizes = [sum(map(len, part.field.unary)) for part in self._parts]
        for number, part in enumerate(self._parts):
            if self._budget.spent():
                return
            share = sizes[number] / sum(sizes[number:])
            problem = part.problem()

            def watch(choice: Choice | None, _cost: float, bound: float, number: int = number) -> None:
                self._record(number, choice, bound)

            own = self._budget.for_subproblem(problem, share, self._choices[number], watch)
            solve(problem, own)
            self._record(number, own.choice, own.bound)
            if own.bound == math.inf:
                return

    def _record(self, number: int, choice: Choice | None, bound: float) -> None:
        """Record a component's new incumbent or bound; pass the combined ones on to the budget."""
        if bound > self._bounds[number]:
            self._bounds[number] = bound
            total = self._contraction.field.constant + sum(self._bounds)
            size = sum(map(abs, self._bounds))
            # Each bound has an error relative to its own size; their sum may be smaller than they are.
            unsure = OPTIMALITY_TOLERANCE * (size - abs(total)) if math.isfinite(size) else 0.0
            self._budget.raise_bound(total - max(0.0, unsure))
        if choice is not None and choice != self._choices[number]:
            self._choices[number] = choice
            if all(each is not None for each in self._choices):
                labels = [0] * len(self._contraction.field.unary)
                for part, chosen in zip(self._parts, self._choices, strict=True):
                    assert chosen is not None, "every component has an incumbent"
                    for node, label in zip(part.nodes.tolist(), chosen, strict=True):
                        labels[node] = label
                self._budget.offer(self._prepared.strategies(self._contraction.invert(labels)))


def split(field: Field, memory: Memory) -> Components:
    """Return the connected components of a field under limits.

    Args:
        field: Costs; removed nodes have no labels.
        memory: Limits without constant usages, as returned by `Memory.restrict`: constant usages would join nodes.
    """
    count = len(field.unary)
    runs = _runs(memory)
    root = list(range(count + int(runs.max(initial=-1)) + 1))  # one extra node per run of rows joins its users

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
        Component(np.array(group), part, _rows_of(memory, np.array(own, np.int64), place))
        for group, part, own in zip(groups, fields, usages, strict=True)
    ]
    parts.sort(key=lambda part: -sum(map(len, part.field.unary)))
    return Components(tuple(parts), count, field.constant)


def _runs(memory: Memory) -> Ints:
    """Return the run of each row: rows covered by one usage are in the same run."""
    joins = np.zeros(memory.num_rows + 1, np.int64)  # usages that cover both row t and row t + 1
    np.add.at(joins, memory.first, 1)
    np.add.at(joins, memory.last - 1, -1)
    apart = np.cumsum(joins)[: max(0, memory.num_rows - 1)] == 0
    return np.concatenate([[0], np.cumsum(apart)])[: memory.num_rows]


def _rows_of(memory: Memory, usages: Ints, place: Ints) -> Memory:
    """Return the rows covered by the given usages, with these usages only."""
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
