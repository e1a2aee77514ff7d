"""Cut LP: lower bounds on the step of pipelines under a memory limit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import highspy
import numpy as np
import pytest

from autopar.bounds import task_lp
from autopar.bounds.block_lp import block_program
from autopar.bounds.column_generation import ColumnGeneration
from autopar.bounds.cut_lp import Component, CutLP, RemainingCosts, TaskOrder
from autopar.bounds.master_problem import step_program
from autopar.bounds.priced_cuts import LEAST_LEVEL, LEVELS, CutGenerator, levels_of
from autopar.bounds.roofline import roofline
from autopar.bounds.saved_values import deferred_values, main_kind, received_values
from autopar.bounds.task_lp import SparseLP
from autopar.cost import CostModel, Overlap, Stack
from autopar.describe.block_decisions import assemble_blocks
from autopar.discover import discover
from autopar.formulate.block_memory import ChainBytes, FloatArray
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import kind_weights, problem, weights
from autopar.formulate.manual_recipes import recipes, restrict
from autopar.formulate.scheduled_step import StageWork, pass_seconds, scheduled_step
from autopar.formulate.step_time import Pipeline, Split, StepTime, step_time
from autopar.formulate.tables import Slot, Tables
from autopar.pipeline_partition.interleaved import RecomputeChooser, grouped_time
from autopar.pipeline_partition.stage_cuts import best_split
from autopar.problem import Choice, Problem, Solution
from autopar.program.lower import lower_blocks
from autopar.recompute import ON_DEVICE, Recompute
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh
from autopar.simulate.ranges import chain_bytes
from autopar.solvers import load
from autopar.workload import Workload, open_workload
from tests.formulations import COSTS, random_choice, splits
from tests.shares import one_in

TOLERANCE = 2e-6
"""Relative: the linear program is solved to 1e-7 in units of about a step time."""

OTHERS = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("interleaved", 2), ("interleaved", 3)]
NOTHING = np.zeros((0, 3))


def _solve(instance: Problem, cutoff: float) -> Solution:
    return load("auto").solve(instance, cutoff=cutoff)


STACKS = {
    "plain": Stack("plain"),
    "shared": Stack("shared", scalars=(("exposed_share", 0.3), ("overlap_slowdown", 1.2))),
    "host": Stack("host", scalars=(("host_launch", 2e-5),)),
    "slow": Stack("slow"),
}

SLOW = replace(COSTS.cluster, intra=replace(COSTS.cluster.intra, bandwidth=1e6, latency=1e-6, tunings=()))
"""Links that gradients take longer on than passes, for the stack of that name."""


@cache
def _model() -> Workload:
    """Return a model of enough blocks for several stages each."""
    return open_workload("zoo:mlp-xs", mode="train", dims={"num_layers": 12, "hidden": 16})


@cache
def _deep(stack: str) -> Tables:
    """Tables of the model."""
    deep = _model()
    costs = CostModel(SLOW if stack == "slow" else COSTS.cluster, COSTS.policy, STACKS[stack])
    return build_tables(deep.folded(8), discover(deep.probe), Mesh.of(outer=2, inner=2), costs)


@cache
def _choices(seed: int) -> tuple[Choice, ...]:
    """A choice that splits the batch, with gradient reductions on any links, and a random one near it."""
    found = _deep("plain")
    plain = weights(found, Pipeline(1, 1, "1f1b"), recompute=Recompute.NONE, hidden=1.0, bounding=False)
    instance = problem(found, plain)
    known = {recipe.name: recipe for recipe in recipes(found, _model().batch_dims(8))}
    choice = _solve(restrict(instance, known["data+zero-1 × data+zero-1"]), np.inf).choice
    assert choice is not None
    rng, walk = np.random.default_rng(seed), [choice]
    for _ in range(300):
        choice = random_choice(instance, rng, near=choice)
        walk.append(choice)

    def gradients(own: Choice) -> float:
        return float(found.kind_totals(own)[:, Slot.GRADIENT].sum())

    most = max((own for own in walk if np.isfinite(found.kind_totals(own)).all()), key=gradients)
    assert gradients(most) > 0
    return walk[0], most


def _order(pipeline: Pipeline) -> TaskOrder:
    return TaskOrder(SCHEDULES[pipeline.schedule], pipeline.num_groups, pipeline.num_microbatches, pipeline.num_chunks)


def _remaining(found: Tables, pipeline: Pipeline, limit: float) -> RemainingCosts:
    """Lower bounds on everything besides repeated blocks; bytes of other blocks are left out."""
    under = roofline(found.folded, found.folded, (8, 8), found.costs)
    alike, others = under.passes_seconds(found.mesh, 8)
    count = main_kind(found.folded).count
    halves = float(alike[1]) / count, float(alike[2]) / count
    late = sum(memory.least(found.mesh.shape) for memory in deferred_values(found.folded, found.costs)) / limit
    arriving, returning = (
        sum(memory.least(found.mesh.shape) for memory in own) / limit
        for own in received_values(found.folded, found.costs, main_kind(found.folded).id)
    )
    assert arriving > 0 < returning, "so that it tells"
    ends = []
    for place in (0, -1):
        names = [op.name for op in found.folded.kinds[found.folded.chain[place]].ops]
        forward, *backward = under.passes_of(names, found.mesh, 8).tolist()
        assert forward > 0 < sum(backward), "so that it tells"
        ends.append((forward, *backward) if SCHEDULES[pipeline.schedule].splits else (forward, sum(backward)))
    edges = [_least_block(found, found.folded.chain[place]) for place in (0, -1)]
    assert any(edge > sum(end) * (1 + TOLERANCE) for edge, end in zip(edges, ends, strict=True)), "so that it tells"
    return RemainingCosts(
        blocks=count,
        late=late,
        halves=halves,
        seconds=float(others.sum()),
        resident=0.0,
        whole=_whole(found, pipeline),
        outer=(1, 1),
        turns=pipeline.with_turns,
        ends=(ends[0], ends[1]),
        edges=(edges[0], edges[1]),
        received=(arriving, returning),
    )


def _least_block(found: Tables, kind: int) -> float:
    """Least seconds of a block of a kind, under the placements that are best for it."""
    return _solve(problem(found, kind_weights(found, [kind], 0.0)), np.inf).bound


def _whole(found: Tables, pipeline: Pipeline) -> float:
    """Least seconds of a microbatch through all blocks, without recompute."""
    plain = weights(found, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=True)
    return _solve(problem(found, plain), np.inf).bound * pipeline.num_groups / pipeline.rounds


def _cut_generator(found: Tables, pipeline: Pipeline, limit: float, choices: Sequence[Choice]) -> CutGenerator:
    program = block_program(found, pipeline, limit, ON_DEVICE, (Recompute.NONE,) * len(found.folded.kinds))
    return CutGenerator(found, program, choices, _solve)


def _raised(
    cut_generator: CutGenerator, order: TaskOrder, remaining: RemainingCosts, steps: int = 6, enough: float = math.inf
) -> tuple[float, float]:
    """Bound after some rounds, and the value of the inner program."""
    value, basis = np.inf, None
    first = cut_generator.bound(order, remaining, enough)
    cut_generator.price_memory(order, remaining, levels_of(order), enough)
    known = cut_generator.bound(order, remaining, enough, known=first)
    bound = max(first.seconds, known.seconds)
    for _ in range(steps):
        found = cut_generator.solve_inner(order, remaining, known.case, basis)
        value, basis = found.value, found.basis
        if not found.cuts:
            break
        known = cut_generator.bound(order, remaining, enough, known=known)
        bound = max(bound, known.seconds)
    return bound, value


def _seconds(passes: FloatArray, totals: FloatArray, chain: Sequence[int], pipeline: Pipeline, split: Split) -> float:
    """Seconds of a split as the planner times it: in closed form under 1F1B."""
    if pipeline.schedule == "1f1b":
        return step_time(totals, chain, pipeline, split, 0.0).seconds
    return grouped_time(passes, totals, chain, pipeline, split, 0.0).seconds


def _best_plan(
    passes: FloatArray, totals: FloatArray, memory: ChainBytes, pipeline: Pipeline, limit: float
) -> tuple[Split, StepTime] | None:
    """Best split that fits; None if none does."""
    if pipeline.schedule == "1f1b":
        return best_split(totals, memory, pipeline, limit, 0.0)
    return RecomputeChooser(passes, totals, memory, pipeline, limit, 0.0).best()


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_no_cut_of_any_choice_is_faster_than_the_bound(schedule: str, chunks: int, stack: str) -> None:
    """For any recompute, without a memory limit, and even with that choice as the only known one."""
    found, rng = _deep(stack), np.random.default_rng(3)
    chain = found.folded.chain
    pipeline = Pipeline(2 * chunks, 4, schedule, Overlap.of(STACKS[stack]), 1e-4, chunks, 0.1 if chunks > 1 else 0.0)
    choices, order, remaining = _choices(5), _order(pipeline), _remaining(found, pipeline, 1e15)
    bound, value = _raised(_cut_generator(found, pipeline, 1e15, choices), order, remaining)

    assert 0 < bound <= value * (1 + TOLERANCE)
    for choice in choices:
        alone = _cut_generator(found, pipeline, 1e15, [choice]).solve_inner(order, remaining).value
        totals = found.block_seconds(choice)
        passes = pass_seconds(found, choice, splits=SCHEDULES[schedule].splits)
        every = splits(len(chain), pipeline.num_stages)
        for number in rng.integers(len(every), size=40):
            flavours = [
                tuple(ON_DEVICE[own] for own in rng.integers(3, size=stop - start)) for start, stop in every[number]
            ]
            split = Split(every[number], tuple(flavours))
            seconds = _seconds(passes, totals, chain, pipeline, split)
            assert max(bound, alone) <= seconds * (1 + TOLERANCE)


@pytest.mark.parametrize(("stack", "least"), [pytest.param("plain", -0.2, marks=pytest.mark.slow), ("slow", 0.2)])
@pytest.mark.parametrize(("schedule", "chunks"), one_in(2, OTHERS, unpacked=True))
def test_no_plan_that_fits_is_faster_than_the_bound(schedule: str, chunks: int, stack: str, least: float) -> None:
    """At limits from what the loosest plan needs down to what none fits.

    For one choice it is tighter than the master problem where links are slow. Where other blocks, known by lower bounds
    only, take much, it is weaker.
    """
    found = _deep(stack)
    pipeline = Pipeline(2 * chunks, 4, schedule, num_chunks=chunks)
    order, fitting, more = _order(pipeline), 0, -1.0
    for choice in _choices(7):
        totals, splits_backward = found.block_seconds(choice), SCHEDULES[schedule].splits
        lowered = lower_blocks(assemble_blocks(found, choice), found.folded, found.resharder, splits=splits_backward)
        memory = chain_bytes(lowered, found.folded, trains=True)
        passes = pass_seconds(found, choice, splits=splits_backward)
        limit = 1e9
        while (plan := _best_plan(passes, totals, memory, pipeline, limit)) is not None:
            remaining = _remaining(found, pipeline, limit)
            alone = _cut_generator(found, pipeline, limit, [choice]).solve_inner(order, remaining).value
            bound, _ = _raised(_cut_generator(found, pipeline, limit, [choice]), order, remaining)
            mean = ColumnGeneration(found, step_program(found, pipeline, limit)).bound_of_choice(choice)
            assert max(bound, alone) <= plan[1].seconds * (1 + TOLERANCE)
            near = _raised(
                _cut_generator(found, pipeline, limit, [choice]), order, remaining, 2, enough=1.01 * plan[1].seconds
            )
            assert near[0] <= plan[1].seconds * (1 + TOLERANCE)
            fitting, more = fitting + 1, max(more, alone / mean - 1)
            limit *= 0.3
    assert fitting > 4
    assert more >= least


@pytest.mark.parametrize("seed", range(4))
def test_a_running_pass_needs_the_transient_bytes_of_its_point(seed: int) -> None:
    """At its peak a block holds the output of one op of its backward, and all its kept bytes."""
    found, limit = _deep("plain"), 1e9
    pipeline, main = Pipeline(4, 4, "interleaved", num_chunks=2), main_kind(found.folded).id
    known = list[float]()
    for choice in _choices(seed):
        cut_generator = _cut_generator(found, pipeline, limit, [choice])
        points, each = cut_generator._points()
        known += points[:, Component.RUNNING].tolist()
        lowered = lower_blocks(assemble_blocks(found, choice), found.folded, found.resharder, splits=False)
        walk = chain_bytes(lowered, found.folded, trains=True).walk
        for point, (_, flavour) in zip(points, each, strict=True):
            held, _ = walk.advance(main, ON_DEVICE[flavour], walk.enter(main))
            needed = max(held.forward, held.backward) - held.kept
            assert point[Component.RUNNING] * (limit - found.folded.buffer_bytes) <= needed * (1 + TOLERANCE)
    assert max(known) > 0


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
@pytest.mark.parametrize("outer", [(0, 0), (1, 1)])
def test_running_passes_take_memory_where_every_stage_has_a_repeated_block(
    schedule: str, chunks: int, outer: tuple[int, int]
) -> None:
    """Of interleaved stages; weight passes hold other bytes, and stages of other blocks may be the running ones."""
    order = TaskOrder(SCHEDULES[schedule], 2, 4, chunks)
    blocks = 2 * chunks
    resident = 0.6 / chunks

    def seconds(running: float) -> float:
        return (
            CutLP(order, _blocks_only(blocks, outer=outer))
            .solve_inner(_point(resident=resident, running=running))
            .seconds
        )

    matters = not order.schedule.splits and outer == (0, 0)
    assert (seconds(0.6) > seconds(0.0) * 1.1) == matters
    assert seconds(0.3) == pytest.approx(seconds(0.0))


@pytest.mark.parametrize("factor", [1.0, 1.7, 4.0])
def test_the_cap_on_blocks_follows_from_the_cutoff(factor: float) -> None:
    """One block more exceeds the cutoff; the cap itself does not."""
    found, pipeline = _deep("plain"), Pipeline(4, 4, "interleaved", num_chunks=2)
    order, remaining = _order(pipeline), _remaining(found, pipeline, 1e9)
    cut_generator = _cut_generator(found, pipeline, 1e9, _choices(3))
    enough = factor * cut_generator.bound(order, remaining).seconds
    each = 4 * remaining.turns * _least_block(found, main_kind(found.folded).id)

    cap = cut_generator._cap(order, cut_generator._in_units(remaining), enough / cut_generator._unit)

    assert cap is not None
    assert cap * each + remaining.fixed <= enough * (1 + 1e-3)
    assert (cap + 1) * each + remaining.fixed >= enough * (1 - 1e-3)
    assert cut_generator.bound(order, remaining, enough).seconds <= max(enough, (cap + 1) * each + remaining.fixed) * (
        1 + 1e-3
    )


@pytest.mark.parametrize("seed", range(4))
def test_transient_bytes_of_points_are_those_of_lowered_blocks(seed: int) -> None:
    """Gathered parameters of two consecutive blocks, gradients to reduce, and received values."""
    found, limit = _deep("plain"), 1e9
    pipeline, main = Pipeline(4, 4, "interleaved", num_chunks=2), main_kind(found.folded).id
    room, sharded = limit - found.folded.buffer_bytes, 0
    for choice in _choices(seed):
        points, _ = _cut_generator(found, pipeline, limit, [choice])._points()
        lowered = lower_blocks(assemble_blocks(found, choice), found.folded, found.resharder, splits=False)
        held = chain_bytes(lowered, found.folded, trains=True)
        received = float(held.arriving[main] + held.returning[main])
        for point in points * room:
            beside = 2 * held.gathered[main] + held.reducing[main]
            assert point[Component.BUFFERS] + point[Component.NEXT_BUFFERS] <= beside * (1 + TOLERANCE)
            assert point[Component.NEXT_BUFFERS] <= held.gathered[main] * (1 + TOLERANCE)
            assert point[Component.RECEIVED] == pytest.approx(received)
            sharded += point[Component.NEXT_BUFFERS] > 0
        assert received > 0
    assert sharded


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
@pytest.mark.parametrize("outer", [(0, 0), (1, 1)])
def test_inner_stages_receive_from_both_sides(schedule: str, chunks: int, outer: tuple[int, int]) -> None:
    """The first and the last stage do not, nor do stages that may have other blocks alone."""
    order = TaskOrder(SCHEDULES[schedule], 2, 4, chunks)
    blocks, inside = 4 * chunks, order.num_stages - 2 * max(1, outer[0])
    remaining = _blocks_only(blocks, outer=outer)

    def seconds(received: float) -> float:
        point = _point(resident=0.25 / chunks, received=received)  # half of a group that has its share
        return CutLP(order, remaining, 2 * chunks, is_most=True).solve_inner(point).seconds

    room = 0.5 / max(1, max(sum(0 < stage < order.num_stages - 1 for stage in own) for own in order.stages_of))
    assert seconds(room * 0.98) == pytest.approx(seconds(0.0))
    assert (seconds(room * 1.5) > seconds(0.0) * 1.1) == (inside > 0)


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_consecutive_blocks_hold_more_where_a_group_has_more_blocks_than_stages(schedule: str, chunks: int) -> None:
    """With as many blocks as stages no two are consecutive; in between only some groups may have such."""
    order = TaskOrder(SCHEDULES[schedule], 2, 4, chunks)

    def seconds(blocks: int, follows: float) -> float:
        share = order.least_of_fullest(blocks)
        point = _point(resident=0.5 / share, next_buffers=follows)
        return CutLP(order, _blocks_only(blocks), share, is_most=True).solve_inner(point).seconds

    assert seconds(2 * chunks, 0.9) == pytest.approx(seconds(2 * chunks, 0.0))
    for blocks in (4 * chunks, 4 * chunks + 1):
        assert seconds(blocks, 0.48) == pytest.approx(seconds(blocks, 0.0))
        assert seconds(blocks, 0.7) > seconds(blocks, 0.0) * 1.1
    assert seconds(2 * chunks + 1, 1.4) > seconds(2 * chunks + 1, 0.0) * 1.1, "one group has a block more"


@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_the_fullest_group_waits_for_groups_before_it(schedule: str, chunks: int, groups: int) -> None:
    """With one block less than all groups could have, one of the last two groups is full; any cut takes longer.

    Updates follow the passes and are waited for in any case.
    """
    order, rng = TaskOrder(SCHEDULES[schedule], groups, 2 * groups, chunks), np.random.default_rng(5)
    count = 2 * order.num_stages - 1
    share, point = order.least_of_fullest(count), _point(update=7.0)
    assert share * groups - count == 1
    least = CutLP(order, _blocks_only(count), share, is_most=True).solve_inner(point).seconds
    backward, weight = (1.0, 1.0) if order.schedule.splits else (2.0, 0.0)
    before = 0.0 if order.schedule.steps_overlap or groups == 2 else 3.0 * (groups - 2)
    alone = order.num_microbatches * 3 * share
    assert least >= (alone + 7.0 * share) * (1 - TOLERANCE)
    plain = CutLP(order, _blocks_only(count), share, is_most=True).solve_inner(_point()).seconds
    assert plain >= (alone + before) * (1 - TOLERANCE)
    found = 0
    for _ in range(200):
        each = rng.multinomial(count - order.num_stages, np.full(order.num_stages, 1 / order.num_stages)) + 1
        if max(sum(int(each[stage]) for stage in own) for own in order.stages_of) == share:
            works = [StageWork(own, backward * own, weight * own, update=7.0 * own) for own in map(float, each)]
            assert least <= scheduled_step(schedule, groups, order.num_microbatches, works) * (1 + TOLERANCE)
            found += 1
    assert found > 3


def test_all_stages_have_one_choice_of_placements() -> None:
    """With one block per stage no stage has more of a component in `COMMON` than another."""
    order, amounts = TaskOrder(SCHEDULES["interleaved"], 2, 4, 2), np.array([0.02, 0.6])
    points = np.concatenate([_point(resident=own, gradient=6.2 - 10 * own, link=6.2 - 10 * own) for own in amounts])
    program = CutLP(order, _blocks_only(4), 2, is_most=True)
    found = program.solve_inner(points)
    taken = found.shares @ points

    assert 0.1 * 4 < taken[:, Component.RESIDENT].sum() < 0.55 * 4
    assert np.allclose(taken[:, Component.RESIDENT], taken[0, Component.RESIDENT], atol=1e-6)
    assert np.allclose(taken[:, Component.GRADIENT], taken[0, Component.GRADIENT], atol=1e-6)


def _point(**amounts: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """A point: a forward of 1, a backward of 2, and the given components."""
    point = np.zeros((1, len(Component)))
    point[0, [Component.FORWARD, Component.BACKWARD, Component.PLAIN]] = 1.0, 2.0, 3.0
    for name, amount in amounts.items():
        point[0, Component[name.upper()]] = amount
    return point


def _blocks_only(blocks: int, **more: object) -> RemainingCosts:
    """A `RemainingCosts` of repeated blocks only."""
    return replace(RemainingCosts(blocks, 0.0, (1.0, 1.0), 0.0, 0.0, 0.0, (0, 0), 1.0), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_the_bound_of_equal_blocks_is_between_busy_groups_and_an_even_cut(schedule: str, chunks: int) -> None:
    """At least a group that is busy all the time, at most evenly cut whole blocks."""
    order = TaskOrder(SCHEDULES[schedule], 2, 4, chunks)
    splits_backward = SCHEDULES[schedule].splits
    for blocks in (4 * chunks, 4 * chunks + 1):
        found = CutLP(order, _blocks_only(blocks)).solve_inner(_point())
        each = [blocks // (2 * chunks) + (stage < blocks % (2 * chunks)) for stage in range(2 * chunks)]
        backward, weight = (1.0, 1.0) if splits_backward else (2.0, 0.0)
        works = [StageWork(own, backward * own, weight * own) for own in each]
        assert 4 * 3 * -(-blocks // 2) <= found.seconds * (1 + TOLERANCE)
        assert found.seconds <= scheduled_step(schedule, 2, 4, works) * (1 + TOLERANCE)
        assert found.shares.sum() == pytest.approx(blocks)


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_no_cut_of_whole_blocks_is_faster_than_its_case(schedule: str, chunks: int) -> None:
    """Either no group has more than its share of blocks, or some group has; cuts of both cases occur."""
    order, rng, count = TaskOrder(SCHEDULES[schedule], 2, 4, chunks), np.random.default_rng(4), 4 * chunks + 1
    share = order.least_of_fullest(count)
    even = CutLP(order, _blocks_only(count), share, is_most=True).solve_inner(_point()).seconds
    uneven = CutLP(order, _blocks_only(count), share + 1).solve_inner(_point()).seconds
    backward, weight = (1.0, 1.0) if SCHEDULES[schedule].splits else (2.0, 0.0)
    seen = set[bool]()
    for _ in range(60):
        each = rng.multinomial(count - 2 * chunks, np.full(2 * chunks, 0.5 / chunks)) + 1
        most = max(sum(int(each[stage]) for stage in own) for own in order.stages_of)
        works = [StageWork(own, backward * own, weight * own) for own in map(float, each)]
        seconds = scheduled_step(schedule, 2, 4, works)
        assert (even if most == share else uneven) <= seconds * (1 + TOLERANCE)
        assert 4 * 3 * (share + 1) <= uneven * (1 + TOLERANCE)
        seen.add(most == share)
    assert seen == {True, False}


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 4), ("zb-h1", 1), ("zb-v", 2)])
def test_cases_have_as_many_rows_with_equal_variables(schedule: str, chunks: int) -> None:
    """So that a basis of one case starts the other."""
    order, remaining = TaskOrder(SCHEDULES[schedule], 3, 6, chunks), _blocks_only(14)
    share = order.least_of_fullest(14)
    cases = [(share, True, None), (share + 1, False, None), (share + 1, False, share + 1), (share, False, share + 2)]
    programs = [CutLP(order, remaining, most, is_most=is_most, cap=cap)._program for most, is_most, cap in cases]
    rows = [[tuple(sorted(row)) for row in program._index] for program in programs]
    apart = [number for number, each in enumerate(zip(*rows, strict=True)) if len(set(each)) > 1]
    # but for how long the fullest group takes, which waits for others if none has more, and what groups hold that have
    # more blocks than stages for certain
    assert len(apart) <= 2 + order.num_groups


def test_whole_blocks_exceed_memory_where_fractions_fit() -> None:
    """Three groups of two blocks, of which one can hold less than two: some group has three."""
    order = TaskOrder(SCHEDULES["1f1b"], 3, 6, 1)
    held = [float(order.held_at_peaks(group)[:, 0].max()) for group in range(3)]
    assert held == [3.0, 2.0, 1.0]
    remaining, point = _blocks_only(6), _point(kept=0.18)  # 1.08 of a device in the first group

    even = CutLP(order, remaining, 2, is_most=True).solve_inner(point).seconds
    uneven = CutLP(order, remaining, 3).solve_inner(point).seconds
    mixed = CutLP(order, remaining).solve_inner(point).seconds

    assert mixed < uneven < even  # as if there were a price for what is short


def test_each_stage_has_a_block_unless_it_may_have_other_blocks_alone() -> None:
    """Four blocks on four stages are one each; if the first stage may have another block, three suffice."""
    order, points = TaskOrder(SCHEDULES["interleaved"], 2, 4, 2), np.vstack([_point(), _point(kept=9.0)])

    every = CutLP(order, _blocks_only(4)).solve_inner(points).shares.sum(axis=1)
    but_one = CutLP(order, _blocks_only(3, outer=(1, 0))).solve_inner(points).shares.sum(axis=1)

    assert every == pytest.approx(1.0)
    assert but_one == pytest.approx([0.0, 1.0, 1.0, 1.0])
    nothing = CutLP(order, _blocks_only(3)).solve_inner(points)
    assert nothing.seconds == math.inf
    assert not nothing.prices.any()
    prices = np.zeros(len(Component))
    prices[Component.PLAIN] = 1.0
    cutting = CutLP(order, _blocks_only(3)).solve_outer([(prices, 1.0)], 1.0)
    assert cutting.seconds == math.inf
    assert cutting.is_binding.tolist() == [True]


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_a_bound_at_the_cutoff_is_valid(schedule: str, chunks: int) -> None:
    """The case of a fuller group is left at the bound of its passes, which some choice attains."""
    found, pipeline = _deep("slow"), Pipeline(2 * chunks, 4, schedule, num_chunks=chunks)
    order, remaining = _order(pipeline), _remaining(found, pipeline, 1e15)
    cut_generator = _cut_generator(found, pipeline, 1e15, _choices(5))

    bound = cut_generator.bound(order, remaining).seconds

    assert 0 < cut_generator.bound(order, remaining, 0.0).seconds <= bound * (1 + TOLERANCE)
    points, _ = cut_generator._points()
    assert cut_generator._plain_seconds == pytest.approx(float(points[:, Component.PLAIN].min()), rel=1e-3)


def test_standard_prices_of_memory_have_none_for_traffic() -> None:
    """Steps mostly do not wait for it."""
    found, pipeline = _deep("plain"), Pipeline(4, 4, "interleaved", num_chunks=2)
    order, remaining = _order(pipeline), _remaining(found, pipeline, 1e9)
    cut_generator = _cut_generator(found, pipeline, 1e9, _choices(3))
    cut_generator.bound(order, remaining)
    known = cut_generator.num_cuts
    cut_generator.price_memory(order, remaining, levels_of(order))

    prices = np.array([own for own, _ in cut_generator._cuts[known:]])
    assert not prices[:, [Component.GRADIENT, Component.LINK, Component.LINK_ONCE]].any()
    assert (prices[:, [Component.KEPT, Component.RESIDENT, Component.UPDATE]] > 0).all()


def test_levels_span_stages_with_many_and_few_microbatches() -> None:
    """One level where all groups hold as many, and the least level last."""
    assert levels_of(TaskOrder(SCHEDULES["gpipe"], 4, 8, 1)) == [8.0, LEAST_LEVEL]
    for schedule, chunks in OTHERS:
        *levels, few = levels_of(TaskOrder(SCHEDULES[schedule], 8, 16, chunks))
        assert levels == sorted(set(levels), reverse=True)
        assert 1 <= len(levels) <= LEVELS
        assert few == LEAST_LEVEL
    many, *_, last, _ = levels_of(TaskOrder(SCHEDULES["1f1b"], 16, 32, 1))  # two groups to a part
    assert (many, last) == (15.5, 1.5)


def test_memory_is_cheaper_the_longer_a_step_is() -> None:
    """With more microbatches through as many groups, the same room saves a smaller share of the step."""
    found = _deep("plain")
    dearest = []
    for count in (4, 16):
        pipeline = Pipeline(4, count, "interleaved", num_chunks=2)
        order, remaining = _order(pipeline), _remaining(found, pipeline, 1e9)
        cut_generator = _cut_generator(found, pipeline, 1e9, _choices(3))
        cut_generator.price_memory(order, remaining, (2.0,))
        dearest.append(
            max(
                own[Component.RESIDENT] / own[Component.FORWARD]
                for own, _ in cut_generator._cuts
                if own[Component.FORWARD]
            )
        )
    assert dearest[1] < 0.5 * dearest[0]


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_links_and_updates_make_a_step_longer(schedule: str, chunks: int) -> None:
    """A link that is busy all the time, traffic after the last pass, and updates after the last task."""
    order, blocks = TaskOrder(SCHEDULES[schedule], 2, 4, chunks), 4 * chunks
    program = CutLP(order, _blocks_only(blocks))
    bare = program.solve_inner(_point()).seconds

    assert program.solve_inner(_point(link=10.0)).seconds >= 4 * 10 * blocks / 2 * (1 - TOLERANCE)
    assert program.solve_inner(_point(update=10.0)).seconds >= (4 * 3 + 10) * blocks / 2 * (1 - TOLERANCE)
    once = program.solve_inner(_point(link_once=100.0)).seconds
    assert once >= 100 * blocks / 2 * (1 - TOLERANCE)
    assert once > bare
    assert program.solve_inner(_point(gradient=100.0, link=0.0)).seconds > bare


def test_missing_memory_has_a_price() -> None:
    """Of resident, kept, deferred and transient bytes, on groups with repeated blocks."""
    order, blocks = TaskOrder(SCHEDULES["zb-h1"], 2, 4, 1), 4
    bare = CutLP(order, _blocks_only(blocks)).solve_inner(_point()).seconds

    def costs(remaining: RemainingCosts, **amounts: float) -> bool:
        return CutLP(order, remaining).solve_inner(_point(**amounts)).seconds > bare * 1.01

    assert not costs(_blocks_only(blocks), resident=0.4)
    assert costs(_blocks_only(blocks), resident=0.6)
    assert costs(_blocks_only(blocks), kept=0.3)
    assert not costs(_blocks_only(blocks), kept=0.1, buffers=0.1)
    assert costs(_blocks_only(blocks), kept=0.1, buffers=0.9)
    assert costs(_blocks_only(blocks, late=0.3))
    # Other blocks fill a group alone, and blocks that are alike the other one.
    assert not costs(_blocks_only(blocks, resident=0.9, outer=(1, 0)), resident=0.2, buffers=0.2)
    assert costs(_blocks_only(blocks, resident=0.9), resident=0.2, buffers=0.2)


def test_the_outer_program_is_below_the_inner_one() -> None:
    """They agree with one cut per price of a stage."""
    rng = np.random.default_rng(1)
    points = np.vstack([_point(kept=0.2), _point(kept=0.05, backward=3.0), _point(kept=0.1, resident=0.1, link=1.0)])
    for schedule, chunks in OTHERS:
        program = CutLP(TaskOrder(SCHEDULES[schedule], 2, 4, chunks), _blocks_only(6 * chunks))
        found = program.solve_inner(points)
        prices = [*rng.random((5, len(Component))), *found.prices]
        cuts = [(own, float((points @ own).min())) for own in prices]
        assert program.solve_outer(cuts[:5], 3.0).seconds <= found.seconds * (1 + TOLERANCE)
        assert program.solve_outer(cuts, 3.0).seconds == pytest.approx(found.seconds, rel=1e-4)


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_warm_starts_reach_the_same_optimum(schedule: str, chunks: int) -> None:
    """With further cuts or points, and from one case to the other."""
    points = np.vstack([_point(kept=0.05, backward=3.0), _point(kept=0.1, resident=0.1, link=1.0), _point(kept=0.2)])
    order, remaining = TaskOrder(SCHEDULES[schedule], 2, 4, chunks), _blocks_only(6 * chunks)
    program, more = CutLP(order, remaining, 3 * chunks, is_most=True), CutLP(order, remaining, 3 * chunks + 1)
    prices = np.random.default_rng(2).random((8, len(Component)))
    cuts = [(own, float((points @ own).min())) for own in prices]
    few, first = program.solve_outer(cuts[:3], 3.0), program.solve_inner(points[:2])

    for each in (program, more):
        assert each.solve_outer(cuts, 3.0, few.basis).seconds == pytest.approx(
            each.solve_outer(cuts, 3.0).seconds, rel=1e-6
        )
        found, cold = each.solve_inner(points, first.basis), each.solve_inner(points)
        assert found.seconds == pytest.approx(cold.seconds, rel=1e-6)
        assert found.shares.sum() == pytest.approx(6 * chunks)
    assert few.seconds <= program.solve_outer(cuts, 3.0).seconds * (1 + TOLERANCE)


@pytest.mark.parametrize("failing", range(5))
def test_a_program_is_solved_by_another_method_where_one_gets_stuck(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm start may end without an answer: then the program is solved anew."""
    program = SparseLP()
    program.add({0: 1.0, 1: 2.0}, least=4.0)
    program.add({0: 1.0}, most=3.0)
    known = program.minimise({0: 1.0, 1: 3.0}, 2)
    program.add({1: 1.0}, least=1.0)
    runs: list[str] = []
    run = highspy.Highs.run

    def stuck(highs: highspy.Highs) -> object:
        runs.append(highs.getOptionValue("solver")[1])
        return run(highs) if len(runs) > failing else None

    monkeypatch.setattr(highspy.Highs, "run", stuck)

    assert program.minimise({0: 1.0, 1: 3.0}, 2, known.basis).value == pytest.approx(5.0)
    assert len(runs) == failing + 1


