"""What tactics make computes what the unpartitioned model computes."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.formulate.manual_recipes import batch_dims
from autopar.plan import Job, ModelInfo
from autopar.sharding import Mesh, parse_placements
from autopar.sharding import Replicate as Whole
from autopar.sharding import Shard as Sharded
from autopar.tactics import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Megatron,
    Pipeline,
    Recompute,
    Replicate,
    SequenceParallel,
    Shard,
    Tactic,
    ZeRO,
)
from autopar.tactics.draft import Draft
from autopar.workload import Workload
from tests.executions import COSTS, Execution, model_graph, model_rules, random_feeds
from tests.gradients import as_float64
from tests.shares import one_in
from tests.tactic_models import decode_step, decoder, draft, graph_network, unet

D, M, S, P = DataParallel("b"), Megatron("m"), SequenceParallel("m"), Pipeline(2, microbatches=2)
SCHEDULES: dict[str, Sequence[Tactic]] = {
    "data": (D,),
    "tensor": (M,),
    "data, tensor, zero-1, pipeline": (D, M, ZeRO(1, "b"), P),
    "data, tensor, zero-3, recompute": (D, M, ZeRO(3, "b"), Recompute("full")),
    "vocabulary, sequence, zero-2, pipeline": (D, Megatron("m", vocabulary=True), S, ZeRO(2, "b"), P),
    "zero-3 first": (ZeRO(3, "b"), D, M),
    "zero over both": (D, M, ZeRO(3, "b"), ZeRO(3, "m")),
    "context": (D, ContextParallel("m"), P),
    "experts": (D, ExpertParallel("m"), P),
    "experts of whole tokens": (D, ExpertParallel("m", batch=False), P),
    "experts, whole ones over tensor": (ExpertParallel("b"), ExpertParallel("m", batch=False), M, P),
    "experts, whole ones over tensor and sequence": (ExpertParallel("b"), ExpertParallel("m", batch=False), M, S),
    "everything by rows": (Shard({lambda value: len(value.shape) > 0: 0}, "m"), D),
    "pinned": (Replicate(lambda value: len(value.shape) == 1), D, M),
}
FAMILIES = ("gpt2", "llama3-8b", "bert-base", "vit-b16", "mixtral-8x7b", "mlp-xs", "resnet50", "qwen3-30b-a3b")
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b")
WITHOUT_PAIRS = ("resnet50",)  # convolutions
WITHOUT_SEQUENCE = ("mlp-xs", "resnet50")
TENSOR = tuple(name for name, schedule in SCHEDULES.items() if any(isinstance(tactic, Megatron) for tactic in schedule))
SEQUENCE = tuple(name for name, schedule in SCHEDULES.items() if S in schedule)


MESH = Mesh.of(b=2, m=2)


@cache
def _execution(name: str) -> Execution:
    return Execution.of(name, 4, 2)


def _draft(name: str, cache_dir: Path, mesh: Mesh = MESH) -> Draft:
    folded = _execution(name).folded
    dims = batch_dims(folded.graph.values, model_graph(name, 8).values)
    job, model = Job("train", 8, 8, 75e9, {}), ModelInfo(name, name, "", 1)
    rules = model_rules(name, cache_dir)
    return Draft(folded, rules, mesh, COSTS, model=model, job=job, batch=dims, num_microbatches=2)


def _cases() -> list[tuple[str, str]]:
    cases = []
    for name in FAMILIES:
        for schedule in SCHEDULES:
            if name in WITHOUT_PAIRS and schedule in TENSOR:
                continue
            if name in WITHOUT_SEQUENCE and schedule in SEQUENCE:
                continue
            if name in EXPERTS and schedule == "zero-3 first":
                continue  # experts split along rows by ZeRO leave no pair of products whole
            if schedule.startswith("experts") and name not in EXPERTS:
                continue
            if schedule == "context" and name in (*WITHOUT_SEQUENCE, "vit-b16"):
                continue
            cases.append((name, schedule))
    return cases


@pytest.mark.parametrize(("name", "schedule"), one_in(2, _cases(), unpacked=True))
def test_partitioned_equals_unpartitioned(name: str, schedule: str, cache_dir: Path) -> None:
    found = _draft(name, cache_dir)
    for tactic in SCHEDULES[schedule]:
        found.apply(tactic)

    assert _execution(name).check(found.plan()) <= 1e-9


@pytest.mark.parametrize(
    "schedule",
    ["tensor", "data, tensor, zero-3, recompute", "vocabulary, sequence, zero-2, pipeline", "zero over both"],
)
@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_more_devices_than_key_heads_equal_unpartitioned(name: str, schedule: str, cache_dir: Path) -> None:
    """4 query heads lie on 4 devices; 2 key heads and the matrices that make them are copied."""
    found = _draft(name, cache_dir, Mesh.of(b=2, m=4))
    for tactic in SCHEDULES[schedule]:
        found.apply(tactic)
    plan = found.plan()

    core = next(op for block in plan.blocks for op in block.ops if op.op.endswith(".core"))
    assert [parse_placements(text)[1] for text in core.inputs] == [Sharded(1), Whole(), Whole()]
    assert _execution(name).check(plan) <= 1e-9


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(FAMILIES))
def test_any_shards_equal_unpartitioned(data: st.DataObject, name: str, cache_dir: Path) -> None:
    found = _draft(name, cache_dir)
    values = [value for value in found.folded.graph.values.values() if value.shape and value.name in _speakable(found)]
    for _ in range(data.draw(st.integers(1, 6))):
        value = data.draw(st.sampled_from(values))
        dim = data.draw(st.integers(0, len(value.shape) - 1))
        pattern = data.draw(st.sampled_from(["split", "pin"]))
        axis = data.draw(st.sampled_from("bm"))
        alike = _speakable(found)[value.name]
        names = {name for name, other in _speakable(found).items() if other == alike}
        speaks = lambda other, names=names: other.name in names  # noqa: E731
        if pattern == "pin":
            found.apply(Replicate(speaks, axis))
        elif found.state.divides(alike, dim, "bm".index(axis)):
            found.apply(Shard({speaks: dim}, axis))
    if data.draw(st.booleans()):
        found.apply(P)

    assert _execution(name).check(found.plan()) <= 1e-9


E = Shard({"edges": 1, "senders": 1, "receivers": 1}, "m")
Q = (Replicate("*.new_*", "m"), Shard({"*.wq": 2, "*.scores": 0, "*.attended": 0, "*.merged": 2}, "m"))


@pytest.mark.parametrize(
    ("workload", "schedule"),
    [
        (decoder(2), (D, M, ZeRO(3, "b"), Shard({"embed": 1}, "m"))),
        (decoder(2, norm="rms"), (D, M, ZeRO(3, "b"), Shard({"embed": 1}, "m"))),
        (unet(2), (D, ZeRO(2, "b", min_dims=1))),
        (unet(2), (D, ZeRO(3, "b"), Shard({"*.wide": 1, "stem": 1}, "m"))),
        (graph_network(3), (E,)),
        (graph_network(3), (E, D, ZeRO(3, "m"))),
        (decode_step(2), (D, *Q, M)),
    ],
)
def test_other_families(workload: Workload, schedule: Sequence[Tactic], cache_dir: Path) -> None:
    folded = workload.folded(16)
    found = draft(workload, Mesh.of(b=2, m=2), 16, cache_dir)
    for tactic in schedule:
        found.apply(tactic)
    graph = as_float64(folded.graph)
    data, states = random_feeds(graph, 1, {})

    assert Execution.of_graph(graph, data, states).check(found.plan()) <= 1e-9


def _speakable(draft: Draft) -> Mapping[str, str]:
    return draft.applier.representatives
