"""Stages that take turns on the same devices: verified, printed, simulated, executed."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.configuration import Configuration
from autopar.errors import ProgramError
from autopar.folding.fold import fold
from autopar.plan import Plan, StagePlan
from autopar.program.records import Category, Program
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.report import format_explain, format_report, format_timeline
from autopar.sharding import Mesh
from autopar.simulate import Row, Timeline, simulate
from tests.executions import Execution, interleave, model_graph, model_rules, random_plan
from tests.plans import two_stage_plan
from tests.programs import ExactCosts, equal_stages


@given(
    num_groups=st.integers(1, 5),
    num_chunks=st.integers(1, 4),
    rounds=st.integers(1, 3),
    forward=st.integers(1, 5),
    backward=st.integers(1, 9),
)
def test_bubble_of_equal_stages_is_the_known_fraction(
    num_groups: int, num_chunks: int, rounds: int, forward: int, backward: int
) -> None:
    """Without communication the bubble is (p - 1) / (v m) of the work, 1 / v of that of 1F1B, on every device."""
    microbatches, slot = rounds * num_groups, forward + backward
    count = num_groups * num_chunks
    program = equal_stages(
        count, microbatches, "interleaved", forward=forward, backward=backward, num_chunks=num_chunks
    )

    timeline = simulate(program, ExactCosts())

    assert timeline.step_seconds == (num_chunks * microbatches + num_groups - 1) * slot
    assert [stage.bubble_seconds for stage in timeline.stages] == [(num_groups - 1) * slot] * num_groups
    assert [stage.compute_seconds for stage in timeline.stages] == [num_chunks * microbatches * slot] * num_groups


def test_memory_is_that_of_all_chunks() -> None:
    """2 groups of 2 chunks, 10 bytes of parameters and 1 byte per microbatch in flight each: warm-ups of 4 and 2."""
    first, second = simulate(equal_stages(4, 4, "interleaved", num_chunks=2), ExactCosts()).stages

    assert [first.memory.bytes, second.memory.bytes] == [20 + 5, 20 + 3]
    assert [first.memory.during, second.memory.during] == ["F2", "F0.1"]
    assert dict(first.memory.breakdown)[Category.PARAMETERS] == 20
    assert dict(first.memory.breakdown)[Category.ACTIVATIONS] == 5


def _bars(timeline: Timeline, row: Row) -> list[tuple[int, str, float, float]]:
    """Return group, name, start and end of the tasks or transfers of a row in order of time."""
    events = [event for event in timeline.events if event.row is row and event.name[1:].replace(".", "").isdigit()]
    return sorted((event.stage, event.name, event.start, event.start + event.seconds) for event in events)


def test_transfers_go_round() -> None:
    """From the last group back to the first, and the other way in the backward; 1 s each, F 1 s, B 2 s.

    Group 0 runs F0 0-1 and F0.1 when group 1 has sent F0 of its first chunk: 1-2 on the way, 2-3, 3-4 on the way.
    """
    timeline = simulate(equal_stages(4, 2, "interleaved", num_chunks=2), ExactCosts(latency=1.0), trace=True)

    tasks = {name: start for group, name, start, _ in _bars(timeline, Row.COMPUTE) if group == 0}
    assert (tasks["F0"], tasks["F1"], tasks["F0.1"]) == (0, 1, 4)
    assert (0, "F0", 1.0, 2.0) in _bars(timeline, Row.SEND_NEXT)
    assert (1, "F0", 3.0, 4.0) in _bars(timeline, Row.SEND_NEXT)
    assert {name for group, name, *_ in _bars(timeline, Row.SEND_NEXT) if group == 1} == {"F0", "F1"}
    assert {name for group, name, *_ in _bars(timeline, Row.SEND_PREVIOUS) if group == 0} == {"B0.1", "B1.1"}


def test_one_group_sends_nothing() -> None:
    """All stages on one device: their work is all there is, however slow the links."""
    timeline = simulate(equal_stages(3, 2, "interleaved", num_chunks=3), ExactCosts(latency=9.0), trace=True)

    assert timeline.step_seconds == 3 * 2 * 3
    assert {event.row for event in timeline.events} == {Row.COMPUTE}


def test_text_keeps_shared_devices() -> None:
    program = equal_stages(4, 2, "interleaved", num_chunks=2)

    text = format_program(program)

    assert "stage 2 devices=0:1" in text
    assert parse_program(text) == program
    assert (program.num_devices, program.num_groups, program.num_chunks) == (2, 2, 2)


def _stage(program: Program, index: int, devices: tuple[int, int]) -> Program:
    stages = list(program.stages)
    stages[index] = replace(stages[index], devices=devices)
    return replace(program, stages=tuple(stages))


INTERLEAVED = equal_stages(4, 4, "interleaved", num_chunks=2)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (_stage(INTERLEAVED, 3, (0, 1)), r"stage 3 has devices \(0, 1\), those of stage 1 take turns"),
        (replace(INTERLEAVED, stages=INTERLEAVED.stages[:3]), "3 stages cannot take turns on 2 groups"),
        (replace(INTERLEAVED, schedule="1f1b"), "'1f1b' runs one stage per group of devices, not 2"),
        (
            replace(INTERLEAVED, num_microbatches=5),
            "'interleaved' runs microbatches in rounds of 2, .* 5 are no whole number",
        ),
    ],
)
def test_unlawful_turns_are_refused(program: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        verify_program(program)


@pytest.mark.parametrize(("num_groups", "num_chunks", "seed"), [(2, 2, 0), (1, 3, 1), (2, 1, 2)])
def test_interleaved_stages_compute_what_the_model_computes(
    num_groups: int, num_chunks: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random placements, boundaries and recompute on 2 x 2 devices per group."""
    cache: Path = tmp_path_factory.getbasetemp() / "rules"
    count = 4
    execution = Execution.of("mlp-xs", 4, count)
    configuration = Configuration(num_groups * num_chunks, Mesh.of(outer=2, inner=2), count, "1f1b")
    rules = model_rules("mlp-xs", cache)

    plan = interleave(random_plan(fold(model_graph("mlp-xs", 4)), rules, configuration, 4, seed), num_groups)

    execution.check(plan)


