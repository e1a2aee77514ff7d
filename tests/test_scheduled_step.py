"""Step time and memory by the longest path of `scheduled_step.py`, compared with the simulator."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.configuration import Configuration
from autopar.cost import Stack
from autopar.formulate.block_memory import FloatArray
from autopar.formulate.scheduled_step import (
    LinkJobs,
    StageHolding,
    StageWork,
    held_bytes,
    pass_seconds,
    scheduled_step,
    stage_works,
)
from autopar.formulate.step_time import Split
from autopar.program.lower import lower
from autopar.program.records import Program, SegmentPhase
from autopar.recompute import Recompute
from autopar.schedule import SCHEDULES, Pass
from autopar.schedule.timing import time_tasks
from autopar.sharding import Mesh
from autopar.simulate import simulate
from autopar.simulate.layout import lay_out
from tests.executions import COSTS, Execution, interleave, model_rules, solved_candidate, written
from tests.plain_pipeline import plain_pipeline
from tests.programs import ExactCosts, equal_stages
from tests.shares import one_in
from tests.test_zero_bubble import freed_by_half

CHUNKS = {"interleaved": 3, "zb-v": 2, "1f1b-a2a": 2, "dualpipe-v": 2}
names = st.sampled_from(sorted(SCHEDULES))
SECONDS = st.integers(0, 6).map(float)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Draw a schedule, groups, microbatches and chunks that fit each other."""
    name, num_groups = draw(names), draw(st.integers(1, 5))
    rounds = draw(st.integers(1, 3))
    count = num_groups * rounds if name in ("interleaved", "1f1b-a2a") else draw(st.integers(1, 12))
    return name, num_groups, count, CHUNKS.get(name, 1)


@given(size=sizes(), data=st.data())
def test_longest_path_equals_simulated_step(size: tuple[str, int, int, int], data: st.DataObject) -> None:
    """Stages of random seconds and messages of random length, all small integers: equal step time."""
    name, num_groups, count, num_chunks = size
    schedule, stages = SCHEDULES[name], num_groups * num_chunks
    seconds = np.array([[data.draw(SECONDS) for _ in Pass] for _ in range(stages)])
    there, back = (np.array([data.draw(SECONDS) for _ in range(stages)]) for _ in range(2))

    timing = time_tasks(schedule, num_groups, count, seconds, there, back)

    groups = schedule.groups(num_groups, num_chunks)
    passes = [dict(zip(Pass, row, strict=True)) for row in seconds.tolist()]
    runs, _ = plain_pipeline(
        schedule.orders(num_groups, count, num_chunks), groups, passes, there[:-1].tolist(), back[1:].tolist()
    )
    assert timing.begins.tolist() == [done[0].start for done in runs]
    assert timing.ends.tolist() == [done[-1].end for done in runs]
    for stage, group in enumerate(groups):
        chunk = [other for other in range(stages) if groups[other] == group].index(stage)
        assert timing.last_starts[stage] == max(run.start for run in runs[group] if run.task.chunk == chunk)


@given(size=sizes(), forward=SECONDS, backward=SECONDS, weight=SECONDS, latency=SECONDS)
def test_step_of_equal_stages_equals_simulated_step(
    size: tuple[str, int, int, int], forward: float, backward: float, weight: float, latency: float
) -> None:
    name, num_groups, count, num_chunks = size
    stages = num_groups * num_chunks
    weight = weight if SCHEDULES[name].splits else 0.0
    program = equal_stages(
        stages, count, name, forward=forward, backward=backward, weight=weight, num_chunks=num_chunks
    )
    work = StageWork(forward, backward if SCHEDULES[name].trains else 0.0, weight)

    seconds = scheduled_step(name, num_groups, count, [work] * stages, (latency, latency))

    assert seconds == simulate(program, ExactCosts(latency=latency)).step_seconds


@given(size=sizes())
def test_held_bytes_equal_simulated_bytes(size: tuple[str, int, int, int]) -> None:
    """Blocks keep 1 + 3 bytes until their backward, of which the weight pass reads 1, and 2 further bytes."""
    name, num_groups, count, num_chunks = size
    stages = num_groups * num_chunks
    program = equal_stages(stages, count, name, num_chunks=num_chunks)
    if SCHEDULES[name].splits:
        program, stage = freed_by_half(program), StageHolding(4.0, 3.0, (4.0, 6.0, 3.0))
    else:
        kept = 1.0 if SCHEDULES[name].trains else 0.0
        stage = StageHolding(kept, 0.0, (1.0, 1.0, 0.0))

    held = held_bytes(name, num_groups, count, [stage] * stages)

    peaks = [found.memory.bytes for found in simulate(program, ExactCosts()).stages]
    assert peaks == [10.0 * num_chunks + size for size in held]


