"""The least memory instead of the least time: bytes as costs of the placement problem, and the split that needs least.

The problem minimises the bytes of a mean stage (`mean.py`), which no split has all stages below; what does not belong
to one decision, such as what live beside each other in a pass, it does not see. So what is found is a plan that fits if
its own peak does, and no proof that nothing fits; `least_bytes` is one.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.mean import mean_bytes
from autopar.formulate.memory import RESIDENT, RangeBytes
from autopar.formulate.step import Pipeline, Split
from autopar.formulate.tables import Memory, Tables
from autopar.formulate.weights import problem, weights
from autopar.problem import Problem
from autopar.recompute import Recompute


def byte_problem(
    tables: Tables,
    pipeline: Pipeline,
    recompute: Recompute,
    *,
    passing: float = 0.0,
    second: float = 0.0,
    name: str = "",
) -> Problem:
    """Return the placement problem whose costs are the bytes of a mean stage that recomputes so.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        recompute: What all blocks keep.
        passing: Weight of what lives only while its neighbours run: not all of it is there at a time.
        second: Bytes that a second counts for: what takes long often ends in buffers, which belong to no decision.
        name: For reports.
    """
    weighting = weights(tables, pipeline, recompute=recompute, hidden=0.0, bounding=False)
    instance = problem(tables, replace(weighting, factors=second * weighting.factors), name=name)
    mean = mean_bytes(tables, pipeline, 0.0, [recompute] * len(tables.folded.kinds))
    lasting = mean.priced(instance, tables, 1.0)
    if not passing:
        return lasting
    costs = [cost.copy() for cost in lasting.node_costs]
    for item in tables.bytes:
        if item.memory is Memory.TRANSIENT:
            costs[item.node] += passing * item.amounts
    return replace(lasting, node_costs=tuple(costs))


def least_split(
    memory: RangeBytes, chain: Sequence[int], pipeline: Pipeline, constraints: Constraints = FREE, *, trains: bool
) -> tuple[float, Split] | None:
    """Return the split whose fullest stage needs the fewest bytes, with those bytes; None if no split is allowed.

    Every stage recomputes what leaves it the fewest bytes, and of equals what is fastest.
    """
    num_blocks, num_stages = len(chain), pipeline.num_stages
    if num_stages > num_blocks:
        return None
    flavours = constraints.flavours() if trains else (Recompute.NONE,)
    inside = np.arange(num_blocks + 1)[None, :] > np.arange(num_blocks)[:, None]
    best = np.full(num_blocks + 1, np.inf)
    best[0] = 0.0
    cuts, chosen = [], []
    for stage in range(num_stages):
        each = np.stack([
            np.where(inside & constraints.stages(flavour, num_blocks),
                     memory.peaks(pipeline.in_flight(stage), flavour), np.inf)
            for flavour in flavours
        ])  # fmt: skip
        chosen.append(each.argmin(axis=0))
        peaks = np.maximum(best[:num_blocks, None], each.min(axis=0))
        cuts.append(peaks.argmin(axis=0))
        best = peaks.min(axis=0)
    if not np.isfinite(best[num_blocks]):
        return None
    ranges, recompute, stop = [], [], num_blocks
    for stage in reversed(range(num_stages)):
        first = int(cuts[stage][stop])
        ranges.append((first, stop))
        recompute.append(flavours[int(chosen[stage][first, stop])])
        stop = first
    return float(best[num_blocks]), Split(tuple(reversed(ranges)), tuple(reversed(recompute)))


def state_bytes(tables: Tables) -> float:
    """Return the bytes of parameters, sums of gradients and optimizer state at their smallest, on all devices together.

    Of the tables of one device it is what all devices of a job hold at least, whatever the plan.
    """
    return sum(
        float(item.amounts.min()) * tables.folded.kinds[item.kind].count
        for item in tables.bytes
        if item.memory in RESIDENT
    )
