"""Every exact reduction in turn, with a record of what each removed; apply (`presolve`) and invert (`Presolved`).

1. parallel edges: one table per pair of nodes; what depends on one node alone goes to that node (`field`).
2. forbidden strategies: what has no permitted partner in some neighbour goes, again and again (`field`).
3. times that can bind: segments of time in which no choice breaks a limit, or that a neighbour covers, go (`memory`).
4. followers: nodes tied to others by forbidden pairs are folded into them, separable tables absorbed (`merge`).
5. dominated strategies: a label goes if another is never dearer and never uses more (`dominance`).
6. parts no limit binds: decided if elimination does it quickly (`components`).
7. nodes with at most two neighbours: eliminated unless a limit depends on them (`eliminate`).
8. components: what is joined by no table and no limit is solved apart (`components`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.problem import Problem
from autopar.solvers.model.graphical_model import Field, Prepared, join, permitted
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.components import Parts, settle, split
from autopar.solvers.reductions.contraction import Merged, merge
from autopar.solvers.reductions.dominance import undominated
from autopar.solvers.reductions.elimination import Reduced, eliminate


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is to decide.

    Attributes:
        nodes: Nodes with more than one label.
        labels: Labels of these nodes.
        pairs: Tables between two nodes; edges in a problem.
        rows: Segments of time whose limit has to be watched.
    """

    nodes: int
    labels: int
    pairs: int
    rows: int

    @classmethod
    def of(cls, field: Field, rows: int) -> "Size":
        """Return the size of a field."""
        sizes = [len(u) for u in field.unary if len(u) > 1]
        return cls(len(sizes), sum(sizes), len(field.tables), rows)


@dataclass(frozen=True, slots=True)
class Step:
    """One reduction.

    Attributes:
        name: What it removes.
        before: How much there was.
        after: How much it left.
        seconds: How long it took.
    """

    name: str
    before: Size
    after: Size
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Presolved:
    """What is left of a problem, and the way back.

    Attributes:
        parts: What is left, in parts that can be solved apart.
    """

    parts: Parts
    _prepared: Prepared
    _merged: Merged
    _reduced: Reduced

    def invert(self, choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the best strategies of all nodes of the problem given labels for each part."""
        labels = self._reduced.invert(self.parts.invert(choices))
        return self._prepared.strategies(self._merged.invert(labels))


class _Clock:
    """Writes down one step after another."""

    def __init__(self, size: Size) -> None:
        self.steps: list[Step] = []
        self._size = size
        self._last = time.monotonic()

    def step(self, name: str, after: Size) -> None:
        """Write down what the step that ends now left."""
        now = time.monotonic()
        self.steps.append(Step(name, self._size, after, now - self._last))
        self._size, self._last = after, now


def presolve(problem: Problem) -> tuple[tuple[Step, ...], Presolved | None]:
    """Return the steps, and what they leave; None if they prove that no choice is permitted and fits."""
    sizes = problem.num_strategies
    num_times = len({u.start for u in problem.usages if u.start < u.end}) if problem.limits else 0
    several = [size for size in sizes if size > 1]
    clock = _Clock(Size(len(several), sum(several), problem.num_edges, num_times))
    field = join(problem)
    clock.step("parallel edges", Size.of(field, num_times))
    prepared = permitted(field)
    if prepared is None:
        clock.step("forbidden strategies", Size(0, 0, 0, 0))
        return tuple(clock.steps), None
    clock.step("forbidden strategies", Size.of(prepared.field, num_times))
    memory = Memory.of(problem, prepared.labels)
    clock.step("times that cannot bind", Size.of(prepared.field, memory.num_rows))
    merged = merge(prepared.field, memory)
    if merged is None or merged.memory.hopeless():
        clock.step("followers", Size(0, 0, 0, 0))
        return tuple(clock.steps), None
    clock.step("followers", Size.of(merged.field, merged.memory.num_rows))
    merged = merged.restrict(undominated(merged.field, merged.memory))
    clock.step("dominated strategies", Size.of(merged.field, merged.memory.num_rows))
    if merged.memory.hopeless():
        return tuple(clock.steps), None
    merged, _ = settle(merged)
    clock.step("parts no limit binds", Size.of(merged.field, merged.memory.num_rows))
    reduced = eliminate(merged.field, keep=merged.memory.users())
    clock.step("degree at most 2", Size.of(reduced.field, merged.memory.num_rows))
    parts = split(reduced.field, merged.memory)
    largest = parts.parts[0] if parts.parts else None
    after = Size(0, 0, 0, 0) if largest is None else Size.of(largest.field, largest.memory.num_rows)
    clock.step(f"largest of {len(parts.parts)} components" if parts.parts else "no component left", after)
    return tuple(clock.steps), Presolved(parts, prepared, merged, reduced)
