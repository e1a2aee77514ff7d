"""Cuts for interleaved schedules (Narayanan et al. 2021), where groups of devices hold several stages (chunks) in turn.

Microbatches pass through one chunk of all groups after the other, a *wave* each. The slowest stage of a chunk delays
its wave, so a cut is judged by the sum over chunks of the slowest stage. With equal blocks all stages of a chunk have
equal numbers of blocks, and groups differ by the remainder only.

If the blocks cannot be divided evenly, some stages are larger. Tasks wait at both ends of a *run* of consecutive larger
stages, so the larger stages are placed in one run.
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
"""Most caps on a stage's seconds that are tried: with equal blocks there are few."""

DECIMALS = 9
"""Decimals to which caps are compared: sums of equal blocks differ by rounding only."""

EVENNESS_WEIGHT = 0.05
"""Weight of the quadratic cost of a chunk's slowest stage, relative to an even share: evens out cuts of equal sums."""

CAP_SLACK = 1 / 16
"""Slack of a stage's cap, as a share of a median block, so that a small end block does not displace another block."""


def cuts_in_waves(blocks: FloatArray, num_groups: int, num_chunks: int, edges: Sequence[int]) -> Iterator[Ranges]:
    """Yield cuts that minimise the sum over chunks of the slowest stage.

    Heuristic: a dynamic program over chunks and caps; early chunks, which hold most microbatches, are the smaller ones
    among equal cuts. The remainder is at the end of the chain in the first cut, at the beginning in the second.

    Args:
        blocks: (blocks,) seconds of a block.
        num_groups: Groups of devices.
        num_chunks: Stages per group.
        edges: Allowed stage boundaries, ascending, from 0 to the number of blocks; more of them than stages.

    >>> list(cuts_in_waves(np.ones(7), 2, 2, range(8)))
    [((0, 2), (2, 4), (4, 6), (6, 7)), ((0, 1), (1, 3), (3, 5), (5, 7))]
    """
    stages, ends = num_groups * num_chunks, np.asarray(edges)
    sums = np.concatenate([[0.0], np.cumsum(blocks)])[ends]
    caps, bends = _caps(sums, stages), np.full(num_chunks, EVENNESS_WEIGHT * stages / sums[-1])
    for backwards in (False, True):
        yield _cut(sums, ends, caps, bends, num_groups, backwards=backwards)


def cuts_in_runs(blocks: FloatArray, num_stages: int, edges: Sequence[int], most: int) -> Iterator[Ranges]:
    """Yield cuts with their larger stages in one run, for runs from the beginning of the chain to its end.

    Heuristic for blocks that cannot be divided evenly. Tasks wait at every change between larger and smaller stages, of
    which one run has two at most; its best place depends on the order of tasks, so several are yielded.

    Args:
        blocks: (blocks,) seconds of a block.
        num_stages: Number of stages.
        edges: Allowed stage boundaries, ascending, from 0 to the number of blocks; more of them than stages.
        most: Most cuts; their runs start at equally spaced stages.

    >>> list(cuts_in_runs(np.ones(5), 3, range(6), 2))
    [((0, 2), (2, 4), (4, 5)), ((0, 1), (1, 3), (3, 5))]
    """
    from autopar.pipeline_partition.partition_kernel import chain_bottleneck, runs  # imported late: loads the compiler

    ends = np.asarray(edges)
    sums = np.concatenate([[0.0], np.cumsum(blocks)])[ends]
    large, usual = float(chain_bottleneck(sums, num_stages)), float(np.median(np.diff(sums)))
    caps = large + CAP_SLACK * usual, large - usual + CAP_SLACK * usual

    def is_late(first: int) -> bool:
        """Return whether a run from stage `first` on leaves blocks over."""
        return not runs(sums, num_stages, np.array([first]), *caps).any()

    count = bisect_left(range(num_stages), 1, key=is_late)
    firsts = np.unique(np.linspace(0, count - 1, min(most, count)).astype(np.int64))
    for stops in dict.fromkeys(map(tuple, runs(sums, num_stages, firsts, *caps).tolist())):
        yield tuple(pairwise(ends[[0, *stops]].tolist()))


def cut_evenly(blocks: FloatArray, num_stages: int, edges: Sequence[int]) -> Ranges:
    """Return a cut with the least slowest stage; the remainder is in the early stages.

    >>> cut_evenly(np.ones(7), 3, range(8))
    ((0, 1), (1, 4), (4, 7))
    """
    from autopar.pipeline_partition.partition_kernel import chain_bottleneck  # imported late: loads the compiler

    ends = np.asarray(edges)
    sums = np.concatenate([[0.0], np.cumsum(blocks)])[ends]
    return _cut(sums, ends, np.array([chain_bottleneck(sums, num_stages)]), np.zeros(1), num_stages, backwards=True)


def _cut(
    sums: FloatArray, ends: IntArray, caps: FloatArray, bends: FloatArray, num_groups: int, *, backwards: bool
) -> Ranges:
    """Return the cut of `even_waves` at `ends`, or that of the reversed chain."""
    from autopar.pipeline_partition.partition_kernel import even_waves  # imported late: loads the compiler

    own = sums[-1] - sums[::-1] if backwards else sums
    stops = even_waves(own, caps, bends, num_groups, not backwards)
    assert len(stops), "some cut has no stage above the caps"
    cut = np.append(0, stops)
    return tuple(pairwise(ends[len(ends) - 1 - cut[::-1] if backwards else cut].tolist()))


def _caps(sums: FloatArray, stages: int) -> FloatArray:
    """Return caps on a stage's seconds, ascending: the sums of ranges of 1/4 to 2 even shares, and of all blocks."""
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
