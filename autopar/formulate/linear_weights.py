"""The step time made linear: weights of the prices of blocks, whose optimum is a choice of strategies and a bound.

`step_time.py` has the formula, docs/bounds.md why these weights bound it from below.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.cost import Overlap
from autopar.cost.collectives import leaves_node
from autopar.cost.overlap import LEAST_GATHER, LEAST_WAIT
from autopar.formulate.block_memory import KEPT, RESIDENT, FloatArray
from autopar.formulate.step_time import Pipeline, Split
from autopar.formulate.table_arrays import FlatTables
from autopar.formulate.tables import Memory, Slot, Tables
from autopar.problem import Kinship, Limit, Problem, Usage
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES


@dataclass(frozen=True, slots=True)
class Weights:
    """Times each slot of each kind counts, (kinds, slots), and whether the optimum is then a lower bound on `step`."""

    factors: FloatArray
    is_bound: bool


def weights(
    tables: Tables,
    pipeline: Pipeline,
    *,
    recompute: Recompute | Sequence[Recompute],
    hidden: float,
    bounding: bool,
    traffic: float | None = 0.0,
    early: bool = False,
) -> Weights:
    """Return the weights that make the step time linear.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        recompute: What blocks run again, for all kinds or by kind.
        hidden: Multiplier in [0, 1] on what the last backward does not hide of gradients, e_s of `step_time.py` on one
            link, the one between nodes if there is one: any value gives a lower bound when there is one stage, the best
            one closes the gap (Lagrange).
        bounding: Whether the optimum must be a lower bound for every split; else terms are added for an even split that
            make better plans.
        traffic: Multiplier in [0, 1] that shares the time of a stage between compute and the gradient traffic beside
            it on that link, t >= (1 - traffic) (f + b) + traffic g: again any value gives a lower bound and the best
            one closes the gap. None prices both in full, which is no bound but keeps choices away from such traffic.
        early: Whether to price what is reduced after the last backward of a block as if nothing hid it, which is no
            bound but prefers gradients that are reduced as soon as they are there.
    """
    counts = np.array([kind.count for kind in tables.folded.kinds], dtype=np.float64)
    num_stages = pipeline.num_groups
    flow = counts * pipeline.rounds / num_stages
    share = counts / num_stages
    flavours = [recompute] * len(counts) if isinstance(recompute, Recompute) else recompute
    full = np.array([flavour is Recompute.FULL for flavour in flavours], dtype=np.float64)
    selective = np.array([flavour is Recompute.SELECTIVE for flavour in flavours], dtype=np.float64)
    factors = np.zeros((len(counts), len(Slot)))
    if traffic is None:
        inline, beside = flow, flow
    else:  # t + left >= f + b + e_s counts `hidden` times, t alone all the others
        rest = flow - hidden * share if bounding and num_stages == 1 else flow
        inline, beside = flow - traffic * rest, traffic * rest
    overlap = pipeline.overlap
    factors[:, Slot.FORWARD] = inline * (1 + full)
    factors[:, Slot.SELECTIVE] = inline * selective
    factors[:, Slot.BACKWARD] = inline
    gradient, reduced = _one_link(tables) if bounding else (Slot.GRADIENT, Slot.REDUCE)
    factors[:, Slot.GRADIENT] = overlap.share * inline
    factors[:, gradient] += beside
    if num_stages == 1 or not bounding:
        before = share  # nothing hides behind the last block of the chain, whose backward is the first
        if bounding:
            before = counts - np.eye(len(counts))[tables.folded.chain[-1]]
        factors[:, Slot.BACKWARD] -= hidden * before
        factors[:, Slot.FORWARD] -= hidden * before * full
        factors[:, Slot.SELECTIVE] -= hidden * before * selective
        factors[:, Slot.UPDATE] = share
        factors[:, gradient] += hidden * share
        if bounding:
            factors[:, Slot.REDUCE] += overlap.share * share
            factors[:, reduced] += hidden * (1 - overlap.share) * share
        else:
            factors[:, Slot.REDUCE] = share if early else hidden * share
    splits = SCHEDULES[pipeline.schedule].splits  # what would hide collectives is put off
    _share_passes(factors, overlap if bounding else Overlap(share=1.0), splits=splits)
    if bounding and num_stages == 1:
        for slot in _waits(tables):
            factors[:, slot] += hidden * before  # links that are taken hide nothing
    return Weights(factors, bounding and traffic is not None and not early)


def _one_link(tables: Tables) -> tuple[Slot, Slot]:
    """Return where gradient traffic and reductions are told that are on one link: between nodes, or else inside."""
    return (Slot.GRADIENT_OUTSIDE, Slot.REDUCE_OUTSIDE) if _is_mixed(tables) else (Slot.GRADIENT, Slot.REDUCE)


def _waits(tables: Tables) -> tuple[Slot, ...]:
    """Return where it is told what a backward waits for on that link."""
    return (Slot.BACKWARD_OUTSIDE,) if _is_mixed(tables) else (Slot.BACKWARD_WAIT, Slot.BACKWARD_GATHER)


def _is_mixed(tables: Tables) -> bool:
    """Whether some axes of the mesh leave nodes and others do not."""
    leaving = [leaves_node(axis, tables.costs.cluster.devices_per_node) for axis in tables.mesh.axes]
    return any(leaving) and not all(leaving)


def _share_passes(factors: FloatArray, overlap: Overlap, *, splits: bool = False) -> None:
    """Give the other slots of a pass their part of its weight; hidden as far as anything could hide it."""
    factors[:, Slot.SELECTIVE_WAIT] = factors[:, Slot.SELECTIVE]
    factors[:, Slot.SELECTIVE_GATHER] = factors[:, Slot.SELECTIVE] * overlap.price(LEAST_GATHER)
    factors[:, Slot.FORWARD_WAIT] = factors[:, Slot.FORWARD]
    factors[:, Slot.FORWARD_GATHER] = factors[:, Slot.FORWARD] * overlap.price(LEAST_GATHER)
    factors[:, Slot.BACKWARD_WEIGHT] = factors[:, Slot.BACKWARD]
    factors[:, Slot.BACKWARD_WAIT] = factors[:, Slot.BACKWARD] * (1.0 if splits else overlap.price(LEAST_WAIT))
    factors[:, Slot.BACKWARD_GATHER] = factors[:, Slot.BACKWARD] * overlap.price(LEAST_GATHER)


def kind_weights(tables: Tables, kinds: Sequence[int], traffic: float) -> Weights:
    """Return the weights whose optimum is the least a block of each kind adds to its stage; `traffic` as in `weights`.

    Args:
        tables: The decisions.
        kinds: The kinds.
        traffic: The same.
    """
    factors = np.zeros((len(tables.folded.kinds), len(Slot)))
    factors[kinds, Slot.FORWARD] = factors[kinds, Slot.BACKWARD] = 1.0 - traffic
    factors[kinds, Slot.GRADIENT] = traffic
    _share_passes(factors, Overlap.of(tables.costs.stack))
    return Weights(factors, True)


@dataclass(frozen=True, slots=True)
class StageMix:
    """What one stage holds, for memory limits.

    Attributes:
        counts: Per flavour of recompute the instances of each kind.
        in_flight: Microbatches in flight.
        offload: Whether the optimizer's state lies in host memory.
    """

    counts: tuple[tuple[int, ...], ...]
    in_flight: int
    offload: bool = False

    def having(self, kind: int, memory: Memory) -> tuple[int, int]:
        """Return how many instances of a kind keep such memory for their backward, and how many make it again."""
        keeps = loses = 0
        for flavour, counts in zip(Recompute, self.counts, strict=True):
            kept = memory in KEPT[flavour]
            keeps += counts[kind] * kept
            loses += counts[kind] * (not kept and memory in KEPT[Recompute.NONE])
        return keeps, loses


def stage_mixes(chain: Sequence[int], pipeline: Pipeline, split: Split, num_kinds: int) -> tuple[StageMix, ...]:
    """Return the distinct stages of a split that no other stage dominates."""
    mixes = []
    for stage, (start, stop) in enumerate(split.ranges):
        kinds, flavours = np.asarray(chain[start:stop]), split.recompute[stage]
        counts = []
        for flavour in Recompute:
            chosen = kinds[[own is flavour for own in flavours]]
            counts.append(tuple(np.bincount(chosen, minlength=num_kinds).tolist()))
        mixes.append(StageMix(tuple(counts), pipeline.in_flight(stage), bool(split.offload) and split.offload[stage]))
    distinct = list(dict.fromkeys(mixes))
    return tuple(mix for mix in distinct if not any(_dominates(other, mix) for other in distinct if other != mix))


def _dominates(big: StageMix, small: StageMix) -> bool:
    held = big.in_flight >= small.in_flight and big.offload <= small.offload
    return held and bool((np.array(big.counts) >= np.array(small.counts)).all())


def problem(
    tables: Tables,
    weighting: Weights,
    mixes: Sequence[StageMix] = (),
    limit: float = np.inf,
    name: str = "",
    *,
    prices: FloatArray | None = None,
    pairs: Sequence[tuple[int, int, FloatArray, float]] = (),
) -> Problem:
    """Return the placement problem: weighted seconds, and the memory of every stage in `mixes` under `limit` bytes.

    Time runs through the ops of every kind of every stage in turn: persistent tensors and saved activations take memory
    throughout their stage, transient values while the ops that need them run.

    Args:
        tables: The decisions.
        weighting: How much each price counts.
        mixes: The stages whose memory is limited.
        limit: Bytes per device.
        name: For reports.
        prices: What a byte of each item of `Tables.bytes` costs besides, (items,); nothing by default.
        pairs: First node, second node, (S of first, S of second) costs and weight of what else is paid in pairs.
    """
    flat, factors = tables.flat, np.maximum(0.0, weighting.factors)
    times = factors[flat.node_kinds, flat.node_slots] * flat.node_shares
    weight = factors[flat.edge_kinds, flat.edge_slots] * flat.edge_shares
    if factors[:, Slot.SELECTIVE].any():
        nodes, edges = flat.again_nodes, flat.again_edges
        times[nodes] += factors[flat.node_kinds[nodes], flat.again_node_slots] * flat.node_shares[nodes]
        weight[edges] += factors[flat.edge_kinds[edges], flat.again_edge_slots] * flat.edge_shares[edges]
    costs = np.repeat(times, np.diff(flat.label_at)) * flat.label_seconds
    if prices is not None and prices.any():
        np.add.at(costs, flat.item_labels, np.repeat(prices, np.diff(flat.item_at)) * flat.item_amounts)
    costs.flags.writeable = False
    distinct, numbers, paid = [*flat.tables], flat.table_of.copy(), np.ones(len(flat.table_of))
    paid[: len(weight)] = weight
    for own, table in _outside(flat, weighting.factors, weight):
        numbers[own], paid[own] = len(distinct), 1.0
        distinct.append(table)
    used, numbers = np.unique(numbers, return_inverse=True)
    usages, limits = _usages(tables, mixes, limit)
    return Problem(
        tuple(costs[first:last] for first, last in pairwise(flat.label_at.tolist())),
        np.vstack([flat.ends, *([first, second] for first, second, _, _ in pairs)]),
        (*(distinct[index] for index in used.tolist()), *(table for _, _, table, _ in pairs)),
        np.concatenate([numbers, len(used) + np.arange(len(pairs))]),
        np.concatenate([paid, [weight for _, _, _, weight in pairs]]),
        tuple(usages),
        tuple(limits),
        flat.names,
        name=name,
        kinship=None if mixes else flat.kinships.setdefault(tuple(pair[:2] for pair in pairs), Kinship()),
    )


def _outside(flat: FlatTables, factors: FloatArray, weight: FloatArray) -> Iterator[tuple[list[int], FloatArray]]:
    """Yield edges whose collectives have another price between nodes than inside, and the tables they have with that.

    It may be less than nothing, but by no more than what the edge costs without.

    Args:
        flat: The prices.
        factors: (kinds, slots) how much each counts.
        weight: (edges,) how much edges count.
    """
    kinds = flat.edge_kinds[flat.outside]
    counted = factors[kinds, flat.outside_slots]
    if factors[:, Slot.SELECTIVE_OUTSIDE].any():
        counted[flat.again_outside] += factors[kinds[flat.again_outside], Slot.SELECTIVE_OUTSIDE]
    counted *= flat.edge_shares[flat.outside]
    alike: dict[tuple[int, int, float, float], list[int]] = {}
    for index in np.flatnonzero(counted).tolist():
        edge = int(flat.outside[index])
        key = int(flat.table_of[edge]), int(flat.outside_of[index]), float(weight[edge]), float(counted[index])
        alike.setdefault(key, []).append(edge)
    for (of, there, own, more), edges in alike.items():
        inside = flat.tables[of]
        with np.errstate(invalid="ignore"):  # infinity less infinity, where a pair is forbidden
            table = np.where(
                np.isinf(inside), np.inf, np.maximum(0.0, own * inside + more * flat.outside_tables[there])
            )
        table.flags.writeable = False
        yield edges, table


def _usages(tables: Tables, mixes: Sequence[StageMix], limit: float) -> tuple[list[Usage], list[Limit]]:
    usages: list[Usage] = []
    limits: list[Limit] = []
    time = 0
    kinds = tables.folded.kinds
    for mix in mixes:
        begin = time
        starts = {}
        counts = [sum(of_kind) for of_kind in zip(*mix.counts, strict=True)]
        for kind in kinds:
            if counts[kind.id]:
                starts[kind.id] = time
                time += max(1, len(kind.ops))
        for item in tables.bytes:
            count = counts[item.kind]
            if not count:
                continue
            start = starts[item.kind]
            if item.memory is Memory.OPTIMIZER and mix.offload:
                continue
            if item.memory in RESIDENT:
                usages.append(Usage(item.node, begin, time, item.amounts * count))
            elif item.memory is Memory.TRANSIENT:
                usages.append(Usage(item.node, start + item.start, start + item.end, item.amounts))
            else:
                keeps, loses = mix.having(item.kind, item.memory)
                if keeps:
                    usages.append(Usage(item.node, begin, time, item.amounts * (keeps * mix.in_flight)))
                if loses:  # made again before the backward
                    usages.append(Usage(item.node, start, start + max(1, len(kinds[item.kind].ops)), item.amounts))
        limits.append(Limit(limit - tables.folded.buffer_bytes, begin, time))
    return usages, limits
