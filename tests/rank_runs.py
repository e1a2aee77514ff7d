"""Tiny plans in float32, to be run by ranks: threads of one process, or real processes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar import solvers
from autopar.configuration import Configuration
from autopar.discover import Rules, discover
from autopar.folding.fold import Folded
from autopar.formulate.building import build_tables
from autopar.formulate.manual_recipes import batch_dims, recipes, restrict
from autopar.formulate.step_time import Split, StepTime
from autopar.formulate.tables import Tables
from autopar.plan import Job, Plan
from autopar.problem import Choice, Problem
from autopar.ranks.compiled_models import Engine
from autopar.ranks.lowered import Lowered
from autopar.ranks.rank import Rank
from autopar.ranks.stopwatch import Clock
from autopar.recompute import Recompute
from autopar.search.candidate import Candidate
from autopar.search.candidate_plan import assemble
from autopar.workload import Workload, open_workload
from tests.executions import COSTS, TINY, random_plan, solved_plan
from tests.local_ranks import LocalCommunicator, LocalWorld, NumpyMemory

Array = NDArray[Any]

SAMPLES = 4
"""Samples of a microbatch."""


@cache
def tiny_workload(name: str, optimizer: str = "adam") -> Workload:
    """Return a tiny model of the zoo as `autopar run` opens it."""
    return open_workload(f"zoo:{name}", dims=TINY[name], optimizer=optimizer)


@cache
def tiny_rules(name: str, cache_dir: Path, optimizer: str = "adam") -> Rules:
    """Return its rules, discovered with a batch that no other size equals."""
    return discover(tiny_workload(name, optimizer).folded(10).graph, cache_dir=cache_dir)


def chosen(tables: Tables, rng: np.random.Generator, recipe: str, workload: Workload) -> Choice:
    """Return what a recipe says; what it leaves open is drawn."""
    costs = [rng.random(node.count) for node in tables.nodes]
    edges = [(edge.first, edge.second, np.where(np.isfinite(edge.table), 0.0, np.inf)) for edge in tables.edges]
    dims = batch_dims(workload.folded(SAMPLES).graph.values, workload.folded(10).graph.values)
    (found,) = [each for each in recipes(tables, dims) if each.name == recipe]
    choice = solvers.load("auto").solve(restrict(Problem.build(costs, edges), found), time_limit=5.0).choice
    assert choice is not None, f"{recipe} is possible"
    return choice


def tiny_plan(
    name: str,
    configuration: Configuration,
    cache_dir: Path,
    *,
    recipe: str = "",
    seed: int = 0,
    recompute: Recompute | None = None,
    optimizer: str = "adam",
) -> Plan:
    """Return a plan that follows a recipe ("solved" for the best one), or a random one, as its file gives it back."""
    workload = tiny_workload(name, optimizer)
    folded = workload.folded(SAMPLES)
    rules = tiny_rules(name, cache_dir, optimizer)
    if recipe == "solved":
        plan = solved_plan(folded, rules, configuration, SAMPLES)
    elif recipe:
        plan = _recipe_plan(workload, folded, rules, configuration, recipe, seed)
    else:
        plan = random_plan(folded, rules, configuration, SAMPLES, seed)
    if recompute is not None:
        stages = tuple(replace(stage, recompute=str(recompute)) for stage in plan.stages)
        plan = replace(plan, stages=stages)
    return replace(plan, model=workload.info(), job=replace(plan.job, optimizer=optimizer))


def _recipe_plan(
    workload: Workload, folded: Folded, rules: Rules, configuration: Configuration, recipe: str, seed: int
) -> Plan:
    tables = build_tables(folded, rules, configuration.mesh, COSTS)
    choice = chosen(tables, np.random.default_rng(seed), recipe, workload)
    count, blocks = configuration.num_stages, folded.num_blocks
    cuts = [blocks * index // count for index in range(count + 1)]
    split = Split.uniform(tuple((cuts[i], cuts[i + 1]) for i in range(count)), (Recompute.NONE,) * count)
    seconds = StepTime(1.0, 1.0, 0.0, np.ones(count))
    candidate = Candidate(configuration, tables, choice, split, seconds)
    gpus = count * configuration.mesh.size
    job = Job("train", gpus, SAMPLES * configuration.num_microbatches, 1e12, COSTS.cluster.to_dict())
    return Plan.from_json(assemble(candidate, workload.info(), job).to_json())


def run_local(
    lowered: Lowered,
    steps: list[list[dict[str, Array]]],
    states: Mapping[str, Array],
    clock: Callable[[], Clock] = Clock,
) -> list[Rank]:
    """Run steps on threads, each rank and step with a clock of its own, and return the ranks as they are then."""
    memory = NumpyMemory()
    engine = Engine(memory)

    def work(communicator: LocalCommunicator) -> Rank:
        rank = Rank(lowered, communicator, memory, engine)
        rank.load(lambda name: states[name])
        for microbatches in steps:
            rank.step(microbatches, clock())
        return rank

    found: list[Rank] = LocalWorld(lowered.program.num_devices).run(work)
    return found
