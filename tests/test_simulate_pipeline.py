"""Simulated time of pipelines."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster, NodeGroup, load_cluster
from autopar.cost import CostModel
from autopar.ir.graph import Op
from autopar.program.records import (
    Collective,
    Compute,
    Fetch,
    Instruction,
    Offload,
    Operand,
    Program,
    Segment,
    SegmentPhase,
    Store,
)
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, Pass, Task
from autopar.schedule.base import Schedule
from autopar.schedule.timing import tasks_of
from autopar.simulate import Row, Timeline, simulate
from autopar.simulate.blocks import Peak
from autopar.simulate.memory import StageMemory, host_bytes, memory_over_time
from autopar.simulate.pipeline import run_pipeline
from tests.plain_pipeline import plain_pipeline
from tests.programs import ExactCosts, equal_stages, programs

GOLDEN = Path(__file__).parent / "golden"
ROUNDING = 1e-9
"""Relative; sums of a few thousand numbers."""

WIDTH = 3  # characters per second of a chart


def _chart(timeline: Timeline) -> str:
    """Return a chart of the tasks of each stage, one column of 3 characters per second."""
    lines = []
    for stage in timeline.stages:
        cells = ["." * WIDTH] * round(timeline.step_seconds)
        for event in timeline.events:
            if event.stage == stage.index and event.row is Row.COMPUTE and event.name[1:].isdigit():
                for second in range(round(event.start), round(event.start + event.seconds)):
                    cells[second] = event.name.ljust(WIDTH)
        lines.append("".join(cells))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "schedule", "latency"),
    [("gpipe", "gpipe", 0.0), ("1f1b", "1f1b", 0.0), ("1f1b_latency", "1f1b", 1.0), ("infer", "forward-only", 1.0)],
)
def test_timelines_are_those_worked_out_by_hand(name: str, schedule: str, latency: float) -> None:
    """3 stages, 4 microbatches, forward 1 s, backward 2 s, transfers of 0 or 1 s; charts whole."""
    program = equal_stages(3, 4, schedule)

    timeline = simulate(program, ExactCosts(latency=latency), trace=True)

    assert _chart(timeline) == (GOLDEN / f"timeline_{name}.txt").read_text()


@given(
    num_stages=st.integers(1, 6),
    num_microbatches=st.integers(1, 12),
    forward=st.integers(1, 5),
    backward=st.integers(1, 9),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_bubble_of_equal_stages_is_the_known_fraction(
    num_stages: int, num_microbatches: int, forward: int, backward: int, schedule: str
) -> None:
    """Without communication (p - 1) / (m + p - 1) of the step is bubble, on every stage and for both schedules."""
    program = equal_stages(num_stages, num_microbatches, schedule, forward=forward, backward=backward)

    timeline = simulate(program, ExactCosts())

    slots = num_microbatches + num_stages - 1
    assert timeline.step_seconds == slots * (forward + backward)
    for stage in timeline.stages:
        assert stage.bubble_seconds == (num_stages - 1) * (forward + backward)


def test_schedules_differ_in_memory_only() -> None:
    """4 stages, 8 microbatches of 1 byte over 10 resident: GPipe holds 8 everywhere, 1F1B 4, 3, 2, 1."""
    gpipe, one = (simulate(equal_stages(4, 8, name), ExactCosts()) for name in ("gpipe", "1f1b"))

    assert gpipe.step_seconds == one.step_seconds
    assert [stage.memory.bytes for stage in gpipe.stages] == [18, 18, 18, 18]
    assert [stage.memory.bytes for stage in one.stages] == [14, 13, 12, 11]


def test_recompute_runs_the_forward_again() -> None:
    """2 stages, 3 microbatches, (3 + 1) slots of 1 + (1 + 2) s."""
    timeline = simulate(equal_stages(2, 3, "1f1b", recompute=Recompute.FULL), ExactCosts())

    assert timeline.step_seconds == 16
    assert [stage.compute_seconds for stage in timeline.stages] == [12, 12]


@given(program=programs(), latency=st.integers(0, 3).map(lambda number: number / 7))
def test_the_times_of_a_stage_add_up_to_the_step(program: Program, latency: float) -> None:
    """Compute, collectives, waiting, bubble, gradients, update, gathering, delays and copies; none is negative."""
    timeline = simulate(program, ExactCosts(speed=3.0, bandwidth=7.0, latency=latency))

    for stage in timeline.stages:
        parts = [
            stage.compute_seconds,
            stage.collective_seconds,
            stage.wait_seconds,
            stage.bubble_seconds,
            stage.gradient_seconds,
            stage.update_seconds,
            stage.gather_seconds,
            stage.delay_seconds,
            stage.copy_seconds,
        ]
        assert sum(parts) == pytest.approx(timeline.step_seconds, rel=ROUNDING)
        assert min(parts) >= 0


def _work(program: Program, costs: ExactCosts) -> list[dict[str, float]]:
    """Return the seconds of compute, blocking collectives and gradient traffic of each stage, counted one by one."""
    table = program.table()
    totals = []
    for stage in program.stages:
        work = {"compute": 0.0, "blocking": 0.0, "dp": 0.0, "tp": 0.0}
        for kind, flavour in zip(stage.blocks, stage.recompute, strict=True):
            again = {Recompute.FULL: SegmentPhase.FORWARD, Recompute.SELECTIVE: SegmentPhase.AGAIN}.get(flavour)
            for phase in SegmentPhase:
                segment = table.get((kind, phase))
                if segment is None:
                    continue
                passes = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.WEIGHT)
                each = (phase in passes) + (phase is again)
                times = each * program.num_microbatches
                if phase in (SegmentPhase.REDUCE, SegmentPhase.UPDATE):
                    times = 1
                for instruction in segment.instructions:
                    match instruction:
                        case Compute(op=op):
                            seconds = op.attr("seconds")
                            assert isinstance(seconds, float)
                            work["compute"] += times * seconds / costs.speed
                        case Collective(axis=axis, bytes=size):
                            loose = instruction.overlaps or phase is SegmentPhase.REDUCE
                            work[axis.name if loose else "blocking"] += times * size / costs.bandwidth
        totals.append(work)
    return totals


def _critical_path(program: Program, costs: ExactCosts) -> float:
    """Return the longest chain of tasks and transfers, by recursion over who waits for whom.

    Where steps overlap it is the longest of a stage, from its first task on.
    """
    layout = simulate(program, costs, trace=True)
    took = {
        (event.stage, event.name): event.seconds
        for event in layout.events
        if event.row is Row.COMPUTE and event.name[1:].isdigit()
    }
    schedule, num_stages = SCHEDULES[program.schedule], len(program.stages)
    orders = [schedule.order(i, num_stages, program.num_microbatches) for i in range(num_stages)]
    ends: dict[tuple[int, Task], float] = {}

    def end(stage: int, task: Task) -> float:
        if (stage, task) not in ends:
            place = orders[stage].index(task)
            start = end(stage, orders[stage][place - 1]) if place else 0.0
            neighbour = stage - 1 if task.kind is Pass.FORWARD else stage + 1
            if task.kind is not Pass.WEIGHT and 0 <= neighbour < num_stages:
                start = max(start, end(neighbour, task) + costs.latency)
            ends[stage, task] = start + took[stage, str(task)]
        return ends[stage, task]

    def step(stage: int) -> float:
        first = (stage, orders[stage][0])
        begin = end(*first) - took[stage, str(first[1])] if schedule.steps_overlap else 0.0
        return end(stage, orders[stage][-1]) - begin

    return max(map(step, range(num_stages)))


@given(program=programs(), latency=st.integers(0, 3).map(float))
def test_step_is_no_shorter_than_the_critical_path_and_each_resource(program: Program, latency: float) -> None:
    """Nothing runs faster than what it consists of, and busy times are the sums of what was asked for."""
    costs = ExactCosts(latency=latency)

    timeline = simulate(program, costs)

    assert timeline.step_seconds >= _critical_path(program, costs) * (1 - ROUNDING)
    for stage, work in zip(timeline.stages, _work(program, costs), strict=True):
        assert stage.busy_seconds == work["compute"]
        assert stage.link_seconds + stage.gather_seconds == pytest.approx(work["blocking"])
        assert stage.collective_seconds <= stage.link_seconds * (1 + ROUNDING)
        assert stage.overlapped_seconds == pytest.approx(work["dp"] + work["tp"])
        for least in (work["compute"], work["blocking"], work["dp"], work["tp"]):
            assert timeline.step_seconds >= least * (1 - ROUNDING)


@given(program=programs())
def test_step_is_the_critical_path_where_no_gradient_travels_and_channels_are_free(program: Program) -> None:
    """Without the once-per-step phases and without latency the step is the longest chain, exactly."""
    phases = (SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.WEIGHT)
    segments = tuple(
        replace(
            segment,
            instructions=tuple(
                replace(part, overlaps=False) if isinstance(part, Collective) else part for part in segment.instructions
            ),
        )
        for segment in program.segments
        if segment.phase in phases
    )
    quiet = replace(program, segments=segments)

    timeline = simulate(quiet, ExactCosts())

    assert timeline.step_seconds == pytest.approx(_critical_path(quiet, ExactCosts()), rel=ROUNDING)


def _renamed(program: Program) -> Program:
    """Return the program with other names of values, ops, axes and kinds of block, on other whole nodes."""

    def operand(old: Operand) -> Operand:
        return replace(old, value=f"{old.value}~")

    def operands(old: Sequence[Operand]) -> tuple[Operand, ...]:
        return tuple(map(operand, old))

    def rename(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Compute):
            return replace(
                instruction,
                op=replace(instruction.op, name=f"{instruction.op.name}~"),
                inputs=tuple(None if old is None else operand(old) for old in instruction.inputs),
                outputs=tuple(None if old is None else operand(old) for old in instruction.outputs),
            )
        if isinstance(instruction, Offload | Fetch):
            return replace(instruction, operand=operand(instruction.operand), result=operand(instruction.result))
        return replace(
            instruction,
            axis=replace(instruction.axis, name=f"{instruction.axis.name}~"),
            operand=operand(instruction.operand),
            result=operand(instruction.result),
        )

    def segment(old: Segment) -> Segment:
        return replace(
            old,
            kind=50 - old.kind,
            inputs=operands(old.inputs),
            external=operands(old.external),
            instructions=tuple(map(rename, old.instructions)),
            saved=operands(old.saved),
            outputs=operands(old.outputs),
            stores=tuple(Store(operand(store.value), f"{store.target}~") for store in old.stores),
        )

    stages = tuple(
        replace(
            stage,
            mesh=replace(stage.mesh, axes=tuple(replace(axis, name=f"{axis.name}~") for axis in stage.mesh.axes)),
            blocks=tuple(50 - kind for kind in stage.blocks),
        )
        for stage in program.stages
    )
    return replace(program, stages=stages, segments=tuple(map(segment, reversed(program.segments))))


@given(program=programs())
def test_names_do_not_matter(program: Program) -> None:
    costs = ExactCosts(latency=1.0)

    renamed, timeline = simulate(_renamed(program), costs), simulate(program, costs)

    assert _by_axes_of(renamed, "~") == timeline


def _by_axes_of(timeline: Timeline, suffix: str) -> Timeline:
    """Return a timeline with a suffix taken off the names of its axes."""
    stages = (
        replace(stage, axis_seconds=tuple((axis.removesuffix(suffix), t) for axis, t in stage.axis_seconds))
        for stage in timeline.stages
    )
    return replace(timeline, stages=tuple(stages))


@given(program=programs())
def test_what_compute_waits_for_adds_up_by_axis(program: Program) -> None:
    timeline = simulate(program, ExactCosts(latency=1.0))

    for stage in timeline.stages:
        assert sum(seconds for _, seconds in stage.axis_seconds) == pytest.approx(stage.collective_seconds)
        assert 0 <= stage.again_seconds <= stage.compute_seconds


@given(program=programs(), better=st.sampled_from(["bandwidth", "speed", "latency"]))
def test_better_hardware_never_makes_the_step_longer(program: Program, better: str) -> None:
    """Twice the bandwidth, twice the speed, or half the latency; halves of whole numbers are exact."""
    costs = ExactCosts(latency=2.0)
    improved = {
        "bandwidth": replace(costs, bandwidth=2.0),
        "speed": replace(costs, speed=2.0),
        "latency": replace(costs, latency=1.0),
    }

    assert simulate(program, improved[better]).step_seconds <= simulate(program, costs).step_seconds


def test_waiting_is_not_bubble() -> None:
    """2 stages, 1 microbatch, 1 s each way: F 0-1 on stage 0, 2-3 on 1, B 3-5 on 1, 6-8 on 0.

    Stage 0 idles 5 s: stage 1 is done with B at 5, the values are there at 6. Stage 1 idles 1 s until stage 0 is done
    with F and 1 s until its values are there; at the end it waits 3 s for stage 0.
    """
    first, second = simulate(equal_stages(2, 1, "1f1b"), ExactCosts(latency=1.0)).stages

    assert (first.bubble_seconds, first.wait_seconds) == (4, 1)
    assert (second.bubble_seconds, second.wait_seconds) == (4, 1)


def test_a_channel_carries_one_transfer_at_a_time() -> None:
    """Stage 0 sends every second, a transfer takes 3 s: arrivals at 4, 7, 10, and the last forward ends at 11."""
    timeline = simulate(equal_stages(2, 3, "forward-only"), ExactCosts(latency=3.0))

    assert timeline.step_seconds == 11


CHUNKS = {"interleaved": 2, "zb-v": 2, "1f1b-a2a": 2, "dualpipe-v": 2}


@given(name=st.sampled_from(sorted(SCHEDULES)), num_groups=st.integers(1, 4), rounds=st.integers(1, 3), data=st.data())
@settings(max_examples=60)
def test_the_compiled_pipeline_equals_a_plain_loop(
    name: str, num_groups: int, rounds: int, data: st.DataObject
) -> None:
    """Stages and transfers of random seconds: runs and transfers of every group are those of the plain loop."""
    schedule, num_chunks, count = SCHEDULES[name], CHUNKS.get(name, 1), num_groups * rounds
    groups, some = schedule.groups(num_groups, num_chunks), st.integers(0, 6).map(float)
    seconds = [{kind: data.draw(some) for kind in schedule.passes} for _ in groups]
    there, back, longer = ([data.draw(some) for _ in groups] for _ in range(3))
    arguments = (groups, seconds, there[:-1], back[:-1], longer)

    runs, transfers = run_pipeline(tasks_of(schedule, num_groups, count, num_chunks), *arguments)

    expected, sent = plain_pipeline(schedule.orders(num_groups, count, num_chunks), *arguments)
    assert [list(own) for own in runs] == expected
    assert [own[-1] for own in runs] == [own[-1] for own in expected]
    assert sorted(transfers) == sorted(sent)


@given(name=st.sampled_from(sorted(SCHEDULES)), num_groups=st.integers(1, 4), rounds=st.integers(1, 3), data=st.data())
@settings(max_examples=40)
def test_memory_over_time_is_what_passes_leave_and_take(
    name: str, num_groups: int, rounds: int, data: st.DataObject
) -> None:
    """Task by task: what a pass leaves stays until the next pass of the same microbatch on the same stage starts."""
    schedule, num_chunks, count = SCHEDULES[name], CHUNKS.get(name, 1), num_groups * rounds
    groups, some = schedule.groups(num_groups, num_chunks), st.integers(0, 9).map(float)
    tasks, nothing = tasks_of(schedule, num_groups, count, num_chunks), [0.0] * (len(groups) - 1)
    runs, _ = run_pipeline(tasks, groups, [dict.fromkeys(Pass, 1.0)] * len(groups), nothing, nothing)
    needs = [_draw_memory(data, schedule, some) for _ in range(num_chunks)]
    receiving, transit = sum(own.receiving for own in needs), max(own.transit for own in needs)

    for done in runs:
        found, hosted = memory_over_time(needs, done, schedule.trains, 2.0), host_bytes(needs, done)

        held: dict[tuple[int, int], float] = {}
        away, most = 0.0, 0.0
        for moment, run in zip(found.tolist(), done, strict=False):
            chunk, key = run.task.chunk, (run.task.chunk, run.task.microbatch)
            held.pop(key, 0.0)
            peak = needs[chunk].passes[run.task.kind]
            assert moment == [
                sum(held.values()) + peak.activations, peak.gathered, receiving + transit + peak.reducing,
                peak.bytes - peak.activations, peak.unmade, 2.0,
            ]  # fmt: skip
            if schedule.trains:
                held[key] = needs[chunk].left[run.task.kind]
            away += {Pass.FORWARD: 1, Pass.BACKWARD: -1}.get(run.task.kind, 0) * needs[chunk].hosted
            most = max(most, away)
        assert len(found) == len(done) + schedule.trains
        assert hosted == most


def _draw_memory(data: st.DataObject, schedule: Schedule, some: st.SearchStrategy[float]) -> StageMemory:
    """Draw what the tasks of a stage need; the last pass of a microbatch leaves nothing."""
    return StageMemory(
        left={kind: 0.0 if kind is schedule.passes[-1] else data.draw(some) for kind in Pass},
        passes={kind: Peak(*(data.draw(some) for _ in range(5))) for kind in Pass},
        blocks={},
        receiving=data.draw(some),
        update=data.draw(some),
        transit=data.draw(some),
        hosted=data.draw(some),
    )


def test_the_costs_of_the_planner_are_those_of_the_simulator() -> None:
    """With `CostModel` the compute of a stage is the sum of its op seconds, and the transfer that of `send_seconds`.

    Stages are one device each, so stages 0 and 1 share a node. An op that makes values of no bytes takes
    the launch time alone.
    """
    costs = CostModel(load_cluster("h100"))
    launch = costs.launch_seconds(Op("f", "work", (), ()))

    first, second = simulate(equal_stages(2, 1, "forward-only", activation=0.0), costs).stages

    assert first.compute_seconds == second.compute_seconds == launch
    assert second.wait_seconds == pytest.approx(costs.send_seconds(0.0, 0))


def test_transfers_between_nodes_take_the_slow_link() -> None:
    """Stage 7 to 8 crosses nodes of 8 devices, the others do not."""
    costs = CostModel(load_cluster("h100"))

    stages = simulate(equal_stages(9, 1, "forward-only"), costs).stages

    near, far = (costs.send_seconds(0.0, crosses) for crosses in (False, True))
    assert near != far
    assert [stage.wait_seconds for stage in stages] == pytest.approx([0, *[near] * 7, far])


def test_stages_on_different_devices_take_the_time_of_their_own() -> None:
    """Stages of one device each: 8 A100 and 8 H100 whose launches differ; only stage 7 to 8 leaves a group."""
    slow, fast = load_cluster("a100"), load_cluster("h100")
    between = load_cluster("v100").inter
    costs = CostModel(Cluster.mixed("mixed", (NodeGroup(1, slow), NodeGroup(1, fast)), between))

    stages = simulate(equal_stages(16, 1, "forward-only", activation=0.0), costs).stages

    first, last = (CostModel(group).launch_seconds(Op("f", "work", (), ())) for group in (slow, fast))
    assert first != last
    assert [stage.compute_seconds for stage in stages] == [first] * 8 + [last] * 8
    near = [CostModel(cluster).send_seconds(0.0, 0) for cluster in (slow, fast)]
    assert [stage.wait_seconds for stage in stages] == pytest.approx(
        [0.0] + [near[0]] * 7 + [costs.send_seconds(0.0, 1)] + [near[1]] * 7
    )


def test_a_group_of_its_own_kind_costs_what_a_cluster_of_it_costs() -> None:
    h100 = load_cluster("h100")
    mixed = Cluster.mixed("mixed", (NodeGroup(2, h100),), h100.inter)
    program = equal_stages(8, 4, "1f1b")

    assert simulate(program, CostModel(mixed)) == simulate(program, CostModel(h100))


def test_large_pipelines_take_what_the_formula_says() -> None:
    """64 stages x 512 microbatches, 65,536 tasks."""
    program = equal_stages(64, 512, "1f1b", blocks_per_stage=2)

    timeline = simulate(program, ExactCosts())

    assert timeline.step_seconds == (512 + 63) * 6
