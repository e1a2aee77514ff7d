"""Steps that train a part of the parameters: what frozen ones cost, where they lie, and that nothing else changes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from autopar import models
from autopar.api import plan_task
from autopar.bounds.saved_values import main_kind, resident_states
from autopar.cluster import load_cluster
from autopar.configuration import Configuration
from autopar.cost import CostModel, load_policy
from autopar.cost.collectives import Collective as CollectiveKind
from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.estimates import Estimator
from autopar.formulate.block_memory import RESIDENT
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.mean_memory import mean_bytes
from autopar.formulate.step_time import Pipeline, Split, StepTime, step_time
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Phase, Role
from autopar.onnx import load
from autopar.onnx.roles import FROZEN_KEY
from autopar.pins import pins_from
from autopar.pins.plan_check import broken
from autopar.prediction import Prediction, Predictor
from autopar.program.lower import lower
from autopar.program.records import Category, Collective, SegmentPhase
from autopar.recompute import Recompute
from autopar.request import JobRequest
from autopar.search.candidate import Candidate
from autopar.sharding import Mesh
from autopar.simulate import simulate
from autopar.simulate.hops import hops
from autopar.tactics.stages import even_blocks, layers
from autopar.task import Effort, Task, pinned, prepare
from autopar.training import training_step
from autopar.workload import Workload, open_workload
from tests.executions import TINY, Execution, model_feeds, random_plan, solved_plan, written
from tests.formulations import optimum
from tests.gradients import as_float64

WIDE = {"num_layers": 4, "hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192}
"""As wide as what the formula is compared on where everything is trained."""

SPACE = (
    Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b"),
    Configuration(2, Mesh.of(inner=4), 1, "gpipe"),
    Configuration(3, Mesh.of(inner=2), 4, "zb-h1"),
)

Choice = Callable[[str], bool]


def is_matrix(name: str) -> bool:
    """Whether a parameter of the zoo's GPT is neither of a norm nor a bias."""
    return "norm" not in name and not name.endswith(".bias")


def is_early(name: str) -> bool:
    """Whether a parameter of the zoo's GPT lies before its last layer."""
    return name.startswith(("embed.", "layers.0.", "layers.1."))


def frozen_file(path: Path, is_frozen: Choice, **dims: Any) -> Path:
    """Write a model of the zoo with some of its parameters frozen, as `from_torch` notes it."""
    model = models.build("gpt2", **dims)
    for tensor in model.graph.initializer:
        if is_frozen(tensor.name):
            tensor.metadata_props.add(key=FROZEN_KEY, value="1")
    models.save(model, path)
    return path


def frozen_step(samples: int, is_frozen: Choice) -> Graph:
    """Return the training step of a tiny GPT in float64."""
    model = models.build("gpt2", **TINY["gpt2"])
    for tensor in model.graph.initializer:
        if is_frozen(tensor.name):
            tensor.metadata_props.add(key=FROZEN_KEY, value="1")
    return training_step(as_float64(find_blocks(load(model, batch=samples))))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """A GPT of which norms and biases are trained."""
    return open_workload(frozen_file(tmp_path_factory.mktemp("wide") / "wide.onnx", is_matrix, **WIDE))


@pytest.fixture(scope="module")
def predictor(wide: Workload) -> Predictor:
    """Predictions for it."""
    return Predictor(wide)


@cache
def _counts(predictor: Predictor) -> tuple[int, int]:
    """Return the elements of all parameters, and of the trained ones."""
    graph = predictor.workload.folded(16).graph
    trained = {state.owner for state in graph.states if state.role is Role.GRADIENT}
    return graph.num_parameters, sum(value.size for value in graph.parameters if value.name in trained)


def _predict(predictor: Predictor, zero: int, precision: str = "mixed") -> Prediction:
    degrees = Degrees(dp=4, zero=zero, microbatch=4, global_batch=32)
    return predictor.predict(degrees, load_cluster("h100"), policy=load_policy(precision))


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"), [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 4, 4), (3, 4, 4, 4)]
)
def test_a_frozen_parameter_takes_its_own_bytes_only(
    predictor: Predictor, zero: int, parameters: int, gradients: int, optimizer: int
) -> None:
    """2 bytes of all parameters; 4 of gradient and 12 of optimizer state of the trained ones, each over its devices."""
    count, trained = _counts(predictor)
    assert 0 < trained < count / 100

    (stage,) = _predict(predictor, zero).program.stages

    held = {category: 0.0 for category in Category}
    for item in stage.resident:
        held[item.category] += item.bytes
    assert held[Category.PARAMETERS] == pytest.approx(2 * count / parameters, rel=1e-9)
    assert held[Category.GRADIENTS] == pytest.approx(4 * trained / gradients, rel=1e-9)
    assert held[Category.OPTIMIZER] == pytest.approx(12 * trained / optimizer, rel=1e-9)


