"""Ring attention: its steps, the rule that is found, what plans with it compute, and what they cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import models
from autopar.cluster import Link, load_cluster
from autopar.context_parallelism import CONTEXT_KINDS, ContextKind
from autopar.cost import CostModel, Stack, rings
from autopar.cost.attention import attention_work
from autopar.describe.context_kinds import context_kinds, limited_rings
from autopar.discover import discover
from autopar.discover.rules import Rules, Strategy
from autopar.errors import TacticError
from autopar.execute import Executor
from autopar.execute.rings import run_ring
from autopar.folding.fold import Folded
from autopar.formulate.building import build_tables
from autopar.formulate.manual_recipes import batch_dims
from autopar.formulate.op_strategies import options
from autopar.formulate.tables import Memory, Tables
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Attr, Graph, Op, Value
from autopar.ir.rings import RINGS
from autopar.onnx import load
from autopar.plan import Job, ModelInfo, Plan
from autopar.program.records import Compute, Operand, Program, SegmentPhase, Start
from autopar.ranks.compiled_models import Engine
from autopar.ranks.rings import ring_model
from autopar.ranks.rings import run_ring as run_ranks
from autopar.sharding import Axis, Mesh, Replicate, Shard
from autopar.simulate.layout import Resource, lay_out
from autopar.simulate.liveness import lifetimes
from autopar.tactics import ContextParallel, DataParallel, Megatron, Pipeline, Recompute, Tactic
from autopar.tactics.draft import Draft
from autopar.tactics.reading import tactics_of
from autopar.training import training_step
from tests.executions import COSTS, TINY, Execution, model_graph, model_rules, random_feeds
from tests.gradients import as_float64
from tests.local_ranks import LocalCommunicator, LocalWorld, NumpyMemory
from tests.test_causal_attention import decoder
from tests.test_discover_windows import compare_runtimes

Array = NDArray[Any]
EXECUTOR = Executor()
OPSET = 24
B, H, G, S, D, F = 2, 4, 2, 12, 6, 3
"""Batch, query heads, key heads, tokens, channels of queries and keys, and of values."""


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def operands() -> list[Array]:
    """Return q, k, v and the gradient of the result."""
    return [draw(B, H, S, D), draw(B, G, S, D, seed=1), draw(B, G, S, F, seed=2), draw(B, H, S, F, seed=3)]


def in_ring(
    kind: str, attrs: Mapping[str, Attr], inputs: list[Array], devices: int, whole: tuple[int, ...] = ()
) -> list[Array]:
    """Return what devices compute that hold blocks of tokens, of `whole` inputs all, put together."""
    given = tuple(sorted(attrs.items()))

    def run(step: str, arrays: Any, num_outputs: int) -> tuple[Array, ...]:
        return EXECUTOR.run_kind(step, given, arrays, num_outputs, OPSET)

    split = [
        np.split(array, devices, axis=2) if array.ndim > 1 and index not in whole else [array] * devices
        for index, array in enumerate(inputs)
    ]
    blocks = list(zip(*split, strict=True))
    starts = [np.array(S // devices * device, np.int64) for device in range(devices)]
    ring = RINGS[f"autopar::{kind}"]
    made = run_ring(ring, blocks, starts, run, ring.steps(given, S // devices, devices))
    assert made is not None
    return [together(parts) for parts in zip(*made, strict=True)]


def together(parts: Sequence[Array]) -> Array:
    """Return the tensor of which devices have blocks of tokens, or terms if it has no tokens."""
    return np.concatenate(parts, axis=2) if parts[0].ndim > 1 else np.sum(parts, axis=0)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("attrs", [{"is_causal": 1}, {"is_causal": 0, "scale": 0.25}], ids=str)
def test_devices_in_a_ring_compute_attention_and_its_gradient(attrs: dict[str, Attr], devices: int) -> None:
    """Keys of two groups of heads; the devices before a block of keys see nothing of it if attention is causal."""
    q, k, v, dy = operands()
    (expected,) = EXECUTOR.run_kind("Attention", tuple(sorted(attrs.items())), (q, k, v), 1, OPSET)
    scaled = tuple(sorted({"scale": D**-0.5, **attrs}.items()))
    gradients = EXECUTOR.run_kind("autopar::AttentionGrad", scaled, (q, k, v, dy), 3, OPSET)

    found = in_ring("RingAttention", attrs, [q, k, v], devices)
    found += in_ring("RingAttentionGrad", dict(scaled), [q, k, v, dy], devices)

    for whole, parts in zip((expected, *gradients), found, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-12)


LIMITS: list[dict[str, Attr]] = [
    {"softcap": 0.5},
    {"window": 1},
    {"window": 4},
    {"window": 5, "softcap": 0.5},
    {"window": 100},
    {"chunk": 4},
    {"chunk": 5},
    {"window": 3, "chunk": 8},
]


@pytest.mark.parametrize("devices", [2, 3, 4, 6])
@pytest.mark.parametrize("attrs", LIMITS, ids=str)
@pytest.mark.parametrize("name", ["CausalAttention", "SinkAttention"])
def test_rings_with_windows_chunks_and_sinks_compute_the_whole(name: str, attrs: dict[str, Attr], devices: int) -> None:
    """Windows shorter than a block, as long as one and longer, chunks that begin within blocks, and logits of sinks."""
    q, k, v, dy = operands()
    sinks = [draw(H, seed=4)] if name == "SinkAttention" else []
    attrs = {"scale": 0.25, **attrs}
    given = tuple(sorted(attrs.items()))
    expected = EXECUTOR.run_kind(f"autopar::{name}", given, (q, k, v, *sinks), 1, OPSET)
    expected += EXECUTOR.run_kind(f"autopar::{name}Grad", given, (q, k, v, *sinks, dy), 3 + len(sinks), OPSET)

    found = in_ring(f"Ring{name}", attrs, [q, k, v, *sinks], devices)
    found += in_ring(f"Ring{name}Grad", attrs, [q, k, v, *sinks, dy], devices)

    for whole, parts in zip(expected, found, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-12)


def mask_of(form: str) -> Array:
    """Return a mask of truth values under which every query sees a key: its own token."""
    own = np.eye(S, dtype=bool)
    match form:
        case "padding":
            return np.asarray(np.arange(S) < np.array([S, S - 3]).reshape(B, 1, 1, 1), bool)
        case "documents":
            documents = np.array([np.arange(S) // 5, np.arange(S) // 3])
            return np.asarray(documents[:, :, None] == documents[:, None, :], bool)[:, None]
        case "tokens":
            return (draw(S, S, seed=8) > 0) | own
        case _:
            return (draw(1, H, S, S, seed=8) > 0) | own


FORMS = ("padding", "documents", "tokens", "heads")


def as_numbers(mask: Array) -> Array:
    return np.where(mask, draw(*mask.shape, seed=9), -np.inf)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_rings_with_masks_compute_the_whole(form: str, is_causal: int, devices: int) -> None:
    """Truth values or numbers; of a mask with rows for all queries a device holds its own rows, or all."""
    q, k, v, dy = operands()
    mask, attrs = mask_of(form), {"is_causal": is_causal, "scale": 0.5}
    numbers, given = as_numbers(mask), tuple(attrs.items())
    ways: list[tuple[int, ...]] = [(3,)] if form in ("padding", "tokens") else [(3,), ()]

    for way in ways:
        for kind, masking in (("Hidden", mask), ("Masked", numbers)):
            expected = EXECUTOR.run_kind("Attention", given, (q, k, v, masking), 1, OPSET)
            found = in_ring(f"Ring{kind}Attention", attrs, [q, k, v, masking], devices, way)
            np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-12)
        gradients = EXECUTOR.run_kind("autopar::MaskedAttentionGrad", given, (q, k, v, numbers, dy), 3, OPSET)
        parts = in_ring("RingMaskedAttentionGrad", attrs, [q, k, v, numbers, dy], devices, way)
        for whole, part in zip(gradients, parts, strict=True):
            np.testing.assert_allclose(part, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("attrs", "steps"),
    [({}, 6), ({"window": 1}, 1), ({"window": 2}, 2), ({"window": 3}, 2), ({"window": 4}, 3), ({"window": 99}, 6),
     ({"chunk": 2}, 1), ({"chunk": 4}, 2), ({"chunk": 5}, 3), ({"window": 2, "chunk": 8}, 2)],
)  # fmt: skip
def test_a_ring_ends_before_blocks_that_no_query_sees(attrs: dict[str, Attr], steps: int) -> None:
    """Blocks of 2 tokens on 6 devices. With chunks of 5, token 8 sees back to token 5, of the second block before."""
    assert RINGS["autopar::RingCausalAttention"].steps(tuple(attrs.items()), 2, 6) == steps


@pytest.mark.parametrize("attrs", [{}, {"window": 4}, {"window": 1}, {"chunk": 5}], ids=str)
@pytest.mark.parametrize("name", ["CausalAttention", "SinkAttention"])
def test_ranks_run_a_ring_as_one_device_runs_the_op(name: str, attrs: dict[str, Attr]) -> None:
    """Four ranks, on threads: gradients of keys go home from wherever the ring ends."""
    q, k, v, dy = operands()
    sinks = [draw(H, seed=4)] if name == "SinkAttention" else []
    given = tuple(sorted({"scale": 0.25, **attrs}.items()))
    inputs = [array.astype(np.float32) for array in (q, k, v, *sinks, dy)]
    expected = EXECUTOR.run_kind(f"autopar::{name}Grad", given, inputs, 3 + len(sinks), OPSET)

    found = on_ranks(f"autopar::Ring{name}Grad", (*given, ("size", S)), inputs, [*inputs[:3], *inputs[3:-1]], 4)

    for whole, parts in zip(expected, found, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)


def on_ranks(
    kind: str,
    attrs: tuple[tuple[str, Attr], ...],
    inputs: list[Array],
    like: list[Array],
    size: int,
    whole: tuple[int, ...] = (),
) -> list[Array]:
    """Return what ranks compute that hold blocks of tokens, put together; outputs have the shapes of `like`."""

    def operand(name: str, array: Array) -> Operand:
        is_whole = array.ndim == 1 or any(array is inputs[index] for index in whole)
        shape = array.shape if is_whole else (*array.shape[:2], array.shape[2] // size, array.shape[3])
        return Operand(name, shape, 4.0 * float(np.prod(shape)))

    names = [f"x{index}" for index in range(len(inputs))], [f"y{index}" for index in range(len(like))]
    given, made_here = (tuple(map(operand, own, arrays)) for own, arrays in zip(names, (inputs, like), strict=True))
    op = Op("core", kind, tuple(names[0]), tuple(names[1]), attrs)
    instruction = Compute(op, given, made_here, start=Start((Axis("c", size, 1),), S // size))
    memory = NumpyMemory()
    engine = Engine(memory)
    compiled = ring_model(instruction, [str(array.dtype) for array in inputs], OPSET).compile(engine)
    split = [
        np.split(array, size, axis=2) if array.ndim > 1 and index not in whole else [array] * size
        for index, array in enumerate(inputs)
    ]

    def work(communicator: LocalCommunicator) -> dict[str, Any]:
        values = {name: memory.load(parts[communicator.rank]) for name, parts in zip(names[0], split, strict=True)}
        return run_ranks(compiled, values, tuple(range(size)), communicator, memory, engine)

    made = LocalWorld(size).run(work)
    return [together([np.asarray(own[name]) for own in made]) for name in names[1]]


@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_the_columns_of_masks_for_all_keys(form: str) -> None:
    """Four ranks, on threads; the columns of the block that arrives are those of its tokens."""
    q, k, v, dy = (array.astype(np.float32) for array in operands())
    mask = mask_of(form)
    mask = mask if mask.ndim == 4 else mask[None, None]
    numbers = as_numbers(mask).astype(np.float32)
    attrs: tuple[tuple[str, Attr], ...] = (("is_causal", 1), ("scale", 0.5))
    expected = EXECUTOR.run_kind("Attention", attrs, (q, k, v, mask), 1, OPSET)
    expected += EXECUTOR.run_kind("autopar::MaskedAttentionGrad", attrs, (q, k, v, numbers, dy), 3, OPSET)
    whole = (3,) if form == "padding" else ()

    sized = (*attrs, ("size", S))
    found = on_ranks("autopar::RingHiddenAttention", sized, [q, k, v, mask], [dy], 4, whole)
    found += on_ranks("autopar::RingMaskedAttentionGrad", sized, [q, k, v, numbers, dy], [q, k, v], 4, whole)

    for wanted, parts in zip(expected, found, strict=True):
        np.testing.assert_allclose(parts, wanted, rtol=0, atol=1e-5)


def test_onnxruntime_runs_the_steps_as_we_do() -> None:
    """A block of keys that all come later than the queries, one that is seen in part, and what was merged before."""
    q, k, v, dy = (array[:, :, :4] for array in operands())
    nothing = [np.zeros((B, H, 4, F)), np.full((B, H, 4, 1), -np.inf)]
    merged = [draw(B, H, 4, F, seed=4), draw(B, H, 4, 1, seed=5)]
    sums = [draw(*array.shape, seed=6) for array in (q, k, v)]
    attrs: dict[str, Attr] = {"is_causal": 1, "size": S}

    for first, begun in ((0, nothing), (4, nothing), (4, merged)):
        starts = [np.array(4, np.int64), np.array(first if begun is merged else 8 - first, np.int64)]
        compare_runtimes("autopar::RingAttention", [q, k, v, *begun, *starts], attrs)
        compare_runtimes("autopar::RingAttentionGrad", [q, k, v, dy, *merged, *sums, *starts], attrs)


def graph_of(
    kind: str, attrs: Mapping[str, Attr], keys: int = S, mask: tuple[int, ...] = (), dtype: str = "float32"
) -> Graph:
    """Return the graph of one attention op, with a mask of some shape if it has one."""
    shapes: dict[str, tuple[int, ...]] = {"q": (B, H, S, D), "k": (B, G, keys, D), "v": (B, G, keys, F)}
    shapes |= {"mask": mask} if mask else {}
    values = {name: Value(name, shape, "float32") for name, shape in {**shapes, "y": (B, H, S, F)}.items()}
    values |= {"mask": Value("mask", mask, dtype)} if mask else {}
    op = Op("core", kind, tuple(shapes), ("y",), tuple(sorted(attrs.items())))
    return Graph("core", OPSET, values, tuple(shapes), (), {}, (op,), ("y",))


def ring_strategies(graph: Graph, cache_dir: Path) -> list[Strategy]:
    rule = discover(graph, cache_dir=cache_dir).of(graph.ops[0])
    return [each for each in rule.strategies if each.local is not None and each.local.kind in RINGS]


@pytest.mark.parametrize(
    ("kind", "attrs"),
    [
        ("Attention", {"is_causal": 1}),
        ("Attention", {"scale": 0.5}),
        ("autopar::CausalAttention", {"scale": 0.5, "window": 0}),
        ("autopar::CausalAttention", {"scale": 0.5, "window": 3}),
        ("autopar::CausalAttention", {"scale": 0.5, "chunk": 4}),
    ],
)
def test_a_ring_is_found_where_tokens_attend_to_tokens(kind: str, attrs: dict[str, Attr], cache_dir: Path) -> None:
    """Queries, keys and values are all split along the sequence, and so is the result."""
    (found,) = ring_strategies(graph_of(kind, attrs), cache_dir)

    assert found.inputs == (Shard(2),) * 3
    assert found.outputs == (Shard(2),)


@pytest.mark.parametrize(
    ("kind", "attrs", "given"),
    [
        ("autopar::CausalAttention", {"scale": 0.5}, {"keys": 2 * S}),
        ("Attention", {"softcap": 0.5}, {"mask": (S, S)}),
    ],
    ids=["decoding", "capped behind a mask"],
)
def test_no_ring_is_found_elsewhere(kind: str, attrs: dict[str, Attr], given: dict[str, Any], cache_dir: Path) -> None:
    """The last queries of a longer sequence start elsewhere; nobody has written the step of a mask with a cap."""
    assert not ring_strategies(graph_of(kind, attrs, **given), cache_dir)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize(
    ("shape", "placed"),
    [
        ((B, 1, 1, S), {Replicate()}),
        ((B, 1, S, S), {Shard(2), Replicate()}),
        ((S, S), {Replicate()}),
        ((1, H, S, S), {Shard(2), Replicate()}),
    ],
)
def test_rings_are_found_for_masks(
    shape: tuple[int, ...], placed: set[Shard | Replicate], dtype: str, cache_dir: Path
) -> None:
    """Queries, keys and values are split; of the mask the rows, where it has them as the queries do, or nothing."""
    found = ring_strategies(graph_of("Attention", {}, mask=shape, dtype=dtype), cache_dir)

    assert {own.inputs[:3] for own in found} == {(Shard(2),) * 3}
    assert {own.inputs[3] for own in found} == placed
    kind = "Hidden" if dtype == "bool" else "Masked"
    assert {own.local.kind for own in found if own.local} == {f"autopar::Ring{kind}Attention"}


def test_a_ring_is_one_axis_of_the_mesh(cache_dir: Path) -> None:
    """Beside it, another axis may split heads or samples, and not the sequence."""
    graph = graph_of("Attention", {"is_causal": 1})
    strategies = discover(graph, cache_dir=cache_dir).of(graph.ops[0]).strategies
    found = options(graph, graph.ops[0], strategies, Mesh.of(a=2, b=2), frozenset())

    ringing = [found.by_axis(index) for index in range(found.count) if found.local_kinds[index] >= 0]
    ringing = [pair for pair in ringing if any(own.local and own.local.kind in RINGS for own in pair)]

    others = [next(own for own in pair if own.local is None) for pair in ringing]
    assert {own.inputs for own in others} >= {(Replicate(),) * 3, (Shard(0),) * 3, (Shard(1),) * 3}
    assert all(own.inputs[0] != Shard(2) for own in others)


@cache
def execution(name: str) -> Execution:
    return Execution.of(name, 4, 2)


def planned(name: str, mesh: Mesh, tactics: tuple[Tactic, ...], cache_dir: Path) -> Plan:
    folded = execution(name).folded
    dims, job = batch_dims(folded.graph.values, model_graph(name, 8).values), Job("train", 8, 8, 75e9, {})
    draft = Draft(
        folded, model_rules(name, cache_dir), mesh, COSTS, model=ModelInfo("tiny", "tiny", "", 1), job=job, batch=dims,
        num_microbatches=2,
    )  # fmt: skip
    for tactic in tactics:
        draft.apply(tactic)
    return draft.plan()


def local_kinds(plan: Plan) -> set[str]:
    return {op.local.kind for block in plan.blocks for op in block.ops if op.local is not None}


@pytest.mark.parametrize(
    ("name", "mesh", "tactics"),
    [
        pytest.param(
            "llama3-8b",
            Mesh.of(d=2, c=2),
            (DataParallel("d"), ContextParallel("c"), Recompute("full")),
            marks=pytest.mark.slow,
        ),
        pytest.param("llama3-8b", Mesh.of(c=4), (ContextParallel("c"),), marks=pytest.mark.slow),
        pytest.param(
            "gpt2",
            Mesh.of(c=2, t=2),
            (ContextParallel("c"), Megatron("t"), Pipeline(2, microbatches=2)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt2", Mesh.of(r=2, u=2), (ContextParallel("r"), ContextParallel("u", "ulysses")), marks=pytest.mark.slow
        ),
    ],
    ids=["data", "alone", "tensor", "heads inside"],
)
def test_plans_with_rings_train_like_the_model(
    name: str, mesh: Mesh, tactics: tuple[Tactic, ...], cache_dir: Path
) -> None:
    """Loss, gradients and updated parameters are those of the unpartitioned model."""
    plan = planned(name, mesh, tactics, cache_dir)

    execution(name).check(plan)

    assert local_kinds(plan) >= {"autopar::RingAttention", "autopar::RingAttentionGrad"}


def masked_step(batch: int, form: str) -> Graph:
    """Return the training step of a decoder whose attention has a mask, an input: of padding, or of documents."""
    graph = load(models.build("llama3-8b", **TINY["llama3-8b"]), batch=batch)
    tokens = TINY["llama3-8b"]["seq"]
    shape = (batch, 1, 1 if form == "padding" else tokens, tokens)
    attrs = (("is_causal", 1), ("scale", 0.5))
    ops = [
        replace(op, inputs=(*op.inputs[:3], "mask"), attrs=attrs) if op.kind == "Attention" else op for op in graph.ops
    ]
    values = dict(graph.values) | {"mask": Value("mask", shape, "bool")}
    masked = replace(graph, values=values, inputs=(*graph.inputs, "mask"), ops=tuple(ops))
    return training_step(find_blocks(masked))


def masked_decoder(batch: int, form: str) -> Graph:
    """Return that step in float64."""
    return as_float64(masked_step(batch, form))


def masks(form: str) -> Array:
    """Return the masks of four samples."""
    tokens = TINY["llama3-8b"]["seq"]
    if form == "padding":
        return np.asarray(np.arange(tokens) < np.array([tokens, tokens - 1, tokens - 2, 1])[:, None, None, None], bool)
    documents = np.minimum(np.arange(tokens)[None] // np.array([[1], [2], [3], [tokens]]), 2)
    return np.asarray(documents[:, :, None] == documents[:, None, :], bool)[:, None]


def masked_plan(folded: Folded, form: str, step: Callable[[int, str], Graph], cache_dir: Path) -> Plan:
    """Return a plan of four devices with samples and sequences split."""
    dims, job = batch_dims(folded.graph.values, step(8, form).values), Job("train", 4, 8, 75e9, {})
    draft = Draft(
        folded, discover(step(10, form), cache_dir=cache_dir), Mesh.of(b=2, c=2), COSTS,
        model=ModelInfo("tiny", "tiny", "", 1), job=job, batch=dims, num_microbatches=2,
    )  # fmt: skip
    for tactic in (DataParallel("b"), ContextParallel("c")):
        draft.apply(tactic)
    return draft.plan()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["padding", "documents"])
def test_plans_with_rings_of_masked_attention_train_like_the_model(form: str, cache_dir: Path) -> None:
    """Samples are split, too: every device has the masks of its own ones, and of these the columns of all keys."""
    graph = masked_decoder(4, form)
    data, states = random_feeds(graph, 2, {})
    execution = Execution.of_graph(graph, [{**own, "mask": masks(form)} for own in data], states)
    plan = masked_plan(execution.folded, form, masked_decoder, cache_dir)

    execution.check(plan)

    assert local_kinds(plan) >= {"autopar::RingHiddenAttention", "autopar::RingMaskedAttentionGrad"}
    assert limited_rings(plan.blocks, execution.folded) > 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("ring", {"ring": 3}), pytest.param("gather", {"gather": 3}, marks=pytest.mark.slow), ("ulysses", {"ulysses": 3})],
)
def test_every_kind_of_context_parallelism_trains_like_the_model(
    kind: ContextKind, expected: dict[str, int], cache_dir: Path
) -> None:
    """Three layers; only one kind at a time."""
    plan = planned("gpt2", Mesh.of(d=2, c=2), (DataParallel("d"), ContextParallel("c", kind)), cache_dir)

    execution("gpt2").check(plan)

    assert context_kinds(plan.mesh, plan.blocks, execution("gpt2").folded) == {"d": {}, "c": expected}


def test_plans_with_each_kind_are_read_back_as_tactics(cache_dir: Path) -> None:
    """The kind is among the words that people would use."""
    for kind in CONTEXT_KINDS:
        plan = planned("gpt2", Mesh.of(c=2), (ContextParallel("c", kind),), cache_dir)
        folded, rules = execution("gpt2").folded, model_rules("gpt2", cache_dir)
        batch = batch_dims(folded.graph.values, model_graph("gpt2", 8).values)

        assert ContextParallel("c", kind) in tactics_of(plan, folded, rules, batch)


@pytest.mark.slow
def test_heads_that_an_axis_does_not_divide_are_not_exchanged(cache_dir: Path) -> None:
    """4 query heads and 2 key heads on 4 devices."""
    with pytest.raises(TacticError, match="c does not divide the heads of"):
        planned("llama3-8b", Mesh.of(c=4), (ContextParallel("c", "ulysses"),), cache_dir)


AXIS = Axis("cp", 8, 1)
LONG = Op("core", "autopar::RingAttention", ("q", "k", "v"), ("y",), (("is_causal", 1), ("size", 131072)))
SHAPES = [np.array([[1, heads, 16384, 128]]) for heads in (32, 8, 8)]
SIZES = dict.fromkeys("qkvy", 2.0)


def test_a_device_of_a_ring_computes_its_share_of_attention() -> None:
    """Of 131,072 tokens, 16,384 on each of 8 devices: an eighth of 4 S^2 / 2 products of 128 channels and 32 heads."""
    work = attention_work(LONG, SHAPES, SHAPES[:1])

    assert work.flops == 131072**2 / 8 * 2 * 32 * 128
    assert work.blocks == 8


def test_a_window_of_a_block_takes_one_transfer_and_no_merge_but_one() -> None:
    """4,096 keys of 131,072: 128 times fewer products, and two blocks of 16,384 in place of eight."""
    attrs = (("scale", 0.5), ("size", 131072), ("window", 4096))
    op = replace(LONG, kind="autopar::RingCausalAttention", attrs=attrs)

    work = attention_work(op, SHAPES, SHAPES[:1])

    assert work.blocks == 2
    assert work.attended[0] == 4096 - 4096**2 / (2 * 131072)
    assert rings.buffer_bytes(5.0, 2) == rings.all_transfers(5.0, 2) == 5.0


def test_transfers_show_where_they_take_longer_than_a_block() -> None:
    """Keys and values of 16,384 tokens and 8 heads are 67.1 MB; of 8 blocks 7 travel, each beside one of 8 kernels."""
    h100 = load_cluster("h100")
    costs = CostModel(h100)
    (kernels,) = costs.op_seconds(LONG, SHAPES, SHAPES[:1], SIZES)
    sent = rings.transfer_bytes(LONG.kind, [1e9, 2.0 * 8 * 16384 * 128, 2.0 * 8 * 16384 * 128], [1e9])
    assert sent == 67108864.0
    transfers = rings.all_transfers(costs.exchange_seconds(sent, AXIS), 8)

    assert transfers / 7 < kernels / 8
    assert rings.added_seconds(kernels, transfers, 8, costs.stack) == 0.0
    assert rings.added_seconds(kernels, 7 * kernels, 8, costs.stack) == pytest.approx(7 * kernels * 7 / 8)
    # a stack that leaves a fifth of what could overlap in sight, and makes both slower by 1.1 meanwhile
    stack = Stack("slower", scalars=(("overlap_slowdown", 1.1), ("exposed_share", 0.2)))
    assert rings.added_seconds(kernels, transfers, 8, stack) == pytest.approx(transfers * (1 - 0.9 * 0.8))


def test_gradients_of_keys_and_values_travel_with_them() -> None:
    """The gradient of the queries stays."""
    assert rings.transfer_bytes("autopar::RingAttentionGrad", [7.0, 1.0, 2.0, 7.0], [7.0, 10.0, 20.0]) == 33.0


def attention_nodes(tables: Tables) -> dict[str, int]:
    """Return the node of the first attention op of each phase, by its kind."""
    ops = [(index, tables.folded.kinds[node.kind].ops[node.position]) for index, node in enumerate(tables.nodes)]
    named = [(index, op) for index, op in ops if "Attention" in op.kind and tables.nodes[index].options is not None]
    return {op.kind: index for index, op in reversed(named)}


SLOW_LINK = replace(COSTS, cluster=replace(COSTS.cluster, intra=Link("slow", 1e6, 1e-3)))


def test_solver_and_simulator_price_a_ring_alike(cache_dir: Path) -> None:
    """Kernels, transfers that show, and the blocks of other devices a device holds meanwhile."""
    mesh = Mesh.of(c=4)
    program = execution("gpt2").program(planned("gpt2", mesh, (ContextParallel("c"),), cache_dir))

    check_prices(execution("gpt2").folded, model_rules("gpt2", cache_dir), program, mesh, {"Attention": 2})


@pytest.mark.slow
def test_solver_and_simulator_price_rings_that_end_early_alike(cache_dir: Path) -> None:
    """Tokens of four devices, one each: a window of 2 with sinks takes one transfer, chunks of 3 take two."""
    data, states = random_feeds(graph := decoder(4), 2, {})
    own, rules, mesh = Execution.of_graph(graph, data, states), discover(decoder(10), cache_dir=cache_dir), Mesh.of(c=4)
    draft = Draft(
        own.folded, rules, mesh, COSTS, model=ModelInfo("tiny", "tiny", "", 1), job=Job("train", 4, 8, 75e9, {}),
        batch=batch_dims(graph.values, decoder(8).values), num_microbatches=2,
    )  # fmt: skip
    draft.apply(ContextParallel("c"))

    steps = {"autopar::SinkAttention": 1, "autopar::CausalAttention": 2}
    check_prices(own.folded, rules, own.program(draft.plan()), mesh, steps)


def check_prices(folded: Folded, rules: Rules, program: Program, mesh: Mesh, blocks: Mapping[str, int]) -> None:
    """Compare what the tables say of rings with what the simulator makes of them.

    Args:
        folded: The graph.
        rules: Its rules.
        program: Its program on the mesh.
        mesh: One axis.
        blocks: How many blocks of other devices a device holds while it runs a kind of attention.
    """
    tables = build_tables(folded, rules, mesh, SLOW_LINK)
    for attention, count in blocks.items():
        kind = next(kind.id for kind in folded.kinds if any(op.kind == attention for op in kind.ops))
        gradient = f"autopar::{attention.removeprefix('autopar::')}Grad"
        for phase, name in ((SegmentPhase.FORWARD, attention), (SegmentPhase.BACKWARD, gradient)):
            segment = program.table()[kind, phase]
            compute = next(each for each in segment.instructions if isinstance(each, Compute) and each.ring is not None)
            only = replace(segment, instructions=(compute,))
            layout, live = lay_out(only, SLOW_LINK), lifetimes(only)
            node = attention_nodes(tables)[name]
            chosen = tables.nodes[node].options
            assert chosen is not None
            rows = range(chosen.count)
            (row,) = [row for row in rows if (local := chosen.by_axis(row)[0].local) and local.kind in RINGS]
            held = [
                each.amounts[row]
                for each in tables.bytes
                if each.node == node and each.memory is Memory.TRANSIENT and each.start == each.end - 1
            ]

            assert tables.nodes[node].seconds[row] == pytest.approx(layout.compute_seconds + layout.collective_seconds)
            assert layout.collective_seconds > 0
            assert [span.resource for span in layout.spans] == [Resource.COMPUTE, Resource.INTRA]
            assert dict(live.steps[0][1])[f"{compute.op.name}|ring"] == pytest.approx(count * compute.passed_bytes)
            assert count * compute.passed_bytes in [pytest.approx(amount) for amount in held]
