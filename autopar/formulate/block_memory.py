"""Bytes of blocks and of stages: what the placement problem sees, and what any range of blocks would hold as a stage.

The placement problem is linear: every byte belongs to one decision. A chain of blocks under one choice of strategies is
held against the limit by `ChainBytes`, which is not: there the bytes are those of the lowered blocks, the ones that the
simulator counts (`autopar.simulate.ranges`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.cost.overlap import TRANSIT_BLOCKS, state_buffers
from autopar.formulate.tables import Memory, Tables
from autopar.recompute import Recompute

FloatArray = NDArray[np.float64]

RESIDENT = (Memory.PARAMETERS, Memory.GRADIENTS, Memory.OPTIMIZER)
"""What stays through the step."""

UNHOSTED = tuple(memory for memory in RESIDENT if memory is not Memory.OPTIMIZER)
"""What of it cannot lie in host memory."""

KEPT: Mapping[Recompute, tuple[Memory, ...]] = {
    Recompute.NONE: (Memory.SAVED, Memory.DROPPED, Memory.ARRIVED),
    Recompute.SELECTIVE: (Memory.SAVED, Memory.ARRIVED),
    Recompute.FULL: (Memory.ARRIVED, Memory.HANDED),
    Recompute.OFFLOAD: (),
}
"""What is kept on the device per microbatch in flight."""


State = tuple[tuple[int, bool, bool], ...]
"""Of each value handed to a block, which tensor it is (numbered in order of appearance), whether an earlier block of
the stage keeps it, and whether one keeps it until its weight pass."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a block of a stage keeps and needs, in bytes of one microbatch.

    Attributes:
        kept: What it keeps from its forward to its backward, besides what earlier blocks of the stage keep.
        forward: Fullest moment of its forward, on top of what earlier blocks keep.
        backward: Fullest moment of its backward, on top of what earlier blocks keep and later ones have put off.
        late: What it keeps from its backward to its weight pass, where the schedule splits these.
        weight: Fullest moment of its weight pass, on top of what earlier blocks have put off.
    """

    kept: float
    forward: float
    backward: float
    late: float = 0.0
    weight: float = 0.0


class Walk(Protocol):
    """What blocks hold, block after block of a stage."""

    def enter(self, kind: int) -> State:
        """Return the state of a stage before its first block."""

    def advance(self, kind: int, recompute: Recompute, state: State) -> tuple[Holding, State]:
        """Return what the next block holds, and the state after it."""

    def meet(self, states: Sequence[State]) -> State:
        """Return the state in which only what all of these keep is kept: no block holds less in it."""


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """A parameter that several blocks read: stages that read it and do not own it hold a copy.

    Attributes:
        owner: The block it belongs to.
        readers: The blocks that read it, each with the bytes of a copy as it reads it.
    """

    owner: int
    readers: tuple[tuple[int, float], ...]

    def on(self, start: int, stop: int) -> float:
        """Return the bytes of the copy that a range of blocks holds; 0 if it needs none."""
        if start <= self.owner < stop:
            return 0.0
        return max((size for reader, size in self.readers if start <= reader < stop), default=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class ChainBytes:
    """What any range of a chain of blocks holds as a stage, whatever its blocks recompute; arrays over kinds.

    Attributes:
        chain: Kind of every block.
        walk: What blocks keep and need for a microbatch.
        flavours: What blocks may recompute.
        resident: Parameters, gradients, optimizer state.
        gathered: Parameters gathered for a block.
        reducing: Gradients under way to their reduction once a block has run.
        update: Fullest moment of the reductions and the update.
        arriving: What a first block of a stage receives from the stage before.
        returning: What a last block of a stage receives from the next stage.
        hosted: What a block with flavour `OFFLOAD` takes to host memory, per microbatch.
        state: Bytes of `resident` that are the optimizer's state, which can lie in host memory.
        buffers: Buffers of the model, held by every stage.
        shared: Parameters that several blocks read.
        host_room: Bytes of host memory per device that may be taken: its share of what its host has.
    """

    chain: tuple[int, ...]
    walk: Walk
    flavours: tuple[Recompute, ...]
    resident: FloatArray
    gathered: FloatArray
    reducing: FloatArray
    update: FloatArray
    arriving: FloatArray
    returning: FloatArray
    hosted: FloatArray
    state: FloatArray
    buffers: float = 0.0
    shared: tuple[SharedBytes, ...] = ()
    host_room: float = np.inf

    @classmethod
    def nothing(cls, chain: Sequence[int], flavours: Sequence[Recompute] = (Recompute.NONE,)) -> "ChainBytes":
        """Return what blocks hold that take no memory."""
        zero = np.zeros(max(chain) + 1)
        return cls(tuple(chain), _Nothing(), tuple(flavours), zero, zero, zero, zero, zero, zero, zero, zero)

    def stage(self, start: int, stop: int, flavours: Sequence[Recompute]) -> tuple[float, float]:
        """Return what one microbatch leaves behind in a range of blocks, and the fullest moment of its passes."""
        state = self.walk.enter(self.chain[start])
        kept = running = 0.0
        for kind, flavour in zip(self.chain[start:stop], flavours, strict=True):
            holding, state = self.walk.advance(kind, flavour, state)
            running = max(running + holding.late, kept + max(holding.forward, holding.backward))
            kept += holding.kept
        return kept, running

    def put_off(self, start: int, stop: int) -> tuple[float, float]:
        """Return what one microbatch leaves for its weight pass, and the fullest moment of that."""
        state = self.walk.enter(self.chain[start])
        late = weight = 0.0
        for kind in self.chain[start:stop]:
            holding, state = self.walk.advance(kind, Recompute.NONE, state)
            weight = max(weight, late + holding.weight)
            late += holding.late
        return late, weight

    def always(self, start: int, stop: int) -> float:
        """Return the bytes that are there all the time."""
        copies = sum(shared.on(start, stop) for shared in self.shared)
        return float(self.resident[list(self.chain[start:stop])].sum()) + self.buffers + copies

    def beside(self, start: int, stop: int, flavours: Sequence[Recompute] = ()) -> float:
        """Return the bytes of buffers that are there while tasks run; no block offloads if no flavours are given."""
        kinds = list(self.chain[start:stop])
        gathered = self.gathered[kinds]
        pairs = gathered[1:] + gathered[:-1] if len(kinds) > 1 else gathered
        received = self.arriving[kinds[0]] if start else 0.0
        received += self.returning[kinds[-1]] if stop < len(self.chain) else 0.0
        copied = (self.hosted[kind] for kind in self._offloading(start, stop, flavours))
        transit = TRANSIT_BLOCKS * max(copied, default=0.0)
        return float(pairs.max() + self.reducing[kinds].max() + received + transit)

    def peak(
        self, start: int, stop: int, in_flight: int, flavours: Sequence[Recompute], *, offload: bool = False
    ) -> float:
        """Return the peak bytes of a range of blocks with so many microbatches in flight, the running one counted.

        It is that of any schedule in which the fullest forward and the fullest backward both run with all but one of
        the microbatches in flight waiting.

        Args:
            start: First block.
            stop: The block after the last one.
            in_flight: Microbatches in flight.
            flavours: What each block keeps.
            offload: Whether the optimizer's state lies in host memory.
        """
        kept, running = self.stage(start, stop, flavours)
        passes = (in_flight - 1) * kept + running + self.beside(start, stop, flavours)
        kinds = list(self.chain[start:stop])
        state = float(self.state[kinds].sum()) if offload else 0.0
        update = float(self.update[kinds].max()) + float(state_buffers(state))
        return self.always(start, stop) - state + max(passes, update)

    def host_bytes(
        self, start: int, stop: int, in_flight: int, flavours: Sequence[Recompute], *, offload: bool = False
    ) -> float:
        """Return the bytes of a device of a range of blocks that lie in host memory; arguments as of `peak`."""
        state = float(self.state[list(self.chain[start:stop])].sum()) if offload else 0.0
        return state + in_flight * sum(float(self.hosted[kind]) for kind in self._offloading(start, stop, flavours))

    def _offloading(self, start: int, stop: int, flavours: Sequence[Recompute]) -> Iterator[int]:
        """Yield the kinds of the blocks that keep in host memory what they save."""
        for kind, flavour in zip(self.chain[start:stop], flavours, strict=False):
            if flavour is Recompute.OFFLOAD:
                yield kind


class _Nothing:
    """Blocks that hold nothing."""

    def enter(self, kind: int) -> State:
        return ()

    def advance(self, kind: int, recompute: Recompute, state: State) -> tuple[Holding, State]:
        return Holding(0.0, 0.0, 0.0), state

    def meet(self, states: Sequence[State]) -> State:
        return states[0]


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
