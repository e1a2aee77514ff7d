"""Step time and activation memory under any schedule, by the longest path through its tasks.

    start(v) >= start(u) + duration(u) + message(u, v)      task v depends on task u
    step      = max over groups of end of compute and link traffic + update

`step_time.py` has a closed form for 1F1B and GPipe, which a solver can minimise; this module evaluates every schedule.
Gradient traffic is queued on each link after the last pass of its block, first in, first out, together with the
collectives and gathers of later passes on that link, as in the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

import numpy as np
from numpy.typing import NDArray

from autopar.cost.overlap import Overlap, Rows, launched
from autopar.folding.graph_facts import op_host_seconds
from autopar.folding.weight_gradients import weight_pass_ops
from autopar.formulate.link_seconds import (
    NUM_LINKS,
    backward_links,
    forward_links,
    gradient_links,
    recompute_links,
    reduce_links,
)
from autopar.formulate.offload_costs import HostLinks, with_host
from autopar.formulate.step_time import Split, rerun_seconds
from autopar.formulate.tables import Decision, Edge, Slot, Tables
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, Pass, chunks_of
from autopar.schedule.holding import moments
from autopar.schedule.timing import drained, time_tasks

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LinkJobs:
    """Traffic on the links of a stage.

    Each array has rows (moment, seconds inside a node, seconds between nodes); the traffic of a row is ready at the
    moment, counted from the start of the pass.

    Attributes:
        waited: Per pass (forward, backward, weight), the collectives and gathers that compute waits for, hidden or not.
        gradient: Gradient traffic after the last pass of every microbatch.
        reduce: Gradient reductions after the last microbatch.
    """

    waited: tuple[FloatArray, ...]
    gradient: FloatArray
    reduce: FloatArray


@dataclass(frozen=True, slots=True)
class StageWork:
    """Seconds of the passes and the update of a stage.

    Attributes:
        forward: Forward of one microbatch.
        backward: Backward of one microbatch, recompute included; without weight gradients if the schedule splits it.
        weight: Weight pass; 0 if the backward is not split.
        links: Traffic on the links; None if there is none.
        update: The optimizer.
    """

    forward: float
    backward: float
    weight: float = 0.0
    links: LinkJobs | None = None
    update: float = 0.0


def scheduled_step(
    name: str,
    num_groups: int,
    num_microbatches: int,
    stages: Sequence[StageWork],
    hops: tuple[float | FloatArray, float | FloatArray] = (0.0, 0.0),
) -> float:
    """Return the seconds of a step.

    Args:
        name: A schedule, a key of `SCHEDULES`.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        stages: All stages in order; their number is a multiple of the groups.
        hops: Seconds of a message to the next stage, and of one to the previous stage, if those are on other devices:
            one number for all stages, or (stages,) by sending stage.

    >>> scheduled_step("zb-h1", 2, 4, [StageWork(1.0, 1.0, 1.0)] * 2)
    13.0
    """
    schedule, count = SCHEDULES[name], len(stages)
    passes = np.array([[stage.forward, stage.backward, stage.weight] for stage in stages], dtype=np.float64)
    there, back = hops
    timing = time_tasks(schedule, num_groups, num_microbatches, passes, np.full(count, there), np.full(count, back))
    last = list(Pass).index(schedule.passes[-1])
    loads = [None if stage.links is None else _link_loads(stage.links, last) for stage in stages]
    ends = timing.ends
    if any(own is not None for own in loads):
        ends = np.maximum(ends, drained(timing, np.array([_NO_LOADS if own is None else own for own in loads])))
    longest = 0.0
    for group, chunks in enumerate(chunks_of(schedule.groups(num_groups, count // num_groups))):
        end = float(ends[group]) + fsum(stages[stage].update for stage in chunks)
        longest = max(longest, end - (float(timing.begins[group]) if schedule.steps_overlap else 0.0))
    return longest


_NO_LOADS = np.zeros((len(Pass) + 1, NUM_LINKS, 2))


@lru_cache(maxsize=4096)  # cuts of a chain share most of their stages
def _link_loads(links: LinkJobs, last: int) -> FloatArray:
    """Return the traffic of a stage in the form of `drained`: (passes + 1, links, 2).

    Only links that carry gradients, and the passes before them, are filled in.

    Args:
        links: The traffic.
        last: Index of the last pass of a microbatch.
    """
    found = _NO_LOADS.copy()
    if len(links.gradient):
        for number in range(last + 1):
            found[number] = _queue_load(links.waited[number], *([links.gradient] if number == last else []))
    if len(links.gradient) or len(links.reduce):
        found[-1] = _queue_load(links.waited[last], links.gradient, links.reduce)
    return found


def _queue_load(*jobs: FloatArray) -> FloatArray:
    """Return when each link has carried the traffic of a pass, if it carries no other, and for how long; (links, 2)."""
    rows = np.concatenate(jobs)
    if not len(rows):
        return np.zeros((NUM_LINKS, 2))
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    moments, seconds = rows[:, :1], rows[:, 1:]
    left = np.cumsum(seconds[::-1], axis=0)[::-1]
    return np.stack([np.where(seconds > 0, moments + left, 0.0).max(axis=0), left[0]], axis=1)


@dataclass(frozen=True, slots=True)
class StageHolding:
    """Bytes that one microbatch takes in a stage.

    Attributes:
        kept: Between its forward and its backward.
        deferred: Between its backward and its weight pass.
        running: Fullest moment of a forward, a backward and a weight pass, with the microbatch's own kept bytes.
    """

    kept: float
    deferred: float
    running: tuple[float, float, float]


def held_bytes(name: str, num_groups: int, num_microbatches: int, stages: Sequence[StageHolding]) -> tuple[float, ...]:
    """Return the peak bytes of activations on a device of each group, over all moments of the schedule.

    Args:
        name: A schedule, a key of `SCHEDULES`.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        stages: All stages in order; their number is a multiple of the groups.

    >>> held_bytes("zb-h2", 2, 4, [StageHolding(1.0, 0.5, (1.0, 1.0, 0.5))] * 2)
    (3.0, 2.0)
    """
    schedule, num_chunks = SCHEDULES[name], len(stages) // num_groups
    found = []
    for group, chunks in enumerate(chunks_of(schedule.groups(num_groups, num_chunks))):
        own = [stages[stage] for stage in chunks]
        sizes = [size for stage in own for size in (stage.kept, stage.deferred, *stage.running)]
        held = moments(schedule, group, num_groups, num_microbatches, num_chunks) @ np.array(sizes)
        found.append(float(held.max()))
    return tuple(found)


def pass_seconds(tables: Tables, choice: Sequence[int], *, splits: bool) -> FloatArray:
    """Return the seconds of one instance of each kind, (kinds, 3): forward, backward, weight pass.

    Args:
        tables: The decisions.
        choice: Strategy per node.
        splits: Whether the backward is split; if not, the last column is zero.
    """
    totals = tables.block_seconds(choice)
    found = np.zeros((len(tables.folded.kinds), len(Pass)))
    found[:, 0], found[:, 1] = totals[:, Slot.FORWARD], totals[:, Slot.BACKWARD]
    if splits:
        overlap, parts = Overlap.of(tables.costs.stack), _SplitBackward(tables, choice)
        for column, costs in ((1, parts.backward), (2, parts.weight)):
            # weight gradients, which would hide the collectives of a backward, run in the weight pass
            nothing, rows = np.zeros(len(found)), Rows(costs.rows, costs.shared, np.zeros(len(found)))
            kernels = costs.kernels + costs.shared
            seconds = overlap.backward(kernels, nothing, costs.waits, costs.chunked, costs.gathers, rows=rows)
            found[:, column] = launched(seconds, costs.host)
    return found


def stage_works(
    tables: Tables, choice: Sequence[int], split: Split, *, splits: bool, links: HostLinks | None = None
) -> tuple[StageWork, ...]:
    """Return the work of the stages of a split.

    Args:
        tables: The decisions.
        choice: Strategy per node.
        split: The stages.
        splits: Whether the schedule splits the backward.
        links: Seconds of blocks on the host link, if any stage offloads.
    """
    each, kinds = pass_seconds(tables, choice, splits=splits), tables.block_seconds(choice)
    if links is not None:  # fetches overlap with the backward pass, whether it is split or not
        whole = kinds.copy()
        whole[:, Slot.BACKWARD] = each[:, 1]
        hosts = [Slot.OFFLOAD, Slot.FETCH, Slot.STATE, Slot.HOST_FORWARD, Slot.HOST_BACKWARD]
        kinds[:, hosts] = with_host(whole, links, Overlap.of(tables.costs.stack))[:, hosts]
    return works_of(each, kinds, tables.folded.chain, split, splits=splits)


def works_of(
    passes: FloatArray, totals: FloatArray, chain: Sequence[int], split: Split, *, splits: bool
) -> tuple[StageWork, ...]:
    """Return the work of the stages of a split, given seconds of blocks.

    Args:
        passes: (kinds, 3) seconds of one instance, as of `pass_seconds`.
        totals: (kinds, slots) seconds of one instance, as of `Tables.block_seconds`.
        chain: Kind of every block.
        split: The stages.
        splits: Whether the schedule splits the backward.
    """
    passes, totals = passes[np.asarray(chain)], totals[np.asarray(chain)]
    rerun_by_flavour = {recompute: rerun_seconds(totals, recompute) for recompute in set(split.flavours)}
    reruns = np.array([rerun_by_flavour[recompute][block] for block, recompute in enumerate(split.flavours)])
    offloads = np.array([recompute is Recompute.OFFLOAD for recompute in split.flavours])
    passes[:, 0] += np.where(offloads, totals[:, Slot.OFFLOAD], 0.0)
    passes[:, 0] += np.where(split.hosted, totals[:, Slot.HOST_FORWARD], 0.0)
    reruns = reruns + np.where(split.hosted, totals[:, Slot.HOST_BACKWARD], 0.0)
    updates = totals[:, Slot.UPDATE] + np.where(split.hosted, totals[:, Slot.STATE], 0.0)
    waits = {recompute: recompute_links(totals, recompute) for recompute in set(split.flavours)}
    waited = np.array([waits[recompute][:, block] for block, recompute in enumerate(split.flavours)]).T
    works = []
    copied = split.copied or (0.0,) * len(split.ranges)
    for (start, stop), added in zip(split.ranges, copied, strict=True):
        rerun = reruns[start:stop]
        forward, backward, weight = passes[start:stop].T
        whole = backward + rerun
        works.append(
            StageWork(
                forward=fsum(forward),
                backward=fsum(whole),
                weight=fsum(weight),
                links=link_jobs(totals[start:stop], waited[:, start:stop], whole, weight if splits else whole),
                update=fsum(updates[start:stop]) + added,
            )
        )
    return tuple(works)


def link_jobs(blocks: FloatArray, rerun: FloatArray, backward: FloatArray, last: FloatArray) -> LinkJobs:
    """Return the traffic on the links of a stage.

    Args:
        blocks: (blocks, slots) seconds.
        rerun: (2, blocks) seconds of collectives and gathers of the recompute before a backward.
        backward: (blocks,) seconds of a backward, recompute included.
        last: (blocks,) seconds of the pass that produces weight gradients, the last pass of a microbatch.
    """
    forward = forward_links(blocks).sum(axis=1, keepdims=True)
    made = np.cumsum(last[::-1])  # the backward starts with the last block
    turns = np.cumsum(backward[::-1]) - backward[::-1]
    waited = (
        _rows(np.zeros(1), forward),
        _rows(turns, (backward_links(blocks) + rerun)[:, ::-1]),
        _rows(np.zeros(0), np.zeros((NUM_LINKS, 0))),
    )
    return LinkJobs(waited, _rows(made, gradient_links(blocks)[:, ::-1]), _rows(made, reduce_links(blocks)[:, ::-1]))


def _rows(moments: FloatArray, seconds: FloatArray) -> FloatArray:
    """Return rows (moment, seconds per link) without rows of zero seconds."""
    rows = np.column_stack([moments, *seconds])
    return np.asarray(rows[(rows[:, 1:] > 0).any(axis=1)])


class _PassCosts:
    """Costs of one pass of a split backward, (kinds,) seconds: kernels, collectives, gathers, launches.

    `chunked` are the collectives that run in chunks beside products, `rows` the rows of experts that travel beside
    shared experts, and `shared` the kernels of these, which `kernels` does not count.
    """

    def __init__(self, num_kinds: int) -> None:
        self.kernels, self.waits, self.chunked, self.gathers, self.host = np.zeros((5, num_kinds))
        self.shared, self.rows = np.zeros((2, num_kinds))

    def of(self, slot: Slot) -> FloatArray | None:
        """Return the costs that an edge in a slot adds to; None if it is in no pass of the backward."""
        return {
            Slot.BACKWARD: self.kernels,
            Slot.BACKWARD_WAIT: self.waits,
            Slot.BACKWARD_CHUNKED: self.chunked,
            Slot.BACKWARD_GATHER: self.gathers,
            Slot.BACKWARD_ROWS: self.rows,
        }.get(slot)


_PLAIN = (Slot.BACKWARD, Slot.BACKWARD_WEIGHT)
_SHARED = (Slot.BACKWARD_SHARED, Slot.BACKWARD_SHARED_WEIGHT)
"""Slots of the kernels of a backward: those of shared experts beside which rows travel, and all others."""


class _SplitBackward:
    """Costs of both passes of a split backward under a choice of strategies."""

    def __init__(self, tables: Tables, choice: Sequence[int]) -> None:
        self._tables, self._choice = tables, choice
        kinds, host = tables.folded.kinds, op_host_seconds(tables.folded, tables.costs)
        self._deferred_ops = [weight_pass_ops(tables.folded, kind) for kind in kinds]
        self.backward, self.weight = _PassCosts(len(kinds)), _PassCosts(len(kinds))
        for index, (node, strategy) in enumerate(zip(tables.nodes, choice, strict=True)):
            if node.slot in (*_PLAIN, *_SHARED):
                costs = self._costs_of_node(index)
                kernels = costs.shared if node.slot in _SHARED else costs.kernels
                kernels[node.kind] += node.share * node.seconds[strategy]
                costs.host[node.kind] += host.get(node.name, 0.0) if node.decision is Decision.OP else 0.0
        for edge in tables.edges:
            if self.backward.of(edge.slot) is not None:
                paid = self._costs_of_node(edge.second).of(edge.slot)
                assert paid is not None, "both passes have the same slots"
                paid[edge.kind] += edge.share * edge.table[choice[edge.first], choice[edge.second]]

    def _costs_of_node(self, index: int) -> _PassCosts:
        """Return the costs of the pass in which a node runs."""
        return self.weight if self._is_deferred(index) else self.backward

    def _is_deferred(self, index: int) -> bool:
        """Whether a node runs in the weight pass."""
        node = self._tables.nodes[index]
        if node.decision is not Decision.COPY:
            return node.decision is Decision.OP and node.name in self._deferred_ops[node.kind]
        # a copy is made before its first reader that needs another placement than the one the value has
        made = next(edge for edge in self._tables.edges if edge.second == index)  # the part in chunks has its own edge
        home = self._defined_number(made)
        readers = [edge for edge in self._tables.edges if edge.first == index]
        return all(self._is_deferred(edge.second) or self._read_number(edge) == home for edge in readers)

    def _defined_number(self, edge: Edge) -> int:
        """Return the placement number at which the first node of an edge defines the value."""
        node, slot = self._tables.nodes[edge.first], 0
        if node.decision is Decision.OP:
            op = self._tables.folded.kinds[node.kind].ops[node.position]
            slot = op.outputs.index(edge.value)
        return int(node.outputs(slot)[self._choice[edge.first]])

    def _read_number(self, edge: Edge) -> int:
        """Return the placement number at which the second node of an edge reads the value."""
        options = self._tables.nodes[edge.second].options
        assert options is not None, "copies must be read by ops"
        numbers = options.inputs[edge.consumer]
        assert numbers is not None, "an edge must belong to an input that exists"
        return int(numbers[self._choice[edge.second]])
