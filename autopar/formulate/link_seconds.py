"""Seconds in which the links of a device are busy, by what they carry: row 0 inside a node, row 1 between nodes.

Tables price a collective as a whole and tell what of it leaves nodes (`Slot.*_OUTSIDE`); the rest stays inside.
"""

import numpy as np

from autopar.formulate.block_memory import FloatArray
from autopar.formulate.tables import Slot
from autopar.recompute import Recompute

NUM_LINKS = 2


def gradient_links(seconds: FloatArray) -> FloatArray:
    """Return (2, ...) seconds of gradients on their way in every microbatch, given (..., slots) seconds."""
    return _by_link(seconds, (Slot.GRADIENT,), Slot.GRADIENT_OUTSIDE)


def reduce_links(seconds: FloatArray) -> FloatArray:
    """Return those of gradients that are reduced once."""
    return _by_link(seconds, (Slot.REDUCE,), Slot.REDUCE_OUTSIDE)


def forward_links(seconds: FloatArray) -> FloatArray:
    """Return those of what a forward waits for, hidden or not."""
    return _by_link(seconds, (Slot.FORWARD_WAIT, Slot.FORWARD_GATHER), Slot.FORWARD_OUTSIDE)


def backward_links(seconds: FloatArray) -> FloatArray:
    """Return those of what a backward waits for, hidden or not; without what runs again."""
    return _by_link(seconds, (Slot.BACKWARD_WAIT, Slot.BACKWARD_GATHER), Slot.BACKWARD_OUTSIDE)


def again_links(seconds: FloatArray, recompute: Recompute) -> FloatArray:
    """Return those of what runs again before a backward."""
    match recompute:
        case Recompute.NONE | Recompute.OFFLOAD:
            return np.zeros((NUM_LINKS, *seconds.shape[:-1]))
        case Recompute.SELECTIVE:
            return _by_link(seconds, (Slot.SELECTIVE_WAIT, Slot.SELECTIVE_GATHER), Slot.SELECTIVE_OUTSIDE)
        case Recompute.FULL:
            return forward_links(seconds)


def _by_link(seconds: FloatArray, slots: tuple[Slot, ...], outside: Slot) -> FloatArray:
    between = seconds[..., outside]
    whole = seconds[..., list(slots)].sum(axis=-1)
    return np.stack([np.maximum(0.0, whole - between), between])
