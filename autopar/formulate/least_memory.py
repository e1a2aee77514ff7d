"""The least memory instead of the least time: bytes as costs of the placement problem, and the split that needs least.

The problem minimises the bytes of a mean stage (`mean_memory.py`), which no split has all stages below. Bytes of pairs
of decisions are costs of edges: values kept at two placements, and buffers of changes of placement. The problem does
not see which values live beside each other in a pass. So what is found is a plan that fits if its own peak does, and no
proof that nothing fits; `least_bytes` is one.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.cost.overlap import state_buffers
from autopar.formulate.block_memory import RESIDENT, ChainBytes, FloatArray
from autopar.formulate.constraints import FREE, Constraints
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
    """Return the placement problem whose costs are the bytes of a mean stage that recomputes so.

    Args:
        tables: The decisions.
        pipeline: Stages, microbatches, schedule.
        recompute: What all blocks keep.
        passing: Weight of what lives only while its neighbours run: not all of it is there at a time.
        second: Bytes that a second counts for: what takes long often ends in buffers, which belong to no decision.
        between: First node, second node and bytes, (S of first, S of second), of what passes and belongs to both.
        resident: What stays on the device through the step.
        name: For reports.
    """
    weighting = weights(tables, pipeline, recompute=recompute, hidden=0.0, bounding=False)
    pairs = [] if recompute is Recompute.FULL else _kept_twice(tables, pipeline)
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


def _kept_twice(tables: Tables, pipeline: Pipeline) -> list[tuple[int, int, FloatArray, float]]:
    """Return the pairs of decisions by which a value is kept at two placements, as of `problem`.

    The block that makes a value and the block that reads it both need it in their backward: they share it where it
    crosses as it was made, else each has its own, the reader as it crosses.
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
    """Return the split whose fullest stage needs the fewest bytes, with those bytes; None if no split is allowed.

    All blocks of a stage recompute alike, or what comes nearest of what is allowed; of equals what is fastest. The
    optimizer's state lies in host memory wherever it may and that frees bytes.
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
    ways = [(number, away) for away in (False, True) for number in range(len(ranges.flavours))]
    for stage in range(num_stages):
        each = np.stack([ranges.peaks(pipeline.in_flight(stage), *way) for way in ways])
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
        number, away = ways[int(chosen[stage][first, stop])]
        recompute.append(ranges.flavours[number][first:stop])
        offload.append(away)
        stop = first
    hosted = tuple(reversed(offload)) if any(offload) else ()
    return float(best[num_blocks]), Split(tuple(reversed(found)), tuple(reversed(recompute)), hosted)


class _Ranges:
    """What every range of blocks that may be a stage holds, by flavour; (blocks, blocks + 1) arrays, infinity if not.

    Attributes:
        flavours: What each block of the chain recomputes, from fastest to slowest.
    """

    def __init__(self, memory: ChainBytes, constraints: Constraints, longest: int, *, whole: bool) -> None:
        self.flavours = _uniform(memory, constraints)
        num_blocks = len(memory.chain)
        shape = (num_blocks, num_blocks + 1)
        allowed = constraints.ranges(num_blocks, longest)
        self._always, self._update, self._state = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        self._kept, self._running, self._hosted = (np.zeros((len(self.flavours), *shape)) for _ in range(3))
        self._room = memory.host_room
        self._lies = {away: np.zeros(shape, dtype=bool) for away in (False, True)}
        for start in range(1 if whole else num_blocks):
            last = min(num_blocks, start + longest)
            stops = [stop for stop in range(start + 1, last + 1) if allowed[start, stop - start - 1]]
            stops = [stop for stop in stops if not whole or stop == num_blocks]
            for stop in stops:
                self._always[start, stop] = memory.resident_bytes(start, stop)
                kinds = list(memory.chain[start:stop])
                self._update[start, stop] = memory.update[kinds].max()
                self._state[start, stop] = memory.state[kinds].sum()
                for away, lies in self._lies.items():
                    lies[start, stop] = constraints.allows_state(start, stop, on_host=away)
            for number, flavours in enumerate(self.flavours):
                self._walk(memory, start, stops, number, flavours)

    def _walk(
        self, memory: ChainBytes, start: int, stops: Sequence[int], number: int, flavours: Sequence[Recompute]
    ) -> None:
        """Fill in what ranges from a block on keep and need, as `ChainBytes.stage` counts it, in one walk."""
        state, wanted = memory.walk.enter(memory.chain[start]), set(stops)
        kept = running = 0.0
        for block in range(start, max(stops, default=start)):
            holding, state = memory.walk.advance(memory.chain[block], flavours[block], state)
            running = max(running + holding.late, kept + max(holding.forward, holding.backward))
            kept += holding.kept
            if block + 1 in wanted:
                self._kept[number, start, block + 1] = kept
                own = flavours[start : block + 1]
                self._running[number, start, block + 1] = running + memory.communication_bytes(start, block + 1, own)
                self._hosted[number, start, block + 1] = memory.host_bytes(start, block + 1, 1, own)

    def peaks(self, in_flight: int, number: int, away: bool) -> FloatArray:
        """Return the peak bytes of every range with so many microbatches in flight.

        Args:
            in_flight: Microbatches in flight.
            number: Flavour of the blocks.
            away: Whether the optimizer's state lies in host memory.
        """
        state = self._state if away else np.zeros(self._state.shape)
        passes = (in_flight - 1) * self._kept[number] + self._running[number]
        peaks = self._always - state + np.maximum(passes, self._update + state_buffers(state))
        fits = state + in_flight * self._hosted[number] <= self._room
        return np.where(fits & self._lies[away], peaks, np.inf)


def _uniform(memory: ChainBytes, constraints: Constraints) -> tuple[tuple[Recompute, ...], ...]:
    """Return what blocks recompute if all do the same, as far as they may: one tuple per flavour."""
    keeps = constraints.keeps or (frozenset(BY_SECONDS),) * len(memory.chain)
    known = [flavour for flavour in BY_SECONDS if flavour in memory.flavours]
    found = []
    for wanted in known:
        at = known.index(wanted)
        nearest = sorted(known, key=lambda own: (abs(known.index(own) - at), -known.index(own)))
        each = [next((own for own in nearest if own in keep), None) for keep in keeps]
        if None not in each:
            found.append(tuple(own for own in each if own is not None))
    return tuple(dict.fromkeys(found))


def state_bytes(tables: Tables, resident: Sequence[Memory] = RESIDENT) -> float:
    """Return the bytes of parameters, sums of gradients and optimizer state at their smallest, on all devices together.

    Of the tables of one device it is what all devices of a job hold at least, whatever the plan.

    Args:
        tables: The decisions.
        resident: What stays on the device through the step.
    """
    return sum(
        float(item.amounts.min()) * tables.folded.kinds[item.kind].count
        for item in tables.bytes
        if item.memory in resident
    )
