"""`autopar::CausalAttention` and `autopar::SinkAttention` against PyTorch, and against each other."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import models
from autopar.cluster import load_cluster
from autopar.configuration import Configuration
from autopar.cost import CostModel, Stack
from autopar.describe.context_kinds import limited_rings
from autopar.discover import discover
from autopar.execute import Executor
from autopar.folding.fold import fold
from autopar.folding.selective_recompute import selective_ops
from autopar.formulate.building import build_tables
from autopar.formulate.manual_recipes import batch_dims
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Attr, Graph, Role, State, Value
from autopar.ir.rings import RINGS
from autopar.onnx import load
from autopar.pins import Choices, Pins
from autopar.pins.restrict import PlacementPins
from autopar.plan import Job, ModelInfo
from autopar.sharding import Mesh, Shard, parse_placements
from autopar.tactics import ContextParallel, DataParallel, Megatron, Recompute, SequenceParallel, Tactic, ZeRO
from autopar.tactics.draft import Draft
from autopar.training import training_step
from tests.executions import COSTS, TINY, Execution, random_feeds, random_plan
from tests.gradients import as_float64
from tests.test_discover_windows import compare_runtimes

Array = NDArray[Any]
EXECUTOR = Executor()
OPSET = 24
B, H, G, S, D, F = 2, 4, 2, 9, 6, 3
"""Batch, query heads, key heads, tokens, channels of queries and keys, and of values."""


def run(kind: str, attrs: Mapping[str, Attr], *inputs: Array, num_outputs: int = 1) -> tuple[Array, ...]:
    """Return the outputs of an op of domain `autopar` whose scale is 0.25."""
    given = tuple(sorted({"scale": 0.25, **attrs}.items()))
    return EXECUTOR.run_kind(f"autopar::{kind}", given, inputs, num_outputs, OPSET)


def draw(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def operands(queries: int = S) -> tuple[Array, Array, Array]:
    """Return q, k and v, of which q has the last tokens."""
    return draw(B, H, queries, D), draw(B, G, S, D, seed=1), draw(B, G, S, F, seed=2)


SETTINGS: list[dict[str, Attr]] = [
    {},
    {"window": 1},
    {"window": 4},
    {"window": 100},
    {"chunk": 4},
    {"window": 2, "chunk": 5},
    {"softcap": 0.5},
    {"window": 3, "softcap": 0.5},
]


def reference(q: Any, k: Any, v: Any, sinks: Any, window: int = 0, chunk: int = 0, softcap: float = 0.0) -> Any:
    """Return attention as Hugging Face's eager kernels compute it: repeated key heads, a mask, sinks as a column.

    Sources: transformers 5.24, `gpt_oss.eager_attention_forward`, `gemma2.eager_attention_forward`,
    `masking_utils.sliding_window_overlay` and `chunked_overlay`.
    """
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = 0.25 * q @ k.transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(k.shape[2])
    query = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    seen = key <= query
    if window:
        seen &= key > query - window
    if chunk:
        seen &= key // chunk == query // chunk
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return torch.softmax(scores, -1)[..., : k.shape[2]] @ v


@pytest.mark.parametrize("queries", [S, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("attrs", SETTINGS, ids=str)
def test_result_and_gradients_equal_those_of_pytorch(attrs: dict[str, Any], with_sinks: bool, queries: int) -> None:
    """In float64; the queries are all tokens, or the last three as in a step of decoding."""
    torch = pytest.importorskip("torch", reason="the oracle of this test")
    inputs = [*operands(queries), *([draw(H)] if with_sinks else [])]
    dy = draw(B, H, queries, F, seed=3)
    tensors = [torch.from_numpy(array).requires_grad_() for array in inputs]
    q, k, v, sinks = tensors if with_sinks else (*tensors, None)
    expected = reference(q, k, v, sinks, **attrs)
    expected.backward(torch.from_numpy(dy))
    kind = "SinkAttention" if with_sinks else "CausalAttention"

    (y,) = run(kind, attrs, *inputs)
    gradients = run(f"{kind}Grad", attrs, *inputs, dy, num_outputs=len(inputs))

    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=0, atol=1e-12)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=0, atol=1e-12)


def test_attention_without_limits_is_the_causal_attention_of_the_standard() -> None:
    """No window, or one that reaches back to the first token."""
    q, k, v = operands()
    attrs: tuple[tuple[str, Attr], ...] = (("is_causal", 1), ("scale", 0.25))
    (expected,) = EXECUTOR.run_kind("Attention", attrs, (q, k, v), 1, OPSET)

    for window in (0, S):
        np.testing.assert_allclose(run("CausalAttention", {"window": window}, q, k, v)[0], expected, atol=1e-12)


def test_chunks_attend_each_to_itself() -> None:
    """Attention in chunks of 4 of 9 tokens is that of 4, 4 and 1 tokens."""
    q, k, v = operands()

    (whole,) = run("CausalAttention", {"chunk": 4}, q, k, v)

    for first, last in ((0, 4), (4, 8), (8, 9)):
        (part,) = run("CausalAttention", {}, *(x[:, :, first:last] for x in (q, k, v)))
        np.testing.assert_allclose(whole[:, :, first:last], part, atol=1e-12)


def test_sinks_below_all_scores_change_nothing_and_those_above_leave_nothing() -> None:
    """A sink of weight 0 in the softmax, and one of weight 1, whose value is 0."""
    q, k, v = operands()

    (plain,) = run("CausalAttention", {"window": 3}, q, k, v)
    (low,) = run("SinkAttention", {"window": 3}, q, k, v, np.full(H, -np.inf))
    (high,) = run("SinkAttention", {"window": 3}, q, k, v, np.full(H, 1e4))

    np.testing.assert_allclose(low, plain, atol=1e-12)
    assert not high.any()


@pytest.mark.parametrize("kind", ["CausalAttention", "SinkAttention"])
def test_onnxruntime_runs_the_bodies_as_we_do(kind: str) -> None:
    """Whole, for some queries and for some query heads, and their gradients."""
    q, k, v = operands()
    sinks = [draw(H)] if kind == "SinkAttention" else []
    dy, attrs = draw(B, H, S, F, seed=3), {"scale": 0.25, "window": 4, "chunk": 6, "softcap": 2.0}
    start = np.array(3, np.int64)

    for grad in ("", "Grad"):
        given = [dy] if grad else []
        compare_runtimes(f"autopar::{kind}{grad}", [q, k, v, *sinks, *given], attrs)
        rows = [x[:, :, 3:6] for x in (q, *given)]
        compare_runtimes(f"autopar::{kind}{grad}Part", [rows[0], k, v, *sinks, *rows[1:], start], {**attrs, "size": S})
        heads = [x[:, 3:4] for x in (q, *given)]
        compare_runtimes(
            f"autopar::{kind}{grad}HeadsPart", [heads[0], k, v, *sinks, *heads[1:], start], {**attrs, "size": H}
        )


def decoder(batch: int) -> Graph:
    """Return the training step of a decoder whose layers take turns: a window and sinks, then chunks and a soft cap.

    It has 4 query heads and 2 key heads.
    """
    graph = load(models.build("llama3-8b", **TINY["llama3-8b"]), batch=batch)
    values, states, ops = dict(graph.values), list(graph.states), []
    for op in graph.ops:
        if op.kind == "Attention":
            if len(states) == len(graph.states):
                values["sinks"] = Value("sinks", (4,), "float32")
                states.append(State("sinks", "sinks", Role.PARAMETER, "sinks"))
                own = "autopar::SinkAttention", (*op.inputs[:3], "sinks"), (("scale", 0.5), ("window", 2))
                op = replace(op, kind=own[0], inputs=own[1], attrs=own[2])
            else:
                attrs = (("chunk", 3), ("scale", 0.5), ("softcap", 2.0))
                op = replace(op, kind="autopar::CausalAttention", inputs=op.inputs[:3], attrs=attrs)
        ops.append(op)
    changed = replace(graph, values=values, states=tuple(states), ops=tuple(ops))
    return training_step(as_float64(find_blocks(changed)))


def test_plans_train_like_the_model(cache_dir: Path) -> None:
    """Random plans, among which are some that split the queries and some that split query heads above key heads."""
    rules = discover(decoder(10), cache_dir=cache_dir)
    used = set()

    for mesh in (Mesh.of(inner=4), Mesh.of(outer=2, inner=2)):
        data, states = random_feeds(graph := decoder(4), 2, {})
        execution = Execution.of_graph(graph, data, states, steps=2)
        for seed in range(6):
            plan = random_plan(execution.folded, rules, Configuration(1, mesh, 2, "1f1b"), 4, seed)
            execution.check(plan)
            used |= {op.local.kind for block in plan.blocks for op in block.ops if op.local is not None}

    assert {f"autopar::{kind}Attention{part}" for kind in ("Causal", "Sink") for part in ("Part", "HeadsPart")} <= used
    assert {f"autopar::{kind}AttentionGradPart" for kind in ("Causal", "Sink")} <= used


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    "tactics",
    [
        (DataParallel("b"), Megatron("m"), SequenceParallel("m"), ZeRO(2, "b")),
        (DataParallel("b"), Megatron("m"), Recompute("full")),
        (DataParallel("b"), ContextParallel("m")),
    ],
    ids=["sequence", "tensor", "context"],
)
def test_tactics_train_like_the_model(tactics: tuple[Tactic, ...], devices: int, cache_dir: Path) -> None:
    """On 4 devices the heads are more than the 2 key heads; attention is sharded in every block."""
    data, states = random_feeds(graph := decoder(4), 2, {})
    execution = Execution.of_graph(graph, data, states)
    dims, job = batch_dims(graph.values, decoder(8).values), Job("train", 2 * devices, 8, 75e9, {})
    rules, mesh = discover(decoder(10), cache_dir=cache_dir), Mesh.of(b=2, m=devices)
    draft = Draft(
        execution.folded, rules, mesh, COSTS, model=ModelInfo("tiny", "tiny", "", 1), job=job, batch=dims,
        num_microbatches=2,
    )  # fmt: skip

    for tactic in tactics:
        draft.apply(tactic)
    plan = draft.plan()

    execution.check(plan)
    cores = [op for block in plan.blocks for op in block.ops if op.op.endswith(".core")]
    dim = 2 if isinstance(tactics[1], ContextParallel) else 1
    assert len(cores) == 2
    assert {parse_placements(core.inputs[0])[1] for core in cores} == {Shard(dim)}
    rings = {core.local.kind for core in cores if core.local is not None and core.local.kind in RINGS}
    assert rings == ({"autopar::RingCausalAttention", "autopar::RingSinkAttention"} if dim == 2 else set())
    assert limited_rings(plan.blocks, execution.folded) == len(rings)


@pytest.mark.parametrize(
    ("forbidden", "rings"),
    [
        ((), {"CausalAttention", "SinkAttention"}),
        (("ring",), set()),
        (("ring:window",), {"CausalAttention"}),
        (("ring:sinks",), {"CausalAttention"}),
        (("ring:chunk",), {"SinkAttention"}),
        (("gather:window", "gather:sinks"), {"CausalAttention", "SinkAttention"}),
    ],
)
def test_forbidden_kinds_of_context_parallelism_are_no_options(
    forbidden: tuple[str, ...], rings: set[str], cache_dir: Path
) -> None:
    """Of the attention they are about, forward and backward: a window and sinks in one layer, chunks in the other."""
    folded, mesh = fold(decoder(4)), Mesh.of(cp=2)
    rules = discover(decoder(10), cache_dir=cache_dir)
    batch = batch_dims(decoder(4).values, decoder(8).values)
    restriction = PlacementPins(Pins(forbid=Choices(context=forbidden)), lambda _: batch)(folded, rules, mesh)

    tables = build_tables(folded, rules, mesh, COSTS, restriction)

    found, others = set[str](), set[str]()
    for node in tables.nodes:
        if node.options is None or "Attention" not in folded.kinds[node.kind].ops[node.position].kind:
            continue
        kind = folded.kinds[node.kind].ops[node.position].kind.removeprefix("autopar::").removesuffix("Grad")
        options = node.options
        local = {options.on_one_axis[index].local for index in options.local_kinds.tolist() if index >= 0}
        (found if any(own is not None and own.kind in RINGS for own in local) else others).add(kind)
    assert found == rings
    assert others == {"CausalAttention", "SinkAttention"} - rings


def test_selective_recompute_drops_the_scores_of_unfused_attention() -> None:
    """Also those of attention with sinks, a parameter that is in no product."""
    folded = fold(decoder(4))

    chosen = selective_ops(folded, CostModel(load_cluster("a100"), stack=Stack("unfused", attention="unfused")))

    kinds = {kind.ops[n].kind for kind, ops in zip(folded.kinds, chosen, strict=True) for n in ops}
    assert {"autopar::CausalAttention", "autopar::SinkAttention"} <= kinds