def _links(
    *,
    waited: tuple[tuple[float, float, float], ...] = (),
    gradient: tuple[tuple[float, float, float], ...] = (),
    reduce: tuple[tuple[float, float, float], ...] = (),
) -> LinkJobs:
    """Return traffic as rows (moment, seconds inside a node, seconds between nodes); `waited` in every backward."""
    nothing, backward, every, once = (np.array(rows).reshape(-1, 3) for rows in ((), waited, gradient, reduce))
    return LinkJobs((nothing, backward, nothing), every, once)


def test_reductions_hide_behind_the_rest_of_the_last_pass() -> None:
    """2 groups of ZB-H1, 2 microbatches of 1 + 1 + 1 s: group 0 ends its weight passes at 7 s, group 1 starts at 1 s.

    Reductions of 4 s that are ready half a second after the start of the last weight pass end at 6 + 0.5 + 4 s on group
    0.
    """
    work = StageWork(1.0, 1.0, 1.0, links=_links(reduce=((0.5, 4.0, 0.0),)), update=0.25)

    assert scheduled_step("zb-h1", 2, 2, [replace(work, links=None)] * 2) == 7.25
    assert scheduled_step("zb-h1", 2, 2, [work] * 2) == 10.75


def test_traffic_of_every_microbatch_sets_the_pace() -> None:
    """One group, 3 microbatches of 2 + 1 + 1 s with 6 s of traffic each, the first of which may run after 4 s."""
    assert scheduled_step("zb-h2", 1, 3, [StageWork(2.0, 1.0, 1.0, links=_links(gradient=((1.0, 6.0, 0.0),)))]) == 22.0


def test_gradients_queue_behind_traffic_of_their_link() -> None:
    """One group, 2 microbatches of 1 + 2 s under GPipe: backwards at 2 and 4, gradients of 1 s from 3 and 5 on.

    Collectives of each backward use the link between nodes for 1.5 s: from 2 on it carries 1.5 + 1 + 1.5 + 1 s,
    until 7. Traffic inside a node delays no gradients: the step ends at 6.
    """
    waited, gradient = ((0.0, 0.0, 1.5),), ((1.0, 0.0, 1.0),)
    inside = ((0.0, 1.5, 0.0),)

    for taken, step in ((waited, 7.0), (inside, 6.0)):
        work = StageWork(1.0, 2.0, links=_links(waited=taken, gradient=gradient))
        assert scheduled_step("gpipe", 1, 2, [work]) == step


@st.composite
def _carried(draw: st.DrawFn, passes: Sequence[float], last: int) -> LinkJobs:
    """Draw the traffic of passes of the given seconds: each row is ready before its pass ends."""

    def rows(number: int) -> FloatArray:
        moments = st.integers(0, int(passes[number])).map(float)
        return np.array(draw(st.lists(st.tuples(moments, SECONDS, SECONDS), max_size=3))).reshape(-1, 3)

    return LinkJobs(tuple(rows(number) for number in range(len(Pass))), rows(last), rows(last))


def _served(jobs: list[tuple[float, float]]) -> float:
    """Return when a link has carried all jobs (ready time, seconds), first in, first out."""
    free = 0.0
    for ready, seconds in sorted(jobs):
        free = max(free, ready) + seconds if seconds else free
    return free


