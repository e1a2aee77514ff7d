"""Values that blocks further on read are handed from block to block, as a pipeline sends them from stage to stage.

The result of an encoder, which every block of the decoder reads, or a skip connection would otherwise go from its block
to its readers by themselves, and no stage in between would send or hold anything. An Identity in each block on the way
passes the value on. It costs nothing inside a stage, being a view. Its gradient is the sum of what the block's own
readers and the next block return, so that gradients are summed up on their way back.
"""

from dataclasses import replace

from autopar.ir.blocks import instance_ops
from autopar.ir.canonical_order import downstream
from autopar.ir.graph import Graph, Op, Phase


def with_relays(graph: Graph) -> Graph:
    """Return a forward graph with blocks in which a value is read in the block after the one it comes from, or there.

    Values that depend on no data, or on no trained tensor, stay as they are: every stage can make them for itself.

    >>> from autopar import models
    >>> from autopar.ir.blocks import find_blocks
    >>> from autopar.onnx import load
    >>> native = models.read_architecture({"model_type": "whisper"}, 64)
    >>> graph = with_relays(find_blocks(load(models.build_architecture("whisper", native), batch=2)))
    >>> [op.block for op in graph.ops if op.kind == "Identity"]
    [7, 8, 9]
    """
    passed = _passed_by_block(graph)
    if not passed:
        return graph
    values, ops = dict(graph.values), list[Op]()
    source: dict[str, str] = {}
    for block, members in enumerate(instance_ops(graph)):
        arrived = dict(source)
        for name in passed.get(block, ()):
            relay = source[name] = f"{name}.passed.{block}"
            values[relay] = replace(values[name], name=relay)
            ops.append(Op(relay, "Identity", (arrived.get(name, name),), (relay,), block=block))
        ops += [replace(op, inputs=tuple(arrived.get(name, name) for name in op.inputs)) for op in members]
    return replace(graph, values=values, ops=tuple(ops))


def _passed_by_block(graph: Graph) -> dict[int, list[str]]:
    """Return the values that each block passes on, in order of definition."""
    data = downstream(graph.ops, set(graph.inputs))
    trained = downstream(graph.ops, {value.name for value in graph.parameters})
    home = {name: op.block for op in graph.ops if op.phase is Phase.FORWARD for name in op.outputs if name}
    last = dict(home)
    for op in graph.ops:
        for name in op.inputs:
            if name in home:
                last[name] = max(last[name], op.block)
    passed: dict[int, list[str]] = {}
    for name, block in home.items():
        if name in data and name in trained and graph.values[name].is_float:
            for between in range(block + 1, last[name]):
                passed.setdefault(between, []).append(name)
    return passed
