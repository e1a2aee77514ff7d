"""Steps of chains whose blocks differ: no cut into stages is faster than the bound, and a schedule is timed exactly."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest

from autopar.bounds.chain_cuts import MOST_TASKS, least_of_cuts
from autopar.formulate.scheduled_step import StageWork, scheduled_step
from autopar.schedule import SCHEDULES

SCHEDULED = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]
CLOSE = 1e-6


def _least(name: str, groups: int, microbatches: int, chunks: int, passes: np.ndarray) -> float:
    """Return the least seconds of a step of all cuts, each timed by the planner's formula, without messages."""
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
def test_no_cut_is_faster(name: str, chunks: int, size: tuple[int, int], seed: int) -> None:
    """Of blocks that differ tenfold; steps that do not overlap are told exactly."""
    groups, microbatches = size
    rng = np.random.default_rng(seed)
    passes = 10 ** rng.uniform(-1, 0, size=(groups * chunks + rng.integers(0, 4), 3))

    found = least_of_cuts(SCHEDULES[name], groups, microbatches, chunks, passes, passes.sum(axis=1))

    least = _least(name, groups, microbatches, chunks, passes)
    assert found <= least
    if not SCHEDULES[name].steps_overlap:
        assert found >= least * (1 - CLOSE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_what_blocks_take_besides_may_be_in_any_pass(name: str, chunks: int, seed: int) -> None:
    """It counts, and no more than it takes wherever it is."""
    rng = np.random.default_rng(seed)
    passes, more = rng.uniform(0.1, 1, size=(2 * chunks + 2, 3)), rng.uniform(2, 3, size=2 * chunks + 2)
    whole = passes.sum(axis=1) + more
    size = SCHEDULES[name], 2, 4, chunks

    found = least_of_cuts(*size, passes, whole)

    assert found > least_of_cuts(*size, passes, passes.sum(axis=1))
    for kind in range(3):
        longer = passes.copy()
        longer[:, kind] += more
        assert found <= _least(name, 2, 4, chunks, longer)


def test_what_is_too_much_to_look_at_is_left_out() -> None:
    """More stages than blocks, one stage, many tasks or many cuts: nothing is said."""
    passes = np.ones((40, 3))

    def found(groups: int, microbatches: int, blocks: int = 40) -> float:
        return least_of_cuts(SCHEDULES["zb-h1"], groups, microbatches, 1, passes[:blocks], np.ones(blocks))

    assert found(2, 8) > 0
    assert found(2, 8, blocks=1) == 0.0
    assert found(1, 8) == 0.0
    assert found(2, MOST_TASKS) == 0.0
    assert found(20, 8) == 0.0
