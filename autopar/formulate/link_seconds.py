"""Seconds that the two links of a device are busy, by type of traffic: row 0 inside a node, row 1 between nodes.

Tables have the seconds of a whole collective and the part of them on links between nodes (`Slot.*_OUTSIDE`); the rest
is inside a node.
"""

import numpy as np

from autopar.formulate.block_memory import FloatArray
from autopar.formulate.tables import Slot
from autopar.recompute import Recompute

NUM_LINKS = 2
FORWARD_LINK_SLOTS = (Slot.FORWARD_WAIT, Slot.FORWARD_CHUNKED, Slot.FORWARD_GATHER, Slot.FORWARD_ROWS)
BACKWARD_LINK_SLOTS = (Slot.BACKWARD_WAIT, Slot.BACKWARD_CHUNKED, Slot.BACKWARD_GATHER, Slot.BACKWARD_ROWS)
SELECTIVE_LINK_SLOTS = (Slot.SELECTIVE_WAIT, Slot.SELECTIVE_CHUNKED, Slot.SELECTIVE_GATHER, Slot.SELECTIVE_ROWS)
"""Slots of the collectives and gathers of a pass, hidden or not."""


def gradient_links(seconds: FloatArray) -> FloatArray:
    """Return (2, ...) seconds of gradient traffic of one microbatch, given (..., slots) seconds."""
    return _by_link(seconds, (Slot.GRADIENT,), Slot.GRADIENT_OUTSIDE)


def reduce_links(seconds: FloatArray) -> FloatArray:
    """Return (2, ...) seconds of gradient reductions after accumulation, given (..., slots) seconds."""
    return _by_link(seconds, (Slot.REDUCE,), Slot.REDUCE_OUTSIDE)


def forward_links(seconds: FloatArray) -> FloatArray:
    """Return (2, ...) seconds of collectives and gathers of a forward, hidden or not, given (..., slots) seconds."""
    return _by_link(seconds, FORWARD_LINK_SLOTS, Slot.FORWARD_OUTSIDE)


def backward_links(seconds: FloatArray) -> FloatArray:
    """Return (2, ...) seconds of collectives and gathers of a backward, hidden or not, without recompute."""
    return _by_link(seconds, BACKWARD_LINK_SLOTS, Slot.BACKWARD_OUTSIDE)


def recompute_links(seconds: FloatArray, recompute: Recompute) -> FloatArray:
    """Return (2, ...) seconds of collectives and gathers of the recompute before a backward."""
    match recompute:
        case Recompute.NONE | Recompute.OFFLOAD:
            return np.zeros((NUM_LINKS, *seconds.shape[:-1]))
        case Recompute.SELECTIVE:
            return _by_link(seconds, SELECTIVE_LINK_SLOTS, Slot.SELECTIVE_OUTSIDE)
        case Recompute.FULL:
            return forward_links(seconds)


def _by_link(seconds: FloatArray, slots: tuple[Slot, ...], outside: Slot) -> FloatArray:
    """Split the seconds of slots into those inside a node and those between nodes."""
    between = seconds[..., outside]
    whole = seconds[..., list(slots)].sum(axis=-1)
    return np.stack([np.maximum(0.0, whole - between), between])