def test_frozen_shards_are_kept_in_the_precision_they_are_read_in(predictor: Predictor) -> None:
    """FSDP keeps float32 shards of what the optimizer updates; nothing updates these."""
    count, trained = _counts(predictor)

    (stage,) = _predict(predictor, 0, "fsdp").program.stages

    held = sum(item.bytes for item in stage.resident if item.category is Category.PARAMETERS)
    assert held == pytest.approx(2 * (count - trained) + 4 * trained)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_no_gradient_of_a_frozen_parameter_is_reduced(predictor: Predictor, zero: int) -> None:
    """What devices reduce in one step is 4 bytes of every trained parameter, per microbatch where sums are sharded."""
    _, trained = _counts(predictor)

    found = _predict(predictor, zero)

    (stage,) = found.program.stages
    kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
    reduced = sum(
        part.bytes * stage.blocks.count(segment.kind) * (2 if segment.phase is SegmentPhase.BACKWARD else 1)
        for segment in found.program.segments
        for part in segment.instructions
        if isinstance(part, Collective) and part.kind in kinds
    )
    assert reduced == pytest.approx(4 * trained * (2 if zero > 1 else 1), rel=1e-6)


@pytest.mark.parametrize("is_frozen", [is_matrix, is_early], ids=["matrices", "early layers"])
def test_random_plans_train_the_rest_like_the_model(is_frozen: Choice, cache_dir: Path) -> None:
    """Loss, gradients and states are those of the unpartitioned step; frozen parameters are as they were."""
    rules = discover(frozen_step(10, is_frozen), cache_dir=cache_dir)

    for seed, configuration in enumerate(SPACE):
        graph = frozen_step(4, is_frozen)
        execution = Execution.of_graph(graph, *model_feeds("gpt2", graph, configuration.num_microbatches))
        execution.check(random_plan(execution.folded, rules, configuration, 4, seed))
        frozen = [value.name for value in graph.parameters if is_frozen(value.name)]
        assert frozen
        assert all(np.array_equal(execution.expected[0].states[name], execution.states[name]) for name in frozen)


def test_a_solved_plan_trains_the_rest_like_the_model(cache_dir: Path) -> None:
    """The best plan of a cluster on which splitting pays."""
    graph = frozen_step(4, is_matrix)
    execution = Execution.of_graph(graph, *model_feeds("gpt2", graph, 2))

    execution.check(
        solved_plan(execution.folded, discover(frozen_step(10, is_matrix), cache_dir=cache_dir), SPACE[0], 4)
    )


def test_the_backward_ends_where_nothing_before_it_is_trained() -> None:
    """A model whose first layers are frozen: they have no backward, and keep nothing for one."""
    graph = frozen_step(4, is_early)

    last = next(op.block for op in graph.ops if "layers.2.attn_norm.weight" in op.inputs)
    assert {op.block for op in graph.ops if op.phase is Phase.BACKWARD} == set(range(last, graph.num_blocks))


ZEROS = ({"pin": {"zero": 3, "dp": 4}}, {"forbid": {"zero": 3}}, {"pin": {"zero": [0, 1], "dp": 4}})


@cache
def _task(path: Path) -> Task:
    return prepare(JobRequest(path, gpus=4, global_batch=16))


