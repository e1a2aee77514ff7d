"""The least step time of one choice, rather than of a mean of choices as in the hull.

The best mean may shard a parameter of a layer by halves. What a single choice takes at least follows from the same
rows with whole numbers: the prices of the hull's bound leave few strategies that a choice better than the best plan
can have, and branch and bound does the rest (`autopar.solvers.exact.aggregate_objective`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.bounds.column_generation import Hull
from autopar.bounds.master_rows import StepProgram
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.tables import AGAIN, OUTSIDE, Slot, Tables
from autopar.problem import Choice
from autopar.solvers.base import Budget
from autopar.solvers.exact.aggregate_objective import AggregateObjective, Term, minimise
from autopar.solvers.reductions.reduced_cost_fixing import survivors_below, union_of

WHOLE_WORK = 6e10
"""Units of work it may take; those of branch and bound take a fifth of a nanosecond here, so that it is cut after some
ten seconds."""

MOST_LEFT = 30_000
"""Strategies and pairs of them up to which branch and bound is tried."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What is known of single choices.

    Attributes:
        bound: Lower bound on the step seconds of every plan below the ceiling; infinity if there is none.
        choice: The choice of the best one by the rows; None if none was found.
    """

    bound: float
    choice: Choice | None


def least_whole(tables: Tables, hull: Hull, ceiling: float, budget: Budget) -> Whole:
    """Return a lower bound on all plans that take less than a ceiling, and the choice it is from.

    Args:
        tables: The decisions.
        hull: The configuration's, with its best prices.
        ceiling: Seconds.
        budget: Work and time.
    """
    rows = hull.rows
    modes = list(range(len(rows.flavours))) if hull.pays_for_memory else [0]
    parts = []
    for mode in modes:
        instance, constant = hull.priced(mode)
        parts.append(survivors_below(instance, ceiling - constant, budget))
    left = union_of(parts)
    if left is None:
        return Whole(math.inf, None)
    if left.size > MOST_LEFT or budget.spent():
        return Whole(hull.bound, None)
    unit = ceiling - rows.fixed
    found = minimise(composite(tables, rows, modes, unit, memory=hull.pays_for_memory), left, 1.0, budget)
    return Whole(max(hull.bound, found.bound * unit + rows.fixed), found.choice)


def composite(tables: Tables, rows: StepProgram, modes: list[int], unit: float, *, memory: bool) -> AggregateObjective:
    """Return the rows of a step program as a function of what a choice adds to them; modes are flavours.

    Args:
        tables: The decisions.
        rows: The step program.
        modes: Flavours that blocks of the most frequent kind may have.
        unit: Seconds that count as 1.
        memory: Whether the rows of memory count.
    """
    of_memory = rows.memory_rows
    used = np.ones(len(of_memory), np.bool_) if memory else ~of_memory
    scale = np.where(of_memory, 1.0, 1.0 / unit)[used]
    own = np.where(rows.shares & ~of_memory[used][:, None], 1.0 / unit, 1.0)
    numbers: dict[bytes, int] = {}
    weights: list[FloatArray] = []
    terms: list[Term] = []
    for nodes, weight, values in _parts(tables, rows, modes):
        scaled = weight[used] * scale[:, None]
        if not scaled.any():
            continue
        number = numbers.setdefault(scaled.tobytes(), len(weights))
        if number == len(weights):
            weights.append(scaled)
        terms.append(Term(nodes, number, values))
    least = (rows.least[:, None] + rows.host[:, modes])[used] * scale[:, None]
    several = int(max(kind.count for kind in tables.folded.kinds))
    return AggregateObjective(rows.cost, rows.lhs[used] * own, least, np.stack(weights, axis=-1), tuple(terms), several)


def _parts(
    tables: Tables, rows: StepProgram, modes: list[int]
) -> Iterator[tuple[tuple[int, ...], FloatArray, FloatArray]]:
    """Yield (nodes, weights of shape (rows, modes), values by strategy) of all that a choice adds to rows."""
    seconds = rows.seconds[:, modes]
    again_nodes, again_edges = frozenset(tables.again_nodes), frozenset(tables.again_edges)

    def paid(kind: int, slot: Slot) -> FloatArray:
        return seconds[:, :, kind, slot]

    for index, node in enumerate(tables.nodes):
        yield (index,), paid(node.kind, node.slot), node.share * node.seconds
        if index in again_nodes:
            yield (index,), paid(node.kind, AGAIN[node.slot]), node.share * node.seconds
    for index, edge in enumerate(tables.edges):
        if not edge.share:
            continue
        slots = (edge.slot, AGAIN[edge.slot]) if index in again_edges else (edge.slot,)
        for slot in slots:
            yield (edge.first, edge.second), paid(edge.kind, slot), edge.share * edge.table
            if edge.outside is not None and slot in OUTSIDE:
                yield (edge.first, edge.second), paid(edge.kind, OUTSIDE[slot]), edge.share * edge.outside.table
    for number, item in enumerate(tables.bytes):
        yield (item.node,), rows.bytes[rows.bytes_of[:, modes], number], item.amounts
    for number, buffer in enumerate(rows.buffers):
        edge = tables.edges[buffer.edge]
        weight = np.broadcast_to(rows.pairs[rows.pairs_of, number][:, None], (len(rows.least), len(modes)))
        yield (edge.first, edge.second), weight, buffer.amounts
