"""Bounds without placement problems: critical paths, whole blocks, and transfer between configurations."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from autopar.bounds import critical_path
from autopar.bounds import task_graph as excerpts
from autopar.bounds.critical_path import least_path
from autopar.bounds.microbatch import UNKNOWN
from autopar.bounds.roofline import roofline, scales
from autopar.bounds.transfer import TransferBounds
from autopar.configuration import PLAIN, Configuration, Family, families
from autopar.cost import Overlap, Stack
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.scheduled_step import StageWork, pass_seconds, scheduled_step
from autopar.formulate.step_time import Pipeline, Split
from autopar.formulate.tables import Tables
from autopar.pipeline_partition.balance import least_load
from autopar.pipeline_partition.interleaved import grouped_time
from autopar.recompute import ON_DEVICE, Recompute
from autopar.request import JobRequest
from autopar.schedule import SCHEDULES
from autopar.search.node_solver import NodeSolver, open_node
from autopar.search.tasks import Finding
from autopar.sharding import Mesh
from autopar.task import Effort, Task, prepare
from tests.formulations import COSTS, DIMS, folded, optimum, random_choice, rules, splits

CLOSE = 3e-6
"""Relative: placement problems are proven optimal to 1e-6 each."""

MESHES = {
    "2x2": Mesh.of(outer=2, inner=2),
    "3x2": Mesh.of(outer=3, inner=2),
}


SCHEDULED = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)]


@pytest.mark.parametrize("size", [(2, 2), (2, 4), (3, 6), (4, 8)])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_no_step_is_shorter_than_its_longest_path(name: str, chunks: int, size: tuple[int, int]) -> None:
    """For any shares of repeated blocks, down to one stage with all, and any distribution of the rest."""
    groups, microbatches = size
    schedule, count = SCHEDULES[name], groups * chunks
    alike = np.array([0.32, 0.42, 0.26] if schedule.splits else [0.32, 0.68])
    rng = np.random.default_rng(count)
    for besides in ((0.0, 0.0), (0.02, 0.05), (0.5, 0.2)):
        found = least_path(schedule, groups, microbatches, chunks, (3 * alike).tolist(), besides)
        assert found is not None
        for kept in (1.0, 0.5, 0.3) * 12:
            shares = rng.dirichlet(np.ones(count)) if kept == 1.0 else np.eye(count)[rng.integers(count)]
            rest = rng.exponential(size=(count, len(alike))) * (rng.random((count, len(alike))) < kept)
            rest *= rng.choice([0.0, 0.01, 1.0])
            shape = 3 * np.outer(shares, alike) + rest
            seconds = scheduled_step(name, groups, microbatches, [StageWork(*stage[:3]) for stage in shape.tolist()])
            assert found.step(shape[:, 0].sum(), shape[:, 1:].sum()) <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("size", [(2, 4), (3, 6), (4, 12), (4, 16)])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULED)
def test_no_step_is_shorter_than_a_path_through_its_excerpt(
    name: str, chunks: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps with many microbatches, whose first and last ones contain the bubble."""
    monkeypatch.setattr(excerpts, "MOST_TASKS", 0)
    monkeypatch.setattr(excerpts, "KEPT_TASKS", 0)
    excerpts.excerpt.cache_clear()
    critical_path._solve_path_lp.cache_clear()
    groups, microbatches = size
    assert len(excerpts.excerpt(SCHEDULES[name], groups, microbatches, chunks).aggregates) >= groups
    try:
        test_no_step_is_shorter_than_its_longest_path(name, chunks, size)
    finally:
        excerpts.excerpt.cache_clear()
        critical_path._solve_path_lp.cache_clear()


def test_a_path_through_an_excerpt_contains_most_of_the_bubble() -> None:
    """With 32 groups of two stages each, and as few microbatches as possible."""
    schedule = SCHEDULES["interleaved"]
    assert excerpts.is_truncated(schedule, 32, 32, 2)

    found = least_path(schedule, 32, 32, 2, (0.5, 0.5), (0.0, 0.0))

    assert found is not None
    assert 1.3 < found.step(0.5, 0.5) < 1 + 31 / 64, "of microbatches per group, with the bubble of equal stages"


