"""What pins leave of the stages with meshes of their own."""

from dataclasses import replace

from autopar.pins.records import ROLES, Pins
from autopar.search.submesh_space import UnequalSpace

EQUAL_ONLY = ("mesh", "within_node", "chunks", "pp_inside", "sequence_parallel", *ROLES)
"""Decisions about the one mesh that equal stages have: whoever speaks of them means equal stages."""


def unequal_left(space: UnequalSpace | None, pins: Pins, global_batch: int, num_blocks: int) -> UnequalSpace | None:
    """Return what pins leave of the space of unequal stages; None if nothing.

    Args:
        space: The space without pins.
        pins: The pins.
        global_batch: Samples per step.
        num_blocks: Blocks of the model.
    """
    alike = any(getattr(choices, name) for choices in (pins.pin, pins.forbid) for name in EQUAL_ONLY)
    if space is None or alike or True not in pins.unequal:
        return None
    pin, forbid = pins.pin, pins.forbid
    if (pin.schedule and space.schedule not in pin.schedule) or space.schedule in forbid.schedule:
        return None
    starts = set(pin.boundaries or range(1, num_blocks)) - set(forbid.boundaries)
    stages = tuple(
        count
        for count in space.stages
        if count in (pin.stages or (count,)) and count not in forbid.stages and count <= len(starts) + 1
    )
    counts = tuple(
        count
        for count in space.microbatches
        if count in (pin.microbatches or (count,))
        and count not in forbid.microbatches
        and global_batch // count in (pin.microbatch_size or (global_batch // count,))
        and global_batch // count not in forbid.microbatch_size
    )
    return replace(space, stages=stages, microbatches=counts) if stages and counts else None
