"""Finds repeated regions in a sequence of ops: stretches of equal instances that form a chain.

An op is described by its *token* (all about it but where its inputs come from) and by *sources*, one number per
input. Two ops p apart are alike if their tokens are equal and each pair of sources is either p apart too, or lies
before the region both times (masks, skip connections). The first instance of a region may take from before the region
what the others take from their predecessor.

A region is accepted if every instance has a trained tensor of its own and reads from its predecessor, and if no value
merely passes by: branches within a layer are not regions.

Instances of several layers, most of which are equal (five layers with a sliding window and one without), are divided
into these.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NO_SOURCE = -(1 << 60)
"""Source of an input that has none."""

MAX_OUTPUTS = 1 << 10
"""A source is `position * MAX_OUTPUTS + output` if an op of the sequence defines it, and negative otherwise."""

LOCAL = 64
"""Values that live over at most so many ops are part of a layer; longer ones may be skip connections."""

_ROUNDS = 4  # rounds of mixing the tokens of producers into the token, to tell alike ops of a layer apart
_LAGS = 8  # equal tokens are paired with so many of their next ones: an op may occur several times in a layer
_MAX_PERIODS = 48  # periods tried per segment
_MAX_STARTS = 64  # starts tried per stretch of equal tokens
_MOST = 0.5  # an instance is divided if regions inside cover this fraction of it
_NEARLY = 0.9  # a shorter period is preferred if it covers this fraction of the best


@dataclass(frozen=True, slots=True)
class Sequence:
    """Ops as arrays.

    Attributes:
        token: Per op.
        first_slot: Index of each op's first source, and the number of sources at the end.
        source: Per input of each op (trained tensors: the op's last use of the same tensor, see `NO_SOURCE`).
        trained: Per op: whether it reads a trained tensor.
        value_position: Position of the op that defines each value which another op reads.
        value_last: Position of the last op that reads it.
        value_bytes: Its size.
    """

    token: Ints
    first_slot: Ints
    source: Ints
    trained: NDArray[np.bool_]
    value_position: Ints
    value_last: Ints
    value_bytes: Ints

    @property
    def size(self) -> int:
        """Number of ops."""
        return len(self.token)

    def crossing(self, weights: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Ints:
        """Return for each position t the summed weight of the chosen values defined before t and read at t or after."""
        change = np.zeros(self.size + 2, np.int64)
        np.add.at(change, self.value_position[chosen] + 1, weights[chosen])
        np.add.at(change, self.value_last[chosen] + 1, -weights[chosen])
        return np.cumsum(change)[: self.size + 1]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """`count` equal instances of `period` ops from position `start` on.

    Attributes:
        start: Position of the first op.
        period: Ops of an instance.
        count: Instances.
        parts: Offsets within an instance at which its parts begin, the first one aside.
    """

    start: int
    period: int
    count: int
    parts: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """Position after the last op."""
        return self.start + self.period * self.count

    @property
    def size(self) -> int:
        """Number of ops."""
        return self.period * self.count

    @property
    def starts(self) -> list[int]:
        """Positions at which parts of instances begin."""
        instances = range(self.start, self.stop, self.period or 1)
        return [instance + offset for instance in instances for offset in (0, *self.parts)]


def find_regions(sequence: Sequence) -> list[Region]:
    """Return disjoint regions in order: the largest first found, then what repeats in the rest."""
    return _regions(sequence, _mix(sequence), 0, sequence.size)


def _regions(sequence: Sequence, mixed: list[NDArray[np.uint64]], first: int, end: int) -> list[Region]:
    """Return disjoint regions between `first` and `end` in order."""
    regions: list[Region] = []
    segments = [(first, end)]
    while segments:
        low, high = segments.pop()
        region = _largest(sequence, mixed, low, high)
        if region is not None:
            regions.append(replace(region, parts=_parts(sequence, mixed, region)))
            segments += [(low, region.start), (region.stop, high)]
    return sorted(regions)


def _parts(sequence: Sequence, mixed: list[NDArray[np.uint64]], region: Region) -> tuple[int, ...]:
    """Return the offsets at which an instance of a region is divided: into what repeats inside, and what is left."""
    low, high = region.start, region.start + region.period
    inner = _regions(sequence, mixed, low, high)
    if sum(part.size for part in inner) < _MOST * region.period:
        return ()
    starts: list[int] = []
    after = low
    for part in (*inner, Region(high, 0, 0)):
        if sequence.trained[after : part.start].any():
            starts.append(after)
        if part.period:
            starts += part.starts
        after = part.stop
    return tuple(start - low for start in starts[1:])


def _mix(sequence: Sequence) -> list[NDArray[np.uint64]]:
    """Return tokens into which those of producers near by are mixed, after a growing number of rounds."""
    sizes = np.diff(sequence.first_slot)
    owner = np.repeat(np.arange(sequence.size), sizes)
    slot = np.arange(len(owner)) - np.repeat(sequence.first_slot[:-1], sizes)
    inside = sequence.source >= 0
    producer = sequence.source[inside] // MAX_OUTPUTS
    owner, weight = owner[inside], (2 * slot[inside] + 3).astype(np.uint64)
    odd = np.uint64(0x9E3779B97F4A7C15)
    tokens = [sequence.token.astype(np.uint64) * odd]
    for _ in range(_ROUNDS):
        last = tokens[-1]
        heard = np.zeros_like(last)
        np.add.at(heard, owner, (last[producer] ^ (last[producer] >> np.uint64(29))) * weight)
        tokens.append((last ^ (heard >> np.uint64(31)) ^ heard) * odd)
    return tokens


def _periods(mixed: list[NDArray[np.uint64]], low: int, high: int) -> list[int]:
    """Return the commonest distances of equal tokens between `low` and `high`."""
    votes: dict[int, int] = {}
    for tokens in mixed:
        order = np.argsort(tokens[low:high], kind="stable")
        ranked = tokens[low:high][order]
        pairs = [order[lag:] - order[:-lag] for lag in range(1, _LAGS + 1)]
        same = [ranked[lag:] == ranked[:-lag] for lag in range(1, _LAGS + 1)]
        distances, counts = np.unique(np.concatenate(pairs)[np.concatenate(same)], return_counts=True)
        for distance, count in zip(distances.tolist(), counts.tolist(), strict=True):
            # A region of two instances has as many pairs as its period has ops; not all of them are seen.
            if 2 * distance <= high - low and 4 * count >= distance:
                votes[distance] = max(count, votes.get(distance, 0))
    return sorted(votes, key=lambda distance: -votes[distance])[:_MAX_PERIODS]


def _largest(sequence: Sequence, mixed: list[NDArray[np.uint64]], low: int, high: int) -> Region | None:
    """Return the region between `low` and `high` that covers most ops, with the shortest period that nearly does."""
    stretches: list[tuple[int, int, int]] = []
    for period in _periods(mixed, low, high):
        equal = sequence.token[low : high - period] == sequence.token[low + period : high]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False]))))
        starts, stops = low + edges[::2], low + edges[1::2]
        long = stops - starts >= period
        stretches += [
            (period, start, stop) for start, stop in zip(starts[long].tolist(), stops[long].tolist(), strict=True)
        ]
    stretches.sort(key=lambda item: item[1] - item[2] - item[0])
    found: list[Region] = []
    best = 0
    for period, start, stop in stretches:
        if stop - start + period < _NEARLY * best:
            break
        region = _in_stretch(sequence, period, start, stop)
        if region is not None:
            found.append(region)
            best = max(best, region.size)
    found = [region for region in found if region.size >= _NEARLY * best]
    return min(found, key=lambda region: (region.period, -region.count), default=None)


def _in_stretch(sequence: Sequence, period: int, start: int, stop: int) -> Region | None:
    """Return the best region in a stretch: op i and op i + period have equal tokens for start <= i < stop."""
    slots = sequence.first_slot
    one = sequence.source[slots[start] : slots[stop]]
    other = sequence.source[slots[start + period] : slots[stop + period]]
    alike = (other - one == period * MAX_OUTPUTS) & (one >= 0) | (np.maximum(one, other) < start * MAX_OUTPUTS)
    owner = np.repeat(np.arange(stop - start), np.diff(slots[start : stop + 1]))
    unlike = np.zeros(stop - start, bool)
    unlike[owner[~alike]] = True
    # next_unlike[i]: first position >= start + i whose pair is not alike.
    positions = np.where(unlike, np.arange(start, stop), stop)
    next_unlike = np.append(np.minimum.accumulate(positions[::-1])[::-1], stop)

    starts = np.arange(start, stop - period + 1)
    counts = 2 + (next_unlike[starts + period - start] - starts - period) // period
    inner = sequence.value_position >= start
    values = sequence.crossing(np.ones_like(sequence.value_bytes), inner)[starts + period]
    size = sequence.crossing(sequence.value_bytes, inner)[starts + period]
    # An instance had better begin with weights than with the activation function of the layer before.
    ranking = np.lexsort((-starts, ~sequence.trained[starts], size, values, -counts))
    for index in ranking[:_MAX_STARTS].tolist():
        region = Region(int(starts[index]), period, int(counts[index]))
        if _accepted(sequence, region):
            return region
    return None


def _accepted(sequence: Sequence, region: Region) -> bool:
    start, period = region.start, region.period
    if not sequence.trained[start : start + period].any():
        return False
    slots = sequence.first_slot
    one = sequence.source[slots[start] : slots[start + period]]
    other = sequence.source[slots[start + period] : slots[start + 2 * period]]
    begin, middle = start * MAX_OUTPUTS, (start + period) * MAX_OUTPUTS
    within, chained, outside = other >= middle, (other >= begin) & (other < middle), other < begin
    if not chained.any() or not (other[within] - one[within] == period * MAX_OUTPUTS).all():
        return False
    if not (one[chained | outside] < begin).all():
        return False
    arrivals = set(zip(other[chained].tolist(), one[chained].tolist(), strict=True))
    if len(arrivals) != len({after for after, _ in arrivals}):
        return False
    return not _passed_by(sequence, region)


def _passed_by(sequence: Sequence, region: Region) -> bool:
    """Whether a value of the layer around the region is defined before it and read after it."""
    position, last = sequence.value_position, sequence.value_last
    passing = (position < region.start) & (last >= region.stop)
    return bool((passing & (last - position <= max(LOCAL, 4 * region.size))).any())


def cut_positions(sequence: Sequence, low: int, high: int) -> Iterator[int]:
    """Yield the positions strictly between `low` and `high` at which at most one value of a layer is alive."""
    local = sequence.value_last - sequence.value_position <= LOCAL
    alive = sequence.crossing(np.ones_like(sequence.value_bytes), local)
    yield from (np.flatnonzero(alive[low + 1 : high] <= 1) + low + 1).tolist()
