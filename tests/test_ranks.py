"""Ranks compute what the unpartitioned model computes: all of it but the processes, which need torch."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray
from onnx import numpy_helper

from autopar import models
from autopar.configuration import Configuration
from autopar.cost import Collective as Kind
from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.errors import ExecutionError, PlanError, ProgramError
from autopar.execute import Executor
from autopar.folding.fold import fold
from autopar.ir.graph import Role
from autopar.plan import Plan
from autopar.prediction import Predictor, predict
from autopar.program.listing import parse_listing
from autopar.program.lower import lower
from autopar.program.records import (
    HOST_PHASES,
    Collective,
    Compute,
    Exchange,
    Operand,
    Program,
    SegmentPhase,
    Slice,
    collective_kind,
    defines,
    reads,
)
from autopar.progress import silent
from autopar.ranks.assemble import Node, Port, assemble
from autopar.ranks.collect import gradient_items, output_items, put_together, state_items
from autopar.ranks.collectives import begin, merge, split
from autopar.ranks.compare import deviation
from autopar.ranks.compiled_models import Engine
from autopar.ranks.instruction_order import Run, Start, Wait, order
from autopar.ranks.job import prepare_job, run_rank
from autopar.ranks.lowered import Lowered
from autopar.ranks.records import RunReport, RunRequest
from autopar.ranks.routes import groups_of, refreshes
from autopar.ranks.run_table import format_run
from autopar.ranks.step_data import Batches, Weights
from autopar.recompute import STATE_KINDS, Recompute
from autopar.runtime.blocks import scatter
from autopar.sharding import Mesh, Partial, Placement, Replicate, Shard
from autopar.training import STEP
from autopar.workload import open_workload
from tests.executions import COSTS, TINY, interleave, random_feeds, random_plan, run_unpartitioned
from tests.local_ranks import LocalCommunicator, LocalWorld, NumpyMemory
from tests.programs import programs
from tests.rank_runs import SAMPLES, run_local, tiny_plan, tiny_rules, tiny_workload
from tests.test_ring_attention import masked_plan, masked_step, masks
from tests.variants import random_plan_of_variants

Array = NDArray[Any]

TOLERANCE = 1e-4
"""Of the largest element, in float32 (`autopar.ranks.compare`); moments start above zero, so that Adam is smooth."""

PIPELINE = Configuration(2, Mesh.of(inner=2), 4, "1f1b")
TWO_AXES = Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for rules that all models share."""
    return tmp_path_factory.mktemp("rules")


# The order of instructions.


@given(program=programs())
def test_orders_keep_what_depends_on_what(program: Program) -> None:
    """Every instruction runs once, after what it reads; waits follow starts; main waits for nothing overlapped."""
    for segment in program.segments:
        if segment.phase in HOST_PHASES:
            continue  # copies, one after the other
        wanted = {operand.value for operand in (*segment.saved, *segment.outputs, *segment.exports)}

        steps = order(segment.instructions, wanted, segment.phase)

        done: list[object] = []
        started: list[object] = []
        known = {operand.value for operand in (*segment.inputs, *segment.external, *segment.saved)}
        made = {operand.value for instruction in segment.instructions for operand in defines(instruction)}
        known |= {operand.value for instruction in segment.instructions for operand in reads(instruction)} - made
        for index, step in enumerate((*steps.main, *steps.tail)):
            if index == len(steps.main):
                assert wanted <= known
            instructions = step.instructions if isinstance(step, Run) else (step.instruction,)
            for instruction in instructions:
                if isinstance(step, Wait):
                    started.remove(instruction)
                else:
                    assert {operand.value for operand in reads(instruction)} <= known
                if isinstance(step, Start):
                    started.append(instruction)
                    continue
                done.append(instruction)
                known |= {operand.value for operand in defines(instruction)}
        assert not started
        assert sorted(map(repr, done)) == sorted(map(repr, segment.instructions))


def test_compute_runs_in_as_few_pieces_as_collectives_allow(cache_dir: Path) -> None:
    """Two runs of compute never follow each other, and not every op is one."""
    lowered = _lowered(tiny_plan("gpt2", Configuration(1, Mesh.of(inner=2), 2, "1f1b"), cache_dir, recipe="data"))

    pieces = ops = 0
    for segment in lowered.program.segments:
        steps = order(segment.instructions, {operand.value for operand in segment.outputs}, segment.phase)
        for part in (steps.main, steps.tail):
            assert not any(isinstance(a, Run) and isinstance(b, Run) for a, b in pairwise(part))
        pieces += sum(isinstance(step, Run) for step in (*steps.main, *steps.tail))
        ops += sum(isinstance(instruction, Compute) for instruction in segment.instructions)
    assert pieces < ops / 4


