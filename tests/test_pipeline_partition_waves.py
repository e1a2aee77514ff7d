"""Candidate cuts of interleaved schedules, the recompute of groups, and local search over cuts."""

from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.describe.block_decisions import assemble_blocks
from autopar.discover import discover
from autopar.formulate.block_memory import ChainBytes
from autopar.formulate.building import build_tables
from autopar.formulate.constraints import Constraints
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.manual_recipes import recipes, restrict
from autopar.formulate.scheduled_step import StageWork, pass_seconds, scheduled_step
from autopar.formulate.step_time import Pipeline, Split
from autopar.formulate.tables import FloatArray, Tables
from autopar.pipeline_partition.interleaved import RUNS, RecomputeChooser, _cuts, _runs, grouped_time
from autopar.pipeline_partition.waves import EVENNESS_WEIGHT, Ranges, cuts_in_runs, cuts_in_waves
from autopar.program.lower import lower_blocks
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, chunks_of
from autopar.schedule.holding import moments
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
    return float((slowest * (1 + EVENNESS_WEIGHT * slowest / mean)).sum())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 30), st.data())
def test_wave_cuts_are_partitions_at_edges(groups: int, chunks: int, more: int, data: st.DataObject) -> None:
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
    """Against the enumeration of cuts."""
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


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(0, 30), st.integers(1, 12), st.data())
def test_run_cuts_are_partitions_at_edges(stages: int, more: int, most: int, data: st.DataObject) -> None:
    count = stages + more
    blocks = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=count, max_size=count)))
    blocks[0] += 0.5
    within = data.draw(st.lists(st.integers(1, count - 1), unique=True, min_size=stages - 1)) if count > 1 else []
    edges = sorted({0, *within, count})
    found = list(cuts_in_runs(blocks, stages, edges, most))

    assert len(found) == len(set(found)) <= most
    for ranges in found:
        assert len(ranges) == stages
        assert (ranges[0][0], ranges[-1][1]) == (0, count)
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        assert all(start < stop and {start, stop} <= set(edges) for start, stop in ranges)


