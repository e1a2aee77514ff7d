"""Lower bounds of one node from the placement relaxation: without memory limits, then by column generation.

The master problem and its pricing are in `bounds/column_generation.py`; placements found on the way become plans.
"""

import math
from dataclasses import replace

import numpy as np

from autopar.bounds.column_generation import ColumnGeneration
from autopar.bounds.critical_path import CriticalPath
from autopar.bounds.master_problem import step_program
from autopar.bounds.master_rows import StepProgram
from autopar.bounds.microbatch import MicrobatchBound, host_launch_bound
from autopar.formulate.linear_weights import kind_weights, problem
from autopar.formulate.tables import Slot
from autopar.problem import Choice
from autopar.search.node_state import NodeState
from autopar.search.placement_solver import PlacementSolver
from autopar.search.plan_finder import PlanFinder


class Relaxation:
    """Bounds a node by its placement problem and by column generation.

    *Relaxes* single choices to their means, and the integrality of stage cuts; *valid* for every node; *costs* one
    placement problem, and one for each column; *source*: Dantzig and Wolfe (1960), `bounds/master_problem.py`.

    Args:
        state: The node.
        solver: Solver of its placement problems.
        finder: Turns placements into plans.
    """

    def __init__(self, state: NodeState, solver: PlacementSolver, finder: PlanFinder) -> None:
        self._state, self._solver, self._finder = state, solver, finder
        self._first = 0.0
        self._is_rounded = False

    def bound_without_memory(self, cutoff: float) -> float:
        """Return a lower bound on the plans without memory limits, in seconds.

        Args:
            cutoff: A bound that is enough.
        """
        state = self._state
        if state.relaxed_choice is None:
            self._first = self._first_bound(cutoff)
        bound = self._first
        if state.relaxed_choice is None or bound >= cutoff:
            return bound
        if state.pipeline.num_stages > 1:
            bound = max(bound, self._undivided_bound() + state.pipeline.fixed)
        if (
            state.column_generation is not None and bound < cutoff < math.inf
        ):  # else nothing is known yet that it might exclude
            bound, _ = self.raise_bound(bound, cutoff, state.settings.relaxed_steps, memory=False)
        return bound

    def raise_bound(self, bound: float, cutoff: float, steps: int, *, memory: bool) -> tuple[float, bool]:
        """Raise the bound by column generation; return it and whether further steps may raise it.

        Args:
            bound: The bound known so far.
            cutoff: A bound that is enough.
            steps: Prices to try at most.
            memory: Whether memory is limited.
        """
        state = self._state
        assert state.column_generation is not None, "the relaxation is solved first"
        more = True
        for _ in range(steps):
            best = state.best.objective if state.best is not None else math.inf
            bound = max(bound, state.column_generation.bound)
            if not more or state.is_stopped() or bound >= state.target(cutoff):
                break
            more = state.column_generation.step(
                self._solver.solve_priced, min(cutoff, best), self._finder.consider, memory=memory
            )
        return max(bound, state.column_generation.bound), more

    def find_plan(self) -> None:
        """Generate columns under the memory limit until one gives a plan that fits: a first incumbent."""
        state = self._state
        if state.column_generation is None:
            return
        for _ in range(state.settings.hurried_steps):
            if (
                state.best is not None
                or state.is_stopped()
                or not state.column_generation.step(
                    self._solver.solve_priced, math.inf, self._finder.consider, memory=True
                )
            ):
                break

    def round_once(self) -> None:
        """Consider the best placements of a pipeline without memory limits, at the first call."""
        if not self._is_rounded and self._state.pipeline.num_stages > 1:
            solution = self._solver.solve(hidden=1.0, recompute=self._state.fastest, bounding=False)
            if solution.choice is not None:
                self._finder.consider(solution.choice)
        self._is_rounded = True

    def program(self) -> StepProgram:
        """Return the rows of the master problem, of the configurations that the bound covers."""
        state = self._state
        main = max(state.tables.folded.kinds, key=lambda kind: kind.count)
        return step_program(
            state.tables,
            state.bounding,
            state.search.memory_limit,
            flavours=state.search.constraints.flavours(main.instances),
            fastest=state.fastest,
            hosted=state.search.constraints.hosted,
            path=self._critical_path(),
        )

    def _first_bound(self, cutoff: float) -> float:
        """Return the bound of one placement problem, and start the master problem unless that bound is enough."""
        state = self._state
        fixed, warm_start = state.pipeline.fixed, state.warm_start
        if warm_start.microbatch_bound.seconds and warm_start.choices:
            state.microbatch_bound, found = warm_start.microbatch_bound, warm_start.choices[0]
            bound = warm_start.microbatch_bound.seconds * state.bounding.rounds / state.bounding.num_groups + fixed
            self._start_master(bound, cutoff, found)
            return bound
        hidden = 1.0 if state.pipeline.num_stages == 1 else 0.0
        solution = self._solver.solve(hidden=hidden, recompute=state.fastest, bounding=True, cutoff=cutoff - fixed)
        bound = max(solution.bound, host_launch_bound(state.tables, state.bounding)) + fixed
        if state.pipeline.num_stages > 1:
            seconds = (bound - fixed) * state.bounding.num_groups / state.bounding.rounds
            state.microbatch_bound = MicrobatchBound(
                seconds, warm_start.microbatch_bound.blocks or (0.0,) * len(state.tables.folded.chain)
            )
        self._start_master(bound, cutoff, solution.choice)
        return bound

    def _start_master(self, bound: float, cutoff: float, choice: Choice | None) -> None:
        """Start the master problem with a choice, unless the bound is enough."""
        state = self._state
        if choice is None or bound >= cutoff or state.is_stopped():
            return
        state.relaxed_choice = choice
        state.prune_schedules(cutoff)
        state.column_generation = ColumnGeneration(state.tables, self.program())
        for known in (choice, *state.warm_start.choices):
            state.column_generation.add(known)
        self._finder.consider(choice)  # now that the master problem may bound the plans of this choice

    def _critical_path(self) -> CriticalPath | None:
        """Return a lower bound on the critical path under each schedule; None if one of them has none."""
        search = self._state.search
        known = [search.roofline.path(configuration, search.global_batch) for configuration in self._state.bounded]
        found = known[0]
        for path in known[1:]:
            found = None if found is None or path is None else found.joined(path)
        return found

    def _undivided_bound(self) -> float:
        """Return the bound in seconds that follows from undivided blocks, each kind at its own least time."""
        state = self._state
        assert state.relaxed_choice is not None, "the relaxation is solved first"
        chain = state.tables.folded.chain
        if not any(state.microbatch_bound.blocks):
            counts = np.array([kind.count for kind in state.tables.folded.kinds])
            totals = state.tables.block_seconds(state.relaxed_choice)
            inline = counts * (totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD])
            least = np.zeros(len(counts))
            for kind in np.argsort(-inline)[: state.settings.heavy_kinds]:
                if state.is_stopped():
                    break
                weighting = kind_weights(state.tables, [int(kind)], 0.0)
                instance = problem(state.tables, weighting, name=str(state.configuration))
                host = float(state.tables.host_seconds[kind].sum())
                least[kind] = max(0.0, host, self._solver.solve_problem(instance).bound)
            state.microbatch_bound = replace(state.microbatch_bound, blocks=tuple(least[np.asarray(chain)].tolist()))
        return min(
            state.microbatch_bound.partition_bound(pipeline) for pipeline in (state.bounding, *state.bounding.others)
        )
