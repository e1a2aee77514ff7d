"""Memory LP: no distribution of blocks that fits is faster than the bound, and excerpts are valid."""

from collections.abc import Sequence

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.bounds import critical_path, memory_lp, task_lp
from autopar.bounds import task_graph as excerpts
from autopar.bounds.critical_path import least_path
from autopar.bounds.memory_lp import PipelineLoad, fits_evenly, least_scheduled_step, least_step
from autopar.formulate.scheduled_step import StageWork, scheduled_step
from autopar.schedule import SCHEDULES, Pass, Schedule, Task, chunks_of
from autopar.schedule.holding import fullest, least_held, moments
from tests.formulations import splits

SCHEDULED = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]
SCHEDULED += [("1f1b-a2a", 2), ("dualpipe-v", 2)]
PASSES = (0.3, 0.4, 0.3)
TOLERANCE = 1e-5


def _peak(order: Sequence[tuple[Pass, int, int]], kept: Sequence[float], late: Sequence[float], last: Pass) -> float:
    """Greatest bytes of a group over its tasks: kept and deferred."""
    held = dict[tuple[int, int], float]()
    peak = 0.0
    for kind, microbatch, chunk in order:
        before = held.get((microbatch, chunk), 0.0)
        after = {Pass.FORWARD: kept[chunk], Pass.BACKWARD: late[chunk], Pass.WEIGHT: 0.0}[kind]
        while_it_runs = {Pass.FORWARD: after, Pass.BACKWARD: max(before, late[chunk]), Pass.WEIGHT: before}[kind]
        held[microbatch, chunk] = 0.0
        peak = max(peak, sum(held.values()) + while_it_runs)
        held[microbatch, chunk] = 0.0 if kind is last else after
    return peak


def _work(seconds: Sequence[float]) -> StageWork:
    """A stage with these pass seconds."""
    return StageWork(seconds[0], seconds[1], seconds[2] if len(seconds) > 2 else 0.0)


def _closed_form(works: Sequence[StageWork], microbatches: int, links: Sequence[float] = ()) -> float:
    """Step by the formula of schedules with a closed form, with links that are busy for `links` seconds."""
    each = [work.forward + work.backward for work in works]
    each = [max(both) for both in zip(each, links, strict=True)] if links else each
    return sum(each) + (microbatches - 1) * max(each)


@st.composite
def loads(draw: st.DrawFn) -> tuple[str, int, int, int, PipelineLoad]:
    """A schedule, its size, and a load that fills about a device."""
    name, chunks = draw(st.sampled_from(SCHEDULED))
    groups = draw(st.integers(2, 3))
    microbatches = groups * draw(st.integers(1, 4))
    scale = draw(st.sampled_from([0.002, 0.02, 0.05, 0.1]))
    splits_backward = SCHEDULES[name].splits
    load = PipelineLoad(
        blocks=12,
        rest=draw(st.sampled_from([0.0, 1.5])),
        recompute=(0.0, draw(st.sampled_from([0.05, 0.3]))),
        kept=(scale, scale * draw(st.sampled_from([0.1, 0.6]))),
        late=scale * draw(st.sampled_from([0.0, 0.5, 1.0])) if splits_backward else 0.0,
        resident=draw(st.sampled_from([0.0, 0.04])),
        others=draw(st.sampled_from([0.0, 0.3])),
        alternatives=draw(st.sampled_from([(), ((0.01, 0.4),), ((0.02, 0.1), (0.0, 1.6))])),
        received=draw(st.sampled_from([(0.0, 0.0), (0.04, 0.02)])),
        outer=draw(st.sampled_from([(0, 0), (1, 1)])),
    )
    return name, groups, microbatches, chunks, load


