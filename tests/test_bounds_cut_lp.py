"""What a step takes at least whose blocks are spread over stages, under schedules without a closed form."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import highspy
import numpy as np
import pytest

from autopar.bounds import task_lp
from autopar.bounds.block_lp import block_program
from autopar.bounds.column_generation import Hull
from autopar.bounds.cut_lp import Order, Rest, Spread, Take
from autopar.bounds.master_problem import step_program
from autopar.bounds.priced_cuts import FEW, LEVELS, Spreader, levels_of
from autopar.bounds.roofline import floor
from autopar.bounds.saved_values import main_kind, put_off, received
from autopar.bounds.task_lp import LeastProgram
from autopar.cost import CostModel, Overlap, Stack
from autopar.describe.block_decisions import assemble_blocks
from autopar.discover import discover
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import kind_weights, problem, weights
from autopar.formulate.manual_recipes import recipes, restrict
from autopar.formulate.scheduled_step import StageWork, pass_seconds, scheduled_step
from autopar.formulate.step_time import Pipeline, Split
from autopar.formulate.tables import Slot, Tables
from autopar.pipeline_partition.interleaved import Groups, grouped_time
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

OTHERS = [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("interleaved", 2), ("interleaved", 3)]
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
    """Return its decisions."""
    deep = _model()
    costs = CostModel(SLOW if stack == "slow" else COSTS.cluster, COSTS.policy, STACKS[stack])
    return build_tables(deep.folded(8), discover(deep.probe), Mesh.of(outer=2, inner=2), costs)


@cache
def _choices(seed: int) -> tuple[Choice, ...]:
    """Return a choice that splits the batch, which has gradients to reduce on any links, and one near it."""
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


def _order(pipeline: Pipeline) -> Order:
    return Order(SCHEDULES[pipeline.schedule], pipeline.num_groups, pipeline.num_microbatches, pipeline.num_chunks)


def _rest(found: Tables, pipeline: Pipeline, limit: float) -> Rest:
    """Return what there is besides blocks: floors of seconds; bytes of others are left out, as far as they may be."""
    under = floor(found.folded, found.folded, (8, 8), found.costs)
    alike, others = under.passes_seconds(found.mesh, 8)
    count = main_kind(found.folded).count
    halves = float(alike[1]) / count, float(alike[2]) / count
    late = sum(memory.least(found.mesh.shape) for memory in put_off(found.folded, found.costs)) / limit
    arriving, returning = (
        sum(memory.least(found.mesh.shape) for memory in own) / limit
        for own in received(found.folded, found.costs, main_kind(found.folded).id)
    )
    assert arriving > 0 < returning, "so that it tells"
    ends = []
    for place in (0, -1):
        names = [op.name for op in found.folded.kinds[found.folded.chain[place]].ops]
        forward, *backward = under.passes_of(names, found.mesh, 8).tolist()
        assert forward > 0 < sum(backward), "so that it tells"
        ends.append((forward, *backward) if SCHEDULES[pipeline.schedule].splits else (forward, sum(backward)))
    edges = [_alone(found, found.folded.chain[place]) for place in (0, -1)]
    assert any(edge > sum(end) * (1 + TOLERANCE) for edge, end in zip(edges, ends, strict=True)), "so that it tells"
    return Rest(
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


def _alone(found: Tables, kind: int) -> float:
    """Return the least seconds of a block of a kind, under the placements that are best for it."""
    return _solve(problem(found, kind_weights(found, [kind], 0.0)), np.inf).bound


def _whole(found: Tables, pipeline: Pipeline) -> float:
    """Return the least seconds of a microbatch through all blocks, without what runs again."""
    plain = weights(found, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=True)
    return _solve(problem(found, plain), np.inf).bound * pipeline.num_groups / pipeline.rounds


def _spreader(found: Tables, pipeline: Pipeline, limit: float, choices: Sequence[Choice]) -> Spreader:
    program = block_program(found, pipeline, limit, ON_DEVICE, (Recompute.NONE,) * len(found.folded.kinds))
    return Spreader(found, program, choices, _solve)


def _raised(
    spreader: Spreader, order: Order, rest: Rest, steps: int = 6, enough: float = math.inf
) -> tuple[float, float]:
    """Return the bound after some rounds, and what the choices known allow."""
    value, basis = np.inf, None
    first = spreader.bound(order, rest, enough)
    spreader.price_memory(order, rest, levels_of(order), enough)
    known = spreader.bound(order, rest, enough, known=first)
    bound = max(first.seconds, known.seconds)
    for _ in range(steps):
        found = spreader.spread(order, rest, known.case, basis)
        value, basis = found.value, found.basis
        if not found.cuts:
            break
        known = spreader.bound(order, rest, enough, known=known)
        bound = max(bound, known.seconds)
    return bound, value


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_no_cut_of_any_choice_is_faster_than_the_bound(schedule: str, chunks: int, stack: str) -> None:
    """Whatever the blocks recompute, where memory is no matter, and not even of choices that are known alone."""
    found, rng = _deep(stack), np.random.default_rng(3)
    chain = found.folded.chain
    pipeline = Pipeline(2 * chunks, 4, schedule, Overlap.of(STACKS[stack]), 1e-4, chunks, 0.1 if chunks > 1 else 0.0)
    choices, order, rest = _choices(5), _order(pipeline), _rest(found, pipeline, 1e15)
    bound, value = _raised(_spreader(found, pipeline, 1e15, choices), order, rest)

    assert 0 < bound <= value * (1 + TOLERANCE)
    for choice in choices:
        alone = _spreader(found, pipeline, 1e15, [choice]).spread(order, rest).value
        totals = found.block_seconds(choice)
        passes = pass_seconds(found, choice, splits=SCHEDULES[schedule].splits)
        every = splits(len(chain), pipeline.num_stages)
        for number in rng.integers(len(every), size=40):
            flavours = [
                tuple(ON_DEVICE[own] for own in rng.integers(3, size=stop - start)) for start, stop in every[number]
            ]
            split = Split(every[number], tuple(flavours))
            seconds = grouped_time(passes, totals, chain, pipeline, split, 0.0).seconds
            assert max(bound, alone) <= seconds * (1 + TOLERANCE)


@pytest.mark.parametrize(("stack", "least"), [pytest.param("plain", -0.2, marks=pytest.mark.slow), ("slow", 0.2)])
@pytest.mark.parametrize(("schedule", "chunks"), one_in(2, OTHERS, unpacked=True))
def test_no_plan_that_fits_is_faster_than_the_bound(schedule: str, chunks: int, stack: str, least: float) -> None:
    """At limits from what the loosest plan needs down to what none fits.

    Of one choice it says more than the mean stage does where links are slow. Where blocks that are not alike take
    much, of which it knows floors only, it says less.
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
        while (plan := Groups(passes, totals, memory, pipeline, limit, 0.0).best()) is not None:
            rest = _rest(found, pipeline, limit)
            alone = _spreader(found, pipeline, limit, [choice]).spread(order, rest).value
            bound, _ = _raised(_spreader(found, pipeline, limit, [choice]), order, rest)
            mean = Hull(found, step_program(found, pipeline, limit)).alone(choice)
            assert max(bound, alone) <= plan[1].seconds * (1 + TOLERANCE)
            near = _raised(_spreader(found, pipeline, limit, [choice]), order, rest, 2, enough=1.01 * plan[1].seconds)
            assert near[0] <= plan[1].seconds * (1 + TOLERANCE)
            fitting, more = fitting + 1, max(more, alone / mean - 1)
            limit *= 0.3
    assert fitting > 4
    assert more >= least


