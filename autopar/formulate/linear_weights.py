"""Linear weights of the step time, which make it a placement problem.

    minimise    sum over kinds k, slots s of w_ks * seconds_ks(x)
    subject to  memory of every stage in `mixes` <= limit at every time

`weights` returns w for a pipeline, `problem` builds the `Problem` for a solver. With `bounding` the optimum is a lower
bound on the step time of docs/model.md: stage maxima are relaxed to means, overlap terms to Lagrangian combinations
(docs/bounds.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.cost import Overlap
from autopar.cost.collectives import leaves_node
from autopar.cost.overlap import LEAST_CHUNKED, LEAST_GATHER, LEAST_WAIT
from autopar.formulate.block_memory import KEPT, RESIDENT, FloatArray
from autopar.formulate.link_seconds import BACKWARD_LINK_SLOTS
from autopar.formulate.step_time import Pipeline, Split
from autopar.formulate.table_arrays import FlatTables
from autopar.formulate.tables import Memory, Slot, Tables
from autopar.problem import Kinship, Limit, Problem, Usage
from autopar.recompute import STATE_KINDS, Recompute
from autopar.schedule import SCHEDULES


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight of each slot of each kind in the objective.

    Attributes:
        factors: (kinds, slots) weights.
        is_bound: Whether the minimum of the weighted sum is a lower bound on the step time.
    """

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

    With `bounding`: relaxes the slowest stage to the mean stage, and the two maxima of the step time formula to
    combinations with multipliers `traffic` and `hidden`. Valid for every split of a chain with these recompute
    flavours. Costs one pass over (kinds, slots). The multipliers are those of Lagrangian duality: any value in [0, 1]
    is valid, the best values close the gap.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        recompute: Recompute flavour of the blocks, for all kinds or by kind.
        hidden: Multiplier in [0, 1] of the gradient traffic that the last backward does not hide, late_s of
            `step_time.py`, on one link: the link between nodes if some axes use it and others do not. With `bounding`
            it is used for a single stage only.
        bounding: Whether the minimum must be a lower bound for every split; if not, terms of an even split are added,
            which give better plans.
        traffic: Multiplier in [0, 1] that combines compute and gradient traffic beside it on that link, t >= (1 -
            traffic) (f + b) + traffic g. None adds both in full, which is no bound but avoids such traffic.
        early: Whether to price gradient reductions in full, as if nothing hid them. This is no bound; it favours
            gradients that are reduced as early as possible.
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
    else:  # of all microbatches, t + left >= f + b + late_s is used `hidden` times and t alone for the rest
        rest = flow - hidden * share if bounding and num_stages == 1 else flow
        inline, beside = flow - traffic * rest, traffic * rest
    overlap = pipeline.overlap
    factors[:, Slot.FORWARD] = inline * (1 + full)
    factors[:, Slot.SELECTIVE] = inline * selective
    factors[:, Slot.BACKWARD] = inline
    gradient, reduced = _gradient_slots(tables) if bounding else (Slot.GRADIENT, Slot.REDUCE)
    factors[:, Slot.GRADIENT] = overlap.share * inline
    factors[:, gradient] += beside
    if num_stages == 1 or not bounding:
        before = share  # the backward of the last block runs first, when there is no traffic to hide yet
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
    splits = SCHEDULES[pipeline.schedule].splits  # the weight pass, which would hide collectives, is deferred
    seen = overlap if bounding else Overlap(share=1.0)
    _spread_pass_weights(factors, seen, overlap.price(LEAST_CHUNKED), splits=splits)
    if bounding and num_stages == 1:
        for slot in _backward_wait_slots(tables):
            factors[:, slot] += hidden * before  # a link that carries these collectives hides no gradients
    return Weights(factors, bounding and traffic is not None and not early)


def _gradient_slots(tables: Tables) -> tuple[Slot, Slot]:
    """Return the slots of gradient traffic and reductions on one link: between nodes if the mesh is mixed, else all."""
    return (Slot.GRADIENT_OUTSIDE, Slot.REDUCE_OUTSIDE) if _is_mixed(tables) else (Slot.GRADIENT, Slot.REDUCE)


def _backward_wait_slots(tables: Tables) -> tuple[Slot, ...]:
    """Return the slots of the collectives that a backward waits for on that link."""
    return (Slot.BACKWARD_OUTSIDE,) if _is_mixed(tables) else BACKWARD_LINK_SLOTS


