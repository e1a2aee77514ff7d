"""Placement problems of one node: they are written from its tables and solved within limits of work and time."""

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.formulate.linear_weights import StageMix, problem, weights
from autopar.formulate.manual_recipes import recipes
from autopar.problem import OPTIMALITY_TOLERANCE, Choice, Problem, Solution
from autopar.recompute import Recompute
from autopar.search.node_state import NodeState
from autopar.solvers.limited import PLACEMENT_WORK, solve_limited


class PlacementSolver:
    """Solves placement problems of one node and counts their work.

    Args:
        state: The node.
    """

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def solve(
        self,
        *,
        hidden: float,
        recompute: Recompute | Sequence[Recompute],
        bounding: bool,
        cutoff: float = math.inf,
        mixes: tuple[StageMix, ...] = (),
        limit: float = math.inf,
        start: Choice | None = None,
    ) -> Solution:
        """Solve the placement problem of the node.

        Args:
            hidden: Share of the gradient traffic that is hidden, as of `weights`.
            recompute: What all blocks recompute, or what each kind does.
            bounding: Whether the optimum has to be a lower bound on plans.
            cutoff: Cost in seconds above which solutions are of no use.
            mixes: Blocks per stage, for problems under the memory limit.
            limit: Bytes per device.
            start: Placements to start from.
        """
        state = self._state
        weighting = weights(
            state.tables,
            state.bounding if bounding else state.pipeline,
            recompute=recompute,
            hidden=hidden,
            bounding=bounding,
            traffic=0.0 if bounding else None,
        )
        instance = problem(state.tables, weighting, mixes, limit, str(state.configuration))
        instance = self._with_recipes(instance)
        if state.search.on_problem is not None:
            state.search.on_problem(instance)
        return self.solve_problem(instance, start, cutoff, state.settings.memory_gap if mixes else OPTIMALITY_TOLERANCE)

    def solve_priced(self, instance: Problem, cutoff: float) -> Solution:
        """Solve the pricing problem of column generation."""
        settings = self._state.settings
        most = settings.priced_work * self._state.search.time_limit
        return self.solve_problem(self._with_recipes(instance), None, cutoff, settings.priced_gap, most)

    def solve_block(self, instance: Problem, cutoff: float) -> Solution:
        """Solve a placement problem of single blocks, for the cut LP."""
        settings = self._state.settings
        return self.solve_problem(self._with_recipes(instance), None, cutoff, settings.block_gap, settings.block_work)

    def solve_problem(
        self,
        instance: Problem,
        start: Choice | None = None,
        cutoff: float = math.inf,
        gap: float = OPTIMALITY_TOLERANCE,
        most: float = PLACEMENT_WORK,
    ) -> Solution:
        """Solve a problem until the deadline of the node.

        Args:
            instance: The problem.
            start: Placements to start from.
            cutoff: Cost above which solutions are of no use.
            gap: Relative gap that is small enough.
            most: Limit of work, in units.
        """
        state = self._state
        found = solve_limited(
            state.search.solver,
            instance,
            state.deadline(),
            start=start,
            cutoff=cutoff,
            gap=gap,
            should_stop=state.search.should_stop,
            seed=state.search.seed,
            most=most,
        )
        state.work += found.work
        state.cut += found.cut
        return found.solution

    def _with_recipes(self, instance: Problem) -> Problem:
        """Return the problem with the recipes that some solvers follow."""
        state = self._state
        if state.search.batch_dims is None:
            return instance
        found = recipes(state.tables, state.search.batch_dims)
        return replace(instance, name=str(state.configuration), recipes=found)
