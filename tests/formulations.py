"""Small models as the planner sees them, each built once per run, and choices to try on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import numpy as np

from autopar.cluster import PRESETS
from autopar.cost import CostModel
from autopar.describe.block_decisions import assemble_blocks
from autopar.discover import Rules, discover
from autopar.folding.fold import Folded
from autopar.formulate.block_memory import BlockBytes, BlockHolding, ChainBytes, FloatArray, State
from autopar.formulate.building import build_tables
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.step_time import Pipeline, Split, step_time
from autopar.formulate.tables import Tables
from autopar.ir.graph import Phase
from autopar.problem import Problem
from autopar.program.lower import lower_blocks
from autopar.recompute import BY_SECONDS, ON_DEVICE, Recompute
from autopar.sharding import Mesh
from autopar.simulate.ranges import chain_bytes
from autopar.solvers import load
from autopar.workload import Workload, open_workload
from tests.test_models import TINY

COSTS = CostModel(PRESETS["h100"])

DIMS = TINY | {"gpt2": TINY["gpt2"] | {"num_layers": 4}, "mlp-xs": {"num_layers": 5, "hidden": 16}}
"""Long enough that some block repeats."""


@cache
def workload(name: str, mode: str = "train") -> Workload:
    """Return a tiny zoo model."""
    return open_workload(f"zoo:{name}", mode=mode, dims=DIMS[name])


@cache
def rules(name: str, mode: str = "train") -> Rules:
    """Return its sharding rules."""
    return discover(workload(name, mode).probe)


def folded(name: str, mode: str = "train", samples: int = 8) -> Folded:
    """Return its distinct blocks."""
    return workload(name, mode).folded(samples)


@cache
def tables(name: str, mode: str = "train", samples: int = 8, shape: tuple[int, ...] = (2, 2)) -> Tables:
    """Return its decisions and prices on a mesh of one or two axes."""
    names = ("outer", "inner")[-len(shape) :]
    mesh = Mesh.of(**dict(zip(names, shape, strict=True)))
    return build_tables(folded(name, mode, samples), rules(name, mode), mesh, COSTS)


def random_choice(
    problem: Problem, rng: np.random.Generator, *, near: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return a random choice that is mostly possible: given one, a few nodes are changed if that stays possible."""
    if near is None:
        return tuple(int(rng.integers(size)) for size in problem.num_strategies)
    choice = list(near)
    for node in rng.integers(problem.num_nodes, size=6):
        before = choice[node]
        choice[node] = int(rng.integers(problem.num_strategies[node]))
        if not np.isfinite(problem.cost(choice)):
            choice[node] = before
    return tuple(choice)


def optimum(problem: Problem) -> tuple[float, tuple[int, ...]]:
    """Return the least cost and a choice that has it."""
    solution = load("auto").solve(problem)
    assert solution.choice is not None
    return solution.cost, solution.choice


@cache
def good_choice(name: str, mode: str) -> tuple[int, ...]:
    """Return the choice that is best on one stage of 2 × 2 devices with two microbatches and no memory limit."""
    found = tables(name, mode)
    weighting = weights(found, Pipeline(1, 2, "1f1b"), recompute=Recompute.NONE, hidden=1.0, bounding=True)
    return optimum(problem(found, weighting))[1]


def splits(num_blocks: int, num_stages: int) -> list[tuple[tuple[int, int], ...]]:
    """Return all ways to cut a chain into stages of one block or more."""
    inner = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(zip((0, *cuts), (*cuts, num_blocks), strict=True)) for cuts in inner]


def stage_peak(memory: ChainBytes, pipeline: Pipeline, split: Split, stage: int) -> float:
    """Return the peak bytes of a stage."""
    in_flight, away = pipeline.in_flight(stage), split.away[stage]
    return memory.peak(*split.ranges[stage], in_flight, split.recompute[stage], away=away)


@dataclass(frozen=True)
class _Adding:
    """Blocks whose bytes add up, whatever company they are in."""

    memory: BlockBytes

    def enter(self, kind: int) -> State:
        return ()

    def advance(self, kind: int, recompute: Recompute, state: State) -> tuple[BlockHolding, State]:
        kept = float(self.memory.kept[recompute][kind])
        running = kept + float(self.memory.transient[kind] + self.memory.recomputed[recompute][kind])
        return BlockHolding(kept, running, running), state

    def meet(self, states: Sequence[State]) -> State:
        return states[0]


def chain_of(memory: BlockBytes, chain: tuple[int, ...], flavours: Sequence[Recompute]) -> ChainBytes:
    """Return what every range of blocks holds if blocks add up, with the running one's transients on top."""
    zero = np.zeros(len(memory.resident))
    return ChainBytes(
        chain,
        _Adding(memory),
        tuple(flavours),
        memory.resident,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        memory.buffers,
    )


def lowered_bytes(
    tables: Tables, choice: tuple[int, ...], flavours: Sequence[Recompute] = ON_DEVICE, host_room: float = np.inf
) -> ChainBytes:
    """Return what every range of blocks holds once lowered."""
    trains = any(op.phase is Phase.BACKWARD for op in tables.folded.graph.ops)
    lowered = lower_blocks(assemble_blocks(tables, choice), tables.folded, tables.resharder)
    return chain_bytes(lowered, tables.folded, trains=trains, flavours=flavours, host_room=host_room)


def hosted_ways(constraints: Constraints, start: int, stop: int) -> list[tuple[bool, ...]]:
    """Return which blocks of a stage may have their optimizer state in host memory: the first ones, beside those told.

    A block that says nothing has it there if it is one of the first; one that has no choice, where it must.
    """
    if not constraints.hosts_optimizer:
        return [(False,) * (stop - start)]
    lies = [constraints.states[block] if constraints.states else {False, True} for block in range(start, stop)]
    every = [
        tuple(True in own and (block < first or False not in own) for block, own in enumerate(lies))
        for first in range(stop - start + 1)
    ]
    return list(dict.fromkeys(every))


def best_by_enumeration(
    totals: FloatArray,
    memory: ChainBytes,
    pipeline: Pipeline,
    limit: float,
    hop: float,
    constraints: Constraints = FREE,
) -> float:
    """Return the least step seconds over all splits whose stages fit, whatever each of their blocks keeps where."""
    best = float("inf")
    keeps = constraints.keeps or (frozenset(BY_SECONDS),) * len(memory.chain)

    @cache
    def fitting(start: int, stop: int, in_flight: int) -> list[tuple[tuple[Recompute, ...], tuple[bool, ...]]]:
        each = product(*([f for f in memory.flavours if f in own] for own in keeps[start:stop]))
        ways = hosted_ways(constraints, start, stop)
        return [
            (flavours, away)
            for flavours, away in product(each, ways)
            if memory.peak(start, stop, in_flight, flavours, away=away) <= limit
            and memory.host_bytes(start, stop, in_flight, flavours, away=away) <= memory.host_room
        ]

    for ranges in splits(len(memory.chain), pipeline.num_stages):
        if constraints.cuts is not None and not constraints.cuts.issuperset(start for start, _ in ranges[1:]):
            continue
        options = [fitting(*blocks, pipeline.in_flight(stage)) for stage, blocks in enumerate(ranges)]
        for chosen in product(*options):
            split = Split(ranges, tuple(own for own, _ in chosen), tuple(away for _, away in chosen))
            best = min(best, step_time(totals, memory.chain, pipeline, split, hop).seconds)
    return best