def _is_mixed(tables: Tables) -> bool:
    """Whether some axes of the mesh cross nodes and others do not."""
    leaving = [leaves_node(axis, tables.costs.cluster.devices_per_node) for axis in tables.mesh.axes]
    return any(leaving) and not all(leaving)


def _spread_pass_weights(factors: FloatArray, overlap: Overlap, chunked: float, *, splits: bool = False) -> None:
    """Set the weights of collectives, gathers and weight gradients of each pass from the weight of the pass.

    A collective is priced at the part that no overlap can hide.

    Args:
        factors: (kinds, slots) weights.
        overlap: How collectives and gathers overlap compute.
        chunked: Price of a second of the collectives that run in chunks beside products.
        splits: Whether the backward is split.
    """
    gather, rows = overlap.price(LEAST_GATHER), overlap.rows_price
    factors[:, Slot.SELECTIVE_WAIT] = factors[:, Slot.SELECTIVE]
    factors[:, Slot.SELECTIVE_CHUNKED] = factors[:, Slot.SELECTIVE] * chunked
    factors[:, Slot.SELECTIVE_GATHER] = factors[:, Slot.SELECTIVE] * gather
    factors[:, Slot.SELECTIVE_SHARED] = factors[:, Slot.SELECTIVE]
    factors[:, Slot.SELECTIVE_ROWS] = factors[:, Slot.SELECTIVE] * rows
    factors[:, Slot.FORWARD_WAIT] = factors[:, Slot.FORWARD]
    factors[:, Slot.FORWARD_CHUNKED] = factors[:, Slot.FORWARD] * chunked
    factors[:, Slot.FORWARD_GATHER] = factors[:, Slot.FORWARD] * gather
    factors[:, Slot.FORWARD_SHARED] = factors[:, Slot.FORWARD]
    factors[:, Slot.FORWARD_ROWS] = factors[:, Slot.FORWARD] * rows
    for slot in (Slot.BACKWARD_WEIGHT, Slot.BACKWARD_SHARED, Slot.BACKWARD_SHARED_WEIGHT):
        factors[:, slot] = factors[:, Slot.BACKWARD]
    factors[:, Slot.BACKWARD_ROWS] = factors[:, Slot.BACKWARD] * rows
    factors[:, Slot.BACKWARD_WAIT] = factors[:, Slot.BACKWARD] * (1.0 if splits else overlap.price(LEAST_WAIT))
    factors[:, Slot.BACKWARD_CHUNKED] = factors[:, Slot.BACKWARD] * chunked
    factors[:, Slot.BACKWARD_GATHER] = factors[:, Slot.BACKWARD] * gather


def kind_weights(tables: Tables, kinds: Sequence[int], traffic: float) -> Weights:
    """Return the weights whose minimum is the least seconds that one block of each kind adds to its stage.

    Args:
        tables: The decisions.
        kinds: The kinds.
        traffic: Multiplier as in `weights`.
    """
    factors = np.zeros((len(tables.folded.kinds), len(Slot)))
    factors[kinds, Slot.FORWARD] = factors[kinds, Slot.BACKWARD] = 1.0 - traffic
    factors[kinds, Slot.GRADIENT] = traffic
    overlap = Overlap.of(tables.costs.stack)
    _spread_pass_weights(factors, overlap, overlap.price(LEAST_CHUNKED))
    return Weights(factors, True)


@dataclass(frozen=True, slots=True)
class StageMix:
    """The blocks of one stage, for its memory limit.

    Attributes:
        counts: Per recompute flavour, the instances of each kind.
        in_flight: Microbatches in flight.
        hosted: The instances of each kind whose state is in host memory; empty if there are none.
        gone: What of it.
    """

    counts: tuple[tuple[int, ...], ...]
    in_flight: int
    hosted: tuple[int, ...] = ()
    gone: tuple[Memory, ...] = (Memory.OPTIMIZER,)

    def kept_and_recomputed(self, kind: int, memory: Memory) -> tuple[int, int]:
        """Return how many instances of a kind keep such bytes for the backward, and how many recompute them."""
        num_kept = num_recomputed = 0
        for flavour, counts in zip(Recompute, self.counts, strict=True):
            kept = memory in KEPT[flavour]
            num_kept += counts[kind] * kept
            num_recomputed += counts[kind] * (not kept and memory in KEPT[Recompute.NONE])
        return num_kept, num_recomputed


