"""Executors reduce gradients by the buckets of the plan, in the simulated order, and compute the same."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.configuration import Configuration
from autopar.cost import Collective as Kind
from autopar.degrees import Degrees
from autopar.fusion_plan import BucketCuts, FusionPlan
from autopar.ir.graph import Role
from autopar.plan import Plan
from autopar.prediction import predict
from autopar.program.bucket_order import issue_order
from autopar.program.buckets import gradients
from autopar.program.lower import lower
from autopar.program.records import Collective, Operand, Program
from autopar.ranks.collect import put_together, state_items
from autopar.ranks.collectives import begin_together
from autopar.ranks.launch import run_plan
from autopar.ranks.lowered import Lowered
from autopar.ranks.predict import predict as predict_phases
from autopar.ranks.records import RunRequest
from autopar.ranks.step_data import Batches, Weights
from autopar.ranks.stopwatch import Clock
from autopar.recompute import Recompute
from autopar.runtime import StepResult, run_step
from autopar.runtime.blocks import move, move_together, scatter
from autopar.schedule import SCHEDULES
from autopar.sharding import Mesh, Partial, Placement, Replicate, Shard
from autopar.simulate import simulate
from autopar.simulate.engine import run_step as simulate_step
from tests.executions import COSTS, TINY, interleave, random_feeds, run_unpartitioned
from tests.local_ranks import LocalCommunicator, LocalWorld, NumpyMemory
from tests.rank_runs import SAMPLES, run_local, tiny_plan, tiny_workload

Array = NDArray[Any]

PAIR, GRID = Mesh.of(inner=2), Mesh.of(outer=2, inner=2)
Case = tuple[str, Configuration | Degrees, str]
"""A tiny model, what it runs on, and a recipe for placements on a configuration."""

DATA = Degrees(dp=2, microbatch=2, global_batch=8)
SHARED = Degrees(dp=4, shard=2, zero=2, microbatch=1, global_batch=8)
"""Gradients are scattered between two devices per microbatch, and summed between their copies once per step."""
IN_A_ROW = replace(SHARED, zero=1, microbatch=2)
"""Once per step gradients are scattered between two devices, and what these have is summed between their copies."""
KINDS = [
    pytest.param(("mlp-xs", DATA, ""), id="all-reduce"),
    pytest.param(("mlp-xs", replace(DATA, zero=2), ""), id="reduce-scatter-per-microbatch"),
    pytest.param(("mlp-xs", IN_A_ROW, ""), id="several-in-a-row"),
    pytest.param(("mlp-xs", Configuration(2, PAIR, 3, "zb-h1"), "data+zero-1"), id="split-backward"),
    pytest.param(("mlp-xs", Configuration(4, PAIR, 4, "1f1b"), "data"), id="stages-share-devices"),
    pytest.param(
        ("llama3-8b", Configuration(1, GRID, 2, "1f1b"), "data+zero-1 × megatron+sequence"),
        id="two-axes",
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for rules that all models share."""
    return tmp_path_factory.mktemp("rules")


def _plan(case: Case, cache_dir: Path) -> Plan:
    name, configuration, recipe = case
    if isinstance(configuration, Degrees):
        return predict(f"zoo:{name}", configuration, dims=TINY[name], cache_dir=cache_dir).plan
    plan = tiny_plan(name, configuration, cache_dir, recipe=recipe, seed=5)
    return interleave(plan, 2, "interleaved") if configuration.num_stages == 4 else plan


def _lowered(plan: Plan) -> Lowered:
    folded = tiny_workload(plan.model.source.removeprefix("zoo:"), plan.job.optimizer).folded(SAMPLES)
    return Lowered(lower(plan, folded, COSTS), folded)


def _cut(plan: Plan, seed: int) -> Plan:
    """Return a plan whose gradients are cut at random; the last two of a stage and kind share a bucket."""
    program, rng = _lowered(plan).program, np.random.default_rng(seed)
    table, splits = program.table(), SCHEDULES[program.schedule].splits
    cuts = []
    for stage in program.stages:
        own = []
        for key, known in gradients(stage, table, splits=splits).items():
            count = len(known)
            ends = {count, *(number for number in range(1, count - 1) if rng.random() < 0.3)}
            own.append(BucketCuts(*key, tuple(sorted(ends))))
        cuts.append(tuple(own))
    return replace(plan, fusion=FusionPlan.of_cuts(tuple(cuts)))


