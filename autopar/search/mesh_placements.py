"""Placements of a whole model on one mesh, and what they make of stages on it: what unequal stages are chosen from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.bounds.column_generation import Hull
from autopar.bounds.master_problem import step_program
from autopar.describe.block_decisions import assemble_blocks
from autopar.formulate.block_memory import ChainBytes, FloatArray
from autopar.formulate.linear_weights import Weights, kind_weights, problem, weights
from autopar.formulate.mean_memory import mean_bytes
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import IntArray, Slot, Tables
from autopar.plan import BlockPlan
from autopar.problem import Choice, Problem, Solution
from autopar.program.block import LoweredKind
from autopar.program.lower import lower_blocks
from autopar.recompute import Recompute
from autopar.search.settings import UnequalSettings
from autopar.search.submesh_space import Submesh
from autopar.simulate.ranges import chain_bytes

Solve = Callable[[Problem, float], Solution]
"""Solves a problem, or proves that its optimum is above a cutoff."""

MEMORY_PRICE_RATIOS = (0.1, 1.0, 10.0)
"""Price of all bytes of a mean stage over its time, where memory may bind: three orders of magnitude."""

ABSENT_KIND_WEIGHT = 1e-3
"""Blocks that a kind counts as where a stage has none: enough to place them well, too few to decide anything."""


@dataclass(frozen=True, slots=True, eq=False)
class MeshPlacement:
    """A choice of placements on a mesh.

    Attributes:
        submesh: The mesh, and where it can lie.
        tables: What was chosen from.
        choice: What was chosen.
        totals: (kinds, slots) seconds of one instance.
        blocks: The placements.
        lowered: The blocks, lowered.
        memory: What ranges of blocks hold.
    """

    submesh: Submesh
    tables: Tables
    choice: Choice
    totals: FloatArray
    blocks: tuple[BlockPlan, ...]
    lowered: dict[int, LoweredKind]
    memory: ChainBytes

    @classmethod
    def of(cls, submesh: Submesh, tables: Tables, choice: Choice, *, trains: bool) -> "MeshPlacement":
        """Return a choice with all that follows from it."""
        blocks = assemble_blocks(tables, choice)
        lowered = lower_blocks(blocks, tables.folded, tables.resharder)
        memory = chain_bytes(lowered, tables.folded, trains=trains)
        return cls(submesh, tables, choice, tables.block_seconds(choice), blocks, lowered, memory)

    @property
    def hand_over_key(self) -> tuple[object, ...]:
        """How and where it holds what stages hand to each other."""
        return self.submesh, tuple((block.arrivals, block.departures) for block in self.blocks)


def block_seconds_bound(
    tables: Tables, solve: Solve, stopped: Callable[[], bool], settings: UnequalSettings
) -> FloatArray:
    """Return by kind a lower bound on the seconds of both passes of a block, whatever is chosen, (kinds,).

    Args:
        tables: The decisions.
        solve: Solver of placement problems.
        stopped: Whether to solve none any more.
        settings: Constants of the search.
    """
    least = fastest_op_seconds(tables)
    counts = np.array([kind.count for kind in tables.folded.kinds])
    shares = counts * least / max(float(counts @ least), 1e-12)
    for kind in np.argsort(-shares, kind="stable")[: settings.heavy_kinds].tolist():
        if shares[kind] < settings.light_share or stopped():
            break
        solution = solve(problem(tables, kind_weights(tables, [kind], 0.0)), math.inf)
        least[kind] = max(least[kind], solution.bound)
    return least


def fastest_op_seconds(tables: Tables) -> FloatArray:
    """Return by kind what both passes of a block take at least, each op at its fastest, (kinds,)."""
    kinds = range(len(tables.folded.kinds))
    costs = problem(tables, kind_weights(tables, kinds, 0.0)).node_costs
    found = np.zeros(len(kinds))
    for node, own in zip(tables.nodes, costs, strict=True):
        found[node.kind] += own.min()
    return np.asarray(np.maximum(found, tables.host_seconds.sum(axis=1)))


def pareto_choices(
    tables: Tables,
    pipeline: Pipeline,
    limit: float,
    flavours: Sequence[Recompute],
    fastest: Sequence[Recompute],
    solve: Solve,
    stopped: Callable[[], bool],
    settings: UnequalSettings,
) -> list[Choice]:
    """Return choices from the fastest to those that hold least, as prices on memory rise.

    Args:
        tables: The decisions.
        pipeline: Equal stages of this mesh, which say how often each price counts.
        limit: Bytes per device.
        flavours: What blocks may recompute.
        fastest: By kind the least of it.
        solve: Solver of placement problems.
        stopped: Whether to end now.
        settings: Constants of the search.
    """
    found: dict[Choice, None] = {}
    hull = Hull(tables, step_program(tables, pipeline, limit, flavours=flavours, fastest=fastest))
    instance = problem(tables, weights(tables, pipeline, recompute=fastest, hidden=1.0, bounding=False))
    first = solve(instance, math.inf)
    if first.choice is None:
        return []
    found[first.choice] = None
    hull.add(first.choice)
    for memory, steps in ((False, settings.free_steps), (True, settings.priced_steps)):
        for _ in range(steps):
            if stopped() or not hull.step(solve, math.inf, lambda choice: found.setdefault(choice), memory=memory):
                break
    for flavour in dict.fromkeys((flavours[0], flavours[-1])):
        # A stage may have to hold more than the mean one, by which the hull prices memory.
        mean = mean_bytes(tables, pipeline, limit, [flavour] * len(tables.folded.kinds))
        used = mean.excess(tables, first.choice) + mean.limit
        if used < settings.roomy * limit:
            continue
        for ratio in MEMORY_PRICE_RATIOS:
            if not stopped():
                price = ratio * first.cost / max(used, 1.0)
                choice = solve(mean.priced(instance, tables, price), math.inf).choice
                if choice is not None:
                    found[choice] = None
    return [choice for choice in found if np.isfinite(tables.block_seconds(choice)).all()]


def stage_choice(tables: Tables, pipeline: Pipeline, counts: IntArray, solve: Solve) -> Choice | None:
    """Return the fastest choice for a stage with so many blocks of each kind, (kinds,); None if there is none.

    Other blocks count so little that they are placed well, and decide nothing.
    """
    flavours = [Recompute.NONE] * len(counts)
    plain = weights(tables, pipeline, recompute=flavours, hidden=1.0, bounding=False)
    held = np.maximum(counts, ABSENT_KIND_WEIGHT) / np.array([kind.count for kind in tables.folded.kinds])
    choice = solve(problem(tables, Weights(plain.factors * held[:, None], False)), math.inf).choice
    return choice if choice is not None and np.isfinite(tables.block_seconds(choice)).all() else None


def undominated(placements: Sequence[MeshPlacement]) -> list[MeshPlacement]:
    """Return the choices that no other one beats for every kind of block, in time and in memory."""
    figures = [_criteria(own) for own in placements]
    return [
        own
        for number, own in enumerate(placements)
        if not any(
            (other <= figures[number]).all() and ((other < figures[number]).any() or before < number)
            for before, other in enumerate(figures)
            if before != number
        )
    ]


def _criteria(own: MeshPlacement) -> FloatArray:
    """Return what counts of a choice: seconds and bytes of each kind of block."""
    bytes_kept = [
        own.memory.stage(index, index + 1, (flavour,))
        for flavour in own.memory.flavours
        for index in _first_blocks(own.memory.chain)
    ]
    slots = [Slot.FORWARD, Slot.BACKWARD, Slot.GRADIENT, Slot.REDUCE, Slot.UPDATE]
    return np.concatenate([own.totals[:, slots].ravel(), own.memory.resident, np.ravel(bytes_kept)])


def _first_blocks(chain: Sequence[int]) -> list[int]:
    """Return the first block of each kind."""
    return [chain.index(kind) for kind in dict.fromkeys(chain)]
