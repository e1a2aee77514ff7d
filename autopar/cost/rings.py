"""Ops that devices run in a ring (`autopar.ir.rings`): what their transfers add to their kernels, and their buffers.

With n steps, as many as there are devices or fewer where windows hide far blocks (`Ring.steps`), c seconds of kernels
per block and t seconds of one transfer, the block of step s + 1 travels beside the kernels of step s; the last step
sends nothing:

    seconds = n c + (n - 1) (t - s min(c, (1 - e) t))

`s` and `e` are the saving and the exposed share of `autopar.cost.overlap`: with 1 and 0 the transfers add
(n - 1) max(0, t - c). A transfer carries the passed inputs (keys and values), in a gradient their gradients, too. All
steps take the same: of causal attention each device holds an early and a late chunk of the sequence
(`autopar.cost.attention`), so that it computes half of the scores of every block. With windows and chunks it holds
one piece of the sequence, whose queries see as many keys as those of others.

In a gradient the kernels begin with the block that came last in the forward pass, so that a block is at home, with the
gradients of all devices, after n - 1 transfers (Transformer Engine, AttnFuncWithCPAndKVP2P.backward); after as many
the other way round where the ring ends early.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from autopar.cost.arrays import FloatArray
from autopar.cost.overlap import Overlap
from autopar.cost.stack import Stack
from autopar.ir.rings import RINGS

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


def buffer_bytes(transfer: Amount, steps: int) -> Amount:
    """Return the bytes of blocks of other devices that a device holds at once, besides its own block.

    >>> buffer_bytes(10.0, 2), buffer_bytes(10.0, 8)
    (10.0, 20.0)
    """
    buffers: Amount = min(BUFFERS, steps - 1) * transfer
    return buffers


def all_transfers(seconds: Amount, steps: int) -> Amount:
    """Return the seconds of all transfers of an op, hidden or not, given those of one."""
    transfers: Amount = (steps - 1) * seconds
    return transfers


def added_seconds(kernels: Amount, transfers: Amount, steps: int, stack: Stack) -> Amount:
    """Return what transfers add to kernels.

    Args:
        kernels: Seconds of the op's kernels on all blocks.
        transfers: Seconds of all its transfers.
        steps: Blocks that a device attends to.
        stack: How far transfers run beside kernels.

    >>> float(added_seconds(8.0, 7 * 1.5, 8, Stack("hides all it can")))  # 7 (1.5 - 1)
    3.5
    """
    overlap = Overlap.of(stack)
    cover = kernels * ((steps - 1) / steps)
    added: Amount = transfers - overlap.saving * np.minimum(cover, (1.0 - overlap.exposed(0.0)) * transfers)
    return added