@pytest.mark.parametrize("content", ZEROS, ids=str)
def test_frozen_parameters_follow_pins_of_zero(
    content: dict[str, dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """ZeRO-3 shards them, lower levels leave them whole; a plan under the opposite pin is seen to break the pin."""
    folder = tmp_path_factory.getbasetemp() / "pins"
    folder.mkdir(exist_ok=True)
    task = _task(frozen_file(folder / "tiny.onnx", is_matrix, **TINY["gpt2"]))
    opposite = ZEROS[1] if content is ZEROS[0] else ZEROS[0]

    plan, other = (plan_task(pinned(task, pins_from(pins)), Effort(top_k=1)) for pins in (content, opposite))

    folded = task.workload.folded(plan.microbatch)
    stored = {state.value: state.placement for block in plan.blocks for state in block.states if is_matrix(state.value)}
    if "pin" in content:
        assert all(("S" in text) == (content is ZEROS[0]) for text in stored.values())
    assert broken(plan, pins_from(content), folded) == ()
    assert broken(other, pins_from(content), task.workload.folded(other.microbatch)) != ()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("dp", "tp", "pp"), [(4, 1, 1), (2, 2, 1), (4, 2, 2)])
def test_estimates_of_a_part_are_close_to_predictions(
    predictor: Predictor, dp: int, tp: int, pp: int, zero: int
) -> None:
    """Seconds within 4 %, bytes within 0.3 %, as of steps that train everything."""
    recompute = "full" if zero == 1 else "none"
    degrees = Degrees(dp=dp, tp=tp, pp=pp, zero=zero, recompute=recompute, microbatch=2, global_batch=2 * dp * 8)
    cluster = load_cluster("a100")

    found = Estimator(predictor, cluster).estimate([degrees])

    timeline = predictor.predict(degrees, cluster).timeline
    assert found.step_seconds[0] == pytest.approx(timeline.step_seconds, rel=0.04)
    assert found.peak_bytes[0] == pytest.approx(timeline.peak_bytes, rel=0.003)


@pytest.mark.parametrize("price", [0.0, 1e-10])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (1, 4), (2, 8)])
def test_the_formula_agrees_with_the_simulator(
    wide: Workload, num_stages: int, num_microbatches: int, price: float
) -> None:
    """Within 4 % on the best choice of a linear objective; with a price on bytes it shards frozen parameters."""
    h100 = load_cluster("h100")
    costs = CostModel(replace(h100, devices_per_node=2, inter=replace(h100.inter, nics=None)))
    mesh = Mesh.of(outer=4, inner=2)
    tables = build_tables(wide.folded(64), wide.rules(), mesh, costs)
    pipeline = Pipeline(num_stages, num_microbatches, "1f1b")
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.3, bounding=False, traffic=None)
    mean = mean_bytes(tables, pipeline, costs.cluster.device.memory, [Recompute.NONE] * len(tables.folded.kinds))
    _, choice = optimum(mean.priced(problem(tables, weighting), tables, price))
    size = tables.folded.num_blocks // num_stages
    ranges = tuple((number * size, (number + 1) * size) for number in range(num_stages))
    split = Split.uniform(ranges, (Recompute.NONE,) * num_stages)
    nothing = StepTime(0.0, 0.0, 0.0, np.zeros(num_stages))
    candidate = Candidate(Configuration(num_stages, mesh, num_microbatches, "1f1b"), tables, choice, split, nothing)
    program = lower(written(candidate, 64 * num_microbatches, True), tables.folded, costs)
    directions = [direction.seconds for hop in hops(program, costs) for direction in (hop.forward, hop.backward)]

    time = step_time(
        tables.block_seconds(choice), tables.folded.chain, pipeline, split, fmean(directions) if directions else 0.0
    )

    assert time.seconds == pytest.approx(simulate(program, costs).step_seconds, rel=0.04)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_the_memory_bound_counts_frozen_parameters(wide: Workload, shape: tuple[int, ...]) -> None:
    """Of a block of the most frequent kind: no placement holds less, and copies hold all of the bound."""
    mesh = Mesh.of(**dict(zip(("outer", "inner"), shape, strict=False)))
    costs = CostModel(load_cluster("h100"))
    tables = build_tables(wide.folded(16), wide.rules(), mesh, costs)
    main = main_kind(tables.folded)

    said = resident_states(tables.folded, costs, offload=False)

    items = [item for item in tables.bytes if item.kind == main.id and item.memory in RESIDENT]
    assert sum(memory.least(mesh.shape) for memory in said) <= sum(float(item.amounts.min()) for item in items) * (
        1 + 1e-9
    )
    assert sum(memory.bytes for memory in said) == pytest.approx(sum(float(item.amounts.max()) for item in items))


def test_a_layer_without_a_gradient_of_its_input_is_a_layer(wide: Workload) -> None:
    """Nothing before the first trained parameter gets a gradient, so that the first layer has a shorter backward."""
    folded = wide.folded(16)

    assert folded.chain[1] != folded.chain[2]
    assert layers(folded) == [1, 2, 3, 4]
    assert even_blocks(folded, 2) == (3, 3)
