"""Small models whose plans need more than plain shards and sums."""

import numpy as np

from autopar.ir.blocks import find_blocks
from autopar.ir.graph import Graph
from autopar.training import training_step
from tests.random_graphs import Writer


def fused_gpt(batch: int = 4, *, layers: int = 3, hidden: int = 16, heads: int = 4, vocabulary: int = 24) -> Graph:
    """Return a training step of a GPT in float64.

    Queries, keys and values come from one matrix product and are split afterwards; the embedding makes the logits too.
    """
    writer, width, length = Writer(batch), hidden // heads, 6
    tokens = writer.input((batch, length), high=vocabulary)
    table = writer.parameter(vocabulary, hidden)
    (h,) = writer.emit("Gather", [table, tokens])
    split = writer.constant(np.array([batch, length, heads, width]))
    merge = writer.constant(np.array([batch, length, hidden]))
    scale = writer.constant(np.asarray(width**-0.5))
    for _ in range(layers):
        (fused,) = writer.emit("MatMul", [h, writer.parameter(hidden, 3 * hidden)])
        (fused,) = writer.emit("Add", [fused, writer.parameter(3 * hidden)])
        parts = writer.emit("Split", [fused], 3, axis=-1, num_outputs=3)
        parts = [writer.emit("Reshape", [part, split])[0] for part in parts]
        orders = ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
        query, key, value = (
            writer.emit("Transpose", [part], perm=order)[0] for part, order in zip(parts, orders, strict=True)
        )
        (scores,) = writer.emit("MatMul", [query, key])
        (scores,) = writer.emit("Mul", [scores, scale])
        (scores,) = writer.emit("Softmax", [scores], axis=-1)
        (mixed,) = writer.emit("MatMul", [scores, value])
        (mixed,) = writer.emit("Transpose", [mixed], perm=(0, 2, 1, 3))
        (mixed,) = writer.emit("Reshape", [mixed, merge])
        (mixed,) = writer.emit("MatMul", [mixed, writer.parameter(hidden, hidden)])
        (h,) = writer.emit("Add", [h, mixed])
    (columns,) = writer.emit("Transpose", [table], perm=(1, 0))
    (logits,) = writer.emit("MatMul", [h, columns])
    return _finished(writer, logits)


def vocabulary_loss(batch: int = 4, *, vocabulary: int = 32) -> Graph:
    """Return the logarithm of the softmax's denominator, written as single ops, in float64."""
    writer = Writer(batch)
    x = writer.input((batch, 8))
    (logits,) = writer.emit("MatMul", [x, writer.parameter(8, vocabulary)])
    (largest,) = writer.emit("ReduceMax", [logits, writer.constant(np.array([1]))], keepdims=1)
    (shifted,) = writer.emit("Sub", [logits, largest])
    (powers,) = writer.emit("Exp", [shifted])
    (total,) = writer.emit("ReduceSum", [powers, writer.constant(np.array([1]))], keepdims=1)
    (loss,) = writer.emit("Log", [total])
    (loss,) = writer.emit("Add", [loss, largest])
    return _finished(writer, loss, train=False)


def spatial_net(batch: int = 2, *, size: int = 16, channels: int = 4, layers: int = 3, train: bool = True) -> Graph:
    """Return convolutions with padding, one of them strided, and a pooling, in float64."""
    writer = Writer(batch)
    (h,) = writer.emit("Conv", [writer.input((batch, 2, size, size)), writer.parameter(channels, 2, 1, 1)])
    square = {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}
    for _ in range(layers):
        (made,) = writer.emit("Conv", [h, writer.parameter(channels, channels, 3, 3)], **square)
        (made,) = writer.emit("Relu", [made])
        (h,) = writer.emit("Add", [h, made])
    (h,) = writer.emit("MaxPool", [h], strides=(2, 2), **square)
    (h,) = writer.emit("Conv", [h, writer.parameter(2 * channels, channels, 3, 3)], strides=(2, 2), **square)
    (h,) = writer.emit("GlobalAveragePool", [h])
    return _finished(writer, h, train)


def _finished(writer: Writer, output: str, train: bool = True) -> Graph:
    graph = find_blocks(writer.graph(output))
    return training_step(graph, loss="mse") if train else graph