# Collectives.

_MOVES: list[tuple[Placement, Placement]] = [
    *[(Partial(reduce), Replicate()) for reduce in ("sum", "mean", "max", "min", "prod", "logsumexp")],
    *[(Partial(reduce), Shard(1)) for reduce in ("sum", "mean", "max", "min", "prod", "logsumexp")],
    (Partial(), Shard(0, 2)),
    (Shard(0), Replicate()),
    (Shard(1), Replicate()),
    (Shard(1, 3), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(2)),
    (Shard(1, 3), Shard(0, 2)),
    (Shard(1), Shard(1, 3)),
]


_REDUCED = {
    "sum": lambda terms: np.sum(terms, axis=0),
    "mean": lambda terms: np.mean(terms, axis=0),
    "max": lambda terms: np.max(terms, axis=0),
    "min": lambda terms: np.min(terms, axis=0),
    "prod": lambda terms: np.prod(terms, axis=0),
    "logsumexp": lambda terms: np.log(np.sum(np.exp(terms), axis=0)),
}


def _lines(mesh: Mesh, axis: int) -> list[tuple[int, ...]]:
    """Return the ranks that talk to each other over an axis."""
    ranks = np.arange(mesh.size).reshape(mesh.shape)
    return [tuple(line) for line in np.moveaxis(ranks, axis, -1).reshape(-1, mesh.shape[axis]).tolist()]


