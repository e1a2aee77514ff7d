"""Step time: the formula by hand, the best split by enumeration, and lower bounds below every plan."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.cost import Overlap, Stack
from autopar.formulate.block_memory import BlockBytes, ChainBytes, FloatArray
from autopar.formulate.building import build_tables
from autopar.formulate.constraints import Constraints
from autopar.formulate.linear_weights import kind_weights, problem, weights
from autopar.formulate.mean_memory import least_bytes, mean_bytes
from autopar.formulate.step_time import Pipeline, Split, StageTimes, step_time, time_of
from autopar.formulate.tables import Slot
from autopar.pipeline_partition.stage_cuts import best_split, least_flow
from autopar.recompute import BY_SECONDS, ON_DEVICE, RESERVE, Hosted, Recompute
from tests.formulations import (
    COSTS,
    best_by_enumeration,
    chain_of,
    good_choice,
    hosted_ways,
    lowered_bytes,
    optimum,
    random_choice,
    rules,
    splits,
    stage_peak,
    tables,
)

NONE = Recompute.NONE

TOLERANCE = 1e-9
"""Relative; both sides are sums of a few hundred float64 numbers in different order."""


def _totals(*rows: tuple[float, float, float, float, float], selective: float = 0.0) -> FloatArray:
    """Return seconds of kinds: forward, backward, gradient traffic, reduction, update; and of selective recompute."""
    totals = np.pad(np.array(rows, dtype=np.float64), ((0, 0), (0, len(Slot) - 5)))
    totals[:, Slot.SELECTIVE] = selective
    return totals


def test_one_stage_by_hand() -> None:
    """Three microbatches of 2 + 4 s; a reduction of 5 s, of which the last backward hides 2; update 0.5 s.

    Each of two equal blocks has half of it. The second one's backward ends 2 s before the first one's, the reductions
    of 2.5 s follow each other from then on: 3 (2 + 4) + (5 - 2) + 0.5 = 21.5.
    """
    totals = _totals((1, 2, 0, 2.5, 0.25))

    time = step_time(totals, (0, 0), Pipeline(1, 3, "1f1b"), Split.uniform(((0, 2),), (NONE,)), hop=7.0)

    assert (time.seconds, time.flow, time.tail) == (21.5, 18.0, 3.5)


def test_one_stage_with_gradient_traffic_by_hand() -> None:
    """Traffic of 8 s beside 6 s of compute sets the pace: 3 · 8, then max(0, 1 + 8 - 4) + 0.5 after the backward."""
    totals = _totals((1, 2, 4, 0.5, 0.25))

    time = step_time(totals, (0, 0), Pipeline(1, 3, "1f1b"), Split.uniform(((0, 2),), (NONE,)), hop=0.0)

    assert (time.seconds, time.flow, time.tail) == (29.5, 24.0, 5.5)


def test_two_stages_by_hand() -> None:
    """Stages of 1 + 2 s and 2 + 4 s, four microbatches, hops of 0.5 s.

    Flow: 3 + 6 + 3 · 6 + 2 · 0.5 = 28. The reduction of a block starts when its backward ends, and each stage has one:
    stage 0 ends at 28 + 3 = 31. Stage 1 ends its last backward 2 + 0.5 s earlier: 28 - 2.5 + 9 = 34.5, the step.
    """
    totals = _totals((1, 2, 0, 3, 0), (2, 4, 0, 9, 0))

    time = step_time(totals, (0, 1), Pipeline(2, 4, "1f1b"), Split.uniform(((0, 1), (1, 2)), (NONE, NONE)), hop=0.5)

    assert (time.seconds, time.flow, time.tail) == (34.5, 28.0, 9.0)
    assert time.stage_seconds.tolist() == [3.0, 6.0]


def test_hops_slow_the_pace_of_equal_stages() -> None:
    """Stages of 3 s, hops of 0.5 s: two microbatches at a time pass 3 + 3 s and a hop there and back in 7 s.

    Flow: 3 + 3 + 1 for the first and 3 · 3.5 for the others. With GPipe only the first one waits for hops.
    """
    totals, split = _totals((1, 2, 0, 0, 0)), Split.uniform(((0, 1), (1, 2)), (NONE, NONE))

    one, gpipe = (step_time(totals, (0, 0), Pipeline(2, 4, name), split, hop=0.5) for name in ("1f1b", "gpipe"))

    assert (one.flow, gpipe.flow) == (17.5, 16.0)


def test_recompute_by_hand() -> None:
    """A stage that recomputes adds its forward to its backward, which then hides more of the reduction.

    Stage 1 has two blocks of 1 + (2 + 1) s: flow 3 + 8 + 3 · 8 + 1 = 36. Its reductions of 4.5 s start when the
    backward of its second block ends, 3 s before that of its first: 36 - 2.5 + (9 - 3) = 39.5; stage 0: 36 + 3 = 39.
    """
    totals = _totals((1, 2, 0, 3, 0), (1, 2, 0, 4.5, 0))

    time = step_time(
        totals, (0, 1, 1), Pipeline(2, 4, "1f1b"), Split.uniform(((0, 1), (1, 3)), (NONE, Recompute.FULL)), hop=0.5
    )

    assert (time.seconds, time.flow) == (39.5, 36.0)


def test_selective_recompute_by_hand() -> None:
    """As above with half the forward recomputed: stage 1 has blocks of 1 + 2.5 s, flow 3 + 7 + 3 · 7 + 1 = 32.

    Its reductions start 2.5 s before the end: 32 - 2.5 + (9 - 2.5) = 36.
    """
    totals = _totals((1, 2, 0, 3, 0), (1, 2, 0, 4.5, 0), selective=0.5)
    split = Split.uniform(((0, 1), (1, 3)), (NONE, Recompute.SELECTIVE))

    time = step_time(totals, (0, 1, 1), Pipeline(2, 4, "1f1b"), split, hop=0.5)

    assert (time.seconds, time.flow) == (36.0, 32.0)


def test_inference_by_hand() -> None:
    """Nothing runs back: 1 + 2 + 3 · 2 s, and one hop of 0.5 s."""
    totals = _totals((1, 0, 0, 0, 0), (2, 0, 0, 0, 0))

    time = step_time(
        totals, (0, 1), Pipeline(2, 4, "forward-only"), Split.uniform(((0, 1), (1, 2)), (NONE, NONE)), hop=0.5
    )

    assert time.seconds == 9.5


def test_stage_bytes_by_hand() -> None:
    """Two microbatches in flight of a stage with one block of kind 0 and two of kind 1.

    All kept: 10 + 2 · 20 resident, 2 · (4 + 2 · 6) saved, 3 for the hungrier block, 1 of buffers: 86.
    Selectively: 50 + 2 · (3 + 2 · 4) kept, 3 + 1 or 2 + 2 for the block that runs, buffers: 77.
    Recomputed: 50 + 2 · (1 + 2 · 2) arrived, block 1 with 2 + (6 - 2), buffers: 67.
    """
    memory = BlockBytes(
        resident=np.array([10.0, 20.0]),
        kept={
            NONE: np.array([4.0, 6.0]),
            Recompute.SELECTIVE: np.array([3.0, 4.0]),
            Recompute.FULL: np.array([1.0, 2.0]),
        },
        recomputed={
            NONE: np.zeros(2),
            Recompute.SELECTIVE: np.array([1.0, 2.0]),
            Recompute.FULL: np.array([3.0, 4.0]),
        },
        transient=np.array([3.0, 2.0]),
        buffers=1.0,
    )
    counts = np.array([1, 2])

    assert memory.stage_bytes(counts, 2, NONE) == 86.0
    assert memory.stage_bytes(counts, 2, Recompute.SELECTIVE) == 77.0
    assert memory.stage_bytes(counts, 2, Recompute.FULL) == 67.0


_OUTSIDE = {
    Slot.GRADIENT_OUTSIDE: (Slot.GRADIENT,),
    Slot.REDUCE_OUTSIDE: (Slot.REDUCE,),
    Slot.FORWARD_OUTSIDE: (Slot.FORWARD_GATHER,),
    Slot.BACKWARD_OUTSIDE: (Slot.BACKWARD_GATHER,),
    Slot.SELECTIVE_OUTSIDE: (Slot.SELECTIVE_GATHER,),
}


def _consistent(totals: FloatArray) -> None:
    """Let no more leave nodes than there is, and passes wait for gathers only."""
    totals[:, [Slot.FORWARD_WAIT, Slot.BACKWARD_WAIT, Slot.SELECTIVE_WAIT]] = 0.0
    totals[:, [Slot.FORWARD_CHUNKED, Slot.BACKWARD_CHUNKED, Slot.SELECTIVE_CHUNKED]] = 0.0
    for outside, whole in _OUTSIDE.items():
        totals[:, outside] = np.minimum(totals[:, outside], totals[:, list(whole)].sum(axis=1))


@st.composite
def _chains(draw: st.DrawFn) -> tuple[FloatArray, ChainBytes, Pipeline, float, float]:
    """Draw block seconds and bytes whose traffic hides behind compute, a pipeline, a limit and a hop."""
    kinds = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chain = tuple(sorted(draw(st.lists(st.integers(0, kinds - 1), min_size=1, max_size=5))))
    totals = rng.integers(0, 6, (kinds, len(Slot))).astype(np.float64)
    totals[:, Slot.FORWARD] += 1
    trains = draw(st.booleans())
    if trains:
        totals[:, Slot.BACKWARD] += 1
        totals[:, Slot.FORWARD_GATHER] = np.minimum(totals[:, Slot.FORWARD_GATHER], totals[:, Slot.FORWARD])
        gathers = totals[:, Slot.FORWARD_GATHER] + totals[:, Slot.BACKWARD_GATHER]
        passes = totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD]
        totals[:, Slot.GRADIENT] = np.clip(passes - gathers, 0.0, totals[:, Slot.GRADIENT])
        if draw(st.booleans()):
            totals[:, [Slot.REDUCE, Slot.GRADIENT]] = 0.0
    else:
        totals[:, 1:] = 0
    totals[:, Slot.SELECTIVE] = np.minimum(totals[:, Slot.SELECTIVE], totals[:, Slot.FORWARD])
    amounts = rng.integers(0, 5, (5, kinds)).astype(np.float64)
    kept = (amounts[1] + amounts[2] + amounts[3], amounts[1] + amounts[2], amounts[1])
    remade = (np.zeros(kinds), amounts[3], amounts[2] + amounts[3])
    by_flavour = dict(zip(ON_DEVICE, kept, strict=True)), dict(zip(ON_DEVICE, remade, strict=True))
    flavours = ON_DEVICE if trains else (NONE,)
    memory = chain_of(BlockBytes(amounts[0], by_flavour[0], by_flavour[1], amounts[4], 1.0), chain, flavours)
    overlap = draw(st.sampled_from([Overlap(), Overlap(1.25, 0.0), Overlap(1.5, 0.25)]))
    if overlap != Overlap():
        totals[:, Slot.GRADIENT] = 0.0  # traffic that makes passes longer does not hide
    _consistent(totals)
    pipeline = Pipeline(
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 3, 8])),
        "1f1b" if trains else "forward-only",
        overlap,
        draw(st.sampled_from([0.0, 1.0])),
    )
    limit = draw(st.sampled_from([10.0, 15.0, 20.0, 30.0, np.inf]))
    return totals, memory, pipeline, limit, draw(st.sampled_from([0.0, 0.5, 2.0]))


@given(_chains())
@settings(max_examples=150)
@example(
    (
        _totals((1, 1, 0, 0, 0), (1, 1, 0, 9, 0)),
        ChainBytes.nothing((0, 0, 1, 1)),
        Pipeline(2, 1, "1f1b"),
        np.inf,
        0.0,
    )
)
def test_best_split_equals_enumeration(
    case: tuple[FloatArray, ChainBytes, Pipeline, float, float],
) -> None:
    """No split that fits is faster, under any recompute flavours; no answer if none fits.

    The answer may be worse in two cases: by the seconds of hops where these slow the pace, and by the seconds of
    gradient traffic or repeated gathers where these outlast backwards, because recompute flavours decide what hides
    them.
    """
    totals, memory, pipeline, _, hop = case
    found = best_split(*case)

    expected = best_by_enumeration(*case)
    seconds = np.inf if found is None else found[1].seconds
    slack = 2 * (pipeline.num_microbatches - 1) * hop if pipeline.schedule == "1f1b" else 0.0
    slack += _traffic(totals, memory)
    assert expected * (1 - TOLERANCE) <= seconds <= (expected + slack) * (1 + TOLERANCE)


@given(_chains(), st.data())
@settings(max_examples=80)
def test_best_split_satisfies_constraints(
    case: tuple[FloatArray, ChainBytes, Pipeline, float, float], data: st.DataObject
) -> None:
    """The best split under constraints on cuts and recompute equals the best by enumeration."""
    totals, memory, pipeline, limit, _ = case
    totals[:, [Slot.REDUCE, Slot.GRADIENT, Slot.SELECTIVE_GATHER]] = 0.0
    _consistent(totals)
    blocks = len(memory.chain)
    cuts = data.draw(st.none() | st.frozensets(st.integers(1, blocks)))
    flavours = st.frozensets(st.sampled_from(memory.flavours), min_size=1)
    keeps = data.draw(st.just(()) | st.tuples(*[flavours] * blocks))
    constraints = Constraints(cuts=cuts, keeps=keeps)

    found = best_split(totals, memory, pipeline, limit, 0.0, constraints)

    expected = best_by_enumeration(totals, memory, pipeline, limit, 0.0, constraints)
    assert (np.inf if found is None else found[1].seconds) == pytest.approx(expected, rel=TOLERANCE)
    if found is not None and keeps:
        assert all(own in kept for own, kept in zip(found[0].flavours, keeps, strict=True))


@st.composite
def _hosting(draw: st.DrawFn) -> tuple[FloatArray, ChainBytes, Pipeline, float, float, Constraints]:
    """Draw a training case of `_chains` with host memory, and constraints on its use."""
    totals, memory, pipeline, limit, hop = draw(_chains().filter(lambda case: len(case[1].flavours) > 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = len(totals)
    totals[:, [Slot.REDUCE, Slot.GRADIENT]] = 0.0
    _consistent(totals)
    walk = memory.walk
    saved = walk.memory.kept[NONE]  # type: ignore[attr-defined]
    walk.memory.kept[Recompute.OFFLOAD] = np.zeros(kinds)  # type: ignore[attr-defined]
    walk.memory.recomputed[Recompute.OFFLOAD] = saved  # type: ignore[attr-defined]
    hosted = draw(st.frozensets(st.sampled_from(sorted(RESERVE)), min_size=1))
    flavours = BY_SECONDS if Hosted.ACTIVATIONS in hosted else ON_DEVICE
    state = np.floor(rng.uniform(size=kinds) * (memory.resident + 1))
    room = draw(st.sampled_from([2.0, 8.0, np.inf]))
    memory = replace(memory, flavours=flavours, hosted=saved, state=state, host_room=room)
    lies = st.sampled_from([frozenset({False}), frozenset({True}), frozenset({False, True})])
    states = draw(st.just(()) | st.tuples(*[lies] * len(memory.chain)))
    if Hosted.OPTIMIZER not in hosted:
        states = ()
    return totals, memory, pipeline, limit, hop * draw(st.booleans()), Constraints(hosted=hosted, states=states)


@given(_hosting())
@settings(max_examples=60)
def test_best_split_with_host_memory_equals_enumeration(
    case: tuple[FloatArray, ChainBytes, Pipeline, float, float, Constraints],
) -> None:
    """With offloaded activations and optimizer state; the answer may be worse by the copies that forwards wait for."""
    totals, memory, pipeline, limit, hop, constraints = case

    found = best_split(*case)

    expected = best_by_enumeration(*case)
    seconds = np.inf if found is None else found[1].seconds
    slack = 2 * (pipeline.num_microbatches - 1) * hop if pipeline.schedule == "1f1b" else 0.0
    if pipeline.num_stages > 1:
        slack += float(totals[list(memory.chain), Slot.OFFLOAD].sum())
    assert expected * (1 - TOLERANCE) <= seconds <= (expected + slack) * (1 + TOLERANCE)
    if found is not None:
        split, time = found
        for stage, (blocks, flavours) in enumerate(zip(split.ranges, split.recompute, strict=True)):
            flying = pipeline.in_flight(stage)
            assert stage_peak(memory, pipeline, split, stage) <= limit
            assert memory.host_bytes(*blocks, flying, flavours, away=split.away[stage]) <= memory.host_room
            assert split.away[stage] in hosted_ways(constraints, *blocks)
        assert time.seconds == step_time(totals, memory.chain, pipeline, split, hop).seconds


@pytest.mark.parametrize(("num_microbatches", "offload"), [(1, ()), (2, ()), (3, ((True,),))])
def test_optimizer_state_is_offloaded_if_that_is_faster(
    num_microbatches: int, offload: tuple[tuple[bool, ...], ...]
) -> None:
    """One block of 3 + 2 s with 4 bytes saved; 5 of 10 resident bytes are optimizer state, whose copies take 7 s.

    12 bytes do not hold everything: the block recomputes in full, 3 s per microbatch, or the optimizer state is
    offloaded. The offloaded state passes the device in one bucket of 5 bytes, held during the update.
    """
    totals = np.zeros((1, len(Slot)))
    totals[0, [Slot.FORWARD, Slot.BACKWARD, Slot.STATE]] = 3.0, 2.0, 7.0
    every = dict.fromkeys(Recompute, np.zeros(1))
    kept = every | {NONE: np.array([4.0])}
    memory = chain_of(BlockBytes(np.array([10.0]), kept, every, np.zeros(1), 0.0), (0,), (NONE, Recompute.FULL))
    memory = replace(memory, state=np.array([5.0]))
    constraints = Constraints(hosted=frozenset({Hosted.OPTIMIZER}))

    found = best_split(totals, memory, Pipeline(1, num_microbatches, "1f1b"), 12.0, 0.0, constraints)

    assert found is not None
    assert found[0].offload == offload
    assert found[1].seconds == num_microbatches * 5.0 + min(3.0 * num_microbatches, 7.0)


@given(_hosting())
@settings(max_examples=30)
def test_offload_is_no_faster_where_all_fits_on_the_device(
    case: tuple[FloatArray, ChainBytes, Pipeline, float, float, Constraints],
) -> None:
    """Dominance: where blocks that recompute nothing fit on the device, nothing goes to the host."""
    totals, memory, pipeline, _, hop, constraints = case
    constraints = replace(constraints, states=())
    plain = best_split(totals, memory, pipeline, np.inf, hop)

    found = best_split(totals, memory, pipeline, np.inf, hop, constraints)

    assert plain is not None or found is None
    if found is not None:
        assert plain is not None
        assert set(found[0].flavours) == {NONE}
        assert not found[0].offload
        assert found[1].seconds == plain[1].seconds


def _traffic(totals: FloatArray, memory: ChainBytes) -> float:
    """Return the seconds of all gradient traffic, and of parameter gathers of selective recompute."""
    return float(totals[list(memory.chain)][:, [Slot.REDUCE, Slot.GRADIENT, Slot.SELECTIVE_GATHER]].sum())


@given(_chains())
@settings(max_examples=50)
def test_best_split_tiles_the_chain_and_fits(
    case: tuple[FloatArray, ChainBytes, Pipeline, float, float],
) -> None:
    """Stages tile the chain, each under the limit, and the time is that of the formula."""
    totals, memory, pipeline, limit, hop = case
    chain = memory.chain

    found = best_split(*case)

    if found is not None:
        split, time = found
        assert split.ranges in splits(len(chain), pipeline.num_stages)
        assert all(stage_peak(memory, pipeline, split, stage) <= limit for stage in range(pipeline.num_stages))
        assert time.seconds == step_time(totals, chain, pipeline, split, hop).seconds


@given(_chains())
@settings(max_examples=50)
def test_more_memory_never_hurts_a_split(
    case: tuple[FloatArray, ChainBytes, Pipeline, float, float],
) -> None:
    """More memory allows more splits and less recompute; only hidden gradient traffic may add to the step."""
    totals, memory, pipeline, limit, hop = case

    tight = best_split(totals, memory, pipeline, limit, hop)
    loose = best_split(totals, memory, pipeline, limit + 5, hop)

    if tight is not None:
        assert loose is not None
        assert loose[1].seconds <= (tight[1].seconds + _traffic(totals, memory)) * (1 + TOLERANCE)


def test_equal_blocks_split_evenly_despite_rounding() -> None:
    """Sums of equal blocks differ only by rounding; 96 blocks of 1/3 s on 8 stages are 12 on each."""
    totals = _totals((0.1, 0.7 / 3, 0, 0, 0))
    found = best_split(totals, ChainBytes.nothing((0,) * 96), Pipeline(8, 64, "1f1b"), np.inf, 0.0)

    assert found is not None
    assert found[0].ranges == tuple((12 * stage, 12 * stage + 12) for stage in range(8))


PIPELINES = [Pipeline(1, 1, "1f1b"), Pipeline(1, 4, "1f1b"), Pipeline(2, 2, "1f1b"), Pipeline(3, 8, "1f1b")]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: f"pp{p.num_stages}-m{p.num_microbatches}")
@pytest.mark.parametrize("name", ["gpt2", "mlp-xs"])
@pytest.mark.parametrize("hidden", [0.0, 1.0])
@pytest.mark.parametrize("traffic", [0.0, 0.6])
def test_bounds_are_below_every_plan(name: str, pipeline: Pipeline, hidden: float, traffic: float) -> None:
    """The bounding objective of a choice is at most the step time of that choice under any split and any recompute.

    So its optimum is at most the step time of any plan. Choices near the optimum are tried, where it is tightest.
    """
    found = tables(name)
    chain = found.folded.chain
    near = good_choice(name, "train")
    weighting = weights(found, pipeline, recompute=NONE, hidden=hidden, bounding=True, traffic=traffic)
    instance = problem(found, weighting)
    rng = np.random.default_rng(0)
    least, best = optimum(instance)

    for start in (near, best):
        choice = start
        for _ in range(4):
            linear, totals = instance.cost(choice), found.block_seconds(choice)
            assert weighting.is_bound
            for ranges in splits(len(chain), pipeline.num_stages):
                redo = tuple(list(Recompute)[number] for number in rng.integers(3, size=len(ranges)))
                for recompute in (redo, (NONE,) * len(ranges)):
                    seconds = step_time(totals, chain, pipeline, Split.uniform(ranges, recompute), hop=0.0).seconds
                    assert max(linear, least) <= seconds * (1 + TOLERANCE)
            choice = random_choice(instance, rng, near=choice)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: f"pp{p.num_stages}-m{p.num_microbatches}")
@pytest.mark.parametrize("traffic", [0.0, 0.6])
def test_bounds_hold_for_software_that_hides_little(pipeline: Pipeline, traffic: float) -> None:
    """Bounds are below every plan if communication is partly exposed, overlap slows down, and launches take long."""
    scalars = (("overlap_slowdown", 1.2), ("exposed_share", 0.1), ("host_launch", 2e-5))
    stack = Stack("slow", scalars=scalars)
    plain = tables("gpt2")
    found = build_tables(plain.folded, rules("gpt2"), plain.mesh, replace(COSTS, stack=stack))
    slow = replace(pipeline, overlap=Overlap.of(stack))
    hidden = 1.0 if pipeline.num_stages == 1 else 0.0
    weighting = weights(found, slow, recompute=NONE, hidden=hidden, bounding=True, traffic=traffic)
    instance = problem(found, weighting)
    rng = np.random.default_rng(4)
    least, choice = optimum(instance)

    for _ in range(6):
        linear, totals = instance.cost(choice), found.block_seconds(choice)
        assert (totals[:, [Slot.FORWARD, Slot.BACKWARD]] >= found.host_seconds).all()
        for ranges in splits(len(plain.folded.chain), pipeline.num_stages):
            recompute = tuple(list(Recompute)[number] for number in rng.integers(3, size=len(ranges)))
            seconds = step_time(totals, plain.folded.chain, slow, Split.uniform(ranges, recompute), hop=0.0).seconds
            assert max(linear, least) <= seconds * (1 + TOLERANCE)
        choice = random_choice(instance, rng, near=choice)


def test_the_bound_of_one_stage_is_tight() -> None:
    """If gradient traffic fills the whole backward, the objective with multiplier 1 equals the step time."""
    found = tables("mlp-xs")
    pipeline = Pipeline(1, 1, "1f1b")
    weighting = weights(found, pipeline, recompute=NONE, hidden=1.0, bounding=True)
    choice = good_choice("mlp-xs", "train")
    totals = found.block_seconds(choice)
    totals[:, Slot.REDUCE] = 0.0
    totals[:, Slot.GRADIENT] = totals[:, Slot.BACKWARD]  # beside all of it
    totals[:, Slot.FORWARD_WAIT :] = 0.0  # what passes wait for is part of them

    time = step_time(totals, found.folded.chain, pipeline, Split.uniform(((0, found.folded.num_blocks),), (NONE,)), 0.0)

    assert time.seconds == pytest.approx(float((weighting.factors * totals).sum()), rel=TOLERANCE)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: f"pp{p.num_stages}-m{p.num_microbatches}")
@pytest.mark.parametrize("price", [1e-12, 1e-9])
def test_priced_bounds_are_below_every_plan_that_fits(pipeline: Pipeline, price: float) -> None:
    """Weak duality: objective plus price times the excess of the mean stage is at most the step time of a fitting plan.

    The limit is the peak of the plan, the tightest limit that it fits. The most frequent kind keeps its activations or
    recomputes, whichever is less; the other kinds pay for neither kept bytes nor recompute.
    """
    found = tables("gpt2")
    chain, kinds = found.folded.chain, found.folded.kinds
    main = max(kinds, key=lambda kind: kind.count).id
    rng = np.random.default_rng(1)
    hidden = 1.0 if pipeline.num_stages == 1 else 0.0
    choice = good_choice("gpt2", "train")
    instance = problem(found, weights(found, pipeline, recompute=NONE, hidden=hidden, bounding=True))
    for _ in range(8):
        totals, memory = found.block_seconds(choice), lowered_bytes(found, choice)
        for ranges in splits(len(chain), pipeline.num_stages):
            split = Split.uniform(ranges, tuple(list(Recompute)[number] for number in rng.integers(0, 3, len(ranges))))
            limit = max(stage_peak(memory, pipeline, split, stage) for stage in range(len(ranges)))
            seconds = step_time(totals, chain, pipeline, split, hop=0.0).seconds
            values = []
            for flavour in ON_DEVICE:
                again = [flavour if kind.id == main else NONE for kind in kinds]
                keeps = [flavour if kind.id == main else Recompute.FULL for kind in kinds]
                mean = mean_bytes(found, pipeline, limit, keeps)
                weighting = weights(found, pipeline, recompute=again, hidden=hidden, bounding=True)
                objective = problem(found, weighting).cost(choice)
                values.append(objective + price * mean.excess(found, choice))
                priced = mean.priced(problem(found, weighting), found, price).cost(choice) - price * mean.limit
                assert priced == pytest.approx(values[-1], rel=1e-9)
            assert min(values) <= seconds * (1 + TOLERANCE)
        choice = random_choice(instance, rng, near=choice)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: f"pp{p.num_stages}-m{p.num_microbatches}")
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("evenly", [False, True])
def test_mean_stage_is_below_the_fullest_stage(pipeline: Pipeline, recompute: Recompute, evenly: bool) -> None:
    """With the fullest stage's bytes as limit, the mean stage does not exceed it, for any choice and split."""
    found = tables("gpt2")
    chain, kinds = found.folded.chain, found.folded.kinds
    rng = np.random.default_rng(3)
    choice = good_choice("gpt2", "train")
    instance = problem(found, weights(found, pipeline, recompute=NONE, hidden=0.0, bounding=True))
    for _ in range(6):
        memory = lowered_bytes(found, choice)
        for ranges in splits(len(chain), pipeline.num_stages):
            split = Split.uniform(ranges, (recompute,) * len(ranges))
            limit = max(stage_peak(memory, pipeline, split, stage) for stage in range(len(ranges)))
            mean = mean_bytes(found, pipeline, limit, [recompute] * len(kinds), evenly=evenly)
            assert mean.excess(found, choice) <= limit * TOLERANCE
        choice = random_choice(instance, rng, near=choice)


