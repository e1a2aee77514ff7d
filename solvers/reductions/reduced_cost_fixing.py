"""Labels and pairs that choices below a cost ceiling can contain; every other one provably costs more.

Where the field can be eliminated, the answer is exact for each label and pair alone (min-marginals). Where it is too
wide, message passing fixes labels by their reduced costs first, usually until elimination becomes possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.problem import Problem
from autopar.solvers.base import Budget
from autopar.solvers.bounds.dual_ascent import ROUNDS, SWEEP
from autopar.solvers.bounds.lagrangian_dual import WINDOW, LagrangianDual
from autopar.solvers.model.csr import FlatField, FlatMemory
from autopar.solvers.model.graphical_model import Field, Ints, Prepared, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.elimination import MAX_ENTRIES, MAX_WORK, eliminate_all, elimination_order

ENTRIES, WORK = MAX_ENTRIES // 4, MAX_WORK // 4
"""Limits of elimination here, smaller because all tables and equally large min-marginals are kept."""
PASSES = 4
"""Most passes of message passing."""
LEAST_DROPPED = 0.1
"""Share of the labels that a pass must drop for another pass."""
ROUNDING = 1e-9
"""Relative tolerance above the ceiling within which a label is kept."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Labels and pairs of labels of all choices below a ceiling.

    Attributes:
        labels: Per node, whether each strategy survives, shape (strategies,).
        pairs: Per pair of nodes (a, b), a < b, which strategies may be combined, shape (strategies of a, of b);
            all combinations of surviving labels for pairs that are not listed.
    """

    labels: tuple[Mask, ...]
    pairs: dict[tuple[int, int], Mask]

    def pair(self, a: int, b: int) -> Mask:
        """Return which strategies of two nodes, a < b, may be combined."""
        both = np.outer(self.labels[a], self.labels[b])
        return both & self.pairs[a, b] if (a, b) in self.pairs else both

    @property
    def size(self) -> int:
        """Number of labels and pairs, nodes with one surviving label left out."""
        several = [int(own.sum()) > 1 for own in self.labels]
        labels = sum(int(own.sum()) for own, many in zip(self.labels, several, strict=True) if many)
        return labels + sum(int(self.pair(a, b).sum()) for a, b in self.pairs if several[a] and several[b])

    def union_with(self, other: "Survivors") -> "Survivors":
        """Return the union with `other`."""
        labels = tuple(own | more for own, more in zip(self.labels, other.labels, strict=True))
        pairs = {at: self.pair(*at) | other.pair(*at) for at in self.pairs.keys() & other.pairs.keys()}
        return Survivors(labels, pairs)


def survivors_below(problem: Problem, ceiling: float, budget: Budget) -> Survivors | None:
    """Return the labels and pairs of choices that cost at most `ceiling`; None if there is no such choice.

    Relaxes: the limits. Valid when: always. Costs: one elimination, or `PASSES` message-passing ascents before it.
    Source: min-marginals (Dechter 1999); reduced-cost fixing as in Cooper et al. 2010 (soft arc consistency).

    Args:
        problem: The costs.
        ceiling: In problem units.
        budget: Counts the work; when it runs out, more labels survive.
    """
    prepared = prepare(problem)
    if prepared is None:
        return None
    room = ROUNDING * abs(ceiling)
    order = None
    for _ in range(PASSES):
        order = elimination_order(prepared.field, ENTRIES, WORK)
        if order is not None or budget.stopped() or budget.work.left == 0.0:
            break
        before = sum(map(len, prepared.labels))
        fewer = _restricted(prepared, _labels_below(prepared.field, ceiling + room, budget))
        if fewer is None:
            return None
        prepared = fewer
        if sum(map(len, prepared.labels)) > (1 - LEAST_DROPPED) * before:
            break
    eliminated = None if order is None else eliminate_all(prepared.field, order, budget)
    sizes = problem.num_strategies
    if eliminated is None:
        finite = {at: np.isfinite(table) for at, table in prepared.field.tables.items()}
        return _survivors(sizes, prepared, [np.ones(len(own), np.bool_) for own in prepared.labels], finite)
    most = ceiling + room - eliminated.optimum
    if most < 0:
        return None
    marginals = eliminated.marginals()
    nodes = [rise <= most for rise in marginals.nodes]
    return _survivors(sizes, prepared, nodes, {at: rise <= most for at, rise in marginals.pairs.items()})


def union_of(parts: Sequence[Survivors | None]) -> Survivors | None:
    """Return the union of several results; None if all are None."""
    there = [part for part in parts if part is not None]
    return reduce(Survivors.union_with, there) if there else None


def _labels_below(field: Field, ceiling: float, budget: Budget) -> list[Mask]:
    """Return per node which labels may be below the ceiling, by message passing."""
    flat = FlatField.of(field.softened())
    dual = LagrangianDual(flat, FlatMemory.of(Memory.unlimited(), flat.offsets))
    for number in range(1, ROUNDS + 1):
        dual.run_round()
        budget.work.spend(SWEEP * flat.tables.size)
        if dual.finished or (number % WINDOW == 0 and budget.work.left == 0.0):
            break
    guide = dual.information()
    few = guide.bound + guide.reduced_costs <= ceiling
    return [few[first:last] for first, last in pairwise(flat.offsets.tolist())]


def _restricted(prepared: Prepared, kept: Sequence[Mask]) -> Prepared | None:
    """Return the field restricted to the labels kept; None if a node has none left."""
    if not all(own.any() for own in kept):
        return None
    places: list[Ints] = [np.flatnonzero(own) for own in kept]
    field = prepared.field.restrict(places)
    if not field.propagate():
        return None
    alive = [np.flatnonzero(np.isfinite(unary)) for unary in field.unary]
    labels = (old[place][own] for old, place, own in zip(prepared.labels, places, alive, strict=True))
    return Prepared(field.restrict(alive), tuple(labels))


def _survivors(
    sizes: Sequence[int], prepared: Prepared, nodes: list[Mask], pairs: dict[tuple[int, int], Mask]
) -> Survivors:
    labels = []
    for size, own, kept in zip(sizes, prepared.labels, nodes, strict=True):
        mask = np.zeros(size, np.bool_)
        mask[own[kept]] = True
        labels.append(mask)
    found = {}
    for (a, b), kept in pairs.items():
        mask = np.zeros((sizes[a], sizes[b]), np.bool_)
        mask[np.ix_(prepared.labels[a], prepared.labels[b])] = kept
        found[a, b] = mask
    return Survivors(tuple(labels), found)
