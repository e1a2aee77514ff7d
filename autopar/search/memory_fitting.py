"""Plans of one node that fit: its placement problem is solved under the memory limit of every stage of an even split.

A primal heuristic, tried where column generation has found no plan near its bound.
"""

import math
from dataclasses import replace

from autopar.formulate.block_memory import ChainBytes
from autopar.formulate.linear_weights import stage_mixes, weights
from autopar.formulate.step_time import Split
from autopar.pipeline_partition.stage_cuts import best_split
from autopar.problem import Choice
from autopar.recompute import Recompute
from autopar.search.node_state import NodeState
from autopar.search.placement_solver import PlacementSolver
from autopar.search.plan_finder import PlanFinder


class MemoryFitting:
    """Solves the placement problem of a node under the memory limit, per kind of recompute.

    Args:
        state: The node.
        solver: Solver of its placement problems.
        finder: Turns placements into plans.
    """

    def __init__(self, state: NodeState, solver: PlacementSolver, finder: PlanFinder) -> None:
        self._state, self._solver, self._finder = state, solver, finder

    def fit(self, bound: float, cutoff: float) -> None:
        """Look for plans that fit: with the optimizer state on the device, and if that is not enough on the host.

        Args:
            bound: Lower bound on all plans of the node, in seconds.
            cutoff: Step time in seconds above which plans are of no use.
        """
        state = self._state
        if not state.pipeline.fills:
            return  # the memory of a stage is no multiple of its microbatches in flight
        self._fit_flavours(bound, cutoff, offload=False)
        offloads = state.best is None or any(state.best.split.hosted)
        if offloads and state.search.constraints.hosts_optimizer:
            self._fit_flavours(bound, cutoff, offload=True)

    def _fit_flavours(self, bound: float, cutoff: float, *, offload: bool) -> None:
        """Look for plans with each kind of recompute, the optimizer state on the device or on the host."""
        state = self._state
        assert state.relaxed_choice is not None, "the relaxation is solved first"
        for recompute, least in state.least_bytes_by_flavour(offload=offload).items():
            if recompute is Recompute.SELECTIVE and not any(state.tables.selective):
                continue
            near = state.best is not None and state.best.objective <= bound * (1 + state.settings.memory_gap)
            if least > state.search.memory_limit or bound >= cutoff or near or state.is_stopped():
                continue
            split = self._even_split(state.relaxed_choice, recompute, offload=offload)
            if split is None:
                break
            enough = cutoff * self._slowdown(recompute)
            self._fit_split(split, recompute, enough)

    def _slowdown(self, recompute: Recompute) -> float:
        """Return the step time with recompute of all blocks over that with the least recompute, at least 1.

        All blocks recompute in the problem, and only those that do not fit otherwise in a plan: the plan may be faster.
        """
        state = self._state
        assert state.relaxed_choice is not None, "the relaxation is solved first"
        totals, factors = state.tables.kind_totals(state.relaxed_choice), []
        for own in (recompute, state.fastest):
            weighting = weights(state.tables, state.pipeline, recompute=own, hidden=1.0, bounding=False, traffic=None)
            factors.append(float((weighting.factors * totals).sum()))
        return max(1.0, factors[0] / factors[1])

    def _fit_split(self, split: Split, recompute: Recompute, cutoff: float) -> None:
        """Solve the placement problem under the memory limit of the stages of a split, and consider its solution.

        Args:
            split: The stages.
            recompute: What all blocks recompute.
            cutoff: Cost in seconds above which solutions are of no use.
        """
        state = self._state
        mixes = stage_mixes(state.tables.folded.chain, state.pipeline, split, len(state.tables.folded.kinds))
        limit = state.search.memory_limit
        for _ in range(state.settings.corrections):
            start = state.best.choice if state.best is not None else None
            solution = self._solver.solve(
                hidden=1.0,
                recompute=recompute,
                bounding=False,
                mixes=mixes,
                limit=limit,
                start=start,
                cutoff=cutoff,
            )
            if solution.choice is None:
                break
            self._finder.consider(solution.choice)
            # The problem does not count all bytes, such as those of collectives in flight: reduce its limit by them.
            excess = self._finder.costs.peak(solution.choice, split) - state.search.memory_limit
            if excess <= 0:
                break
            limit -= excess

    def _even_split(self, choice: Choice, recompute: Recompute, *, offload: bool) -> Split | None:
        """Return the split that is best without memory limits; None if constraints exclude every split."""
        state, chain = self._state, self._state.tables.folded.chain
        totals, nothing = state.tables.block_seconds(choice), ChainBytes.nothing(chain, state.flavours)
        found = best_split(totals, nothing, state.pipeline, math.inf, 0.0, state.search.constraints)
        if found is None:
            return None
        ranges = found[0].ranges
        split = Split.uniform(ranges, (recompute,) * len(ranges), (offload,) * len(ranges) if offload else ())
        return replace(split, what=state.search.constraints.what)