@pytest.mark.parametrize(("stages", "count"), [(4, 7), (6, 21), (8, 17), (5, 24)])
def test_run_cuts_have_one_run_of_larger_stages(stages: int, count: int) -> None:
    """Equal blocks with negligible ones at both ends; one stage has the remainder."""
    blocks = np.array([0.01, *np.ones(count), 0.05])
    found = list(cuts_in_runs(blocks, stages, range(count + 3), 100))
    assert len(found) == stages - count % stages + 1, "they begin at any stage that leaves enough of them"
    for ranges in found:
        sizes = [round(blocks[start:stop].sum()) for start, stop in ranges]
        assert sum(sizes) == count
        assert set(sizes) == {count // stages, count // stages + 1}
        larger = [stage for stage, size in enumerate(sizes) if size == max(sizes)]
        assert larger == [*range(larger[0], larger[-1] + 1)]


def test_divisible_blocks_are_cut_evenly() -> None:
    (found,) = cuts_in_runs(np.ones(12), 4, range(13), 5)
    assert found == ((0, 3), (3, 6), (6, 9), (9, 12))


def _step(name: str, blocks: FloatArray, ranges: Ranges, groups: int, microbatches: int) -> float:
    works = [StageWork(*blocks[start:stop].sum(axis=0)) for start, stop in ranges]
    return scheduled_step(name, groups, microbatches, works)


@pytest.mark.parametrize(("chunks", "least"), [(2, 0.015), (4, 0.03), (8, 0.007)])
def test_one_run_of_larger_stages_waits_less(chunks: int, least: float) -> None:
    """128 blocks on 12 groups, where wave cuts put the remainder into the first or the last stages."""
    chain = (0, *[1] * 128, 2)
    passes = ((0.0, 1.0, 0.0), (22.0, 42.0, 0.0), (4.0, 8.0, 0.0))
    blocks = np.array(passes)[list(chain)]
    found = _runs(passes, chain, "interleaved", 12, 48, chunks, tuple(range(131)))
    assert len(found) == RUNS
    each = [_step("interleaved", blocks, ranges, 12, 48) for ranges in found]
    waves = _cuts(tuple(blocks.sum(axis=1)[[0, 1, -1]].tolist()), chain, 12, chunks, tuple(range(131)))

    assert each == sorted(each)
    assert each[0] < (1 - least) * min(_step("interleaved", blocks, ranges, 12, 48) for ranges in waves)


@pytest.mark.parametrize(("name", "chunks"), IN_TURN)
def test_few_cuts_are_faster_than_the_candidates(name: str, chunks: int) -> None:
    """Against the enumeration of cuts of a few equal blocks with a remainder."""
    for count in range(2 * chunks + 1, 2 * chunks + 6):
        passes, chain = ((1.0, 1.0, 1.0 if SCHEDULES[name].splits else 0.0),), (0,) * count
        blocks, edges = np.array(passes)[list(chain)], tuple(range(count + 1))
        every = [tuple(pairwise((0, *cut, count))) for cut in combinations(range(1, count), 2 * chunks - 1)]
        steps = sorted(_step(name, blocks, ranges, 2, 4) for ranges in every)
        tried = {*_cuts((1.0,), chain, 2, chunks, edges), *_runs(passes, chain, name, 2, 4, chunks, edges)}
        best = min(_step(name, blocks, ranges, 2, 4) for ranges in tried)
        assert best <= 1.06 * steps[0]


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
    """Return the fullest moment of each group; the buffers of all its stages may coincide."""
    schedule, last, found = SCHEDULES[pipeline.schedule], len(memory.chain), []
    for group, chunks in enumerate(chunks_of(schedule.groups(pipeline.num_groups, pipeline.num_chunks))):
        rows = moments(schedule, group, pipeline.num_groups, pipeline.num_microbatches, pipeline.num_chunks)
        sizes, received, others, always = [], 0.0, [], 0.0
        for stage in chunks:
            start, stop = split.ranges[stage]
            flavours = split.recompute[stage]
            (kept, running), (late, weight) = memory.stage(start, stop, flavours), memory.deferred_bytes(start, stop)
            sizes += [kept, late, running, running, weight]
            always += memory.resident_bytes(start, stop)
            got = memory.arriving[memory.chain[start]] if start else 0.0
            got += memory.returning[memory.chain[stop - 1]] if stop < last else 0.0
            received += got
            others.append(memory.communication_bytes(start, stop, flavours) - got)
        found.append(always + float((rows @ np.array(sizes)).max()) + received + max(others))
    return found


@pytest.mark.parametrize(("name", "chunks"), IN_TURN)
def test_groups_recompute_no_more_than_needed(name: str, chunks: int) -> None:
    """Where memory binds, keeping the values of any recomputing block would exceed its group's limit."""
    pipeline = Pipeline(2 * chunks, 4, name, num_chunks=chunks)
    bound = 0
    for seed in range(4):
        passes, totals, memory = _held(name, seed)
        free = RecomputeChooser(passes, totals, memory, pipeline, np.inf, 0.0).best()
        assert free is not None
        assert set(free[0].flavours) == {Recompute.NONE}
        ranges = free[0].ranges
        most, least = (
            max(_peaks(Split.uniform(ranges, (own,) * len(ranges)), memory, pipeline))
            for own in (Recompute.NONE, Recompute.FULL)
        )
        for share in (0.2, 0.5, 0.8):
            limit = least + share * (most - least)
            found = RecomputeChooser(passes, totals, memory, pipeline, limit, 0.0).best()
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
    """A cutoff above the optimum changes nothing; at or below it nothing is found."""
    pipeline = Pipeline(2 * chunks, 4, name, num_chunks=chunks)
    for seed in range(4):
        passes, totals, memory = _held(name, seed)
        for limit in (np.inf, 3.0 * float(memory.resident.sum())):
            whole = RecomputeChooser(passes, totals, memory, pipeline, limit, 0.0).best()
            if whole is None:
                continue
            seconds = whole[1].seconds
            above = RecomputeChooser(passes, totals, memory, pipeline, limit, 0.0).best(seconds * 1.001)
            assert above is not None
            assert (above[0], above[1].seconds) == (whole[0], seconds)
            busiest = seconds / 8  # far below what any group is at work for
            assert RecomputeChooser(passes, totals, memory, pipeline, limit, 0.0).best(busiest) is None


@pytest.mark.parametrize(("name", "chunks"), IN_TURN)
def test_moving_blocks_makes_a_split_no_slower(name: str, chunks: int) -> None:
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
        found, time = RecomputeChooser(passes, totals, memory, pipeline, limit, 0.0).improve_by_moves(start)

        assert time.seconds <= start[1].seconds
        assert time.seconds == grouped_time(passes, totals, chain, pipeline, found, 0.0).seconds
        assert max(_peaks(found, memory, pipeline)) <= limit
        assert all(start < stop for start, stop in found.ranges)
        assert (found.ranges[0][0], found.ranges[-1][1]) == (0, len(chain))
        faster += time.seconds < 0.9 * start[1].seconds
        again = RecomputeChooser(passes, totals, memory, pipeline, limit, 0.0).improve_by_moves(start)
        assert (again[0], again[1].seconds) == (found, time.seconds)
        groups = RecomputeChooser(passes, totals, memory, pipeline, np.inf, 0.0)
        best = groups.best()
        assert best is not None
        assert groups.improve_by_moves(best)[1].seconds <= best[1].seconds, "most moves make a good cut slower"
    assert faster


def test_cuts_that_are_pinned_stay() -> None:
    passes, totals, memory = _held("interleaved", 0)
    cuts = frozenset(range(0, 24, 3))
    pinned = Constraints(cuts=cuts)
    pipeline = Pipeline(4, 4, "interleaved", num_chunks=2)
    found = RecomputeChooser(passes, totals, memory, pipeline, np.inf, 0.0, pinned).best()
    assert found is not None
    moved, _ = RecomputeChooser(passes, totals, memory, pipeline, np.inf, 0.0, pinned).improve_by_moves(found)
    for split in (found[0], moved):
        assert {start for start, _ in split.ranges[1:]} <= cuts


def test_a_stopped_local_search_changes_nothing() -> None:
    passes, totals, memory = _held("interleaved", 0)
    pipeline = Pipeline(4, 4, "interleaved", num_chunks=2)
    found = RecomputeChooser(passes, totals, memory, pipeline, np.inf, 0.0).best()
    assert found is not None
    assert (
        RecomputeChooser(passes, totals, memory, pipeline, np.inf, 0.0).improve_by_moves(
            found, should_stop=lambda: True
        )
        is found
    )
