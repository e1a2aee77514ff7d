"""Presolve: all exact reductions in turn, with a record of the size after each; inverted by `Presolved.invert`.

1. parallel edges: one table per pair of nodes; costs that depend on one node move to it (`graphical_model.join`).
2. forbidden strategies: arc consistency (`graphical_model.permitted`).
3. times that cannot bind: segments no choice can break, or implied by a neighbouring segment (`memory_rows`).
4. followers: functionally determined nodes are contracted, separable tables absorbed (`contraction`).
5. dominated strategies: labels that another label can replace at no cost or use (`dominance`).
6. parts no limit binds: fixed if elimination is quick (`components`).
7. degree at most 2: nodes eliminated unless a limit depends on them (`elimination`).
8. components: subproblems joined by no table and no limit (`components`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.problem import Problem
from autopar.solvers.model.graphical_model import Field, Prepared, join, permitted
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.components import Components, fix_unconstrained, split
from autopar.solvers.reductions.contraction import Contraction, contract
from autopar.solvers.reductions.dominance import undominated
from autopar.solvers.reductions.elimination import ReducedField, eliminate
from autopar.solvers.reductions.resource_fixing import drop_oversized


@dataclass(frozen=True, slots=True)
class ProblemSize:
    """Size of a problem or field.

    Attributes:
        nodes: Nodes with more than one label.
        labels: Labels of these nodes.
        pairs: Tables between two nodes; edges in a problem.
        rows: Segments of time whose limit can bind.
    """

    nodes: int
    labels: int
    pairs: int
    rows: int

    @classmethod
    def of(cls, field: Field, rows: int) -> "ProblemSize":
        """Return the size of a field."""
        sizes = [len(u) for u in field.unary if len(u) > 1]
        return cls(len(sizes), sum(sizes), len(field.tables), rows)


@dataclass(frozen=True, slots=True)
class Step:
    """Record of one reduction.

    Attributes:
        name: What it removes.
        before: ProblemSize before it.
        after: ProblemSize after it.
        seconds: Its wall time.
    """

    name: str
    before: ProblemSize
    after: ProblemSize
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Presolved:
    """A presolved problem, with the map back.

    Attributes:
        parts: The remaining components.
    """

    parts: Components
    _prepared: Prepared
    _contraction: Contraction
    _reduced: ReducedField

    def invert(self, choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the best strategies of all nodes of the problem given the labels of each component."""
        labels = self._reduced.invert(self.parts.invert(choices))
        return self._prepared.strategies(self._contraction.invert(labels))


class _Recorder:
    """Records reductions with their sizes and times."""

    def __init__(self, size: ProblemSize) -> None:
        self.steps: list[Step] = []
        self._size = size
        self._last = time.monotonic()

    def record(self, name: str, after: ProblemSize) -> None:
        """Record the reduction that ends now."""
        now = time.monotonic()
        self.steps.append(Step(name, self._size, after, now - self._last))
        self._size, self._last = after, now


def presolve(problem: Problem) -> tuple[tuple[Step, ...], Presolved | None]:
    """Return the record of reductions and the presolved problem; None if no choice is permitted or fits."""
    sizes = problem.num_strategies
    num_times = len({u.start for u in problem.usages if u.start < u.end}) if problem.limits else 0
    several = [size for size in sizes if size > 1]
    recorder = _Recorder(ProblemSize(len(several), sum(several), problem.num_edges, num_times))
    field = join(problem)
    recorder.record("parallel edges", ProblemSize.of(field, num_times))
    prepared = permitted(field)
    if prepared is None:
        recorder.record("forbidden strategies", ProblemSize(0, 0, 0, 0))
        return tuple(recorder.steps), None
    recorder.record("forbidden strategies", ProblemSize.of(prepared.field, num_times))
    memory = Memory.of(problem, prepared.labels)
    recorder.record("times that cannot bind", ProblemSize.of(prepared.field, memory.num_rows))
    contraction = contract(prepared.field, memory)
    if contraction is None or contraction.memory.is_infeasible():
        recorder.record("followers", ProblemSize(0, 0, 0, 0))
        return tuple(recorder.steps), None
    recorder.record("followers", ProblemSize.of(contraction.field, contraction.memory.num_rows))
    contraction = drop_oversized(contraction)
    if contraction is None:
        recorder.record("strategies that no limit permits", ProblemSize(0, 0, 0, 0))
        return tuple(recorder.steps), None
    recorder.record("strategies that no limit permits", ProblemSize.of(contraction.field, contraction.memory.num_rows))
    contraction = contraction.restrict(undominated(contraction.field, contraction.memory))
    recorder.record("dominated strategies", ProblemSize.of(contraction.field, contraction.memory.num_rows))
    if contraction.memory.is_infeasible():
        return tuple(recorder.steps), None
    contraction, _ = fix_unconstrained(contraction)
    recorder.record("parts no limit binds", ProblemSize.of(contraction.field, contraction.memory.num_rows))
    reduced = eliminate(contraction.field, keep=contraction.memory.resource_users())
    recorder.record("degree at most 2", ProblemSize.of(reduced.field, contraction.memory.num_rows))
    parts = split(reduced.field, contraction.memory)
    largest = parts.parts[0] if parts.parts else None
    after = ProblemSize(0, 0, 0, 0) if largest is None else ProblemSize.of(largest.field, largest.memory.num_rows)
    recorder.record(f"largest of {len(parts.parts)} components" if parts.parts else "no component left", after)
    return tuple(recorder.steps), Presolved(parts, prepared, contraction, reduced)
