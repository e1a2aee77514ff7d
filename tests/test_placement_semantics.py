"""Meaning of placements: the reduction of a partial value, the chunks of a sharded dim."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.configuration import Configuration
from autopar.discover import Rule, Rules, Strategy, discover
from autopar.folding.fold import fold
from autopar.formulate.building import build_tables
from autopar.formulate.manual_recipes import batch_dims, recipes, restrict
from autopar.formulate.op_strategies import is_partial
from autopar.formulate.placement_semantics import PlacementSemantics, meaning
from autopar.formulate.step_time import Split
from autopar.formulate.tables import Decision
from autopar.ir.graph import Graph, Op
from autopar.program.records import Collective, Compute, SegmentPhase, Slice
from autopar.recompute import Recompute
from autopar.sharding import Mesh, Partial, Shard, parse_placement
from tests.executions import QUICK_MEMORY, Execution, model_graph, model_rules, written
from tests.fused_models import fused_gpt, vocabulary_loss
from tests.pinned_plans import best_candidate, execution, op_placements, pinned, pinned_plan, plan_of
from tests.random_graphs import Writer

HEAD_TERM = "logits.weight.vjp.0"
"""The term that the head of GPT-2 adds to the gradient of its shared embedding."""


def strategy(text: str, *, cyclic: bool = False) -> Strategy:
    """Return the strategy written like "S(0),R->S(0)"."""
    inputs, outputs = (tuple(map(parse_placement, side.split(","))) for side in text.split("->"))
    return Strategy(inputs, outputs, cyclic=cyclic)


def means(graph: Graph, offered: Mapping[str, Iterable[Strategy]]) -> PlacementSemantics:
    """Return the meaning of placements if ops have the offered strategies and replication only."""

    def rule(op: Op) -> Rule:
        whole = strategy(",".join("R" * len(op.inputs)) + "->" + ",".join("R" * len(op.outputs)))
        return Rule(op.kind, (whole, *offered.get(op.name, ())), op.name, (), (), 0)

    return meaning(fold(graph), Rules({op.name: rule(op) for op in graph.ops}, 0, 0, 0.0))


def texts(found: PlacementSemantics, name: str) -> set[str]:
    """Return the strategies of an op as text, without replication."""
    op = next(op for op in found.folded.graph.ops if op.name == name)
    return {str(item) for item in found.strategies(op) if not item.is_replicate}


def chain(*kinds: str) -> Graph:
    """Return a chain of ops with one input on a product with a parameter; op0 is the product."""
    writer = Writer(4)
    (h,) = writer.emit("MatMul", [writer.input((4, 8)), writer.parameter(8, 12)])
    for kind in kinds:
        (h,) = writer.emit(kind, [h])
    graph = writer.graph(h)
    return replace(graph, ops=tuple(replace(op, block=0) for op in graph.ops))


def test_the_first_producer_decides_the_reduction() -> None:
    """A chain of ops that keep partial terms passes their reduction on; strategies with another one are left out."""
    same = [strategy("P->P"), strategy("P(max)->P(max)"), strategy("P(min)->P(max)")]
    found = means(chain("Relu", "Abs"), {"op0": [strategy("S(1),S(0)->P(max)")], "op1": same, "op2": same[:1]})

    assert [found.reduction(name) for name in ("op0.0", "op1.0")] == ["max", "max"]
    assert texts(found, "op1") == {"P(max) -> P(max)"}
    assert texts(found, "op2") == set()


def test_sums_are_preferred() -> None:
    found = means(chain(), {"op0": [strategy("S(1),S(0)->P(mean)"), strategy("R,S(0)->P")]})

    assert found.reduction("op0.0") == "sum"
    assert texts(found, "op0") == {"R,S(0) -> P"}


def test_placement_numbers_decode_to_reduction_and_chunks() -> None:
    """In base 4 with digits R, P, S(0), S(1): 1 × 4 + 3 is P(max)S(1/3)."""
    product = [strategy("R,S(1)->S(1)", cyclic=True), strategy("S(1),S(0)->P(max)")]
    found = means(chain("Relu"), {"op0": product, "op1": [strategy("S(1/3)->S(1)")]})

    assert found.placements("op0.0", 1 * 4 + 3, Mesh.of(dp=2, tp=2)) == (Partial("max"), Shard(1, chunks=3))


TIED = strategy("R,S(1)->S(1)", cyclic=True)
ALONG = strategy("S(1)->S(1)", cyclic=True)


@pytest.mark.parametrize(
    ("offered", "chunks", "offers"),
    [
        # chunks spread back to the parameter
        ({"op0": [TIED], "op1": [ALONG], "op2": [strategy("S(1/3)->S(1)")]}, (3, 3, 1), "S(1/3) -> S(1/3)"),
        # strategies with plain shards of a chunked dim are left out
        ({"op0": [TIED], "op1": [strategy("S(1)->S(1)"), strategy("S(1/3)->S(1)")]}, (3, 1, 1), "S(1/3) -> S(1)"),
        # a dim that is not tied to a parameter gets no chunks
        ({"op1": [ALONG], "op2": [strategy("S(1/3)->S(1)")]}, (1, 1, 1), "S(1) -> S(1)"),
        # 12 columns in 4 chunks of 3 cannot be shared by two devices
        ({"op0": [TIED], "op1": [ALONG], "op2": [strategy("S(1/4)->S(1)")]}, (1, 1, 1), "S(1) -> S(1)"),
        # the fewest chunks first
        (
            {"op0": [TIED], "op1": [ALONG, strategy("S(1/6)->S(1)")], "op2": [strategy("S(1/3)->S(1)")]},
            (3, 3, 1),
            "S(1/3) -> S(1/3)",
        ),
        # two counts for one dim
        ({"op0": [TIED], "op1": [ALONG, strategy("S(1/3)->S(1)")]}, (1, 1, 1), "S(1) -> S(1)"),
    ],
)
def test_chunks_spread_along_tied_dims(
    offered: Mapping[str, Sequence[Strategy]], chunks: tuple[int, ...], offers: str
) -> None:
    """Chunks spread along tied dims from the strategy that asks for them to the parameter; others are left out."""
    found = means(chain("Relu", "Abs"), offered)

    assert tuple(found.chunks(name)[1] for name in ("w0", "op1.0", "op2.0")) == chunks
    assert texts(found, "op1") == ({offers} if offers else set())


@pytest.mark.parametrize("mesh", [Mesh.of(inner=4), Mesh.of(outer=2, inner=2)], ids=str)
def test_the_largest_of_a_sharded_vocabulary_is_found_by_an_all_reduce(mesh: Mesh) -> None:
    """Vocabulary-parallel cross-entropy: the largest logit of each shard, then the largest of those; sums likewise."""
    graph = vocabulary_loss()
    model = execution(graph)
    shards = "S(1)" * len(mesh.axes)

    plan = pinned_plan(
        model.folded,
        discover(graph),
        Configuration(1, mesh, 2, "forward-only"),
        4,
        {"op0.0": shards, "op2.0": shards},
    )

    model.check(plan)
    assert op_placements(plan)["op1"].outputs == ("P(max)" * len(mesh.axes),)
    moved = {
        str(item.source)
        for segment in model.program(plan).segments
        for item in segment.instructions
        if isinstance(item, Collective) and item.operand.value.startswith("op1.0")
    }
    assert moved == {"P(max)"}


@pytest.mark.parametrize("degree", [2, 4])
def test_a_fused_projection_is_split_by_heads(degree: int) -> None:
    """Megatron's plan where queries, keys and values are one product: between it and the output nothing is moved."""
    graph, larger = fused_gpt(4), fused_gpt(8)
    model = execution(graph)
    tables = build_tables(model.folded, discover(graph), Mesh.of(inner=degree), QUICK_MEMORY)
    recipe = next(r for r in recipes(tables, batch_dims(graph.values, larger.values)) if r.name == "megatron")
    configuration = Configuration(1, tables.mesh, 2, "1f1b")

    layer = next(kind for kind in model.folded.kinds if kind.count > 1)
    fused, *_, out = (op for op in layer.ops if op.kind == "MatMul")
    pins = {out.inputs[1]: "S(0)"}

    candidate = best_candidate(tables, configuration, lambda instance: pinned(restrict(instance, recipe), tables, pins))
    plan = plan_of(candidate, 4)

    model.check(plan)
    forward, backward = (
        [item for item in segment.instructions if not isinstance(item, Slice)]
        for segment in model.program(plan).segments
        if segment.kind == layer.id and segment.phase in (SegmentPhase.FORWARD, SegmentPhase.BACKWARD)
    )
    assert op_placements(plan)[fused.name].inputs == ("R", "S(1/3)")
    names = [item.op.name if isinstance(item, Compute) else "moved" for item in forward]
    assert "moved" not in names[names.index(fused.name) : names.index(out.name)]
    # One all_reduce, or a reduce_scatter and an all_gather; traffic of gradients of weights runs beside compute.
    for instructions in (forward, backward):
        assert sum(isinstance(item, Collective) and not item.overlaps for item in instructions) <= 2


