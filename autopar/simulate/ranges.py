"""What any range of blocks would hold as a stage, from lowered blocks: the simulator's memory, for the planner.

A range of a thousand blocks differs from the next one in its first block or two: once two stages have kept the same,
what follows is the same.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.formulate.fold import Folded
from autopar.formulate.memory import FloatArray, RangeBytes
from autopar.program.lower import LoweredKind, copies
from autopar.program.records import SegmentPhase
from autopar.recompute import Recompute
from autopar.simulate.blocks import BlockMemories, BlockMemory, State
from autopar.simulate.memory import received_bytes


def range_bytes(lowered: Mapping[int, LoweredKind], folded: Folded, *, trains: bool) -> RangeBytes:
    """Return what every range of a chain of blocks holds as a stage.

    It is what `stage_memory` and `memory_over_time` say of it, under any schedule in which the fullest forward and the
    fullest backward both run with all but one of the microbatches in flight waiting.

    Args:
        lowered: The kinds of blocks.
        folded: The chain of blocks; every stage holds the buffers of the model.
        trains: Whether there are backwards and an update.
    """
    table = {(kind, segment.phase): segment for kind, block in lowered.items() for segment in block.segments}
    chain = folded.chain
    memories, num_blocks = BlockMemories(table, trains), len(chain)
    index = np.asarray(chain)
    resident = {kind: sum(amount for _, amount in block.resident.items()) for kind, block in lowered.items()}
    inside = np.arange(num_blocks + 1)[None, :] > np.arange(num_blocks)[:, None]
    receiving = np.zeros((num_blocks, num_blocks + 1))
    forward_in = {kind: received_bytes(table, (kind,), is_first=False, is_last=True) for kind in lowered}
    backward_in = {kind: received_bytes(table, (kind,), is_first=True, is_last=False) for kind in lowered}
    receiving += np.array([0.0, *(forward_in[kind] for kind in chain[1:])])[:, None]
    receiving[:, 1:] += np.array([*(backward_in[kind] for kind in chain[:-1]), 0.0])[None, :]
    kept: dict[Recompute, FloatArray] = {}
    running: dict[Recompute, FloatArray] = {}
    update = np.zeros((num_blocks, num_blocks + 1))
    phases = {segment.phase for block in lowered.values() for segment in block.segments}
    for recompute in Recompute if trains else (Recompute.NONE,):
        if recompute is Recompute.SELECTIVE and SegmentPhase.AGAIN not in phases:
            kept[recompute], running[recompute] = kept[Recompute.NONE], running[Recompute.NONE]
            continue
        blocks, numbers = _walk_all(memories, chain, recompute)
        shares = np.array([[block.kept, block.forward.bytes, block.backward.bytes] for block in blocks])
        alike = shares[np.maximum(numbers, 0)] * (numbers >= 0)[..., None]
        before = np.concatenate([np.zeros((num_blocks, 1)), np.cumsum(alike[..., 0], axis=1)], axis=1)
        peaks = before[:, :-1, None] + alike[..., 1:]
        fullest = np.zeros((num_blocks, num_blocks + 1))
        fullest[:, 1:] = np.maximum.accumulate(np.where(numbers >= 0, peaks.max(axis=2), 0.0), axis=1)
        kept[recompute], running[recompute] = before, fullest + receiving + _buffers(blocks, numbers)
        update[:, 1:] = np.maximum.accumulate(_of(blocks, numbers, [block.update for block in blocks]), axis=1)
    total = np.concatenate([[0.0], np.cumsum([resident[kind] for kind in index.tolist()])])
    spans = (total[None, :] - total[:-1, None]) * inside + folded.buffer_bytes
    for copy in copies([lowered[kind] for kind in chain], folded):
        first, stop = np.arange(num_blocks)[:, None], np.arange(num_blocks + 1)[None, :]
        owned = (first <= copy.owner) & (copy.owner < stop)
        size = np.zeros(spans.shape)
        for reader, amount in copy.readers:
            size = np.where((first <= reader) & (reader < stop), np.maximum(size, amount), size)
        spans += size * ~owned
    return RangeBytes(
        spans,
        {flavour: kept.get(flavour, kept[Recompute.NONE]) for flavour in Recompute},
        {flavour: running.get(flavour, running[Recompute.NONE]) for flavour in Recompute},
        update,
    )


def _of(blocks: Sequence[BlockMemory], numbers: NDArray[np.int64], values: Sequence[float]) -> FloatArray:
    """Return a value of each block of each range, 0 where there is none."""
    assert len(blocks) == len(values), "one per block"
    return np.asarray(np.where(numbers >= 0, np.asarray(values)[np.maximum(numbers, 0)], 0.0))


def _buffers(blocks: Sequence[BlockMemory], numbers: NDArray[np.int64]) -> FloatArray:
    """Return the bytes of gathered parameters and of gradients under way, of every range."""
    gathered = _of(blocks, numbers, [block.gathered for block in blocks])
    pairs = gathered.copy()
    follows = (numbers[:, :-1] >= 0) & (numbers[:, 1:] >= 0)
    pairs[:, 1:] += np.where(follows, gathered[:, :-1], 0.0)
    reducing = _of(blocks, numbers, [block.reducing for block in blocks])
    result = np.zeros((numbers.shape[0], numbers.shape[1] + 1))
    result[:, 1:] = np.maximum.accumulate(pairs, axis=1) + np.maximum.accumulate(reducing, axis=1)
    return result


def _walk_all(
    memories: BlockMemories, chain: Sequence[int], recompute: Recompute
) -> tuple[list[BlockMemory], NDArray[np.int64]]:
    """Return the distinct blocks, and their numbers (blocks, blocks) by first block of the stage; -1 before it."""
    num_blocks = len(chain)
    known: dict[BlockMemory, int] = {}
    numbers = np.full((num_blocks, num_blocks), -1, dtype=np.int64)
    earlier: list[State] = []  # before each block, in the range that starts one block later
    for start in reversed(range(num_blocks)):
        state = memories.enter(chain[start])
        states: list[State] = [()] * (start + 1)
        states[start] = state
        for block in range(start, num_blocks):
            if block > start and earlier[block] == state:
                numbers[start, block:] = numbers[start + 1, block:]
                states += earlier[block + 1 :]
                break
            memory, state = memories.advance(chain[block], recompute, state)
            numbers[start, block] = known.setdefault(memory, len(known))
            states.append(state)
        earlier = states
    return list(known), numbers
