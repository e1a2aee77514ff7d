"""Batch normalisation in training: with the statistics of the batch instead of stored ones.

For x [N, C, ...] over n = N * ... elements per channel: mean = sum(x) / n, variance = sum(x^2) / n - mean^2,
y = (x - mean) / sqrt(variance + epsilon) * scale + bias. The statistics are an op of their own. The running statistics
are left as they are: a step does not read them.

Where devices share a batch, there are two semantics:

- *synchronised*: the statistics are sums over the whole batch, one small all-reduce each, and a partitioned step
  computes what the whole one does (`torch.nn.SyncBatchNorm`, the usual semantics of JAX under `jit`).
- *per device*: a device takes its own terms of the means for the whole ones (`DistributedDataParallel`, and so FSDP,
  with `torch.nn.BatchNorm2d`). A step on n devices computes what gradient accumulation over n times as many
  microbatches of an n-th of the samples does.
"""

from dataclasses import replace

from autopar.ir.graph import Attr, Graph, Op
from autopar.training.rules.base import float_attr
from autopar.training.tape import Tape, unsupported

NORMALIZATION = "BatchNormalization"
"""Kind of the op in a forward graph."""


def use_batch_statistics(graph: Graph, *, synchronised: bool) -> Graph:
    """Return the graph with every BatchNormalization using the statistics of its input.

    Args:
        graph: The forward graph.
        synchronised: Whether devices that share a batch compute its statistics together.

    Raises:
        UnsupportedOpError: If a result other than the normalised tensor is used.
    """
    if all(op.kind != NORMALIZATION for op in graph.ops):
        return graph
    tape = Tape(replace(graph, ops=()))
    users = graph.consumers()
    for op in graph.ops:
        if op.kind != NORMALIZATION:
            tape.ops.append(op)
            continue
        if any(name in users or name in graph.outputs for name in op.outputs[1:]):
            raise unsupported(op, "its running statistics are used within the step")
        for name in filter(None, op.outputs[1:]):
            del tape.values[name]
        tape.write_for(op.phase, op.block, stem=f"{op.name}.stats")
        _normalise(tape, op, synchronised=synchronised)
    return replace(graph, values=tape.values, constants=tape.constants, ops=tuple(tape.ops))


def _normalise(tape: Tape, op: Op, *, synchronised: bool) -> None:
    x, scale, bias = op.inputs[:3]
    shape, dtype = tape.shape(x), tape.dtype(x)
    count = tape.values[x].size // shape[1]
    statistics = [(shape[1],)] * 2
    attrs: dict[str, Attr] = {"epsilon": float_attr(op, "epsilon", 1e-5)}
    if synchronised:
        sums = tape.emit_all("autopar::BatchNormStats", [x], statistics, dtype)
        mean, mean_square = (tape.times(total, 1.0 / count) for total in sums)
    else:
        mean, mean_square = tape.emit_all("autopar::BatchNormMeans", [x], statistics, dtype)
        attrs["per_device"] = 1
    tape.append(
        "autopar::BatchNorm",
        [x, scale, bias, mean, mean_square],
        op.outputs[:1],
        op.name,
        **attrs,
    )
