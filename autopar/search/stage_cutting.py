"""Rounding: the chain of blocks is cut into stages for a choice of placements, under each schedule of a node.

The cuts are optimal for schedules with a closed form (`best_split`); others are improved by local moves.
"""

import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from autopar.configuration import Configuration
from autopar.formulate.scheduled_step import pass_seconds
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import FloatArray, Tables
from autopar.pipeline_partition.interleaved import RecomputeChooser, grouped_time
from autopar.pipeline_partition.p2p import hop_seconds
from autopar.pipeline_partition.stage_cuts import best_split, least_flow
from autopar.problem import Choice
from autopar.schedule import SCHEDULES
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.lowered_memory import ChoiceCosts


class StageCutter:
    """Cuts the chain of blocks for choices of placements of one node.

    Args:
        search: Inputs of the search.
        pipelines: Configurations of the node with their pipelines.
        tables: Placement decisions.
        costs: Memory and transfers of choices.
    """

    def __init__(
        self,
        search: SearchContext,
        pipelines: Sequence[tuple[Configuration, Pipeline]],
        tables: Tables,
        costs: ChoiceCosts,
    ) -> None:
        self._search, self._pipelines, self._tables, self._costs = search, tuple(pipelines), tables, costs

    def best_plan(
        self,
        choice: Choice,
        known: Candidate | None,
        cutoff: float,
        least: Callable[[Configuration], float],
        should_stop: Callable[[], bool],
    ) -> Candidate | None:
        """Return the best plan of a choice if it is faster than the incumbent, else the incumbent.

        Args:
            choice: The choice.
            known: The incumbent of the node.
            cutoff: Step time in seconds above which plans may be missed.
            least: Returns a lower bound on the plans of the choice under a configuration, in seconds.
            should_stop: Whether to stop improving a plan.
        """
        totals, chain = self._tables.block_seconds(choice), self._tables.folded.chain
        if not np.isfinite(totals).all():
            return known
        limit, constraints = self._search.memory_limit, self._search.constraints
        passes_of: dict[bool, FloatArray] = {}
        too_many: list[list[int]] = []  # microbatches in flight that do not fit
        for configuration, pipeline in self._pipelines:
            splits = SCHEDULES[pipeline.schedule].splits
            if splits not in passes_of:
                passes_of[splits] = pass_seconds(self._tables, choice, splits=splits)
            passes = passes_of[splits]
            best = min(cutoff, known.objective if known is not None else math.inf)
            if least_flow(passes.sum(axis=1), chain, pipeline) + pipeline.fixed >= best or (
                best < math.inf and least(configuration) >= best
            ):
                continue
            holds = [pipeline.in_flight(stage) for stage in range(pipeline.num_stages)] if pipeline.fills else []
            if any(all(map(operator.ge, holds, fewer)) for fewer in too_many if holds):
                continue
            memory, hops = self._costs.bytes(choice, splits=splits), self._costs.hops(choice, pipeline)
            seconds = self._costs.seconds_with_copies(choice, totals, passes, splits=splits)
            if pipeline.fills:
                found = best_split(seconds, memory, pipeline, limit, hops, constraints)
                if found is None:
                    too_many.append(holds)
                elif (
                    pipeline.schedule == "gpipe"
                ):  # its last passes are backwards only, which hide less than with forwards between
                    found = (
                        found[0],
                        grouped_time(passes, seconds, chain, pipeline, found[0], hop_seconds(found[0], hops)),
                    )
            else:
                groups = RecomputeChooser(passes, seconds, memory, pipeline, limit, hops, constraints)
                found = groups.best(best * (1 + self._search.settings.node.shift_excess))
                if found is not None and found[1].seconds < best * (1 + self._search.settings.node.shift_excess):
                    found = groups.improve_by_moves(found, should_stop)
            if found is not None and (known is None or found[1].seconds < known.objective):
                known = Candidate(configuration, self._tables, choice, found[0], found[1])
        return known