def stage_mixes(chain: Sequence[int], pipeline: Pipeline, split: Split, num_kinds: int) -> tuple[StageMix, ...]:
    """Return the distinct stages of a split, without stages that another one dominates in memory."""
    mixes, kind = [], STATE_KINDS[split.what]
    gone = (Memory.OPTIMIZER, *[Memory.GRADIENTS] * kind.sums, *[Memory.PARAMETERS] * kind.parameters)
    for stage, (start, stop) in enumerate(split.ranges):
        kinds, flavours = np.asarray(chain[start:stop]), split.recompute[stage]
        counts = []
        for flavour in Recompute:
            chosen = kinds[[own is flavour for own in flavours]]
            counts.append(tuple(np.bincount(chosen, minlength=num_kinds).tolist()))
        away = tuple(np.bincount(kinds[list(split.away[stage])], minlength=num_kinds).tolist())
        mixes.append(StageMix(tuple(counts), pipeline.in_flight(stage), away if any(away) else (), gone))
    distinct = list(dict.fromkeys(mixes))
    return tuple(mix for mix in distinct if not any(_dominates(other, mix) for other in distinct if other != mix))


def _dominates(big: StageMix, small: StageMix) -> bool:
    """Whether one stage takes at least as much memory as another one under any choice."""
    away, other = (np.array(mix.hosted or (0,) * len(mix.counts[0])) for mix in (big, small))
    held = big.in_flight >= small.in_flight and bool((away <= other).all())
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
    """Build the placement problem: weighted seconds as costs, and a memory limit for every stage in `mixes`.

    The time of a memory limit runs through the ops of every kind of every stage: resident tensors and saved activations
    take memory throughout their stage, transient values only while the ops that need them run.

    Args:
        tables: The decisions.
        weighting: Weight of each slot.
        mixes: The stages whose memory is limited.
        limit: Bytes per device.
        name: Name of the problem for reports.
        prices: (items,) cost of a byte of each item of `Tables.bytes`; None for zero.
        pairs: First node, second node, (S of first, S of second) costs and weight of further pairwise costs.
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
    for own, table in _tables_with_outside(flat, weighting.factors, weight):
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


def _tables_with_outside(
    flat: FlatTables, factors: FloatArray, weight: FloatArray
) -> Iterator[tuple[list[int], FloatArray]]:
    """Yield the edges whose seconds on links between nodes are weighted apart, with their combined table of costs.

    The weight of the part between nodes may be negative; the combined cost is never negative.

    Args:
        flat: The costs as arrays.
        factors: (kinds, slots) weights.
        weight: (edges,) weight of each edge's whole seconds.
    """
    kinds = flat.edge_kinds[flat.outside]
    counted = factors[kinds, flat.outside_slots]
    if factors[:, Slot.SELECTIVE_OUTSIDE].any():
        counted[flat.again_outside] += factors[kinds[flat.again_outside], Slot.SELECTIVE_OUTSIDE]
    counted *= flat.edge_shares[flat.outside]
    edges_by_price: dict[tuple[int, int, float, float], list[int]] = {}
    for index in np.flatnonzero(counted).tolist():
        edge = int(flat.outside[index])
        key = int(flat.table_of[edge]), int(flat.outside_of[index]), float(weight[edge]), float(counted[index])
        edges_by_price.setdefault(key, []).append(edge)
    for (table_number, outside_number, whole_weight, outside_weight), edges in edges_by_price.items():
        whole = flat.tables[table_number]
        with np.errstate(invalid="ignore"):  # infinity minus infinity for a forbidden pair
            cost = whole_weight * whole + outside_weight * flat.outside_tables[outside_number]
            table = np.where(np.isinf(whole), np.inf, np.maximum(0.0, cost))
        table.flags.writeable = False
        yield edges, table


def _usages(tables: Tables, mixes: Sequence[StageMix], limit: float) -> tuple[list[Usage], list[Limit]]:
    """Return the memory use of every decision over time, and the limit of every stage."""
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
            if mix.hosted and item.memory in mix.gone:
                count -= mix.hosted[item.kind]
                if not count:
                    continue
            if item.memory in RESIDENT:
                usages.append(Usage(item.node, begin, time, item.amounts * count))
            elif item.memory is Memory.TRANSIENT:
                usages.append(Usage(item.node, start + item.start, start + item.end, item.amounts))
            else:
                num_kept, num_recomputed = mix.kept_and_recomputed(item.kind, item.memory)
                if num_kept:
                    usages.append(Usage(item.node, begin, time, item.amounts * (num_kept * mix.in_flight)))
                if num_recomputed:  # before the backward
                    usages.append(Usage(item.node, start, start + max(1, len(kinds[item.kind].ops)), item.amounts))
        limits.append(Limit(limit - tables.folded.buffer_bytes, begin, time))
    return usages, limits