def _rows(count: int, placement: Shard, size: int, position: int) -> list[int]:
    """Return the rows of a dim that a device holds, chunk by chunk."""
    width = count // (size * placement.chunks)
    starts = [chunk * (count // placement.chunks) + position * width for chunk in range(placement.chunks)]
    return [row for start in starts for row in range(start, start + width)]


def _cut(whole: Array, placement: Placement, size: int, position: int) -> Array:
    if isinstance(placement, Shard):
        return np.take(whole, _rows(whole.shape[placement.dim], placement, size, position), axis=placement.dim)
    return whole


def _joined(parts: list[Array], placement: Placement) -> Array:
    if isinstance(placement, Partial):
        return np.asarray(_REDUCED[placement.reduce](np.stack(parts)))
    assert isinstance(placement, Shard)
    side_by_side = np.concatenate(parts, axis=placement.dim)
    count = side_by_side.shape[placement.dim]
    rows = [row for position in range(len(parts)) for row in _rows(count, placement, len(parts), position)]
    return np.take(side_by_side, np.argsort(rows), axis=placement.dim)


@pytest.mark.parametrize(("source", "target"), _MOVES, ids=lambda placement: str(placement))
@pytest.mark.parametrize("axis", [0, 1])
def test_collectives_move_blocks(source: Placement, target: Placement, axis: int) -> None:
    """On both axes of a mesh of 2 × 3 devices."""
    mesh = Mesh.of(outer=2, inner=3)
    rng = np.random.default_rng(0)
    shape = [12, 36, 6]
    if isinstance(source, Shard):
        shape[source.dim] //= mesh.shape[axis]
    blocks = [rng.normal(size=shape) for _ in range(mesh.size)]
    expected: list[Array] = [np.empty(0)] * mesh.size
    for line in _lines(mesh, axis):
        whole = _joined([blocks[rank] for rank in line], source)
        for rank, position in zip(line, range(len(line)), strict=True):
            expected[rank] = _cut(whole, target, len(line), position)
    kind = collective_kind(source, target)
    assert kind is not None
    before, after = (Operand(name, array.shape, 0.0) for name, array in (("x", blocks[0]), ("y", expected[0])))
    instruction = Collective(kind, mesh.axes[axis], source, target, before, after, 0.0)

    found = _on_mesh(mesh, instruction, blocks)

    for block, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(block, wanted, rtol=1e-12, atol=1e-14)
        assert block.flags.c_contiguous


def test_a_device_that_is_alone_keeps_what_it_has() -> None:
    """Over an axis of one device nothing is sent, whatever the program says; a halo is filled."""
    mesh, array = Mesh.of(outer=1, inner=2), np.ones((4, 4))
    operand, padded = Operand("x", (4, 4), 0.0), Operand("y", (6, 4), 0.0)
    total = Collective(Kind.ALL_REDUCE, mesh.axes[0], Partial("mean"), Replicate(), operand, operand, 0.0)
    halo = Exchange(mesh.axes[0], 0, 1, 1, "zero", operand, padded, 0.0)
    world = LocalWorld(1)

    assert begin(total, array, (0,), LocalCommunicator(world, 0), NumpyMemory()).wait() is array
    found = begin(halo, array, (0,), LocalCommunicator(world, 0), NumpyMemory()).wait()

    np.testing.assert_array_equal(found, np.pad(array, [(1, 1), (0, 0)]))


@pytest.mark.parametrize("rows", [(1, 2), (0, 1), (2, 0)])
@pytest.mark.parametrize("fill", ["zero", "lowest"])
def test_halos_come_from_the_neighbours(rows: tuple[int, int], fill: str) -> None:
    mesh = Mesh.of(outer=2, inner=3)
    blocks = [np.random.default_rng(rank).normal(size=(2, 4, 3)) for rank in range(mesh.size)]
    before, after = rows
    operand, result = Operand("x", (2, 4, 3), 0.0), Operand("y", (2, 4 + before + after, 3), 0.0)
    instruction = Exchange(mesh.axes[1], 1, before, after, fill, operand, result, 0.0)

    found = _on_mesh(mesh, instruction, blocks)

    edges = {"zero": 0.0, "lowest": -np.inf}
    for line in _lines(mesh, 1):
        padded = np.pad(
            np.concatenate([blocks[rank] for rank in line], axis=1),
            [(0, 0), rows, (0, 0)],
            constant_values=edges[fill],
        )
        for position, rank in enumerate(line):
            np.testing.assert_array_equal(found[rank], padded[:, 4 * position : 4 * position + 4 + sum(rows)])


def _on_mesh(mesh: Mesh, instruction: Collective | Exchange, blocks: list[Array]) -> list[Array]:
    """Return what all ranks get from a collective."""
    lines = _lines(mesh, mesh.axes.index(instruction.axis))

    def work(communicator: LocalCommunicator) -> Array:
        (group,) = [line for line in lines if communicator.rank in line]
        pending = begin(instruction, blocks[communicator.rank], group, communicator, NumpyMemory())
        result: Array = pending.wait()
        return result

    found: list[Array] = LocalWorld(mesh.size).run(work)
    return found


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(1, 2), Shard(2, 3)])
def test_stacked_blocks_are_those_of_the_devices(placement: Shard) -> None:
    """And merging is the inverse of splitting."""
    array = np.random.default_rng(0).normal(size=(6, 12, 18))

    pieces = split(array, placement, 3)

    np.testing.assert_array_equal(pieces, np.stack([_cut(array, placement, 3, position) for position in range(3)]))
    np.testing.assert_array_equal(merge(pieces, placement), array)


@pytest.mark.filterwarnings("ignore:divide by zero")  # of numpy; torch says nothing
def test_log_sum_exp_of_nothing_is_minus_infinity() -> None:
    mesh = Mesh.of(inner=2)
    operand = Operand("x", (3,), 0.0)
    instruction = Collective(Kind.ALL_REDUCE, mesh.axes[0], Partial("logsumexp"), Replicate(), operand, operand, 0.0)

    found = _on_mesh(mesh, instruction, [np.array([-np.inf, 0.0, 1e4]), np.array([-np.inf, -np.inf, 1e4])])

    np.testing.assert_allclose(found[0], [-np.inf, 0.0, 1e4 + np.log(2)])


# The law.


def _lowered(plan: Plan) -> Lowered:
    folded = tiny_workload(plan.model.source.removeprefix("zoo:"), plan.job.optimizer).folded(SAMPLES)
    return Lowered(lower(plan, folded, COSTS), folded)


def _check(plan: Plan, num_steps: int = 1) -> Lowered:
    """Assert that ranks compute what the model computes, and that all copies of a tensor are the same."""
    lowered = _lowered(plan)
    graph, program = lowered.graph, lowered.program
    weights = Weights(tiny_workload(plan.model.source.removeprefix("zoo:"), plan.job.optimizer), graph, 0)
    given = {state.input: weights(state.input) for state in graph.states if state.role is not Role.MOMENT}
    _, states = random_feeds(graph, 1, given)
    states = {name: np.asarray(array, graph.values[name].dtype) for name, array in states.items()}
    batches = Batches(graph, 0)
    steps = [[batches(step, index) for index in range(program.num_microbatches)] for step in range(num_steps)]
    _compare(lowered, steps, states)
    return lowered


