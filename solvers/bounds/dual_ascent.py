"""The least cost of a field that is too wide to eliminate: messages for the bound, trees for the choice.

On the problems of placements both mostly come to the same number within some hundred sweeps, in a tenth of the time
that a linear program takes. Where they do not, labels go that provably cost more than the best choice, and little is
left for the linear program.
"""

import math
from dataclasses import dataclass

import numpy as np

from autopar.compiled import compiled
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.base import Budget
from autopar.solvers.bounds.lagrangian_dual import WINDOW, Relaxation
from autopar.solvers.local_search.polish import Polisher
from autopar.solvers.model.csr import Flat, FlatMemory
from autopar.solvers.model.graphical_model import Field, Floats, Ints, labels_of, penalty
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.model.table_kernels import separate
from autopar.solvers.reductions.dominance import Flags, undominated, undominated_of

ROUNDS = 400
"""Sweeps at most: what they leave open takes messages among the labels that are left, or a linear program."""
SWEEP = 4.0
"""Units of work of a sweep per entry of the tables."""
LOOKS = 20
"""Sweeps between two choices that are polished."""
CLOSED = 1e-9
"""Relative gap at which there is nothing more to find."""


@dataclass(frozen=True, slots=True, eq=False)
class Closing:
    """What messages and trees have found.

    Attributes:
        labels: The cheapest choice known, any label for nodes that are gone; forbidden if no other was found.
        bound: No choice costs less.
        closed: Whether the choice is the best, or the bound is as high as was asked for.
        kept: Per node the labels of which a best choice consists.
    """

    labels: list[int]
    bound: float
    closed: bool
    kept: list[Ints]


def close_in(field: Field, budget: Budget, enough: float = math.inf) -> Closing:
    """Return the cheapest choice and a bound on it, which mostly are equal.

    Equal arguments give equal answers unless the time is over before the sweeps are; its sweeps are counted.

    Args:
        field: Costs; nodes that are gone have no labels.
        budget: Time.
        enough: A bound that is enough.
    """
    better = undominated(_filled(field), Memory.unlimited())
    kept = [own[: len(unary)] for own, unary in zip(better, field.unary, strict=True)]
    smaller = _filled(field.restrict(kept))
    return _closed(Flat.of(smaller.softened()), kept, smaller.highest_cost(), budget, enough)


def close_in_flat(flat: Flat, budget: Budget, enough: float = math.inf) -> Closing:
    """Return the same for a field in arrays, with one table per edge, as near as the budget asks for."""
    flags = undominated_of(flat, FlatMemory.of(Memory.unlimited(), flat.offsets))
    kept = np.flatnonzero(flags)
    begins = np.searchsorted(kept, flat.offsets)
    sizes, unary = np.diff(begins), flat.unary[kept]
    tables, stands = np.empty(len(flat.tables)), np.zeros(len(flat.edges), bool)
    extremes = np.zeros(2)
    length = _narrowed(flat.offsets, flat.edges, flat.tables, flat.at, kept, begins, unary, tables, stands, extremes)
    edges, tables = flat.edges[stands], tables[:length]
    lowest, highest = extremes.tolist()
    lowest, highest = lowest + flat.constant, highest + flat.constant
    soft = penalty(lowest, highest)
    unary[np.isinf(unary)], tables[np.isinf(tables)] = soft, soft
    smaller = Flat.of_tables(sizes, unary, edges, tables, flat.constant)
    close = budget.gap / 2 if budget.gap > OPTIMALITY_TOLERANCE else CLOSED
    return _closed(smaller, labels_of(flags, flat.offsets), highest, budget, enough, close)


