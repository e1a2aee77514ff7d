"""In the manner of Alpa: placements by an ILP for one mesh axis after the other, stages by dynamic programming.

For every pipeline degree, mesh and number of microbatches placements are found as Alpa's intra-operator pass does under
XLA's `solve_nd_sharding_iteratively`: on the first axis with the others left alone, then on the next with the first as
decided, each an ILP over ops, parameters and what passes between blocks; under the memory limit if nothing fits
without. The chain is then cut into stages by dynamic programming, as its inter-operator pass does.

Alpa solves such an ILP for every run of layers that could be a stage. Here there is one per axis, over the whole model
with equal blocks folded into one. On these costs that is what Alpa does at best: all stages have equal meshes, what a
block takes does not depend on the stage it is in, and what is minimised is a sum over blocks and what passes between
them, so that the ILP of a run is a part of the whole one. As in the planner's plans on equal meshes, equal blocks are
placed alike, and what passes between blocks keeps one placement, between stages, too. So equal blocks of different
stages are not placed differently, as they might be where the first stages hold more microbatches: these recompute more.

What Alpa leaves to the user (microbatches, recompute) is searched here, which is kinder to it: recompute is the
lightest that fits, per stage. What is not kept of it: stages on submeshes of different sizes.
"""

import math
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.configuration import Configuration
from autopar.discover import Strategy
from autopar.formulate.building import build_tables
from autopar.formulate.data_major import is_data_major
from autopar.formulate.linear_weights import StageMix, problem, stage_mixes, weights
from autopar.formulate.op_strategies import encode
from autopar.formulate.step_time import Split
from autopar.formulate.tables import Decision, Tables
from autopar.ir.graph import Op, Value
from autopar.problem import Choice
from autopar.progress import Progress
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES
from autopar.search.candidate import Candidate
from autopar.search.context import SearchContext
from autopar.search.history import History
from autopar.search.node_solver import NodeSolver
from autopar.search.outcome import Outcome
from autopar.search.tasks import Finding
from autopar.solvers.limited import PLACEMENT_SECONDS
from autopar.tactics.state import sharded_dim

Mask = NDArray[np.bool_]


