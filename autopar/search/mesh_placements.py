"""Placements of a whole model on one mesh: the columns of the staging problem of unequal stages.

Bounds of blocks on a mesh, Pareto-optimal choices of placements in time and memory, and what each of them costs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.bounds.column_generation import ColumnGeneration
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
"""Solves a placement problem, or proves that its optimum is above a cutoff."""

ABSENT_KIND_WEIGHT = 1e-3
"""Blocks that a kind counts as where a stage has none: its placements are optimised, but decide nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class MeshPlacement:
    """A choice of placements on a mesh, with its costs.

    Attributes:
        submesh: The mesh and its places.
        tables: Placement decisions.
        choice: One strategy per decision.
        totals: (kinds, slots) seconds of one instance.
        blocks: Placements of each distinct block.
        lowered: Lowered blocks, by kind.
        memory: Bytes of ranges of blocks.
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
        """Return a choice with its costs."""
        blocks = assemble_blocks(tables, choice)
        lowered = lower_blocks(blocks, tables.folded, tables.resharder)
        memory = chain_bytes(lowered, tables.folded, trains=trains)
        return cls(submesh, tables, choice, tables.block_seconds(choice), blocks, lowered, memory)

    @property
    def hand_over_key(self) -> tuple[object, ...]:
        """Key of the placements of values between stages: equal keys have equal hand-over costs."""
        return self.submesh, tuple((block.arrivals, block.departures) for block in self.blocks)


def block_seconds_bound(
    tables: Tables, solve: Solve, stopped: Callable[[], bool], settings: UnequalSettings
) -> FloatArray:
    """Return a lower bound on the seconds of both passes of a block, per kind, (kinds,).

    *Relaxes* edges between blocks and memory; *valid* for every choice; *costs* a placement problem per heavy kind;
    *source*: `formulate/linear_weights.py`, with the other slots free.

    Args:
        tables: Placement decisions.
        solve: Solver of placement problems.
        stopped: Whether to solve no further problems.
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
    """Return a lower bound on the seconds of both passes of a block, each op at its fastest, per kind, (kinds,)."""
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
    """Return choices from the fastest to those with least memory, at rising prices of memory.

    Args:
        tables: Placement decisions.
        pipeline: Pipeline of equal stages on this mesh, which weighs the costs.
        limit: Bytes per device.
        flavours: Kinds of recompute that constraints allow.
        fastest: Least recompute of each kind of block.
        solve: Solver of placement problems.
        stopped: Whether to stop now.
        settings: Constants of the search.
    """
    found: dict[Choice, None] = {}
    column_generation = ColumnGeneration(
        tables, step_program(tables, pipeline, limit, flavours=flavours, fastest=fastest)
    )
    instance = problem(tables, weights(tables, pipeline, recompute=fastest, hidden=1.0, bounding=False))
    first = solve(instance, math.inf)
    if first.choice is None:
        return []
    found[first.choice] = None
    column_generation.add(first.choice)
    for memory, steps in ((False, settings.free_steps), (True, settings.priced_steps)):
        for _ in range(steps):
            if stopped() or not column_generation.step(
                solve, math.inf, lambda choice: found.setdefault(choice), memory=memory
            ):
                break
    for flavour in dict.fromkeys((flavours[0], flavours[-1])):
        # The master problem prices the memory of the mean stage; the fullest stage may need more.
        mean = mean_bytes(tables, pipeline, limit, [flavour] * len(tables.folded.kinds))
        used = mean.excess(tables, first.choice) + mean.limit
        if used < settings.ample_memory_share * limit:
            continue
        if not stopped():  # memory as dear as time: all of what a mean stage uses costs as much as its seconds
            choice = solve(mean.priced(instance, tables, first.cost / max(used, 1.0)), math.inf).choice
            if choice is not None:
                found[choice] = None
    return [choice for choice in found if np.isfinite(tables.block_seconds(choice)).all()]


def stage_choice(tables: Tables, pipeline: Pipeline, counts: IntArray, solve: Solve) -> Choice | None:
    """Return the fastest choice for a stage with `counts` blocks of each kind, (kinds,); None if there is none."""
    flavours = [Recompute.NONE] * len(counts)
    plain = weights(tables, pipeline, recompute=flavours, hidden=1.0, bounding=False)
    held = np.maximum(counts, ABSENT_KIND_WEIGHT) / np.array([kind.count for kind in tables.folded.kinds])
    choice = solve(problem(tables, Weights(plain.factors * held[:, None], False)), math.inf).choice
    return choice if choice is not None and np.isfinite(tables.block_seconds(choice)).all() else None


def undominated(placements: Sequence[MeshPlacement]) -> list[MeshPlacement]:
    """Return the choices that no other one dominates in seconds and bytes of every kind of block."""
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
    """Return the criteria of dominance of a choice: seconds and bytes of each kind of block."""
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
