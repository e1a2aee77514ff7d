"""Schedules that split the backward: published bubbles and memory, programs, clear errors; and schedules of others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cli import main
from autopar.configuration import Configuration
from autopar.errors import PlanError, ProgramError
from autopar.program.lower import lower
from autopar.program.records import Category, Compute, Operand, Program, Segment, SegmentPhase
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.recompute import Recompute
from autopar.report import format_report
from autopar.schedule import SCHEDULES, Pass, Schedule, Task, ZeroBubble
from autopar.schedule.timing import time_tasks
from autopar.sharding import Mesh
from autopar.simulate import Row, simulate
from tests.executions import COSTS, Execution, model_rules, random_plan
from tests.plans import two_stage_plan
from tests.programs import ExactCosts, equal_stages, value, work

SECONDS = st.integers(1, 6).map(float)


@given(
    num_groups=st.integers(1, 6),
    more=st.integers(0, 8),
    forward=SECONDS,
    backward=SECONDS,
    weight=SECONDS,
    stretch=st.sampled_from([1, 2]),
)
def test_bubbles_equal_the_published_formulas(
    num_groups: int, more: int, forward: float, backward: float, weight: float, stretch: int
) -> None:
    """(p - 1) (F + B - W) for ZB-H1 and (p - 1) (F + B - 2 W) for ZB-H2, if the weight pass is the shortest pass.

    Arithmetic on small integers is exact.
    """
    weight = min(weight, forward, backward)
    count = stretch * (num_groups - 1) + 1 + more
    program = equal_stages(num_groups, count, f"zb-h{stretch}", forward=forward, backward=backward, weight=weight)

    timeline = simulate(program, ExactCosts())

    bubble = (num_groups - 1) * (forward + backward - stretch * weight)
    assert timeline.step_seconds == count * (forward + backward + weight) + bubble
    assert [stage.bubble_seconds for stage in timeline.stages] == [bubble] * num_groups


@given(num_groups=st.integers(1, 6), more=st.integers(0, 8), seconds=SECONDS)
def test_bubbles_of_equal_passes_relative_to_1f1b(num_groups: int, more: int, seconds: float) -> None:
    """Compared with 1F1B of equal work; a chunk of ZB-V is half a stage."""
    count = 2 * num_groups - 1 + more

    def bubble(schedule: str, num_chunks: int = 1) -> float:
        program = equal_stages(
            num_groups * num_chunks,
            count,
            schedule,
            forward=seconds,
            backward=seconds if SCHEDULES[schedule].splits else 2 * seconds,
            weight=seconds,
            num_chunks=num_chunks,
        )
        timeline = simulate(program, ExactCosts())
        assert {stage.bubble_seconds for stage in timeline.stages} == {timeline.stages[0].bubble_seconds}
        return timeline.stages[0].bubble_seconds

    assert bubble("1f1b") == 3 * (num_groups - 1) * seconds
    assert bubble("zb-h1") == (num_groups - 1) * seconds
    assert bubble("zb-h2") == 0
    assert bubble("zb-v", num_chunks=2) == 0


@given(num_groups=st.integers(1, 6), more=st.integers(0, 8), forward=SECONDS, backward=SECONDS, weight=SECONDS)
def test_the_bubble_of_dual_pipe_v(num_groups: int, more: int, forward: float, backward: float, weight: float) -> None:
    """At most the published one, which counts pairs as one pass; at least (p - 1) (F + B - W).

    For passes in the usual proportions: W no longer than B, F no longer than both.
    """
    weight = min(weight, backward)
    forward = min(forward, backward + weight)
    count, num_stages = 2 * num_groups + more, 2 * num_groups
    passes, none = np.array([[forward, backward, weight]] * num_stages), np.zeros(num_stages)

    timing = time_tasks(SCHEDULES["dualpipe-v"], num_groups, count, passes, none, none)

    bubble = timing.ends.max() - 2 * count * (forward + backward + weight)
    assert bubble >= (num_groups - 1) * (forward + backward - weight)
    assert bubble <= (num_groups - 1) * (forward + 2 * backward - weight)


@settings(max_examples=50)
@given(num_groups=st.integers(1, 6), forward=SECONDS, backward=SECONDS, weight=SECONDS)
def test_a_fitted_schedule_has_almost_no_bubble(
    num_groups: int, forward: float, backward: float, weight: float
) -> None:
    """The bubble is less than one microbatch, for any number of groups, if backwards are no shorter than forwards."""
    backward = max(forward, backward)
    schedule, count = ZeroBubble.fitted(forward, backward, weight), 80
    passes = np.array([[forward, backward, weight]] * num_groups)
    none = np.zeros(num_groups)

    timing = time_tasks(schedule, num_groups, count, passes, none, none)

    bubble = float((timing.ends - timing.begins).max()) - count * (forward + backward + weight)
    assert 0 <= bubble < forward + backward + weight


def test_the_schedule_fitted_to_equal_passes_is_zb_h2() -> None:
    fitted = ZeroBubble.fitted(2.0, 2.0, 2.0)

    assert fitted.orders(4, 9) == SCHEDULES["zb-h2"].orders(4, 9)


@pytest.mark.parametrize("num_groups", [1, 2, 4, 8])
def test_microbatches_held_equal_the_published_numbers(num_groups: int) -> None:
    """ZB-H1 holds as many as group 0 of 1F1B, ZB-H2 about twice as many, ZB-V twice as many half stages."""
    count = 3 * num_groups

    def held(name: str, num_chunks: int = 1) -> list[int]:
        return [SCHEDULES[name].in_flight(group, num_groups, count, num_chunks) for group in range(num_groups)]

    assert max(held("1f1b")) == num_groups
    assert held("zb-h1") == [num_groups] * num_groups
    assert held("zb-h2") == [2 * num_groups - 1] * num_groups
    assert held("zb-v", 2) == [2 * num_groups] * num_groups
    assert held("dualpipe-v", 2) == [2 * num_groups + 1] * num_groups
    assert held("1f1b-a2a") == [2 * (num_groups - group) for group in range(num_groups)]


def test_memory_is_held_from_the_forward_to_the_weight_pass() -> None:
    """4 groups, 8 microbatches of 1 byte over 10 resident bytes; a chunk of ZB-V holds half of a stage."""
    programs = [equal_stages(4, 8, name) for name in ("1f1b", "zb-h1", "zb-h2")]
    programs.append(equal_stages(8, 8, "zb-v", activation=0.5, num_chunks=2))

    activations = [
        [dict(stage.memory.breakdown)[Category.ACTIVATIONS] for stage in simulate(program, ExactCosts()).stages]
        for program in programs
    ]

    assert activations == [[4, 3, 2, 1], [4, 4, 4, 4], [7, 7, 7, 7], [4, 4, 4, 4]]


def freed_by_half(program: Program) -> Program:
    """Return the program with 3 bytes saved for the backward alone, and 2 that the backward saves for the weights."""
    changed = []
    extra, late = value("extra", 3), value("late", 2)
    for segment in program.segments:
        match segment.phase:
            case SegmentPhase.FORWARD:
                make = work((), (extra,), 0.0, name="more")
                segment = replace(segment, instructions=(*segment.instructions, make), saved=(*segment.saved, extra))
            case SegmentPhase.BACKWARD:
                make = work((extra,), (late,), 0.0, SegmentPhase.BACKWARD, name="keep")
                segment = replace(segment, instructions=(*segment.instructions, make), saved=(late,))
            case SegmentPhase.WEIGHT:
                use = work((late,), (value("dv"),), 0.0, SegmentPhase.WEIGHT, name="use")
                segment = replace(segment, instructions=(*segment.instructions, use))
        changed.append(segment)
    return replace(program, segments=tuple(changed))


def test_a_weight_pass_keeps_only_what_it_reads() -> None:
    """A microbatch holds 1 + 3 bytes until its backward and 1 + 2 bytes until its weight pass.

    ZB-H1 on 2 groups runs F0 B0 F1 B1 W0 F2 on group 1. In F2 microbatch 1 waits for its weight pass with 3 bytes and
    microbatch 2 holds 4; in B1 microbatch 0 holds 3, microbatch 1 holds 4 and 2 that its backward produces.
    """
    program = freed_by_half(equal_stages(2, 3, "zb-h1"))

    timeline = simulate(program, ExactCosts(), trace=True)

    during = dict(zip(["F0", "B0", "F1", "B1", "W0", "F2", "B2", "W1", "W2"], _samples(program, 1), strict=True))
    assert during == {"F0": 4, "B0": 6, "F1": 7, "B1": 9, "W0": 6, "F2": 7, "B2": 9, "W1": 6, "W2": 3}
    assert timeline.stages[1].memory.bytes == 10 + 9


def _samples(program: Program, group: int) -> list[float]:
    """Return the bytes above the resident ones in every task of a group."""
    timeline = simulate(program, ExactCosts(), trace=True)
    return [sample.bytes - 10 for sample in timeline.samples if sample.stage == group][:-1]


def test_recomputed_values_are_held_until_the_weight_pass() -> None:
    """Blocks keep their inputs (0 bytes here) until the backward, recomputed values until the weight pass."""
    timeline = simulate(equal_stages(2, 3, "zb-h1", recompute=Recompute.FULL), ExactCosts())

    assert timeline.step_seconds == 3 * (1 + 3 + 1) + (1 + 3 - 1)
    assert [stage.memory.bytes for stage in timeline.stages] == [11, 12]


def test_messages_of_zb_v_cross_groups_only() -> None:
    """2 groups, stages 0 1 1 0: no message at the turn, and group 0 gets the input of its second chunk from group 1."""
    timeline = simulate(equal_stages(4, 3, "zb-v", num_chunks=2), ExactCosts(latency=1.0), trace=True)

    sends = {(event.stage, event.row, event.name.partition(".")[2]) for event in timeline.events if event.row in _SENDS}
    assert sends == {
        (0, Row.SEND_NEXT, ""),
        (1, Row.SEND_NEXT, "1"),
        (0, Row.SEND_PREVIOUS, "1"),
        (1, Row.SEND_PREVIOUS, ""),
    }


_SENDS = (Row.SEND_NEXT, Row.SEND_PREVIOUS)


def _kinds_of_ops(program: Program, phase: SegmentPhase) -> set[str]:
    return {
        instruction.op.kind
        for segment in program.segments
        if segment.phase is phase
        for instruction in segment.instructions
        if isinstance(instruction, Compute)
    }


def test_a_split_backward_has_all_ops_of_the_joint_one(cache_dir: Path) -> None:
    """Ops that the previous block depends on stay in the backward; gradient sums are in the weight segments."""
    execution, rules = Execution.of("llama3-8b", 4, 4), model_rules("llama3-8b", cache_dir)
    plan = random_plan(execution.folded, rules, Configuration(2, Mesh.of(inner=2), 4, "1f1b"), 4, seed=3)

    joint, split = (lower(replace(plan, schedule=name), execution.folded, COSTS) for name in ("1f1b", "zb-h1"))

    verify_program(split, execution.folded, rules)
    assert parse_program(format_program(split)) == split

    def ops(program: Program) -> list[str]:
        return sorted(
            instruction.op.name
            for segment in program.segments
            for instruction in segment.instructions
            if isinstance(instruction, Compute)
        )

    assert ops(joint) == ops(split)
    assert not any(segment.stores for segment in split.segments if segment.phase is SegmentPhase.BACKWARD)
    assert {"Einsum", "Add"} <= _kinds_of_ops(split, SegmentPhase.WEIGHT)
    assert {"Einsum", "autopar::AttentionGrad"} <= _kinds_of_ops(split, SegmentPhase.BACKWARD)
    assert "autopar::AttentionGrad" not in _kinds_of_ops(split, SegmentPhase.WEIGHT)


def _change(phase: SegmentPhase, change: Callable[[Segment], Segment]) -> Program:
    program = equal_stages(2, 2, "zb-h1")
    return replace(
        program,
        segments=tuple(change(each) if each.phase is phase else each for each in program.segments),
    )


def _without(phase: SegmentPhase) -> Program:
    program = equal_stages(2, 2, "zb-h1")
    return replace(program, segments=tuple(each for each in program.segments if each.phase is not phase))


DW: Operand = value("dw")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (_change(SegmentPhase.WEIGHT, lambda each: replace(each, outputs=(DW,))), "no other block waits for them"),
        (_change(SegmentPhase.WEIGHT, lambda each: replace(each, exports=(DW,))), "no other block waits for them"),
        (_change(SegmentPhase.WEIGHT, lambda each: replace(each, saved=(DW,))), "only a forward or a backward can"),
        (_without(SegmentPhase.BACKWARD), "follows a backward, but kind 0 has none|has no backward"),
        (replace(equal_stages(2, 2, "zb-h1"), schedule="1f1b"), "has weight segments, which schedule '1f1b' does not"),
        (equal_stages(4, 2, "zb-h1", num_chunks=2), "'zb-h1' runs one stage per group of devices, not 2"),
        (replace(equal_stages(4, 2, "interleaved", num_chunks=2), schedule="zb-v"), "those of stage 1 take turns"),
        (equal_stages(2, 2, "zb-v"), "'zb-v' runs two stages per group of devices, i and 2p - 1 - i of 2p, not 1"),
    ],
)
def test_invalid_splits_are_refused(program: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify_program(program)


def test_an_unknown_schedule_of_a_plan_is_refused(cache_dir: Path) -> None:
    execution, rules = Execution.of("mlp-xs", 4, 2), model_rules("mlp-xs", cache_dir)
    plan = random_plan(execution.folded, rules, Configuration(2, Mesh.of(inner=2), 2, "1f1b"), 4, seed=0)

    with pytest.raises(PlanError, match="there is no schedule 'zb-h9'"):
        lower(replace(plan, schedule="zb-h9"), execution.folded, COSTS)


class _WeightsLast(Schedule):
    """1F1B, and all weights at the end: a schedule as another package may bring it along."""

    splits = True

    def order(self, group: int, num_groups: int, num_microbatches: int, num_chunks: int = 1) -> tuple[Task, ...]:
        """Return the order of 1F1B, then W0 W1 ..."""
        rest = (Task(Pass.WEIGHT, i) for i in range(num_microbatches))
        return (*SCHEDULES["1f1b"].order(group, num_groups, num_microbatches), *rest)


def test_a_schedule_can_be_added(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """A new schedule is lowered, verified, executed and simulated like any other."""
    monkeypatch.setitem(SCHEDULES, "weights-last", _WeightsLast())
    execution, rules = Execution.of("mlp-xs", 4, 4), model_rules("mlp-xs", cache_dir)
    plan = random_plan(execution.folded, rules, Configuration(3, Mesh.of(inner=2), 4, "weights-last"), 4, seed=1)

    execution.check(plan)
    timeline = simulate(equal_stages(3, 4, "weights-last"), ExactCosts())

    assert timeline.step_seconds == (4 + 2) * 3 + 4 * 1
    assert SCHEDULES["weights-last"].in_flight(0, 3, 4) == 4


def test_reports_say_that_steps_are_taken_to_overlap() -> None:
    """A step counted from a group's first task to its last needs an optimizer that waits for no other group."""
    plan = two_stage_plan()

    told = [format_report(replace(plan, schedule=name)) for name in ("1f1b", "zb-h1")]

    assert ["no global gradient-norm clipping" in " ".join(text.split()) for text in told] == [False, True]