@settings(max_examples=150, deadline=None)
@given(loads(), st.integers(0, 2**32 - 1))
def test_no_distribution_of_blocks_that_fits_is_faster(
    size: tuple[str, int, int, int, PipelineLoad], seed: int
) -> None:
    """Random distributions, each with flavours per stage, timed by the order of tasks."""
    name, groups, microbatches, chunks, load = size
    schedule, rng = SCHEDULES[name], np.random.default_rng(seed)
    passes = PASSES if schedule.splits else (PASSES[0], PASSES[1] + PASSES[2])
    least = least_step(schedule, groups, microbatches, chunks, load)
    ordered = least_scheduled_step(schedule, groups, microbatches, chunks, load, passes)
    stages_of = chunks_of(schedule.groups(groups, chunks))
    orders = schedule.orders(groups, microbatches, chunks)
    if fits_evenly(schedule, groups, microbatches, chunks, load):
        assert least < np.inf
    for _ in range(30):
        count = groups * chunks
        blocks = rng.multinomial(load.blocks, rng.dirichlet(np.full(count, 2.0)))
        again = rng.binomial(blocks, rng.random()) if rng.random() < 0.8 else np.zeros(count, dtype=np.int64)
        flavours = np.stack([blocks - again, again], axis=1)
        lies = np.array([(load.resident, 0.0), *load.alternatives])
        ways = rng.multinomial(blocks, rng.dirichlet(np.ones(len(lies))))
        rest = load.rest * rng.dirichlet(np.ones(count * len(passes))).reshape(count, -1)
        others = load.others * rng.dirichlet(np.ones(groups))
        fits = True
        for group, own in enumerate(stages_of):
            kept = [float(flavours[stage] @ load.kept) for stage in own]
            late = [float(blocks[stage]) * load.late for stage in own]
            order = [(task.kind, task.microbatch, task.chunk) for task in orders[group]]
            always = others[group] + sum(float(ways[stage] @ lies[:, 0]) for stage in own)
            inner = [stage for stage in own if load.outer[0] <= stage < count - load.outer[1]]
            always += sum(load.received[0] * (stage > 0) + load.received[1] * (stage < count - 1) for stage in inner)
            fits &= always + _peak(order, kept, late, schedule.passes[-1]) <= 1
        if not fits:
            continue
        works = []
        for stage in range(count):
            seconds = [float(blocks[stage]) * own + float(more) for own, more in zip(passes, rest[stage], strict=True)]
            seconds[1] += float(flavours[stage] @ load.recompute)
            works.append(_work(seconds))
        links = [sum(float(ways[stage] @ lies[:, 1]) for stage in own) for own in stages_of]
        ends = max(scheduled_step(name, groups, microbatches, works), microbatches * max(links))
        assert ordered <= ends * (1 + 1e-9)
        step = _closed_form(works, microbatches, links) if name in ("1f1b", "gpipe") else ends
        assert least <= step * (1 + 1e-9)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_the_bound_is_close_to_the_best_cut(name: str, chunks: int) -> None:
    """Of few stages with few blocks, by enumeration of cuts and recompute; infinite if nothing fits."""
    schedule, groups, microbatches, count = SCHEDULES[name], 2, 4, 2 * chunks
    passes = PASSES if schedule.splits else (PASSES[0], PASSES[1] + PASSES[2])
    blocks = 8 if chunks < 3 else 9
    late = 0.03 if schedule.splits else 0.0
    load = PipelineLoad(blocks, 0.0, (0.0, 0.3), (0.05, 0.01), late, 0.02, 0.0)
    stages_of = chunks_of(schedule.groups(groups, chunks))
    orders = schedule.orders(groups, microbatches, chunks)
    best = np.inf
    for ranges in splits(blocks, count):
        sizes = [stop - start for start, stop in ranges]
        for again in np.ndindex(*(size + 1 for size in sizes)):
            works = []
            for size, more in zip(sizes, again, strict=True):
                seconds = [size * own for own in passes]
                seconds[1] += 0.3 * more
                works.append(_work(seconds))
            kept = [(size - more) * 0.05 + more * 0.01 for size, more in zip(sizes, again, strict=True)]
            fits = all(
                0.02 * sum(sizes[stage] for stage in own)
                + _peak(
                    [(task.kind, task.microbatch, task.chunk) for task in orders[group]],
                    [kept[stage] for stage in own],
                    [sizes[stage] * late for stage in own],
                    schedule.passes[-1],
                )
                <= 1
                for group, own in enumerate(stages_of)
            )
            if fits:
                own = _closed_form(works, microbatches) if name in ("1f1b", "gpipe") else None
                best = min(best, own or scheduled_step(name, groups, microbatches, works))

    order = schedule, groups, microbatches, chunks
    bound = max(least_step(*order, load), least_scheduled_step(*order, load, passes))
    assert bound <= best < np.inf
    assert bound >= 0.85 * best, "blocks are divided between stages, and little else is left out"
    full = PipelineLoad(blocks, 0.0, (0.0, 0.3), (0.05, 0.01), 0.0, 0.3, 0.0)
    assert least_step(*order, full) == np.inf
    assert least_scheduled_step(*order, full, passes) == np.inf


