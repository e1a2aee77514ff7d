"""What the optimizers compute, keep and cost, and which of their updates devices can share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import models
from autopar.cluster import load_cluster
from autopar.configuration import Configuration
from autopar.cost import MIXED, CostModel
from autopar.degrees import Degrees
from autopar.discover import discover
from autopar.estimates import Estimator
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph, Op, Phase, Role, Value
from autopar.onnx import load
from autopar.prediction import Predictor
from autopar.program.records import Category
from autopar.sharding import Mesh, Shard
from autopar.training import OPTIMIZERS, Optimizer, training_step
from autopar.workload import open_workload
from tests.executions import EXECUTOR, TINY, Execution, model_feeds, random_feeds, random_plan, solved_plan
from tests.gradients import as_float64

Array = NDArray[np.float64]
SPACE = (Configuration(1, Mesh.of(outer=2, inner=2), 2, "1f1b"), Configuration(3, Mesh.of(inner=2), 4, "zb-h1"))


def step_of(name: str, optimizer: str, samples: int = 4) -> Graph:
    """Return the training step of a tiny model in float64."""
    return training_step(
        as_float64(find_blocks(load(models.build(name, **TINY[name]), batch=samples))), optimizer=optimizer
    )


def update(optimizer: str, *inputs: NDArray[Any]) -> list[Array]:
    """Run the update op of an optimizer."""
    method = OPTIMIZERS[optimizer]
    outputs = tuple(f"y{index}" for index in range(1 + len(method.moments)))
    names = tuple(f"x{index}" for index in range(len(inputs)))
    op = Op("op", method.kind, names, outputs, tuple(sorted(method.attrs.items())), Phase.UPDATE)
    return [np.asarray(found) for found in EXECUTOR.run(op, list(inputs), 24)]


def random(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape)


def test_lion_steps_by_the_sign_of_a_mixed_gradient() -> None:
    """M' = b2 m + (1 - b2) g and p' = p - rate sign(b1 m + (1 - b1) g)."""
    p, m, g = random(3, 4), 0.5 * random(4, 3).T, -random(3, 4)

    p_next, m_next = update("lion", p, m, g)

    np.testing.assert_allclose(m_next, 0.99 * m + 0.01 * g, rtol=1e-6)
    np.testing.assert_allclose(p_next, p - 1e-4 * np.sign(0.9 * m + 0.1 * g), rtol=1e-6)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 6, 10)], ids=str)
def test_muon_orthogonalises_its_step(shape: tuple[int, ...]) -> None:
    """All singular values of the step, over its size, come between 0.6 and 1.3; the singular vectors stay."""
    p, m, g = random(*shape), 0.3 * random(*shape), random(*shape)

    p_next, m_next = update("muon", p, m, g)

    np.testing.assert_allclose(m_next, 0.95 * m + 0.05 * g, rtol=1e-6)
    direction = (p * (1 - 1e-3 * 0.1) - p_next) / (1e-3 * 0.2 * np.sqrt(10))
    u, _, v = np.linalg.svd(0.05 * g + 0.95 * m_next, full_matrices=False)
    values = np.einsum("...ij,...ik,...kj->...k", direction, u, v)
    assert 0.6 < values.min() <= values.max() < 1.3
    np.testing.assert_allclose(np.einsum("...ik,...k,...kj->...ij", u, values, v), direction, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)], ids=str)
def test_muon_is_that_of_pytorch(shape: tuple[int, int]) -> None:
    """torch.optim.Muon iterates in bfloat16, so that singular values differ by some percent."""
    torch = pytest.importorskip("torch")
    p, m, g = random(*shape), np.zeros(shape), random(*shape)
    weight = torch.nn.Parameter(torch.tensor(p))
    weight.grad = torch.tensor(g)

    torch.optim.Muon([weight], lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()

    (found, _) = update("muon", p, m, g)
    change = p - weight.detach().numpy()
    assert np.abs(p - found - change).max() < 0.05 * np.abs(change).max()


@pytest.mark.parametrize("shape", [(8, 12), (12,), (3, 4, 6)], ids=str)
def test_adafactor_is_that_of_pytorch(shape: tuple[int, ...]) -> None:
    """Three steps in float64, with decay, small and large gradients; the parameter and all moments."""
    torch = pytest.importorskip("torch")
    method = OPTIMIZERS["adafactor"]
    value = Value("w", shape, "float64")
    if not method.takes(value, frozenset()):
        assert method.others is not None
        method = method.others
    method = replace(method, attrs={**method.attrs, "weight_decay": 0.1})
    weight = torch.nn.Parameter(torch.tensor(random(*shape)))
    optimizer = torch.optim.Adafactor([weight], eps=(2.0**-23, 1e-3), weight_decay=0.1, foreach=False)
    known = {"p": weight.detach().numpy().copy(), "length": np.sqrt(np.mean(random(*shape) ** 2))}
    known |= {moment.suffix: np.zeros(moment.of(value)[0]) for moment in method.moments if moment.suffix != "length"}

    for step, size in enumerate((1.0, 30.0, 1e-3), 1):
        gradient = size * np.random.default_rng(step).normal(size=shape)
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        known = run_update(method, value, {**known, "g": gradient, "t": np.asarray(float(step))})

        np.testing.assert_allclose(known["p"], weight.detach().numpy(), rtol=1e-6, atol=1e-8)
        for ours, theirs in (("row", "row_var"), ("column", "col_var"), ("v", "variance")):
            if ours in known:
                np.testing.assert_allclose(known[ours], optimizer.state[weight][theirs].numpy(), rtol=1e-6)


def run_update(method: Optimizer, value: Value, known: dict[str, Array]) -> dict[str, Array]:
    """Run the ops of an update; return the new parameter and moments by name."""
    states = {"p", *(moment.suffix for moment in method.moments)}
    made = dict(known)
    for part in method.update(value):
        inputs = [made[name] for name in part.reads]
        outputs = tuple(f"{out.suffix}.new" if out.suffix in states else out.suffix for out in part.makes)
        attrs = tuple(sorted(method.attributes(part, value).items()))
        op = Op("op", part.kind, tuple(f"x{index}" for index in range(len(inputs))), outputs, attrs, Phase.UPDATE)
        made |= zip(outputs, map(np.asarray, EXECUTOR.run(op, inputs, 24)), strict=True)
    return {name: made[f"{name}.new"] for name in states}


def test_muon_trains_the_matrices_of_layers_and_adamw_the_rest() -> None:
    """Embeddings, norms, biases and the head have two moments, the others one; 14 bytes in place of 18."""
    step = step_of("llama3-8b", "muon")

    kinds = {op.origin: op.kind for op in step.ops if op.phase is Phase.UPDATE}
    matrices = {name for name in kinds if name.startswith("layers.") and "norm" not in name}
    assert {name for name, kind in kinds.items() if kind == "autopar::Muon"} == matrices
    assert {kinds[name] for name in kinds.keys() - matrices} == {"autopar::Adam"}
    sizes = MIXED.graph_element_bytes(step)
    held = {
        name: sum(sizes[state.input] for state in step.states if state.owner == name)
        for name in ("layers.0.attn.q.weight", "embed.weight")
    }
    assert held == {"layers.0.attn.q.weight": 14, "embed.weight": 18}


def test_moments_in_8_bits_are_within_a_step_of_adamw() -> None:
    """The parameter is updated with exact moments of this step; what is kept of them is rounded to a step."""
    rng = np.random.default_rng(0)
    p, g = rng.normal(size=(2, 4, 512))
    m_bytes, v_bytes = rng.integers(1, 256, (4, 512), np.uint8), rng.integers(0, 256, (4, 512), np.uint8)
    m_scale, v_scale = rng.uniform(0.5, 2.0, (2, 4, 2))
    m = (m_bytes.astype(float) - 128) * np.repeat(m_scale, 256, axis=1) / 127
    v = v_bytes.astype(float) * np.repeat(v_scale, 256, axis=1) / 255

    found = update("adamw-8bit", p, m_bytes.astype(np.uint8), m_scale, v_bytes, v_scale, g, np.asarray(3.0))

    p_next, m_next, v_next = update("adamw", p, m, v, g, np.asarray(3.0))
    np.testing.assert_allclose(found[0], p_next, rtol=1e-12)
    m_units, v_units = (np.abs(own).reshape(4, 2, 256).max(axis=2) for own in (m_next, v_next))
    np.testing.assert_allclose(found[2], m_units, rtol=1e-12)
    np.testing.assert_allclose(found[4], v_units, rtol=1e-12)
    kept_m = (found[1].astype(float) - 128) * np.repeat(found[2], 256, axis=1) / 127
    kept_v = found[3].astype(float) * np.repeat(found[4], 256, axis=1) / 255
    assert (np.abs(kept_m - m_next) <= np.repeat(m_units, 256, axis=1) / 254 * (1 + 1e-9)).all()
    assert (np.abs(kept_v - v_next) <= np.repeat(v_units, 256, axis=1) / 510 * (1 + 1e-9)).all()


def test_moments_in_8_bits_take_a_byte_and_a_scale_per_256() -> None:
    """Beside 2 of parameter, 4 of gradient and 4 of master copy; small tensors and parts of blocks keep float32."""
    model = models.build("gpt2", num_layers=1, hidden=512, heads=8, seq=8, vocab=200)
    step = training_step(find_blocks(load(model, batch=2)), optimizer="adamw-8bit")

    sizes = MIXED.graph_element_bytes(step)

    def held(name: str) -> float:
        own = [state.input for state in step.states if state.owner == name]
        return sum(sizes[state] * step.values[state].size for state in own) / step.values[name].size

    assert held("layers.0.attn.q.weight") == 2 + 4 + 4 + 2 * (1 + 4 / 256)
    assert held("layers.0.attn_norm.weight") == 18


def test_partitioned_moments_in_8_bits_are_those_of_the_model(cache_dir: Path) -> None:
    """Shards of whole blocks."""
    dims: dict[str, Any] = {"num_layers": 2, "hidden": 256, "heads": 4, "seq": 4, "vocab": 24}

    def step(samples: int) -> Graph:
        forward = as_float64(find_blocks(load(models.build("gpt2", **dims), batch=samples)))
        return training_step(forward, optimizer="adamw-8bit")

    graph = step(4)
    assert sum(op.kind == "autopar::Adam8Bit" for op in graph.ops) == 13
    microbatches, states = random_feeds(graph, 2, {})
    for name in states:
        if graph.values[name].dtype == "uint8":
            states[name] = np.random.default_rng(0).integers(0, 256, graph.values[name].shape, np.uint8)
    execution = Execution.of_graph(graph, microbatches, states)

    execution.check(random_plan(execution.folded, discover(step(10), cache_dir=cache_dir), SPACE[0], 4, 0))


def test_adamw_is_adam_with_decay() -> None:
    adam, adamw = (OPTIMIZERS[name] for name in ("adam", "adamw"))

    assert (adam.kind, adam.moments, adam.counts) == (adamw.kind, adamw.moments, adamw.counts)
    assert (adam.attrs["weight_decay"], adamw.attrs["weight_decay"]) == (0.0, 0.01)


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_an_update_is_shared_as_discovery_finds(name: str, cache_dir: Path) -> None:
    """Lion works element by element; Muon needs whole matrices, and can share those of different experts."""
    for optimizer, whole in (("lion", False), ("muon", True)):
        step = step_of(name, optimizer, 10)
        rules = discover(step, cache_dir=cache_dir)
        for op in step.ops:
            if op.kind not in ("autopar::Lion", "autopar::Muon"):
                continue
            rank = len(step.values[op.origin].shape)
            found = {
                placement.dim
                for strategy in rules.by_op[op.name].strategies
                for placement in strategy.outputs[:1]
                if isinstance(placement, Shard)
            }
            assert found == (set(range(rank - 2)) if whole else set(range(rank))), op.name


@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "muon", "sgd"])
@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b"])
def test_partitioned_updates_are_those_of_the_model(name: str, optimizer: str, cache_dir: Path) -> None:
    """Random plans, and the best of a cluster on which splitting pays."""
    rules = discover(step_of(name, optimizer, 10), cache_dir=cache_dir)

    for seed, configuration in enumerate(SPACE):
        graph = step_of(name, optimizer)
        execution = Execution.of_graph(graph, *model_feeds(name, graph, configuration.num_microbatches))
        execution.check(random_plan(execution.folded, rules, configuration, 4, seed))
        if not seed:
            execution.check(solved_plan(execution.folded, rules, configuration, 4))


def test_adafactor_keeps_a_number_per_row_and_column(cache_dir: Path) -> None:
    """And one of the size of each tensor; 10 bytes per parameter, master copy included, where Adam has 18.

    A matrix split by rows sums its columns and its sizes over the devices, and nothing else.
    """
    step = step_of("llama3-8b", "adafactor")
    rules = discover(step_of("llama3-8b", "adafactor", 10), cache_dir=cache_dir)

    moments = {state.input: step.values[state.input].shape for state in step.states if state.role is Role.MOMENT}
    assert {name: moments[name] for name in moments if name.startswith("layers.0.mlp.up")} == {
        "layers.0.mlp.up.weight.row": (16, 1), "layers.0.mlp.up.weight.column": (1, 24),
        "layers.0.mlp.up.weight.length": (),
    }  # fmt: skip
    assert {name: moments[name] for name in moments if name.startswith("final_norm")} == {
        "final_norm.weight.v": (16,), "final_norm.weight.length": ()
    }  # fmt: skip
    sizes = MIXED.graph_element_bytes(step)
    assert [sizes[f"layers.0.mlp.up.weight{end}"] for end in ("", ".grad", ".row")] == [6, 4, 4]
    by_rows = {
        "layers.0.mlp.up.weight.rows.update": "S(0) -> S(0),P",
        "layers.0.mlp.up.weight.row.new.update": "S(0),S(0),R -> S(0),P",
        "layers.0.mlp.up.weight.moved.update": "S(0),S(0),R,R -> P",
        "layers.0.mlp.up.weight.update": "S(0),S(0),S(0),R,R,R,R,R -> S(0),P",
    }
    assert by_rows.keys() <= rules.by_op.keys()
    for name, strategy in by_rows.items():
        assert strategy in map(str, rules.by_op[name].strategies)


@pytest.mark.parametrize(("zero", "parameters", "gradients"), [(0, 6, 4), (1, 6, 4), (2, 6, 0.5), (3, 0.75, 0.5)])
def test_zero_shares_the_update_of_adafactor(zero: int, parameters: float, gradients: float) -> None:
    """Its moments are nothing; the master copy lies with the parameters. Estimates say so as well."""
    predictor = Predictor(open_workload("zoo:gpt2", dims=WIDE, optimizer="adafactor"))
    degrees = Degrees(dp=8, zero=zero, microbatch=2, global_batch=128)
    count = predictor.workload.folded(16).graph.num_parameters

    found = predictor.predict(degrees, load_cluster("a100"))

    (stage,) = found.program.stages
    held = {item.category: item.bytes / count for item in stage.resident}
    assert held[Category.PARAMETERS] == pytest.approx(parameters, rel=1e-3)
    assert held[Category.GRADIENTS] == pytest.approx(gradients, rel=1e-3)
    assert held[Category.OPTIMIZER] < 0.01
    (timed,) = found.timeline.stages
    assert timed.update_seconds < 4e-4 if zero else timed.update_seconds > 2e-3
    estimate = Estimator(predictor, load_cluster("a100")).estimate([degrees])
    assert estimate.step_seconds[0] == pytest.approx(found.timeline.step_seconds, rel=0.04)
    assert estimate.peak_bytes[0] == pytest.approx(found.timeline.peak_bytes, rel=0.02)


WIDE: dict[str, Any] = {"num_layers": 4, "hidden": 2048, "heads": 16, "seq": 512, "vocab": 8192}


def test_the_seconds_of_muon_are_its_products() -> None:
    """A 2048 x 8192 matrix: 5 times two products over the longer side and a square, at 700 TFLOP/s or less."""
    predictor = Predictor(open_workload("zoo:gpt2", dims=WIDE, optimizer="muon"))
    flops = 5 * 2 * sum(short * short * (2 * long + short) for short, long in 4 * [(2048, 2048)] + 2 * [(2048, 8192)])

    found = predictor.predict(Degrees(dp=1, microbatch=4, global_batch=4), load_cluster("h100"))

    (stage,) = found.timeline.stages
    peak = CostModel(load_cluster("h100")).cluster.device.peak("half")
    assert 4 * flops / peak < stage.update_seconds < 3 * 4 * flops / peak


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_zero_leaves_the_momentum_of_muon_whole(zero: int) -> None:
    """8 bytes of every matrix of a layer on each device, 12 of the rest shared; estimates say so as well."""
    predictor = Predictor(open_workload("zoo:gpt2", dims=WIDE, optimizer="muon"))
    degrees = Degrees(dp=8, zero=zero, microbatch=2, global_batch=128)
    step = predictor.workload.folded(16).graph
    matrices = sum(
        step.values[op.origin].size for op in step.ops if op.phase is Phase.UPDATE and op.kind == "autopar::Muon"
    )
    assert {state.role for state in step.states} >= {Role.MOMENT}

    found = predictor.predict(degrees, load_cluster("a100"))

    (stage,) = found.program.stages
    held = next(item.bytes for item in stage.resident if item.category is Category.OPTIMIZER)
    rest = 12 * (step.num_parameters - matrices)
    assert held == pytest.approx(8 * matrices + (rest / 8 if zero else rest), rel=1e-6)
    estimate = Estimator(predictor, load_cluster("a100")).estimate([degrees])
    assert estimate.step_seconds[0] == pytest.approx(found.timeline.step_seconds, rel=0.04)
    assert estimate.peak_bytes[0] == pytest.approx(found.timeline.peak_bytes, rel=1e-3)