@given(
    seconds=st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3),
    chain=st.lists(st.integers(0, 2), min_size=4, max_size=8),
    num_stages=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
)
def test_least_flow_equals_the_minimum_over_all_splits(
    seconds: list[float], chain: list[int], num_stages: int, num_microbatches: int
) -> None:
    """`least_flow` equals the minimum over an enumeration of all cuts."""
    pipeline = Pipeline(num_stages, num_microbatches, "1f1b")
    blocks = [seconds[kind] for kind in chain]

    flow = least_flow(seconds, chain, pipeline)

    slowest = min(max(sum(blocks[a:b]) for a, b in ranges) for ranges in splits(len(chain), num_stages))
    assert flow == pytest.approx(sum(blocks) + (num_microbatches - 1) * slowest)


def test_least_time_of_a_kind_is_below_its_time_in_every_choice() -> None:
    """The minimum for one kind alone is at most its seconds in a joint choice."""
    found = tables("gpt2")
    rng = np.random.default_rng(2)
    choice = good_choice("gpt2", "train")
    instance = problem(found, weights(found, Pipeline(1, 1, "1f1b"), recompute=NONE, hidden=0.0, bounding=True))
    least = [optimum(problem(found, kind_weights(found, [kind.id], 0.25)))[0] for kind in found.folded.kinds]

    for _ in range(6):
        totals = found.block_seconds(choice)
        inline = totals[:, Slot.FORWARD] + totals[:, Slot.BACKWARD]
        shared = 0.75 * inline + 0.25 * totals[:, Slot.GRADIENT]
        assert (np.array(least) <= shared * (1 + TOLERANCE)).all()
        choice = random_choice(instance, rng, near=choice)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: f"pp{p.num_stages}-m{p.num_microbatches}")
