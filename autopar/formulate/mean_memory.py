"""Lower bounds on the peak bytes of a pipeline's fullest stage, and their use as a Lagrangian price on memory.

`MeanBytes` relaxes the maximum over stages to a weighted mean, which is linear in the decisions; `least_bytes` relaxes
the decisions too.
"""

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
    """Bytes of the mean stage, a lower bound on the bytes of the fullest stage of every split.

    Stage s with n_s blocks and f_s microbatches in flight holds at least n_s (resident + f_s saved) bytes. With stage
    weights (1 / f_s) / H, H = sum 1 / f_s, the mean of saved activations is total / H for every split, and the mean of
    resident bytes is at least total / (H max f). With equal weights, the mean of resident bytes is total / p, and the
    mean of saved activations is at least total min f / p.

    Relaxes the maximum over stages to their mean. Valid for every split of the pipeline, under the given recompute
    flavours. Costs one pass over `Tables.bytes`.

    Attributes:
        factors: (items,) weight of each item of `Tables.bytes` in the mean.
        limit: Largest allowed mean in bytes.
    """

    factors: FloatArray
    limit: float

    def excess(self, tables: Tables, choice: Sequence[int]) -> float:
        """Return the bytes by which the mean stage of a choice exceeds the limit; negative if it is below."""
        used = sum(
            factor * item.amounts[choice[item.node]]
            for factor, item in zip(self.factors, tables.bytes, strict=True)
            if factor
        )
        return float(used) - self.limit

    def priced(self, instance: Problem, tables: Tables, price: float) -> Problem:
        """Return the Lagrangian relaxation of memory: every byte of the mean stage costs `price` seconds."""
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
    """Return the mean stage of a pipeline under one recompute flavour per kind.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        limit: Bytes per device.
        keeps: Recompute flavour of each kind.
        resident: Memory that stays on the device throughout the step.
        evenly: Whether all stages have equal weights.
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
    """Return the least weights in the mean stage of a resident byte and of a byte per microbatch.

    Each is the minimum over the stages, so that it holds wherever the byte is.

    Args:
        pipeline: Stages, microbatches, schedule.
        groups: The stages of the mean.
        evenly: Whether all stages have equal weights.
    """
    in_flight = np.array([pipeline.in_flight(group) for group in groups], dtype=np.float64)
    weights = np.ones(len(in_flight)) if evenly else 1 / in_flight
    weights /= weights.sum()
    return float(weights.min()), float((weights * in_flight).min())


def least_bytes(
    tables: Tables,
    pipeline: Pipeline,
    allowed: Sequence[Sequence[int]] | None = None,
    *,
    resident: Sequence[Memory] = RESIDENT,
) -> dict[Recompute, float]:
    """Return a lower bound on the peak bytes of the fullest stage, by recompute flavour.

    Relaxes every decision to its smallest bytes, item by item, and the fullest stage to the mean stage. Valid for every
    split and every allowed choice. Costs one pass over `Tables.bytes`.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        allowed: Allowed strategies per node; None for all.
        resident: Memory that stays on the device throughout the step.
    """
    kinds = tables.folded.kinds
    totals = dict.fromkeys(Memory, 0.0)
    for item in tables.bytes:
        amounts = item.amounts if allowed is None else item.amounts[np.asarray(allowed[item.node])]
        totals[item.memory] += float(amounts.min()) * kinds[item.kind].count / pipeline.num_groups
    # The fullest stage holds at least the mean of all stages; every stage has at least `least` microbatches in flight.
    least = min(pipeline.in_flight(group) for group in range(pipeline.num_groups))
    resident_bytes = sum(totals[memory] for memory in resident)
    return {flavour: resident_bytes + least * sum(totals[memory] for memory in KEPT[flavour]) for flavour in Recompute}