def _feeds(plan: Plan, lowered: Lowered) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Return data of the microbatches of a step, and states, in the model's own element types."""
    graph = lowered.graph
    weights = Weights(tiny_workload(plan.model.source.removeprefix("zoo:"), plan.job.optimizer), graph, 0)
    given = {state.input: weights(state.input) for state in graph.states if state.role is not Role.MOMENT}
    _, states = random_feeds(graph, 1, given)
    batches = Batches(graph, 0)
    data = [batches(0, index) for index in range(lowered.program.num_microbatches)]
    return data, {name: np.asarray(array, graph.values[name].dtype) for name, array in states.items()}


def _simulated(program: Program) -> list[tuple[str, ...]]:
    """Return the gradient traffic of each group of devices in the order in which the simulator issues it."""
    jobs = simulate_step(program, COSTS).jobs
    return [tuple(job.name for job in own if job.key is not None) for own in jobs]


def _check_gradients(found: StepResult, expected: StepResult) -> None:
    """Check that gradients are those of another run, as far as float32 goes."""
    for name, array in expected.gradients.items():
        scale = max(1e-3, float(np.abs(array).max()))
        np.testing.assert_allclose(found.gradients[name], array, rtol=0, atol=1e-4 * scale)


def _check_order(departed: Sequence[tuple[str, ...]], program: Program) -> None:
    """Assert that collectives of gradients are the simulated ones, in their order.

    Where a block has gradients that travel per microbatch and others that travel per step, executors reduce the latter
    once the former are there, and the simulator does not wait.
    """
    simulated, table = _simulated(program), program.table()
    known = [key for stage in program.stages for key in gradients(stage, table, splits=False)]
    if len({per for _, _, per, _ in known}) > 1:
        assert [sorted(own) for own in departed] == [sorted(own) for own in simulated]
    else:
        assert list(departed) == simulated


@pytest.mark.parametrize("case", KINDS)
def test_reference_reduces_by_the_buckets_of_the_plan(case: Case, cache_dir: Path) -> None:
    """Numbers are those of the model on one device; collectives of gradients are those that are simulated, in order."""
    plan = _cut(_plan(case, cache_dir), 3)
    lowered = _lowered(plan)
    data, states = _feeds(plan, lowered)

    found = run_step(lowered.program, lowered.folded, data, states)

    _check_gradients(found, run_unpartitioned(lowered.graph, data, states))
    _check_order(found.departed, lowered.program)


@pytest.mark.parametrize("case", KINDS)
def test_ranks_reduce_by_the_buckets_of_the_plan(case: Case, cache_dir: Path) -> None:
    """Every rank starts the simulated collectives in the simulated order; its gradients are the reference's."""
    pytest.importorskip("onnxruntime", reason='ranks compute with it: pip install "autopar[run]"')
    plan = _cut(_plan(case, cache_dir), 4)
    lowered = _lowered(plan)
    program, (data, states) = lowered.program, _feeds(plan, lowered)

    ranks = run_local(lowered, [data], states)

    expected = run_step(program, lowered.folded, data, states)
    for rank in ranks:
        assert tuple(rank.departed) == expected.departed[rank.group]
    _check_order(expected.departed, program)
    for item in state_items(lowered):
        first, last = program.stages[item.stage].devices
        blocks = [rank.kept(item.tensor, item.placements) for rank in ranks[first:last]]
        whole, _ = put_together(blocks, item.placements, program.stages[item.stage].mesh)
        scale = max(1e-3, float(np.abs(expected.states[item.tensor]).max()))
        np.testing.assert_allclose(whole, expected.states[item.tensor], rtol=0, atol=1e-4 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS[:2])
