"""Integer bound: the least step time of a single choice by the rows of the master problem.

```text
x_is in {0, 1},   pairs y as in the local polytope,   V linear in x and y,
shares of recompute flavours a multiple of 1 / blocks
```

Look here for the last and most expensive lower bound. The optimum of column generation may be a convex combination that
shards half of a parameter; here strategies are binary. At the best prices, min-marginals fix every strategy and pair
that would exceed the incumbent, and branch and bound decides the rest (`autopar.solvers.exact.aggregate_objective`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.bounds.column_generation import ColumnGeneration
from autopar.bounds.master_rows import StepProgram
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.tables import AGAIN, OUTSIDE, Slot, Tables
from autopar.problem import Choice
from autopar.solvers.base import Budget
from autopar.solvers.exact.aggregate_objective import AggregateObjective, Term, minimise
from autopar.solvers.reductions.reduced_cost_fixing import survivors_below, union_of

WHOLE_WORK = 6e10
"""Limit on the work of one integer bound. A unit of branch and bound takes a fifth of a nanosecond here, so that this
cuts it off after about ten seconds."""

MOST_LEFT = 30_000
"""Surviving strategies and pairs up to which branch and bound is tried."""


@dataclass(frozen=True, slots=True)
class IntegerBound:
    """What is proven of single choices.

    Attributes:
        bound: Lower bound on the step seconds of every plan below the ceiling; infinity if there is no such plan.
        choice: Best choice by the rows; None if none was found.
    """

    bound: float
    choice: Choice | None


def integer_bound(tables: Tables, column_generation: ColumnGeneration, ceiling: float, budget: Budget) -> IntegerBound:
    """Lower bound on all plans below a ceiling, and the best choice found.

    - *Relaxes*: gradients that blocks inside the chain reduce late, and which blocks of a kind have which recompute
      flavour: only the number of blocks of each flavour is integral.
    - *Valid when*: the rows of the master problem are lower bounds of the step time.
    - *Cost*: branch and bound within the budget; skipped if more than `MOST_LEFT` strategies and pairs survive.
    - *Source*: branch and bound, Land and Doig, 1960; reduced-cost fixing, Dantzig, Fulkerson and Johnson, 1954.

    Args:
        tables: The placement problem's tables.
        column_generation: The configuration's master problem, with its best prices.
        ceiling: Upper cutoff in seconds: the incumbent.
        budget: Work and time.
    """
    rows = column_generation.rows
    modes = list(range(len(rows.flavours))) if column_generation.pays_for_memory else [0]
    survivors = []
    for mode in modes:
        instance, constant = column_generation.priced(mode)
        survivors.append(survivors_below(instance, ceiling - constant, budget))
    remaining = union_of(survivors)
    if remaining is None:
        return IntegerBound(math.inf, None)
    if remaining.size > MOST_LEFT or budget.spent():
        return IntegerBound(column_generation.bound, None)
    unit = ceiling - rows.fixed
    found = minimise(
        objective_of_rows(tables, rows, modes, unit, memory=column_generation.pays_for_memory), remaining, 1.0, budget
    )
    return IntegerBound(max(column_generation.bound, found.bound * unit + rows.fixed), found.choice)


def objective_of_rows(
    tables: Tables, rows: StepProgram, modes: list[int], unit: float, *, memory: bool
) -> AggregateObjective:
    """Write the rows of a step program as an objective over choices and flavours.

    Args:
        tables: The placement problem's tables.
        rows: The step program.
        modes: Numbers of the flavours that blocks of the most frequent kind may have.
        unit: Seconds that count as 1.
        memory: Whether rows of memory count.
    """
    is_memory = rows.memory_rows
    in_use = np.ones(len(is_memory), np.bool_) if memory else ~is_memory
    scale = np.where(is_memory, 1.0, 1.0 / unit)[in_use]
    variable_scale = np.where(rows.are_shares & ~is_memory[in_use][:, None], 1.0 / unit, 1.0)
    numbers: dict[bytes, int] = {}
    weights: list[FloatArray] = []
    terms: list[Term] = []
    for nodes, weight, values in _objective_terms(tables, rows, modes):
        scaled = weight[in_use] * scale[:, None]
        if not scaled.any():
            continue
        weight_number = numbers.setdefault(scaled.tobytes(), len(weights))
        if weight_number == len(weights):
            weights.append(scaled)
        terms.append(Term(nodes, weight_number, values))
    least = (rows.least[:, None] + rows.host[:, modes])[in_use] * scale[:, None]
    num_instances = int(max(kind.count for kind in tables.folded.kinds))
    return AggregateObjective(
        rows.cost, rows.lhs[in_use] * variable_scale, least, np.stack(weights, axis=-1), tuple(terms), num_instances
    )


def _objective_terms(
    tables: Tables, rows: StepProgram, modes: list[int]
) -> Iterator[tuple[tuple[int, ...], FloatArray, FloatArray]]:
    """Yield (nodes, weights of shape (rows, modes), values by strategy) of everything a choice adds to rows."""
    seconds = rows.seconds[:, modes]
    recomputed_nodes, recomputed_edges = frozenset(tables.again_nodes), frozenset(tables.again_edges)

    def weight_of(kind: int, slot: Slot) -> FloatArray:
        return seconds[:, :, kind, slot]

    for index, node in enumerate(tables.nodes):
        yield (index,), weight_of(node.kind, node.slot), node.share * node.seconds
        if index in recomputed_nodes:
            yield (index,), weight_of(node.kind, AGAIN[node.slot]), node.share * node.seconds
    for index, edge in enumerate(tables.edges):
        if not edge.share:
            continue
        slots = (edge.slot, AGAIN[edge.slot]) if index in recomputed_edges else (edge.slot,)
        for slot in slots:
            yield (edge.first, edge.second), weight_of(edge.kind, slot), edge.share * edge.table
            if edge.outside is not None and slot in OUTSIDE:
                yield (edge.first, edge.second), weight_of(edge.kind, OUTSIDE[slot]), edge.share * edge.outside.table
    for number, item in enumerate(tables.bytes):
        yield (item.node,), rows.bytes[rows.bytes_of[:, modes], number], item.amounts
    for number, buffer in enumerate(rows.buffers):
        edge = tables.edges[buffer.edge]
        weight = np.broadcast_to(rows.pairs[rows.pairs_of, number][:, None], (len(rows.least), len(modes)))
        yield (edge.first, edge.second), weight, buffer.amounts
