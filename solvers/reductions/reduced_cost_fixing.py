"""Which labels and pairs a choice below a ceiling can consist of: everything else provably costs more.

Where the field can be eliminated the answer is exact for each label and pair alone (min-marginals); where it is too
wide, messages drop labels first, and mostly so many that the rest can be.
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
from autopar.solvers.bounds.lagrangian_dual import WINDOW, Relaxation
from autopar.solvers.model.csr import Flat, FlatMemory
from autopar.solvers.model.graphical_model import Field, Ints, Prepared, prepare
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.elimination import MAX_ENTRIES, MAX_WORK, eliminate_all, order_of

ENTRIES, WORK = MAX_ENTRIES // 4, MAX_WORK // 4
"""Of an elimination here: its tables are all kept, and as many again for what each label and pair raises."""
PASSES = 4
"""Times labels are dropped by messages at most."""
LEAST_DROPPED = 0.1
"""Share of the labels that has to go for another time."""
ROUNDING = 1e-9
"""A label this little above the ceiling, relative, may be below it."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """What choices below a ceiling consist of.

    Attributes:
        labels: Per node which of its strategies are left, (strategies,).
        pairs: Per pair of nodes (a, b), a < b, which of their strategies may stand together, (strategies of a, of b);
            all that are left of pairs that are not named.
    """

    labels: tuple[Mask, ...]
    pairs: dict[tuple[int, int], Mask]

    def pair(self, a: int, b: int) -> Mask:
        """Return which strategies of two nodes, a < b, may stand together."""
        both = np.outer(self.labels[a], self.labels[b])
        return both & self.pairs[a, b] if (a, b) in self.pairs else both

    @property
    def size(self) -> int:
        """Number of labels and pairs, those of nodes with one label left aside."""
        several = [int(own.sum()) > 1 for own in self.labels]
        labels = sum(int(own.sum()) for own, many in zip(self.labels, several, strict=True) if many)
        return labels + sum(int(self.pair(a, b).sum()) for a, b in self.pairs if several[a] and several[b])

    def joined(self, other: "Left") -> "Left":
        """Return what either has left."""
        labels = tuple(own | more for own, more in zip(self.labels, other.labels, strict=True))
        pairs = {at: self.pair(*at) | other.pair(*at) for at in self.pairs.keys() & other.pairs.keys()}
        return Left(labels, pairs)


def below(problem: Problem, ceiling: float, budget: Budget) -> Left | None:
    """Return what choices that cost at most `ceiling` consist of, limits left aside; None if there are none.

    Args:
        problem: The costs.
        ceiling: In units of the problem.
        budget: Its work is counted; if it ends, more is left.
    """
    prepared = prepare(problem)
    if prepared is None:
        return None
    room = ROUNDING * abs(ceiling)
    order = None
    for _ in range(PASSES):
        order = order_of(prepared.field, ENTRIES, WORK)
        if order is not None or budget.stopped() or budget.work.left == 0.0:
            break
        before = sum(map(len, prepared.labels))
        fewer = _dropped(prepared, _rise(prepared.field, ceiling + room, budget))
        if fewer is None:
            return None
        prepared = fewer
        if sum(map(len, prepared.labels)) > (1 - LEAST_DROPPED) * before:
            break
    eliminated = None if order is None else eliminate_all(prepared.field, order, budget)
    sizes = problem.num_strategies
    if eliminated is None:
        finite = {at: np.isfinite(table) for at, table in prepared.field.tables.items()}
        return _left(sizes, prepared, [np.ones(len(own), np.bool_) for own in prepared.labels], finite)
    most = ceiling + room - eliminated.optimum
    if most < 0:
        return None
    marginals = eliminated.marginals()
    nodes = [rise <= most for rise in marginals.nodes]
    return _left(sizes, prepared, nodes, {at: rise <= most for at, rise in marginals.pairs.items()})


def union(parts: Sequence[Left | None]) -> Left | None:
    """Return what any of several has left; None if nothing is."""
    there = [part for part in parts if part is not None]
    return reduce(Left.joined, there) if there else None


def _rise(field: Field, ceiling: float, budget: Budget) -> list[Mask]:
    """Return which labels of each node may be below the ceiling, by messages."""
    flat = Flat.of(field.softened())
    relaxation = Relaxation(flat, FlatMemory.of(Memory.unlimited(), flat.offsets))
    for number in range(1, ROUNDS + 1):
        relaxation.round()
        budget.work.spend(SWEEP * flat.tables.size)
        if relaxation.finished or (number % WINDOW == 0 and budget.work.left == 0.0):
            break
    known, rises = relaxation.rises()
    few = known + rises <= ceiling
    return [few[first:last] for first, last in pairwise(flat.offsets.tolist())]


def _dropped(prepared: Prepared, kept: Sequence[Mask]) -> Prepared | None:
    """Return a field of the labels kept; None if a node has none left."""
    if not all(own.any() for own in kept):
        return None
    places: list[Ints] = [np.flatnonzero(own) for own in kept]
    field = prepared.field.restrict(places)
    if not field.propagate():
        return None
    alive = [np.flatnonzero(np.isfinite(unary)) for unary in field.unary]
    labels = (old[place][own] for old, place, own in zip(prepared.labels, places, alive, strict=True))
    return Prepared(field.restrict(alive), tuple(labels))


def _left(sizes: Sequence[int], prepared: Prepared, nodes: list[Mask], pairs: dict[tuple[int, int], Mask]) -> Left:
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
    return Left(tuple(labels), found)
