"""The least cost of a field that is too wide to eliminate: messages for the bound, trees for the choice.

On the problems of placements both mostly come to the same number within some hundred sweeps, in a tenth of the time
that a linear program takes. Where they do not, labels go that provably cost more than the best choice, and little is
left for the linear program.
"""

import math
from dataclasses import dataclass

import numpy as np

from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.solvers.base import Budget
from autopar.solvers.dominance import undominated
from autopar.solvers.field import Field, Ints, labels_of
from autopar.solvers.flat import Flat, FlatMemory
from autopar.solvers.memory import Memory
from autopar.solvers.polish import Polisher
from autopar.solvers.relaxation import WINDOW, Relaxation

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
    highest = smaller.highest_cost()
    flat = Flat.of(smaller.softened())
    relaxation = Relaxation(flat, FlatMemory.of(Memory.unlimited(), flat.offsets))
    polisher = Polisher(flat, relaxation.memory, budget.seed)
    bound = -math.inf
    for number in range(1, ROUNDS + 1):
        relaxation.round()
        budget.work.spend(SWEEP * flat.tables.size)
        if number % LOOKS == WINDOW:
            polisher.look(relaxation.labels.copy(), relaxation.prices, budget.spent)
        if number % WINDOW == 0:
            bound = relaxation.bound
            if relaxation.finished or bound >= min(enough, _less(polisher.cost, CLOSED)) or budget.spent():
                break
    labels = relaxation.labels if polisher.labels is None else polisher.labels
    whole = [int(own[label]) if len(own) else 0 for own, label in zip(kept, labels.tolist(), strict=True)]
    if polisher.cost > highest + CLOSED * abs(highest):  # no more than a way through what is forbidden
        return Closing(whole, bound, bound >= enough, kept)
    if bound >= min(enough, _less(polisher.cost, OPTIMALITY_TOLERANCE / 4)):
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
