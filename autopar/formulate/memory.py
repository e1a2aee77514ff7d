"""Bytes of blocks and of stages: what the placement problem sees, and what any range of blocks would hold as a stage.

The placement problem is linear: every byte belongs to one decision. A chain of blocks under one choice of strategies is
held against the limit by `RangeBytes`, which is not: there the bytes are those of the lowered blocks, the ones that the
simulator counts (`autopar.simulate.ranges`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.formulate.tables import Memory, Tables
from autopar.recompute import Recompute

FloatArray = NDArray[np.float64]

RESIDENT = (Memory.PARAMETERS, Memory.GRADIENTS, Memory.OPTIMIZER)
"""What stays through the step."""

KEPT: Mapping[Recompute, tuple[Memory, ...]] = {
    Recompute.NONE: (Memory.SAVED, Memory.DROPPED, Memory.ARRIVED),
    Recompute.SELECTIVE: (Memory.SAVED, Memory.ARRIVED),
    Recompute.FULL: (Memory.ARRIVED, Memory.HANDED),
    Recompute.OFFLOAD: (),
}
"""What is kept on the device per microbatch in flight."""


@dataclass(frozen=True, slots=True, eq=False)
class RangeBytes:
    """What any range of blocks holds as a stage; (blocks, blocks + 1) arrays: blocks a to b.

    Attributes:
        resident: Parameters, gradients, optimizer state, buffers of the model.
        kept: What a microbatch leaves behind between its forward and its backward.
        running: Fullest moment of a pass with the buffers that are there meanwhile, no other microbatch counted.
        update: Fullest moment of the update.
    """

    resident: FloatArray
    kept: Mapping[Recompute, FloatArray]
    running: Mapping[Recompute, FloatArray]
    update: FloatArray

    @classmethod
    def nothing(cls, num_blocks: int) -> "RangeBytes":
        """Return what ranges of blocks hold that take no memory."""
        zero = np.zeros((num_blocks, num_blocks + 1))
        return cls(zero, dict.fromkeys(Recompute, zero), dict.fromkeys(Recompute, zero), zero)

    def peaks(self, in_flight: int, recompute: Recompute) -> FloatArray:
        """Return the peak bytes of every range with so many microbatches in flight, the running one counted."""
        passes = (in_flight - 1) * self.kept[recompute] + self.running[recompute]
        return np.asarray(self.resident + np.maximum(passes, self.update))

    def peak(self, start: int, stop: int, in_flight: int, recompute: Recompute) -> float:
        """Return the peak bytes of one range."""
        passes = (in_flight - 1) * self.kept[recompute][start, stop] + self.running[recompute][start, stop]
        return float(self.resident[start, stop] + max(passes, self.update[start, stop]))


@dataclass(frozen=True, slots=True, eq=False)
class BlockBytes:
    """Bytes per device of one instance of each kind, as the placement problem counts them; arrays over kinds.

    Attributes:
        resident: Parameters, gradients and optimizer state.
        kept: Kept per microbatch in flight, arrivals included.
        remade: Made again, to be there while the block runs.
        transient: Peak of what lives only while the block runs.
        buffers: Bytes of buffers, once per device.
    """

    resident: FloatArray
    kept: Mapping[Recompute, FloatArray]
    remade: Mapping[Recompute, FloatArray]
    transient: FloatArray
    buffers: float

    def stage_bytes(self, counts: NDArray[np.int64], in_flight: int, recompute: Recompute) -> float:
        """Return the peak bytes of a stage with `counts` instances of each kind."""
        kept = self.kept[recompute]
        running = self.transient + self.remade[recompute]
        present = counts > 0
        peak = float(running[present].max()) if present.any() else 0.0
        return float(counts @ self.resident + in_flight * (counts @ kept)) + peak + self.buffers


def block_bytes(tables: Tables, choice: Sequence[int]) -> BlockBytes:
    """Return the bytes of every kind under a choice of strategies."""
    num_kinds = len(tables.folded.kinds)
    resident = np.zeros(num_kinds)
    kept = {recompute: np.zeros(num_kinds) for recompute in Recompute}
    remade = {recompute: np.zeros(num_kinds) for recompute in Recompute}
    profiles = [np.zeros(len(kind.ops) + 1) for kind in tables.folded.kinds]
    for item in tables.bytes:
        amount = item.amounts[choice[item.node]]
        if item.memory in RESIDENT:
            resident[item.kind] += amount
        elif item.memory is Memory.TRANSIENT:
            profiles[item.kind][item.start : item.end] += amount
        else:
            for recompute, memories in KEPT.items():
                if item.memory in memories:
                    kept[recompute][item.kind] += amount
                elif item.memory in KEPT[Recompute.NONE]:
                    remade[recompute][item.kind] += amount
    transient = np.array([profile.max() for profile in profiles])
    return BlockBytes(resident, kept, remade, transient, tables.folded.buffer_bytes)
