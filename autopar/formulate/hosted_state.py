"""Which blocks of a stage keep their optimizer state in host memory: no more of its first ones than it takes to fit.

    away(e) = blocks that must + blocks before e that may,    peak(e) = resident - s(e) + max(passes, update + buffers)

s(e) are the bytes of their state, which grow with the boundary e; so a mixture of recompute has one least boundary with
which it fits, and every block beyond it only lengthens the update. The first blocks are taken, as frameworks take the
first parameters up to a share (`--optimizer-offload-fraction` of Megatron-LM).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost.overlap import TRANSIT_BLOCKS, state_buffers
from autopar.formulate.block_memory import ChainBytes, FloatArray, SharedBytes
from autopar.formulate.constraints import Constraints, Mask
from autopar.formulate.tables import Slot
from autopar.recompute import Hosted

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class HostedState:
    """Optimizer state of a chain of blocks that may lie in host memory; sums over blocks, (blocks + 1,) each.

    Attributes:
        may: Whether the state of each block may lie in host memory, (blocks,).
        must: Whether it may not lie on the device, (blocks,).
        free: Bytes of the blocks before each that may and need not.
        forced: Bytes of the blocks before each that must.
        free_seconds: What copies of the former add to the update.
        forced_seconds: What copies of the latter add to the update.
        free_passes: What copies of the former add to the passes of a microbatch.
        forced_passes: What copies of the latter add to them.
        streamed: Bytes beside passes of each block that may have state in host memory, (blocks,).
        what: What of their state.
        shared: Parameters of which stages without their owner have copies. Their state is in host memory where that of
            all blocks of a stage is.
        reading: How many blocks before each read each of them, (shared, blocks + 1).
    """

    may: tuple[bool, ...]
    must: tuple[bool, ...]
    free: FloatArray
    forced: FloatArray
    free_seconds: FloatArray
    forced_seconds: FloatArray
    free_passes: FloatArray
    forced_passes: FloatArray
    streamed: FloatArray
    what: Hosted
    shared: tuple[SharedBytes, ...] = ()
    reading: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))

    @classmethod
    def of(cls, memory: ChainBytes, constraints: Constraints, totals: FloatArray | None = None) -> "HostedState":
        """Return what constraints leave.

        Args:
            memory: Bytes of the chain.
            constraints: Where the state of each block may lie.
            totals: (kinds, slots) seconds of one instance, `Tables.block_seconds`; zero if not given.
        """
        chain, opened = np.asarray(memory.chain), constraints.hosts_optimizer
        states = constraints.states or (frozenset({False, True}),) * len(chain)
        may = tuple(opened and True in own for own in states)
        must = tuple(opened and False not in own for own in states)
        seconds = np.zeros(len(chain)) if totals is None else totals[chain, Slot.STATE]
        streams = [Slot.HOST_FORWARD, Slot.HOST_BACKWARD]
        passes = np.zeros(len(chain)) if totals is None else totals[:, streams].sum(axis=1)[chain]
        forced = np.array(must)
        free = np.array(may) & ~forced

        def sums(each: FloatArray, chosen: Mask) -> FloatArray:
            return np.concatenate([[0.0], np.cumsum(np.where(chosen, each, 0.0))])

        state = memory.state[chain]
        reading = np.zeros((len(memory.shared), len(chain) + 1), dtype=np.int64)
        for number, shared in enumerate(memory.shared):
            reading[number, [block + 1 for block, size in shared.readers if size]] = 1
        return cls(
            may,
            must,
            sums(state, free),
            sums(state, forced),
            sums(seconds, free),
            sums(seconds, forced),
            sums(passes, free),
            sums(passes, forced),
            np.where(free | forced, 0.0 if memory.streamed is None else memory.streamed[chain], 0.0),
            memory.what,
            memory.shared,
            np.cumsum(reading, axis=1),
        )

    def away(self, start: int, stop: int, boundary: int) -> tuple[bool, ...]:
        """Return whether the state of each block of a stage is in host memory, given the boundary e."""
        return tuple(self.must[block] or (self.may[block] and block < boundary) for block in range(start, stop))

    def bytes(self, start: IntArray, stop: IntArray, boundary: IntArray) -> FloatArray:
        """Return the bytes s(e) of stages."""
        blocks = self.free[boundary] - self.free[start] + self.forced[stop] - self.forced[start]
        return np.asarray(blocks + self._of_copies(start, stop, boundary, [shared.state for shared in self.shared]))

    def seconds(self, start: IntArray, stop: IntArray, boundary: IntArray) -> FloatArray:
        """Return what copies of the state add to the update of stages."""
        free, forced = self.free_seconds, self.forced_seconds
        blocks = free[boundary] - free[start] + forced[stop] - forced[start]
        each = [shared.state_seconds for shared in self.shared]
        return np.asarray(blocks + self._of_copies(start, stop, boundary, each))

    def pass_seconds(self, start: IntArray, stop: IntArray, boundary: IntArray) -> FloatArray:
        """Return what copies of the state add to the passes of a microbatch through stages."""
        free, forced = self.free_passes, self.forced_passes
        return np.asarray(free[boundary] - free[start] + forced[stop] - forced[start])

    def stream(self, start: IntArray, stop: IntArray) -> FloatArray:
        """Return the bytes beside passes of stages at most, of what comes from host memory for them."""
        if not self.streamed.any():
            return np.zeros(np.broadcast_shapes(start.shape, stop.shape))
        most = np.zeros((len(self.streamed), len(self.streamed) + 1))
        for first, row in enumerate(most):
            row[first + 1 :] = np.maximum.accumulate(self.streamed[first:])
        return np.asarray(TRANSIT_BLOCKS * most[np.minimum(start, len(most) - 1), stop])

    def _of_copies(self, start: IntArray, stop: IntArray, boundary: IntArray, each: Sequence[float]) -> FloatArray:
        """Return the sums over the copies that stages have and whose state is in host memory, given one of each."""
        found = np.zeros(np.broadcast_shapes(start.shape, stop.shape, boundary.shape))
        if not any(each):
            return found
        stay = np.concatenate([[0], np.cumsum(~np.array(self.must))])  # blocks that need not have their state there
        never = np.concatenate([[0], np.cumsum(~(np.array(self.may) | np.array(self.must)))])
        is_away = (never[stop] == never[start]) & (stay[stop] == stay[np.clip(boundary, start, stop)])
        for shared, reading, value in zip(self.shared, self.reading, each, strict=True):
            has_copy = (reading[stop] > reading[start]) & ((shared.owner < start) | (shared.owner >= stop))
            found += np.where(is_away & has_copy, value, 0.0)
        return found

    def least(self, start: IntArray, stop: IntArray, needed: FloatArray) -> IntArray:
        """Return the least boundary with which so many bytes are in host memory; above `stop` if all are fewer."""
        wanted = self.free[start] + needed - (self.forced[stop] - self.forced[start])
        return np.maximum(np.searchsorted(self.free, wanted, side="left"), start)

    def most(self, start: IntArray, stop: IntArray, room: FloatArray) -> IntArray:
        """Return the largest boundary with which no more than so many bytes are in host memory, `start` at least."""
        wanted = self.free[start] + room - (self.forced[stop] - self.forced[start])
        boundary = np.clip(np.searchsorted(self.free, wanted, side="right") - 1, start, stop)
        is_over = self.bytes(start, stop, boundary) > room  # with the copies of a stage all of whose blocks are there
        chosen = np.array(self.may) & ~np.array(self.must)
        last = np.concatenate([[-1], np.maximum.accumulate(np.where(chosen, np.arange(len(chosen)), -1))])
        return np.where(is_over, np.maximum(last[boundary], start), boundary)


def needed_state(
    resident: FloatArray, passes: FloatArray, update: FloatArray, limit: float, what: Hosted = Hosted.OPTIMIZER
) -> FloatArray:
    """Return the bytes of state that have to be in host memory for a stage to fit into a limit; not below 0.

    Args:
        resident: Bytes it holds all the time with all its state.
        passes: Bytes beside them while passes run.
        update: Bytes beside them in the update, without the buffers of hosted state.
        limit: Bytes per device.
        what: What of the state would be there.
    """
    over = resident + update - limit
    buffered = np.where(over > 0, over + state_buffers(np.inf, what), 0.0)
    return np.maximum(np.maximum(resident + passes - limit, buffered), 0.0)
