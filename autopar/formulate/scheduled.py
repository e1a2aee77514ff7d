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

from autopar.formulate.split import weight_ops
from autopar.formulate.tables import Decision, Edge, Slot, Tables
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
        traffic: Gradient traffic of one microbatch, beside compute.
        reduce: Gradient traffic once per step: per block, in the order of the last pass, the moment in that pass from
            which on it may run, and its seconds.
        update: The optimizer.
    """

    forward: float
    backward: float
    weight: float = 0.0
    traffic: float = 0.0
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
    # gradient traffic of a microbatch that outlasts its passes holds up the last of them
    last = len(schedule.passes) - 1
    passes[:, last] += np.maximum(0.0, np.array([stage.traffic for stage in stages]) - passes.sum(axis=1))
    there, back = hops
    timing = time_tasks(schedule, num_groups, num_microbatches, passes, np.full(count, there), np.full(count, back))
    longest = 0.0
    for group, chunks in enumerate(chunks_of(schedule.groups(num_groups, count // num_groups))):
        done = float(timing.ends[group])
        free = 0.0
        starts = [(float(timing.last_starts[stage]), stages[stage]) for stage in chunks]
        queue = ((start + ready, seconds) for start, stage in starts for ready, seconds in stage.reduce)
        for ready, seconds in sorted(queue):
            free = max(free, ready) + seconds
        end = max(done, free) + fsum(stages[stage].update for stage in chunks)
        longest = max(longest, end - (float(timing.begins[group]) if schedule.steps_overlap else 0.0))
    return longest


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
    """Return the seconds of one instance of each kind in line with compute, (kinds, 3): forward, backward, weights.

    Args:
        tables: The decisions.
        choice: Strategy per node.
        splits: Whether the backward is split; if not, the last column is zero.
    """
    folded = tables.folded
    late = [weight_ops(folded, kind) if splits else frozenset() for kind in folded.kinds]

    def home(index: int, value: str) -> int:
        """Return the placement number of a value as its node defines it."""
        node = tables.nodes[index]
        slot = 0
        if node.decision is Decision.OP:
            slot = folded.kinds[node.kind].ops[node.position].outputs.index(value)
        return int(node.outputs(slot)[choice[index]])

    def is_late(index: int) -> bool:
        node = tables.nodes[index]
        if node.decision is not Decision.COPY:
            return node.decision is Decision.OP and node.name in late[node.kind]
        # a copy is made when it is first read by an op that does not take the value as it is
        (made,) = (edge for edge in tables.edges if edge.second == index)
        first = home(made.first, made.value)
        return all(is_late(edge.second) or reads(edge) == first for edge in tables.edges if edge.first == index)

    def reads(edge: Edge) -> int:
        """Return the placement number at which an op reads a value."""
        options = tables.nodes[edge.second].options
        assert options is not None, "copies are read by ops"
        numbers = options.inputs[edge.consumer]
        assert numbers is not None, "a price is for an input that is there"
        return int(numbers[choice[edge.second]])

    column = {Slot.FORWARD: Pass.FORWARD, Slot.BACKWARD: Pass.BACKWARD}
    found = np.zeros((len(folded.kinds), len(Pass)))
    order = list(Pass)
    for index, (node, strategy) in enumerate(zip(tables.nodes, choice, strict=True)):
        if node.slot in column:
            kind = Pass.WEIGHT if node.slot is Slot.BACKWARD and is_late(index) else column[node.slot]
            found[node.kind, order.index(kind)] += node.share * node.seconds[strategy]
    for edge in tables.edges:
        if edge.share and edge.slot in column:
            kind = Pass.WEIGHT if edge.slot is Slot.BACKWARD and is_late(edge.second) else column[edge.slot]
            seconds = edge.table[choice[edge.first], choice[edge.second]]
            found[edge.kind, order.index(kind)] += edge.share * seconds
    return found