class _Axes:
    """The restriction of placements to axes decided before and the axis at hand; the others split nothing."""

    def __init__(self, num_axes: int) -> None:
        self.num_axes, self.axis = num_axes, 0
        self._ops: dict[str, tuple[Strategy, ...]] = {}
        self._values: dict[tuple[Decision, int, str], tuple[int, ...]] = {}

    def of_op(self, kind: int, op: Op, strategies: Sequence[Strategy]) -> tuple[Mask, ...]:
        """Return by axis which strategies an op may take."""
        masks = []
        for axis in range(self.num_axes):
            if axis == self.axis:
                masks.append(np.ones(len(strategies), dtype=bool))
            elif axis < self.axis:
                decided = _codes(self._ops[op.name][axis])
                masks.append(np.array([_codes(strategy) == decided for strategy in strategies]))
            else:
                masks.append(np.array([not _splits(strategy) for strategy in strategies]))
        return tuple(masks)

    def of_value(self, decision: Decision, kind: int, value: Value) -> tuple[Mask, ...]:
        """Return by axis which placements a value may have; copies follow from the ops that read them."""
        masks = []
        for axis in range(self.num_axes):
            mask = np.ones(len(value.shape) + 2, dtype=bool)
            if decision is not Decision.COPY and axis != self.axis:
                decided = self._values.get((decision, kind, value.name)) if axis < self.axis else (0,) * self.num_axes
                if decided is not None:
                    mask[:] = False
                    mask[decided[axis]] = True
            masks.append(mask)
        return tuple(masks)

    def decide(self, tables: Tables, choice: Choice) -> None:
        """Take over what a choice does on every axis, and go on to the next."""
        for node, strategy in zip(tables.nodes, choice, strict=True):
            if node.options is not None:
                self._ops[node.name] = node.options.by_axis(strategy)
            elif node.value is not None and node.placements is not None:
                number, base = int(node.placements[strategy]), len(node.value.shape) + 2
                digits = tuple(number // base ** (self.num_axes - 1 - axis) % base for axis in range(self.num_axes))
                self._values[node.decision, node.kind, node.value.name] = digits
        self.axis += 1


def _choose(node: NodeSolver, *, bounded: bool) -> Choice | None:
    """Return the placements of a node with the least seconds, or those under the memory limit of an even split."""
    state, search, pipeline = node.state, node.state.search, node.pipeline
    weighting = weights(node.tables, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=False)
    mixes: tuple[StageMix, ...] = ()
    if bounded:
        chain, stages = node.tables.folded.chain, pipeline.num_stages
        ends = [round(stage * len(chain) / stages) for stage in range(stages + 1)]
        keeps = Recompute.FULL if SCHEDULES[pipeline.schedule].trains else Recompute.NONE
        split = Split.uniform(tuple(pairwise(ends)), (keeps,) * stages)
        mixes = stage_mixes(chain, pipeline, split, len(node.tables.folded.kinds))
    limit = search.memory_limit if bounded else math.inf
    instance = problem(node.tables, weighting, mixes, limit, str(state.configuration))
    left = max(0.1, min(PLACEMENT_SECONDS, state.end - time.monotonic()))
    return search.solver.solve(instance, time_limit=left, should_stop=search.should_stop).choice


def alpa_search(search: SearchContext, space: list[Configuration]) -> Outcome:
    """Return the best candidate of every configuration, best first; nothing is proven."""
    listed = len(space)
    plain = [found for found in space if found.schedule in ("1f1b", "forward-only")]  # what its pipelines run
    space = [found for found in plain if not is_data_major(found.mesh)]
    outcome = Outcome(bound=0.0, pruned=listed - len(space), history=History(search.before))
    end = time.monotonic() + search.time_limit
    space.sort(key=lambda configuration: search.roofline.seconds(configuration, search.global_batch))
    for done, configuration in enumerate(space):
        found = _best(search, configuration, end)
        if found is None:
            outcome.stopped = _stopped(search, end)
            if outcome.stopped:
                break
        outcome.add_finding(Finding(0.0, found, cut=0), search.keep)
        outcome.solved += 1
        best = outcome.candidates[0].objective if outcome.candidates else math.inf
        outcome.history.record(best, 0.0)
        search.progress(Progress("alpa", done + 1, len(space), best, 0.0, configuration.words))
    return outcome


def _stopped(search: SearchContext, end: float) -> str:
    """Return why to stop: "interrupted", "time limit", or "" if there is no reason to."""
    if search.should_stop():
        return "interrupted"
    return "time limit" if time.monotonic() > end else ""


def _best(search: SearchContext, configuration: Configuration, end: float) -> Candidate | None:
    """Return the best plan of a configuration, if one fits; none if it is stopped before the last axis."""
    folded = search.folded(search.global_batch // configuration.num_microbatches)
    axes = _Axes(len(configuration.mesh.axes))
    for last in (axis == axes.num_axes - 1 for axis in range(axes.num_axes)):
        if _stopped(search, end):
            return None
        tables = build_tables(folded, search.rules(folded), configuration.mesh, search.costs, axes)
        node = NodeSolver(search, [configuration], tables, end)
        choice = _choose(node, bounded=False)
        if choice is None:
            return None
        if last:
            node.consider([choice])
            if node.best is None and (smaller := _choose(node, bounded=True)) is not None:
                node.consider([smaller])
            return node.best
        axes.decide(tables, choice)
    return None


def _codes(strategy: Strategy) -> tuple[int, ...]:
    """Return how a strategy places its inputs and outputs; terms of whatever kind are alike."""
    return tuple(map(encode, (*strategy.inputs, *strategy.outputs)))


def _splits(strategy: Strategy) -> bool:
    return any(sharded_dim(placement) is not None for placement in (*strategy.inputs, *strategy.outputs))