def test_processes_reduce_by_the_buckets_of_the_plan(case: Case, cache_dir: Path, tmp_path: Path) -> None:
    """Over gloo the report says the simulated order, and the step equals the unpartitioned one."""
    pytest.importorskip("torch", reason="processes talk over PyTorch: pip install autopar[run]")
    plan = _cut(_plan(case, cache_dir), 6)
    plan.save(tmp_path / "plan.json")

    report = run_plan(RunRequest(str(tmp_path / "plan.json"), plan.job.gpus))

    assert report.passed, report.compared
    assert report.departed == _simulated(_lowered(plan).program)[0]


def test_gradients_with_several_collectives_share_buckets_of_each(cache_dir: Path) -> None:
    """All blocks are scattered in one bucket, and then summed in one; cut into two, sums begin before all scatters."""
    plan = _plan(("mlp-xs", IN_A_ROW, ""), cache_dir)
    program = _lowered(plan).program
    table = program.table()
    known = gradients(program.stages[0], table, splits=False)
    (first, one), (second, other) = sorted(known.items(), key=lambda own: own[0][3])
    assert (first[3], second[3], len(one)) == (0, 1, len(other))

    together = issue_order(program.stages[0], table, splits=False, last=True)
    cuts = tuple(BucketCuts(*key, (2, len(one))) for key in (first, second))
    apart = issue_order(replace(program.stages[0], buckets=cuts), table, splits=False, last=True)

    assert [(own.key, len(own.members)) for own in together] == [(first, len(one)), (second, len(one))]
    assert [own.key for own in apart] == [first, second, first, second]


def test_a_reduction_of_the_step_follows_the_buckets_of_the_microbatch(cache_dir: Path) -> None:
    """Where devices share over a part of the copies, buckets leave in an order that holds, and gradients are right."""
    plan = _cut(_plan(("mlp-xs", SHARED, ""), cache_dir), 3)
    lowered = _lowered(plan)
    data, states = _feeds(plan, lowered)

    found = run_step(lowered.program, lowered.folded, data, states)

    _check_gradients(found, run_unpartitioned(lowered.graph, data, states))
    _check_order(found.departed, lowered.program)
    ranks = run_local(lowered, [data], states)
    assert all(tuple(rank.departed) == found.departed[rank.group] for rank in ranks)


_MOVES: list[Sequence[tuple[Placement, Placement, tuple[int, ...]]]] = [
    [(Partial(), Replicate(), (4, 3)), (Partial(), Replicate(), (5,)), (Partial("max"), Replicate(), (2,))],
    [(Partial(), Shard(0), (4, 3)), (Partial(), Shard(1), (3, 2)), (Partial(), Shard(0, 2), (8,))],
    [(Partial(), Shard(0, whole=3), (3, 2)), (Partial(), Replicate(), (2, 2)), (Partial(), Shard(0), (6,))],
]


