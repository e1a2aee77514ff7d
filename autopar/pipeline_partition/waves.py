"""Cuts for groups of devices that hold several stages in turn, and wait for each other within each turn.

Microbatches pass through one chunk of all groups after the other, a *wave* each. A stage that takes longer than the
others of its chunk holds the wave up, so that what counts is the slowest stage of every chunk, summed over chunks: of
equal blocks all stages of a chunk have as many, and no group has more than another but for what is left over.

Where blocks are not shared out evenly, some stages are larger. Tasks wait at both ends of a *run* of them, so that they
follow each other.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from autopar.formulate.block_memory import FloatArray
from autopar.pipeline_partition.block_ranges import IntArray

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of blocks, the stages."""

MOST_CAPS = 32
"""Different sizes of stages that are looked at: of equal blocks there are few."""

DECIMALS = 9
"""Sums of equal blocks differ by rounding only."""

BEND = 0.05
"""What a chunk counts more, as a share of its seconds, per even share that it takes: as even as nothing is lost by."""

OVER = 1 / 16
"""Of a usual block: what a stage may take more, so that small blocks at the ends are beside as many as elsewhere."""


def cuts_in_waves(blocks: FloatArray, num_groups: int, num_chunks: int, edges: Sequence[int]) -> Iterator[Ranges]:
    """Yield cuts in which the slowest stages of the chunks take the least together.

    Early chunks hold most microbatches, so that of equal cuts they are the smaller ones. What is left over is at the
    end in the first cut, and at the beginning in the second.

    Args:
        blocks: (blocks,) seconds of a block.
        num_groups: Groups of devices.
        num_chunks: Stages per group.
        edges: Where a stage may begin or end, ascending, from 0 to the number of blocks; more of them than stages.

    >>> list(cuts_in_waves(np.ones(7), 2, 2, range(8)))
    [((0, 2), (2, 4), (4, 6), (6, 7)), ((0, 1), (1, 3), (3, 5), (5, 7))]
    """
    stages, ends = num_groups * num_chunks, np.asarray(edges)
    sums = np.concatenate([[0.0], np.cumsum(blocks)])[ends]
    caps, bends = _caps(sums, stages), np.full(num_chunks, BEND * stages / sums[-1])
    for backwards in (False, True):
        yield _cut(sums, ends, caps, bends, num_groups, backwards=backwards)


def cuts_in_runs(blocks: FloatArray, num_stages: int, edges: Sequence[int], most: int) -> Iterator[Ranges]:
    """Yield cuts whose larger stages follow each other, from the beginning of the chain to its end.

    Of blocks that no stages have evenly, some stages have one more. Tasks wait wherever larger stages and smaller ones
    follow each other, which is twice at least; where that is best depends on the order of tasks.

    Args:
        blocks: (blocks,) seconds of a block.
        num_stages: Stages.
        edges: Where a stage may begin or end, ascending, from 0 to the number of blocks; more of them than stages.
        most: How many cuts at most, of places that are equally far apart.

    >>> list(cuts_in_runs(np.ones(5), 3, range(6), 2))
    [((0, 2), (2, 4), (4, 5)), ((0, 1), (1, 3), (3, 5))]
    """
    from autopar.pipeline_partition.partition_kernel import evenest, runs  # compiling is loaded when it is needed only

    ends = np.asarray(edges)
    sums = np.concatenate([[0.0], np.cumsum(blocks)])[ends]
    large, usual = float(evenest(sums, num_stages)), float(np.median(np.diff(sums)))
    caps = large + OVER * usual, large - usual + OVER * usual

    def is_late(first: int) -> bool:
        """Whether larger stages from one on leave parts over."""
        return not runs(sums, num_stages, np.array([first]), *caps).any()

    count = bisect_left(range(num_stages), 1, key=is_late)
    firsts = np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int64))
    for stops in dict.fromkeys(map(tuple, runs(sums, num_stages, firsts, *caps).tolist())):
        yield tuple(pairwise(ends[[0, *stops]].tolist()))


def cut_evenly(blocks: FloatArray, num_stages: int, edges: Sequence[int]) -> Ranges:
    """Return the cut whose slowest stage is fastest, of which early stages have what is left over.

    >>> cut_evenly(np.ones(7), 3, range(8))
    ((0, 1), (1, 4), (4, 7))
    """
    from autopar.pipeline_partition.partition_kernel import evenest  # compiling is loaded when it is needed only

    ends = np.asarray(edges)
    sums = np.concatenate([[0.0], np.cumsum(blocks)])[ends]
    return _cut(sums, ends, np.array([evenest(sums, num_stages)]), np.zeros(1), num_stages, backwards=True)


def _cut(
    sums: FloatArray, ends: IntArray, caps: FloatArray, bends: FloatArray, num_groups: int, *, backwards: bool
) -> Ranges:
    """Return a cut of `even_waves` between `ends`, or of the chain from its end to its beginning."""
    from autopar.pipeline_partition.partition_kernel import even_waves  # compiling is loaded when it is needed only

    own = sums[-1] - sums[::-1] if backwards else sums
    stops = even_waves(own, caps, bends, num_groups, not backwards)
    assert len(stops), "some cut has no stage above the caps"
    cut = np.append(0, stops)
    return tuple(pairwise(ends[len(ends) - 1 - cut[::-1] if backwards else cut].tolist()))


def _caps(sums: FloatArray, stages: int) -> FloatArray:
    """Return what stages may take, ascending: what ranges do that take a quarter to twice an even share, and all."""
    mean = float(sums[-1]) / stages
    every = [np.append(np.diff(sums).max(), sums[-1])]
    for length in range(1, len(sums)):
        spans = sums[length:] - sums[:-length]
        if spans.min() > 2 * mean:
            break
        every.append(spans[(spans >= mean / 4) & (spans <= 2 * mean)])
    distinct = np.unique(np.round(np.concatenate(every) / mean, DECIMALS)) * mean
    if len(distinct) > MOST_CAPS:
        distinct = distinct[np.linspace(0, len(distinct) - 1, MOST_CAPS).astype(np.int64)]
    return np.asarray(distinct)