def _closed(
    flat: Flat, kept: list[Ints], highest: float, budget: Budget, enough: float, close: float = CLOSED
) -> Closing:
    """Return the same for what is left of a field.

    Args:
        flat: The field, softened.
        kept: Which labels of the field these are.
        highest: What no permitted choice exceeds.
        budget: Time.
        enough: A bound that is enough.
        close: Relative gap that is.
    """
    relaxation = Relaxation(flat, FlatMemory.of(Memory.unlimited(), flat.offsets))
    polisher = Polisher(flat, relaxation.memory, budget.seed)
    bound = -math.inf
    for number in range(WINDOW, ROUNDS + 1, WINDOW):
        relaxation.window()
        budget.work.spend(SWEEP * WINDOW * flat.tables.size)
        if number % LOOKS == WINDOW:
            polisher.look(relaxation.labels.copy(), relaxation.prices, budget.spent)
        bound = relaxation.bound
        if relaxation.finished or bound >= min(enough, _less(polisher.cost, close)) or budget.spent():
            break
    labels = relaxation.labels if polisher.labels is None else polisher.labels
    whole = [int(own[label]) if len(own) else 0 for own, label in zip(kept, labels.tolist(), strict=True)]
    if polisher.cost > highest + CLOSED * abs(highest):  # no more than a way through what is forbidden
        return Closing(whole, bound, bound >= enough, kept)
    if bound >= min(enough, _less(polisher.cost, max(close, OPTIMALITY_TOLERANCE / 4))):
        return Closing(whole, bound, True, kept)
    known, rises = relaxation.rises()
    slack = CLOSED * abs(polisher.cost) + 1e-12 * float(np.abs(flat.tables).max(initial=0.0))
    below = known + rises <= polisher.cost + slack
    left = labels_of(below, flat.offsets)
    kept = [own[some] if len(own) else own for own, some in zip(kept, left, strict=True)]
    return Closing(whole, bound, False, kept)


def _less(cost: float, share: float) -> float:
    """Return a cost less a share of it; infinity stays."""
    return cost - share * abs(cost) if math.isfinite(cost) else cost


def _filled(field: Field) -> Field:
    """Return a field in which nodes that are gone have one label, which costs nothing."""
    nothing = np.zeros(1)
    unary = [own if len(own) else nothing for own in field.unary]
    return Field(unary, field.tables, field.adjacent, field.constant)


@compiled
def _narrowed(
    offsets: Ints,
    edges: Ints,
    tables: Floats,
    at: Ints,
    kept: Ints,
    begins: Ints,
    unary: Floats,
    narrowed: Floats,
    stands: Flags,
    extremes: Floats,
) -> int:
    """Write the tables of the labels that are kept, one after the other, and return how many entries they have.

    Args:
        offsets: Where the labels of each node begin.
        edges: Nodes of each edge.
        tables: Their tables.
        at: Where each begins.
        kept: The labels that are kept, counted over all nodes.
        begins: Where those of each node begin among them.
        unary: What they cost; added to where a table is a cost per row plus a cost per column, which is then left out.
        narrowed: Written to.
        stands: The same: which edges are not left out.
        extremes: The same: the sums of all least and of all greatest permitted costs.
    """
    place = 0
    for edge in range(len(edges)):
        one, two = edges[edge, 0], edges[edge, 1]
        rows, columns = begins[one + 1] - begins[one], begins[two + 1] - begins[two]
        width = offsets[two + 1] - offsets[two]
        for x in range(rows):
            row = at[edge] + (kept[begins[one] + x] - offsets[one]) * width - offsets[two]
            for y in range(columns):
                narrowed[place + x * columns + y] = tables[row + kept[begins[two] + y]]
        of_rows, of_columns = np.empty(rows), np.empty(columns)
        if separate(narrowed[place : place + rows * columns].reshape((rows, columns)), of_rows, of_columns):
            for x in range(rows):
                unary[begins[one] + x] += of_rows[x]
            for y in range(columns):
                unary[begins[two] + y] += of_columns[y]
            continue
        stands[edge] = True
        _extremes(narrowed, place, place + rows * columns, extremes)
        place += rows * columns
    for node in range(len(begins) - 1):
        _extremes(unary, begins[node], begins[node + 1], extremes)
    return place


@compiled
def _extremes(costs: Floats, first: int, last: int, extremes: Floats) -> None:
    """Add the least of some costs and the greatest one that is permitted, if any is."""
    least, most = np.inf, -np.inf
    for place in range(first, last):
        least = min(least, costs[place])
        if costs[place] < np.inf:
            most = max(most, costs[place])
    extremes[0] += least
    if most > -np.inf:
        extremes[1] += most