def test_no_group_has_a_choice_of_its_own() -> None:
    """Components in `COMMON` are equal on all groups: of two layouts no group takes its own."""
    order, blocks = TaskOrder(SCHEDULES["1f1b"], 2, 4, 1), 4
    assert [float(order.held_at_peaks(group)[:, 0].max()) for group in range(2)] == [2.0, 1.0]
    copied, sharded = _point(kept=0.1, resident=0.35), _point(kept=0.1, resident=0.2, link=4.0, gradient=4.0)
    points = np.vstack([copied, sharded])  # two blocks that are copied fit into the second group only

    even = CutLP(order, _blocks_only(blocks), 2, is_most=True).solve_inner(points)
    taken = even.shares @ points
    resident = taken[:, Component.RESIDENT]

    assert even.shares.sum(axis=1) == pytest.approx(2.0)
    assert resident[0] == pytest.approx(resident[1])
    alone = [CutLP(order, _blocks_only(blocks), 2, is_most=True).solve_inner(own).seconds for own in (copied, sharded)]
    assert even.seconds <= min(alone) * (1 + TOLERANCE)
    assert max(alone) > even.seconds * 1.01


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_messages_end_blocks_and_received_bytes_make_a_step_longer(schedule: str, chunks: int) -> None:
    """An end block is on its stage, a message is waited for, and received bytes take room."""
    order, blocks = TaskOrder(SCHEDULES[schedule], 2, 4, chunks), 4 * chunks
    bare = CutLP(order, _blocks_only(blocks)).solve_inner(_point()).seconds
    passes = (2.0, 2.0, 2.0) if SCHEDULES[schedule].splits else (2.0, 4.0)

    anywhere = CutLP(order, _blocks_only(blocks, seconds=6.0, outer=(0, 1))).solve_inner(_point()).seconds
    ends = (tuple(0.0 for _ in passes), passes)
    share = order.least_of_fullest(blocks)
    placed = CutLP(order, _blocks_only(blocks, seconds=6.0, outer=(0, 1), ends=ends), share, is_most=True)
    known = CutLP(order, _blocks_only(blocks, seconds=6.0, outer=(0, 1), edges=(0.0, 6.0)), share, is_most=True)
    sent = CutLP(order, _blocks_only(blocks, hop=0.5)).solve_inner(_point()).seconds
    room = (
        CutLP(order, _blocks_only(blocks, received=(0.2, 0.2)))
        .solve_inner(_point(resident=0.45 / (2 * chunks)))
        .seconds
    )

    assert anywhere > bare
    assert placed.solve_inner(_point()).seconds > anywhere * (1 - TOLERANCE)
    assert placed.solve_inner(_point()).seconds >= 4 * (3 * share + 6) * (1 - TOLERANCE), (
        "that group has its share, too"
    )
    least = known.solve_inner(_point()).seconds
    assert 4 * (3 * share + 6) * (1 - TOLERANCE) <= least, "whichever pass takes it"
    assert least <= placed.solve_inner(_point()).seconds * (1 + TOLERANCE), "which is not known"
    assert sent >= bare * (1 - TOLERANCE)
    assert sent > bare or SCHEDULES[schedule].steps_overlap, "steps that overlap hide what they wait for"
    assert CutLP(order, _blocks_only(blocks)).solve_inner(
        _point(resident=0.45 / (2 * chunks))
    ).seconds == pytest.approx(bare)
    assert (room > bare * 1.01) == (chunks > 1), "of a single stage at an end one side alone sends"


def test_cuts_that_are_not_binding_are_left_out_of_large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound stays: the binding cuts prove it."""
    monkeypatch.setattr(task_lp, "LARGE", 0)
    found, pipeline = _deep("slow"), Pipeline(2, 4, "zb-h1")
    order, remaining = _order(pipeline), _remaining(found, pipeline, 1e15)
    cut_generator = _cut_generator(found, pipeline, 1e15, _choices(5))

    first = cut_generator.bound(order, remaining)
    again = cut_generator.bound(order, remaining, known=first)

    assert first.basis is None
    assert 0 < len(first.cuts) < first.seen == cut_generator.num_cuts
    assert again.seconds == pytest.approx(first.seconds, rel=TOLERANCE)
    cut_generator.solve_inner(order, remaining, first.case)
    more = cut_generator.bound(order, remaining, known=first)
    assert set(more.cuts) <= {*first.cuts, *range(first.seen, cut_generator.num_cuts)}
    assert more.seconds >= first.seconds * (1 - TOLERANCE)