def _compare(lowered: Lowered, steps: list[list[dict[str, Array]]], states: dict[str, Array]) -> None:
    """Assert that ranks compute what the model computes from given data and states."""
    graph, program = lowered.graph, lowered.program
    ranks = run_local(lowered, steps, states)

    for microbatches in steps:
        expected = run_unpartitioned(graph, microbatches, states)
        states = {
            **expected.states,
            **{
                state.input: np.zeros_like(states[state.input]) for state in graph.states if state.role is Role.GRADIENT
            },
        }
    wanted: dict[Any, Array] = {
        (index, name): array for index, each in enumerate(expected.outputs) for name, array in each.items()
    }
    wanted |= {name: array for name, array in expected.states.items()}
    for item in (*output_items(lowered), *gradient_items(lowered), *state_items(lowered)):
        first, last = program.stages[item.stage].devices
        blocks = [
            rank.outputs[item.key][1] if item.key in rank.outputs else rank.kept(item.tensor, item.placements)
            for rank in ranks[first:last]
        ]
        whole, apart = put_together(blocks, item.placements, program.stages[item.stage].mesh)
        scale = max(float(np.max(np.abs(wanted[item.key]))), 1e-3)
        assert apart <= TOLERANCE * scale, item
        np.testing.assert_allclose(whole, wanted[item.key], rtol=0, atol=TOLERANCE * scale, err_msg=str(item))


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in TINY if n != "gpt2")])
def test_random_plans_train_like_the_model(name: str, cache_dir: Path) -> None:
    """Loss, gradients and updated states, for random placements, stage boundaries and recompute."""
    for seed, configuration in enumerate((TWO_AXES, PIPELINE)):
        _check(tiny_plan(name, configuration, cache_dir, seed=seed))


@pytest.mark.parametrize(
    ("recipe", "offload"),
    [
        ("data+zero-1 × megatron", "parameters"),
        *(
            pytest.param(recipe, own, marks=pytest.mark.slow)
            for recipe in ("data × data", "megatron+sequence × megatron+sequence")
            for own in STATE_KINDS
        ),
    ],
)
def test_ranks_bring_their_state_from_host_memory(recipe: str, offload: str, cache_dir: Path) -> None:
    """Wherever parameters, sums and the optimizer's state lie between steps, ranks compute the same, over two steps."""
    plan = tiny_plan("gpt2", TWO_AXES, cache_dir, recipe=recipe)
    stages = tuple(replace(stage, offload=str(offload)) for stage in plan.stages)

    _check(replace(plan, stages=stages), num_steps=2)


@pytest.mark.parametrize(
    "recipe",
    [
        "data+zero-1 × megatron",
        pytest.param("data × data", marks=pytest.mark.slow),
        pytest.param("megatron+sequence × megatron+sequence", marks=pytest.mark.slow),
    ],
)
def test_recipes_train_like_the_model(recipe: str, cache_dir: Path) -> None:
    """Data parallelism, ZeRO-1, Megatron with and without sequence parallelism; two steps."""
    _check(tiny_plan("gpt2", TWO_AXES, cache_dir, recipe=recipe), num_steps=2)


@pytest.mark.parametrize(
    "schedule", ["1f1b", "zb-h1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpipe", "zb-h2"))]
)
def test_pipelines_with_tied_embeddings_train_for_several_steps(schedule: str, cache_dir: Path) -> None:
    """The last stage reads the embedding that the first one updates: its copy follows, step by step."""
    configuration = replace(PIPELINE, schedule=schedule)

    lowered = _check(
        tiny_plan("gpt2", configuration, cache_dir, recipe="megatron", recompute=Recompute.FULL), num_steps=3
    )

    assert "embed.tokens.weight" in {refresh.tensor for refresh in refreshes(lowered)}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama3-8b", marks=pytest.mark.slow)])
