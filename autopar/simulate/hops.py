"""From one stage to the next: what travels between which devices, and how long that takes.

A value that lies alike on equal meshes goes from device i to device i; the widest tier on which any of them meet sets
the time. Other values cross in pieces (`autopar.program.crossings`) and take what `autopar.cost.handover` says, as the
planner is told.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import fsum

import numpy as np
from numpy.typing import NDArray

from autopar.cost.arrays import FloatArray, IntArray
from autopar.cost.handover import loads, slowest
from autopar.program.records import Crossing, Operand, Program, SegmentPhase, StageProgram, Table, lies_alike
from autopar.simulate.layout import Costs, Resource


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way from a stage to its neighbour; arrays are (n,), one entry per pair of devices.

    Attributes:
        senders: Numbers of devices.
        receivers: Numbers of devices.
        each: Seconds until the receiver has all that the sender has for it.
        tiers: Where they meet.
        seconds: Until every device has all.
    """

    senders: IntArray
    receivers: IntArray
    each: FloatArray
    tiers: IntArray
    seconds: float

    @property
    def resource(self) -> Resource:
        """The link that it takes; the NIC if any part of it leaves a node."""
        return Resource.INTER if self.tiers.any() else Resource.INTRA


@dataclass(frozen=True, slots=True)
class Hop:
    """What lies between a stage and the next."""

    forward: Way
    backward: Way


def hops(program: Program, costs: Costs) -> list[Hop]:
    """Return what lies between each stage of a program and the next."""
    table = program.table()
    return [
        Hop(
            _way(here, there, SegmentPhase.FORWARD, program, table, costs),
            _way(there, here, SegmentPhase.BACKWARD, program, table, costs),
        )
        for here, there in pairwise(program.stages)
    ]


def _way(
    sender: StageProgram, receiver: StageProgram, phase: SegmentPhase, program: Program, table: Table, costs: Costs
) -> Way:
    alike, crossings = _values(sender, receiver, phase, program, table)
    cluster = costs.cluster
    ends = (*sender.devices, *receiver.devices)
    devices = range(min(ends), max(ends))
    view = costs.on(devices[:1]) if cluster.one_kind(devices) else costs
    if not crossings and sender.num_devices == receiver.num_devices:
        senders, receivers = np.arange(*sender.devices), np.arange(*receiver.devices)
        tiers = cluster.tiers_between(senders, receivers)
        known = {tier: float(view.send_seconds(alike, tier)) for tier in set(tiers.tolist())}
        return Way(senders, receivers, np.array([known[tier] for tier in tiers.tolist()]), tiers, max(known.values()))
    pieces = [piece for crossing in crossings for piece in crossing.pieces]
    sizes = [crossing.element_bytes for crossing in crossings for _ in crossing.pieces]
    amounts = [piece.elements * size for piece, size in zip(pieces, sizes, strict=True)]
    pairs = [(piece.sender, piece.receiver) for piece in pieces]
    if alike:
        amounts += [alike] * sender.num_devices
        pairs += zip(range(*sender.devices), range(*receiver.devices), strict=True)
    if not pairs:
        nothing = np.zeros(0, np.int64)
        return Way(nothing, nothing, np.zeros(0), nothing, 0.0)
    numbers, where = np.unique(np.array(pairs, np.int64), axis=0, return_inverse=True)
    senders, receivers = numbers.T
    nbytes: FloatArray = np.zeros(len(numbers))
    np.add.at(nbytes, where.reshape(-1), amounts)
    each, seconds = _seconds(senders, receivers, nbytes, view, costs)
    return Way(senders, receivers, each, cluster.tiers_between(senders, receivers), seconds)


def _seconds(
    senders: IntArray, receivers: IntArray, nbytes: FloatArray, view: Costs, costs: Costs
) -> tuple[FloatArray, float]:
    """Return the seconds until each receiver has all of its sender's, and until all have all."""
    amounts = loads(senders, receivers, nbytes, costs.cluster)
    count = next(iter(amounts.values())).shape[1]
    busy: NDArray[np.float64] = np.zeros((2, count))
    for tier, each in amounts.items():
        known = {size: float(view.send_seconds(size, tier)) for size in np.unique(each).tolist() if size > 0}
        taken = np.array([[known.get(size, 0.0) for size in way] for way in each.tolist()])
        busy = np.maximum(busy, taken)
    return np.maximum(busy[0, senders], busy[1, receivers]), slowest(amounts, view.send_seconds)


def _values(
    sender: StageProgram, receiver: StageProgram, phase: SegmentPhase, program: Program, table: Table
) -> tuple[float, list[Crossing]]:
    """Return what neighbours hand to each other: bytes per device of what lies alike, and what crosses."""
    ahead = phase is SegmentPhase.FORWARD
    here = table.get((sender.blocks[-1 if ahead else 0], phase))
    there = table.get((receiver.blocks[0 if ahead else -1], phase))
    if here is None or there is None:
        return 0.0, []
    pairs = list(zip(here.outputs, there.inputs, strict=True))
    alike = fsum(out.bytes for out, into in pairs if lies_alike(out, sender.mesh, into, receiver.mesh))
    crossing = partial(_crossing, program, sender.index, receiver.index, phase)
    return alike, [crossing(out, into) for out, into in pairs if not lies_alike(out, sender.mesh, into, receiver.mesh)]


def _crossing(
    program: Program, sender: int, receiver: int, phase: SegmentPhase, source: Operand, target: Operand
) -> Crossing:
    wanted = (sender, receiver, phase, source.placements, target.placements, source.shape)
    for crossing in program.crossings:
        found = (crossing.sender, crossing.receiver, crossing.phase)
        if (*found, crossing.source.placements, crossing.target.placements, crossing.source.shape) == wanted:
            return crossing
    raise AssertionError("lawful programs say how every value crosses")