def test_least_bytes_are_below_the_fullest_stage(pipeline: Pipeline) -> None:
    """For any choice and any split, with and without recompute."""
    found = tables("gpt2")
    chain = found.folded.chain
    rng = np.random.default_rng(0)
    instance = problem(found, weights(found, pipeline, recompute=NONE, hidden=0.0, bounding=True))
    choice = good_choice("gpt2", "train")
    leasts = least_bytes(found, pipeline)

    assert leasts[Recompute.FULL] <= leasts[Recompute.SELECTIVE] <= leasts[NONE]
    for _ in range(6):
        memory = lowered_bytes(found, choice)
        for ranges in splits(len(chain), pipeline.num_stages):
            for recompute, least in leasts.items():
                split = Split.uniform(ranges, (recompute,) * len(ranges))
                fullest = max(stage_peak(memory, pipeline, split, stage) for stage in range(len(ranges)))
                assert least <= fullest * (1 + TOLERANCE)
        choice = random_choice(instance, rng, near=choice)


def test_no_weight_of_a_bound_is_negative() -> None:
    """With one microbatch and multiplier 1, only the backward of the last block keeps a weight, which is 1.

    It runs first, so that no reduction hides behind it. Negative weights would be set to 0, and the optimum would no
    longer be a bound.
    """
    found = tables("mlp-xs")

    weighting = weights(found, Pipeline(1, 1, "1f1b"), recompute=NONE, hidden=1.0, bounding=True, traffic=0.75)

    last = found.folded.chain[-1]
    assert weighting.factors.min() == 0.0
    assert weighting.factors[:, Slot.REDUCE].tolist() == [kind.count for kind in found.folded.kinds]
    assert weighting.factors[:, Slot.BACKWARD].tolist() == [float(kind.id == last) for kind in found.folded.kinds]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "forward-only"])
