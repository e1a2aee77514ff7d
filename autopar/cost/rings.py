"""Ops that devices run in a ring (`autopar.ir.rings`): what their transfers add to their kernels, and their buffers.

With n devices, c seconds of kernels per block and t seconds of one transfer, the block of step s + 1 travels beside the
kernels of step s; the last step sends nothing:

    seconds = n c + (n - 1) (t - s min(c, (1 - e) t))

`s` and `e` are the saving and the exposed share of `autopar.cost.overlap`: with 1 and 0 the transfers add
(n - 1) max(0, t - c). A transfer carries the passed inputs (keys and values), in a gradient their gradients, too. All
steps take the same: of causal attention each device holds an early and a late chunk of the sequence
(`autopar.cost.attention`), so that it computes half of the scores of every block.

In a gradient the kernels begin with the block that came last in the forward pass, so that a block is at home, with the
gradients of all devices, after n - 1 transfers (Transformer Engine, AttnFuncWithCPAndKVP2P.backward).
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from autopar.cost.arrays import FloatArray
from autopar.cost.overlap import Overlap
from autopar.cost.stack import Stack
from autopar.ir.rings import RINGS
from autopar.sharding import Axis

Amount = TypeVar("Amount", float, FloatArray)

BUFFERS = 2
"""Blocks beside a device's own: one is read and sent on while the next one arrives."""


def transfer_bytes(kind: str, inputs: Sequence[Amount], outputs: Sequence[Amount]) -> Amount:
    """Return the bytes that a device sends in one step.

    Args:
        kind: A key of `RINGS`.
        inputs: Bytes of the op's inputs on the device.
        outputs: Bytes of its outputs there.
    """
    ring = RINGS[kind]
    passed = [inputs[index] for index in ring.passed] + [outputs[index] for index in ring.travelling]
    total = passed[0]
    for amount in passed[1:]:
        total = total + amount
    return total


def buffer_bytes(transfer: Amount, axis: Axis) -> Amount:
    """Return the bytes of blocks of other devices that a device holds at once, besides its own block.

    >>> buffer_bytes(10.0, Axis("cp", 2, 1)), buffer_bytes(10.0, Axis("cp", 8, 1))
    (10.0, 20.0)
    """
    buffers: Amount = min(BUFFERS, axis.size - 1) * transfer
    return buffers


def all_transfers(seconds: Amount, axis: Axis) -> Amount:
    """Return the seconds of all transfers of an op, hidden or not, given those of one."""
    transfers: Amount = (axis.size - 1) * seconds
    return transfers


def added_seconds(kernels: Amount, transfers: Amount, axis: Axis, stack: Stack) -> Amount:
    """Return what transfers add to kernels.

    Args:
        kernels: Seconds of the op's kernels on all blocks.
        transfers: Seconds of all its transfers.
        axis: The devices.
        stack: How far transfers run beside kernels.

    >>> float(added_seconds(8.0, 7 * 1.5, Axis("cp", 8, 1), Stack("hides all it can")))  # 7 (1.5 - 1)
    3.5
    """
    overlap = Overlap.of(stack)
    cover = kernels * ((axis.size - 1) / axis.size)
    added: Amount = transfers - overlap.saving * np.minimum(cover, (1.0 - overlap.exposed(0.0)) * transfers)
    return added
