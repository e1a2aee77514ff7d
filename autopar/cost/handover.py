"""From one stage to another: who sends which piece of a value to whom, and how long that takes.

Stages may have meshes of different sizes, and hold a value at different placements. Each receiving device gets its
block in pieces: the boxes in which that block meets the blocks of the sending stage. Several devices may hold the same
sending block. The nearest of them sends (inside the node before between nodes), and receivers that are equally near to
the same ones take turns, so that the load is spread. Where a value lies alike on equal meshes, device i sends to
device i, as programs have it.

A value may leave as terms of a sum, and arrive as such: of k terms, the devices that hold term j of l add up those
whose number leaves the remainder j when divided by l. Devices that get nothing so have zeros.

All pieces of a hand-over leave together. On the tiers of the network they do not wait for each other, and a device
sends while it receives, so that the fullest device of the slowest tier sets the time:

    t = max over tiers of latency + max over devices and directions of S / bandwidth

S is what a device sends or receives there; what goes further than between two nodes leaves the node as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from autopar.cluster import Cluster
from autopar.cost.arrays import FloatArray, IntArray
from autopar.errors import ShardingError
from autopar.sharding import Mesh, Partial, Placements, Shard, format_placements, local_shape

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: a half-open range per dim."""


@dataclass(frozen=True, slots=True)
class Holding:
    """How a stage holds a value.

    Attributes:
        first: Number of its first device.
        mesh: Its devices.
        placements: Where the value lies on them; terms are those of a sum.
    """

    first: int
    mesh: Mesh
    placements: Placements

    @property
    def ends(self) -> tuple[int, int]:
        """Its first and its last device."""
        return self.first, self.first + self.mesh.size - 1


@dataclass(frozen=True, slots=True)
class Handed:
    """A value that is handed from one stage to another.

    Attributes:
        shape: Shape of the whole value.
        element_bytes: Bytes per element on the wire.
        source: How the sending stage holds it.
        target: How the receiving stage takes it.
    """

    shape: tuple[int, ...]
    element_bytes: float
    source: Holding
    target: Holding


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What devices send to each other; arrays are (n,), one entry per pair of devices and block.

    Attributes:
        senders: Numbers of devices.
        receivers: Numbers of devices.
        elements: Elements of all boxes of the entry.
    """

    senders: IntArray
    receivers: IntArray
    elements: IntArray
    _held: IntArray  # block of the source
    _source: "Division"
    _target: "Division"
    _first: int  # device of the target

    def boxes(self) -> list[tuple[Box, ...]]:
        """Return the boxes of the whole value that each entry sends."""
        source, target = self._source, self._target
        ranges: list[dict[tuple[int, int], list[tuple[int, int]]]] = [{} for _ in target.shape]
        for dim, known in enumerate(ranges):
            for here, there, start, stop in zip(*(a.tolist() for a in _segments(source, target, dim)), strict=True):
                known.setdefault((here, there), []).append((start, stop))
        has = np.stack(np.unravel_index(self._held, (source.num_terms, *source.parts)), axis=1)[:, 1:]
        gets = target.indices[self.receivers - self._first]
        return [
            tuple(product(*(known[own, other] for known, own, other in zip(ranges, here, there, strict=True))))
            for here, there in zip(has.tolist(), gets.tolist(), strict=True)
        ]


def intervals(size: int, chunks: int, parts: int, part: int) -> list[tuple[int, int]]:
    """Return the rows of a dim that one of its parts has, chunk by chunk; of uneven parts the first are the largest.

    >>> intervals(12, chunks=2, parts=3, part=1), intervals(10, chunks=1, parts=4, part=3)
    ([(2, 4), (8, 10)], [(9, 10)])
    """
    width = -(-size // (chunks * parts))
    starts = (chunk * (size // chunks) + part * width for chunk in range(chunks))
    return [(min(start, size), min(start + width, size)) for start in starts]


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Into how many parts a holding divides each dim of a value, in how many chunks first, and which part is whose.

    Attributes:
        shape: Shape of the whole value.
        parts: Per dim.
        chunks: Per dim.
        indices: (devices, dims) part of each device.
        num_terms: Terms whose sum is the value.
        terms: (devices,) term of each device.
    """

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    chunks: tuple[int, ...]
    indices: IntArray
    num_terms: int
    terms: IntArray

    @classmethod
    def of(cls, shape: tuple[int, ...], holding: Holding) -> "Division":
        """Return how a holding divides a value.

        Raises:
            ShardingError: If the value cannot be placed so, or lies there as terms of another reduction than a sum.
        """
        local_shape(shape, holding.placements, holding.mesh)
        mesh, num_terms = holding.mesh, 1
        parts, chunks = [1] * len(shape), [1] * len(shape)
        indices, terms = np.zeros((mesh.size, len(shape)), np.int64), np.zeros(mesh.size, np.int64)
        for axis, placement in zip(mesh.axes, holding.placements, strict=True):
            position = np.arange(mesh.size) // axis.stride % axis.size
            match placement:
                case Shard(dim, count):
                    indices[:, dim] = indices[:, dim] * axis.size + position
                    parts[dim] *= axis.size
                    chunks[dim] = count
                case Partial("sum"):
                    terms = terms * axis.size + position
                    num_terms *= axis.size
                case Partial(reduce):
                    raise ShardingError(
                        f"a value placed {format_placements(holding.placements)} cannot be handed to another mesh: its "
                        f"terms are put together by {reduce}",
                        hint="reduce it before it leaves its stage",
                    )
        return cls(shape, tuple(parts), tuple(chunks), indices, num_terms, terms)

    def terms_for(self, target: "Division", term: int) -> range:
        """Return the terms that devices of another division add up which hold the given one of its terms."""
        return range(term, self.num_terms, target.num_terms)

    def intervals(self, dim: int, part: int) -> list[tuple[int, int]]:
        """Return the rows of a dim that a part has."""
        return intervals(self.shape[dim], self.chunks[dim], self.parts[dim], part)

    @property
    def blocks(self) -> IntArray:
        """Which block each device has, (devices,): its term and the parts of its dims as digits of one number."""
        numbers = self.terms
        for dim, count in enumerate(self.parts):
            numbers = numbers * count + self.indices[:, dim]
        return numbers

    def place(self, device: int, box: Box) -> tuple[slice, ...]:
        """Return where a box of the whole value lies in the block of a device (its index in the mesh)."""
        slices = []
        for dim, (start, stop) in enumerate(box):
            offset = 0
            for first, last in self.intervals(dim, int(self.indices[device, dim])):
                if first <= start and stop <= last:
                    slices.append(slice(offset + start - first, offset + stop - first))
                    break
                offset += last - first
            else:
                raise ShardingError(f"device {device} of the mesh does not hold {box}")
        return tuple(slices)