def test_equal_hops_by_stage_equal_one_hop(schedule: str) -> None:
    """An array of equal hops, with 0 back in inference, gives the step time of one hop for all stages."""
    rng = np.random.default_rng(2)
    trains = schedule != "forward-only"
    for count in (1, 2, 5):
        parts = [rng.uniform(0.5, 1.5, count) for _ in range(7)]
        parts[1] *= trains
        stages, pipeline = StageTimes(*parts), Pipeline(count, 4, schedule)
        both = np.tile([0.3, 0.3 * trains], (count - 1, 1))

        assert time_of(stages, pipeline, both).seconds == pytest.approx(time_of(stages, pipeline, 0.3).seconds)


def test_hops_by_stage_by_hand() -> None:
    """Forwards of 1 s, backwards of 2 s on three stages, on 0.1 and 0.3 s, back 0.2 and 0.4 s, two microbatches.

    All passes take 9 s and hops 1 s. From one microbatch to the next it takes 3 s for a stage, (6 + 0.3) / 2 and
    (6 + 0.7) / 2 s for two, (9 + 1) / 3 for three.
    """
    each = [np.ones(3), 2 * np.ones(3), *(np.zeros(3) for _ in range(5))]
    hops = np.array([[0.1, 0.2], [0.3, 0.4]])

    assert time_of(StageTimes(*each), Pipeline(3, 2, "1f1b"), hops).seconds == pytest.approx(10 + 3.35)
