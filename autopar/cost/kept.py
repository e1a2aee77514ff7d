"""Bytes that a kernel keeps for its gradient besides values of the graph."""

from collections.abc import Sequence

import numpy as np

from autopar.cost.arrays import FloatArray, IntArray
from autopar.ir.graph import Op

ATTENTION = frozenset({"Attention", "autopar::AttentionPart", "autopar::ScaledAttentionPart"})


def attention_kept_bytes(
    op: Op, inputs: Sequence[IntArray | None], outputs: Sequence[IntArray | None], element: float, *, fused: bool
) -> FloatArray:
    """Return the bytes attention keeps, (n,): its scores if they are written to memory at all.

    Probabilities, what dropout left of them, and its mask of one byte: 5 bytes per score of 2-byte numbers (Korthikanti
    et al., 2022, arXiv:2205.05198, section 4.1).
    """
    if op.kind not in ATTENTION or fused:
        return np.zeros(next((len(shape) for shape in (*outputs, *inputs) if shape is not None), 0))
    q, k = inputs[0], inputs[1]
    assert q is not None, op.name
    assert k is not None, op.name
    heads = op.attr("q_num_heads", 1)
    rows = q[:, 0] * (q[:, 1] if q.shape[1] == 4 else np.asarray(heads, dtype=np.int64))
    return np.asarray(rows * q[:, -2].astype(np.float64) * k[:, -2] * (2 * element + 1))
