"""Discovery for whole graphs: what it costs, what it keeps, what it admits."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from autopar.discover import Rule, Rules, Scaled, Strategy, discover
from autopar.discover.rules import rule_from_json, rule_to_json
from autopar.discover.store import VERSION
from autopar.errors import GraphError
from autopar.ir.graph import Graph, Op, Value
from autopar.models import build
from autopar.onnx import load
from autopar.progress import TROUBLE, Progress
from autopar.sharding import Partial, Replicate, Shard
from autopar.training import training_step
from tests.single_ops import Input, floats, indices, ints, single_op, with_sums


def chain(num_layers: int, batch: int, width: int) -> Graph:
    """Return `num_layers` times x @ w, then Relu."""
    values = {"x0": Value("x0", (batch, width), "float32")}
    ops = []
    for layer in range(num_layers):
        for name, shape in (
            (f"w{layer}", (width, width)),
            (f"h{layer}", (batch, width)),
            (f"x{layer + 1}", (batch, width)),
        ):
            values[name] = Value(name, shape, "float32")
        ops.append(Op(f"matmul{layer}", "MatMul", (f"x{layer}", f"w{layer}"), (f"h{layer}",)))
        ops.append(Op(f"relu{layer}", "Relu", (f"h{layer}",), (f"x{layer + 1}",)))
    inputs = ("x0", *(f"w{layer}" for layer in range(num_layers)))
    return Graph("chain", 24, values, inputs, (), {}, tuple(ops), (f"x{num_layers}",))


def texts(rule: Rule) -> list[str]:
    return [str(strategy) for strategy in rule.strategies]


def test_first_strategy_replicates() -> None:
    """Whatever else is found, every device can always do the whole work."""
    rules = discover(chain(1, 32, 64))

    assert [rule.strategies[0].is_replicate for rule in rules] == [True, True]
    assert sum(strategy.is_replicate for rule in rules for strategy in rule.strategies) == 2


def test_product_has_three_shardings_and_is_linear_in_each_operand() -> None:
    """Rows, columns, the contraction as a partial sum, and partial sums of either operand."""
    rule = discover(chain(1, 32, 64)).of(Op("matmul0", "MatMul", ("x0", "w0"), ("h0",)))

    assert texts(rule)[0] == "R,R -> R"
    assert sorted(texts(with_sums(rule))[1:]) == [
        "P,R -> P",
        "R,P -> P",
        "R,S(1) -> S(1)",
        "S(0),R -> S(0)",
        "S(1),S(0) -> P",
    ]


def test_cost_depends_neither_on_depth_nor_on_size() -> None:
    """A distinct op is executed once, on small shapes."""
    small, large = discover(chain(1, 32, 64)), discover(chain(50, 4096, 12288))

    assert len(small) == len(large) == 2
    assert large.num_executions == small.num_executions
    assert [rule.signature for rule in small] == [rule.signature for rule in large]


def test_second_run_executes_nothing(tmp_path: Path) -> None:
    """The rules come back equal from the disk."""
    graph = chain(2, 32, 64)

    first, second = discover(graph, cache_dir=tmp_path), discover(graph, cache_dir=tmp_path)

    assert (first.num_cached, second.num_cached) == (0, 2)
    assert second.num_executions == 0
    assert list(first) == list(second)


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"version": 1, "rules": {"a": 3}, "signatures": {}}', "\0\0", "bit"]
)
def test_damaged_cache_is_rebuilt(tmp_path: Path, damage: str) -> None:
    """It is only a cache."""
    graph = chain(1, 32, 64)
    expected = discover(graph, cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace("S(0)", "S(1)", 1) if damage == "bit" else damage)

    rules = discover(graph, cache_dir=tmp_path)

    assert list(rules) == list(expected)
    assert len(json.loads(file.read_text())["content"]["rules"]) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", 3), ("inputRanks", ["2"]), ("strategies", [{"inputs": ["X"], "outputs": []}]), ("seconds", None)],
)
def test_cached_rules_have_to_be_rules(tmp_path: Path, field: str, value: object) -> None:
    """Whoever writes the file may know its hash: what is no rule is found out all the same."""
    graph = chain(1, 32, 64)
    expected = discover(graph, cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())["content"]
    next(iter(content["rules"].values()))[field] = value
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(f'{{"version": {VERSION}, "sha256": "{digest}", "content": {text}}}')

    rules = discover(graph, cache_dir=tmp_path)

    assert rules.num_cached == 0
    assert list(rules) == list(expected)


def test_a_cache_that_cannot_be_written_is_told_and_costs_nothing(tmp_path: Path) -> None:
    """The rules are there; the next run has to find them again."""
    (tmp_path / "cache").write_text("no folder")
    told: list[Progress] = []

    rules = discover(chain(1, 32, 64), cache_dir=tmp_path / "cache", progress=told.append)

    assert len(rules) == 2
    (trouble,) = [progress.detail for progress in told if progress.phase == TROUBLE]
    assert trouble.startswith(f"cannot write '{tmp_path / 'cache'}")


def test_cache_keeps_what_other_runs_found(tmp_path: Path) -> None:
    """Two models share one file."""
    discover(chain(1, 32, 64), cache_dir=tmp_path)
    discover(single_op("Neg", [floats(8, 4)])[0], cache_dir=tmp_path)

    both = discover(chain(1, 32, 64), cache_dir=tmp_path)

    assert both.num_executions == 0


def test_rule_survives_json() -> None:
    """Written and read again, it is the same."""
    graph, op = single_op("Reshape", [floats(8, 16, 96), ints(8, 16, 12, 8)])
    rule = discover(graph).of(op)

    assert rule_from_json(json.loads(json.dumps(rule_to_json(rule)))) == rule


def test_scaled_numbers_are_named() -> None:
    """The target shape of a Reshape is its input 1; splitting dim 2 into heads shrinks entry 2."""
    graph, op = single_op("Reshape", [floats(8, 16, 96), ints(8, 16, 12, 8)])

    strategies = with_sums(discover(graph).of(op)).strategies

    assert Strategy((Shard(2), Replicate()), (Shard(2),), (Scaled(1, 2),)) in strategies


def test_random_ops_are_only_replicated_and_say_why() -> None:
    """Two runs differ, so nothing can be compared; the reason is not hidden."""
    graph, op = single_op("RandomNormalLike", [floats(8, 16)])

    rules = discover(graph)

    assert len(rules.of(op).strategies) == 1
    assert [rule.reason for rule in rules.unsharded] == ["replicated: two runs on the same data differ"]


def test_op_that_runs_on_no_small_shape_says_so() -> None:
    """Contradicting shapes run neither small nor large."""
    graph, op = single_op("MatMul", [floats(8, 16), floats(16, 8)])
    values = {**graph.values, "x1": Value("x1", (5, 8), "float64")}
    broken = Graph(graph.name, graph.opset, values, graph.inputs, (), {}, graph.ops, graph.outputs)

    rule = discover(broken).of(op)

    assert len(rule.strategies) == 1
    assert "no small shapes" in rule.reason


def test_outputs_nobody_asked_for_do_not_matter() -> None:
    """The mean of a LayerNormalization is an optional output: unnamed, it restricts nothing."""
    graph, op = single_op("LayerNormalization", [floats(8, 96), floats(96), floats(96)], 3, axis=-1)
    unnamed = Op("op", op.kind, op.inputs, ("y0", "", "y2"), op.attrs)
    changed = Graph(graph.name, graph.opset, graph.values, graph.inputs, (), {}, (unnamed,), ("y0",))

    rule = with_sums(discover(changed).of(unnamed))

    assert Strategy((Shard(0), Replicate(), Replicate()), (Shard(0), Replicate(), Shard(0))) in rule.strategies


def test_rows_of_a_vocabulary_are_sharded_by_their_numbers() -> None:
    """The gradient of an embedding takes the numbers of its rows, so a part of them gives a part of it."""
    inputs: list[Input] = [indices(40, 8, 16), np.arange(40), floats(8, 16, 32)]
    graph, op = single_op("autopar::GatherGrad", inputs, axis=0)

    rule = with_sums(discover(graph).of(op))

    assert Strategy((Replicate(), Shard(0), Replicate()), (Shard(0),)) in rule.strategies
    assert Strategy((Shard(0), Replicate(), Shard(0)), (Partial(),)) in rule.strategies


def test_op_of_another_graph_has_no_rule() -> None:
    """Rules are looked up by name and kind."""
    rules = discover(chain(1, 32, 64))

    with pytest.raises(GraphError, match="no rule for op 'relu0' of kind 'Tanh'"):
        rules.of(Op("relu0", "Tanh", ("h0",), ("x1",)))


def test_progress_counts_distinct_ops() -> None:
    """One call for each distinct op, the last one with everything done; which is first is left to chance."""
    calls: list[Progress] = []

    discover(chain(3, 32, 64), progress=calls.append)

    assert [(call.done, call.total) for call in calls] == [(1, 2), (2, 2)]
    assert {call.detail for call in calls} == {"MatMul", "Relu"}


@pytest.fixture(scope="module")
def gpt2_rules() -> tuple[Graph, Rules]:
    graph = training_step(load(build("gpt2"), batch=8))
    return graph, discover(graph)


def test_every_op_of_a_training_step_can_follow_the_batch(gpt2_rules: tuple[Graph, Rules]) -> None:
    """Data parallelism, found by execution alone: an op that reads a batch of samples can be sharded along it."""
    graph, rules = gpt2_rules
    batched = [op for op in graph.ops if any(graph.values[name].shape[:1] == (8,) for name in op.inputs if name)]

    assert batched
    for op in batched:
        follows = [
            strategy
            for strategy in rules.of(op).strategies
            if all(
                placement == Shard(0)
                for name, placement in zip(op.inputs, strategy.inputs, strict=True)
                if name and graph.values[name].shape[:1] == (8,)
            )
        ]
        assert follows, f"{op.name} of kind {op.kind}"


def test_training_step_of_a_transformer_takes_few_executions(gpt2_rules: tuple[Graph, Rules]) -> None:
    """About 40 distinct ops at less than 200 runs each on average, terms, chunks and uneven blocks included."""
    _, rules = gpt2_rules

    assert rules.unsharded == ()
    assert len(rules) < 50
    assert rules.num_executions < 200 * len(rules)
