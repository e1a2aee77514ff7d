"""Subproblems of a large-neighbourhood search (Shaw 1998): some nodes free, all others fixed, solved exactly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autopar.solvers.backends import highs, lazy_rows
from autopar.solvers.base import Budget
from autopar.solvers.model.csr import FlatMemory
from autopar.solvers.model.graphical_model import Field, Floats, Ints
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.reductions.elimination import eliminate, eliminate_all, elimination_order

MAX_ENTRIES, MAX_WORK = 200_000, 4_000_000
"""Largest table, and entries of all tables, of a subproblem that is eliminated; about 50 ms."""
TRIALS = 6
"""Most eliminations at prices, after one without."""


@dataclass(frozen=True, slots=True, eq=False)
class Subproblem:
    """Costs and limits of the free nodes while all others are fixed.

    Attributes:
        nodes: The free nodes.
        kept: Labels each free node may take, its present one included.
        field: Costs of these labels, including the tables to fixed nodes.
        memory: Limits less the use of the fixed nodes.
        present: The present choice, in labels of `field`.
    """

    nodes: Ints
    kept: tuple[Ints, ...]
    field: Field
    memory: Memory
    present: tuple[int, ...]

    def labels(self, choice: Sequence[int]) -> Ints:
        """Return the labels of `nodes` for a choice of `field`."""
        return np.array([k[c] for k, c in zip(self.kept, choice, strict=True)], np.int64)


def subproblem_of(
    field: Field, memory: FlatMemory, labels: Ints, profile: Floats, nodes: Ints, kept: Sequence[Ints]
) -> Subproblem:
    """Return the subproblem of the free `nodes`.

    Args:
        field: Costs of all nodes.
        memory: All limits.
        labels: The present choice, within the limits.
        profile: Its use in each segment.
        nodes: The free nodes.
        kept: Labels to consider per free node, in order, the present one included.
    """
    place = {n: k for k, n in enumerate(nodes.tolist())}
    subproblem = Field([field.unary[n][k] for n, k in zip(place, kept, strict=True)])
    for n, k in place.items():
        for other in field.adjacent[n]:
            if other not in place:
                subproblem.unary[k] = subproblem.unary[k] + field.table(n, other)[kept[k], labels[other]]
            elif n < other:
                subproblem.add(k, place[other], field.tables[n, other][kept[k][:, None], kept[place[other]]])
    present = tuple(int(np.searchsorted(k, labels[n])) for n, k in zip(place, kept, strict=True))
    return Subproblem(nodes, tuple(kept), subproblem, _residual_memory(memory, labels, profile, nodes, kept), present)


def _residual_memory(memory: FlatMemory, labels: Ints, profile: Floats, nodes: Ints, kept: Sequence[Ints]) -> Memory:
    """Return the limits on free nodes, one row per run of segments that the same usages cover."""
    owners, usages, amounts = [], [], []
    for k, n in enumerate(nodes.tolist()):
        for u in range(memory.node_at[n], memory.node_at[n + 1]):
            use = memory.amounts[memory.amount_at[u] : memory.amount_at[u + 1]]
            part = use[kept[k]]
            if part.min() < part.max():
                owners.append(k)
                usages.append(u)
                amounts.append(part - use[labels[n]])  # relative to the present choice, whose use is in `profile`
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


def solve(subproblem: Subproblem, budget: Budget, prices: Floats | None = None) -> Ints | None:
    """Return labels within the limits that cost no more than the present ones; None if none were found.

    Where elimination is quick it is tried at prices of the limits first, and its choice is taken if it is cheaper.

    Args:
        subproblem: The subproblem.
        budget: Time and work.
        prices: Price of each segment in the dual; limits with a price are in the linear program from the start.
    """
    found: list[tuple[float, tuple[int, ...]]] = []
    before = subproblem.field.cost(subproblem.present)
    limits = subproblem.memory.limits

    def offer(choice: list[int]) -> bool:
        if not bool((subproblem.memory.profile(choice) <= limits).all()):
            return False
        found.append((subproblem.field.cost(choice), tuple(choice)))
        return True

    rows = _row_prices(subproblem.memory, prices)
    if not _eliminate(subproblem, budget, offer, rows):
        solve_program = partial(highs.run, ceiling=before)
        lazy_rows.minimise(
            subproblem.field,
            subproblem.memory,
            budget,
            solve_program,
            offer,
            report=lambda _: None,
            violated_times=set(subproblem.memory.times[rows > 0].tolist()),
        )
    cost, choice = min(found, default=(np.inf, ()))
    return subproblem.labels(choice) if cost <= before else None


def _row_prices(memory: Memory, prices: Floats | None) -> Floats:
    """Return the price of each row of a subproblem: the sum over its segments."""
    result = np.zeros(memory.num_rows)
    if prices is not None and memory.num_rows:
        priced = np.flatnonzero(prices > 0)
        rows = np.searchsorted(memory.times, priced, side="right") - 1
        np.add.at(result, rows[rows >= 0], prices[priced[rows >= 0]])
    return result


def _eliminate(subproblem: Subproblem, budget: Budget, offer: Callable[[list[int]], bool], prices: Floats) -> bool:
    """Offer minima at rising prices of the limits if elimination is quick; return whether one is good enough.

    The minimum without prices is optimal if it is within the limits. Else the most broken limit gets a price at which
    nothing would be gained, or twice its price, until a minimum is within the limits or costs too much.
    """
    memory, field = subproblem.memory, subproblem.field
    before = field.cost(subproblem.present)
    sizes = [len(unary) for unary in field.unary]
    rows = np.zeros(memory.num_rows)
    for trial in range(1 + TRIALS):
        priced = field
        if rows.any():
            priced = field.copy()
            priced.unary = [u + p for u, p in zip(field.unary, memory.prices(rows, sizes), strict=True)]
        reduced = eliminate(priced)
        order = elimination_order(reduced.field, MAX_ENTRIES, MAX_WORK)
        eliminated = None if order is None else eliminate_all(reduced.field, order, budget)
        if eliminated is None:
            return False
        choice = reduced.invert(eliminated.choice())
        cost = field.cost(choice)
        if trial and cost >= before:
            return False
        if offer(choice):
            return True
        excess = memory.profile(choice) - memory.limits
        if trial == 0:
            rows = prices.copy()
        worst = int((excess / memory.scales).argmax())
        if excess[worst] > 0 and (trial or not rows[worst] > 0):
            rows[worst] = max(2 * rows[worst], (before - cost) / excess[worst])
    return False