def test_rings_train_like_the_model(name: str, cache_dir: Path) -> None:
    """Keys and values, in llama3 of two groups of heads, and their gradients go round between two ranks, twice."""
    degrees = Degrees(dp=2, cp=2, cp_kind="ring", zero=1, microbatch=2, global_batch=8)

    lowered = _check(predict(f"zoo:{name}", degrees, dims=TINY[name], cache_dir=cache_dir).plan)

    computes = [each for own in lowered.program.segments for each in own.instructions if isinstance(each, Compute)]
    assert {each.op.kind for each in computes if each.ring} == {"autopar::RingAttention", "autopar::RingAttentionGrad"}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["padding", "documents"])
def test_rings_with_masks_train_like_the_model(form: str, cache_dir: Path) -> None:
    """Two ranks of a ring have the masks of their samples, and of these the columns of all keys."""
    graph = masked_step(4, form)
    folded = fold(graph)
    plan = masked_plan(folded, form, masked_step, cache_dir)
    data, states = random_feeds(graph, 2, {})
    typed = [{name: np.asarray(array, graph.values[name].dtype) for name, array in own.items()} for own in data]
    state = {name: np.asarray(0.1 * array, graph.values[name].dtype) for name, array in states.items()}

    lowered = Lowered(lower(plan, folded, COSTS), folded)
    _compare(lowered, [[{**own, "mask": masks(form)} for own in typed]], state)

    computes = [each for own in lowered.program.segments for each in own.instructions if isinstance(each, Compute)]
    assert {each.op.kind for each in computes if each.ring} == {
        "autopar::RingHiddenAttention", "autopar::RingMaskedAttentionGrad"
    }  # fmt: skip


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_groups_of_several_stages_train_like_the_model(schedule: str, cache_dir: Path) -> None:
    """Four stages on two groups of devices."""
    plan = tiny_plan("mlp-xs", Configuration(4, Mesh.of(inner=2), 4, "1f1b"), cache_dir, seed=3)

    _check(interleave(plan, 2, schedule), num_steps=2)


VARIANTS: dict[str, tuple[str, tuple[Mesh, ...], str]] = {
    "unequal": ("gpt2", (Mesh.of(a=2), Mesh.of(a=4)), "1f1b"),
    "of another shape": ("gpt2", (Mesh.of(a=4), Mesh.of(a=2, b=2)), "zb-h1"),
    "with other placements": ("mlp-xs", (Mesh.of(a=2), Mesh.of(a=2), Mesh.of(a=2)), "1f1b"),
    "one device and many": ("llama3-8b", (Mesh.of(a=1), Mesh.of(a=2, b=2)), "gpipe"),
    "in turns": ("mlp-xs", (Mesh.of(a=2), Mesh.of(a=1)), "interleaved"),
    "in the shape of a V": ("mlp-xs", (Mesh.of(a=2), Mesh.of(a=2, b=2)), "zb-v"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_stages_of_other_meshes_train_like_the_model(name: str, cache_dir: Path) -> None:
    """Two steps: what crosses in pieces, and copies of tied weights on another mesh that follow the update."""
    model, meshes, schedule = VARIANTS[name]
    workload = tiny_workload(model)
    plan = random_plan_of_variants(
        workload.folded(SAMPLES), tiny_rules(model, cache_dir), meshes, schedule, 4, SAMPLES, 7
    )

    lowered = _check(replace(plan, model=workload.info()), num_steps=2)

    crossing = {found.crossing is not None for found in refreshes(lowered)}
    assert crossing == ({True} if model == "gpt2" else set())
    assert lowered.program.crossings


def test_sgd_updates_like_the_model(cache_dir: Path) -> None:
    _check(tiny_plan("mlp-xs", TWO_AXES, cache_dir, optimizer="sgd"), num_steps=2)


def test_groups_are_lines_of_the_mesh(cache_dir: Path) -> None:
    """Of the devices of the stage, in the order of the axis."""
    lowered = _lowered(tiny_plan("mlp-xs", Configuration(2, Mesh.of(outer=2, inner=2), 2, "1f1b"), cache_dir))

    assert groups_of(lowered.program.stages[1], 1) == {"outer": (5, 7), "inner": (4, 5)}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [2, 3], [4, 0], [7, 9]])
