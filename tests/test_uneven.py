"""Vocabularies that devices do not divide: dealt out in uneven blocks, priced by the largest, executed exactly."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autopar import models, solvers
from autopar.bounds.roofline import roofline
from autopar.bounds.saved_values import freed, most_shards
from autopar.cluster import PRESETS
from autopar.configuration import Configuration
from autopar.cost import IDEAL, Collective, CostModel, reshards
from autopar.cost.stack import parse_stack
from autopar.degrees import Degrees
from autopar.discover import Rules, discover
from autopar.errors import ExportError, ProgramError, ShardingError
from autopar.folding.fold import Folded, fold
from autopar.folding.graph_facts import dealt_lengths
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.formulate.op_placement import op_placement
from autopar.formulate.op_strategies import all_placements, local_sizes
from autopar.formulate.step_time import Pipeline, Split, StepTime, step_time
from autopar.formulate.tables import Memory, Node, Tables
from autopar.frameworks.restriction import stack_kept_to
from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph
from autopar.ir.relays import with_relays
from autopar.onnx import load
from autopar.plan import Plan
from autopar.prediction import predict
from autopar.problem import Choice, Problem
from autopar.program.lower import lower
from autopar.program.records import Operand, defines
from autopar.program.verify import verify_program
from autopar.ranks.collect import put_together, state_items
from autopar.ranks.lowered import Lowered
from autopar.recompute import Recompute
from autopar.runtime import run_step
from autopar.runtime.blocks import move, move_together
from autopar.search.candidate import Candidate
from autopar.sharding import Mesh, Partial, Placement, Replicate, Shard, format_placements
from autopar.simulate import simulate
from autopar.training import training_step
from autopar.training.chunked_loss import CHUNKED
from autopar.workload import open_workload
from tests.enumeration import Comparison, SmallJob, slow_nodes
from tests.executions import COSTS, TINY, Execution, random_feeds, written
from tests.formulations import optimum
from tests.gradients import as_float64
from tests.rank_runs import run_local
from tests.test_agreement import CLOSE

VOCAB = 25
"""Blocks of 13 and 12 on two devices, of 7, 7, 7 and 4 on four."""
SAMPLES = 4


def _graph(name: str, batch: int, *, loss: str = "cross-entropy") -> Graph:
    graph = with_relays(find_blocks(load(models.build(name, **{**TINY[name], "vocab": VOCAB}), batch=batch)))
    return training_step(as_float64(graph), loss=loss)


@cache
def _rules(name: str, cache_dir: Path, loss: str = "cross-entropy") -> Rules:
    return discover(_graph(name, 10, loss=loss), cache_dir=cache_dir)


def _with_data(graph: Graph) -> tuple[Graph, Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    return graph, *random_feeds(graph, 2, {})


def _dealt(tables: Tables, node: Node, vocab: int = VOCAB) -> list[bool]:
    """Return of each strategy of a decision whether it deals out the vocabulary."""
    mark, values, mesh = f":{vocab})", tables.folded.graph.values, tables.mesh
    if node.options is None:
        assert node.value is not None and node.placements is not None  # noqa: PT018
        placed = [tables.meaning.placements(node.value.name, int(number), mesh) for number in node.placements]
        return [mark in format_placements(each) for each in placed]
    op = tables.folded.kinds[node.kind].ops[node.position]
    options = node.options
    ops = [op_placement(op, options.by_axis(number), mesh, values) for number in range(node.count)]
    return [any(mark in text for text in (*each.inputs, *each.outputs)) for each in ops]


def _dealing_choice(tables: Tables, seed: int) -> Choice:
    """Return any choice that deals out the vocabulary wherever that is possible."""
    rng = np.random.default_rng(seed)
    costs = [rng.random(node.count) + np.where(_dealt(tables, node), 0.0, 10.0) for node in tables.nodes]
    edges = [(edge.first, edge.second, np.where(np.isfinite(edge.table), 0.0, np.inf)) for edge in tables.edges]
    choice = solvers.load("auto").solve(Problem.build(costs, edges), time_limit=5.0).choice
    assert choice is not None, "replicating everything is always possible"
    return choice


def _dealing_plan(folded: Folded, rules: Rules, configuration: Configuration, seed: int) -> Plan:
    tables = build_tables(folded, rules, configuration.mesh, COSTS)
    choice = _dealing_choice(tables, seed)
    count, blocks = configuration.num_stages, folded.num_blocks
    cuts = [blocks * index // count for index in range(count + 1)]
    flavours = tuple(list(Recompute)[:3][index % 3] for index in range(count))
    split = Split.uniform(tuple((cuts[i], cuts[i + 1]) for i in range(count)), flavours)
    candidate = Candidate(configuration, tables, choice, split, StepTime(1.0, 1.0, 0.0, np.ones(count)))
    return written(candidate, SAMPLES * configuration.num_microbatches, True)


def _values(plan: Plan, folded: Folded) -> list[Operand]:
    segments = lower(plan, folded, COSTS).segments
    return [operand for segment in segments for own in segment.instructions for operand in defines(own)]


def _dealt_values(plan: Plan, folded: Folded) -> set[str]:
    """Return the tensors of which some instruction makes uneven blocks."""
    found = set()
    for segment in lower(plan, folded, COSTS).segments:
        for operand in (own for instruction in segment.instructions for own in defines(instruction)):
            if f":{VOCAB})" in format_placements(operand.placements):
                found.add(operand.value.split("|")[0])
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "stages", "loss"),
    [
        ("gpt2", Mesh.of(tp=4), 1, "cross-entropy"),
        ("gpt2", Mesh.of(dp=2, tp=2), 2, "cross-entropy"),
        ("llama3-8b", Mesh.of(tp=3), 2, "cross-entropy"),
        pytest.param("llama3-8b", Mesh.of(dp=2, tp=2), 1, CHUNKED, marks=pytest.mark.slow),
    ],
    ids=["tied", "tied_in_stages", "untied", "chunks"],
)
def test_a_dealt_vocabulary_trains_like_the_model(
    name: str, mesh: Mesh, stages: int, loss: str, cache_dir: Path
) -> None:
    """Look-up, logits, loss and their gradients run on blocks of 7, 7, 7 and 4 rows, of 9, 9 and 7, or of 13 and 12."""
    execution = Execution.of_graph(*_with_data(_graph(name, SAMPLES, loss=loss)))
    configuration = Configuration(stages, mesh, 2, "1f1b")

    plan = _dealing_plan(execution.folded, _rules(name, cache_dir, loss), configuration, 0)

    execution.check(plan)
    dealt = _dealt_values(plan, execution.folded)
    assert {"loss.vjp.0", "logits.vjp.1"} & dealt, "the gradient of the logits, or of the matrix that makes them"
    assert {"embed.tokens.weight.grad.sum", "embed.weight.grad.sum"} & dealt


@pytest.mark.parametrize(
    ("mesh", "stages"),
    [pytest.param(Mesh.of(tp=4), 1, marks=pytest.mark.slow), (Mesh.of(dp=2, tp=2), 2)],
    ids=["one", "two"],
)
def test_ranks_have_blocks_of_their_own_size(mesh: Mesh, stages: int, cache_dir: Path) -> None:
    """Every rank compiles for the rows it has; what they have together are the states of the reference executor."""
    pytest.importorskip("onnxruntime", reason='ranks compute with it: pip install "autopar[run]"')
    workload = open_workload("zoo:gpt2", dims={**TINY["gpt2"], "vocab": VOCAB})
    folded, configuration = workload.folded(SAMPLES), Configuration(stages, mesh, 2, "1f1b")
    rules = discover(workload.folded(10).graph, cache_dir=cache_dir)
    plan = replace(_dealing_plan(folded, rules, configuration, 1), model=workload.info())
    lowered = Lowered(lower(plan, folded, COSTS), folded)
    data, states = random_feeds(folded.graph, 2, {})
    states = {name: np.asarray(array, folded.graph.values[name].dtype) for name, array in states.items()}

    ranks = run_local(lowered, [data], states)

    expected = run_step(lowered.program, folded, data, states)
    rows = set[int]()
    for item in state_items(lowered):
        stage = lowered.program.stages[item.stage]
        blocks = [rank.kept(item.tensor, item.placements) for rank in ranks[slice(*stage.devices)]]
        if item.tensor.startswith("embed.tokens.weight") and f":{VOCAB})" in format_placements(item.placements):
            rows.update(len(block) for block in blocks)
        whole, _ = put_together(blocks, item.placements, stage.mesh)
        scale = max(1e-3, float(np.abs(expected.states[item.tensor]).max()))
        np.testing.assert_allclose(whole, expected.states[item.tensor], rtol=0, atol=1e-4 * scale)
    assert rows == ({7, 4} if stages == 1 else {13, 12})


@cache
def _wide(vocab: int, mesh: Mesh, cache_dir: Path) -> Tables:
    """Return the tables of a model whose logits take most of its time."""
    dims = {"num_layers": 4, "hidden": 512, "heads": 8, "seq": 512, "vocab": vocab}
    folded = open_workload("zoo:gpt2", dims=dims).folded(64)
    return build_tables(folded, _rules("gpt2", cache_dir), mesh, CostModel(PRESETS["h100"]))


def _priced(tables: Tables, node: Node) -> dict[tuple[int, ...], float]:
    """Return the seconds of the strategies of a decision, by the placement numbers of all that it places."""
    options = node.options
    placed = [node.placements] if options is None else [*options.inputs, *options.outputs]
    rows = zip(*(numbers.tolist() for numbers in placed if numbers is not None), strict=True)
    return dict(zip(rows, node.seconds.tolist(), strict=True))


def test_a_dealt_vocabulary_costs_what_its_largest_block_does(cache_dir: Path) -> None:
    """2049, 2049, 2049 and 2046 rows take the seconds and the bytes of four times 2049."""
    uneven, even = (_wide(vocab, Mesh.of(tp=4), cache_dir) for vocab in (8193, 8196))
    checked = 0

    for node, other in zip(uneven.nodes, even.nodes, strict=True):
        own, wanted = _priced(uneven, node), _priced(even, other)
        for (key, seconds), is_dealt in zip(own.items(), _dealt(uneven, node, 8193), strict=True):
            if is_dealt:
                assert seconds == pytest.approx(wanted[key], rel=1e-12), node.name
                checked += 1
    stored = [
        max(own.amounts[np.array(_dealt(uneven, uneven.nodes[own.node], 8193))], default=0.0)
        for own in uneven.bytes
        if own.memory is Memory.PARAMETERS
    ]

    assert checked > 10
    assert max(stored) == 2049 * 512 * 2


def test_the_simulator_agrees_on_a_dealt_vocabulary(cache_dir: Path) -> None:
    """The formula the solver minimises, on a choice that deals out the vocabulary wherever that is possible."""
    tables = _wide(8193, Mesh.of(dp=2, tp=4), cache_dir)
    pipeline, configuration = Pipeline(1, 2, "1f1b"), Configuration(1, tables.mesh, 2, "1f1b")
    weighting = weights(tables, pipeline, recompute=Recompute.NONE, hidden=0.3, bounding=False, traffic=None)
    found = problem(tables, weighting)
    wanted = [np.array(_dealt(tables, node, 8193)) for node in tables.nodes]
    costs = [cost + np.where(own | ~own.any(), 0.0, 1e3) for cost, own in zip(found.node_costs, wanted, strict=True)]
    _, choice = optimum(replace(found, node_costs=tuple(costs), kinship=None))
    split = Split.uniform(((0, tables.folded.num_blocks),), (Recompute.NONE,))
    time = step_time(tables.block_seconds(choice), tables.folded.chain, pipeline, split, 0.0)

    program = lower(
        written(Candidate(configuration, tables, choice, split, time), 128, True), tables.folded, tables.costs
    )

    assert sum(bool(own[number]) for own, number in zip(wanted, choice, strict=True)) > 10
    assert time.seconds == pytest.approx(simulate(program, tables.costs).step_seconds, rel=CLOSE)


def test_placements_of_a_dealt_dim_count_its_largest_block() -> None:
    """25 rows over four devices are blocks of 7, nothing else splits that dim, and no device is left with none."""
    one, two = Mesh.of(tp=4), Mesh.of(dp=2, tp=2)

    assert all_placements((25, 8), (1, 1), one, partial=False).tolist() == [0, 3]
    assert all_placements((25, 8), (1, 1), one, partial=False, dealt=frozenset({25})).tolist() == [0, 2, 3]
    assert local_sizes((25, 8), np.array([0, 2, 3]), one).tolist() == [200.0, 56.0, 50.0]
    both = all_placements((25, 8), (1, 1), two, partial=False, dealt=frozenset({25})).tolist()
    assert 2 * 4 + 2 not in both
    assert {2 * 4, 2, 2 * 4 + 3, 3 * 4 + 2} <= set(both)
    assert all_placements((9, 7), (1, 1), Mesh.of(tp=8), partial=False, dealt=frozenset({9})).tolist() == [0]
    assert all_placements((25, 8), (5, 1), one, partial=False, dealt=frozenset({25})).tolist() == [0, 3]


def test_uneven_blocks_are_joined_before_another_dim_is_split() -> None:
    """Sums go to uneven blocks at once, with the bytes of the whole; blocks of another dim come out of copies."""
    mesh = Mesh.of(tp=4)
    ways = reshards((25, 8), 4.0, mesh, COSTS, dealt=frozenset({25}))
    uneven, columns = (Shard(0, whole=25),), (Shard(1),)

    (reduced,) = ways.path((Partial(),), uneven)
    joined = ways.path(uneven, columns)

    assert (reduced.collective, reduced.target, reduced.nbytes) == (Collective.REDUCE_SCATTER, *uneven, 800.0)
    assert [move.collective for move in joined] == [Collective.ALL_GATHER, None]
    assert [str(move.target) for move in ways.path(columns, uneven)] == ["R", "S(0:25)"]
    with pytest.raises(ShardingError):
        reshards((25, 8), 4.0, mesh, COSTS).path((Partial(),), uneven)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "bert-base", "t5-11b", "vit-b16", "unet-sd1"])
def test_vocabularies_are_what_may_be_dealt(name: str) -> None:
    """Classes of the loss, and nothing else: no positions, no widths. Without a loss, a looked-up table says so."""
    workload = open_workload(f"zoo:{name}", dims=TINY[name])
    classes = {"vit-b16": {8}, "unet-sd1": set()}.get(name, {24})
    looked_up = set() if name == "vit-b16" else classes

    assert dealt_lengths(workload.folded(4)) == classes
    assert dealt_lengths(open_workload(f"zoo:{name}", dims=TINY[name], mode="infer").folded(4)) == looked_up


def test_bounds_let_every_axis_split_a_dealt_dim(cache_dir: Path) -> None:
    """The least resident bytes count blocks that 3 × 16 devices have of a table of 25 rows of 16."""
    folded = fold(_graph("gpt2", SAMPLES))
    found = roofline(folded, folded, (SAMPLES, SAMPLES), COSTS)
    tables = build_tables(folded, _rules("gpt2", cache_dir), Mesh.of(outer=3, inner=16), COSTS)
    least = sum(
        float(own.amounts.min()) * folded.kinds[own.kind].count
        for own in tables.bytes
        if own.memory in (Memory.PARAMETERS, Memory.GRADIENTS, Memory.OPTIMIZER)
    )

    bound = found.bytes(Configuration(1, tables.mesh, 1, "1f1b"))

    assert bound <= least * (1 + 1e-9)
    assert freed((25, 16), folded) == (0, 16)
    assert most_shards((0, 16), (3, 16)) == 48


def test_software_that_refuses_uneven_blocks_deals_out_nothing(cache_dir: Path) -> None:
    """As JAX, whose shardings have to divide; a search for MaxText is kept to that."""
    folded, rules, mesh = fold(_graph("gpt2", SAMPLES)), _rules("gpt2", cache_dir), Mesh.of(tp=4)
    even = replace(COSTS, stack=stack_kept_to("maxtext", COSTS.stack, COSTS.cluster))

    free, kept = (build_tables(folded, rules, mesh, costs) for costs in (COSTS, even))

    assert any(any(_dealt(free, node)) for node in free.nodes)
    assert not any(any(_dealt(kept, node)) for node in kept.nodes)
    assert parse_stack(yaml.safe_dump(even.stack.to_dict())).uneven is False
    assert stack_kept_to("megatron", COSTS.stack, COSTS.cluster).uneven


def test_exports_ask_for_blocks_that_were_priced(cache_dir: Path) -> None:
    """Megatron-LM pads to the largest block; JAX and MaxText refuse; DTensor has uneven blocks of its own."""
    dims = {**TINY["llama3-8b"], "vocab": VOCAB}
    plan = predict("zoo:llama3-8b", Degrees(tp=2, global_batch=4), dims=dims, cache_dir=cache_dir).plan

    megatron = plan.export("megatron", cache_dir=cache_dir)
    dtensor = plan.export("pytorch", cache_dir=cache_dir)

    assert b"--vocab-size 25\n" in megatron.data
    assert b"--make-vocab-size-divisible-by 1\n" in megatron.data
    assert any("pads it to 26" in line for line in megatron.lost)
    assert b"'embed.weight': ((25, 16), (0,))" in dtensor.data
    even = predict(
        "zoo:llama3-8b",
        Degrees(tp=2, global_batch=4),
        dims=dims,
        stack=replace(IDEAL, uneven=False),
        cache_dir=cache_dir,
    )
    assert b"P(None, 'tp')" in even.plan.export("jax", cache_dir=cache_dir).data
    for framework in ("jax", "maxtext"):
        with pytest.raises(ExportError, match="25 rows or columns, which the 2 devices of axis 'tp' do not divide"):
            plan.export(framework, cache_dir=cache_dir)


def test_uneven_blocks_are_verified_by_rules_that_hold_on_them(cache_dir: Path) -> None:
    """A program of uneven blocks is none of rules that hold on equal blocks only."""
    folded, rules = fold(_graph("gpt2", SAMPLES)), _rules("gpt2", cache_dir)
    plan = _dealing_plan(folded, rules, Configuration(1, Mesh.of(tp=4), 2, "1f1b"), 0)
    program = lower(plan, folded, COSTS)
    even = {
        name: replace(rule, strategies=tuple(replace(own, uneven=False) for own in rule.strategies))
        for name, rule in rules.by_op.items()
    }

    verify_program(program, folded, rules)

    with pytest.raises(ProgramError, match="which is no strategy of"):
        verify_program(program, folded, replace(rules, by_op=even))


def test_buckets_carry_blocks_that_differ_over_other_axes() -> None:
    """Sums over `dp` of 13 and 12 rows, which lie so over `tp`, beside a tensor that all devices have alike."""
    mesh, rng = Mesh.of(dp=2, tp=2), np.random.default_rng(0)
    uneven = [rng.normal(size=(rows, 3)) for rows in (13, 12, 13, 12)]
    alike = [rng.normal(size=(4, 2)) for _ in range(4)]
    moves: list[tuple[Placement, Placement]] = [(Partial(), Replicate()), (Partial(), Shard(0))]

    found = move_together([uneven, alike], 0, moves, mesh)

    for blocks, tensor, (source, target) in zip(found, (uneven, alike), moves, strict=True):
        for own, wanted in zip(blocks, move(tensor, 0, source, target, mesh), strict=True):
            np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "memory"), [("gpt2", "train", 2.0), ("llama3-8b", "infer", 0.0)])
def test_bounds_hold_where_the_best_plan_deals_out_the_vocabulary(
    name: str, mode: str, memory: float, cache_dir: Path
) -> None:
    """No plan by degrees is below the bound, and none is faster than the plan by more than the gap."""
    dims = {**TINY[name], "num_layers": 2, "vocab": 203}

    found = Comparison.of(SmallJob(0, name, dims, 4, slow_nodes(4, 1e9, 1e9), mode, 4, memory), cache_dir)

    assert not found.violations
    assert b":203)" in found.plan.to_json()
