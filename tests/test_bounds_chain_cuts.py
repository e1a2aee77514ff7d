"""Enumeration of all cuts of a chain: no cut into stages is faster than the bound."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest

from autopar.bounds.chain_cuts import MOST_TASKS, least_step_over_cuts
from autopar.formulate.scheduled_step import StageWork, scheduled_step
from autopar.schedule import SCHEDULES

SCHEDULED = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]
SCHEDULED += [("1f1b-a2a", 1), ("1f1b-a2a", 2), ("dualpipe-v", 2)]
CLOSE = 1e-6


def _least_step(name: str, groups: int, microbatches: int, chunks: int, passes: np.ndarray) -> float:
    """Least seconds of a step over all cuts, each timed by the step time formula without messages."""
    stages, count = groups * chunks, len(passes)
    if not SCHEDULES[name].splits:
        passes = np.stack([passes[:, 0], passes[:, 1:].sum(axis=1), np.zeros(count)], axis=1)
    found = math.inf
    for inner in combinations(range(1, count), stages - 1):
        edges = (0, *inner, count)
        work = [StageWork(*passes[start:stop].sum(axis=0).tolist()) for start, stop in pairwise(edges)]
        found = min(found, scheduled_step(name, groups, microbatches, work))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [(2, 2), (2, 6), (3, 3), (3, 6)])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_no_cut_is_faster_than_the_bound(name: str, chunks: int, size: tuple[int, int], seed: int) -> None:
    """With blocks that differ tenfold; the bound is exact where steps do not overlap."""
    groups, microbatches = size
    rng = np.random.default_rng(seed)
    passes = 10 ** rng.uniform(-1, 0, size=(groups * chunks + rng.integers(0, 4), 3))

    found = least_step_over_cuts(SCHEDULES[name], groups, microbatches, chunks, passes, passes.sum(axis=1))

    least = _least_step(name, groups, microbatches, chunks, passes)
    assert found <= least
    if not SCHEDULES[name].steps_overlap:
        assert found >= least * (1 - CLOSE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_seconds_of_unknown_pass_may_be_in_any_pass(name: str, chunks: int, seed: int) -> None:
    """`whole` raises the bound, which stays below every distribution of the excess over passes."""
    rng = np.random.default_rng(seed)
    passes, more = rng.uniform(0.1, 1, size=(2 * chunks + 2, 3)), rng.uniform(2, 3, size=2 * chunks + 2)
    whole = passes.sum(axis=1) + more
    size = SCHEDULES[name], 2, 4, chunks

    found = least_step_over_cuts(*size, passes, whole)

    assert found > least_step_over_cuts(*size, passes, passes.sum(axis=1))
    for kind in range(3):
        longer = passes.copy()
        longer[:, kind] += more
        assert found <= _least_step(name, 2, 4, chunks, longer)


def test_the_bound_is_zero_without_cuts_or_with_too_many() -> None:
    """More stages than blocks, one stage, many tasks, many cuts."""
    passes = np.ones((40, 3))

    def found(groups: int, microbatches: int, blocks: int = 40) -> float:
        return least_step_over_cuts(SCHEDULES["zb-h1"], groups, microbatches, 1, passes[:blocks], np.ones(blocks))

    assert found(2, 8) > 0
    assert found(2, 8, blocks=1) == 0.0
    assert found(1, 8) == 0.0
    assert found(2, MOST_TASKS) == 0.0
    assert found(20, 8) == 0.0