@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_duals_of_a_grid_point_bound_other_values_of_the_rest(
    name: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound between grid points is within a percent of its own program, and never above it."""
    schedule = SCHEDULES[name]
    passes = PASSES if schedule.splits else (PASSES[0], PASSES[1] + PASSES[2])
    late = 0.02 if schedule.splits else 0.0
    for rest in (0.0, 0.4, 1.5, 2.1, 7.0, 20.0):
        load = PipelineLoad(12, rest, (0.0, 0.3), (0.06, 0.01), late, 0.01, 0.1)
        monkeypatch.setattr(memory_lp, "REST_GRID", 16)
        between = least_scheduled_step(schedule, 3, 9, chunks, load, passes)
        monkeypatch.setattr(memory_lp, "REST_GRID", 1 << 20)
        own = least_scheduled_step(schedule, 3, 9, chunks, load, passes)
        assert 0.99 * own < between <= own * (1 + 1e-5)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
@pytest.mark.parametrize("kept", [0.01, 0.06, 0.5])
def test_interior_point_and_simplex_have_equal_optima(
    name: str, chunks: int, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both prove infeasibility; duals of a path are equally tight at the point they are for."""
    schedule = SCHEDULES[name]
    passes = PASSES if schedule.splits else (PASSES[0], PASSES[1] + PASSES[2])
    load = PipelineLoad(12, 1.5, (0.0, 0.3), (kept, 0.8 * kept), 0.02, 0.01, 0.1)
    found = []
    for large in (0, 1 << 30):
        monkeypatch.setattr(task_lp, "LARGE", large)
        for known in (memory_lp._solve_step, memory_lp._solve_scheduled_step, critical_path._solve_path_lp):
            known.cache_clear()
        order = schedule, 3, 9, chunks
        path = least_path(*order, tuple(12 * own for own in passes), (0.3, 0.6))
        assert path is not None
        ends = path.step(12 * passes[0] + 0.3, 12 * sum(passes[1:]) + 0.6)
        found.append((least_step(*order, load), least_scheduled_step(*order, load, passes), ends))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    if kept == 0.5:
        assert found[0][1] == np.inf


@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_fewer_tasks_of_many_stages_lower_the_bound_little(
    name: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without backwards of the first and forwards of the last microbatches it is 3 % lower at most."""
    schedule = SCHEDULES[name]
    passes = PASSES if schedule.splits else (PASSES[0], PASSES[1] + PASSES[2])
    load = PipelineLoad(12, 1.5, (0.0, 0.3), (0.05, 0.01), 0.02 if schedule.splits else 0.0, 0.01, 0.1)
    order = schedule, 3, 60, chunks
    monkeypatch.setattr(excerpts, "MOST_TASKS", 0)
    monkeypatch.setattr(excerpts, "KEPT_TASKS", 0)
    found = []
    for whole in (256, 0):
        monkeypatch.setattr(excerpts, "MOST_STAGES_WITH_ALL_PASSES", whole)
        for known in (excerpts.excerpt, memory_lp._solve_scheduled_step):
            known.cache_clear()
        found.append((least_scheduled_step(*order, load, passes), len(excerpts.excerpt(*order).stage)))
    (most, tasks), (least_of_both, fewer) = found
    assert 2 * fewer <= tasks
    assert 0.97 * most <= least_of_both <= most * (1 + 1e-6)
    excerpts.excerpt.cache_clear()
    memory_lp._solve_scheduled_step.cache_clear()


@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_fullest_moments_dominate_all_others(name: str, chunks: int) -> None:
    """Each is a moment of the order of tasks, and no other moment holds more of anything than every one."""
    schedule = SCHEDULES[name]
    for groups, microbatches in ((1, 2), (2, 4), (3, 9)):
        for group in range(groups):
            size = group, groups, microbatches, chunks
            every = moments(schedule, *size).reshape(-1, chunks, 5)
            found = fullest(schedule, *size)
            kept = every[..., 0] + every[..., 2] + every[..., 3]
            late = every[..., 1] + every[..., 4]
            assert {tuple(row) for row in found[:, :chunks].tolist()} <= {
                tuple(row) for row in [*kept.tolist(), *(every[..., 0] + every[..., 2]).tolist()]
            }
            at_once = np.hstack([kept, late])
            assert all((found >= row).all(axis=1).any() for row in at_once)
            assert (found[None] >= found[:, None]).all(axis=2).sum() == len(found), "none is as large as another one"
            assert found.tolist() == sorted(found.tolist())
            assert int(found[:, :chunks].min(axis=1).max()) == least_held(schedule, *size)
            if not schedule.splits:
                assert not found[:, chunks:].any()


class _Aperiodic(Schedule):
    """A schedule that does not know that it is periodic."""

    def __init__(self, known: Schedule) -> None:
        self._known = known
        for name in ("splits", "trains", "steps_overlap"):
            setattr(self, name, getattr(known, name))

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        return self._known.order(group, num_groups, num_microbatches, num_chunks)

    def group(self, stage: int, num_groups: int) -> int:
        return self._known.group(stage, num_groups)


@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_more_microbatches_only_lengthen_an_aggregate(name: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of groups, and precedences of an excerpt, are those of all tasks, one by one."""
    schedule, endless = SCHEDULES[name], _Aperiodic(SCHEDULES[name])
    monkeypatch.setattr(excerpts, "MOST_TASKS", 0)
    for kept in (0, 60):
        monkeypatch.setattr(excerpts, "KEPT_TASKS", kept)
        excerpts.excerpt.cache_clear()
        for groups in (1, 2, 3, 5):
            for microbatches in (groups * 4, groups * 7, groups * 15 + (name not in ("interleaved", "1f1b-a2a"))):
                size = groups, microbatches, chunks
                for group in range(groups):
                    own, all_of_them = (moments(each, group, *size) for each in (schedule, endless))
                    np.testing.assert_array_equal(own, all_of_them)
                found, whole = (excerpts.excerpt(each, *size) for each in (schedule, endless))
                for part in ("stage", "kind", "aggregates", "predecessors", "successors"):
                    np.testing.assert_array_equal(getattr(found, part), getattr(whole, part))
                for run, other in zip(found.order_of_group, whole.order_of_group, strict=True):
                    np.testing.assert_array_equal(run, other)
    excerpts.excerpt.cache_clear()


@settings(max_examples=60, deadline=None)
@given(loads(), st.integers(1, 3))
def test_merged_groups_have_a_lower_bound(size: tuple[str, int, int, int, PipelineLoad], most: int) -> None:
    """And no less than the mean of all groups without a memory limit."""
    name, groups, microbatches, chunks, load = size
    order = SCHEDULES[name], groups, microbatches, chunks
    apart = least_step(*order, load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_lp, "MOST_GROUPS", most)
        memory_lp._solve_step.cache_clear()
        together = least_step(*order, load)
    memory_lp._solve_step.cache_clear()

    assert together <= apart * (1 + TOLERANCE)
    assert together >= microbatches * (load.blocks + load.rest) / groups * (1 - 1e-2)
    if most >= groups:
        assert together == apart


def test_a_program_that_no_method_solves_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may keep every method of HiGHS from an answer; a search goes on with a lower bound of 0."""
    load = PipelineLoad(blocks=8, rest=0.0, recompute=(0.0,), kept=(0.01,), late=0.151, resident=0.01, others=0.0)
    step = SCHEDULES["zb-h1"], 2, 4, 1, load
    solved = memory_lp._solve_step.__wrapped__(*step, fills=False)
    monkeypatch.setattr(highspy.Highs, "run", lambda _: None)

    assert solved > 0.0
    assert memory_lp._solve_step.__wrapped__(*step, fills=False) == 0.0
    assert memory_lp._solve_scheduled_step.__wrapped__(*step, PASSES) == (0.0, 0.0)
