"""Dual ascent for fields too wide to eliminate: message passing raises the bound, tree descent lowers the cost.

On placement problems bound and cost usually meet within some hundred sweeps, in a tenth of the time of a linear
program. Where they do not, reduced-cost fixing removes labels before the remaining field is solved otherwise.
"""

import math
from dataclasses import dataclass

import numpy as np

from autopar.compiled import compiled
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.base import Budget
from autopar.solvers.bounds.lagrangian_dual import WINDOW, LagrangianDual
from autopar.solvers.local_search.polish import Polisher
from autopar.solvers.model.csr import FlatField, FlatMemory
from autopar.solvers.model.graphical_model import Field, Floats, Ints, labels_of, penalty
from autopar.solvers.model.memory_rows import Memory
from autopar.solvers.model.table_kernels import separate
from autopar.solvers.reductions.dominance import Flags, undominated, undominated_flags

ROUNDS = 400
"""Most sweeps; a gap left open goes to another ascent on fewer labels, or to a linear program."""
SWEEP = 4.0
"""Units of work of a sweep, per table entry."""
POLISH_ROUNDS = 20
"""Sweeps between two choices that are polished."""
CLOSED = 1e-9
"""Relative gap that counts as closed."""


@dataclass(frozen=True, slots=True, eq=False)
class AscentResult:
    """Result of a dual ascent.

    Attributes:
        labels: The cheapest choice found, any label for removed nodes; forbidden if no permitted choice was found.
        bound: Lower bound on the cost of every choice.
        closed: Whether the choice is optimal, or the bound reached the one asked for.
        kept: Labels per node that survive reduced-cost fixing; an optimal choice consists of them.
    """

    labels: list[int]
    bound: float
    closed: bool
    kept: list[Ints]


def ascend(field: Field, budget: Budget, sufficient: float = math.inf) -> AscentResult:
    """Return the cheapest choice found and a lower bound, usually equal; deterministic unless time runs out.

    Relaxes: the agreement of edges on labels (TRW-S, `autopar.solvers.bounds.messages`). Valid when: no limits are
    asked for (with limits it stays a lower bound). Costs: at most `ROUNDS` sweeps over the tables, counted as work.

    Args:
        field: Costs; removed nodes have no labels.
        budget: Time and work.
        sufficient: Bound at which to stop.
    """
    better = undominated(_with_placeholder_labels(field), Memory.unlimited())
    kept = [own[: len(unary)] for own, unary in zip(better, field.unary, strict=True)]
    smaller = _with_placeholder_labels(field.restrict(kept))
    return _ascend(FlatField.of(smaller.softened()), kept, smaller.highest_cost(), budget, sufficient)


def ascend_flat(flat: FlatField, budget: Budget, sufficient: float = math.inf) -> AscentResult:
    """Run `ascend` on a field in arrays with one table per edge, down to half the budget's gap."""
    flags = undominated_flags(flat, FlatMemory.of(Memory.unlimited(), flat.offsets))
    kept = np.flatnonzero(flags)
    begins = np.searchsorted(kept, flat.offsets)
    sizes, unary = np.diff(begins), flat.unary[kept]
    tables, stands = np.empty(len(flat.tables)), np.zeros(len(flat.edges), bool)
    extremes = np.zeros(2)
    length = _restrict_tables(
        flat.offsets, flat.edges, flat.tables, flat.at, kept, begins, unary, tables, stands, extremes
    )
    edges, tables = flat.edges[stands], tables[:length]
    lowest, highest = extremes.tolist()
    lowest, highest = lowest + flat.constant, highest + flat.constant
    soft = penalty(lowest, highest)
    unary[np.isinf(unary)], tables[np.isinf(tables)] = soft, soft
    smaller = FlatField.of_tables(sizes, unary, edges, tables, flat.constant)
    close = budget.gap / 2 if budget.gap > OPTIMALITY_TOLERANCE else CLOSED
    return _ascend(smaller, labels_of(flags, flat.offsets), highest, budget, sufficient, close)


def _ascend(
    flat: FlatField, kept: list[Ints], highest: float, budget: Budget, sufficient: float, close: float = CLOSED
) -> AscentResult:
    """Run the ascent on a softened field.

    Args:
        flat: The field, softened.
        kept: Original labels of each node.
        highest: Upper bound on the cost of permitted choices.
        budget: Time and work.
        sufficient: Bound at which to stop.
        close: Relative gap at which to stop.
    """
    dual = LagrangianDual(flat, FlatMemory.of(Memory.unlimited(), flat.offsets))
    polisher = Polisher(flat, dual.memory, budget.seed)
    bound = -math.inf
    for number in range(WINDOW, ROUNDS + 1, WINDOW):
        dual.run_window()
        budget.work.spend(SWEEP * WINDOW * flat.tables.size)
        if number % POLISH_ROUNDS == WINDOW:
            polisher.polish(dual.labels.copy(), dual.prices, budget.spent)
        bound = dual.bound
        if dual.finished or bound >= min(sufficient, _lowered(polisher.cost, close)) or budget.spent():
            break
    labels = dual.labels if polisher.labels is None else polisher.labels
    whole = [int(own[label]) if len(own) else 0 for own, label in zip(kept, labels.tolist(), strict=True)]
    if polisher.cost > highest + CLOSED * abs(highest):  # the choice contains a forbidden label or pair
        return AscentResult(whole, bound, bound >= sufficient, kept)
    if bound >= min(sufficient, _lowered(polisher.cost, max(close, OPTIMALITY_TOLERANCE / 4))):
        return AscentResult(whole, bound, True, kept)
    guide = dual.information()
    slack = CLOSED * abs(polisher.cost) + 1e-12 * float(np.abs(flat.tables).max(initial=0.0))
    below = guide.bound + guide.reduced_costs <= polisher.cost + slack
    left = labels_of(below, flat.offsets)
    kept = [own[some] if len(own) else own for own, some in zip(kept, left, strict=True)]
    return AscentResult(whole, bound, False, kept)


def _lowered(cost: float, share: float) -> float:
    """Return `cost` minus the given share of its absolute value; infinity stays."""
    return cost - share * abs(cost) if math.isfinite(cost) else cost


def _with_placeholder_labels(field: Field) -> Field:
    """Return a field in which each removed node has one label of cost 0."""
    nothing = np.zeros(1)
    unary = [own if len(own) else nothing for own in field.unary]
    return Field(unary, field.tables, field.adjacent, field.constant)


@compiled
def _restrict_tables(
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
    """Write the tables restricted to the kept labels, concatenated; return their number of entries.

    Args:
        offsets: Where the labels of each node begin.
        edges: Nodes of each edge.
        tables: Table entries of all edges.
        at: Where each edge's table begins.
        kept: Kept labels, numbered over all nodes.
        begins: Where each node's labels begin in `kept`.
        unary: Costs of the kept labels; separable tables are added to it and left out.
        narrowed: Output: the restricted tables.
        stands: Output: which edges keep a table.
        extremes: Output: the sums of all minima and of all permitted maxima.
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
    """Add to `extremes` the minimum and, if any cost is permitted, the permitted maximum of a range of costs."""
    least, most = np.inf, -np.inf
    for place in range(first, last):
        least = min(least, costs[place])
        if costs[place] < np.inf:
            most = max(most, costs[place])
    extremes[0] += least
    if most > -np.inf:
        extremes[1] += most