def test_faster_bodies_compute_what_the_definition_says(axis: int, rows: list[int]) -> None:
    """The gradient of a gather for all rows, for a shard of them, for rows in another order, for rows of no token."""
    rng = np.random.default_rng(0)
    indices, shape = rng.integers(0, 5, (3, 4)), (2, 3)
    dy = rng.normal(size=(*shape[:axis], 3, 4, *shape[axis:])).astype(np.float32)
    inputs = {"indices": indices, "rows": np.array(rows), "dy": dy}
    kind, attrs = "autopar::GatherGrad", (("axis", axis),)
    (expected,) = Executor().run_kind(kind, attrs, list(inputs.values()), 1, 24)
    ports = [Port(name, array.shape, str(array.dtype)) for name, array in inputs.items()]
    outputs = [Port("dx", expected.shape, "float32")]
    engine = Engine(NumpyMemory())
    model = assemble([Node(kind, attrs, tuple(inputs), ("dx",))], ports, outputs, {}, 24)

    found = engine.run(engine.compile(model, ports, outputs), inputs)["dx"]

    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_models_that_cannot_be_compiled_are_said_to_be() -> None:
    """A kernel the runtime does not have."""
    engine = Engine(NumpyMemory())
    ports, outputs = [Port("x", (2,), "float32")], [Port("y", (2,), "float32")]
    model = assemble([Node("nobody::Knows", (), ("x",), ("y",))], ports, outputs, {}, 24)

    with pytest.raises(ExecutionError, match="cannot compile a part of the model"):
        engine.compile(model, ports, outputs)


# Data and weights.


@pytest.mark.parametrize("name", TINY)
def test_data_stays_within_what_the_model_knows(name: str) -> None:
    """Tokens within the vocabulary, labels within the classes; the step counts from 1; the same for the same seed."""
    graph = tiny_workload(name).folded(SAMPLES).graph
    data, again, other = Batches(graph, 3)(1, 0), Batches(graph, 3)(1, 0), Batches(graph, 4)(1, 0)

    assert data.keys() == set(graph.inputs)
    assert data[STEP] == 2
    limit = TINY[name].get("vocab") or TINY[name].get("classes") or (1000 if name == "unet-sd1" else 16)  # noise steps
    for key, array in data.items():
        assert array.shape == graph.values[key].shape
        assert str(array.dtype) == graph.values[key].dtype
        np.testing.assert_array_equal(array, again[key])
        if array.dtype.kind == "i" and array.size:
            assert 0 <= array.min() <= array.max() < limit
            assert len(np.unique(array)) > 1
    assert any(not np.array_equal(data[key], other[key]) for key in data)


def _with_weights(values: dict[str, Array], path: Path) -> None:
    """Write the tiny MLP as a file that holds its weights."""
    model = models.build("mlp-xs", **TINY["mlp-xs"])
    for tensor in model.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
    path.write_bytes(model.SerializeToString())


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    """What the file does not hold is drawn: matrices about 0, scales 1, shifts 0; moments are 0."""
    given = {"layers.0.weight": np.full((16, 16), 0.25, np.float32)}
    _with_weights(given, tmp_path / "model.onnx")
    workload = open_workload(tmp_path / "model.onnx")
    graph = workload.folded(SAMPLES).graph

    weights = Weights(workload, graph, 1)

    np.testing.assert_array_equal(weights("layers.0.weight"), given["layers.0.weight"])
    drawn = weights("layers.1.weight")
    assert drawn.dtype == np.float32
    assert 0.15 < float(drawn.std()) < 0.35, "variance 1 over 16 rows"
    np.testing.assert_array_equal(drawn, Weights(workload, graph, 1)("layers.1.weight"))
    assert not np.array_equal(drawn, Weights(workload, graph, 2)("layers.1.weight"))
    assert not weights("layers.0.weight.m").any()
    assert (weights.num_given, weights.num_drawn) == (1, 3)


def test_norms_start_as_identities(tmp_path: Path) -> None:
    """If the file has no numbers for them."""
    path = tmp_path / "model.onnx"
    path.write_bytes(models.build("gpt2", **TINY["gpt2"]).SerializeToString())
    workload = open_workload(path)
    weights = Weights(workload, workload.folded(SAMPLES).graph, 0)

    np.testing.assert_array_equal(weights("layers.0.attn_norm.weight"), np.ones(16))
    np.testing.assert_array_equal(weights("layers.0.attn_norm.bias"), np.zeros(16))
    np.testing.assert_array_equal(weights("layers.0.attn.q.bias"), np.zeros(16))


# Whole runs on threads.