@pytest.mark.parametrize("seed", range(4))
def test_a_pass_needs_no_less_besides_than_is_known_of_it(seed: int) -> None:
    """Whatever runs again, at its fullest moment a block holds what one op of its backward makes, and all it keeps."""
    found, limit = _deep("plain"), 1e9
    pipeline, main = Pipeline(4, 4, "interleaved", num_chunks=2), main_kind(found.folded).id
    known = list[float]()
    for choice in _choices(seed):
        spreader = _spreader(found, pipeline, limit, [choice])
        points, each = spreader._points()
        known += points[:, Take.RUNNING].tolist()
        lowered = lower_blocks(assemble_blocks(found, choice), found.folded, found.resharder, splits=False)
        walk = chain_bytes(lowered, found.folded, trains=True).walk
        for point, (_, flavour) in zip(points, each, strict=True):
            held, _ = walk.advance(main, ON_DEVICE[flavour], walk.enter(main))
            needed = max(held.forward, held.backward) - held.kept
            assert point[Take.RUNNING] * (limit - found.folded.buffer_bytes) <= needed * (1 + TOLERANCE)
    assert max(known) > 0


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
@pytest.mark.parametrize("outer", [(0, 0), (1, 1)])
def test_what_runs_takes_memory_where_every_stage_has_such_a_block(
    schedule: str, chunks: int, outer: tuple[int, int]
) -> None:
    """Of interleaved stages; weight passes hold something else, and stages of other blocks may be what runs."""
    order = Order(SCHEDULES[schedule], 2, 4, chunks)
    blocks = 2 * chunks
    resident = 0.6 / chunks

    def seconds(running: float) -> float:
        return Spread(order, _plain(blocks, outer=outer)).of_points(_point(resident=resident, running=running)).seconds

    matters = not order.schedule.splits and outer == (0, 0)
    assert (seconds(0.6) > seconds(0.0) * 1.1) == matters
    assert seconds(0.3) == pytest.approx(seconds(0.0))