@pytest.mark.parametrize("moves", _MOVES)
def test_one_collective_does_what_several_do(moves: Sequence[tuple[Placement, Placement, tuple[int, ...]]]) -> None:
    """Blocks after one collective for all tensors are those after one collective each, in one process and on ranks."""
    mesh, rng = Mesh.of(outer=2, inner=2), np.random.default_rng(0)
    axis = mesh.axes[1]
    tensors = [[rng.normal(size=shape) for _ in range(4)] for *_, shape in moves]
    alone = [move(blocks, 1, source, target, mesh) for blocks, (source, target, _) in zip(tensors, moves, strict=True)]

    together = move_together(tensors, 1, [(source, target) for source, target, _ in moves], mesh)

    def work(communicator: LocalCommunicator) -> list[Array]:
        rank = communicator.rank
        items = []
        for blocks, result, (source, target, _) in zip(tensors, alone, moves, strict=True):
            kind = Kind.ALL_REDUCE if isinstance(target, Replicate) else Kind.REDUCE_SCATTER
            operand, made = Operand("x", blocks[0].shape, 0.0), Operand("y", result[0].shape, 0.0)
            items.append((Collective(kind, axis, source, target, operand, made, 0.0), blocks[rank]))
        group = tuple(range(2 * (rank // 2), 2 * (rank // 2) + 2))
        return [pending.wait() for pending in begin_together(items, group, communicator, NumpyMemory())]

    ranks = LocalWorld(4).run(work)
    for number, blocks in enumerate(alone):
        for rank in range(4):
            np.testing.assert_allclose(together[number][rank], blocks[rank], rtol=0, atol=1e-12)
            target = moves[number][1]
            if not isinstance(target, Shard) or not target.whole:
                np.testing.assert_allclose(ranks[rank][number], blocks[rank], rtol=0, atol=1e-12)


def test_blocks_of_several_tensors_are_gathered_in_one_collective() -> None:
    """Whole dims, dims in chunks and padded dims come out as they do from gathers of their own; types do not mix."""
    shards = [Shard(0), Shard(1), Shard(0, 2), Shard(0, whole=3), Shard(0)]
    wholes: list[Array] = [np.arange(24.0).reshape(4, 6) + number for number in range(3)] + [
        np.arange(6.0).reshape(3, 2)
    ]
    wholes.append(np.arange(4, dtype=np.float32))
    axis = PAIR.axes[0]
    blocks = [scatter(whole, (shard,), PAIR) for whole, shard in zip(wholes, shards, strict=True)]

    def work(communicator: LocalCommunicator) -> tuple[list[Array], int]:
        calls, gather = [0], communicator.all_gather

        def counted(*given: Any) -> Any:
            calls[0] += 1
            return gather(*given)

        vars(communicator)["all_gather"] = counted
        operand = Operand("x", (), 0.0)
        items = [
            (Collective(Kind.ALL_GATHER, axis, shard, Replicate(), operand, operand, 0.0), own[communicator.rank])
            for shard, own in zip(shards, blocks, strict=True)
        ]
        started = begin_together(items, (0, 1), communicator, NumpyMemory())
        return [pending.wait() for pending in started], calls[0]

    for found, calls in LocalWorld(2).run(work):
        assert calls == 2
        for own, whole in zip(found, wholes, strict=True):
            np.testing.assert_array_equal(own, whole)


def test_ranks_are_predicted_with_the_buckets_they_use(cache_dir: Path) -> None:
    """The predicted step is the simulated one with buckets, which is another than with every gradient alone."""
    program = _lowered(_plan(("mlp-xs", replace(DATA, zero=1), ""), cache_dir)).program

    timeline, (stage,) = predict_phases(program, COSTS)

    assert timeline.step_seconds == simulate(program, COSTS).step_seconds
    assert timeline.step_seconds != simulate(program, COSTS, bucket=0.0).step_seconds
    assert stage["gather"] > 0


def test_forwards_that_run_again_count_as_backward(cache_dir: Path) -> None:
    """The clock of a rank enters the forward as often with full recompute as without it."""
    pytest.importorskip("onnxruntime", reason='ranks compute with it: pip install "autopar[run]"')
    counts = []
    for recompute in (Recompute.NONE, Recompute.FULL):
        lowered = _lowered(tiny_plan("mlp-xs", Configuration(1, PAIR, 2, "1f1b"), cache_dir, recompute=recompute))
        data, states = _feeds(_plan(("mlp-xs", DATA, ""), cache_dir), lowered)
        entered: list[str] = []

        class Recorder(Clock):
            def __call__(self, phase: str) -> Any:
                entered.append(phase)  # noqa: B023
                return super().__call__(phase)

        run_local(lowered, [data], states, Recorder)
        counts.append(Counter(entered))

    assert counts[0]["forward"] == counts[1]["forward"] > 0
    assert counts[0]["backward"] < counts[1]["backward"]


def test_uniform_buckets_are_executed_too(cache_dir: Path) -> None:
    """Without cuts of a plan, all gradients of a tiny model share the one bucket that the simulator has."""
    program = _lowered(_plan(("mlp-xs", DATA, ""), cache_dir)).program

    (bucket,) = issue_order(program.stages[0], program.table(), splits=False, last=True)

    assert _simulated(program) == [(bucket.name,)]
    assert len(bucket.members) > 1