def _run_threads(request: RunRequest) -> RunReport:
    """Return what rank 0 reports of a run on threads."""
    job = prepare_job(request)
    memory = NumpyMemory()

    def work(communicator: LocalCommunicator) -> RunReport | None:
        return run_rank(
            job, communicator, memory, Engine(memory), progress=silent, device="threads", release=lambda: None
        )

    report = LocalWorld(request.ranks).run(work)[0]
    assert isinstance(report, RunReport)
    return report


@pytest.fixture(scope="module")
def plan_file(cache_dir: Path) -> Path:
    """Return the file of a plan for 2 × 2 devices."""
    path = cache_dir / "plan.json"
    tiny_plan("gpt2", PIPELINE, cache_dir, recipe="solved").save(path)
    return path


def test_a_run_compares_its_first_and_its_last_step(plan_file: Path) -> None:
    """From zero moments: Adam's first step is the sign of a gradient, even of one that is zero but for rounding."""
    report = _run_threads(RunRequest(str(plan_file), 4, steps=2))

    assert report.passed
    assert [step.step for step in report.compared] == [1, 2]
    assert [each.what for each in report.compared[0].deviations] == ["loss", "gradients", "parameters"]
    assert all(step.loss is not None and abs(step.loss - np.log(24)) < 1 for step in report.compared), "random tokens"
    assert [stage.stage for stage in report.stages] == [0, 1]
    assert report.measured_seconds > 0 < report.predicted_seconds
    text = format_run(report)
    assert "equal within tolerance" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("synchronised", [False, True])
def test_a_run_that_normalises_batches_is_compared_with_one_that_has_the_same_statistics(
    synchronised: bool, cache_dir: Path, tmp_path: Path
) -> None:
    """Of each device: with accumulation over the samples of each; of the whole batch: with whole microbatches."""
    models.save(models.build("resnet50", **TINY["resnet50"]), tmp_path / "model.onnx")
    workload = open_workload(tmp_path / "model.onnx", sync_batchnorm=synchronised)
    degrees = Degrees(dp=2, microbatch=2, global_batch=8)
    Predictor(workload, cache_dir).planned(degrees, COSTS.cluster).save(tmp_path / "plan.json")

    report = _run_threads(RunRequest(str(tmp_path / "plan.json"), 2, steps=2))

    assert report.passed, report.compared
    job = prepare_job(RunRequest(str(tmp_path / "plan.json"), 2))
    assert job.parts == (1 if synchronised else 2)


def test_inference_compares_outputs(cache_dir: Path, tmp_path: Path) -> None:
    """There is nothing else."""
    workload = open_workload("zoo:mlp-xs", mode="infer", dims=TINY["mlp-xs"])
    rules = discover(workload.folded(10).graph, cache_dir=cache_dir)
    configuration = Configuration(2, Mesh.of(inner=2), 3, "forward-only")
    plan = random_plan(workload.folded(SAMPLES), rules, configuration, SAMPLES, 0, train=False)
    replace(plan, model=workload.info()).save(tmp_path / "plan.json")

    report = _run_threads(RunRequest(str(tmp_path / "plan.json"), 4, steps=2))

    assert report.passed
    assert [[each.what for each in step.deviations] for step in report.compared] == [["outputs"], ["outputs"]]


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_the_program_of_a_plan_gives_the_numbers_of_the_plan(name: str, cache_dir: Path, tmp_path: Path) -> None:
    """From the weights of the model that the text names: losses and deviations of both steps, bit for bit."""
    workload = open_workload(f"zoo:{name}", dims=TINY[name])
    plan = Predictor(workload, cache_dir).planned(Degrees(dp=2, microbatch=2, global_batch=8), COSTS.cluster)
    plan.save(tmp_path / "plan.json")
    (tmp_path / "program.txt").write_text(plan.program(cache_dir=cache_dir))

    of_plan, of_program = (
        _run_threads(RunRequest(str(tmp_path / name), 2, steps=2)) for name in ("plan.json", "program.txt")
    )

    assert of_program.passed
    assert of_program.drawn == of_plan.drawn == 0
    assert of_program.compared == of_plan.compared
    assert of_program.summary == "2 GPUs = dp=2, 2 microbatches"


