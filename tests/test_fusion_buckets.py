"""Buckets cut for a program, held against all cuts there are, and against the bound."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost import Collective as CollectiveKind
from autopar.cost import CostModel, Stack
from autopar.errors import PlanError, ProgramError
from autopar.fusion import LEAST_GAIN, cut_gradients
from autopar.fusion.buckets import BucketTimer
from autopar.fusion.link_clock import LinkClock
from autopar.fusion_plan import BucketCuts
from autopar.ir.routing import Routed
from autopar.program.buckets import bucketed, gradients
from autopar.program.records import Program, Segment, SegmentPhase, StageProgram
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES
from autopar.sharding import Axis, Mesh
from autopar.simulate import simulate
from autopar.simulate.fitting import Line
from autopar.simulate.flat import simulate_flat
from tests.programs import ExactCosts, all_reduce, programs, two_block_step, value, work


@dataclass(frozen=True, slots=True)
class _Starting(ExactCosts):
    """Collectives that take a second to start, which buckets save."""

    def collective_seconds(
        self, collective: CollectiveKind, nbytes: float, axis: Axis, routed: Routed | None = None, /
    ) -> float:
        return 1.0 + nbytes / self.bandwidth

    def on(self, devices: range, /) -> "_Starting":
        return self


def _costs(stack: Stack | None = None) -> CostModel:
    costs = _Starting() if stack is None else _Starting(stack=stack)
    return cast(CostModel, costs)  # all that is asked of it


def _every_cut(count: int) -> Iterator[tuple[int, ...]]:
    for number in range(count):
        for chosen in combinations(range(1, count), number):
            yield (*chosen, count)


def _counts(program: Program) -> list[dict[tuple[str, str, str, int], int]]:
    """Return the number of gradients of every stage by key."""
    table, splits = program.table(), SCHEDULES[program.schedule].splits
    return [{key: len(own) for key, own in gradients(stage, table, splits=splits).items()} for stage in program.stages]


def _cut(program: Program, data: st.DataObject) -> Program:
    """Return a program with buckets drawn at random."""
    cuts: dict[int, list[BucketCuts]] = {}
    for stage, keys in enumerate(_counts(program)):
        for key, count in keys.items():
            if data.draw(st.booleans()):
                inner = data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else set()
                cuts.setdefault(stage, []).append(BucketCuts(*key, (*sorted(inner), count)))
    return bucketed(program, cuts)


_BUSY = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=6)


@given(busy=_BUSY, jobs=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=5))
def test_on_the_clock_of_a_link_nothing_interrupts(busy: list[tuple[int, int]], jobs: list[tuple[int, int]]) -> None:
    """Jobs planned on the free seconds of a link end when they do on the link itself, second by second."""
    spans = np.array([(float(start), float(start + length)) for start, length in busy]).reshape(-1, 2)
    line, clock, free = Line(spans), LinkClock(spans), 0.0
    for ready, seconds in sorted(jobs):
        _, end = line.fit(float(ready), float(seconds))

        free = max(free, float(clock.free(np.array([float(ready)]))[0])) + seconds

        assert float(clock.time(np.array([free]))[0]) == pytest.approx(end)


@given(program=programs())
@settings(max_examples=20)
def test_gradients_of_a_program_are_those_of_the_simulator(program: Program) -> None:
    """Read off the instructions, gradients have the keys, order and bytes of the traffic that is timed."""
    table, splits = program.table(), SCHEDULES[program.schedule].splits
    timer = BucketTimer(program, _costs())
    for stage, traffic in zip(program.stages, timer.traffic(timer.uncut), strict=True):
        timed: dict[tuple[str, str, str, int], list[float]] = {}
        for own in traffic.issued:
            timed.setdefault(own.key, []).append(own.traffic.nbytes)

        read = gradients(stage, table, splits=splits)

        assert {key: [own.nbytes for own in found] for key, found in read.items()} == timed


def _chain(blocks: Sequence[tuple[int, int, int]], mesh: Mesh, microbatches: int) -> Program:
    """Return a stage of blocks, each given as seconds of its backward, bytes of a wait, bytes of its gradient."""
    dp, tp = mesh.axes
    segments = []
    for kind, (seconds, waited, size) in enumerate(blocks):
        w, dx, dw = value("w"), value("dx"), value("w.grad")
        back = work((w,), (dx, dw), seconds, SegmentPhase.BACKWARD)
        wait = all_reduce(tp, dx, "dx.sum", seconds=waited)
        reduce = all_reduce(dp, dw, "w.sum", seconds=size)
        segments += [
            Segment(kind, SegmentPhase.FORWARD, (), (w,), (work((w,), (value("a"),), 1),)),
            Segment(kind, SegmentPhase.BACKWARD, (), (w,), (back, *([wait] if waited else []))),
            Segment(kind, SegmentPhase.REDUCE, (), (dw,), (reduce,)),
        ]
    none = (Recompute.NONE,) * len(blocks)
    stage = StageProgram(0, (0, mesh.size), mesh, tuple(range(len(blocks))), none, ())
    return Program((stage,), tuple(segments), "1f1b", microbatches)


@given(
    blocks=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=6),
    mesh=st.sampled_from([Mesh.of(dp=2, tp=2), Mesh.of(dp=2, tp=8)]),
    microbatches=st.integers(1, 2),
)
@settings(max_examples=40)
def test_no_cuts_of_one_collective_are_faster(
    blocks: list[tuple[int, int, int]], mesh: Mesh, microbatches: int
) -> None:
    """Gradients of one collective and axis: of all cuts, which are tried, none makes a shorter step.

    With tp=2 the link also has collectives that compute waits for.
    """
    program, key = _chain(blocks, mesh, microbatches), ("all_reduce", "dp", "step", 0)
    timer = BucketTimer(program, _costs())

    found = cut_gradients(program, _costs())

    steps = [timer.time([(BucketCuts(*key, ends),)]).step_seconds for ends in _every_cut(len(blocks))]
    assert found.found.step_seconds == pytest.approx(min(steps))


_STACKS = [
    Stack("all defaults"),
    Stack("slow", scalars=(("overlap_slowdown", 1.2), ("exposed_share", 0.1), ("step_seconds", 0.5))),
]


@given(program=programs(), stack=st.sampled_from(_STACKS), data=st.data())
@settings(max_examples=25)
def test_cuts_are_between_the_bound_and_the_uniform_rule(program: Program, stack: Stack, data: st.DataObject) -> None:
    """Cuts never make a step longer than the uniform rule; no buckets, however drawn, make one below the bound."""
    costs = _costs(stack)

    found = cut_gradients(program, costs)

    drawn = simulate(_cut(program, data), costs).step_seconds
    assert found.found.step_seconds <= found.uniform.step_seconds
    assert found.uniform.step_seconds == pytest.approx(simulate(program, costs).step_seconds)
    assert found.bound <= min(found.found.step_seconds, drawn) * (1 + 1e-9)
    again = bucketed(program, dict(enumerate(found.cuts)))
    assert simulate(again, costs).step_seconds == pytest.approx(found.found.step_seconds)
    wanted = cut_gradients(program, costs, least_gain=LEAST_GAIN)
    assert (wanted.cuts if wanted.is_worth_it else ()) == (found.cuts if found.is_worth_it else ())


@given(program=programs(), stack=st.sampled_from(_STACKS), data=st.data())
@settings(max_examples=20)
def test_devices_apart_take_as_long_with_buckets_of_a_plan(program: Program, stack: Stack, data: st.DataObject) -> None:
    cut, costs = _cut(program, data), _costs(stack)

    devices = simulate_flat(cut, costs)

    assert devices.step_seconds == pytest.approx(simulate(cut, costs).step_seconds, rel=1e-3)


@given(program=programs(), data=st.data())
@settings(max_examples=15)
def test_buckets_are_written_and_read(program: Program, data: st.DataObject) -> None:
    cut = _cut(program, data)

    assert parse_program(format_program(cut)) == cut
    verify_program(cut)


def test_a_bucket_of_a_plan_is_one_collective() -> None:
    """Two microbatches of 7 + 9 s; gradients are there at 27 and 32. Apart they end at 33 and 36, together at 40.

    So they stay apart, while the uniform rule waits for both.
    """
    program = two_block_step(Mesh.of(dp=2, tp=8))

    found = cut_gradients(program, _costs())

    assert found.cuts == ((BucketCuts("all_reduce", "dp", "step", 0, (1, 2)),),)
    assert found.uniform.step_seconds - found.found.step_seconds == pytest.approx(4.0)
    assert found.is_worth_it
    assert found.num_gradients == 2


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (
            BucketCuts("all_reduce", "dp", "step", 0, (2, 1)),
            "bucket 1 of all_reduce over 'dp' per step is out of order",
        ),
        (BucketCuts("all_reduce", "dp", "step", 0, (0, 2)), "out of order: it ends at gradient 0, the first"),
        (
            BucketCuts("all_reduce", "dp", "step", 0, (1,)),
            r"hold 1 gradients, there are 2; there are 'v.grad', 'w.grad'",
        ),
        (
            BucketCuts("all_reduce", "tp", "step", 0, (2,)),
            "no gradient of the stage is reduced by all_reduce over 'tp'",
        ),
        (BucketCuts("all_reduce", "dp", "step", 0, ()), "into no buckets"),
        (BucketCuts("all_reduce", "dp", "pass", 0, (2,)), "they travel per step or per microbatch"),
    ],
)
def test_buckets_that_cannot_be_are_refused(cuts: BucketCuts, message: str) -> None:
    """In a plan and in the text of a program, with the gradients around the place."""
    program = two_block_step(Mesh.of(dp=2, tp=8))
    with pytest.raises(PlanError, match=message):
        bucketed(program, {0: [cuts]})

    (stage,) = program.stages
    with pytest.raises(ProgramError, match=message):
        verify_program(replace(program, stages=(replace(stage, buckets=(cuts,)),)))


def test_all_steps_of_small_cuts_agree_with_the_simulator() -> None:
    """The timer that lays passes out once and the simulator are one: for both orders of two gradients."""
    program = two_block_step(Mesh.of(dp=2, tp=2))
    timer = BucketTimer(program, _costs())
    for ends in ((2,), (1, 2)):
        cuts = (BucketCuts("all_reduce", "dp", "step", 0, ends),)
        cut = bucketed(program, {0: cuts})
        assert timer.time([cuts]).step_seconds == simulate(cut, _costs()).step_seconds
        assert timer.time_uniform(0.0).step_seconds == simulate(cut, _costs(), bucket=0.0).step_seconds


def test_units_of_whole_blocks_end_between_blocks() -> None:
    """Units of FSDP: of two gradients per block no cut separates them, however much earlier the first one is there."""
    program = _chain([(4, 0, 1), (4, 0, 1)], Mesh.of(dp=2, tp=8), 1)
    twice = tuple(
        replace(segment, instructions=segment.instructions * 2) if segment.phase is SegmentPhase.REDUCE else segment
        for segment in program.segments
    )
    program = replace(program, segments=twice)

    (units,) = cut_gradients(program, _costs(), whole_blocks=True).cuts

    assert [cuts.ends for cuts in units] == [(2, 4)]


def test_where_nothing_overlaps_fewest_seconds_count() -> None:
    """With an exposed share of 1 all reductions follow the backward, and one bucket starts once."""
    stack = Stack("all exposed", scalars=(("exposed_share", 1.0),))
    program = _chain([(4, 0, 1)] * 4, Mesh.of(dp=2, tp=8), 1)

    found = cut_gradients(program, _costs(stack))

    assert found.found.step_seconds == found.uniform.step_seconds  # the uniform rule has one bucket, too
    apart = [(BucketCuts("all_reduce", "dp", "step", 0, (1, 2, 3, 4)),)]
    assert BucketTimer(program, _costs(stack)).time(apart).step_seconds == pytest.approx(found.found.step_seconds + 3.0)
