"""Seconds and bytes of a step under any schedule, from those of its stages: by its order, not by a closed form.

`step.py` has a closed form for 1F1B and GPipe, which a solver can minimise. This module has the same for every schedule
there is: the longest path through its tasks, and what a group of devices holds while each of them runs. Gradient
traffic that is reduced once per step is queued behind the last pass of each block, first in, first out, as in the
simulator, but for what it waits for other traffic on the same link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray

from autopar.cost.overlap import Overlap, launched
from autopar.formulate.offload import HostLinks, with_host
from autopar.formulate.split import weight_ops
from autopar.formulate.step import Split, rerun_seconds
from autopar.formulate.tables import Decision, Edge, Slot, Tables
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, Pass, chunks_of
from autopar.schedule.holding import moments
from autopar.schedule.timing import time_tasks

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage takes, in seconds.

    Attributes:
        forward: A forward of one microbatch.
        backward: A backward; of the inputs only if the schedule splits it. What is computed again is part of it.
        weight: A weight pass; 0 if the backward is not split.
        traffic: Gradient traffic of one microbatch, beside compute, gathers on the same link included: per block, in
            the order of the last pass, the moment in that pass from which on it may run, and its seconds.
        reduce: The same of gradient traffic once per step, after the last microbatch.
        update: The optimizer.
    """

    forward: float
    backward: float
    weight: float = 0.0
    traffic: tuple[tuple[float, float], ...] = ()
    reduce: tuple[tuple[float, float], ...] = ()
    update: float = 0.0


def scheduled_step(
    name: str,
    num_groups: int,
    num_microbatches: int,
    stages: Sequence[StageWork],
    hops: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return the seconds of a step.

    Args:
        name: A schedule, a key of `SCHEDULES`.
        num_groups: Groups of devices.
        num_microbatches: Microbatches per step.
        stages: All stages in order, a multiple of the groups.
        hops: Seconds of a message to the next stage, and to the previous one, where those are on other devices.

    >>> scheduled_step("zb-h1", 2, 4, [StageWork(1.0, 1.0, 1.0)] * 2)
    13.0
    """
    schedule, count = SCHEDULES[name], len(stages)
    passes = np.array([[stage.forward, stage.backward, stage.weight] for stage in stages], dtype=np.float64)
    there, back = hops
    timing = time_tasks(schedule, num_groups, num_microbatches, passes, np.full(count, there), np.full(count, back))
    longest = 0.0
    for group, chunks in enumerate(chunks_of(schedule.groups(num_groups, count // num_groups))):
        done = float(timing.ends[group])
        jobs = [(timing.closing[stage], stages[stage].traffic) for stage in chunks]
        jobs += [(timing.last_starts[stage, None], stages[stage].reduce) for stage in chunks]
        end = max(done, _queued(jobs)) + fsum(stages[stage].update for stage in chunks)
        longest = max(longest, end - (float(timing.begins[group]) if schedule.steps_overlap else 0.0))
    return longest


def _queued(jobs: Sequence[tuple[FloatArray, Sequence[tuple[float, float]]]]) -> float:
    """Return when all traffic of a group is over, first in, first out.

    Args:
        jobs: Starts of passes, and moments in such a pass from which on traffic may run with its seconds.
    """
    parts = [(starts, np.array(traffic)) for starts, traffic in jobs if traffic]
    if not parts:
        return 0.0
    ready = np.concatenate([(starts[:, None] + traffic[:, 0]).ravel() for starts, traffic in parts])
    seconds = np.concatenate([np.tile(traffic[:, 1], len(starts)) for starts, traffic in parts])
    order = np.argsort(ready, kind="stable")
    left = np.cumsum(seconds[order][::-1])[::-1]
    return float((ready[order] + left).max())


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
            found[:, column] = launched(seconds, half.launches * tables.costs.stack["host_launch"])
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
    again = {recompute: rerun_seconds(totals, recompute) for recompute in Recompute}
    reruns = np.array([again[recompute][block] for block, recompute in enumerate(split.flavours)])
    offloads = np.array([recompute is Recompute.OFFLOAD for recompute in split.flavours])
    passes[:, 0] += np.where(offloads, totals[:, Slot.OFFLOAD], 0.0)
    updates = totals[:, Slot.UPDATE] + np.where(split.hosted, totals[:, Slot.STATE], 0.0)
    gathers = totals[:, Slot.FORWARD_GATHER] + totals[:, Slot.BACKWARD_GATHER]
    traffic = np.where(totals[:, Slot.GRADIENT] > 0, totals[:, Slot.GRADIENT] + gathers, 0.0)
    works = []
    for start, stop in split.ranges:
        rerun = reruns[start:stop]
        forward, backward, weight = passes[start:stop].T
        last = weight if splits else backward + rerun
        done = np.cumsum(last[::-1])  # blocks of the last pass, the last block first
        works.append(
            StageWork(
                forward=fsum(forward),
                backward=fsum(backward + rerun),
                weight=fsum(weight),
                traffic=beside(done, traffic[start:stop][::-1]),
                reduce=beside(done, totals[start:stop, Slot.REDUCE][::-1]),
                update=fsum(updates[start:stop]),
            )
        )
    return tuple(works)


def beside(moments: FloatArray, seconds: FloatArray) -> tuple[tuple[float, float], ...]:
    """Return traffic of blocks as `StageWork` has it: from these moments of a pass on, for so many seconds."""
    return tuple((at, own) for at, own in zip(moments.tolist(), seconds.tolist(), strict=True) if own)


class _Half:
    """A part of the backward of one instance of each kind: seconds by what they are for, and kernels launched."""

    def __init__(self, num_kinds: int) -> None:
        self.kernels, self.waits, self.gathers, self.launches = np.zeros((4, num_kinds))


class _Halves:
    """The backward cut in two under a choice of strategies."""

    def __init__(self, tables: Tables, choice: Sequence[int]) -> None:
        self._tables, self._choice = tables, choice
        kinds = tables.folded.kinds
        self._late = [weight_ops(tables.folded, kind) for kind in kinds]
        self.backward, self.weight = _Half(len(kinds)), _Half(len(kinds))
        for index, (node, strategy) in enumerate(zip(tables.nodes, choice, strict=True)):
            if node.slot in (Slot.BACKWARD, Slot.BACKWARD_WEIGHT):
                half = self._half(index)
                half.kernels[node.kind] += node.share * node.seconds[strategy]
                half.launches[node.kind] += node.decision is Decision.OP and node.seconds.max() > 0
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
