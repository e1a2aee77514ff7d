"""Memory per device of blocks and stages, and its peak.

    peak = resident + max((in_flight - 1) kept + fullest moment of a pass + communication buffers, update)

`ChainBytes` holds the bytes of lowered blocks, which the simulator counts too (`autopar.simulate.ranges`): the limit
applies to them. `BlockBytes` holds the linear estimate of the placement problem, in which every byte belongs to one
decision.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.cost.overlap import TRANSIT_BLOCKS, state_buffers
from autopar.formulate.tables import Memory, Tables
from autopar.recompute import Hosted, Recompute

FloatArray = NDArray[np.float64]

RESIDENT = (Memory.PARAMETERS, Memory.GRADIENTS, Memory.OPTIMIZER, Memory.CACHES)
"""Memory that is held throughout the step."""

UNHOSTED = tuple(memory for memory in RESIDENT if memory is not Memory.OPTIMIZER)
"""Resident memory that cannot be offloaded to host memory."""

STREAMED = (Memory.CACHES,)
"""Resident memory that stays on the device if parameters and sums of gradients lie in host memory."""

KEPT: Mapping[Recompute, tuple[Memory, ...]] = {
    Recompute.NONE: (Memory.SAVED, Memory.DROPPED, Memory.ARRIVED),
    Recompute.SELECTIVE: (Memory.SAVED, Memory.ARRIVED),
    Recompute.FULL: (Memory.ARRIVED, Memory.HANDED),
    Recompute.OFFLOAD: (),
}
"""Memory that a block keeps on the device for each microbatch in flight, by recompute flavour."""


State = tuple[tuple[int, bool, bool], ...]
"""State of a walk over the blocks of a stage, one entry per value handed to the next block.

