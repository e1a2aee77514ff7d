"""Master problem: for one choice it is the step time, and no plan is faster than its bound."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autopar.bounds.column_generation import ColumnGeneration
from autopar.bounds.master_problem import step_program
from autopar.bounds.roofline import roofline
from autopar.configuration import Configuration
from autopar.cost import CostModel, Overlap, Stack
from autopar.describe.block_decisions import assemble_blocks
from autopar.discover import discover
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.offload_costs import with_host
from autopar.formulate.scheduled_step import pass_seconds
from autopar.formulate.step_time import Pipeline, Split, stage_times, step_time, time_of
from autopar.formulate.tables import OUTSIDE, Memory, Tables
from autopar.pipeline_partition.interleaved import RecomputeChooser, grouped_time
from autopar.problem import Choice, Problem, Solution
from autopar.program.lower import lower_blocks
from autopar.recompute import BY_SECONDS, ON_DEVICE, RESERVE, Hosted, Recompute
from autopar.sharding import Mesh
from autopar.simulate.offload import host_links
from autopar.simulate.ranges import chain_bytes
from autopar.solvers import load
from autopar.workload import open_workload
from tests.formulations import COSTS, good_choice, lowered_bytes, random_choice, rules, splits, stage_peak, tables

TOLERANCE = 2e-6
"""Relative: the linear program is solved to 1e-7 in units of about a step time."""

SAMPLES = 8
"""Of a microbatch of the tables."""

NONE = Recompute.NONE

STACKS = {
    "plain": Stack("plain"),
    "shared": Stack("shared", scalars=(("exposed_share", 0.3), ("overlap_slowdown", 1.2))),
    "host": Stack("host", scalars=(("host_launch", 2e-5),)),
    "apart": Stack("apart"),
    "chunked": Stack("chunked", hides_tp=True, scalars=(("exposed_share", 0.1), ("overlap_slowdown", 1.1))),
}

NODES = {"apart": replace(COSTS.cluster, devices_per_node=2, inter=replace(COSTS.cluster.inter, nics=None))}
"""By stack: in nodes of two devices the outer of two axes of two leaves nodes, and the inner one does not."""


def _tables(model: str, stack: str) -> Tables:
    found = tables(model)
    cluster = NODES.get(stack, COSTS.cluster)
    return build_tables(found.folded, rules(model), found.mesh, CostModel(cluster, COSTS.policy, STACKS[stack]))


def _solve(instance: Problem, cutoff: float) -> Solution:
    return load("auto").solve(instance, cutoff=cutoff)


def _choices(found: Tables, model: str, number: int) -> list[Choice]:
    """Return a good choice and random ones near it."""
    rng = np.random.default_rng(number)
    choice = good_choice(model, "train")
    instance = problem(found, weights(found, Pipeline(1, 1, "1f1b"), recompute=NONE, hidden=0.0, bounding=True))
    result = [choice]
    for _ in range(number):
        choice = random_choice(instance, rng, near=choice)
        result.append(choice)
    return result


def _mixed(ranges: tuple[tuple[int, int], ...], rng: np.random.Generator) -> Split:
    """Return a split in which every block has a flavour of its own."""
    flavours = list(ON_DEVICE)
    return Split(
        ranges,
        tuple(tuple(flavours[number] for number in rng.integers(3, size=stop - start)) for start, stop in ranges),
    )


@pytest.mark.parametrize("stack", ["plain", "shared", "apart", "chunked"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_of_one_stage_and_one_choice_the_value_is_the_step_time(stack: str, num_microbatches: int) -> None:
    """Except for late reductions of blocks inside the chain, and slowdown beside gathers."""
    found = _tables("gpt2", stack)
    pipeline = Pipeline(1, num_microbatches, "1f1b", Overlap.of(STACKS[stack]))
    whole = Split.uniform(((0, found.folded.num_blocks),), (NONE,))
    for choice in _choices(found, "gpt2", 6):
        time = step_time(found.block_seconds(choice), found.folded.chain, pipeline, whole, 0.0).seconds
        column_generation = ColumnGeneration(found, step_program(found, pipeline, np.inf))
        column_generation.add(choice, 0)

        column_generation.step(_solve, 0.0, lambda _: None, memory=False)

        assert column_generation.value <= time * (1 + TOLERANCE)
        if stack not in ("shared", "chunked"):
            assert column_generation.value >= time * 0.98


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-h2"])
@pytest.mark.parametrize(("model", "num_groups"), [("gpt2", 1), ("gpt2", 2), ("gpt2", 3), ("mixtral-8x7b", 2)])
def test_no_plan_is_faster_than_the_bound(model: str, num_groups: int, schedule: str, stack: str) -> None:
    """For any choice, cut and flavours without memory limits: weak duality."""
    found = _tables(model, stack)
    chain, overlap = found.folded.chain, Overlap.of(STACKS[stack])
    chunks = 2 if schedule == "interleaved" and 2 * num_groups <= len(chain) else 1
    pipeline = Pipeline(num_groups * chunks, 4 * num_groups, schedule, overlap, 1e-4, chunks, 0.1)
    microbatches = pipeline.num_microbatches
    under = roofline(found.folded, found.folded, (SAMPLES, SAMPLES), found.costs)
    configuration = Configuration(num_groups, found.mesh, microbatches, schedule, chunks)
    path = under.path(configuration, SAMPLES * microbatches)
    assert (path is None) == (num_groups == 1 or schedule == "1f1b")
    column_generation = ColumnGeneration(found, step_program(found, pipeline, np.inf, path=path))
    column_generation.add(good_choice(model, "train"))
    for _ in range(6):
        column_generation.step(_solve, np.inf, lambda _: None, memory=False)
    rng = np.random.default_rng(0)

    assert column_generation.bound > pipeline.fixed
    for choice in _choices(found, model, 6):
        totals = found.block_seconds(choice)
        if not np.isfinite(totals).all():
            continue
        for ranges in splits(len(chain), pipeline.num_stages):
            split = _mixed(ranges, rng)
            if schedule != "1f1b":
                passes = pass_seconds(found, choice, splits=schedule != "interleaved")
                seconds = grouped_time(passes, totals, chain, pipeline, split, 0.0).seconds
            else:
                seconds = time_of(stage_times(totals, chain, split, overlap), pipeline, 0.0).seconds
            assert column_generation.bound <= seconds * (1 + TOLERANCE)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("model", ["gpt2", "mlp-xs"])
def test_no_plan_that_fits_is_faster_than_the_bound_under_a_limit(model: str, num_stages: int) -> None:
    """The limit is the peak of a plan, the tightest that it fits."""
    found = tables(model)
    chain = found.folded.chain
    pipeline = Pipeline(num_stages, 4, "1f1b")
    rng = np.random.default_rng(1)
    raised = 0
    for choice in _choices(found, model, 3):
        totals, memory = found.block_seconds(choice), lowered_bytes(found, choice)
        if not np.isfinite(totals).all():
            continue
        ranges = splits(len(chain), num_stages)
        for number in rng.integers(len(ranges), size=2):
            split = _mixed(ranges[number], rng)
            limit = max(stage_peak(memory, pipeline, split, stage) for stage in range(num_stages))
            seconds = step_time(totals, chain, pipeline, split, 0.0).seconds
            column_generation = ColumnGeneration(found, step_program(found, pipeline, limit))
            column_generation.add(choice)
            for _ in range(8):
                column_generation.step(_solve, np.inf, lambda _: None, memory=True)

            assert column_generation.bound <= seconds * (1 + TOLERANCE)
            assert column_generation.bound <= column_generation.bound_of_choice(choice) * (1 + TOLERANCE)
            assert column_generation.bound_of_choice(choice) <= seconds * (1 + TOLERANCE)
            free = ColumnGeneration(found, step_program(found, pipeline, np.inf))
            free.add(choice)
            for _ in range(8):
                free.step(_solve, np.inf, lambda _: None, memory=False)
            raised += column_generation.bound > free.bound * (1 + TOLERANCE)
    assert raised or num_stages > 1, "limits matter"


@cache
def _deep() -> Tables:
    """Return the decisions of a model of as many blocks as pipelines of many stages need."""
    deep = open_workload("zoo:mlp-xs", mode="train", dims={"num_layers": 12, "hidden": 16})
    return build_tables(deep.folded(8), discover(deep.probe), Mesh.of(outer=2, inner=2), COSTS)


_OTHERS = [("zb-h1", 1), ("zb-h2", 1), ("interleaved", 2), ("zb-v", 2)]
_SLOW = pytest.mark.slow(reason="ten seconds each, for what two groups show too")


@pytest.mark.parametrize(
    ("num_groups", "schedule", "chunks"),
    [
        *((2, *own) for own in _OTHERS),
        *(pytest.param(3, *own, marks=_SLOW) for own in _OTHERS),
        (5, "zb-h1", 1),
        (6, "zb-v", 2),
        (6, "interleaved", 2),
    ],
)
def test_no_plan_of_other_schedules_that_fits_is_faster_than_the_bound(
    num_groups: int, schedule: str, chunks: int
) -> None:
    """For plans cut for limits from what the loosest needs down to what none fits."""
    name = "gpt2" if num_groups * chunks <= 6 else "mlp-xs"
    found = tables(name) if name == "gpt2" else _deep()
    chain = found.folded.chain
    assert num_groups * chunks <= len(chain)
    pipeline = Pipeline(num_groups * chunks, 2 * num_groups, schedule, num_chunks=chunks)
    splits_backward = schedule != "interleaved"
    fitting = 0
    for choice in _choices(found, name, 1):
        totals = found.block_seconds(choice)
        blocks = assemble_blocks(found, choice)
        lowered = lower_blocks(blocks, found.folded, found.resharder, splits=splits_backward)
        memory = chain_bytes(lowered, found.folded, trains=True)
        passes = pass_seconds(found, choice, splits=splits_backward)
        limit = 64e9
        while True:
            plan = RecomputeChooser(passes, totals, memory, pipeline, limit, 0.0).best()
            if plan is None:
                break
            column_generation = ColumnGeneration(found, step_program(found, pipeline, limit))
            column_generation.add(choice)
            for _ in range(4):
                column_generation.step(_solve, np.inf, lambda _: None, memory=True)
            assert column_generation.bound <= plan[1].seconds * (1 + TOLERANCE)
            assert column_generation.bound_of_choice(choice) <= plan[1].seconds * (1 + TOLERANCE)
            fitting += 1
            limit *= 0.3
    assert fitting > 4


@pytest.mark.parametrize("speed", [1e8, 1e10])
@pytest.mark.parametrize(("model", "num_stages"), [("mlp-xs", 1), ("mlp-xs", 2), ("mlp-xs", 3)])
def test_no_plan_with_host_memory_is_faster_than_the_bound(model: str, num_stages: int, speed: float) -> None:
    """At the tightest limit of a plan, on links whose copies take a part of a pass or several passes."""
    rng = np.random.default_rng(num_stages)
    host = replace(COSTS.cluster.known_host(), to_host=speed, to_device=2 * speed, latency=0.0)
    costs = CostModel(replace(COSTS.cluster, host=host), COSTS.policy, STACKS["plain"])
    plain = tables(model)
    found = build_tables(plain.folded, rules(model), plain.mesh, costs)
    chain, pipeline = found.folded.chain, Pipeline(num_stages, 4, "1f1b")
    choice = good_choice(model, "train")
    memory = lowered_bytes(found, choice, BY_SECONDS)
    lowered = lower_blocks(assemble_blocks(found, choice), found.folded, found.resharder)
    seconds = with_host(found.block_seconds(choice), host_links(lowered, costs), Overlap())
    ranges = splits(len(chain), num_stages)
    for number in rng.integers(len(ranges), size=2):
        each = [bool(own) for own in rng.integers(2, size=len(chain))]
        away = tuple(tuple(each[a:b]) for a, b in ranges[number])
        every = [BY_SECONDS[own] for own in rng.integers(4, size=len(chain))]
        split = Split(ranges[number], tuple(tuple(every[a:b]) for a, b in ranges[number]), away)
        limit = max(stage_peak(memory, pipeline, split, stage) for stage in range(num_stages))
        column_generation = ColumnGeneration(
            found, step_program(found, pipeline, limit, flavours=BY_SECONDS, hosted=RESERVE)
        )
        column_generation.add(choice)
        for _ in range(5):
            column_generation.step(_solve, np.inf, lambda _: None, memory=True)

        taken = step_time(seconds, chain, pipeline, split, 0.0).seconds
        assert column_generation.bound <= taken * (1 + TOLERANCE)
        assert column_generation.bound_of_choice(choice) <= taken * (1 + TOLERANCE)


@pytest.mark.parametrize(
    ("flavour", "away", "speed", "seen"), [(Recompute.OFFLOAD, False, 1e8, 0.08), (Recompute.NONE, True, 3e7, 0.5)]
)
def test_on_a_slow_host_link_the_bound_contains_part_of_the_copies(
    flavour: Recompute, away: bool, speed: float, seen: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In long chains most hosted bytes are forced to the host at the tightest limit of a plan.

    Of copies of activations the bound contains little: each block copies its inputs although the previous block does
    too, and saved bytes of two blocks are in transit.
    """
    monkeypatch.setattr("autopar.cost.overlap.STATE_BUCKET_BYTES", 16.0)  # small beside the state of a small model
    monkeypatch.setattr("autopar.bounds.master_problem.SHORTAGE", 1e6)  # else memory is cheaper not to be there
    host = replace(COSTS.cluster.known_host(), to_host=speed, to_device=speed, latency=0.0)
    costs = CostModel(replace(COSTS.cluster, host=host), COSTS.policy, STACKS["plain"])
    model = open_workload("zoo:mlp-xs", dims={"num_layers": 24, "hidden": 16})
    found = build_tables(model.folded(64), discover(model.probe), Mesh.of(inner=1), costs)
    chain, pipeline = found.folded.chain, Pipeline(1, 4, "1f1b")
    solution = _solve(problem(found, weights(found, pipeline, recompute=NONE, hidden=1.0, bounding=True)), np.inf)
    assert solution.choice is not None
    memory = lowered_bytes(found, solution.choice, BY_SECONDS)
    lowered = lower_blocks(assemble_blocks(found, solution.choice), found.folded, found.resharder)
    seconds = with_host(found.block_seconds(solution.choice), host_links(lowered, costs), Overlap())
    split = Split.uniform(((0, len(chain)),), (flavour,), (away,))
    plan = step_time(seconds, chain, pipeline, split, 0.0).seconds
    free = step_time(seconds, chain, pipeline, Split.uniform(split.ranges, (NONE,)), 0.0).seconds
    hosted = ({Hosted.ACTIVATIONS} if flavour is Recompute.OFFLOAD else set()) | ({Hosted.OPTIMIZER} if away else set())
    limit = stage_peak(memory, pipeline, split, 0)

    column_generation = ColumnGeneration(
        found, step_program(found, pipeline, limit, flavours=(flavour,), hosted=hosted)
    )
    column_generation.add(solution.choice)
    for _ in range(8):
        column_generation.step(_solve, np.inf, lambda _: None, memory=True)

    assert plan > 2 * free
    assert free + seen * (plan - free) <= column_generation.bound <= plan * (1 + TOLERANCE)


