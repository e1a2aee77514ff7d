"""Batch normalisation in training: with the statistics of the batch instead of stored ones.

For x [N, C, ...] over n = N * ... elements per channel: mean = sum(x) / n, variance = sum(x^2) / n - mean^2,
y = (x - mean) / sqrt(variance + epsilon) * scale + bias. The two sums are an op of their own, so that a batch split
over devices needs one small all-reduce and gives the same numbers as the whole batch (synchronised batch
normalisation). The running statistics are left as they are: a step does not read them.
"""

from dataclasses import replace

from autopar.ir.graph import Graph, Op
from autopar.training.rules.base import float_attr
from autopar.training.tape import Tape, unsupported


def use_batch_statistics(graph: Graph) -> Graph:
    """Return the graph with every BatchNormalization using the statistics of its input.

    Raises:
        UnsupportedOpError: If a result other than the normalised tensor is used.
    """
    if all(op.kind != "BatchNormalization" for op in graph.ops):
        return graph
    tape = Tape(replace(graph, ops=()))
    users = graph.consumers()
    for op in graph.ops:
        if op.kind != "BatchNormalization":
            tape.ops.append(op)
            continue
        if any(name in users or name in graph.outputs for name in op.outputs[1:]):
            raise unsupported(op, "its running statistics are used within the step")
        for name in filter(None, op.outputs[1:]):
            del tape.values[name]
        tape.write_for(op.phase, op.block, stem=f"{op.name}.stats")
        _normalise(tape, op)
    return replace(graph, values=tape.values, constants=tape.constants, ops=tuple(tape.ops))


def _normalise(tape: Tape, op: Op) -> None:
    x, scale, bias = op.inputs[:3]
    shape, dtype = tape.shape(x), tape.dtype(x)
    count = tape.values[x].size // shape[1]
    sums = tape.emit_all("autopar::BatchNormStats", [x], [(shape[1],)] * 2, dtype)
    mean, mean_square = (tape.times(total, 1.0 / count) for total in sums)
    tape.append(
        "autopar::BatchNorm",
        [x, scale, bias, mean, mean_square],
        op.outputs[:1],
        op.name,
        epsilon=float_attr(op, "epsilon", 1e-5),
    )
