"""Solves one node of the branch and bound: its best plan, and a lower bound on all its plans.

1. The placement problem without memory limits bounds every plan; column generation raises the bound (`relaxation.py`).
2. Column generation continues under the memory limit; for pipelines the cut LP replaces it (`cut_relaxation.py`).
3. Placements found on the way are cut into stages, and the best plan is kept (`plan_finder.py`). Where none is near
   the bound, the placement problem is solved under the memory limit (`memory_fitting.py`).
4. With one stage the bound is raised from means of choices to single choices (`proof.py`).
"""

import math
from collections.abc import Sequence

from autopar.configuration import Configuration
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.manual_recipes import restrict
from autopar.formulate.mean_memory import least_bytes
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Tables
from autopar.problem import Choice, Recipe
from autopar.recompute import Recompute
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.cut_relaxation import CutRelaxation
from autopar.search.memory_fitting import MemoryFitting
from autopar.search.node_state import NodeState
from autopar.search.placement_solver import PlacementSolver
from autopar.search.plan_finder import PlanFinder
from autopar.search.proof import Proof
from autopar.search.relaxation import Relaxation


class NodeSolver:
    """Solves one pipeline degree, mesh and number of microbatches, under any of several schedules.

    Args:
        search: Inputs of the search.
        family: Configurations that differ in the schedule only.
        tables: Placement decisions and their costs.
        end: When to stop, on the monotonic clock.

    Attributes:
        state: What is known of the node.
        finder: Turns placements into plans.
        relaxation: Bounds by column generation.
        cuts: Bounds by the cut LP.
        exhausted: Whether no further task raises the bound.
        is_settled: Whether no further task raises the bound but a proof.
    """

    def __init__(self, search: SearchContext, family: Sequence[Configuration], tables: Tables, end: float) -> None:
        self.state = state = NodeState(search, family, tables, end)
        self.finder = PlanFinder(state)
        self._solver = PlacementSolver(state)
        self.relaxation = Relaxation(state, self._solver, self.finder)
        self.cuts = CutRelaxation(state, self._solver, self.finder, self.relaxation)
        self._fitting = MemoryFitting(state, self._solver, self.finder)
        self._proof = Proof(state, self.finder)
        self.exhausted = self.is_settled = False

    @property
    def best(self) -> Candidate | None:
        """The incumbent of the node; None before the first plan."""
        return self.state.best

    @property
    def tables(self) -> Tables:
        """Placement decisions and their costs."""
        return self.state.tables

    @property
    def pipeline(self) -> Pipeline:
        """Pipeline of the first configuration."""
        return self.state.pipeline

    def relax(self, cutoff: float) -> float:
        """Solve the node without memory limits and return a lower bound on all its plans, in seconds.

        Args:
            cutoff: A bound that is enough.
        """
        state = self.state
        state.cutoff = cutoff
        if not state.may_fit:
            return math.inf
        bound = min(self.relaxation.bound_without_memory(cutoff), state.left_out)
        state.unlimited = max(state.unlimited, bound)
        return bound

    def advance(self, bound: float, cutoff: float) -> float:
        """Do the next task under the memory limit: look for better plans, and return a bound that is no lower.

        Args:
            bound: The bound known so far, in seconds.
            cutoff: A bound that is enough.
        """
        state = self.state
        if state.relaxed_choice is None:
            self.exhausted = True
        elif state.cut_lp_applies:
            bound, more = self.cuts.advance(bound, cutoff)
            self.is_settled = self.exhausted = not more
            bound = min(bound, state.left_out)
        elif self.is_settled:
            self.relaxation.round_once()
            bound, more = self._proof.prove(bound, cutoff)
            self.exhausted = not more
            bound = min(bound, state.left_out)
        else:
            self.relaxation.round_once()
            bound = min(self._generate_columns(bound, cutoff), state.left_out)
        return bound

    def solve(self, bound: float, cutoff: float) -> float:
        """Raise a bound until it is above the cutoff or no task raises it, and return it.

        Args:
            bound: The bound known so far, in seconds.
            cutoff: A bound that is enough.
        """
        while not self.exhausted and bound < cutoff and not self.state.is_stopped():
            bound = self.advance(bound, cutoff)
        return bound

    def consider(self, choices: Sequence[Choice]) -> None:
        """Cut placements that are known into stages, and keep the best plan."""
        for choice in choices:
            self.finder.consider(choice)

    def consider_recipes(self, known: Sequence[Recipe]) -> None:
        """Consider the best completion of each recipe, except of those whose every completion is too large."""
        state = self.state
        weighting = weights(state.tables, state.pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=False)
        instance = problem(state.tables, weighting, name=str(state.configuration))
        resident = state.search.constraints.resident
        for recipe in known:
            least = least_bytes(state.tables, state.bounding, recipe.allowed, resident=resident)
            if min(least.values()) > state.search.memory_limit:
                continue
            solution = self._solver.solve_problem(restrict(instance, recipe))
            if solution.choice is not None:
                self.finder.consider(solution.choice)

    def _generate_columns(self, bound: float, cutoff: float) -> float:
        """Raise the bound by column generation under the memory limit; at its end look for plans that fit."""
        state, settings = self.state, self.state.settings
        own, more = self.relaxation.raise_bound(bound, cutoff, settings.memory_steps, memory=True)
        bound = max(bound, own)
        assert state.column_generation is not None, "the relaxation is solved first"
        is_near = state.best is not None and bound >= state.target(math.inf)
        if is_near or not more or state.column_generation.steps >= settings.most_steps:
            self._fitting.fit(bound, cutoff)
            self.is_settled = True
            self.exhausted = not (state.proves and self._proof.is_open(bound, cutoff))
        return bound


def open_node(context: SearchContext, family: Sequence[Configuration], end: float) -> NodeSolver | None:
    """Return the solver of a node; None if pins exclude all its plans.

    Args:
        context: Inputs of the search.
        family: Configurations that differ in the schedule only.
        end: When to stop, on the monotonic clock.
    """
    tables = context.tables(tuple(family))
    return None if tables is None else NodeSolver(context, family, tables, end)
