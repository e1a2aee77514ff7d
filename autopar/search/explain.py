"""Why nothing fits, and the cheapest way out."""

import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.formulate.step import Pipeline
from autopar.formulate.tables import Memory, build_tables
from autopar.formulate.weights import problem, weights
from autopar.program.lower import lower_blocks
from autopar.recompute import ON_DEVICE, Recompute
from autopar.schedule import SCHEDULES
from autopar.search.blocks import assemble_blocks
from autopar.search.planner import Search
from autopar.search.space import Configuration, meshes
from autopar.simulate.ranges import chain_bytes
from autopar.units import format_bytes

MOST_GPUS = 65536  # the largest cluster a way out is looked for on


@dataclass(frozen=True, slots=True)
class Shortage:
    """The least memory found for a configuration: bytes of its fullest stage."""

    configuration: Configuration
    stage: int
    bytes: float
    recompute: Recompute


def explain_infeasible(search: Search, space: list[Configuration]) -> InfeasibleError:
    """Return the error that says how much is missing, on which stage of the best attempt, and what would help."""
    attempts = [_shortage(search, configuration) for configuration in _thriftiest(space)]
    best = min(attempts, key=lambda attempt: attempt.bytes)
    limit = search.memory_limit
    missing = best.bytes - limit
    gpus = best.configuration.num_stages * best.configuration.mesh.size
    flavour = "no" if best.recompute is Recompute.NONE else best.recompute
    message = (
        f"no plan fits {gpus} devices: the thriftiest ({best.configuration}, "
        f"{flavour} recompute) needs {format_bytes(best.bytes)} on stage {best.stage}, "
        f"{format_bytes(missing)} more than the limit of {format_bytes(limit)}"
    )
    return InfeasibleError(message, hint=_way_out(search, best, gpus))


def _thriftiest(space: list[Configuration]) -> list[Configuration]:
    """Return, for every number of stages, the configurations with the smallest microbatches.

    No schedule holds less than 1F1B.
    """
    most = max(configuration.num_microbatches for configuration in space)
    names = ("1f1b", "forward-only")
    return [found for found in space if found.num_microbatches == most and found.schedule in names]


def _shortage(search: Search, configuration: Configuration) -> Shortage:
    """Return the least memory of a configuration: the placement problem with bytes in place of seconds."""
    samples = search.global_batch // configuration.num_microbatches
    folded = search.folded(samples)
    tables = build_tables(folded, search.rules(folded), configuration.mesh, search.costs)
    pipeline = Pipeline(configuration.num_stages, configuration.num_microbatches, configuration.schedule)
    chain = tables.folded.chain
    size = -(-len(chain) // pipeline.num_stages)
    ranges = tuple(
        (
            min(stage * size, len(chain) - pipeline.num_stages + stage),
            min((stage + 1) * size, len(chain) - pipeline.num_stages + stage + 1),
        )
        for stage in range(pipeline.num_stages)
    )
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=False)
    instance = problem(tables, replace(weighting, factors=np.zeros_like(weighting.factors)))
    costs = [cost.copy() for cost in instance.node_costs]
    for item in tables.bytes:
        if item.memory is not Memory.TRANSIENT:
            costs[item.node] += item.amounts * tables.folded.kinds[item.kind].count
    solution = search.solver.solve(replace(instance, node_costs=tuple(costs)), time_limit=10.0)
    worst = Shortage(configuration, 0, math.inf, Recompute.FULL)
    if solution.choice is None:
        return worst
    lowered = lower_blocks(assemble_blocks(tables, solution.choice), folded, tables.resharder)
    trains = SCHEDULES[pipeline.schedule].trains
    memory = chain_bytes(lowered, folded, trains=trains)
    for recompute in ON_DEVICE if trains else (Recompute.NONE,):
        fullest = max(
            (memory.peak(start, stop, pipeline.in_flight(stage), (recompute,) * (stop - start)), stage)
            for stage, (start, stop) in enumerate(ranges)
        )
        if fullest[0] < worst.bytes:
            worst = Shortage(configuration, fullest[1], fullest[0], recompute)
    return worst


def _way_out(search: Search, best: Shortage, gpus: int) -> str:
    """Return the smallest number of GPUs (doubling) that would do, or the memory per device that would."""
    count = gpus * 2
    while count <= MOST_GPUS:
        for stages in sorted({best.configuration.num_stages, 1}):
            if count % stages:
                continue
            for mesh in meshes(count // stages, search.costs.cluster.devices_per_node):
                attempt = _shortage(search, replace(best.configuration, num_stages=stages, mesh=mesh))
                if attempt.bytes <= search.memory_limit:
                    worse = attempt.recompute is not Recompute.NONE and best.recompute is Recompute.NONE
                    fix = f"{attempt.recompute} recompute and " if worse else ""
                    return f"{fix}--gpus {count} would fit; or devices with {format_bytes(best.bytes)} free each"
        count *= 2
    return f"devices with {format_bytes(best.bytes)} free each; or a smaller model or batch"