@pytest.mark.parametrize("model", ["gpt2", "mlp-xs", "mixtral-8x7b"])
def test_one_stage_satisfies_the_rows_of_memory(model: str) -> None:
    """For any choice and flavour, at a limit of its peak, no row is short."""
    found = tables(model)
    pipeline, stop = Pipeline(1, 4, "1f1b"), found.folded.num_blocks
    buffered = 0
    for choice in _choices(found, model, 40):
        memory = lowered_bytes(found, choice)
        for index, flavour in enumerate(step_program(found, pipeline, 1.0).flavours):
            limit = memory.peak(0, stop, 1, (flavour,) * stop)
            rows = step_program(found, pipeline, limit)
            amounts = np.array([item.amounts[choice[item.node]] for item in found.bytes])
            edges = [found.edges[buffer.edge] for buffer in rows.buffers]
            held = np.array(
                [
                    buffer.amounts[choice[edge.first], choice[edge.second]]
                    for edge, buffer in zip(edges, rows.buffers, strict=True)
                ]
            )
            assert (rows.memory_use(index, amounts, held) + rows.least <= TOLERANCE).all()
            buffered += bool((rows.pairs @ held).any())
    assert buffered, "some choices gather or reduce"


def test_the_saved_values_of_the_last_block_count_under_every_flavour() -> None:
    """Its backward runs first, when they all exist."""
    found, pipeline = tables("gpt2"), Pipeline(1, 4, "1f1b")
    choice, stop = good_choice("gpt2", "train"), found.folded.num_blocks
    rows, memory = step_program(found, pipeline, 1.0), lowered_bytes(found, choice)
    amounts = np.array([item.amounts[choice[item.node]] for item in found.bytes])
    saved = [
        item.kind == found.folded.chain[-1] and item.memory in (Memory.SAVED, Memory.DROPPED) for item in found.bytes
    ]
    between = np.zeros(len(rows.buffers))
    assert amounts[saved].any()
    for index, flavour in enumerate(rows.flavours):
        held = rows.memory_use(index, amounts, between)[rows.memory_rows]
        without = rows.memory_use(index, np.where(saved, 0.0, amounts), between)[rows.memory_rows]
        assert held - without == pytest.approx(amounts[saved].sum())
        assert (held <= memory.peak(0, stop, 1, (flavour,) * stop)).all()


def test_no_slot_has_a_negative_factor() -> None:
    """`problem` would cut off negative weights, and the optimum would be no bound."""
    program = step_program(tables("gpt2"), replace(Pipeline(2, 4, "1f1b"), overlap=Overlap(1.3, 0.2)), 1e9)

    base = np.delete(program.seconds, list(OUTSIDE.values()), axis=-1)
    assert (base >= 0).all()
    for slot, outside in OUTSIDE.items():  # what leaves nodes has the price of its slot and one of its own
        assert (program.seconds[..., slot] + program.seconds[..., outside] >= 0).all()
    assert (program.host >= 0).all()
    assert (program.bytes >= 0).all()