def test_the_command_lists_and_draws_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    """The bubble of 1F1B is 3 / 11 of a step on 4 groups and 8 microbatches, that of ZB-H1 3 / 27."""
    assert main(["schedules"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["1f1b"] == ["1f1b", "F", "B", "1", "27.3", "%", "4"]
    assert rows["zb-h1"] == ["zb-h1", "F", "B", "W", "1", "11.1", "%", "4"]
    assert rows["interleaved"][3:] == ["2", "15.8", "%", "5.5"]

    assert main(["schedules", "--microbatches", "7"]) == 0
    assert "interleaved   -" in capsys.readouterr().out

    assert main(["schedules", "1f1b", "--pp", "2", "--microbatches", "2", "--seconds", "1", "2", "1"]) == 0
    assert capsys.readouterr().out == "f0f1      b0      b1\n  f0b0    f1b1\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zb-v"], "'zb-v' runs two stages per group of devices, i and 2p - 1 - i of 2p, not 1"),
        (
            ["interleaved", "--microbatches", "7", "--interleave", "2"],
            "in rounds of 4, one per group of devices, and 7",
        ),
        (["zb-h9"], "there is no schedule 'zb-h9'"),
    ],
)
def test_unfit_schedules_are_refused_with_a_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedules", *arguments]) != 0
    assert message in capsys.readouterr().err