@pytest.mark.parametrize(
    ("name", "groups", "seen"), [("zb-h1", 2, 0.95), ("zb-h1", 4, 0.95), ("zb-h2", 4, 0.7), ("zb-v", 4, 0.7)]
)
def test_the_longest_path_contains_most_of_the_bubble(name: str, groups: int, seen: float) -> None:
    """Of equal stages whose weight passes are shorter than their backwards; uneven stages have a smaller bubble."""
    chunks, microbatches = 2 if name == "zb-v" else 1, 2 * groups
    alike = (0.32, 0.42, 0.26)
    found = least_path(SCHEDULES[name], groups, microbatches, chunks, alike, (0.0, 0.0))
    forward, backward, weight = (part / (groups * chunks) for part in alike)
    stages = [StageWork(forward, backward, weight)] * groups * chunks

    bubble = scheduled_step(name, groups, microbatches, stages) - microbatches / groups

    assert found is not None
    assert found.step(0.32, 0.68) - microbatches / groups >= seen * bubble > 0


def test_many_stages_and_single_groups_have_no_path_bound() -> None:
    """The linear program would take long, or be trivial."""
    assert least_path(SCHEDULES["zb-h1"], 1, 4, 1, (1.0, 1.0, 1.0), (0.0, 0.0)) is None
    assert least_path(SCHEDULES["interleaved"], 64, 64, 8, (1.0, 1.0), (0.0, 0.0)) is None


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [(1.0,) * 6, (1.0,) * 5 + (2.4, 0.3), (0.5, 2.0, 2.0, 2.0), (3.0, 1.0, 1.0, 1.0, 0.0)]
)
def test_the_fullest_group_by_enumeration(sizes: tuple[float, ...], groups: int) -> None:
    """All assignments of blocks to groups; blocks of one size and a few others."""
    best = min(
        max(sum(size for size, own in zip(sizes, places, strict=True) if own == group) for group in range(groups))
        for places in product(range(groups), repeat=len(sizes))
    )

    assert least_load(Counter(sizes), groups) == pytest.approx(best, rel=1e-6)


def test_many_sizes_are_bounded_by_their_mean_and_the_largest() -> None:
    """Too many for every combination."""
    sizes = dict.fromkeys(np.linspace(1.0, 2.0, 9).tolist(), 1)

    assert least_load(sizes, 3) == pytest.approx(4.5)
    assert least_load(sizes, 9) == 2.0


@cache
def _tables(model: str, mesh: str, samples: int) -> Tables:
    return build_tables(folded(model, "train", samples), rules(model), MESHES[mesh], COSTS)


@cache
def _microbatch_seconds(model: str, mesh: str, samples: int) -> float:
    """Return the least seconds of a microbatch through all blocks."""
    found = _tables(model, mesh, samples)
    pipeline = Pipeline(2, 1, "interleaved", Overlap.of(COSTS.stack), num_chunks=1)
    own = weights(found, pipeline, recompute=Recompute.NONE, hidden=0.0, bounding=True)
    return 2 * optimum(problem(found, own))[0]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["gpt2", "mixtral-8x7b", "mlp-xs"])
def test_more_samples_at_once_take_no_longer_per_sample(model: str, mesh: str) -> None:
    """Under the best placements of each number, where the graphs differ in the samples only."""
    compared = 0
    for few, many in ((2, 4), (3, 6), (2, 12)):
        if scales(folded(model, "train", few), folded(model, "train", many), (few, many)):
            compared += 1
            assert _microbatch_seconds(model, mesh, many) * few / many <= _microbatch_seconds(model, mesh, few) * (
                1 + CLOSE
            )
    assert compared