@pytest.mark.parametrize("factor", [1.0, 1.7, 4.0])
def test_no_group_has_more_blocks_than_what_is_enough_has_time_for(factor: float) -> None:
    """Passes of one block more take longer than that, for each microbatch, and those of no block less do."""
    found, pipeline = _deep("plain"), Pipeline(4, 4, "interleaved", num_chunks=2)
    order, rest = _order(pipeline), _rest(found, pipeline, 1e9)
    spreader = _spreader(found, pipeline, 1e9, _choices(3))
    enough = factor * spreader.bound(order, rest).seconds
    each = 4 * rest.turns * _alone(found, main_kind(found.folded).id)

    cap = spreader._cap(order, spreader._scaled(rest), enough / spreader._unit)

    assert cap is not None
    assert cap * each + rest.fixed <= enough * (1 + 1e-3)
    assert (cap + 1) * each + rest.fixed >= enough * (1 - 1e-3)
    assert spreader.bound(order, rest, enough).seconds <= max(enough, (cap + 1) * each + rest.fixed) * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_hold_no_more_beside_their_passes_than_is_known_of_them(seed: int) -> None:
    """What is gathered for two of them in a row, what is reduced, and what a stage of them receives."""
    found, limit = _deep("plain"), 1e9
    pipeline, main = Pipeline(4, 4, "interleaved", num_chunks=2), main_kind(found.folded).id
    room, sharded = limit - found.folded.buffer_bytes, 0
    for choice in _choices(seed):
        points, _ = _spreader(found, pipeline, limit, [choice])._points()
        lowered = lower_blocks(assemble_blocks(found, choice), found.folded, found.resharder, splits=False)
        held = chain_bytes(lowered, found.folded, trains=True)
        received = float(held.arriving[main] + held.returning[main])
        for point in points * room:
            beside = 2 * held.gathered[main] + held.reducing[main]
            assert point[Take.BESIDE] + point[Take.NEXT] <= beside * (1 + TOLERANCE)
            assert point[Take.NEXT] <= held.gathered[main] * (1 + TOLERANCE)
            assert point[Take.RECEIVED] == pytest.approx(received)
            sharded += point[Take.NEXT] > 0
        assert received > 0
    assert sharded


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
@pytest.mark.parametrize("outer", [(0, 0), (1, 1)])
def test_stages_inside_receive_from_both_sides(schedule: str, chunks: int, outer: tuple[int, int]) -> None:
    """The first and the last stage do not, nor do those that may have other blocks alone."""
    order = Order(SCHEDULES[schedule], 2, 4, chunks)
    blocks, inside = 4 * chunks, order.num_stages - 2 * max(1, outer[0])
    rest = _plain(blocks, outer=outer)

    def seconds(received: float) -> float:
        point = _point(resident=0.25 / chunks, received=received)  # half of a group that has its share
        return Spread(order, rest, 2 * chunks, is_most=True).of_points(point).seconds

    room = 0.5 / max(1, max(sum(0 < stage < order.num_stages - 1 for stage in own) for own in order.stages_of))
    assert seconds(room * 0.98) == pytest.approx(seconds(0.0))
    assert (seconds(room * 1.5) > seconds(0.0) * 1.1) == (inside > 0)


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_blocks_in_a_row_hold_more_where_a_group_has_more_of_them_than_stages(schedule: str, chunks: int) -> None:
    """With as many as stages none has another one next to it; in between only some groups may have."""
    order = Order(SCHEDULES[schedule], 2, 4, chunks)

    def seconds(blocks: int, follows: float) -> float:
        share = order.share(blocks)
        point = _point(resident=0.5 / share, next=follows)
        return Spread(order, _plain(blocks), share, is_most=True).of_points(point).seconds

    assert seconds(2 * chunks, 0.9) == pytest.approx(seconds(2 * chunks, 0.0))
    for blocks in (4 * chunks, 4 * chunks + 1):
        assert seconds(blocks, 0.48) == pytest.approx(seconds(blocks, 0.0))
        assert seconds(blocks, 0.7) > seconds(blocks, 0.0) * 1.1
    assert seconds(2 * chunks + 1, 1.4) > seconds(2 * chunks + 1, 0.0) * 1.1, "one group has a block more"


