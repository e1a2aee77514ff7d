"""Bytes that no plan of a pipeline stays below, and what a price on them makes of a placement problem."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.formulate.block_memory import KEPT, RESIDENT, FloatArray
from autopar.formulate.step_time import Pipeline
from autopar.formulate.tables import Memory, Tables
from autopar.problem import Problem
from autopar.recompute import Recompute


@dataclass(frozen=True, slots=True, eq=False)
class MeanBytes:
    """Bytes of a mean stage: no split has all stages below it.

    Stage s with n_s blocks and f_s microbatches in flight holds n_s (resident + f_s saved) and more. Weighting stages
    by (1 / f_s) / H, H = sum 1 / f_s, the mean of saved activations is total / H for every split, that of resident
    bytes at least total / (H max f). Weighting them evenly, the mean of resident bytes is total / p, that of saved
    activations at least total min f / p.

    Attributes:
        factors: Per item of `Tables.bytes` its weight in the mean.
        limit: Bytes the mean may reach.
    """

    factors: FloatArray
    limit: float

    def excess(self, tables: Tables, choice: Sequence[int]) -> float:
        """Return by how many bytes the mean of a choice is over the limit; negative if it is under."""
        used = sum(
            factor * item.amounts[choice[item.node]]
            for factor, item in zip(self.factors, tables.bytes, strict=True)
            if factor
        )
        return float(used) - self.limit

    def priced(self, instance: Problem, tables: Tables, price: float) -> Problem:
        """Return the problem with every byte of the mean priced at `price` seconds."""
        costs = [cost.copy() for cost in instance.node_costs]
        for factor, item in zip(self.factors, tables.bytes, strict=True):
            if factor:
                costs[item.node] += price * factor * item.amounts
        return replace(instance, node_costs=tuple(costs))


def mean_bytes(
    tables: Tables,
    pipeline: Pipeline,
    limit: float,
    keeps: Sequence[Recompute],
    *,
    resident: Sequence[Memory] = RESIDENT,
    evenly: bool = False,
) -> MeanBytes:
    """Return the mean stage of a pipeline when kinds keep what their flavour of recompute says.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        keeps: Flavour of each kind.
        resident: What stays on the device through the step.
        evenly: Whether all stages weigh the same.
    """
    held, kept = stage_weights(pipeline, range(pipeline.num_groups), evenly=evenly)
    factors = np.zeros(len(tables.bytes))
    for index, item in enumerate(tables.bytes):
        count = tables.folded.kinds[item.kind].count
        if item.memory in resident:
            factors[index] = count * held
        elif item.memory in KEPT[keeps[item.kind]]:
            factors[index] = count * kept
    return MeanBytes(factors, limit - tables.folded.buffer_bytes)


def stage_weights(pipeline: Pipeline, groups: Sequence[int], *, evenly: bool) -> tuple[float, float]:
    """Return how often resident bytes and those of a microbatch count at least in a mean stage, of those of its stages.

    Args:
        pipeline: Stages, microbatches, schedule.
        groups: The stages that it is the mean of.
        evenly: Whether they all weigh the same.
    """
    flying = np.array([pipeline.in_flight(group) for group in groups], dtype=np.float64)
    weights = np.ones(len(flying)) if evenly else 1 / flying
    weights /= weights.sum()
    return float(weights.min()), float((weights * flying).min())


def least_bytes(
    tables: Tables,
    pipeline: Pipeline,
    allowed: Sequence[Sequence[int]] | None = None,
    *,
    resident: Sequence[Memory] = RESIDENT,
) -> dict[Recompute, float]:
    """Return a lower bound on the peak bytes of the fullest stage, by flavour of recompute.

    Every item is taken at its smallest, and all stages at their mean.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        allowed: Strategies per node that may be chosen; None for all.
        resident: What stays on the device through the step.
    """
    kinds = tables.folded.kinds
    totals = dict.fromkeys(Memory, 0.0)
    for item in tables.bytes:
        amounts = item.amounts if allowed is None else item.amounts[np.asarray(allowed[item.node])]
        totals[item.memory] += float(amounts.min()) * kinds[item.kind].count / pipeline.num_groups
    # The fullest stage holds at least the mean of all stages, and every stage at least the least number of
    # microbatches.
    least = min(pipeline.in_flight(group) for group in range(pipeline.num_groups))
    always = sum(totals[memory] for memory in resident)
    return {flavour: always + least * sum(totals[memory] for memory in KEPT[flavour]) for flavour in Recompute}
