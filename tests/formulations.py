"""Small models as the planner sees them, each built once per run, and choices to try on them."""

from functools import cache
from itertools import combinations

import numpy as np

from autopar.cluster import PRESETS
from autopar.cost import CostModel
from autopar.discover import Rules, discover
from autopar.formulate.fold import Folded
from autopar.formulate.memory import BlockBytes, FloatArray, RangeBytes
from autopar.formulate.step import Pipeline, Split, step_time
from autopar.formulate.tables import Slot, Tables, build_tables
from autopar.formulate.weights import problem, weights
from autopar.ir.graph import Phase
from autopar.problem import Problem
from autopar.program.lower import lower_blocks
from autopar.recompute import ON_DEVICE, Recompute
from autopar.search.blocks import assemble_blocks
from autopar.sharding import Mesh
from autopar.simulate.ranges import range_bytes
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


def stage_peak(memory: RangeBytes, pipeline: Pipeline, split: Split, stage: int) -> float:
    """Return the peak bytes of a stage."""
    return memory.peak(*split.ranges[stage], pipeline.in_flight(stage), split.recompute[stage])


def ranges_of(memory: BlockBytes, chain: tuple[int, ...]) -> RangeBytes:
    """Return what every range of blocks holds if blocks add up as the placement problem counts them."""
    num_blocks = len(chain)
    resident = np.zeros((num_blocks, num_blocks + 1))
    kept = {flavour: np.zeros_like(resident) for flavour in memory.kept}
    running = {flavour: np.zeros_like(resident) for flavour in memory.kept}
    for start in range(num_blocks):
        for stop in range(start + 1, num_blocks + 1):
            counts = np.bincount(np.asarray(chain[start:stop]), minlength=len(memory.resident))
            resident[start, stop] = counts @ memory.resident + memory.buffers
            for flavour in memory.kept:
                kept[flavour][start, stop] = counts @ memory.kept[flavour]
                one = memory.stage_bytes(counts, 1, flavour)
                running[flavour][start, stop] = one - resident[start, stop]
    return RangeBytes(resident, kept, running, np.zeros_like(resident))


def lowered_bytes(tables: Tables, choice: tuple[int, ...]) -> RangeBytes:
    """Return what every range of blocks holds once lowered."""
    trains = any(op.phase is Phase.BACKWARD for op in tables.folded.graph.ops)
    lowered = lower_blocks(assemble_blocks(tables, choice), tables.folded, tables.resharder)
    return range_bytes(lowered, tables.folded, trains=trains)


def best_by_enumeration(
    totals: FloatArray, memory: RangeBytes, chain: tuple[int, ...], pipeline: Pipeline, limit: float, hop: float
) -> float:
    """Return the least step seconds over all splits whose stages fit, each with as little recompute as it fits with."""
    best = float("inf")
    trains = bool(totals[:, Slot.BACKWARD].any())
    for ranges in splits(len(chain), pipeline.num_stages):
        redo = []
        for stage in range(len(ranges)):
            for recompute in ON_DEVICE if trains else (Recompute.NONE,):
                split = Split(ranges, tuple(recompute for _ in ranges))
                if stage_peak(memory, pipeline, split, stage) <= limit:
                    redo.append(recompute)
                    break
        if len(redo) == len(ranges):
            best = min(best, step_time(totals, chain, pipeline, Split(ranges, tuple(redo)), hop).seconds)
    return best