@pytest.mark.parametrize("groups", [2, 3, 4])
@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_the_fullest_group_waits_for_those_before_it(schedule: str, chunks: int, groups: int) -> None:
    """With one block less than all groups could have, one of the last two has its share; whoever it is, cuts take more.

    Updates come after the passes, and are waited for in any case.
    """
    order, rng = Order(SCHEDULES[schedule], groups, 2 * groups, chunks), np.random.default_rng(5)
    count = 2 * order.num_stages - 1
    share, point = order.share(count), _point(update=7.0)
    assert share * groups - count == 1
    least = Spread(order, _plain(count), share, is_most=True).of_points(point).seconds
    backward, weight = (1.0, 1.0) if order.schedule.splits else (2.0, 0.0)
    before = 0.0 if order.schedule.steps_overlap or groups == 2 else 3.0 * (groups - 2)
    alone = order.num_microbatches * 3 * share
    assert least >= (alone + 7.0 * share) * (1 - TOLERANCE)
    plain = Spread(order, _plain(count), share, is_most=True).of_points(_point()).seconds
    assert plain >= (alone + before) * (1 - TOLERANCE)
    found = 0
    for _ in range(200):
        each = rng.multinomial(count - order.num_stages, np.full(order.num_stages, 1 / order.num_stages)) + 1
        if max(sum(int(each[stage]) for stage in own) for own in order.stages_of) == share:
            works = [StageWork(own, backward * own, weight * own, update=7.0 * own) for own in map(float, each)]
            assert least <= scheduled_step(schedule, groups, order.num_microbatches, works) * (1 + TOLERANCE)
            found += 1
    assert found > 3


def test_stages_have_one_choice_of_placements_each_block_of_them() -> None:
    """Where each has one block, none has more of what placements decide than another, whatever it would be good for."""
    order, amounts = Order(SCHEDULES["interleaved"], 2, 4, 2), np.array([0.02, 0.6])
    points = np.concatenate([_point(resident=own, gradient=6.2 - 10 * own, link=6.2 - 10 * own) for own in amounts])
    spread = Spread(order, _plain(4), 2, is_most=True)
    found = spread.of_points(points)
    taken = found.shares @ points

    assert 0.1 * 4 < taken[:, Take.RESIDENT].sum() < 0.55 * 4
    assert np.allclose(taken[:, Take.RESIDENT], taken[0, Take.RESIDENT], atol=1e-6)
    assert np.allclose(taken[:, Take.GRADIENT], taken[0, Take.GRADIENT], atol=1e-6)


