"""Which layers of a model stand for all of them: stretches of equal blocks, made short.

An excerpt keeps the first and the last few instances of every stretch of blocks that repeats. What the instances after
the gap read of those in the gap, they read of the instances before it instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.blocks import instance_ops
from autopar.ir.graph import Graph

SIDE = 2
"""Periods of a stretch that are kept on either side of the gap: neighbours of what is left out, and theirs."""

_MAX_PERIOD = 8  # blocks after which a stretch repeats, at most
_WORTHWHILE = 0.5  # share of the blocks that have to be left out


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What is kept of a chain of blocks.

    Attributes:
        kept: Blocks, in order.
        joins: By value that is left out, the value that is read in its place.
        dropped: Results of the graph that are left out.
    """

    kept: tuple[int, ...]
    joins: Mapping[str, str]
    dropped: frozenset[str]


def excerpt(forward: Graph, chain: Sequence[int]) -> Excerpt | None:
    """Return an excerpt of a graph; None if little would be left out, or if layers read what lies further away.

    Args:
        forward: A forward graph in which blocks have been found.
        chain: Kind of each block.
    """
    stands_for: dict[int, int | None] = {}  # by block that is left out, the one before the gap; None if there is none
    for start, period, count in _stretches(chain):
        gap = (count - 2 * SIDE) * period
        for block in range(start + SIDE * period, start + SIDE * period + gap):
            stands_for[block] = block - gap if block - gap >= start else None
    if len(stands_for) < _WORTHWHILE * len(chain):
        return None
    members = instance_ops(forward)
    places = {
        name: (block, position, slot)
        for block in stands_for
        for position, op in enumerate(members[block])
        for slot, name in enumerate(op.outputs)
        if name
    }
    joins: dict[str, str] = {}
    kept = tuple(block for block in range(len(chain)) if block not in stands_for)
    for name in (name for block in kept for op in members[block] for name in op.inputs if name in places):
        block, position, slot = places[name]
        other = stands_for[block]
        if other is None:
            return None
        joins[name] = members[other][position].outputs[slot]
    return Excerpt(kept, joins, frozenset(name for name in forward.outputs if name in places))


def _stretches(chain: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield start, period and number of periods of the stretches that repeat, from left to right.

    >>> list(_stretches([0, 1, 1, 1, 2, 3, 2, 3, 4]))
    [(0, 1, 1), (1, 1, 3), (4, 2, 2), (8, 1, 1)]
    """
    at = 0
    while at < len(chain):
        found = [(period, _count(chain, at, period)) for period in range(1, _MAX_PERIOD + 1)]
        period, count = max(found, key=lambda item: item[0] * item[1] if item[1] > 1 else item[0] == 1)
        yield at, period, count
        at += period * count


def _count(chain: Sequence[int], start: int, period: int) -> int:
    """Return how often the first `period` blocks from `start` on are there in a row."""
    stop = start + period
    while stop < len(chain) and chain[stop] == chain[stop - period]:
        stop += 1
    return (stop - start) // period
