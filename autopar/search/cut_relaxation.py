"""Lower bounds of one node from the cut LP, which spreads blocks over the stages of a pipeline.

The linear program is in `bounds/cut_lp.py`, the order of its pipelines in `bounds/cut_order.py`; the most frequent
choices of its solution are completed and become plans.
"""

import numpy as np

from autopar.bounds.block_lp import BlockProgram, block_program
from autopar.bounds.cut_lp import RemainingCosts, TaskOrder
from autopar.bounds.cut_order import PipelineBounds
from autopar.bounds.priced_cuts import CutGenerator
from autopar.configuration import Configuration
from autopar.formulate.block_memory import RESIDENT
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.manual_recipes import restrict
from autopar.problem import Choice, Recipe
from autopar.search.node_state import NodeState
from autopar.search.placement_solver import PlacementSolver
from autopar.search.plan_finder import PlanFinder
from autopar.search.relaxation import Relaxation


class CutRelaxation:
    """Bounds the pipelines of a node by the cut LP.

    *Relaxes* single choices of blocks to their means; *valid* where `SearchContext.cut_lp_applies` holds; *costs* a
    linear program and several placement problems of single blocks a round; *source*: `bounds/cut_lp.py`.

    Args:
        state: The node.
        solver: Solver of its placement problems.
        finder: Turns placements into plans.
        relaxation: The bound without memory limits.

    Attributes:
        pipeline_bounds: Bounds of the pipelines; None before the first cut LP.
    """

    def __init__(self, state: NodeState, solver: PlacementSolver, finder: PlanFinder, relaxation: Relaxation) -> None:
        self._state, self._solver, self._finder, self._relaxation = state, solver, finder, relaxation
        self.pipeline_bounds: PipelineBounds | None = None

    def start(self, cutoff: float) -> PipelineBounds:
        """Bound the pipelines by the cuts at the first prices, up to a bound that is enough."""
        state = self._state
        cut_generator = CutGenerator(state.tables, self.program(), state.choices, self._solver.solve_block)
        self.pipeline_bounds = PipelineBounds(
            cut_generator, state.bounded, self._tasks, state.target(cutoff), state.is_stopped
        )
        return self.pipeline_bounds

    def advance(self, bound: float, cutoff: float) -> tuple[float, bool]:
        """Raise the bound by a few rounds of the cut LP; return it and whether further rounds may raise it.

        Args:
            bound: The bound known so far.
            cutoff: A bound that is enough.
        """
        state, settings, pipeline_bounds = self._state, self._state.settings, self.pipeline_bounds
        steps = settings.cut_steps
        if pipeline_bounds is None:
            pipeline_bounds = self.start(cutoff)
            steps = 0 if pipeline_bounds.bound > bound * (1 + settings.least_cut_rise) else settings.cut_steps
        for _ in range(steps):
            own = pipeline_bounds.select_pipeline(self._tasks, state.target(cutoff), state.is_stopped)
            if own is None or state.is_stopped():
                break
            self._relaxation.round_once()
            found = pipeline_bounds.solve_inner(own, self._tasks, state.target(cutoff), state.is_stopped)
            for choice in found.choices[: settings.most_tried_choices]:
                whole = self._complete(choice, found.rent)
                if whole is not None:
                    self._finder.consider(whole)
            if found.value >= state.target(cutoff) or pipeline_bounds.bound > bound * (1 + settings.least_cut_rise):
                break  # the choices known allow no better plan, or other nodes have the least bound now
        more = pipeline_bounds.select_pipeline(self._tasks, state.target(cutoff), state.is_stopped) is not None
        self.count_work()
        return max(bound, pipeline_bounds.bound), more

    def count_work(self) -> None:
        """Add the work of the linear programs since the last call to that of the node."""
        assert self.pipeline_bounds is not None, "a cut LP is solved first"
        self._state.work += self.pipeline_bounds.cut_generator.drain_work()

    def program(self) -> BlockProgram:
        """Return the rows of a block of the most frequent kind."""
        state = self._state
        main = max(state.tables.folded.kinds, key=lambda kind: kind.count)
        flavours = state.search.constraints.flavours(main.instances)
        return block_program(state.tables, state.bounding, state.search.memory_limit, flavours, state.fastest)

    def _tasks(self, configuration: Configuration) -> tuple[TaskOrder, RemainingCosts]:
        """Return the order of a pipeline's tasks, and its costs besides blocks."""
        memory_bounds = self._state.search.memory_bounds
        return memory_bounds.order(configuration), memory_bounds.remaining_costs(
            configuration, self._state.microbatch_bound
        )

    def _complete(self, choice: Choice, rent: float) -> Choice | None:
        """Return placements that agree with a choice in the most frequent kind of block; the others are solved for.

        Args:
            choice: The choice.
            rent: Price of all the memory of a device, in seconds.
        """
        state, tables = self._state, self._state.tables
        main = max(tables.folded.kinds, key=lambda kind: kind.count).id
        price = rent / (state.search.memory_limit - tables.folded.buffer_bytes)
        prices = np.array([price * (item.kind != main and item.memory in RESIDENT) for item in tables.bytes])
        weighting = weights(tables, state.pipeline, recompute=state.fastest, hidden=1.0, bounding=False)
        instance = problem(tables, weighting, name=str(state.configuration), prices=prices)
        allowed = tuple(
            (own,) if node.kind == main else tuple(range(node.count))
            for node, own in zip(tables.nodes, choice, strict=True)
        )
        restricted = restrict(instance, Recipe("blocks", allowed))
        return self._solver.solve_problem(restricted, most=state.settings.block_work).choice