def _point(**amounts: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return what a block takes: a forward of 1, a backward of 2, and what is given besides."""
    point = np.zeros((1, len(Take)))
    point[0, [Take.FORWARD, Take.BACKWARD, Take.PLAIN]] = 1.0, 2.0, 3.0
    for name, amount in amounts.items():
        point[0, Take[name.upper()]] = amount
    return point


def _plain(blocks: int, **more: object) -> Rest:
    """Return a rest of nothing but blocks."""
    return replace(Rest(blocks, 0.0, (1.0, 1.0), 0.0, 0.0, 0.0, (0, 0), 1.0), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_equal_blocks_take_no_longer_than_cut_evenly(schedule: str, chunks: int) -> None:
    """And no less than a group that is at work all the time, whole blocks counted."""
    order = Order(SCHEDULES[schedule], 2, 4, chunks)
    splits_backward = SCHEDULES[schedule].splits
    for blocks in (4 * chunks, 4 * chunks + 1):
        found = Spread(order, _plain(blocks)).of_points(_point())
        each = [blocks // (2 * chunks) + (stage < blocks % (2 * chunks)) for stage in range(2 * chunks)]
        backward, weight = (1.0, 1.0) if splits_backward else (2.0, 0.0)
        works = [StageWork(own, backward * own, weight * own) for own in each]
        assert 4 * 3 * -(-blocks // 2) <= found.seconds * (1 + TOLERANCE)
        assert found.seconds <= scheduled_step(schedule, 2, 4, works) * (1 + TOLERANCE)
        assert found.shares.sum() == pytest.approx(blocks)


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_no_cut_of_whole_blocks_is_faster_than_its_case(schedule: str, chunks: int) -> None:
    """Either no group has more than its share of blocks, or some group does; both cases have cuts."""
    order, rng, count = Order(SCHEDULES[schedule], 2, 4, chunks), np.random.default_rng(4), 4 * chunks + 1
    share = order.share(count)
    even = Spread(order, _plain(count), share, is_most=True).of_points(_point()).seconds
    uneven = Spread(order, _plain(count), share + 1).of_points(_point()).seconds
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
def test_cases_have_the_same_rows(schedule: str, chunks: int) -> None:
    """A program goes on from the optimum of another case: row by row, whether it says something or not."""
    order, rest = Order(SCHEDULES[schedule], 3, 6, chunks), _plain(14)
    share = order.share(14)
    cases = [(share, True, None), (share + 1, False, None), (share + 1, False, share + 1), (share, False, share + 2)]
    programs = [Spread(order, rest, most, is_most=is_most, cap=cap)._program for most, is_most, cap in cases]
    rows = [[tuple(sorted(row)) for row in program._index] for program in programs]
    apart = [number for number, each in enumerate(zip(*rows, strict=True)) if len(set(each)) > 1]
    # but for how long the fullest group takes, which waits for others if none has more, and what groups hold that have
    # more blocks than stages for certain
    assert len(apart) <= 2 + order.num_groups


def test_whole_blocks_say_where_shares_of_them_fit() -> None:
    """Three groups of two blocks, of which one could hold less than two: then some group has three."""
    order = Order(SCHEDULES["1f1b"], 3, 6, 1)
    held = [float(order.fullest(group)[:, 0].max()) for group in range(3)]
    assert held == [3.0, 2.0, 1.0]
    rest, point = _plain(6), _point(kept=0.18)  # 1.08 of a device in the first group

    even = Spread(order, rest, 2, is_most=True).of_points(point).seconds
    uneven = Spread(order, rest, 3).of_points(point).seconds
    mixed = Spread(order, rest).of_points(point).seconds

    assert mixed < uneven < even  # as if there were a price for what is short


def test_each_stage_has_a_block_unless_it_may_have_others_alone() -> None:
    """Four blocks on four stages are one each; if the first stage may have another one, the rest have more."""
    order, points = Order(SCHEDULES["interleaved"], 2, 4, 2), np.vstack([_point(), _point(kept=9.0)])

    every = Spread(order, _plain(4)).of_points(points).shares.sum(axis=1)
    but_one = Spread(order, _plain(3, outer=(1, 0))).of_points(points).shares.sum(axis=1)

    assert every == pytest.approx(1.0)
    assert but_one == pytest.approx([0.0, 1.0, 1.0, 1.0])
    nothing = Spread(order, _plain(3)).of_points(points)
    assert nothing.seconds == math.inf
    assert not nothing.prices.any()
    prices = np.zeros(len(Take))
    prices[Take.PLAIN] = 1.0
    cutting = Spread(order, _plain(3)).of_cuts([(prices, 1.0)], 1.0)
    assert cutting.seconds == math.inf
    assert cutting.holding.tolist() == [True]


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_a_bound_that_is_enough_is_not_raised_but_holds(schedule: str, chunks: int) -> None:
    """The case of a group that has more is left at what its passes take, which some choice takes, too."""
    found, pipeline = _deep("slow"), Pipeline(2 * chunks, 4, schedule, num_chunks=chunks)
    order, rest = _order(pipeline), _rest(found, pipeline, 1e15)
    spreader = _spreader(found, pipeline, 1e15, _choices(5))

    bound = spreader.bound(order, rest).seconds

    assert 0 < spreader.bound(order, rest, 0.0).seconds <= bound * (1 + TOLERANCE)
    points, _ = spreader._points()
    assert spreader._plain == pytest.approx(float(points[:, Take.PLAIN].min()), rel=1e-3)


def test_prices_of_memory_ask_nothing_for_what_nothing_waits_for() -> None:
    """A second of the link after the last pass costs a step nothing, mostly: a cut with a price for it says little."""
    found, pipeline = _deep("plain"), Pipeline(4, 4, "interleaved", num_chunks=2)
    order, rest = _order(pipeline), _rest(found, pipeline, 1e9)
    spreader = _spreader(found, pipeline, 1e9, _choices(3))
    spreader.bound(order, rest)
    known = spreader.num_cuts
    spreader.price_memory(order, rest, levels_of(order))

    prices = np.array([own for own, _ in spreader._cuts[known:]])
    assert not prices[:, [Take.GRADIENT, Take.ONCE]].any()
    assert (prices[:, [Take.KEPT, Take.RESIDENT, Take.LINK, Take.UPDATE]] > 0).all()


def test_levels_are_of_stages_that_hold_many_microbatches_and_few() -> None:
    """One where all groups hold as many, the most and the least of several, and last next to nothing."""
    assert levels_of(Order(SCHEDULES["gpipe"], 4, 8, 1)) == [8.0, FEW]
    for schedule, chunks in OTHERS:
        *levels, few = levels_of(Order(SCHEDULES[schedule], 8, 16, chunks))
        assert levels == sorted(set(levels), reverse=True)
        assert 1 <= len(levels) <= LEVELS
        assert few == FEW
    many, *_, last, _ = levels_of(Order(SCHEDULES["1f1b"], 16, 32, 1))  # two groups to a part
    assert (many, last) == (15.5, 1.5)


def test_memory_is_cheaper_the_longer_a_step_is() -> None:
    """Of more microbatches through as many groups the same room saves a smaller part of what they take."""
    found = _deep("plain")
    dearest = []
    for count in (4, 16):
        pipeline = Pipeline(4, count, "interleaved", num_chunks=2)
        order, rest = _order(pipeline), _rest(found, pipeline, 1e9)
        spreader = _spreader(found, pipeline, 1e9, _choices(3))
        spreader.price_memory(order, rest, (2.0,))
        dearest.append(max(own[Take.RESIDENT] / own[Take.FORWARD] for own, _ in spreader._cuts if own[Take.FORWARD]))
    assert dearest[1] < 0.5 * dearest[0]


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_links_and_updates_make_a_step_longer(schedule: str, chunks: int) -> None:
    """A link that is busy all the time, what is left after the last pass, and updates after the last task."""
    order, blocks = Order(SCHEDULES[schedule], 2, 4, chunks), 4 * chunks
    spread = Spread(order, _plain(blocks))
    bare = spread.of_points(_point()).seconds

    assert spread.of_points(_point(link=10.0)).seconds >= 4 * 10 * blocks / 2 * (1 - TOLERANCE)
    assert spread.of_points(_point(update=10.0)).seconds >= (4 * 3 + 10) * blocks / 2 * (1 - TOLERANCE)
    once = spread.of_points(_point(once=100.0)).seconds
    assert once >= 100 * blocks / 2 * (1 - TOLERANCE)
    assert once > bare
    assert spread.of_points(_point(gradient=100.0, link=0.0)).seconds > bare


def test_memory_that_is_not_there_has_a_price() -> None:
    """Of what stays, of what microbatches keep or put off, and of what is there beside, where such blocks are."""
    order, blocks = Order(SCHEDULES["zb-h1"], 2, 4, 1), 4
    bare = Spread(order, _plain(blocks)).of_points(_point()).seconds

    def costs(rest: Rest, **amounts: float) -> bool:
        return Spread(order, rest).of_points(_point(**amounts)).seconds > bare * 1.01

    assert not costs(_plain(blocks), resident=0.4)
    assert costs(_plain(blocks), resident=0.6)
    assert costs(_plain(blocks), kept=0.3)
    assert not costs(_plain(blocks), kept=0.1, beside=0.1)
    assert costs(_plain(blocks), kept=0.1, beside=0.9)
    assert costs(_plain(blocks, late=0.3))
    # Other blocks fill a group alone, and blocks that are alike the other one.
    assert not costs(_plain(blocks, resident=0.9, outer=(1, 0)), resident=0.2, beside=0.2)
    assert costs(_plain(blocks, resident=0.9), resident=0.2, beside=0.2)


def test_cuts_say_no_more_than_the_points_they_are_of() -> None:
    """And as much, where there is one for each price of a stage."""
    rng = np.random.default_rng(1)
    points = np.vstack([_point(kept=0.2), _point(kept=0.05, backward=3.0), _point(kept=0.1, resident=0.1, link=1.0)])
    for schedule, chunks in OTHERS:
        spread = Spread(Order(SCHEDULES[schedule], 2, 4, chunks), _plain(6 * chunks))
        found = spread.of_points(points)
        prices = [*rng.random((5, len(Take))), *found.prices]
        cuts = [(own, float((points @ own).min())) for own in prices]
        assert spread.of_cuts(cuts[:5], 3.0).seconds <= found.seconds * (1 + TOLERANCE)
        assert spread.of_cuts(cuts, 3.0).seconds == pytest.approx(found.seconds, rel=1e-4)


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_programs_go_on_from_where_they_were(schedule: str, chunks: int) -> None:
    """With fewer cuts or points, and from one case to the other; nothing depends on where they began."""
    points = np.vstack([_point(kept=0.05, backward=3.0), _point(kept=0.1, resident=0.1, link=1.0), _point(kept=0.2)])
    order, rest = Order(SCHEDULES[schedule], 2, 4, chunks), _plain(6 * chunks)
    spread, more = Spread(order, rest, 3 * chunks, is_most=True), Spread(order, rest, 3 * chunks + 1)
    prices = np.random.default_rng(2).random((8, len(Take)))
    cuts = [(own, float((points @ own).min())) for own in prices]
    few, first = spread.of_cuts(cuts[:3], 3.0), spread.of_points(points[:2])

    for each in (spread, more):
        assert each.of_cuts(cuts, 3.0, few.basis).seconds == pytest.approx(each.of_cuts(cuts, 3.0).seconds, rel=1e-6)
        found, cold = each.of_points(points, first.basis), each.of_points(points)
        assert found.seconds == pytest.approx(cold.seconds, rel=1e-6)
        assert found.shares.sum() == pytest.approx(6 * chunks)
    assert few.seconds <= spread.of_cuts(cuts, 3.0).seconds * (1 + TOLERANCE)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_program_is_solved_by_another_method_where_one_gets_stuck(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on from a known optimum may end without an answer: then the program is solved anew."""
    program = LeastProgram()
    program.add({0: 1.0, 1: 2.0}, least=4.0)
    program.add({0: 1.0}, most=3.0)
    known = program.minimised({0: 1.0, 1: 3.0}, 2)
    program.add({1: 1.0}, least=1.0)
    runs: list[str] = []
    run = highspy.Highs.run

    def stuck(highs: highspy.Highs) -> object:
        runs.append(highs.getOptionValue("solver")[1])
        return run(highs) if len(runs) > failing else None

    monkeypatch.setattr(highspy.Highs, "run", stuck)

    assert program.minimised({0: 1.0, 1: 3.0}, 2, known.basis).value == pytest.approx(5.0)
    assert len(runs) == failing + 1


def test_blocks_have_one_choice() -> None:
    """What does not depend on recompute is the same of all: of two ways to lie no group takes its own."""
    order, blocks = Order(SCHEDULES["1f1b"], 2, 4, 1), 4
    assert [float(order.fullest(group)[:, 0].max()) for group in range(2)] == [2.0, 1.0]
    copied, sharded = _point(kept=0.1, resident=0.35), _point(kept=0.1, resident=0.2, link=4.0, gradient=4.0)
    points = np.vstack([copied, sharded])  # two blocks that are copied fit into the second group only

    even = Spread(order, _plain(blocks), 2, is_most=True).of_points(points)
    taken = even.shares @ points
    resident = taken[:, Take.RESIDENT]

    assert even.shares.sum(axis=1) == pytest.approx(2.0)
    assert resident[0] == pytest.approx(resident[1])
    alone = [Spread(order, _plain(blocks), 2, is_most=True).of_points(own).seconds for own in (copied, sharded)]
    assert even.seconds <= min(alone) * (1 + TOLERANCE)
    assert max(alone) > even.seconds * 1.01


@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_messages_ends_and_what_is_received_make_a_step_longer(schedule: str, chunks: int) -> None:
    """A block at the end is where it has to be, a message is waited for, and what arrives takes room."""
    order, blocks = Order(SCHEDULES[schedule], 2, 4, chunks), 4 * chunks
    bare = Spread(order, _plain(blocks)).of_points(_point()).seconds
    passes = (2.0, 2.0, 2.0) if SCHEDULES[schedule].splits else (2.0, 4.0)

    anywhere = Spread(order, _plain(blocks, seconds=6.0, outer=(0, 1))).of_points(_point()).seconds
    ends = (tuple(0.0 for _ in passes), passes)
    share = order.share(blocks)
    placed = Spread(order, _plain(blocks, seconds=6.0, outer=(0, 1), ends=ends), share, is_most=True)
    known = Spread(order, _plain(blocks, seconds=6.0, outer=(0, 1), edges=(0.0, 6.0)), share, is_most=True)
    sent = Spread(order, _plain(blocks, hop=0.5)).of_points(_point()).seconds
    room = Spread(order, _plain(blocks, received=(0.2, 0.2))).of_points(_point(resident=0.45 / (2 * chunks))).seconds

    assert anywhere > bare
    assert placed.of_points(_point()).seconds > anywhere * (1 - TOLERANCE)
    assert placed.of_points(_point()).seconds >= 4 * (3 * share + 6) * (1 - TOLERANCE), "that group has its share, too"
    least = known.of_points(_point()).seconds
    assert 4 * (3 * share + 6) * (1 - TOLERANCE) <= least, "whichever pass takes it"
    assert least <= placed.of_points(_point()).seconds * (1 + TOLERANCE), "which is not known"
    assert sent >= bare * (1 - TOLERANCE)
    assert sent > bare or SCHEDULES[schedule].steps_overlap, "steps that overlap hide what they wait for"
    assert Spread(order, _plain(blocks)).of_points(_point(resident=0.45 / (2 * chunks))).seconds == pytest.approx(bare)
    assert (room > bare * 1.01) == (chunks > 1), "of a single stage at an end one side alone sends"


def test_cuts_that_say_nothing_are_left_out_of_large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bound is the same: what they said before they still say."""
    monkeypatch.setattr(task_lp, "LARGE", 0)
    found, pipeline = _deep("slow"), Pipeline(2, 4, "zb-h1")
    order, rest = _order(pipeline), _rest(found, pipeline, 1e15)
    spreader = _spreader(found, pipeline, 1e15, _choices(5))

    first = spreader.bound(order, rest)
    again = spreader.bound(order, rest, known=first)

    assert first.basis is None
    assert 0 < len(first.cuts) < first.seen == spreader.num_cuts
    assert again.seconds == pytest.approx(first.seconds, rel=TOLERANCE)
    spreader.spread(order, rest, first.case)
    more = spreader.bound(order, rest, known=first)
    assert set(more.cuts) <= {*first.cuts, *range(first.seen, spreader.num_cuts)}
    assert more.seconds >= first.seconds * (1 - TOLERANCE)
