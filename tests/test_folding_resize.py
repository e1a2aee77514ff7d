"""Resizing: a folded graph derived from an excerpt equals the graph built anew at that microbatch size."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

from autopar import models
from autopar.configuration import Configuration
from autopar.discover import discover
from autopar.folding.fold import Folded, fold
from autopar.folding.layer_excerpt import excerpt
from autopar.formulate.building import build_tables
from autopar.formulate.linear_weights import problem, weights
from autopar.ir.blocks import Cut, cut, num_bytes, work_of
from autopar.ir.graph import Graph, Op, Value
from autopar.onnx import load
from autopar.onnx.abridge import abridged
from autopar.onnx.reader import read
from autopar.recompute import Recompute
from autopar.sharding import Mesh
from autopar.workload import Workload, open_workload
from tests.formulations import COSTS, DIMS

DEEP = {
    "gpt2": DIMS["gpt2"] | {"num_layers": 10},
    "llama3-8b": DIMS["llama3-8b"] | {"num_layers": 12},
    "mixtral-8x7b": DIMS["mixtral-8x7b"] | {"num_layers": 12},
    "deepseek-moe-16b": DIMS["deepseek-moe-16b"] | {"num_layers": 13},
    "vit-b16": DIMS["vit-b16"] | {"num_layers": 11},
    "mlp-xs": DIMS["mlp-xs"] | {"num_layers": 14},
}
KNOWN = 104
"""A microbatch size that equals another dim of these models."""


def _deep(name: str, mode: str = "train") -> Workload:
    return open_workload(f"zoo:{name}", mode=mode, dims=DEEP[name])


def _assert_equal(one: Folded, other: Folded) -> None:
    """Return whether all fields but `origin` are equal."""
    assert (one.chain, one.kinds, one.parameters, one.uses) == (
        other.chain,
        other.kinds,
        other.parameters,
        other.uses,
    )
    assert (one.free, one.buffer_bytes) == (other.free, other.buffer_bytes)
    assert (one.by_value, one.producers, one.readers) == (other.by_value, other.producers, other.readers)
    graph, anew = one.graph, other.graph
    assert list(graph.values.items()) == list(anew.values.items())
    assert (graph.ops, graph.states, graph.inputs, graph.outputs) == (anew.ops, anew.states, anew.inputs, anew.outputs)
    assert (graph.name, graph.opset, dict(graph.metadata)) == (anew.name, anew.opset, dict(anew.metadata))
    assert list(graph.constants) == list(anew.constants)
    for name, array in graph.constants.items():
        assert array.dtype == anew.constants[name].dtype
        np.testing.assert_array_equal(array, anew.constants[name], err_msg=name)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", DEEP)
def test_resized_graphs_equal_rebuilt_ones(name: str, mode: str) -> None:
    """Most sizes are derived from the excerpt, and every derived graph equals the rebuilt one."""
    found = _deep(name, mode)
    known = found.folded(KNOWN)

    sizes = {samples: found.folded(samples) for samples in (1, 2, 40)}

    for samples, own in sizes.items():
        _assert_equal(own, fold(found.graph(samples)))
    assert known.origin is None
    assert sizes[40].origin is known


def test_problems_of_resized_graphs_equal_rebuilt_ones() -> None:
    """Costs, memory and limits of the placement problem are equal to the last bit."""
    found, mesh = _deep("mlp-xs"), Mesh.of(outer=2, inner=2)
    found.folded(KNOWN)
    rules = discover(found.probe)
    pipeline = Configuration(1, mesh, 4, "1f1b").pipeline(COSTS.stack)

    one, other = (build_tables(folded, rules, mesh, COSTS) for folded in (found.folded(40), fold(found.graph(40))))
    first, second = (
        problem(own, weights(own, pipeline, recompute=Recompute.NONE, hidden=1.0, bounding=True))
        for own in (one, other)
    )

    assert found.folded(40).origin is not None
    assert first.num_strategies == second.num_strategies
    for before, after in zip(first.node_costs, second.node_costs, strict=True):
        np.testing.assert_array_equal(before, after)
    assert [(edge.first, edge.second) for edge in one.edges] == [(edge.first, edge.second) for edge in other.edges]
    for edge, twin in zip(one.edges, other.edges, strict=True):
        np.testing.assert_array_equal(edge.table, twin.table)
    for held, twin_held in zip(one.bytes, other.bytes, strict=True):
        np.testing.assert_array_equal(held.amounts, twin_held.amounts)


def test_a_size_equal_to_another_dim_is_rebuilt() -> None:
    """With 16 samples of 16 elements an activation has the type of a weight, so blocks might fold differently."""
    found = _deep("mlp-xs")
    known = found.folded(KNOWN)

    own = found.folded(16)

    assert own.origin is None
    assert found.folded(40).origin is known
    _assert_equal(own, fold(found.graph(16)))


def test_the_probe_is_made_of_the_excerpt() -> None:
    """Rules are discovered on the same graph, whether another size is known or not."""
    one, other = _deep("gpt2"), _deep("gpt2")
    one.folded(KNOWN)

    probe, anew = one.probe, other.probe

    assert probe.ops == anew.ops
    assert list(probe.values.items()) == list(anew.values.items())


def test_few_layers_are_not_abridged() -> None:
    """There is no excerpt if it would be most of the model, or nothing repeats."""
    for name in ("gpt2", "unet-sd1", "resnet50"):
        found = open_workload(f"zoo:{name}", dims=DIMS[name])
        found.folded(KNOWN)

        assert found.folded(40).origin is None


def test_a_read_from_inside_a_stretch_prevents_an_excerpt() -> None:
    """A result of the last layers that reads a middle layer has no source in an excerpt."""
    names = [f"x{number}" for number in range(14)]
    ops = [Op(f"op{number}", "Relu", (names[number],), (names[number + 1],), block=number) for number in range(13)]
    chain = (0, *(1,) * 12)

    def graph(last: Op) -> Graph:
        values = {name: Value(name, (4, 4), "float32") for name in (*names, "y")}
        return Graph("chain", 24, values, ("x0",), (), {}, (*ops, last), ("y",))

    near = excerpt(graph(Op("end", "Add", ("x13", "x12"), ("y",), block=12)), chain)
    far = excerpt(graph(Op("end", "Add", ("x13", "x6"), ("y",), block=12)), chain)

    assert far is None
    assert near is not None
    assert near.kept == (0, 1, 2, 11, 12)
    assert near.joins == {"x11": "x3"}


def _facts(found: Cut, graph: Graph) -> tuple[list[np.ndarray], np.ndarray]:
    """Return what decides where a graph is cut, at its own size."""
    nbytes = [np.array([num_bytes(graph.values[name]) for name in line.crossing], np.int64) for line in found.lines]
    return nbytes, np.array([work_of(op, graph) for op in found.lines[-1].core], np.float64)


def test_block_cuts_depend_on_sizes() -> None:
    """A cut holds at twice the samples, but not if the work is distributed differently or another value is smallest."""
    graph = load(models.build("unet-sd1", **DIMS["unet-sd1"]), batch=4)
    found = cut(graph)
    nbytes, work = _facts(found, graph)

    assert found.holds(nbytes, work)
    assert found.holds([2 * own for own in nbytes], 2 * work)
    assert not found.holds(nbytes, np.where(np.arange(len(work)) < len(work) // 2, work, 1e-6 * work))
    assert not found.holds([own.max() - own for own in nbytes], work)


def test_bodies_of_ops_are_not_abridged() -> None:
    """They may read any value by its name."""
    source = read(models.build("mlp-xs", **DEEP["mlp-xs"]))
    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    node = model.graph.node[0]
    node.attribute.append(onnx.helper.make_attribute("body", onnx.helper.make_graph([], "body", [], [])))

    assert abridged(source, {}, frozenset()) is not None
    assert abridged(replace(source, model=model), {}, frozenset()) is None
