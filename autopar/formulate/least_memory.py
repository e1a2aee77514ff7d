"""Minimise memory instead of time: a placement problem whose costs are bytes, and the stage cuts of least peak memory.

The problem minimises the bytes of the mean stage (`mean_memory.py`), a lower bound on the fullest stage of every split.
Costs of edges are bytes that depend on two decisions: values kept at two placements, and buffers of reshards. The
problem ignores which values live at the same time in a pass. So its solution is a plan that has to be checked against
the limit, and proves nothing if it does not fit; `least_bytes` is the lower bound.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.cost.overlap import state_buffers
from autopar.formulate.block_memory import RESIDENT, ChainBytes, FloatArray
from autopar.formulate.constraints import FREE, Constraints
from autopar.formulate.hosted_state import HostedState, IntArray
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.mean_memory import mean_bytes, stage_weights
from autopar.formulate.step_time import Pipeline, Split
from autopar.formulate.tables import Memory, Tables
from autopar.problem import Problem
from autopar.recompute import BY_SECONDS, Recompute


def byte_problem(
    tables: Tables,
    pipeline: Pipeline,
    recompute: Recompute,
    *,
    passing: float = 0.0,
    second: float = 0.0,
    between: Sequence[tuple[int, int, FloatArray]] = (),
    resident: Sequence[Memory] = RESIDENT,
    name: str = "",
) -> Problem:
    """Build the placement problem whose costs are the bytes of the mean stage under one recompute flavour.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        recompute: Recompute flavour of all blocks.
        passing: Weight of transient bytes, which are not all held at the same time.
        second: Bytes that one second of cost counts for; slow choices often need buffers that belong to no decision.
        between: First node, second node and bytes, (S of first, S of second), of buffers that depend on both.
        resident: Memory that stays on the device throughout the step.
        name: Name of the problem for reports.
    """
    weighting = weights(tables, pipeline, recompute=recompute, hidden=0.0, bounding=False)
    pairs = [] if recompute is Recompute.FULL else _doubly_kept(tables, pipeline)
    if passing:
        pairs += [(*pair, passing) for pair in between]
    instance = problem(tables, replace(weighting, factors=second * weighting.factors), name=name, pairs=pairs)
    mean = mean_bytes(tables, pipeline, 0.0, [recompute] * len(tables.folded.kinds), resident=resident)
    lasting = mean.priced(instance, tables, 1.0)
    if not passing:
        return lasting
    costs = [cost.copy() for cost in lasting.node_costs]
    for item in tables.bytes:
        if item.memory is Memory.TRANSIENT:
            costs[item.node] += passing * item.amounts
    return replace(lasting, node_costs=tuple(costs))


def _doubly_kept(tables: Tables, pipeline: Pipeline) -> list[tuple[int, int, FloatArray, float]]:
    """Return the pairs of decisions under which a value is kept at two placements, in the form of `problem`'s `pairs`.

    The producing and the reading block both keep a boundary value for their backward. They share one tensor if the
    boundary placement equals the placement at which the value is made; else each keeps its own.
    """
    handed = {item.node: item for item in tables.bytes if item.memory is Memory.HANDED}
    ops = {(node.kind, node.position): index for index, node in enumerate(tables.nodes)}
    _, kept = stage_weights(pipeline, range(pipeline.num_groups), evenly=False)
    found = []
    for boundary in tables.boundaries:
        if boundary.node not in handed:
            continue
        crossing, amounts = tables.nodes[boundary.node].outputs(0), handed[boundary.node].amounts
        for producer in boundary.producers:
            first = ops[producer.kind, producer.position]
            made = tables.nodes[first].outputs(producer.slot)
            bytes_kept = np.where(made[:, None] == crossing[None, :], 0.0, amounts[None, :])
            found.append((first, boundary.node, bytes_kept, kept * tables.folded.kinds[producer.kind].count))
    return found


def least_split(memory: ChainBytes, pipeline: Pipeline, constraints: Constraints = FREE) -> tuple[float, Split] | None:
    """Return the least peak bytes of the fullest stage, and a split that attains it; None if no split is allowed.

    Dynamic program over stages and blocks: the peak of a prefix is the maximum of its last stage's peak and the least
    peak of the rest. All blocks of a stage have one recompute flavour, or the nearest allowed one; ties go to the
    fastest flavour. Of the optimizer state of a stage as much is offloaded as is allowed and has room, where that
    lowers the peak.

    Without a constraint on cuts, stages are at most about twice as long as the mean. Costs O(stages x blocks^2) per
    flavour, after one walk from every block.
    """
    num_blocks, num_stages = len(memory.chain), pipeline.num_stages
    if num_stages > num_blocks:
        return None
    longest = num_blocks if constraints.cuts is not None else min(num_blocks, 2 * -(-num_blocks // num_stages) + 2)
    ranges = _Ranges(memory, constraints, longest, whole=num_stages == 1)
    best = np.full(num_blocks + 1, np.inf)
    best[0] = 0.0
    cuts, chosen = [], []
    if not ranges.flavours:
        return None
    places = (False, True) if constraints.hosts_optimizer else (False,)
    options = [(number, on_host) for on_host in places for number in range(len(ranges.flavours))]
    for stage in range(num_stages):
        each = np.stack([ranges.peaks(pipeline.in_flight(stage), *option) for option in options])
        chosen.append(each.argmin(axis=0))
        peaks = np.maximum(best[:num_blocks, None], each.min(axis=0))
        cuts.append(peaks.argmin(axis=0))
        best = peaks.min(axis=0)
    if not np.isfinite(best[num_blocks]):
        return None
    found, recompute, offload, stop = [], [], [], num_blocks
    for stage in reversed(range(num_stages)):
        first = int(cuts[stage][stop])
        found.append((first, stop))
        number, on_host = options[int(chosen[stage][first, stop])]
        recompute.append(ranges.flavours[number][first:stop])
        offload.append(ranges.away(first, stop, pipeline.in_flight(stage), number, on_host=on_host))
        stop = first
    split = Split.of_stages(found[::-1], recompute[::-1], offload[::-1], memory.shared, memory.what)
    return float(best[num_blocks]), split


class _Ranges:
    """Peak bytes of every range of blocks that may be a stage; (blocks, blocks + 1) arrays, infinity if not allowed.

    Attributes:
        flavours: Recompute flavour of each block of the chain, one tuple per uniform flavour, from fastest to slowest.
    """

    def __init__(self, memory: ChainBytes, constraints: Constraints, longest: int, *, whole: bool) -> None:
        self.flavours = _uniform_flavours(memory, constraints)
        num_blocks = len(memory.chain)
        shape = (num_blocks, num_blocks + 1)
        allowed = constraints.ranges(num_blocks, longest)
        self._resident, self._update = np.full(shape, np.inf), np.zeros(shape)
        self._kept, self._running, self._hosted = (np.zeros((len(self.flavours), *shape)) for _ in range(3))
        self._host_room = memory.host_room
        self._places = HostedState.of(memory, constraints)
        self._stream = self._places.stream(np.arange(num_blocks)[:, None], np.arange(num_blocks + 1)[None, :])
        self._start, self._stop = np.arange(num_blocks)[:, None], np.arange(num_blocks + 1)[None, :]
        for start in range(1 if whole else num_blocks):
            last = min(num_blocks, start + longest)
            stops = [stop for stop in range(start + 1, last + 1) if allowed[start, stop - start - 1]]
            stops = [stop for stop in stops if not whole or stop == num_blocks]
            for stop in stops:
                self._resident[start, stop] = memory.resident_bytes(start, stop)
                kinds = list(memory.chain[start:stop])
                self._update[start, stop] = memory.update[kinds].max()
            for number, flavours in enumerate(self.flavours):
                self._fill_ranges_from(memory, start, stops, number, flavours)

    def _fill_ranges_from(
        self, memory: ChainBytes, start: int, stops: Sequence[int], number: int, flavours: Sequence[Recompute]
    ) -> None:
        """Fill in the bytes of all ranges that start at one block, in one walk, as `ChainBytes.stage` counts them."""
        state, target = memory.walk.enter(memory.chain[start]), set(stops)
        kept = running = 0.0
        for block in range(start, max(stops, default=start)):
            holding, state = memory.walk.advance(memory.chain[block], flavours[block], state)
            running = max(running + holding.late, kept + max(holding.forward, holding.backward))
            kept += holding.kept
            if block + 1 in target:
                self._kept[number, start, block + 1] = kept
                own = flavours[start : block + 1]
                self._running[number, start, block + 1] = running + memory.communication_bytes(start, block + 1, own)
                self._hosted[number, start, block + 1] = memory.host_bytes(start, block + 1, 1, own)

    def peaks(self, in_flight: int, number: int, on_host: bool) -> FloatArray:
        """Return the peak bytes of every range with `in_flight` microbatches in flight.

        Args:
            in_flight: Microbatches in flight.
            number: Index into `flavours`.
            on_host: Whether as much of the optimizer state is in host memory as has room there, or as little as may be.
        """
        copied = in_flight * self._hosted[number]
        boundary = self._boundaries(copied, on_host=on_host)
        state = self._places.bytes(self._start, self._stop, boundary)
        passes = (in_flight - 1) * self._kept[number] + self._running[number]
        passes = passes + np.where(state > 0, self._stream, 0.0)
        peaks = self._resident - state + np.maximum(passes, self._update + state_buffers(state, self._places.what))
        return np.where(state + copied <= self._host_room, peaks, np.inf)

    def away(self, start: int, stop: int, in_flight: int, number: int, *, on_host: bool) -> tuple[bool, ...]:
        """Return whether the optimizer state of each block of a range is in host memory; arguments as in `peaks`."""
        boundary = self._boundaries(in_flight * self._hosted[number], on_host=on_host)
        return self._places.away(start, stop, int(boundary[start, stop]))

    def _boundaries(self, copied: FloatArray, *, on_host: bool) -> IntArray:
        """Return up to which block the optimizer state of every range is in host memory, beside what blocks save."""
        if not on_host:
            return np.broadcast_to(self._start, copied.shape)
        return self._places.most(self._start, np.maximum(self._start, self._stop), self._host_room - copied)


def _uniform_flavours(memory: ChainBytes, constraints: Constraints) -> tuple[tuple[Recompute, ...], ...]:
    """Return the flavours of all blocks if they are as equal as the constraints allow: one tuple per flavour."""
    keeps = constraints.keeps or (frozenset(BY_SECONDS),) * len(memory.chain)
    known = [flavour for flavour in BY_SECONDS if flavour in memory.flavours]
    found = []
    for target in known:
        at = known.index(target)
        nearest = sorted(known, key=lambda own: (abs(known.index(own) - at), -known.index(own)))
        each = [next((own for own in nearest if own in keep), None) for keep in keeps]
        if None not in each:
            found.append(tuple(own for own in each if own is not None))
    return tuple(dict.fromkeys(found))


def state_bytes(tables: Tables, resident: Sequence[Memory] = RESIDENT) -> float:
    """Return the least bytes of parameters, gradient sums and optimizer state over all instances of the tables' kinds.

    Applied to the tables of a single device, this is a lower bound on the total over all devices of a job, for any
    plan.

    Args:
        tables: The decisions.
        resident: Memory that stays on the device throughout the step.
    """
    return sum(
        float(item.amounts.min()) * tables.folded.kinds[item.kind].count
        for item in tables.bytes
        if item.memory in resident
    )