def test_a_plan_file_may_interleave(tmp_path: Path) -> None:
    """Halves of a solved plan's blocks take turns on its 2 devices: the same work, and nothing to wait for.

    Only buckets of gradients differ: stages do not share them.
    """
    solved = autopar.solve("zoo:mlp-xs", gpus=2, cluster="h100", stack="ideal", global_batch=65536)
    (stage,) = solved.stages
    stages = (replace(stage, blocks=(0, 4)), replace(stage, blocks=(4, 8)))
    replace(solved, stages=stages, schedule="interleaved").save(tmp_path / "plan.json")

    timeline = autopar.simulate_plan(Plan.load(tmp_path / "plan.json"))

    (row,) = timeline.stages
    whole = autopar.simulate_plan(solved)
    assert row.compute_seconds == pytest.approx(whole.stages[0].compute_seconds)
    assert timeline.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)
    assert row.index == 0
    assert row.wait_seconds == 0
    assert row.bubble_seconds == pytest.approx(0, abs=1e-12)


def test_reports_show_a_group_for_each_of_its_stages() -> None:
    """Every stage of the plan is listed with the peak of its devices; the simulator has one row per group."""
    plan = two_stage_plan()
    stages = tuple(
        StagePlan((block, block + 1), plan.stages[block % 2].devices, plan.stages[block % 2].recompute)
        for block in range(4)
    )
    plan = replace(plan, stages=stages, schedule="interleaved")

    report, explained = format_report(plan), format_explain(plan)
    timeline = format_timeline(simulate(equal_stages(4, 2, "interleaved", num_chunks=2), ExactCosts()))

    peaks = [line.split()[-3] for line in report.splitlines() if line.split()[1:2] in (["0-3"], ["4-7"])]
    assert len(peaks) == 4
    assert peaks[:2] == peaks[2:]
    assert "stage" in explained
    firsts = [line.split()[0] for line in timeline.splitlines() if line]
    assert [word for word in firsts if word.isdigit()] == ["0", "1"] * 4
