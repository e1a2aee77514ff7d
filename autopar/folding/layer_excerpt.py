"""Excerpts of a model: repeated stretches of equal blocks, shortened to a few periods at either end.

Reads by blocks after the gap of values made inside it are redirected to the corresponding blocks before the gap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.blocks import instance_ops
from autopar.ir.graph import Graph

SIDE = 2
"""Periods kept on either side of the gap: the neighbours of left-out blocks, and their neighbours."""

_MAX_PERIOD = 8  # longest period of a stretch, in blocks
_WORTHWHILE = 0.5  # smallest share of left-out blocks that is worth an excerpt


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The kept part of a chain of blocks.

    Attributes:
        kept: Blocks kept, in order.
        joins: Left-out value -> the value read in its place.
        dropped: Left-out outputs of the graph.
    """

    kept: tuple[int, ...]
    joins: Mapping[str, str]
    dropped: frozenset[str]


def excerpt(forward: Graph, chain: Sequence[int]) -> Excerpt | None:
    """Return an excerpt of a graph; None if it would leave out little, or a read reaches beyond the kept periods.

    Args:
        forward: A forward graph in which blocks have been found.
        chain: Kind of each block.
    """
    stands_for: dict[int, int | None] = {}  # left-out block -> the corresponding block before the gap, if any
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
    """Yield start, period and number of periods of the repeated stretches, from left to right.

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
    """Return how often the first `period` blocks from `start` on occur in a row."""
    stop = start + period
    while stop < len(chain) and chain[stop] == chain[stop - period]:
        stop += 1
    return (stop - start) // period
