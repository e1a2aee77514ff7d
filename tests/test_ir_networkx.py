"""Graphs for the algorithms of networkx."""

import subprocess
import sys

import networkx as nx

from autopar.ir.canonical_order import canonical_order
from autopar.ir.graph import Phase, Role
from tests.executions import model_graph


def test_every_op_and_every_value_it_reads_is_there() -> None:
    """Ops and sources are nodes, operands are edges, with what the graph says of them."""
    graph = model_graph("mixtral-8x7b", 4)

    found = graph.to_networkx()

    sources = [*graph.inputs, *(state.input for state in graph.states), *graph.constants]
    assert set(found) == {*(op.name for op in graph.ops), *(f"%{name}" for name in sources)}
    assert found.number_of_edges() == sum(bool(name) for op in graph.ops for name in op.inputs)
    for op in graph.ops:
        node = found.nodes[op.name]
        assert (node["kind"], node["phase"], node["block"]) == (op.kind, str(op.phase), op.block)
        read = {slot: facts["value"] for _, _, slot, facts in found.in_edges(op.name, keys=True, data=True)}
        assert read == {slot: name for slot, name in enumerate(op.inputs) if name}
    for _, _, facts in found.edges(data=True):
        value = graph.values[facts["value"]]
        assert (facts["shape"], facts["dtype"]) == (value.shape, value.dtype)
    roles = {state.input: str(state.role) for state in graph.states}
    assert {name: found.nodes[f"%{name}"]["role"] for name in roles} == roles
    assert str(Role.PARAMETER) in roles.values()
    assert found.graph == {"name": graph.name, "opset": graph.opset, "outputs": graph.outputs}


def test_the_order_of_the_ops_is_a_topological_one() -> None:
    """By networkx: no cycle, no op before what it reads; blocks of the forward are a chain."""
    graph = model_graph("gpt2", 4)

    found = graph.to_networkx()

    position = {op.name: number for number, op in enumerate(graph.ops)}
    assert nx.is_directed_acyclic_graph(found)
    assert all(position[reader] > position[maker] for maker, reader in found.edges() if maker in position)
    forward = [op.name for op in graph.ops if op.phase is Phase.FORWARD]
    blocks = [found.nodes[name]["block"] for name in forward]
    assert blocks == sorted(blocks)
    longest = nx.dag_longest_path_length(nx.DiGraph(found.subgraph(forward)))
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD]
    assert longest < len(ops) == len(canonical_order(graph, ops).core) + len(canonical_order(graph, ops).early)


def test_networkx_is_imported_where_it_is_used_only() -> None:
    """It takes a tenth of a second and more."""
    code = "import sys, autopar.api, autopar.cli.commands, autopar.onnx; print('networkx' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