@given(size=sizes(), data=st.data())
def test_links_serve_traffic_first_in_first_out(size: tuple[str, int, int, int], data: st.DataObject) -> None:
    """A group ends with its last pass or with the last traffic of a link queue, whichever is later."""
    name, num_groups, count, num_chunks = size
    schedule, groups = SCHEDULES[name], SCHEDULES[name].groups(num_groups, num_chunks)
    kinds = [list(Pass).index(kind) for kind in schedule.passes]
    works = []
    for _ in groups:
        passes = [data.draw(SECONDS) if kind in kinds else 0.0 for kind in range(len(Pass))]
        links = data.draw(st.none() | _carried(passes, kinds[-1]))
        forward, backward, weight = passes
        works.append(StageWork(forward, backward, weight, links))

    seconds = scheduled_step(name, num_groups, count, works)

    nothing = [0.0] * (len(groups) - 1)
    each = [dict(zip(Pass, (own.forward, own.backward, own.weight), strict=True)) for own in works]
    runs, _ = plain_pipeline(schedule.orders(num_groups, count, num_chunks), groups, each, nothing, nothing)
    longest = 0.0
    for group, done in enumerate(runs):
        stages = [stage for stage, own in enumerate(groups) if own == group]
        queues: tuple[list[tuple[float, float]], ...] = ([], [])
        for stage in stages:
            links = works[stage].links
            own = [run for run in done if stages[run.task.chunk] == stage]
            final = [run for run in own if run.task.kind is schedule.passes[-1]][-1]
            if links is None:
                continue
            for run in own:
                kind, rows = list(Pass).index(run.task.kind), list[FloatArray]()
                if len(links.gradient) or (len(links.reduce) and run is final):
                    rows.append(links.waited[kind])
                if kind == kinds[-1]:
                    rows.append(links.gradient)
                if run is final:
                    rows.append(links.reduce)
                for moment, inside, between in np.concatenate([np.zeros((0, 3)), *rows]).tolist():
                    queues[0].append((run.start + moment, inside))
                    queues[1].append((run.start + moment, between))
        end = max(done[-1].end, *map(_served, queues))
        longest = max(longest, end - (done[0].start if schedule.steps_overlap else 0.0))
    assert seconds == longest


@pytest.mark.parametrize("model", ["gpt2", "llama3-8b"])
@pytest.mark.parametrize("host", [0.0, 50e-6])
def test_pass_seconds_equal_those_of_the_lowered_program(model: str, host: float, cache_dir: Path) -> None:
    """Of the best plan of a cluster with slow devices, for every kind of block, with the backward split and whole.

    With a host that takes no time, and with one that takes most of it. Parameters pay their share of a gather of all of
    their block, of which the plan gathers some, which makes less than 1e-5.
    """
    costs = replace(COSTS, stack=Stack("slow host", scalars=(("host_launch", host),)))
    execution, rules = Execution.of(model, 4, 2), model_rules(model, cache_dir)
    configuration = Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b")
    candidate = solved_candidate(execution.folded, rules, configuration, 4)
    plan = written(candidate, 8, True)

    for name in ("1f1b", "zb-h1"):
        program = lower(replace(plan, schedule=name), execution.folded, COSTS)
        tables = replace(candidate.tables, costs=costs)
        found = pass_seconds(tables, candidate.choice, splits=SCHEDULES[name].splits)

        table = program.table()
        for kind in range(len(found)):
            for column, phase in enumerate((SegmentPhase.FORWARD, SegmentPhase.BACKWARD, SegmentPhase.WEIGHT)):
                segment = table.get((kind, phase))
                expected = 0.0 if segment is None else lay_out(segment, costs).seconds
                assert found[kind, column] == pytest.approx(expected, rel=1e-5), (kind, phase)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"forward-only"}))
@pytest.mark.parametrize("recompute", one_in(2, [Recompute.FULL, Recompute.NONE]))
def test_step_of_solved_plans_equals_simulated_step(name: str, recompute: Recompute, cache_dir: Path) -> None:
    """Uneven stages (the head is dearer than a layer), messages, reductions and updates of a plan on 2 x 4 devices.

    Reductions that wait for other traffic on their link make the difference, and gathers that are taken to keep the
    traffic of gradients from it: 1.3e-5 at most here.
    """
    num_chunks, count = 2 if name in CHUNKS else 1, 6
    execution, rules = Execution.of("gpt2", 4, count), model_rules("gpt2", cache_dir)
    configuration = Configuration(2 * num_chunks, Mesh.of(outer=2, inner=2), count, "1f1b")
    candidate = solved_candidate(execution.folded, rules, configuration, 4)
    split = Split.uniform(candidate.split.ranges, (recompute,) * configuration.num_stages)
    candidate = replace(candidate, split=split, draft=None)
    plan = interleave(written(candidate, 4 * count, True), 2, name)
    program = lower(plan, execution.folded, COSTS)
    works = stage_works(candidate.tables, candidate.choice, candidate.split, splits=SCHEDULES[name].splits)

    seconds = scheduled_step(name, 2, count, works, _hops(program))

    assert seconds == pytest.approx(simulate(program, COSTS).step_seconds, rel=2e-5)


def _hops(program: Program) -> tuple[float, float]:
    """Return the seconds of a message to the second stage and back."""
    table, stages = program.table(), program.stages
    there = table[stages[0].blocks[-1], SegmentPhase.FORWARD].outputs
    back = table[stages[1].blocks[0], SegmentPhase.BACKWARD].outputs
    first, second = (COSTS.send_seconds(sum(each.bytes for each in sent), False) for sent in (there, back))
    return float(first), float(second)
