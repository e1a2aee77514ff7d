"""Seconds and bytes of a step under any schedule, from those of its stages: by its order, not by a closed form.

`step_time.py` has a closed form for 1F1B and GPipe, which a solver can minimise. This module has the same for every
schedule there is: the longest path through its tasks, and what a group of devices holds while each of them runs.
Gradient traffic is queued on each link behind the last pass of its block, first in, first out, with what compute waits
for on the same link in between, as in the simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum

import numpy as np
from numpy.typing import NDArray

from autopar.cost.overlap import Overlap, launched
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
    """What the links of a stage carry.

    Each is an array of rows: a moment in a pass, and from then on seconds inside a node and seconds between nodes.

    Attributes:
        waited: What each pass (forward, backward, weight) waits for, hidden or not.
        gradient: Gradients on their way, after the last pass of every microbatch.
        reduce: Gradients that are reduced once, after the last microbatch.
    """

    waited: tuple[FloatArray, ...]
    gradient: FloatArray
    reduce: FloatArray


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage takes, in seconds.

    Attributes:
        forward: A forward of one microbatch.
        backward: A backward; of the inputs only if the schedule splits it. What is computed again is part of it.
        weight: A weight pass; 0 if the backward is not split.
        links: What its links carry.
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
        stages: All stages in order, a multiple of the groups.
        hops: Seconds of a message to the next stage, and to the previous one, where those are on other devices: from
            any stage, or (stages,) from each.

    >>> scheduled_step("zb-h1", 2, 4, [StageWork(1.0, 1.0, 1.0)] * 2)
    13.0
    """
    schedule, count = SCHEDULES[name], len(stages)
    passes = np.array([[stage.forward, stage.backward, stage.weight] for stage in stages], dtype=np.float64)
    there, back = hops
    timing = time_tasks(schedule, num_groups, num_microbatches, passes, np.full(count, there), np.full(count, back))
    last = list(Pass).index(schedule.passes[-1])
    loads = [None if stage.links is None else _loads(stage.links, last) for stage in stages]
    ends = timing.ends
    if any(own is not None for own in loads):
        ends = np.maximum(ends, drained(timing, np.array([_NO_LOADS if own is None else own for own in loads])))
    longest = 0.0
    for group, chunks in enumerate(chunks_of(schedule.groups(num_groups, count // num_groups))):
        end = float(ends[group]) + fsum(stages[stage].update for stage in chunks)
        longest = max(longest, end - (float(timing.begins[group]) if schedule.steps_overlap else 0.0))
    return longest


_NO_LOADS = np.zeros((len(Pass) + 1, NUM_LINKS, 2))


@lru_cache(maxsize=4096)  # most stages of a cut are those of another one
def _loads(links: LinkJobs, last: int) -> FloatArray:
    """Return what the links of a stage carry that could be late, and what comes before, as of `drained`.

    Args:
        links: What they carry.
        last: The last pass of a microbatch.
    """
    found = _NO_LOADS.copy()
    if len(links.gradient):
        for number in range(last + 1):
            found[number] = _load(links.waited[number], *([links.gradient] if number == last else []))
    if len(links.gradient) or len(links.reduce):
        found[-1] = _load(links.waited[last], links.gradient, links.reduce)
    return found


def _load(*jobs: FloatArray) -> FloatArray:
    """Return until when a pass has each link, if nobody else has, from its start, and for how long; (links, 2)."""
    rows = np.concatenate(jobs)
    if not len(rows):
        return np.zeros((NUM_LINKS, 2))
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    moments, seconds = rows[:, :1], rows[:, 1:]
    left = np.cumsum(seconds[::-1], axis=0)[::-1]
    return np.stack([np.where(seconds > 0, moments + left, 0.0).max(axis=0), left[0]], axis=1)


@dataclass(frozen=True, slots=True)
class StageHolding:
    """What a stage holds of one microbatch, in bytes.

    Attributes:
        kept: Between its forward and its backward.
        put_off: Between its backward and its weight pass.
        running: The fullest moment of a forward, a backward and a weight pass, the microbatch's own bytes included.
    """

    kept: float
    put_off: float
    running: tuple[float, float, float]


def held_bytes(name: str, num_groups: int, num_microbatches: int, stages: Sequence[StageHolding]) -> tuple[float, ...]:
    """Return the most bytes of activations on a device of each group.

    Args:
        name: A schedule, a key of `SCHEDULES`.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        stages: All stages in order, a multiple of the groups.

    >>> held_bytes("zb-h2", 2, 4, [StageHolding(1.0, 0.5, (1.0, 1.0, 0.5))] * 2)
    (3.0, 2.0)
    """
    schedule, num_chunks = SCHEDULES[name], len(stages) // num_groups
    found = []
    for group, chunks in enumerate(chunks_of(schedule.groups(num_groups, num_chunks))):
        own = [stages[stage] for stage in chunks]
        sizes = [size for stage in own for size in (stage.kept, stage.put_off, *stage.running)]
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
        overlap, halves = Overlap.of(tables.costs.stack), _Halves(tables, choice)
        for column, half in ((1, halves.backward), (2, halves.weight)):
            # what would cover the collectives of a backward is put off: they are waited for
            seconds = overlap.backward(half.kernels, np.zeros(len(found)), half.waits, half.gathers)
            found[:, column] = launched(seconds, half.host)
    return found


def stage_works(
    tables: Tables, choice: Sequence[int], split: Split, *, splits: bool, links: HostLinks | None = None
) -> tuple[StageWork, ...]:
    """Return what the stages of a split take.

    Args:
        tables: The decisions.
        choice: Strategy per node.
        split: Blocks to stages.
        splits: Whether the schedule splits the backward.
        links: Time of blocks on the host link, if any stage offloads.
    """
    each, kinds = pass_seconds(tables, choice, splits=splits), tables.block_seconds(choice)
    if links is not None:  # what is fetched runs beside the backward as it is, split or not
        whole = kinds.copy()
        whole[:, Slot.BACKWARD] = each[:, 1]
        hosts = [Slot.OFFLOAD, Slot.FETCH, Slot.STATE]
        kinds[:, hosts] = with_host(whole, links, Overlap.of(tables.costs.stack))[:, hosts]
    return works_of(each, kinds, tables.folded.chain, split, splits=splits)


def works_of(
    passes: FloatArray, totals: FloatArray, chain: Sequence[int], split: Split, *, splits: bool
) -> tuple[StageWork, ...]:
    """Return what the stages of a split take.

    Args:
        passes: (kinds, 3) seconds of one instance, `pass_seconds`.
        totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`.
        chain: Kind of every block.
        split: Blocks to stages.
        splits: Whether the schedule splits the backward.
    """
    passes, totals = passes[np.asarray(chain)], totals[np.asarray(chain)]
    again = {recompute: rerun_seconds(totals, recompute) for recompute in set(split.flavours)}
    reruns = np.array([again[recompute][block] for block, recompute in enumerate(split.flavours)])
    offloads = np.array([recompute is Recompute.OFFLOAD for recompute in split.flavours])
    passes[:, 0] += np.where(offloads, totals[:, Slot.OFFLOAD], 0.0)
    updates = totals[:, Slot.UPDATE] + np.where(split.hosted, totals[:, Slot.STATE], 0.0)
    waits = {recompute: recompute_links(totals, recompute) for recompute in set(split.flavours)}
    waited = np.array([waits[recompute][:, block] for block, recompute in enumerate(split.flavours)]).T
    works = []
    for start, stop in split.ranges:
        rerun = reruns[start:stop]
        forward, backward, weight = passes[start:stop].T
        whole = backward + rerun
        works.append(
            StageWork(
                forward=fsum(forward),
                backward=fsum(whole),
                weight=fsum(weight),
                links=link_jobs(totals[start:stop], waited[:, start:stop], whole, weight if splits else whole),
                update=fsum(updates[start:stop]),
            )
        )
    return tuple(works)


def link_jobs(blocks: FloatArray, again: FloatArray, backward: FloatArray, last: FloatArray) -> LinkJobs:
    """Return what the links of a stage carry.

    Args:
        blocks: (blocks, slots) seconds.
        again: (2, blocks) seconds that what runs again before a backward waits for links.
        backward: (blocks,) seconds of a backward, with what runs again.
        last: (blocks,) seconds of the pass that makes gradients, the last of a microbatch.
    """
    forward = forward_links(blocks).sum(axis=1, keepdims=True)
    made = np.cumsum(last[::-1])  # the last block's gradients are the first
    turns = np.cumsum(backward[::-1]) - backward[::-1]
    waited = (
        _rows(np.zeros(1), forward),
        _rows(turns, (backward_links(blocks) + again)[:, ::-1]),
        _rows(np.zeros(0), np.zeros((NUM_LINKS, 0))),
    )
    return LinkJobs(waited, _rows(made, gradient_links(blocks)[:, ::-1]), _rows(made, reduce_links(blocks)[:, ::-1]))


def _rows(moments: FloatArray, seconds: FloatArray) -> FloatArray:
    rows = np.column_stack([moments, *seconds])
    return np.asarray(rows[(rows[:, 1:] > 0).any(axis=1)])


class _Half:
    """A part of the backward of one instance of each kind: seconds by what they are for, and of the host."""

    def __init__(self, num_kinds: int) -> None:
        self.kernels, self.waits, self.gathers, self.host = np.zeros((4, num_kinds))


class _Halves:
    """The backward cut in two under a choice of strategies."""

    def __init__(self, tables: Tables, choice: Sequence[int]) -> None:
        self._tables, self._choice = tables, choice
        kinds, host = tables.folded.kinds, op_host_seconds(tables.folded, tables.costs)
        self._late = [weight_pass_ops(tables.folded, kind) for kind in kinds]
        self.backward, self.weight = _Half(len(kinds)), _Half(len(kinds))
        for index, (node, strategy) in enumerate(zip(tables.nodes, choice, strict=True)):
            if node.slot in (Slot.BACKWARD, Slot.BACKWARD_WEIGHT):
                half = self._half(index)
                half.kernels[node.kind] += node.share * node.seconds[strategy]
                half.host[node.kind] += host.get(node.name, 0.0) if node.decision is Decision.OP else 0.0
        for edge in tables.edges:
            if edge.slot in (Slot.BACKWARD_WAIT, Slot.BACKWARD_GATHER):
                half = self._half(edge.second)
                paid = half.waits if edge.slot is Slot.BACKWARD_WAIT else half.gathers
                paid[edge.kind] += edge.share * edge.table[choice[edge.first], choice[edge.second]]

    def _half(self, index: int) -> _Half:
        return self.weight if self._is_late(index) else self.backward

    def _is_late(self, index: int) -> bool:
        node = self._tables.nodes[index]
        if node.decision is not Decision.COPY:
            return node.decision is Decision.OP and node.name in self._late[node.kind]
        # a copy is made when it is first read by an op that does not take the value as it is
        (made,) = (edge for edge in self._tables.edges if edge.second == index)
        home = self._home(made)
        readers = [edge for edge in self._tables.edges if edge.first == index]
        return all(self._is_late(edge.second) or self._read(edge) == home for edge in readers)

    def _home(self, edge: Edge) -> int:
        """Return the placement number of a value as the node defines it that an edge comes from."""
        node, slot = self._tables.nodes[edge.first], 0
        if node.decision is Decision.OP:
            op = self._tables.folded.kinds[node.kind].ops[node.position]
            slot = op.outputs.index(edge.value)
        return int(node.outputs(slot)[self._choice[edge.first]])

    def _read(self, edge: Edge) -> int:
        """Return the placement number at which an op reads a value."""
        options = self._tables.nodes[edge.second].options
        assert options is not None, "copies are read by ops"
        numbers = options.inputs[edge.consumer]
        assert numbers is not None, "a price is for an input that is there"
        return int(numbers[self._choice[edge.second]])
