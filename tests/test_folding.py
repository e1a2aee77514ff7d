"""Folding is exact: what is reported for a plan is what the graph costs with every block as a kind of its own."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.configuration import Configuration
from autopar.folding import fold as folding
from autopar.folding.fold import Folded
from autopar.formulate import building
from autopar.formulate.building import build_tables
from autopar.formulate.op_strategies import OpStrategies
from autopar.formulate.scheduled_step import pass_seconds
from autopar.formulate.step_time import Pipeline, Split, step_time
from autopar.formulate.tables import Decision, Tables
from autopar.ir.graph import Graph, Op
from autopar.pipeline_partition.interleaved import grouped_time
from autopar.pipeline_partition.p2p import StageTransfers, hop_seconds
from autopar.problem import Choice
from autopar.recompute import ON_DEVICE
from autopar.request import JobRequest
from autopar.schedule import SCHEDULES
from autopar.search.candidate import Candidate
from autopar.search.lowered_memory import ChoiceCosts
from autopar.search.node_solver import open_node
from autopar.sharding import Mesh
from autopar.task import Effort, Task, prepare
from tests.formulations import DIMS, lowered_bytes

ROUNDING = 1e-9
"""Relative: sums of equal numbers in another order."""


def _unfolded(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> Folded:
    """Return a graph with every block as a kind of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(folding, "block_kinds", lambda graph: range(1 + max(op.block for op in graph.ops)))
        return folding.fold(graph)


def _decisions(tables: Tables, chain: Sequence[int]) -> list[list[tuple[object, ...]]]:
    """Return for each node what it decides, in positions within blocks; several for what several ops share.

    Args:
        tables: The decisions.
        chain: Kind of each block that the tables have as a kind.
    """
    parameters = iter(tables.folded.parameters)
    found: list[list[tuple[object, ...]]] = []
    for node in tables.nodes:
        match node.decision:
            case Decision.OP:
                found.append([("op", chain[node.kind], node.position)])
            case Decision.PARAMETER:
                producer = next(parameters).producer
                found.append([("parameter", chain[producer.kind], producer.position, producer.slot)])
            case _:
                found.append([])
    for boundary in tables.boundaries:
        found[boundary.node] += [("boundary", chain[own.kind], own.position, own.slot) for own in boundary.producers]
    for edge in tables.edges:
        if tables.nodes[edge.first].decision is Decision.COPY:
            reader = tables.nodes[edge.second]
            found[edge.first].append(("copy", chain[reader.kind], reader.position, edge.consumer))
    return found


def _spread(choice: Choice, folded: Tables, whole: Tables) -> Choice:
    """Return the choice in which every block decides what its kind does."""
    chain = folded.folded.chain
    own = _decisions(folded, range(len(folded.folded.kinds)))
    known = {what: strategy for several, strategy in zip(own, choice, strict=True) for what in several}
    return tuple(known[several[0]] for several in _decisions(whole, chain))


ALL = ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved")


@pytest.mark.parametrize(
    ("name", "schedules"), [("mlp-xs", ALL), ("gpt2", ALL), ("mixtral-8x7b", ("1f1b", "interleaved"))]
)
def test_the_objective_is_that_of_the_unfolded_graph(
    name: str, schedules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the best plan under each schedule, and of the same with layers that recompute in part or in full.

    A value that the first layer reads of the block before it and later ones of further away (a mask) takes no time
    between stages where it is read from further away; folded, that holds for the first layer as well.
    """
    task = prepare(JobRequest(f"zoo:{name}", gpus=4, global_batch=8, dims=DIMS[name]))
    for schedule in schedules:
        configuration = _configuration(task, schedule)
        found = _best(task, configuration)
        folded, pipeline, chain = found.tables, configuration.pipeline(task.costs.stack), found.tables.folded.chain
        whole = build_tables(
            _unfolded(folded.folded.graph, monkeypatch), task.rules_of(folded.folded), configuration.mesh, task.costs
        )
        choice = _spread(found.choice, folded, whole)
        mixed = tuple(ON_DEVICE[number % 3] for number in range(len(chain)))
        again = Split(found.split.ranges, tuple(mixed[start:stop] for start, stop in found.split.ranges))
        hop = _hop(task, configuration, folded, found.choice)

        alone = [_seconds(whole, choice, pipeline, split, hop) for split in (found.split, again)]

        assert whole.folded.chain == tuple(range(len(chain)))
        assert alone[0] == pytest.approx(found.objective, rel=ROUNDING)
        assert alone[1] == pytest.approx(_seconds(folded, found.choice, pipeline, again, hop), rel=ROUNDING)
        assert alone[1] > alone[0]
        totals = folded.block_seconds(found.choice)[list(chain)]
        np.testing.assert_allclose(whole.block_seconds(choice), totals, rtol=ROUNDING, atol=1e-15)
        arriving = lowered_bytes(whole, choice).arriving
        assert [lowered_bytes(folded, found.choice).arriving[kind] for kind in chain[2:]] == pytest.approx(arriving[2:])


def _seconds(tables: Tables, choice: Choice, pipeline: Pipeline, split: Split, hop: StageTransfers | float) -> float:
    """Return the step seconds of a plan under its schedule."""
    totals, chain = tables.block_seconds(choice), tables.folded.chain
    if pipeline.fills and pipeline.schedule != "gpipe":
        return step_time(totals, chain, pipeline, split, hop_seconds(split, hop)).seconds
    passes = pass_seconds(tables, choice, splits=SCHEDULES[pipeline.schedule].splits)
    return grouped_time(passes, totals, chain, pipeline, split, hop_seconds(split, hop)).seconds


def _configuration(task: Task, schedule: str) -> Configuration:
    """Return one of two groups of devices."""
    return next(own for own in task.space if (own.num_stages, own.num_microbatches, own.schedule) == (2, 4, schedule))


def _best(task: Task, configuration: Configuration) -> Candidate:
    node = open_node(task.context(Effort(top_k=1)), (configuration,), math.inf)
    assert node is not None
    node.relax(math.inf)
    assert node.best is not None, configuration
    return node.best


def _hop(task: Task, configuration: Configuration, tables: Tables, choice: Choice) -> StageTransfers | float:
    pipeline = configuration.pipeline(task.costs.stack)
    return ChoiceCosts(tables, pipeline, configuration.mesh.size).hops(choice, pipeline)


def test_tables_are_built_once_per_distinct_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve layers have the decisions, prices and bytes of four, array for array, and ask for no more of them."""
    asked: list[str] = []
    of_op = building._Builder._options

    def ask(builder: building._Builder, kind: int, op: Op) -> OpStrategies:
        asked.append(op.name)
        return of_op(builder, kind, op)

    monkeypatch.setattr(building._Builder, "_options", ask)
    mesh = Mesh.of(outer=2, inner=2)
    sizes = []
    for layers in (4, 12):
        asked.clear()
        task = prepare(JobRequest("zoo:gpt2", gpus=4, global_batch=8, dims=DIMS["gpt2"] | {"num_layers": layers}))
        folded = task.workload.folded(4)
        found = build_tables(folded, task.rules_of(folded), mesh, task.costs)
        sizes.append(
            (len(asked), [node.seconds.tobytes() for node in found.nodes], [e.table.tobytes() for e in found.edges])
        )
        assert len(asked) == sum(len(kind.ops) for kind in folded.kinds)
        assert max(kind.count for kind in folded.kinds) >= layers - 2

    assert sizes[0] == sizes[1]
