"""The proof of a node of one stage: its bound is raised from means of choices to single choices.

Dual prices of the master problem make it an integer problem (`bounds/integer.py`), which mostly meets the incumbent.
"""

import math
import time

from autopar.bounds.integer import WHOLE_WORK, integer_bound
from autopar.problem import OPTIMALITY_TOLERANCE
from autopar.search.node_state import NodeState
from autopar.search.plan_finder import PlanFinder
from autopar.solvers.base import Budget, Work


class Proof:
    """Bounds a node of one stage by its best single choice.

    *Relaxes* nothing but the terms that prices replace; *valid* for one stage, once there are prices; *costs* as much
    as all work on the node before, up to `WHOLE_WORK`; *source*: `bounds/integer.py`. Only solvers that count their
    work are used: the others are compared with, or follow recipes.

    Args:
        state: The node.
        finder: Turns placements into plans.
    """

    def __init__(self, state: NodeState, finder: PlanFinder) -> None:
        self._state, self._finder = state, finder

    def is_open(self, bound: float, cutoff: float) -> bool:
        """Whether a proof may raise a bound below the cutoff."""
        return self._ceiling(bound, cutoff) > 0.0

    def prove(self, bound: float, cutoff: float) -> tuple[float, bool]:
        """Raise the bound to single choices; return it and whether another proof may raise it.

        A better incumbent of the proof leaves fewer choices to the next one.

        Args:
            bound: The bound known so far, in seconds.
            cutoff: A bound that is enough.
        """
        state = self._state
        known = state.best
        bound = self._raise_bound(bound, cutoff)
        return bound, state.is_stopped() or (state.best is not known and self.is_open(bound, cutoff))

    def _ceiling(self, bound: float, cutoff: float) -> float:
        """Return the objective in seconds below which a proof looks for choices; 0 if it cannot raise the bound."""
        state = self._state
        best, column_generation = state.best, state.column_generation
        if (
            best is None
            or column_generation is None
            or state.pipeline.num_stages > 1
            or not state.search.solver.counts_work
        ):
            return 0.0
        ceiling = min(cutoff, best.objective)
        return ceiling if column_generation.has_prices and bound < ceiling * (1 - OPTIMALITY_TOLERANCE) else 0.0

    def _raise_bound(self, bound: float, cutoff: float) -> float:
        """Return the bound on single choices, and consider the choice that has it."""
        state = self._state
        ceiling = self._ceiling(bound, cutoff)
        if not ceiling or state.is_stopped():
            return bound
        assert state.column_generation is not None, "there are prices"
        instance, _ = state.column_generation.priced()
        work, seconds = Work(WHOLE_WORK), max(0.0, state.deadline() - time.monotonic())
        budget = Budget(instance, seconds, None, math.inf, 0.0, state.search.should_stop, work=work)
        found = integer_bound(state.tables, state.column_generation, ceiling, budget)
        state.work += work.done
        state.cut += work.left == 0.0
        if found.choice is not None:
            self._finder.consider(found.choice)
        return max(bound, min(found.bound, ceiling))