def test_weights_of_a_program_without_a_model_are_drawn(plan_file: Path, tmp_path: Path) -> None:
    """And compared all the same: the text holds the graph; `model` names a file that has some."""
    text = Plan.load(plan_file).program()
    path = tmp_path / "program.txt"
    path.write_text("".join(line for line in text.splitlines(True) if not line.startswith("weights ")))
    models.save(models.build("gpt2", **TINY["gpt2"]), tmp_path / "model.onnx")
    count = len(parse_listing(path.read_text()).graph.parameters)

    drawn = _run_threads(RunRequest(str(path), 4, steps=1))
    given = _run_threads(RunRequest(str(path), 4, steps=1, model=str(tmp_path / "model.onnx")))

    assert (drawn.passed, given.passed) == (True, True)
    assert drawn.drawn == given.drawn == count  # the file of a model of the zoo has no numbers


def test_a_program_that_lost_its_graph_of_a_part_is_refused(cache_dir: Path, tmp_path: Path) -> None:
    """Where devices normalise their own samples, a step on one device computes something else."""
    workload = open_workload("zoo:resnet50", dims=TINY["resnet50"])
    plan = Predictor(workload, cache_dir).planned(Degrees(dp=2, microbatch=2, global_batch=8), COSTS.cluster)
    text = plan.program(cache_dir=cache_dir)
    (tmp_path / "program.txt").write_text(text[: text.rindex("\ngraph ") + 1])

    with pytest.raises(ProgramError, match="normalise a microbatch in 2 parts"):
        prepare_job(RunRequest(str(tmp_path / "program.txt"), 2))


def test_another_model_is_refused(plan_file: Path) -> None:
    """Its hash is not that of the plan."""
    plan = Plan.load(plan_file)

    with pytest.raises(PlanError, match="is not the model the plan was made for"):
        prepare_job(RunRequest(str(plan_file), plan.job.gpus, model="zoo:bert-base"))


def test_a_wrong_number_is_found(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that is off by a thousandth makes the verdict."""
    gather = LocalCommunicator.all_gather

    def lossy(self: LocalCommunicator, out: Array, tensor: Array, group: tuple[int, ...]) -> Any:
        handle = gather(self, out, tensor, group)
        out *= 0.999
        return handle

    monkeypatch.setattr(LocalCommunicator, "all_gather", lossy)

    report = _run_threads(RunRequest(str(plan_file), 4, steps=1))

    assert not report.passed
    assert "DIFFERENT" in format_run(report)


# Comparison.


def test_errors_are_measured_against_the_largest_element() -> None:
    """Of the tensor, but at least a thousandth of the largest of all; copies that differ count, slack is allowed."""
    expected = {"a": np.array([2.0, 0.0]), "b": np.array([1e-9])}
    found = {"a": np.array([2.0, 2e-4]), "b": np.array([1e-7])}

    plain = deviation("x", found, expected, 1e-4)

    assert (plain.absolute, plain.worst, plain.tensors) == (2e-4, "a", 2)
    assert plain.relative == pytest.approx(1e-4)
    assert not deviation("x", found, expected, 0.9e-4).passed
    assert not deviation("x", found, expected, 1.1e-4, copies={"a": 1e-4}).passed
    slack = {"a": np.array([0.0, 1e-4]), "b": np.array([0.0])}
    assert deviation("x", found, expected, 0.9e-4, slack=slack).passed
    for nothing in (np.nan, np.inf):
        broken = deviation("x", {**found, "b": np.array([nothing])}, expected, 1.0)
        assert (broken.passed, broken.absolute, broken.relative, broken.worst) == (False, None, None, "b")
    assert not deviation("x", {"a": np.array([np.nan])}, {"a": np.array([np.nan])}, 1.0).passed, "it proves nothing"


def test_copies_that_differ_are_noticed() -> None:
    mesh = Mesh.of(outer=2, inner=2)
    array = np.arange(4.0)
    blocks = [block.copy() for block in scatter(array, (Replicate(), Shard(0)), mesh)]
    blocks[3][1] += 0.5

    whole, apart = put_together(blocks, (Replicate(), Shard(0)), mesh)

    np.testing.assert_array_equal(whole, array)
    assert apart == 0.5


def test_slices_are_part_of_compute() -> None:
    """They break no piece."""
    axis = Mesh.of(inner=2).axes[0]
    x, y = Operand("x", (4,), 0.0), Operand("y", (2,), 0.0)

    steps = order([Slice(axis, Shard(0), x, y)], {"y"}, SegmentPhase.FORWARD)

    assert steps.main == (Run((Slice(axis, Shard(0), x, y),)),)
