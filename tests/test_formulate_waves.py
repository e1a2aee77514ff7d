"""Cuts for groups that hold several stages in turn, what they recompute, and moves that make them faster."""

from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.discover import discover
from autopar.formulate.building import build_tables
from autopar.formulate.constraints import Constraints
from autopar.formulate.grouped import Groups, _cuts, grouped_time
from autopar.formulate.memory import ChainBytes
from autopar.formulate.recipes import recipes, restrict
from autopar.formulate.scheduled import pass_seconds
from autopar.formulate.step import Pipeline, Split
from autopar.formulate.tables import FloatArray, Tables
from autopar.formulate.waves import BEND, Ranges, cuts_in_waves
from autopar.formulate.weights import problem, weights
from autopar.program.lower import lower_blocks
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, chunks_of
from autopar.schedule.holding import moments
from autopar.search.blocks import assemble_blocks
from autopar.sharding import Mesh
from autopar.simulate.ranges import chain_bytes
from autopar.solvers import load
from autopar.workload import Workload, open_workload
from tests.formulations import COSTS

SAMPLES = 512
"""Per microbatch: so many that most of what is held are activations."""

IN_TURN = [("interleaved", 2), ("interleaved", 3), ("zb-v", 2), ("zb-h1", 1)]


def _slowest(blocks: FloatArray, ranges: Ranges, num_groups: int) -> FloatArray:
    """Return the seconds of the slowest stage of every chunk."""
    seconds = np.array([blocks[start:stop].sum() for start, stop in ranges])
    return np.asarray(seconds.reshape(-1, num_groups).max(axis=1))


def _cost(slowest: FloatArray, blocks: FloatArray, num_groups: int) -> float:
    mean = blocks.sum() / (num_groups * len(slowest))
    return float((slowest * (1 + BEND * slowest / mean)).sum())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 30), st.data())
def test_cuts_have_all_blocks_in_stages_between_edges(groups: int, chunks: int, more: int, data: st.DataObject) -> None:
    count = groups * chunks + more
    blocks = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=count, max_size=count)))
    blocks[0] += 0.5  # some block takes time
    within = data.draw(st.lists(st.integers(1, count - 1), unique=True)) if count > 1 else []
    edges = sorted({0, *within, count})
    found = _cuts(tuple(blocks.tolist()), tuple(range(count)), groups, chunks, tuple(edges))

    assert bool(found) == (len(edges) > groups * chunks)
    for ranges in found:
        assert len(ranges) == groups * chunks
        assert (ranges[0][0], ranges[-1][1]) == (0, count)
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        assert all(start < stop and {start, stop} <= set(edges) for start, stop in ranges)