An entry has the number of the tensor (in order of appearance), whether an earlier block of the stage keeps it for a
backward, and whether an earlier block keeps it for a weight pass.
"""


@dataclass(frozen=True, slots=True)
class BlockHolding:
    """Bytes that one microbatch takes in a block of a stage.

    Attributes:
        kept: Kept from the forward to the backward of the block, without tensors that earlier blocks of the stage keep.
        forward: Fullest moment of the forward, in addition to what earlier blocks keep.
        backward: Fullest moment of the backward, in addition to what earlier blocks keep and later blocks deferred.
        late: Kept from the backward to the weight pass, if the schedule splits the backward.
        weight: Fullest moment of the weight pass, in addition to what earlier blocks deferred.
    """

    kept: float
    forward: float
    backward: float
    late: float = 0.0
    weight: float = 0.0


class BlockByteScan(Protocol):
    """Computes the bytes of the blocks of a stage one after another; a tensor that two blocks keep counts once."""

    def enter(self, kind: int) -> State:
        """Return the state before the first block of a stage."""

    def advance(self, kind: int, recompute: Recompute, state: State) -> tuple[BlockHolding, State]:
        """Return the bytes of the next block, and the state after it."""

    def meet(self, states: Sequence[State]) -> State:
        """Return the meet of states: a tensor counts as kept only if every state keeps it.

        A block never holds less in the meet than in one of the states.
        """


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """A parameter that several blocks read; a stage that reads it without owning it holds a copy.

    Attributes:
        owner: The block that owns the parameter.
        readers: (block, bytes of a copy under the placement at which the block reads it, with the gradient and the
            optimizer state of the copy) per reading block.
        state: The optimizer state among them, which can be offloaded to host memory.
        state_seconds: What its way to the device and back adds to an update; 0 if it stays on the device.
    """

    owner: int
    readers: tuple[tuple[int, float], ...]
    state: float = 0.0
    state_seconds: float = 0.0

    def on(self, start: int, stop: int) -> float:
        """Return the bytes of the copy that a range of blocks holds; 0 if it owns the parameter or does not read it."""
        if start <= self.owner < stop:
            return 0.0
        return max((size for reader, size in self.readers if start <= reader < stop), default=0.0)

    def state_on(self, start: int, stop: int) -> float:
        """Return the optimizer state of the copy that a range of blocks holds; 0 if it holds none."""
        return self.state if self.on(start, stop) else 0.0


def copied_seconds(shared: Iterable[SharedBytes], start: int, stop: int, away: Sequence[bool]) -> float:
    """Return what the state of copies in host memory adds to the update of a stage: of all, if that of its blocks is.

    Args:
        shared: Parameters that several blocks read.
        start: First block.
        stop: The block after the last one.
        away: Whether the optimizer state of each block is in host memory; empty if none is.
    """
    if not away or not all(away):
        return 0.0
    return fsum(own.state_seconds for own in shared if own.on(start, stop))


@dataclass(frozen=True, slots=True, eq=False)
class ChainBytes:
    """Bytes of any range of a chain of blocks as a stage, under any recompute flavours; arrays are (kinds,) bytes.

    Attributes:
        chain: Kind of every block.
        walk: Bytes of the passes of one microbatch, block by block.
        flavours: Recompute flavours that blocks may have.
        resident: Parameters, gradients, optimizer state, caches.
        gathered: Parameters gathered before use.
        reducing: Gradients that wait for their reduction or are being reduced after the block has run.
        update: Fullest moment of gradient reductions and the update.
        arriving: Message from the previous stage, if the block is the first of a stage.
        returning: Message from the next stage, if the block is the last of a stage.
        hosted: Bytes that flavour `OFFLOAD` moves to host memory per microbatch.
        state: The part of `resident` that is optimizer state, which can be offloaded to host memory.
        buffers: Bytes of the model's buffers, held by every stage.
        shared: Parameters that several blocks read.
        host_room: Bytes of host memory that one device may use: its share of its host's memory.
        streamed: Bytes on the device while a pass of a block runs, of what lies in host memory otherwise; None for 0.
        what: What of the state of blocks can be offloaded; `state` are its bytes.
    """

    chain: tuple[int, ...]
    walk: BlockByteScan
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
    streamed: FloatArray | None = None
    what: Hosted = Hosted.OPTIMIZER

    @classmethod
    def nothing(cls, chain: Sequence[int], flavours: Sequence[Recompute] = (Recompute.NONE,)) -> "ChainBytes":
        """Return the bytes of a chain whose blocks take no memory."""
        zero = np.zeros(max(chain) + 1)
        return cls(tuple(chain), _ZeroByteScan(), tuple(flavours), zero, zero, zero, zero, zero, zero, zero, zero)

    def stage(self, start: int, stop: int, flavours: Sequence[Recompute]) -> tuple[float, float]:
        """Return the bytes that one microbatch keeps in a range of blocks, and the fullest moment of its passes."""
        state = self.walk.enter(self.chain[start])
        kept = running = 0.0
        for kind, flavour in zip(self.chain[start:stop], flavours, strict=True):
            holding, state = self.walk.advance(kind, flavour, state)
            running = max(running + holding.late, kept + max(holding.forward, holding.backward))
            kept += holding.kept
        return kept, running

    def deferred_bytes(self, start: int, stop: int) -> tuple[float, float]:
        """Return the bytes that one microbatch keeps for its weight pass, and the fullest moment of the weight pass."""
        state = self.walk.enter(self.chain[start])
        late = weight = 0.0
        for kind in self.chain[start:stop]:
            holding, state = self.walk.advance(kind, Recompute.NONE, state)
            weight = max(weight, late + holding.weight)
            late += holding.late
        return late, weight

    def resident_bytes(self, start: int, stop: int) -> float:
        """Return the bytes that a range of blocks holds throughout the step."""
        copies = sum(shared.on(start, stop) for shared in self.shared)
        return float(self.resident[list(self.chain[start:stop])].sum()) + self.buffers + copies

    def communication_bytes(self, start: int, stop: int, flavours: Sequence[Recompute] = ()) -> float:
        """Return the bytes of communication buffers while tasks run; no block offloads if `flavours` is empty.

        The buffers are gathered parameters of two neighbouring blocks, gradients under reduction, messages of the
        neighbouring stages and offloaded values in transit.
        """
        kinds = list(self.chain[start:stop])
        gathered = self.gathered[kinds]
        pairs = gathered[1:] + gathered[:-1] if len(kinds) > 1 else gathered
        received = self.arriving[kinds[0]] if start else 0.0
        received += self.returning[kinds[-1]] if stop < len(self.chain) else 0.0
        copied = (self.hosted[kind] for kind in self._offloaded_kinds(start, stop, flavours))
        transit = TRANSIT_BLOCKS * max(copied, default=0.0)
        return float(pairs.max() + self.reducing[kinds].max() + received + transit)

    def peak(
        self, start: int, stop: int, in_flight: int, flavours: Sequence[Recompute], *, away: Sequence[bool] = ()
    ) -> float:
        """Return the peak bytes of a range of blocks with `in_flight` microbatches in flight, the running one included.

        The peak is exact for schedules in which the fullest forward and the fullest backward both run while all other
        microbatches in flight are kept.

        Args:
            start: First block.
            stop: The block after the last one.
            in_flight: Microbatches in flight.
            flavours: Recompute flavour of each block.
            away: Whether the optimizer state of each block is in host memory; empty if none is.
        """
        kept, running = self.stage(start, stop, flavours)
        passes = (in_flight - 1) * kept + running + self.communication_bytes(start, stop, flavours)
        passes += self.streamed_bytes(start, stop, away)
        kinds, state = list(self.chain[start:stop]), self._hosted_state(start, stop, away)
        update = float(self.update[kinds].max()) + float(state_buffers(state, self.what))
        return self.resident_bytes(start, stop) - state + max(passes, update)

    def streamed_bytes(self, start: int, stop: int, away: Sequence[bool]) -> float:
        """Return the bytes beside passes of what comes from host memory for them, of two blocks at a time."""
        if self.streamed is None:
            return 0.0
        each = zip(self.chain[start:stop], away, strict=True) if away else ()
        return TRANSIT_BLOCKS * max((float(self.streamed[kind]) for kind, is_away in each if is_away), default=0.0)

    def host_bytes(
        self, start: int, stop: int, in_flight: int, flavours: Sequence[Recompute], *, away: Sequence[bool] = ()
    ) -> float:
        """Return the bytes of host memory that a range of blocks uses per device; arguments as in `peak`."""
        copied = sum(float(self.hosted[kind]) for kind in self._offloaded_kinds(start, stop, flavours))
        return self._hosted_state(start, stop, away) + in_flight * copied

    def _hosted_state(self, start: int, stop: int, away: Sequence[bool]) -> float:
        """Return the bytes of optimizer state in host memory: of blocks, and of copies where that of all blocks is."""
        each = zip(self.chain[start:stop], away, strict=True) if away else ()
        copies = (shared.state_on(start, stop) for shared in self.shared) if away and all(away) else ()
        return fsum(float(self.state[kind]) for kind, is_away in each if is_away) + fsum(copies)

    def _offloaded_kinds(self, start: int, stop: int, flavours: Sequence[Recompute]) -> Iterator[int]:
        """Yield the kinds of the blocks with flavour `OFFLOAD`."""
        for kind, flavour in zip(self.chain[start:stop], flavours, strict=False):
            if flavour is Recompute.OFFLOAD:
                yield kind


class _ZeroByteScan:
    """Scan over blocks that take no memory."""

    def enter(self, kind: int) -> State:
        return ()

    def advance(self, kind: int, recompute: Recompute, state: State) -> tuple[BlockHolding, State]:
        return BlockHolding(0.0, 0.0, 0.0), state

    def meet(self, states: Sequence[State]) -> State:
        return states[0]


@dataclass(frozen=True, slots=True, eq=False)
class BlockBytes:
    """Bytes per device of one instance of each kind in the linear estimate of the placement problem; (kinds,) arrays.

    Attributes:
        resident: Parameters, gradients, optimizer state and caches.
        kept: Kept per microbatch in flight, by recompute flavour; values from other blocks included.
        recomputed: Recomputed before the backward, by recompute flavour.
        transient: Peak of the values that live only while the block runs.
        buffers: Bytes of the model's buffers per device.
    """

    resident: FloatArray
    kept: Mapping[Recompute, FloatArray]
    recomputed: Mapping[Recompute, FloatArray]
    transient: FloatArray
    buffers: float

    def stage_bytes(self, counts: NDArray[np.int64], in_flight: int, recompute: Recompute) -> float:
        """Return the peak bytes of a stage with `counts` instances of each kind."""
        kept = self.kept[recompute]
        running = self.transient + self.recomputed[recompute]
        present = counts > 0
        peak = float(running[present].max()) if present.any() else 0.0
        return float(counts @ self.resident + in_flight * (counts @ kept)) + peak + self.buffers


def block_bytes(tables: Tables, choice: Sequence[int]) -> BlockBytes:
    """Return the bytes of every kind under a choice of strategies."""
    num_kinds = len(tables.folded.kinds)
    resident = np.zeros(num_kinds)
    kept = {recompute: np.zeros(num_kinds) for recompute in Recompute}
    recomputed = {recompute: np.zeros(num_kinds) for recompute in Recompute}
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
                    recomputed[recompute][item.kind] += amount
    transient = np.array([profile.max() for profile in profiles])
    return BlockBytes(resident, kept, recomputed, transient, tables.folded.buffer_bytes)