def test_graphs_with_other_ops_or_dims_do_not_scale() -> None:
    """A microbatch of one sample has no Expand; three samples are no multiple of two."""
    llama, gpt = (
        {samples: folded(name, "train", samples) for samples in (1, 2, 3, 4)} for name in ("llama3-8b", "gpt2")
    )

    assert not scales(llama[1], llama[4], (1, 4))
    assert scales(gpt[2], gpt[4], (2, 4))
    assert not scales(gpt[2], gpt[4], (2, 6)), "dims are no such multiples"
    assert roofline(gpt[2], gpt[4], (2, 4), COSTS).is_generic(3)
    assert not roofline(gpt[2], gpt[4], (2, 4), COSTS).is_generic(1)


@cache
def _task() -> Task:
    """Return a small job whose blocks take time that is not for launches alone, so that samples matter."""
    dims = DIMS["gpt2"] | {"hidden": 1024, "heads": 8, "seq": 1024, "vocab": 512}
    return prepare(JobRequest("zoo:gpt2", gpus=8, cluster="h100", global_batch=24, dims=dims))


def _random_plans(task: Task, family: Family, number: int) -> list[float]:
    """Return the step seconds of random choices under every split of each schedule, as the planner computes them."""
    found = open_node(task.context(Effort()), family, np.inf)
    assert found is not None
    rng = np.random.default_rng(number)
    pipelines = [configuration.pipeline(task.costs.stack) for configuration in family]
    own = weights(found.tables, pipelines[0], recompute=Recompute.NONE, hidden=0.0, bounding=True)
    instance = problem(found.tables, own)
    choice, chain = optimum(instance)[1], found.tables.folded.chain
    seconds = []
    for _ in range(number):
        totals = found.tables.block_seconds(choice)
        for pipeline in pipelines:
            passes = pass_seconds(found.tables, choice, splits=SCHEDULES[pipeline.schedule].splits)
            ranges = splits(len(chain), pipeline.num_stages)
            for index in rng.integers(len(ranges), size=min(6, len(ranges))):
                redo = tuple(ON_DEVICE[number] for number in rng.integers(3, size=pipeline.num_stages))
                split = Split.uniform(ranges[index], redo)
                seconds.append(grouped_time(passes, totals, chain, pipeline, split, 0.0).seconds)
        choice = random_choice(instance, rng, near=choice)
    return seconds


@pytest.mark.parametrize("host", [0.0, 20e-6])
def test_no_plan_is_faster_than_the_transfer_bound(host: float) -> None:
    """For any schedule, from bounds of larger microbatches; with a slow host, too."""
    task = _task()
    task = replace(task, costs=replace(task.costs, stack=Stack("slow host", scalars=(("host_launch", host),))))
    search = task.context(Effort())
    mesh = Mesh.of(outer=2, inner=2)
    known = families([each for each in task.space if each.mesh == mesh and each.num_microbatches in (2, 12)])
    transfer_bounds = TransferBounds(search.folded, search.roofline, task.costs.stack, task.job.global_batch)
    untold = {family: transfer_bounds.least(family) for family in known}
    assert all((least > 0) == (family[0].schedule not in PLAIN) for family, least in untold.items()), "paths only"
    for family in known:
        if family[0].num_microbatches == 2:
            node = open_node(search, family, np.inf)
            assert node is not None
            bound = node.relax(np.inf)
            transfer_bounds.record_finding(
                family,
                Finding(bound, None, 0, microbatch_bound=node.state.microbatch_bound, unlimited=node.state.unlimited),
            )
            assert transfer_bounds.least(family) >= max(
                untold[family], bound * (family[0].schedule in PLAIN) * (1 - CLOSE)
            )

    told = {(own.schedule, own.num_chunks) for family in known for own in family}
    assert {name for name, _ in told} == {"1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v"}
    for family in known:
        least = transfer_bounds.least(family)
        assert least > 0
        assert all(least <= seconds * (1 + CLOSE) for seconds in _random_plans(task, family, 4))