@pytest.mark.parametrize(("groups", "chunks"), [(2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("count", [7, 9, 11, 12])
def test_no_cut_of_equal_blocks_has_faster_waves(groups: int, chunks: int, count: int) -> None:
    """Against every cut there is."""
    blocks = np.ones(count)
    every = (tuple(pairwise((0, *cut, count))) for cut in combinations(range(1, count), groups * chunks - 1))
    least = min(_cost(_slowest(blocks, ranges, groups), blocks, groups) for ranges in every)
    for ranges in cuts_in_waves(blocks, groups, chunks, range(count + 1)):
        assert _cost(_slowest(blocks, ranges, groups), blocks, groups) == pytest.approx(least)


def test_waves_of_unequal_blocks_are_nearly_as_fast_as_any() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        blocks = rng.choice([0.2, 1.0, 1.5, 4.0], size=10)
        every = (tuple(pairwise((0, *cut, 10))) for cut in combinations(range(1, 10), 3))
        least = min(_cost(_slowest(blocks, ranges, 2), blocks, 2) for ranges in every)
        first, *_ = cuts_in_waves(blocks, 2, 2, range(11))
        assert _cost(_slowest(blocks, first, 2), blocks, 2) <= 1.1 * least


@cache
def _model() -> Workload:
    return open_workload("zoo:mlp-xs", mode="train", dims={"num_layers": 24, "hidden": 16})


@cache
def _tables() -> Tables:
    deep = _model()
    return build_tables(deep.folded(SAMPLES), discover(deep.probe), Mesh.of(outer=2, inner=2), COSTS)


@cache
def _held(schedule: str, number: int) -> tuple[FloatArray, FloatArray, ChainBytes]:
    """Return passes, prices and bytes of the best choice of a recipe."""
    found, splits = _tables(), SCHEDULES[schedule].splits
    pipeline = Pipeline(1, 1, "1f1b")
    instance = problem(found, weights(found, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=False))
    recipe = recipes(found, _model().batch_dims(SAMPLES))[number]
    choice = load("auto").solve(restrict(instance, recipe)).choice
    assert choice is not None
    lowered = lower_blocks(assemble_blocks(found, choice), found.folded, found.resharder, splits=splits)
    memory = chain_bytes(lowered, found.folded, trains=True)
    return pass_seconds(found, choice, splits=splits), found.block_seconds(choice), memory


def _peaks(split: Split, memory: ChainBytes, pipeline: Pipeline) -> list[float]:
    """Return what the fullest moment of each group takes: buffers of all its stages may be there at a time."""
    schedule, last, found = SCHEDULES[pipeline.schedule], len(memory.chain), []
    for group, chunks in enumerate(chunks_of(schedule.groups(pipeline.num_groups, pipeline.num_chunks))):
        rows = moments(schedule, group, pipeline.num_groups, pipeline.num_microbatches, pipeline.num_chunks)
        sizes, received, others, always = [], 0.0, [], 0.0
        for stage in chunks:
            start, stop = split.ranges[stage]
            flavours = split.recompute[stage]
            (kept, running), (late, weight) = memory.stage(start, stop, flavours), memory.put_off(start, stop)
            sizes += [kept, late, running, running, weight]
            always += memory.always(start, stop)
            got = memory.arriving[memory.chain[start]] if start else 0.0
            got += memory.returning[memory.chain[stop - 1]] if stop < last else 0.0
            received += got
            others.append(memory.beside(start, stop, flavours) - got)
        found.append(always + float((rows @ np.array(sizes)).max()) + received + max(others))
    return found


@pytest.mark.parametrize(("name", "chunks"), IN_TURN)
def test_groups_run_no_more_again_than_has_to_be(name: str, chunks: int) -> None:
    """Where memory binds, no block could keep all that it runs again: its group would not fit any more."""
    pipeline = Pipeline(2 * chunks, 4, name, num_chunks=chunks)
    bound = 0
    for seed in range(4):
        passes, totals, memory = _held(name, seed)
        free = Groups(passes, totals, memory, pipeline, np.inf, 0.0).best()
        assert free is not None
        assert set(free[0].flavours) == {Recompute.NONE}
        ranges = free[0].ranges
        most, least = (
            max(_peaks(Split.uniform(ranges, (own,) * len(ranges)), memory, pipeline))
            for own in (Recompute.NONE, Recompute.FULL)
        )
        for share in (0.2, 0.5, 0.8):
            limit = least + share * (most - least)
            found = Groups(passes, totals, memory, pipeline, limit, 0.0).best()
            if found is None:
                continue
            split = found[0]
            assert max(_peaks(split, memory, pipeline)) <= limit * (1 + 1e-9)
            for stage, flavours in enumerate(split.recompute):
                for block, own in enumerate(flavours):
                    if own is Recompute.FULL:
                        more = (*flavours[:block], Recompute.NONE, *flavours[block + 1 :])
                        each = (*split.recompute[:stage], more, *split.recompute[stage + 1 :])
                        bound += 1
                        assert max(_peaks(Split(split.ranges, each), memory, pipeline)) > limit * 0.995
    assert bound or name == "zb-v"  # nothing fits there once something has to run again


@pytest.mark.parametrize(("name", "chunks"), IN_TURN)
def test_nothing_is_lost_below_a_cutoff(name: str, chunks: int) -> None:
    """What is found with one that is above it is what is found without; nothing that is not below is found."""
    pipeline = Pipeline(2 * chunks, 4, name, num_chunks=chunks)
    for seed in range(4):
        passes, totals, memory = _held(name, seed)
        for limit in (np.inf, 3.0 * float(memory.resident.sum())):
            whole = Groups(passes, totals, memory, pipeline, limit, 0.0).best()
            if whole is None:
                continue
            seconds = whole[1].seconds
            above = Groups(passes, totals, memory, pipeline, limit, 0.0).best(seconds * 1.001)
            assert above is not None
            assert (above[0], above[1].seconds) == (whole[0], seconds)
            busiest = seconds / 8  # far below what any group is at work for
            assert Groups(passes, totals, memory, pipeline, limit, 0.0).best(busiest) is None


@pytest.mark.parametrize(("name", "chunks"), IN_TURN)
def test_shifted_blocks_make_a_split_no_slower_and_fit(name: str, chunks: int) -> None:
    pipeline = Pipeline(2 * chunks, 4, name, num_chunks=chunks)
    faster = 0
    for seed in range(4):
        passes, totals, memory = _held(name, seed)
        chain = memory.chain
        # the first stages have a block each, so that there is something to move
        cut = tuple(pairwise([*range(pipeline.num_stages), len(chain)]))
        split = Split.uniform(cut, (Recompute.NONE,) * len(cut))
        start = split, grouped_time(passes, totals, chain, pipeline, split, 0.0)
        limit = max(_peaks(split, memory, pipeline))
        found, time = Groups(passes, totals, memory, pipeline, limit, 0.0).shifted(start)

        assert time.seconds <= start[1].seconds
        assert time.seconds == grouped_time(passes, totals, chain, pipeline, found, 0.0).seconds
        assert max(_peaks(found, memory, pipeline)) <= limit
        assert all(start < stop for start, stop in found.ranges)
        assert (found.ranges[0][0], found.ranges[-1][1]) == (0, len(chain))
        faster += time.seconds < 0.9 * start[1].seconds
        again = Groups(passes, totals, memory, pipeline, limit, 0.0).shifted(start)
        assert (again[0], again[1].seconds) == (found, time.seconds)
        groups = Groups(passes, totals, memory, pipeline, np.inf, 0.0)
        best = groups.best()
        assert best is not None
        assert groups.shifted(best)[1].seconds <= best[1].seconds, "most moves make a good cut slower"
    assert faster


def test_cuts_that_are_pinned_stay() -> None:
    passes, totals, memory = _held("interleaved", 0)
    cuts = frozenset(range(0, 24, 3))
    pinned = Constraints(cuts=cuts)
    pipeline = Pipeline(4, 4, "interleaved", num_chunks=2)
    found = Groups(passes, totals, memory, pipeline, np.inf, 0.0, pinned).best()
    assert found is not None
    moved, _ = Groups(passes, totals, memory, pipeline, np.inf, 0.0, pinned).shifted(found)
    for split in (found[0], moved):
        assert {start for start, _ in split.ranges[1:]} <= cuts


def test_a_search_that_ends_shifts_nothing() -> None:
    passes, totals, memory = _held("interleaved", 0)
    pipeline = Pipeline(4, 4, "interleaved", num_chunks=2)
    found = Groups(passes, totals, memory, pipeline, np.inf, 0.0).best()
    assert found is not None
    assert Groups(passes, totals, memory, pipeline, np.inf, 0.0).shifted(found, should_stop=lambda: True) is found
