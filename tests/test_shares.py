"""Rows of unequal devices with different shares of the batch: what they compute, take and hold."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar import solve, solvers
from autopar.api import fuse_plan
from autopar.bounds.roofline import roofline
from autopar.cluster import Cluster, NodeGroup
from autopar.configuration import Configuration
from autopar.cost import CostModel
from autopar.degrees import Degrees
from autopar.errors import ClusterError, JobError, PlanError, ProgramError
from autopar.folding.fold import Folded, fold
from autopar.formulate.constraints import Constraints
from autopar.formulate.manual_recipes import batch_dims
from autopar.formulate.step_time import Split, step_time
from autopar.ir.graph import Graph
from autopar.page import look
from autopar.page.document import render
from autopar.plan import Plan
from autopar.prediction import predict
from autopar.program.lower import lower
from autopar.program.records import Program
from autopar.program.text import format_program, parse_program
from autopar.program.verify import verify_program
from autopar.progress import never, silent
from autopar.ranks.collect import gradient_items, output_items, put_together, state_items
from autopar.ranks.lowered import Lowered
from autopar.ranks.samples import cut, has_part
from autopar.recompute import Recompute
from autopar.report import format_report
from autopar.runtime import run_step
from autopar.search.context import SearchContext
from autopar.search.share_nodes import share_roofline
from autopar.search.share_solver import ShareNodeSolver
from autopar.search.share_space import ShareSpace, share_space
from autopar.sharding import Mesh
from autopar.shares import Share, balanced, row_microbatches
from autopar.simulate import simulate
from autopar.simulate.flat import simulate_flat
from autopar.tactics.reading import tactics_of
from autopar.task import NO_RULES, job_costs
from autopar.workload import open_plan
from tests.executions import (
    COSTS,
    EXECUTOR,
    TINY,
    check_close,
    model_feeds,
    model_graph,
    model_rules,
    next_data,
    next_states,
    random_choice,
    random_plan,
    run_unpartitioned,
)
from tests.rank_runs import run_local
from tests.shares import some

Array = NDArray[Any]

SAMPLES = 2
"""Samples of a microbatch of one row."""

SPACE = (
    Configuration(1, Mesh.of(inner=2), 3, "1f1b", shares=(Share((0, 1), 3), Share((1, 2), 1))),
    Configuration(1, Mesh.of(outer=2, inner=2), 3, "1f1b", shares=(Share((0, 1), 1), Share((1, 2), 3))),
    Configuration(2, Mesh.of(outer=2, inner=2), 4, "1f1b", shares=(Share((0, 1), 4), Share((1, 2), 2))),
    Configuration(1, Mesh.of(dp=3, outer=2, inner=2), 3, "1f1b", shares=(Share((0, 2), 3), Share((2, 3), 2))),
    Configuration(2, Mesh.of(inner=2), 3, "zb-h1", shares=(Share((0, 1), 2), Share((1, 2), 3))),
)
"""Rows of one device to four, the first or the last ones with most; one stage and two."""


TRAINED = [name for name in TINY if name not in ("bert-base", "deepseek-moe-16b", "resnet50", "t5-11b", "unet-sd1")]
"""The others have ops whose sums over rows cannot wait: statistics of a batch, and gradients that no rule leaves as
terms."""


@cache
def _graphs(name: str, rows: int) -> tuple[Graph, Folded]:
    """Return the graph of a microbatch of one row, and of all rows."""
    return model_graph(name, SAMPLES), fold(model_graph(name, SAMPLES * rows))


@cache
def _plan(name: str, configuration: Configuration, cache_dir: Path, seed: int) -> tuple[Plan, Program]:
    """Return a random plan whose rows have different shares, as its file gives it back, and its program."""
    rows = configuration.mesh.shape[0]
    alone, folded = _graphs(name, rows)
    constraints = Constraints(batch=lambda _: batch_dims(alone.values, folded.graph.values))
    rules = model_rules(name, cache_dir)
    plan = random_plan(folded, rules, configuration, SAMPLES * rows, seed, constraints=constraints)
    batch = SAMPLES * row_microbatches(configuration.shares)
    plan = Plan.from_json(replace(plan, job=replace(plan.job, global_batch=batch)).to_json())
    program = lower(plan, folded, COSTS)
    verify_program(program, folded)
    return plan, program


def _accumulated(
    alone: Graph, program: Program, microbatches: Sequence[Mapping[str, Array]]
) -> list[tuple[int, dict[str, Array]]]:
    """Return what rows run of each microbatch, one after the other."""
    rows = program.shares[-1].rows[1]
    return [
        (index, part)
        for index, data in enumerate(microbatches)
        for row, part in enumerate(cut(data, alone, rows))
        if has_part(program, row, rows, index)
    ]


@pytest.mark.parametrize("name", some(TRAINED, lambda name: name == "mlp-xs"))
def test_random_plans_train_like_the_model(name: str, cache_dir: Path) -> None:
    """Loss, gradients weighted by samples and updated states are those of all samples on one device."""
    for seed, configuration in enumerate(SPACE):
        alone, folded = _graphs(name, configuration.mesh.shape[0])
        data, states = model_feeds(name, folded.graph, configuration.num_microbatches)
        plan, program = _plan(name, configuration, cache_dir, seed)
        parts = _accumulated(alone, program, data)
        expected = run_unpartitioned(alone, [part for _, part in parts], states)

        found = run_step(program, folded, data, states, EXECUTOR)

        assert len(parts) == row_microbatches(plan.shares)
        check_close(found.gradients, expected.gradients)
        check_close(found.states, expected.states)
        for output in folded.graph.outputs:
            total = sum(each[output] for each in found.outputs)
            np.testing.assert_allclose(total, sum(each[output] for each in expected.outputs), rtol=1e-9)


def _line(pace: float) -> Callable[[int], float]:
    return lambda count: 0.5 + pace * count


@given(
    rows=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    total=st.integers(2, 24),
    paces=st.lists(st.sampled_from([1.0, 1.5, 2.3]), min_size=3, max_size=3),
)
def test_balanced_shares_are_the_best_of_all(rows: list[int], total: int, paces: list[float]) -> None:
    """Against every combination: none ends its slowest rows sooner, and if there is none there are no shares."""
    groups = [_line(pace) for pace in paces[: len(rows)]]
    every = [
        counts
        for counts in product(range(1, total + 1), repeat=len(rows))
        if sum(row * count for row, count in zip(rows, counts, strict=True)) == total
    ]

    def slowest(counts: Sequence[int]) -> float:
        return max(group(count) for group, count in zip(groups, counts, strict=True))

    found = balanced(rows, total, groups)

    assert (found is None) == (not every)
    if found is not None:
        assert found in every
        assert slowest(found) == min(map(slowest, every))


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([{"rows": [0, 1], "num_microbatches": 3}], "shares are of 1 rows, the major axis of mesh"),
        ([{"rows": [1, 2], "num_microbatches": 3}], "shares name rows 1 to 2 where rows from 0 on come next"),
        ([{"rows": [0, 2], "num_microbatches": 0}], "a share of 0 microbatches"),
        (
            [{"rows": [0, 1], "num_microbatches": 2}, {"rows": [1, 2], "num_microbatches": 1}],
            "num_microbatches is 3, the largest share has 2",
        ),
        (
            [{"rows": [0, 1], "num_microbatches": 3}, {"rows": [1, 2], "num_microbatches": 2}],
            "a batch of 8 cannot be 5 equal microbatches, those of all 2 rows",
        ),
    ],
)
def test_shares_of_a_file_fit_the_plan(shares: list[dict[str, Any]], message: str, cache_dir: Path) -> None:
    plan, _ = _plan("mlp-xs", SPACE[0], cache_dir, 0)
    data = json.loads(plan.to_json())

    assert data["version"] == 4
    assert Plan.from_json(json.dumps(data).encode()).microbatch == 2 * SAMPLES
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data | {"shares": shares}).encode())


def test_the_text_of_a_program_has_its_shares(cache_dir: Path) -> None:
    _, program = _plan("mlp-xs", SPACE[0], cache_dir, 0)

    assert parse_program(format_program(program)) == program


def test_rows_that_meet_in_a_pass_have_equal_shares(cache_dir: Path) -> None:
    """A plan whose parameters are split over the rows gathers them in every pass: a row cannot skip one."""
    configuration = replace(SPACE[0], shares=())
    folded = fold(model_graph("mlp-xs", 2 * SAMPLES))
    plan = random_plan(folded, model_rules("mlp-xs", cache_dir), configuration, 2 * SAMPLES, 3)
    program = replace(lower(plan, folded, COSTS), shares=SPACE[0].shares)

    verify_program(replace(program, shares=()), folded)
    with pytest.raises(ProgramError, match=r"rows meet inside a pass|as if all rows had run the pass"):
        verify_program(program, folded)


def test_ranks_train_like_the_model(cache_dir: Path) -> None:
    """Each rank runs the microbatches of its own row, two steps; loss, gradients and states are as above."""
    for seed, configuration in enumerate(SPACE[2:3]):
        alone, folded = _graphs("mlp-xs", configuration.mesh.shape[0])
        first, states = model_feeds("mlp-xs", folded.graph, configuration.num_microbatches)
        _, program = _plan("mlp-xs", configuration, cache_dir, 10 + seed)
        lowered, steps = Lowered(program, folded), [first, next_data(folded.graph, first)]
        held = dict(states)
        for data in steps:
            expected = run_unpartitioned(alone, [part for _, part in _accumulated(alone, program, data)], held)
            held = next_states(alone, expected.states)

        ranks = run_local(lowered, steps, states)

        for item in (*gradient_items(lowered), *state_items(lowered)):
            stage = program.stages[item.stage]
            blocks = [rank.kept(item.tensor, item.placements) for rank in ranks[slice(*stage.devices)]]
            whole, apart = put_together(blocks, item.placements, stage.mesh)
            scale = max(float(np.max(np.abs(expected.states[item.key]))), 1e-3)
            assert apart <= 1e-6 * scale, item
            np.testing.assert_allclose(whole, expected.states[item.key], rtol=0, atol=1e-6 * scale, err_msg=str(item))
        losses = []
        for item in output_items(lowered):
            stage = program.stages[item.stage]
            blocks = [rank.output(item.key[0], item.tensor, item.placements) for rank in ranks[slice(*stage.devices)]]
            losses.append(put_together(blocks, item.placements, stage.mesh)[0])
        assert sum(losses) == pytest.approx(sum(each["loss"] for each in expected.outputs), rel=1e-6)


def _mixed(devices: int) -> CostModel:
    """Return the costs of two nodes of a few devices, the second of half the speed with slower links."""
    fast = replace(COSTS.cluster, name="fast", devices_per_node=devices, domains=())
    device = fast.device
    slow = replace(
        fast,
        name="slow",
        device=replace(
            device,
            peaks=tuple((name, peak / 2) for name, peak in device.peaks),
            memory_bandwidth=device.memory_bandwidth / 2,
            memory=device.memory / 2,
        ),
        intra=replace(fast.intra, bandwidth=fast.intra.bandwidth / 3),
    )
    between = replace(fast.inter, bandwidth=fast.inter.bandwidth / 4)
    return replace(COSTS, cluster=Cluster.mixed("two", (NodeGroup(1, fast), NodeGroup(1, slow)), between))


@pytest.mark.parametrize("configuration", [SPACE[0], SPACE[1], SPACE[2], SPACE[4]], ids=str)
def test_the_hierarchical_simulator_agrees_with_the_flat_one(configuration: Configuration, cache_dir: Path) -> None:
    """On devices of two speeds, and pipelines on equal ones, for random placements and buckets."""
    costs = _mixed(configuration.mesh.size // 2) if configuration.num_stages == 1 else COSTS
    for seed, bucket in enumerate((None, 0.0, 500.0)):
        _, program = _plan("mlp-xs", configuration, cache_dir, 20 + seed)

        timeline, flat = simulate(program, costs, bucket=bucket), simulate_flat(program, costs, bucket=bucket)

        assert timeline.step_seconds == pytest.approx(flat.step_seconds, rel=1e-9)
        assert len(timeline.stages) == 2 * configuration.num_stages
        for stage in timeline.stages:
            parts = (
                stage.compute_seconds, stage.collective_seconds, stage.wait_seconds, stage.bubble_seconds,
                stage.gradient_seconds, stage.update_seconds, stage.gather_seconds, stage.delay_seconds,
                stage.copy_seconds,
            )  # fmt: skip
            assert sum(parts) == pytest.approx(timeline.step_seconds, rel=1e-9)
            assert min(parts) > -1e-12


def test_rows_wait_for_the_slowest_before_they_sum_gradients(cache_dir: Path) -> None:
    """Shares that follow the speed end together; others leave the faster rows, or the slower ones, idle."""
    costs = _mixed(1)
    steps = {}
    for fast, slow in ((2, 4), (3, 3), (4, 2), (5, 1)):
        shares = (Share((0, 1), fast), Share((1, 2), slow))
        configuration = Configuration(1, Mesh.of(inner=2), max(fast, slow), "1f1b", shares=shares)
        _, program = _plan("mlp-xs", configuration, cache_dir, 0)
        timeline = simulate(program, costs, trace=True)
        steps[fast] = timeline.step_seconds
        passes = [stage.compute_seconds + stage.collective_seconds for stage in timeline.stages]
        assert timeline.arrays is not None
        traffic = timeline.arrays.traffic
        over = [max(timeline.arrays.tasks["end"][timeline.arrays.tasks["stage"] == part]) for part in (0, 1)]
        last = traffic["end"][traffic["group"] == 0].max()

        assert passes[1] / passes[0] == pytest.approx(2 * slow / fast, rel=1e-4)
        assert last == traffic["end"][traffic["group"] == 1].max() >= max(over)
        assert timeline.stages[int(over[0] > over[1])].bubble_seconds >= max(over) - min(over) - 1e-12
        assert sum(step.seconds for step in timeline.path) == pytest.approx(timeline.step_seconds, rel=1e-9)
        blocks = f"0-{len(program.stages[0].blocks) - 1}"
        assert timeline.tracks == (
            f"stage 0: GPU 0, block {blocks}, {fast} microbatches",
            f"stage 0: GPU 1, block {blocks}, {slow} microbatches",
        )

    assert min(steps, key=lambda fast: steps[fast]) == 4


def test_equal_devices_with_equal_shares_take_the_time_of_a_plan_without(cache_dir: Path) -> None:
    shares = (Share((0, 1), 3), Share((1, 2), 3))
    _, program = _plan("mlp-xs", replace(SPACE[1], shares=shares), cache_dir, 0)
    costs = replace(COSTS, cluster=replace(COSTS.cluster, devices_per_node=2))

    apart, together = simulate(program, costs), simulate(replace(program, shares=()), costs)

    assert apart.step_seconds == pytest.approx(together.step_seconds, rel=1e-9)
    assert {stage.memory.bytes for stage in apart.stages} == {together.stages[0].memory.bytes}


def _cluster(devices: int) -> Cluster:
    return _mixed(devices).cluster


def test_rows_of_the_space_lie_in_one_group() -> None:
    """Nodes of four and of two devices: rows of one device or two; no space where devices are alike."""
    fast, slow = _cluster(4).groups[0].cluster, replace(_cluster(4).groups[1].cluster, devices_per_node=2)
    mixed = Cluster.mixed("uneven", (NodeGroup(1, fast), NodeGroup(3, slow)), fast.inter)

    space = share_space(mixed, 10, 60, "train", None)

    assert space is not None
    assert {str(node.mesh) for node in space.nodes} == {"inner=10", "outer=5×inner=2"}
    assert {space.rows(node) for node in space.nodes} == {(4, 6), (2, 3)}
    assert {node.samples for node in space.nodes if node.num_rows == 10} == {1, 2, 3, 4, 5, 6}
    assert space.shares(space.nodes[0], (9, 4)) == (Share((0, 4), 9), Share((4, 10), 4))
    assert share_space(mixed, 10, 60, "infer", None) is None
    assert share_space(mixed, 10, 60, "train", 5) is None
    assert share_space(mixed, 4, 60, "train", None) is None
    assert share_space(fast, 8, 60, "train", None) is None


@cache
def _context(cache_dir: Path) -> tuple[SearchContext, ShareSpace]:
    """Return a search of a tiny model on two fast and two slow devices."""
    costs, rules = _mixed(2), model_rules("mlp-xs", cache_dir)
    folded = {4 * samples: fold(model_graph("mlp-xs", 4 * samples)) for samples in (1, 2)}
    batch = {id(own): batch_dims(model_graph("mlp-xs", 10).values, own.graph.values) for own in folded.values()}
    space = share_space(costs.cluster, 4, 16, "train", None)
    assert space is not None
    nodes = tuple(node for node in space.nodes if node.mesh == Mesh.of(inner=4) and node.samples < 3)
    own = [roofline(folded[4], folded[8], (4, 8), costs.on(range(first, first + 1))) for first in (0, 2)]
    search = SearchContext(
        folded=folded.__getitem__,
        rules=lambda _: rules,
        costs=costs,
        solver=solvers.load("auto"),
        roofline=own[1],
        global_batch=16,
        memory_limit=1e12,
        keep=1,
        time_limit=math.inf,
        progress=silent,
        should_stop=never,
        constraints=Constraints(batch=lambda own: batch[id(own)]),
        shares=replace(space, nodes=nodes),
        rooflines=tuple(own),
    )
    return search, replace(space, nodes=nodes)


def test_no_plan_with_shares_is_below_the_bounds_of_its_node(cache_dir: Path) -> None:
    """For random placements and all shares of a node; and the plan found is as good as any of these."""
    search, space = _context(cache_dir)
    rng = np.random.default_rng(0)
    for node in space.nodes:
        finding = ShareNodeSolver(search, space, node).solve()
        assert finding.best is not None
        folded, rows = search.folded(4 * node.samples), space.rows(node)
        views = [search.costs.on_rows(range(first, first + 1)) for first in (0, 2)]
        tables = [
            search.constraints.tables(folded, search.rules(folded), node.mesh, view, rows_apart=True) for view in views
        ]
        split = Split.uniform(((0, folded.num_blocks),), (Recompute.NONE,))
        every = [
            (fast, slow)
            for fast, slow in product(range(1, 17), repeat=2)
            if rows[0] * fast + rows[1] * slow == space.total(node)
        ]
        assert tables[0] is not None
        choices = [finding.best.choice, *(random_choice(tables[0], rng) for _ in range(3))]
        steps = {
            (choice, counts): max(
                step_time(
                    own.block_seconds(choice),
                    folded.chain,
                    Configuration(1, node.mesh, count, "1f1b").pipeline(view.stack),
                    split,
                    0.0,
                ).seconds
                for own, view, count in zip(tables, views, counts, strict=True)
                if own is not None
            )
            for choice in choices
            for counts in every
        }

        assert share_roofline(search, space, node) <= finding.bound <= min(steps.values()) * (1 + 1e-9)
        assert finding.best.objective == pytest.approx(min(steps.values()), rel=1e-9)
        assert finding.bound >= 0.8 * finding.best.objective


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Plan:
    """Return the plan of a chain of products on a fast and a slow device of equal links."""
    cluster = _cluster(1)
    return solve("zoo:mlp-xs", gpus=2, cluster=cluster, global_batch=960, dims={"hidden": 16}, cache_dir=cache_dir)


def test_the_search_gives_faster_devices_more_of_the_batch(solved: Plan) -> None:
    """About twice as much; no other shares of the plan are faster, and its bound is one."""
    assert solved.search is not None
    assert solved.simulated is not None
    fast, slow = solved.shares
    microbatch, costs = solved.microbatch // 2, job_costs(solved.job)
    folded = open_plan(solved).folded(solved.microbatch)
    program, steps = lower(solved, folded, costs), {}
    for count in range(1, 960 // microbatch):
        counts = count, 960 // microbatch - count
        shares = tuple(Share(own.rows, each) for own, each in zip(solved.shares, counts, strict=True))
        other = replace(program, shares=shares, num_microbatches=max(counts))
        steps[counts] = simulate(other, costs).step_seconds

    assert 1.5 <= fast.num_microbatches / slow.num_microbatches <= 2.5
    assert solved.simulated.step_seconds == steps[fast.num_microbatches, slow.num_microbatches]
    assert solved.simulated.step_seconds <= min(steps.values()) * 1.01
    assert solved.search.bound <= solved.objective == pytest.approx(solved.simulated.step_seconds, rel=0.05)
    assert any("take shares of the batch by their speed" in words for words in solved.search.space)


def test_reports_have_a_row_for_every_share(solved: Plan, cache_dir: Path) -> None:
    """Memory by share, with the limit of its own devices; the page is written, too."""
    text = format_report(solved)
    page = render(look(solved, cache_dir=cache_dir))

    assert f"shares of {solved.shares[0].num_microbatches} + {solved.shares[1].num_microbatches} micro" in text
    assert "share  devices  blocks  recompute" in text
    assert solved.device_ranges == ((0, 1), (1, 2))
    assert solved.stage_limits[0] > solved.stage_limits[1]
    assert "share 1" in page
    assert solved.to_dataframe()["first_device"].tolist() == [0, 1]


def test_a_prediction_by_degrees_has_shares(solved: Plan, cache_dir: Path) -> None:
    """The shares that the search has found take the time that it says; ZeRO over all devices is refused."""
    fast, slow = (share.num_microbatches for share in solved.shares)
    degrees = Degrees(dp=2, shares=((1, fast), (1, slow)), microbatch=solved.microbatch // 2, global_batch=960, zero=0)

    found = predict("zoo:mlp-xs", degrees, cluster=_cluster(1), dims={"hidden": 16}, cache_dir=cache_dir)

    assert found.plan.shares == solved.shares
    assert found.timeline.step_seconds >= solved.objective * 0.99
    for changes, message in (
        ({"global_batch": 961}, "the global batch is 961"),
        ({"shares": ((1, fast),)}, "shares are of 1 data-parallel devices, there are 2"),
        ({"zero": 3}, "ZeRO 3 over devices with different shares"),
    ):
        with pytest.raises(JobError, match=message):
            replace(degrees, **changes)
    astray = replace(degrees, dp=4, shares=((3, 2), (1, 1)), microbatch=1, global_batch=7)
    with pytest.raises(ClusterError, match="devices 0 to 2, which lie in several groups"):
        predict("zoo:mlp-xs", astray, cluster=_cluster(2), dims={"hidden": 16}, cache_dir=cache_dir)


def test_exports_say_what_becomes_of_shares(solved: Plan, cache_dir: Path) -> None:
    """FSDP2 runs them; a framework that does not runs equal ones, and says what that costs."""
    script = solved.export("fsdp", cache_dir=cache_dir).text
    other = solved.export("deepspeed", cache_dir=cache_dir)

    shares = [(1, share.num_microbatches) for share in solved.shares]
    assert f"SHARES = {shares}" in script
    assert any(lost.startswith("shares of 1 x") for lost in other.lost)
    assert "equal shares of the batch" in other.outcome
    told = json.loads(other.text)
    assert 2 * told["train_micro_batch_size_per_gpu"] * told["gradient_accumulation_steps"] == 960


def test_what_knows_equal_shares_only_says_so(solved: Plan, cache_dir: Path) -> None:
    with pytest.raises(PlanError, match="whose gradients travel by the uniform rule"):
        fuse_plan(solved, cache_dir=cache_dir)
    folded = open_plan(solved).folded(solved.microbatch)
    with pytest.raises(PlanError, match="no tactic gives rows of devices different shares"):
        tactics_of(solved, folded, NO_RULES, {})
