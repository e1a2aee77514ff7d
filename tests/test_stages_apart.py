"""What is said of every stage under schedules without a closed form: ways through a step, and bounds from them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost import CostModel, Overlap, Stack
from autopar.discover import discover
from autopar.formulate.building import build_tables
from autopar.formulate.grouped import Groups, grouped_time
from autopar.formulate.hull import MOST_STAGES_APART, can_be_staged, step_program
from autopar.formulate.recipes import recipes, restrict
from autopar.formulate.scheduled import LinkJobs, StageWork, pass_seconds, scheduled_step
from autopar.formulate.step import Pipeline, Split
from autopar.formulate.tables import Slot, Tables
from autopar.formulate.weights import problem, weights
from autopar.problem import Choice, Problem, Solution
from autopar.program.lower import lower_blocks
from autopar.recompute import ON_DEVICE, Hosted, Recompute
from autopar.schedule import SCHEDULES
from autopar.schedule.critical import Loads, longest_ways
from autopar.search.blocks import assemble_blocks
from autopar.search.floor import floor
from autopar.search.hull import Hull
from autopar.sharding import Mesh
from autopar.simulate.ranges import chain_bytes
from autopar.solvers import load
from autopar.workload import Workload, open_workload
from tests.formulations import COSTS, random_choice, splits

TOLERANCE = 2e-6
"""Relative: the linear program is solved to 1e-7 in units of about a step time."""

OTHERS = [("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("interleaved", 2), ("interleaved", 3)]
NOTHING = np.zeros((0, 3))


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, int, int, list[StageWork]]:
    """Return a schedule, groups, microbatches and what stages take, their passes no less than the links they use."""
    name, chunks = draw(st.sampled_from([*OTHERS, ("1f1b", 1), ("gpipe", 1)]))
    groups = draw(st.integers(1, 3))
    count = groups * draw(st.integers(1, 3))
    seconds = st.sampled_from([0.0, 0.3, 1.0, 2.5])
    every = draw(st.booleans())  # gradients travel after every microbatch, or once
    stages = []
    for _ in range(groups * chunks):
        passes = [draw(seconds) for _ in SCHEDULES[name].passes] + [0.0]
        waited = [draw(seconds) for _ in range(2)]
        jobs = np.array([[0.0, draw(seconds) + 0.1, draw(seconds)]])
        took = [max(own, wait) for own, wait in zip(passes, waited, strict=False)] + passes[2:]
        each = tuple(np.array([[0.0, wait, 0.0]]) for wait in waited)
        links = LinkJobs((*each, NOTHING), jobs if every else NOTHING, NOTHING if every else jobs)
        stages.append(StageWork(took[0], took[1], took[2], links, draw(seconds)))
    return name, groups, count, stages


def _of_links(stages: Sequence[StageWork]) -> list[Loads]:
    """Return what the two links of stages carry."""
    links = [stage.links for stage in stages]
    assert all(own is not None for own in links)

    def sums(link: int) -> Loads:
        waited = np.array([[float(rows[:, 1 + link].sum()) for rows in own.waited] for own in links if own])
        behind = np.array([float(own.gradient[:, 1 + link].sum()) for own in links if own])
        once = np.array([float(own.reduce[:, 1 + link].sum()) for own in links if own])
        return Loads(waited, behind, once)

    return [sums(0), sums(1)]


@settings(max_examples=300, deadline=None)
@given(steps())
def test_no_way_is_longer_than_the_step(step: tuple[str, int, int, list[StageWork]]) -> None:
    """Be it by tasks or by links; what is on a way adds up to it, and without links one is the step."""
    name, groups, count, stages = step
    schedule = SCHEDULES[name]
    seconds = np.array([[stage.forward, stage.backward, stage.weight] for stage in stages])
    loads, update = _of_links(stages), np.array([stage.update for stage in stages])
    of = np.array(schedule.groups(groups, len(stages) // groups))
    ways = longest_ways(schedule, groups, count, seconds, loads)
    assert [way.group for way in ways] == list(range(groups))
    for way in ways:
        total = float((way.passes * seconds).sum())
        if way.link >= 0:
            own = loads[way.link]
            total += float((way.waited * own.waited).sum() + way.behind @ own.behind + way.once @ own.once)
        assert total == pytest.approx(way.seconds, abs=1e-9)
        whole = way.seconds + float(update[of == way.group].sum())
        assert whole <= scheduled_step(name, groups, count, stages) * (1 + 1e-9) + 1e-9

    bare = [StageWork(stage.forward, stage.backward, stage.weight) for stage in stages]
    if not schedule.steps_overlap:
        longest = max(way.seconds for way in longest_ways(schedule, groups, count, seconds, ()))
        assert longest == pytest.approx(scheduled_step(name, groups, count, bare), abs=1e-9)


def test_gradients_behind_the_last_pass_are_on_the_longest_way() -> None:
    """Links that have more to carry than passes take make the way from the first gradient on the longest."""
    seconds = np.array([[1.0, 1.0, 1.0]] * 2)
    loads = Loads(np.array([[0.5, 0.5, 0.0]] * 2), np.full(2, 3.0), np.zeros(2))
    first, last = longest_ways(SCHEDULES["zb-h1"], 2, 4, seconds, [loads])

    # F0 F1 B0, then what W0 to W3 leave, and what is waited for of F2, F3 and B1 to B3 meanwhile
    assert last.link == 0
    assert last.seconds == pytest.approx(last.passes.sum() + 4 * 3.0 + 0.5 * last.waited[:, :2].sum())
    assert first.seconds > 13.0, "without links"


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


def _staged(found: Tables, pipeline: Pipeline, limit: float) -> Hull:
    """Return the hull of a program that tells stages apart."""
    under = floor(found.folded, found.folded, (8, 8), found.costs)
    _, backward, weight = under.passes_seconds(found.mesh, 8)[0].tolist()
    assert can_be_staged(pipeline, limit)
    return Hull(found, step_program(found, pipeline, limit, staged=(backward, weight)))


def _raised(hull: Hull, choices: Sequence[Choice], steps: int = 8) -> Hull:
    for choice in choices:
        hull.add(choice)
    for _ in range(steps):
        if not hull.step(_solve, np.inf, lambda _: None, memory=True):
            break
    return hull


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_no_cut_of_any_choice_is_faster_than_the_bound(schedule: str, chunks: int, stack: str) -> None:
    """Whatever the blocks recompute, where memory is no matter."""
    found, rng = _deep(stack), np.random.default_rng(3)
    chain = found.folded.chain
    pipeline = Pipeline(2 * chunks, 4, schedule, Overlap.of(STACKS[stack]), 1e-4, chunks, 0.1 if chunks > 1 else 0.0)
    choices = _choices(5)
    hull = _raised(_staged(found, pipeline, 1e15), choices)

    assert hull.bound > pipeline.fixed
    for choice in choices:
        totals = found.block_seconds(choice)
        passes = pass_seconds(found, choice, splits=SCHEDULES[schedule].splits)
        every = splits(len(chain), pipeline.num_stages)
        for number in rng.integers(len(every), size=40):
            flavours = [
                tuple(ON_DEVICE[own] for own in rng.integers(3, size=stop - start)) for start, stop in every[number]
            ]
            split = Split(every[number], tuple(flavours))
            seconds = grouped_time(passes, totals, chain, pipeline, split, 0.0).seconds
            assert hull.bound <= seconds * (1 + TOLERANCE)


@pytest.mark.parametrize(("stack", "least"), [("plain", -TOLERANCE), ("slow", 0.2)])
@pytest.mark.parametrize(("schedule", "chunks"), OTHERS)
def test_no_plan_that_fits_is_faster_than_the_bound_of_stages(
    schedule: str, chunks: int, stack: str, least: float
) -> None:
    """At limits from what the loosest plan needs down to what none fits.

    It says no less than the mean stage does, and more where links are slow.
    """
    found = _deep(stack)
    pipeline = Pipeline(2 * chunks, 4, schedule, num_chunks=chunks)
    fitting, more = 0, 0.0
    for choice in _choices(7):
        totals, splits_backward = found.block_seconds(choice), SCHEDULES[schedule].splits
        lowered = lower_blocks(assemble_blocks(found, choice), found.folded, found.resharder, splits=splits_backward)
        memory = chain_bytes(lowered, found.folded, trains=True)
        passes = pass_seconds(found, choice, splits=splits_backward)
        limit = 1e9
        while (plan := Groups(passes, totals, memory, pipeline, limit, 0.0).best()) is not None:
            hull = _raised(_staged(found, pipeline, limit), [choice], 20)
            bound = hull.bound
            assert hull.alone(choice) <= plan[1].seconds * (1 + TOLERANCE)
            mean = _raised(Hull(found, step_program(found, pipeline, limit)), [choice], 20).bound
            assert bound <= plan[1].seconds * (1 + TOLERANCE)
            fitting, more = fitting + 1, max(more, bound / mean - 1)
            limit *= 0.3
    assert fitting > 4
    assert more > least


def test_stages_are_told_apart_where_that_is_possible() -> None:
    """Of a schedule without a closed form, alone, under a limit of memory on the device, with few stages."""
    limit = 1e9
    assert can_be_staged(Pipeline(2, 4, "zb-h1"), limit)
    assert can_be_staged(Pipeline(MOST_STAGES_APART, 8, "interleaved", num_chunks=2), limit)
    assert not can_be_staged(Pipeline(2 * MOST_STAGES_APART, 16, "interleaved", num_chunks=2), limit)
    assert not can_be_staged(Pipeline(2, 4, "1f1b"), limit)
    assert not can_be_staged(Pipeline(1, 4, "zb-h1"), limit)
    assert not can_be_staged(Pipeline(2, 4, "zb-h1", others=(Pipeline(2, 4, "zb-h2"),)), limit)
    assert not can_be_staged(Pipeline(2, 4, "zb-h1"), np.inf)
    assert not can_be_staged(Pipeline(2, 4, "zb-h1"), limit, frozenset({Hosted.OPTIMIZER}))
