"""Parts of a problem around a choice: some nodes free, all others as they are, solved exactly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.solvers.backends import highs, lazy_rows
from autopar.solvers.base import Budget
from autopar.solvers.model.csr import FlatMemory
from autopar.solvers.model.graphical_model import Field, Floats, Ints
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.elimination import eliminate, eliminate_all, order_of

MAX_ENTRIES, MAX_WORK = 200_000, 4_000_000
"""Largest table, and entries of all tables, of a part that is eliminated; about 50 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The costs and limits that free nodes see while all others stay.

    Attributes:
        nodes: The free nodes.
        kept: Per free node the labels it may take, its present one among them.
        field: Costs of those labels; a choice costs what it adds to the cost of the rest.
        memory: What the others leave of the limits.
        present: The present choice, in labels of `field`.
    """

    nodes: Ints
    kept: tuple[Ints, ...]
    field: Field
    memory: Memory
    present: tuple[int, ...]

    def labels(self, choice: Sequence[int]) -> Ints:
        """Return the labels of `nodes` that a choice of `field` stands for."""
        return np.array([k[c] for k, c in zip(self.kept, choice, strict=True)], np.int64)


def carve(field: Field, memory: FlatMemory, labels: Ints, profile: Floats, nodes: Ints, kept: Sequence[Ints]) -> Piece:
    """Return what `nodes` may change.

    Args:
        field: All costs.
        memory: All limits.
        labels: The present choice, which fits.
        profile: Its use in each segment.
        nodes: The free nodes.
        kept: Per free node the labels to consider, in order; the present one must be among them.
    """
    place = {n: k for k, n in enumerate(nodes.tolist())}
    piece = Field([field.unary[n][k] for n, k in zip(place, kept, strict=True)])
    for n, k in place.items():
        for other in field.adjacent[n]:
            if other not in place:
                piece.unary[k] = piece.unary[k] + field.table(n, other)[kept[k], labels[other]]
            elif n < other:
                piece.add(k, place[other], field.tables[n, other][kept[k][:, None], kept[place[other]]])
    present = tuple(int(np.searchsorted(k, labels[n])) for n, k in zip(place, kept, strict=True))
    return Piece(nodes, tuple(kept), piece, _left(memory, labels, profile, nodes, kept), present)


def _left(memory: FlatMemory, labels: Ints, profile: Floats, nodes: Ints, kept: Sequence[Ints]) -> Memory:
    """Return the limits on free nodes: one row for each run of segments in which the same usages count."""
    owners, usages, amounts = [], [], []
    for k, n in enumerate(nodes.tolist()):
        for u in range(memory.node_at[n], memory.node_at[n + 1]):
            use = memory.amounts[memory.amount_at[u] : memory.amount_at[u + 1]]
            part = use[kept[k]]
            if part.min() < part.max():
                owners.append(k)
                usages.append(u)
                amounts.append(part - use[labels[n]])  # the present choice counts as the use of nothing
    if not usages:
        return Memory.unlimited()
    first, last = memory.first[usages], memory.last[usages]
    cuts = np.unique(np.concatenate([first, last]))
    room = np.append(memory.limits - profile, np.inf)
    rooms = np.minimum.reduceat(room, cuts)[:-1]
    begin, end = np.searchsorted(cuts, first), np.searchsorted(cuts, last)
    most = np.zeros(len(cuts))
    highest = np.array([a.max() for a in amounts])
    np.add.at(most, begin, highest)
    np.add.at(most, end, -highest)
    rows = np.flatnonzero(np.cumsum(most)[:-1] > rooms)
    number = np.searchsorted(rows, np.arange(len(cuts) + 1))
    begin, end = number[begin], number[end]
    counted = np.flatnonzero(begin < end)
    return Memory(
        cuts[rows],
        rooms[rows],
        memory.scales[np.minimum(cuts[rows], len(memory.scales) - 1)],
        np.array(owners, np.int64)[counted],
        begin[counted],
        end[counted],
        tuple(amounts[u] for u in counted.tolist()),
    )


def solve(piece: Piece, budget: Budget) -> Ints | None:
    """Return labels of the piece's nodes that cost no more than the present ones and fit; None if none were found."""
    found: list[tuple[float, tuple[int, ...]]] = []
    before = piece.field.cost(piece.present)
    limits = piece.memory.limits

    def offer(choice: list[int]) -> bool:
        if not bool((piece.memory.profile(choice) <= limits).all()):
            return False
        found.append((piece.field.cost(choice), tuple(choice)))
        return True

    if not _eliminate(piece, budget, offer):
        code = partial(highs.run, ceiling=before)
        lazy_rows.minimise(piece.field, piece.memory, budget, code, offer, report=lambda _: None)
    cost, choice = min(found, default=(np.inf, ()))
    return piece.labels(choice) if cost <= before else None


def _eliminate(piece: Piece, budget: Budget, offer: Callable[[list[int]], bool]) -> bool:
    """Offer the best choice without limits if elimination finds it quickly; return whether it fits."""
    reduced = eliminate(piece.field)
    order = order_of(reduced.field, MAX_ENTRIES, MAX_WORK)
    eliminated = None if order is None else eliminate_all(reduced.field, order, budget)
    return eliminated is not None and offer(reduced.invert(eliminated.choice()))