@pytest.mark.parametrize("ranges", [((0, 5),), ((0, 3), (3, 5))], ids=["inside", "between stages"])
def test_terms_of_a_tied_embedding_are_reduced_once(ranges: tuple[tuple[int, int], ...], cache_dir: Path) -> None:
    """Data parallel: the head's gradient term crosses blocks as a partial sum and is reduced once, with the rest."""
    model, rules = Execution.of("gpt2", 4, 2), model_rules("gpt2", cache_dir)
    tables = build_tables(model.folded, rules, Mesh.of(inner=2), QUICK_MEMORY)
    dims = batch_dims(model_graph("gpt2", 4).values, model_graph("gpt2", 8).values)
    recipe = next(found for found in recipes(tables, dims) if found.name == "data")
    configuration = Configuration(len(ranges), tables.mesh, 2, "1f1b")
    found = best_candidate(tables, configuration, lambda instance: restrict(instance, recipe))
    split = Split.uniform(ranges, (Recompute.NONE,) * len(ranges))

    plan = written(replace(found, split=split), 8, True)

    model.check(plan)
    moved = {
        item.operand.value
        for segment in model.program(plan).segments
        for item in segment.instructions
        if isinstance(item, Collective)
    }
    assert {own.value for block in plan.blocks for own in block.departures if own.placement == "P"} == {HEAD_TERM}
    assert HEAD_TERM not in moved


def test_other_boundary_values_are_never_partial(cache_dir: Path) -> None:
    """Activations and their gradients are never partial between blocks."""
    folded = Execution.of("gpt2", 4, 2).folded
    tables = build_tables(folded, model_rules("gpt2", cache_dir), Mesh.of(inner=2), QUICK_MEMORY)

    partial = {
        node.value.name: bool(is_partial(node.outputs(0), len(node.value.shape), 1).any())
        for node in tables.nodes
        if node.decision is Decision.BOUNDARY and node.value is not None
    }

    assert len(partial) == 3
    assert [name for name, able in partial.items() if able] == [HEAD_TERM]