@dataclass(frozen=True, slots=True, eq=False)
class _Meetings:
    """The rows of a dim that a part of the target and a part of the source both have; arrays are by target, source.

    Attributes:
        begins: (parts of the target + 1,) where the entries of each part begin.
        parts: Part of the source, by entry.
        rows: How many rows there are, by entry.
    """

    begins: IntArray
    parts: IntArray
    rows: IntArray

    @classmethod
    def of(cls, source: Division, target: Division, dim: int) -> "_Meetings":
        """Return the meetings of a dim."""
        here, there, starts, stops = _segments(source, target, dim)
        count = source.parts[dim]
        keys, number = np.unique(there * count + here, return_inverse=True)
        rows = np.bincount(number, stops - starts, len(keys)).astype(np.int64)
        return cls(np.searchsorted(keys // count, np.arange(target.parts[dim] + 1)), keys % count, rows)


def _segments(source: Division, target: Division, dim: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the longest ranges of a dim that are in one part of both: those parts, starts and stops, by start."""
    size = target.shape[dim]
    counts = [side.chunks[dim] * side.parts[dim] for side in (source, target)]
    widths = [max(1, -(-size // count)) for count in counts]
    starts = np.unique(np.concatenate([np.arange(0, size, width) for width in widths]))
    here, there = (starts // width % side.parts[dim] for width, side in zip(widths, (source, target), strict=True))
    return here, there, starts, np.append(starts[1:], size)


def _entries(source: Division, target: Division) -> tuple[IntArray, IntArray, IntArray]:
    """Return what the blocks of the target are made of: device, block of the source and elements, in their order."""
    device, turn = _repeated(-((target.terms - source.num_terms) // target.num_terms))  # as of `Division.terms_for`
    held = target.terms[device] + turn * target.num_terms
    elements = np.ones(len(device), np.int64)
    for dim in range(len(target.shape)):
        meetings = _Meetings.of(source, target, dim)
        begin = meetings.begins[target.indices[device, dim]]
        entry, turn = _repeated(meetings.begins[target.indices[device, dim] + 1] - begin)
        place = begin[entry] + turn
        device, held = device[entry], held[entry] * source.parts[dim] + meetings.parts[place]
        elements = elements[entry] * meetings.rows[place]
    return device, held, elements


def _repeated(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return so many numbers of each entry, and which of them each is."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)


def pieces(shape: tuple[int, ...], source: Holding, target: Holding, cluster: Cluster) -> Pieces:
    """Return what the devices of one stage send to those of another so that each has its block of a value.

    Args:
        shape: Shape of the whole value.
        source: How the sending stage holds it.
        target: How the receiving stage takes it.
        cluster: Where the devices are.

    Raises:
        ShardingError: If the value cannot be placed so, or lies there as terms of another reduction than a sum.
    """
    here, there = Division.of(shape, source), Division.of(shape, target)
    by_block = np.argsort(here.blocks, kind="stable").reshape(here.num_terms * prod(here.parts), -1)
    device, held, elements = _entries(here, there)
    receivers = device + target.first
    if source.mesh == target.mesh and source.placements == target.placements:
        senders = device + source.first  # its counterpart has the same block
    else:
        senders = _nearest(held, receivers, by_block + source.first, cluster)
    return Pieces(senders, receivers, elements, held, here, there, target.first)


def _nearest(held: IntArray, receivers: IntArray, holders: IntArray, cluster: Cluster) -> IntArray:
    """Return the device that serves each entry; those that are equally near take turns.

    Args:
        held: Block that is asked for, by entry.
        receivers: Who asks.
        holders: (blocks, holders) who has each block.
        cluster: Where they are.
    """
    # Who asks for the same block from the same node has the same way to its holders.
    nodes = receivers if cluster.groups else receivers // cluster.devices_per_node
    _, first, number = np.unique(held * (nodes.max() + 1) + nodes, return_index=True, return_inverse=True)
    candidates = holders[held[first]]
    tiers = cluster.tiers_between(receivers[first][:, None], candidates)
    least = tiers.min(axis=1)
    near = tiers == least[:, None]
    counts = near.sum(axis=1)
    begins = np.cumsum(counts) - counts
    nearest = candidates[near]
    keys = np.stack([held, least[number], near.argmax(axis=1)[number]])
    order = np.lexsort(keys[::-1])
    ordered = keys[:, order]
    fresh = np.concatenate([[True], (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)])
    starts = np.flatnonzero(fresh)
    turns = np.empty(len(held), np.int64)
    turns[order] = np.arange(len(held)) - starts[np.cumsum(fresh) - 1]
    return np.asarray(nearest[begins[number] + turns % counts[number]])


def loads(senders: IntArray, receivers: IntArray, nbytes: FloatArray, cluster: Cluster) -> dict[int, FloatArray]:
    """Return the bytes that each device sends and receives, (2, devices), by tier.

    Args:
        senders: Numbers of devices, (n,).
        receivers: Numbers of devices, (n,).
        nbytes: What is sent, (n,).
        cluster: Where they are.
    """
    tiers = cluster.tiers_between(senders, receivers)
    count = int(max(senders.max(), receivers.max())) + 1
    found: dict[int, FloatArray] = {}
    for tier in np.unique(tiers).tolist():
        through = tiers >= tier if tier else tiers == 0
        ways = [np.bincount(devices[through], nbytes[through], count) for devices in (senders, receivers)]
        found[tier] = np.asarray(ways, np.float64)
    return found


def hand_over_seconds(values: Sequence[Handed], cluster: Cluster, send_seconds: Callable[[float, int], float]) -> float:
    """Return the seconds of handing values from one stage to another, all at once.

    Args:
        values: What is handed.
        cluster: Where the stages are.
        send_seconds: Seconds of a transfer of so many bytes on a tier.

    Raises:
        ShardingError: If a value cannot be placed so, or lies there as terms of another reduction than a sum.
    """
    values = _near_the_start(values, cluster)
    if len(values) < 2:
        return max((seconds for value in values for seconds in _alone(value, cluster, send_seconds)), default=0.0)
    found = [(_kept(value.shape, value.source, value.target, cluster), value.element_bytes) for value in values]
    amounts = loads(
        np.concatenate([each.senders for each, _ in found]),
        np.concatenate([each.receivers for each, _ in found]),
        np.concatenate([each.elements * size for each, size in found]),
        cluster,
    )
    return slowest(amounts, send_seconds)


_kept = lru_cache(maxsize=32)(pieces)  # a boundary of many plans is the same; of large stages megabytes each


def _near_the_start(values: Sequence[Handed], cluster: Cluster) -> Sequence[Handed]:
    """Return values between stages that lie to each other and to nodes as the given ones, near the first device.

    Planners ask for equal stages all along the cluster.
    """
    if cluster.groups or cluster.numbered is not None or not values:
        return values
    period = cluster.domains[-1].devices if cluster.domains else cluster.devices_per_node
    first = min(side.first for value in values for side in (value.source, value.target)) // period * period
    return [
        replace(value, source=_shifted(value.source, first), target=_shifted(value.target, first)) for value in values
    ]


def _shifted(holding: Holding, by: int) -> Holding:
    return replace(holding, first=holding.first - by) if by else holding


def _alone(value: Handed, cluster: Cluster, send_seconds: Callable[[float, int], float]) -> list[float]:
    """Return the seconds of a value by tier."""
    most = _most_elements(value.shape, value.source, value.target, cluster)
    return [float(send_seconds(elements * value.element_bytes, tier)) for tier, elements in most]


@lru_cache(maxsize=4096)  # numbers only, where pieces take memory
def _most_elements(
    shape: tuple[int, ...], source: Holding, target: Holding, cluster: Cluster
) -> tuple[tuple[int, float], ...]:
    """Return the elements that the fullest device sends or receives, by tier."""
    sent = pieces(shape, source, target, cluster)
    amounts = loads(sent.senders, sent.receivers, sent.elements.astype(np.float64), cluster)
    return tuple((tier, float(each.max())) for tier, each in amounts.items())


def slowest(amounts: dict[int, FloatArray], send_seconds: Callable[[float, int], float]) -> float:
    """Return the seconds of the fullest device of the slowest tier, given the bytes by tier."""
    return max(float(send_seconds(float(each.max()), tier)) for tier, each in amounts.items())
