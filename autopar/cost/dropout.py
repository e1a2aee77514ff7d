"""Bytes that dropout leaves behind for the backward pass; the graph has no dropout.

layers      x + dropout(f(x)): a mask of a byte per element of the sum, two such sums in a layer
(Korthikanti et al. 2022, equation 1: 2 sbh of 34 sbh), and one of tokens with their positions
adapters    dropout(x) A of LoRA: the mask, and the copy of x that the gradient of A reads
"""

from collections.abc import Mapping, Sequence

from autopar.cost.arrays import FloatArray, IntArray, num_elements
from autopar.cost.attention import MASK_BYTES
from autopar.cost.stack import Dropout
from autopar.ir.graph import Op, Phase

_SUM_DIMS = 3
"""Dims of what layers hand on: batch, tokens, width; positions of rotary embeddings have one more."""
_ADAPTER = "lora_A"


def dropout_bytes(
    op: Op, inputs: Sequence[IntArray | None], element_bytes: Mapping[str, float], dropout: Dropout
) -> FloatArray | None:
    """Return the bytes that dropout keeps where an op runs, (n,); None if it keeps nothing there.

    Args:
        op: The op.
        inputs: Local shapes of what it reads, (n, rank).
        element_bytes: Bytes of an element of every value.
        dropout: Where there is dropout.
    """
    if op.phase is not Phase.FORWARD or len(inputs) != 2:
        return None
    first, second = inputs
    if dropout == "layers" and op.kind == "Add" and first is not None and second is not None:
        return MASK_BYTES * num_elements(first) if _is_sum(first, second) else None
    if dropout == "adapters" and first is not None and _ADAPTER in op.inputs[1]:
        return (MASK_BYTES + element_bytes[op.inputs[0]]) * num_elements(first)
    return None


def _is_sum(first: IntArray, second: IntArray) -> bool:
    """Return whether an addition is of what layers hand on, or of positions to tokens; biases have one dim."""
    rank, added = first.shape[-1], second.shape[-1]
    return rank == _SUM_DIMS and added >= rank - 1 and bool((first[:, rank - added :] == second).all())