def test_without_pipeline_smaller_microbatches_are_no_faster() -> None:
    """The step time of one stage is bounded by that of fewer microbatches on the same mesh."""
    task = _task()
    search = task.context(Effort())
    transfer_bounds = TransferBounds(search.folded, search.roofline, task.costs.stack, task.job.global_batch)
    family = [(Configuration(1, Mesh.of(outer=4, inner=2), count, "1f1b"),) for count in (2, 4, 12)]
    first = open_node(search, family[0], np.inf)
    assert first is not None
    transfer_bounds.record_finding(family[0], Finding(0.0, None, 0, unlimited=first.relax(np.inf)))

    for more in family[1:]:
        node = open_node(search, more, np.inf)
        assert node is not None
        assert 0 < transfer_bounds.least(more) <= node.relax(np.inf) * (1 + CLOSE)
    assert transfer_bounds.least((replace(family[0][0], num_microbatches=3),)) == 0.0, "8 samples are no multiple of 12"


def test_the_bound_of_every_family_is_below_its_plans() -> None:
    """Families whose members hide as much as each other, and hold stages alike; without memory limits."""
    task = _task()
    stack = Stack("turns", scalars=(("interleave_overhead", 0.1),))
    task = replace(task, costs=replace(task.costs, stack=stack))
    mesh = Mesh.of(outer=2, inner=2)
    for family in families([each for each in task.space if each.mesh == mesh and each.num_microbatches == 6]):
        assert len({(SCHEDULES[own.schedule].splits, own.num_chunks > 1) for own in family}) == 1
        node = open_node(task.context(Effort()), family, np.inf)
        assert isinstance(node, NodeSolver)
        bound = max(node.relax(np.inf), node.relax(1e9))

        assert node.state.microbatch_bound != UNKNOWN
        assert all(bound <= seconds * (1 + CLOSE) for seconds in _random_plans(task, family, 4))


def test_pruned_schedules_are_left_out_of_the_bound() -> None:
    """ZB-H1 beside ZB-H2: the remaining schedule has its own bound; before, the bound is valid for both."""
    task = _task()
    search = task.context(Effort())
    (family,) = (
        family
        for family in families(task.space)
        if family[0].num_stages == 4 and family[0].num_microbatches == 6 and family[0].schedule == "zb-h1"
    )
    whole, narrow = (open_node(search, family, np.inf) for _ in range(2))
    assert whole is not None
    assert narrow is not None
    whole.relax(np.inf)
    first, second = (
        search.roofline.path_seconds(
            own, search.global_batch, own.pipeline(task.costs.stack), whole.state.microbatch_bound.seconds
        )
        for own in family
    )
    assert second < first, "less is put off"
    assert whole.state.bounded == family

    bound = narrow.relax(first)

    assert narrow.state.bounded == family[1:]
    assert narrow.state.left_out == pytest.approx(first)
    assert second * (1 - CLOSE) <= bound <= first * (1 + CLOSE)
    assert all(bound <= seconds * (1 + CLOSE) for seconds in _random_plans(task, family, 4))


def test_a_path_bound_is_skipped_only_where_it_prunes_nothing() -> None:
    """The step with equal stages is never below the path bound."""
    task = _task()
    search = task.context(Effort())
    under = replace(search.roofline, chain=())  # cuts say more of a chain as short as this
    transfer_bounds = TransferBounds(search.folded, under, task.costs.stack, task.job.global_batch)
    for family in (family for family in families(task.space) if family[0].num_microbatches in (4, 6)):
        least = transfer_bounds.least(family)
        evenly = [
            search.roofline.even_seconds(own, search.global_batch, own.pipeline(task.costs.stack), 0.0)
            for own in family
        ]

        assert transfer_bounds.least(family, least) == least
        assert transfer_bounds.least(family, 2 * min(evenly)) == 0.0
        assert least <= min(evenly) * (1 + CLOSE)


def test_cuts_of_graphs_with_other_blocks_are_not_bounded() -> None:
    """As few samples may have, whose graph is simplified."""
    task = _task()
    search = task.context(Effort())
    (own, *_) = (each for each in task.space if each.schedule == "zb-h1" and each.num_stages == 2)
    known, other = (
        TransferBounds(search.folded, under, task.costs.stack, task.job.global_batch)
        for under in (search.roofline, replace(search.roofline, chain=(*search.roofline.chain, 0)))
    )

    assert known._cuts_step(own, UNKNOWN) > 0
    assert other._cuts_step(own, UNKNOWN) == 0.0
